//! What was done for each kind of layer: plan, calls, bytes moved.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A kind of layer that ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Tokens to hidden states.
    Embedding,
    /// Hidden states to queries, keys and values.
    QueryKeyValue,
    /// Attended heads back to hidden states.
    AttentionOutput,
    /// Hidden states to the feed-forward's gated and linear halves.
    GateUp,
    /// Feed-forward back to hidden states.
    Down,
    /// Last hidden states to the ranks' shares of the vocabulary.
    Head,
    /// Each rank's best token to the best of all.
    Choice,
}

impl Kind {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::QueryKeyValue => "qkv",
            Self::AttentionOutput => "attention_output",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::Head => "head",
            Self::Choice => "choice",
        }
    }
}

/// Which part of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Reading the prompts.
    Prefill,
    /// Generating tokens.
    Decode,
}

impl Phase {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What all ranks did for a kind of layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerReport {
    /// Which kind.
    pub kind: Kind,
    /// When.
    pub phase: Phase,
    /// How the last of its calls was done.
    pub plan: String,
    /// Calls on one rank.
    pub calls: u64,
    /// Bytes that each rank moved to or from others. Empty on GPUs: there a call has not run when it returns, and to ask would be to wait for it.
    pub moved_bytes: Vec<u64>,
}

/// Plan, calls, and bytes moved where they are counted.
type Counts = (String, u64, Option<u64>);

/// One rank's counts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(
    from = "Vec<((Phase, Kind), Counts)>",
    into = "Vec<((Phase, Kind), Counts)>"
)]
pub(crate) struct Tally(BTreeMap<(Phase, Kind), Counts>);

impl From<Vec<((Phase, Kind), Counts)>> for Tally {
    fn from(entries: Vec<((Phase, Kind), Counts)>) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl From<Tally> for Vec<((Phase, Kind), Counts)> {
    fn from(tally: Tally) -> Self {
        tally.0.into_iter().collect()
    }
}

impl Tally {
    pub(crate) fn add(&mut self, phase: Phase, kind: Kind, plan: String, moved_bytes: Option<u64>) {
        let new = || (String::new(), 0, Some(0));
        let entry = self.0.entry((phase, kind)).or_insert_with(new);
        entry.0 = plan;
        entry.1 += 1;
        entry.2 = entry.2.zip(moved_bytes).map(|(sum, more)| sum + more);
    }

    /// What was counted as a graph was captured, once more: it was launched.
    pub(crate) fn again(&mut self, captured: &Self) {
        for (&(phase, kind), (plan, calls, moved)) in &captured.0 {
            let new = || (String::new(), 0, Some(0));
            let entry = self.0.entry((phase, kind)).or_insert_with(new);
            entry.0.clone_from(plan);
            entry.1 += calls;
            entry.2 = entry.2.zip(*moved).map(|(sum, more)| sum + more);
        }
    }
}

/// One report for each kind, over all ranks.
pub(crate) fn merge<'a>(tallies: impl Iterator<Item = &'a Tally>) -> Vec<LayerReport> {
    let mut all: BTreeMap<(Phase, Kind), LayerReport> = BTreeMap::new();
    for tally in tallies {
        for (&(phase, kind), (plan, calls, moved)) in &tally.0 {
            all.entry((phase, kind))
                .or_insert_with(|| LayerReport {
                    kind,
                    phase,
                    plan: plan.clone(),
                    calls: *calls,
                    moved_bytes: Vec::new(),
                })
                .moved_bytes
                .extend(moved);
        }
    }
    all.into_values().collect()
}
