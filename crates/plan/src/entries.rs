//! Figures from outside of a build.

use crate::{
    crossover,
    hierarchical::{self, Costs},
    transports, tuned,
};
use brigade_device::{Error, Machines, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Figures that users measured on GPUs and machines of theirs, as entries of tables. They count before those of this build for the same
/// model of GPU, links and number of ranks; among them the first counts. What they say decides on plans, so all ranks must have the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    pub(crate) crossovers: Vec<crossover::Entry>,
    pub(crate) all_reduces: Vec<tuned::Entry>,
    pub(crate) experts: Vec<transports::Entry>,
    costs: Vec<hierarchical::Entry>,
}

impl Entries {
    /// Those of a file's text: one entry, or a list of entries of all kinds, as `brigade-perf crossover`, `tune`, `tune-experts` and
    /// `tune-hierarchical` write them.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been, if an entry is of no kind or cannot be.
    pub fn read(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| Error::invalid("entries", e, "JSON: an entry, or a list of entries"))?;
        let mut entries = Self::default();
        match &value {
            Value::Array(all) => all.iter().try_for_each(|one| entries.add(one))?,
            one => entries.add(one)?,
        }
        Ok(entries)
    }

    /// These, and those of another file behind them.
    #[must_use]
    pub fn and(mut self, more: Self) -> Self {
        self.crossovers.extend(more.crossovers);
        self.all_reduces.extend(more.all_reduces);
        self.experts.extend(more.experts);
        self.costs.extend(more.costs);
        self
    }

    /// What calls and links were measured to cost across machines that have this model of GPU: as many machines of as many ranks, else
    /// those that are nearest, by ranks of a machine before the number of machines.
    pub fn costs(&self, gpu: &str, machines: Machines) -> Option<Costs> {
        let far = |entry: &&hierarchical::Entry| {
            let ranks = entry.ranks.abs_diff(machines.ranks());
            (ranks, entry.machines.abs_diff(machines.count()))
        };
        let of = self.costs.iter().filter(|entry| entry.gpu == gpu);
        of.min_by_key(far).map(hierarchical::Entry::costs)
    }

    /// An entry is of the kind that alone has one of its fields.
    fn add(&mut self, value: &Value) -> Result<()> {
        let has = |field| value.get(field).is_some();
        if has("operation") {
            self.crossovers.push(read("entry of crossovers", value)?);
        } else if has("one_shot_max_bytes") {
            let entry: tuned::Entry = read("entry of all-reduces", value)?;
            entry.check()?;
            self.all_reduces.push(entry);
        } else if has("push_max_bytes") {
            let entry: transports::Entry = read("entry of experts", value)?;
            entry.check()?;
            self.experts.push(entry);
        } else if has(hierarchical::Entry::KIND) {
            hierarchical::Entry::check_version(value)?;
            let entry: hierarchical::Entry = read("entry of costs", value)?;
            entry.check()?;
            self.costs.push(entry);
        } else {
            let got = match value {
                Value::Object(fields) => {
                    let names: Vec<_> = fields.keys().map(String::as_str).collect();
                    format!("an entry of the fields [{}]", names.join(", "))
                }
                other => other.to_string(),
            };
            let want = "an entry with operation (as crossover writes it), one_shot_max_bytes (tune), push_max_bytes (tune-experts) or \
                        costs_version (tune-hierarchical)";
            return Err(Error::invalid("entries", got, want));
        }
        Ok(())
    }
}

/// An entry of a kind, or which of its fields is wrong.
fn read<E: DeserializeOwned>(kind: &'static str, value: &Value) -> Result<E> {
    let told = |e: serde_json::Error| e.to_string();
    let what = match E::deserialize(value).map_err(told) {
        Ok(entry) => return Ok(entry),
        Err(what) => what,
    };
    // Without the field that is wrong, nothing is said of it.
    let fields = value.as_object().into_iter().flatten();
    let field = fields.map(|(name, _)| name).find(|name| {
        let mut without = value.clone();
        if let Some(fields) = without.as_object_mut() {
            fields.remove(*name);
        }
        E::deserialize(&without).map_err(told).err().as_ref() != Some(&what)
    });
    let (got, want) = match what.split_once(", expected ") {
        Some((got, want)) => (got.to_owned(), want.to_owned()),
        None => (what, "all fields that brigade-perf writes".to_owned()),
    };
    let named = match field {
        Some(field) if !got.starts_with("missing") => format!("{field}: {got}"),
        _ => got,
    };
    Err(Error::invalid(kind, named, want))
}
