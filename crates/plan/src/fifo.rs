//! Queues between ranks: how many from one rank to another, and of what entries. Every call cuts the memory as its rows want it, since
//! all queues are empty when it begins.

use crate::{
    Topology,
    dispatch::{Sections, lines, part_bytes},
    reason,
};
use brigade_device::{CommConfig, Plan, Reason};

/// Most queues from one rank to another.
pub const MOST_CHANNELS: usize = 16;

/// The queues from one rank to another, one behind the other: a channel's entries follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queues {
    /// How many.
    pub channels: usize,
    /// Entries of each.
    pub depth: u32,
    /// Bytes of an entry.
    pub entry_bytes: usize,
    /// Most rows in one.
    pub entry_rows: usize,
    /// How so many rows lie in an entry.
    pub sections: Sections,
}

/// What an entry should have at least, so that its flag costs little beside it.
const ENTRY_BYTES: usize = 16 << 10;

/// What it has at most if it holds a row, so that who receives soon has something to take.
const MOST_ENTRY_BYTES: usize = 256 << 10;

/// Most rows in an entry.
const MOST_ROWS: usize = 1 << 24;

/// Channels and entries, the ones that let most go on side by side first.
const SHAPES: [(usize, u32); 7] = [
    (MOST_CHANNELS, 4),
    (8, 4),
    (4, 4),
    (4, 2),
    (2, 2),
    (1, 2),
    (1, 1),
];

/// What is known of queues before the memory is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Most queues from one rank to another.
    channels: usize,
    /// Entries of each, if the configuration says it.
    depth: Option<u32>,
    /// Bytes of an entry, if it says that.
    entry_bytes: Option<usize>,
}

impl Cut {
    /// Channels and entries that may be taken, in the order in which they are tried.
    fn shapes(self) -> impl Iterator<Item = (usize, u32)> {
        SHAPES
            .into_iter()
            .filter(move |&(channels, _)| channels <= self.channels)
            .map(move |(channels, depth)| (channels, self.depth.unwrap_or(depth)))
    }

    /// Bytes of an entry where a rank has so many for all; none, if there are too few.
    fn entry(self, (channels, depth): (usize, u32), part: usize) -> usize {
        let entries = channels * depth as usize;
        match self.entry_bytes {
            Some(bytes) if bytes.saturating_mul(entries) > part => 0,
            Some(bytes) => bytes,
            None => part_bytes(part, entries),
        }
    }
}

impl Queues {
    /// Of a communicator with so many bytes for queues, for rows that have `each` bytes in each section.
    ///
    /// # Errors
    /// [`reason::CAPACITY`] if no entry holds a row.
    ///
    /// ```
    /// use brigade_plan::fifo::Queues;
    /// let queues = Queues::new(8 << 20, 8, &[7168 * 2, 32])?;
    /// assert_eq!((queues.channels, queues.depth, queues.entry_rows), (16, 4, 1));
    /// # Ok::<_, brigade_device::Reason>(())
    /// ```
    pub fn new(fifo_bytes: usize, size: usize, each: &[usize]) -> Result<Self, Reason> {
        let cut = Cut {
            channels: MOST_CHANNELS,
            depth: None,
            entry_bytes: None,
        };
        Self::cut(cut, fifo_bytes, size, each)
    }

    fn cut(given: Cut, fifo_bytes: usize, size: usize, each: &[usize]) -> Result<Self, Reason> {
        let size = size.max(1);
        let part = part_bytes(fifo_bytes, size);
        let bytes = |rows: usize| {
            let bytes = Sections::new(each, rows).bytes;
            // Entries of a size that is given need not begin at lines.
            given.entry_bytes.map_or_else(|| lines(bytes), |_| bytes)
        };
        let one = bytes(1);
        if let Some(entry_bytes) = given.entry_bytes.filter(|&bytes| bytes < one) {
            return Err(reason::narrow_entry(one, entry_bytes));
        }
        let entry = |shape| match given.entry_bytes {
            Some(_) => given.entry(shape, part),
            None => given.entry(shape, part).min(one.max(MOST_ENTRY_BYTES)),
        };
        let fits = |least: usize| given.shapes().find(|&shape| entry(shape) >= least);
        let Some(shape) = fits(one.max(ENTRY_BYTES)).or_else(|| fits(one)) else {
            let entries = given.depth.unwrap_or(1) as usize;
            let queue = given.entry_bytes.unwrap_or(one).saturating_mul(entries);
            let need = queue.saturating_mul(size);
            return Err(reason::capacity("fifo_bytes", need, fifo_bytes));
        };
        let entry_bytes = entry(shape);
        // Bytes grow with rows, so they can be searched. A row of nothing takes no room.
        let (mut enough, mut too_many) = (1, entry_bytes.min(MOST_ROWS) + 1);
        while too_many - enough > 1 {
            let middle = enough.midpoint(too_many);
            match bytes(middle) <= entry_bytes {
                true => enough = middle,
                false => too_many = middle,
            }
        }
        Ok(Self {
            channels: shape.0,
            depth: shape.1,
            entry_bytes,
            entry_rows: enough,
            sections: Sections::new(each, enough),
        })
    }

    /// Bytes for queues with which none has fewer or smaller entries than it should, and bytes with which one holds a row.
    pub(crate) fn bytes(size: usize, each: &[usize]) -> (usize, usize) {
        let one = lines(Sections::new(each, 1).bytes);
        let (channels, depth) = SHAPES[0];
        let entries = channels * depth as usize;
        let all = one.max(ENTRY_BYTES).saturating_mul(entries);
        (all.saturating_mul(size), one.saturating_mul(size))
    }

    /// Where an entry begins, among all from one rank to another.
    pub const fn start(&self, channel: usize, entry: usize) -> usize {
        (channel * self.depth as usize + entry) * self.entry_bytes
    }

    /// Entries that so many rows take in a channel: one at least, which says how many there are.
    pub const fn entries(&self, rows: usize, channel: usize) -> usize {
        let all = rows.div_ceil(self.entry_rows);
        match all > channel {
            true => (all - channel).div_ceil(self.channels),
            false => 1,
        }
    }

    /// Which of so many rows are in the `n`-th entry of a channel: entries go to the channels in turn.
    pub fn rows(&self, rows: usize, channel: usize, n: usize) -> std::ops::Range<usize> {
        let first = ((n * self.channels + channel) * self.entry_rows).min(rows);
        first..(first + self.entry_rows).min(rows)
    }

    /// Those of a communicator: with entries as its configuration has them, if it says so, and no more channels than its device has there.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if a row does not fit an entry that is configured, or a queue of such entries the memory.
    pub fn of(topology: &Topology, each: &[usize]) -> Result<Self, Reason> {
        let config = &topology.config;
        let cut = Cut {
            channels: usize::from(topology.engines.queues).max(1),
            depth: config.fifo_depth,
            entry_bytes: config.fifo_entry_bytes,
        };
        Self::cut(cut, config.fifo_bytes, topology.group.size, each)
    }

    /// The same, for no more than so many rows from one rank to another: so few in an entry that all queues have some of them.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn for_rows(topology: &Topology, each: &[usize], rows: usize) -> Result<Self, Reason> {
        Ok(Self::of(topology, each)?.spread(each, rows))
    }

    fn spread(self, each: &[usize], rows: usize) -> Self {
        let share = rows.div_ceil(self.channels * self.depth as usize);
        let entry_rows = self.entry_rows.min(share.max(1));
        Self {
            entry_rows,
            sections: Sections::new(each, entry_rows),
            ..self
        }
    }

    /// In words, and whether somebody else than the plan said so.
    pub(crate) fn told(&self, config: &CommConfig) -> String {
        let given = match (config.fifo_depth, config.fifo_entry_bytes) {
            (None, None) => "",
            (Some(_), None) => ", so many as configured",
            (None, Some(_)) => ", of a size that is configured",
            (Some(_), Some(_)) => ", as configured",
        };
        format!("{}{given}", self.plan())
    }

    pub(crate) fn plan(&self) -> Plan {
        Plan::Queued {
            entry_bytes: self.entry_bytes,
            entry_rows: self.entry_rows,
            depth: self.depth,
            channels: self.channels as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What can be said of a cut.
    fn cuts() -> impl Strategy<Value = Cut> {
        let depth = prop::option::of((0u32..8).prop_map(|log| 1 << log));
        let entry_bytes = prop::option::of((1usize..50).prop_map(|lines| 64 * lines));
        let channels = 1usize..=MOST_CHANNELS;
        (channels, depth, entry_bytes).prop_map(|(channels, depth, entry_bytes)| Cut {
            channels,
            depth,
            entry_bytes,
        })
    }

    proptest! {
        #[test]
        fn every_row_is_in_one_entry(
            cut in cuts(), fifo_bytes in 0usize..1 << 18, size in 1usize..9, rows in 0usize..500,
            each in prop::collection::vec(0usize..700, 1..5), spread: bool,
        ) {
            let part = part_bytes(fifo_bytes, size);
            let queues = match Queues::cut(cut, fifo_bytes, size, &each) {
                Ok(queues) => queues,
                Err(why) => {
                    let rows = each.iter().map(|e| e.next_multiple_of(16)).sum::<usize>();
                    let one = Sections::COUNTS_BYTES + rows;
                    let one = if cut.entry_bytes.is_some() { one } else { lines(one) };
                    let entry = cut.entry_bytes.unwrap_or(one);
                    let least = entry * cut.depth.unwrap_or(1) as usize;
                    prop_assert!(one > entry || least > part, "{why}");
                    let field = if one > entry { "fifo_entry_bytes" } else { "fifo_bytes" };
                    prop_assert!(why.remedy.contains(field), "{why}");
                    return Ok(());
                }
            };
            let queues = if spread { queues.spread(&each, rows) } else { queues };
            prop_assert!(queues.channels <= cut.channels);
            prop_assert_eq!(queues.depth, cut.depth.unwrap_or(queues.depth));
            prop_assert_eq!(queues.entry_bytes, cut.entry_bytes.unwrap_or(queues.entry_bytes));
            prop_assert!(queues.sections.bytes <= queues.entry_bytes);
            prop_assert!(queues.entry_bytes.is_multiple_of(64));
            prop_assert!(queues.depth.is_power_of_two());
            let last = queues.start(queues.channels - 1, queues.depth as usize);
            prop_assert!(last <= part);
            let mut seen = vec![0; rows];
            for channel in 0..queues.channels {
                let entries = queues.entries(rows, channel);
                prop_assert!(entries > 0);
                for n in 0..entries {
                    queues.rows(rows, channel, n).for_each(|row| seen[row] += 1);
                }
                prop_assert!(queues.rows(rows, channel, entries).is_empty());
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
        }
    }

    #[test]
    fn few_rows_go_by_all_queues() {
        let queues = Queues::new(32 << 20, 2, &[14336]).unwrap();
        assert_eq!(
            (queues.channels, queues.depth, queues.entry_rows),
            (16, 4, 18)
        );
        let rows = |n| queues.clone().spread(&[14336], n).entry_rows;
        assert_eq!([0, 1, 128, 1000, 4096].map(rows), [1, 1, 2, 16, 18]);
    }

    #[test]
    fn what_no_entry_holds_is_refused() {
        let refused = Queues::new(1000, 4, &[300]).unwrap_err();
        assert_eq!(refused.code, reason::CAPACITY);
        assert!(Queues::new(0, 1, &[1]).is_err());
        // Memory for one entry alone will do.
        let one = Queues::new(4 * 512, 4, &[300]).unwrap();
        assert_eq!((one.channels, one.depth, one.entry_rows), (1, 1, 1));
    }
}
