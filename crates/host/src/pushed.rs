//! Exchanges that push. In one shot of an all-reduce every input goes to every rank; in two shots each share of it goes to the rank
//! that reduces it, which pushes the sums to all. A reduce-scatter is the first of two, and copies go to every rank. Values are
//! their own flags: nobody waits before it pushes.

use crate::{
    all_reduce::Kind,
    core::Core,
    dispatch::Written,
    element,
    job::{Active, Job},
};
use brigade_device::{AllReduceAlgorithm, DataType, Place, Point, Result};
use brigade_group::SharedSegment;
use brigade_plan::pushed::{GRANULE_BYTES, Granules, RowShares};
use brigade_sync::{BUFFERS, Flag, Memory, Sentinel, Shot, Turnover, Word, Words};
use smallvec::SmallVec;
use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// Every rank pushes its input to all, and reduces what it has of all.
pub(crate) fn one_shot(
    active: &mut Active<'_>,
    kind: Kind,
    input: &[u8],
    out: &mut [u8],
) -> Result<()> {
    let _span = tracing::info_span!(target: "brigade::comm", "one-shot push", bytes = input.len())
        .entered();
    let cut = kind.cut(AllReduceAlgorithm::OneShotPush, input, active.job.size());
    let shot = Shot::first(words(cut.granules(), GRANULE_BYTES));
    let exchange = Exchange::begin(active, shot);
    for to in exchange.job.peers() {
        exchange.push(to, shot, kind.dtype, input);
    }
    exchange.clear();
    exchange.reduce(shot, kind, input, out)
}

/// Every rank pushes each its share, reduces its own, and pushes the sums to all.
pub(crate) fn two_shot(
    active: &mut Active<'_>,
    kind: Kind,
    input: &[u8],
    out: &mut [u8],
) -> Result<()> {
    let _span = tracing::info_span!(target: "brigade::comm", "two-shot push", bytes = input.len())
        .entered();
    let size = active.job.size();
    let cut = kind.cut(AllReduceAlgorithm::TwoShotPush, input, size);
    let elements = input.len() / kind.dtype.bytes();
    let share = |rank: usize, dtype: DataType| {
        let of = cut.elements_of(rank, elements);
        of.start * dtype.bytes()..of.end * dtype.bytes()
    };
    let parts = Shot::first(words(cut.granules(), GRANULE_BYTES));
    let sums = parts.then(size, words(cut.granules(), cut.result_bytes()));

    let exchange = Exchange::begin(active, sums);
    let rank = exchange.job.rank();
    for to in exchange.job.peers() {
        exchange.push(to, parts, kind.dtype, &input[share(to, kind.dtype)]);
    }
    exchange.clear();
    let own = share(rank, kind.output);
    let mine = &input[share(rank, kind.dtype)];
    exchange.reduce(parts, kind, mine, &mut out[own.clone()])?;
    for to in exchange.job.peers().filter(|_| !own.is_empty()) {
        exchange.push(to, sums, kind.output, &out[own.clone()]);
    }
    exchange.job.peers().try_for_each(|from| {
        let of = share(from, kind.output);
        match of.is_empty() {
            true => Ok(()),
            false => exchange.take(from, sums, &mut out[of]),
        }
    })
}

/// Every rank pushes each its share, and reduces its own. Bytes of every rank's share.
pub(crate) fn scatter(
    active: &mut Active<'_>,
    kind: Kind,
    shares: &[usize],
    input: &[u8],
    out: &mut [u8],
) -> Result<()> {
    let _span =
        tracing::info_span!(target: "brigade::comm", "reduce-scatter push", bytes = input.len())
            .entered();
    let most = shares.iter().max().copied().unwrap_or(0);
    let shot = Shot::first(Sentinel::filled(most));
    let offsets = brigade_plan::rows::offsets(shares);
    let share = |rank: usize| &input[offsets[rank]..offsets[rank + 1]];
    let exchange = Exchange::begin(active, shot);
    for to in exchange.job.peers() {
        exchange.push(to, shot, kind.dtype, share(to));
    }
    exchange.clear();
    exchange.reduce(shot, kind, share(exchange.job.rank()), out)
}

/// Every rank pushes its part of `out` to all, who have it in the same place. Bytes of every rank's part.
pub(crate) fn copy(active: &mut Active<'_>, parts: &[usize], out: &mut [u8]) -> Result<()> {
    let _span =
        tracing::info_span!(target: "brigade::comm", "copy push", bytes = out.len()).entered();
    let most = parts.iter().max().copied().unwrap_or(0);
    let words = Sentinel::copied(most);
    let shot = match parts.iter().filter(|&&bytes| bytes > 0).count() {
        0 | 1 => Shot::single(words),
        _ => Shot::first(words),
    };
    let offsets = brigade_plan::rows::offsets(parts);
    let part = |rank: usize| offsets[rank]..offsets[rank + 1];
    let exchange = Exchange::begin(active, shot);
    let own = &out[part(exchange.job.rank())];
    for to in exchange.job.peers() {
        exchange.push_copy(to, shot, own, own.len());
    }
    exchange.clear();
    exchange
        .job
        .peers()
        .try_for_each(|from| exchange.take_copy(from, shot, &mut out[part(from)]))
}

/// Every rank pushes a part of its own to each, of at most `most` bytes: how long it is, and then the part.
pub(crate) fn parts(
    active: &mut Active<'_>,
    most: usize,
    mut write: impl FnMut(usize, &mut [u8]) -> Written,
    mut take: impl FnMut(usize, &[u8]),
) -> Result<()> {
    let size = active.job.size();
    let lengths = Shot::first(Sentinel::copied(size_of::<u64>()));
    let parts = lengths.then(size, Sentinel::copied(most));
    let exchange = Exchange::begin(active, parts);
    let mut part = vec![0; most];
    for to in exchange.job.peers() {
        let Written { bytes, moved } = write(to, &mut part);
        exchange.push_copy(to, lengths, &(bytes as u64).to_le_bytes(), 0);
        exchange.push_copy(to, parts, &part[..bytes], moved);
    }
    exchange.clear();
    let rank = exchange.job.rank();
    let Written { bytes, .. } = write(rank, &mut part);
    take(rank, &part[..bytes]);
    // A peer in another call fills other places, those of third ranks too. So nothing says anything before all have signed this one.
    let length = |from: usize| {
        let mut bytes = [0; size_of::<u64>()];
        exchange.take_copy(from, lengths, &mut bytes)?;
        Ok((from, u64::from_le_bytes(bytes) as usize))
    };
    let known: SmallVec<[_; 8]> = exchange.job.peers().map(length).collect::<Result<_>>()?;
    for (from, bytes) in known {
        let part = &mut part[..bytes];
        exchange.take_copy(from, parts, part)?;
        take(from, part);
    }
    Ok(())
}

/// Words of so many granules.
fn words(granules: usize, bytes: usize) -> usize {
    Sentinel::filled(granules * bytes)
}

impl Kind {
    fn cut(self, algorithm: AllReduceAlgorithm, input: &[u8], size: usize) -> Cut {
        let elements = input.len() / self.dtype.bytes();
        match self.row {
            Some(row) => Cut::Rows {
                shares: RowShares::new(algorithm, (elements / row, row), self.dtype, size),
                row,
            },
            None => {
                let types = (self.dtype, self.output);
                Cut::Granules(Granules::new(algorithm, elements, types, size))
            }
        }
    }
}

/// Who reduces what.
enum Cut {
    Granules(Granules),
    /// Rows of so many elements, whose sums have their type.
    Rows {
        shares: RowShares,
        row: usize,
    },
}

impl Cut {
    /// Granules of a share.
    fn granules(&self) -> usize {
        match self {
            Self::Granules(g) => g.share,
            Self::Rows { shares, .. } => shares.granules(),
        }
    }

    /// Bytes of a reduced granule.
    fn result_bytes(&self) -> usize {
        match self {
            Self::Granules(g) => g.result_bytes,
            Self::Rows { .. } => GRANULE_BYTES,
        }
    }

    /// The elements that a rank reduces in two shots, of so many in all.
    fn elements_of(&self, rank: usize, all: usize) -> Range<usize> {
        match self {
            Self::Granules(g) => g.elements_of(rank, all),
            Self::Rows { shares, row } => {
                let of = shares.of(rank);
                of.start * row..of.end * row
            }
        }
    }
}

/// One use of the buffers.
struct Exchange<'a> {
    job: &'a Job,
    memory: Buffers<'a>,
    sums: Sentinel,
    turn: Turnover,
    flag: Flag,
}

impl<'a> Exchange<'a> {
    /// The next use, whose last shot this is.
    fn begin(active: &'a mut Active<'_>, last: Shot) -> Self {
        let turn = active.state.rotation.begin(last.end(active.job.size()));
        let job = &active.job;
        Self {
            job,
            memory: Buffers::of(&job.core),
            sums: job.core.control.layout().sums(),
            turn,
            flag: Flag::new(job.flag.generation(), job.flag.signature(), turn.epoch),
        }
    }

    /// What `from` pushes, as hooks are told of it.
    fn place(&self, from: usize, shot: Shot) -> Option<Place> {
        Some(Place {
            slot: from,
            piece: shot.index,
            half: self.turn.buffer,
            epoch: self.turn.epoch,
        })
    }

    fn push(&self, to: usize, shot: Shot, dtype: DataType, bytes: &[u8]) {
        let nan = Sentinel::nan(dtype);
        self.sums
            .push(&self.memory, to, self.turn, shot, nan, bytes);
        self.sign(to, shot, bytes.len());
    }

    /// Any bytes, of which so many count as moved.
    fn push_copy(&self, to: usize, shot: Shot, bytes: &[u8], moved: usize) {
        self.sums
            .push_copy(&self.memory, to, self.turn, shot, bytes);
        self.sign(to, shot, moved);
    }

    /// Behind what was pushed, of which so many bytes count as moved.
    fn sign(&self, to: usize, shot: Shot, moved: usize) {
        self.job.count_moved(moved);
        let place = self.place(self.job.rank(), shot);
        if self.job.step(Point::Announce, to, place) {
            self.job
                .post(self.sums.signed(to, self.turn, shot, self.flag));
        }
    }

    fn take(&self, from: usize, shot: Shot, out: &mut [u8]) -> Result<()> {
        let signature = self.sums.signature(from, self.turn, shot, self.flag);
        self.job.wait_by(signature, from, |deadline, watch| {
            let (memory, turn, flag) = (&self.memory, self.turn, self.flag);
            self.sums
                .take(memory, from, turn, shot, flag, out, deadline, watch)
        })?;
        self.job.step(Point::Read, from, self.place(from, shot));
        Ok(())
    }

    fn take_copy(&self, from: usize, shot: Shot, out: &mut [u8]) -> Result<()> {
        let signature = self.sums.signature(from, self.turn, shot, self.flag);
        self.job.wait_by(signature, from, |deadline, watch| {
            let (memory, turn, flag) = (&self.memory, self.turn, self.flag);
            self.sums
                .take_copy(memory, from, turn, shot, flag, out, deadline, watch)
        })?;
        self.job.step(Point::Read, from, self.place(from, shot));
        Ok(())
    }

    /// Takes what every peer pushes, and reduces it with the own part.
    fn reduce(&self, shot: Shot, kind: Kind, own: &[u8], out: &mut [u8]) -> Result<()> {
        /// Parts begin at a line of the cache.
        const LINE_BYTES: usize = 64;
        let (rank, size) = (self.job.rank(), self.job.size());
        let each = own.len().next_multiple_of(LINE_BYTES).max(LINE_BYTES);
        let staging = &self.job.core.staging;
        let mut staged = staging.take((size - 1) * each)?;
        for (from, part) in self.job.peers().zip(staged.as_mut().chunks_mut(each)) {
            self.take(from, shot, &mut part[..own.len()])?;
        }
        let peers = staged.as_ref().chunks(each).map(|part| &part[..own.len()]);
        let mut parts: SmallVec<[&[u8]; 8]> = std::iter::once(own).chain(peers).collect();
        // They begin with this rank's, and sums with rank 0's.
        parts.rotate_right(rank);
        element::reduce(kind.op, kind.dtype, &parts, kind.output, out);
        drop(parts);
        staging.put(staged);
        Ok(())
    }

    fn clear(&self) {
        let Turnover { epoch, stale, .. } = self.turn;
        let place = Place {
            slot: self.job.rank(),
            piece: 0,
            half: stale,
            epoch,
        };
        if self.turn.stale_words > 0 && self.job.step(Point::Clear, self.job.rank(), Some(place)) {
            self.sums.clear(&self.memory, self.turn);
        }
    }
}

/// Words of all ranks, flags and buffers of sums.
pub(crate) struct Buffers<'a> {
    flags: &'a Words<SharedSegment>,
    sums: SmallVec<[&'a [AtomicU64]; 8]>,
    first: usize,
}

impl<'a> Buffers<'a> {
    pub(crate) fn of(core: &'a Core) -> Self {
        let (control, layout) = (&core.control, core.control.layout());
        let range = layout.sums_start(0)..layout.sums_start(BUFFERS);
        let sums = control.segments().iter();
        Self {
            flags: control.memory(),
            // SAFETY: all ranks reach these bytes of a segment through here alone.
            sums: sums
                .map(|s| unsafe { s.0.data_words(range.clone()) })
                .collect(),
            first: layout.sums().buffers,
        }
    }

    fn word(&self, at: Word) -> &AtomicU64 {
        &self.sums[at.owner][at.index - self.first]
    }
}

/// What is loaded and stored relaxed are words of buffers, and all else flags.
impl Memory for Buffers<'_> {
    fn load(&self, at: Word) -> u64 {
        self.flags.load(at)
    }
    fn store(&self, at: Word, value: u64) {
        self.flags.store(at, value);
    }
    fn load_relaxed(&self, at: Word) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn store_relaxed(&self, at: Word, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn empty(&self, owner: usize, words: Range<usize>) {
        let words = words.start - self.first..words.end - self.first;
        for word in &self.sums[owner][words] {
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        self.flags.compare_exchange(at, current, new)
    }
    fn events(&self, owner: usize) -> u32 {
        self.flags.events(owner)
    }
    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.flags.rest(owner, events, until);
    }
}
