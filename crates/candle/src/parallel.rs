//! One rank, as a serving thread holds it.

use crate::{
    error::{OrCandle, invalid},
    memory::{self, Lent},
};
use brigade::{
    Bootstrap, Comm, CommConfig, Group, Lease, Plan, Queues, Reason, Stream, View, ViewMut,
    host::HostDevice,
};
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, op::BackpropOp};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// A rank's place in a group: its device, its communicator and its stream. Layers hold a clone, which is the same rank.
///
/// On a GPU the stream is that of the candle device, so that Brigade's work and candle's stand in one order, and nothing has to be
/// waited for between them. A group works in the order in which its ranks call: all ranks make the same calls in the same
/// order, each from one thread at a time. A second thread that calls gets [`brigade::Error::Busy`].
#[derive(Clone)]
pub struct Parallel(Arc<Inner>);

struct Inner {
    device: Arc<dyn brigade::Device>,
    comm: Comm,
    on: Stream,
    place: Device,
    last: Mutex<Option<Plan>>,
}

impl std::fmt::Debug for Parallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parallel({:?} on {:?})", self.0.comm, self.0.place)
    }
}

impl Parallel {
    /// Joins a group with tensors on `place`. All ranks call it together, with the same configuration.
    ///
    /// # Errors
    /// [`brigade::Error::Group`] if ranks are missing or disagree; [`brigade::Error::Unsupported`] with what is missing for a GPU.
    pub fn join(place: &Device, boot: &dyn Bootstrap, config: &CommConfig) -> Result<Self> {
        match place {
            Device::Cpu => Self::on_host(HostDevice::new().or_candle()?, boot, config),
            #[cfg(feature = "cuda")]
            Device::Cuda(place) => {
                let device = crate::cuda::open(place)?;
                Self::on_gpu(device, place, boot, config)
            }
            other => Err(memory::no_device(other)),
        }
    }

    /// As [`join`](Self::join), for tensors in the host's memory, with a device that the caller has set up: with more threads, or with a
    /// hook for faults.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn on_host(
        device: Arc<HostDevice>,
        boot: &dyn Bootstrap,
        config: &CommConfig,
    ) -> Result<Self> {
        let on = device.stream(0).or_candle()?;
        Self::with(device, on, &Device::Cpu, boot, config)
    }

    /// As [`join`](Self::join), for tensors on a GPU, with a device that the caller has set up.
    ///
    /// # Errors
    /// As [`join`](Self::join); [`brigade::Error::Invalid`] if the two devices are not the same GPU.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(
        device: Arc<brigade::cuda::CudaDevice>,
        place: &candle_core::CudaDevice,
        boot: &dyn Bootstrap,
        config: &CommConfig,
    ) -> Result<Self> {
        let on = crate::cuda::stream(&device, place)?;
        Self::with(device, on, &Device::Cuda(place.clone()), boot, config)
    }

    /// `on` is a stream of the device, and for a GPU that of `place`.
    fn with(
        device: Arc<dyn brigade::Device>,
        on: Stream,
        place: &Device,
        boot: &dyn Bootstrap,
        config: &CommConfig,
    ) -> Result<Self> {
        let comm = device.clone().join(boot, config).or_candle()?;
        Ok(Self(Arc::new(Inner {
            device,
            comm,
            on,
            place: place.clone(),
            last: Mutex::new(None),
        })))
    }

    /// A further group on the same device and stream: for another parallelism (the feed-forward part's, the experts'), or of other
    /// ranks. Its calls stand in one order with this one's.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn and(&self, boot: &dyn Bootstrap, config: &CommConfig) -> Result<Self> {
        let Inner {
            device, on, place, ..
        } = &*self.0;
        Self::with(Arc::clone(device), on.clone(), place, boot, config)
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.group().rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.group().size
    }

    /// Which ranks, as this one sees them.
    pub fn group(&self) -> Group {
        self.0.comm.group()
    }

    /// Where tensors of this rank lie.
    pub fn place(&self) -> &Device {
        &self.0.place
    }

    /// Brigade's device, for operations that have no layer here.
    pub fn device(&self) -> &Arc<dyn brigade::Device> {
        &self.0.device
    }

    /// Brigade's communicator: what it has done, what it would do, and every other call.
    pub fn comm(&self) -> &Comm {
        &self.0.comm
    }

    /// The stream on which everything runs.
    pub fn stream(&self) -> &Stream {
        &self.0.on
    }

    /// Device memory that joining with this configuration takes, in bytes, before it takes any.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a configuration that cannot be.
    pub fn memory_need(&self, config: &CommConfig, size: usize) -> Result<u64> {
        self.0.device.memory_need(config, size).or_candle()
    }

    /// The fault that stopped the group, if one did. Asks nobody and waits for nothing.
    ///
    /// # Errors
    /// [`brigade::Error::Fault`]; [`brigade::Error::Closed`].
    pub fn check(&self) -> Result<()> {
        self.0.comm.check().or_candle()
    }

    /// Waits until all work so far is done. On a GPU, where calls return before their work has run, a fault shows here, or at the
    /// next call.
    ///
    /// # Errors
    /// [`brigade::Error::Fault`]; [`brigade::Error::Backend`] if it took longer.
    pub fn sync(&self, within: Duration) -> Result<()> {
        self.0.on.sync(within).or_candle()?;
        self.check()
    }

    /// Ends every wait of every rank, now.
    pub fn abort(&self) {
        self.0.comm.abort();
    }

    /// After a fault, all ranks come together and start anew.
    ///
    /// # Errors
    /// [`brigade::Error::Group`] naming the ranks that did not come `within` the time; it may be called again.
    pub fn reset(&self, within: Duration) -> Result<()> {
        self.0.comm.reset(within).or_candle()
    }

    /// The collective end: when it returns, nobody waits for this rank any more.
    ///
    /// # Errors
    /// The fault, if ranks did not come.
    pub fn close(&self, within: Duration) -> Result<()> {
        self.0.comm.close(within).or_candle()
    }

    /// A contiguous tensor's memory as a view of Brigade's, without a copy.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a tensor of another candle device, also of the same GPU, which works on another stream; for one
    /// that is not contiguous, or has more than six dimensions.
    pub fn lend<'t>(&self, tensor: &'t Tensor) -> Result<Lent<'t>> {
        self.check_place(tensor)?;
        Lent::new(tensor)
    }

    /// A new tensor of what `write` writes: any operation of Brigade's with an output. No copy is made of it.
    ///
    /// # Errors
    /// What `write` returns; [`brigade::Error::Invalid`] for a type or a shape that cannot be.
    pub fn make(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        write: impl FnOnce(ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let storage = match &self.0.place {
            Device::Cpu => {
                self.refuse_capture()?;
                Storage::Cpu(memory::make_cpu(dtype, shape.dims(), write)?.0)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(place) => {
                Storage::Cuda(crate::cuda::make(place, dtype, shape.dims(), write)?.0)
            }
            other => return Err(memory::no_device(other)),
        };
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }

    /// A new tensor with what lies in a buffer of Brigade's: a copy, since candle frees what it has by itself.
    ///
    /// # Errors
    /// As [`make`](Self::make).
    pub fn tensor(&self, view: View<'_>) -> Result<Tensor> {
        let dtype = memory::dtype_of(view.dtype())?;
        self.make(dtype, view.shape().dims(), |to| {
            self.0.device.copy(&self.0.on, to, view)
        })
    }

    /// How this rank's last call was carried out: which algorithm or overlap, in how many pieces. `None` before the first. (A
    /// column-parallel linear whose outputs are not gathered makes no call.)
    pub fn last_plan(&self) -> Option<Plan> {
        self.0.last.lock().clone()
    }

    /// One call of the communicator, whose plan is kept.
    pub(crate) fn call(
        &self,
        work: impl FnOnce(&mut Lease<'_>) -> brigade::Result<Plan>,
    ) -> brigade::Result<()> {
        let plan = work(&mut self.lease()?)?;
        *self.0.last.lock() = Some(plan);
        Ok(())
    }

    /// Exclusive use of the communicator, for one call or several.
    pub(crate) fn lease(&self) -> brigade::Result<Lease<'_>> {
        self.0.comm.lease(&self.0.on)
    }

    /// A recorded call on the host would leave its result to a replay, which candle's tensor does not wait for.
    pub(crate) fn refuse_capture(&self) -> Result<()> {
        if self.0.place.is_cpu() && self.0.on.capturing() {
            return Err(crate::to_candle(
                Reason::new(
                    "not-capturable",
                    "a call with tensors in the host's memory cannot be captured",
                    "call it outside of capture",
                )
                .into(),
            ));
        }
        Ok(())
    }

    /// Checks that a tensor lies where this rank works, on its stream: another candle device of the same GPU has another one.
    pub(crate) fn check_place(&self, tensor: &Tensor) -> Result<()> {
        self.check_device(tensor.device())
    }

    /// The same of what candle lends an operation, which is no tensor.
    pub(crate) fn check_device(&self, theirs: &Device) -> Result<()> {
        let own = &self.0.place;
        if theirs.same_device(own) {
            return Ok(());
        }
        let (got, want) = (theirs.location(), own.location());
        let other = if got == want { ", another stream" } else { "" };
        let want = format!("{want:?}, this rank's candle device");
        Err(invalid("device", format!("{got:?}{other}"), want))
    }

    /// As candle's `to_dtype`, which on a GPU fails where there are no elements: it launches a kernel for none.
    pub(crate) fn cast(&self, tensor: &Tensor, dtype: DType) -> Result<Tensor> {
        match tensor.elem_count() {
            0 => self.make(dtype, tensor.shape(), |_| Ok(())),
            _ => tensor.to_dtype(dtype),
        }
    }

    /// Lends a contiguous tensor, and gives a new one of `dims` to write to. A graph keeps what was lent so.
    pub(crate) fn mapped(
        &self,
        x: &Tensor,
        dims: impl Into<Shape>,
        work: impl FnOnce(View<'_>, ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<Tensor> {
        let lent = self.lend(x)?;
        self.make(x.dtype(), dims, |to| work(lent.view(), to))
    }

    /// The same of what an operation got from candle, which it has for the call alone: a graph cannot keep it.
    pub(crate) fn mapped_cpu(
        &self,
        (storage, layout): (&CpuStorage, &candle_core::Layout),
        dims: &[usize],
        work: impl FnOnce(View<'_>, ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<(CpuStorage, Shape)> {
        self.check_device(&Device::Cpu)?;
        self.refuse_capture()?;
        let dtype = candle_core::backend::BackendStorage::dtype(storage);
        memory::borrowed_cpu(storage, layout, |from| {
            let (made, ()) = memory::make_cpu(dtype, dims, |to| work(from, to))?;
            Ok((made, dims.into()))
        })
    }

    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn mapped_cuda(
        &self,
        (storage, layout): (&candle_core::CudaStorage, &candle_core::Layout),
        dims: &[usize],
        work: impl FnOnce(View<'_>, ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let place = storage.device();
        self.check_device(&Device::Cuda(place.clone()))?;
        crate::cuda::borrowed(storage, layout, |from| {
            let (made, ()) = crate::cuda::make(place, storage.dtype(), dims, |to| work(from, to))?;
            Ok((made, dims.into()))
        })
    }
}
