//! Executable graphs that nobody launches any more.
//!
//! The driver may wait for all that runs on a GPU before it destroys one (driver 580 does so for a captured ring, whatever other
//! stream is busy), and whoever calls it meanwhile waits with it. If ranks share the GPU, what runs there may be waiting for the
//! very rank that destroys. So a graph is put aside, and destroyed when the work of all communicators there is done and nothing
//! is being enqueued.

use crate::quiet::alive;
use cudarc::driver::{CudaContext, result::graph, sys};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Those of each GPU.
static ALL: Mutex<BTreeMap<usize, Arc<Retired>>> = Mutex::new(BTreeMap::new());

/// Those of one GPU.
#[derive(Default)]
pub(crate) struct Retired {
    ordinal: usize,
    graphs: Mutex<Vec<Executable>>,
    /// Whether there are any.
    some: AtomicBool,
    /// Held by whoever enqueues work, and alone by whoever destroys.
    enqueuing: RwLock<()>,
}

/// A graph, and what keeps it valid.
struct Executable(sys::CUgraphExec, Arc<CudaContext>);

// SAFETY: the handle belongs to its context, not to a thread, and nobody else has it.
unsafe impl Send for Executable {}

impl Retired {
    /// Those of a GPU of this process.
    pub(crate) fn of(ordinal: usize) -> Arc<Self> {
        let mut all = ALL.lock();
        let retired = all.entry(ordinal).or_insert_with(|| {
            Arc::new(Self {
                ordinal,
                ..Self::default()
            })
        });
        Arc::clone(retired)
    }

    /// To be held while work is enqueued.
    pub(crate) fn enqueuing(&self) -> RwLockReadGuard<'_, ()> {
        self.enqueuing.read_recursive()
    }

    /// Takes a graph that will not be launched again.
    pub(crate) fn retire(&self, graph: sys::CUgraphExec, context: &Arc<CudaContext>) {
        let mut graphs = self.graphs.lock();
        graphs.push(Executable(graph, Arc::clone(context)));
        self.some.store(true, Ordering::Release);
        drop(graphs);
        self.sweep();
    }

    /// Destroys what there is, if nobody has to wait for it.
    pub(crate) fn sweep(&self) {
        if !self.some.load(Ordering::Acquire) {
            return;
        }
        // Nobody waits for this lock: whoever comes later sweeps.
        let Some(alone) = self.enqueuing.try_write() else {
            return;
        };
        let cores = alive(self.ordinal);
        let mut marks = cores.iter().flat_map(|core| core.marks());
        if marks.all(|mark| mark.is_over()) {
            self.destroy();
        }
        // In this order: a communicator that goes now may enqueue something.
        drop(alone);
        drop(cores);
    }

    fn destroy(&self) {
        let graphs = {
            let mut graphs = self.graphs.lock();
            self.some.store(false, Ordering::Release);
            mem::take(&mut *graphs)
        };
        for Executable(graph, context) in graphs {
            if context.bind_to_thread().is_ok() {
                // SAFETY: instantiated once, destroyed once; the driver keeps what a launch in flight still needs.
                let _ = unsafe { graph::exec_destroy(graph) };
            }
        }
    }
}
