//! The machines under model checkers: stateright goes through all interleavings of single loads and stores of up to four
//! ranks, loom through all weakly ordered executions of two. Both run the machines' own code.
//!
//! `BRIGADE_MODELS=long` deepens the bounds.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod abort;
mod barrier;
mod bell;
mod claims;
mod explore;
mod fifo;
mod guards;
mod in_place;
mod in_turn;
mod loomed;
mod low_latency;
mod message_calls;
mod message_guards;
mod message_launch;
mod messages;
mod packet;
mod relay;
mod replay;
mod reset;
mod ring;
mod roll;
mod sentinel;
mod shared;
mod table;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};
use table::Row;

/// Threads that go through the rows.
const THREADS: usize = 2;

/// What each row's checker found.
fn check(rows: &[Row]) -> Vec<Result<(), String>> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![Ok(()); rows.len()]);
    thread::scope(|s| {
        for _ in 0..THREADS {
            s.spawn(|| {
                while let Some((i, row)) = rows
                    .iter()
                    .enumerate()
                    .nth(next.fetch_add(1, Ordering::Relaxed))
                {
                    let start = Instant::now();
                    let result = (row.check)();
                    println!("{:>9.3?} {}: {}", start.elapsed(), row.machine, row.what);
                    found.lock().unwrap()[i] = result;
                }
            });
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn every_machine_holds() {
    let rows = claims::claims();
    let mut table = String::from("| machine | what holds | checker |\n|---|---|---|\n");
    for (row, found) in rows.iter().zip(check(&rows)) {
        assert_eq!(found, Ok(()), "{}: {}", row.machine, row.what);
        table += &format!("| {} | {} | {} |\n", row.machine, row.what, row.checker);
    }
    insta::assert_snapshot!("claims", table);
}

#[test]
fn no_guard_can_be_taken_away() {
    let rows = guards::guards();
    let mut table = String::from(
        "| machine | guard | instead | checker | counterexample |\n|---|---|---|---|---|\n",
    );
    for (row, found) in rows.iter().zip(check(&rows)) {
        let mutation = row.mutation.unwrap_or_default();
        let name = format!("{}: {}, but {mutation}", row.machine, row.what);
        let counterexample = found.expect_err(&name);
        table += &format!(
            "| {} | {} | {mutation} | {} | {counterexample} |\n",
            row.machine, row.what, row.checker
        );
    }
    insta::assert_snapshot!("guards", table);
}
