//! Quantizing the rows of a matrix. Every step is one f32 operation, so that other devices can give the same bits:
//! `scale = max |x| / limit`, `q = round(x / scale)`, ties to even. A scale of 0 gives zeros; a NaN is the canonical one of
//! its type, and 0 in int8, where its scale still is one.

use crate::{
    device::HostDevice,
    element,
    memory::{reading, writing},
    queue::HostQueue,
};
use brigade_device::{DataType, Fp8Cast, QBuffer, QScheme, Result, ScaleFormat, Stream, View};
use float8::F8E4M3;
use std::sync::Arc;

/// Greatest int8 value used: the range is symmetric.
const INT8_LIMIT: f32 = 127.0;
/// Greatest finite fp8 e4m3 value.
const FP8_LIMIT: f32 = 448.0;

impl HostDevice {
    pub(crate) fn run_quantize(
        &self,
        on: &Stream,
        a: View<'_>,
        scheme: QScheme,
    ) -> Result<QBuffer> {
        let (kernel_type, scales_shape) = scheme.quantized(a)?;
        let (rows, columns) = (a.shape().rows(), a.shape().columns());
        let blocks = columns.div_ceil(QScheme::BLOCK);
        let kernel = self.heap(kernel_type, &[rows, columns])?;
        let scales = self.heap(DataType::F32, scales_shape.dims())?;
        let (from, kernel_out, scales_out) = (a.retain(), kernel.clone(), scales.clone());
        let engine = Arc::clone(&self.engine);
        HostQueue::of(on)?.run(move || {
            let mut values = engine.scratch.take(rows * columns)?;
            reading(&[&from], |inputs| {
                element::load(from.dtype(), inputs[0], &mut values);
                Ok(())
            })?;
            let group = Groups {
                scheme,
                columns,
                blocks,
            };
            let mut most = vec![0.0; scales_out.shape().len()];
            group.each(&values, |i, x| most[i] = greatest(most[i], x.abs()));
            let factors: Vec<f32> = most.iter().map(|&m| factor(kernel_type, m)).collect();
            writing(&scales_out, &[], |out, _| {
                out.copy_from_slice(bytemuck::cast_slice(&factors));
                Ok(())
            })?;
            writing(&kernel_out, &[], |out, _| {
                let mut out = out.iter_mut();
                group.each(&values, |i, x| {
                    if let Some(out) = out.next() {
                        *out = one(kernel_type, x, factors[i]);
                    }
                });
                Ok(())
            })
        })?;
        QBuffer::new(kernel, scales, None, scheme)
    }
}

/// The greater of two; a NaN stays, so that its scale and all it stands for become NaN.
fn greatest(a: f32, b: f32) -> f32 {
    if !a.is_nan() && (b > a || b.is_nan()) {
        b
    } else {
        a
    }
}

/// What values divided by it fill the range of `kernel_type` with.
fn factor(kernel_type: DataType, most: f32) -> f32 {
    let limit = match kernel_type {
        DataType::I8 => INT8_LIMIT,
        _ => FP8_LIMIT,
    };
    element::canonical(most / limit)
}

/// The scale that values have in common.
pub(crate) fn scale_of(kernel_type: DataType, values: &[f32]) -> f32 {
    let most = values.iter().fold(0.0, |most, x| greatest(most, x.abs()));
    factor(kernel_type, most)
}

/// The least power of two that is not below a scale, and not subnormal; 1 for 0. What is not finite stays so.
pub(crate) fn power_of_two(scale: f32) -> f32 {
    const MANTISSA: u32 = (1 << 23) - 1;
    match scale.to_bits() {
        0 => 1.0,
        _ if scale.is_nan() => element::canonical(scale),
        bits => f32::from_bits(((bits + MANTISSA) & !MANTISSA).max(1 << 23)),
    }
}

/// Quantizes values by a scale.
pub(crate) fn by_scale(kernel_type: DataType, values: &[f32], scale: f32, out: &mut [u8]) {
    for (&x, out) in values.iter().zip(out) {
        *out = one(kernel_type, x, scale);
    }
}

fn one(kernel_type: DataType, x: f32, scale: f32) -> u8 {
    let q = if scale == 0.0 { 0.0 } else { x / scale };
    match kernel_type {
        DataType::I8 => {
            let q = q.round_ties_even().clamp(-INT8_LIMIT, INT8_LIMIT);
            (q as i8).cast_unsigned()
        }
        other if q.is_nan() => other.poison() as u8,
        _ => F8E4M3::from_f32(q.clamp(-FP8_LIMIT, FP8_LIMIT)).to_bits(),
    }
}

/// Which values share a scale.
#[derive(Clone, Copy)]
struct Groups {
    scheme: QScheme,
    columns: usize,
    blocks: usize,
}

impl Groups {
    fn each(&self, values: &[f32], mut f: impl FnMut(usize, f32)) {
        for (row, values) in values.chunks_exact(self.columns.max(1)).enumerate() {
            for (column, &x) in values.iter().enumerate() {
                let group = match self.scheme {
                    QScheme::Int8PerToken => row,
                    QScheme::Int8WeightOnly => column,
                    QScheme::Fp8PerTokenBlock => row * self.blocks + column / QScheme::BLOCK,
                    _ => 0,
                };
                f(group, x);
            }
        }
    }
}

/// A scale among those of a row.
pub(crate) fn scale_at(format: ScaleFormat, scales: &[u8], block: usize) -> f32 {
    match format {
        ScaleFormat::Ue8m0 => f32::from_bits(u32::from(scales[block]) << 23),
        ScaleFormat::F32 | ScaleFormat::PowerOfTwo => {
            bytemuck::pod_read_unaligned(&scales[block * 4..][..4])
        }
    }
}

/// Rows as fp8, and their scales.
pub(crate) fn cast_rows(
    cast: Fp8Cast,
    dtype: DataType,
    hidden: usize,
    rows: &[u8],
) -> (Vec<u8>, Vec<u8>) {
    let mut values = vec![0.0; rows.len() / dtype.bytes()];
    element::load(dtype, rows, &mut values);
    let (scale_type, per_row) = cast.scales(hidden);
    let (mut cast_values, mut scales) = (vec![0; values.len()], Vec::new());
    for (row, out) in values
        .chunks_exact(hidden)
        .zip(cast_values.chunks_exact_mut(hidden))
    {
        let first = scales.len();
        for (block, out) in row
            .chunks(Fp8Cast::BLOCK)
            .zip(out.chunks_mut(Fp8Cast::BLOCK))
        {
            let scale = scale_of(DataType::F8E4M3, block);
            let scale = match cast.format {
                ScaleFormat::F32 => scale,
                ScaleFormat::PowerOfTwo | ScaleFormat::Ue8m0 => power_of_two(scale),
            };
            by_scale(DataType::F8E4M3, block, scale, out);
            match cast.format {
                ScaleFormat::Ue8m0 => scales.push((scale.to_bits() >> 23) as u8),
                ScaleFormat::F32 | ScaleFormat::PowerOfTwo => scales.extend(scale.to_le_bytes()),
            }
        }
        scales.resize(first + per_row * scale_type.bytes(), 0);
    }
    (cast_values, scales)
}
