//! How fast linears run on the first GPU: `cargo run --release -p brigade-cuda --example products [-- M,K,N ..]`.
#![allow(clippy::print_stdout)]

use brigade_cuda::CudaDevice;
use brigade_device::{
    Activation, Allocate, Buffer, DataType, DeviceExt, GemmParams, Linear, Lora, LoraLinearParams,
    LoraRun, MemoryType, Operand, Output, QScheme, Queues, Result, Stream,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const CALLS: u32 = 50;
const AMPLE: Duration = Duration::from_secs(60);

struct Bench {
    device: Arc<CudaDevice>,
    on: Stream,
}

impl Bench {
    /// A matrix of small numbers that differ.
    fn matrix(&self, dtype: DataType, rows: usize, columns: usize) -> Result<Buffer> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let values: Vec<f32> = (0..rows * columns).map(|_| next()).collect();
        let dims = [rows, columns];
        let wide = self.device.upload(&self.on, &values, &dims)?;
        let mut out = self
            .device
            .allocate(&self.on, MemoryType::Device, dtype, &dims)?;
        self.device.convert(&self.on, out.view_mut(), wide.view())?;
        Ok(out)
    }

    /// Microseconds of a call on the GPU, and those that it keeps the calling thread.
    fn time(&self, mut call: impl FnMut() -> Result<()>) -> Result<(f64, f64)> {
        for _ in 0..5 {
            call()?;
        }
        self.on.sync(AMPLE)?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        let enqueued = start.elapsed();
        self.on.sync(AMPLE)?;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(CALLS);
        Ok((each(start.elapsed()), each(enqueued)))
    }

    fn linear(&self, name: &str, dims: [usize; 3], p: LoraLinearParams<'_>) -> Result<()> {
        self.linear_to(DataType::BF16, name, dims, p)
    }

    fn linear_to(
        &self,
        output: DataType,
        name: &str,
        dims: [usize; 3],
        p: LoraLinearParams<'_>,
    ) -> Result<()> {
        let [m, k, n] = dims;
        let dims = [m, n];
        let mut d = self
            .device
            .allocate(&self.on, MemoryType::Device, output, &dims)?;
        let (us, host_us) = self.time(|| {
            let output = Output::Into(d.view_mut());
            self.device.lora_linear(&self.on, &p, output).map(drop)
        })?;
        let tera = 2.0 * (m * k * n) as f64 / us / 1e6;
        println!("{m:>6} {k:>6} {n:>6}  {name:<14} {us:>9.1} {host_us:>8.1} {tera:>9.1}");
        Ok(())
    }

    fn all(&self, [m, k, n]: [usize; 3]) -> Result<()> {
        let dims = [m, k, n];
        let (x, w) = (
            self.matrix(DataType::BF16, m, k)?,
            self.matrix(DataType::BF16, n, k)?,
        );
        let row = self.matrix(DataType::BF16, 1, n)?;
        let plain = by_rows(Operand::from(&x), Operand::from(&w));
        self.linear("bf16", dims, base(plain))?;
        self.linear(
            "bf16 + row",
            dims,
            base(GemmParams {
                c: Some(row.view()),
                ..plain
            }),
        )?;
        let activation = Activation::Silu;
        self.linear(
            "bf16, silu",
            dims,
            base(GemmParams {
                activation,
                ..plain
            }),
        )?;
        let (a, b) = (
            self.matrix(DataType::BF16, k, 16)?,
            self.matrix(DataType::BF16, 16, n)?,
        );
        let adapter = Some(Lora {
            a: a.view(),
            b: b.view(),
            scale: 1.0,
        });
        let runs = [LoraRun { rows: m, adapter }];
        self.linear(
            "bf16 + lora 16",
            dims,
            LoraLinearParams {
                gemm: plain,
                runs: &runs,
            },
        )?;
        for (name, scheme) in [
            ("int8", QScheme::Int8PerToken),
            ("fp8", QScheme::Fp8PerTensor),
        ] {
            let quantize = |v: &Buffer| self.device.quantize(&self.on, v.view(), scheme);
            let (x, w) = (quantize(&x)?, quantize(&w)?);
            let gemm = by_rows(Operand::Quantized(x.view()), Operand::Quantized(w.view()));
            self.linear(name, dims, base(gemm))?;
        }
        self.linear_to(DataType::F32, "bf16 to f32", dims, base(plain))?;
        let sums = self.matrix(DataType::F32, m, n)?;
        let mut d = self
            .device
            .allocate(&self.on, MemoryType::Device, DataType::BF16, &[m, n])?;
        let (us, _) = self.time(|| {
            let output = Output::Into(d.view_mut());
            let done =
                self.device
                    .bias_activation(&self.on, sums.view(), None, activation, output)?;
            drop(done);
            Ok(())
        })?;
        println!("{m:>6} {:>6} {n:>6}  {:<14} {us:>9.1}", "", "silu of f32");
        let (us, _) = self.time(|| {
            let q = self
                .device
                .quantize(&self.on, x.view(), QScheme::Int8PerToken)?;
            drop(q);
            Ok(())
        })?;
        println!("{m:>6} {k:>6} {:>6}  {:<14} {us:>9.1}", "", "quantize int8");
        Ok(())
    }
}

/// No adapters.
fn base(gemm: GemmParams<'_>) -> LoraLinearParams<'_> {
    LoraLinearParams { gemm, runs: &[] }
}

/// x by a weight that is stored as `[N, K]`.
fn by_rows<'a>(x: Operand<'a>, w: Operand<'a>) -> GemmParams<'a> {
    GemmParams {
        transpose_b: true,
        ..GemmParams::new(x, w)
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
    println!("     M      K      N  linear                us  host us  TFLOP/s");
    let bench = Bench { device, on };
    let named: Vec<[usize; 3]> = std::env::args()
        .skip(1)
        .filter_map(|text| {
            let sizes: Vec<usize> = text.split(',').filter_map(|n| n.parse().ok()).collect();
            sizes.try_into().ok()
        })
        .collect();
    let usual = vec![
        [16, 8192, 7168],
        [512, 8192, 6144],
        [2048, 8192, 7168],
        [8192, 8192, 7168],
    ];
    for dims in if named.is_empty() { usual } else { named } {
        bench.all(dims)?;
    }
    Ok(())
}
