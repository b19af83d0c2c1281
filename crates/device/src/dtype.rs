//! Element types and where memory lies.

use bytemuck::Pod;
use half::{bf16, f16};
use std::fmt;

/// Which memory a buffer lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryType {
    /// Ordinary host memory.
    Host,
    /// Host memory that a device can read and write directly (page-locked).
    HostPinned,
    /// The device's own memory.
    Device,
}

/// Type of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an `f32`.
    BF16,
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// 8-bit float: 4 bits of exponent, 3 of mantissa, no infinities (OCP FP8).
    F8E4M3,
    /// 8-bit float: 5 bits of exponent, 2 of mantissa (OCP FP8).
    F8E5M2,
    /// Tag of a [`QBuffer`](crate::QBuffer) whose kernel is `I8`.
    QI8,
    /// Tag of a [`QBuffer`](crate::QBuffer) whose kernel is `F8E4M3`.
    QF8E4M3,
}

impl DataType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E4M3
            | Self::F8E5M2
            | Self::QI8
            | Self::QF8E4M3 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether sums are accumulated as floats.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::BF16 | Self::F32 | Self::F64 | Self::F8E4M3 | Self::F8E5M2
        )
    }

    /// Bit pattern (little-endian, `bytes()` long) that marks an output nobody may trust: the canonical NaN
    /// for floats, all ones for the rest.
    pub const fn poison(self) -> u64 {
        match self {
            Self::F16 => 0x7E00,
            Self::BF16 => 0x7FC0,
            Self::F32 => 0x7FC0_0000,
            Self::F64 => 0x7FF8_0000_0000_0000,
            Self::F8E4M3 | Self::F8E5M2 | Self::QF8E4M3 => 0x7F,
            _ => u64::MAX,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::QI8 => "qi8",
            Self::QF8E4M3 => "qf8e4m3",
        })
    }
}

/// A Rust type that is an element: plain bytes with a [`DataType`].
pub trait Element: Pod + Send + Sync {
    /// Its tag.
    const DTYPE: DataType;
}

macro_rules! elements {
    ($($t:ty = $d:ident),* $(,)?) => { $(impl Element for $t { const DTYPE: DataType = DataType::$d; })* };
}
elements!(
    u8 = U8,
    i8 = I8,
    u16 = U16,
    i16 = I16,
    u32 = U32,
    i32 = I32,
    u64 = U64,
    i64 = I64,
    f16 = F16,
    bf16 = BF16,
    f32 = F32,
    f64 = F64
);
