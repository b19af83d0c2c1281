//! Calls beside the caller's stream: they come after what they were told to come after, what the caller's stream is given meanwhile
//! does not wait for them, and what it is given behind the join finds their results.

use crate::{
    backend::Rank,
    check::{assert_bits, expect_unsupported},
    experts::{
        self,
        case::{By, Case},
        own::{Own, check},
    },
    faults::AMPLE,
    suite::{Suite, World},
};
use brigade_device::{
    Arrangement, Buffer, CombineParams, CombineSum, DataType, Dispatched, Output, Transport,
};
use rand::{Rng, rngs::StdRng};

fn case(world: &World, rng: &mut StdRng) -> Case {
    let mut case = Case::random(rng, world.size, (40, 64, 3, 2 * world.size));
    case.arrangement = Arrangement::BySource;
    case.dtype = DataType::F32;
    // A rank waits with one warp, and leaves room for all else.
    case.by = By::of(Transport::OneSided, Transport::OneSided);
    let mut case = case.with_rows(rng);
    for rows in &mut case.rows {
        // Whole numbers, so that sums are what they are.
        for value in rows.chunks_exact_mut(4) {
            value.copy_from_slice(&(rng.random_range(-99i8..99) as f32).to_ne_bytes());
        }
    }
    case
}

/// Something else for the caller's stream, and whether it is done though others are late.
fn compute(rank: &Rank, to: &mut Buffer, alone: bool) {
    rank.device.fill(&rank.stream, to.view_mut(), 7).unwrap();
    if alone {
        rank.stream.record().unwrap().sync(AMPLE).unwrap();
    }
}

/// There and back, each beside other work, with a rank that comes late where streams do not hold up their threads.
fn round_trip(rank: &Rank, case: &Case, late: Option<usize>) {
    let (me, comm) = (rank.rank, rank.comm());
    let own = Own::of(rank, case);
    let mut other = rank.poisoned(DataType::U8, &[1 << 16]);
    // Compiled and loaded before anybody waits.
    compute(rank, &mut other, late.is_some());
    let late_here = late == Some(me);
    let meet = |here: bool| {
        if late.is_some() && here {
            rank.meet();
        }
    };
    meet(late_here);
    let ready = rank.stream.record().unwrap();
    compute(rank, &mut other, false);
    let mut beside = comm.lease_beside(&rank.stream, Some(&ready)).unwrap();
    let got = own.dispatch(&mut *beside, case).unwrap();
    compute(rank, &mut other, late.is_some() && !late_here);
    meet(!late_here);
    let there = beside.finish().unwrap();
    there.join().unwrap();
    check(rank, case, &got);
    // As they came, so that a token gets itself once for each rank that it went to.
    let rows = echo(rank, &got);
    let mut d = rank.poisoned(DataType::F32, &[case.tokens(me), case.hidden]);
    meet(late_here);
    let mut beside = comm.lease_beside(&rank.stream, None).unwrap();
    beside
        .combine(CombineParams {
            rows: rows.view(),
            handle: &got.handle,
            sum: CombineSum::Rank,
            weights: None,
            biases: &[],
            output: Output::Into(d.view_mut()),
            waits: None,
            choice: case.by.back,
        })
        .unwrap();
    compute(rank, &mut other, late.is_some() && !late_here);
    meet(!late_here);
    beside.finish().unwrap().join().unwrap();
    let mut want = Vec::new();
    for token in 0..case.tokens(me) {
        let goes = |to: &usize| (0..case.k).any(|e| case.local(*to, me, token, e).is_some());
        let times = (0..case.size).filter(goes).count() as f32;
        let row = &case.rows[me][token * case.hidden * 4..][..case.hidden * 4];
        for value in bytemuck::pod_collect_to_vec::<u8, f32>(row) {
            want.extend((value * times + 0.0).to_ne_bytes());
        }
    }
    assert_bits(&rank.raw(d.view()), &want, DataType::F32, "sums");
    assert_eq!(rank.raw(other.view()), vec![7; 1 << 16]);
    comm.check().unwrap();
}

/// The rows that came, copied on the caller's stream.
fn echo(rank: &Rank, got: &Dispatched) -> Buffer {
    let dims = got.rows.shape();
    let mut rows = rank.poisoned(got.rows.dtype(), dims.dims());
    rank.device
        .copy(&rank.stream, rows.view_mut(), got.rows.view())
        .unwrap();
    rows
}

/// Many in a row, with new data, and calls on the caller's own stream between them.
fn in_order(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<Case> = (0..3).map(|_| case(world, &mut rng)).collect();
    let lates: Vec<usize> = (0..6).map(|_| rng.random_range(0..world.size)).collect();
    let overlaps = !world.backend.asks_callers() && world.size > 1;
    world.run(&experts::config(), move |rank| {
        for (i, late) in lates.iter().enumerate() {
            round_trip(rank, &cases[i % cases.len()], overlaps.then_some(*late));
            rank.lease().barrier().unwrap();
        }
    });
}

/// A stream that captures has nothing beside it.
fn not_captured(world: &World) {
    world.run(&experts::config(), |rank| {
        let captured = rank.device.capture(&rank.stream, &mut || {
            let beside = rank.comm().lease_beside(&rank.stream, None).map(drop);
            assert_eq!(expect_unsupported(beside, "captured"), "not-capturable");
            Ok(())
        });
        assert!(captured.is_ok());
        rank.lease().barrier().unwrap();
    });
}

/// Adds all trials.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    suite.add("beside/in_order", in_order);
    suite.add("beside/not_captured", not_captured);
}
