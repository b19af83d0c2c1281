//! A communicator is shared, and used by one lease at a time; leases on different streams run one after the other.
#![allow(clippy::unwrap_used)]

#[path = "common/backend.rs"]
mod backend;
mod common;

use backend::{Log, LogComm, LogQueue};
use brigade_device::*;
use std::{
    sync::{Arc, Barrier, atomic::Ordering},
    time::Duration,
};

const SOON: Duration = Duration::from_secs(1);

fn setup() -> (Log, Arc<LogComm>, Comm) {
    let log = Log::default();
    let backend = LogComm::new(&log);
    let comm = Comm::new(backend.clone());
    (log, backend, comm)
}

fn text<T>(result: Result<T>) -> String {
    result.err().map_or("ok".into(), |e| e.to_string())
}

const BUSY: &str = "the communicator is in use by another call";

#[test]
fn a_second_live_lease_is_busy() {
    let (log, _, comm) = setup();
    let on = LogQueue::stream("a", &log);
    let other = comm.clone();
    let lease = comm.lease(&on).unwrap();
    assert_eq!(
        text(other.lease(&on)),
        BUSY,
        "a clone is the same communicator"
    );
    assert_eq!(text(other.reset(SOON)), BUSY);
    assert_eq!(text(other.close(SOON)), BUSY);
    drop(lease);
    assert_eq!(text(other.lease(&on)), "ok");
    assert_eq!(text(other.reset(SOON)), "ok");
}

#[test]
fn of_many_threads_one_gets_the_lease() {
    let (log, _, comm) = setup();
    const THREADS: usize = 8;
    let (start, end) = (Barrier::new(THREADS), Barrier::new(THREADS));
    for _ in 0..50 {
        let won = std::thread::scope(|s| {
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    s.spawn(|| {
                        let on = LogQueue::stream("t", &log);
                        start.wait();
                        let lease = comm.lease(&on);
                        // Nobody lets go before everybody has tried.
                        end.wait();
                        usize::from(lease.is_ok())
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap())
                .sum::<usize>()
        });
        assert_eq!(won, 1);
    }
}

#[test]
fn a_lease_on_another_stream_waits_for_the_last_one() {
    let (log, _, comm) = setup();
    let (a, b) = (LogQueue::stream("a", &log), LogQueue::stream("b", &log));
    for on in [&a, &a, &b, &b, &a] {
        comm.lease(on).unwrap().barrier().unwrap();
    }
    insta::assert_snapshot!(log.lock().join("\n"), @r"
    barrier on a, turn 1
    record a1
    barrier on a, turn 2
    record a2
    b waits for a2
    barrier on b, turn 3
    record b1
    barrier on b, turn 4
    record b2
    a waits for b2
    barrier on a, turn 5
    record a3
    ");
}

#[test]
fn an_event_that_could_not_be_waited_for_is_not_forgotten() {
    let (log, _, comm) = setup();
    let (a, b) = (LogQueue::stream("a", &log), LogQueue::stream("b", &log));
    drop(comm.lease(&a).unwrap());
    LogQueue::of(&b)
        .refuses_to_wait
        .store(true, Ordering::Relaxed);
    assert_eq!(text(comm.lease(&b)), "wait: code -1");
    LogQueue::of(&b)
        .refuses_to_wait
        .store(false, Ordering::Relaxed);
    assert_eq!(comm.lease(&b).unwrap().group().rank, 1);
    assert_eq!(log.lock()[..], ["record a1", "b waits for a1", "record b1"]);
}

/// What `work` does on a stream that captures.
fn capture(on: &Stream, work: impl FnOnce()) -> GraphTurns {
    let captures = &LogQueue::of(on).captures;
    captures.store(true, Ordering::Relaxed);
    let graph = GraphTurns::of(|| {
        work();
        Ok(())
    });
    captures.store(false, Ordering::Relaxed);
    graph.unwrap()
}

/// A capture waits for nothing and is waited for by nobody; its launches are turns, behind the last one and in front of the next.
#[test]
fn launches_of_graphs_are_turns() {
    let (log, _, comm) = setup();
    let (a, b) = (LogQueue::stream("a", &log), LogQueue::stream("b", &log));
    let call = |on: &Stream| comm.lease(on).unwrap().barrier().unwrap();
    let launch = |graph: &GraphTurns, on: &Stream| drop(graph.launch(on, || on.record()).unwrap());
    call(&b);
    let graph = capture(&a, || {
        call(&a);
        call(&a);
    });
    // Another graph may hold it, and one that holds nothing waits for nothing.
    let outer = capture(&a, || drop(graph.launch(&a, || b.record()).unwrap()));
    let without = capture(&a, || ());
    call(&b);
    launch(&without, &a);
    launch(&graph, &a);
    launch(&graph, &a);
    call(&b);
    launch(&outer, &a);
    // One that cannot be launched has waited all the same.
    let refused = graph.launch(&b, || Err(backend::refused("launch")));
    assert_eq!(text(refused), "launch: code -1");
    call(&a);
    // The graph outlives the communicator.
    drop(comm);
    drop(graph.launch(&b, || b.record()).unwrap());
    insta::assert_snapshot!(log.lock().join("\n"), @r"
    barrier on b, turn 1
    record b1
    barrier on a, turn 2
    barrier on a, turn 3
    record b2
    barrier on b, turn 4
    record b3
    record a1
    a waits for b3
    record a2
    record a3
    b waits for a3
    barrier on b, turn 5
    record b4
    a waits for b4
    record a4
    b waits for a4
    record b5
    a waits for b5
    barrier on a, turn 6
    record a5
    record b6
    ");
}

#[test]
fn finish_gives_the_event_of_the_end() {
    let (log, _, comm) = setup();
    let a = LogQueue::stream("a", &log);
    let mut lease = comm.lease(&a).unwrap();
    lease.barrier().unwrap();
    let end = lease.finish().unwrap();
    assert!(end.done().unwrap() && end.sync(SOON).is_ok());
    assert_eq!(log.lock()[..2], ["barrier on a, turn 1", "record a1"]);
}

#[test]
fn calls_beside_a_stream_are_behind_one_event_and_before_another() {
    let (log, _, comm) = setup();
    let (compute, other) = (LogQueue::stream("a", &log), LogQueue::stream("b", &log));
    let mut beside = comm.lease_beside(&compute, None).unwrap();
    beside.barrier().unwrap();
    assert_eq!(text(comm.lease(&compute)), BUSY);
    let first = beside.finish().unwrap();
    let ready = other.record().unwrap();
    let mut beside = comm.lease_beside(&compute, Some(&ready)).unwrap();
    beside.barrier().unwrap();
    let second = beside.finish().unwrap();
    other.wait(first.event()).unwrap();
    second.join().unwrap();
    drop(comm.lease(&compute));
    insta::assert_snapshot!(log.lock().join("\n"));
}

#[test]
fn after_a_fault_there_is_no_lease_until_reset() {
    let (log, backend, comm) = setup();
    let on = LogQueue::stream("a", &log);
    let lease = comm.lease(&on).unwrap();
    // Needs no lease: it is for the thread that watches.
    comm.abort();
    drop(lease);
    for _ in 0..2 {
        let error = comm.lease(&on).err().unwrap();
        assert_eq!(error.fault().copied(), backend.fault());
        assert_eq!(error.fault().unwrap().kind, FaultKind::Aborted);
    }
    assert!(comm.check().is_err());
    comm.reset(SOON).unwrap();
    assert!(comm.check().is_ok() && comm.lease(&on).is_ok());
}

#[test]
fn a_closed_communicator_gives_no_lease() {
    let (log, backend, comm) = setup();
    let on = LogQueue::stream("a", &log);
    backend.refuses_to_close.store(true, Ordering::Relaxed);
    assert_eq!(text(comm.close(SOON)), "close: code -1");
    assert_eq!(text(comm.lease(&on)), "ok", "not closed after all");
    backend.refuses_to_close.store(false, Ordering::Relaxed);
    comm.close(SOON).unwrap();
    assert_eq!(text(comm.lease(&on)), "communicator closed");
    assert_eq!(text(comm.clone().check()), "communicator closed");
}

#[test]
fn calls_go_to_the_backend_with_turn_and_stream() {
    let (log, _, comm) = setup();
    let on = LogQueue::stream("a", &log);
    let mut lease = comm.lease(&on).unwrap();
    let (mut to, from) = (common::plain(&[4]), common::plain(&[4]));
    let rows = &[2, 2];
    let (op, choice) = (ReduceOp::Sum, None);
    let (view, peer, root) = (from.view(), 0, 0);
    let failed = [
        text(lease.all_reduce(AllReduceParams {
            data: to.view_mut(),
            from: None,
            op,
            choice,
        })),
        text(lease.all_gather(AllGatherParams {
            from: view,
            rows_per_rank: rows,
            to: to.view_mut(),
        })),
        text(lease.reduce_scatter(ReduceScatterParams {
            from: view,
            rows_per_rank: rows,
            to: to.view_mut(),
            op,
        })),
        text(lease.broadcast(BroadcastParams {
            data: to.view_mut(),
            root,
        })),
        text(lease.all_to_all(AllToAllParams {
            from: view,
            send_rows: rows,
            to: to.view_mut(),
            recv_rows: rows,
        })),
        text(lease.send(SendParams { from: view, peer })),
        text(lease.recv(RecvParams {
            to: to.view_mut(),
            peer,
        })),
        text(lease.send_recv(
            SendParams { from: view, peer },
            RecvParams {
                to: to.view_mut(),
                peer,
            },
        )),
    ];
    assert!(
        failed
            .iter()
            .all(|e| e == "anything but a barrier: code -1"),
        "{failed:?}"
    );
    drop(lease);
    insta::assert_snapshot!(log.lock().join("\n"), @r"
    all_reduce on a, turn 1
    all_gather on a, turn 1
    reduce_scatter on a, turn 1
    broadcast on a, turn 1
    all_to_all on a, turn 1
    send on a, turn 1
    recv on a, turn 1
    send_recv on a, turn 1
    record a1
    ");
}

#[test]
fn own_chunk_proves_which_turn_filled_it() {
    let (log, _, comm) = setup();
    let on = LogQueue::stream("a", &log);
    drop(comm.lease(&on).unwrap());
    let mut lease = comm.lease(&on).unwrap();
    let mut own = lease.own_chunk(&[4, 3], 8, DataType::BF16).unwrap();
    assert_eq!(own.view_mut().shape().dims(), [3, 8]);
    let filled = own.filled();
    assert_eq!((filled.turn(), filled.ticket()), (2, 7));
    assert_eq!(
        (filled.rows(), filled.columns(), filled.dtype()),
        (3, 8, DataType::BF16)
    );
    // The check takes shape and type from the proof.
    let (w, rows) = (common::plain(&[8, 6]), [4, 3]);
    let p = AllGatherLoraLinearParams::new(Chunk::Resident(filled), &rows, &w);
    assert_eq!(p.check(&comm.group()).unwrap().k, 8);
}

#[test]
fn slots_are_lent_to_one_at_a_time() {
    let (log, _, comm) = setup();
    let (_, _, other) = setup();
    let busy = "the low-latency exchange is in use by another call";
    let mut exchange = comm.low_latency().unwrap();
    assert_eq!(text(comm.low_latency()), busy);
    assert_eq!(
        text(comm.clone().low_latency()),
        busy,
        "the same communicator"
    );
    // A slot that changed places is still lent, and its own communicator's.
    let mut theirs = other.low_latency().unwrap();
    std::mem::swap(exchange.slots().0, theirs.slots().0);
    drop(exchange);
    assert_eq!(text(comm.low_latency()), busy);
    assert_eq!(text(other.low_latency()), busy);
    let (rows, ids) = (common::plain(&[1, 8]), common::plain(&[1, 2]));
    let p = LowLatencyDispatchParams {
        rows: rows.view(),
        routing: Routing {
            ids: ids.view(),
            placement: Placement::Ranks,
        },
        weights: None,
        max_tokens: 1,
        cast: None,
    };
    let mut lease = comm.lease(&LogQueue::stream("a", &log)).unwrap();
    let (ours, foreign) = theirs.slots();
    assert_eq!(
        text(lease.low_latency_dispatch(foreign, p)),
        "slot: got another communicator's, wanted one that this communicator lent"
    );
    assert_eq!(
        text(lease.low_latency_dispatch(ours, p)),
        "this device has no expert-parallel dispatch; use all_to_all"
    );
    drop(theirs);
    assert_eq!(text(other.low_latency()), "ok");
    // What was lent before is nobody's, though its communicator lends slots of the same numbers again.
    let again = comm.low_latency();
    assert_eq!(text(comm.low_latency()), busy);
    assert_eq!(text(again), "ok");
}

#[test]
fn what_a_backend_does_not_have_is_a_reason() {
    let (log, _, comm) = setup();
    let on = LogQueue::stream("a", &log);
    let mut lease = comm.lease(&on).unwrap();
    let mut exchange = comm.low_latency().unwrap();
    let (rows, ids) = (common::plain(&[1, 8]), common::plain(&[1, 2]));
    let p = LowLatencyDispatchParams {
        rows: rows.view(),
        routing: Routing {
            ids: ids.view(),
            placement: Placement::Ranks,
        },
        weights: None,
        max_tokens: 1,
        cast: None,
    };
    assert_eq!(
        text(lease.windows()),
        "this device registers no regions; use send and recv"
    );
    assert_eq!(
        text(lease.low_latency_dispatch(exchange.slots().0, p)),
        "this device has no expert-parallel dispatch; use all_to_all"
    );
    assert_eq!(
        comm.explain(&Call::Barrier).unwrap_err().to_string(),
        "there is no plan for barrier; take a real backend"
    );
    assert_eq!(comm.traffic(), Traffic::default());
    assert_eq!(
        format!("{comm:?}"),
        "Comm(Group { mode: Tp, rank: 1, size: 2 })"
    );
}
