//! Dispatch: how many rows go at a time, and where what belongs to them lies on the way.

use crate::{Table, Topology, fifo::Queues, reason, records};
use brigade_device::{Arrangement, DispatchCall, Launch, Plan, Reason, Transport};
use std::ops::Range;

pub(crate) fn plan(
    call: &DispatchCall,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    let own_only = matches!(call.choice, Some(Transport::Pushed | Transport::Fifo));
    if call.gathered && own_only {
        return Err(reason::gathered_ids());
    }
    let pushed = || match call.gathered {
        true => Err(reason::gathered_ids()),
        false => records::dispatch(call, topology),
    };
    let limit = table.experts.of(call).push_limit(topology.config.sm_budget);
    if let Some(plan) = rows_pushed(call.choice, pushed, topology, limit)? {
        return Ok(plan);
    }
    if call.choice == Some(Transport::Fifo) {
        let rows = call.max_tokens;
        return queued(rows, &Queues::for_rows(topology, &sections(call), rows)?);
    }
    let cut = |transport, load| {
        let room = ("dispatch_bytes", topology.config.dispatch_bytes);
        let bytes = |rows| Sections::part(call, load, rows).bytes;
        let most = (call.max_tokens, table.experts.of(call).rows_at_a_time);
        let (rows, pieces) = pieces(most, topology, room, bytes)?;
        Ok(in_pieces(transport, rows, pieces))
    };
    if call.choice == Some(Transport::InPlace) {
        if call.arrangement != Arrangement::BySource {
            return Err(reason::not_in_place());
        }
        if !topology.engines.rows_in_place {
            return cut(Transport::InPlace, Load::of(call));
        }
        let need = InPlace::of(call, topology.group.size).bytes(topology.group.size);
        let have = topology.config.dispatch_bytes;
        if need > have {
            return Err(reason::capacity("dispatch_bytes", need, have));
        }
        let steps = in_pieces(Transport::InPlace, call.max_tokens, 1);
        return Ok(pushed().map_or(steps, records::Pushed::plan));
    }
    if call.choice == Some(Transport::Gather) {
        // The longer of the two says how much memory there must be.
        let row = |load| Sections::part(call, load, 1).bytes;
        if Load::of(call) == Load::Whole && row(Load::Ways) > row(Load::Rest) {
            cut(Transport::Gather, Load::Ways)?;
        }
        return cut(Transport::Gather, Load::Rest);
    }
    or_pushed(
        call.choice,
        cut(Transport::OneSided, Load::of(call)),
        pushed,
    )
}

/// Rows of a sender at a time of which no more travels than which they are, through halves of so many bytes; 1 at least.
pub fn ways_rows(call: &DispatchCall, half_bytes: usize, size: usize) -> usize {
    let bytes = |rows| Sections::part(call, Load::Ways, rows).bytes;
    fitting(call.max_tokens, part_bytes(half_bytes, size), bytes).unwrap_or(1)
}

/// The plan if rows are pushed: because that is forced, or because what may come is not more than a limit.
pub(crate) fn rows_pushed(
    choice: Option<Transport>,
    pushed: impl Fn() -> Result<records::Pushed, Reason>,
    topology: &Topology,
    limit: Option<usize>,
) -> Result<Option<Plan>, Reason> {
    if !topology.engines.dispatches {
        return Err(reason::no_experts());
    }
    match choice {
        Some(Transport::OneSided | Transport::Fifo | Transport::Gather | Transport::InPlace) => {
            Ok(None)
        }
        Some(Transport::Pushed) => Ok(Some(pushed()?.plan())),
        None => {
            let few = |of: &records::Pushed| limit.is_some_and(|most| of.is_within(most));
            Ok(pushed().ok().filter(few).map(records::Pushed::plan))
        }
    }
}

/// Rows that are not to be pushed are so all the same where halves hold none of them, unless that is forced. Where they cannot be pushed
/// either, halves are what there should be more of.
pub(crate) fn or_pushed(
    choice: Option<Transport>,
    halves: Result<Plan, Reason>,
    pushed: impl Fn() -> Result<records::Pushed, Reason>,
) -> Result<Plan, Reason> {
    halves.or_else(|why| match choice {
        None => pushed().map(records::Pushed::plan).map_err(|_| why),
        Some(_) => Err(why),
    })
}

/// Through queues: as many rows at a time as an entry holds.
pub(crate) fn queued(rows: usize, queues: &Queues) -> Result<Plan, Reason> {
    let pieces = rows.div_ceil(queues.entry_rows).max(1);
    Ok(in_pieces(Transport::Fifo, queues.entry_rows, pieces))
}

/// The plan for so many pieces of so many rows.
pub(crate) fn in_pieces(transport: Transport, piece_rows: usize, pieces: usize) -> Plan {
    Plan::Experts {
        transport,
        piece_rows,
        pieces,
        launch: Launch::default(),
    }
}

/// As many rows of a sender at a time as fit its part of a half, and about `most` if there are more; and how often.
pub(crate) fn pieces(
    (rows, most): (usize, Option<usize>),
    topology: &Topology,
    (field, have): (&'static str, usize),
    bytes: impl Fn(usize) -> usize,
) -> Result<(usize, usize), Reason> {
    let size = topology.group.size.max(1);
    let Some(fits) = fitting(rows, part_bytes(have, size), &bytes) else {
        return Err(reason::capacity(field, half_bytes(bytes(1), size), have));
    };
    let even = most.map_or(fits, |most| rows.div_ceil(rows.div_ceil(most).max(1)));
    let at_a_time = fits.min(even).max(1);
    Ok((at_a_time, rows.div_ceil(at_a_time).max(1)))
}

/// As many of `rows` rows as a part of a half holds, if it holds one.
fn fitting(rows: usize, part: usize, bytes: impl Fn(usize) -> usize) -> Option<usize> {
    if bytes(1) > part {
        return None;
    }
    // Bytes grow with rows, so they can be searched.
    let (mut fits, mut too_many) = (1, rows.max(1) + 1);
    while too_many - fits > 1 {
        let middle = fits.midpoint(too_many);
        match bytes(middle) <= part {
            true => fits = middle,
            false => too_many = middle,
        }
    }
    Some(fits)
}

/// What a sender has of a half of so many bytes, that all of `size` share.
pub const fn part_bytes(half_bytes: usize, size: usize) -> usize {
    half_bytes / size / ALIGN_BYTES * ALIGN_BYTES
}

/// Of a half in which each of `size` has a part of so many bytes.
pub(crate) fn half_bytes(part_bytes: usize, size: usize) -> usize {
    lines(part_bytes).saturating_mul(size)
}

/// So many bytes or more, as whole lines of the cache; what cannot be counted is too much for any memory.
pub(crate) fn lines(bytes: usize) -> usize {
    bytes
        .checked_next_multiple_of(ALIGN_BYTES)
        .unwrap_or(usize::MAX)
}

/// Parts, and the rows in them, begin at a line of a GPU's memory, since the halves of two are slow to travel; other sections at the
/// widest access.
const ALIGN_BYTES: usize = 128;
pub(crate) const SECTION_BYTES: usize = 16;

/// What a sender's part of a half holds, for so many rows: counts first, and then a section for each thing that a row has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sections {
    /// Bytes of a row in each section, and where the section begins.
    sections: Vec<(usize, usize)>,
    /// All of it.
    pub bytes: usize,
}

/// What a row has on the way to its experts, in this order; and then what is beside it, one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Its elements.
    Row,
    /// Scales of a row that was cast.
    Scales,
    /// Which token of the sender it is, i32.
    Token,
    /// Its slots, counted from the first of the receiver, i32 `[k]`.
    Slots,
    /// Their weights, f32 `[k]`.
    Weights,
    /// What is beside it.
    Beside(usize),
}

impl Section {
    /// Its number.
    pub const fn index(self) -> usize {
        match self {
            Self::Row => 0,
            Self::Scales => 1,
            Self::Token => 2,
            Self::Slots => 3,
            Self::Weights => 4,
            Self::Beside(i) => 5 + i,
        }
    }
}

/// What of a row travels at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// All of it.
    Whole,
    /// What says which row it is: its token, its slots and their weights.
    Ways,
    /// The rest.
    Rest,
}

impl Load {
    /// Rows of which it is known where they go bring no tokens, slots and weights.
    pub const fn of(call: &DispatchCall) -> Self {
        if call.again || call.gathered {
            Self::Rest
        } else {
            Self::Whole
        }
    }
}

/// Bytes of a row of a dispatch in each section.
pub fn sections(call: &DispatchCall) -> Vec<usize> {
    sections_of(call, Load::of(call))
}

fn sections_of(call: &DispatchCall, load: Load) -> Vec<usize> {
    let (scale_type, scales) = match call.cast {
        Some(cast) => cast.scales(call.hidden),
        None => (call.dtype, 0),
    };
    let unless = |left_out: Load, bytes: usize| if load == left_out { 0 } else { bytes };
    let rest = |bytes| unless(Load::Ways, bytes);
    let ways = |bytes| unless(Load::Rest, bytes);
    let mut each = vec![
        rest(call.hidden * call.wire_type().bytes()),
        rest(scales * scale_type.bytes()),
        ways(4),
        ways(4 * call.k),
        ways(if call.weights { 4 * call.k } else { 0 }),
    ];
    each.extend(call.beside_bytes.iter().map(|&bytes| rest(bytes)));
    each
}

impl Sections {
    /// Bytes of the counts, and what is left of their line.
    pub const COUNTS_BYTES: usize = ALIGN_BYTES;

    /// For rows of a dispatch.
    pub fn dispatch(call: &DispatchCall, rows: usize) -> Self {
        Self::part(call, Load::of(call), rows)
    }

    /// For a part of what they are.
    pub fn part(call: &DispatchCall, load: Load, rows: usize) -> Self {
        Self::new(&sections_of(call, load), rows)
    }

    /// For rows that have so many bytes in each section.
    pub(crate) fn new(each: &[usize], rows: usize) -> Self {
        let mut bytes = Self::COUNTS_BYTES;
        let sections = each
            .iter()
            .map(|&each| {
                let start = bytes;
                let of_rows = each.saturating_mul(rows).saturating_add(SECTION_BYTES - 1);
                bytes = bytes.saturating_add(of_rows / SECTION_BYTES * SECTION_BYTES);
                (each, start)
            })
            .collect();
        Self { sections, bytes }
    }

    /// Where a section of `rows` rows lies.
    pub fn of(&self, section: Section, rows: usize) -> Range<usize> {
        self.at(section.index(), rows)
    }

    /// The same for the section of this number.
    pub fn at(&self, index: usize, rows: usize) -> Range<usize> {
        let (each, start) = self.sections[index];
        start..start + each * rows
    }

    /// Bytes of all that a row has.
    pub fn all_bytes(&self) -> usize {
        self.sections.iter().map(|(each, _)| each).sum()
    }

    /// How many sections there are.
    pub fn count(&self) -> usize {
        self.sections.len()
    }

    /// Bytes of a row in a section.
    pub fn row_bytes(&self, section: Section) -> usize {
        self.sections[section.index()].0
    }
}

/// A half whose rows stay where they come: first the rows, `[ranks, max_tokens, ..]`, and behind them a part of each sender for what
/// else a row has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InPlace {
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes of what a rank may send.
    pub source_bytes: usize,
    /// Where parts begin.
    pub parts_start: usize,
    /// Bytes of a part.
    pub part_bytes: usize,
    /// Where sections lie in a part. That of rows is empty.
    pub sections: Sections,
}

impl InPlace {
    /// For all rows of a dispatch.
    pub fn of(call: &DispatchCall, size: usize) -> Self {
        let mut each = sections(call);
        let row_bytes = std::mem::take(&mut each[Section::Row.index()]);
        let sections = Sections::new(&each, call.max_tokens);
        let source_bytes = row_bytes.saturating_mul(call.max_tokens);
        let rows = source_bytes.saturating_mul(size);
        Self {
            row_bytes,
            source_bytes,
            parts_start: lines(rows),
            part_bytes: lines(sections.bytes),
            sections,
        }
    }

    /// All of it.
    pub fn bytes(&self, size: usize) -> usize {
        self.parts_start
            .saturating_add(self.part_bytes.saturating_mul(size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Engines;
    use brigade_device::{
        Arrangement, CommConfig, DataType, Group, ParallelMode, PlacementCall, ReceivedIds,
        Transport,
    };

    fn planned(call: &DispatchCall, dispatch_bytes: usize) -> Result<(usize, usize), String> {
        let topology = Topology {
            group: Group {
                mode: ParallelMode::Ep,
                rank: 0,
                size: 2,
            },
            config: CommConfig {
                dispatch_bytes,
                ..CommConfig::new(ParallelMode::Ep)
            },
            engines: Engines::host(),
        };
        match plan(call, &topology, &Table::host()) {
            Ok(Plan::Experts {
                transport,
                piece_rows,
                pieces,
                ..
            }) => {
                assert_eq!(transport, Transport::Gather);
                Ok((piece_rows, pieces))
            }
            Ok(other) => panic!("{other}"),
            Err(reason) => Err(reason.code.to_string()),
        }
    }

    #[test]
    fn what_gathers_goes_in_pieces_of_its_own() {
        // 16 bytes a row, and 4 + 2 * 128 that say which it is.
        let call = DispatchCall {
            max_tokens: 100,
            hidden: 8,
            dtype: DataType::BF16,
            beside_bytes: [].into_iter().collect(),
            k: 32,
            weights: true,
            placement: PlacementCall::Ranks,
            arrangement: Arrangement::Dense,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            again: false,
            gathered: false,
            cast: None,
            choice: Some(Transport::Gather),
        };
        assert_eq!(planned(&call, 2 * 1024), Ok((56, 2)));
        assert_eq!(ways_rows(&call, 2 * 1024, 2), 3);
        // Where the ways are known, only rows have to fit.
        assert_eq!(planned(&call, 2 * 256), Err(reason::CAPACITY.into()));
        let (mut again, mut gathered) = (call.clone(), call);
        (again.again, gathered.gathered) = (true, true);
        for known in [again, gathered] {
            assert_eq!(planned(&known, 2 * 256), Ok((8, 13)));
        }
    }
}
