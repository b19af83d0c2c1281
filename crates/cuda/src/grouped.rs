//! Products in groups: one launch, whose blocks find their groups by what lies in the device's memory.

use crate::{CudaDevice, Kernel, KernelSet, Missing, kernels::Blocks, memory::check_reach, types};
use brigade_device::{
    Buffer, DataType, Device, GroupedGemmParams, GroupedShape, Operand, Output, QScheme, Result,
    Stream,
};
use brigade_kernels::{
    GROUPED_LARGE, GROUPED_LARGE_BYTES, GROUPED_LARGE_THREADS, GROUPED_SMALL_BYTES,
    GROUPED_SMALL_COLUMNS, GROUPED_SMALL_ROWS, GROUPED_SMALL_THREADS, GroupedParams,
};
use std::sync::Arc;

/// A kernel, and the size of its tiles.
#[derive(Debug)]
struct Tiled {
    blocks: Blocks<GroupedParams>,
    rows: usize,
    columns: usize,
}

impl Tiled {
    fn new(
        kernel: Kernel<GroupedParams>,
        (rows, columns): (u32, u32),
        threads: u32,
        shared_bytes: u32,
    ) -> Result<Self, Missing> {
        Ok(Self {
            blocks: Blocks::new(kernel, threads, shared_bytes)?,
            rows: rows as usize,
            columns: columns as usize,
        })
    }

    /// As many tiles as there are at most, whatever the groups' rows are.
    fn most_tiles(&self, shape: &GroupedShape) -> usize {
        let down = shape.rows / self.rows + shape.groups.min(shape.rows);
        down.saturating_mul(shape.n.div_ceil(self.columns))
    }
}

/// For every type the kernel with large tiles, and that with small ones where there are two.
#[derive(Debug)]
pub(crate) struct GroupedKernels {
    f16: [Tiled; 2],
    bf16: [Tiled; 2],
    f32: Tiled,
}

impl GroupedKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        let of = |name: &str| -> Result<[Tiled; 2], Missing> {
            Ok([
                Tiled::new(
                    set.variant(format!("_{name}_large"))?,
                    (GROUPED_LARGE, GROUPED_LARGE),
                    GROUPED_LARGE_THREADS,
                    GROUPED_LARGE_BYTES,
                )?,
                Tiled::new(
                    set.variant(format!("_{name}_small"))?,
                    (GROUPED_SMALL_ROWS, GROUPED_SMALL_COLUMNS),
                    GROUPED_SMALL_THREADS,
                    GROUPED_SMALL_BYTES,
                )?,
            ])
        };
        Ok(Self {
            f16: of("f16")?,
            bf16: of("bf16")?,
            f32: Tiled::new(set.variant("_f32")?, (64, 64), 256, 0)?,
        })
    }

    /// Large tiles read weights least often, small ones are more: taken where the others would leave multiprocessors idle. Bits are the
    /// same.
    fn choose(&self, dtype: DataType, shape: &GroupedShape, sms: usize) -> &Tiled {
        let [large, small] = match dtype {
            DataType::F16 => &self.f16,
            DataType::BF16 => &self.bf16,
            _ => return &self.f32,
        };
        // Groups that may have rows, each of which has one tile at least for each of the columns.
        if large.most_tiles(shape) < 2 * sms {
            small
        } else {
            large
        }
    }
}

impl CudaDevice {
    pub(crate) fn run_grouped_gemm(
        &self,
        on: &Stream,
        p: &GroupedGemmParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let shape = p.check(&output)?;
        let lane = self.lane(on)?;
        let weights = p.weights.retain();
        let (offsets, counts) = p.groups.views();
        let [offsets, counts, which] =
            [offsets, counts, p.which].map(|view| view.map(|v| v.retain()));
        let mut inputs = vec![
            ("x.memory", p.x.kernel().retain()),
            ("weights.memory", weights.clone()),
        ];
        if let Operand::Quantized(q) = &p.x {
            crate::linear::no_zero_points(q)?;
            inputs.push(("x.memory", q.scales().retain()));
        }
        for (field, list) in [
            ("groups.offsets", &offsets),
            ("groups.counts", &counts),
            ("which", &which),
        ] {
            inputs.extend(list.clone().map(|list| (field, list)));
        }
        for (field, buffer) in &inputs {
            check_reach(&self.card, field, buffer)?;
        }
        let (d, new) = self.place(lane, output, &shape.d())?;
        if d.shape().is_empty() || shape.groups == 0 {
            return Ok(new.then_some(d));
        }
        let mut x = self.floats(lane, &p.x)?;
        if p.x.scheme() != QScheme::None {
            x = self.as_type(lane, &x, weights.dtype())?;
        }
        let address = |list: &Option<Buffer>| list.as_ref().map_or(0, Buffer::address);
        let row_bytes = (shape.k * weights.dtype().bytes()) as u64;
        let starts = [x.address(), weights.address(), row_bytes];
        // All sizes were checked to fit in 31 bits.
        let parameters = GroupedParams {
            out: d.address(),
            x: x.address(),
            weights: weights.address(),
            offsets: address(&offsets),
            counts: address(&counts),
            which: address(&which),
            rows: shape.rows as u32,
            groups: shape.groups as u32,
            places: shape.places() as u32,
            weight_count: shape.weights as u32,
            columns: shape.n as u32,
            inner: shape.k as u32,
            out_type: types::float_code(d.dtype()),
            aligned: u32::from(starts.iter().all(|start| start.is_multiple_of(16))),
        };
        let sms = usize::from(self.info().sms);
        let tiled = (self.opened.kernels.grouped).choose(weights.dtype(), &shape, sms);
        let most = sms * tiled.blocks.per_sm as usize;
        let blocks = tiled.most_tiles(&shape).min(most);
        let mut buffers = vec![&d, &x];
        buffers.extend(inputs.iter().map(|(_, buffer)| buffer));
        // SAFETY: the shapes were checked: so many rows and weights lie there, of this type, and a number for each group; what the
        // numbers reach beyond the rows is cut off.
        unsafe { tiled.blocks.launch(lane, &buffers, blocks, parameters) }?;
        Ok(new.then_some(d))
    }
}
