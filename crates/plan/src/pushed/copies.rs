//! Whether copies and reduce-scatters are pushed, at once or in pieces.

use super::{GRANULE_BYTES, Packets};
use crate::{Table, Topology};
use brigade_device::{DataType, Launch, Plan};

/// How a copy or a reduce-scatter is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pushed {
    pub(crate) launch: Launch,
    /// Elements of each rank in a piece. The last piece has what is left.
    pub(crate) piece_elements: usize,
    pub(crate) pieces: usize,
}

/// How a copy is pushed, if it is, which would go through the scratch memory in pieces of so many elements else.
pub(crate) fn copy(
    packets: Packets,
    (dtype, otherwise): (DataType, usize),
    topology: &Topology,
    table: &Table,
) -> Option<Pushed> {
    let arriving = |bytes| copied(Packets::new(bytes, packets.slots), topology);
    pushed(packets.bytes, arriving, (dtype, otherwise), topology, table)
}

/// How a reduce-scatter of so many elements for each rank is pushed, if it is, which would go through the scratch memory in pieces of so
/// many elements of each rank else.
pub(crate) fn scatter(
    elements: &[usize],
    (input, otherwise): (DataType, usize),
    topology: &Topology,
    table: &Table,
) -> Option<Pushed> {
    let most = elements.iter().max().copied().unwrap_or(0);
    let bytes = input.bytes();
    let arriving = |piece: usize| scattered(piece / bytes, input, topology);
    let all = most.saturating_mul(bytes);
    pushed(all, arriving, (input, otherwise), topology, table)
}

/// At once, or in pieces: of `all` bytes that the rank with most has, of which so many arrive at a rank.
fn pushed(
    all: usize,
    arriving: impl Fn(usize) -> Arriving,
    (dtype, otherwise): (DataType, usize),
    topology: &Topology,
    table: &Table,
) -> Option<Pushed> {
    /// What room is counted in.
    const UNIT: usize = 64 << 10;
    /// What pieces are cut at: whole packets of whole granules, and so many that places are whole lines. Finer than what room is counted in, so that
    /// none of many pieces is much smaller than the others.
    const CUT: usize = 4 << 10;
    let launch = |bytes| arriving(bytes).launch(dtype, topology, table);
    if let Some(launch) = launch(all) {
        return Some(Pushed {
            launch,
            piece_elements: (all / dtype.bytes()).max(1),
            pieces: 1,
        });
    }
    if !table.copies.in_pieces {
        return None;
    }
    // Whatever fits, less does.
    let (mut most, mut too_much) = (0, all.div_ceil(UNIT));
    while most + 1 < too_much {
        let middle = most.midpoint(too_much);
        match launch(middle * UNIT) {
            Some(_) => most = middle,
            None => too_much = middle,
        }
    }
    let most = most * UNIT;
    if most == 0 || most < otherwise.saturating_mul(dtype.bytes()) {
        return None;
    }
    let pieces = all.div_ceil(most);
    let piece = all.div_ceil(pieces).next_multiple_of(CUT);
    let launch = launch(piece)?;
    Some(Pushed {
        launch,
        piece_elements: piece / dtype.bytes(),
        pieces: all.div_ceil(piece),
    })
}

/// The plan of a copy of so many elements, which goes through the scratch memory in pieces of so many else.
pub(crate) fn copied_as(pushed: Option<Pushed>, (all, otherwise): (usize, usize)) -> Plan {
    Plan::Copy {
        piece_elements: pushed.map_or(otherwise, |p| p.piece_elements),
        pieces: pushed.map_or(all.div_ceil(otherwise), |p| p.pieces),
        pushed: pushed.map(|p| p.launch),
    }
}

/// What comes in a copy: a packet for each thread.
pub(crate) const fn copied(packets: Packets, topology: &Topology) -> Arriving {
    let peers = topology.group.size.saturating_sub(1);
    Arriving {
        bytes: packets.slots.saturating_mul(packets.bytes),
        filled: packets.granules().saturating_mul(GRANULE_BYTES),
        threads: packets.most.saturating_mul(peers),
    }
}

/// What comes in a reduce-scatter of at most so many elements for a rank: a granule for each thread.
pub(crate) const fn scattered(most: usize, input: DataType, topology: &Topology) -> Arriving {
    let peers = topology.group.size.saturating_sub(1);
    let granules = most.saturating_mul(input.bytes()).div_ceil(GRANULE_BYTES);
    let bytes = granules.saturating_mul(peers).saturating_mul(GRANULE_BYTES);
    Arriving {
        bytes,
        filled: bytes,
        threads: granules,
    }
}

/// What comes to a rank if all of it is pushed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arriving {
    bytes: usize,
    /// Bytes of a buffer that it fills.
    filled: usize,
    /// Threads that have something to do.
    threads: usize,
}

impl Arriving {
    /// The launch, if it is pushed: where bytes that arrive are few, and those that they fill fit a buffer.
    fn launch(&self, dtype: DataType, topology: &Topology, table: &Table) -> Option<Launch> {
        let few = (table.copies.push_max_bytes).is_some_and(|most| self.bytes <= most);
        let pushes = topology.engines.one_shot_push && self.fits(topology) && few;
        let figures = table.all_reduce.of(dtype);
        let of = (self.bytes, topology.group.size);
        pushes.then(|| figures.launch(of, self.threads, topology.config.sm_budget))
    }

    const fn fits(&self, topology: &Topology) -> bool {
        let room = topology.config.all_reduce_bytes;
        room > 0 && self.filled <= room
    }

    /// Why it is pushed, in so many pieces, or is not.
    pub(crate) fn why(&self, pushed: Option<usize>, topology: &Topology, table: &Table) -> String {
        let Self { bytes, filled, .. } = self;
        match table.copies.push_max_bytes {
            Some(_) if !topology.engines.one_shot_push => "this device pushes nothing".into(),
            None => "this device pushes no copies by itself".into(),
            Some(most) if *bytes > most || !self.fits(topology) => {
                let room = topology.config.all_reduce_bytes;
                let much = match *bytes > most {
                    true => format!(
                        "{bytes} bytes come to a rank, more than the {most} that are pushed at once"
                    ),
                    false => format!("{filled} bytes do not fit all_reduce_bytes, {room}"),
                };
                match pushed {
                    Some(_) => much,
                    None if room == 0 || !table.copies.in_pieces => much,
                    None => much + ", and pieces would be smaller than those of the scratch memory",
                }
            }
            Some(most) => {
                format!("{bytes} bytes come to a rank, not more than the {most} that are pushed")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Copies, Engines};
    use DataType::F32;
    use brigade_device::{CommConfig, Group, ParallelMode};

    #[test]
    fn what_fits_at_once_is_pushed_where_figures_have_it() {
        let group = Group {
            mode: ParallelMode::Tp,
            rank: 0,
            size: 4,
        };
        let mut topology = Topology {
            group,
            config: CommConfig::new(ParallelMode::Tp),
            engines: Engines::cuda(false, true),
        };
        topology.config.all_reduce_bytes = 3 * 65_536;
        let table = Table {
            copies: Copies {
                push_max_bytes: Some(1 << 30),
                in_pieces: true,
                source: "".into(),
            },
            ..Table::host()
        };
        let pieces = |topology: &Topology, table: &Table, elements: usize, otherwise: usize| {
            let scattered = scatter(&[1, elements, 0, 0], (F32, otherwise), topology, table);
            let packets = Packets::gathered(&[4 * elements, 0, 0, 0]);
            let copied = copy(packets, (F32, otherwise), topology, table);
            [scattered, copied].map(|pushed| pushed.map(|p| (p.pieces, p.piece_elements)))
        };
        let by = |topology: &Topology, table: &Table, elements: usize| {
            pieces(topology, table, elements, 1 << 20).map(|pushed| pushed.is_some())
        };
        assert_eq!(by(&topology, &table, 16_384), [true, false]);
        assert_eq!(by(&topology, &table, 16_385), [false, false]);
        assert_eq!(by(&topology, &table, 15_000), [true, true]);
        assert_eq!(by(&topology, &table, 0), [true, true]);
        assert_eq!(by(&topology, &Table::host(), 0), [false, false]);
        // In pieces, where these are large enough; of copies, there is no room for a whole unit, with the words behind it.
        let of = |otherwise| pieces(&topology, &table, 40_000, otherwise);
        assert_eq!(of(16_384), [Some((3, 14_336)), None]);
        assert_eq!(of(16_385), [None, None]);
        topology.config.all_reduce_bytes = 3 * 140_000;
        let of = |otherwise| pieces(&topology, &table, 40_000, otherwise);
        // Two pieces of as many bytes, cut at 4096.
        assert_eq!(of(1), [Some((2, 20_480)), Some((2, 20_480))]);
        let few = Table {
            copies: Copies {
                push_max_bytes: Some(3 * 70_000),
                ..table.copies.clone()
            },
            ..table.clone()
        };
        let of = |table: &Table| pieces(&topology, table, 40_000, 1);
        assert_eq!(of(&few), [Some((3, 14_336)), Some((3, 14_336))]);
        let whole = Table {
            copies: Copies {
                in_pieces: false,
                ..few.copies.clone()
            },
            ..few.clone()
        };
        assert_eq!(of(&whole), [None, None]);
        topology.config.all_reduce_bytes = 0;
        assert_eq!(by(&topology, &table, 0), [false, false]);
        topology.config.all_reduce_bytes = 1 << 30;
        topology.engines = Engines::cuda(false, false);
        assert_eq!(by(&topology, &table, 5), [false, false]);
    }
}
