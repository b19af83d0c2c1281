//! Quantized tensors: made by `quantize`, multiplied, and gathered with their scales.

mod agreement;
pub mod gather;
mod limits;
mod products;
pub mod quantize;
mod scatter;

use crate::{
    backend::Rank,
    layer::Layer,
    matrix::Matrix,
    suite::{Suite, World},
};
use brigade_device::{Buffer, DataType, Operand, QBuffer, QScheme};
use rand::{Rng, rngs::StdRng};

/// Columns that share a scale in fp8 by blocks.
const BLOCK: usize = 128;

/// Every way to quantize.
pub const SCHEMES: [QScheme; 5] = [
    QScheme::Int8WeightOnly,
    QScheme::Int8PerToken,
    QScheme::Int8PerTensor,
    QScheme::Fp8PerTensor,
    QScheme::Fp8PerTokenBlock,
];

/// A quantized matrix on the host, with what its numbers mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// How.
    pub scheme: QScheme,
    /// `[rows, columns]`
    pub dims: [usize; 2],
    /// A byte per value.
    pub kernel: Vec<u8>,
    /// In the order of the scheme.
    pub scales: Vec<f32>,
}

/// Shape of the scales of a matrix.
fn scale_dims(scheme: QScheme, [rows, columns]: [usize; 2]) -> Vec<usize> {
    match scheme {
        QScheme::Int8PerToken => vec![rows, 1],
        QScheme::Int8WeightOnly => vec![columns],
        QScheme::Fp8PerTokenBlock => vec![rows, columns.div_ceil(BLOCK)],
        _ => vec![1],
    }
}

fn is_fp8(scheme: QScheme) -> bool {
    matches!(scheme, QScheme::Fp8PerTensor | QScheme::Fp8PerTokenBlock)
}

/// The greatest value that a kernel holds.
fn limit(scheme: QScheme) -> f32 {
    if is_fp8(scheme) { 448.0 } else { 127.0 }
}

/// Relative error that a product with a factor of this scheme may have.
// Inlined, it is compiled to a look at bytes that do not count, which valgrind cannot know.
#[inline(never)]
pub fn tolerance(scheme: QScheme) -> f64 {
    if is_fp8(scheme) { 4e-3 } else { 1e-5 }
}

/// What 8 bits of fp8 e4m3 mean (OCP 8-bit floating point, table 1).
pub fn fp8(bits: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if bits >> 7 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

impl Quantized {
    /// Any values that a kernel may hold, -128 among them, and scales for a magnitude of about `size`.
    pub fn random(rng: &mut StdRng, scheme: QScheme, dims: [usize; 2], size: f64) -> Self {
        let byte = |rng: &mut StdRng| loop {
            let bits: u8 = rng.random();
            if !is_fp8(scheme) || !fp8(bits).is_nan() {
                return bits;
            }
        };
        let scales = scale_dims(scheme, dims).iter().product();
        Self {
            scheme,
            dims,
            kernel: (0..dims[0] * dims[1]).map(|_| byte(rng)).collect(),
            scales: (0..scales)
                .map(|_| (rng.random_range(0.5..2.0) * size) as f32 / limit(scheme))
                .collect(),
        }
    }

    /// Which scale a value has.
    pub fn group(&self, row: usize, column: usize) -> usize {
        match self.scheme {
            QScheme::Int8PerToken => row,
            QScheme::Int8WeightOnly => column,
            QScheme::Fp8PerTokenBlock => row * self.dims[1].div_ceil(BLOCK) + column / BLOCK,
            _ => 0,
        }
    }

    /// A value of the kernel, without its scale.
    pub fn stored(&self, row: usize, column: usize) -> f64 {
        let bits = self.kernel[row * self.dims[1] + column];
        if is_fp8(self.scheme) {
            fp8(bits)
        } else {
            f64::from(bits.cast_signed())
        }
    }

    /// All values with their scales.
    pub fn dequantized(&self) -> Matrix {
        let [rows, columns] = self.dims;
        let places = (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j)));
        let value = |(i, j)| self.stored(i, j) * f64::from(self.scales[self.group(i, j)]);
        Matrix {
            dtype: DataType::F64,
            dims: self.dims.to_vec(),
            values: places.map(value).collect(),
        }
    }

    /// The scales as a device stores them.
    pub fn scale_bytes(&self) -> Vec<u8> {
        bytemuck::cast_slice(&self.scales).to_vec()
    }

    /// Kernel and scales in the device's memory.
    pub fn parts(&self, rank: &Rank) -> (Buffer, Buffer) {
        let kernel_type = self.scheme.kernel_type().unwrap();
        let scales = scale_dims(self.scheme, self.dims);
        (
            rank.upload_bytes(kernel_type, &self.dims, &self.kernel),
            rank.upload_bytes(DataType::F32, &scales, &self.scale_bytes()),
        )
    }

    /// In the device's memory.
    pub fn upload(&self, rank: &Rank) -> QBuffer {
        let (kernel, scales) = self.parts(rank);
        QBuffer::new(kernel, scales, None, self.scheme).unwrap()
    }
}

/// A factor of a product: plain or quantized.
#[derive(Clone, Debug)]
pub enum Factor {
    /// Floats.
    Plain(Matrix),
    /// Small numbers and scales.
    Quantized(Quantized),
}

/// A factor in the device's memory.
pub enum Uploaded {
    /// Floats.
    Plain(Buffer),
    /// Small numbers and scales.
    Quantized(QBuffer),
}

impl Factor {
    /// Any values of a magnitude of about `size`; `dtype` is that of floats.
    fn random(
        rng: &mut StdRng,
        scheme: QScheme,
        dtype: DataType,
        dims: [usize; 2],
        size: f64,
    ) -> Self {
        match scheme {
            QScheme::None => Self::Plain(Matrix::random(rng, dtype, &dims, size)),
            scheme => Self::Quantized(Quantized::random(rng, scheme, dims, size)),
        }
    }

    fn scheme(&self) -> QScheme {
        match self {
            Self::Plain(_) => QScheme::None,
            Self::Quantized(q) => q.scheme,
        }
    }

    /// The numbers that it stands for.
    fn matrix(&self) -> Matrix {
        match self {
            Self::Plain(m) => m.clone(),
            Self::Quantized(q) => q.dequantized(),
        }
    }

    fn upload(&self, rank: &Rank) -> Uploaded {
        match self {
            Self::Plain(m) => Uploaded::Plain(rank.upload(m)),
            Self::Quantized(q) => Uploaded::Quantized(q.upload(rank)),
        }
    }
}

impl Uploaded {
    /// As parameters take it.
    pub fn operand(&self) -> Operand<'_> {
        match self {
            Self::Plain(b) => b.into(),
            Self::Quantized(q) => Operand::Quantized(q.view()),
        }
    }
}

/// The weight of one rank, as its layer stores it, and the layer with the numbers that the weight stands for.
fn quantize_weight(rng: &mut StdRng, layer: &mut Layer, scheme: QScheme) -> Factor {
    let dims = [layer.weight.dims[0], layer.weight.dims[1]];
    let k = dims[usize::from(layer.transpose)];
    let size = 2.0 / (k.max(1) as f64).sqrt();
    let weight = Factor::random(rng, scheme, layer.weight.dtype, dims, size);
    layer.weight = weight.matrix();
    weight
}

/// Group sizes of these contracts.
const WORLDS: [usize; 5] = [1, 2, 3, 5, 8];

fn add_at_worlds(
    suite: &mut Suite,
    name: &str,
    contract: impl Fn(&World) + Clone + Send + 'static,
) {
    for size in suite.backend().worlds() {
        if WORLDS.contains(&size) {
            suite.add_at(size, name, contract.clone());
        }
    }
}

/// Adds the contracts of a device alone.
pub fn add_alone(suite: &mut Suite) {
    quantize::add(suite);
    products::add(suite);
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    add_alone(suite);
    gather::add(suite);
    limits::add(suite);
    scatter::add(suite);
    agreement::add(suite);
}
