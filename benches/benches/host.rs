//! Criterion benchmarks of the host device: products against their floors, and what small collectives cost.

#![allow(
    clippy::expect_used,
    missing_docs,
    reason = "a benchmark has nobody to give its errors to"
)]

use anyhow::Result;
use brigade::{
    AllGatherParams, AllReduceParams, CommConfig, DataType, DeviceExt, ParallelMode, ReduceOp,
};
use brigade_benches::{Product, Rank, Shape, on_ranks};
use criterion::{Criterion, criterion_group, criterion_main};
use std::time::{Duration, Instant};

const SHAPES: [Shape; 4] = [
    Shape {
        m: 1,
        k: 576,
        n: 1536,
    },
    Shape {
        m: 34,
        k: 576,
        n: 1536,
    },
    Shape {
        m: 128,
        k: 1024,
        n: 1024,
    },
    Shape {
        m: 512,
        k: 1024,
        n: 1024,
    },
];

fn gemm(c: &mut Criterion) {
    for shape in SHAPES {
        let mut group = c.benchmark_group(format!("gemm {shape}"));
        for dtype in [DataType::F32, DataType::F16, DataType::BF16] {
            let mut product = Product::new(shape, dtype).expect("a product");
            group.bench_function(format!("{dtype}"), |b| {
                b.iter(|| product.run().expect("a product"));
            });
            group.bench_function(format!("{dtype} floor"), |b| {
                b.iter(|| product.floor().expect("a floor"));
            });
        }
    }
}

/// A call that can be made again and again.
type Again<'r> = Box<dyn FnMut() -> Result<()> + 'r>;

/// How long so many calls take on the slower of two ranks.
fn two_ranks(calls: u64, prepare: impl Fn(&Rank) -> Result<Again<'_>> + Sync) -> Duration {
    let timed = on_ranks(2, &CommConfig::new(ParallelMode::Tp), |rank| {
        let mut call = prepare(rank)?;
        rank.meet()?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        Ok(start.elapsed())
    });
    timed.expect("two ranks").into_iter().max().expect("a time")
}

fn all_reduce<'r>(rank: &'r Rank, values: &[f32]) -> Result<Again<'r>> {
    let mut data = rank.device.upload(&rank.on, values, &[values.len()])?;
    Ok(Box::new(move || {
        rank.comm.lease(&rank.on)?.all_reduce(AllReduceParams {
            data: data.view_mut(),
            from: None,
            // Not a sum, which would grow from call to call.
            op: ReduceOp::Max,
            choice: None,
        })?;
        Ok(())
    }))
}

fn all_gather<'r>(rank: &'r Rank, values: &[f32]) -> Result<Again<'r>> {
    let own = rank.device.upload(&rank.on, values, &[1, values.len()])?;
    let mut all = rank
        .device
        .upload(&rank.on, &values.repeat(2), &[2, values.len()])?;
    Ok(Box::new(move || {
        rank.comm.lease(&rank.on)?.all_gather(AllGatherParams {
            from: own.view(),
            rows_per_rank: &[1, 1],
            to: all.view_mut(),
        })?;
        Ok(())
    }))
}

fn collectives(c: &mut Criterion) {
    let mut group = c.benchmark_group("2 ranks");
    for bytes in [64, 2304, 64 << 10, 1 << 20] {
        let values = vec![1f32; bytes / 4];
        group.bench_function(format!("all_reduce {bytes} bytes"), |b| {
            b.iter_custom(|calls| two_ranks(calls, |rank| all_reduce(rank, &values)));
        });
        group.bench_function(format!("all_gather {bytes} bytes"), |b| {
            b.iter_custom(|calls| two_ranks(calls, |rank| all_gather(rank, &values)));
        });
    }
}

criterion_group! {
    name = host;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = gemm, collectives
}
criterion_main!(host);
