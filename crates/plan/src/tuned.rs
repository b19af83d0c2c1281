//! Which all-reduce is quickest on a model of GPU, and with how many blocks: figures as data, each with where it comes from.
//!
//! They are in `tables/all_reduce.json` of this crate, which a build holds, and before those count [the user's](crate::Entries). An
//! entry is chosen by what all ranks of a group know of their GPUs when they join; `brigade-perf tune` measures one. Where none was
//! measured, the usual figures hold, and say so.

use crate::{
    crossover::{Gpus, Links, Source, Whose},
    reason,
};
use brigade_device::{AllReduceAlgorithm as A, DataType, Error, Launch, Reason, Result as Checked};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

const EMBEDDED: &str = include_str!("../tables/all_reduce.json");

/// Threads of a block, of the kernels that push: whole warps, and no more than they are compiled for.
const MAX_THREADS: u16 = 512;

/// Threads of a warp.
const WARP: usize = 32;

/// The largest group of which launches were measured.
const MEASURED_RANKS: usize = 4;

/// What decides on an all-reduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Largest input, in bytes, that takes one shot.
    pub one_shot_max_bytes: usize,
    /// From so many bytes of input on, pulling is quicker than pushing; `None` if it is at no size. Smaller inputs push where
    /// the device does and its buffers have room.
    pub pull_from_bytes: Option<usize>,
    /// Most blocks of a kernel that pushes.
    pub max_blocks: u16,
    /// Threads of its blocks, where some number of them was measured to be quickest; by size, ascending.
    pub threads: Vec<Threads>,
    /// From so many bytes of input on, NCCL is quicker than all of Brigade's; `None` if it is at no size. It decides only where
    /// [NCCL's sums are allowed](brigade_device::NcclUse::Quicker).
    pub nccl_from_bytes: Option<usize>,
    /// Where the figures are from, for people. Empty for the host, whose figures are a rule.
    pub source: Cow<'static, str>,
}

/// Threads of a block for inputs of up to so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threads {
    /// Largest input, in bytes.
    pub max_bytes: usize,
    /// Whole warps, at most 512.
    pub threads: u16,
}

impl Figures {
    /// Whether inputs of so many bytes push.
    pub fn pushes(&self, bytes: usize) -> bool {
        self.pull_from_bytes.is_none_or(|from| bytes < from)
    }

    /// The launch of a kernel that pushes an input of so many bytes among `ranks`, of which a rank has so many granules, within a
    /// budget of multiprocessors: no block needs more than one.
    ///
    /// A granule for each thread. Where no number of threads was measured, blocks are small while there are few of them,
    /// since a block waits for its slowest thread. Large ones have 512 threads where launches were measured so. Of larger groups a
    /// rank has less of the same input, for which so large blocks are often half as many as there may be: there they have the warps that
    /// as many blocks need, so that all multiprocessors send.
    pub fn launch(
        &self,
        (bytes, ranks): (usize, usize),
        granules: usize,
        sm_budget: Option<u16>,
    ) -> Launch {
        let most = self.max_blocks.min(sm_budget.unwrap_or(u16::MAX)).max(1);
        let each = granules.div_ceil(usize::from(most));
        let measured = self.threads.iter().find(|t| bytes <= t.max_bytes);
        let threads = match measured {
            Some(measured) => measured.threads,
            None => match each {
                ..=128 => 128,
                129..=256 => 256,
                257..=512 if ranks > MEASURED_RANKS => each.next_multiple_of(WARP) as u16,
                _ => MAX_THREADS,
            },
        };
        let blocks = granules.div_ceil(usize::from(threads.max(1)));
        Launch {
            blocks: u16::try_from(blocks).unwrap_or(most).clamp(1, most),
            threads,
        }
    }

    /// The numbers that decide, for a vote. Lists go with their length, so that no two run together.
    fn numbers(&self) -> Vec<u64> {
        let Self {
            one_shot_max_bytes,
            pull_from_bytes,
            max_blocks,
            threads,
            nccl_from_bytes,
            source: _,
        } = self;
        let mut numbers = vec![
            *one_shot_max_bytes as u64,
            pull_from_bytes.map_or(u64::MAX, |bytes| bytes as u64),
            (*max_blocks).into(),
            nccl_from_bytes.map_or(u64::MAX, |bytes| bytes as u64),
            threads.len() as u64,
        ];
        numbers.extend(
            threads
                .iter()
                .flat_map(|t| [t.max_bytes as u64, t.threads.into()]),
        );
        numbers
    }
}

/// For every type of input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByType {
    /// f32
    pub f32: Figures,
    /// f16
    pub f16: Figures,
    /// bf16
    pub bf16: Figures,
}

impl ByType {
    /// The same for all types.
    pub fn all(figures: Figures) -> Self {
        Self {
            f32: figures.clone(),
            f16: figures.clone(),
            bf16: figures,
        }
    }

    /// Those of a type of input.
    pub fn of(&self, input: DataType) -> &Figures {
        match input {
            DataType::F32 => &self.f32,
            DataType::F16 => &self.f16,
            _ => &self.bf16,
        }
    }

    /// Each with its type.
    pub fn each(&self) -> [(Float, &Figures); 3] {
        [
            (Float::F32, &self.f32),
            (Float::F16, &self.f16),
            (Float::Bf16, &self.bf16),
        ]
    }

    /// The numbers that decide, for a vote.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.each().into_iter().flat_map(|(_, f)| f.numbers())
    }
}

/// Types that sums are made of, as files name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// f32
    F32,
    /// f16
    F16,
    /// bf16
    Bf16,
}

impl Float {
    /// Its name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// Sizes that were measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// The smallest input.
    pub from_bytes: usize,
    /// The largest.
    pub to_bytes: usize,
}

/// What it was measured with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// The CUDA that the driver offers.
    pub driver: String,
    /// The CUDA that kernels were compiled for.
    pub cuda: String,
    /// `null` if there was none to compare with.
    pub nccl: Option<String>,
}

/// What was measured on GPUs of a model, in groups of so many ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The model of GPU, as the driver calls it.
    pub gpu: String,
    /// How the GPUs reach each other.
    pub links: Links,
    /// In groups of so many ranks.
    pub ranks: usize,
    /// Of inputs of this type; of all that have no entry of their own, if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Float>,
    /// Largest input, in bytes, for which one shot is quicker than two.
    pub one_shot_max_bytes: usize,
    /// From so many bytes on pulling is quicker than pushing; `null` if at no size that was measured.
    pub pull_from_bytes: Option<usize>,
    /// Most blocks of a kernel that pushes: more are not quicker.
    pub max_blocks: u16,
    /// Threads of a block by size, where they were measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<Threads>,
    /// From so many bytes on NCCL is quicker than all of Brigade's; `null` if at no size that was measured. It decides where the caller
    /// [allows NCCL's sums](brigade_device::NcclUse::Quicker), which have an order of their own.
    pub nccl_from_bytes: Option<usize>,
    /// Which sizes were measured.
    pub measured: Sizes,
    /// With what.
    pub versions: Versions,
    /// How it came about.
    pub source: Source,
}

/// What holds where nothing was measured, in groups of up to so many ranks.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Untuned {
    #[serde(default = "any")]
    max_ranks: usize,
    one_shot_max_bytes: usize,
    pull_from_bytes: Option<usize>,
    max_blocks: u16,
    /// What they were derived from, for people.
    why: String,
}

fn any() -> usize {
    usize::MAX
}

/// A file of such figures.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    untuned: Vec<Untuned>,
    entries: Vec<Entry>,
    #[serde(skip)]
    own: Vec<Entry>,
}

impl File {
    /// That of this build.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn embedded() -> Result<Self, Reason> {
        Self::read(EMBEDDED)
    }

    /// From its text.
    ///
    /// # Errors
    /// [`ALL_REDUCES`](crate::reason::ALL_REDUCES) if it is no such file, or has launches that cannot be.
    pub fn read(text: &str) -> Result<Self, Reason> {
        let file: Self =
            serde_json::from_str(text).map_err(|e| reason::all_reduces(&e.to_string()))?;
        file.check()
            .map_err(|why| reason::all_reduces(&why.to_string()))?;
        Ok(file)
    }

    /// With entries of the user's, which count before those of the file.
    #[must_use]
    pub fn with(mut self, own: &[Entry]) -> Self {
        self.own.extend_from_slice(own);
        self
    }

    fn check(&self) -> Checked<()> {
        self.entries.iter().try_for_each(Entry::check)?;
        self.untuned.iter().try_for_each(|usual| {
            some_blocks(usual.max_blocks)?;
            some_words("untuned.why", &usual.why)
        })?;
        // The last one holds for groups of any size.
        match self.untuned.last().map(|last| last.max_ranks) {
            Some(most) if most == any() => Ok(()),
            last => Err(Error::invalid(
                "untuned.max_ranks",
                format!("{last:?} in the last one"),
                "none in the last one",
            )),
        }
    }

    /// All that was measured, in the file.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// For every type of input: the entry of these GPUs for it, else the one for all types, of the user's first, else the usual
    /// figures.
    pub fn of(&self, gpus: &Gpus) -> ByType {
        ByType {
            f32: self.one(gpus, Float::F32),
            f16: self.one(gpus, Float::F16),
            bf16: self.one(gpus, Float::Bf16),
        }
    }

    fn one(&self, gpus: &Gpus, dtype: Float) -> Figures {
        let fits = |e: &&Entry| gpus.are(&e.gpu, e.links, e.ranks);
        let among = |entries: &[Entry], whose| {
            let of_type =
                |dtype: Option<Float>| entries.iter().filter(fits).find(|e| e.dtype == dtype);
            let found = of_type(Some(dtype)).or_else(|| of_type(None));
            found.map(|entry| entry.figures(whose))
        };
        among(&self.own, Whose::User)
            .or_else(|| among(&self.entries, Whose::Build))
            .unwrap_or_else(|| self.usual(gpus))
    }

    fn usual(&self, gpus: &Gpus) -> Figures {
        let model = gpus.name();
        let (ranks, links) = (gpus.ranks, gpus.links);
        let usual = self.untuned.iter().find(|u| ranks <= u.max_ranks);
        // `check` has seen to it that there is one.
        let (one_shot_max_bytes, pull_from_bytes, max_blocks, why) =
            usual.map_or((0, None, 1, ""), |u| {
                let Untuned { why, .. } = u;
                (u.one_shot_max_bytes, u.pull_from_bytes, u.max_blocks, why)
            });
        Figures {
            one_shot_max_bytes,
            pull_from_bytes,
            max_blocks,
            threads: Vec::new(),
            nccl_from_bytes: None,
            source: format!(
                "untuned: nobody has measured {model} by {links} of {ranks} ranks; {why}"
            )
            .into(),
        }
    }
}

/// Figures that nobody measured say why they are what they are.
pub(crate) fn some_words(field: &'static str, why: &str) -> Checked<()> {
    match why.trim() {
        "" => Err(Error::invalid(field, "nothing", "a reason")),
        _ => Ok(()),
    }
}

fn some_blocks(max_blocks: u16) -> Checked<()> {
    match max_blocks {
        0 => Err(Error::invalid("max_blocks", 0, "at least 1")),
        _ => Ok(()),
    }
}

/// Whether a kernel that pushes can have so many threads in a block.
///
/// # Errors
/// [`Error::Invalid`] if they are no whole warps, none, or more than it is compiled for.
pub fn some_threads(threads: u16) -> Checked<()> {
    if threads.is_multiple_of(32) && (32..=MAX_THREADS).contains(&threads) {
        return Ok(());
    }
    Err(Error::invalid("threads", threads, "1 to 16 warps"))
}

impl Entry {
    /// Whether its launches can be.
    pub(crate) fn check(&self) -> Checked<()> {
        some_blocks(self.max_blocks)?;
        if !self.threads.is_sorted_by(|a, b| a.max_bytes < b.max_bytes) {
            let got: Vec<_> = self.threads.iter().map(|t| t.max_bytes).collect();
            let want = "sizes that ascend";
            return Err(Error::invalid(
                "threads.max_bytes",
                format!("{got:?}"),
                want,
            ));
        }
        self.threads
            .iter()
            .try_for_each(|t| some_threads(t.threads))
    }

    fn figures(&self, whose: Whose) -> Figures {
        Figures {
            one_shot_max_bytes: self.one_shot_max_bytes,
            pull_from_bytes: self.pull_from_bytes,
            max_blocks: self.max_blocks,
            threads: self.threads.clone(),
            nccl_from_bytes: self.nccl_from_bytes,
            source: self.told(whose).into(),
        }
    }

    /// In one line.
    fn told(&self, whose: Whose) -> String {
        let Self {
            gpu, links, ranks, ..
        } = self;
        let Versions { driver, cuda, nccl } = &self.versions;
        let Sizes {
            from_bytes,
            to_bytes,
        } = self.measured;
        let of = self
            .dtype
            .map_or(String::new(), |dtype| format!(" in {}", dtype.name()));
        let beside = match (nccl, self.nccl_from_bytes) {
            (None, _) => "no NCCL beside it".to_owned(),
            (Some(nccl), None) => format!("NCCL {nccl} quicker at no size"),
            (Some(nccl), Some(from)) => format!("NCCL {nccl} quicker from {from} bytes on"),
        };
        format!(
            "measured on {gpu} by {links} of {ranks} ranks{of}, {from_bytes} to {to_bytes} bytes, {}, driver {driver}, \
             cuda {cuda}, {beside}, {whose}",
            self.source.date
        )
    }
}

/// What an all-reduce's launch is and what the choice rests on, in one line for people. A pull has no launch of its own: its
/// steps and sums are launched as any other's.
pub fn told(algorithm: A, launch: Launch, figures: &Figures) -> String {
    let Launch { blocks, threads } = launch;
    let s = if blocks == 1 { "" } else { "s" };
    let launch = match algorithm {
        A::OneShotPush | A::TwoShotPush => {
            format!("{blocks} block{s} of {threads} threads on at most {blocks} SM{s}")
        }
        _ => String::new(),
    };
    let parts = [&launch[..], &figures.source];
    parts
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
}
