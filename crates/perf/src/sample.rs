//! Taking times: variants in turn, round by round.

use crate::ranks::{PATIENCE, Rank};
use anyhow::Result;
use brigade::{Queues, Replay, cuda::Stopwatch};

/// Rounds before anything is timed.
const WARM_UP: usize = 3;

/// One way of doing things: how often a round does it, and how.
pub struct Variant<'a> {
    pub name: &'static str,
    work: Work<'a>,
    calls: usize,
}

enum Work<'a> {
    Eager(Box<dyn FnMut() -> brigade::Result<()> + 'a>),
    Graph(Box<dyn Replay>),
}

impl<'a> Variant<'a> {
    /// Runs the call once, so that everything is loaded, and captures it if graphs are asked for.
    pub fn new(
        rank: &Rank,
        name: &'static str,
        (calls, graph): (usize, bool),
        mut call: impl FnMut() -> brigade::Result<()> + 'a,
    ) -> Result<Self> {
        for _ in 0..WARM_UP {
            call()?;
        }
        rank.on.sync(PATIENCE)?;
        rank.meet()?;
        let work = if graph {
            let mut round = || (0..calls).try_for_each(|_| call());
            Work::Graph(rank.device.capture(&rank.on, &mut round)?)
        } else {
            Work::Eager(Box::new(call))
        };
        rank.meet()?;
        Ok(Self { name, work, calls })
    }

    /// Microseconds of one call, as the mean of a round.
    fn round(&mut self, rank: &Rank) -> Result<f64> {
        rank.meet()?;
        let mut watch = Stopwatch::default();
        watch.start(&rank.device, &rank.on)?;
        match &mut self.work {
            Work::Eager(call) => (0..self.calls).try_for_each(|_| call())?,
            Work::Graph(graph) => drop(graph.launch(&rank.on)?),
        }
        watch.stop(&rank.device, &rank.on)?;
        let took = watch.elapsed(PATIENCE)?;
        rank.on.sync(PATIENCE)?;
        Ok(took.as_secs_f64() * 1e6 / self.calls as f64)
    }
}

/// What was measured of a variant.
#[derive(Clone, Debug)]
pub struct Times {
    pub name: &'static str,
    /// Median of the rounds, of the slowest rank in each.
    pub median: f64,
    pub p99: f64,
    pub samples: Vec<f64>,
}

impl Times {
    /// Of all rounds, of which there is one at least.
    pub fn new(name: &'static str, samples: Vec<f64>) -> Self {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let at = |part: f64| sorted.get((last as f64 * part).round() as usize);
        Self {
            name,
            median: at(0.5).copied().unwrap_or(f64::NAN),
            p99: at(0.99).copied().unwrap_or(f64::NAN),
            samples,
        }
    }
}

impl Times {
    /// Median of what each round took over what it took the other: what the machine did meanwhile met both.
    pub fn over(&self, other: &Self) -> f64 {
        let pairs = self.samples.iter().zip(&other.samples);
        let mut ratios: Vec<f64> = pairs.map(|(mine, other)| mine / other).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Measures all variants, in turn.
pub fn measure(rank: &Rank, variants: &mut [Variant<'_>], rounds: usize) -> Result<Vec<Times>> {
    let mut samples = vec![Vec::new(); variants.len()];
    for round in 0..WARM_UP + rounds {
        for (variant, samples) in variants.iter_mut().zip(&mut samples) {
            let mine = variant.round(rank)?;
            let slowest = rank.slowest(mine)?;
            if round >= WARM_UP {
                samples.push(slowest);
            }
        }
    }
    let all = variants.iter().zip(samples);
    Ok(all
        .map(|(v, samples)| Times::new(v.name, samples))
        .collect())
}
