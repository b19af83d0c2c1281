//! A product in front of a sum over ranks that sends its parts itself, as soon as it has them (`kernels/few_rows.cu`), to a kernel of the sum that takes its place
//! while the product ends. To peers that is one shot like any other.

use crate::{
    Kernel, Launch, comm::CudaComm, core::Core, few_rows::FewRows, job::Job, matrix::Matrix,
    memory::Place,
};
use brigade_device::{
    AllReduceAlgorithm, Buffer, DataType, GemmShape, LoraLinearParams, Plan, Result, Storage,
    Stream,
};
use brigade_kernels::FewRowsParams;
use brigade_plan::pushed::GRANULE_BYTES;
use brigade_sync::BUFFERS;

/// Types of what may be sent.
pub(crate) const SENT: [DataType; 2] = [DataType::F16, DataType::BF16];

/// Most ranks of a group whose kernels take it.
const MOST_RANKS: usize = 4;

/// A product that sends.
pub(crate) struct Sender<'a> {
    factors: [Matrix; 2],
    kernel: &'a Kernel<FewRowsParams>,
    launch: Launch,
    parameters: FewRowsParams,
}

impl CudaComm {
    /// The product of a linear that sends its parts to the sum of a plan; none where it does not.
    pub(crate) fn sender(
        &self,
        on: &Stream,
        linear: &LoraLinearParams<'_>,
        (shape, dtype): (&GemmShape, DataType),
        plan: &Plan,
    ) -> Result<Option<Sender<'_>>> {
        let (core, device) = (&self.core, self.gpu());
        let &Plan::AllReduce {
            algorithm: AllReduceAlgorithm::OneShotPush,
            piece_elements,
            ..
        } = plan
        else {
            return Ok(None);
        };
        let elements = shape.m * shape.n;
        // Each buffer has a place more, for this rank's own.
        let (_, buffer_bytes) = core.sum_buffers();
        let fits = (core.size() * elements * dtype.bytes()) as u64 <= buffer_bytes;
        let suits = SENT.contains(&dtype)
            && (2..=MOST_RANKS).contains(&core.size())
            && (shape.n * dtype.bytes()).is_multiple_of(GRANULE_BYTES)
            && core.memory.desk.is_none();
        if piece_elements < elements || !fits || !suits {
            return Ok(None);
        }
        let Some(factors) = device.few_factors(linear, shape, dtype)? else {
            return Ok(None);
        };
        // Rows of the group's memory end with the next call, which this is: a product of its own reads them first.
        for factor in &factors {
            if let Place::Group(_) = Place::of(factor.buffer().storage())? {
                return Ok(None);
            }
        }
        let few = FewRows::plain(factors.each_ref(), &linear.gemm);
        let Some((kernel, launch)) = device.few_rows_kernel(device.lane(on)?, &few, shape.n) else {
            return Ok(None);
        };
        let parameters = sending(core, few.parameters());
        Ok(Some(Sender {
            factors,
            kernel,
            launch,
            parameters,
        }))
    }
}

impl Sender<'_> {
    /// What the call is to keep.
    pub(crate) fn buffers(&self) -> [&Buffer; 2] {
        self.factors.each_ref().map(Matrix::buffer)
    }

    /// In a call that takes what is sent, and keeps the [buffers](Self::buffers).
    pub(crate) fn enqueue(&self, job: &Job<'_>) -> Result<()> {
        // SAFETY: shapes, strides and reach were checked, and the call keeps the buffers until the work is done; what is sent goes to places of the group's
        // memory, of which there are enough.
        unsafe { self.kernel.launch(job.stream, self.launch, self.parameters) }.map_err(Into::into)
    }
}

/// What a product is told so that it sends its result to all ranks, as their next use of a buffer.
fn sending(core: &Core, product: FewRowsParams) -> FewRowsParams {
    let (slots, buffer_bytes) = core.sum_buffers();
    FewRowsParams {
        base: core.memory.symmetric.base(),
        stride: core.memory.symmetric.stride() as u64,
        state: Storage::address(&core.memory.state),
        slots,
        buffer_bytes,
        buffers: BUFFERS as u32,
        rank: core.rank() as u32,
        size: core.size() as u32,
        ..product
    }
}
