//! The desk, where kernels ask the hook of fault injection: memory that both see, and the threads of the host that answer.
//!
//! A hook may keep one question until another is asked, of this rank or of a peer: so one thread looks for the next question,
//! and leaves that to another one while it is with the hook.

use crate::{
    card::Card,
    inject::{Asker, Words},
    memory::Pinned,
};
use brigade_device::{Action, Error, Injector, Result, Storage};
use brigade_group::Control;
use brigade_kernels::{
    ANSWER_GO_ON, ANSWER_LEAVE_OUT, QUESTION_ANSWER, QUESTION_ASKED, QUESTION_CALL, QUESTION_EPOCH,
    QUESTION_OPERATION, QUESTION_STEP, QUESTION_WORDS,
};
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
    /// With slots for so many blocks of a launch of messages, or of one that serves queues.
    pub(crate) fn new(
        card: &Arc<Card>,
        hook: &Injector,
        control: &Arc<Control>,
        blocks: u32,
    ) -> Result<Self> {
        let count = Asker::Messages.first_slot() + blocks as usize;
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
    /// Waits until nobody looks, so that none reads the slots of a process that is about to end. A thread that is with the
    /// hook comes back by itself.
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Release);
        drop(self.0.taken.lock());
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

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{
        Bootstrap, CommConfig, Group, Operation, ParallelMode, Point, Step, Unguarded,
    };
    use brigade_group::{Sharing, threads};
    use brigade_kernels::{
        STEP_ARRIVE, STEP_CREDIT, STEP_FINISH, STEP_MEET, STEP_POST, STEP_START, STEP_WAIT,
    };
    use brigade_sync::{Area, Layout};

    const LONG: Duration = Duration::from_secs(30);

    /// A desk in ordinary memory, and the test in the place of kernels.
    struct Kernels {
        desk: Desk,
        control: Arc<Control>,
        asked: Vec<u64>,
    }

    impl Kernels {
        fn new(hook: impl Fn(&Step) -> Action + Send + Sync + 'static) -> Self {
            let boot = &threads(1)[0];
            let config = CommConfig::new(ParallelMode::Tp);
            let group = Group {
                mode: config.mode,
                rank: boot.rank(),
                size: boot.size(),
            };
            let layout = Layout::new(&config, 16, 0, 1).unwrap();
            let sharing = Sharing::between(boot, LONG).unwrap();
            let segments = sharing.exchange(boot, layout.words, 0, LONG).unwrap();
            let control = Arc::new(Control::new(group, layout, sharing, segments));
            let count = 4;
            let mut memory = vec![0u64; count * QUESTION_WORDS];
            let slots = Slots {
                address: memory.as_mut_ptr() as u64,
                count,
                _memory: Arc::new(memory),
            };
            Self {
                desk: Desk::open(slots, &Injector::new(Arc::new(hook)), &control).unwrap(),
                control,
                asked: vec![0; count],
            }
        }

        /// Asks in a slot, about a step with this peer in place of all else.
        fn ask(&mut self, slot: usize, op: u64, peer: u64) {
            let slots = &self.desk.0.slots;
            let ring = self.control.layout().ring(Area::Scratch);
            let words = [
                (QUESTION_STEP, op << 60 | peer << 20 | ring.base as u64),
                (QUESTION_EPOCH, 1),
                (QUESTION_CALL, 2),
                (QUESTION_OPERATION, Operation::Barrier as u64),
            ];
            for (index, word) in words {
                slots.word(slot, index).store(word, Ordering::Relaxed);
            }
            self.asked[slot] += 1;
            let asked = slots.word(slot, QUESTION_ASKED);
            asked.store(self.asked[slot], Ordering::Release);
        }

        fn answer(&self, slot: usize) -> Option<u64> {
            let said = self.desk.0.slots.word(slot, QUESTION_ANSWER);
            let said = said.load(Ordering::Acquire);
            (said >> 2 == self.asked[slot]).then_some(said & 3)
        }

        fn hear(&self, slot: usize) -> u64 {
            let end = Instant::now() + LONG;
            loop {
                if let Some(answer) = self.answer(slot) {
                    return answer;
                }
                assert!(Instant::now() < end, "no answer in slot {slot}");
                thread::yield_now();
            }
        }
    }

    #[test]
    fn questions_are_answered_again_and_again_in_every_slot() {
        // SAFETY: nothing is written behind this guard.
        let skip = Action::Skip(unsafe { Unguarded::promise() });
        let mut kernels = Kernels::new(move |step| match (step.point, step.peer) {
            (_, 3) => Action::Drop,
            (_, 4) => skip,
            (_, 5) => Action::Stall(Duration::from_micros(100)),
            _ => Action::GoOn,
        });
        let cases = [
            (STEP_START, 0, ANSWER_GO_ON),
            (STEP_POST, 3, ANSWER_LEAVE_OUT),
            (STEP_WAIT, 3, ANSWER_GO_ON),
            (STEP_CREDIT, 4, ANSWER_LEAVE_OUT),
            (STEP_POST, 4, ANSWER_GO_ON),
            (STEP_ARRIVE, 5, ANSWER_GO_ON),
            // No point.
            (STEP_FINISH, 3, ANSWER_GO_ON),
        ];
        for (i, (op, peer, want)) in cases.into_iter().cycle().take(200).enumerate() {
            kernels.ask(i % 4, op, peer);
            assert_eq!(kernels.hear(i % 4), want, "question {i}");
        }
    }

    #[test]
    fn a_question_may_be_kept_until_another_is_asked() {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let receiver = Mutex::new(receiver);
        let mut kernels = Kernels::new(move |step| {
            match step.point {
                Point::Read => receiver.lock().recv_timeout(LONG).unwrap(),
                Point::Meet => sender.send(()).unwrap(),
                _ => {}
            }
            Action::GoOn
        });
        for _ in 0..20 {
            kernels.ask(0, STEP_WAIT, 0);
            kernels.ask(1, STEP_ARRIVE, 0);
            kernels.hear(1);
            assert_eq!(kernels.answer(0), None, "kept");
            kernels.ask(2, STEP_MEET, 0);
            assert_eq!([0, 2].map(|slot| kernels.hear(slot)), [ANSWER_GO_ON; 2]);
        }
    }

    /// A kernel that was stopped leaves its question behind; what is said to it later is not taken for the answer to the
    /// next one.
    #[test]
    fn late_answers_are_nobodys() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let receiver = Mutex::new(receiver);
        let taken = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&taken);
        let mut kernels = Kernels::new(move |step| {
            if step.point == Point::Read {
                told.store(true, Ordering::Release);
                receiver.lock().recv_timeout(LONG).unwrap();
            }
            Action::Drop
        });
        kernels.ask(0, STEP_WAIT, 0);
        let end = Instant::now() + LONG;
        while !taken.load(Ordering::Acquire) {
            assert!(Instant::now() < end, "never taken");
            thread::yield_now();
        }
        kernels.ask(0, STEP_POST, 0);
        assert_eq!(kernels.hear(0), ANSWER_LEAVE_OUT);
        sender.send(()).unwrap();
        let office = Arc::clone(&kernels.desk.0);
        // The thread that was held is back, beside the one that looks.
        while office.free.load(Ordering::Relaxed) < 2 {
            assert!(Instant::now() < end, "never back");
            thread::yield_now();
        }
        assert_eq!(kernels.answer(0), Some(ANSWER_LEAVE_OUT));
    }

    #[test]
    fn a_stall_ends_when_the_group_is_stopped_and_a_panic_stops_it() {
        let mut kernels = Kernels::new(|step| match step.point {
            Point::Begin => Action::Stall(2 * LONG),
            // No message of a panic: the test is no failure.
            _ => std::panic::resume_unwind(Box::new(())),
        });
        kernels.ask(0, STEP_START, 0);
        kernels.ask(1, STEP_MEET, 0);
        assert_eq!([1, 0].map(|slot| kernels.hear(slot)), [ANSWER_GO_ON; 2]);
        let record = kernels.control.fault().unwrap();
        assert_eq!(record.kind, brigade_device::FaultKind::Aborted);
    }

    #[test]
    fn threads_end_with_the_desk() {
        let mut kernels = Kernels::new(|_| Action::GoOn);
        kernels.ask(0, STEP_START, 0);
        kernels.hear(0);
        let office = Arc::downgrade(&kernels.desk.0);
        drop(kernels);
        let end = Instant::now() + LONG;
        while office.strong_count() > 0 {
            assert!(Instant::now() < end, "they go on");
            thread::yield_now();
        }
    }
}
