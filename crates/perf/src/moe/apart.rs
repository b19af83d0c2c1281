//! What an exchange in two halves leaves to its caller: each half alone, and a product between them while its receive is pending.

use super::case::Case;
use crate::{
    data,
    ranks::{PATIENCE, Rank},
    sample::Times,
};
use anyhow::Result;
use brigade::{Buffer, DataType, GemmParams, Linear, Output, cuda::Stopwatch};

/// Rows and columns of both factors of the product: many times what the multiprocessors of a GPU take at once.
const SIDE: usize = 8192;

/// Times of both, of the slowest rank in each round; none of an exchange that is not in two halves.
pub fn times(case: &Case<'_>, made: &Buffer) -> Result<Vec<Times>> {
    if !case.options.in_slots() {
        return Ok(Vec::new());
    }
    let names = [
        "dispatch_send",
        "dispatch_receive",
        "combine_send",
        "combine_receive",
    ];
    let mut times = rounds(case, names, || halves(case, made))?;
    let mut product = Product::new(case.rank)?;
    times.extend(rounds(case, ["gemm", "gemm_pending"], || {
        product.beside(case)
    })?);
    Ok(times)
}

/// All rounds, after one that loads what is needed.
fn rounds<const N: usize>(
    case: &Case<'_>,
    names: [&'static str; N],
    mut round: impl FnMut() -> Result<[f64; N]>,
) -> Result<Vec<Times>> {
    round()?;
    let mut samples = [const { Vec::new() }; N];
    for _ in 0..case.options.common.rounds {
        for (samples, mine) in samples.iter_mut().zip(round()?) {
            samples.push(case.rank.slowest(mine)?);
        }
    }
    let all = names.into_iter().zip(samples);
    Ok(all.map(|(name, all)| Times::new(name, all)).collect())
}

/// Runs between two events of the stream.
fn between<R>(
    rank: &Rank,
    watch: &mut Stopwatch,
    work: impl FnOnce() -> brigade::Result<R>,
) -> brigade::Result<R> {
    watch.start(&rank.device, &rank.on)?;
    let done = work()?;
    watch.stop(&rank.device, &rank.on)?;
    Ok(done)
}

/// A round's calls, outside of graphs: means of what each call notes, in microseconds.
fn noted<const N: usize>(
    case: &Case<'_>,
    mut call: impl FnMut(&mut [Stopwatch; N]) -> brigade::Result<()>,
) -> Result<[f64; N]> {
    let calls = case.options.common.calls.max(1);
    let mut watches = Vec::new();
    case.rank.meet()?;
    for _ in 0..calls {
        let mut of_call = std::array::from_fn(|_| Stopwatch::default());
        call(&mut of_call)?;
        watches.push(of_call);
    }
    let mut sums = [0.0; N];
    for of_call in &watches {
        for (sum, watch) in sums.iter_mut().zip(of_call) {
            *sum += watch.elapsed(PATIENCE)?.as_secs_f64() * 1e6 / calls as f64;
        }
    }
    case.rank.on.sync(PATIENCE)?;
    Ok(sums)
}

/// A send and a receive there, and a send and a receive back.
fn halves(case: &Case<'_>, made: &Buffer) -> Result<[f64; 4]> {
    let rank = case.rank;
    noted(case, |[send, receive, send_back, receive_back]| {
        let comm = case.among.comm()?;
        let (mut lease, mut exchange) = (comm.lease(&rank.on)?, comm.low_latency()?);
        let slot = exchange.slots().0;
        let pending = between(rank, send, || {
            lease.low_latency_dispatch(slot, case.way_there())
        })?;
        let there = between(rank, receive, || case.receive(&mut lease, pending))?;
        let back = between(rank, send_back, || {
            lease.low_latency_combine(&there, case.way_back(made.view()))
        })?;
        let output = Output::Allocate(DataType::BF16);
        between(rank, receive_back, || back.receive(&mut lease, output)).map(drop)
    })
}

/// A product that wants the whole GPU.
struct Product {
    factors: [Buffer; 2],
    d: Buffer,
}

impl Product {
    fn new(rank: &Rank) -> Result<Self> {
        let (device, on) = (&rank.device, &rank.on);
        let shape = [SIDE, SIDE];
        let numbers = data::numbers(600, SIDE * SIDE);
        let factor = || data::upload(device, on, &numbers, shape);
        Ok(Self {
            factors: [factor()?, factor()?],
            d: data::poisoned(device, on, shape)?,
        })
    }

    /// Alone, and then between the halves of an exchange: what is sent to this rank may come meanwhile, and nobody has asked for it yet.
    fn beside(&mut self, case: &Case<'_>) -> Result<[f64; 2]> {
        let rank = case.rank;
        let [a, b] = &self.factors;
        let d = &mut self.d;
        let mut multiply = || {
            let p = GemmParams {
                transpose_b: true,
                ..GemmParams::new(a, b)
            };
            let product = rank.device.gemm(&rank.on, &p, Output::Into(d.view_mut()));
            product.map(drop)
        };
        noted(case, |[alone, beside]| {
            between(rank, alone, &mut multiply)?;
            let comm = case.among.comm()?;
            let (mut lease, mut exchange) = (comm.lease(&rank.on)?, comm.low_latency()?);
            let pending = lease.low_latency_dispatch(exchange.slots().0, case.way_there())?;
            between(rank, beside, &mut multiply)?;
            case.receive(&mut lease, pending).map(drop)
        })
    }
}
