//! One product of rows that arrive part by part, by the kernel of `kernels/gemm_flags.cu`.

use crate::{
    CudaDevice, Kernel, KernelSet, Launch, Missing,
    adapters::Low,
    driver::failed,
    gemm_send::Sends,
    job::{Job, waiting},
    lane::Lane,
    steps::{Counters, Use},
    types,
};
use brigade_device::{Activation, Buffer, DataType, Error, Reason, Result};
use brigade_kernels::{
    BEGINS_BESIDE_STEPS, BEGINS_WITH_NEW_STATE, GEMM_ROWS, GEMM_SHARED_BYTES, GEMM_THREADS,
    GemmFlagsParams, GemmSumsParams, Parameters, STATE_COUNTERS,
};
use brigade_plan::reason;
use cudarc::driver::sys;
use std::{ffi::c_void, mem::MaybeUninit, ops::Range, ptr, sync::Arc};

mod falls;
pub(crate) use falls::Falls;
use falls::{WIDTHS, Width, best_width, cost_of, even_blocks, low_blocks, narrow_cost};

/// Bytes of the inner dimension that a box holds.
const BOX_BYTES: usize = 128;

/// The kernels for factors of one type and results of one, with how many columns the tiles of each have.
#[derive(Debug)]
struct OfType {
    input: DataType,
    output: DataType,
    widths: &'static [Width],
    kernels: Vec<Kernel<GemmFlagsParams>>,
    /// Those which add what others made of the same rows, if there are any.
    sums: Vec<Kernel<GemmSumsParams>>,
}

/// The kernels for all types.
#[derive(Debug)]
pub(crate) struct TileKernels(Vec<OfType>);

impl TileKernels {
    pub(crate) fn load(set: &Arc<KernelSet>, sums: &Arc<KernelSet>) -> Result<Self, Missing> {
        use DataType::{BF16, F8E4M3, F16, I8};
        let [halves, int8, fp8] = WIDTHS;
        let of = |name: &str, input, output, widths: &'static [Width]| {
            Ok(OfType {
                input,
                output,
                widths,
                kernels: of_widths(set, name, widths)?,
                sums: match input == output {
                    true => of_widths(sums, name, widths)?,
                    false => Vec::new(),
                },
            })
        };
        let all: Result<_, Missing> = [
            of("f16", F16, F16, halves),
            of("bf16", BF16, BF16, halves),
            of("int8_f16", I8, F16, int8),
            of("int8_bf16", I8, BF16, int8),
            of("fp8_f16", F8E4M3, F16, fp8),
            of("fp8_bf16", F8E4M3, BF16, fp8),
        ]
        .into_iter()
        .collect();
        all.map(Self)
    }

    fn of(&self, input: DataType, output: DataType) -> Option<&OfType> {
        self.0
            .iter()
            .find(|k| (k.input, k.output) == (input, output))
    }
}

/// The kernel for each width.
fn of_widths<P: Parameters>(
    set: &Arc<KernelSet>,
    name: &str,
    widths: &[Width],
) -> Result<Vec<Kernel<P>>, Missing> {
    let load = |width: &Width| {
        let kernel = set.variant(format!("_{name}_{}", width.columns))?;
        kernel.allow_shared_bytes(GEMM_SHARED_BYTES)?;
        Ok(kernel)
    };
    widths.iter().map(load).collect()
}

/// A matrix in device memory, rows of `columns` elements one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) address: u64,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// Rows that arrive together.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Among all rows, as runs of adapters count them.
    pub(crate) rows: Range<usize>,
    /// The first one in the matrix that they lie in: own rows, or all.
    pub(crate) first: usize,
    /// Address of the first row of their result.
    pub(crate) out: u64,
    /// Address of the scale of its first row, where there are scales.
    pub(crate) scales: u64,
    /// Whose they are, and the slot by whose flag they are announced; `None` for own rows.
    pub(crate) from: Option<usize>,
}

/// Scales of factors of 8 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    /// Whether each row has one; else each part.
    pub(crate) by_row: bool,
    /// Address of those of columns.
    pub(crate) columns: u64,
    /// Whether each column has one; else all have one.
    pub(crate) by_column: bool,
}

/// Rows of the result with an adapter.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) rows: Range<usize>,
    /// Address of `[inner, width]`.
    pub(crate) first: u64,
    /// Address of `[width, columns]`.
    pub(crate) second: u64,
    /// The first of its columns among those that all adapters have between their factors.
    pub(crate) column: usize,
    pub(crate) width: usize,
    pub(crate) scale: f32,
}

/// `out = act(rows weight^T + bias)`, and adapters.
#[derive(Clone, Debug)]
pub(crate) struct Tiled {
    /// How many there is room for.
    pub(crate) blocks: u32,
    /// Of rows and weight.
    pub(crate) dtype: DataType,
    pub(crate) output: DataType,
    pub(crate) scales: Option<Scales>,
    /// Where rows of peers arrive.
    pub(crate) all: Rows,
    /// Own rows.
    pub(crate) own: Rows,
    pub(crate) weight: Rows,
    /// C of all rows.
    pub(crate) bias: Option<Buffer>,
    pub(crate) activation: Activation,
    /// In the order in which they are multiplied.
    pub(crate) parts: Vec<Part>,
    pub(crate) runs: Vec<Run>,
    /// What weight, bias and adapters lie in.
    pub(crate) buffers: Vec<Buffer>,
}

/// Columns that the adapters of these runs have between their factors.
pub(crate) fn low_columns(runs: &[Run]) -> usize {
    runs.last().map_or(0, |run| run.column + run.width)
}

impl Tiled {
    /// Columns that all adapters have between their factors.
    pub(crate) fn low_columns(&self) -> usize {
        low_columns(&self.runs)
    }

    /// Whether there is nothing to multiply.
    pub(crate) fn is_empty(&self) -> bool {
        self.weight.rows == 0 || self.bands() == 0
    }

    pub(crate) fn bands(&self) -> usize {
        let rows = self.band_rows() as usize;
        let of = |part: &Part| part.rows.len().div_ceil(rows);
        self.parts.iter().map(of).sum()
    }

    /// How high bands are, so that none is much lower: rows beyond a matrix' end take longer to load than those that are there. In groups
    /// of 8, as rows lie in shared memory.
    fn band_rows(&self) -> u32 {
        let of = |part: &Part| {
            let rows = part.rows.len();
            let bands = rows.div_ceil(GEMM_ROWS as usize).max(1);
            rows.div_ceil(bands).next_multiple_of(8) as u32
        };
        self.parts.iter().map(of).max().unwrap_or(0).max(8)
    }
}

/// From row to row of C, in elements.
fn stride_of(c: &Buffer, columns: usize) -> u32 {
    let one_row = c.shape().len() == columns;
    if one_row { 0 } else { columns as u32 }
}

/// How bulk copies find boxes of a matrix: `rows` rows of 128 bytes.
pub(crate) fn tensor_map(matrix: &Rows, dtype: DataType, rows: u32) -> Result<[u64; 16]> {
    use sys::{
        CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum::*,
        CUtensorMapInterleave_enum::*, CUtensorMapL2promotion_enum::*, CUtensorMapSwizzle_enum::*,
    };
    let kind = match dtype {
        DataType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DataType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let sizes = [matrix.columns as u64, matrix.rows as u64];
    let strides = [(matrix.columns * dtype.bytes()) as u64];
    let boxes = [(BOX_BYTES / dtype.bytes()) as u32, rows];
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    // SAFETY: all arrays have as many elements as two dimensions ask for; the map is written by the call, and aligned by its
    // type.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            2,
            matrix.address as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            [1_u32; 2].as_ptr(),
            CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(failed("cuTensorMapEncodeTiled"))?;
    // SAFETY: 128 bytes without holes, all of them set.
    Ok(unsafe { ptr::read(map.as_ptr().cast()) })
}

/// A product that is ready to be launched, but for what its tiles wait for.
pub(crate) struct Ready<'a> {
    of_type: &'a OfType,
    /// Which width.
    chosen: usize,
    /// Blocks that there is room for.
    sms: u32,
    pub(crate) parameters: GemmFlagsParams,
    low: Option<Low>,
}

impl Ready<'_> {
    /// Enqueues its tiles.
    pub(crate) fn launch(&self, lane: &Arc<Lane>, p: &Tiled, programmatic: bool) -> Result<()> {
        let kernel = &self.of_type.kernels[self.chosen];
        self.launch_as(kernel, self.parameters, (lane, p), programmatic)
    }

    /// The same by the kernel that adds what others made of the rows, of which there are some where results have the type of the rows.
    pub(crate) fn launch_sums(
        &self,
        lane: &Arc<Lane>,
        p: &Tiled,
        programmatic: bool,
    ) -> Result<()> {
        let kernel = &self.of_type.sums[self.chosen];
        let parameters = GemmSumsParams(self.parameters);
        self.launch_as(kernel, parameters, (lane, p), programmatic)
    }

    fn launch_as<P: Parameters>(
        &self,
        kernel: &Kernel<P>,
        parameters: P,
        (lane, p): (&Arc<Lane>, &Tiled),
        programmatic: bool,
    ) -> Result<()> {
        let of = &self.parameters;
        let turns = of.low_blocks + of.tiles - of.low_tiles;
        let blocks = even_blocks(turns, self.sms, self.low.is_some());
        let shape = Launch {
            shared_bytes: GEMM_SHARED_BYTES,
            programmatic,
            ..Launch::grid(blocks, GEMM_THREADS)
        };
        let made = self.low.iter().map(|low| &low.memory);
        let kept: Vec<_> = p.buffers.iter().chain(made).collect();
        lane.run(&kept, |stream| {
            // SAFETY: rows and result lie in buffers of the call, which its `run` keeps, or in the group's memory; this `run`
            // keeps the rest.
            unsafe { kernel.launch(stream, shape, parameters) }.map_err(Error::from)
        })
    }
}

impl Job<'_> {
    /// Enqueues the product, whose tiles wait for the flags of `of`, and which may send own rows.
    pub(crate) fn tiled(
        &self,
        of: Use,
        p: &Tiled,
        low: Option<Low>,
        sends: Option<Sends>,
    ) -> Result<()> {
        let Some(mut ready) = self.ready(of, p, low)? else {
            return Ok(());
        };
        if let Some(sends) = sends {
            sends.tell(&mut ready.parameters);
        }
        let steps = self.core.steps();
        for (i, part) in p.parts.iter().enumerate() {
            if let Some(from) = part.from {
                ready.parameters.part_word[i] = steps.filled_word(of, from, 0, from);
                ready.parameters.part_peer[i] = from as u32;
            }
        }
        ready.launch(self.lane, p, self.behind_steps())
    }

    /// What has all that is known without saying what is waited for. `None` if there is nothing to multiply.
    pub(crate) fn ready(&self, of: Use, p: &Tiled, low: Option<Low>) -> Result<Option<Ready<'_>>> {
        let begins_early = self.behind_steps() && self.product_follows;
        let waiting = GemmFlagsParams {
            signature: self.kind.signature,
            counter: Counters::uses(of) as u32,
            begins: if begins_early { BEGINS_BESIDE_STEPS } else { 0 },
            ..waiting!(GemmFlagsParams, self)
        };
        self.core.device.ready(p, low, waiting)
    }

    /// Whether a product's launch may take place while steps of this call go on.
    pub(crate) fn behind_steps(&self) -> bool {
        self.core.begins_early && self.stepped.get()
    }
}

impl CudaDevice {
    /// Whether there is a kernel for rows of this type with such results.
    pub(crate) fn check_tiles(&self, dtype: DataType, output: DataType) -> Result<(), Reason> {
        let kernels = self.opened.kernels.tiles.as_ref();
        if kernels.is_some_and(|k| k.of(dtype, output).is_some()) {
            return Ok(());
        }
        Err(reason::tiles_operands(
            format!(
                "chunk.dtype: this GPU has no kernel for tiles of {dtype} with results of {output}"
            ),
            "give f16, bf16 or quantized rows, and a compute capability of 9.0",
        ))
    }

    /// How a product of so many rows and columns falls into tiles, with adapters of so many in all; `None` where there is no kernel.
    pub(crate) fn falls(
        &self,
        [input, output]: [DataType; 2],
        [rows, columns]: [usize; 2],
        low_columns: usize,
        sms: usize,
    ) -> Option<Falls> {
        let widths = self
            .opened
            .kernels
            .tiles
            .as_ref()?
            .of(input, output)?
            .widths;
        let shape = (rows.div_ceil(GEMM_ROWS as usize), columns);
        let narrow = narrow_cost(low_columns);
        let width = widths[best_width(widths, shape, narrow, sms)];
        Some(Falls {
            sms,
            tiles: shape.0 * columns.div_ceil(width.columns),
            cost: cost_of(width, shape, narrow, sms),
        })
    }

    /// Enqueues a product of rows that are there, all of them own ones.
    pub(crate) fn tiled(&self, lane: &Arc<Lane>, p: &Tiled) -> Result<()> {
        // A state in which nothing has happened, and, behind it, whether it was stopped, which those who wait for adapters look at.
        let state = self.scratch(lane, DataType::U64, &[STATE_COUNTERS + 1])?;
        let low = self.low(lane, p, Some(&state))?;
        if low.is_none() {
            self.fill_bytes(lane, &state, 0)?;
        }
        let alone = GemmFlagsParams {
            base: state.address(),
            state: state.address(),
            deadline_ns: u64::MAX,
            first_deadline_ns: u64::MAX,
            size: 1,
            stop: STATE_COUNTERS as u32,
            begins: BEGINS_WITH_NEW_STATE,
            ..GemmFlagsParams::default()
        };
        // The kernel that lays adapters out lets this one be launched.
        let programmatic = low.is_some() && self.launches_early();
        let p = Tiled {
            buffers: p.buffers.iter().cloned().chain([state]).collect(),
            ..p.clone()
        };
        match self.ready(&p, low, alone)? {
            Some(ready) => ready.launch(lane, &p, programmatic),
            None => Ok(()),
        }
    }

    /// Chooses how wide tiles are. `None` if there is nothing to multiply.
    fn ready(
        &self,
        p: &Tiled,
        low: Option<Low>,
        waiting: GemmFlagsParams,
    ) -> Result<Option<Ready<'_>>> {
        let columns = p.weight.rows;
        if p.is_empty() {
            return Ok(None);
        }
        // Whoever has tiles has been told that there are kernels.
        self.check_tiles(p.dtype, p.output)?;
        let kernels = self.opened.kernels.tiles.as_ref();
        let Some(of_type) = kernels.and_then(|k| k.of(p.dtype, p.output)) else {
            return Ok(None);
        };
        let sms = p.blocks as usize;
        let narrow = narrow_cost(p.low_columns());
        let chosen = best_width(of_type.widths, (p.bands(), columns), narrow, sms);
        let width = of_type.widths[chosen].columns;
        let band_rows = p.band_rows();
        let mut parameters = GemmFlagsParams {
            rows_map: tensor_map(&p.all, p.dtype, band_rows)?,
            // Without own rows nobody looks at their map.
            own_map: tensor_map(
                if p.own.rows > 0 { &p.own } else { &p.all },
                p.dtype,
                band_rows,
            )?,
            weight_map: tensor_map(&p.weight, p.dtype, width as u32)?,
            activation: types::activation_code(p.activation),
            columns: columns as u32,
            inner: p.weight.columns as u32,
            band_rows,
            parts: p.parts.len() as u32,
            column_scales: p.scales.map_or(0, |s| s.columns),
            row_scale_stride: u32::from(p.scales.is_some_and(|s| s.by_row)),
            column_scale_stride: u32::from(p.scales.is_some_and(|s| s.by_column)),
            ..waiting
        };
        if let Some(c) = &p.bias {
            parameters.bias = c.address();
            parameters.bias_type = types::float_code(c.dtype());
            parameters.bias_stride = stride_of(c, columns);
        }
        if let Some(low) = &low {
            parameters.down_map = tensor_map(&low.down, p.dtype, low.low.columns as u32)?;
            parameters.low_map = tensor_map(&low.low, p.dtype, band_rows)?;
            parameters.up_map = tensor_map(&low.up, p.dtype, width as u32)?;
            parameters.low = low.low.address;
            parameters.low_flags = low.flags;
            parameters.low_columns = low.low.columns as u32;
            parameters.runs = p.runs.len() as u32;
            for (i, run) in p.runs.iter().enumerate() {
                parameters.run_row[i] = run.rows.start as u32;
                parameters.run_rows[i] = run.rows.len() as u32;
                parameters.run_column[i] = run.column as u32;
                parameters.run_width[i] = run.width as u32;
                parameters.run_scale[i] = run.scale;
            }
        }
        // A narrow tile for each band, where there are adapters: in front of all, or among its others.
        let (bands, mut in_band) = (p.bands(), columns.div_ceil(width));
        if low.is_some() {
            let cost = of_type.widths[chosen].cost;
            match low_blocks((bands, in_band), (cost, narrow), sms) {
                0 => in_band += 1,
                first => {
                    (parameters.low_tiles, parameters.low_blocks) = (bands as u32, first as u32)
                }
            }
        }
        let mut tiles = 0;
        for (i, part) in p.parts.iter().enumerate() {
            let rows = &part.rows;
            parameters.part_out[i] = part.out;
            parameters.part_scales[i] = part.scales;
            parameters.part_row[i] = part.first as u32;
            parameters.part_rows[i] = rows.len() as u32;
            parameters.part_out_row[i] = rows.start as u32;
            parameters.part_first[i] = tiles;
            tiles += (rows.len() as u32).div_ceil(band_rows) * in_band as u32;
        }
        parameters.tiles = tiles + parameters.low_tiles;
        Ok(Some(Ready {
            of_type,
            chosen,
            sms: sms as u32,
            parameters,
            low,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product() -> Tiled {
        let of = |rows, columns| Rows {
            address: 4096,
            rows,
            columns,
        };
        Tiled {
            blocks: 132,
            dtype: DataType::BF16,
            output: DataType::BF16,
            scales: None,
            all: of(300, 64),
            own: of(100, 64),
            weight: of(24, 64),
            bias: None,
            activation: Activation::None,
            parts: vec![
                Part {
                    rows: 0..129,
                    first: 0,
                    out: 16,
                    scales: 0,
                    from: None,
                },
                Part {
                    rows: 129..129,
                    first: 129,
                    out: 16,
                    scales: 0,
                    from: Some(1),
                },
            ],
            runs: Vec::new(),
            buffers: Vec::new(),
        }
    }

    #[test]
    fn a_part_that_begins_a_band_has_all_of_it() {
        assert_eq!(product().bands(), 2);
    }
}
