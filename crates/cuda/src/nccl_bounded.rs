//! Communicators of NCCL's whose calls end.
//!
//! NCCL waits without a bound, on the host and on the GPU, and its kernels know no stop word. So a thread of their own makes
//! their calls, for which whoever wants them waits as long as that is of use; and they can be given up, which ends their kernels. Who uses them
//! sees to it that somebody watches. (NCCL's own way, communicators that do not block, starts a thread for each call, which takes 130 us.)
//!
//! [NCCL forbids](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/threadsafety.html) that several threads work with communicators
//! on one GPU at once. So those that a rank has for one purpose are made, called and given up together, by one thread at a time.

use crate::{
    Version,
    card::Card,
    core::HEARSAY,
    errands::{Errands, errands},
    nccl_comm::{
        Functions, Handle, IN_PROGRESS, Initialize, Settings, Status, UniqueId, check, missing,
    },
};
use brigade_device::{Bootstrap, Error, Reason, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Between two looks whether NCCL has taken a call, once it has not for a while.
pub(crate) const ROUND: Duration = Duration::from_micros(50);

/// One rank of this process frees what it gave up at a time: where ranks are threads, the last of them to give a communicator up takes those of all
/// others apart, on their GPUs.
static FREEING: Mutex<()> = Mutex::new(());

/// How long one waits for that: each takes half a second, and what the one before gave up may be kept by graphs.
const FREES: Duration = HEARSAY;

/// The longest that giving up takes, where no graph keeps anything: behind what is to come before, a call that is being made, others, and half a
/// second of its own.
const GIVING_UP: Duration = Duration::from_secs(4);

/// From this version on, NCCL frees what is given up at the end of a group, all of it beside each other; before, at once, and waits for its kernels.
const FREES_IN_GROUPS: Version = Version::of(2, 22);

/// How long what is to come before is waited for.
const TURN: Duration = Duration::from_millis(100);

/// What is to come before something else is opened once.
#[derive(Default)]
pub(crate) struct Latch {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Latch {
    pub(crate) fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }

    fn wait_for(&self, most: Duration) {
        let mut is_open = self.is_open.lock();
        self.opened
            .wait_while_for(&mut is_open, |open| !*open, most);
    }
}

/// NCCL, as far as it makes such communicators.
pub(crate) struct Usable {
    functions: Functions,
    init: Initialize,
    settings: Settings,
}

impl Usable {
    /// That of this process, for communicators of so many channels, or as many as it decides.
    pub(crate) fn find(channels: Option<u16>) -> Result<Self> {
        let functions = Functions::find()?;
        let settings = Settings::blocking(channels, functions.version)?;
        match functions.init_config {
            Some(init) => Ok(Self {
                functions,
                init,
                settings,
            }),
            None => Err(missing("it is older than 2.14")),
        }
    }

    /// A name for a communicator, for all ranks of a group.
    pub(crate) fn name(&self, boot: &dyn Bootstrap, within: Duration) -> Result<UniqueId> {
        UniqueId::of_group(&self.functions, boot, within)
    }
}

/// A call of NCCL's.
type Work = Box<dyn FnOnce(&Functions, Handle) -> Status + Send>;

/// One rank's communicators of NCCL's, until they are given up.
pub(crate) struct Bounded {
    shared: Arc<Shared>,
    errands: Errands<(usize, Work)>,
}

/// What the communicators' thread has as well.
struct Shared {
    functions: Functions,
    card: Arc<Card>,
    comms: Vec<Handle>,
    /// NCCL takes one call at a time: whoever makes one holds this.
    turn: Mutex<()>,
    /// Whether they are to be given up: nobody makes calls any more.
    given_up: AtomicBool,
    /// Whether NCCL is through with giving them up.
    ended: AtomicBool,
    /// What each has failed with, as far as is known, or 0.
    failed: Vec<AtomicI32>,
}

// SAFETY: communicators may be used by any thread, by one at a time, as the lock sees to; and one gives them up.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Bounded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bounded({:?})", self.shared.card)
    }
}

impl Bounded {
    /// This rank's part of the communicators of these names, which all ranks of a group make. NCCL may load what it needs, so nobody should wait on
    /// the GPU.
    pub(crate) fn make(
        card: &Arc<Card>,
        usable: Usable,
        names: Vec<UniqueId>,
        place: (usize, usize),
        end: Instant,
    ) -> Result<Arc<Self>> {
        let (tell, told) = mpsc::channel();
        let (errands, queue) = errands::<(usize, Work)>();
        let card = Arc::clone(card);
        // Until it is handed over, an exit waits for it.
        ending::one_more();
        let made = move || {
            let mut shared = Shared::none(card, usable.functions, names.len());
            let made = shared.make((usable.init, &usable.settings), names, place);
            ending::waits();
            let shared = Arc::new(shared);
            let is_made = made.is_ok();
            let handed = tell.send(made.map(|()| Arc::clone(&shared)));
            let serves = is_made && handed.is_ok();
            // Whoever waited may have gone: then it ends here, and behind what was told.
            drop(handed);
            let shared = Some(shared).filter(|_| serves);
            ending::one_less();
            if let Some(shared) = shared {
                queue.serve(|work| shared.answer(work));
            }
        };
        let spawned = thread::Builder::new().name("calls NCCL".into()).spawn(made);
        spawned.map_err(|e| {
            ending::one_less();
            missing(&format!("there is no thread for it: {e}"))
        })?;
        let left = end.saturating_duration_since(Instant::now());
        let shared = told.recv_timeout(left).map_err(|_| late())??;
        Ok(Arc::new(Self { shared, errands }))
    }

    /// Makes a call with one of them. `goes_on` says whether to wait on for NCCL to take it, as it mostly does at once; a call that finds its peers only now waits
    /// for them.
    pub(crate) fn call(
        &self,
        which: usize,
        name: &'static str,
        goes_on: impl Fn() -> Result<()>,
        work: impl FnOnce(&Functions, Handle) -> Status + Send + 'static,
    ) -> Result<()> {
        let done = self.errands.done((which, Box::new(work)), goes_on)?;
        check(name, done.ok_or_else(gone)?)
    }

    /// What NCCL has failed with beside calls with one of them. While a call is made, it is what was known before.
    pub(crate) fn failed(&self, which: usize) -> Option<Status> {
        let (shared, failed) = (&self.shared, &self.shared.failed[which]);
        let Some(_turn) = shared.turn.try_lock() else {
            return Some(failed.load(Ordering::Acquire)).filter(|&status| status != 0);
        };
        if shared.given_up.load(Ordering::Acquire) {
            return None;
        }
        let mut status = 0;
        let comm = shared.comms[which];
        // SAFETY: the communicator has not been given up, and the pointer is to a live number.
        let asked = unsafe { (shared.functions.async_error)(comm, &raw mut status) };
        let found = [asked, status]
            .into_iter()
            .find(|s| ![0, IN_PROGRESS].contains(s));
        failed.store(found.unwrap_or(0), Ordering::Release);
        found
    }

    /// Ends NCCL's kernels, and the communicators. On a thread of its own, since NCCL waits for graphs that use them to be
    /// dropped; their kernels find that they were given up, and end at once.
    pub(crate) fn give_up(&self) {
        self.give_up_behind(None);
    }

    /// The same, behind something that has its [`TURN`] to be done.
    pub(crate) fn give_up_behind(&self, before: Option<Arc<Latch>>) {
        self.shared.give_up(before);
    }

    /// Waits until NCCL is through with giving them up, if it is to, but not for long: graphs may keep them.
    pub(crate) fn settle(&self) {
        let (shared, end) = (&self.shared, Instant::now() + FREES + HEARSAY);
        if !shared.given_up.load(Ordering::Acquire) {
            return;
        }
        while !shared.ended.load(Ordering::Acquire) && Instant::now() < end {
            // tidy: sleeps because NCCL tells nobody when it is done.
            thread::sleep(ROUND);
        }
    }
}

impl Drop for Bounded {
    /// Nobody uses them any more: all of their work is done by then.
    fn drop(&mut self) {
        // Whoever gave them up before has waited for that.
        if !self.shared.given_up.load(Ordering::Acquire) {
            self.give_up_behind(None);
            self.settle();
        }
    }
}

impl Shared {
    /// None yet, of so many.
    fn none(card: Arc<Card>, functions: Functions, count: usize) -> Self {
        Self {
            functions,
            card,
            comms: Vec::with_capacity(count),
            turn: Mutex::default(),
            given_up: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            failed: (0..count).map(|_| AtomicI32::new(0)).collect(),
        }
    }

    /// Makes the communicators, which wait for their peers without a bound. Dropping this gives up those that were made.
    fn make(
        &mut self,
        (init, settings): (Initialize, &Settings),
        names: Vec<UniqueId>,
        (rank, size): (usize, usize),
    ) -> Result<()> {
        const CALL: &str = "ncclCommInitRankConfig";
        self.card.bind()?;
        let (size, rank) = (size as _, rank as _);
        for name in names {
            let mut comm = std::ptr::null_mut();
            // SAFETY: the pointers are to a live handle and to live settings; this thread's context is the device's.
            let status = unsafe { init(&raw mut comm, size, name, rank, settings) };
            check(CALL, status)?;
            if comm.is_null() {
                return Err(missing("it makes no communicator"));
            }
            self.comms.push(comm);
        }
        Ok(())
    }

    /// Makes a call, unless they were given up.
    fn answer(&self, (which, work): (usize, Work)) -> Option<Status> {
        let _turn = self.turn.lock();
        let is_left = self.given_up.load(Ordering::Acquire);
        (!is_left).then(|| work(&self.functions, self.comms[which]))
    }

    fn give_up(self: &Arc<Self>, before: Option<Arc<Latch>>) {
        if self.given_up.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = Arc::clone(self);
        let gives_up = thread::Builder::new().name("gives NCCL up".into());
        ending::one_more();
        ending::waits();
        let spawned = gives_up.spawn(move || {
            if let Some(latch) = before {
                latch.wait_for(TURN);
            }
            // Behind a call that is being made, unless it waits for what may never come: NCCL tells such a call first that it is to end, by its source.
            drop(shared.turn.try_lock_for(HEARSAY));
            shared.abort();
            shared.ended.store(true, Ordering::Release);
            ending::one_less();
        });
        // Without a thread its kernels go on until their process ends.
        if spawned.is_err() {
            ending::one_less();
        }
    }

    /// Once, by whoever gives them up. NCCL tells the kernels of each as it is given up, and frees what they had, beside each other, at the end of the
    /// group.
    fn abort(&self) {
        let f = &self.functions;
        if self.comms.is_empty() {
            return;
        }
        if f.version < FREES_IN_GROUPS {
            return self.abort_each();
        }
        if self.card.bind().is_err() {
            return;
        }
        // SAFETY: each was made once, and is given up once, as the flag has it; a group that was begun is ended, by the same thread.
        unsafe {
            let begun = (f.group_start)();
            for &comm in &self.comms {
                let _ = (f.abort)(comm);
            }
            let _turn = FREEING.try_lock_for(FREES);
            if begun == 0 {
                let _ = (f.group_end)();
            }
        }
    }

    /// Each by a thread of its own: kernels of one may keep what another's freeing waits for.
    fn abort_each(&self) {
        thread::scope(|threads| {
            for which in 0..self.comms.len() {
                let abort = move || {
                    if self.card.bind().is_ok() {
                        // SAFETY: as above.
                        let _ = unsafe { (self.functions.abort)(self.comms[which]) };
                    }
                };
                let _ = thread::Builder::new().spawn_scoped(threads, abort);
            }
        });
    }
}

impl Drop for Shared {
    /// Nobody took it over.
    fn drop(&mut self) {
        if !*self.given_up.get_mut() {
            self.abort();
        }
    }
}

/// A process that exits while NCCL is being given up would take the driver away from NCCL's threads, which crash then.
mod ending {
    use super::{Duration, Instant, ROUND, thread};
    use std::{
        ffi::c_int,
        sync::{
            Once,
            atomic::{AtomicUsize, Ordering},
        },
    };

    /// Communicators that are being given up.
    static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

    /// The longest that an exit is held up.
    const PATIENCE: Duration = super::GIVING_UP;

    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> c_int;
    }

    pub(super) fn one_more() {
        UNDER_WAY.fetch_add(1, Ordering::AcqRel);
    }

    /// From here on an exit waits. To be asked for when NCCL and the driver are loaded.
    pub(super) fn waits() {
        static ASKED: Once = Once::new();
        // What is asked for last comes first: before NCCL and the driver, which are loaded already, take themselves down.
        ASKED.call_once(|| {
            // SAFETY: the function is there for as long as the program is, and panics nowhere. That it could not be noted changes nothing here.
            let _ = unsafe { atexit(wait) };
        });
    }

    pub(super) fn one_less() {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
    }

    extern "C" fn wait() {
        let end = Instant::now() + PATIENCE;
        while UNDER_WAY.load(Ordering::Acquire) > 0 && Instant::now() < end {
            // tidy: sleeps because NCCL tells nobody when it is done.
            thread::sleep(ROUND);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn an_exit_waits_for_what_is_under_way() {
            one_more();
            let begun = Instant::now();
            let exit = thread::spawn(|| wait());
            assert_eq!(UNDER_WAY.load(Ordering::Acquire), 1);
            one_less();
            exit.join().unwrap();
            assert!(begun.elapsed() < PATIENCE, "it waited for nothing");
            // What never ends holds an exit up no longer than that.
            one_more();
            wait();
            assert!(begun.elapsed() >= PATIENCE);
            one_less();
        }
    }
}

pub(crate) fn remains(end: Instant) -> Result<()> {
    if Instant::now() < end {
        return Ok(());
    }
    Err(late())
}

pub(crate) fn late() -> Error {
    Error::Group {
        step: "NCCL",
        what: "it has not done in time what this rank asked for".into(),
    }
}

pub(crate) fn shared() -> Error {
    Reason::new(
        "nccl-shared",
        "NCCL serves no ranks that share a GPU",
        "give every rank a GPU of its own, or join without nccl",
    )
    .into()
}

pub(crate) fn gone() -> Reason {
    Reason::new(
        "nccl-gone",
        "NCCL's communicator ended with the group that was stopped, and a reset makes no other",
        "join anew, or leave the algorithm to the plan",
    )
}
