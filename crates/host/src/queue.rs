//! Streams of the host run their work at once, on the thread that calls; a stream that captures records it instead.

use brigade_device::{Error, Event, GraphTurns, Hook, Mark, Queue, Reason, Replay, Result, Stream};
use parking_lot::Mutex;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

/// A piece of work that can run again.
pub(crate) type Job = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// What stands behind a [`Stream`] of the host.
#[derive(Default)]
pub(crate) struct HostQueue {
    captured: Mutex<Option<Captured>>,
}

/// Recorded work, and what is asked before any of it is done again.
#[derive(Default)]
struct Captured {
    jobs: Vec<Job>,
    conditions: Vec<Job>,
}

impl std::fmt::Debug for HostQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostQueue")
    }
}

impl HostQueue {
    /// The queue behind a stream of this backend.
    pub(crate) fn of(on: &Stream) -> Result<&Self> {
        on.as_any()
            .downcast_ref()
            .ok_or_else(|| Error::invalid("on", format!("{on:?}"), "a stream of the host device"))
    }

    /// Runs the work now, or records it.
    pub(crate) fn run(&self, job: impl Fn() -> Result<()> + Send + Sync + 'static) -> Result<()> {
        if let Some(captured) = &mut *self.captured.lock() {
            captured.jobs.push(Arc::new(job));
            return Ok(());
        }
        job()
    }

    /// If it captures, a graph is not launched where this fails.
    fn provided(&self, condition: Job) {
        if let Some(captured) = &mut *self.captured.lock() {
            captured.conditions.push(condition);
        }
    }

    /// As [`run`](Self::run), for work that needs what may be gone when a graph does it again.
    pub(crate) fn run_with<R>(
        &self,
        held: impl Fn() -> Result<R> + Clone + Send + Sync + 'static,
        work: impl Fn(&R) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let before = held.clone();
        self.provided(Arc::new(move || before().map(drop)));
        self.run(move || work(&held()?))
    }

    /// Runs the work that `enqueue` enqueues now, or records it as one piece; if it fails then, `failed` hears of it.
    pub(crate) fn together<R>(
        &self,
        enqueue: impl FnOnce() -> Result<R>,
        failed: impl FnOnce(&R) -> Box<dyn Fn(&Error) + Send + Sync>,
    ) -> Result<R> {
        let Some(before) = self.captured.lock().as_mut().map(std::mem::take) else {
            return enqueue();
        };
        let result = enqueue();
        let mut captured = self.captured.lock();
        let parts = captured.replace(before).unwrap_or_default();
        if let (Some(captured), Ok(r)) = (&mut *captured, &result) {
            let failed = failed(r);
            captured.conditions.extend(parts.conditions);
            captured.jobs.push(Arc::new(move || {
                let mut jobs = parts.jobs.iter();
                jobs.try_for_each(|job| job()).inspect_err(&failed)
            }));
        }
        result
    }

    /// For work that answers to the caller, which a graph cannot.
    pub(crate) fn refuse_capture(&self, what: &'static str) -> Result<()> {
        if self.capturing() {
            return Err(Reason::new(
                "not-capturable",
                format!("{what} cannot be captured in a graph"),
                "call it outside of capture",
            )
            .into());
        }
        Ok(())
    }
}

/// A stream while it captures; back to running its work at once when dropped, also if what is captured panics.
struct Capturing<'a>(&'a HostQueue);

impl<'a> Capturing<'a> {
    fn begin(queue: &'a HostQueue) -> Self {
        *queue.captured.lock() = Some(Captured::default());
        Self(queue)
    }

    fn end(&self) -> Captured {
        self.0.captured.lock().take().unwrap_or_default()
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Records what `work` enqueues on `on`.
pub(crate) fn capture(
    on: &Stream,
    work: &mut dyn FnMut() -> Result<()>,
) -> Result<Box<dyn Replay>> {
    let queue = HostQueue::of(on)?;
    queue.refuse_capture("a capture")?;
    let capturing = Capturing::begin(queue);
    let turns = GraphTurns::of(work)?;
    Ok(Box::new(Graph(capturing.end(), turns)))
}

impl Queue for HostQueue {
    fn record(&self) -> Result<Event> {
        Ok(Event::new(Arc::new(Done)))
    }
    fn wait(&self, _event: &Event) -> Result<()> {
        Ok(())
    }
    fn sync(&self, _within: Duration) -> Result<()> {
        self.refuse_capture("sync")
    }
    fn on_complete(&self, hook: Hook) -> Result<()> {
        self.refuse_capture("a completion hook")?;
        // As where hooks have a thread of their own: a panic of theirs is not the caller's.
        if catch_unwind(AssertUnwindSafe(|| hook(Ok(())))).is_err() {
            tracing::warn!("a completion hook panicked");
        }
        Ok(())
    }
    fn capturing(&self) -> bool {
        self.captured.lock().is_some()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Work that has run by the time its event exists.
#[derive(Debug)]
struct Done;

impl Mark for Done {
    fn done(&self) -> Result<bool> {
        Ok(true)
    }
    fn sync(&self, _within: Duration) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Graph(Captured, GraphTurns);

impl Replay for Graph {
    fn launch(&self, on: &Stream) -> Result<Event> {
        let queue = HostQueue::of(on)?;
        let Captured { jobs, conditions } = &self.0;
        conditions.iter().try_for_each(|holds| holds())?;
        for condition in conditions {
            queue.provided(Arc::clone(condition));
        }
        self.1.launch(on, || {
            for job in jobs {
                let job = Arc::clone(job);
                queue.run(move || job())?;
            }
            queue.record()
        })
    }
}
