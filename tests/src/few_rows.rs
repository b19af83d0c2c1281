//! Products of few rows between sums over all ranks, as a layer has them when it gives a token to each of some sequences. Their weights stay as they are,
//! so a device may read them while a sum is still under way; rows it may not. All values are whole numbers that every type has.

use crate::{
    backend::Rank,
    faults::AMPLE,
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    AllReduceParams, Buffer, CommConfig, DataType, GemmParams, LoraLinearAllReduceParams,
    LoraLinearParams, Output, ParallelMode, ReduceOp, Replay, Result,
};
use rand::Rng;

const K: usize = 1032;
const N: usize = 136;
const LAST: usize = 72;
/// More than any day.
const WEIGHTS: u64 = 1 << 32;
/// How often all of it, one after the other.
const LAYERS: usize = 3;

#[derive(Clone, Copy)]
struct Kind {
    rows: usize,
    dtype: DataType,
    seed: u64,
}

impl Kind {
    /// Rows with so many ones or minus ones: all that comes of them are whole numbers up to 256.
    fn few(&self, dims: [usize; 2], ones: usize, rank: usize, which: u64) -> Matrix {
        let seed = self.seed ^ (which << 8 | rank as u64);
        Matrix::few(seed, self.dtype, dims, ones)
    }

    fn x(&self, rank: usize, day: u64) -> Matrix {
        self.few([self.rows, K], 2, rank, day)
    }

    fn weights(&self, rank: usize) -> [Matrix; 2] {
        [(0, [N, K], 8), (1, [LAST, N], 2)]
            .map(|(which, dims, ones)| self.few(dims, ones, rank, WEIGHTS + which))
    }
}

/// Product, sum, product, sum; all of it several times.
struct Chain {
    kind: Kind,
    x: Buffer,
    weights: [Buffer; 2],
    /// Whether a product and its sum are one call, and whether its product sends its parts then.
    together: Option<bool>,
    /// Of all ranks.
    known: Vec<[Matrix; 2]>,
    /// Of every layer.
    sums: Vec<[Buffer; 2]>,
}

impl Chain {
    fn new(rank: &Rank, kind: Kind, together: Option<bool>) -> Self {
        let new = |columns| rank.poisoned(kind.dtype, &[kind.rows, columns]);
        let chain = Self {
            kind,
            x: rank.upload(&kind.x(rank.rank, 0)),
            weights: kind.weights(rank.rank).map(|w| rank.upload(&w)),
            together,
            known: (0..rank.size).map(|r| kind.weights(r)).collect(),
            sums: (0..LAYERS).map(|_| [new(N), new(LAST)]).collect(),
        };
        rank.stream.sync(AMPLE).unwrap();
        chain
    }

    fn call(&self, rank: &Rank) -> Result<()> {
        for layer in &self.sums {
            let mut from = &self.x;
            for (weight, sum) in self.weights.iter().zip(layer) {
                let gemm = GemmParams {
                    transpose_b: true,
                    settled_b: true,
                    ..GemmParams::new(from, weight)
                };
                let mut out = sum.clone();
                from = sum;
                if let Some(sends) = self.together {
                    let params = LoraLinearAllReduceParams {
                        linear: LoraLinearParams { gemm, runs: &[] },
                        output: Output::Into(out.view_mut()),
                        choice: None,
                    };
                    let mut lease = rank.comm().lease(&rank.stream)?;
                    let done = lease.lora_linear_with_all_reduce(params)?;
                    assert_eq!(done.sent, sends, "{} rows", self.kind.rows);
                    continue;
                }
                rank.device
                    .gemm(&rank.stream, &gemm, Output::Into(out.view_mut()))?;
                let params = AllReduceParams {
                    data: out.view_mut(),
                    from: None,
                    op: ReduceOp::Sum,
                    choice: None,
                };
                rank.comm().lease(&rank.stream)?.all_reduce(params)?;
            }
        }
        Ok(())
    }

    /// Runs with the rows of a day, and asserts what comes out of every layer.
    fn check(&mut self, rank: &Rank, graph: Option<&dyn Replay>, day: u64) {
        let (kind, device) = (self.kind, &rank.device);
        let mine = kind.x(rank.rank, day).bytes();
        device
            .write(&rank.stream, self.x.view_mut(), &mine)
            .unwrap();
        for out in self.sums.iter_mut().flatten() {
            device.fill(&rank.stream, out.view_mut(), 0xFF).unwrap();
        }
        match graph {
            Some(graph) => graph.launch(&rank.stream).map(drop).unwrap(),
            None => self.call(rank).unwrap(),
        }
        rank.stream.sync(AMPLE).unwrap();
        let ranks = || 0..rank.size;
        let summed = |of: &dyn Fn(usize) -> Vec<f64>| {
            ranks().map(of).reduce(|mut sum, part| {
                sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
                sum
            })
        };
        let first = summed(&|r| oracle::multiply(&kind.x(r, day), false, &self.known[r][0], true));
        let middle = Matrix {
            dtype: kind.dtype,
            dims: vec![kind.rows, N],
            values: first.unwrap(),
        };
        let last = summed(&|r| oracle::multiply(&middle, false, &self.known[r][1], true));
        for layer in &self.sums {
            for (sum, want) in layer.iter().zip([&middle.values, last.as_ref().unwrap()]) {
                let got = rank.values(sum.view());
                assert_eq!(&got, want, "day {day}, {} rows", kind.rows);
            }
        }
    }
}

/// With products and sums in calls of their own, and in one.
fn between_sums(world: &World, sends: bool) {
    let mut rng = world.rng();
    let kinds: Vec<_> = [1, 5, 8, 13, 16]
        .into_iter()
        .zip([DataType::BF16, DataType::F16].into_iter().cycle())
        .map(|(rows, dtype)| Kind {
            rows,
            dtype,
            seed: rng.random(),
        })
        .collect();
    world.run(&CommConfig::new(ParallelMode::Tp), move |rank| {
        let sends = sends && (2..=4).contains(&rank.size);
        let mut chains: Vec<_> = kinds
            .iter()
            .flat_map(|&kind| [None, Some(sends)].map(|how| Chain::new(rank, kind, how)))
            .collect();
        for chain in &mut chains {
            for day in 0..3 {
                chain.check(rank, None, day);
            }
        }
        let capture = |chain: &Chain| {
            let mut call = || chain.call(rank);
            rank.device.capture(&rank.stream, &mut call).unwrap()
        };
        let graphs: Vec<_> = chains.iter().map(capture).collect();
        for day in 3..12 {
            for (chain, graph) in chains.iter_mut().zip(&graphs) {
                chain.check(rank, Some(&**graph), day);
            }
        }
    });
}

pub(crate) fn add(suite: &mut Suite) {
    let [sends, _] = suite.backend().sends_products();
    suite.add("few_rows/between_sums", move |world| {
        between_sums(world, sends);
    });
}
