//! One GPU as one rank's accelerator.

use crate::{
    Missing,
    card::Card,
    comm,
    devices::devices,
    graph, hierarchical,
    lane::{CudaQueue, Lane},
    opened::Opened,
    trace::Tracer,
};
use brigade_device::{
    Bootstrap, Comm, CommConfig, Device, DeviceInfo, Error, Hierarchy, HierarchyConfig, Injector,
    Machines, Queues, Replay, Result, Stream,
};
use brigade_plan::{Entries, hierarchical::Wire};
use cudarc::driver::sys;
use std::{any::Any, ffi::c_void, net::IpAddr, sync::Arc};

/// How a CUDA device is set up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaConfig {
    /// Asked at every step of the protocols, to try out delays and faults; `None` in earnest. Kernels wait for its answers,
    /// which threads of the communicator give: on a GPU, whoever is asked is never the thread that made the call.
    pub inject: Option<Injector>,
    /// Figures that were measured on GPUs like these, as entries of the files that `brigade-perf crossover`, `tune`, `tune-experts` and
    /// `tune-hierarchical` write: they count before those of this build. The same on every rank, or joining fails at the vote on tables,
    /// or that on machines.
    pub entries: Entries,
    /// What is between machines, for plans: latency and bandwidth of a rank's link. `None` takes what `entries` have, else what
    /// `Costs::cuda` guesses. The same on every rank.
    pub wire: Option<Wire>,
    /// Where other machines reach this one, for what hosts tell each other at faults and resets; `None` takes the address that its
    /// packets to others bear. NCCL finds its own ways (`NCCL_SOCKET_IFNAME`).
    pub rail_address: Option<IpAddr>,
    /// No kernel begins before the one in front of it has ended. Else those do that push, multiply few rows, or gate them, where the GPU can
    /// (programmatic launch).
    pub serial: bool,
}

/// A GPU of NVIDIA's, by its primary context: what other libraries of the process allocate there is within reach.
///
/// Calls, and drops of what came of them, may leave that context current on their thread. Whoever works with another GPU on the same thread
/// makes its context current before each piece of that work (`cudaSetDevice`).
///
/// Work is enqueued on streams and done later. Memory comes from a pool of the device's own and is freed in stream order, so
/// that dropping a buffer never blocks. Products are cuBLASLt's; everything else is this crate's kernels, which are all
/// loaded when the device is opened.
pub struct CudaDevice {
    info: DeviceInfo,
    pub(crate) capability: (u32, u32),
    pub(crate) card: Arc<Card>,
    pub(crate) opened: Arc<Opened>,
    pub(crate) tracer: Tracer,
    pub(crate) inject: Option<Injector>,
    pub(crate) serial: bool,
    pub(crate) entries: Entries,
    pub(crate) wire: Option<Wire>,
    pub(crate) rail_address: Option<IpAddr>,
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaDevice({}, {})", self.info.ordinal, self.info.name)
    }
}

impl CudaDevice {
    /// Opens GPU `ordinal`, as CUDA counts, with nothing out of the ordinary.
    ///
    /// # Errors
    /// As [`with`](Self::with).
    pub fn new(ordinal: usize) -> Result<Arc<Self>, Missing> {
        Self::with(ordinal, &CudaConfig::default())
    }

    /// Opens GPU `ordinal`, as CUDA counts. Opening a GPU for the first time synchronizes it: no capture and no wait may run
    /// there, of other libraries neither. Its primary context, the kernels and cuBLASLt's handle then stay until the process
    /// ends.
    ///
    /// # Errors
    /// What is missing: driver, GPU, kernels in this build, or cuBLASLt. Never panics.
    pub fn with(ordinal: usize, config: &CudaConfig) -> Result<Arc<Self>, Missing> {
        let found = devices()?;
        let count = found.len();
        let gpu = found
            .into_iter()
            .nth(ordinal)
            .ok_or(Missing::Ordinal { ordinal, count })?;
        let card = Card::open(ordinal)?;
        let opened = Opened::of(&gpu, &card.context)?;
        Ok(Arc::new(Self {
            info: DeviceInfo {
                name: gpu.name,
                ordinal: ordinal as u32,
                sms: u16::try_from(gpu.multiprocessors).unwrap_or(u16::MAX),
                memory_bytes: gpu.memory_bytes,
            },
            capability: gpu.capability,
            opened,
            card,
            tracer: Tracer::default(),
            inject: config.inject.clone(),
            serial: config.serial,
            entries: config.entries.clone(),
            wire: config.wire,
            rail_address: config.rail_address,
        }))
    }

    /// Brings in a stream that Brigade did not make: work of both sides is in its order. Null is CUDA's legacy default
    /// stream, which cannot be captured.
    ///
    /// Graphs that others capture on it keep what they refer to for as long as the returned stream lives, and must be
    /// launched on this stream alone.
    ///
    /// # Errors
    /// [`Error::Invalid`], field `raw`, for `CU_STREAM_PER_THREAD`, which is another stream on every thread: Brigade's threads could
    /// not tell what the caller's is doing.
    ///
    /// # Safety
    /// `raw` must be a `CUstream` of this GPU's primary context, and stay valid while `owner` lives.
    pub unsafe fn adopt_stream(
        &self,
        raw: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Stream> {
        let stream = same_on_all_threads(raw.cast())?;
        let lane = Lane::adopt(&self.card, stream, owner);
        Ok(Stream::new(Arc::new(CudaQueue(lane))))
    }

    /// The driver's handle of a stream, for other libraries to enqueue on. It is valid while `on` lives. From then on, as on a stream that was
    /// adopted, a low-latency receive does not begin beside its send: a kernel between them may let it begin before that kernel has ended.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stream of another device.
    pub fn raw_stream(&self, on: &Stream) -> Result<*mut c_void> {
        let lane = self.lane(on)?;
        lane.show();
        Ok(lane.stream.cast())
    }

    pub(crate) fn lane<'a>(&self, on: &'a Stream) -> Result<&'a Arc<Lane>> {
        Lane::of(on, &self.card)
    }
}

/// A handle of a stream, unless it is `CU_STREAM_PER_THREAD`.
fn same_on_all_threads(stream: sys::CUstream) -> Result<sys::CUstream> {
    const PER_THREAD: usize = 2;
    match stream.addr() {
        PER_THREAD => Err(Error::invalid(
            "raw",
            "CU_STREAM_PER_THREAD",
            "a stream that is the same on every thread",
        )),
        _ => Ok(stream),
    }
}

impl Queues for CudaDevice {
    fn stream(&self, priority: i8) -> Result<Stream> {
        let lane = Lane::new(&self.card, priority)?;
        Ok(Stream::new(Arc::new(CudaQueue(lane))))
    }

    fn capture(
        &self,
        on: &Stream,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Box<dyn Replay>> {
        graph::capture(&self.card, on, work)
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_need(&self, config: &CommConfig, size: usize) -> Result<u64> {
        comm::memory_need(self, config, size)
    }

    fn join(self: Arc<Self>, boot: &dyn Bootstrap, config: &CommConfig) -> Result<Comm> {
        comm::join(self, boot, config)
    }

    fn machines_memory_need(&self, machines: Machines, config: &HierarchyConfig) -> Result<u64> {
        hierarchical::memory_need(self, machines, config)
    }

    fn join_machines(
        self: Arc<Self>,
        boot: &dyn Bootstrap,
        machines: Machines,
        config: &HierarchyConfig,
    ) -> Result<Hierarchy> {
        hierarchical::join(&self, boot, machines, config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    /// The legacy default stream is one, by both of its handles.
    #[test]
    fn a_stream_of_each_thread_is_refused() {
        for handle in [0, 1, 2, 3, 0x7F00_1234_5678] {
            let stream = ptr::without_provenance_mut(handle);
            match same_on_all_threads(stream) {
                Ok(same) => assert!(handle != 2 && same == stream),
                Err(Error::Invalid { field, got, .. }) => {
                    assert_eq!((handle, field), (2, "raw"));
                    assert_eq!(got, "CU_STREAM_PER_THREAD");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}
