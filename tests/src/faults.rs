//! Faults: whatever a rank does wrong, every rank hears of it in time, as a typed error, and the group can go on.
//!
//! Every operation of [`ops::all`] goes through all of these contracts.

mod experts;
pub mod injected;
mod linears;
pub mod panics;

use crate::{
    all_reduce,
    backend::Rank,
    check::{assert_kind, expect_fault, is_poisoned},
    gather_linear::{self, config},
    layer::Spec,
    ops::{self, Ended, Op},
    pieces,
    suite::{Suite, World},
    themes::with_a_hook,
};
use brigade_device::{CommConfig, DataType, FaultKind, FaultRecord, OverlapMode, ReduceOp, Result};
use brigade_plan::Engines;
use rand::{Rng, rngs::StdRng};
use std::time::{Duration, Instant};

/// Deadline of calls where a rank does not come.
pub const DEADLINE: Duration = Duration::from_millis(300);

/// What a rank may take beyond the deadline, and at most where it need not wait for one.
pub const GRACE: Duration = Duration::from_secs(1);

/// For collective steps that nobody misses.
pub const AMPLE: Duration = Duration::from_secs(30);

/// A communicator whose calls have a short deadline, once the first is over.
pub fn impatient() -> CommConfig {
    CommConfig {
        deadline: DEADLINE,
        first_deadline: AMPLE,
        ..config()
    }
}

/// Calls whose results show that a communicator works.
pub struct Probe {
    linear: gather_linear::Case,
    sum: all_reduce::Case,
}

impl Probe {
    /// Draws its numbers.
    pub fn new(rng: &mut StdRng, size: usize) -> Self {
        let spec = Spec::ragged(rng, size).with(|s| s.dtype = DataType::F32);
        let kind = (DataType::F32, ReduceOp::Sum, all_reduce::Place::OverInput);
        Self {
            linear: gather_linear::Case::new(rng, spec),
            sum: all_reduce::Case::random(rng, size, 500, kind),
        }
    }

    /// Makes a call that is none of the linears.
    pub fn sum(&self, rank: &Rank) {
        self.sum.run(rank, None);
    }

    /// Makes the calls, and asserts their results.
    pub fn run(&self, rank: &Rank) {
        self.sum.run(rank, None);
        self.linear.run(rank, Some(OverlapMode::Off));
        self.linear.run(rank, None);
    }
}

/// Asserts how a call ended that a fault stopped: with a record of that kind, and an output that nobody takes for a
/// result. A call that was not begun, because the group had been stopped before, leaves its output as it was.
fn assert_stopped(rank: &Rank, ended: Ended, kind: FaultKind, what: &str) -> FaultRecord {
    let record = expect_fault(ended.result, what);
    assert_kind(&record, kind, what);
    if let Some(d) = ended.output {
        let bytes = rank.raw(d.view());
        let values = crate::matrix::to_f64(d.dtype(), &bytes);
        let untouched = values.iter().all(|&x| x == ops::OLD);
        // A timeout comes long after all who are there have begun.
        let begun = kind == FaultKind::Timeout;
        assert!(
            is_poisoned(d.dtype(), &bytes) || untouched && !begun,
            "{what}: output not poisoned: {values:?}"
        );
    }
    record
}

fn words(record: FaultRecord) -> Vec<u8> {
    bytemuck::cast_slice(&record.to_words()).to_vec()
}

/// Asserts that every later use of the communicator gives the same record, on every rank.
fn assert_stays_stopped(rank: &Rank, record: FaultRecord) {
    assert_eq!(expect_fault(rank.comm().check(), "check"), record);
    for _ in 0..2 {
        let lease = rank.comm().lease(&rank.stream).map(drop);
        assert_eq!(expect_fault(lease, "a later lease"), record);
        assert_eq!(
            expect_fault(ops::barrier().run(rank).result, "a later call"),
            record
        );
    }
    rank.assert_shared(&words(record), "fault record");
}

pub fn assert_in_time(start: Instant, limit: Duration, what: &str) {
    let took = start.elapsed();
    assert!(took < limit, "{what}: took {took:?}, allowed {limit:?}");
}

/// A rank that never calls: every other rank times out naming it.
fn never_calls(world: &World, op: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let culprit = rng.random_range(0..world.size);
    world.run(&impatient(), move |rank| {
        probe.run(rank);
        rank.meet();
        let record = if rank.rank == culprit {
            rank.meet();
            expect_fault(rank.comm().check(), "the culprit")
        } else {
            let start = Instant::now();
            let ended = op.run(rank);
            assert_in_time(start, DEADLINE + GRACE, &op.name);
            let record = assert_stopped(rank, ended, FaultKind::Timeout, &op.name);
            assert_eq!(record.peer as usize, culprit, "{}: {record}", op.name);
            let named = op.operations.iter().any(|&o| o as u32 == record.operation);
            assert!(named, "{}: {record}", op.name);
            rank.meet();
            record
        };
        assert_stays_stopped(rank, record);
        rank.comm().reset(AMPLE).unwrap();
        probe.run(rank);
    });
}

/// A rank that makes another call: a mismatch on every rank, the culprit too, long before the deadline. One of them comes late, maybe when
/// others have stopped the group.
fn mismatch(world: &World, op: Op, other: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let culprit = rng.random_range(0..world.size);
    let (late, rounds) = (rng.random_range(0..world.size), rng.random_range(0..300));
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        if rank.rank == late {
            rank.dawdle(rounds);
        }
        differ(rank, culprit, &op, &other);
        probe.run(rank);
    });
}

/// Makes one call on the culprit and another on all other ranks, and goes on from there.
pub fn differ(rank: &Rank, culprit: usize, op: &Op, other: &Op) {
    let mine = if rank.rank == culprit { other } else { op };
    let start = Instant::now();
    let ended = mine.run(rank);
    assert_in_time(start, GRACE, &mine.name);
    let record = assert_stopped(rank, ended, FaultKind::Mismatch, &mine.name);
    let involved = [record.rank, record.peer].map(|r| r as usize);
    assert!(
        involved.contains(&culprit),
        "rank {culprit} did it: {record}"
    );
    assert_stays_stopped(rank, record);
    rank.comm().reset(AMPLE).unwrap();
}

/// Somebody calls `abort` while others wait.
fn aborted(world: &World, op: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let culprit = rng.random_range(0..world.size);
    let rounds = rng.random_range(0..3000);
    world.run(&config(), move |rank| {
        probe.run(rank);
        abort(rank, culprit, rounds, &op);
        probe.run(rank);
    });
}

/// Aborts on the culprit, after a while, while all other ranks make a call; and goes on from there.
pub fn abort(rank: &Rank, culprit: usize, rounds: u32, op: &Op) {
    rank.meet();
    let start = Instant::now();
    let record = if rank.rank == culprit {
        rank.dawdle(rounds);
        rank.comm().abort();
        expect_fault(rank.comm().check(), "after abort")
    } else {
        assert_stopped(rank, op.run(rank), FaultKind::Aborted, &op.name)
    };
    assert_in_time(start, GRACE, &op.name);
    assert_kind(&record, FaultKind::Aborted, &op.name);
    assert_eq!(record.rank as usize, culprit);
    assert_stays_stopped(rank, record);
    rank.comm().reset(AMPLE).unwrap();
}

/// A rank whose communicator is gone: the others hear of it long before the deadline.
fn peer_lost(world: &World, op: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let culprit = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        if rank.rank == culprit {
            rank.leave();
            rank.meet();
            return;
        }
        let start = Instant::now();
        let record = assert_stopped(rank, op.run(rank), FaultKind::PeerLost, &op.name);
        assert_in_time(start, GRACE, &op.name);
        assert_eq!(record.peer as usize, culprit, "{record}");
        rank.meet();
        let reset: Result<()> = rank.comm().reset(DEADLINE);
        assert!(reset.is_err(), "reset without rank {culprit}");
    });
}

/// Pairs of calls that differ in one thing that all ranks must agree on.
fn mismatches(engines: Engines) -> Vec<(&'static str, Op, Op)> {
    let sum = |len, dtype, op| ops::all_reduce(len, dtype, op, None);
    let (f32, bf16) = (DataType::F32, DataType::BF16);
    let mut pairs = vec![
        (
            "length",
            sum(64, f32, ReduceOp::Sum),
            sum(65, f32, ReduceOp::Sum),
        ),
        (
            "dtype",
            sum(64, f32, ReduceOp::Sum),
            sum(64, bf16, ReduceOp::Sum),
        ),
        (
            "op",
            sum(64, f32, ReduceOp::Sum),
            sum(64, f32, ReduceOp::Max),
        ),
        ("operation", sum(64, f32, ReduceOp::Sum), ops::barrier()),
        ("copy", ops::all_gather(3), ops::broadcast(0)),
        ("rows", ops::all_gather(3), ops::all_gather(4)),
        (
            "scatter",
            ops::reduce_scatter(ReduceOp::Sum),
            ops::reduce_scatter(ReduceOp::Min),
        ),
        ("root", ops::broadcast(0), ops::broadcast(1)),
        ("row_len", ops::all_to_all(6), ops::all_to_all(7)),
    ];
    if engines.dispatches {
        pairs.push(("hidden", ops::experts(8, None), ops::experts(12, None)));
        let exchange = ops::low_latency;
        pairs.push(("hidden_in_turn", exchange(8), exchange(12)));
        pairs.push(("in_turn", exchange(8), ops::barrier()));
        pairs.push(("together", ops::all_gather(3), exchange(8)));
        let rows = ops::all_to_all_rows;
        pairs.push(("row_of_list", rows(6), rows(7)));
        pairs.push(("lists", rows(6), ops::all_to_all(6)));
    }
    if engines.norms {
        let norm = |rows, eps| ops::all_reduce_norm(rows, eps, None);
        pairs.push(("norm_rows", norm(3, 1e-5), norm(4, 1e-5)));
        pairs.push(("norm_eps", norm(3, 1e-5), norm(3, 1e-6)));
        pairs.push(("norm_sum", norm(3, 1e-5), sum(18, f32, ReduceOp::Sum)));
    }
    let algorithms: Vec<_> = all_reduce::algorithms(engines)
        .into_iter()
        .map(|a| a.1)
        .collect();
    let [first, second, ..] = algorithms[..] else {
        return pairs;
    };
    let chosen = |choice| ops::all_reduce(64, f32, ReduceOp::Sum, choice);
    pairs.push(("choice", chosen(first), chosen(second)));
    let off = Some(OverlapMode::Off);
    let pull = Some(OverlapMode::Pull).filter(|_| engines.pull);
    let ring = Some(OverlapMode::Ring);
    let gather = ops::gather_linear;
    let scatter = ops::linear_reduce_scatter;
    pairs.push(("linear_off", gather(3, 6, off), gather(3, 6, ring)));
    pairs.push(("linear_mode", gather(3, 6, ring), gather(3, 6, pull)));
    pairs.push(("linear_rows", gather(3, 6, ring), gather(4, 6, ring)));
    pairs.push(("linear_k", gather(3, 6, pull), gather(3, 7, pull)));
    pairs.push(("linear_twin", gather(3, 6, ring), scatter(3, 6, ring)));
    pairs.push(("linear_auto", gather(3, 6, off), gather(3, 6, None)));
    pairs.push(("twin_auto", scatter(3, 6, off), scatter(3, 6, None)));
    pairs.push(("twin_mode", scatter(3, 6, ring), scatter(3, 6, off)));
    pairs.push(("twin_n", scatter(3, 6, ring), scatter(3, 7, ring)));
    pairs.push((
        "linear_sum",
        scatter(3, 6, ring),
        sum(64, f32, ReduceOp::Sum),
    ));
    pairs
}

/// The same for sums by each algorithm: those that are pushed before anybody knows what its peers do, and those that are pulled.
fn mismatches_of_sums(engines: Engines) -> Vec<(String, Op, Op)> {
    let pairs = |name, choice| {
        let sum = |len, dtype, op| ops::all_reduce(len, dtype, op, Some(choice));
        let norm = |rows| ops::all_reduce_norm(rows, 1e-5, Some(choice));
        let (f32, bf16) = (DataType::F32, DataType::BF16);
        let usual = || sum(64, f32, ReduceOp::Sum);
        let mut pairs = vec![
            ("length", usual(), sum(65, f32, ReduceOp::Sum)),
            ("much_more", usual(), sum(5000, f32, ReduceOp::Sum)),
            ("dtype", usual(), sum(64, bf16, ReduceOp::Sum)),
            ("op", usual(), sum(64, f32, ReduceOp::Max)),
        ];
        if engines.norms {
            pairs.push(("norm", norm(3), norm(300)));
        }
        pairs
            .into_iter()
            .map(move |(what, op, other)| (format!("{name}_{what}"), op, other))
    };
    let algorithms = all_reduce::algorithms(engines).into_iter();
    let forced = algorithms.filter_map(|(name, choice)| Some((name, choice?)));
    forced
        .flat_map(|(name, choice)| pairs(name, choice))
        .collect()
}

/// A rank that makes the call of another operation.
fn wrong_call(world: &World, op: Op) {
    let all = ops::all(world.backend.engines());
    let at = all.iter().position(|o| o.name == op.name).unwrap();
    let other = all[(at + 1) % all.len()].clone();
    mismatch(world, op, other);
}

type Contract = fn(&World, Op);

/// What every operation goes through.
const CONTRACTS: [(&str, Contract); 4] = [
    ("never_calls", never_calls),
    ("aborted", aborted),
    ("peer_lost", peer_lost),
    ("wrong_call", wrong_call),
];

/// What it goes through on devices that take a hook.
const INJECTED: [(&str, Contract); 2] = [
    ("delayed", injected::delayed),
    ("mishaps", injected::mishaps),
];

/// The same, where the thread that makes a call is asked.
const KILLED: (&str, Contract) = ("killed", injected::killed);

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    let (injects, asks_callers) = (suite.backend().injects(), suite.backend().asks_callers());
    let injected = injects.then_some(INJECTED).into_iter().flatten();
    let killed = (injects && asks_callers).then_some(KILLED);
    let engines = suite.backend().engines();
    let plain = CONTRACTS.map(|contract| (contract, engines));
    let hooked = injected.chain(killed);
    let hooked = hooked.map(|contract| (contract, with_a_hook(engines)));
    for ((contract, f), engines) in plain.into_iter().chain(hooked) {
        for op in ops::all(engines) {
            let name = format!("faults/{contract}/{}", op.name);
            suite.add_from(2, &name, move |world| f(world, op.clone()));
        }
    }
    if injects {
        let pushing = all_reduce::pushing(with_a_hook(engines));
        for (name, choice) in pushing {
            let name = format!("faults/in_pieces/{name}");
            let config = impatient();
            // Two ranks have room for less than half of it.
            let elements = 2 * config.all_reduce_bytes / DataType::F32.bytes() + 100;
            let op = ops::all_reduce(elements, DataType::F32, ReduceOp::Sum, Some(choice));
            suite.add_from(2, &name, move |world| {
                injected::in_pieces(world, &config, op.clone());
            });
        }
        for op in ops::of_bytes(2 * pieces::UNIT + 1000) {
            let name = format!("faults/in_pieces/{}", op.name);
            suite.add_from(2, &name, move |world| {
                let config = pieces::small(&impatient(), world.size);
                injected::in_pieces(world, &config, op.clone());
            });
        }
    }
    let pairs = mismatches(engines).into_iter();
    let named = pairs.map(|(name, op, other)| (name.to_owned(), op, other));
    let others = mismatches_of_sums(engines).into_iter();
    let others = others.chain(linears::mismatches(engines));
    for (name, op, other) in named.chain(others) {
        suite.add_from(2, &format!("faults/mismatch/{name}"), move |world| {
            mismatch(world, op.clone(), other.clone());
        });
    }
    experts::add(suite);
    panics::add(suite);
}
