//! When phases of slices ran, as the host's own spans say.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
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

/// One slice in one phase, on one rank.
#[derive(Clone, Debug)]
pub struct PhaseSpan {
    pub rank: usize,
    pub phase: String,
    pub slice: usize,
    pub start: Instant,
    pub end: Instant,
}

impl PhaseSpan {
    pub fn us(&self) -> f64 {
        (self.end - self.start).as_secs_f64() * 1e6
    }
}

/// Listens to the spans of slices while it is asked to.
#[derive(Default)]
struct Listener {
    /// Held by whoever listens.
    turn: Mutex<()>,
    is_on: AtomicBool,
    next: AtomicU64,
    open: Mutex<BTreeMap<u64, (Fields, Instant)>>,
    found: Mutex<Vec<PhaseSpan>>,
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `work` does, and the spans of all ranks' slices, in the order in which they ended.
pub fn listen<R>(work: impl FnOnce() -> R) -> (R, Vec<PhaseSpan>) {
    let listener = listener();
    let _turn = locked(&listener.turn);
    listener.is_on.store(true, Ordering::Release);
    let result = work();
    listener.is_on.store(false, Ordering::Release);
    (result, std::mem::take(&mut *locked(&listener.found)))
}

/// What a span of a slice says.
#[derive(Default)]
struct Fields {
    phase: String,
    slice: usize,
    rank: usize,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "phase" {
            value.clone_into(&mut self.phase);
        }
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "slice" => self.slice = value as usize,
            "rank" => self.rank = value as usize,
            _ => (),
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
        let mut fields = Fields::default();
        span.record(&mut fields);
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        locked(&self.open).insert(id, (fields, Instant::now()));
        Id::from_u64(id)
    }
    fn exit(&self, span: &Id) {
        let end = Instant::now();
        let Some((fields, start)) = locked(&self.open).remove(&span.into_u64()) else {
            return;
        };
        let Fields { phase, slice, rank } = fields;
        locked(&self.found).push(PhaseSpan {
            rank,
            phase,
            slice,
            start,
            end,
        });
    }
    fn enter(&self, _: &Id) {}
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
}
