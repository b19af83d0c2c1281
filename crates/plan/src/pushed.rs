//! How much an exchange that pushes needs, and how what does not fit is cut: the same on every rank and device.
//!
//! Inputs are cut into granules of 16 bytes, the widest access of a GPU; the last one may be filled up. A rank gives its
//! peers a place each, so a buffer holds `size - 1` of everything.

mod copies;

pub(crate) use copies::{Arriving, copied, copied_as, copy, scatter, scattered};

use crate::reason;
use brigade_device::{AllReduceAlgorithm as A, DataType, Reason};

/// Bytes of a granule of the input. A granule of a result that is wider takes more.
pub const GRANULE_BYTES: usize = 16;

/// Granules of a line of a GPU's memory.
pub(crate) const LINE_GRANULES: usize = 8;

/// From so many lines on, places in buffers are whole lines.
const MANY_LINES: usize = 8;

/// A place for so many granules. Where there are many, it is whole lines, so that those behind it begin with a line: a warp
/// writes a few of them to a peer at once, and parts of lines are slower to travel.
fn place(granules: usize) -> usize {
    match granules / LINE_GRANULES {
        ..MANY_LINES => granules,
        _ => granules.next_multiple_of(LINE_GRANULES),
    }
}

/// The most granules whose place has no more than so many.
fn fill(granules: usize) -> usize {
    match granules / LINE_GRANULES {
        ..MANY_LINES => granules,
        lines => lines * LINE_GRANULES,
    }
}

/// The shape of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granules {
    /// Elements in a granule.
    pub elements: usize,
    /// Granules of the whole input.
    pub all: usize,
    /// Granules of a rank's place. In two shots rank `r` reduces as many, from `r * share` on, as far as there are so many.
    pub share: usize,
    /// Bytes of a reduced granule.
    pub result_bytes: usize,
}

impl Granules {
    /// Of so many elements, which `algorithm` reduces over `size` ranks.
    pub fn new(
        algorithm: A,
        elements: usize,
        (input, output): (DataType, DataType),
        size: usize,
    ) -> Self {
        let each = GRANULE_BYTES / input.bytes().clamp(1, GRANULE_BYTES);
        let all = elements.div_ceil(each);
        Self {
            elements: each,
            all,
            share: place(match algorithm {
                A::TwoShotPush => all.div_ceil(size.max(1)),
                _ => all,
            }),
            result_bytes: each * output.bytes(),
        }
    }

    /// The granules that a rank reduces in two shots.
    pub fn of(&self, rank: usize) -> std::ops::Range<usize> {
        let cut = |i: usize| (i * self.share).min(self.all);
        cut(rank)..cut(rank + 1)
    }

    /// The elements that a rank reduces in two shots, of so many in all: the last granule may be filled in part.
    pub fn elements_of(&self, rank: usize, all: usize) -> std::ops::Range<usize> {
        let of = self.of(rank);
        (of.start * self.elements).min(all)..(of.end * self.elements).min(all)
    }

    /// Bytes that the exchange takes of a buffer.
    pub fn bytes(&self, algorithm: A, size: usize) -> usize {
        let results = match algorithm {
            A::TwoShotPush => self.result_bytes,
            _ => 0,
        };
        size.saturating_sub(1)
            .saturating_mul(self.share)
            .saturating_mul(GRANULE_BYTES + results)
    }
}

/// The shape of an exchange of rows that stay whole, so that whoever has a sum of a row can normalize it. Every row begins
/// with a granule of its own, and fills its last one up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShares {
    /// Rows of the whole input.
    pub rows: usize,
    /// Rows that a rank reduces: rank `r` those from `r * share` on. All of them, in one shot.
    pub share: usize,
    /// Granules of a row.
    pub row_granules: usize,
}

impl RowShares {
    /// Of so many rows of `hidden` elements, which `algorithm` reduces over `size` ranks.
    pub fn new(algorithm: A, (rows, hidden): (usize, usize), dtype: DataType, size: usize) -> Self {
        Self {
            rows,
            share: match algorithm {
                A::TwoShotPush => rows.div_ceil(size.max(1)),
                _ => rows,
            },
            row_granules: hidden.saturating_mul(dtype.bytes()).div_ceil(GRANULE_BYTES),
        }
    }

    /// The rows that a rank reduces in two shots.
    pub fn of(&self, rank: usize) -> std::ops::Range<usize> {
        let cut = |i: usize| (i * self.share).min(self.rows);
        cut(rank)..cut(rank + 1)
    }

    /// Granules of a share: what a source has in a buffer, for each shot.
    pub fn granules(&self) -> usize {
        self.share.saturating_mul(self.row_granules)
    }

    /// Bytes that the exchange takes of a buffer: a share of each peer, and in two shots the sums of all ranks' shares.
    pub fn bytes(&self, algorithm: A, size: usize) -> usize {
        let sums = match algorithm {
            A::TwoShotPush if size > 1 => size,
            _ => 0,
        };
        (size.saturating_sub(1) + sums)
            .saturating_mul(self.granules())
            .saturating_mul(GRANULE_BYTES)
    }
}

/// The shape of an exchange of copies. Any word may be the sentinel there, so a packet of granules has one word more, which
/// says which of them are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packets {
    /// Bytes of the rank that has most.
    pub bytes: usize,
    /// Packets of that rank.
    pub most: usize,
    /// Granules of a slot: those that it carries, and the words behind them.
    pub slot: usize,
    /// Slots of a buffer: one for each peer, or one where only one rank has something.
    pub slots: usize,
}

impl Packets {
    /// Granules of a packet.
    pub const GRANULES: usize = 4;

    /// From so many packets on, peers of a GPU pass a broadcast on: below, a way of two steps takes longer than what one rank
    /// sends.
    pub const RELAYED: usize = 8192;

    /// Of what each rank has, for all.
    pub fn gathered(bytes: &[usize]) -> Self {
        let most = bytes.iter().max().copied().unwrap_or(0);
        Self::new(most, bytes.len().saturating_sub(1))
    }

    /// Of what one of `size` ranks has, for all.
    pub fn broadcast(bytes: usize, size: usize) -> Self {
        Self::new(bytes, size.saturating_sub(1).min(1))
    }

    fn new(bytes: usize, slots: usize) -> Self {
        let granules = bytes.div_ceil(GRANULE_BYTES);
        let most = granules.div_ceil(Self::GRANULES);
        Self {
            bytes,
            most,
            slot: place(granules.saturating_add(most.div_ceil(GRANULE_BYTES / 4))),
            slots,
        }
    }

    /// Granules of a buffer that the exchange fills.
    pub const fn granules(&self) -> usize {
        self.slots.saturating_mul(self.slot)
    }

    /// Whether peers pass a broadcast among `size` ranks on.
    pub fn are_relayed(&self, size: usize) -> bool {
        size > 2 && self.most >= Self::RELAYED
    }

    /// Bytes of a broadcast that the root pushes to the rank `distance` behind it, where peers pass it on.
    pub fn relayed_bytes(&self, distance: usize, size: usize) -> usize {
        let each = self.most.div_ceil(size - 1);
        let cut = |i: usize| (i * each).min(self.most);
        (0..Self::GRANULES)
            .map(|k| {
                let at = |j: usize| ((k * self.most + j) * GRANULE_BYTES).min(self.bytes);
                at(cut(distance)) - at(cut(distance - 1))
            })
            .sum()
    }
}

/// Most rows of `hidden` elements in one exchange in buffers of `capacity` bytes.
pub(crate) fn piece_rows(
    algorithm: A,
    capacity: usize,
    (hidden, dtype): (usize, DataType),
    size: usize,
) -> Result<usize, Reason> {
    if size <= 1 {
        return Ok(usize::MAX);
    }
    let one = RowShares::new(algorithm, (1, hidden), dtype, size).bytes(algorithm, size);
    let shares = match algorithm {
        A::TwoShotPush => size,
        _ => 1,
    };
    match capacity / one.max(1) {
        0 => Err(reason::all_reduce_bytes(capacity, one)),
        rows => Ok(rows * shares),
    }
}

/// Most elements of one exchange in buffers of `capacity` bytes.
pub(crate) fn piece_elements(
    algorithm: A,
    capacity: usize,
    (input, output): (DataType, DataType),
    size: usize,
) -> Result<usize, Reason> {
    let peers = size.saturating_sub(1);
    if peers == 0 {
        return Ok(usize::MAX);
    }
    let one = Granules::new(algorithm, 1, (input, output), size);
    let shares = match algorithm {
        A::TwoShotPush => size,
        _ => 1,
    };
    let granules = fill(capacity / one.bytes(algorithm, size)) * shares;
    if granules > 0 {
        Ok(granules * one.elements)
    } else {
        Err(reason::all_reduce_bytes(
            capacity,
            one.bytes(algorithm, size),
        ))
    }
}

/// The largest of as few pieces as there can be, none much smaller than the others: the one behind a large piece empties its buffer,
/// and a small one has few threads for that.
pub(crate) fn even(elements: usize, most: usize) -> usize {
    /// What pieces are cut at: places of any type and number of ranks are whole lines then.
    const UNIT: usize = 1 << 16;
    match elements.div_ceil(most.max(1)) {
        0 | 1 => most,
        pieces => elements.div_ceil(pieces).next_multiple_of(UNIT).min(most),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DataType::{BF16, F32};
    use proptest::prelude::*;

    #[test]
    fn shares_are_whole_granules() {
        let of = |elements| Granules::new(A::TwoShotPush, elements, (BF16, F32), 3);
        let g = of(100);
        assert_eq!((g.elements, g.all, g.share, g.result_bytes), (8, 13, 5, 32));
        assert_eq!([0, 1, 2].map(|r| g.of(r)), [0..5, 5..10, 10..13]);
        assert_eq!(
            [0, 1, 2].map(|r| g.elements_of(r, 100)),
            [0..40, 40..80, 80..100]
        );
        assert_eq!(of(8).of(2), 1..1);
        assert_eq!(g.bytes(A::TwoShotPush, 3), 2 * 5 * (16 + 32));
    }

    #[test]
    fn places_of_many_granules_are_whole_lines() {
        let of = |algorithm, granules: usize| {
            let g = Granules::new(algorithm, 8 * granules, (BF16, BF16), 3);
            (g.share, g.of(2))
        };
        assert_eq!(of(A::TwoShotPush, 3 * 63), (63, 126..189));
        assert_eq!(of(A::TwoShotPush, 3 * 65), (72, 144..195));
        assert_eq!(of(A::OneShotPush, 65).0, 72);
        assert_eq!(Packets::gathered(&[16 * 64 + 1, 0]).slot, 64 + 1 + 5 + 2);
        // 256 MiB through buffers of 128 MiB on four ranks: no piece begins within a line.
        let piece = piece_elements(A::TwoShotPush, 128 << 20, (BF16, BF16), 4).unwrap();
        assert_eq!(piece, 8 * 4 * 1_398_096);
    }

    #[test]
    fn pieces_are_much_the_same() {
        assert_eq!(even(100, 100), 100);
        assert_eq!(even(0, 100), 100);
        assert_eq!(even(101, 100), 100, "too few for a choice");
        // Not three of 44 million and one of next to nothing.
        let (elements, most) = (1 << 27, 44_739_072);
        let piece = even(elements, most);
        assert_eq!(piece, 1 << 25);
        assert_eq!(elements % piece, 0);
        let ragged = even(elements + 1, most);
        assert!(ragged <= most && ragged * 4 > elements && ragged.is_multiple_of(1 << 16));
    }

    #[test]
    fn shares_of_rows_are_whole_rows() {
        let of = |algorithm| RowShares::new(algorithm, (10, 100), BF16, 4);
        let two = of(A::TwoShotPush);
        assert_eq!((two.share, two.row_granules, two.granules()), (3, 13, 39));
        assert_eq!([0, 1, 2, 3].map(|r| two.of(r)), [0..3, 3..6, 6..9, 9..10]);
        assert_eq!(two.bytes(A::TwoShotPush, 4), (3 + 4) * 39 * 16);
        assert_eq!(of(A::OneShotPush).bytes(A::OneShotPush, 4), 3 * 130 * 16);
        assert_eq!(
            piece_rows(A::OneShotPush, 0, (100, BF16), 1),
            Ok(usize::MAX)
        );
    }

    #[test]
    fn packets_have_a_word_each_behind_their_granules() {
        let of = |bytes: &[usize]| Packets::gathered(bytes);
        let p = of(&[0, 16 * 4 * 5 + 1, 64]);
        assert_eq!((p.most, p.slot, p.slots, p.granules()), (6, 21 + 2, 2, 46));
        assert_eq!(of(&[100]).granules(), 0, "nobody to push to");
        assert_eq!(of(&[0, 0]).granules(), 0);
        assert_eq!(Packets::broadcast(64, 8), of(&[64, 0]));
    }

    #[test]
    fn peers_pass_on_all_of_a_large_broadcast_between_them() {
        for (bytes, size) in [(1 << 20, 4), ((1 << 20) + 33, 3), (600_001, 8)] {
            let p = Packets::broadcast(bytes, size);
            assert!(p.are_relayed(size) && !p.are_relayed(2));
            let all: usize = (1..size).map(|d| p.relayed_bytes(d, size)).sum();
            assert_eq!(all, bytes);
        }
        assert!(!Packets::broadcast(500_000, 4).are_relayed(4));
    }

    proptest! {
        #[test]
        fn a_piece_of_rows_is_the_largest_that_fits(
            capacity in 0..100_000usize, size in 2..=8usize, hidden in 1..3000usize, two in any::<bool>()
        ) {
            let algorithm = if two { A::TwoShotPush } else { A::OneShotPush };
            let bytes = |rows| RowShares::new(algorithm, (rows, hidden), F32, size).bytes(algorithm, size);
            match piece_rows(algorithm, capacity, (hidden, F32), size) {
                Ok(rows) => prop_assert!(bytes(rows) <= capacity && bytes(rows + 1) > capacity),
                Err(_) => prop_assert!(bytes(1) > capacity),
            }
        }

        #[test]
        fn a_piece_is_the_largest_that_fits(
            capacity in 0..100_000usize, size in 2..=8usize, two in any::<bool>(), wide in any::<bool>(), narrow in any::<bool>()
        ) {
            let algorithm = if two { A::TwoShotPush } else { A::OneShotPush };
            let input = if narrow { BF16 } else { F32 };
            let types = (input, if wide { F32 } else { input });
            let bytes = |n| Granules::new(algorithm, n, types, size).bytes(algorithm, size);
            match piece_elements(algorithm, capacity, types, size) {
                Ok(n) => prop_assert!(bytes(n) <= capacity && bytes(n + 1) > capacity),
                Err(_) => prop_assert!(bytes(1) > capacity),
            }
        }
    }
}
