//! Rows as they travel back from their experts: as they are, or cast. Every step is one f32 operation, as in `quantize.rs`.

use crate::{element, quantize};
use brigade_device::{CombineCast, Fp8Cast, LowLatencyCombineCall};
use brigade_plan::{logfmt, low_latency::BackRow};

/// What travels of a row.
pub(crate) fn pack(call: &LowLatencyCombineCall, row: &[u8], out: &mut Vec<u8>) {
    out.clear();
    match call.cast {
        None => out.extend(row),
        Some(CombineCast::Fp8(format)) => {
            let cast = Fp8Cast {
                format,
                column_major: false,
            };
            let (values, scales) = quantize::cast_rows(cast, call.dtype, call.hidden, row);
            out.extend(values);
            out.extend(scales);
        }
        Some(CombineCast::LogFmt10) => {
            let mut numbers = vec![0.0; call.hidden];
            element::load(call.dtype, row, &mut numbers);
            let (blocks, _) = numbers.as_chunks();
            let (codes, beside): (Vec<_>, Vec<_>) = blocks.iter().map(logfmt::pack).unzip();
            out.extend(codes.as_flattened());
            out.extend(bytemuck::cast_slice::<_, u8>(&beside));
        }
    }
}

/// The row again.
pub(crate) fn unpack(call: &LowLatencyCombineCall, bytes: &[u8]) -> Vec<f32> {
    let (values, beside) = bytes.split_at(BackRow::new(call).values);
    let mut row = vec![0.0; call.hidden];
    match call.cast {
        None => element::load(call.dtype, values, &mut row),
        Some(CombineCast::Fp8(format)) => {
            let blocks = values.chunks(Fp8Cast::BLOCK).enumerate();
            for ((block, values), row) in blocks.zip(row.chunks_mut(Fp8Cast::BLOCK)) {
                let scale = quantize::scale_at(format, beside, block);
                for (x, &value) in row.iter_mut().zip(values) {
                    *x = element::fp8_to_f32(value) * scale;
                }
            }
        }
        Some(CombineCast::LogFmt10) => {
            let ((codes, _), (rows, _)) = (values.as_chunks(), row.as_chunks_mut());
            let beside: Vec<[f32; 2]> = bytemuck::pod_collect_to_vec(beside);
            for ((codes, beside), row) in codes.iter().zip(beside).zip(rows) {
                *row = logfmt::unpack(codes, beside);
            }
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{
        CombineSum, DataType, LowLatencyDispatchCall, PlacementCall, ScaleFormat,
    };

    fn call(cast: CombineCast) -> LowLatencyCombineCall {
        LowLatencyCombineCall {
            there: LowLatencyDispatchCall {
                slot: 0,
                max_tokens: 1,
                hidden: 144,
                dtype: DataType::BF16,
                k: 1,
                weights: false,
                placement: PlacementCall::Ranks,
                cast: None,
            },
            hidden: 144,
            dtype: DataType::F32,
            sum: CombineSum::Expert,
            cast: Some(cast),
        }
    }

    /// A row by way of each format of scales.
    fn there_and_back(row: &[f32]) -> impl Iterator<Item = (ScaleFormat, Vec<f32>)> {
        let formats = [
            ScaleFormat::F32,
            ScaleFormat::PowerOfTwo,
            ScaleFormat::Ue8m0,
        ];
        formats.into_iter().map(|format| {
            let call = call(CombineCast::Fp8(format));
            let mut bytes = Vec::new();
            pack(&call, bytemuck::cast_slice(row), &mut bytes);
            assert_eq!(bytes.len(), BackRow::new(&call).bytes());
            (format, unpack(&call, &bytes))
        })
    }

    #[test]
    fn fp8_comes_back_within_its_steps() {
        // Of either sign, down to 2^-7 of the greatest: none is subnormal.
        let row: Vec<f32> = (0..144i16)
            .map(|i| f32::from(i % 128 + 1) * if i % 2 == 0 { 0.3 } else { -0.3 })
            .collect();
        for (format, back) in there_and_back(&row) {
            for (x, y) in row.iter().zip(back) {
                let off = (x - y).abs();
                assert!(off <= x.abs() / 16.0, "{y} instead of {x}, {format:?}");
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        let mut row = vec![1f32; 144];
        (row[3], row[130]) = (f32::NAN, f32::INFINITY);
        for (format, back) in there_and_back(&row) {
            assert!(back[3].is_nan() && !back[130].is_finite(), "{format:?}");
        }
    }
}
