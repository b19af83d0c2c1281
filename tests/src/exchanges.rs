//! Copies and sums in turn, of all lengths: where a device pushes them, they go through the same buffers. What arrives is what
//! was sent, eagerly and in graphs, and a reset finds nothing of a call that was lost.

use crate::{
    backend::Rank,
    check::{assert_bits, assert_kind, expect_fault},
    faults::{AMPLE, impatient},
    gather_linear::config,
    ops,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherParams, AllReduceParams, BroadcastParams, Buffer, DataType, FaultKind, ReduceOp,
    ReduceScatterParams, Result,
};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// Around granules of 16 bytes and packets of four; and more than fits a buffer.
const BYTES: [usize; 14] = [
    0, 1, 3, 15, 16, 17, 48, 63, 64, 65, 1024, 1100, 5000, 30_000,
];

/// Elements of 4 bytes, likewise.
const ELEMENTS: [usize; 9] = [0, 1, 3, 4, 5, 16, 33, 1000, 9000];

#[derive(Clone, Debug)]
enum Kind {
    /// Bytes of each rank.
    Gather(Vec<usize>),
    Broadcast {
        root: usize,
        bytes: usize,
    },
    /// Elements of each rank.
    Scatter(Vec<usize>),
    Sum(usize),
}

impl Kind {
    fn random(rng: &mut StdRng, size: usize) -> Self {
        let of = |list: &[usize], rng: &mut StdRng| *list.choose(rng).unwrap();
        let each = |list: &[usize], rng: &mut StdRng| (0..size).map(|_| of(list, rng)).collect();
        match rng.random_range(0..4) {
            0 => Self::Gather(each(&BYTES, rng)),
            1 => Self::Broadcast {
                root: rng.random_range(0..size),
                bytes: of(&BYTES, rng),
            },
            2 => Self::Scatter(each(&ELEMENTS, rng)),
            _ => Self::Sum(of(&ELEMENTS, rng)),
        }
    }
}

/// Bytes of a rank on a day, of whose words some are all ones, and others all but one: but for stretches without.
fn bytes(rank: usize, day: usize, len: usize) -> Vec<u8> {
    let byte = |i: usize| match (i / 4 + rank + day) % 9 {
        0 if (i / 256).is_multiple_of(2) => 0xFF,
        3 if (i / 256).is_multiple_of(4) => 0xFF - u8::from(i.is_multiple_of(4)),
        _ => (i * 31 + rank * 7 + day * 13) as u8,
    };
    (0..len).map(byte).collect()
}

/// Small whole numbers, whose sums are exact.
fn numbers(rank: usize, day: usize, len: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 3 + rank * 5 + day * 7) % 11) as f32;
    (0..len).map(number).collect()
}

fn sums(size: usize, day: usize, len: usize) -> Vec<f32> {
    let ranks: Vec<_> = (0..size).map(|r| numbers(r, day, len)).collect();
    (0..len).map(|i| ranks.iter().map(|x| x[i]).sum()).collect()
}

fn raw(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// A call with its buffers.
struct Wired {
    kind: Kind,
    from: Buffer,
    to: Buffer,
}

impl Wired {
    fn new(rank: &Rank, kind: &Kind) -> Self {
        let me = rank.rank;
        let (dtype, from, to) = match kind {
            Kind::Gather(rows) => (DataType::U8, rows[me], rows.iter().sum()),
            Kind::Broadcast { bytes, .. } => (DataType::U8, 0, *bytes),
            Kind::Scatter(rows) => (DataType::F32, rows.iter().sum(), rows[me]),
            Kind::Sum(len) => (DataType::F32, *len, *len),
        };
        Self {
            kind: kind.clone(),
            from: rank.poisoned(dtype, &[from, 1]),
            to: rank.poisoned(dtype, &[to, 1]),
        }
    }

    /// Writes the input of a day, and something else where the result goes.
    fn prepare(&mut self, rank: &Rank, day: usize) {
        let (device, on, me) = (&rank.device, &rank.stream, rank.rank);
        device.fill(on, self.to.view_mut(), 0xFF).unwrap();
        let len = self.from.shape().len();
        let (to, input) = match &self.kind {
            Kind::Gather(_) => (&mut self.from, bytes(me, day, len)),
            Kind::Broadcast { root, .. } if *root != me => return,
            Kind::Broadcast { bytes: len, .. } => (&mut self.to, bytes(me, day, *len)),
            Kind::Scatter(_) | Kind::Sum(_) => (&mut self.from, raw(&numbers(me, day, len))),
        };
        device.write(on, to.view_mut(), &input).unwrap();
    }

    fn call(&self, rank: &Rank) -> Result<()> {
        let mut to = self.to.clone();
        let mut lease = rank.comm().lease(&rank.stream)?;
        let plan = match &self.kind {
            Kind::Gather(rows) => lease.all_gather(AllGatherParams {
                from: self.from.view(),
                rows_per_rank: rows,
                to: to.view_mut(),
            }),
            Kind::Broadcast { root, .. } => lease.broadcast(BroadcastParams {
                data: to.view_mut(),
                root: *root,
            }),
            Kind::Scatter(rows) => lease.reduce_scatter(ReduceScatterParams {
                from: self.from.view(),
                rows_per_rank: rows,
                to: to.view_mut(),
                op: ReduceOp::Sum,
            }),
            Kind::Sum(_) => lease.all_reduce(AllReduceParams {
                data: to.view_mut(),
                from: Some(self.from.view()),
                op: ReduceOp::Sum,
                choice: None,
            }),
        };
        plan.map(drop)
    }

    fn check(&self, rank: &Rank, day: usize) {
        let (me, size) = (rank.rank, rank.size);
        let want = match &self.kind {
            Kind::Gather(rows) => (0..size).flat_map(|r| bytes(r, day, rows[r])).collect(),
            Kind::Broadcast { root, bytes: len } => bytes(*root, day, *len),
            Kind::Scatter(rows) => {
                let first: usize = rows[..me].iter().sum();
                let all = sums(size, day, rows.iter().sum());
                raw(&all[first..first + rows[me]])
            }
            Kind::Sum(len) => raw(&sums(size, day, *len)),
        };
        let what = format!("{:?} on day {day}", self.kind);
        assert_bits(&rank.raw(self.to.view()), &want, self.to.dtype(), &what);
    }
}

/// Makes all calls, nobody waiting between them, and asserts what they give.
fn run_all(rank: &Rank, calls: &mut [Wired], day: usize) {
    calls.iter_mut().for_each(|call| call.prepare(rank, day));
    let made = calls.iter().try_for_each(|call| call.call(rank));
    rank.settle(made).unwrap();
    calls.iter().for_each(|call| call.check(rank, day));
}

/// One behind the other, as calls and in one graph, and both in turn.
fn in_turn(world: &World) {
    let mut rng = world.rng();
    let kinds: Vec<_> = (0..40)
        .map(|_| Kind::random(&mut rng, world.size))
        .collect();
    world.run(&config(), move |rank| {
        let wire = || kinds.iter().map(|kind| Wired::new(rank, kind));
        let (mut calls, mut captured): (Vec<_>, Vec<_>) = (wire().collect(), wire().collect());
        run_all(rank, &mut calls, 0);
        let work = &mut || captured.iter().try_for_each(|call| call.call(rank));
        let graph = rank.device.capture(&rank.stream, work).unwrap();
        // Making a graph may wait for the GPU, and so for a peer's replay where ranks share one.
        rank.meet();
        for day in 1..6 {
            captured.iter_mut().for_each(|call| call.prepare(rank, day));
            graph.launch(&rank.stream).unwrap().sync(AMPLE).unwrap();
            captured.iter().for_each(|call| call.check(rank, day));
            run_all(rank, &mut calls[..7 * day], day);
        }
    });
}

/// What the others pushed in a call that one rank did not come to, nobody finds after a reset.
fn after_a_reset(world: &World) {
    let mut rng = world.rng();
    let (size, culprit) = (world.size, rng.random_range(0..world.size));
    let lost = [
        Kind::Gather(vec![1000; size]),
        Kind::Broadcast {
            root: (culprit + 1) % size,
            bytes: 5000,
        },
        Kind::Scatter(vec![1000; size]),
    ];
    let rounds: Vec<_> = lost
        .into_iter()
        .enumerate()
        .map(|(before, lost)| {
            let calls: Vec<_> = (0..4).map(|_| Kind::random(&mut rng, size)).collect();
            (before, lost, calls)
        })
        .collect();
    world.run(&impatient(), move |rank| {
        // The first call of all may take longer.
        ops::barrier().run(rank).result.unwrap();
        for (before, lost, kinds) in &rounds {
            let mut calls: Vec<_> = kinds.iter().map(|kind| Wired::new(rank, kind)).collect();
            run_all(rank, &mut calls[..*before], 1);
            rank.meet();
            if rank.rank != culprit {
                let ended = rank.settle(Wired::new(rank, lost).call(rank));
                let record = expect_fault(ended, "without a rank");
                assert_kind(&record, FaultKind::Timeout, "without a rank");
                assert_eq!(record.peer as usize, culprit, "{record}");
            }
            rank.meet();
            rank.comm().reset(AMPLE).unwrap();
            run_all(rank, &mut calls, 2);
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("exchanges/in_turn", in_turn);
    suite.add_from(2, "exchanges/after_a_reset", after_a_reset);
}
