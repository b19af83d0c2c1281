//! Registered regions (after TransformerEngine's userbuffers): one segment per rank, put and got by peers, with a signal
//! and a credit per pair of ranks and region.

use crate::{
    comm::HostComm,
    core::{Core, Pairs},
    job::{Active, Job, Use},
    memory::{reading, writing},
    queue::HostQueue,
};
use brigade_device::{
    Call, CopyBy, Error, Operation, Place, Point, Reason, Region, Result, TransferParams, Turn,
    UserBuffers, View, ViewMut, check_peer,
};
use brigade_group::Segment;
use brigade_sync::{Area, CreditRing, Flag, Half, Memory};
use std::sync::{Arc, Weak};

/// A region's memory on every rank.
pub(crate) struct RegionMemory {
    bytes: usize,
    segments: Vec<Arc<Segment>>,
}

/// All signals of regions are signed alike; which region it is shows in which word they stand.
const SIGNATURE: u32 = 1;

/// Bytes that are copied between two segments at a time.
const STEP: usize = 4096;

impl RegionMemory {
    fn check(&self, field: &'static str, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::invalid(
                field,
                format!("{bytes} bytes from byte {offset} on"),
                format!("a place within the region's {} bytes", self.bytes),
            )),
        }
    }

    fn copy(&self, from: (usize, usize), to: (usize, usize), bytes: usize) {
        let mut step = [0; STEP];
        for start in (0..bytes).step_by(STEP) {
            let step = &mut step[..STEP.min(bytes - start)];
            self.segments[from.0].load_bytes(from.1 + start, step);
            self.segments[to.0].store_bytes(to.1 + start, step);
        }
    }
}

/// A region as a captured call remembers it: once it is given back, another may have its number.
#[derive(Clone)]
struct Held {
    region: Region,
    memory: Weak<RegionMemory>,
}

impl Held {
    fn memory(&self) -> Result<Arc<RegionMemory>> {
        self.memory.upgrade().ok_or_else(|| {
            let got = format!("{}, which was given back since the capture", self.region.0);
            Error::invalid("region", got, "a registered region")
        })
    }
}

impl Core {
    fn region(&self, region: Region) -> Result<Arc<RegionMemory>> {
        let regions = self.regions.lock();
        regions
            .get(usize::from(region.0))
            .and_then(Clone::clone)
            .ok_or_else(|| Error::invalid("region", region.0, "a registered region"))
    }
}

/// Shows every rank a word of every rank.
fn exchange_words(active: &mut Active<'_>, mine: u64) -> Result<Vec<u64>> {
    let of: Use = active.begin(Area::Scratch)?;
    let job = &active.job;
    let me = job.rank();
    // SAFETY: own half: all peers have given their credit for it, and it is announced below.
    unsafe { job.bytes_mut(me, of, 0..8) }.copy_from_slice(&mine.to_ne_bytes());
    job.say_filled_to_all(of, me, 0);
    let mut words = vec![mine; job.size()];
    for peer in job.peers() {
        job.await_filled(of, peer, 0, peer)?;
        // SAFETY: announced by its owner for this use, which this rank has not ended.
        let theirs = unsafe { job.bytes(peer, of, 0..8) };
        words[peer] = bytemuck::pod_read_unaligned(theirs);
    }
    active.end(of);
    Ok(words)
}

/// How a registration ended, on all ranks alike.
enum Registered {
    At(Region, RegionMemory),
    NoneFree,
    /// Who failed at what, and this rank's own error if it is one of them.
    Missing(String),
}

/// Who made no part of a region, or else who did not get at everybody's: as nobody does where a part is missing.
fn missing(keys: &[u64], all_have: &[u64]) -> Option<(usize, &'static str)> {
    let none = |all: &[u64]| all.iter().position(|&n| n == 0);
    let makes = none(keys).map(|rank| (rank, "make its"));
    makes.or_else(|| none(all_have).map(|rank| (rank, "get at everybody's")))
}

/// The lowest number that is free on every rank. Ranks may differ in what they hold, if a fault ended a registration on
/// some of them only: they raise what they propose until all propose the same.
fn agree_on_number(active: &mut Active<'_>) -> Result<Option<Region>> {
    let core = Arc::clone(&active.job.core);
    let most = core.config.regions;
    let free_from = |first: u16| {
        let regions = core.regions.lock();
        let free = |&i: &u16| regions.get(usize::from(i)).is_none_or(Option::is_none);
        (first..most).find(free).unwrap_or(most)
    };
    let mut proposed = free_from(0);
    loop {
        let all = exchange_words(active, proposed.into())?;
        let highest = all.iter().copied().max().unwrap_or_default();
        let highest = u16::try_from(highest).unwrap_or(most);
        if all.iter().all(|&n| n == u64::from(highest)) {
            return Ok((highest < most).then_some(Region(highest)));
        }
        proposed = free_from(highest);
    }
}

/// One side of the exchange between this rank and a peer in one region.
struct Pair<'a, 'b> {
    active: &'a mut Active<'b>,
    ring: CreditRing,
    region: Region,
    peer: usize,
}

impl Pair<'_, '_> {
    fn counts(&mut self) -> &mut Pairs {
        let size = self.active.job.size();
        let signals = &mut self.active.state.signals;
        signals
            .entry(self.region)
            .or_insert_with(|| Pairs::none(size))
    }

    /// The flag of the `count`-th signal: epochs wrap, the count does not.
    fn flag(&self, count: u64) -> Flag {
        Flag::new(self.active.job.generation(), SIGNATURE, count as u32)
    }

    /// Comes to a step about the `count`-th signal: see [`Job::step`].
    fn step(&self, point: Point, count: u64) -> bool {
        let place = Place {
            slot: self.region.0.into(),
            piece: 0,
            half: 0,
            epoch: count as u32,
        };
        self.active.job.step(point, self.peer, Some(place))
    }

    /// Waits until the peer has released all that was signalled.
    fn await_released(&mut self) -> Result<()> {
        let peer = self.peer;
        let sent = self.counts().sent[peer];
        if sent == 0 {
            return Ok(());
        }
        if !self.step(Point::Credit, sent + 1) {
            return Ok(());
        }
        let next = self.flag(sent + 1);
        let w = self.ring.credit(Half::of(0), self.peer, next);
        self.active.job.wait(w, self.region.0.into())
    }

    fn signal(&mut self) -> Result<()> {
        self.await_released()?;
        let peer = self.peer;
        let count = self.counts().sent[peer] + 1;
        self.counts().sent[peer] = count;
        let flag = self.flag(count);
        let me = self.active.job.rank();
        if self.step(Point::Announce, count) {
            let post = self.ring.filled(peer, Half::of(0), me, 0, flag);
            self.active.job.post(post);
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let peer = self.peer;
        let count = self.counts().received[peer] + 1;
        let w = self
            .ring
            .arrival(Half::of(0), peer, 0, peer, self.flag(count));
        self.active.job.wait(w, self.region.0.into())?;
        self.counts().received[peer] = count;
        self.step(Point::Read, count);
        Ok(())
    }

    /// Releases all that the peer has signalled, whether it was waited for or not, so that the next who gets this region's
    /// number begins with nothing on its way.
    fn let_go(&mut self) {
        let job = &self.active.job;
        let word = self
            .ring
            .arrival(Half::of(0), self.peer, 0, self.peer, self.flag(0))
            .word;
        let last = Flag::from_bits(job.core.control.memory().load(word));
        if last.generation() == job.generation() {
            let peer = self.peer;
            let received = &mut self.counts().received[peer];
            *received += u64::from(last.epoch().wrapping_sub(*received as u32));
            self.release();
        }
    }

    fn release(&mut self) {
        let peer = self.peer;
        let count = self.counts().received[peer];
        if !self.step(Point::Done, count) {
            return;
        }
        let flag = self.flag(count);
        self.ring
            .release(Half::of(0), flag)
            .filter(|p| p.word.owner == peer)
            .for_each(|p| self.active.job.post(p));
    }
}

impl HostComm {
    fn ring(&self, region: Region) -> Result<CreditRing> {
        self.core
            .control
            .layout()
            .region_ring(region)
            .ok_or_else(|| Error::invalid("region", region.0, "a registered region"))
    }

    /// Enqueues work in a region, which a graph does again for as long as the region is registered.
    fn within(
        &self,
        turn: &Turn,
        region: Region,
        work: impl Fn(&Arc<RegionMemory>) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let held = Held {
            region,
            memory: Arc::downgrade(&self.core.region(region)?),
        };
        HostQueue::of(turn.stream())?.run_with(move || held.memory(), work)
    }

    /// Enqueues work between this rank and a peer in a region.
    fn with_peer(
        &self,
        turn: &Turn,
        region: Region,
        peer: usize,
        work: impl Fn(&mut Pair<'_, '_>, &Arc<RegionMemory>) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let group = self.core.control.group();
        check_peer(peer, group.rank, group.size)?;
        let ring = self.ring(region)?;
        let core = self.core.clone();
        self.within(turn, region, move |memory| {
            core.pairwise(Operation::UserBuffers, SIGNATURE, |active| {
                let mut pair = Pair {
                    active,
                    ring,
                    region,
                    peer,
                };
                work(&mut pair, memory)
            })
        })
    }
}

impl HostComm {
    /// Copies between this rank's part of a region and a peer's.
    fn transfer(&self, turn: &Turn, p: TransferParams, puts: bool) -> Result<()> {
        let memory = self.core.region(p.region)?;
        memory.check("source_offset", p.source_offset, p.bytes)?;
        memory.check("target_offset", p.target_offset, p.bytes)?;
        let me = self.core.control.group().rank;
        self.with_peer(turn, p.region, p.peer, move |pair, memory| {
            let (source, target) = if puts {
                pair.await_released()?;
                (me, p.peer)
            } else {
                (p.peer, me)
            };
            let (from, to) = ((source, p.source_offset), (target, p.target_offset));
            match p.choice.unwrap_or(CopyBy::Kernel) {
                CopyBy::Kernel => memory.copy(from, to, p.bytes),
                CopyBy::Engine => {
                    let memory = Arc::clone(memory);
                    let copy = move |_: &Job| {
                        memory.copy(from, to, p.bytes);
                        Ok(())
                    };
                    pair.active.job.hand_over(copy).wait()?;
                }
            }
            pair.active.job.count_moved(p.bytes);
            Ok(())
        })
    }
}

impl UserBuffers for HostComm {
    fn register(&self, turn: &mut Turn, bytes: usize) -> Result<Region> {
        let queue = HostQueue::of(turn.stream())?;
        queue.refuse_capture("registering a region")?;
        let registered = self.core.collective(&Call::Register { bytes }, |active| {
            let Some(region) = agree_on_number(active)? else {
                return Ok(Registered::NoneFree);
            };
            let sharing = self.core.control.sharing();
            let words = Segment::words_for(bytes);
            let offer = sharing.offer(active.job.rank(), words, 0);
            let keys = exchange_words(active, offer.as_ref().map_or(0, |offer| offer.key))?;
            let take = |(owner, &key)| sharing.take(owner, key, words, 0);
            let segments: Result<Vec<_>> = keys.iter().enumerate().map(take).collect();
            // Nobody withdraws its offer before everybody has taken it.
            let all_have = exchange_words(active, segments.is_ok().into())?;
            let Some((rank, what)) = missing(&keys, &all_have) else {
                let segments = segments?;
                return Ok(Registered::At(region, RegionMemory { bytes, segments }));
            };
            let all_made = !keys.contains(&0);
            let own = offer.err().or_else(|| segments.err().filter(|_| all_made));
            let why = own.map_or_else(String::new, |error| format!("; here: {error}"));
            let what = format!("rank {rank} could not {what} {bytes} bytes{why}");
            Ok(Registered::Missing(what))
        })?;
        match registered {
            Registered::At(region, memory) => {
                let mut regions = self.core.regions.lock();
                let len = regions.len().max(usize::from(region.0) + 1);
                regions.resize_with(len, || None);
                regions[usize::from(region.0)] = Some(Arc::new(memory));
                Ok(region)
            }
            Registered::NoneFree => Err(Reason::new(
                "regions",
                format!("all {} regions are taken", self.core.config.regions),
                "deregister one, or raise regions",
            )
            .into()),
            Registered::Missing(what) => Err(Error::Group {
                step: "register a region",
                what,
            }),
        }
    }

    fn deregister(&self, turn: &mut Turn, region: Region) -> Result<()> {
        HostQueue::of(turn.stream())?.refuse_capture("giving a region back")?;
        self.core.region(region)?;
        let ring = self.ring(region)?;
        let call = Call::Deregister { region: region.0 };
        self.core.collective(&call, |active| {
            // Once all ranks are in this call, none will touch the region or signal in it any more.
            active.job.meet()?;
            for peer in active.job.peers() {
                let mut pair = Pair {
                    active: &mut *active,
                    ring,
                    region,
                    peer,
                };
                pair.let_go();
            }
            Ok(())
        })?;
        if let Some(memory) = self.core.regions.lock()[usize::from(region.0)].take() {
            memory.segments[self.core.control.group().rank].give_back();
        }
        Ok(())
    }

    fn write(&self, turn: &mut Turn, region: Region, offset: usize, from: View<'_>) -> Result<()> {
        let memory = self.core.region(region)?;
        memory.check("offset", offset, from.bytes())?;
        let (from, me) = (from.retain(), self.core.control.group().rank);
        let core = self.core.clone();
        self.within(turn, region, move |memory| {
            core.control.usable()?;
            reading(&[&from], |inputs| {
                memory.segments[me].store_bytes(offset, inputs[0]);
                Ok(())
            })
        })
    }

    fn read(&self, turn: &mut Turn, region: Region, offset: usize, to: ViewMut<'_>) -> Result<()> {
        let memory = self.core.region(region)?;
        let (to, me) = (to.as_view().retain(), self.core.control.group().rank);
        memory.check("offset", offset, to.bytes())?;
        let core = self.core.clone();
        self.within(turn, region, move |memory| {
            core.control.usable()?;
            writing(&to, &[], |out, _| {
                memory.segments[me].load_bytes(offset, out);
                Ok(())
            })
        })
    }

    fn put(&self, turn: &mut Turn, p: TransferParams) -> Result<()> {
        self.transfer(turn, p, true)
    }

    fn get(&self, turn: &mut Turn, p: TransferParams) -> Result<()> {
        self.transfer(turn, p, false)
    }

    fn signal(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()> {
        self.with_peer(turn, region, peer, |pair, _| pair.signal())
    }

    fn wait(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()> {
        self.with_peer(turn, region, peer, |pair, _| pair.wait())
    }

    fn release(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()> {
        self.with_peer(turn, region, peer, |pair, _| {
            pair.release();
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostDevice;
    use brigade_device::{Bootstrap, CommConfig, Device, ParallelMode, Queues};
    use brigade_group::threads;

    #[test]
    fn who_has_no_memory_is_named_and_not_those_who_miss_it() {
        assert_eq!(missing(&[7, 8, 9], &[1, 1, 1]), None);
        let makes = Some((2, "make its"));
        assert_eq!(missing(&[7, 8, 0, 0], &[0, 0, 0, 0]), makes);
        let gets = Some((1, "get at everybody's"));
        assert_eq!(missing(&[7, 8, 9], &[1, 0, 1]), gets);
    }

    #[test]
    fn a_rank_that_has_no_memory_says_what_the_system_said() -> Result<()> {
        let join = |boot: &dyn Bootstrap| -> Result<Error> {
            let device = HostDevice::new()?;
            let on = device.stream(0)?;
            let comm = device.join(boot, &CommConfig::new(ParallelMode::Tp))?;
            let registered = comm.lease(&on)?.windows()?.register(1 << 60);
            Ok(registered.expect_err("nobody has so much"))
        };
        std::thread::scope(|scope| {
            let start = |boot| scope.spawn(move || join(&boot));
            let ranks: Vec<_> = threads(2).into_iter().map(start).collect();
            for rank in ranks {
                let error = rank.join().unwrap()?.to_string();
                assert_eq!(
                    error,
                    "register a region: rank 0 could not make its 1152921504606846976 bytes; here: \
                     allocate shared memory: code 1152921504606846976"
                );
            }
            Ok(())
        })
    }
}
