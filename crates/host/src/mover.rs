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

    /// Hands work over.
    pub(crate) fn start(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Ticket {
        let (done, ticket) = channel();
        let work = move || {
            // A hook of fault injection runs here too: the thread has more to do than what panics.
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()));
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
            let panics = mover.start(|| panic!("meant to happen, within a hook"));
            let (tell, told) = channel();
            let after = mover.start(move || {
                tell.send(thread::current().id()).unwrap();
                Ok(())
            });
            let error = panics.wait().unwrap_err().to_string();
            assert!(error.contains("which panicked"), "{error}");
            after.wait().unwrap();
            let here = told.recv().unwrap() == thread::current().id();
            assert_eq!(here, size == 1);
        }
    }
}
