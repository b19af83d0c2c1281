//! A captured gather-linear, or its twin, in any mode; and thousands of its replays among stalls, which a hook makes, and where tiles
//! and copy engines ask none, other work of the same rank.

use super::{in_turn, replays, times_in_turn};
use crate::{
    backend::Rank,
    faults::AMPLE,
    gather_linear::config,
    inject::Jitter,
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
    themes::{modes, scatters, with_a_hook},
};
use brigade_device::{
    AllGatherLoraLinearParams, Buffer, Chunk, DataType, Event, LoraLinearReduceScatterParams,
    Output, OverlapMode, Replay, Result,
};
use brigade_plan::Engines;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::sync::Arc;

/// Rows of a rank, columns of the input and of the result: as many as tiles take.
pub(super) const ROWS: usize = 2;
const K: usize = 8;
pub(super) const N: usize = 8;

/// A linear, a mode, and numbers.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    scatters: bool,
    mode: OverlapMode,
    seed: u64,
}

/// Whose weight numbers are, in place of a day.
const WEIGHT: u32 = u32::MAX;

impl Kind {
    /// A gather-linear.
    pub fn gather(mode: OverlapMode, seed: u64) -> Self {
        Self {
            scatters: false,
            mode,
            seed,
        }
    }

    /// Small whole numbers, so that every result is exact in bf16 and no order of work shows.
    fn numbers(&self, rank: usize, day: u32, rows: usize, most: i32) -> Matrix {
        let day = u64::from(day) << 8 | rank as u64;
        let mut rng = StdRng::seed_from_u64(self.seed ^ day);
        let value = |_| f64::from(rng.random_range(-most..=most));
        Matrix {
            dtype: DataType::BF16,
            dims: vec![rows, K],
            values: (0..rows * K).map(value).collect(),
        }
    }

    /// What a rank brings on a day: its own rows, or all of them with its columns.
    pub(super) fn x(&self, rank: usize, size: usize, day: u32) -> Matrix {
        let rows = if self.scatters { size * ROWS } else { ROWS };
        self.numbers(rank, day, rows, 3)
    }

    fn weight(&self, rank: usize) -> Matrix {
        self.numbers(rank, WEIGHT, N, 1)
    }

    /// What is of one rank in another's D: the product of its rows, or its part of the sum.
    pub(super) fn part(&self, to: usize, from: usize, size: usize, day: u32) -> Vec<f64> {
        let x = self.x(from, size, day);
        let (x, weight) = match self.scatters {
            true => (x.slice(to * ROWS, ROWS), self.weight(from)),
            false => (x, self.weight(to)),
        };
        oracle::multiply(&x, false, &weight, true)
    }

    fn d(&self, rank: usize, size: usize, day: u32) -> Vec<f64> {
        let parts: Vec<_> = (0..size).map(|r| self.part(rank, r, size, day)).collect();
        match self.scatters {
            true => (0..ROWS * N)
                .map(|i| parts.iter().map(|p| p[i]).sum())
                .collect(),
            false => parts.concat(),
        }
    }
}

/// All that a device has, by name.
pub fn kinds(engines: Engines, rng: &mut StdRng) -> Vec<(String, Kind)> {
    let mut kinds = vec![];
    for (name, choices) in modes(engines) {
        let Some(mode) = choices[0] else { continue };
        let gather = Kind::gather(mode, rng.random());
        kinds.push((format!("gather_linear/{name}"), gather));
        if scatters(Some(mode)) {
            let twin = Kind {
                scatters: true,
                ..gather
            };
            kinds.push((format!("linear_reduce_scatter/{name}"), twin));
        }
    }
    kinds
}

/// One of them as a graph, with a copy of the gathered rows behind it.
pub struct Captured {
    graph: Box<dyn Replay>,
    kind: Kind,
    x: Buffer,
    d: Buffer,
    gathered: Option<Buffer>,
}

impl Captured {
    /// Captures it.
    pub fn new(rank: &Rank, kind: Kind) -> Self {
        Self::among(rank, kind, &|_| Ok(()))
    }

    /// The same with other work on its stream: before the call, as 0, and behind it, as 1, where what was gathered is still to be read.
    fn among(rank: &Rank, kind: Kind, other: &dyn Fn(usize) -> Result<()>) -> Self {
        let (me, size) = (rank.rank, rank.size);
        let x = rank.upload(&kind.x(me, size, 0));
        let weight = rank.upload(&kind.weight(me));
        let of_all = [size * ROWS, K];
        let gathered = (!kind.scatters).then(|| rank.poisoned(DataType::BF16, &of_all));
        let rows = if kind.scatters { ROWS } else { size * ROWS };
        let d = rank.poisoned(DataType::BF16, &[rows, N]);
        let (mut to, mut copy) = (d.clone(), gathered.clone());
        let counts = vec![ROWS; size];
        let work = &mut || {
            other(0)?;
            let mut lease = rank.lease();
            let output = Output::Into(to.view_mut());
            let Some(copy) = &mut copy else {
                lease.lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                    transpose_weight: true,
                    output,
                    choice: Some(kind.mode),
                    ..LoraLinearReduceScatterParams::new(&x, &counts, &weight)
                })?;
                return other(1);
            };
            let chunk = Chunk::Copy((&x).into());
            let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
                transpose_weight: true,
                output,
                choice: Some(kind.mode),
                ..AllGatherLoraLinearParams::new(chunk, &counts, &weight)
            })?;
            other(1)?;
            let all = result.a.operand()?.kernel();
            rank.device.copy(&rank.stream, copy.view_mut(), all)
        };
        Self {
            graph: rank.device.capture(&rank.stream, work).unwrap(),
            kind,
            x,
            d,
            gathered,
        }
    }

    /// Runs with the data of a day.
    pub(super) fn launch(&mut self, rank: &Rank, day: u32, fill: u8) -> Result<Event> {
        let (device, on) = (&rank.device, &rank.stream);
        let mine = self.kind.x(rank.rank, rank.size, day);
        device.write(on, self.x.view_mut(), &mine.bytes())?;
        for output in [&mut self.d].into_iter().chain(&mut self.gathered) {
            device.fill(on, output.view_mut(), fill)?;
        }
        self.graph.launch(on)
    }

    /// D and the gathered rows, none of the twin.
    pub(super) fn outputs(&self, rank: &Rank) -> [Vec<f64>; 2] {
        let gathered = self.gathered.as_ref();
        [
            rank.values(self.d.view()),
            gathered.map_or_else(Vec::new, |rows| rank.values(rows.view())),
        ]
    }

    /// Runs with the data of a day. Gives D and the gathered rows.
    pub(super) fn replay(&mut self, rank: &Rank, day: u32) -> [Vec<f64>; 2] {
        let end = self.launch(rank, day, 0xFF).unwrap();
        end.sync(AMPLE).unwrap();
        self.outputs(rank)
    }

    /// Runs with the data of a day, and asserts what comes out.
    pub fn check(&mut self, rank: &Rank, day: u32) {
        let [d, gathered] = self.replay(rank, day);
        let (kind, size) = (self.kind, rank.size);
        assert_eq!(
            d,
            kind.d(rank.rank, size, day),
            "D of replay {day}: {kind:?}"
        );
        if !kind.scatters {
            let rows = (0..size).map(|r| kind.x(r, size, day).values);
            let rows: Vec<_> = rows.collect();
            assert_eq!(
                gathered,
                rows.concat(),
                "gathered rows of replay {day}: {kind:?}"
            );
        }
    }
}

/// Every result of every replay is that of its day, wherever ranks are held up: graphs of both linears in all modes, in turn and through
/// the same memory.
fn under_stalls(world: &World) {
    let mut rng = world.rng();
    let jitter = Jitter::new(&mut rng, 20, 200);
    let kinds = kinds(with_a_hook(world.backend.engines()), &mut rng);
    world.run_injected(&config(), Arc::new(jitter), move |rank| {
        let graphs = kinds.iter().map(|&(_, kind)| Captured::new(rank, kind));
        let mut graphs: Vec<_> = graphs.collect();
        in_turn(rank, &mut graphs, |graph, day| graph.check(rank, day));
    });
}

/// Graphs of a kind, each with other work around the call.
const GRAPHS: usize = 4;

/// The same without a hook. Tiles ask none, and flags that copy engines write are posted by kernels where there is one: so this is how
/// they are, and what users have. Ranks are held up by what they do besides: on the host before a launch, and on the stream before the
/// graph, in it before the call, and in it between the call and who reads the gathered rows.
fn beside_fills(world: &World, name: &str) {
    let mut rng = world.rng();
    let all = kinds(world.backend.engines(), &mut rng);
    let kind = all.into_iter().find(|(n, _)| n == name).unwrap().1;
    let seed: u64 = rng.random();
    // Some microseconds, or tens of them.
    let fills_quickly = world.backend.reduces_millions();
    let most: usize = if fills_quickly { 128 << 20 } else { 256 << 10 };
    let times = match fills_quickly {
        true => replays(world.size),
        // Of which there are as many kinds as make up for it.
        false => replays(world.size) / 10,
    };
    world.run(&config(), move |rank| {
        // Every rank has stalls of its own.
        let mut rng = StdRng::seed_from_u64(seed ^ rank.rank as u64);
        let room = rank.poisoned(DataType::U8, &[most]);
        let fill = |bytes: usize| {
            let mut part = room.slice(0, bytes)?;
            rank.device.fill(&rank.stream, part.view_mut(), 0xA5)
        };
        let drawn = |rng: &mut StdRng| rng.random_range(1..=most) >> rng.random_range(0..8);
        let graphs = (0..GRAPHS).map(|_| {
            let bytes = [drawn(&mut rng).max(1), drawn(&mut rng).max(1)];
            Captured::among(rank, kind, &|place| fill(bytes[place]))
        });
        let mut graphs: Vec<_> = graphs.collect();
        // Making a graph may wait for the GPU, and so for a peer's replay where ranks share one.
        rank.meet();
        times_in_turn(times, &mut graphs, |graph, day| {
            if rng.random_ratio(1, 8) {
                rank.dawdle(rng.random_range(0..200));
            }
            if rng.random_ratio(1, 8) {
                fill(drawn(&mut rng).max(1)).unwrap();
            }
            graph.check(rank, day);
        });
    });
}

/// Adds the contracts.
pub(super) fn add(suite: &mut Suite) {
    let backend = suite.backend();
    let (engines, injects) = (backend.engines(), backend.injects());
    let worlds = backend.worlds().into_iter();
    let worlds: Vec<_> = worlds.filter(|size| matches!(size, 2..=4 | 8)).collect();
    // Names alone count here.
    let kinds = kinds(engines, &mut StdRng::seed_from_u64(0));
    for size in worlds {
        if injects {
            suite.add_at(size, "replays/under_stalls", under_stalls);
        }
        for (name, _) in &kinds {
            let of = name.clone();
            let name = format!("replays/{name}/beside_fills");
            suite.add_at(size, &name, move |world| beside_fills(world, &of));
        }
    }
}
