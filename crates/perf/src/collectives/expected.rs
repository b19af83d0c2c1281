//! What every rank brings, and what must come out of it.

use super::which::{Extent, Which};
use crate::{float::Float, ranks::Rank};
use anyhow::{Result, anyhow, ensure};
use brigade::ReduceOp;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Numbers repeat after so many of them. It is prime, so that nothing that is laid out in tiles or shares falls together with
/// it: what lands in a wrong place is a wrong number.
const PERIOD: usize = 65_521;

/// Who has the data of a broadcast.
pub const ROOT: usize = 0;

/// What every rank brings. Every rank knows all of it.
pub struct Inputs {
    float: Float,
    /// Of each rank, as the type stores them.
    numbers: Vec<Vec<f32>>,
}

/// How closely results are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closeness {
    /// The same bits.
    Exact,
    /// As far off as so many sums in any order can be, each rounded.
    Rounded,
}

impl Inputs {
    /// Other numbers in every run: rank 0 draws the seed.
    pub fn fresh(rank: &Rank, float: Float) -> Result<Self> {
        let drawn: u64 = rand::rng().random();
        let shared = rank.share(&drawn.to_le_bytes())?;
        let seed = shared.first().and_then(|s| s.as_slice().try_into().ok());
        let seed = seed.ok_or_else(|| anyhow!("rank 0 sent something else than a seed"))?;
        Ok(Self::new(u64::from_le_bytes(seed), float, rank.size()))
    }

    /// Numbers between 1/2 and 2 or below zero: neither their sums nor their products become too large or too small, some
    /// sums cancel, and none is what memory holds before it is written.
    fn new(seed: u64, float: Float, ranks: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut table = || {
            let mut stored = Vec::new();
            for _ in 0..PERIOD {
                let size: f32 = rng.random_range(0.5..2.0);
                float.store(if rng.random() { size } else { -size }, &mut stored);
            }
            float.load(&stored)
        };
        Self {
            float,
            numbers: (0..ranks).map(|_| table()).collect(),
        }
    }

    fn at(&self, rank: usize, i: usize) -> f32 {
        self.numbers[rank][i % PERIOD]
    }

    /// The first elements of what a rank brings, as they lie in memory.
    pub fn bytes(&self, rank: usize, elements: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(elements * self.float.bytes());
        for i in 0..elements {
            self.float.store(self.at(rank, i), &mut bytes);
        }
        bytes
    }

    /// In rank order in f32, beginning with rank 0's value. The one rounding is left to whoever stores it.
    fn reduced(&self, op: ReduceOp, i: usize) -> f32 {
        let first = self.at(0, i);
        let sum = (1..self.numbers.len()).fold(first, |x, rank| {
            let y = self.at(rank, i);
            match op {
                ReduceOp::Sum | ReduceOp::Avg => x + y,
                ReduceOp::Prod => x * y,
                ReduceOp::Max => x.max(y),
                ReduceOp::Min => x.min(y),
            }
        });
        match op {
            ReduceOp::Avg => sum / self.numbers.len() as f32,
            _ => sum,
        }
    }

    /// Element `i` of what `rank` gets.
    fn wanted(&self, which: Which, op: ReduceOp, extent: Extent, rank: usize, i: usize) -> f32 {
        match which {
            Which::AllReduce => self.reduced(op, i),
            Which::ReduceScatter => self.reduced(op, rank * extent.share + i),
            Which::AllGather => self.at(i / extent.share, i % extent.share),
            Which::Broadcast => self.at(ROOT, i),
        }
    }

    /// Compares what `rank` got with what it should have.
    pub fn check(
        &self,
        (which, op, extent): (Which, ReduceOp, Extent),
        rank: usize,
        closeness: Closeness,
        got: &[u8],
    ) -> Result<()> {
        let count = got.len() / self.float.bytes();
        let wanted: Vec<f32> = (0..count)
            .map(|i| self.wanted(which, op, extent, rank, i))
            .collect();
        let values = self.float.load(got);
        match closeness {
            Closeness::Exact => {
                let mut bytes = Vec::with_capacity(got.len());
                for &x in &wanted {
                    self.float.store(x, &mut bytes);
                }
                let Some(at) = got.iter().zip(&bytes).position(|(a, b)| a != b) else {
                    return Ok(());
                };
                let i = at / self.float.bytes();
                Err(anyhow!(
                    "element {i} of {count} is {}, and should be {} rounded",
                    values[i],
                    wanted[i]
                ))
            }
            Closeness::Rounded => {
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let pairs = || values.iter().zip(&wanted);
                let error = norm(&mut pairs().map(|(&a, &b)| f64::from(a) - f64::from(b)));
                let size = norm(&mut wanted.iter().map(|&x| x.into()));
                let most = self.float.epsilon() * self.numbers.len() as f64;
                // Not the other way round: poison is no number, and nothing compares with that.
                ensure!(
                    error <= most * size,
                    "relative error {:.1e} over {count} elements, and {most:.1e} at most",
                    error / size
                );
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements of 16 bytes for each of three ranks.
    const SMALL: Extent = Extent { all: 24, share: 8 };

    fn stored(float: Float, values: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &x in values {
            float.store(x, &mut bytes);
        }
        bytes
    }

    #[test]
    fn numbers_are_never_zero_and_other_in_every_rank_and_run() {
        for float in [Float::Bf16, Float::F16, Float::F32] {
            let [one, other] = [1, 2].map(|seed| Inputs::new(seed, float, 2));
            assert!(one.numbers.iter().flatten().all(|x| x.abs() >= 0.5));
            assert_ne!(one.numbers[0], one.numbers[1]);
            assert_ne!(one.numbers, other.numbers);
            assert_eq!(one.bytes(1, 70_000).len(), 70_000 * float.bytes());
        }
    }

    #[test]
    fn sums_are_taken_in_rank_order_and_rounded_once() {
        let mut inputs = Inputs::new(1, Float::Bf16, 3);
        // In bf16, 1 + 1/256 is 1, twice; in f32 both halves count.
        for (rank, x) in [1.0, 1.0 / 256.0, 1.0 / 256.0].into_iter().enumerate() {
            inputs.numbers[rank][0] = x;
        }
        // In f32, 2^24 + 1 is 2^24; from the other end it would be 2^24 + 2.
        for (rank, x) in [16_777_216.0, 1.0, 1.0].into_iter().enumerate() {
            inputs.numbers[rank][1] = x;
        }
        assert_eq!(inputs.reduced(ReduceOp::Sum, 0), 1.0 + 1.0 / 128.0);
        assert_eq!(inputs.reduced(ReduceOp::Sum, 1), 16_777_216.0);
        assert_eq!(inputs.reduced(ReduceOp::Max, 1), 16_777_216.0);
        assert_eq!(inputs.reduced(ReduceOp::Min, 1), 1.0);
        assert_eq!(inputs.reduced(ReduceOp::Prod, 0), 1.0 / 65_536.0);
        assert_eq!(inputs.reduced(ReduceOp::Avg, 1), 16_777_216.0 / 3.0);
    }

    #[test]
    fn every_collective_gives_every_rank_what_is_its_own() {
        let inputs = Inputs::new(7, Float::F32, 3);
        let want = |which, rank, i| inputs.wanted(which, ReduceOp::Sum, SMALL, rank, i);
        assert_eq!(
            want(Which::AllReduce, 2, 20),
            inputs.reduced(ReduceOp::Sum, 20)
        );
        assert_eq!(
            want(Which::ReduceScatter, 2, 4),
            inputs.reduced(ReduceOp::Sum, 20)
        );
        assert_eq!(want(Which::AllGather, 0, 20), inputs.at(2, 4));
        assert_eq!(want(Which::Broadcast, 2, 20), inputs.at(ROOT, 20));
    }

    #[test]
    fn a_single_wrong_bit_and_what_was_never_written_are_found() {
        let call = (Which::AllReduce, ReduceOp::Sum, SMALL);
        for float in [Float::Bf16, Float::F16, Float::F32] {
            let inputs = Inputs::new(3, float, 3);
            let right: Vec<f32> = (0..24).map(|i| inputs.reduced(ReduceOp::Sum, i)).collect();
            let mut got = stored(float, &right);
            let check = |closeness, got: &[u8]| inputs.check(call, 1, closeness, got);
            for closeness in [Closeness::Exact, Closeness::Rounded] {
                check(closeness, &got).unwrap();
                let poison = vec![0xFF; got.len()];
                assert!(check(closeness, &poison).is_err());
                assert!(check(closeness, &vec![0; got.len()]).is_err());
            }
            got[5 * float.bytes()] ^= 1;
            let told = check(Closeness::Exact, &got).unwrap_err().to_string();
            assert!(told.starts_with("element 5 of 24"), "{told}");
            check(Closeness::Rounded, &got).unwrap();
        }
    }
}
