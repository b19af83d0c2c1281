//! Which transport is quickest for rows to experts and back, on a model of GPU: figures as data, each with where it comes from.
//!
//! They are in `tables/experts.json` of this crate, which a build holds, and before those count [the user's](crate::Entries). An entry
//! is chosen by what all ranks of a group know of their GPUs when they join; `brigade-perf tune-experts` measures one. Where none was
//! measured, the usual figures hold, and say so.
//!
//! Bytes are those that may come to a rank in one call ([`arriving_bytes`](crate::experts::arriving_bytes)).

use crate::{
    crossover::{Gpus, Links, Source, Whose},
    reason,
    records::MOST_BLOCKS,
    tuned::{Versions, some_words},
};
use brigade_device::{DispatchCall, Error, Reason, Result as Checked, Transport};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

const EMBEDDED: &str = include_str!("../tables/experts.json");

/// What decides on a transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Most bytes that are pushed; what is more goes one-sided. `None` if nothing is pushed.
    pub push_max_bytes: Option<usize>,
    /// The same of rows that go back.
    pub push_back_max_bytes: Option<usize>,
    /// Most of either for each multiprocessor of a budget, where the budget keeps rows from all of a kernel's blocks.
    pub push_max_bytes_per_sm: usize,
    /// How many rows of a sender go through a half of a dispatch at a time where more could: while they are taken, the next are on their
    /// way. `None` if as many as fit.
    pub rows_at_a_time: Option<usize>,
    /// What the caller may ask for. It decides nothing.
    pub others: Vec<Other>,
    /// Where the figures are from, for people. Empty for the host, whose figures are a rule.
    pub source: Cow<'static, str>,
}

/// A transport that no plan takes by itself, and where it was quicker than the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Other {
    /// Which one.
    pub transport: Asked,
    /// From so many bytes on; `null` if at no size that was measured.
    pub from_bytes: Option<usize>,
}

/// Transports that are only asked for, as files name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Asked {
    /// [`Transport::InPlace`]
    InPlace,
    /// [`Transport::Gather`]
    Gather,
    /// [`Transport::Fifo`]
    Fifo,
}

impl Asked {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::InPlace, Self::Gather, Self::Fifo];

    /// As calls name it.
    pub const fn transport(self) -> Transport {
        match self {
            Self::InPlace => Transport::InPlace,
            Self::Gather => Transport::Gather,
            Self::Fifo => Transport::Fifo,
        }
    }

    /// Why no plan takes it by itself, however quick it is.
    const fn why(self) -> &'static str {
        match self {
            Self::InPlace => "rows are lent until the next dispatch, which the caller must allow",
            Self::Gather => "it sends every row to every rank",
            Self::Fifo => "it is for little memory",
        }
    }
}

impl Figures {
    /// That nothing goes another way than one-sided.
    pub const fn nothing_pushed() -> Self {
        Self {
            push_max_bytes: None,
            push_back_max_bytes: None,
            push_max_bytes_per_sm: usize::MAX,
            rows_at_a_time: None,
            others: Vec::new(),
            source: Cow::Borrowed(""),
        }
    }

    /// Most bytes that are pushed within a budget of multiprocessors.
    pub fn push_limit(&self, sm_budget: Option<u16>) -> Option<usize> {
        Some(self.within(sm_budget, self.push_max_bytes?))
    }

    /// The same of rows that go back.
    pub fn push_back_limit(&self, sm_budget: Option<u16>) -> Option<usize> {
        Some(self.within(sm_budget, self.push_back_max_bytes?))
    }

    fn within(&self, sm_budget: Option<u16>, most: usize) -> usize {
        match sm_budget {
            Some(sms) if sms < MOST_BLOCKS => {
                let of_budget = self.push_max_bytes_per_sm.saturating_mul(sms.into());
                most.min(of_budget)
            }
            _ => most,
        }
    }

    /// Of those transports that no plan takes by itself: why, and from where on one was quicker.
    pub(crate) fn asked_for(&self, which: &[Asked]) -> String {
        let one = |asked: &Asked| {
            let found = self.others.iter().find(|o| o.transport == *asked);
            let quicker = match found.map(|o| o.from_bytes) {
                None => "not measured".to_owned(),
                Some(None) => "quicker at no size".to_owned(),
                Some(Some(bytes)) => format!("quicker from {bytes} bytes on"),
            };
            format!("{:?} ({}; {quicker})", asked.transport(), asked.why())
        };
        let each: Vec<_> = which.iter().map(one).collect();
        format!("only where asked for: {}", each.join(", "))
    }

    /// The numbers that decide, for a vote.
    fn numbers(&self) -> [u64; 4] {
        let Self {
            push_max_bytes,
            push_back_max_bytes,
            push_max_bytes_per_sm,
            rows_at_a_time,
            others: _,
            source: _,
        } = self;
        let or_most = |n: &Option<usize>| n.map_or(u64::MAX, |n| n as u64);
        [
            or_most(push_max_bytes),
            or_most(push_back_max_bytes),
            *push_max_bytes_per_sm as u64,
            or_most(rows_at_a_time),
        ]
    }
}

/// For rows as they are, and for rows that are cast on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByRows {
    /// Rows of f32, f16 and bf16, and all that go back.
    pub plain: Figures,
    /// Rows that a dispatch casts to fp8.
    pub fp8: Figures,
}

impl ByRows {
    /// The same for both.
    pub fn all(figures: Figures) -> Self {
        Self {
            plain: figures.clone(),
            fp8: figures,
        }
    }

    /// Those of a dispatch.
    pub const fn of(&self, call: &DispatchCall) -> &Figures {
        match call.cast {
            Some(_) => &self.fp8,
            None => &self.plain,
        }
    }

    /// Each with its name.
    pub const fn each(&self) -> [(Rows, &Figures); 2] {
        [(Rows::Plain, &self.plain), (Rows::Fp8, &self.fp8)]
    }

    /// The numbers that decide, for a vote.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.each().into_iter().flat_map(|(_, f)| f.numbers())
    }
}

/// How rows travel, as files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rows {
    /// As they are.
    Plain,
    /// Cast on the way there.
    Fp8,
}

impl Rows {
    /// Its name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fp8 => "fp8",
        }
    }
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Fewest tokens of a rank.
    pub from_tokens: usize,
    /// Most.
    pub to_tokens: usize,
    /// Columns of a row.
    pub hidden: usize,
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
    /// Of rows that travel so; of all that have no entry of their own, if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<Rows>,
    /// Most bytes for which pushing is quicker than one-sided; 0 if it is at no size.
    pub push_max_bytes: usize,
    /// The same of rows that go back; untuned, if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push_back_max_bytes: Option<usize>,
    /// Most of either for each multiprocessor of a budget; untuned, if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push_max_bytes_per_sm: Option<usize>,
    /// Rows of a sender at a time, of more; untuned, if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_at_a_time: Option<usize>,
    /// Where transports that no plan takes by itself were quicker; not measured, if left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Other>,
    /// Which numbers of tokens were measured.
    pub measured: Measured,
    /// With what.
    pub versions: Versions,
    /// How it came about.
    pub source: Source,
}

/// What holds where nothing was measured.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Untuned {
    push_max_bytes: usize,
    push_back_max_bytes: usize,
    push_max_bytes_per_sm: usize,
    rows_at_a_time: usize,
    /// What they were derived from, for people.
    why: String,
}

/// A file of such figures.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    untuned: Untuned,
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
    /// [`EXPERTS`](crate::reason::EXPERTS) if it is no such file, or has no rows go at a time.
    pub fn read(text: &str) -> Result<Self, Reason> {
        let file: Self = serde_json::from_str(text).map_err(|e| reason::experts(&e.to_string()))?;
        let usual = some_rows(Some(file.untuned.rows_at_a_time));
        usual
            .and_then(|()| some_words("untuned.why", &file.untuned.why))
            .and_then(|()| file.entries.iter().try_for_each(Entry::check))
            .map_err(|why| reason::experts(&why.to_string()))?;
        Ok(file)
    }

    /// With entries of the user's, which count before those of the file.
    #[must_use]
    pub fn with(mut self, own: &[Entry]) -> Self {
        self.own.extend_from_slice(own);
        self
    }

    /// All that was measured, in the file.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Most bytes that are pushed where nothing was measured: there, and back.
    pub const fn untuned_push_max_bytes(&self) -> (usize, usize) {
        (
            self.untuned.push_max_bytes,
            self.untuned.push_back_max_bytes,
        )
    }

    /// For rows of both kinds: the entry of these GPUs for them, else the one for all rows, of the user's first, else the usual
    /// figures.
    pub fn of(&self, gpus: &Gpus) -> ByRows {
        ByRows {
            plain: self.one(gpus, Rows::Plain),
            fp8: self.one(gpus, Rows::Fp8),
        }
    }

    fn one(&self, gpus: &Gpus, rows: Rows) -> Figures {
        let fits = |e: &&Entry| gpus.are(&e.gpu, e.links, e.ranks);
        let among = |entries: &[Entry], whose| {
            let of_rows = |rows: Option<Rows>| entries.iter().filter(fits).find(|e| e.rows == rows);
            let found = of_rows(Some(rows)).or_else(|| of_rows(None));
            found.map(|entry| entry.figures(&self.untuned, whose))
        };
        among(&self.own, Whose::User)
            .or_else(|| among(&self.entries, Whose::Build))
            .unwrap_or_else(|| self.untuned.figures(gpus, rows))
    }
}

impl Untuned {
    fn figures(&self, gpus: &Gpus, rows: Rows) -> Figures {
        let model = gpus.name();
        let (ranks, links) = (gpus.ranks, gpus.links);
        Figures {
            push_max_bytes: Some(self.push_max_bytes),
            push_back_max_bytes: Some(self.push_back_max_bytes),
            push_max_bytes_per_sm: self.push_max_bytes_per_sm,
            rows_at_a_time: Some(self.rows_at_a_time),
            others: Vec::new(),
            source: format!(
                "untuned: nobody has measured {} rows on {model} by {links} of {ranks} ranks; {}",
                rows.name(),
                self.why
            )
            .into(),
        }
    }
}

fn some_rows(rows_at_a_time: Option<usize>) -> Checked<()> {
    match rows_at_a_time {
        Some(0) => Err(Error::invalid("rows_at_a_time", 0, "at least 1")),
        _ => Ok(()),
    }
}

impl Entry {
    /// Whether rows go at all.
    pub(crate) fn check(&self) -> Checked<()> {
        some_rows(self.rows_at_a_time)
    }

    fn figures(&self, untuned: &Untuned, whose: Whose) -> Figures {
        Figures {
            push_max_bytes: Some(self.push_max_bytes),
            push_back_max_bytes: Some(
                self.push_back_max_bytes
                    .unwrap_or(untuned.push_back_max_bytes),
            ),
            push_max_bytes_per_sm: self
                .push_max_bytes_per_sm
                .unwrap_or(untuned.push_max_bytes_per_sm),
            rows_at_a_time: Some(self.rows_at_a_time.unwrap_or(untuned.rows_at_a_time)),
            others: self.others.clone(),
            source: self.told(whose).into(),
        }
    }

    /// In one line.
    fn told(&self, whose: Whose) -> String {
        let Self {
            gpu, links, ranks, ..
        } = self;
        let Versions { driver, cuda, .. } = &self.versions;
        let Measured {
            from_tokens,
            to_tokens,
            hidden,
        } = self.measured;
        let of = match self.rows {
            Some(rows) => format!(" of {} rows", rows.name()),
            None => String::new(),
        };
        let left_out = [
            ("push_back_max_bytes", self.push_back_max_bytes),
            ("push_max_bytes_per_sm", self.push_max_bytes_per_sm),
            ("rows_at_a_time", self.rows_at_a_time),
        ];
        let left_out: Vec<_> = left_out
            .into_iter()
            .filter(|(_, figure)| figure.is_none())
            .map(|(name, _)| name)
            .collect();
        let untuned = match &left_out[..] {
            [] => String::new(),
            names => format!(", untuned: {}", names.join(" ")),
        };
        format!(
            "measured on {gpu} by {links} of {ranks} ranks, {from_tokens} to {to_tokens} tokens{of} of {hidden} columns, {}, \
             driver {driver}, cuda {cuda}, {whose}{untuned}",
            self.source.date
        )
    }
}
