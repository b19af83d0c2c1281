//! Matrices, and products of them on one rank.

use anyhow::{Result, ensure};
use brigade::{
    Buffer, DataType, Device, DeviceChoice, DeviceExt, GemmParams, MemoryType, OpenConfig, Output,
    Stream,
};
use std::{fmt, sync::Arc};

/// `[m, k]` times `[n, k]` transposed, as the linears of models are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub m: usize,
    /// Inner dimension.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.k, self.n)
    }
}

/// The host device with one thread.
pub struct Host {
    /// The device.
    pub device: Arc<dyn Device>,
    /// A stream of it.
    pub on: Stream,
}

impl Host {
    /// Opens it.
    ///
    /// # Errors
    /// As [`brigade::open`].
    pub fn open() -> Result<Self> {
        let device = brigade::open(&OpenConfig {
            device: DeviceChoice::Host,
            ..OpenConfig::default()
        })?;
        let on = device.stream(0)?;
        Ok(Self { device, on })
    }

    /// Small numbers that are the same for a seed, in any type as near as it comes to them.
    ///
    /// # Errors
    /// The device's.
    pub fn matrix(&self, dtype: DataType, shape: [usize; 2], seed: u64) -> Result<Buffer> {
        matrix(&*self.device, &self.on, dtype, shape, seed)
    }

    fn empty(&self, dtype: DataType, shape: [usize; 2]) -> Result<Buffer> {
        let (device, on) = (&self.device, &self.on);
        Ok(device.allocate(on, MemoryType::Device, dtype, &shape)?)
    }
}

/// As [`Host::matrix`], on any device.
///
/// # Errors
/// The device's.
pub fn matrix(
    device: &dyn Device,
    on: &Stream,
    dtype: DataType,
    shape: [usize; 2],
    seed: u64,
) -> Result<Buffer> {
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| value(seed, i)).collect();
    let values = device.upload(on, &values, &shape)?;
    if dtype == DataType::F32 {
        return Ok(values);
    }
    let mut converted = device.allocate(on, MemoryType::Device, dtype, &shape)?;
    device.convert(on, converted.view_mut(), values.view())?;
    Ok(converted)
}

/// Number `i` of a seed: a multiple of 1/64 in -1..1, which f16 and bf16 have too, so that all types multiply the same.
pub fn value(seed: u64, i: usize) -> f32 {
    // SplitMix64 (Steele, Lea and Flood 2014).
    let mut z = (seed << 40)
        .wrapping_add(i as u64)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z >> 57) as f32 - 64.0) / 64.0
}

/// Element `[row, column]` of the product of two seeds' matrices.
pub fn element(shape: Shape, seeds: [u64; 2], row: usize, column: usize) -> f64 {
    (0..shape.k)
        .map(|i| {
            let x = value(seeds[0], row * shape.k + i);
            f64::from(x) * f64::from(value(seeds[1], column * shape.k + i))
        })
        .sum()
}

/// A product in some type, and the least that it can take on this device.
///
/// The host multiplies in f32. The floor of another type is the product in f32, and both factors and the result converted
/// once, by the device's own conversion.
pub struct Product {
    host: Host,
    shape: Shape,
    dtype: DataType,
    /// x, the weight and the result: in the type, and in f32.
    typed: [Buffer; 3],
    wide: [Buffer; 3],
}

impl Product {
    /// Makes the matrices, and checks that both ways give the product.
    ///
    /// # Errors
    /// The device's, or a wrong product.
    pub fn new(shape: Shape, dtype: DataType) -> Result<Self> {
        let host = Host::open()?;
        let Shape { m, k, n } = shape;
        let three = |dtype| -> Result<[Buffer; 3]> {
            let mut d = host.empty(dtype, [m, n])?;
            host.device.fill(&host.on, d.view_mut(), 0xFF)?;
            Ok([
                host.matrix(dtype, [m, k], 1)?,
                host.matrix(dtype, [n, k], 2)?,
                d,
            ])
        };
        let (typed, wide) = (three(dtype)?, three(DataType::F32)?);
        let mut product = Self {
            host,
            shape,
            dtype,
            typed,
            wide,
        };
        product.run()?;
        product.check()?;
        product.floor()?;
        product.check()?;
        Ok(product)
    }

    /// The product in the type.
    ///
    /// # Errors
    /// The device's.
    pub fn run(&mut self) -> Result<()> {
        let [x, w, d] = &mut self.typed;
        multiply(&self.host, [x, w], d)
    }

    /// The floor; in f32 the product itself.
    ///
    /// # Errors
    /// The device's.
    pub fn floor(&mut self) -> Result<()> {
        if self.dtype == DataType::F32 {
            return self.run();
        }
        let (device, on) = (&self.host.device, &self.host.on);
        let ([x, w, d], [wide_x, wide_w, wide_d]) = (&mut self.typed, &mut self.wide);
        device.convert(on, wide_x.view_mut(), x.view())?;
        device.convert(on, wide_w.view_mut(), w.view())?;
        multiply(&self.host, [wide_x, wide_w], wide_d)?;
        device.convert(on, d.view_mut(), wide_d.view())?;
        Ok(())
    }

    /// Some elements against sums in f64; spoils the result afterwards.
    fn check(&mut self) -> Result<()> {
        let (device, on, shape) = (&self.host.device, &self.host.on, self.shape);
        let mut wide = self.host.empty(DataType::F32, [shape.m, shape.n])?;
        let d = &mut self.typed[2];
        device.convert(on, wide.view_mut(), d.view())?;
        let got: Vec<f32> = device.download(on, wide.view())?;
        for i in 0..64 {
            let (row, column) = (i * 7 % shape.m, i * 31 % shape.n);
            let want = element(shape, [1, 2], row, column);
            let off = (f64::from(got[row * shape.n + column]) - want).abs();
            // One rounding of bf16, on values of about the square root of k thirds.
            let most = 0.004 * want.abs().max((shape.k as f64).sqrt() / 3.0);
            ensure!(
                off <= most,
                "{shape} {}: [{row}, {column}] is {off} off {want}",
                self.dtype
            );
        }
        device.fill(on, d.view_mut(), 0xFF)?;
        Ok(())
    }
}

fn multiply(host: &Host, [x, w]: [&Buffer; 2], d: &mut Buffer) -> Result<()> {
    let gemm = GemmParams {
        transpose_b: true,
        ..GemmParams::new(x, w)
    };
    host.device
        .gemm(&host.on, &gemm, Output::Into(d.view_mut()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_their_floors_are_right_in_every_type() {
        for dtype in [DataType::F32, DataType::F16, DataType::BF16] {
            let shape = Shape { m: 5, k: 70, n: 33 };
            let mut product = Product::new(shape, dtype).unwrap();
            // What was not multiplied is not right.
            assert!(product.check().is_err(), "{dtype}");
        }
    }

    #[test]
    fn values_are_spread_and_fit_every_type() {
        let values: Vec<f32> = (0..4096).map(|i| value(3, i)).collect();
        let mean = values.iter().sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.05, "{mean}");
        assert!(
            values
                .iter()
                .all(|v| (v * 64.0).fract() == 0.0 && v.abs() <= 1.0)
        );
        assert_ne!(value(3, 0), value(4, 0));
    }
}
