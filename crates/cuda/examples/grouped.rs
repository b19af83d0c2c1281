//! How fast products in groups run on the first GPU, beside a loop of products over the same groups:
//! `cargo run --release -p brigade-cuda --example grouped [-- EXPERTS,ROWS,K,N ..]`, with so many rows for each expert.
#![allow(clippy::print_stdout)]

use brigade_cuda::CudaDevice;
use brigade_device::{
    Allocate, Buffer, DataType, DeviceExt, GemmParams, GroupedGemmParams, Groups, Linear,
    MemoryType, Output, Queues, Replay, Result, Stream,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const CALLS: u32 = 20;
const AMPLE: Duration = Duration::from_secs(60);

struct Bench {
    device: Arc<CudaDevice>,
    on: Stream,
}

impl Bench {
    /// Small numbers that differ, in bf16.
    fn numbers(&self, dims: &[usize]) -> Result<Buffer> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Of magnitude 1 to 2, with either sign.
            (state >> 16) as u16 & 0x807F | 0x3F80
        };
        let values: Vec<u16> = (0..dims.iter().product()).map(|_| next()).collect();
        let memory = MemoryType::Device;
        let mut out = self
            .device
            .allocate(&self.on, memory, DataType::BF16, dims)?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.device.write(&self.on, out.view_mut(), &bytes)?;
        Ok(out)
    }

    /// Microseconds of what was captured.
    fn time(&self, graph: &dyn Replay) -> Result<f64> {
        for _ in 0..3 {
            graph.launch(&self.on)?;
        }
        self.on.sync(AMPLE)?;
        let start = Instant::now();
        for _ in 0..CALLS {
            graph.launch(&self.on)?;
        }
        self.on.sync(AMPLE)?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS))
    }

    fn case(&self, [experts, rows, k, n]: [usize; 4]) -> Result<()> {
        let (device, on) = (&self.device, &self.on);
        let x = self.numbers(&[experts * rows, k])?;
        let weights = self.numbers(&[experts, n, k])?;
        let mut d = self.numbers(&[experts * rows, n])?;
        let firsts: Vec<i32> = (0..=experts).map(|e| (e * rows) as i32).collect();
        let offsets = device.upload(on, &firsts, &[experts + 1])?;
        let groups = Groups::Behind {
            offsets: offsets.view(),
            counts: None,
        };
        let params = GroupedGemmParams::new(&x, weights.view(), groups);
        let together = device.capture(on, &mut || {
            let output = Output::Into(d.view_mut());
            device.grouped_gemm(on, &params, output).map(drop)
        })?;
        let apart = device.capture(on, &mut || {
            for expert in 0..experts {
                let first = expert * rows;
                let (x, w) = (x.slice(first, rows)?, weights.index(expert)?);
                let product = GemmParams {
                    transpose_b: true,
                    ..GemmParams::new(&x, &w)
                };
                let mut to = d.view_mut();
                let output = Output::Into(to.rows(first..first + rows)?);
                device.gemm(on, &product, output)?;
            }
            Ok(())
        })?;
        let (us, loop_us) = (self.time(&*together)?, self.time(&*apart)?);
        let tera = 2.0 * (experts * rows * n * k) as f64 / us / 1e6;
        let gb = (experts * n * k * 2) as f64 / us / 1e3;
        println!(
            "{experts:>7} {rows:>6} {k:>6} {n:>6} {us:>10.1} {loop_us:>10.1} {tera:>9.1} {gb:>9.0}"
        );
        Ok(())
    }
}

fn main() -> Result<()> {
    let device = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(missing) => {
            println!("{missing}");
            return Ok(());
        }
    };
    let on = device.stream(0)?;
    println!("{device:?}");
    println!("experts   rows      K      N         us    loop us   TFLOP/s  GB/s of weights");
    let bench = Bench { device, on };
    let named: Vec<[usize; 4]> = std::env::args()
        .skip(1)
        .filter_map(|text| {
            let sizes: Vec<usize> = text.split(',').filter_map(|n| n.parse().ok()).collect();
            sizes.try_into().ok()
        })
        .collect();
    // What a rank of eight has of Qwen3-30B-A3B, Mixtral-8x7B and DeepSeek-V3, gate and up and then down: decoding, and a prompt.
    let mut usual = Vec::new();
    for [experts, k, inner] in [[16, 2048, 768], [1, 4096, 14336], [32, 7168, 2048]] {
        for rows in [1, 8, 64, 512] {
            usual.push([experts, rows, k, 2 * inner]);
            usual.push([experts, rows, inner, k]);
        }
    }
    for sizes in if named.is_empty() { usual } else { named } {
        bench.case(sizes)?;
    }
    Ok(())
}
