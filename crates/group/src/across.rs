//! A hierarchy's groups, as one: what stops one of them stops all, with ranks numbered over all machines.

use brigade_device::{
    Error, FaultKind, FaultRecord, Group, Identity, Machines, Numbers, Origin, Result,
};
use parking_lot::{Mutex, RwLock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// One of the groups that a hierarchy is made of, on this rank.
pub trait Stoppable: Send + Sync {
    /// What stopped it, if it was stopped. It may wait to hear why.
    fn fault(&self) -> Option<FaultRecord>;

    /// The same, as far as it is known: waits for nothing.
    fn known(&self) -> Option<FaultRecord> {
        self.fault()
    }

    /// Has it hear of what stopped another one, as far as that waits for nothing; [`stop`](Self::stop) is next.
    fn tell(&self, _record: FaultRecord) {}

    /// Stops it with what stopped another one. Nothing, if it is stopped.
    fn stop(&self, record: FaultRecord);

    /// Whether it was closed.
    fn is_closed(&self) -> bool {
        false
    }
}

/// One rank's groups, inside its machine and along its rail.
pub struct Across {
    group: Group,
    machines: Machines,
    parts: Vec<(Arc<dyn Stoppable>, Numbers)>,
    calls: AtomicU64,
    /// 1 at first, one more after each reset.
    generation: AtomicU32,
    identity: Identity,
    /// What stopped it, with ranks of all machines.
    fault: Mutex<Option<FaultRecord>>,
    /// While groups start anew, one after the other, nobody stops those that have.
    renewing: AtomicBool,
    /// Held while groups are stopped, by as many threads as do so.
    relaying: RwLock<()>,
}

impl Across {
    /// Of these groups, each with what its numbers stand for.
    pub fn new(
        group: Group,
        machines: Machines,
        parts: Vec<(Arc<dyn Stoppable>, Numbers)>,
    ) -> Self {
        Self {
            group,
            machines,
            parts,
            calls: AtomicU64::new(0),
            generation: AtomicU32::new(1),
            identity: Identity::new(),
            fault: Mutex::default(),
            renewing: AtomicBool::new(false),
            relaying: RwLock::new(()),
        }
    }

    /// All ranks, as this one sees them.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Which of them share a machine.
    pub fn machines(&self) -> Machines {
        self.machines
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Acquire)
    }

    /// One more call. Gives how many there are then.
    pub fn count_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// 1 at first, one more after each reset.
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// What this rank's caller is given now is from here, and no longer after the next reset.
    pub fn origin(&self) -> Origin {
        self.identity.origin()
    }

    /// What stopped it: the first that this rank heard of.
    pub fn fault(&self) -> Option<FaultRecord> {
        self.found(|part| part.fault())
    }

    fn found(&self, of: impl Fn(&dyn Stoppable) -> Option<FaultRecord>) -> Option<FaultRecord> {
        let (known, generation) = (*self.fault.lock(), self.generation());
        if known.is_some() || self.renewing.load(Ordering::Acquire) {
            return known;
        }
        // Nothing is held meanwhile: a group may wait to hear why it was stopped, and another thread of this rank be about to say it.
        let found = self.parts.iter().find_map(|(part, numbers)| {
            let record = of(&**part)?;
            Some(self.machines.over_all(record, self.group.rank, *numbers))
        });
        let mut fault = self.fault.lock();
        match found {
            Some(record) if self.is_in(generation) => Some(*fault.get_or_insert(record)),
            _ => *fault,
        }
    }

    /// Whether this generation is the one of now.
    fn is_in(&self, generation: u32) -> bool {
        self.generation() == generation && !self.renewing.load(Ordering::Acquire)
    }

    /// If one group was stopped, stops the others. It may wait to hear why.
    pub fn relay(&self) -> Option<FaultRecord> {
        self.relay_of(|part| part.fault())
    }

    /// The same, for whoever is to hear why: waits for nothing.
    pub fn relay_known(&self) -> Option<FaultRecord> {
        self.relay_of(|part| part.known())
    }

    fn relay_of(&self, of: impl Fn(&dyn Stoppable) -> Option<FaultRecord>) -> Option<FaultRecord> {
        let generation = self.generation();
        let record = self.found(of)?;
        // Whoever has begun with it is done before any group starts anew; and what stopped one generation stops no later one.
        let _turn = self.relaying.read_recursive();
        if self.is_in(generation) {
            // All hear of it first: what one of them waits for while it stops may be another one's to end.
            self.parts.iter().for_each(|(part, _)| part.tell(record));
            self.parts.iter().for_each(|(part, _)| part.stop(record));
        }
        Some(record)
    }

    /// Stops all groups with this record, if nothing has that this rank has heard of; gives what stopped them.
    pub fn stop(&self, record: FaultRecord) -> FaultRecord {
        let record = *self.fault.lock().get_or_insert(record);
        self.relay_known();
        record
    }

    /// The same for what was found in a generation: nothing, if it is over by now.
    pub fn stop_in(&self, generation: u32, record: FaultRecord) {
        {
            let mut fault = self.fault.lock();
            if !self.is_in(generation) {
                return;
            }
            fault.get_or_insert(record);
        }
        self.relay_known();
    }

    /// Stops all groups because this rank's program wants it.
    pub fn abort(&self) {
        self.stop(self.record(FaultKind::Aborted));
    }

    /// Stops all groups after `error`; gives what the call that it ended returns.
    pub fn give_up(&self, error: Error) -> Error {
        // If no group was stopped, it went wrong outside of any, and they wait for this rank.
        let record = self.fault();
        let record = self.stop(record.unwrap_or_else(|| self.record(FaultKind::Aborted)));
        match error {
            Error::Fault(_) => Error::Fault(record),
            other => other,
        }
    }

    /// A record about nothing but this rank.
    pub fn record(&self, kind: FaultKind) -> FaultRecord {
        let rank = self.group.rank as u32;
        FaultRecord {
            kind,
            operation: 0,
            rank,
            peer: rank,
            slot: 0,
            generation: self.generation(),
            expected: 0,
            seen: 0,
            waited_ns: 0,
            call: self.calls(),
            claimed: 1,
            across: 1,
        }
    }

    /// Whether calls can be made.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Fault`].
    pub fn usable(&self) -> Result<()> {
        self.is_open()?;
        self.relay().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Whether no group was closed.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn is_open(&self) -> Result<()> {
        match self.parts.iter().any(|(part, _)| part.is_closed()) {
            true => Err(Error::Closed),
            false => Ok(()),
        }
    }

    /// Starts a generation, `within` that time: `renew` starts all groups anew, and nobody stops one of them meanwhile.
    ///
    /// # Errors
    /// Those of `renew`; the groups are stopped then. [`Error::Busy`] where a thread is still about to stop them.
    pub fn renew(&self, within: Duration, renew: impl FnOnce() -> Result<()>) -> Result<()> {
        self.is_open()?;
        let Some(turn) = self.relaying.try_write_for(within) else {
            return Err(Error::Busy("the hierarchy"));
        };
        self.renewing.store(true, Ordering::Release);
        drop(turn);
        let result = renew();
        let mut fault = self.fault.lock();
        let before = fault.take();
        if result.is_err() {
            // What stopped it before still does.
            *fault = before;
        } else {
            self.generation.fetch_add(1, Ordering::AcqRel);
            self.identity.renew();
        }
        self.renewing.store(false, Ordering::Release);
        drop(fault);
        result.map_err(|error| self.give_up(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::ParallelMode;
    use std::{
        sync::{Barrier, OnceLock},
        thread,
    };

    const AMPLE: Duration = Duration::from_secs(60);

    #[derive(Default)]
    struct Part(Mutex<Option<FaultRecord>>, OnceLock<Arc<Part>>);

    impl Stoppable for Part {
        fn fault(&self) -> Option<FaultRecord> {
            *self.0.lock()
        }
        fn tell(&self, record: FaultRecord) {
            self.0.lock().get_or_insert(record);
        }
        fn stop(&self, _: FaultRecord) {
            let waits_for = self.1.get();
            assert!(waits_for.is_none_or(|other| other.fault().is_some()));
        }
    }

    fn four() -> (Across, [Arc<Part>; 4]) {
        let parts: [Arc<Part>; 4] = Default::default();
        let group = Group {
            mode: ParallelMode::Tp,
            rank: 4,
            size: 6,
        };
        let numbers = [
            Numbers::Inside,
            Numbers::Inside,
            Numbers::Rail,
            Numbers::Rail,
        ];
        let listed = parts.iter().zip(numbers);
        let listed = listed.map(|(p, n)| (Arc::clone(p) as Arc<dyn Stoppable>, n));
        let machines = Machines::cut(6, 3).unwrap();
        (Across::new(group, machines, listed.collect()), parts)
    }

    #[test]
    fn what_stops_one_group_stops_all_with_ranks_of_all_machines() {
        let (across, parts) = four();
        across.usable().unwrap();
        let mut own = across.record(FaultKind::Timeout);
        // As rank 2 of the rail says it, of rank 0 there.
        (own.rank, own.peer, own.across) = (2, 0, 0);
        parts[2].tell(own);
        // The first one ends once the last one has heard.
        parts[0].1.get_or_init(|| Arc::clone(&parts[3]));
        let told = across.relay().unwrap();
        assert_eq!((told.rank, told.peer, told.across), (4, 0, 1));
        for (i, part) in parts.iter().enumerate().filter(|(i, _)| *i != 2) {
            assert_eq!(part.fault(), Some(told), "group {i}");
        }
        assert!(matches!(across.usable(), Err(Error::Fault(f)) if f == told));
        across.abort();
        assert_eq!(across.fault(), Some(told), "the first one stays");
    }

    #[test]
    fn nobody_stops_what_starts_anew() {
        let (across, parts) = four();
        across.abort();
        across
            .renew(AMPLE, || {
                parts.iter().for_each(|part| *part.0.lock() = None);
                assert!(across.relay().is_some(), "it is still stopped");
                Ok(())
            })
            .unwrap();
        across.usable().unwrap();
        assert_eq!(across.generation(), 2);
        let failed = across.renew(AMPLE, || Err(Error::Busy("a test")));
        assert!(matches!(failed, Err(Error::Busy(_))));
        assert!(parts.iter().all(|part| part.fault().is_some()));
        assert_eq!(across.generation(), 2);
    }

    /// A group that was stopped and waits to hear why.
    struct Deaf;

    impl Stoppable for Deaf {
        fn fault(&self) -> Option<FaultRecord> {
            unreachable!("whoever is to hear why waits for it")
        }
        fn known(&self) -> Option<FaultRecord> {
            None
        }
        fn stop(&self, _: FaultRecord) {}
    }

    /// Why a group was stopped may be what another one is about to hear, from who looks.
    #[test]
    fn who_is_to_hear_why_waits_for_no_group() {
        let (mut across, parts) = four();
        let deaf = Arc::new(Deaf) as Arc<dyn Stoppable>;
        across.parts.insert(0, (deaf, Numbers::Inside));
        assert_eq!(across.relay_known(), None);
        let heard = across.record(FaultKind::PeerLost);
        parts[3].tell(heard);
        let told = across.relay_known();
        assert_eq!(told.map(|record| record.kind), Some(FaultKind::PeerLost));
        assert_eq!(parts[0].fault(), told, "the others hear of it");
        assert_eq!(across.fault(), told, "and whoever asks");
    }

    /// A group that hears of a stop when it is let.
    struct Slow(Part, Barrier, AtomicBool);

    impl Stoppable for Slow {
        fn fault(&self) -> Option<FaultRecord> {
            self.0.fault()
        }
        fn tell(&self, record: FaultRecord) {
            if !self.2.load(Ordering::Acquire) {
                self.1.wait();
                self.1.wait();
            }
            self.0.tell(record);
            self.2.store(true, Ordering::Release);
        }
        fn stop(&self, _: FaultRecord) {}
    }

    #[test]
    fn who_has_begun_to_stop_groups_is_done_before_they_start_anew() {
        let slow = Arc::new(Slow(
            Part::default(),
            Barrier::new(2),
            AtomicBool::new(false),
        ));
        let group = Group {
            mode: ParallelMode::Tp,
            rank: 0,
            size: 2,
        };
        let part = (Arc::clone(&slow) as Arc<dyn Stoppable>, Numbers::Inside);
        let across = Across::new(group, Machines::cut(2, 2).unwrap(), vec![part]);
        thread::scope(|threads| {
            threads.spawn(|| across.abort());
            slow.1.wait();
            let renewed = threads.spawn(|| {
                across.renew(AMPLE, || {
                    assert!(slow.2.load(Ordering::Acquire), "it is being stopped");
                    slow.0.0.lock().take();
                    Ok(())
                })
            });
            // A thread that waits to write keeps readers out.
            while across.relaying.try_read().is_some() {
                thread::yield_now();
            }
            slow.1.wait();
            renewed.join().unwrap().unwrap();
        });
        across.usable().unwrap();
    }
}
