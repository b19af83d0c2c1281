//! LogFMT-10: 128 numbers as a sign and a code of nine bits each, linear in the logarithm between the least and the greatest magnitude
//! (after DeepSeek's "Insights into DeepSeek-V3", 2025, and DeepEP).
//!
//! Code 0 is zero, and code c is `2^(least + (c - 1) * step)` with `step = (greatest - least) / 510`. Of two neighbours a number gets the nearer
//! one as numbers go, not as logarithms do; of equally near ones the lower. Magnitudes below `greatest - 32` count as that or as
//! zero, those below the smallest normal f32 as zero. A block with a number that is infinite or none is NaN throughout.
//!
//! Every step is one f32 operation, rounded to nearest, so that kernels give the same bits (`kernels/logfmt.cuh`).

/// Numbers of a block.
pub const BLOCK: usize = 128;
/// Bytes of a block's codes: the lower eight bits of each, and then the upper two, four numbers a byte, from the lowest bits on.
pub const CODES: usize = BLOCK + BLOCK / 4;
/// Bytes of what belongs to a block: the least and the greatest logarithm, f32.
pub const BESIDE: usize = 8;

/// The greatest code.
const GREATEST: u32 = 511;
/// Steps from the least magnitude to the greatest.
const STEPS: f32 = 510.0;
/// Binary orders of magnitude below the greatest that codes reach.
const ORDERS: f32 = 32.0;
const SIGN: u32 = 1 << 9;
const INFINITY: u32 = 0x7F80_0000;
const SMALLEST: u32 = 0x0080_0000;

/// The logarithm of a positive normal number to base 2, off by at most 2^-22 and a rounding.
fn log2(bits: u32) -> f32 {
    // Whole numbers of the mantissa's upper third count as the next power's, so that it is between 0.71 and 1.42.
    const HALFWAY: u32 = 0x3F35_04F3;
    let shifted = bits.wrapping_sub(HALFWAY);
    let exponent = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x007F_FFFF) + HALFWAY);
    // ln m = 2 atanh((m - 1) / (m + 1))
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut sum = ATANH[3];
    for c in [ATANH[2], ATANH[1], ATANH[0]] {
        sum = sum * z + c;
    }
    exponent + sum * s
}

/// `2 / ((2 i + 1) ln 2)`
const ATANH: [f32; 4] = [2.885_39, 0.961_796_7, 0.577_078, 0.412_198_6];

/// 2 to a power from -126 to less than 128, off by at most 2^-21 of it.
fn exp2(x: f32) -> f32 {
    let whole = (x + 0.5).floor();
    let r = x - whole;
    let mut sum = EXP[6];
    for c in [EXP[5], EXP[4], EXP[3], EXP[2], EXP[1], EXP[0]] {
        sum = sum * r + c;
    }
    f32::from_bits(sum.to_bits().wrapping_add_signed((whole as i32) << 23))
}

/// `(ln 2)^i / i!`
const EXP: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_5,
    0.055_504_11,
    0.009_618_129,
    0.001_333_355_8,
    0.000_154_035_3,
];

/// The numbers that a block's codes stand for.
#[derive(Clone, Copy, Debug)]
struct Scale {
    least: f32,
    step: f32,
}

impl Scale {
    fn new([least, greatest]: [f32; 2]) -> Self {
        let step = (greatest - least) / STEPS;
        Self { least, step }
    }

    fn magnitude(self, code: u32) -> f32 {
        if code == 0 {
            return 0.0;
        }
        exp2(self.least + (code - 1) as f32 * self.step)
    }

    /// The code of the magnitude with these bits.
    fn code(self, bits: u32) -> u32 {
        if bits < SMALLEST {
            return 0;
        }
        let above = log2(bits) - self.least;
        let lower = if above < 0.0 {
            0
        } else if self.step > 0.0 {
            // Within f32's reach; what rounding puts above the last step but one is found from there.
            ((above / self.step).floor() as u32 + 1).min(GREATEST - 1)
        } else {
            return 1;
        };
        let x = f32::from_bits(bits);
        let (below, beyond) = (x - self.magnitude(lower), self.magnitude(lower + 1) - x);
        lower + u32::from(below > beyond)
    }
}

/// A block's codes, and the least and the greatest logarithm.
pub fn pack(numbers: &[f32; BLOCK]) -> ([u8; CODES], [f32; 2]) {
    let (mut least, mut greatest) = (u32::MAX, 0);
    for x in numbers {
        let bits = x.abs().to_bits();
        greatest = greatest.max(bits);
        if bits >= SMALLEST {
            least = least.min(bits);
        }
    }
    let mut codes = [0; CODES];
    if greatest >= INFINITY {
        return (codes, [f32::NAN; 2]);
    }
    if greatest < SMALLEST {
        return (codes, [0.0; 2]);
    }
    let greatest = log2(greatest);
    let least = log2(least);
    let clipped = greatest - ORDERS;
    let least = if least < clipped { clipped } else { least };
    let scale = Scale::new([least, greatest]);
    for (i, x) in numbers.iter().enumerate() {
        let sign = if x.is_sign_negative() { SIGN } else { 0 };
        let code = sign | scale.code(x.abs().to_bits());
        codes[i] = code as u8;
        codes[BLOCK + i / 4] |= ((code >> 8) << (i % 4 * 2)) as u8;
    }
    (codes, [least, greatest])
}

/// The numbers of a block.
pub fn unpack(codes: &[u8; CODES], beside: [f32; 2]) -> [f32; BLOCK] {
    if beside[0].is_nan() {
        return [f32::NAN; BLOCK];
    }
    let scale = Scale::new(beside);
    std::array::from_fn(|i| {
        let upper = u32::from(codes[BLOCK + i / 4]) >> (i % 4 * 2) & 3;
        let code = upper << 8 | u32::from(codes[i]);
        let magnitude = scale.magnitude(code & GREATEST);
        if code & SIGN == 0 {
            magnitude
        } else {
            -magnitude
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_and_powers_are_as_good_as_promised() {
        let mut worst = (0f64, 0f64);
        for bits in (SMALLEST..INFINITY).step_by(4099) {
            let x = f64::from(f32::from_bits(bits));
            let (got, want) = (f64::from(log2(bits)), x.log2());
            let rounding = want.abs() * 2f64.powi(-24);
            worst.0 = worst.0.max((got - want).abs() - rounding);
        }
        for i in 0..2_000_000 {
            let x = -126.0 + i as f32 * (253.99 / 2e6);
            let (got, want) = (f64::from(exp2(x)), f64::from(x).exp2());
            worst.1 = worst.1.max((got / want - 1.0).abs());
        }
        assert!(worst.0 <= 2f64.powi(-22), "log2: {:e}", worst.0);
        assert!(worst.1 <= 2f64.powi(-21), "exp2: {:e}", worst.1);
        // Powers of two are exact, both ways.
        for e in -126..128 {
            let power = 2f32.powi(e);
            assert_eq!(log2(power.to_bits()), e as f32);
            assert_eq!(exp2(e as f32), power);
        }
    }

    fn back(numbers: &[f32; BLOCK]) -> [f32; BLOCK] {
        let (codes, beside) = pack(numbers);
        unpack(&codes, beside)
    }

    #[test]
    fn every_number_gets_the_nearest_code() {
        // bf16 numbers of many sizes, both signs.
        let x: [f32; BLOCK] = std::array::from_fn(|i| {
            let bits = (0x3000 + i as u32 * 0x31) << 16 | (i as u32 % 2) << 31;
            f32::from_bits(bits)
        });
        let (codes, beside) = pack(&x);
        let (least, greatest) = (f64::from(beside[0]), f64::from(beside[1]));
        let step = (greatest - least) / f64::from(STEPS);
        let all: Vec<f64> = [0.0]
            .into_iter()
            .chain((0..511).map(|c| (least + f64::from(c) * step).exp2()))
            .collect();
        for (x, y) in x.iter().zip(unpack(&codes, beside)) {
            let (size, got) = (f64::from(x.abs()), f64::from(y.abs()));
            let nearest = all
                .iter()
                .map(|c| (c - size).abs())
                .fold(f64::MAX, f64::min);
            let off = (got - size).abs();
            assert!(
                off <= nearest + size * 1e-5,
                "{y} of {x}: {off} for {nearest}"
            );
            assert!(y == 0.0 || x.is_sign_negative() == y.is_sign_negative());
        }
    }

    #[test]
    fn extremes_of_a_block() {
        assert_eq!(back(&[0.0; BLOCK]), [0.0; BLOCK]);
        // Equal magnitudes take one code.
        let mut equal = [0.375f32; BLOCK];
        (equal[1], equal[2]) = (-0.375, 0.0);
        let got = back(&equal);
        for (x, y) in equal.iter().zip(got) {
            assert!((x - y).abs() <= x.abs() * 1e-6, "{y} of {x}");
        }
        assert_eq!((got[2], got[0]), (0.0, -got[1]));
        // What is 2^-40 of the greatest is nothing; 0.9 of the least code counts as it.
        let mut wide = [1f32; BLOCK];
        (wide[0], wide[1]) = (2f32.powi(-40), 0.9 * 2f32.powi(-32));
        let got = back(&wide);
        assert_eq!(got[..3], [0.0, 2f32.powi(-32), 1.0]);
        // The whole range of f32, but what is subnormal.
        let mut edges = [f32::from_bits(SMALLEST); BLOCK];
        edges[5] = f32::from_bits(1);
        assert_eq!(back(&edges)[4..6], [f32::from_bits(SMALLEST), 0.0]);
        let most = f32::from_bits(0x7F7F_0000);
        let got = back(&[-most; BLOCK])[7];
        assert!(got.is_finite() && (got / most + 1.0).abs() < 1e-5, "{got}");
    }

    #[test]
    fn what_is_no_number_spoils_its_block() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1f32; BLOCK];
            x[77] = bad;
            assert!(back(&x).iter().all(|y| y.is_nan()), "{bad}");
        }
    }
}
