//! A layer of experts on Brigade: router, dispatch, experts, combine.
//!
//! Every rank scores its tokens (a product in f32), chooses the experts of each, and sends rows in bf16 or fp8 to the ranks that have them.
//! There all experts multiply their rows in one product in groups, by the counts that the dispatch left on the device, and `combine` brings the
//! sums back. The host reads nothing between the calls, but in the first pass: only the weights of experts that were chosen are made.
//!
//! [`Outcome::compare`] evaluates tokens in f64 from the same weights, with no dispatch and no group, and says how far off the layer
//! was.
//!
//! ```
//! use brigade_demo::moe::{MoeShape, Options, RandomExperts, run};
//!
//! let source = RandomExperts { shape: MoeShape::small(), seed: 1 };
//! let outcome = run(&source, &Options { tokens: vec![3, 0, 5], ..Options::default() })?;
//! let agreement = outcome.compare(&source);
//! agreement.verdict()?;
//! assert_eq!(agreement.compared + agreement.unclear, 8);
//! # Ok::<(), brigade_demo::Error>(())
//! ```

mod compare;
mod layer;
mod shape;
mod weights;

pub use compare::Agreement;
pub use shape::{MoeShape, Scoring};
pub use weights::{ExpertSource, ExpertWeights, RandomExperts};

use crate::{
    Error, Result,
    parallel::{all_or_cause, threads_per_rank},
};
use brigade::{Bootstrap, Device, DeviceChoice, host::HostConfig};
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Duration};

/// How results of experts are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// Each travels back: [`CombineSum::Expert`](brigade::CombineSum::Expert).
    Expert,
    /// Each rank's sum does: [`CombineSum::ExpertByRank`](brigade::CombineSum::ExpertByRank).
    Rank,
}

/// How to run a layer.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tokens of each rank.
    pub tokens: Vec<usize>,
    /// How results are added up.
    pub sum: Sum,
    /// Cast rows to fp8 on the way to their experts.
    pub fp8: bool,
    /// Timed passes after the first, which loads weights. All must give the same bits.
    pub repeats: usize,
    /// Where ranks compute. On GPUs each takes the next, and shares them where there are fewer.
    pub device: DeviceChoice,
    /// Every wait between ranks ends after this, but for those in which weights are made.
    pub deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tokens: vec![4; 2],
            sum: Sum::Rank,
            fp8: false,
            repeats: 3,
            device: DeviceChoice::Auto,
            deadline: Duration::from_secs(60),
        }
    }
}

impl Options {
    fn max_tokens(&self) -> usize {
        self.tokens.iter().max().copied().unwrap_or(0)
    }

    fn on_gpus(&self) -> bool {
        self.device == DeviceChoice::Cuda
    }

    fn check(&self, shape: &MoeShape) -> Result<()> {
        shape.check()?;
        for (field, got) in [
            ("ranks", self.tokens.len()),
            ("tokens", self.tokens.iter().sum()),
            ("repeats", self.repeats),
        ] {
            if got == 0 {
                return Err(Error::field(field, got, "at least 1"));
            }
        }
        Ok(())
    }
}

/// What the layer made of a token that is to be compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sampled {
    /// Its number, counted over all ranks.
    pub token: usize,
    /// Its experts, best first.
    pub experts: Vec<u32>,
    /// The bits of its row, in bf16.
    pub bits: Vec<u16>,
}

/// What one rank has to say at the end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankReport {
    /// Name of its device.
    pub device: String,
    /// What it made of those of its tokens that are to be compared.
    pub sampled: Vec<Sampled>,
    /// Rows that came for each of its experts.
    pub rows_per_slot: Vec<usize>,
    /// Bytes of weights that it holds: of the experts that rows came for.
    pub weight_bytes: u64,
    /// Plans of dispatch and combine.
    pub plans: [String; 2],
    /// The first repeat that gave other bits.
    pub differing: Option<usize>,
    /// Of router, dispatch, experts and combine, in every repeat.
    pub times: Vec<[Duration; 4]>,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The layer's dimensions.
    pub shape: MoeShape,
    /// How it ran.
    pub options: Options,
    /// What each rank said.
    pub ranks: Vec<RankReport>,
}

impl Outcome {
    fn new(shape: &MoeShape, options: &Options, ranks: Vec<RankReport>) -> Result<Self> {
        for (rank, report) in ranks.iter().enumerate() {
            if let Some(repeat) = report.differing {
                return Err(Error::OtherBits { rank, repeat });
            }
        }
        Ok(Self {
            shape: shape.clone(),
            options: options.clone(),
            ranks,
        })
    }

    /// Median times of router, dispatch, experts and combine, each on the rank where it is longest. Waits for slower ranks are in
    /// them.
    pub fn medians(&self) -> [Duration; 4] {
        let of = |report: &RankReport, step: usize| {
            let mut times: Vec<Duration> = report.times.iter().map(|t| t[step]).collect();
            times.sort();
            times.get(times.len() / 2).copied().unwrap_or_default()
        };
        std::array::from_fn(|step| {
            let all = self.ranks.iter().map(|report| of(report, step));
            all.max().unwrap_or_default()
        })
    }

    /// Rows that came to each rank: a token's for every expert that it chose there.
    pub fn rows_per_rank(&self) -> Vec<usize> {
        let of = |r: &RankReport| r.rows_per_slot.iter().sum();
        self.ranks.iter().map(of).collect()
    }

    /// Experts that got rows.
    pub fn experts_used(&self) -> usize {
        let slots = self.ranks.iter().flat_map(|r| &r.rows_per_slot);
        slots.filter(|&&rows| rows > 0).count()
    }
}

/// Runs a layer with ranks that are threads.
///
/// # Errors
/// [`Error::Field`] for options that cannot be, and for weights that there is no memory for; [`Error::OtherBits`] if a repeat
/// differs; else the error of the first rank that has one of its own.
pub fn run(source: &dyn ExpertSource, options: &Options) -> Result<Outcome> {
    options.check(source.shape())?;
    let ranks = brigade::group::threads(options.tokens.len());
    let reports = std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for boot in ranks {
            let handle = std::thread::Builder::new()
                .name(format!("rank {} compute", boot.rank()))
                .spawn_scoped(scope, move || run_rank(source, options, &boot))
                .map_err(|e| {
                    Error::field("ranks", options.tokens.len(), format!("threads: {e}"))
                })?;
            handles.push(handle);
        }
        let panicked = || Error::field("rank", "panicked", "an answer");
        // All are joined, also behind one that failed.
        let results: Vec<_> = handles
            .into_iter()
            .map(|h| h.join().unwrap_or_else(|_| Err(panicked())))
            .collect();
        all_or_cause(results)
    })?;
    Outcome::new(source.shape(), options, reports)
}

/// As [`run`], by a group of processes: this one is the rank that `boot` says, and all give the same outcome.
///
/// # Errors
/// As [`run`], but each rank has its own error.
pub fn run_as_rank(
    source: &dyn ExpertSource,
    options: &Options,
    boot: &dyn Bootstrap,
) -> Result<Outcome> {
    options.check(source.shape())?;
    if options.tokens.len() != boot.size() {
        let want = boot.size().to_string();
        return Err(Error::field("ranks", options.tokens.len(), want));
    }
    let report = run_rank(source, options, boot)?;
    let unreadable = |e: serde_json::Error| Error::field("report of a rank", e, "JSON");
    let mine = serde_json::to_vec(&report).map_err(unreadable)?;
    let all = boot.all_gather(&mine, options.deadline)?;
    let all: Result<Vec<RankReport>> = all
        .iter()
        .map(|report| serde_json::from_slice(report).map_err(unreadable))
        .collect();
    Outcome::new(source.shape(), options, all?)
}

fn run_rank(
    source: &dyn ExpertSource,
    options: &Options,
    boot: &dyn Bootstrap,
) -> Result<RankReport> {
    let sample = compare::sample(source.shape(), options.tokens.iter().sum());
    let device = open(options, boot)?;
    layer::Layer::new(source, options, boot, device)?.run(&sample)
}

fn open(options: &Options, boot: &dyn Bootstrap) -> Result<Arc<dyn Device>> {
    let gpus = match options.on_gpus() {
        true => brigade::cuda::devices().map_or(1, |all| all.len()),
        false => 1,
    };
    Ok(brigade::open(&brigade::OpenConfig {
        device: options.device,
        host: HostConfig {
            threads: threads_per_rank(options.tokens.len()),
            ..HostConfig::default()
        },
        gpu: boot.rank() % gpus,
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(differing: Option<usize>, times: &[u64]) -> RankReport {
        RankReport {
            device: "host".into(),
            sampled: Vec::new(),
            rows_per_slot: vec![1],
            weight_bytes: 0,
            plans: Default::default(),
            differing,
            times: times
                .iter()
                .map(|&t| [Duration::from_millis(t); 4])
                .collect(),
        }
    }

    #[test]
    fn other_bits_are_an_error_that_names_rank_and_repeat() {
        let of = |differing| {
            let reports = vec![report(None, &[]), report(differing, &[])];
            Outcome::new(&MoeShape::small(), &Options::default(), reports)
        };
        of(None).unwrap();
        let told = of(Some(2)).unwrap_err().to_string();
        assert_eq!(
            told,
            "repeat 2 gave other bits on rank 1 than the first pass"
        );
    }

    #[test]
    fn times_are_those_of_the_slowest_rank() {
        let outcome = Outcome {
            shape: MoeShape::small(),
            options: Options::default(),
            ranks: vec![report(None, &[9, 1, 2]), report(None, &[1, 3, 8])],
        };
        assert_eq!(outcome.medians(), [Duration::from_millis(3); 4]);
    }
}
