//! All kernels of operations, loaded when a device is opened: loading later would synchronize with waits in flight.

use crate::{
    Kernel, KernelSet, Launch, Missing, combine::CombineKernels, dispatch::DispatchKernels,
    few_rows::FewRowsKernels, fifo::BackKernels, gemm_flags::TileKernels, grouped::GroupedKernels,
    lane::Lane, lora::LoraKernels, low_latency::LowLatencyKernels, norm::NormKernels,
    pushed::PushKernels, residual_norm::ResidualNormKernels, routing::RouteKernels,
};
use brigade_device::{Buffer, Result};
use brigade_kernels::{
    AdaptersParams, AllToAllRowsParams, ConvertParams, DequantizeParams, DispatchFifoParams,
    FinishParams, GatheredParams, GreatestParams, LongParams, MessagesParams, MoveParams,
    PackParams, Parameters, QuantizeParams, QuantizeRowsParams, ReduceParams, SiluMulParams,
    StepsParams, TopKParams, TransposeParams, fatbin,
};
use cudarc::driver::CudaContext;
use std::sync::Arc;

/// What a device launches.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) convert: Kernel<ConvertParams>,
    pub(crate) transpose: Kernel<TransposeParams>,
    pub(crate) finish: Kernel<FinishParams>,
    pub(crate) quantize_rows: Kernel<QuantizeRowsParams>,
    pub(crate) greatest: Kernel<GreatestParams>,
    pub(crate) quantize: Kernel<QuantizeParams>,
    pub(crate) dequantize: Kernel<DequantizeParams>,
    pub(crate) pack: Kernel<PackParams>,
    pub(crate) long: Kernel<LongParams>,
    pub(crate) grouped: GroupedKernels,
    pub(crate) lora: LoraKernels,
    /// Where bulk copies have room for it.
    pub(crate) few_rows: Option<FewRowsKernels>,
    pub(crate) silu_mul: Kernel<SiluMulParams>,
    pub(crate) top_k: Kernel<TopKParams>,
    pub(crate) steps: Kernel<StepsParams>,
    pub(crate) moves: Kernel<MoveParams>,
    pub(crate) reduce: Kernel<ReduceParams>,
    /// Compares what machines signed.
    pub(crate) compare: Kernel<ReduceParams>,
    pub(crate) sign: Kernel<ReduceParams>,
    pub(crate) messages: Kernel<MessagesParams>,
    /// Of which some are long.
    pub(crate) messages_in_teams: Kernel<MessagesParams>,
    pub(crate) rows: Kernel<AllToAllRowsParams>,
    pub(crate) adapters: Kernel<AdaptersParams>,
    pub(crate) pushes: PushKernels,
    pub(crate) norms: NormKernels,
    pub(crate) residual_norms: ResidualNormKernels,
    pub(crate) routes: RouteKernels,
    pub(crate) gathered: Kernel<GatheredParams>,
    pub(crate) dispatches: DispatchKernels,
    pub(crate) combines: CombineKernels,
    pub(crate) dispatch_fifo: Kernel<DispatchFifoParams>,
    pub(crate) combine_fifo: BackKernels,
    pub(crate) low_latency: LowLatencyKernels,
    /// On compute capability 9.0.
    pub(crate) tiles: Option<TileKernels>,
    sms: u32,
}

/// Threads of a block, for all kernels here.
const THREADS: u32 = 256;
/// Blocks that an SM holds of these.
const BLOCKS_PER_SM: u32 = 8;

impl Kernels {
    /// Loads everything.
    pub(crate) fn load(
        context: &Arc<CudaContext>,
        capability: (u32, u32),
        sms: u32,
    ) -> Result<Self, Missing> {
        let set = |name: &str| KernelSet::load(context, fatbin(name)?);
        let (quantize, int8) = (set("quantize")?, set("int8")?);
        let reduce = set("reduce")?;
        Ok(Self {
            convert: set("convert")?.kernel()?,
            transpose: set("transpose")?.kernel()?,
            finish: set("finish")?.kernel()?,
            quantize_rows: quantize.kernel()?,
            greatest: quantize.kernel()?,
            quantize: quantize.kernel()?,
            dequantize: quantize.kernel()?,
            pack: int8.kernel()?,
            long: int8.kernel()?,
            grouped: GroupedKernels::load(&set("grouped")?)?,
            lora: LoraKernels::load(&set("lora")?)?,
            few_rows: FewRowsKernels::suit(context, capability)?
                .then(|| FewRowsKernels::load(&set("few_rows")?, capability))
                .transpose()?,
            silu_mul: set("silu_mul")?.kernel()?,
            top_k: set("top_k")?.kernel()?,
            steps: set("steps")?.kernel()?,
            moves: set("move")?.kernel()?,
            reduce: reduce.kernel()?,
            compare: reduce.variant("_compare")?,
            sign: reduce.variant("_sign")?,
            messages: set("messages")?.kernel()?,
            messages_in_teams: set("messages_in_teams")?.variant("_in_teams")?,
            rows: set("all_to_all_rows")?.kernel()?,
            adapters: set("adapters")?.kernel()?,
            norms: NormKernels::load(&set("all_reduce_norm")?)?,
            residual_norms: ResidualNormKernels::load(&set("residual_norm")?)?,
            routes: RouteKernels::load(&set("routing")?)?,
            gathered: set("gathered")?.kernel()?,
            dispatches: DispatchKernels::load(&set("dispatch")?)?,
            combines: CombineKernels::load(&set("combine")?)?,
            dispatch_fifo: set("dispatch_fifo")?.kernel()?,
            combine_fifo: BackKernels::load(&set("combine_fifo")?)?,
            low_latency: LowLatencyKernels::load(&set("low_latency")?)?,
            pushes: PushKernels::load(set, capability)?,
            tiles: (capability == (9, 0))
                .then(|| TileKernels::load(&set("gemm_flags")?, &set("gemm_sums")?))
                .transpose()?,
            sms,
        })
    }

    /// Enqueues a kernel with as many blocks as `blocks` asks for, at most what the GPU holds at once: all kernels here go
    /// on with the rest themselves.
    ///
    /// # Safety
    /// Every address in `parameters` must lie, for all that the kernel does with it, in one of `buffers`, which must be
    /// within reach of the GPU; or in memory that outlives the work.
    pub(crate) unsafe fn launch<P: Parameters>(
        &self,
        kernel: &Kernel<P>,
        lane: &Arc<Lane>,
        buffers: &[&Buffer],
        blocks: usize,
        parameters: P,
    ) -> Result<()> {
        let shape = self.shape(blocks);
        lane.run(buffers, |stream| {
            // SAFETY: the caller's promise; `run` keeps the buffers until the work is done, and the stream is of the lane's
            // context, in which `kernel` was loaded.
            unsafe { kernel.launch(stream, shape, parameters) }.map_err(Into::into)
        })
    }
}

impl Kernels {
    /// A grid of at most so many blocks, and of no more than the GPU holds at once.
    pub(crate) fn shape(&self, blocks: usize) -> Launch {
        let most = self.sms * BLOCKS_PER_SM;
        let blocks = u32::try_from(blocks).unwrap_or(most).clamp(1, most);
        Launch::grid(blocks, THREADS)
    }
}

/// A kernel whose blocks go on with the rest themselves, their shape, and how many a multiprocessor holds.
#[derive(Debug)]
pub(crate) struct Blocks<P> {
    kernel: Kernel<P>,
    block: Launch,
    pub(crate) per_sm: u32,
}

impl<P: Parameters> Blocks<P> {
    pub(crate) fn new(kernel: Kernel<P>, threads: u32, shared_bytes: u32) -> Result<Self, Missing> {
        let block = Launch {
            shared_bytes,
            ..Launch::grid(1, threads)
        };
        if shared_bytes > 0 {
            kernel.allow_shared_bytes(shared_bytes)?;
        }
        Ok(Self {
            per_sm: kernel.resident_per_sm(block)?.max(1),
            kernel,
            block,
        })
    }

    /// Enqueues so many blocks, one at least.
    ///
    /// # Safety
    /// As [`Kernels::launch`].
    pub(crate) unsafe fn launch(
        &self,
        lane: &Arc<Lane>,
        buffers: &[&Buffer],
        blocks: usize,
        parameters: P,
    ) -> Result<()> {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).max(1);
        let shape = Launch {
            blocks,
            ..self.block
        };
        lane.run(buffers, |stream| {
            // SAFETY: the caller's promise; `run` keeps the buffers until the work is done, and the stream is of the lane's
            // context, in which `kernel` was loaded.
            unsafe { self.kernel.launch(stream, shape, parameters) }.map_err(Into::into)
        })
    }
}

/// Blocks for so many elements, one for each thread.
pub(crate) fn blocks_for(elements: usize) -> usize {
    elements.div_ceil(THREADS as usize)
}
