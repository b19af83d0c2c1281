//! What calls and links cost, and from that what slices take.

use super::slices;
use brigade_device::{DataType, HierarchicalCall, Machines, Phase};

/// What one collective costs on one kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Nanoseconds of a call, however little it moves: what it costs to begin, and the way of a byte.
    pub call_ns: u64,
    /// Bytes that a rank sends, or receives, in a microsecond. At least 1.
    pub bytes_per_us: u64,
}

/// Costs of a group that spans machines. Whole numbers, so that all ranks and builds decide alike; all ranks have the same, and vote on
/// [`digest`](Self::digest).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Between ranks of a machine.
    pub inside: Link,
    /// Between machines. What is collected and what is diffused share the link.
    pub across: Link,
    /// Bytes that a rank reads in a microsecond where it adds. At least 1.
    pub add_bytes_per_us: u64,
}

impl Costs {
    /// Ranks that are threads or processes of one host, and rails that are its memory too. From what criterion's benchmarks of the host
    /// device say of small and large calls, in round numbers.
    pub const fn host() -> Self {
        let memory = Link {
            call_ns: 20_000,
            bytes_per_us: 2_000,
        };
        Self {
            inside: memory,
            across: memory,
            add_bytes_per_us: 1_000,
        }
    }

    /// The same with rails of this latency and bandwidth, where it is less than the memory's.
    #[must_use]
    pub fn with_rail(self, latency_ns: u64, bytes_per_us: u64) -> Self {
        let across = Link {
            call_ns: self.across.call_ns.saturating_add(latency_ns),
            bytes_per_us: self.across.bytes_per_us.min(bytes_per_us).max(1),
        };
        Self { across, ..self }
    }

    /// A number that differs, with overwhelming likelihood, between tables that decide differently (FNV-1a).
    pub fn digest(&self) -> u64 {
        let Self {
            inside,
            across,
            add_bytes_per_us,
        } = self;
        [
            inside.call_ns,
            inside.bytes_per_us,
            across.call_ns,
            across.bytes_per_us,
            *add_bytes_per_us,
        ]
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        })
    }

    /// Nanoseconds of one phase with a slice of `rank_elements` of each rank.
    pub fn phase_ns(&self, phase: Phase, call: &HierarchicalCall, rank_elements: usize) -> u64 {
        let [input, travels, collected, sum, _, gathered] =
            slices::parts_bytes(call, rank_elements);
        let (count, ranks) = (call.machines.count(), call.machines.ranks());
        let others = |bytes: usize, of: usize| bytes as u64 * (of as u64 - 1) / of as u64;
        match phase {
            Phase::ReduceInside => self.inside.ns(others(input, ranks)),
            Phase::Collect => self.across.ns(others(travels, count)),
            Phase::Add => nanoseconds(collected as u64, self.add_bytes_per_us),
            Phase::Diffuse => self.across.ns(sum as u64 * (count as u64 - 1)),
            Phase::GatherInside => self.inside.ns(others(gathered, ranks)),
        }
    }

    /// How long a slice keeps the link between machines busy.
    fn link_ns(&self, call: &HierarchicalCall, phases: &[Phase], rank_elements: usize) -> u64 {
        let along = |p: &&Phase| matches!(p, Phase::Collect | Phase::Diffuse);
        let phases = phases.iter().filter(along);
        phases
            .map(|&p| self.phase_ns(p, call, rank_elements) - self.across.call_ns)
            .sum()
    }

    /// Nanoseconds of a call in so many slices and slots: what is slowest for every slice, and everything for one. What is slowest is a
    /// phase, or the link that two of them share, or that there are not enough slots to keep all phases busy.
    pub fn slices_ns(
        &self,
        call: &HierarchicalCall,
        phases: &[Phase],
        rank_elements: usize,
        (slices, slots): (usize, usize),
    ) -> u64 {
        let each = |p: &Phase| self.phase_ns(*p, call, rank_elements);
        let one: u64 = phases.iter().map(each).sum();
        let longest = phases.iter().map(each).max().unwrap_or(0);
        let slowest = longest
            .max(self.link_ns(call, phases, rank_elements))
            .max(one / slots.max(1) as u64);
        one.saturating_add(slowest.saturating_mul(slices.saturating_sub(1) as u64))
    }

    /// Nanoseconds of an all-reduce on the path as a whole.
    pub(super) fn whole_ns(
        &self,
        machines: Machines,
        elements: usize,
        (input, output): (DataType, DataType),
    ) -> u64 {
        let (count, ranks) = (machines.count() as u64, machines.ranks() as u64);
        let bytes = |dtype: DataType| elements as u64 * dtype.bytes() as u64;
        let inside = match ranks {
            1 => 0,
            _ => self
                .inside
                .ns((bytes(input) + bytes(output)) * (ranks - 1) / ranks),
        };
        inside
            .saturating_add(self.across.ns(bytes(output) * (count - 1)))
            .saturating_add(nanoseconds(bytes(output) * count, self.add_bytes_per_us))
    }
}

impl Link {
    fn ns(&self, bytes: u64) -> u64 {
        self.call_ns
            .saturating_add(nanoseconds(bytes, self.bytes_per_us))
    }
}

fn nanoseconds(bytes: u64, bytes_per_us: u64) -> u64 {
    bytes.saturating_mul(1000) / bytes_per_us.max(1)
}
