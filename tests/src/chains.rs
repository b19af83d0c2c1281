//! Calls that follow each other: on streams that take turns, and all in one graph. Everything is small whole numbers, so that
//! every order of work gives the same bits.

use crate::{
    all_reduce::algorithms,
    backend::Rank,
    faults::AMPLE,
    gather_linear::config,
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherLoraLinearParams, AllReduceParams, AllToAllParams, Buffer, Chunk, DataType, DeviceExt,
    GemmParams, Lease, LoraLinearReduceScatterParams, Output, OverlapMode, ReduceOp, Replay,
    Result, Stream,
};
use brigade_plan::{Engines, rows};
use rand::{Rng, rngs::StdRng};
use std::time::Duration;

/// Leases that alternate between two streams.
fn turns(size: usize) -> usize {
    if size <= 4 { 10_000 } else { 1000 }
}

fn two_streams(rank: &Rank) -> [Stream; 2] {
    [rank.stream.clone(), rank.device.stream(0).unwrap()]
}

/// Waits for what both streams do, and finds the group well.
fn settle(rank: &Rank, streams: &[Stream; 2]) {
    streams.iter().for_each(|on| on.sync(AMPLE).unwrap());
    rank.comm().check().unwrap();
}

/// Every call reads what the one before it, on the other stream, has written: a value goes round all ranks. One that came too
/// early would send an old one on.
fn alternating_streams(world: &World) {
    let turns = turns(world.size);
    world.run(&config(), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let streams = two_streams(rank);
        let mine = |value: usize| vec![value as f32; 3];
        let mut buffers = [mine(100 + me), mine(0)].map(|values| {
            let on = &rank.stream;
            rank.device.upload(on, &values, &[1, 3]).unwrap()
        });
        rank.stream.sync(AMPLE).unwrap();
        let only = |to: usize| -> Vec<usize> { (0..size).map(|r| usize::from(r == to)).collect() };
        let (next, prev) = ((me + 1) % size, (me + size - 1) % size);
        for turn in 0..turns {
            let [a, b] = &mut buffers;
            let (from, to) = if turn % 2 == 0 { (a, b) } else { (b, a) };
            let mut lease = rank.comm().lease(&streams[turn % 2]).unwrap();
            lease
                .all_to_all(AllToAllParams {
                    from: from.view(),
                    send_rows: &only(next),
                    to: to.view_mut(),
                    recv_rows: &only(prev),
                })
                .unwrap();
        }
        settle(rank, &streams);
        let got: Vec<f32> = rank
            .device
            .download(&rank.stream, buffers[turns % 2].view())
            .unwrap();
        let origin = (me + size - turns % size) % size;
        assert_eq!(got, mine(100 + origin), "after {turns} turns");
    });
}

/// The same with sums, by every algorithm in turn: the rank whose turn it is brings the sum so far, and each of the others adds a number of
/// its own. One that came too early would leave out what was added last.
fn sums_on_alternating_streams(world: &World) {
    let mut rng = world.rng();
    let turns = turns(world.size);
    let choices = algorithms(world.backend.engines());
    let first: Vec<f32> = (0..rng.random_range(1..400))
        .map(|_| rng.random_range(0u8..100).into())
        .collect();
    world.run(&config(), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let streams = two_streams(rank);
        let own = |r: usize| (r + 1) as f32;
        let mine = rank.upload_f32(&vec![own(me); first.len()]);
        let mut buffers = [
            rank.upload_f32(&first),
            rank.poisoned(DataType::F32, &[first.len()]),
        ];
        rank.stream.sync(AMPLE).unwrap();
        for turn in 0..turns {
            let [a, b] = &mut buffers;
            let (sum, to) = if turn % 2 == 0 { (a, b) } else { (b, a) };
            let from = if turn % size == me { &*sum } else { &mine };
            let mut lease = rank.comm().lease(&streams[turn % 2]).unwrap();
            let params = AllReduceParams {
                data: to.view_mut(),
                from: Some(from.view()),
                op: ReduceOp::Sum,
                choice: choices[turn % choices.len()].1,
            };
            lease.all_reduce(params).unwrap();
        }
        settle(rank, &streams);
        let got: Vec<f32> = rank
            .device
            .download(&rank.stream, buffers[turns % 2].view())
            .unwrap();
        let all: f32 = (0..size).map(own).sum();
        let added: f32 = (0..turns).map(|turn| all - own(turn % size)).sum();
        let want: Vec<f32> = first.iter().map(|x| x + added).collect();
        assert_eq!(got, want, "after {turns} turns");
    });
}

/// Modes of the twin and of the gather-linear behind it.
type Modes = [Option<OverlapMode>; 2];

const PIECE: Option<OverlapMode> = Some(OverlapMode::Chunked { pieces: 1 });

/// Those for halves of 16 bits, with weights as tiles take them: tiles, where they are, before and behind what is in their place elsewhere.
fn modes_of_halves(engines: Engines) -> Vec<Modes> {
    let tiles = Some(OverlapMode::Tiles).filter(|_| engines.tiles);
    let with_tiles = tiles.map(|_| [[tiles, PIECE], [PIECE, tiles], [tiles, tiles]]);
    let without = [PIECE, Some(OverlapMode::Ring)].map(|mode| [PIECE, mode]);
    with_tiles.into_iter().flatten().chain(without).collect()
}

/// Rows of all ranks, and columns, of what linears hand to each other.
const ROUND: [usize; 2] = [12, 16];

/// A weight that moves all columns so far, and leaves out those that are not of one of so many parts.
fn moving(by: usize, part: usize, parts: usize) -> Matrix {
    let [_, k] = ROUND;
    let at = |i: usize, j: usize| {
        let from = (i + by) % k;
        u8::from(from == j && from % parts == part).into()
    };
    Matrix {
        dtype: DataType::BF16,
        dims: vec![k, k],
        values: (0..k * k).map(|i| at(i / k, i % k)).collect(),
    }
}

/// The same with linears: the twin moves columns, each rank those of its part, and gather-linear, on the other stream, moves them on. One
/// that came too early would move what was there a round before.
fn linears_on_alternating_streams(world: &World) {
    let mut rng = world.rng();
    let rounds = turns(world.size) / 5;
    let modes = modes_of_halves(world.backend.engines());
    let [m, k] = ROUND;
    let first = Matrix {
        dtype: DataType::BF16,
        dims: ROUND.to_vec(),
        values: (0..m * k)
            .map(|_| rng.random_range(-100i8..=100).into())
            .collect(),
    };
    world.run(&config(), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let streams = two_streams(rank);
        let counts = rows::split(m, size).to_vec();
        let mut x = rank.upload(&first);
        let mut y = rank.poisoned(DataType::BF16, &[counts[me], k]);
        let weights = [moving(1, me, size), moving(2, 0, 1)].map(|w| rank.upload(&w));
        rank.stream.sync(AMPLE).unwrap();
        for round in 0..rounds {
            let [twin, gather] = modes[round % modes.len()];
            let mut lease = rank.comm().lease(&streams[0]).unwrap();
            scatter(&mut lease, [&x, &weights[0]], &mut y, &counts, (twin, true)).unwrap();
            drop(lease);
            let mut lease = rank.comm().lease(&streams[1]).unwrap();
            let from = [&y, &weights[1]];
            gathered(&mut lease, from, &mut x, &counts, (gather, true)).unwrap();
        }
        settle(rank, &streams);
        let from = |i: usize| first.values[i / k * k + (i + 3 * rounds) % k];
        let want: Vec<_> = (0..m * k).map(from).collect();
        assert_eq!(rank.values(x.view()), want, "after {rounds} rounds");
    });
}

/// A twin of `x` and a weight that may be transposed, in a mode.
fn scatter(
    lease: &mut Lease<'_>,
    [x, weight]: [&Buffer; 2],
    d: &mut Buffer,
    counts: &[usize],
    (choice, transpose_weight): (Option<OverlapMode>, bool),
) -> Result<()> {
    let params = LoraLinearReduceScatterParams {
        output: Output::Into(d.view_mut()),
        transpose_weight,
        choice,
        ..LoraLinearReduceScatterParams::new(x, counts, weight)
    };
    lease.lora_linear_reduce_scatter(params).map(drop)
}

/// The same of a gather-linear.
fn gathered(
    lease: &mut Lease<'_>,
    [x, weight]: [&Buffer; 2],
    d: &mut Buffer,
    counts: &[usize],
    (choice, transpose_weight): (Option<OverlapMode>, bool),
) -> Result<()> {
    let params = AllGatherLoraLinearParams {
        output: Output::Into(d.view_mut()),
        transpose_weight,
        choice,
        ..AllGatherLoraLinearParams::new(Chunk::Copy(x.into()), counts, weight)
    };
    lease.all_gather_lora_linear(params).map(drop)
}

const M: usize = 12;
const K: usize = 16;
const N: usize = 8;
const LAST: usize = 8;

/// What weights are drawn for, in place of a day: the first of them.
const WEIGHTS: u64 = 1 << 40;

/// What a chain is made of.
#[derive(Clone, Copy)]
struct Kind {
    modes: Modes,
    /// Whether all is bf16, and weights are as tiles take them; else f32, and the other way round.
    half: bool,
    seed: u64,
}

impl Kind {
    /// Rows with so many ones or minus ones, of this rank and day: so few that all products stay whole numbers of bf16.
    fn few(&self, dims: [usize; 2], ones: usize, rank: usize, day: u64) -> Matrix {
        let dtype = if self.half {
            DataType::BF16
        } else {
            DataType::F32
        };
        Matrix::few(self.seed ^ (day << 8 | rank as u64), dtype, dims, ones)
    }

    fn x(&self, rank: usize, day: usize) -> Matrix {
        self.few([M, K], 2, rank, day as u64)
    }

    /// The weights of a rank, a row for each column of the result. These are at most 2, 4 for each rank, and four times the sum of those.
    fn weights(&self, rank: usize) -> [Matrix; 3] {
        [(0, [N, K], 8), (1, [K, N], 2), (2, [LAST, K], 4)]
            .map(|(which, dims, ones)| self.few(dims, ones, rank, WEIGHTS + which))
    }
}

/// A product, a linear whose sum is scattered, and a linear over what is gathered again: as a layer of a model has them.
struct Chain {
    kind: Kind,
    x: Buffer,
    h: Buffer,
    y: Buffer,
    d: Buffer,
    weights: [Buffer; 3],
    counts: Vec<usize>,
}

impl Chain {
    fn new(rank: &Rank, kind: Kind) -> Self {
        let counts = rows::split(M, rank.size).to_vec();
        let own = counts[rank.rank];
        let x = kind.x(rank.rank, 0);
        let weight = |w: Matrix| rank.upload(&if kind.half { w } else { w.transposed() });
        Self {
            kind,
            h: rank.poisoned(x.dtype, &[M, N]),
            y: rank.poisoned(x.dtype, &[own, K]),
            d: rank.poisoned(x.dtype, &[M, LAST]),
            x: rank.upload(&x),
            weights: kind.weights(rank.rank).map(weight),
            counts,
        }
    }

    fn call(&self, rank: &Rank) -> Result<()> {
        let [mut h, mut y, mut d] = [&self.h, &self.y, &self.d].map(Clone::clone);
        let [first, second, third] = &self.weights;
        let (modes, half) = (self.kind.modes, self.kind.half);
        let gemm = GemmParams {
            transpose_b: half,
            ..GemmParams::new(&self.x, first)
        };
        rank.device
            .gemm(&rank.stream, &gemm, Output::Into(h.view_mut()))?;
        let mut lease = rank.comm().lease(&rank.stream)?;
        let on = &mut lease;
        scatter(
            on,
            [&self.h, second],
            &mut y,
            &self.counts,
            (modes[0], half),
        )?;
        gathered(on, [&self.y, third], &mut d, &self.counts, (modes[1], half))
    }

    fn capture(&self, rank: &Rank) -> Box<dyn Replay> {
        rank.device
            .capture(&rank.stream, &mut || self.call(rank))
            .unwrap()
    }

    /// Runs with the input of a day, and asserts what comes out.
    fn check(&mut self, rank: &Rank, graph: &dyn Replay, day: usize) {
        let (kind, device) = (self.kind, &rank.device);
        let mine = kind.x(rank.rank, day).bytes();
        device
            .write(&rank.stream, self.x.view_mut(), &mine)
            .unwrap();
        for out in [&mut self.h, &mut self.y, &mut self.d] {
            device.fill(&rank.stream, out.view_mut(), 0xFF).unwrap();
        }
        let end = graph.launch(&rank.stream).unwrap();
        end.sync(AMPLE).unwrap();
        let product = |x: &Matrix, w: &Matrix| Matrix {
            dtype: x.dtype,
            dims: vec![M, w.rows()],
            values: oracle::multiply(x, false, w, true),
        };
        let parts = (0..rank.size).map(|r| {
            let [first, second, _] = kind.weights(r);
            product(&product(&kind.x(r, day), &first), &second)
        });
        let sum = parts.reduce(|mut sum, part| {
            let all = sum.values.iter_mut().zip(part.values);
            all.for_each(|(s, p)| *s += p);
            sum
        });
        let want = product(&sum.unwrap(), &kind.weights(rank.rank)[2]);
        let got = rank.values(self.d.view());
        assert_eq!(got, want.values, "day {day} of {:?}", kind.modes);
    }
}

/// Chains in every mode that both linears can be forced to, and in the plan's own; and in halves.
fn kinds(engines: Engines, rng: &mut StdRng) -> Vec<Kind> {
    let all = [
        OverlapMode::Off,
        OverlapMode::Chunked { pieces: 2 },
        OverlapMode::Ring,
    ];
    let mut modes: Vec<_> = all
        .into_iter()
        .filter(|&mode| engines.overlaps(mode))
        .map(|mode| ([Some(mode); 2], false))
        .collect();
    if engines.pull {
        modes.push(([None, Some(OverlapMode::Pull)], false));
    }
    modes.push(([None; 2], false));
    modes.extend(
        modes_of_halves(engines)
            .into_iter()
            .map(|modes| (modes, true)),
    );
    let kind = |(modes, half)| Kind {
        modes,
        half,
        seed: rng.random(),
    };
    modes.into_iter().map(kind).collect()
}

fn linears_in_one_graph(world: &World) {
    let kinds = kinds(world.backend.engines(), &mut world.rng());
    world.run(&config(), move |rank| {
        // All graphs are replayed in turn, so that they find each other's halves used.
        let mut chains: Vec<_> = kinds.iter().map(|&kind| Chain::new(rank, kind)).collect();
        for chain in &chains {
            chain.call(rank).unwrap();
            rank.stream.sync(Duration::from_secs(40)).unwrap();
        }
        let graphs: Vec<_> = chains.iter().map(|chain| chain.capture(rank)).collect();
        for day in 0..60 {
            for (chain, graph) in chains.iter_mut().zip(&graphs) {
                chain.check(rank, &**graph, day);
            }
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add_from(2, "chains/alternating_streams", alternating_streams);
    suite.add_from(
        2,
        "chains/sums_on_alternating_streams",
        sums_on_alternating_streams,
    );
    suite.add_from(
        2,
        "chains/linears_on_alternating_streams",
        linears_on_alternating_streams,
    );
    suite.add("chains/linears_in_one_graph", linears_in_one_graph);
}
