//! Types of numbers that collectives are measured with.

use brigade::DataType;
use clap::ValueEnum;
use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Float {
    Bf16,
    F16,
    F32,
}

impl Float {
    pub const fn dtype(self) -> DataType {
        match self {
            Self::Bf16 => DataType::BF16,
            Self::F16 => DataType::F16,
            Self::F32 => DataType::F32,
        }
    }

    pub const fn bytes(self) -> usize {
        self.dtype().bytes()
    }

    /// From 1 to the next number.
    pub fn epsilon(self) -> f64 {
        match self {
            Self::Bf16 => bf16::EPSILON.to_f64(),
            Self::F16 => f16::EPSILON.to_f64(),
            Self::F32 => f32::EPSILON.into(),
        }
    }

    /// Appends a number, rounded to nearest, ties to even.
    pub fn store(self, x: f32, to: &mut Vec<u8>) {
        match self {
            Self::Bf16 => to.extend(bf16::from_f32(x).to_ne_bytes()),
            Self::F16 => to.extend(f16::from_f32(x).to_ne_bytes()),
            Self::F32 => to.extend(x.to_ne_bytes()),
        }
    }

    /// All numbers of a buffer.
    pub fn load(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::Bf16 => numbers(bytes, |b| bf16::from_ne_bytes(b).to_f32()),
            Self::F16 => numbers(bytes, |b| f16::from_ne_bytes(b).to_f32()),
            Self::F32 => numbers(bytes, f32::from_ne_bytes),
        }
    }
}

fn numbers<const N: usize>(bytes: &[u8], one: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (numbers, _) = bytes.as_chunks();
    numbers.iter().map(|&b| one(b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_once_to_the_nearest_even() {
        for float in [Float::Bf16, Float::F16, Float::F32] {
            let next = 1.0 + float.epsilon() as f32;
            // Halfway between 1 and the next number, which f32 alone has a number for only if the type is narrower.
            let halfway = 1.0 + float.epsilon() as f32 / 2.0;
            let mut stored = Vec::new();
            for x in [1.0, next, halfway, -2.5] {
                float.store(x, &mut stored);
            }
            assert_eq!(stored.len(), 4 * float.bytes());
            assert_eq!(float.load(&stored), [1.0, next, 1.0, -2.5], "{float:?}");
        }
    }
}
