//! Elements as numbers: conversions, and reductions over ranks.

use brigade_device::{DataType, Element, Error, Reason, ReduceOp, Result};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use std::sync::LazyLock;

/// Reads floats as f32.
pub(crate) fn load(dtype: DataType, from: &[u8], to: &mut [f32]) {
    match dtype {
        DataType::F16 => bytemuck::cast_slice::<_, f16>(from).convert_to_f32_slice(to),
        DataType::BF16 => bytemuck::cast_slice::<_, bf16>(from).convert_to_f32_slice(to),
        _ => to.copy_from_slice(bytemuck::cast_slice(from)),
    }
}

/// Writes f32 as floats, rounded to nearest, ties to even.
pub(crate) fn store(dtype: DataType, from: &[f32], to: &mut [u8]) {
    match dtype {
        DataType::F16 => bytemuck::cast_slice_mut::<_, f16>(to).convert_from_f32_slice(from),
        DataType::BF16 => bytemuck::cast_slice_mut::<_, bf16>(to).convert_from_f32_slice(from),
        _ => to.copy_from_slice(bytemuck::cast_slice(from)),
    }
}

/// All 256 values of fp8 e4m3.
static FP8: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|bits| float8::F8E4M3::from_bits(bits as u8).to_f32()));

/// An fp8 e4m3 value, exactly.
pub(crate) fn fp8_to_f32(bits: u8) -> f32 {
    FP8[usize::from(bits)]
}

/// Elements that are reduced at a time: small enough for the first cache.
const BLOCK: usize = 1024;

/// Combines inputs, which are in rank order, in f32, with one rounding at the end. A NaN becomes the canonical one.
pub(crate) fn reduce(
    op: ReduceOp,
    dtype: DataType,
    inputs: &[&[u8]],
    output: DataType,
    out: &mut [u8],
) {
    let (mut sum, mut next) = ([0f32; BLOCK], [0f32; BLOCK]);
    let (in_bytes, out_bytes) = (dtype.bytes(), output.bytes());
    for (i, out) in out.chunks_mut(BLOCK * out_bytes).enumerate() {
        let n = out.len() / out_bytes;
        let block = i * BLOCK * in_bytes..(i * BLOCK + n) * in_bytes;
        let (sum, next) = (&mut sum[..n], &mut next[..n]);
        for (rank, input) in inputs.iter().enumerate() {
            if rank == 0 {
                load(dtype, &input[block.clone()], sum);
            } else {
                load(dtype, &input[block.clone()], next);
                combine(op, sum, next);
            }
        }
        let divisor = inputs.len() as f32;
        for s in &mut *sum {
            if op == ReduceOp::Avg {
                *s /= divisor;
            }
            *s = canonical(*s);
        }
        store(output, sum, out);
    }
}

/// Sign and payload of a NaN are the processor's choice.
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() {
        f32::from_bits(DataType::F32.poison() as u32)
    } else {
        x
    }
}

fn combine(op: ReduceOp, sum: &mut [f32], next: &[f32]) {
    let with = |f: fn(f32, f32) -> f32, sum: &mut [f32]| {
        for (s, &x) in sum.iter_mut().zip(next) {
            *s = f(*s, x);
        }
    };
    match op {
        ReduceOp::Sum | ReduceOp::Avg => with(|a, b| a + b, sum),
        ReduceOp::Prod => with(|a, b| a * b, sum),
        // total_cmp puts -0 below +0; NaNs win, whatever their sign.
        ReduceOp::Max => with(|a, b| pick(a, b, a.total_cmp(&b).is_ge()), sum),
        ReduceOp::Min => with(|a, b| pick(a, b, a.total_cmp(&b).is_le()), sum),
    }
}

fn pick(a: f32, b: f32, first: bool) -> f32 {
    if a.is_nan() || !b.is_nan() && first {
        a
    } else {
        b
    }
}

/// An element as a number.
trait Number: Element {
    const INTEGER: bool;
    fn to_f64(self) -> f64;
    fn from_f64(x: f64) -> Self;
    fn to_i128(self) -> i128;
    fn from_i128(x: i128) -> Self;
}

macro_rules! integers {
    ($($t:ty),*) => { $(impl Number for $t {
        const INTEGER: bool = true;
        fn to_f64(self) -> f64 { self as f64 }
        fn from_f64(x: f64) -> Self { x as Self }
        fn to_i128(self) -> i128 { i128::from(self) }
        fn from_i128(x: i128) -> Self { x.clamp(i128::from(Self::MIN), i128::from(Self::MAX)) as Self }
    })* };
}
integers!(u8, i8, u16, i16, u32, i32, u64, i64);

macro_rules! floats {
    ($($t:ty: $to:expr, $from:expr;)*) => { $(impl Number for $t {
        const INTEGER: bool = false;
        fn to_f64(self) -> f64 { $to(self) }
        fn from_f64(x: f64) -> Self { $from(x) }
        fn to_i128(self) -> i128 { $to(self) as i128 }
        fn from_i128(x: i128) -> Self { $from(x as f64) }
    })* };
}
floats! {
    f16: f16::to_f64, |x| f16::from_f32(to_odd(x));
    bf16: bf16::to_f64, |x| bf16::from_f32(to_odd(x));
    f32: f64::from, |x| x as f32;
    f64: |x| x, |x| x;
}

/// The nearest f32 towards zero, with its last bit set if it is not the number itself: a second rounding then gives what
/// one rounding of the number gives (Boldo and Melquiond: Emulation of a FMA and correctly rounded sums, 2008).
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let beyond = u32::from(f64::from(near).abs() > x.abs());
    f32::from_bits((near.to_bits() - beyond) | 1)
}

/// The same from an integer of at most 64 bits to f64.
fn integer_to_odd(x: i128) -> f64 {
    let near = x as f64;
    if near as i128 == x {
        return near;
    }
    let beyond = u64::from(near.abs() as u128 > x.unsigned_abs());
    f64::from_bits((near.to_bits() - beyond) | 1)
}

fn cast<A: Number, B: Number>(from: &[u8], to: &mut [u8]) {
    let pairs = bytemuck::cast_slice::<_, A>(from)
        .iter()
        .zip(bytemuck::cast_slice_mut::<_, B>(to));
    for (&a, b) in pairs {
        *b = if A::INTEGER && B::INTEGER {
            B::from_i128(a.to_i128())
        } else if A::INTEGER && B::DTYPE != DataType::F64 {
            B::from_f64(integer_to_odd(a.to_i128()))
        } else {
            B::from_f64(a.to_f64())
        };
    }
}

macro_rules! dispatch {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DataType::U8 => {
                type $t = u8;
                $body
            }
            DataType::I8 => {
                type $t = i8;
                $body
            }
            DataType::U16 => {
                type $t = u16;
                $body
            }
            DataType::I16 => {
                type $t = i16;
                $body
            }
            DataType::U32 => {
                type $t = u32;
                $body
            }
            DataType::I32 => {
                type $t = i32;
                $body
            }
            DataType::U64 => {
                type $t = u64;
                $body
            }
            DataType::I64 => {
                type $t = i64;
                $body
            }
            DataType::F16 => {
                type $t = f16;
                $body
            }
            DataType::BF16 => {
                type $t = bf16;
                $body
            }
            DataType::F32 => {
                type $t = f32;
                $body
            }
            DataType::F64 => {
                type $t = f64;
                $body
            }
            other => return Err(not_convertible(other)),
        }
    };
}

fn not_convertible(dtype: DataType) -> Error {
    Reason::new(
        "conversion",
        format!("the host device does not convert {dtype}"),
        "use an integer or f16, bf16, f32, f64",
    )
    .into()
}

/// Checks that both types can be converted.
pub(crate) fn check_conversion(from: DataType, to: DataType) -> Result<()> {
    // Nothing, but aligned for every type.
    let (input, mut output): ([u64; 0], [u64; 0]) = ([], []);
    convert(
        from,
        bytemuck::cast_slice(&input),
        to,
        bytemuck::cast_slice_mut(&mut output),
    )
}

/// Converts elements.
pub(crate) fn convert(
    from_type: DataType,
    from: &[u8],
    to_type: DataType,
    to: &mut [u8],
) -> Result<()> {
    use DataType::{BF16, F16, F32};
    match (from_type, to_type) {
        (F16 | BF16, F32) => load(from_type, from, bytemuck::cast_slice_mut(to)),
        (F32, F16 | BF16) => store(to_type, bytemuck::cast_slice(from), to),
        (a, b) if a == b => to.copy_from_slice(from),
        _ => dispatch!(from_type, A => dispatch!(to_type, B => cast::<A, B>(from, to))),
    }
    Ok(())
}

/// The sum of rows, each multiplied by its weight first if it has one; 0 of none.
pub(crate) fn add(dtype: DataType, rows: &[(&[u8], Option<f32>)], sum: &mut [f32]) {
    sum.fill(0.0);
    let mut next = vec![0.0; sum.len()];
    for (i, (row, weight)) in rows.iter().enumerate() {
        load(dtype, row, &mut next);
        if let Some(weight) = weight {
            next.iter_mut().for_each(|x| *x *= weight);
        }
        match i {
            0 => sum.copy_from_slice(&next),
            _ => sum.iter_mut().zip(&next).for_each(|(s, x)| *s += x),
        }
    }
    sum.iter_mut().for_each(|s| *s = canonical(*s));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced(op: ReduceOp, inputs: &[f32]) -> f32 {
        let bytes: Vec<[u8; 4]> = inputs.iter().map(|x| x.to_ne_bytes()).collect();
        let slices: Vec<&[u8]> = bytes.iter().map(|b| &b[..]).collect();
        let mut out = [0f32];
        reduce(
            op,
            DataType::F32,
            &slices,
            DataType::F32,
            bytemuck::cast_slice_mut(&mut out),
        );
        out[0]
    }

    #[test]
    fn signed_zeros_and_nans_have_one_answer() {
        let bits = |op, inputs: &[f32]| reduced(op, inputs).to_bits();
        assert_eq!(bits(ReduceOp::Max, &[-0.0, 0.0]), 0.0f32.to_bits());
        assert_eq!(bits(ReduceOp::Max, &[0.0, -0.0]), 0.0f32.to_bits());
        assert_eq!(bits(ReduceOp::Min, &[0.0, -0.0]), (-0.0f32).to_bits());
        assert_eq!(bits(ReduceOp::Sum, &[-0.0, -0.0]), (-0.0f32).to_bits());
        for nan in [f32::from_bits(0x7FFF_1234), f32::from_bits(0xFFC0_0001)] {
            for op in [
                ReduceOp::Sum,
                ReduceOp::Max,
                ReduceOp::Min,
                ReduceOp::Avg,
                ReduceOp::Prod,
            ] {
                assert_eq!(bits(op, &[1.0, nan]), 0x7FC0_0000, "{op:?}");
                assert_eq!(bits(op, &[nan, 1.0]), 0x7FC0_0000, "{op:?}");
            }
        }
        assert_eq!(reduced(ReduceOp::Avg, &[1.0, 2.0, 4.0]), 7.0 / 3.0);
        assert_eq!(reduced(ReduceOp::Prod, &[3.0, -2.0, 4.0]), -24.0);
    }

    #[test]
    fn conversions_saturate_and_round_to_even() {
        let mut out = [0u8; 3];
        convert(
            DataType::F32,
            bytemuck::cast_slice(&[-3.7f32, 300.0, 7.9]),
            DataType::U8,
            &mut out,
        )
        .unwrap();
        assert_eq!(out, [0, 255, 7]);
        let mut out = [bf16::ZERO; 2];
        let ties = [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
        convert(
            DataType::F32,
            bytemuck::cast_slice(&ties),
            DataType::BF16,
            bytemuck::cast_slice_mut(&mut out),
        )
        .unwrap();
        assert_eq!(out.map(f32::from), [1.0, 1.0 + 4.0 / 256.0]);
        assert!(check_conversion(DataType::F8E4M3, DataType::F32).is_err());
    }

    #[test]
    fn conversions_round_once() {
        // Just above a tie, by a bit that an f32, or an f64, on the way would lose.
        let mut half = [f16::ZERO; 2];
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        let x = [x, -x];
        let bytes = bytemuck::cast_slice(&x);
        convert(
            DataType::F64,
            bytes,
            DataType::F16,
            bytemuck::cast_slice_mut(&mut half),
        )
        .unwrap();
        assert_eq!(
            half.map(f32::from),
            [1.0 + 1.0 / 1024.0, -1.0 - 1.0 / 1024.0]
        );
        let x = [
            (1i64 << 60) + (1 << 36) + 1,
            -(1 << 60) - (1 << 36),
            i64::MAX,
        ];
        let mut single = [0f32; 3];
        let bytes = bytemuck::cast_slice(&x);
        convert(
            DataType::I64,
            bytes,
            DataType::F32,
            bytemuck::cast_slice_mut(&mut single),
        )
        .unwrap();
        let unit = 2f32.powi(60);
        assert_eq!(single, [unit + 2f32.powi(37), -unit, 2f32.powi(63)]);
        let mut brain = [bf16::ZERO; 2];
        let x = [(1i64 << 60) + (1 << 52) + 1, (1 << 60) + (1 << 52)];
        let bytes = bytemuck::cast_slice(&x);
        convert(
            DataType::I64,
            bytes,
            DataType::BF16,
            bytemuck::cast_slice_mut(&mut brain),
        )
        .unwrap();
        assert_eq!(brain.map(f32::from), [unit + 2f32.powi(53), unit]);
        for x in [f64::MAX, f64::INFINITY, 1e-300, 0.0, f64::NAN] {
            let f = to_odd(x);
            let kept = x.is_nan() && f.is_nan() || bf16::from_f32(f) == bf16::from_f64(x);
            assert!(kept, "{x} became {f}");
        }
    }
}
