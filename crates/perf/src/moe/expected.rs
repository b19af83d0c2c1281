//! What should come back of rows that experts leave as they are: sums of themselves.

use super::case::Case;
use crate::data;
use anyhow::{Result, ensure};
use brigade::{Allocate, Buffer, CombineSum, DataType, Fp8Cast, MemoryType, View};
use float8::F8E4M3;
use half::bf16;

/// Compares every element.
pub fn check(case: &Case<'_>) -> Result<()> {
    let options = case.options;
    let back = case.both(|rows, scales| match scales {
        Some(scales) => widened(case, rows, scales).map(Some),
        None => Ok(None),
    })?;
    let (hidden, k) = (options.hidden, options.k);
    let mut got = vec![bf16::ZERO; case.tokens * hidden];
    let bytes = bytemuck::cast_slice_mut(&mut got);
    case.rank.device.read(&case.rank.on, back.view(), bytes)?;
    let me = case.rank.number();
    let numbers = data::numbers(500 + me as u64, case.tokens * hidden);
    for token in 0..case.tokens {
        let ids = &case.ways.ids(me)[token * k..][..k];
        let mut factor = 0f64;
        for rank in 0..case.rank.size() {
            let own: Vec<usize> = (0..k)
                .filter(|&e| case.ways.owner(ids[e]) == rank)
                .collect();
            factor += match options.sum() {
                CombineSum::Rank => f64::from(u8::from(!own.is_empty())),
                CombineSum::Expert | CombineSum::ExpertByRank => own
                    .iter()
                    .map(|e| 1.0 / (1.0 + ((token * k + e) % 8) as f64))
                    .sum(),
            };
        }
        for column in 0..hidden {
            let at = token * hidden + column;
            let (got, want) = (got[at].to_f64(), numbers[at].to_f64() * factor);
            let off = (got - want).abs();
            ensure!(
                off <= options.tolerance() * want.abs().max(1e-2),
                "token {token}, column {column}: {got} instead of {want}"
            );
        }
    }
    Ok(())
}

/// Rows that were cast, in bf16 again.
fn widened(case: &Case<'_>, rows: View<'_>, scales: View<'_>) -> Result<Buffer> {
    let (device, on) = (&case.rank.device, &case.rank.on);
    let dims = rows.shape().dims().to_vec();
    let mut stored = vec![0u8; rows.shape().len()];
    let mut factors = vec![0f32; scales.shape().len()];
    device.read(on, rows, &mut stored)?;
    device.read(on, scales, bytemuck::cast_slice_mut(&mut factors))?;
    let values = wide(&stored, &factors, case.options.hidden);
    let mut made = device.allocate(on, MemoryType::Device, DataType::BF16, &dims)?;
    device.write(on, made.view_mut(), bytemuck::cast_slice(&values))?;
    Ok(made)
}

/// Each value times the scale of its block, rounded to bf16.
fn wide(stored: &[u8], scales: &[f32], hidden: usize) -> Vec<bf16> {
    let blocks = hidden.div_ceil(Fp8Cast::BLOCK);
    let rows = stored.chunks(hidden).zip(scales.chunks(blocks));
    let value =
        |(&value, &scale): (&u8, &f32)| bf16::from_f32(F8E4M3::from_bits(value).to_f32() * scale);
    rows.flat_map(|(row, scales)| {
        let blocks = row.chunks(Fp8Cast::BLOCK).zip(scales);
        blocks.flat_map(|(block, scale)| block.iter().map(move |v| (v, scale)))
    })
    .map(value)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_widened_by_the_scale_of_their_block() {
        let hidden = 200;
        let bits = |i: usize| F8E4M3::from_f32((i % 16) as f32).to_bits();
        let stored: Vec<u8> = (0..2 * hidden).map(bits).collect();
        let scales = [1.0, 2.0, 4.0, 0.5];
        let got = wide(&stored, &scales, hidden);
        assert_eq!(got.len(), 2 * hidden);
        for (i, got) in got.iter().enumerate() {
            let scale = scales[2 * (i / hidden) + usize::from(i % hidden >= 128)];
            assert_eq!(got.to_f32(), (i % 16) as f32 * scale, "{i}");
        }
    }
}
