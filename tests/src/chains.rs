//! Calls that follow each other: on streams that take turns, and all in one graph. Everything is small whole numbers, so that
//! every order of work gives the same bits.

use crate::{
    backend::Rank,
    faults::AMPLE,
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherLoraLinearParams, AllToAllParams, Buffer, Chunk, DataType, DeviceExt, GemmParams,
    LoraLinearReduceScatterParams, Output, OverlapMode, Replay, Result,
};
use brigade_plan::{Engines, rows};
use std::time::Duration;

/// Leases that alternate between two streams.
fn turns(size: usize) -> usize {
    if size <= 4 { 10_000 } else { 1000 }
}

/// Every call reads what the one before it, on the other stream, has written: a value goes round all ranks. One that came too
/// early would send an old one on.
fn alternating_streams(world: &World) {
    let turns = turns(world.size);
    world.run(&config(), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let streams = [rank.stream.clone(), rank.device.stream(0).unwrap()];
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
        streams[(turns + 1) % 2].sync(AMPLE).unwrap();
        streams[turns % 2].sync(AMPLE).unwrap();
        rank.comm().check().unwrap();
        let got: Vec<f32> = rank
            .device
            .download(&rank.stream, buffers[turns % 2].view())
            .unwrap();
        let origin = (me + size - turns % size) % size;
        assert_eq!(got, mine(100 + origin), "after {turns} turns");
    });
}

const M: usize = 12;
const K: usize = 16;
const N: usize = 8;
const LAST: usize = 5;

/// Small whole numbers that differ by place, rank and day.
fn whole(rows: usize, columns: usize, seed: usize) -> Vec<f32> {
    (0..rows * columns)
        .map(|i| ((i * 7 + seed * 13 + i / columns * 3) % 5) as f32 - 2.0)
        .collect()
}

fn product(x: &[f32], w: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let at = |i: usize, j: usize| (0..k).map(|l| x[i * k + l] * w[l * n + j]).sum();
    (0..m * n).map(|i| at(i / n, i % n)).collect()
}

/// A product, a linear whose sum is scattered, and a linear over what is gathered again: as a layer of a model has them.
struct Chain {
    x: Buffer,
    h: Buffer,
    y: Buffer,
    d: Buffer,
    weights: [Buffer; 3],
    counts: Vec<usize>,
    mode: Option<OverlapMode>,
}

/// The weights of a rank.
fn weights(rank: usize) -> [(Vec<f32>, [usize; 2]); 3] {
    [([K, N], 1), ([N, K], 2), ([K, LAST], 3)]
        .map(|(dims, seed)| (whole(dims[0], dims[1], seed + 10 * rank), dims))
}

impl Chain {
    fn new(rank: &Rank, mode: Option<OverlapMode>) -> Self {
        let counts = rows::split(M, rank.size).to_vec();
        let own = counts[rank.rank];
        let upload = |values: &[f32], dims: &[usize]| {
            rank.device.upload(&rank.stream, values, dims).unwrap()
        };
        Self {
            x: upload(&whole(M, K, 0), &[M, K]),
            h: rank.poisoned(DataType::F32, &[M, N]),
            y: rank.poisoned(DataType::F32, &[own, K]),
            d: rank.poisoned(DataType::F32, &[M, LAST]),
            weights: weights(rank.rank).map(|(values, dims)| upload(&values, &dims)),
            counts,
            mode,
        }
    }

    fn call(&self, rank: &Rank) -> Result<()> {
        let [mut h, mut y, mut d] = [&self.h, &self.y, &self.d].map(Clone::clone);
        let gemm = GemmParams::new(&self.x, &self.weights[0]);
        rank.device
            .gemm(&rank.stream, &gemm, Output::Into(h.view_mut()))?;
        let mut lease = rank.comm().lease(&rank.stream)?;
        lease.lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
            output: Output::Into(y.view_mut()),
            choice: self.mode.filter(|m| *m != OverlapMode::Pull),
            ..LoraLinearReduceScatterParams::new(&self.h, &self.counts, &self.weights[1])
        })?;
        lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            output: Output::Into(d.view_mut()),
            choice: self.mode,
            ..AllGatherLoraLinearParams::new(
                Chunk::Copy((&self.y).into()),
                &self.counts,
                &self.weights[2],
            )
        })?;
        Ok(())
    }

    fn capture(&self, rank: &Rank) -> Box<dyn Replay> {
        rank.device
            .capture(&rank.stream, &mut || self.call(rank))
            .unwrap()
    }

    /// Runs with the input of a day, and asserts what comes out.
    fn check(&mut self, rank: &Rank, graph: &dyn Replay, day: usize) {
        let x = |r: usize| whole(M, K, 31 * day + r);
        let mine = x(rank.rank);
        let bytes = bytemuck::cast_slice(&mine);
        let device = &rank.device;
        device
            .write(&rank.stream, self.x.view_mut(), bytes)
            .unwrap();
        for out in [&mut self.h, &mut self.y, &mut self.d] {
            device.fill(&rank.stream, out.view_mut(), 0xFF).unwrap();
        }
        let end = graph.launch(&rank.stream).unwrap();
        end.sync(AMPLE).unwrap();
        let mut sum = vec![0.0; M * K];
        for r in 0..rank.size {
            let [w1, w2, _] = weights(r);
            let h = product(&x(r), &w1.0, [M, K, N]);
            let part = product(&h, &w2.0, [M, N, K]);
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        let want = product(&sum, &weights(rank.rank)[2].0, [M, K, LAST]);
        let got: Vec<f32> = device.download(&rank.stream, self.d.view()).unwrap();
        assert_eq!(got, want, "day {day}");
    }
}

/// The modes that both linears can be forced to, and the plan's own.
fn modes(engines: Engines) -> Vec<Option<OverlapMode>> {
    let all = [
        OverlapMode::Off,
        OverlapMode::Chunked { pieces: 2 },
        OverlapMode::Ring,
        OverlapMode::Pull,
    ];
    let forced = all.into_iter().filter(|&mode| engines.overlaps(mode));
    forced.map(Some).chain([None]).collect()
}

fn linears_in_one_graph(world: &World) {
    let modes = modes(world.backend.engines());
    world.run(&config(), move |rank| {
        // All graphs are replayed in turn, so that they find each other's halves used.
        let mut chains: Vec<_> = modes.iter().map(|&mode| Chain::new(rank, mode)).collect();
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
    suite.add("chains/linears_in_one_graph", linears_in_one_graph);
}
