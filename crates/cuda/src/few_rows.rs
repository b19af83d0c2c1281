//! Products of few rows, by a kernel that reads the weight ahead (`kernels/few_rows.cu`).

mod adapters;

pub(crate) use adapters::RowAdapters;

use crate::{
    CudaDevice, Kernel, KernelSet, Launch, Missing, finish::End, lane::Lane,
    linear::adds_something, matrix::Matrix, tiles::GRAIN, types,
};
use brigade_device::{
    Activation, Buffer, DataType, Device, GemmParams, GemmShape, LoraLinearParams, Operand, Result,
    View,
};
use brigade_kernels::{FEW_LOW_BLOCKS, FEW_ROWS_BYTES, FEW_ROWS_THREADS, FewRowsParams};
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

/// Most rows of each kernel.
const FORMS: [usize; 2] = [8, MOST];

/// A kernel, and how many of its blocks a GPU holds at once, where they come in clusters.
#[derive(Debug)]
struct Form {
    kernel: Kernel<FewRowsParams>,
    most: Option<u32>,
}

/// Of one type, by rows: without adapters, and with them.
#[derive(Debug)]
struct OfType {
    plain: [Form; 2],
    with_adapters: [Form; 2],
}

/// By type.
#[derive(Debug)]
pub(crate) struct FewRowsKernels {
    f16: OfType,
    bf16: OfType,
}

impl FewRowsKernels {
    /// Whether a GPU has bulk copies, and shared memory for them.
    pub(crate) fn suit(context: &CudaContext, capability: (u32, u32)) -> Result<bool, Missing> {
        let most = context
            .attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(crate::driver::refused("cuDeviceGetAttribute"))?;
        Ok(capability >= (9, 0) && i64::from(most) >= i64::from(FEW_ROWS_BYTES))
    }

    /// Adapters are taken along on compute capability 9.0 alone: elsewhere no warps give up registers for others, and what does not fit is slow to come back.
    pub(crate) fn load(set: &Arc<KernelSet>, capability: (u32, u32)) -> Result<Self, Missing> {
        let form = |name: &str, rows: usize, cluster: u32| {
            let kernel: Kernel<FewRowsParams> = set.variant(format!("_{name}_{rows}"))?;
            kernel.allow_shared_bytes(FEW_ROWS_BYTES)?;
            // A part of a GPU that holds no cluster may be told so as an error.
            let clusters = || kernel.resident_clusters(launch(cluster, cluster));
            let most = (cluster > 1).then(|| match capability {
                (9, 0) => cluster * clusters().unwrap_or(0),
                _ => 0,
            });
            Ok::<_, Missing>(Form { kernel, most })
        };
        let [few, more] = FORMS;
        let of = |dtype: DataType| -> Result<_, Missing> {
            let (plain, low) = (dtype.to_string(), format!("low_{dtype}"));
            let with_adapters = |rows| form(&low, rows, FEW_LOW_BLOCKS);
            Ok(OfType {
                plain: [form(&plain, few, 1)?, form(&plain, more, 1)?],
                with_adapters: [with_adapters(few)?, with_adapters(more)?],
            })
        };
        Ok(Self {
            f16: of(DataType::F16)?,
            bf16: of(DataType::BF16)?,
        })
    }

    /// The kernel for so many rows, with adapters or without, and its launch with so many blocks at most; none where these are too few.
    fn of(
        &self,
        dtype: DataType,
        rows: usize,
        adapters: bool,
        blocks: usize,
    ) -> Option<(&Kernel<FewRowsParams>, Launch)> {
        let of_type = match dtype {
            DataType::F16 => &self.f16,
            DataType::BF16 => &self.bf16,
            _ => return None,
        };
        let which = FORMS.iter().position(|&most| rows <= most)?;
        let (forms, cluster) = match adapters {
            true => (&of_type.with_adapters, FEW_LOW_BLOCKS),
            false => (&of_type.plain, 1),
        };
        let form = &forms[which];
        let most = u32::try_from(blocks).unwrap_or(u32::MAX);
        let blocks = most.min(form.most.unwrap_or(most)) / cluster * cluster;
        let launch = launch(blocks, cluster);
        (blocks > 0).then_some((&form.kernel, launch))
    }
}

/// So many blocks, in such clusters.
const fn launch(blocks: u32, cluster: u32) -> Launch {
    Launch {
        shared_bytes: FEW_ROWS_BYTES,
        cluster,
        ..Launch::grid(blocks, FEW_ROWS_THREADS)
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
    /// Adapters, which are added to the product before C is.
    pub(crate) adapters: Option<&'a RowAdapters>,
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
            adapters: None,
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
            ..self.adapters.map(|all| all.told).unwrap_or_default()
        }
    }

    /// Whether the kernel can do it, and does it well.
    fn suits(&self) -> bool {
        let [x, weight] = self.factors;
        let whole = |m: &Matrix| {
            let line = m.stride() * m.dtype().bytes();
            m.address().is_multiple_of(GRAIN as u64) && line.is_multiple_of(GRAIN)
        };
        // Whatever has adapters otherwise takes two launches more at least.
        let most = match self.settled || self.adapters.is_some() {
            true => MOST,
            false => ALWAYS,
        };
        let narrow = |n: usize| i32::try_from(n).is_ok();
        let much = x.rows() <= ALWAYS || x.columns() <= SHORT || weight.columns() >= WIDE;
        let pays = self
            .adapters
            .is_none_or(|all| all.pays(x.rows(), x.columns()));
        much && pays
            && (1..=most).contains(&x.rows())
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
        if !p.suits() {
            return None;
        }
        let sms = p.sm_cap.unwrap_or(u16::MAX).clamp(1, self.info().sms);
        let blocks = usize::from(sms).min(columns);
        let (kernel, launch) = kernels.of(x.dtype(), x.rows(), p.adapters.is_some(), blocks)?;
        let launch = Launch {
            programmatic: self.overtakes(lane),
            ..launch
        };
        Some((kernel, launch))
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
        buffers.extend(p.adapters.iter().flat_map(|all| &all.factors));
        lane.run(&buffers, |stream| {
            // SAFETY: shapes, strides and reach were checked, and `run` keeps the buffers until the work is done; the stream is of
            // the lane's context, in which the kernel was loaded.
            unsafe { kernel.launch(stream, shape, parameters) }.map_err(Into::into)
        })?;
        Ok(true)
    }
}
