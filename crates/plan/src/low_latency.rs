//! The low-latency exchange: where rows lie at their receiver. Every row has a place that its sender knows, whatever else is sent.

use crate::{
    Topology,
    dispatch::{SECTION_BYTES, Sections, half_bytes, part_bytes},
    logfmt, reason,
    routes::Slots,
};
use brigade_device::{
    CombineCast, CombineSum, CommConfig, Fp8Cast, LowLatencyCombineCall, LowLatencyDispatchCall,
    Plan, Reason,
};

pub(crate) fn dispatch(call: &LowLatencyDispatchCall, topology: &Topology) -> Result<Plan, Reason> {
    let size = topology.group.size.max(1);
    // Names and places of rows are told in 32 bits.
    let experts = Words::new(call, size).experts;
    let rows = experts.saturating_mul(call.max_tokens.saturating_mul(size));
    if rows > i32::MAX as usize {
        return Err(reason::rows_countable(rows));
    }
    let there = There::new(call);
    let bytes = half_bytes(there.bytes(), size);
    fits(bytes, told_there(call, size), topology, |have| {
        part_bytes(have, size) >= there.bytes()
    })
}

pub(crate) fn combine(call: &LowLatencyCombineCall, topology: &Topology) -> Result<Plan, Reason> {
    let bytes = back_bytes(call);
    fits(bytes, told_back(call), topology, |have| have >= bytes)
}

/// Bytes of a half beside which there is room for the words that tell of a dispatch.
pub(crate) fn told_there(call: &LowLatencyDispatchCall, size: usize) -> usize {
    told(Words::new(call, size).count().saturating_mul(size))
}

/// The same of the way back: a word for each expert of each token.
pub(crate) fn told_back(call: &LowLatencyCombineCall) -> usize {
    told(call.there.max_tokens.saturating_mul(call.there.k))
}

fn told(words: usize) -> usize {
    words.saturating_mul(CommConfig::LOW_LATENCY_WORD_BYTES)
}

/// Whether there is room for so many bytes, and beside it for words that tell of them.
fn fits(
    bytes: usize,
    told: usize,
    topology: &Topology,
    is_room: impl Fn(usize) -> bool,
) -> Result<Plan, Reason> {
    if !topology.engines.dispatches {
        return Err(reason::no_experts());
    }
    let have = topology.config.low_latency_bytes;
    let bytes = bytes.max(told);
    if have == 0 || have < told || !is_room(have) {
        return Err(reason::capacity("low_latency_bytes", bytes.max(64), have));
    }
    Ok(Plan::LowLatency { bytes })
}

/// A sender's part of a half, at each receiver: how many tokens it has (on a GPU, [`Words`] say so), and then a place for each of them in each section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct There {
    sections: Sections,
    max_tokens: usize,
}

/// What there is of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Its row, where the receiver has one of its experts.
    Row,
    /// The row's scales, if it was cast.
    Scales,
    /// The receiver's experts that it names, counted from the first of them, i32 `[k]` with -1 for all others. These are there for every
    /// token; on a GPU [`Words`] say so instead.
    Experts,
    /// Their weights, f32 `[k]`, if it has any: where the receiver has one of its experts.
    Weights,
}

impl There {
    /// Of a dispatch.
    pub fn new(call: &LowLatencyDispatchCall) -> Self {
        let row = call.hidden * call.wire_type().bytes();
        let scales = call.scales().map_or(0, |(dtype, n)| n * dtype.bytes());
        let weights = if call.weights { 4 * call.k } else { 0 };
        Self {
            sections: Sections::new(&[row, scales, 4 * call.k, weights], call.max_tokens),
            max_tokens: call.max_tokens,
        }
    }

    /// All of it.
    pub fn bytes(&self) -> usize {
        self.sections.bytes
    }

    /// Where a section begins, and how many bytes of it are a token's.
    pub fn of(&self, section: Section) -> (usize, usize) {
        let index = section as usize;
        let start = self.sections.at(index, 0).start;
        (start, self.sections.at(index, 1).len())
    }

    /// The place of a token.
    pub fn place(&self, section: Section, token: usize) -> std::ops::Range<usize> {
        debug_assert!(token < self.max_tokens, "token {token} has no place");
        let (start, each) = self.of(section);
        start + token * each..start + (token + 1) * each
    }
}

/// Words by which a sender tells a receiver of what it sends there (`kernels/in_turn.cuh`), and where they stand. On the way back there is one for
/// each expert of each token, at the rank that has the token, and no others.
///
/// ```
/// use brigade_plan::low_latency::Words;
/// let words = Words { max_tokens: 3, k: 2, experts: 4 };
/// assert_eq!(words.of_row(2), 3);
/// assert_eq!(words.of_name(0, 0), 4);
/// assert_eq!(words.of_name(2, 1), 9);
/// assert_eq!(words.of_count(0), 10);
/// assert_eq!(words.of_count(3), words.count() - 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// Most tokens of any rank.
    pub max_tokens: usize,
    /// Experts of a token.
    pub k: usize,
    /// Most experts of any rank.
    pub experts: usize,
}

impl Words {
    /// Of a dispatch in a group of `size`.
    pub fn new(call: &LowLatencyDispatchCall, size: usize) -> Self {
        Self {
            max_tokens: call.max_tokens,
            k: call.k,
            // The first rank has as many as any.
            experts: Slots::new(call.placement, size).of(0).len(),
        }
    }

    /// All of them. The first one says how many tokens there are.
    pub const fn count(self) -> usize {
        self.of_count(self.experts)
    }

    /// That which says that a token's row has come.
    pub const fn of_row(self, token: usize) -> usize {
        1 + token
    }

    /// That which says which of the receiver's experts it is that a token has as its expert number `entry`, and its how manieth row of the sender's
    /// that is: `expert * max_tokens + row`.
    pub const fn of_name(self, token: usize, entry: usize) -> usize {
        let before = token.saturating_mul(self.k).saturating_add(entry);
        before.saturating_add(1).saturating_add(self.max_tokens)
    }

    /// That which says how many rows one of the receiver's experts gets.
    pub const fn of_count(self, expert: usize) -> usize {
        self.of_name(self.max_tokens, 0).saturating_add(expert)
    }
}

/// What travels back of a row: its values, and behind them what belongs to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackRow {
    /// Bytes of the values.
    pub values: usize,
    /// Bytes of their scales, or of what else belongs to blocks, if they were cast.
    pub beside: usize,
}

impl BackRow {
    /// Of a combine.
    pub fn new(call: &LowLatencyCombineCall) -> Self {
        match call.cast {
            None => Self {
                values: call.hidden * call.dtype.bytes(),
                beside: 0,
            },
            Some(CombineCast::Fp8(format)) => {
                let cast = Fp8Cast {
                    format,
                    column_major: false,
                };
                let (dtype, n) = cast.scales(call.hidden);
                Self {
                    values: call.hidden,
                    beside: n * dtype.bytes(),
                }
            }
            Some(CombineCast::LogFmt10) => {
                let blocks = call.hidden / logfmt::BLOCK;
                Self {
                    values: blocks * logfmt::CODES,
                    beside: blocks * logfmt::BESIDE,
                }
            }
        }
    }

    /// Bytes that are sent.
    pub const fn bytes(self) -> usize {
        self.values + self.beside
    }

    /// Bytes of its place, which begins at the widest access.
    pub const fn place(self) -> usize {
        self.bytes().next_multiple_of(SECTION_BYTES)
    }
}

/// Bytes of a half on the way back: a place for each expert of each token, whoever has that expert. Where a token's rows are added before
/// they come, the place of the first of its experts that a rank has is for all of that rank's.
pub fn back_bytes(call: &LowLatencyCombineCall) -> usize {
    back_place(call, call.there.max_tokens, 0).start
}

/// Those of a token's places that are filled, in the order in which they are added: that of the token's experts, or of ranks. `chosen` are
/// the token's slots.
///
/// ```
/// use brigade_device::{CombineSum, PlacementCall};
/// use brigade_plan::{low_latency::back_order, routes::Slots};
/// // Four slots on two ranks.
/// let slots = Slots::new(PlacementCall::Even { experts: 4 }, 2);
/// let chosen = [3, -1, 0, 2, 1];
/// assert_eq!(back_order(CombineSum::Expert, &chosen, &slots), [0, 2, 3, 4]);
/// assert_eq!(back_order(CombineSum::ExpertByRank, &chosen, &slots), [2, 0]);
/// ```
pub fn back_order(sum: CombineSum, chosen: &[i32], slots: &Slots) -> Vec<usize> {
    let rank = |entry: usize| {
        let slot = usize::try_from(chosen[entry]).ok();
        slot.and_then(|slot| slots.rank_of(slot))
    };
    let mut places: Vec<usize> = (0..chosen.len()).filter(|&e| rank(e).is_some()).collect();
    if sum != CombineSum::Expert {
        places.sort_by_key(|&entry| rank(entry));
        places.dedup_by_key(|entry| rank(*entry));
    }
    places
}

/// The place of what a token's expert made.
pub fn back_place(
    call: &LowLatencyCombineCall,
    token: usize,
    entry: usize,
) -> std::ops::Range<usize> {
    let row = BackRow::new(call);
    let start = (token * call.there.k + entry).saturating_mul(row.place());
    start..start.saturating_add(row.bytes())
}

/// The rows of each of a rank's experts, in the order in which they lie: source rank, token, and which of the token's experts it is,
/// as bits. `named` has, of every source, the experts that its tokens name, `k` each, as [`Section::Experts`] has them.
///
/// ```
/// use brigade_plan::low_latency::packed;
/// // Two tokens of rank 0, and one of rank 1 that names expert 1 twice.
/// let named: [&[i32]; 2] = [&[1, -1, 0, 1], &[1, 1]];
/// let rows = packed(&named, 2, 2);
/// assert_eq!(rows[0], [[0, 1, 1]]);
/// assert_eq!(rows[1], [[0, 0, 1], [0, 1, 2], [1, 0, 3]]);
/// ```
pub fn packed(named: &[&[i32]], k: usize, experts: usize) -> Vec<Vec<[i32; 3]>> {
    let mut rows = vec![Vec::new(); experts];
    for (source, tokens) in named.iter().enumerate() {
        for (token, names) in tokens.chunks_exact(k.max(1)).enumerate() {
            for (expert, rows) in rows.iter_mut().enumerate() {
                let entries = names.iter().enumerate();
                let bits = entries
                    .filter(|(_, name)| usize::try_from(**name) == Ok(expert))
                    .fold(0u32, |bits, (entry, _)| bits | 1 << entry);
                if bits != 0 {
                    rows.push([source as i32, token as i32, bits as i32]);
                }
            }
        }
    }
    rows
}

/// For each of `size` ranks, which of an expert's rows is the first from there, and how many are: of rows as [`packed`] gives them.
///
/// ```
/// use brigade_plan::low_latency::ranges;
/// // A row of rank 0, none of rank 1, and two of rank 2.
/// assert_eq!(ranges(&[[0, 4, 1], [2, 0, 1], [2, 5, 2]], 3), [[0, 1], [1, 0], [1, 2]]);
/// ```
pub fn ranges(rows: &[[i32; 3]], size: usize) -> Vec<[i32; 2]> {
    let first = |rank: usize| rows.partition_point(|row| row[0] < rank as i32) as i32;
    (0..size)
        .map(|rank| [first(rank), first(rank + 1) - first(rank)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{CommConfig, DataType, Fp8Cast, ParallelMode, PlacementCall, ScaleFormat};

    fn call(hidden: usize, cast: Option<Fp8Cast>) -> LowLatencyDispatchCall {
        LowLatencyDispatchCall {
            slot: 0,
            max_tokens: 5,
            hidden,
            dtype: DataType::BF16,
            k: 3,
            weights: true,
            placement: PlacementCall::Even { experts: 7 },
            cast,
        }
    }

    #[test]
    fn places_are_apart_and_all_of_them_fit() {
        let cast = Fp8Cast {
            format: ScaleFormat::F32,
            column_major: false,
        };
        for cast in [None, Some(cast)] {
            let there = There::new(&call(400, cast));
            let mut end = Sections::COUNTS_BYTES;
            for section in [
                Section::Row,
                Section::Scales,
                Section::Experts,
                Section::Weights,
            ] {
                let (start, _) = there.of(section);
                assert!(start >= end && start.is_multiple_of(16), "{section:?}");
                for token in 0..5 {
                    let place = there.place(section, token);
                    assert!(place.start >= end, "{section:?} of {token}");
                    end = place.end;
                }
            }
            assert!(end <= there.bytes());
        }
    }

    #[test]
    fn words_of_many_experts_find_room_beside_few_tokens() {
        for (size, experts) in [(1, 4096), (3, 1000), (16, 333)] {
            let there = LowLatencyDispatchCall {
                max_tokens: 1,
                placement: PlacementCall::Even { experts },
                ..call(16, None)
            };
            let config = CommConfig::new(ParallelMode::Ep);
            let config = config.for_low_latency((1, 3), experts, 16, DataType::BF16, size);
            let words = Words::new(&there, size);
            assert!(words.experts * size >= experts, "{size}");
            assert!(
                config.low_latency_bytes >= told_there(&there, size),
                "{size}"
            );
        }
    }

    #[test]
    fn a_configuration_for_so_many_tokens_has_room_for_them() {
        for (size, hidden) in [(1, 16), (3, 400), (8, 7168)] {
            let there = call(hidden, None);
            let back = LowLatencyCombineCall {
                hidden,
                dtype: DataType::BF16,
                sum: CombineSum::Expert,
                cast: None,
                there: there.clone(),
            };
            let config = CommConfig::new(ParallelMode::Ep);
            let config = config.for_low_latency((5, 3), 7, hidden, DataType::BF16, size);
            let have = config.low_latency_bytes;
            assert!(
                part_bytes(have, size) >= There::new(&there).bytes(),
                "{size}"
            );
            assert!(have >= back_bytes(&back), "{size}");
            assert!(
                have >= told_there(&there, size).max(told_back(&back)),
                "{size}"
            );
            for cast in [
                CombineCast::Fp8(ScaleFormat::F32),
                CombineCast::Fp8(ScaleFormat::PowerOfTwo),
                CombineCast::Fp8(ScaleFormat::Ue8m0),
                CombineCast::LogFmt10,
            ] {
                let back = LowLatencyCombineCall {
                    cast: Some(cast),
                    ..back.clone()
                };
                assert!(have >= back_bytes(&back), "{size}, {cast:?}");
            }
        }
    }
}
