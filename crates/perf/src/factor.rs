//! Rows and weights of a product, as they are stored: bf16, or quantized from it by the device.

use crate::data;
use anyhow::Result;
use brigade::{
    Allocate, Buffer, DataType, Linear, MemoryType, Operand, QBuffer, QScheme, Stream,
    cuda::{CudaDevice, NcclComm},
};
use clap::ValueEnum;
use float8::F8E4M3;
use half::bf16;

/// How rows and weights are stored. Results are bf16 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scheme {
    /// Not quantized
    Bf16,
    /// int8, with a scale for each row and for each column of the weight
    Int8,
    /// fp8 e4m3, with one scale for each tensor
    Fp8,
}

impl Scheme {
    /// As the command line and files of results have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }

    fn quantized(self) -> Option<QScheme> {
        match self {
            Self::Bf16 => None,
            Self::Int8 => Some(QScheme::Int8PerToken),
            Self::Fp8 => Some(QScheme::Fp8PerTensor),
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        self.quantized()
            .and_then(QScheme::kernel_type)
            .unwrap_or(DataType::BF16)
            .bytes()
    }

    /// Bytes of all scales of `rows` rows that `ranks` ranks quantized.
    pub fn scale_bytes(self, rows: usize, ranks: usize) -> usize {
        let scales = match self {
            Self::Bf16 => 0,
            Self::Int8 => rows,
            Self::Fp8 => ranks,
        };
        scales * DataType::F32.bytes()
    }

    /// What a row stands for that [`Factor::row`] gave.
    pub fn meaning(self, row: &[u8]) -> Vec<f64> {
        let Some((scale, stored)) = row.split_first_chunk() else {
            return Vec::new();
        };
        let scale = f64::from(f32::from_le_bytes(*scale));
        match self {
            Self::Bf16 => stored
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64())
                .collect(),
            Self::Int8 => stored
                .iter()
                .map(|b| f64::from(b.cast_signed()) * scale)
                .collect(),
            Self::Fp8 => stored
                .iter()
                .map(|&b| F8E4M3::from_bits(b).to_f64() * scale)
                .collect(),
        }
    }
}

/// A matrix on the GPU. A weight is stored as `[N, K]`, so that the scales of its rows are those of its columns.
#[derive(Clone)]
pub enum Factor {
    Plain(Buffer),
    Quantized(QBuffer),
}

impl Factor {
    /// Uploads `values`, and quantizes them there.
    pub fn new(
        device: &CudaDevice,
        on: &Stream,
        scheme: Scheme,
        values: &[bf16],
        shape: [usize; 2],
    ) -> Result<Self> {
        let plain = data::upload(device, on, values, shape)?;
        Ok(match scheme.quantized() {
            None => Self::Plain(plain),
            Some(scheme) => Self::Quantized(device.quantize(on, plain.view(), scheme)?),
        })
    }

    /// For a call.
    pub fn operand(&self) -> Operand<'_> {
        match self {
            Self::Plain(values) => values.into(),
            Self::Quantized(q) => Operand::Quantized(q.view()),
        }
    }

    /// The first scale's bytes and then those of row `i`, as the GPU has them; a scale of 1 where there is none.
    pub fn row(&self, device: &CudaDevice, on: &Stream, i: usize) -> Result<Vec<u8>> {
        let row = self.operand().rows(i..i + 1)?;
        let mut scale = 1f32.to_le_bytes();
        if let Operand::Quantized(q) = &row {
            device.read(on, q.scales(), &mut scale)?;
        }
        let kernel = row.kernel();
        let mut bytes = vec![0; kernel.bytes()];
        device.read(on, kernel, &mut bytes)?;
        Ok([&scale[..], &bytes].concat())
    }
}

/// Space for the rows of all ranks, and for their scales, which NCCL fills.
pub struct Gathered {
    kernel: Buffer,
    scales: Option<Buffer>,
    /// What is multiplied: for fp8 with the first rank's scale alone, as where ranks have agreed on one.
    pub whole: Factor,
}

impl Gathered {
    /// Holds `values` until something is gathered.
    pub fn new(
        device: &CudaDevice,
        on: &Stream,
        scheme: Scheme,
        values: &[bf16],
        (shape, ranks): ([usize; 2], usize),
    ) -> Result<Self> {
        Ok(match Factor::new(device, on, scheme, values, shape)? {
            Factor::Plain(kernel) => Self {
                whole: Factor::Plain(kernel.clone()),
                kernel,
                scales: None,
            },
            Factor::Quantized(q) if q.scheme().per_row() => Self {
                kernel: q.kernel().clone(),
                scales: Some(q.scales().clone()),
                whole: Factor::Quantized(q),
            },
            Factor::Quantized(q) => {
                let mut scales =
                    device.allocate(on, MemoryType::Device, DataType::F32, &[ranks])?;
                let mut first = scales.slice(0, 1)?;
                device.fill(on, scales.view_mut(), 0)?;
                device.copy(on, first.view_mut(), q.scales().view())?;
                let whole = QBuffer::new(q.kernel().clone(), first, None, q.scheme())?;
                Self {
                    kernel: q.kernel().clone(),
                    scales: Some(scales),
                    whole: Factor::Quantized(whole),
                }
            }
        })
    }

    /// Every rank's rows, and their scales, by NCCL.
    pub fn gather(&mut self, nccl: &NcclComm, on: &Stream, own: &Factor) -> brigade::Result<()> {
        let own = own.operand();
        let mut pairs = vec![(own.kernel(), self.kernel.view_mut())];
        if let (Operand::Quantized(q), Some(scales)) = (&own, &mut self.scales) {
            pairs.push((q.scales(), scales.view_mut()));
        }
        nccl.all_gathers(on, pairs)
    }
}

impl Clone for Gathered {
    /// The same space.
    fn clone(&self) -> Self {
        Self {
            kernel: self.kernel.clone(),
            scales: self.scales.clone(),
            whole: self.whole.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(scale: f32, stored: &[u8]) -> Vec<u8> {
        [&scale.to_le_bytes()[..], stored].concat()
    }

    #[test]
    fn rows_mean_what_their_scheme_says() {
        let x = bf16::from_f32(-1.5).to_le_bytes();
        assert_eq!(Scheme::Bf16.meaning(&row(1.0, &x)), [-1.5]);
        assert_eq!(
            Scheme::Int8.meaning(&row(0.5, &[3, 0x80, 0xFF])),
            [1.5, -64.0, -0.5]
        );
        // 448 is the greatest of e4m3, 2^-9 the least.
        let fp8 = Scheme::Fp8.meaning(&row(2.0, &[0x7E, 0x81, 0x38]));
        assert_eq!(fp8, [896.0, -2.0 / 512.0, 2.0]);
        assert!(Scheme::Fp8.meaning(&[1, 2]).is_empty());
    }

    #[test]
    fn fewer_bytes_travel_where_rows_are_quantized() {
        let bytes = |scheme: Scheme| (scheme.bytes(), scheme.scale_bytes(512, 4));
        assert_eq!(bytes(Scheme::Bf16), (2, 0));
        assert_eq!(bytes(Scheme::Int8), (1, 2048));
        assert_eq!(bytes(Scheme::Fp8), (1, 16));
    }
}
