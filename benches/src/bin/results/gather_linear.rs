//! Gather-linear and its twin on two ranks of one thread each: the ring against no overlap.

use super::{Rounds, ratio, rounded};
use anyhow::{Result, ensure};
use brigade::{
    AllGatherLoraLinearParams, Buffer, Chunk, CommConfig, DataType, DeviceExt,
    LoraLinearReduceScatterParams, MemoryType, Output, OverlapMode, ParallelMode, Plan, plan::rows,
};
use brigade_benches::{Pairs, Rank, Shape, element, matrix, on_ranks, time_us};
use serde_json::{Value, json};

const RANKS: usize = 2;

/// SmolLM2's gate and up, of which a rank has 2 * 1536 / 2 outputs, for short prompts and long ones; and larger layers.
const GATHER: [(usize, usize, usize); 7] = [
    (34, 576, 1536),
    (64, 576, 1536),
    (128, 576, 1536),
    (256, 576, 1536),
    (512, 576, 1536),
    (512, 1024, 1024),
    (1024, 1024, 2048),
];

/// SmolLM2's down, of which a rank has 1536 / 2 inputs; and larger layers.
const SCATTER: [(usize, usize, usize); 7] = [
    (34, 768, 576),
    (64, 768, 576),
    (128, 768, 576),
    (256, 768, 576),
    (512, 768, 576),
    (512, 1024, 1024),
    (1024, 2048, 1024),
];

/// The two that are compared; the first is told as a multiple of the second.
const MODES: [OverlapMode; 2] = [OverlapMode::Ring, OverlapMode::Off];

/// What is measured.
#[derive(Clone, Copy)]
struct Case {
    twin: bool,
    /// Whether the weight is stored as `[N, K]`, as in model files, rather than as `[K, N]`.
    transposed: bool,
    shape: Shape,
}

/// One layer on one rank.
struct Layer<'r> {
    rank: &'r Rank,
    case: Case,
    shares: Vec<usize>,
    x: Buffer,
    weight: Buffer,
    d: Buffer,
}

/// Seeds of a rank's rows and of its weight.
fn seeds(rank: usize) -> [u64; 2] {
    [10 + rank as u64, 20 + rank as u64]
}

impl<'r> Layer<'r> {
    fn new(rank: &'r Rank, case: Case) -> Result<Self> {
        let Shape { m, k, n } = case.shape;
        let shares = rows::split(m, RANKS).to_vec();
        let own = shares[rank.number()];
        let (in_rows, out_rows) = if case.twin { (m, own) } else { (own, m) };
        let [x, weight] = seeds(rank.number());
        let (device, on) = (&*rank.device, &rank.on);
        let mut stored = matrix(device, on, DataType::F32, [n, k], weight)?;
        if !case.transposed {
            let empty = device.allocate(on, MemoryType::Device, DataType::F32, &[k, n])?;
            let from = std::mem::replace(&mut stored, empty);
            device.transpose(on, stored.view_mut(), from.view())?;
        }
        Ok(Self {
            rank,
            case,
            x: matrix(device, on, DataType::F32, [in_rows, k], x)?,
            weight: stored,
            d: device.allocate(on, MemoryType::Device, DataType::F32, &[out_rows, n])?,
            shares,
        })
    }

    fn call(&mut self, choice: Option<OverlapMode>) -> Result<Plan> {
        let mut lease = self.rank.comm.lease(&self.rank.on)?;
        let output = Output::Into(self.d.view_mut());
        Ok(if self.case.twin {
            let params = LoraLinearReduceScatterParams {
                transpose_weight: self.case.transposed,
                choice,
                output,
                ..LoraLinearReduceScatterParams::new(&self.x, &self.shares, &self.weight)
            };
            lease.lora_linear_reduce_scatter(params)?.plan
        } else {
            let chunk = Chunk::Copy((&self.x).into());
            let params = AllGatherLoraLinearParams {
                transpose_weight: self.case.transposed,
                choice,
                output,
                ..AllGatherLoraLinearParams::new(chunk, &self.shares, &self.weight)
            };
            lease.all_gather_lora_linear(params)?.plan
        })
    }

    /// An element of the result, summed in f64.
    fn want(&self, row: usize, column: usize) -> f64 {
        let me = self.rank.number();
        if self.case.twin {
            let first: usize = self.shares[..me].iter().sum();
            let part = |rank| element(self.case.shape, seeds(rank), first + row, column);
            (0..RANKS).map(part).sum()
        } else {
            let owner = usize::from(row >= self.shares[0]);
            let first: usize = self.shares[..owner].iter().sum();
            element(
                self.case.shape,
                [seeds(owner)[0], seeds(me)[1]],
                row - first,
                column,
            )
        }
    }

    /// Calls with a spoilt result, and looks at some elements of it.
    fn check(&mut self, choice: Option<OverlapMode>) -> Result<Plan> {
        let (device, on) = (&self.rank.device, &self.rank.on);
        device.fill(on, self.d.view_mut(), 0xFF)?;
        let plan = self.call(choice)?;
        let got: Vec<f32> = self.rank.device.download(&self.rank.on, self.d.view())?;
        let (rows, n) = (self.d.shape().rows(), self.case.shape.n);
        for i in 0..64 {
            let (row, column) = (i * 13 % rows, i * 31 % n);
            let want = self.want(row, column);
            let off = (f64::from(got[row * n + column]) - want).abs();
            let most = 1e-5 * (self.case.shape.k as f64).sqrt();
            ensure!(
                off <= most,
                "{plan}, {}: [{row}, {column}] is {off} off",
                self.case.shape
            );
        }
        Ok(plan)
    }
}

/// What a rank found: its times, and what would have been done of itself.
fn on_rank(rank: &Rank, case: Case, rounds: Rounds) -> Result<(Pairs, String)> {
    let mut layer = Layer::new(rank, case)?;
    for mode in MODES {
        let plan = layer.check(Some(mode))?;
        ensure!(
            plan.to_string() == mode.to_string(),
            "{plan} instead of {mode}"
        );
    }
    let chosen = layer.check(None)?;
    rank.meet()?;
    let once = time_us(2, || layer.call(Some(OverlapMode::Off)).map(drop))?;
    // All ranks must make as many calls: the first one decides.
    let calls = on_all(rank, rounds.calls(once))?;
    let pairs = Pairs::take(rounds.pairs, |which| {
        rank.meet()?;
        time_us(calls, || layer.call(Some(MODES[which])).map(drop))
    })?;
    Ok((pairs, chosen.to_string()))
}

/// The first rank's number, on all ranks.
fn on_all(rank: &Rank, number: usize) -> Result<usize> {
    let number = u32::try_from(number)?;
    let mut data = rank.device.upload(&rank.on, &[number], &[1])?;
    rank.comm
        .lease(&rank.on)?
        .broadcast(brigade::BroadcastParams {
            data: data.view_mut(),
            root: 0,
        })?;
    let number: Vec<u32> = rank.device.download(&rank.on, data.view())?;
    Ok(number[0] as usize)
}

fn row(case: Case, rounds: Rounds) -> Result<Value> {
    let Shape { m, k, n } = case.shape;
    let columns = if case.twin { n } else { k };
    let config = CommConfig::new(ParallelMode::Tp).for_linears(m, columns, DataType::F32, RANKS);
    let found = on_ranks(RANKS, &config, |rank| on_rank(rank, case, rounds))?;
    let pairs: Vec<Pairs> = found.iter().map(|(pairs, _)| pairs.clone()).collect();
    let pairs = Pairs::slowest(&pairs);
    let [least, median, most] = pairs.ratio();
    Ok(json!({
        "operation": if case.twin { "linear-reduce-scatter" } else { "gather-linear" },
        "ranks": RANKS,
        "m": m,
        "k": k,
        "n": n,
        "dtype": "f32",
        "weight": if case.transposed { "[n, k]" } else { "[k, n]" },
        "ring_us": rounded(pairs.median_us(0)),
        "off_us": rounded(pairs.median_us(1)),
        "ratio": ratio(median),
        "ratio_min": ratio(least),
        "ratio_max": ratio(most),
        "plan": found[0].1,
    }))
}

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let mut rows = Vec::new();
    for (twin, shapes) in [(false, GATHER), (true, SCATTER)] {
        for transposed in [true, false] {
            for (m, k, n) in shapes {
                let shape = Shape { m, k, n };
                let case = Case {
                    twin,
                    transposed,
                    shape,
                };
                rows.push(row(case, rounds)?);
            }
        }
    }
    Ok(rows)
}
