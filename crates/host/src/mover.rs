//! The communication thread of a rank: it moves chunks while the rank's own thread multiplies.

use brigade_device::{Error, Group, Result};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

type Work = Box<dyn FnOnce() + Send>;

/// A thread that does one piece of work after the other. It ends by itself once its owner is gone; nobody waits for it.
pub(crate) struct Mover {
    work: Option<Sender<Work>>,
}

/// Work that was handed over.
#[must_use = "the work may still be going on"]
pub(crate) struct Ticket(Receiver<Result<()>>);

impl Mover {
    /// A thread for one rank of a group; none for a group of one.
    pub(crate) fn new(group: &Group) -> Result<Self> {
        if group.size == 1 {
            return Ok(Self { work: None });
        }
        let (work, inbox) = channel::<Work>();
        thread::Builder::new()
            .name(format!("rank {} communication", group.rank))
            .spawn(move || {
                for work in inbox {
                    work();
                }
            })
            .map_err(|e| Error::Backend {
                call: "start the communication thread",
                code: e.raw_os_error().unwrap_or(0).into(),
                source: Some(Arc::new(e)),
            })?;
        Ok(Self { work: Some(work) })
    }

    /// Hands work over. `ended` hears how it ended, also if it panicked: whoever waits for what the work does may wait for that, and not for
    /// the ticket.
    pub(crate) fn start(
        &self,
        work: impl FnOnce() -> Result<()> + Send + 'static,
        ended: impl FnOnce(&Result<()>) + Send + 'static,
    ) -> Ticket {
        let (done, ticket) = channel();
        let work = move || {
            // A hook of fault injection runs here too: the thread has more to do than what panics.
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()));
            ended(&result);
            // Whoever gave up on the ticket needs no answer.
            let _ = done.send(result);
        };
        match &self.work {
            Some(inbox) => {
                if let Err(back) = inbox.send(Box::new(work)) {
                    (back.0)();
                }
            }
            None => work(),
        }
        Ticket(ticket)
    }
}

impl Ticket {
    /// Waits for the work to end. Bounded by the work itself, whose every wait has the call's deadline.
    pub(crate) fn wait(self) -> Result<()> {
        self.0.recv().unwrap_or(Err(Error::Closed))
    }
}

/// How two parts of a call ended. Of two errors that which is no fault says why: the fault is what it may have led to.
pub(crate) fn both(one: Result<()>, other: Result<()>) -> Result<()> {
    match (one, other) {
        (Err(Error::Fault(_)), Err(why)) => Err(why),
        (one, other) => one.and(other),
    }
}

fn panicked() -> Error {
    Error::Backend {
        call: "work on the communication thread, which panicked",
        code: 0,
        source: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::ParallelMode;

    #[test]
    fn a_panic_is_the_work_s_error_and_the_thread_goes_on() {
        for size in [1, 2] {
            let (mode, rank) = (ParallelMode::Tp, 0);
            let mover = Mover::new(&Group { mode, rank, size }).unwrap();
            let (hear, heard) = channel();
            let panics = mover.start(
                || panic!("meant to happen, within a hook"),
                move |result| hear.send(result.clone()).unwrap(),
            );
            let (tell, told) = channel();
            let work = move || {
                tell.send(thread::current().id()).unwrap();
                Ok(())
            };
            let after = mover.start(work, |result| assert!(result.is_ok()));
            for result in [panics.wait(), heard.recv().unwrap()] {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("which panicked"), "{error}");
            }
            after.wait().unwrap();
            let here = told.recv().unwrap() == thread::current().id();
            assert_eq!(here, size == 1);
        }
    }
}
