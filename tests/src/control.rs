//! Negative controls: the checks of this suite find what they are there to find.

use crate::{
    backend::panic_text,
    check::{assert_bits, assert_close, is_poisoned},
    gather_linear::{self, config},
    layer::{FLOATS, LoraKind, Spec},
    linear_reduce_scatter as twin,
    matrix::{Matrix, to_bytes},
    oracle,
    suite::{Suite, World},
};
use brigade_device::{DataType, OverlapMode, ReduceOp};
use rand::Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The text with which a check fails.
fn failure(what: &str, check: impl FnOnce()) -> String {
    match catch_unwind(AssertUnwindSafe(check)) {
        Ok(()) => panic!("{what} was not noticed"),
        Err(payload) => panic_text(&*payload),
    }
}

/// One element negated, or lost, or an output that nobody wrote, is noticed in every type.
fn comparisons(world: &World) {
    let mut rng = world.rng();
    for dtype in FLOATS {
        let m = Matrix::random(&mut rng, dtype, &[60, 50], 1.0);
        let place = rng.random_range(0..m.values.len());
        let with = |value: f64| {
            let mut changed = m.values.clone();
            changed[place] = value;
            changed
        };
        let text = failure("a negated element", || {
            assert_close(&with(-m.values[place]), &m.values, dtype, "control");
        });
        assert!(text.contains(&format!("element {place} ")), "{text}");
        for value in [f64::NAN, 0.0, f64::INFINITY, m.values[place] + 0.2] {
            failure("a changed element", || {
                assert_close(&with(value), &m.values, dtype, "control");
            });
        }
        failure("a missing element", || {
            assert_close(&m.values[1..], &m.values, dtype, "control");
        });
        let poison = vec![0xFF; m.values.len() * dtype.bytes()];
        assert!(is_poisoned(dtype, &poison));
        failure("an output that nobody wrote", || {
            let values = crate::matrix::to_f64(dtype, &poison);
            assert_close(&values, &m.values, dtype, "control");
        });
        assert!(!is_poisoned(dtype, &m.bytes()));

        let mut bits = m.bytes();
        bits[place * dtype.bytes()] ^= 1;
        let text = failure("one bit", || {
            assert_bits(&bits, &m.bytes(), dtype, "control")
        });
        assert!(text.contains(&format!("element {place} ")), "{text}");
    }
}

/// The reduction oracle knows the order of ranks, the one rounding, and signed zeros.
fn reduction_oracle(_: &World) {
    let sum = |inputs: &[f32], output| {
        let inputs: Vec<_> = inputs.iter().map(|&x| vec![x]).collect();
        oracle::reduce(ReduceOp::Sum, &inputs, output)
    };
    let (large, small) = (1e8f32, 3.0f32);
    let f32 = DataType::F32;
    assert_ne!(
        sum(&[large, small, -large], f32),
        sum(&[large, -large, small], f32)
    );
    assert_eq!(sum(&[-0.0, -0.0], f32), (-0.0f32).to_ne_bytes());
    // Rounded after every addition, bf16 would lose all of the small ones.
    let many = [256.0f32, 0.75, 0.75, 0.75];
    assert_eq!(
        sum(&many, DataType::BF16),
        to_bytes(DataType::BF16, &[258.0])
    );
}

/// A case whose weight differs from the one that the oracle used fails, on the device too, in every mode.
fn wrong_result(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::even(&mut rng, world.size).with(|s| s.lora = LoraKind::One);
    let mut gather = gather_linear::Case::new(&mut rng, spec.clone());
    let mut scatter = twin::Case::new(&mut rng, spec);
    // Of one rank alone, so that nothing else takes it back, and far more than any element may be off.
    for layers in [&mut gather.layers, &mut scatter.layers] {
        layers[0].weight.values[0] += 40.0;
    }
    let run = |call: fn(&crate::Rank, &gather_linear::Case, &twin::Case)| {
        let (gather, scatter) = (gather.clone(), scatter.clone());
        failure("a wrong weight", || {
            world.run(&config(), move |rank| call(rank, &gather, &scatter));
        })
    };
    let text = run(|rank, gather, _| gather.run_forced(rank, Some(OverlapMode::Off)));
    assert!(text.contains("instead of"), "{text}");
    let text = run(|rank, _, scatter| drop(scatter.run(rank, Some(OverlapMode::Off))));
    assert!(text.contains("instead of"), "{text}");
}

/// A rank that fails is named, and the others, who wait for it, end at once.
fn failing_rank(world: &World) {
    let culprit = world.rng().random_range(0..world.size);
    let start = Instant::now();
    let text = failure("a rank that panics", || {
        world.run(&config(), move |rank| {
            rank.lease().barrier().unwrap();
            assert!(rank.rank != culprit, "this rank gives up");
            rank.lease().barrier().unwrap();
        });
    });
    let named = format!("rank {culprit} of {}", world.size);
    assert!(text.contains(&named) && text.contains("gives up"), "{text}");
    assert!(start.elapsed() < Duration::from_secs(5), "others waited");
}

/// Adds the controls.
pub fn add(suite: &mut Suite) {
    suite.add_at(1, "control/comparisons", comparisons);
    suite.add_at(1, "control/reduction_oracle", reduction_oracle);
    suite.add("control/wrong_result", wrong_result);
    suite.add("control/failing_rank", failing_rank);
}
