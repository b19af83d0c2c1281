//! What is dispatched, and what must come of it: told token by token, in the words of the contract.

use crate::{
    copies::noise,
    matrix::{to_bytes, to_f64},
};
use brigade_device::{
    Arrangement, CombineSum, DataType, DispatchParams, Fp8Cast, ReceivedIds, Transport,
};
use half::{bf16, f16};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};
use std::collections::BTreeSet;

/// Where experts are.
#[derive(Clone, Debug)]
pub enum Where {
    /// Spread evenly.
    Even,
    /// In slots of a map, `[experts, copies]`.
    Map { slots: Vec<i32>, per_rank: usize },
    /// On the rank of their number.
    Ranks,
}

/// Whose experts a rank gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// Those of its tokens.
    Own,
    /// Those of all ranks' tokens, one rank's behind the other's.
    Ragged,
    /// The same, with room for as many of each.
    Padded,
}

/// How rows travel there and back, and how it is known where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct By {
    pub there: Option<Transport>,
    pub back: Option<Transport>,
    pub ids: Ids,
}

impl By {
    pub const fn of(there: Transport, back: Transport) -> Self {
        Self {
            there: Some(there),
            back: Some(back),
            ids: Ids::Own,
        }
    }
}

/// What all ranks dispatch.
#[derive(Clone, Debug)]
pub struct Case {
    pub size: usize,
    /// Ranks of a machine, where rows go across several.
    pub by_machine: Option<usize>,
    pub max_tokens: usize,
    pub hidden: usize,
    pub k: usize,
    pub experts: usize,
    pub dtype: DataType,
    pub arrangement: Arrangement,
    /// Whether there is room for a known number of rows.
    pub room: Option<usize>,
    pub places: Where,
    /// How received ids number slots.
    pub received_ids: ReceivedIds,
    pub cast: Option<Fp8Cast>,
    pub by: By,
    /// Ids are i64.
    pub wide: bool,
    /// Experts of every rank's tokens.
    pub ids: Vec<Vec<i64>>,
    /// Rows of every rank, as they are stored.
    pub rows: Vec<Vec<u8>>,
    /// Weights of every rank's tokens, if they have any.
    pub weights: Option<Vec<Vec<f32>>>,
    /// What is beside every row.
    pub beside: Vec<Beside>,
}

/// Something beside every row.
#[derive(Clone, Debug)]
pub struct Beside {
    pub dtype: DataType,
    /// Elements of a row.
    pub width: usize,
    /// What every rank has, as it is stored.
    pub of_ranks: Vec<Vec<u8>>,
}

impl Beside {
    /// None to as many as there may be: numbers of adapters, scales of blocks, and what has an odd number of bytes.
    fn draw(rng: &mut StdRng) -> Vec<Self> {
        let kinds = [
            (DataType::U8, 1),
            (DataType::U8, 2),
            (DataType::U8, 7),
            (DataType::I32, 1),
            (DataType::I64, 3),
            (DataType::BF16, 5),
            (DataType::F32, 1),
            (DataType::F32, 6),
        ];
        (0..rng.random_range(0..=DispatchParams::MOST_BESIDE))
            .map(|_| {
                let (dtype, width) = kinds[rng.random_range(0..kinds.len())];
                Self {
                    dtype,
                    width,
                    of_ranks: vec![],
                }
            })
            .collect()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.width * self.dtype.bytes()
    }
}

/// A row at its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Came {
    pub at: usize,
    pub source: usize,
    pub token: usize,
    /// Where there is a row for each expert.
    pub entry: Option<usize>,
}

impl Case {
    /// Random tokens of which a few have fewer experts, twice the same, or none.
    pub fn random(
        rng: &mut StdRng,
        size: usize,
        (max_tokens, hidden, k, experts): (usize, usize, usize, usize),
    ) -> Self {
        let case = Self {
            size,
            by_machine: None,
            max_tokens,
            hidden,
            k,
            experts,
            dtype: DataType::BF16,
            arrangement: Arrangement::Dense,
            room: None,
            places: Where::Even,
            received_ids: ReceivedIds::Local,
            cast: None,
            by: By {
                there: None,
                back: None,
                ids: Ids::Own,
            },
            wide: rng.random(),
            ids: vec![],
            rows: vec![],
            weights: Some(vec![]),
            beside: Beside::draw(rng),
        };
        let tokens: Vec<usize> = (0..size)
            .map(|_| rng.random_range(0..=max_tokens))
            .collect();
        case.with_tokens(rng, &tokens)
    }

    /// The same by these transports. What is pushed has room for a known number of rows.
    pub fn by(mut self, by: By) -> Self {
        self.by = by;
        let counted = self.arrangement == Arrangement::BySource;
        if by.there == Some(Transport::Pushed) && !counted {
            let most = (0..self.size).map(|rank| self.capacity(rank)).max();
            self.room = most;
        }
        self
    }

    /// The same with received ids that number slots in any way.
    pub fn with_any_ids(mut self, rng: &mut StdRng) -> Self {
        let all = [ReceivedIds::Local, ReceivedIds::Global, ReceivedIds::Padded];
        self.received_ids = all[rng.random_range(0..all.len())];
        self
    }

    /// The same with so many tokens of every rank, all of them new.
    pub fn with_tokens(mut self, rng: &mut StdRng, tokens: &[usize]) -> Self {
        self.ids = tokens
            .iter()
            .map(|&n| (0..n * self.k).map(|_| self.id(rng)).collect())
            .collect();
        self.weights = Some(tokens.iter().map(|&n| values(rng, n * self.k)).collect());
        self.fill_beside(rng);
        self.with_rows(rng)
    }

    /// The same tokens with other things beside them.
    pub fn with_any_beside(mut self, rng: &mut StdRng) -> Self {
        self.beside = Beside::draw(rng);
        self.fill_beside(rng);
        self
    }

    fn fill_beside(&mut self, rng: &mut StdRng) {
        let tokens: Vec<usize> = (0..self.size).map(|rank| self.tokens(rank)).collect();
        for beside in &mut self.beside {
            let bytes = tokens.iter().map(|n| n * beside.row_bytes());
            beside.of_ranks = bytes.map(|n| noise(rng, n)).collect();
        }
    }

    /// The same tokens with new rows: any bits, or numbers where they are cast.
    pub fn with_rows(mut self, rng: &mut StdRng) -> Self {
        let elements = |ids: &Vec<i64>| ids.len() / self.k * self.hidden;
        self.rows = match self.cast {
            Some(_) => {
                let rows = self.ids.iter().map(|ids| {
                    // Of very different sizes, block by block.
                    let values = values(rng, elements(ids)).into_iter().enumerate();
                    let scaled = values.map(|(i, x)| f64::from(x) * size_of_block(i % self.hidden));
                    to_bytes(self.dtype, &scaled.collect::<Vec<_>>())
                });
                rows.collect()
            }
            None => {
                let bytes = self.dtype.bytes();
                self.ids
                    .iter()
                    .map(|ids| noise(rng, elements(ids) * bytes))
                    .collect()
            }
        };
        self
    }

    /// The same with weights above 0: sums of a token's rows do not cancel, and are as near as these are.
    pub fn with_weights_above_0(mut self) -> Self {
        for weight in self.weights.iter_mut().flatten().flatten() {
            *weight = weight.abs();
        }
        self
    }

    /// What is left of it where these ranks are absent: experts that lie there are none, and nothing comes from there.
    pub fn without(&self, absent: &[usize]) -> Self {
        let mut left = self.clone();
        for rank in 0..self.size {
            for (i, id) in left.ids[rank].iter_mut().enumerate() {
                let slot = self.slot(rank, i / self.k, i % self.k);
                if slot.is_some_and(|slot| absent.contains(&self.owner(slot).0)) {
                    *id = -1;
                }
            }
        }
        for &rank in absent {
            left.ids[rank].clear();
        }
        left
    }

    fn id(&self, rng: &mut StdRng) -> i64 {
        let ids = match self.places {
            Where::Ranks => self.size,
            _ => self.experts,
        } as i64;
        match rng.random_range(0..12) {
            0 => -1,
            1 => *[ids, i64::from(i32::MAX), -7].choose(rng).unwrap_or(&-1),
            _ => rng.random_range(0..ids.max(1)),
        }
    }

    pub fn tokens(&self, rank: usize) -> usize {
        self.ids[rank].len() / self.k
    }

    /// Slots of every rank.
    pub fn slots(&self) -> Vec<usize> {
        (0..self.size).map(|rank| self.slots_of(rank)).collect()
    }

    fn slots_of(&self, rank: usize) -> usize {
        match &self.places {
            Where::Even => self.experts / self.size + usize::from(rank < self.experts % self.size),
            Where::Map { per_rank, .. } => *per_rank,
            Where::Ranks => 1,
        }
    }

    /// The slot, over all ranks, for one of a token's experts.
    pub fn slot(&self, rank: usize, token: usize, entry: usize) -> Option<usize> {
        let id = self.ids[rank][token * self.k + entry];
        let known = match self.places {
            Where::Ranks => self.size,
            _ => self.experts,
        };
        if id < 0 || id >= known as i64 {
            return None;
        }
        let id = id as usize;
        match &self.places {
            Where::Even | Where::Ranks => Some(id),
            Where::Map { slots, .. } => {
                let copies = slots.len() / self.experts;
                let mut of_expert = slots[id * copies..(id + 1) * copies]
                    .iter()
                    .filter(|&&s| s >= 0);
                let number = of_expert.clone().count().max(1);
                of_expert.nth((token + rank) % number).map(|&s| s as usize)
            }
        }
    }

    /// Whose a slot is, and which of that rank's.
    pub fn owner(&self, slot: usize) -> (usize, usize) {
        let mut left = slot;
        for rank in 0..self.size {
            let n = self.slots_of(rank);
            if left < n {
                return (rank, left);
            }
            left -= n;
        }
        panic!("slot {slot} is nobody's")
    }

    /// The slot of `rank` for one of a token's experts.
    pub fn local(&self, rank: usize, source: usize, token: usize, entry: usize) -> Option<usize> {
        let (owner, local) = self.owner(self.slot(source, token, entry)?);
        (owner == rank).then_some(local)
    }

    /// What one of a rank's slots is called in received ids, or none.
    pub fn called(&self, rank: usize, local: Option<usize>) -> i32 {
        let slots = self.slots();
        let first: usize = slots[..rank].iter().sum();
        let called = match (self.received_ids, local) {
            (ReceivedIds::Local, Some(slot)) => slot,
            (ReceivedIds::Global | ReceivedIds::Padded, Some(slot)) => first + slot,
            (ReceivedIds::Padded, None) => slots.iter().sum(),
            (ReceivedIds::Local | ReceivedIds::Global, None) => return -1,
        };
        called as i32
    }

    /// What slots of a rank get.
    pub fn counts(&self, rank: usize) -> Vec<i64> {
        let mut counts = vec![0; self.slots()[rank]];
        for (source, ids) in self.ids.iter().enumerate() {
            for entry in 0..ids.len() {
                if let Some(slot) = self.local(rank, source, entry / self.k, entry % self.k) {
                    counts[slot] += 1;
                }
            }
        }
        counts
    }

    /// What a rank must get, and how many rows that takes.
    pub fn received(&self, rank: usize) -> (Vec<Came>, usize) {
        let mut list = Vec::new();
        let mut end = 0usize;
        let of = |source: usize| (0..self.tokens(source)).map(move |token| (source, token));
        if let Arrangement::ByExpert { alignment } = self.arrangement {
            let mut of_slots = vec![vec![]; self.slots_of(rank)];
            for (source, token) in (0..self.size).flat_map(of) {
                for entry in 0..self.k {
                    if let Some(slot) = self.local(rank, source, token, entry) {
                        of_slots[slot].push((source, token, Some(entry)));
                    }
                }
            }
            for rows in of_slots {
                end = end.div_ceil(alignment) * alignment;
                for (source, token, entry) in rows {
                    list.push(Came {
                        at: end,
                        source,
                        token,
                        entry,
                    });
                    end += 1;
                }
            }
            return (list, end.div_ceil(alignment) * alignment);
        }
        for source in 0..self.size {
            if self.arrangement == Arrangement::BySource {
                end = source * self.max_tokens;
            }
            for (source, token) in of(source) {
                if (0..self.k).any(|entry| self.local(rank, source, token, entry).is_some()) {
                    list.push(Came {
                        at: end,
                        source,
                        token,
                        entry: None,
                    });
                    end += 1;
                }
            }
        }
        match self.arrangement {
            Arrangement::BySource => (list, self.size * self.max_tokens),
            _ => (list, end),
        }
    }

    /// Rows that there is room for.
    pub fn capacity(&self, rank: usize) -> usize {
        self.room.unwrap_or_else(|| self.received(rank).1)
    }

    /// What a rank's experts make of a row: any numbers, which everybody can make again.
    pub fn made(&self, rank: usize, row: &Came, hidden: usize, dtype: DataType) -> Vec<f64> {
        let names = [row.source, row.token, row.entry.map_or(99, |e| e)];
        let of_row = names.into_iter().fold(mixed(0, rank), mixed);
        (0..hidden)
            .map(|column| {
                let x = (mixed(of_row, column) >> 40) as f32 / (1 << 23) as f32 - 1.0;
                f64::from(rounded(dtype, x + 0.001))
            })
            .collect()
    }

    /// What a rank must get back for each of its tokens where experts make of a row what it was.
    pub fn echoed(&self, rank: usize, sum: CombineSum) -> Vec<f64> {
        let rows = to_f64(self.dtype, &self.rows[rank]);
        let times = |token: usize| -> f64 {
            let slots =
                (0..self.k).filter_map(|entry| Some((entry, self.slot(rank, token, entry)?)));
            match sum {
                CombineSum::Rank => {
                    let owners: BTreeSet<_> = slots.map(|(_, slot)| self.owner(slot).0).collect();
                    owners.len() as f64
                }
                _ => {
                    let weight = |entry| {
                        let all = self.weights.as_ref();
                        all.map_or(1.0, |w| f64::from(w[rank][token * self.k + entry]))
                    };
                    slots.map(|(entry, _)| weight(entry)).sum()
                }
            }
        };
        let times: Vec<_> = (0..self.tokens(rank)).map(times).collect();
        let each = rows.iter().enumerate();
        each.map(|(i, x)| x * times[i / self.hidden]).collect()
    }

    /// What a rank must get back for each of its tokens: bits in f32 by the order of the contract, and the same in f64.
    pub fn combined(
        &self,
        rank: usize,
        (sum, dtype, output, hidden): (CombineSum, DataType, DataType, usize),
        biases: &[Vec<f64>],
    ) -> (Vec<f32>, Vec<f64>) {
        let weights = self.weights.as_ref().map(|w| &w[rank]);
        let (mut exact, mut wide) = (vec![], vec![]);
        for token in 0..self.tokens(rank) {
            let weight = |entry: usize| weights.map_or(1.0, |w| w[token * self.k + entry]);
            // Parts in the order in which they are added, each a list of rows with their weights that is added first.
            let mut parts: Vec<Vec<(Vec<f64>, f32)>> = vec![];
            let of_owner = |owner: usize| {
                (0..self.k).filter(move |&e| self.local(owner, rank, token, e).is_some())
            };
            let row = |entry| Came {
                at: 0,
                source: rank,
                token,
                entry,
            };
            match sum {
                CombineSum::Expert => {
                    for entry in 0..self.k {
                        if let Some(slot) = self.slot(rank, token, entry) {
                            let made =
                                self.made(self.owner(slot).0, &row(Some(entry)), hidden, dtype);
                            parts.push(vec![(made, weight(entry))]);
                        }
                    }
                }
                CombineSum::Rank if self.by_machine.is_some() => {
                    let ranks = self.by_machine.unwrap_or(1);
                    for machine in (0..self.size).step_by(ranks) {
                        let owners = machine..machine + ranks;
                        let owners = owners.filter(|&o| of_owner(o).next().is_some());
                        let made = |o| (self.made(o, &row(None), hidden, dtype), 1.0);
                        parts.push(owners.map(made).collect());
                    }
                    parts.retain(|part| !part.is_empty());
                }
                CombineSum::Rank => {
                    for owner in (0..self.size).filter(|&o| of_owner(o).next().is_some()) {
                        parts.push(vec![(self.made(owner, &row(None), hidden, dtype), 1.0)]);
                    }
                }
                CombineSum::ExpertByRank => {
                    for owner in (0..self.size).filter(|&o| of_owner(o).next().is_some()) {
                        let made = |e| (self.made(owner, &row(Some(e)), hidden, dtype), weight(e));
                        parts.push(of_owner(owner).map(made).collect());
                    }
                }
            }
            for column in 0..hidden {
                let mut sums: Option<(f32, f64)> = None;
                let mut add =
                    |x: f32, y: f64| sums = Some(sums.map_or((x, y), |(a, b)| (a + x, b + y)));
                for part in &parts {
                    let mut of_part: Option<(f32, f64)> = None;
                    for (row, weight) in part {
                        let (x, y) = (
                            row[column] as f32 * weight,
                            row[column] * f64::from(*weight),
                        );
                        of_part = Some(of_part.map_or((x, y), |(a, b)| (a + x, b + y)));
                    }
                    let (x, y) = of_part.unwrap_or_default();
                    match sum {
                        CombineSum::ExpertByRank => add(rounded(dtype, x), y),
                        // A machine's sum goes back in the result's type.
                        CombineSum::Rank if self.by_machine.is_some() => add(rounded(output, x), y),
                        CombineSum::Rank | CombineSum::Expert => add(x, y),
                    }
                }
                for bias in biases {
                    let x = bias[token * hidden + column];
                    add(x as f32, x);
                }
                let (x, y) = sums.unwrap_or_default();
                exact.push(x);
                wide.push(y);
            }
        }
        (exact, wide)
    }
}

/// Bits that say nothing of those for other numbers: if rows had anything in common, sums of them could cancel as a whole. As in SplitMix64
/// (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
fn mixed(bits: u64, next: usize) -> u64 {
    let mut z = (bits ^ next as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// How large the numbers of a cast row are about a column.
pub fn size_of_block(column: usize) -> f64 {
    10f64.powi((column / 128 % 9) as i32 - 4)
}

/// The nearest value of a type, as f32.
pub fn rounded(dtype: DataType, x: f32) -> f32 {
    match dtype {
        DataType::F16 => f16::from_f32(x).to_f32(),
        DataType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

fn values(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| rng.random_range(0.05f32..1.0) * if rng.random() { 1.0 } else { -1.0 })
        .collect()
}
