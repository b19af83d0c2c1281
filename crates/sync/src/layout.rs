//! What lies where in a rank's segment: the same on every rank, computed from the voted configuration.

use crate::{
    AbortCell, BELL_WORDS, BUFFERS, CreditRing, Fifo, FlagBarrier, HALVES, Half, ResetGate, Role,
    RollCall, Sentinel,
};
use brigade_device::{CommConfig, Error, Group, Region, Result};

/// The regions that carry data between ranks, each in two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// Rows of all ranks, for gather-linear.
    Gather,
    /// Parts of all ranks, for its twin.
    ReduceScatter,
    /// Pieces of collectives.
    Scratch,
    /// A slot per sender, for send and receive.
    Mail,
    /// Rows on their way to experts: a part per sender.
    Dispatch,
    /// Rows on their way back: a part per sender.
    Combine,
    /// Rows of the low-latency exchange, there or back: places in its first slot.
    LowLatencyFirst,
    /// The same in its second slot.
    LowLatencySecond,
}

impl Area {
    /// All of them, in the order in which they lie.
    pub const ALL: [Self; 8] = [
        Self::Gather,
        Self::ReduceScatter,
        Self::Scratch,
        Self::Mail,
        Self::Dispatch,
        Self::Combine,
        Self::LowLatencyFirst,
        Self::LowLatencySecond,
    ];

    /// That of a slot of the low-latency exchange.
    pub const fn of_slot(slot: u8) -> Self {
        match slot {
            0 => Self::LowLatencyFirst,
            _ => Self::LowLatencySecond,
        }
    }

    /// The slot of the low-latency exchange that it is of.
    pub const fn slot(self) -> usize {
        (self as usize).saturating_sub(Self::LowLatencyFirst as usize)
    }
}

/// Bytes of a GPU's line of memory, where all data begins: a warp that writes whole lines to a peer would otherwise send the
/// halves of two.
const LINE: usize = 128;

/// Flags and data of one group, as one rank sees them. Words of flags come first, and the bell behind them; bytes of data
/// follow, each area with its two halves.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Where all ranks meet.
    pub barrier: FlagBarrier,
    /// What stopped the group.
    pub abort: AbortCell,
    /// Where all ranks let go of a generation.
    pub reset: ResetGate,
    /// Where those who are left find each other.
    pub roll: RollCall,
    /// First of a word per peer: 1 once it is gone.
    pub departed: usize,
    rings: [CreditRing; Area::ALL.len()],
    /// Flags of the regions that users can register.
    region_rings: Vec<CreditRing>,
    starts: [usize; Area::ALL.len()],
    half_bytes: [usize; Area::ALL.len()],
    signatures: usize,
    /// First word of the queues' counters, and how many channels there are.
    fifos: (usize, usize),
    fifo_start: usize,
    fifo_bytes: usize,
    sums_start: usize,
    sums_bytes: usize,
    told_start: usize,
    told_bytes: usize,
    /// Words that hold flags.
    pub flags: usize,
    /// All words: the flags and the bell.
    pub words: usize,
    /// Bytes of data, behind the words.
    pub bytes: usize,
}

impl Layout {
    /// For rank `rank` of `size`, at most [`Group::MOST_RANKS`], whose collectives cut a slot into at most `pieces` pieces. All but `rank` is the same on
    /// every rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that fails its check, a group of no ranks or of too many, or sizes that do not fit in memory.
    pub fn new(config: &CommConfig, pieces: usize, rank: usize, size: usize) -> Result<Self> {
        config.check()?;
        if !(1..=Group::MOST_RANKS).contains(&size) {
            let want = format!("1 to {}", Group::MOST_RANKS);
            return Err(Error::invalid("size", size, want));
        }
        let mut words = 0;
        let mut take = |n: usize| {
            let base = words;
            words += n;
            base
        };
        let barrier = FlagBarrier {
            rank,
            size,
            base: take(FlagBarrier::words(size)),
        };
        let abort = AbortCell {
            size,
            base: take(AbortCell::WORDS),
        };
        let reset = ResetGate {
            rank,
            size,
            base: take(ResetGate::words(size)),
        };
        let roll = RollCall {
            rank,
            size,
            base: take(RollCall::WORDS),
        };
        let departed = take(size);
        let rings = Area::ALL.map(|_| CreditRing {
            rank,
            size,
            pieces,
            base: take(CreditRing::words(size, pieces)),
        });
        let region_rings = (0..config.regions)
            .map(|_| CreditRing {
                rank,
                size,
                pieces: 1,
                base: take(CreditRing::words(size, 1)),
            })
            .collect();
        let signatures = take(Sentinel::signatures(size));
        let channels = if config.fifo_bytes > 0 {
            Fifo::CHANNELS
        } else {
            0
        };
        let fifos = (take(channels * Fifo::words(size)), channels);
        let flags = words;
        let words = (flags.next_multiple_of(BELL_WORDS) + BELL_WORDS).next_multiple_of(LINE / 8);
        // Two slots for each sender; 64 bytes of a message may take 68 of them (kernels/escaped.cuh).
        let packets = (config.message_bytes / size.max(1)).div_ceil(64).max(1);
        let mail = (68 * packets).next_multiple_of(64) * (2 * size);
        // The scales of gathered rows lie behind them in the same half.
        let gather = Self::scales_offset(config) + config.gather_scale_bytes;
        let half_bytes = [
            gather,
            config.reduce_scatter_bytes,
            config.scratch_bytes,
            mail,
            config.dispatch_bytes,
            config.combine_bytes,
            config.low_latency_bytes,
            config.low_latency_bytes,
        ];
        // Each was checked to be so small that all of them together can be counted.
        let mut bytes = 0;
        let mut take = |each: usize, count: usize| {
            let start = bytes;
            bytes += each.next_multiple_of(LINE) * count;
            start
        };
        let starts = half_bytes.map(|half| take(half, HALVES));
        let sums_start = take(config.all_reduce_bytes, BUFFERS);
        let fifo_start = take(config.fifo_bytes, 1);
        let told_bytes = config.low_latency_bytes / CommConfig::LOW_LATENCY_WORD_BYTES * 8;
        let told_start = take(told_bytes, 2 * HALVES);
        Ok(Self {
            barrier,
            abort,
            reset,
            roll,
            departed,
            rings,
            region_rings,
            starts,
            half_bytes,
            signatures,
            fifos,
            fifo_start,
            fifo_bytes: config.fifo_bytes,
            sums_start,
            sums_bytes: config.all_reduce_bytes,
            told_start,
            told_bytes,
            flags,
            words,
            bytes,
        })
    }

    /// Where scales begin in a half of the gather region.
    pub fn scales_offset(config: &CommConfig) -> usize {
        config.gather_bytes.next_multiple_of(64)
    }

    /// Flags of an area.
    pub fn ring(&self, area: Area) -> CreditRing {
        self.rings[area as usize]
    }

    /// Flags of a user's region.
    pub fn region_ring(&self, region: Region) -> Option<CreditRing> {
        self.region_rings.get(usize::from(region.0)).copied()
    }

    /// What a word is for, and of which user's region, if it is a flag of data or a credit.
    pub fn role(&self, index: usize) -> Option<(Option<Region>, Role)> {
        let areas = self.rings.iter().map(|&ring| (None, ring));
        let regions = self.region_rings.iter().zip(0..);
        areas
            .chain(regions.map(|(&ring, i)| (Some(Region(i)), ring)))
            .find_map(|(region, ring)| Some((region, ring.role(index)?)))
            .or_else(|| {
                let rank = self.barrier.rank;
                (0..self.fifos.1)
                    .find_map(|c| self.fifo(rank, rank, c, 1).role(index, c))
                    .map(|role| (None, role))
            })
    }

    /// A queue from one rank to another, of so many entries. There are [`Fifo::CHANNELS`], if there is memory for queues.
    pub fn fifo(&self, from: usize, to: usize, channel: usize, depth: u32) -> Fifo {
        let size = self.barrier.size;
        Fifo {
            from,
            to,
            size,
            depth,
            base: self.fifos.0 + channel * Fifo::words(size),
        }
    }

    /// First byte of the queues, counted from the first byte of data.
    pub fn fifo_start(&self) -> usize {
        self.fifo_start
    }

    /// Memory of the queues from all ranks.
    pub fn fifo_bytes(&self) -> usize {
        self.fifo_bytes
    }

    /// First byte of a half, counted from the first byte of data.
    pub fn start(&self, area: Area, half: Half) -> usize {
        let half_bytes = self.half_bytes[area as usize].next_multiple_of(LINE);
        self.starts[area as usize] + half.index() * half_bytes
    }

    /// Capacity of a half.
    pub fn half_bytes(&self, area: Area) -> usize {
        self.half_bytes[area as usize]
    }

    /// First byte of one of the [`BUFFERS`] that sums are pushed through, counted from the first byte of data.
    pub fn sums_start(&self, buffer: usize) -> usize {
        self.sums_start + buffer * self.sums_bytes.next_multiple_of(LINE)
    }

    /// Capacity of each of them.
    pub fn sums_bytes(&self) -> usize {
        self.sums_bytes
    }

    /// First byte of the words that tell of what comes in a half of a slot of the low-latency exchange, counted from the first byte of data. No
    /// others are ever written there: a word tells by itself of which use it is.
    pub fn told_start(&self, slot: usize, half: Half) -> usize {
        let which = slot * HALVES + half.index();
        self.told_start + which * self.told_bytes.next_multiple_of(LINE)
    }

    /// Capacity of them.
    pub fn told_bytes(&self) -> usize {
        self.told_bytes
    }

    /// Where all of them lie, of both slots.
    pub fn all_told(&self) -> std::ops::Range<usize> {
        self.told_start..self.told_start(2, Half::of(0))
    }

    /// The exchange of sums that are pushed. Its buffers are words of the data, counted from the first word of a segment.
    pub fn sums(&self) -> Sentinel {
        Sentinel {
            rank: self.barrier.rank,
            size: self.barrier.size,
            base: self.signatures,
            buffers: self.words + self.sums_start / 8,
            capacity: self.sums_bytes.next_multiple_of(LINE) / 8,
        }
    }

    /// All memory of a rank: its words, and its data.
    pub fn total_bytes(&self) -> usize {
        self.words * 8 + self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Flag, Shot, Word};
    use brigade_device::ParallelMode;

    fn config() -> CommConfig {
        CommConfig {
            gather_bytes: 100,
            gather_scale_bytes: 10,
            reduce_scatter_bytes: 65,
            all_reduce_bytes: 130,
            scratch_bytes: 5000,
            message_bytes: 5000,
            dispatch_bytes: 300,
            combine_bytes: 70,
            fifo_bytes: 200,
            low_latency_bytes: 290,
            regions: 3,
            ..CommConfig::new(ParallelMode::Tp)
        }
    }

    #[test]
    fn halves_are_apart_and_all_of_it_fits() {
        let layout = Layout::new(&config(), 4, 1, 3).unwrap();
        let mut end = 0;
        for area in Area::ALL {
            for half in [Half::of(0), Half::of(1)] {
                let start = layout.start(area, half);
                assert!(
                    start >= end && start.is_multiple_of(LINE),
                    "{area:?} {half:?}"
                );
                end = start + layout.half_bytes(area);
            }
        }
        for buffer in 0..BUFFERS {
            let start = layout.sums_start(buffer);
            assert!(start >= end && start.is_multiple_of(LINE), "{buffer}");
            end = start + layout.sums_bytes();
        }
        assert_eq!(layout.sums_start(BUFFERS), layout.fifo_start());
        end = layout.fifo_start() + layout.fifo_bytes();
        for (slot, half) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let start = layout.told_start(slot, Half::of(half));
            assert!(start >= end && start.is_multiple_of(LINE), "{slot} {half}");
            end = start + layout.told_bytes();
        }
        assert_eq!(layout.told_bytes(), 16, "of 256 bytes and more");
        assert_eq!(layout.all_told().start, layout.told_start(0, Half::of(0)));
        assert!(end <= layout.all_told().end && layout.all_told().end <= layout.bytes);
        assert_eq!(layout.sums_bytes(), 130);
        let sums = layout.sums();
        let shot = Shot::first(1);
        let place = sums.place(1, 2, shot, 2, 0).index * 8;
        assert_eq!(
            place,
            layout.total_bytes() - layout.bytes + layout.sums_start(2)
        );
        assert_eq!(layout.half_bytes(Area::Gather), 128 + 10);
        assert!(layout.half_bytes(Area::Mail).is_multiple_of(3 * 64));
        let front = layout.total_bytes() - layout.bytes;
        assert!(front == layout.words * 8 && front.is_multiple_of(LINE));
    }

    #[test]
    fn flags_are_apart_and_the_bell_has_a_line_of_its_own() {
        let layout = Layout::new(&config(), 4, 1, 3).unwrap();
        let mut parts = vec![
            (layout.barrier.base, FlagBarrier::words(3)),
            (layout.abort.base, AbortCell::WORDS),
            (layout.reset.base, ResetGate::words(3)),
            (layout.roll.base, RollCall::WORDS),
            (layout.departed, 3),
        ];
        parts.extend(Area::ALL.map(|a| (layout.ring(a).base, CreditRing::words(3, 4))));
        let regions = (0..3).filter_map(|r| layout.region_ring(Region(r)));
        parts.extend(regions.map(|ring| (ring.base, CreditRing::words(3, 1))));
        parts.push((layout.sums().base, Sentinel::signatures(3)));
        let fifos = (0..Fifo::CHANNELS).map(|c| layout.fifo(0, 1, c, 1));
        parts.extend(fifos.map(|fifo| (fifo.base, Fifo::words(3))));
        let end = parts.into_iter().fold(0, |end, (base, words)| {
            assert_eq!(base, end);
            base + words
        });
        assert_eq!(layout.flags, end);
        assert!(layout.words >= end + BELL_WORDS && layout.words.is_multiple_of(BELL_WORDS));
        assert!(layout.region_ring(Region(3)).is_none());
    }

    #[test]
    fn every_word_of_a_ring_is_known_for_what_it_is() {
        let (flag, halves) = (Flag::from_bits(0), [Half::of(0), Half::of(1)]);
        let layout = Layout::new(&config(), 4, 1, 3).unwrap();
        let areas = Area::ALL.map(|area| (None, layout.ring(area)));
        let regions = [0, 1, 2].map(|r| (Some(Region(r)), layout.region_ring(Region(r)).unwrap()));
        let mut known = 0;
        let mut assert_role = |word: Word, want| {
            assert_eq!(layout.role(word.index), Some(want), "{word:?}");
            known += 1;
        };
        for (region, ring) in areas.into_iter().chain(regions) {
            for half in halves {
                for (slot, piece) in (0..3).flat_map(|s| (0..ring.pieces).map(move |p| (s, p))) {
                    let want = Role::Filled { half, slot, piece };
                    let post = ring.filled(2, half, slot, piece, flag);
                    assert_role(post.word, (region, want));
                }
                for from in 0..3 {
                    let want = Role::Credit { half, from };
                    assert_role(ring.credit(half, from, flag).word, (region, want));
                }
                for post in ring.release(half, flag) {
                    let want = Some((region, Role::Credit { half, from: 1 }));
                    assert_eq!(layout.role(post.word.index), want);
                }
            }
        }
        for (channel, peer) in (0..Fifo::CHANNELS).flat_map(|c| (0..3).map(move |p| (c, p))) {
            let (half, from) = (Half::of(0), peer);
            let (slot, piece) = (peer, channel);
            let put = layout.fifo(peer, 1, channel, 1).sender(1).put(0);
            assert_role(put.word, (None, Role::Filled { half, slot, piece }));
            let taken = layout.fifo(1, peer, channel, 1).receiver(1).taken(0);
            assert_role(taken.word, (None, Role::Credit { half, from }));
        }
        let others = (0..layout.words).filter(|&i| layout.role(i).is_none());
        assert_eq!(others.count(), layout.words - known, "and no other word");
    }

    #[test]
    fn sizes_that_fit_nowhere_are_refused() {
        type Field = (&'static str, fn(&mut CommConfig) -> &mut usize);
        let fields: [Field; 11] = [
            ("gather_bytes", |c| &mut c.gather_bytes),
            ("gather_scale_bytes", |c| &mut c.gather_scale_bytes),
            ("reduce_scatter_bytes", |c| &mut c.reduce_scatter_bytes),
            ("all_reduce_bytes", |c| &mut c.all_reduce_bytes),
            ("scratch_bytes", |c| &mut c.scratch_bytes),
            ("message_bytes", |c| &mut c.message_bytes),
            ("dispatch_bytes", |c| &mut c.dispatch_bytes),
            ("combine_bytes", |c| &mut c.combine_bytes),
            ("fifo_bytes", |c| &mut c.fifo_bytes),
            ("low_latency_bytes", |c| &mut c.low_latency_bytes),
            ("region_bytes", |c| &mut c.region_bytes),
        ];
        let mut most = config();
        for (want, of) in fields {
            for bytes in [usize::MAX, usize::MAX / 2, CommConfig::MOST_BYTES + 1] {
                let mut config = config();
                *of(&mut config) = bytes;
                let refused = Layout::new(&config, 4, 0, 2).map(drop);
                let named = matches!(refused, Err(Error::Invalid { field, .. }) if field == want);
                assert!(named, "{want} of {bytes}: {refused:?}");
            }
            *of(&mut most) = CommConfig::MOST_BYTES;
        }
        // All of them at once can still be counted.
        let layout = Layout::new(&most, 8, 0, Group::MOST_RANKS).unwrap();
        assert!(layout.total_bytes() > 20 * CommConfig::MOST_BYTES);
    }

    #[test]
    fn groups_that_cannot_be_are_refused() {
        for size in [0, Group::MOST_RANKS + 1, 1 << 40, usize::MAX] {
            let refused = Layout::new(&config(), 4, 0, size).map(drop);
            let named = matches!(refused, Err(Error::Invalid { field: "size", .. }));
            assert!(named, "{size}: {refused:?}");
        }
    }
}
