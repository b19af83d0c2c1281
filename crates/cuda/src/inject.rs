//! Fault injection: kernels ask at the points of their protocols, and threads of the host put their questions to the hook.
//!
//! A question lies in a slot of the *desk*, in memory that both see, and so does its answer. Whatever may ask at the same time
//! has a slot of its own. A hook may keep one question until another is asked, of this rank or of a peer: so one thread looks
//! for the next question, and leaves that to another one while it is with the hook.

use crate::{card::Card, job::Side, memory::Pinned, messages::most_blocks};
use brigade_device::{Action, Error, Injector, Operation, Place, Point, Result, Step, Storage};
use brigade_group::Control;
use brigade_kernels::{
    ANSWER_GO_ON, ANSWER_LEAVE_OUT, MOST_STEPS, QUESTION_ANSWER, QUESTION_ASKED, QUESTION_CALL,
    QUESTION_EPOCH, QUESTION_OPERATION, QUESTION_STEP, QUESTION_WORDS, STEP_ARRIVE, STEP_CREDIT,
    STEP_MEET, STEP_POST, STEP_POST_OPEN, STEP_RELEASED, STEP_START, STEP_WAIT,
};
use brigade_sync::{Layout, Role};
use parking_lot::Mutex;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread,
    time::{Duration, Instant},
};

/// Launches of a communicator that may run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// Steps on the caller's stream.
    Caller,
    /// Steps beside it.
    Waiter,
    /// Flags behind copies.
    Mover,
    /// Messages: a slot for each block.
    Messages,
}

impl Asker {
    /// Steps on a stream beside the caller's, or on that.
    pub(crate) const fn of(side: Option<Side>) -> Self {
        match side {
            None => Self::Caller,
            Some(Side::Waiter) => Self::Waiter,
            Some(Side::Mover) => Self::Mover,
        }
    }

    const fn first_slot(self) -> usize {
        self as usize * MOST_STEPS
    }
}

/// How long the thread that looks spins after a question, before it parks between looks.
const SPINNING: Duration = Duration::from_micros(500);
const PARKED: Duration = Duration::from_micros(50);

/// How soon a stall ends once the group is stopped.
const REST: Duration = Duration::from_millis(10);

/// Where one rank's kernels ask. To be dropped when none does any more: then its threads end.
pub(crate) struct Desk(Arc<Office>);

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Desk({} slots)", self.0.slots.count)
    }
}

impl Desk {
    pub(crate) fn new(card: &Arc<Card>, hook: &Injector, control: &Arc<Control>) -> Result<Self> {
        let blocks = most_blocks(control.group().size) as usize;
        let count = Asker::Messages.first_slot() + blocks;
        let memory = Pinned::new(card, 8 * QUESTION_WORDS * count)?;
        let slots = Slots {
            address: memory.address(),
            count,
            _memory: Arc::new(memory),
        };
        Self::open(slots, hook, control)
    }

    fn open(slots: Slots, hook: &Injector, control: &Arc<Control>) -> Result<Self> {
        let office = Arc::new(Office {
            taken: Mutex::new(vec![0; slots.count]),
            slots,
            hook: hook.clone(),
            control: Arc::clone(control),
            free: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        });
        office.hire()?;
        Ok(Self(office))
    }

    /// Address of the slots of a launch.
    pub(crate) fn address(&self, asker: Asker) -> u64 {
        let first = 8 * QUESTION_WORDS * asker.first_slot();
        self.0.slots.address + first as u64
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Release);
    }
}

/// Slots of zeroed memory that lasts as long as they do.
struct Slots {
    address: u64,
    count: usize,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl Slots {
    fn word(&self, slot: usize, index: usize) -> &AtomicU64 {
        assert!(slot < self.count && index < QUESTION_WORDS);
        let at = self.address as usize + 8 * (slot * QUESTION_WORDS + index);
        // SAFETY: inside the memory, which lives as long as `self`; its words are only ever used as atomics here.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }

    /// The question in a slot, unless it is the one that was taken last.
    fn question(&self, slot: usize, taken: u64) -> Option<(u64, Words)> {
        let number = self.word(slot, QUESTION_ASKED).load(Ordering::Acquire);
        if number == taken {
            return None;
        }
        let word = |index| self.word(slot, index).load(Ordering::Relaxed);
        let words = Words {
            step: word(QUESTION_STEP),
            epoch: word(QUESTION_EPOCH),
            call: word(QUESTION_CALL),
            operation: word(QUESTION_OPERATION),
        };
        // Another one may have taken its place, if the kernel was stopped. Then it is there at the next look.
        fence(Ordering::Acquire);
        let same = self.word(slot, QUESTION_ASKED).load(Ordering::Relaxed) == number;
        same.then_some((number, words))
    }

    /// Answers a question, unless a later one of the slot was answered meanwhile.
    fn answer(&self, slot: usize, number: u64, answer: u64) {
        let said = number << 2 | answer;
        self.word(slot, QUESTION_ANSWER)
            .fetch_max(said, Ordering::Release);
    }
}

/// A question, as kernels write it.
#[derive(Clone, Copy, Debug)]
struct Words {
    step: u64,
    epoch: u64,
    call: u64,
    operation: u64,
}

impl Words {
    /// The step that it is about, as hooks are told of it; nothing if it is no point of a call.
    fn step(&self, layout: &Layout, rank: usize) -> Option<Step> {
        let bits = self.step;
        let (peer, word) = ((bits >> 20 & 0xFF) as usize, (bits & 0xF_FFFF) as usize);
        let place = || self.place(layout, rank, word);
        let (point, place) = match bits >> 60 {
            STEP_START => (Point::Begin, None),
            STEP_ARRIVE => (Point::Arrive, None),
            STEP_MEET => (Point::Meet, None),
            STEP_CREDIT | STEP_RELEASED => (Point::Credit, Some(place()?.1)),
            STEP_WAIT => (Point::Read, Some(place()?.1)),
            STEP_POST | STEP_POST_OPEN => match place()? {
                (Role::Filled { .. }, place) => (Point::Announce, Some(place)),
                (Role::Credit { .. }, place) => (Point::Done, Some(place)),
            },
            _ => return None,
        };
        Some(Step {
            point,
            operation: Operation::from_code(self.operation as u32)?,
            call: self.call,
            rank,
            peer,
            place,
        })
    }

    /// What a word is for, and which data its flag is about. Credits are about all that a rank has in a half.
    fn place(&self, layout: &Layout, rank: usize, word: usize) -> Option<(Role, Place)> {
        let (region, role) = layout.role(word)?;
        let (half, slot, piece) = match role {
            Role::Filled { half, slot, piece } => (half, slot, piece),
            Role::Credit { half, .. } => (half, rank, 0),
        };
        let place = Place {
            slot: region.map_or(slot, |region| region.0.into()),
            piece,
            half: half.index(),
            // Epochs wrap; what kernels count does not.
            epoch: self.epoch as u32,
        };
        Some((role, place))
    }
}

/// A question that a thread has taken.
struct Question {
    slot: usize,
    number: u64,
    words: Words,
}

/// The threads behind a desk.
struct Office {
    slots: Slots,
    hook: Injector,
    control: Arc<Control>,
    /// Number of the last question that was taken, for each slot. Held by the thread that looks.
    taken: Mutex<Vec<u64>>,
    /// Threads that are not with the hook.
    free: AtomicUsize,
    closed: AtomicBool,
}

impl Office {
    /// Starts another thread. There are never more than questions at a time, and one.
    fn hire(self: &Arc<Self>) -> Result<()> {
        let office = Arc::clone(self);
        self.free.fetch_add(1, Ordering::Relaxed);
        thread::Builder::new()
            .name(format!("rank {} hook", self.control.group().rank))
            .spawn(move || office.work())
            .map(drop)
            .map_err(|e| {
                self.free.fetch_sub(1, Ordering::Relaxed);
                Error::Backend {
                    call: "start a thread for fault injection",
                    code: e.raw_os_error().unwrap_or(0).into(),
                    source: Some(Arc::new(e)),
                }
            })
    }

    fn work(self: Arc<Self>) {
        while let Some(Question {
            slot,
            number,
            words,
        }) = self.next()
        {
            let answer = self.put(&words);
            self.slots.answer(slot, number, answer);
            self.free.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The next question; none when the desk is closed.
    fn next(self: &Arc<Self>) -> Option<Question> {
        let mut taken = self.taken.lock();
        let start = Instant::now();
        loop {
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            let found = taken.iter_mut().enumerate().find_map(|(slot, taken)| {
                let (number, words) = self.slots.question(slot, *taken)?;
                *taken = number;
                Some(Question {
                    slot,
                    number,
                    words,
                })
            });
            if let Some(question) = found {
                if self.free.fetch_sub(1, Ordering::Relaxed) == 1
                    && let Err(error) = self.hire()
                {
                    tracing::warn!(%error, "questions wait for each other");
                }
                return Some(question);
            }
            if start.elapsed() < SPINNING {
                thread::yield_now();
            } else {
                thread::park_timeout(PARKED);
            }
        }
    }

    /// Puts a question to the hook, and does what it says. A hook that panics stops the group.
    fn put(&self, words: &Words) -> u64 {
        let generation = self.control.generation();
        let Some(step) = words.step(self.control.layout(), self.control.group().rank) else {
            return ANSWER_GO_ON;
        };
        let asked = catch_unwind(AssertUnwindSafe(|| self.hook.at(&step)));
        let action = asked.unwrap_or_else(|_| {
            self.control.abort(step.call);
            Action::GoOn
        });
        if let Action::Stall(time) = action {
            self.stall(time, generation);
        }
        if action.leaves_out(step.point) {
            ANSWER_LEAVE_OUT
        } else {
            ANSWER_GO_ON
        }
    }

    fn stall(&self, time: Duration, generation: u8) {
        let start = Instant::now();
        let goes_on = || self.control.fault().is_none() && self.control.generation() == generation;
        while let Some(left) = time.checked_sub(start.elapsed())
            && !left.is_zero()
            && goes_on()
        {
            // tidy: sleeps because the delay is what was asked for
            thread::sleep(left.min(REST));
        }
    }
}
