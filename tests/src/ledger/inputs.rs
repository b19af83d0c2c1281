//! Inputs of the ledger, from a generator that is small enough to write down.
//!
//! The state is the first 8 bytes (little-endian) of SHA-256 of `"<key>/<rank>"`; every draw is a step of splitmix64
//! (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). A float takes one draw `r`:
//!
//! | `r % 32` | value |
//! |---|---|
//! | 0, 1 | +0, -0 |
//! | 2 | a subnormal of the type: sign `r >> 63`, mantissa `(r >> 8) \| 1` |
//! | 3 | an infinity of sign `r >> 63`, where infinities are asked for |
//! | else | `(-1)^(r >> 63) * 1.m * 2^(e - 6)` with `e = (r >> 32) % 13` and `m` the 23 bits from bit 8, of which the lowest `(r >> 40) % 24` are cleared so that ties are common; rounded to the type. In f64 the lowest bit is bit 50 of `r`: just above a tie |
//!
//! A whole number takes one draw `r`: `(-1)^(r >> 63) * (1 + (r >> 8) % 8)`.
//!
//! An expert takes one draw `r`: -1 where `r % 8` is 0, the first number that names none where it is 1, and `(r >> 8) % experts`
//! otherwise.

use crate::matrix::to_bytes;
use brigade_device::DataType;
use half::{bf16, f16};
use sha2::{Digest, Sha256};

/// Draws of one rank for one entry.
pub struct Inputs(u64);

impl Inputs {
    /// The state before the first draw.
    pub fn new(key: &str, rank: usize) -> Self {
        let digest = Sha256::digest(format!("{key}/{rank}"));
        let first = std::array::from_fn(|i| digest[i]);
        Self(u64::from_le_bytes(first))
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Any bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.draw() as u8).collect()
    }

    /// Experts of tokens.
    pub fn ids(&mut self, count: usize, experts: usize) -> Vec<i64> {
        let draw = |r: u64| match r % 8 {
            0 => -1,
            1 => experts as i64,
            _ => ((r >> 8) % experts as u64) as i64,
        };
        (0..count).map(|_| draw(self.draw())).collect()
    }

    /// Floats of f16, bf16, f32 or f64, as a device stores them.
    pub fn floats(&mut self, dtype: DataType, count: usize, infinities: bool) -> Vec<u8> {
        (0..count)
            .flat_map(|_| self.float(dtype, infinities))
            .collect()
    }

    /// Whole numbers from 1 to 8 and their negatives, as floats of this type: sums of products of them are exact in f32.
    pub fn whole(&mut self, dtype: DataType, count: usize) -> Vec<u8> {
        let number = |r: u64| {
            let size = 1 + (r >> 8) % 8;
            if r >> 63 == 1 {
                -(size as f64)
            } else {
                size as f64
            }
        };
        let all: Vec<_> = (0..count).map(|_| number(self.draw())).collect();
        to_bytes(dtype, &all)
    }

    fn float(&mut self, dtype: DataType, infinities: bool) -> Vec<u8> {
        let r = self.draw();
        let sign = (r >> 63) as u32;
        let mantissa = (r >> 8) as u32 & 0x7F_FFFF;
        let cleared = mantissa & 0x7F_FFFF << ((r >> 40) % 24);
        if r % 32 == 2 {
            return match dtype {
                DataType::F16 => ((sign << 15 | mantissa & 0x3FF | 1) as u16)
                    .to_ne_bytes()
                    .into(),
                DataType::BF16 => ((sign << 15 | mantissa & 0x7F | 1) as u16)
                    .to_ne_bytes()
                    .into(),
                DataType::F32 => (sign << 31 | mantissa | 1).to_ne_bytes().into(),
                _ => (u64::from(sign) << 63 | u64::from(mantissa) | 1)
                    .to_ne_bytes()
                    .into(),
            };
        }
        let exponent = 121 + ((r >> 32) % 13) as u32;
        let (x, lowest) = match r % 32 {
            0 => (0.0, 0),
            1 => (-0.0, 0),
            3 if infinities => (f32::from_bits(sign << 31 | 0x7F80_0000), 0),
            _ => (
                f32::from_bits(sign << 31 | exponent << 23 | cleared),
                r >> 50 & 1,
            ),
        };
        match dtype {
            DataType::F16 => f16::from_f32(x).to_ne_bytes().into(),
            DataType::BF16 => bf16::from_f32(x).to_ne_bytes().into(),
            DataType::F32 => x.to_ne_bytes().into(),
            _ => (f64::from(x).to_bits() | lowest).to_ne_bytes().into(),
        }
    }
}
