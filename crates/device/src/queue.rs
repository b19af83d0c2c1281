//! Streams, events and graphs: opaque handles over what a backend has.
//!
//! Work on one stream runs in order. A backend may run it at once (the host does) or later.

use crate::Result;
use std::{any::Any, fmt, sync::Arc, time::Duration};

/// Runs when the work before it is done, with the fault if there was one.
pub type Hook = Box<dyn FnOnce(Result<()>) + Send>;

/// What a backend gives behind a [`Stream`].
pub trait Queue: Send + Sync + fmt::Debug {
    /// Marks the work so far.
    ///
    /// # Errors
    /// Backend errors.
    fn record(&self) -> Result<Event>;
    /// Work after this runs after `event`.
    ///
    /// # Errors
    /// Backend errors.
    fn wait(&self, event: &Event) -> Result<()>;
    /// Blocks the caller until everything so far is done.
    ///
    /// # Errors
    /// The fault, if the work ended in one; [`Error::Backend`](crate::Error::Backend) if `within` passed first.
    fn sync(&self, within: Duration) -> Result<()>;
    /// Calls `hook` once the work so far is done; from a thread of the backend's, or at once. If it panics, a warning is traced, and
    /// nothing else happens.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) while capturing.
    fn on_complete(&self, hook: Hook) -> Result<()>;
    /// Whether work is being recorded into a graph instead of run.
    fn capturing(&self) -> bool;
    /// For the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// What a backend gives behind an [`Event`].
pub trait Mark: Send + Sync + fmt::Debug {
    /// Whether the work before the mark is done.
    ///
    /// # Errors
    /// The fault, if the work ended in one.
    fn done(&self) -> Result<bool>;
    /// Blocks the caller until it is.
    ///
    /// # Errors
    /// As [`Queue::sync`].
    fn sync(&self, within: Duration) -> Result<()>;
    /// For the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A captured graph, ready to run again and again with the data of the day.
pub trait Replay: Send {
    /// Runs it on `on`. The event marks its end.
    ///
    /// # Errors
    /// As the captured calls.
    fn launch(&self, on: &Stream) -> Result<Event>;
}

/// A queue of work. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct Stream(Arc<dyn Queue>);

/// A mark in a queue of work. Clones are the same mark.
#[derive(Clone, Debug)]
pub struct Event(Arc<dyn Mark>);

impl Stream {
    /// Wraps a backend's queue.
    pub fn new(queue: Arc<dyn Queue>) -> Self {
        Self(queue)
    }

    /// Whether both are the same queue.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Event {
    /// Wraps a backend's mark.
    pub fn new(mark: Arc<dyn Mark>) -> Self {
        Self(mark)
    }
}

impl std::ops::Deref for Stream {
    type Target = dyn Queue;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl std::ops::Deref for Event {
    type Target = dyn Mark;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}
