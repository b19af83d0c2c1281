//! How long phases of slices take, as the host's own spans say.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    dispatcher::set_global_default,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::Interest,
};

/// Microseconds of each phase, in the order in which its slices ended on all ranks.
pub type Phases = BTreeMap<String, Vec<f64>>;

/// Listens to the spans of slices while it is asked to.
#[derive(Default)]
struct Listener {
    is_on: AtomicBool,
    next: AtomicU64,
    open: Mutex<BTreeMap<u64, (String, Instant)>>,
    found: Mutex<Phases>,
}

/// What a program listens with is set once.
static LISTENER: OnceLock<Arc<Listener>> = OnceLock::new();

fn listener() -> &'static Listener {
    LISTENER.get_or_init(|| {
        let listener = Arc::new(Listener::default());
        // Whoever listens already goes on, and nothing is found here.
        let _ = set_global_default(Dispatch::new(Arc::clone(&listener)));
        listener
    })
}

/// What `work` does, and how long each phase of its slices takes.
pub fn listen<R>(work: impl FnOnce() -> R) -> (R, Phases) {
    let listener = listener();
    listener.is_on.store(true, Ordering::Release);
    let result = work();
    listener.is_on.store(false, Ordering::Release);
    let mut found = listener
        .found
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    (result, std::mem::take(&mut *found))
}

/// Finds the field `phase`.
#[derive(Default)]
struct Named(String);

impl Visit for Named {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "phase" {
            value.clone_into(&mut self.0);
        }
    }
    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

fn is_slice(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && metadata.name() == "slice" && metadata.target() == "brigade::comm"
}

impl Subscriber for Listener {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match is_slice(metadata) {
            true => Interest::sometimes(),
            false => Interest::never(),
        }
    }
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_slice(metadata) && self.is_on.load(Ordering::Acquire)
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut named = Named::default();
        span.record(&mut named);
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.insert(id, (named.0, Instant::now()));
        Id::from_u64(id)
    }
    fn exit(&self, span: &Id) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((phase, start)) = open.remove(&span.into_u64()) {
            let us = start.elapsed().as_secs_f64() * 1e6;
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.entry(phase).or_default().push(us);
        }
    }
    fn enter(&self, _: &Id) {}
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
}
