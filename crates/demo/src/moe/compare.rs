//! The layer in f64: every token by its experts, with no dispatch and no group.

use super::{ExpertSource, MoeShape, Outcome, Sampled};
use crate::{Error, Result};
use half::bf16;
use rayon::prelude::*;

/// Products of two numbers that a comparison may cost; where tokens need more, only some are compared.
const MOST_PRODUCTS: usize = 4_000_000_000;

/// Tokens that are compared at least.
const LEAST: usize = 4;

/// Greatest relative error of a rounding to bf16, which has eight digits: half of the last one.
const BF16: f64 = 1.0 / 256.0;

/// Greatest relative error of a rounding to fp8 e4m3, of numbers that are not too small for it.
const FP8: f64 = 1.0 / 16.0;

/// How far a layer is from its evaluation in f64.
#[derive(Clone, Debug)]
pub struct Agreement {
    /// Tokens that were compared.
    pub compared: usize,
    /// Tokens that were to be compared, but whose best experts left out and worst ones chosen have scores too close for f32.
    pub unclear: usize,
    /// `1 - 2 sum(x y) / sum(x^2 + y^2)` over all of them: half the square of the relative error.
    pub diff: f64,
    /// The greatest of a single token.
    pub worst_diff: f64,
    /// The greatest error of a single number.
    pub max_error: f64,
    /// What `worst_diff` may be.
    pub bound: f64,
    /// A token that went to other experts, those, and those of the evaluation.
    pub misrouted: Option<(usize, Vec<u32>, Vec<u32>)>,
}

impl Agreement {
    /// Whether the layer is as near as its roundings let it be.
    ///
    /// # Errors
    /// [`Error::Inexact`] if a token is further off than the bound; [`Error::Field`] if one went to other experts, or nothing
    /// could be compared.
    pub fn verdict(&self) -> Result<()> {
        if let Some((token, got, want)) = &self.misrouted {
            let field = format!("experts of token {token}");
            return Err(Error::field(
                field,
                format!("{got:?}"),
                format!("{want:?}, in any order"),
            ));
        }
        if self.compared == 0 {
            let got = format!("0, and {} unclear", self.unclear);
            return Err(Error::field("tokens compared", got, "at least 1"));
        }
        let worst = self.worst_diff.max(self.diff);
        // Neither of which may be a NaN, which `max` hides.
        if self.diff.is_finite() && worst <= self.bound {
            return Ok(());
        }
        Err(Error::Inexact {
            diff: self.diff,
            worst: self.worst_diff,
            bound: self.bound,
        })
    }
}

/// The greatest diff that roundings explain.
///
/// Rows in bf16 are what both start from. On the way the inner value of each expert, its result, a rank's sum and the sum of all are rounded,
/// each by at most `u = 2^-8`. The first three act on summands: were the errors of a token's k results as one, their sum were up to `sqrt(k)`
/// times as large beside that of results that are not. A relative error of `(3 sqrt(k) + 1) u` is a diff of half its square: 2e-4 for 2
/// experts, 7e-4 for 8. Errors are not as one: each rounding adds 1.4e-6 on average, and 6e-6 or less is usual. Rows in fp8 are off by up to `v = 2^-4`, once in
/// gate and once in up, which adds `2 v`.
fn bound(shape: &MoeShape, fp8: bool) -> f64 {
    let of_rows = if fp8 { 2.0 * FP8 } else { 0.0 };
    let error = of_rows + (3.0 * (shape.top_k as f64).sqrt() + 1.0) * BF16;
    error * error / 2.0
}

/// The tokens that are compared: all, or evenly spread ones if that takes too long.
pub(super) fn sample(shape: &MoeShape, tokens: usize) -> Vec<usize> {
    let cost = shape.top_k * 3 * shape.hidden * shape.feed_forward;
    let n = (MOST_PRODUCTS / cost.max(1)).max(LEAST).min(tokens);
    (0..n).map(|i| i * tokens / n).collect()
}

impl Outcome {
    /// Compares what was sampled with an evaluation in f64 of these weights, whose router decides anew.
    pub fn compare(&self, source: &dyn ExpertSource) -> Agreement {
        let sampled: Vec<&Sampled> = self.ranks.iter().flat_map(|r| &r.sampled).collect();
        let tokens: Vec<usize> = sampled.iter().map(|s| s.token).collect();
        let evaluated = evaluate(source, &tokens);
        let mut all = Agreement {
            compared: 0,
            unclear: 0,
            diff: 0.0,
            worst_diff: 0.0,
            max_error: 0.0,
            bound: bound(&self.shape, self.options.fp8),
            misrouted: None,
        };
        let (mut errors, mut squares) = (0.0, 0.0);
        for (got, want) in sampled.into_iter().zip(&evaluated) {
            let Some(want) = want else {
                all.unclear += 1;
                continue;
            };
            all.compared += 1;
            let mut chosen: Vec<u32> = want.chosen.iter().map(|c| c.0 as u32).collect();
            let mut experts = got.experts.clone();
            chosen.sort_unstable();
            experts.sort_unstable();
            if chosen != experts {
                all.misrouted.get_or_insert((got.token, experts, chosen));
            }
            // x^2 + y^2 - 2 x y is the square of the error.
            let (mut error, mut square) = (0.0, 0.0);
            for (&bits, y) in got.bits.iter().zip(&want.row) {
                let x = f64::from(bf16::from_bits(bits).to_f32());
                error += (x - y) * (x - y);
                square += x * x + y * y;
                all.max_error = all.max_error.max((x - y).abs());
            }
            all.worst_diff = all.worst_diff.max(ratio(error, square));
            errors += error;
            squares += square;
        }
        all.diff = ratio(errors, squares);
        all
    }
}

fn ratio(error: f64, square: f64) -> f64 {
    if square == 0.0 { 0.0 } else { error / square }
}

/// A token's row, and how it came to be.
struct Evaluated {
    chosen: Vec<(usize, f64)>,
    row: Vec<f64>,
}

/// Rows of tokens in f64; none where the choice of experts is not clear in f32. Of the experts' weights one is in memory at a time.
fn evaluate(source: &dyn ExpertSource, tokens: &[usize]) -> Vec<Option<Evaluated>> {
    let shape = source.shape();
    let router: Vec<f64> = source.router().into_iter().map(f64::from).collect();
    let row = |&token: &usize| -> Vec<f64> {
        let row = source.tokens(token..token + 1);
        row.iter().map(|v| f64::from(v.to_f32())).collect()
    };
    let rows: Vec<Vec<f64>> = tokens.iter().map(row).collect();
    let mut all: Vec<Option<Evaluated>> = rows
        .iter()
        .map(|x| {
            let chosen = clear_choice(shape, &router, x)?;
            let row = vec![0.0; shape.hidden];
            Some(Evaluated { chosen, row })
        })
        .collect();
    for expert in 0..shape.experts {
        let weight = |of: &Evaluated| of.chosen.iter().find(|c| c.0 == expert).map(|c| c.1);
        if !all.iter().flatten().any(|of| weight(of).is_some()) {
            continue;
        }
        let weights = source.expert(expert);
        for (x, of) in rows.iter().zip(&mut all) {
            let Some((weight, of)) = of.as_mut().and_then(|of| Some((weight(of)?, of))) else {
                continue;
            };
            let both = product(&weights.gate_up, x);
            let (gate, up) = both.split_at(shape.feed_forward);
            let inner: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            for (sum, y) in of.row.iter_mut().zip(product(&weights.down, &inner)) {
                *sum += weight * y;
            }
        }
    }
    all
}

/// A matrix `[outputs, inputs]` times a row.
fn product(matrix: &[bf16], x: &[f64]) -> Vec<f64> {
    let dot = |row: &[bf16]| -> f64 {
        let products = row.iter().zip(x).map(|(w, x)| f64::from(w.to_f32()) * x);
        products.sum()
    };
    matrix.par_chunks_exact(x.len()).map(dot).collect()
}

/// A token's experts, unless f32 may choose others.
///
/// A score is a sum of n products. In f32 its error is below `4 sqrt(n) 2^-24` times the sum of their magnitudes, unless roundings conspire
/// ([Higham and Mary 2019](https://doi.org/10.1137/18M1226312)), and much less where sums are taken in blocks. If the worst score
/// that is chosen leads the best that is not by more than twice that, the choice is clear.
fn clear_choice(shape: &MoeShape, router: &[f64], x: &[f64]) -> Option<Vec<(usize, f64)>> {
    let unit = 4.0 * (x.len() as f64).sqrt() / f64::from(1 << 24);
    let (mut scores, mut error) = (Vec::new(), 0f64);
    for row in router.chunks_exact(x.len()) {
        let products = || row.iter().zip(x).map(|(w, x)| w * x);
        scores.push(products().sum::<f64>());
        error = error.max(unit * products().map(f64::abs).sum::<f64>());
    }
    let chosen = shape.choose(&scores);
    let mut order = scores;
    order.sort_by(|a, b| b.total_cmp(a));
    let clear = match order.get(shape.top_k) {
        Some(next) => order[shape.top_k - 1] - next > 2.0 * error,
        None => true,
    };
    clear.then_some(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_scores_are_not_a_clear_choice() {
        let shape = MoeShape {
            hidden: 1,
            experts: 4,
            top_k: 2,
            ..MoeShape::small()
        };
        let clear = |router: [f64; 4]| clear_choice(&shape, &router, &[1.0]);
        assert!(clear([1.0, 0.5, 0.5 - 1e-7, 0.0]).is_none());
        assert!(clear([1.0, 0.5, 0.5, 0.0]).is_none());
        let chosen = clear([0.0, 0.5, 0.5 - 1e-5, 1.0]).unwrap();
        assert_eq!((chosen[0].0, chosen[1].0), (3, 1));
    }

    #[test]
    fn samples_are_all_or_evenly_spread() {
        assert_eq!(sample(&MoeShape::small(), 5), [0, 1, 2, 3, 4]);
        let some = sample(&MoeShape::mixtral(), 1100);
        assert_eq!((some.len(), some[0], some[1], some[10]), (11, 0, 100, 1000));
        assert_eq!(sample(&MoeShape::deepseek(), 2), [0, 1]);
    }

    #[test]
    fn bounds_are_what_their_derivation_says() {
        let of = |shape: MoeShape, fp8| format!("{:.1e}", bound(&shape, fp8));
        assert_eq!(of(MoeShape::mixtral(), false), "2.1e-4");
        assert_eq!(of(MoeShape::qwen3(), false), "6.9e-4");
        assert_eq!(of(MoeShape::qwen3(), true), "1.3e-2");
    }
}
