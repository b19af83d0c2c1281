//! Memory that the driver takes for graphs and streams, taken before anybody waits.
//!
//! Instantiating a graph, or making a stream, waits for all that runs on the GPU whenever the driver takes more memory for such
//! things; and kernels that run there may wait for the thread that makes them. What the driver has taken it keeps: so as much
//! as serving needs is taken at the beginning, and given back to the driver, not to the system.

use crate::{Launch, Missing, driver::refused, kernels::Kernels};
use brigade_kernels::{ConvertParams, StepsParams};
use cudarc::driver::{
    CudaContext,
    result::{graph, stream},
    sys,
};

/// Streams at a time.
const STREAMS: usize = 256;
/// Graphs at a time.
const GRAPHS: usize = 20;
/// Kernels in each.
const NODES: usize = 200;

/// Makes streams and graphs, and destroys them.
pub(crate) fn grow(context: &CudaContext, kernels: &Kernels) -> Result<(), Missing> {
    context
        .bind_to_thread()
        .map_err(refused("cuCtxSetCurrent"))?;
    let (least, greatest) =
        stream::get_priority_range().map_err(refused("cuCtxGetStreamPriorityRange"))?;
    let mut streams = Streams(Vec::new());
    for i in 0..STREAMS {
        let priority = if i % 2 == 0 { least } else { greatest };
        let made = stream::create_with_priority(stream::StreamKind::NonBlocking, priority)
            .map_err(refused("cuStreamCreateWithPriority"))?;
        streams.0.push(made);
        // SAFETY: it converts no elements, and so looks at no address.
        unsafe {
            let nothing = ConvertParams::default();
            kernels.convert.launch(made, Launch::grid(1, 32), nothing)?;
        }
    }
    let mut graphs = Graphs(Vec::new());
    for &on in streams.0.iter().take(GRAPHS) {
        graphs.0.push(instantiated(on, kernels)?);
    }
    // SAFETY: the context is bound.
    unsafe { sys::cuCtxSynchronize() }
        .result()
        .map_err(refused("cuCtxSynchronize"))
}

/// A graph that is never launched.
fn instantiated(on: sys::CUstream, kernels: &Kernels) -> Result<sys::CUgraphExec, Missing> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is new, nobody else has it, and its capture is ended once. What is captured never runs.
    let captured = unsafe {
        stream::begin_capture(on, mode).map_err(refused("cuStreamBeginCapture"))?;
        let work = (0..NODES).try_for_each(|_| {
            let nothing = StepsParams::default();
            kernels.steps.launch(on, Launch::grid(1, 32), nothing)
        });
        let captured = stream::end_capture(on).map_err(refused("cuStreamEndCapture"))?;
        work.map(|()| captured)
    }?;
    let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    // SAFETY: the graph was just captured; the executable copy does not refer to it.
    unsafe {
        let executable = graph::instantiate(captured, flags);
        let _ = graph::destroy(captured);
        let executable = executable.map_err(refused("cuGraphInstantiate"))?;
        graph::upload(executable, on).map_err(refused("cuGraphUpload"))?;
        Ok(executable)
    }
}

struct Streams(Vec<sys::CUstream>);

impl Drop for Streams {
    fn drop(&mut self) {
        for &made in &self.0 {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { stream::destroy(made) };
        }
    }
}

struct Graphs(Vec<sys::CUgraphExec>);

impl Drop for Graphs {
    fn drop(&mut self) {
        for &made in &self.0 {
            // SAFETY: instantiated once, destroyed once.
            let _ = unsafe { graph::exec_destroy(made) };
        }
    }
}
