//! What calls and links cost, and from that what slices take.

use super::{StepCost, slices, whole};
use crate::crossover::Whose;
use brigade_device::{
    CostsBasis, DataType, HierarchicalCall, HierarchicalOperation as Operation, Machines, Phase,
};
use smallvec::SmallVec;

/// What one collective costs a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Nanoseconds of a call, however little it moves.
    pub call_ns: u64,
    /// Bytes that a rank sends, or receives, in a microsecond. At least 1.
    pub bytes_per_us: u64,
}

/// What is between machines, besides what calls cost the ranks themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// Nanoseconds that a byte is on its way. The link is free for others meanwhile.
    pub latency_ns: u64,
    /// Bytes that a rank's link carries in a microsecond. At least 1.
    pub bytes_per_us: u64,
}

impl Wire {
    /// None: ranks reach each other's memory.
    pub const NONE: Self = Self {
        latency_ns: 0,
        bytes_per_us: u64::MAX,
    };

    /// Nanoseconds for which so many bytes keep the link.
    pub fn link_ns(&self, bytes: u64) -> u64 {
        nanoseconds(bytes, self.bytes_per_us)
    }
}

/// What a GPU moves where it does so itself, in bytes of a microsecond.
const NVLINK: u64 = 340_000;

/// Where costs were measured, and who keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// With so many machines,
    pub machines: usize,
    /// of so many ranks each.
    pub ranks: usize,
    /// In whose table they stand.
    pub whose: Whose,
}

/// Costs of a group that spans machines. Whole numbers, so that all ranks and builds decide alike; all ranks have the same, and vote on
/// [`digest`](Self::digest).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Between ranks of a machine.
    pub inside: Link,
    /// Between machines, as if there were no wire: what is copied and told.
    pub across: Link,
    /// The wire. What is collected and what is diffused share the link.
    pub wire: Wire,
    /// Bytes that a rank reads in a microsecond where it adds. At least 1.
    pub add_bytes_per_us: u64,
    /// Nanoseconds that the host takes to enqueue a slice, where it enqueues all phases one after the other; given by the device.
    pub enqueue_ns: u64,
    /// Most connections to its rail that a rank's slices take in turn. At least 2; as many as the device has, or fewer where that was measured
    /// to be quicker.
    pub connections: usize,
    /// What a byte across takes while several connections carry some, in percent of what it takes where one does; at least 100. Beyond what the
    /// wire and connections have, they keep each other waiting: for threads that all of them need, for instance.
    pub crowded_percent: u64,
    /// Channels that each connection is made with, where what carries it has channels; `None` leaves them to it. No plan depends on them, but
    /// all ranks have to make the same connections.
    pub channels: Option<u16>,
    /// Whether the device reads and writes slices where they lie in the caller's tensors, in one piece; else there are copies in slots.
    pub in_place: bool,
    /// Nanoseconds of a copy within a rank's memory, of which there is one for each rank where rows that are scattered or gathered lie in
    /// another order than slices.
    pub copy_ns: u64,
    /// Where all but the wire was measured; `None` if it is guessed. It decides nothing.
    pub measured: Option<Measured>,
}

impl Costs {
    /// Ranks that are threads or processes of one host, and rails that are its memory too. In round numbers what
    /// `docs/results/hierarchical-costs.host.json` has, where twice as many ranks as there are cores do the same at once: medians of phases of
    /// slices that go one after the other, and as much again for each call, for the thread that is handed the slice has to wake.
    pub const fn host() -> Self {
        let call_ns = 100_000;
        Self {
            inside: Link {
                call_ns,
                bytes_per_us: 800,
            },
            across: Link {
                call_ns,
                bytes_per_us: 1_000,
            },
            wire: Wire::NONE,
            add_bytes_per_us: 4_000,
            // Each phase has a thread.
            enqueue_ns: 0,
            connections: 2,
            crowded_percent: 100,
            channels: None,
            in_place: false,
            // What it takes is in a call's.
            copy_ns: 0,
            measured: Some(Measured {
                machines: 2,
                ranks: 2,
                whose: Whose::Build,
            }),
        }
    }

    /// GPUs whose machines reach each other by sockets. In round numbers what two machines of two GPUs took, which were one host's: calls inside
    /// and across, and what one connection of NCCL's carries, and all. NVLink, reading and copying memory are guessed.
    pub const fn cuda() -> Self {
        Self {
            inside: Link {
                call_ns: 15_000,
                bytes_per_us: NVLINK,
            },
            across: Link {
                call_ns: 120_000,
                // A thread copies what goes by a connection.
                bytes_per_us: 4_500,
            },
            wire: Wire {
                latency_ns: 0,
                bytes_per_us: 7_500,
            },
            add_bytes_per_us: 2_000_000,
            enqueue_ns: 100_000,
            connections: 4,
            crowded_percent: 100,
            channels: None,
            in_place: true,
            copy_ns: 2_000,
            measured: None,
        }
    }

    /// GPUs whose machines reach each other by a wire that is known, and no thread copies anything.
    #[must_use]
    pub const fn cuda_over(wire: Wire) -> Self {
        let sockets = Self::cuda();
        Self {
            across: Link {
                bytes_per_us: NVLINK,
                ..sockets.across
            },
            wire,
            ..sockets
        }
    }

    /// The same with such a wire between machines.
    #[must_use]
    pub fn with_wire(self, wire: Wire) -> Self {
        Self { wire, ..self }
    }

    /// What plans across these machines rest on, in a word.
    pub fn basis(&self, machines: Machines) -> CostsBasis {
        match self.measured {
            None => CostsBasis::Guessed,
            Some(at) if (at.machines, at.ranks) == (machines.count(), machines.ranks()) => {
                CostsBasis::Measured
            }
            Some(_) => CostsBasis::Elsewhere,
        }
    }

    /// What plans across these machines rest on, in one line for people: where the costs are from, and the wire. What was not measured on
    /// as many machines, of as many ranks, says `untuned`.
    pub fn told(&self, machines: Machines) -> String {
        let costs = match self.measured {
            None => "untuned: what calls and bytes cost is guessed".to_owned(),
            Some(Measured {
                machines: count,
                ranks,
                whose,
            }) => {
                let of = format!("{count} x {ranks}");
                match self.basis(machines) {
                    CostsBasis::Measured => {
                        format!("costs of calls and bytes measured at {of} ranks, {whose}")
                    }
                    _ => format!(
                        "untuned: not measured at {} x {} ranks; costs of calls and bytes of {of}, {whose}",
                        machines.count(),
                        machines.ranks()
                    ),
                }
            }
        };
        let Wire {
            latency_ns,
            bytes_per_us,
        } = self.wire;
        if self.wire == Wire::NONE {
            return format!("{costs}; no wire");
        }
        format!("{costs}; a wire of {latency_ns} ns and {bytes_per_us} bytes in a microsecond")
    }

    /// A number that differs, with overwhelming likelihood, between tables that decide differently (FNV-1a).
    pub fn digest(&self) -> u64 {
        let Self {
            inside,
            across,
            wire,
            add_bytes_per_us,
            enqueue_ns,
            connections,
            crowded_percent,
            channels,
            in_place,
            copy_ns,
            measured: _,
        } = self;
        [
            inside.call_ns,
            inside.bytes_per_us,
            across.call_ns,
            across.bytes_per_us,
            wire.latency_ns,
            wire.bytes_per_us,
            *add_bytes_per_us,
            *enqueue_ns,
            *connections as u64,
            *crowded_percent,
            channels.map_or(0, u64::from),
            u64::from(*in_place),
            *copy_ns,
        ]
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        })
    }

    /// What one of these phases takes with a slice of `rank_elements` of each rank.
    pub fn step(
        &self,
        phase: Phase,
        call: &HierarchicalCall,
        (phases, rank_elements): (&[Phase], usize),
    ) -> StepCost {
        let [input, travels, collected, sum, _, gathered] =
            slices::parts_of(call, phases, rank_elements);
        let diffused = match slices::is_one_shot(phases) {
            true => travels,
            false => sum,
        };
        let (count, ranks) = (call.machines.count(), call.machines.ranks());
        let others = |bytes: usize, of: usize| bytes as u64 * (of as u64 - 1) / of as u64;
        let alone = |then_ns| StepCost {
            link_ns: 0,
            then_ns,
        };
        let copies = self.copies_ns(call, call.machines.size());
        let inside = |bytes| alone(self.inside.ns(bytes).saturating_add(copies));
        match phase {
            Phase::ReduceInside => inside(others(input, ranks)),
            Phase::Collect => self.along(others(travels, count)),
            Phase::Add => alone(nanoseconds(collected as u64, self.add_bytes_per_us)),
            Phase::Diffuse => self.along(diffused as u64 * (count as u64 - 1)),
            Phase::GatherInside => inside(others(gathered, ranks)),
        }
    }

    /// So many copies of rows that are in another order than they travel: by local number, and then by machine.
    fn copies_ns(&self, call: &HierarchicalCall, copies: usize) -> u64 {
        let all_reduce = matches!(call.operation, Operation::AllReduce { .. });
        match all_reduce || call.machines.ranks() == 1 {
            true => 0,
            false => self.copy_ns.saturating_mul(copies as u64),
        }
    }

    /// What a call takes before its first slice: ranks of a machine meet if what goes along the rail comes first.
    pub fn begins_ns(&self, call: &HierarchicalCall) -> u64 {
        let gathers = matches!(call.operation, Operation::AllGather { .. });
        match gathers && call.machines.ranks() > 1 {
            true => self.inside.call_ns,
            false => 0,
        }
    }

    /// What a call takes that stays in one machine, and is one collective there: of what such calls are measured by.
    pub fn inside_ns(&self, call: &HierarchicalCall) -> u64 {
        let ranks = call.machines.size() as u64;
        let elements = slices::elements(call) as u64;
        let bytes = |dtype: DataType| elements.saturating_mul(dtype.bytes() as u64);
        let moved = match call.operation {
            Operation::AllReduce { .. } => bytes(call.dtype).saturating_add(bytes(call.output)),
            Operation::ReduceScatter { .. } => bytes(call.dtype),
            Operation::AllGather { .. } => bytes(call.output),
        };
        self.inside.ns(moved.saturating_mul(ranks - 1) / ranks)
    }

    /// So many bytes of a rank along its rail.
    fn along(&self, bytes: u64) -> StepCost {
        let then = self.across.ns(bytes);
        StepCost {
            link_ns: self.wire.link_ns(bytes),
            then_ns: then.saturating_add(self.wire.latency_ns),
        }
    }

    /// These where so many connections carry slices.
    pub(super) fn by(&self, connections: usize) -> Self {
        let slower = |rate: u64| match rate {
            u64::MAX => rate,
            rate => (rate.saturating_mul(100) / self.crowded_percent.max(100)).max(1),
        };
        match connections {
            ..=1 => *self,
            _ => Self {
                across: Link {
                    bytes_per_us: slower(self.across.bytes_per_us),
                    ..self.across
                },
                wire: Wire {
                    bytes_per_us: slower(self.wire.bytes_per_us),
                    ..self.wire
                },
                ..*self
            },
        }
    }

    /// What all phases take with a slice of `rank_elements` of each rank, one after the other.
    pub fn steps(
        &self,
        call: &HierarchicalCall,
        phases: &[Phase],
        rank_elements: usize,
    ) -> SmallVec<[StepCost; 5]> {
        let step = |p: &Phase| self.step(*p, call, (phases, rank_elements));
        phases.iter().map(step).collect()
    }

    /// Nanoseconds of a call on the path as a whole.
    pub(super) fn whole_ns(&self, call: &HierarchicalCall) -> u64 {
        let (count, ranks) = (call.machines.count() as u64, call.machines.ranks() as u64);
        let bytes = |elements: usize, dtype: DataType| {
            (elements as u64).saturating_mul(dtype.bytes() as u64)
        };
        let (input, output) = (call.dtype, call.output);
        let inside = |bytes: u64| match ranks {
            1 => 0,
            _ => self.inside.ns(bytes.saturating_mul(ranks - 1) / ranks),
        };
        let all = slices::elements(call);
        let reduced = || inside(bytes(all, input).saturating_add(bytes(all, output)));
        let added = |own: u64| nanoseconds(own.saturating_mul(count), self.add_bytes_per_us);
        let (inside, along, rest) = match call.operation {
            Operation::AllReduce { .. } => {
                let own = bytes(all, output);
                (reduced(), own, added(own))
            }
            Operation::ReduceScatter { .. } => {
                let own = bytes(slices::most_rank_elements(call), output);
                let copies = self.copies_ns(call, call.machines.count());
                (reduced(), own, added(own).saturating_add(copies))
            }
            Operation::AllGather { .. } => {
                let own = bytes(whole::most_machine_elements(call), output);
                (inside(own), own, 0)
            }
        };
        let along = self.along(along.saturating_mul(count - 1)).ns();
        inside.saturating_add(along).saturating_add(rest)
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
