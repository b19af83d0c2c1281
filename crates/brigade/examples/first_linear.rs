//! A feed-forward block over several ranks: a column-parallel linear that gathers its rows, and a row-parallel one that
//! scatters its sums. Checked against the same block on one device.
//!
//! `cargo run -p brigade --example first_linear`, with `-- 4` for four ranks.
#![allow(clippy::print_stdout)]

use brigade::group::ThreadGroup;
use brigade::plan::rows;
use brigade::{
    Activation, AllGatherLoraLinearParams, Bootstrap, Chunk, CommConfig, DataType, DeviceExt,
    Error, GemmParams, LoraLinearReduceScatterParams, MemoryType, OpenConfig, Output, ParallelMode,
    Result,
};
use std::ops::Range;

const ROWS: usize = 300;
const HIDDEN: usize = 256;
const INNER: usize = 1000;

/// The whole block, as a checkpoint would hold it.
struct Block {
    /// `[ROWS, HIDDEN]`
    x: Vec<f32>,
    /// `[HIDDEN, INNER]`
    up: Vec<f32>,
    /// `[INNER, HIDDEN]`
    down: Vec<f32>,
}

impl Block {
    fn new() -> Self {
        Self {
            x: noise(1, ROWS * HIDDEN),
            up: noise(2, HIDDEN * INNER),
            down: noise(3, INNER * HIDDEN),
        }
    }
}

/// Numbers between -0.5 and 0.5 that look random.
fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

/// Some columns of a matrix that is `width` wide.
fn columns(matrix: &[f32], width: usize, keep: Range<usize>) -> Vec<f32> {
    matrix
        .chunks(width)
        .flat_map(|row| &row[keep.clone()])
        .copied()
        .collect()
}

/// One rank's part of the work: its rows of the result.
fn one_rank(boot: &ThreadGroup, block: &Block) -> Result<Vec<f32>> {
    let (rank, size) = (boot.rank(), boot.size());
    let device = brigade::open(&OpenConfig::default())?;
    let on = device.stream(0)?;
    let config =
        CommConfig::new(ParallelMode::FfnTp).for_linears(ROWS, HIDDEN, DataType::F32, size);
    let comm = device.clone().join(boot, &config)?;

    // Rows of the activations, and columns of the inner layer, are shared out as evenly as can be.
    let rows_per_rank = rows::split(ROWS, size);
    let my_rows = rows::piece(ROWS, size, rank);
    let mine = rows::piece(INNER, size, rank);
    let x = &block.x[my_rows.start * HIDDEN..my_rows.end * HIDDEN];
    let x = device.upload(&on, x, &[my_rows.len(), HIDDEN])?;
    let up = columns(&block.up, INNER, mine.clone());
    let up = device.upload(&on, &up, &[HIDDEN, mine.len()])?;
    let down = &block.down[mine.start * HIDDEN..mine.end * HIDDEN];
    let down = device.upload(&on, down, &[mine.len(), HIDDEN])?;
    let dtype = DataType::F32;
    let mut inner = device.allocate(&on, MemoryType::Device, dtype, &[ROWS, mine.len()])?;
    let mut out = device.allocate(&on, MemoryType::Device, dtype, &[my_rows.len(), HIDDEN])?;

    let mut lease = comm.lease(&on)?;
    // All rows meet my columns. Ranks may have different numbers of columns, so the call names their sum.
    let gathered = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
        total_n: Some(INNER),
        activation: Activation::Silu,
        output: Output::Into(inner.view_mut()),
        ..AllGatherLoraLinearParams::new(Chunk::Copy((&x).into()), &rows_per_rank, &up)
    })?;
    let gather_plan = gathered.plan;
    // My columns meet my rows of the second weight; the sums over all ranks go to whoever owns the row.
    let reduced = lease.lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
        total_k: Some(INNER),
        output: Output::Into(out.view_mut()),
        ..LoraLinearReduceScatterParams::new(&inner, &rows_per_rank, &down)
    })?;
    println!(
        "rank {rank}: {} rows, {} columns; gather-linear by {gather_plan}, its twin by {}",
        my_rows.len(),
        mine.len(),
        reduced.plan
    );
    device.download(&on, out.view())
}

/// The same block on one device, with no group.
fn alone(block: &Block) -> Result<Vec<f32>> {
    let device = brigade::open(&OpenConfig::default())?;
    let on = device.stream(0)?;
    let x = device.upload(&on, &block.x, &[ROWS, HIDDEN])?;
    let up = device.upload(&on, &block.up, &[HIDDEN, INNER])?;
    let down = device.upload(&on, &block.down, &[INNER, HIDDEN])?;
    let mut inner = device.allocate(&on, MemoryType::Device, DataType::F32, &[ROWS, INNER])?;
    let first = GemmParams {
        activation: Activation::Silu,
        ..GemmParams::new(&x, &up)
    };
    device.gemm(&on, &first, Output::Into(inner.view_mut()))?;
    let mut out = device.allocate(&on, MemoryType::Device, DataType::F32, &[ROWS, HIDDEN])?;
    let second = GemmParams::new(&inner, &down);
    device.gemm(&on, &second, Output::Into(out.view_mut()))?;
    device.download(&on, out.view())
}

/// Size of the difference against the size of what was wanted (Frobenius norms).
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(
        &mut got
            .iter()
            .zip(want)
            .map(|(g, w)| f64::from(*g) - f64::from(*w)),
    );
    difference / norm(&mut want.iter().map(|w| f64::from(*w)))
}

fn main() -> Result<()> {
    let size = match std::env::args().nth(1) {
        Some(n) => n
            .parse()
            .map_err(|_| Error::invalid("ranks", n, "a number"))?,
        None => 3,
    };
    let block = &Block::new();
    let parts = std::thread::scope(|s| {
        let ranks: Vec<_> = brigade::group::threads(size)
            .into_iter()
            .map(|boot| s.spawn(move || one_rank(&boot, block)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| {
                rank.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    // Ranks own consecutive rows, so their results one after the other are the whole result.
    let error = relative_error(&parts.concat(), &alone(block)?);
    println!("relative error against one device: {error:.1e}");
    assert!(error < 1e-5, "{error}");
    Ok(())
}
