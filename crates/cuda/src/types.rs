//! Types, activations and times as kernels are told them (`kernels/types.cuh`).

use brigade_device::{Activation, DataType, ReduceOp};
use std::time::Duration;

/// The number of a type that kernels read and write.
pub(crate) const fn code(dtype: DataType) -> Option<u32> {
    Some(match dtype {
        DataType::U8 => 0,
        DataType::I8 => 1,
        DataType::U16 => 2,
        DataType::I16 => 3,
        DataType::U32 => 4,
        DataType::I32 => 5,
        DataType::U64 => 6,
        DataType::I64 => 7,
        DataType::F16 => 8,
        DataType::BF16 => 9,
        DataType::F32 => 10,
        DataType::F64 => 11,
        DataType::F8E4M3 => 12,
        _ => return None,
    })
}

/// The number of one of the floats that linears take: f32 for all others, which checks have refused before.
pub(crate) const fn float_code(dtype: DataType) -> u32 {
    match dtype {
        DataType::F16 => 8,
        DataType::BF16 => 9,
        _ => 10,
    }
}

/// The number of a reduction (`kernels/combine.cuh`).
pub(crate) const fn op_code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}

/// The number of the integer sums of small products.
pub(crate) const I32: u32 = 5;

/// The number of what a quantized tensor holds.
pub(crate) const fn kernel_code(dtype: DataType) -> u32 {
    match dtype {
        DataType::I8 => 1,
        _ => 12,
    }
}

/// The number of an activation (`kernels/finish.cu`).
pub(crate) const fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::None => 0,
        Activation::Relu => 1,
        Activation::GeluTanh => 2,
        Activation::GeluErf => 3,
        Activation::Silu => 4,
    }
}

/// The number of what makes one of two products (`kernels/activation.cuh`).
pub(crate) const GATED: u32 = 5;

/// An element's poison, as often as it goes into 8 bytes.
pub(crate) fn poison_pattern(dtype: DataType) -> u64 {
    let bits = dtype.bytes() * 8;
    let element = dtype.poison() & (u64::MAX >> (64 - bits));
    (0..64 / bits).fold(0, |word, i| word | element << (i * bits))
}

/// A time as kernels count it.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_repeats_over_eight_bytes() {
        assert_eq!(poison_pattern(DataType::F16), 0x7E00_7E00_7E00_7E00);
        assert_eq!(poison_pattern(DataType::BF16), 0x7FC0_7FC0_7FC0_7FC0);
        assert_eq!(poison_pattern(DataType::F32), 0x7FC0_0000_7FC0_0000);
        assert_eq!(poison_pattern(DataType::F64), 0x7FF8_0000_0000_0000);
        assert_eq!(poison_pattern(DataType::F8E4M3), 0x7F7F_7F7F_7F7F_7F7F);
        assert_eq!(poison_pattern(DataType::I32), u64::MAX);
        assert_eq!(poison_pattern(DataType::Bool), u64::MAX);
    }
}
