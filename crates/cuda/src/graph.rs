//! CUDA graphs behind `capture` and [`Replay`].

use crate::{card::Card, driver::failed, kept::Kept, lane::Lane, mark::CudaMark, memory::Place};
use brigade_device::{Event, GraphTurns, Replay, Result, Storage, Stream};
use cudarc::driver::{
    result::{graph, stream},
    sys::{self, CUgraphInstantiate_flags_enum},
};
use parking_lot::Mutex;
use std::sync::Arc;

/// A graph that can run again and again, and everything that it refers to.
struct Graph {
    card: Arc<Card>,
    executable: sys::CUgraphExec,
    kept: Vec<Arc<dyn Storage>>,
    turns: GraphTurns,
    ran_on: Mutex<Vec<Arc<Lane>>>,
}

// SAFETY: the handle belongs to the context, not to a thread, and launches of one graph are in order.
unsafe impl Send for Graph {}

/// Ends a capture, also while a panic unwinds: a stream that went on capturing could not be used any more.
struct Capturing<'a> {
    lane: &'a Lane,
    open: bool,
}

impl Capturing<'_> {
    /// The graph and what it refers to.
    fn end(&mut self) -> (Result<sys::CUgraph>, Vec<Arc<dyn Storage>>) {
        self.open = false;
        let bound = self.lane.card.bind();
        let graph = bound.and_then(|()| {
            // SAFETY: the capture was begun on this stream and is ended once.
            unsafe { stream::end_capture(self.lane.stream) }.map_err(failed("cuStreamEndCapture"))
        });
        (graph, self.lane.end_capture())
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if self.open
            && let (Ok(graph), _) = self.end()
        {
            // SAFETY: nobody else has the graph.
            let _ = unsafe { graph::destroy(graph) };
        }
    }
}

/// Records what `work` enqueues on `on`.
pub(crate) fn capture(
    card: &Arc<Card>,
    on: &Stream,
    work: &mut dyn FnMut() -> Result<()>,
) -> Result<Box<dyn Replay>> {
    let lane = Lane::of(on, card)?;
    lane.refuse_capture("a capture")?;
    card.bind()?;
    lane.begin_capture()?;
    let mut capturing = Capturing { lane, open: true };
    let turns = GraphTurns::of(work)?;
    let (graph, kept) = capturing.end();
    let graph = graph?;
    card.bind()?;
    // Memory that was allocated in the capture and is lent to it stays allocated until the next launch, which allocates it again.
    let flags = CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        | CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    // SAFETY: the graph was just captured; the executable copy does not refer to it.
    let executable = unsafe {
        let executable = graph::instantiate(graph, flags);
        let _ = graph::destroy(graph);
        executable
    }
    .map_err(failed("cuGraphInstantiate"))?;
    let graph = Graph {
        card: Arc::clone(card),
        executable,
        kept,
        turns,
        ran_on: Mutex::default(),
    };
    // Else the first launch would, and might wait for memory, and so for the GPU.
    // SAFETY: both live as long as the lane and the graph.
    unsafe { graph::upload(graph.executable, lane.stream) }.map_err(failed("cuGraphUpload"))?;
    Ok(Box::new(graph))
}

impl Replay for Graph {
    fn launch(&self, on: &Stream) -> Result<Event> {
        let lane = Lane::of(on, &self.card)?;
        lane.refuse_capture("the launch of a graph")?;
        for storage in &self.kept {
            if let Some(kept) = Kept::of(storage) {
                kept.again(lane)?;
            }
        }
        let end = self.turns.launch(on, || {
            lane.run(&[], |stream| {
                // SAFETY: the executable lives as long as `self`, and what its nodes refer to is kept.
                unsafe { graph::launch(self.executable, stream) }.map_err(failed("cuGraphLaunch"))
            })?;
            Ok(Event::new(Arc::new(CudaMark::of_lane(lane)?)))
        })?;
        let mut ran_on = self.ran_on.lock();
        if !ran_on.iter().any(|l| Arc::ptr_eq(l, lane)) {
            ran_on.push(Arc::clone(lane));
        }
        drop(ran_on);
        for storage in &self.kept {
            if let Some(Kept::Group(token)) = Kept::of(storage) {
                token.core.keep_pace(lane);
            }
        }
        Ok(end)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        for lane in self.ran_on.get_mut().drain(..) {
            for storage in &self.kept {
                match Place::of(storage) {
                    Ok(Place::Adopted(_)) => {
                        let storage = Arc::clone(storage);
                        let _ = lane.after(Box::new(move |_| drop(storage)));
                    }
                    Ok(place) => place.used_on(&lane),
                    Err(_) => {}
                }
            }
        }
        let card = &self.card;
        card.retired.retire(self.executable, &card.context);
    }
}
