//! Rows and experts: who sends what to whom, and where it lies when it has come. The same arithmetic for every device, and what
//! kernels are held against.

use crate::rows;
use brigade_device::{Arrangement, DispatchCall, PlacementCall, ReceivedIds};
use std::ops::Range;

/// Which slots are whose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// First of every rank, and at the end their number.
    first: Vec<usize>,
}

impl Slots {
    /// Of a group of `size`.
    ///
    /// ```
    /// use brigade_device::PlacementCall;
    /// use brigade_plan::routes::Slots;
    /// let slots = Slots::new(PlacementCall::Even { experts: 7 }, 3);
    /// assert_eq!((slots.of(0), slots.of(1), slots.of(2)), (0..3, 3..5, 5..7));
    /// assert_eq!(slots.rank_of(4), Some(1));
    /// ```
    pub fn new(placement: PlacementCall, size: usize) -> Self {
        let each = match placement {
            PlacementCall::Even { experts } => rows::split(experts, size),
            PlacementCall::Map { per_rank, .. } => vec![per_rank; size].into(),
            PlacementCall::Ranks => vec![1; size].into(),
        };
        Self {
            first: rows::offsets(&each).to_vec(),
        }
    }

    /// Of all ranks.
    pub fn total(&self) -> usize {
        self.first.last().copied().unwrap_or(0)
    }

    /// First of every rank, and at the end their number.
    pub fn firsts(&self) -> &[usize] {
        &self.first
    }

    /// Those of one rank.
    pub fn of(&self, rank: usize) -> Range<usize> {
        self.first[rank]..self.first[rank + 1]
    }

    /// What the first slot of a rank is called in the ids of the rows that it receives, and what none is.
    ///
    /// ```
    /// use brigade_device::{PlacementCall, ReceivedIds};
    /// use brigade_plan::routes::Slots;
    /// let slots = Slots::new(PlacementCall::Even { experts: 7 }, 3);
    /// assert_eq!(slots.called(1, ReceivedIds::Local), (0, -1));
    /// assert_eq!(slots.called(1, ReceivedIds::Global), (3, -1));
    /// assert_eq!(slots.called(1, ReceivedIds::Padded), (3, 7));
    /// ```
    pub fn called(&self, rank: usize, ids: ReceivedIds) -> (i32, i32) {
        // Checked to be countable.
        let (first, all) = (self.first[rank] as i32, self.total() as i32);
        match ids {
            ReceivedIds::Local => (0, -1),
            ReceivedIds::Global => (first, -1),
            ReceivedIds::Padded => (first, all),
        }
    }

    /// Whose a slot is, if there is such a slot.
    pub fn rank_of(&self, slot: usize) -> Option<usize> {
        (slot < self.total()).then(|| self.first.partition_point(|&first| first <= slot) - 1)
    }
}

/// Who chooses slots: a rank, and where experts are.
#[derive(Clone, Copy, Debug)]
pub struct Chooser<'a> {
    /// Where experts are.
    pub placement: PlacementCall,
    /// The slots of every expert, if there is a map.
    pub map: &'a [i32],
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
}

impl Chooser<'_> {
    /// The slot for expert `id` of `token`.
    pub fn slot(&self, id: i64, token: usize) -> Option<usize> {
        let id = usize::try_from(id).ok()?;
        match self.placement {
            PlacementCall::Even { experts } => (id < experts).then_some(id),
            PlacementCall::Ranks => (id < self.size).then_some(id),
            PlacementCall::Map {
                experts,
                copies,
                per_rank,
            } => {
                let of_expert = (id < experts).then(|| &self.map[id * copies..][..copies])?;
                let there = of_expert.iter().take_while(|&&slot| slot >= 0).count();
                let slot = match there {
                    0 => return None,
                    n => of_expert[(token + self.rank) % n],
                };
                usize::try_from(slot)
                    .ok()
                    .filter(|s| *s < per_rank * self.size)
            }
        }
    }
}

/// Where one rank's rows go: what [`ExpertLayout`](brigade_device::ExpertLayout) has, as numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routes {
    /// `[tokens, k]`
    pub slots: Vec<i32>,
    /// `[tokens, ranks]`
    pub positions: Vec<i32>,
    /// `[tokens * min(k, ranks)]`
    pub sent: Vec<i32>,
    /// `[ranks + 1]`
    pub sent_offsets: Vec<i32>,
    /// `[slots]`
    pub rows_per_slot: Vec<i32>,
}

impl Routes {
    /// Of tokens whose experts are `ids`, `k` each.
    pub fn new(ids: &[i64], k: usize, chooser: &Chooser<'_>) -> Self {
        let size = chooser.size;
        let all = Slots::new(chooser.placement, size);
        let tokens = ids.len() / k.max(1);
        let mut routes = Self {
            slots: Vec::with_capacity(ids.len()),
            positions: vec![-1; tokens * size],
            sent: Vec::with_capacity(tokens * k.min(size)),
            sent_offsets: Vec::with_capacity(size + 1),
            rows_per_slot: vec![0; all.total()],
        };
        let mut lists = vec![Vec::new(); size];
        for (token, ids) in ids.chunks_exact(k.max(1)).enumerate() {
            for &id in ids {
                let slot = chooser.slot(id, token);
                routes.slots.push(slot.map_or(-1, |s| s as i32));
                let Some((slot, rank)) = slot.and_then(|s| Some((s, all.rank_of(s)?))) else {
                    continue;
                };
                routes.rows_per_slot[slot] += 1;
                let position = &mut routes.positions[token * size + rank];
                if *position < 0 {
                    *position = lists[rank].len() as i32;
                    lists[rank].push(token as i32);
                }
            }
        }
        for list in lists {
            routes.sent_offsets.push(routes.sent.len() as i32);
            routes.sent.extend(list);
        }
        routes.sent_offsets.push(routes.sent.len() as i32);
        routes.sent.resize(tokens * k.min(size), -1);
        routes
    }

    /// Tokens that go to a rank, in their order.
    pub fn to(&self, rank: usize) -> &[i32] {
        &self.sent[self.sent_offsets[rank] as usize..self.sent_offsets[rank + 1] as usize]
    }
}

/// A row at its receiver, and which of what came from where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where it lies.
    pub at: usize,
    /// Who sent it.
    pub source: usize,
    /// Which of the rows from there.
    pub position: usize,
    /// Which of the token's experts it is for, where there is a row for each.
    pub entry: Option<usize>,
}

/// What says which rows come to a rank from one other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coming {
    /// Which tokens of the sender they are.
    pub tokens: Vec<i32>,
    /// The slots of each, `k`, counted from the first of this rank; -1 for others.
    pub slots: Vec<i32>,
}

impl Coming {
    /// To rank `me`, of what a rank sends by these routes.
    pub fn new(routes: &Routes, k: usize, all: &Slots, me: usize) -> Self {
        let (tokens, mine) = (routes.to(me).to_vec(), all.of(me));
        let local = |&slot: &i32| match usize::try_from(slot) {
            Ok(slot) if mine.contains(&slot) => (slot - mine.start) as i32,
            _ => -1,
        };
        let of_token = |&token: &i32| routes.slots[token as usize * k..][..k].iter().map(local);
        let slots = tokens.iter().flat_map(of_token).collect();
        Self { tokens, slots }
    }

    /// The weights of its slots, of those of all of the sender's tokens; 0 for slots of others.
    pub fn weights(&self, k: usize, of_sender: &[f32]) -> Vec<f32> {
        let of_token = |&token: &i32| &of_sender[token as usize * k..][..k];
        let weights = self.tokens.iter().flat_map(of_token);
        let mine = self.slots.iter().map(|&slot| slot >= 0);
        weights
            .zip(mine)
            .map(|(&weight, mine)| if mine { weight } else { 0.0 })
            .collect()
    }
}

/// How received rows lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arranged {
    /// All rows, in the order in which they lie.
    pub rows: Vec<Row>,
    /// First row of each source rank, or of each slot; and at the end what there must be room for.
    pub offsets: Vec<i32>,
    /// Rows for each slot.
    pub counts: Vec<i32>,
}

impl Arranged {
    /// Of what came from every rank: the slots of each row, counted from the first of this rank, `k` each.
    pub fn new(
        arrangement: Arrangement,
        max_tokens: usize,
        came: &[&[i32]],
        k: usize,
        slots: usize,
    ) -> Self {
        let mut counts = vec![0; slots];
        let mine = |slot: i32| usize::try_from(slot).ok().filter(|s| *s < slots);
        for slot in came.iter().flat_map(|c| c.iter()).filter_map(|&s| mine(s)) {
            counts[slot] += 1;
        }
        let of_source = |source: usize| came[source].len() / k.max(1);
        let lengths: Vec<usize> = match arrangement {
            Arrangement::Dense => (0..came.len()).map(of_source).collect(),
            Arrangement::BySource => vec![max_tokens; came.len()],
            Arrangement::ByExpert { alignment } => counts
                .iter()
                .map(|&n: &i32| (n as usize).next_multiple_of(alignment.max(1)))
                .collect(),
        };
        let offsets = rows::offsets(&lengths);
        let mut rows = Vec::new();
        if let Arrangement::ByExpert { .. } = arrangement {
            let mut next = offsets.clone();
            for (source, slots) in came.iter().enumerate() {
                for (i, slot) in slots.iter().enumerate() {
                    let Some(slot) = mine(*slot) else { continue };
                    rows.push(Row {
                        at: next[slot],
                        source,
                        position: i / k,
                        entry: Some(i % k),
                    });
                    next[slot] += 1;
                }
            }
            rows.sort_by_key(|row| row.at);
        } else {
            for (source, first) in offsets.iter().take(came.len()).enumerate() {
                rows.extend((0..of_source(source)).map(|position| Row {
                    at: first + position,
                    source,
                    position,
                    entry: None,
                }));
            }
        }
        Self {
            rows,
            offsets: offsets.iter().map(|&o| o as i32).collect(),
            counts,
        }
    }

    /// What a receiver with room for so many rows is told of them, by what `came` and the weights of that. Its ids are called so, from the
    /// first on, and none so: [`Slots::called`].
    pub fn told(
        &self,
        call: &DispatchCall,
        room: usize,
        (first, none): (i32, i32),
        came: &[Coming],
        weights: &[Vec<f32>],
    ) -> Told {
        let (k, most) = (call.k, call.max_tokens);
        let (per_row, entries) = match call.arrangement {
            Arrangement::ByExpert { .. } => (1, came.len() * most * k),
            Arrangement::Dense | Arrangement::BySource => (k, 0),
        };
        let mut told = Told {
            sources: vec![-1; room * 4],
            ids: vec![none; room * per_row],
            weights: vec![0.0; room * per_row],
            rows_of: vec![-1; entries],
        };
        for row in &self.rows {
            let Row {
                at,
                source,
                position,
                entry,
            } = *row;
            let token = came[source].tokens[position];
            let named = entry.map_or(-1, |e| e as i32);
            told.sources[at * 4..][..4].copy_from_slice(&[
                source as i32,
                token,
                named,
                position as i32,
            ]);
            let of = entry.map_or(0..k, |e| e..e + 1);
            let of = position * k + of.start..position * k + of.end;
            let ids = told.ids[at * per_row..][..per_row].iter_mut();
            for (id, &slot) in ids.zip(&came[source].slots[of.clone()]) {
                *id = if slot < 0 { none } else { first + slot };
            }
            if let Some(weights) = weights.get(source) {
                told.weights[at * per_row..][..per_row].copy_from_slice(&weights[of]);
            }
            if let Some(entry) = entry {
                told.rows_of[(source * most + position) * k + entry] = at as i32;
            }
        }
        told
    }

    /// Rows that there must be room for.
    pub fn room(&self) -> usize {
        self.offsets.last().map_or(0, |&n| n as usize)
    }
}

/// What a receiver is told of its rows: what [`HandleParts`](brigade_device::HandleParts) has, as numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// `[rows, 4]`
    pub sources: Vec<i32>,
    /// `[rows, k]`, or `[rows]` by expert.
    pub ids: Vec<i32>,
    /// The same; 0 if rows have none.
    pub weights: Vec<f32>,
    /// By expert `[ranks, max_tokens, k]`.
    pub rows_of: Vec<i32>,
}

/// Rows in the order in which they lie, out of where each is from: source rank, token, entry and position, as a
/// [`Handle`](brigade_device::Handle) has them.
pub fn rows_of_sources(sources: &[i32]) -> Vec<Row> {
    let row = |(at, s): (usize, &[i32])| {
        Some(Row {
            at,
            source: usize::try_from(s[0]).ok()?,
            position: usize::try_from(s[3]).ok()?,
            entry: usize::try_from(s[2]).ok(),
        })
    };
    sources
        .chunks_exact(4)
        .enumerate()
        .filter_map(row)
        .collect()
}
