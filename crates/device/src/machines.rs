//! Which ranks share a machine.

use crate::{FaultRecord, Reason};
use std::{fmt, ops::Range};

/// Machines of equally many ranks. Ranks are numbered machine by machine: rank = machine * ranks of a machine + local number. Ranks
/// with the same local number, one on each machine, are a *rail*.
///
/// A machine is whatever its ranks say it is: [`of`](Self::of) asks them, and [`cut`](Self::cut) makes *virtual machines* of one
/// group, so that what runs across machines can be tried on one.
///
/// ```
/// use brigade_device::Machines;
/// let machines = Machines::cut(6, 3).unwrap();
/// assert_eq!((machines.machine_of(5), machines.local_of(5)), (2, 1));
/// assert_eq!(machines.rail(1).collect::<Vec<_>>(), [1, 3, 5]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Machines {
    count: usize,
    ranks: usize,
}

impl Machines {
    /// `size` ranks cut into so many machines.
    ///
    /// # Errors
    /// A [`Reason`] with `unequal-machines` if they do not all have as many ranks, and at least one.
    pub fn cut(size: usize, machines: usize) -> Result<Self, Reason> {
        if machines == 0 || size == 0 || !size.is_multiple_of(machines) {
            return Err(unequal(format!(
                "{size} ranks do not make {machines} machines of equally many"
            )));
        }
        Ok(Self {
            count: machines,
            ranks: size / machines,
        })
    }

    /// From what each rank calls its machine, in rank order. Names are compared, and nothing else.
    ///
    /// # Errors
    /// A [`Reason`] with `unequal-machines` if one has more ranks than another, or `machine-order` if ranks of one machine do not
    /// follow each other.
    pub fn of<N: AsRef<[u8]>>(names: &[N]) -> Result<Self, Reason> {
        let starts: Vec<usize> = (0..names.len())
            .filter(|&r| r == 0 || names[r].as_ref() != names[r - 1].as_ref())
            .collect();
        for (i, &start) in starts.iter().enumerate() {
            let name = names[start].as_ref();
            if let Some(&other) = starts[..i].iter().find(|&&o| names[o].as_ref() == name) {
                return Err(Reason::new(
                    "machine-order",
                    format!(
                        "ranks {other} and {start} share a machine, and ranks between them do not"
                    ),
                    "number the ranks machine by machine",
                ));
            }
        }
        let ends = starts.iter().skip(1).copied().chain([names.len()]);
        let ranks: Vec<usize> = starts.iter().zip(ends).map(|(s, e)| e - s).collect();
        match ranks.first() {
            Some(&first) if ranks.iter().all(|&r| r == first) => Ok(Self {
                count: ranks.len(),
                ranks: first,
            }),
            _ => Err(unequal(format!("machines have {ranks:?} ranks"))),
        }
    }

    /// How many machines.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Ranks of each; there are as many rails.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Ranks of all.
    pub fn size(&self) -> usize {
        self.count * self.ranks
    }

    /// The machine of a rank.
    pub fn machine_of(&self, rank: usize) -> usize {
        rank / self.ranks
    }

    /// A rank's number on its machine, which is that of its rail.
    pub fn local_of(&self, rank: usize) -> usize {
        rank % self.ranks
    }

    /// The rank with this number on this machine.
    pub fn rank(&self, machine: usize, local: usize) -> usize {
        machine * self.ranks + local
    }

    /// All ranks of a machine.
    pub fn inside(&self, machine: usize) -> Range<usize> {
        self.rank(machine, 0)..self.rank(machine + 1, 0)
    }

    /// All ranks of a rail, in the order of machines.
    pub fn rail(&self, local: usize) -> impl Iterator<Item = usize> + use<> {
        let machines = *self;
        (0..self.count).map(move |machine| machines.rank(machine, local))
    }
}

/// Which ranks the numbers of a group stand for that is part of a hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Those of one machine.
    Inside,
    /// Those of one rail: its machines.
    Rail,
}

impl Machines {
    /// The record with ranks of all machines, as `rank` of these reads one of a group that it is in.
    #[must_use]
    pub fn over_all(&self, record: FaultRecord, rank: usize, numbers: Numbers) -> FaultRecord {
        if record.across == 1 {
            return record;
        }
        let of = |number: u32| {
            let number = number as usize;
            let rank = match numbers {
                Numbers::Inside => self.rank(self.machine_of(rank), number),
                Numbers::Rail => self.rank(number, self.local_of(rank)),
            };
            rank as u32
        };
        FaultRecord {
            rank: of(record.rank),
            peer: of(record.peer),
            across: 1,
            ..record
        }
    }
}

impl fmt::Display for Machines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.count, self.ranks)
    }
}

fn unequal(what: String) -> Reason {
    Reason::new(
        "unequal-machines",
        what,
        "take as many ranks of every machine, or cut the group into machines of your own",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_told_by_name_in_rank_order() {
        let of = |names: &[&str]| Machines::of(names).map_err(|r| r.code);
        let cut = |size, machines| Machines::cut(size, machines).map_err(|r| r.code);
        assert_eq!(of(&["a", "a", "b", "b", "c", "c"]), cut(6, 3));
        assert_eq!(of(&["b", "a"]), cut(2, 2));
        assert_eq!(of(&["a", "a"]), cut(2, 1));
        assert_eq!(of(&["a", "b", "a", "b"]), Err("machine-order"));
        assert_eq!(of(&["a", "a", "b"]), Err("unequal-machines"));
        assert_eq!(of(&[]), Err("unequal-machines"));
        for (size, machines) in [(5, 2), (0, 1), (4, 0), (2, 4)] {
            assert_eq!(cut(size, machines), Err("unequal-machines"));
        }
    }

    #[test]
    fn records_name_ranks_of_all_machines_once() {
        let mut words = [0; 8];
        // A timeout of rank 1, which waited for rank 0.
        (words[0], words[1]) = (1, 1);
        let record = FaultRecord::from_words(words).unwrap();
        let machines = Machines::cut(6, 3).unwrap();
        let named = |record: FaultRecord| (record.rank, record.peer, record.across);
        let inside = machines.over_all(record, 4, Numbers::Inside);
        let rail = machines.over_all(record, 5, Numbers::Rail);
        assert_eq!((named(inside), named(rail)), ((5, 4, 1), (3, 1, 1)));
        assert_eq!(machines.over_all(rail, 0, Numbers::Inside), rail);
    }

    #[test]
    fn every_rank_is_in_one_machine_and_on_one_rail() {
        for (count, ranks) in [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (4, 4)] {
            let machines = Machines::cut(count * ranks, count).unwrap();
            assert_eq!(machines.to_string(), format!("{count}x{ranks}"));
            for rank in 0..machines.size() {
                let (machine, local) = (machines.machine_of(rank), machines.local_of(rank));
                assert_eq!(machines.rank(machine, local), rank);
                assert!(machines.inside(machine).contains(&rank));
                assert_eq!(machines.rail(local).nth(machine), Some(rank));
            }
        }
    }
}
