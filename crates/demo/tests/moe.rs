//! A layer of experts gives what its evaluation in f64 gives, however many ranks it is spread over.
#![allow(clippy::unwrap_used)]

use brigade::DeviceChoice;
use brigade_demo::{
    Error,
    moe::{
        ExpertSource, ExpertWeights, MoeShape, Options, Outcome, RandomExperts, Scoring, Sum, run,
    },
};
use half::bf16;
use std::{ops::Range, time::Duration};

fn source() -> RandomExperts {
    RandomExperts {
        shape: MoeShape::small(),
        seed: 5,
    }
}

fn options(tokens: &[usize]) -> Options {
    Options {
        tokens: tokens.to_vec(),
        repeats: 2,
        device: DeviceChoice::Host,
        deadline: Duration::from_secs(20),
        ..Options::default()
    }
}

/// All tokens, in their order.
fn rows(outcome: &Outcome) -> Vec<Vec<f64>> {
    let mut all: Vec<_> = outcome.ranks.iter().flat_map(|r| &r.sampled).collect();
    all.sort_by_key(|s| s.token);
    let wide = |bits: &u16| bf16::from_bits(*bits).to_f64();
    all.iter()
        .map(|s| s.bits.iter().map(wide).collect())
        .collect()
}

#[test]
fn layers_give_what_f64_gives() {
    let groups: [&[usize]; 5] = [&[9], &[4, 3], &[5, 0, 2], &[1, 8, 0, 3], &[0, 0, 1, 0]];
    for tokens in groups {
        for (sum, fp8) in [(Sum::Rank, false), (Sum::Expert, false), (Sum::Rank, true)] {
            let options = Options {
                sum,
                fp8,
                ..options(tokens)
            };
            let outcome = run(&source(), &options).unwrap();
            let agreement = outcome.compare(&source());
            agreement.verdict().unwrap();
            let told = format!("{tokens:?} {sum:?} {fp8}: {agreement:?}");
            let all: usize = tokens.iter().sum();
            assert_eq!(agreement.compared + agreement.unclear, all, "{told}");
            assert_eq!(outcome.rows_per_rank().iter().sum::<usize>(), 3 * all);
            // The bound is for roundings that are as one, and these are not: a rounding to bf16 adds 1.4e-6. There are three where each expert's
            // result travels, and four where a rank's sum does. Rows in fp8, by scales that are powers of two, outdo them all.
            let most = match (sum, fp8) {
                (_, true) => 2e-3,
                (Sum::Expert, false) => 5e-6,
                (Sum::Rank, false) => 8e-6,
            };
            assert!(agreement.diff < most, "{told}");
            // The roundings are there, and those of fp8 are greater.
            let least = if fp8 { 1e-5 } else { 1e-8 };
            assert!(agreement.diff > least, "{told}");
            assert!(agreement.max_error > 0.0, "{told}");
        }
    }
}

#[test]
fn every_scoring_and_odd_dimensions_agree() {
    let odd = MoeShape {
        hidden: 24,
        feed_forward: 37,
        experts: 5,
        top_k: 5,
        ..MoeShape::small()
    };
    let one = MoeShape {
        experts: 1,
        top_k: 1,
        ..MoeShape::small()
    };
    for shape in [MoeShape::small(), odd, one] {
        for scoring in [
            Scoring::SoftmaxOfChosen,
            Scoring::SoftmaxRenormalized,
            Scoring::Sigmoid { factor: 2.5 },
        ] {
            let source = RandomExperts {
                shape: MoeShape {
                    scoring,
                    ..shape.clone()
                },
                seed: 8,
            };
            let outcome = run(&source, &options(&[3, 2, 4])).unwrap();
            outcome.compare(&source).verdict().unwrap();
        }
    }
}

#[test]
fn one_rank_and_four_agree_and_every_run_to_the_bit() {
    let diff = |a: &[Vec<f64>], b: &[Vec<f64>]| {
        let (a, b) = (a.concat(), b.concat());
        let pairs = || a.iter().zip(&b);
        let error: f64 = pairs().map(|(x, y)| (x - y) * (x - y)).sum();
        error / pairs().map(|(x, y)| x * x + y * y).sum::<f64>()
    };
    for sum in [Sum::Rank, Sum::Expert] {
        let of = |tokens: &[usize]| {
            let options = Options {
                sum,
                ..options(tokens)
            };
            run(&source(), &options).unwrap()
        };
        let (one, four) = (of(&[12]), of(&[4, 1, 0, 7]));
        let bound = one.compare(&source()).bound;
        let (one, four) = (rows(&one), rows(&four));
        assert_eq!(rows(&of(&[4, 1, 0, 7])), four);
        assert_eq!((one.len(), four.len()), (12, 12));
        assert!(diff(&one, &four) <= bound);
        if sum == Sum::Rank {
            // What ranks round, they round apart.
            assert_ne!(one, four);
        }
    }
}

/// Sound weights, but for one expert.
struct Broken {
    sound: RandomExperts,
    expert: usize,
    how: fn(&mut ExpertWeights),
}

impl ExpertSource for Broken {
    fn shape(&self) -> &MoeShape {
        self.sound.shape()
    }
    fn router(&self) -> Vec<f32> {
        self.sound.router()
    }
    fn expert(&self, number: usize) -> ExpertWeights {
        let mut weights = self.sound.expert(number);
        if number == self.expert {
            (self.how)(&mut weights);
        }
        weights
    }
    fn tokens(&self, which: Range<usize>) -> Vec<bf16> {
        self.sound.tokens(which)
    }
}

#[test]
fn broken_weights_are_found() {
    let tokens = [4, 0, 5];
    let sound = run(&source(), &options(&tokens)).unwrap();
    let slots: Vec<usize> = sound
        .ranks
        .iter()
        .flat_map(|r| r.rows_per_slot.clone())
        .collect();
    let expert = slots.iter().position(|&rows| rows > 0).unwrap();
    let ways: [fn(&mut ExpertWeights); 4] = [
        // One weight of 18432.
        |w| w.down[100] = bf16::from_f32(2.0),
        // One row of gate.
        |w| w.gate_up[..64].fill(bf16::ONE),
        |w| w.down.reverse(),
        |w| w.down[5] = bf16::NAN,
    ];
    for (which, how) in ways.into_iter().enumerate() {
        let broken = Broken {
            sound: source(),
            expert,
            how,
        };
        let outcome = run(&broken, &options(&tokens)).unwrap();
        let error = outcome.compare(&source()).verdict().unwrap_err();
        assert!(matches!(error, Error::Inexact { .. }), "{which}: {error}");
        if which > 1 {
            // The wider bound is not too wide for a whole matrix, or a NaN.
            let options = Options {
                fp8: true,
                ..options(&tokens)
            };
            let outcome = run(&broken, &options).unwrap();
            outcome.compare(&source()).verdict().unwrap_err();
        }
        if which < 3 {
            // It is the weights that are compared, not the layer that is broken.
            outcome.compare(&broken).verdict().unwrap();
        }
    }
}

/// A router that is another for the layer than for the comparison.
struct Astray(RandomExperts);

impl ExpertSource for Astray {
    fn shape(&self) -> &MoeShape {
        self.0.shape()
    }
    fn router(&self) -> Vec<f32> {
        let mut router = self.0.router();
        router.reverse();
        router
    }
    fn expert(&self, number: usize) -> ExpertWeights {
        self.0.expert(number)
    }
    fn tokens(&self, which: Range<usize>) -> Vec<bf16> {
        self.0.tokens(which)
    }
}

#[test]
fn other_experts_are_found() {
    let outcome = run(&Astray(source()), &options(&[3, 3])).unwrap();
    let error = outcome.compare(&source()).verdict().unwrap_err();
    assert!(error.to_string().starts_with("experts of token"), "{error}");
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |tokens: &[usize], repeats, top_k| {
        let source = RandomExperts {
            shape: MoeShape {
                top_k,
                ..MoeShape::small()
            },
            seed: 1,
        };
        let options = Options {
            repeats,
            ..options(tokens)
        };
        run(&source, &options).unwrap_err().to_string()
    };
    assert_eq!(refused(&[], 1, 3), "ranks is 0, wanted at least 1");
    assert_eq!(refused(&[0, 0], 1, 3), "tokens is 0, wanted at least 1");
    assert_eq!(refused(&[1], 0, 3), "repeats is 0, wanted at least 1");
    assert!(refused(&[1], 1, 8).contains("top_k is 8"));
}
