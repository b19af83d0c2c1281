//! What a sender pushes of a row, and what it tells beside.

use super::{MOST_BLOCKS, TOKENS};
use crate::{
    dispatch::{Section, Sections},
    pushed::{GRANULE_BYTES, LINE_GRANULES as LINE},
    routes::Slots,
};
use brigade_device::{Arrangement, DispatchCall, Transport};

/// Granules of a packet.
pub(super) const PACKET: usize = 4;

/// Those that a warp stores at a time of a row that stays in place.
pub(super) const RUN: usize = 32 * PACKET;

/// What a sender pushes for each of its rows: a header, the row with what belongs to it, and a word for each of its packets,
/// each of them from a line on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Granules of the header: the token, and half a word for each of its slots; by expert a word for each, with which of the sender's rows for
    /// the slot it is.
    pub header: usize,
    /// By expert: granules in which a rank tells another how many rows it has for each of its slots. In place: those in which its blocks say that
    /// they have stored theirs.
    pub counts: usize,
    /// Granules in which blocks of a rank tell each other where its tokens go, where they are many.
    pub shared: usize,
    /// Of a row that stays in place, runs of granules that a warp stores; or 0.
    pub runs: usize,
    /// Granule where each section begins, and where the last one ends. Tokens and slots are in the header.
    pub first: Vec<usize>,
}

impl Record {
    /// Of a dispatch among so many ranks.
    pub fn new(call: &DispatchCall, size: usize) -> Self {
        /// Counts of a granule, tokens that blocks tell each other of, and words.
        const EACH: usize = 8;
        const SHARED: usize = 8;
        const WORDS: usize = GRANULE_BYTES / 4;
        let in_place = call.choice == Some(Transport::InPlace);
        let by_expert = matches!(call.arrangement, Arrangement::ByExpert { .. });
        let sections = Sections::dispatch(call, 1);
        let mut first = vec![0];
        let mut granules = 0;
        for i in 0..sections.count() {
            let bytes = match i {
                _ if i == Section::Token.index() || i == Section::Slots.index() => 0,
                _ if i == Section::Row.index() && in_place => 0,
                _ => sections.at(i, 1).len(),
            };
            granules += bytes.div_ceil(GRANULE_BYTES);
            first.push(granules);
        }
        Self {
            header: match call.again {
                true => 0,
                false if by_expert => (4 * call.k).div_ceil(GRANULE_BYTES),
                false => (4 + 2 * call.k).div_ceil(GRANULE_BYTES),
            },
            counts: match by_expert && !call.again {
                true => most_slots(call, size).div_ceil(EACH),
                false if in_place => usize::from(MOST_BLOCKS).div_ceil(WORDS),
                false => 0,
            },
            shared: match in_place || (!by_expert && call.max_tokens > TOKENS) {
                true => call.max_tokens.div_ceil(SHARED),
                false => 0,
            },
            runs: match in_place {
                true => sections
                    .row_bytes(Section::Row)
                    .div_ceil(RUN * GRANULE_BYTES),
                false => 0,
            },
            first,
        }
    }

    /// Granules of the row and what belongs to it.
    pub fn granules(&self) -> usize {
        self.first.last().copied().unwrap_or(0)
    }

    /// Packets of them: granule `k * packets + j` is one of packet `j`.
    pub fn packets(&self) -> usize {
        let packets = self.granules().div_ceil(PACKET);
        if packets > LINE {
            packets.next_multiple_of(LINE)
        } else {
            packets
        }
    }

    /// Granule at which the row begins, behind the header.
    pub fn body(&self) -> usize {
        self.header.next_multiple_of(LINE)
    }

    /// Granule at which the words behind packets begin.
    pub fn words(&self) -> usize {
        (self.body() + self.granules()).next_multiple_of(LINE)
    }

    /// Granules of all of it.
    pub fn all(&self) -> usize {
        let words = self.packets().div_ceil(GRANULE_BYTES / 4);
        (self.words() + words).next_multiple_of(LINE)
    }

    /// Granules in which peers tell which of so many tokens come, at the beginning.
    pub fn ways(tokens: usize, size: usize) -> usize {
        /// Tokens of a granule.
        const EACH: usize = 64;
        tokens
            .div_ceil(EACH)
            .max(1)
            .saturating_mul(size.saturating_sub(1))
            .next_multiple_of(LINE)
    }

    /// Granules before the records of so many tokens of every peer: which of them come, how many for each slot, and where own ones go.
    pub fn told(&self, tokens: usize, size: usize) -> usize {
        let counts = self.counts.saturating_mul(size.saturating_sub(1));
        Self::ways(tokens, size) + (counts + self.shared).next_multiple_of(LINE)
    }

    fn beside(&self, granules: usize, tokens: usize, size: usize) -> usize {
        let rows = tokens.saturating_mul(size.saturating_sub(1));
        rows.saturating_mul(self.all())
            .saturating_add(granules)
            .saturating_mul(GRANULE_BYTES)
    }

    /// Bytes of a buffer that so many tokens of every peer take.
    pub fn bytes(&self, tokens: usize, size: usize) -> usize {
        self.beside(self.told(tokens, size), tokens, size)
    }

    /// Those that tables count: with one line for all that tells of rows.
    pub fn arriving(&self, tokens: usize, size: usize) -> usize {
        self.beside(LINE.max(size), tokens, size)
    }
}

/// Most slots of any rank.
pub(super) fn most_slots(call: &DispatchCall, size: usize) -> usize {
    let slots = Slots::new(call.placement, size);
    (0..size).map(|r| slots.of(r).len()).max().unwrap_or(0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use brigade_device::{DataType, PlacementCall, ReceivedIds};

    pub(in super::super) fn call(hidden: usize, k: usize) -> DispatchCall {
        DispatchCall {
            max_tokens: 128,
            hidden,
            dtype: DataType::BF16,
            beside_bytes: [2, 0, 20].into_iter().collect(),
            k,
            weights: true,
            placement: PlacementCall::Even { experts: 256 },
            arrangement: Arrangement::BySource,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            again: false,
            gathered: false,
            cast: None,
            choice: None,
        }
    }

    #[test]
    fn every_section_begins_with_a_granule() {
        let record = Record::new(&call(7168, 8), 4);
        assert_eq!(record.header, 2);
        assert_eq!(record.first, [0, 896, 896, 896, 896, 898, 899, 899, 901]);
        assert_eq!((record.body(), record.words()), (8, 8 + 904));
        assert_eq!((record.packets(), record.all()), (232, 912 + 58 + 6));
        assert_eq!(record.bytes(128, 4), 16 * (8 + 128 * 3 * 976));
        assert_eq!((Record::ways(0, 4), Record::ways(1024, 4)), (8, 48));
        let again = DispatchCall {
            again: true,
            ..call(8, 32)
        };
        assert_eq!(Record::new(&again, 4).header, 0);
        assert_eq!(Record::new(&again, 4).first, [0, 1, 1, 1, 1, 1, 2, 2, 4]);
        assert_eq!(
            (
                Record::new(&again, 4).body(),
                Record::new(&again, 4).packets()
            ),
            (0, 1)
        );
    }

    #[test]
    fn by_expert_a_header_has_a_word_for_each_slot_and_ranks_tell_of_counts() {
        let by_expert = DispatchCall {
            arrangement: Arrangement::ByExpert { alignment: 1 },
            ..call(7168, 10)
        };
        let of = |size| Record::new(&by_expert, size);
        assert_eq!((of(4).header, of(4).body()), (3, 8));
        // Of 256 experts, two counts in each word.
        assert_eq!([1, 2, 3, 4].map(|size| of(size).counts), [32, 16, 11, 8]);
        assert_eq!(of(4).told(128, 4), 8 + 24);
        assert_eq!(of(4).bytes(128, 4), 16 * (32 + 128 * 3 * of(4).all()));
        let again = DispatchCall {
            again: true,
            ..by_expert.clone()
        };
        let again = Record::new(&again, 4);
        assert_eq!((again.header, again.counts, again.told(128, 4)), (0, 0, 8));
    }

    #[test]
    fn rows_in_place_are_no_part_of_what_is_pushed() {
        let in_place = DispatchCall {
            choice: Some(Transport::InPlace),
            ..call(7168, 8)
        };
        let record = Record::new(&in_place, 4);
        assert_eq!(record.first, [0, 0, 0, 0, 0, 2, 3, 3, 5]);
        // A word for each of 132 blocks, a granule for eight own tokens, and 128 granules for a warp.
        assert_eq!((record.counts, record.shared, record.runs), (33, 16, 7));
        assert_eq!(record.told(128, 4), 8 + 120);
        // Blocks find the ways of many tokens between them.
        let many = |max_tokens| {
            let call = DispatchCall {
                max_tokens,
                ..call(8, 1)
            };
            Record::new(&call, 4).shared
        };
        assert_eq!([1024, 1025, 8192].map(many), [0, 129, 1024]);
    }
}
