//! From which size on overlap pays on a model of GPU: figures as data, each with where it comes from.
//!
//! They are in `tables/crossovers.json` of this crate, which a build holds, and before those count [the user's](crate::Entries). A
//! figure is chosen by what all ranks of a group know of their GPUs when they join; `brigade-perf crossover` measures one.

use crate::overlap::Product;
use brigade_device::{QScheme, Reason};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};

const EMBEDDED: &str = include_str!("../tables/crossovers.json");

/// What must be large enough for overlap to pay, as files name it: `{"outputs": 6291456}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Least {
    /// Bytes of the mean chunk: on the host, where copying them must take longer than waking a thread.
    ChunkBytes(usize),
    /// Elements that a rank's whole product has, one for each row of all ranks and column of its own: on GPUs, whose multiprocessors
    /// must have more than one tile each for something to be done while rows travel.
    Outputs(usize),
    /// Multiplications of that product, one for each of its elements and of the inner dimension: for gathers of fp8 on GPUs, whose chunks are
    /// products of the library, each of which must take longer than to launch it.
    Multiplications(usize),
}

impl Least {
    /// What a call has of it, of which the mean chunk has so many bytes.
    pub(crate) fn had(self, product: Product, chunk_bytes: usize) -> Self {
        match self {
            Self::ChunkBytes(_) => Self::ChunkBytes(chunk_bytes),
            Self::Outputs(_) => Self::Outputs(product.outputs),
            Self::Multiplications(_) => Self::Multiplications(product.multiplications),
        }
    }

    /// How many.
    pub const fn count(self) -> usize {
        match self {
            Self::ChunkBytes(count) | Self::Outputs(count) | Self::Multiplications(count) => count,
        }
    }

    /// All that it decides, as numbers.
    pub(crate) fn numbers(this: Option<Self>) -> [u64; 2] {
        let kind = match this {
            None => 0,
            Some(Self::ChunkBytes(_)) => 1,
            Some(Self::Outputs(_)) => 2,
            Some(Self::Multiplications(_)) => 3,
        };
        [kind, this.map_or(0, Self::count) as u64]
    }
}

impl fmt::Display for Least {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ChunkBytes(bytes) => write!(f, "chunks of {bytes} bytes"),
            Self::Outputs(outputs) => write!(f, "products of {outputs} elements"),
            Self::Multiplications(count) => write!(f, "products of {count} multiplications"),
        }
    }
}

/// From where on overlap pays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crossover {
    /// `None` if overlap paid at no size that was measured.
    pub least: Option<Least>,
    /// Where the figure is from, for people. Empty for the host, whose figure is a rule.
    pub source: Cow<'static, str>,
}

/// The same for every type of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crossovers {
    /// bf16; f16 and f32 go by it too.
    pub bf16: Crossover,
    /// int8 with a scale for each row.
    pub int8: Crossover,
    /// fp8 with one scale.
    pub fp8: Crossover,
}

impl Crossovers {
    /// One for all types.
    pub(crate) const fn all(least: Least) -> Self {
        const fn one(least: Least) -> Crossover {
            Crossover {
                least: Some(least),
                source: Cow::Borrowed(""),
            }
        }
        Self {
            bf16: one(least),
            int8: one(least),
            fp8: one(least),
        }
    }

    /// That of rows quantized so.
    pub fn of(&self, scheme: QScheme) -> &Crossover {
        match scheme {
            QScheme::Int8PerToken => &self.int8,
            QScheme::Fp8PerTensor => &self.fp8,
            _ => &self.bf16,
        }
    }

    /// Each with its type.
    pub fn each(&self) -> [(RowType, &Crossover); 3] {
        [
            (RowType::Bf16, &self.bf16),
            (RowType::Int8, &self.int8),
            (RowType::Fp8, &self.fp8),
        ]
    }
}

/// The operations that overlap, as files name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlapped {
    /// Gather-linear, whose chunks are rows.
    GatherLinear,
    /// Its twin, whose chunks are parts of sums.
    ReduceScatterLinear,
}

/// What rows are made of, as files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    /// Also for f16 and f32.
    Bf16,
    /// With a scale for each row.
    Int8,
    /// e4m3, with one scale.
    Fp8,
}

/// How the GPUs of a group reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Links {
    /// NVLink, all of them.
    Nvlink,
    /// PCIe, some of them at least.
    Pcie,
    /// Ranks share a GPU.
    Shared,
    /// Not all ranks can tell.
    Unknown,
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvlink => "nvlink",
            Self::Pcie => "pcie",
            Self::Shared => "shared",
            Self::Unknown => "unknown",
        })
    }
}

/// The GPUs of a group: the same on all of its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// The model of all of them, as the driver calls it; `None` where they are not of one.
    pub model: Option<String>,
    /// How they reach each other.
    pub links: Links,
    /// Ranks in the group.
    pub ranks: usize,
}

impl Gpus {
    /// Whether they are of a model, so linked, and so many.
    pub(crate) fn are(&self, model: &str, links: Links, ranks: usize) -> bool {
        self.model.as_deref() == Some(model) && (self.links, self.ranks) == (links, ranks)
    }

    /// The model of all of them, for people.
    pub(crate) fn name(&self) -> &str {
        self.model.as_deref().unwrap_or("several models of GPU")
    }
}

/// In whose table an entry stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user gave it.
    User,
    /// This build holds it.
    Build,
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::User => "in the user's table",
            Self::Build => "in the table of this build",
        })
    }
}

/// How a figure came about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The command that measured it.
    pub command: String,
    /// YYYY-MM-DD
    pub date: String,
    /// At which commit.
    pub commit: String,
    /// What else there is to know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The model of GPU, as the driver calls it.
    pub gpu: String,
    /// How the GPUs reach each other.
    pub links: Links,
    /// In groups of so many ranks; in all that have no entry of their own, if left out. Groups of which nobody measured anything go by
    /// the entry of the next size, and say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// Of which operation.
    pub operation: Overlapped,
    /// Of which rows.
    pub dtype: RowType,
    /// From where on overlap pays; `null` if it paid at no size that was measured.
    #[serde(deserialize_with = "Option::deserialize")]
    pub least: Option<Least>,
    /// How it came about.
    pub source: Source,
}

/// What holds where nothing was measured.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unmeasured {
    least: Least,
    source: Note,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    note: String,
}

/// A file of figures.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    default: Unmeasured,
    entries: Vec<Entry>,
    #[serde(skip)]
    own: Vec<Entry>,
}

impl Figures {
    /// Those that this build holds.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn embedded() -> Result<Self, Reason> {
        Self::read(EMBEDDED)
    }

    /// Those of a file's text.
    ///
    /// # Errors
    /// [`CROSSOVERS`](crate::reason::CROSSOVERS) if it is no such file.
    pub fn read(text: &str) -> Result<Self, Reason> {
        serde_json::from_str(text).map_err(|e| crate::reason::crossovers(&e.to_string()))
    }

    /// With entries of the user's, which count before those of the file.
    #[must_use]
    pub fn with(mut self, own: &[Entry]) -> Self {
        self.own.extend_from_slice(own);
        self
    }

    /// All figures of the file but the default.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// For every type of rows: the entry of these GPUs in groups of this size, else the one for all sizes, of the user's first; else that
    /// of the size that is nearest, else the default. The last two say that they were not measured so.
    pub fn of(&self, gpus: &Gpus, operation: Overlapped) -> Crossovers {
        let of = |dtype| self.one(gpus, operation, dtype);
        Crossovers {
            bf16: of(RowType::Bf16),
            int8: of(RowType::Int8),
            fp8: of(RowType::Fp8),
        }
    }

    fn one(&self, gpus: &Gpus, operation: Overlapped, dtype: RowType) -> Crossover {
        let fits = |e: &&Entry| {
            (Some(&e.gpu), e.links) == (gpus.model.as_ref(), gpus.links)
                && (e.operation, e.dtype) == (operation, dtype)
        };
        let tables = [(&self.own, Whose::User), (&self.entries, Whose::Build)];
        for (entries, whose) in tables {
            let of_size =
                |ranks: Option<usize>| entries.iter().filter(fits).find(|e| e.ranks == ranks);
            if let Some(entry) = of_size(Some(gpus.ranks)).or_else(|| of_size(None)) {
                return Crossover {
                    least: entry.least,
                    source: entry.told(whose).into(),
                };
            }
        }
        let all = tables.into_iter().flat_map(|(entries, whose)| {
            let fitting = entries.iter().filter(fits);
            fitting.map(move |entry| (entry, whose))
        });
        // Of two that are as near, the smaller one; of two of one size, the user's.
        let far = |(e, _): &(&Entry, Whose)| {
            let ranks = e.ranks?;
            Some((ranks.abs_diff(gpus.ranks), ranks))
        };
        match all.min_by_key(far) {
            Some((entry, whose)) => Crossover {
                least: entry.least,
                source: format!(
                    "untuned: not measured at {} ranks; the figure of {}",
                    gpus.ranks,
                    entry.told(whose)
                )
                .into(),
            },
            None => Crossover {
                least: Some(self.default.least),
                source: format!("default, {}", self.default.source.note).into(),
            },
        }
    }
}

impl Entry {
    /// In one line.
    fn told(&self, whose: Whose) -> String {
        let ranks = match self.ranks {
            Some(ranks) => format!(" of {ranks} ranks"),
            None => String::new(),
        };
        let Source { date, commit, .. } = &self.source;
        format!(
            "{} by {}{ranks}, {date}, commit {commit}, {whose}",
            self.gpu, self.links
        )
    }
}
