//! Products of few rows, by a kernel that reads the weight ahead (`kernels/few_rows.cu`).

use crate::{
    CudaDevice, Kernel, KernelSet, Launch, Missing, finish::End, lane::Lane,
    linear::adds_something, matrix::Matrix, tiles::GRAIN, types,
};
use brigade_device::{
    Activation, Buffer, DataType, Device, GemmParams, GemmShape, LoraLinearParams, Operand, Result,
    View,
};
use brigade_kernels::{FEW_ROWS_BYTES_8, FEW_ROWS_BYTES_16, FEW_ROWS_THREADS, FewRowsParams};
use cudarc::driver::{
    CudaContext,
    sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
};
use std::sync::Arc;

/// Rows up to which it takes as long as the library, within 2%, whatever comes before it, and mostly less (`docs/results/few-rows.h100x1.json`). Of
/// more, it is taken where the weight is settled.
const ALWAYS: usize = 8;

/// Of more rows than that, the longest inner dimension and the fewest columns of which one is enough: where there is neither, a block reads as much of the rows as
/// of the weight.
const SHORT: usize = 4096;
const WIDE: usize = 4096;

/// Most rows of any kernel.
const MOST: usize = 16;

/// Most rows of each kernel, and the shared memory of its blocks.
const FORMS: [(usize, u32); 2] = [(8, FEW_ROWS_BYTES_8), (MOST, FEW_ROWS_BYTES_16)];

/// By type, and by rows.
#[derive(Debug)]
pub(crate) struct FewRowsKernels {
    f16: [Kernel<FewRowsParams>; 2],
    bf16: [Kernel<FewRowsParams>; 2],
}

impl FewRowsKernels {
    /// Whether a GPU has bulk copies, and shared memory for them.
    pub(crate) fn suit(context: &CudaContext, capability: (u32, u32)) -> Result<bool, Missing> {
        let most = context
            .attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(crate::driver::refused("cuDeviceGetAttribute"))?;
        let wanted = FORMS.iter().map(|form| form.1).max().unwrap_or(0);
        Ok(capability >= (9, 0) && i64::from(most) >= i64::from(wanted))
    }

    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        let kernel = |dtype: DataType, (rows, bytes): (usize, u32)| {
            let kernel: Kernel<FewRowsParams> = set.variant(format!("_{dtype}_{rows}"))?;
            kernel.allow_shared_bytes(bytes)?;
            Ok::<_, Missing>(kernel)
        };
        let of = |dtype| -> Result<_, Missing> {
            let [few, more] = FORMS;
            Ok([kernel(dtype, few)?, kernel(dtype, more)?])
        };
        Ok(Self {
            f16: of(DataType::F16)?,
            bf16: of(DataType::BF16)?,
        })
    }

    /// The kernel for so many rows, and the shared memory of its blocks.
    fn of(&self, dtype: DataType, rows: usize) -> Option<(&Kernel<FewRowsParams>, u32)> {
        let kernels = match dtype {
            DataType::F16 => &self.f16,
            DataType::BF16 => &self.bf16,
            _ => return None,
        };
        let which = FORMS.iter().position(|&(most, _)| rows <= most)?;
        Some((&kernels[which], FORMS[which].1))
    }
}

/// A product, and what comes after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FewRows<'a> {
    pub(crate) factors: [&'a Matrix; 2],
    pub(crate) alpha: f32,
    /// C may be the result.
    pub(crate) end: End<'a>,
    pub(crate) sm_cap: Option<u16>,
    /// Whether the right factor may be read before the work in front has ended.
    pub(crate) settled: bool,
}

impl<'a> FewRows<'a> {
    /// One with nothing behind it.
    pub(crate) fn plain(factors: [&'a Matrix; 2], gemm: &GemmParams<'_>) -> Self {
        Self {
            factors,
            alpha: gemm.alpha,
            end: End::PLAIN,
            sm_cap: gemm.sm_cap,
            settled: gemm.settled_b,
        }
    }

    /// What the kernel is told but for where the result goes, and how it ends.
    pub(crate) fn parameters(&self) -> FewRowsParams {
        let [x, weight] = self.factors;
        FewRowsParams {
            x: x.address(),
            weight: weight.address(),
            x_stride: x.stride() as u64,
            weight_stride: weight.stride() as u64,
            rows: x.rows() as u32,
            columns: weight.columns() as u32,
            inner: x.columns() as u32,
            settled: u32::from(self.settled),
            alpha: self.alpha,
            ..FewRowsParams::default()
        }
    }

    /// Whether the kernel can do it, and does it well.
    fn suits(&self) -> bool {
        let [x, weight] = self.factors;
        let whole = |m: &Matrix| {
            let line = m.stride() * m.dtype().bytes();
            m.address().is_multiple_of(GRAIN as u64) && line.is_multiple_of(GRAIN)
        };
        let most = if self.settled { MOST } else { ALWAYS };
        let narrow = |n: usize| i32::try_from(n).is_ok();
        let much = x.rows() <= ALWAYS || x.columns() <= SHORT || weight.columns() >= WIDE;
        much && (1..=most).contains(&x.rows())
            && x.dtype() == weight.dtype()
            && !x.transposed()
            && weight.transposed()
            && (x.columns() * x.dtype().bytes()).is_multiple_of(GRAIN)
            && [x, weight].into_iter().all(whole)
            && [x.columns(), weight.columns()].into_iter().all(narrow)
    }
}

impl CudaDevice {
    /// The factors of a linear which is the product of two of this type and nothing else.
    pub(crate) fn few_factors(
        &self,
        p: &LoraLinearParams<'_>,
        shape: &GemmShape,
        dtype: DataType,
    ) -> Result<Option<[Matrix; 2]>> {
        let gemm = &p.gemm;
        let (Operand::Plain(x), Operand::Plain(weight)) = (gemm.a, gemm.b) else {
            return Ok(None);
        };
        let bare = gemm.activation == Activation::None && (gemm.c.is_none() || gemm.beta == 0.0);
        let product = shape.k > 0 && gemm.alpha != 0.0 && !gemm.batch_invariant;
        let alike = [x.dtype(), weight.dtype()] == [dtype; 2] && shape.d.dims().len() == 2;
        if !bare || !product || !alike || p.runs.iter().any(adds_something) {
            return Ok(None);
        }
        self.inputs(p, shape)?;
        let of = |view: View<'_>, transposed| Matrix::of(&view.retain(), transposed);
        Ok(Some([
            of(x, gemm.transpose_a),
            of(weight, gemm.transpose_b),
        ]))
    }

    /// The kernel for a product, and its launch for a result of so many columns; none where it is not for one.
    pub(crate) fn few_rows_kernel(
        &self,
        lane: &Lane,
        p: &FewRows<'_>,
        columns: usize,
    ) -> Option<(&Kernel<FewRowsParams>, Launch)> {
        let [x, _] = p.factors;
        let kernels = self.opened.kernels.few_rows.as_ref()?;
        let (kernel, shared_bytes) = kernels.of(x.dtype(), x.rows()).filter(|_| p.suits())?;
        let sms = p.sm_cap.unwrap_or(u16::MAX).clamp(1, self.info().sms);
        let blocks = usize::from(sms).min(columns);
        let shape = Launch {
            shared_bytes,
            programmatic: self.overtakes(lane),
            ..Launch::grid(blocks as u32, FEW_ROWS_THREADS)
        };
        Some((kernel, shape))
    }

    /// The product into `d`, its rows one after the other; `false`, and nothing is done, where it is not for the kernel.
    pub(crate) fn few_rows(&self, lane: &Arc<Lane>, p: &FewRows<'_>, d: &Buffer) -> Result<bool> {
        let [x, weight] = p.factors;
        let columns = weight.columns();
        let Some((kernel, shape)) = self.few_rows_kernel(lane, p, columns) else {
            return Ok(false);
        };
        let c_is_a_row = |c: &Buffer| c.shape().len() == columns;
        let parameters = FewRowsParams {
            out: d.address(),
            bias: p.end.bias.map_or(0, Buffer::address),
            bias_stride: match p.end.bias {
                Some(c) if !c_is_a_row(c) => columns as u64,
                _ => 0,
            },
            beta: p.end.beta,
            out_type: types::float_code(d.dtype()),
            bias_type: p.end.bias.map_or(0, |c| types::float_code(c.dtype())),
            activation: types::activation_code(p.end.activation),
            ..p.parameters()
        };
        let mut buffers = vec![d, x.buffer(), weight.buffer()];
        buffers.extend(p.end.bias);
        lane.run(&buffers, |stream| {
            // SAFETY: shapes, strides and reach were checked, and `run` keeps the buffers until the work is done; the stream is of
            // the lane's context, in which the kernel was loaded.
            unsafe { kernel.launch(stream, shape, parameters) }.map_err(Into::into)
        })?;
        Ok(true)
    }
}
