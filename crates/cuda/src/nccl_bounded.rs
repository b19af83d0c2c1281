//! A communicator of NCCL's whose calls end.
//!
//! NCCL waits without a bound, on the host and on the GPU, and its kernels know no stop word. So the communicator does not block the
//! host, which asks until a call is taken or has taken too long; and it can be given up, which ends its kernels. Who uses it sees to it
//! that somebody watches.

use crate::{
    card::Card,
    core::HEARSAY,
    nccl_comm::{
        Functions, Handle, IN_PROGRESS, Initialize, Settings, Status, UniqueId, check, missing,
    },
};
use brigade_device::{Bootstrap, Error, Reason, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Between two questions whether NCCL has taken a call, once it has not for a while.
pub(crate) const ROUND: Duration = Duration::from_micros(50);

/// NCCL hands every call to a thread of its own, and mostly has taken it before this.
const SPINNING: Duration = Duration::from_micros(200);

/// One communicator of this process is given up at a time. NCCL says of communicators on one GPU that several threads must not work with them at
/// once, and where ranks are threads, the last of them to give a communicator up takes those of all others apart, on their GPUs.
static GIVING_UP: Mutex<()> = Mutex::new(());

/// How long one waits for that: the one before may be kept by graphs, and this one's kernels still run.
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
}

impl Usable {
    /// That of this process.
    pub(crate) fn find() -> Result<Self> {
        let functions = Functions::find()?;
        match functions.init_config {
            Some(init) => Ok(Self { functions, init }),
            None => Err(missing("it is older than 2.14")),
        }
    }

    /// A name for a communicator, for all ranks of a group.
    pub(crate) fn name(&self, boot: &dyn Bootstrap, within: Duration) -> Result<UniqueId> {
        UniqueId::of_group(&self.functions, boot, within)
    }
}

/// One rank's communicator of NCCL's, until it is given up.
pub(crate) struct Bounded {
    functions: Functions,
    card: Arc<Card>,
    /// NCCL takes one call at a time.
    comm: Mutex<Option<Handle>>,
    /// Whether NCCL is through with giving it up.
    ended: AtomicBool,
}

// SAFETY: a communicator may be used by any thread, by one at a time, as the lock sees to.
unsafe impl Send for Bounded {}
// SAFETY: as above.
unsafe impl Sync for Bounded {}

impl std::fmt::Debug for Bounded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bounded({:?})", self.card)
    }
}

impl Bounded {
    /// This rank's part of the communicator that all ranks of a group make. NCCL may load what it needs, so nobody should wait on the GPU.
    pub(crate) fn make(
        card: &Arc<Card>,
        usable: Usable,
        id: UniqueId,
        (rank, size): (usize, usize),
        end: Instant,
    ) -> Result<Arc<Self>> {
        const CALL: &str = "ncclCommInitRankConfig";
        card.bind()?;
        let Usable { functions, init } = usable;
        let mut comm = std::ptr::null_mut();
        let (size, rank) = (size as _, rank as _);
        // SAFETY: the pointers are to a live handle and to a static; this thread's context is the device's.
        let status = unsafe { init(&raw mut comm, size, id, rank, &Settings::NON_BLOCKING) };
        if comm.is_null() {
            check(CALL, status)?;
            return Err(missing("it makes no communicator"));
        }
        // From here on, dropping it gives NCCL's communicator up.
        let bounded = Self {
            functions,
            card: Arc::clone(card),
            comm: Mutex::new(Some(comm)),
            ended: AtomicBool::new(false),
        };
        bounded.taken(comm, CALL, status, || remains(end))?;
        Ok(Arc::new(bounded))
    }

    /// Makes a call. `goes_on` says whether to wait on for NCCL to take it.
    pub(crate) fn call(
        &self,
        name: &'static str,
        goes_on: impl Fn() -> Result<()>,
        work: impl FnOnce(&Functions, Handle) -> Status,
    ) -> Result<()> {
        let comm = self.comm.lock();
        let Some(comm) = *comm else {
            return Err(gone().into());
        };
        let status = work(&self.functions, comm);
        self.taken(comm, name, status, goes_on)
    }

    /// Waits until NCCL is done with a call on the host.
    fn taken(
        &self,
        comm: Handle,
        call: &'static str,
        mut status: Status,
        goes_on: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let begun = Instant::now();
        while status == IN_PROGRESS {
            goes_on()?;
            if begun.elapsed() < SPINNING {
                hint::spin_loop();
            } else {
                // tidy: sleeps because NCCL tells nobody when it is done.
                thread::sleep(ROUND);
            }
            // SAFETY: the communicator has not been given up, and the pointer is to a live number.
            let asked = unsafe { (self.functions.async_error)(comm, &raw mut status) };
            check("ncclCommGetAsyncError", asked)?;
        }
        check(call, status)
    }

    /// What NCCL has failed with beside its calls. Nothing is known while a call is made.
    pub(crate) fn failed(&self) -> Option<Status> {
        let comm = (*self.comm.try_lock()?)?;
        let mut status = 0;
        // SAFETY: as above.
        let asked = unsafe { (self.functions.async_error)(comm, &raw mut status) };
        [asked, status]
            .into_iter()
            .find(|s| ![0, IN_PROGRESS].contains(s))
    }

    /// Ends NCCL's kernels, and its communicator. On a thread of its own, since NCCL waits for graphs that use it to be
    /// dropped; their kernels find that it was given up, and end at once.
    pub(crate) fn give_up(self: &Arc<Self>) {
        self.give_up_behind(None);
    }

    /// The same, behind something that has its [`TURN`] to be done.
    pub(crate) fn give_up_behind(self: &Arc<Self>, before: Option<Arc<Latch>>) {
        let Some(comm) = self.comm.lock().take() else {
            return;
        };
        let (bounded, comm) = (Arc::clone(self), Given(comm));
        let gives_up = thread::Builder::new().name("gives NCCL up".into());
        ending::one_more();
        let spawned = gives_up.spawn(move || {
            if let Some(latch) = before {
                latch.wait_for(TURN);
            }
            bounded.abort(comm);
            bounded.ended.store(true, Ordering::Release);
            ending::one_less();
        });
        // Without a thread its kernels go on until their process ends.
        if spawned.is_err() {
            ending::one_less();
        }
    }

    fn abort(&self, Given(comm): Given) {
        if self.card.bind().is_ok() {
            let _turn = GIVING_UP.try_lock_for(TURN);
            // SAFETY: made once, taken out of its place once.
            let _ = unsafe { (self.functions.abort)(comm) };
        }
    }

    /// Waits until NCCL is through with being given up, if it is, but not for long: graphs may keep it.
    pub(crate) fn settle(&self) {
        if self.comm.lock().is_some() {
            return;
        }
        let end = Instant::now() + HEARSAY;
        while !self.ended.load(Ordering::Acquire) && Instant::now() < end {
            // tidy: sleeps because NCCL tells nobody when it is done.
            thread::sleep(ROUND);
        }
    }
}

impl Drop for Bounded {
    /// Nobody uses it any more: all of a communicator's work is done by then.
    fn drop(&mut self) {
        if let Some(comm) = self.comm.get_mut().take() {
            self.abort(Given(comm));
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
    const PATIENCE: Duration = Duration::from_secs(2);

    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> c_int;
    }

    pub(super) fn one_more() {
        static ASKED: Once = Once::new();
        UNDER_WAY.fetch_add(1, Ordering::AcqRel);
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

/// A communicator on its way to who gives it up.
struct Given(Handle);

// SAFETY: as for `Bounded`.
unsafe impl Send for Given {}

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
