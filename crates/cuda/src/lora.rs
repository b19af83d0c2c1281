//! Adapters of runs that have few rows each: two launches for many of them, going down and going up.
//!
//! A run is told in the launch's parameters, which a graph keeps: so nothing is copied to the device first, and a launch takes
//! [`MOST_LORA_RUNS`] of them. What is between the factors is left in f32, in as many parts as blocks summed it in.

use crate::{
    CudaDevice, Kernel, KernelSet, Missing, kernels::Blocks, lane::Lane, matrix::Matrix, types,
};
use brigade_device::{Buffer, DataType, Device, GemmShape, Lora, Result};
use brigade_kernels::{
    LORA_CHUNK, LORA_COLUMNS, LORA_DOWN_BYTES, LORA_FLOAT_THREADS, LORA_ROWS, LORA_THREADS,
    LORA_UP_BYTES, LORA_WIDTH, LoraParams, MOST_LORA_RUNS,
};
use std::{ops::Range, sync::Arc};

/// Most rows of a run that goes with others. Of more, a product keeps the GPU busy by itself, and the library multiplies it.
const FEW: usize = 256;

/// Least runs with adapters for which the two launches measured quicker than two of the library's for each: by a few rows with two runs, by
/// hundreds from three on.
const MANY: usize = 3;

/// Most rows, columns or inner indices in all, so that numbers of tiles stay in 32 bits.
const LONGEST: usize = 1 << 24;

/// Most tiles side by side for a block that goes up.
const SPAN: usize = 8;

/// Rows, and the caller's adapter for them.
pub(crate) type Given<'a> = (Range<usize>, Option<&'a Lora<'a>>);

/// Rows, and the adapter that changes them.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    rows: Range<usize>,
    adapter: Option<Adapter>,
}

#[derive(Clone, Debug)]
struct Adapter {
    a: Buffer,
    b: Buffer,
    scale: f32,
}

impl Run {
    /// Those of `runs` that go together, if they are many enough, and the others.
    pub(crate) fn short<'a>(
        runs: impl Iterator<Item = Given<'a>>,
        shape: &GemmShape,
    ) -> (Vec<Self>, Vec<Given<'a>>) {
        let (mut short, mut rest) = (Vec::new(), Vec::new());
        let runs: Vec<_> = runs.collect();
        for (rows, lora) in &runs {
            match Self::of(rows, *lora, shape) {
                Some(run) => short.push(run),
                None => rest.push((rows.clone(), *lora)),
            }
        }
        let many = short.iter().filter(|run| run.adapter.is_some()).count();
        if many < MANY {
            (Vec::new(), runs)
        } else {
            (short, rest)
        }
    }

    /// The run, if it is one of those that go with others: without an adapter too, whose rows may have to become zero.
    fn of(rows: &Range<usize>, lora: Option<&Lora<'_>>, shape: &GemmShape) -> Option<Self> {
        let width = lora.map_or(0, |lora| lora.a.shape().columns());
        let fits = rows.len() <= FEW
            && width <= LORA_WIDTH as usize
            && shape.m.max(shape.n).max(shape.k) <= LONGEST;
        fits.then(|| Self {
            rows: rows.clone(),
            adapter: lora.map(|lora| Adapter {
                a: lora.a.retain(),
                b: lora.b.retain(),
                scale: lora.scale,
            }),
        })
    }

    /// Whether tensor cores multiply the rows by the first factor.
    fn on_tensor_cores(&self, x: DataType) -> bool {
        let same = |adapter: &Adapter| adapter.a.dtype() == x;
        x != DataType::F32 && self.adapter.as_ref().is_none_or(same)
    }

    fn width(&self) -> usize {
        let width = |adapter: &Adapter| adapter.a.shape().columns();
        self.adapter.as_ref().map_or(0, width)
    }
}

/// For every type the kernels of both ways: those of 16 bits, and those that take any.
#[derive(Debug)]
pub(crate) struct LoraKernels {
    f16: [Blocks<LoraParams>; 2],
    bf16: [Blocks<LoraParams>; 2],
    f32: [Blocks<LoraParams>; 2],
}

impl LoraKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        let of = |name: &str, threads, bytes: [u32; 2]| -> Result<_, Missing> {
            let kernel = |way: &str| -> Result<Kernel<LoraParams>, Missing> {
                set.variant(format!("_{way}_{name}"))
            };
            Ok([
                Blocks::new(kernel("down")?, threads, bytes[0])?,
                Blocks::new(kernel("up")?, threads, bytes[1])?,
            ])
        };
        let bytes = [LORA_DOWN_BYTES, LORA_UP_BYTES];
        Ok(Self {
            f16: of("f16", LORA_THREADS, bytes)?,
            bf16: of("bf16", LORA_THREADS, bytes)?,
            f32: of("f32", LORA_FLOAT_THREADS, [0, 0])?,
        })
    }

    fn ways(&self, dtype: DataType) -> &[Blocks<LoraParams>; 2] {
        match dtype {
            DataType::F16 => &self.f16,
            DataType::BF16 => &self.bf16,
            _ => &self.f32,
        }
    }
}

impl CudaDevice {
    /// `scale * x A B` of every run, into its rows of `out`: added to sums in f32; or, where all types are one of 16 bits, in place of what
    /// was there, with `x A` rounded too, and zeros where there is no adapter.
    pub(crate) fn lora_runs(
        &self,
        lane: &Arc<Lane>,
        runs: &[Run],
        [x, out]: [&Matrix; 2],
        sm_cap: Option<u16>,
    ) -> Result<()> {
        let kernels = &self.opened.kernels.lora;
        let [_, up] = kernels.ways(out.dtype());
        let (same, other): (Vec<&Run>, Vec<&Run>) =
            (runs.iter()).partition(|run| run.on_tensor_cores(x.dtype()));
        for (dtype, runs) in [(x.dtype(), same), (DataType::F32, other)] {
            let [down, _] = kernels.ways(dtype);
            for runs in runs.chunks(MOST_LORA_RUNS) {
                self.launch_lora(lane, runs, [x, out], [down, up], sm_cap)?;
            }
        }
        Ok(())
    }

    /// The same of so many runs as two launches take. A block is on one multiprocessor, so as many blocks are on no more.
    fn launch_lora(
        &self,
        lane: &Arc<Lane>,
        runs: &[&Run],
        [x, out]: [&Matrix; 2],
        [down, up]: [&Blocks<LoraParams>; 2],
        sm_cap: Option<u16>,
    ) -> Result<()> {
        let sms = usize::from(sm_cap.unwrap_or(self.info().sms));
        let mut p = parameters(runs, x, out);
        go_down(&mut p, sms);
        let low = p.part_stride as usize * p.parts as usize;
        let low = self.scratch(lane, DataType::F32, &[low])?;
        p.low = low.address();
        let most = |way: &Blocks<LoraParams>| match sm_cap {
            Some(_) => sms,
            None => sms * way.per_sm as usize,
        };
        let launch = |way: &Blocks<LoraParams>, p: &LoraParams, factors: &[Option<&Buffer>]| {
            let mut buffers = vec![x.buffer(), out.buffer(), &low];
            buffers.extend(factors.iter().flatten());
            let blocks = (p.tiles as usize).min(most(way));
            // SAFETY: shapes were checked: rows, factors and result are as large as said, and `low` has all rows of all parts.
            unsafe { way.launch(lane, &buffers, blocks, *p) }
        };
        if p.tiles > 0 {
            let first = factors(runs, |adapter| &adapter.a);
            tell(&mut p, &first);
            launch(down, &p, &first)?;
        }
        let second = factors(runs, |adapter| &adapter.b);
        tell(&mut p, &second);
        go_up(&mut p, most(up));
        launch(up, &p, &second)
    }
}

/// What is known of runs before their tiles are counted.
fn parameters(runs: &[&Run], x: &Matrix, out: &Matrix) -> LoraParams {
    let stride = x.stride() as u64;
    let (x_row, x_inner) = if x.transposed() {
        (1, stride)
    } else {
        (stride, 1)
    };
    let starts = [x.address(), x_row * x.dtype().bytes() as u64];
    // All sizes are below 32 bits.
    let mut p = LoraParams {
        x: x.address(),
        out: out.address(),
        x_row,
        x_inner,
        inner: x.columns() as u32,
        columns: out.columns() as u32,
        runs: runs.len() as u32,
        x_type: types::float_code(x.dtype()),
        x_aligned: u32::from(x_inner == 1 && starts.iter().all(|start| start.is_multiple_of(16))),
        ..LoraParams::default()
    };
    let mut low_row = 0;
    for (i, run) in runs.iter().enumerate() {
        let rows = run.rows.len() as u32;
        p.row[i] = run.rows.start as u32;
        p.rows[i] = rows;
        p.width[i] = run.width() as u32;
        p.scale[i] = run.adapter.as_ref().map_or(0.0, |adapter| adapter.scale);
        if p.width[i] > 0 {
            p.low_row[i] = low_row;
            low_row += rows;
        }
    }
    let widest = p.width.iter().max().copied().unwrap_or(0);
    p.low_stride = widest.next_multiple_of(4);
    p.part_stride = u64::from(low_row) * u64::from(p.low_stride);
    p
}

/// Of each run, one of its factors.
fn factors<'a>(runs: &[&'a Run], of: fn(&Adapter) -> &Buffer) -> Vec<Option<&'a Buffer>> {
    runs.iter()
        .map(|run| run.adapter.as_ref().map(of))
        .collect()
}

/// Where each run's is.
fn tell(p: &mut LoraParams, factors: &[Option<&Buffer>]) {
    for (i, factor) in factors.iter().enumerate() {
        p.weight[i] = factor.map_or(0, Buffer::address);
        p.weight_type[i] = factor.map_or(0, |factor| types::float_code(factor.dtype()));
    }
}

/// So many shares for each tile of rows of a run of this width.
fn share(p: &mut LoraParams, tiles: impl Fn(u32) -> u32) {
    p.tiles = 0;
    for i in 0..p.runs as usize {
        p.first[i] = p.tiles;
        p.tiles += p.rows[i].div_ceil(LORA_ROWS) * tiles(p.width[i]);
    }
}

/// A share for each tile; or, where multiprocessors would be left without one, for each of its chunks.
fn go_down(p: &mut LoraParams, sms: usize) {
    p.parts = 1;
    share(p, |width| width.div_ceil(LORA_COLUMNS));
    if (p.tiles as usize) < sms {
        let parts = p.inner.div_ceil(LORA_CHUNK).max(1);
        p.parts = parts;
        share(p, |width| width.div_ceil(LORA_COLUMNS) * parts);
    }
}

/// Shares of as many tiles as leaves one for each of so many blocks.
fn go_up(p: &mut LoraParams, blocks: usize) {
    let across = p.columns.div_ceil(LORA_COLUMNS);
    share(p, |_| across);
    let span = (p.tiles as usize / blocks.max(1)).clamp(1, SPAN) as u32;
    p.span = span;
    share(p, |_| across.div_ceil(span));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn runs(of: &[(u32, u32)], [inner, columns]: [u32; 2]) -> LoraParams {
        let mut p = LoraParams {
            inner,
            columns,
            runs: of.len() as u32,
            ..LoraParams::default()
        };
        for (i, &(rows, width)) in of.iter().enumerate() {
            (p.rows[i], p.width[i]) = (rows, width);
        }
        p
    }

    /// How often every run has a share, by its number in the run, as the kernel finds them.
    fn found(p: &LoraParams) -> HashMap<(usize, u32), usize> {
        let mut all = HashMap::new();
        for tile in 0..p.tiles {
            let mut run = 0;
            for step in [64, 32, 16, 8, 4, 2, 1] {
                if run + step < p.runs as usize && p.first[run + step] <= tile {
                    run += step;
                }
            }
            *all.entry((run, tile - p.first[run])).or_default() += 1;
        }
        all
    }

    fn expect(p: &LoraParams, shares: impl Fn(u32, u32) -> u32) {
        let all = found(p);
        let mut count = 0;
        for run in 0..p.runs as usize {
            for share in 0..shares(p.rows[run], p.width[run]) {
                assert_eq!(all.get(&(run, share)), Some(&1), "run {run}, share {share}");
                count += 1;
            }
        }
        assert_eq!(all.len(), count);
    }

    #[test]
    fn every_tile_is_somebodys_once() {
        let mut widths = vec![(0, 16), (1, 0), (33, 65), (512, 256), (7, 0), (0, 0)];
        widths.extend((0..90).map(|i| (i % 5, 1 + i % 64)));
        assert_eq!(widths.len(), MOST_LORA_RUNS);
        for count in [1, 2, 3, 6, 64, 65, 96] {
            let mut p = runs(&widths[..count], [3000, 200]);
            go_down(&mut p, 0);
            assert_eq!(p.parts, 1);
            expect(&p, |rows, width| rows.div_ceil(32) * width.div_ceil(64));
            go_down(&mut p, usize::MAX);
            assert_eq!(p.parts, 3);
            expect(&p, |rows, width| rows.div_ceil(32) * width.div_ceil(64) * 3);
            for (blocks, span) in [(usize::MAX, 1), (0, 8)] {
                go_up(&mut p, blocks);
                let full = p.span;
                assert!(full == span || p.rows[..count].iter().all(|&rows| rows < 65));
                expect(&p, |rows, _| rows.div_ceil(32) * 4u32.div_ceil(full));
            }
        }
    }

    #[test]
    fn few_tiles_are_cut_by_the_inner_dimension() {
        let mut p = runs(&[(2, 16); 32], [8192, 8192]);
        go_down(&mut p, 132);
        assert_eq!((p.parts, p.tiles), (8, 256));
        go_up(&mut p, 132 * 4);
        assert_eq!((p.span, p.tiles), (7, 32 * 19));
        let mut p = runs(&[(512, 16); 32], [8192, 64]);
        go_down(&mut p, 132);
        assert_eq!((p.parts, p.tiles), (1, 512));
        go_up(&mut p, 132 * 4);
        assert_eq!((p.span, p.tiles), (1, 512));
    }
}
