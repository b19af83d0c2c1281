//! Registered regions (after TransformerEngine's userbuffers): a place in every rank's part of the symmetric memory, put and got
//! by peers, with a signal and a credit per pair of ranks and region.
//!
//! Memory for them is taken at `join`, since a peer in another process could not map more of it later.

use crate::{
    all_gather::all_gather,
    comm::{CudaComm, REGION_ALIGN},
    driver::failed,
    job::Job,
    kept::Kept,
    mark::CudaMark,
    memory::check_reach,
};
use brigade_device::{
    Allocate, Buffer, Call, CommConfig, CopyBy, DataType, Error, Operation, Reason, Region, Result,
    TransferParams, Turn, UserBuffers, View, ViewMut, check_peer,
};
use cudarc::driver::result;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};

/// All signals of regions are signed alike; which region it is shows in which word they stand.
const SIGNATURE: u32 = 1;

/// From this size on a copy is the copy engine's, which takes no SM, and below a kernel's, which begins sooner, where the caller leaves it to us.
const ENGINE_BYTES: usize = 1 << 20;

/// Beyond its deadline, how long a call may take to end.
const ENDING: Duration = Duration::from_secs(1);

/// A place in every rank's part.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    bytes: usize,
}

/// A region as captured work remembers it: once it is given back, another may have its number and its place.
#[derive(Debug)]
pub(crate) struct Held {
    region: Region,
    span: Weak<Span>,
}

impl Held {
    /// Whether the region is still registered.
    pub(crate) fn check(&self) -> Result<()> {
        if self.span.strong_count() > 0 {
            return Ok(());
        }
        let got = format!("{}, which was given back since the capture", self.region.0);
        Err(Error::invalid("region", got, "a registered region"))
    }
}

/// Registered regions, by number, and what is left of the memory for them.
pub(crate) struct Regions {
    start: usize,
    bytes: usize,
    most: u16,
    /// Nobody else keeps one: see [`Held`].
    list: Vec<Option<Arc<Span>>>,
}

impl Regions {
    /// From byte `start` of a part on.
    pub(crate) fn new(start: usize, config: &CommConfig) -> Self {
        Self {
            start,
            bytes: config.region_bytes,
            most: config.regions,
            list: Vec::new(),
        }
    }

    fn place(&self, region: Region) -> Result<&Arc<Span>> {
        self.list
            .get(usize::from(region.0))
            .and_then(Option::as_ref)
            .ok_or_else(|| Error::invalid("region", region.0, "a registered region"))
    }

    fn get(&self, region: Region) -> Result<Span> {
        self.place(region).map(|span| **span)
    }

    /// What work in the region keeps.
    fn held(&self, region: Region) -> Result<Buffer> {
        let span = Arc::downgrade(self.place(region)?);
        Kept::Region(Held { region, span }).buffer()
    }

    /// The lowest free number from `first` on; `most` if there is none.
    fn free_from(&self, first: u64) -> u64 {
        let free = |&i: &u64| self.list.get(i as usize).is_none_or(Option::is_none);
        let most = u64::from(self.most);
        (first..most).find(free).unwrap_or(most)
    }

    /// The lowest place for `bytes` bytes from `first` on; past the end if there is none.
    fn place_from(&self, first: u64, bytes: usize) -> u64 {
        let end = (self.start + self.bytes) as u64;
        let taken = |at: u64| {
            let overlaps = |s: &&Arc<Span>| {
                at < (s.start + s.bytes) as u64
                    && (s.start as u64) < at.saturating_add(bytes as u64)
            };
            self.list.iter().flatten().find(overlaps)
        };
        let mut at = first.max(self.start as u64);
        while let Some(span) = taken(at) {
            at = ((span.start + span.bytes) as u64).next_multiple_of(REGION_ALIGN as u64);
        }
        match at.checked_add(bytes as u64) {
            Some(last) if last <= end => at,
            _ => u64::MAX,
        }
    }

    fn set(&mut self, region: Region, span: Option<Span>) {
        let at = usize::from(region.0);
        let len = self.list.len().max(at + 1);
        self.list.resize(len, None);
        self.list[at] = span.map(Arc::new);
    }
}

impl Span {
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
}

impl CudaComm {
    /// Waits for the work of a call that answers.
    fn settle(&self, turn: &Turn) -> Result<()> {
        let lane = self.gpu().lane(turn.stream())?;
        let mark = CudaMark::record(&self.gpu().card, lane.stream)?;
        let config = &self.core.config;
        let in_time = mark.reached(config.first_deadline.max(config.deadline) + ENDING)?;
        self.core.usable()?;
        if in_time {
            return Ok(());
        }
        self.core.abort();
        self.core.usable()
    }

    /// Shows every rank two numbers of every rank, as part of `call`.
    fn exchange_numbers(&self, turn: &Turn, call: &Call, mine: [u64; 2]) -> Result<Vec<[u64; 2]>> {
        let (gpu, size) = (self.gpu(), self.core.size());
        let on = turn.stream();
        let mut from = gpu.allocate(on, brigade_device::MemoryType::Device, DataType::U64, &[2])?;
        let to = gpu.allocate(
            on,
            brigade_device::MemoryType::Device,
            DataType::U64,
            &[2 * size],
        )?;
        let bytes: Vec<u8> = mine.iter().flat_map(|n| n.to_ne_bytes()).collect();
        gpu.write(on, from.view_mut(), &bytes)?;
        let piece = self.core.config.scratch_bytes;
        self.core.collective(on, call, &[&from, &to], None, |job| {
            all_gather(job, &vec![16; size], piece, &to, &from)
        })?;
        self.settle(turn)?;
        let mut all = vec![0; 16 * size];
        gpu.read(on, to.view(), &mut all)?;
        let number = |b: &[u8]| b.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
        Ok(all
            .chunks_exact(16)
            .map(|b| [number(&b[..8]), number(&b[8..])])
            .collect())
    }

    /// The lowest number and place that are free on every rank. Ranks may differ in what they hold, if a fault ended a
    /// registration on some of them only: they raise what they propose until all propose the same.
    fn agree_on_place(&self, turn: &Turn, call: &Call, bytes: usize) -> Result<[u64; 2]> {
        let propose = |[number, place]: [u64; 2]| {
            let regions = self.core.regions.lock();
            [regions.free_from(number), regions.place_from(place, bytes)]
        };
        let mut mine = propose([0, 0]);
        loop {
            let all = self.exchange_numbers(turn, call, mine)?;
            let highest = all
                .iter()
                .fold([0, 0], |h: [u64; 2], n| [h[0].max(n[0]), h[1].max(n[1])]);
            if all.iter().all(|n| *n == highest) {
                return Ok(highest);
            }
            mine = propose(highest);
        }
    }

    fn with_peer(
        &self,
        turn: &Turn,
        region: Region,
        peer: usize,
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        check_peer(peer, self.core.rank(), self.core.size())?;
        let held = self.core.regions.lock().held(region)?;
        let signed = (Operation::UserBuffers, SIGNATURE);
        self.core.pairwise(turn.stream(), signed, &[&held], work)
    }

    /// Copies between this rank's part of a region and a peer's.
    fn transfer(&self, turn: &Turn, p: TransferParams, puts: bool) -> Result<()> {
        let span = self.core.regions.lock().get(p.region)?;
        span.check("source_offset", p.source_offset, p.bytes)?;
        span.check("target_offset", p.target_offset, p.bytes)?;
        check_peer(p.peer, self.core.rank(), self.core.size())?;
        let held = self.core.regions.lock().held(p.region)?;
        let signed = (Operation::UserBuffers, SIGNATURE);
        self.core
            .pairwise_alone(turn.stream(), signed, &[&held], |job| {
                let me = job.core.rank();
                job.steps.start();
                let (source, target) = if puts {
                    job.steps.await_released(p.region, p.peer)?;
                    (me, p.peer)
                } else {
                    (p.peer, me)
                };
                // A copy waits for nobody: the call is counted in front of it, so that no steps stand behind.
                job.count_moved(p.bytes);
                job.steps.finish();
                let from = job.core.address(source, span.start + p.source_offset);
                let to = job.core.address(target, span.start + p.target_offset);
                match carrier(&p) {
                    CopyBy::Kernel => job.moves(&[(to, from, p.bytes)]),
                    CopyBy::Engine => {
                        job.steps_now()?;
                        job.copy(job.stream, to, from, p.bytes)
                    }
                }
            })
    }
}

/// What carries a copy.
fn carrier(p: &TransferParams) -> CopyBy {
    p.choice.unwrap_or(match p.bytes {
        ENGINE_BYTES.. => CopyBy::Engine,
        _ => CopyBy::Kernel,
    })
}

impl UserBuffers for CudaComm {
    fn register(&self, turn: &mut Turn, bytes: usize) -> Result<Region> {
        let lane = self.gpu().lane(turn.stream())?;
        lane.refuse_capture("registering a region")?;
        let call = Call::Register { bytes };
        let [number, place] = self.agree_on_place(turn, &call, bytes)?;
        let config = &self.core.config;
        if number >= u64::from(config.regions) {
            return Err(Reason::new(
                "regions",
                format!("all {} regions are taken", config.regions),
                "deregister one, or raise regions",
            )
            .into());
        }
        let Some(start) = usize::try_from(place).ok().filter(|_| place != u64::MAX) else {
            return Err(Error::Group {
                step: "register a region",
                what: format!(
                    "no place for {bytes} bytes among the {} for regions: raise region_bytes",
                    config.region_bytes
                ),
            });
        };
        let region = Region(number as u16);
        lane.run(&[], |stream| {
            let own = self.core.address(self.core.rank(), start);
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: own memory, in a place that is free on every rank.
            unsafe { result::memset_d8_async(own, 0, bytes, stream) }
                .map_err(failed("cuMemsetD8Async"))
        })?;
        // Nobody writes there before everybody's memory is zero.
        self.exchange_numbers(turn, &call, [number, place])?;
        self.core
            .regions
            .lock()
            .set(region, Some(Span { start, bytes }));
        Ok(region)
    }

    fn deregister(&self, turn: &mut Turn, region: Region) -> Result<()> {
        let lane = self.gpu().lane(turn.stream())?;
        lane.refuse_capture("giving a region back")?;
        self.core.regions.lock().get(region)?;
        let call = Call::Deregister { region: region.0 };
        self.core
            .collective(turn.stream(), &call, &[], None, |job| {
                // Once all ranks are in this call, none will touch the region or signal in it any more.
                job.steps.meet();
                for peer in job.core.peers() {
                    job.steps.let_go_of(region, peer)?;
                }
                Ok(())
            })?;
        self.settle(turn)?;
        self.core.regions.lock().set(region, None);
        Ok(())
    }

    fn write(&self, turn: &mut Turn, region: Region, offset: usize, from: View<'_>) -> Result<()> {
        let from = from.retain();
        self.local(turn, region, offset, &from, true)
    }

    fn read(&self, turn: &mut Turn, region: Region, offset: usize, to: ViewMut<'_>) -> Result<()> {
        let to = to.as_view().retain();
        self.local(turn, region, offset, &to, false)
    }

    fn put(&self, turn: &mut Turn, p: TransferParams) -> Result<()> {
        self.transfer(turn, p, true)
    }

    fn get(&self, turn: &mut Turn, p: TransferParams) -> Result<()> {
        self.transfer(turn, p, false)
    }

    fn signal(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()> {
        self.with_peer(turn, region, peer, |job| job.steps.signal(region, peer))
    }

    fn wait(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()> {
        self.with_peer(turn, region, peer, |job| {
            job.steps.await_signal(region, peer)
        })
    }

    fn release(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()> {
        self.with_peer(turn, region, peer, |job| job.steps.release(region, peer))
    }
}

impl CudaComm {
    /// Copies between the caller's buffer and this rank's own part of a region.
    fn local(
        &self,
        turn: &Turn,
        region: Region,
        offset: usize,
        buffer: &Buffer,
        writes: bool,
    ) -> Result<()> {
        let (span, held) = {
            let regions = self.core.regions.lock();
            (regions.get(region)?, regions.held(region)?)
        };
        span.check("offset", offset, buffer.bytes())?;
        check_reach(
            &self.gpu().card,
            if writes { "from.memory" } else { "to.memory" },
            buffer,
        )?;
        self.core.locally(turn.stream(), &[buffer, &held], |job| {
            let own = job.core.address(job.core.rank(), span.start + offset);
            let (to, from) = if writes {
                (own, buffer.address())
            } else {
                (buffer.address(), own)
            };
            job.moves(&[(to, from, buffer.bytes())])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::ParallelMode;

    fn regions() -> Regions {
        let mut config = CommConfig::new(ParallelMode::Tp);
        (config.regions, config.region_bytes) = (3, 4096);
        Regions::new(1024, &config)
    }

    fn take(regions: &mut Regions, bytes: usize) -> Option<u64> {
        let number = regions.free_from(0);
        let place = regions.place_from(0, bytes);
        if number == 3 || place == u64::MAX {
            return None;
        }
        let start = place as usize;
        regions.set(Region(number as u16), Some(Span { start, bytes }));
        Some(place)
    }

    #[test]
    fn places_are_apart_inside_and_used_again() {
        let mut regions = regions();
        assert_eq!(take(&mut regions, 1000), Some(1024));
        assert_eq!(take(&mut regions, 10), Some(2048));
        assert_eq!(take(&mut regions, 4096), None, "too large for what is left");
        assert_eq!(take(&mut regions, 2560), Some(2304), "to the very end");
        assert_eq!(take(&mut regions, 0), None, "no number is left");
        regions.set(Region(1), None);
        assert_eq!(regions.free_from(0), 1);
        assert_eq!(take(&mut regions, 256), Some(2048));
        assert!(regions.get(Region(1)).is_ok() && regions.get(Region(3)).is_err());
    }

    #[test]
    fn a_forced_carrier_is_taken_at_any_size() {
        let by = |bytes, choice| {
            carrier(&TransferParams {
                region: Region(0),
                peer: 1,
                source_offset: 0,
                target_offset: 0,
                bytes,
                choice,
            })
        };
        for bytes in [0, ENGINE_BYTES - 1, ENGINE_BYTES, usize::MAX] {
            for forced in [CopyBy::Engine, CopyBy::Kernel] {
                assert_eq!(by(bytes, Some(forced)), forced, "{bytes}");
            }
        }
        assert_eq!(by(ENGINE_BYTES - 1, None), CopyBy::Kernel);
        assert_eq!(by(ENGINE_BYTES, None), CopyBy::Engine);
    }

    #[test]
    fn sizes_that_cannot_be_have_no_place() {
        let regions = regions();
        for bytes in [4097, usize::MAX, 1 << 63] {
            assert_eq!(regions.place_from(0, bytes), u64::MAX, "{bytes}");
        }
        assert_eq!(regions.place_from(1300, 100), 1300, "from there on");
    }
}
