//! The watch of a communicator: a thread that hands on what kernels, peers and the host say to each other, also while a rank
//! that has dropped its communicator still works.

use crate::{
    core::{Core, GroupMemory, HEARSAY},
    lane::Lane,
    mark::CudaMark,
};
use brigade_device::{Error, Group, Result};
use brigade_group::Control;
use brigade_sync::{Deadline, Memory};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

impl Drop for Core {
    /// Waits for nobody but NCCL, where that is being given up: a process that ended meanwhile would crash. Memory stays, and the peers hear that this rank has left, when its work is done: they may be
    /// waiting for what it has yet to say.
    fn drop(&mut self) {
        if let Some(nccl) = &self.memory.nccl {
            nccl.settle();
        }
        let leaving = Leaving {
            marks: self.marks(),
            control: Arc::clone(&self.control),
            memory: Arc::clone(&self.memory),
            _lanes: std::mem::take(self.used.get_mut()),
            _sides: [&self.mover, &self.waiter].map(Arc::clone),
        };
        if leaving.done() {
            return;
        }
        let patience = self.config.first_deadline.max(self.config.deadline) + HEARSAY;
        let memory = Arc::clone(&self.memory);
        let waits = thread::Builder::new()
            .name(format!("rank {} leaves", self.rank()))
            .spawn(move || leaving.wait(patience));
        if waits.is_err() {
            // Without a thread to wait, the peers hear of it at once; kernels still use the memory.
            std::mem::forget(memory);
        }
    }
}

/// A rank whose communicator is dropped while work of it is still going on.
struct Leaving {
    marks: Vec<Arc<CudaMark>>,
    control: Arc<Control>,
    memory: Arc<GroupMemory>,
    _lanes: Vec<Arc<Lane>>,
    _sides: [Arc<Lane>; 2],
}

impl Leaving {
    fn done(&self) -> bool {
        self.marks.iter().all(|mark| mark.is_over())
    }

    fn wait(self, patience: Duration) {
        let end = Deadline::after(patience).end();
        while !self.done() && Instant::now() < end {
            relay(&self.control, &self.memory);
            thread::park_timeout(ROUND);
        }
        if !self.done() {
            // Better lost than taken from under a kernel.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.control.leave();
    }
}

/// Hands on what kernels, peers and this rank's host say to each other: a kernel cannot wake a thread, nor hear of a process
/// that died.
fn relay(control: &Control, memory: &GroupMemory) {
    let (report, generation) = (&memory.report, control.generation());
    if let Some(record) = report.fault(generation)
        && control.fault().is_none()
    {
        control.raise_in(generation, record);
    }
    if let Some(nccl) = &memory.nccl {
        nccl.relay(control);
    }
    // Of no generation but that: kernels of one that a reset has just begun would stop, and nobody would know why.
    if let Some(generation) = control.stopped() {
        report.ask_to_stop(generation);
    }
    let Group { rank, size, .. } = *control.group();
    let gone = (0..size).filter(|&p| p != rank && control.departed(p));
    report.say_departed(gone.fold(0, |mask, p| mask | 1 << p));
}

/// How long a kernel's record may lie unread. What hosts say wakes the watch at once.
const ROUND: Duration = Duration::from_millis(5);

/// Starts the watch of a communicator: a thread that relays. It ends with the communicator.
pub(crate) fn watch(core: &Arc<Core>) -> Result<()> {
    if core.size() == 1 {
        return Ok(());
    }
    let (watched, control) = (Arc::downgrade(core), Arc::clone(&core.control));
    let rank = core.rank();
    let rounds = move || {
        loop {
            let events = control.memory().events(rank);
            let Some(core) = watched.upgrade() else {
                return;
            };
            relay(&core.control, &core.memory);
            drop(core);
            let until = Instant::now().checked_add(ROUND);
            control.memory().rest(rank, events, until);
        }
    };
    thread::Builder::new()
        .name(format!("rank {rank} watch"))
        .spawn(rounds)
        .map(drop)
        .map_err(|e| Error::Backend {
            call: "start the watch of a communicator",
            code: e.raw_os_error().unwrap_or(0).into(),
            source: Some(Arc::new(e)),
        })
}
