//! What one thread does for others, who wait for it as long as that is of use.

use crate::nccl_bounded::ROUND;
use brigade_device::Result;
use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

/// An errand mostly is done before this, and mostly there is another one.
const SPINNING: Duration = Duration::from_micros(200);

/// How long what is under way is waited for all the same, by who does not want it any more.
const TURN: Duration = Duration::from_millis(100);

/// What came of an errand, where nobody has begun with it: no 32-bit number is as large.
const PENDING: i64 = i64::MAX;

/// The same of one that is under way.
const RUNNING: i64 = i64::MAX - 1;

/// The same of one that nobody waits for, and which is not begun.
const ABANDONED: i64 = i64::MAX - 2;

/// The same where whoever does errands does no more.
const GONE: i64 = i64::MIN;

struct Errand<W> {
    work: W,
    answer: Arc<AtomicI64>,
}

/// Where errands are handed over.
pub(crate) struct Errands<W>(Sender<Errand<W>>);

/// Where they come out.
pub(crate) struct Queue<W>(Receiver<Errand<W>>);

/// Both ends.
pub(crate) fn errands<W>() -> (Errands<W>, Queue<W>) {
    let (sender, receiver) = mpsc::channel();
    (Errands(sender), Queue(receiver))
}

impl<W> Errands<W> {
    /// Has something done, and gives what came of it; `None` if nobody does errands any more. `goes_on` says whether to wait on. What was not
    /// begun by then is not begun; what was may go on.
    ///
    /// # Errors
    /// Those of `goes_on`.
    pub(crate) fn done(&self, work: W, goes_on: impl Fn() -> Result<()>) -> Result<Option<i32>> {
        let answer = Arc::new(AtomicI64::new(PENDING));
        let errand = Errand {
            work,
            answer: Arc::clone(&answer),
        };
        if self.0.send(errand).is_err() {
            return Ok(None);
        }
        let begun = Instant::now();
        loop {
            match answer.load(Ordering::Acquire) {
                PENDING | RUNNING => {}
                GONE => return Ok(None),
                status => return Ok(Some(status as i32)),
            }
            if let Err(error) = goes_on() {
                leave(&answer);
                return Err(error);
            }
            rest(begun);
        }
    }
}

/// For who does not want it any more.
fn leave(answer: &AtomicI64) {
    let (order, else_order) = (Ordering::AcqRel, Ordering::Acquire);
    let begun = Instant::now();
    if answer
        .compare_exchange(PENDING, ABANDONED, order, else_order)
        .is_err()
    {
        while answer.load(Ordering::Acquire) == RUNNING && begun.elapsed() < TURN {
            rest(begun);
        }
    }
}

fn rest(begun: Instant) {
    if begun.elapsed() < SPINNING {
        hint::spin_loop();
    } else {
        // tidy: sleeps because what takes so long waits for a peer.
        thread::sleep(ROUND);
    }
}

impl<W> Queue<W> {
    /// Does errands as they come, until nobody can hand any over: `does` gives what came of each. Where some come one after the other, it looks for the
    /// next for a while, since to wake takes longer than an errand.
    pub(crate) fn serve(self, does: impl Fn(W) -> Option<i32>) {
        while let Some(Errand { work, answer }) = self.next() {
            let (order, else_order) = (Ordering::AcqRel, Ordering::Acquire);
            if answer
                .compare_exchange(PENDING, RUNNING, order, else_order)
                .is_ok()
            {
                answer.store(does(work).map_or(GONE, i64::from), Ordering::Release);
            }
        }
    }

    fn next(&self) -> Option<Errand<W>> {
        let begun = Instant::now();
        loop {
            match self.0.try_recv() {
                Err(TryRecvError::Empty) if begun.elapsed() < SPINNING => hint::spin_loop(),
                Err(TryRecvError::Empty) => return self.0.recv().ok(),
                next => return next.ok(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::Error;
    use std::sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize},
    };

    type Work<'a> = Box<dyn FnOnce() -> Option<i32> + Send + 'a>;

    #[test]
    fn what_comes_of_errands_is_told_in_turn() {
        let (errands, queue) = errands::<Work<'_>>();
        thread::scope(|threads| {
            threads.spawn(|| queue.serve(|work| work()));
            for status in [0, 7, -1, i32::MAX, i32::MIN] {
                let done = errands.done(Box::new(move || Some(status)), || Ok(()));
                assert_eq!(done.unwrap(), Some(status));
            }
            assert_eq!(errands.done(Box::new(|| None), || Ok(())).unwrap(), None);
            drop(errands);
        });
    }

    #[test]
    fn nobody_waits_for_who_is_gone() {
        let (errands, queue) = errands::<Work<'_>>();
        drop(queue);
        assert_eq!(errands.done(Box::new(|| Some(1)), || Ok(())).unwrap(), None);
    }

    /// While one errand is stuck: it is left after a while, and what stands behind it is never begun.
    #[test]
    fn a_wait_ends_and_what_nobody_waits_for_is_not_begun() {
        let (errands, queue) = errands::<Work<'_>>();
        let (stuck, is_begun, begun) =
            (Barrier::new(2), AtomicBool::new(false), AtomicUsize::new(0));
        let busy = || Err(Error::Busy("a test"));
        thread::scope(|threads| {
            threads.spawn(|| queue.serve(|work| work()));
            let waits: Work<'_> = Box::new(|| {
                is_begun.store(true, Ordering::Release);
                stuck.wait();
                Some(0)
            });
            let until_begun = || match is_begun.load(Ordering::Acquire) {
                true => busy(),
                false => Ok(()),
            };
            assert!(errands.done(waits, until_begun).is_err());
            let behind: Work<'_> = Box::new(|| Some(begun.fetch_add(1, Ordering::AcqRel) as i32));
            assert!(errands.done(behind, busy).is_err());
            stuck.wait();
            let last = errands.done(Box::new(|| Some(5)), || Ok(()));
            assert_eq!(last.unwrap(), Some(5));
            assert_eq!(begun.load(Ordering::Acquire), 0);
            drop(errands);
        });
    }
}
