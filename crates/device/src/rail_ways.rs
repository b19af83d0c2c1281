//! Which rows go along a rail, and whose they are behind it: the arithmetic of calls with experts across machines.
//!
//! What is known of a row travels as words beside it: the rank and the token that it is from, the token's slots, and the bits of their
//! weights. Whoever gets the row finds in them what is its own.

use crate::{Error, Machines, ReceivedIds, Result};
use std::ops::Range;

/// Whose slots are whose, over all machines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owners<'a> {
    pub(crate) machines: Machines,
    /// First slot of every rank, and at the end their number.
    pub(crate) first: &'a [usize],
}

impl Owners<'_> {
    fn rank_of(&self, slot: i32) -> Option<usize> {
        let slot = usize::try_from(slot).ok()?;
        let all = *self.first.last()?;
        (slot < all).then(|| self.first.partition_point(|&first| first <= slot) - 1)
    }
}

/// The numbers that a row's words are cut by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowWords {
    /// Experts of a token.
    pub(crate) k: usize,
    /// Whether they have weights.
    pub(crate) weights: bool,
}

impl RowWords {
    /// Words of a row.
    pub(crate) const fn count(self) -> usize {
        match self.weights {
            true => 2 + 2 * self.k,
            false => 2 + self.k,
        }
    }

    fn slots(self, words: &[i32]) -> &[i32] {
        &words[2..2 + self.k]
    }

    fn weights(self, words: &[i32]) -> &[i32] {
        &words[2 + self.k..]
    }
}

/// What one rank's tokens send along its rail. A token goes once to a machine, however many of its experts are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outward {
    /// The machines of every token, in their order, `[tokens, min(k, machines)]`; -1 behind the last.
    pub(crate) machines: Vec<i32>,
    /// Rows for each machine.
    pub(crate) counts: Vec<i32>,
    /// Words of all rows, by machine, then token.
    pub(crate) words: Vec<i32>,
}

impl Outward {
    /// Of `rank`'s tokens, whose slots and weights are `[tokens, k]`.
    pub(crate) fn new(
        owners: Owners<'_>,
        rank: usize,
        row: RowWords,
        slots: &[i32],
        weights: &[f32],
    ) -> Self {
        let count = owners.machines.count();
        let mut machines = Vec::new();
        let mut lists = vec![Vec::new(); count];
        for (token, slots) in slots.chunks_exact(row.k).enumerate() {
            let of = slots.iter().filter_map(|&slot| owners.rank_of(slot));
            let goes = marked(of.map(|rank| owners.machines.machine_of(rank)), count);
            let start = machines.len();
            for machine in goes {
                machines.push(machine as i32);
                lists[machine].push(token);
            }
            machines.resize(start + row.k.min(count), -1);
        }
        let mut words = Vec::new();
        for &token in lists.iter().flatten() {
            words.extend([rank as i32, token as i32]);
            words.extend(&slots[token * row.k..][..row.k]);
            if row.weights {
                let of_token = &weights[token * row.k..][..row.k];
                words.extend(of_token.iter().map(|w| w.to_bits() as i32));
            }
        }
        Self {
            machines,
            counts: lists.iter().map(|list| list.len() as i32).collect(),
            words,
        }
    }
}

/// The numbers below `count` that come, in order.
fn marked(come: impl Iterator<Item = usize>, count: usize) -> impl Iterator<Item = usize> {
    let mut marks = vec![false; count];
    for n in come {
        marks[n] = true;
    }
    (0..count).filter(move |&n| marks[n])
}

/// How many rows each machine has for each, out of the counts of all: `[machines, machines]`, row by row.
pub(crate) fn square(counts: &[i32], most: usize) -> Result<Vec<usize>> {
    let count = |&n: &i32| {
        let counted = usize::try_from(n).ok().filter(|n| *n <= most);
        counted.ok_or_else(|| Error::invalid("counts", n, format!("at most {most} rows")))
    };
    counts.iter().map(count).collect()
}

/// The same the other way round: what each machine has back for each.
pub(crate) fn turned(square: &[usize], machines: usize) -> Vec<usize> {
    let at = |i: usize| square[i % machines * machines + i / machines];
    (0..machines * machines).map(at).collect()
}

/// The machine of each of so many rows for each machine.
pub(crate) fn rows_of_machines(rows: &[usize]) -> impl Iterator<Item = usize> {
    let each = rows.iter().enumerate();
    each.flat_map(|(machine, &rows)| std::iter::repeat_n(machine, rows))
}

/// Takes what belongs to experts of these ranks, out of numbers for each of a token's experts.
pub(crate) fn take_entries(
    owners: Owners<'_>,
    row: RowWords,
    words: &[i32],
    ranks: &Range<usize>,
    from: &[f32],
    to: &mut [f32],
) {
    for ((&slot, &from), to) in row.slots(words).iter().zip(from).zip(to) {
        if owners
            .rank_of(slot)
            .is_some_and(|rank| ranks.contains(&rank))
        {
            *to = from;
        }
    }
}

/// Where rows that came along a rail go inside: for each, the places `local number * machines + machine it is from` of the ranks that have
/// experts for it, in their order, `[rows, min(k, ranks)]`; -1 behind the last. In the order of these places rows lie by the rank that they
/// are from, wherever they came along.
pub(crate) fn inward(
    owners: Owners<'_>,
    rank: usize,
    row: RowWords,
    words: &[i32],
) -> Result<Vec<i32>> {
    let machines = owners.machines;
    let here = machines.inside(machines.machine_of(rank));
    let mut places = Vec::new();
    for words in words.chunks_exact(row.count()) {
        let (source, _) = from(owners, words)?;
        let from = machines.machine_of(source);
        let of = row.slots(words).iter();
        let of = of.filter_map(|&slot| owners.rank_of(slot).filter(|r| here.contains(r)));
        let goes = marked(of.map(|rank| machines.local_of(rank)), machines.ranks());
        let start = places.len();
        places.extend(goes.map(|local| (local * machines.count() + from) as i32));
        places.resize(start + row.k.min(machines.ranks()), -1);
    }
    Ok(places)
}

/// The rank and the token that a row is from.
fn from(owners: Owners<'_>, words: &[i32]) -> Result<(usize, usize)> {
    let size = owners.machines.size();
    let source = usize::try_from(words[0]).ok().filter(|s| *s < size);
    match (source, usize::try_from(words[1])) {
        (Some(source), Ok(token)) => Ok((source, token)),
        _ => {
            let got = format!("a row from rank {}, token {}", words[0], words[1]);
            Err(Error::invalid("rows", got, format!("ranks below {size}")))
        }
    }
}

/// What a rank knows of the rows that came to it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrived {
    /// As [`Handle::sources`](crate::Handle::sources).
    pub(crate) sources: Vec<i32>,
    /// Rows from each rank.
    pub(crate) received: Vec<i32>,
    /// The first row of each rank, and at the end their number.
    pub(crate) offsets: Vec<i32>,
    /// `[room, k]`
    pub(crate) ids: Vec<i32>,
    /// `[room, k]`, if there are any.
    pub(crate) weights: Vec<f32>,
    /// Rows for each slot of this rank.
    pub(crate) counts: Vec<i32>,
}

impl Arrived {
    /// Of rows in the order of the ranks that they are from, with room for so many.
    pub(crate) fn new(
        owners: Owners<'_>,
        rank: usize,
        (row, ids): (RowWords, ReceivedIds),
        words: &[i32],
        room: usize,
    ) -> Result<Self> {
        let (size, own) = (owners.machines.size(), &owners.first[rank..rank + 2]);
        let all = owners.first[size] as i32;
        let none = match ids {
            ReceivedIds::Padded => all,
            ReceivedIds::Local | ReceivedIds::Global => -1,
        };
        let called = |slot: usize| match ids {
            ReceivedIds::Local => slot - own[0],
            ReceivedIds::Global | ReceivedIds::Padded => slot,
        };
        let mut arrived = Self {
            sources: vec![-1; room * 4],
            received: vec![0; size],
            offsets: Vec::with_capacity(size + 1),
            ids: vec![none; room * row.k],
            weights: vec![0.0; if row.weights { room * row.k } else { 0 }],
            counts: vec![0; own[1] - own[0]],
        };
        for (at, words) in words.chunks_exact(row.count()).enumerate().take(room) {
            let (source, token) = from(owners, words)?;
            let position = &mut arrived.received[source];
            let sources = [source as i32, token as i32, -1, *position];
            arrived.sources[at * 4..][..4].copy_from_slice(&sources);
            *position += 1;
            for (entry, &slot) in row.slots(words).iter().enumerate() {
                let slot = usize::try_from(slot).ok();
                let Some(slot) = slot.filter(|slot| (own[0]..own[1]).contains(slot)) else {
                    continue;
                };
                arrived.ids[at * row.k + entry] = called(slot) as i32;
                arrived.counts[slot - own[0]] += 1;
                if row.weights {
                    let bits = row.weights(words)[entry] as u32;
                    arrived.weights[at * row.k + entry] = f32::from_bits(bits);
                }
            }
        }
        let mut first = 0;
        for &n in &arrived.received {
            arrived.offsets.push(first);
            first += n;
        }
        arrived.offsets.push(first);
        Ok(arrived)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some numbers that depend on nothing.
    fn mixed(seed: &mut u64) -> usize {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) as usize
    }

    /// Rows of all ranks through both hops, by numbers alone: each comes once to every rank that has an expert for it, in the order of
    /// source rank and token, with its slots and weights.
    #[test]
    fn rows_come_once_in_the_order_of_ranks_and_tokens() -> Result<()> {
        for (seed, (count, ranks)) in [(2, 1), (2, 2), (3, 2), (2, 4), (4, 3)].iter().enumerate() {
            let machines = Machines::cut(count * ranks, *count).map_err(Error::from)?;
            let (size, row) = (
                machines.size(),
                RowWords {
                    k: 3,
                    weights: true,
                },
            );
            let mut seed = seed as u64;
            let first = (0..=size).scan(0, |sum, _| {
                let before = *sum;
                *sum += mixed(&mut seed) % 3;
                Some(before)
            });
            let first = first.collect::<Vec<_>>();
            let owners = Owners {
                machines,
                first: &first,
            };
            let all = first[size];
            let tokens: Vec<usize> = (0..size).map(|_| mixed(&mut seed) % 9).collect();
            let slots: Vec<Vec<i32>> = tokens
                .iter()
                .map(|n| {
                    let any = |_| mixed(&mut seed) % (all + 2);
                    (0..n * row.k).map(any).map(|s| s as i32 - 1).collect()
                })
                .collect();
            let weight = |rank: usize, i: usize| (rank * 100 + i) as f32 + 0.5;
            let outward: Vec<Outward> = (0..size)
                .map(|rank| {
                    let weights: Vec<f32> =
                        (0..slots[rank].len()).map(|i| weight(rank, i)).collect();
                    Outward::new(owners, rank, row, &slots[rank], &weights)
                })
                .collect();
            // Along each rail, and to the places inside.
            let n = row.count();
            let mut places = vec![vec![Vec::new(); *count]; size];
            for rank in 0..size {
                let mut came = Vec::new();
                for source in machines.rail(machines.local_of(rank)) {
                    let of = &outward[source];
                    let machine = machines.machine_of(rank);
                    let before: i32 = of.counts[..machine].iter().sum();
                    let (before, rows) = (before as usize, of.counts[machine] as usize);
                    came.extend(&of.words[before * n..(before + rows) * n]);
                }
                let goes = inward(owners, rank, row, &came)?;
                let per_row = row.k.min(*ranks);
                for (words, goes) in came.chunks(n).zip(goes.chunks(per_row)) {
                    for &place in goes.iter().filter(|p| **p >= 0) {
                        let (local, from) = (place as usize / count, place as usize % count);
                        let to = machines.rank(machines.machine_of(rank), local);
                        places[to][from].extend_from_slice(words);
                    }
                }
            }
            for rank in 0..size {
                let words = places[rank].concat();
                let own = first[rank]..first[rank + 1];
                let mine = |slot: &i32| own.contains(&(*slot as usize)) && *slot >= 0;
                let room = words.len() / n + 2;
                let kind = (row, ReceivedIds::Global);
                let got = Arrived::new(owners, rank, kind, &words, room)?;
                let mut at = 0;
                for (source, slots) in slots.iter().enumerate() {
                    assert_eq!(got.offsets[source] as usize, at);
                    for (token, of_token) in slots.chunks(row.k).enumerate() {
                        if !of_token.iter().any(mine) {
                            continue;
                        }
                        let from = [source as i32, token as i32];
                        assert_eq!(got.sources[at * 4..][..2], from);
                        for (e, slot) in of_token.iter().enumerate() {
                            let (id, w) = match mine(slot) {
                                true => (*slot, weight(source, token * row.k + e)),
                                false => (-1, 0.0),
                            };
                            assert_eq!(got.ids[at * row.k + e], id);
                            assert_eq!(got.weights[at * row.k + e], w);
                        }
                        at += 1;
                    }
                }
                assert_eq!((got.offsets[size] as usize, at), (at, words.len() / n));
                assert_eq!(got.sources[at * 4..], [-1; 8]);
            }
        }
        Ok(())
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let machines = Machines::cut(4, 2).unwrap();
        let owners = Owners {
            machines,
            first: &[0, 1, 2, 3, 4],
        };
        let row = RowWords {
            k: 1,
            weights: false,
        };
        for words in [[4, 0, 0], [-1, 0, 0], [0, -1, 0]] {
            assert!(inward(owners, 0, row, &words).is_err());
            let kind = (row, ReceivedIds::Local);
            assert!(Arrived::new(owners, 0, kind, &words, 1).is_err());
        }
        assert!(square(&[0, 3, -1, 0], 3).is_err());
        assert!(square(&[0, 4, 0, 0], 3).is_err());
        assert_eq!(turned(&[1, 2, 3, 4], 2), [1, 3, 2, 4]);
    }
}
