//! Costs that users measured between machines of theirs, as a file has them.

use super::{Costs, Link, Measured, Wire};
use crate::{
    crossover::{Links, Source, Whose},
    tuned::{Sizes, Versions},
};
use brigade_device::{Error, Group, HierarchyConfig, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What calls and links cost, in whole numbers as [`Costs`] has them, and where they were measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Of which version of costs the figures are: [`VERSION`](Self::VERSION). What they mean follows from how plans count with them.
    pub costs_version: u32,
    /// The model of GPU, as the driver calls it; `host` of the other device.
    pub gpu: String,
    /// How the GPUs of a machine reach each other. It decides nothing.
    pub links: Links,
    /// So many machines,
    pub machines: usize,
    /// of so many ranks each.
    pub ranks: usize,
    /// [`Costs::inside`]; of machines of one rank, as it was guessed.
    pub inside_call_ns: u64,
    /// At least 1.
    pub inside_bytes_per_us: u64,
    /// [`Costs::across`].
    pub across_call_ns: u64,
    /// At least 1.
    pub across_bytes_per_us: u64,
    /// [`Costs::wire`].
    pub wire_latency_ns: u64,
    /// At least 1.
    pub wire_bytes_per_us: u64,
    /// [`Costs::add_bytes_per_us`]. At least 1.
    pub add_bytes_per_us: u64,
    /// [`Costs::copy_ns`].
    pub copy_ns: u64,
    /// [`Costs::connections`], by which calls were quickest. At least 2; a device has no more than it has.
    pub connections: usize,
    /// [`Costs::crowded_percent`]. At least 100, and at most 10000.
    pub crowded_percent: u64,
    /// [`Costs::channels`] of each connection, by which calls were quickest; without, as many as NCCL decides. 1 to 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<u16>,
    /// Which sizes were measured, in bytes of the larger of a rank's two buffers.
    pub measured: Sizes,
    /// With what.
    pub versions: Versions,
    /// How it came about.
    pub source: Source,
}

impl Entry {
    /// The version of costs that this build counts with.
    pub const VERSION: u32 = 3;

    /// Longest that a call, a copy or the way of a byte can take, in nanoseconds: a minute.
    pub const MOST_NS: u64 = 60_000_000_000;

    /// The field that no other kind of entry has.
    pub(crate) const KIND: &'static str = "costs_version";

    /// Whether a value is of this version, whatever else it has.
    pub(crate) fn check_version(value: &Value) -> Result<()> {
        match value.get(Self::KIND) {
            Some(got) if *got != Self::VERSION => {
                let want = format!("{}, which this build counts with", Self::VERSION);
                Err(Error::invalid(Self::KIND, got, want))
            }
            _ => Ok(()),
        }
    }

    /// Whether these can be costs.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        let most = Group::MOST_RANKS;
        if self.machines < 2 || self.machines > most {
            let want = format!("2 to {most}");
            return Err(Error::invalid("machines", self.machines, want));
        }
        if self.ranks == 0 || self.ranks > most / self.machines {
            let want = format!("1 to {} on each of {}", most / self.machines, self.machines);
            return Err(Error::invalid("ranks", self.ranks, want));
        }
        let times = [
            ("inside_call_ns", self.inside_call_ns),
            ("across_call_ns", self.across_call_ns),
            ("wire_latency_ns", self.wire_latency_ns),
            ("copy_ns", self.copy_ns),
        ];
        if let Some((field, got)) = times.into_iter().find(|(_, ns)| *ns > Self::MOST_NS) {
            let want = format!("at most {}, a minute", Self::MOST_NS);
            return Err(Error::invalid(field, got, want));
        }
        let rates = [
            ("inside_bytes_per_us", self.inside_bytes_per_us),
            ("across_bytes_per_us", self.across_bytes_per_us),
            ("wire_bytes_per_us", self.wire_bytes_per_us),
            ("add_bytes_per_us", self.add_bytes_per_us),
        ];
        if let Some((field, got)) = rates.into_iter().find(|(_, rate)| *rate == 0) {
            return Err(Error::invalid(field, got, "at least 1"));
        }
        if self.connections < 2 {
            return Err(Error::invalid(
                "connections",
                self.connections,
                "at least 2",
            ));
        }
        if !(100..=10_000).contains(&self.crowded_percent) {
            let got = self.crowded_percent;
            return Err(Error::invalid("crowded_percent", got, "100 to 10000"));
        }
        const MOST: u16 = HierarchyConfig::MOST_CHANNELS;
        match self.channels {
            None | Some(1..=MOST) => Ok(()),
            Some(got) => Err(Error::invalid("channels", got, format!("1 to {MOST}"))),
        }
    }

    /// As plans count with them.
    pub fn costs(&self) -> Costs {
        let guess = match self.gpu.as_str() {
            "host" => Costs::host(),
            _ => Costs::cuda(),
        };
        Costs {
            inside: Link {
                call_ns: self.inside_call_ns,
                bytes_per_us: self.inside_bytes_per_us,
            },
            across: Link {
                call_ns: self.across_call_ns,
                bytes_per_us: self.across_bytes_per_us,
            },
            wire: Wire {
                latency_ns: self.wire_latency_ns,
                bytes_per_us: self.wire_bytes_per_us,
            },
            add_bytes_per_us: self.add_bytes_per_us,
            enqueue_ns: guess.enqueue_ns,
            connections: guess.connections.min(self.connections),
            crowded_percent: self.crowded_percent,
            channels: self.channels,
            in_place: guess.in_place,
            copy_ns: self.copy_ns,
            measured: Some(Measured {
                machines: self.machines,
                ranks: self.ranks,
                whose: Whose::User,
            }),
        }
    }
}
