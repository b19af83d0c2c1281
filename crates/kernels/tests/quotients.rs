//! Kernels quantize by a product with the inverse of a scale, and a correction (`kernels/quantized.cuh`, `Divisor`). Each step is one operation
//! of IEEE 754, so it is the same here: it gives the bits of a division.

use proptest::prelude::*;

/// As the kernel has it.
fn corrected(x: f32, scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    let product = x * inverse;
    let left = scale.mul_add(product, -x);
    left.mul_add(-inverse, product)
}

/// Scales that kernels correct by; they divide by all others.
fn scales() -> impl Strategy<Value = f32> {
    let exponents = (127 - 64)..(127 + 64_u32);
    // All kinds of significands: any, nearly one, nearly two, and a few bits.
    let significands = prop_oneof![
        0..1_u32 << 23,
        0..64_u32,
        (1_u32 << 23) - 64..1 << 23,
        (0..23_u32).prop_map(|bit| 1 << bit),
    ];
    (exponents, significands).prop_map(|(e, s)| f32::from_bits(e << 23 | s))
}

/// Quotients may underflow to what is quantized as zero, so they are compared where they are normal.
fn same(x: f32, scale: f32) -> bool {
    let want = x / scale;
    !want.is_normal() || corrected(x, scale).to_bits() == want.to_bits()
}

proptest! {
    /// Of all numbers of bf16 that do not come near the ends of f32, by any scale.
    #[test]
    fn all_of_bf16(scale in scales()) {
        for high in 0..=u16::MAX {
            let x = f32::from_bits(u32::from(high) << 16);
            if x.abs() < 1e30 && x.abs() > 1e-30 && (x / scale).abs() < 512.0 {
                prop_assert!(same(x, scale), "{x:e} / {scale:e}");
            }
        }
    }

    /// Of quotients near halves, where a rounding decides, and of any.
    #[test]
    fn near_ties(scale in scales(), step in -127_i32..127, off in -4_i32..=4, any in any::<u32>()) {
        let tie = (step as f32 + 0.5) * scale;
        let x = f32::from_bits((tie.to_bits() as i32 + off) as u32);
        prop_assert!(same(x, scale), "{x:e} / {scale:e}");
        let significand = f32::from_bits(127 << 23 | any >> 9);
        prop_assert!(same(significand * scale, scale));
    }
}

/// Without the correction some of these would not hold.
#[test]
fn a_product_alone_does_not_do() {
    let differ = |scale: f32| {
        let numbers = (1..4096_u32).map(|i| i as f32);
        numbers
            .filter(move |x| x * (1.0 / scale) != x / scale)
            .count()
    };
    assert!(differ(3.0) > 100);
}
