//! Times, and what is told of them.

use anyhow::Result;
use std::time::Instant;

/// The middle of some figures, or the mean of the two in the middle; NaN for none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

/// Microseconds that a call takes, over so many calls in a row.
///
/// # Errors
/// The call's.
pub fn time_us(calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / calls as f64)
}

/// Two ways to do the same, timed in turn, so that both meet the machine in the same state.
#[derive(Clone, Debug, Default)]
pub struct Pairs {
    /// Microseconds of the one, and of the other.
    pub us: Vec<[f64; 2]>,
}

impl Pairs {
    /// Times both `pairs` times; who goes first alternates.
    ///
    /// # Errors
    /// Those of `time`, which is called with 0 for the one and 1 for the other.
    pub fn take(pairs: usize, mut time: impl FnMut(usize) -> Result<f64>) -> Result<Self> {
        let mut us = Vec::new();
        for pair in 0..pairs {
            let mut both = [0.0; 2];
            for turn in 0..2 {
                let which = (pair + turn) % 2;
                both[which] = time(which)?;
            }
            us.push(both);
        }
        Ok(Self { us })
    }

    /// The slowest rank of every time.
    pub fn slowest(ranks: &[Self]) -> Self {
        let mut ranks = ranks.iter();
        let mut all = ranks.next().cloned().unwrap_or_default();
        for rank in ranks {
            for (all, rank) in all.us.iter_mut().zip(&rank.us) {
                *all = [all[0].max(rank[0]), all[1].max(rank[1])];
            }
        }
        all
    }

    /// Median of the one (0) or the other (1).
    pub fn median_us(&self, which: usize) -> f64 {
        median(&self.us.iter().map(|pair| pair[which]).collect::<Vec<_>>())
    }

    /// What the one takes for every microsecond of the other: least, median, most over the pairs.
    pub fn ratio(&self) -> [f64; 3] {
        let ratios: Vec<f64> = self.us.iter().map(|[one, other]| one / other).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        [least, median(&ratios), most]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn pairs_alternate_and_keep_their_sides() {
        let mut order = Vec::new();
        let pairs = Pairs::take(3, |which| {
            order.push(which);
            Ok(if which == 0 { 30.0 } else { 10.0 })
        });
        let pairs = pairs.unwrap();
        assert_eq!(order, [0, 1, 1, 0, 0, 1]);
        assert_eq!(pairs.us, [[30.0, 10.0]; 3]);
        assert_eq!(pairs.ratio(), [3.0; 3]);
    }

    #[test]
    fn the_slowest_rank_counts_each_time() {
        let rank = |us: &[[f64; 2]]| Pairs { us: us.to_vec() };
        let all = Pairs::slowest(&[
            rank(&[[1.0, 5.0], [8.0, 2.0]]),
            rank(&[[4.0, 3.0], [2.0, 4.0]]),
        ]);
        assert_eq!(all.us, [[4.0, 5.0], [8.0, 4.0]]);
        assert_eq!([all.median_us(0), all.median_us(1)], [6.0, 4.5]);
    }
}
