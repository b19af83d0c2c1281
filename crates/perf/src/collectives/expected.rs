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

/// What is called, and over how much.
pub type Call = (Which, ReduceOp, Extent);

/// Elements of which every one comes again after as many as there are numbers.
struct Repeated {
    numbers: Vec<f32>,
    /// The number that the first element is.
    from: usize,
    elements: usize,
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

    /// The first elements of what a rank brings, as they lie in memory.
    pub fn bytes(&self, rank: usize, elements: usize) -> Vec<u8> {
        self.stored(&Repeated::new(self.numbers[rank].clone(), 0, elements))
    }

    /// In rank order in f32, beginning with rank 0's values, until they repeat. The one rounding is left to whoever stores them.
    fn reduced(&self, op: ReduceOp) -> Vec<f32> {
        let mut all = self.numbers.iter();
        let mut sums = all.next().cloned().unwrap_or_default();
        for numbers in all {
            for (x, &y) in sums.iter_mut().zip(numbers) {
                *x = match op {
                    ReduceOp::Sum | ReduceOp::Avg => *x + y,
                    ReduceOp::Prod => *x * y,
                    ReduceOp::Max => x.max(y),
                    ReduceOp::Min => x.min(y),
                };
            }
        }
        if op == ReduceOp::Avg {
            for x in &mut sums {
                *x /= self.numbers.len() as f32;
            }
        }
        sums
    }

    /// What `rank` gets, piece by piece.
    fn wanted(&self, (which, op, extent): Call, rank: usize) -> Vec<Repeated> {
        let Extent { all, share } = extent;
        match which {
            Which::AllReduce => vec![Repeated::new(self.reduced(op), 0, all)],
            Which::ReduceScatter => {
                vec![Repeated::new(self.reduced(op), rank * share, share)]
            }
            Which::AllGather => {
                let each = self.numbers.iter();
                each.map(|n| Repeated::new(n.clone(), 0, share)).collect()
            }
            Which::Broadcast => vec![Repeated::new(self.numbers[ROOT].clone(), 0, all)],
            Which::AllToAll => {
                let each = self.numbers.iter();
                each.map(|n| Repeated::new(n.clone(), rank * share, share))
                    .collect()
            }
        }
    }

    /// As it lies in memory. What repeats is stored once and copied from then on.
    fn stored(&self, repeated: &Repeated) -> Vec<u8> {
        let mut once = Vec::new();
        for &x in &repeated.numbers {
            self.float.store(x, &mut once);
        }
        let all = repeated.elements * self.float.bytes();
        let mut bytes = Vec::with_capacity(all);
        let mut from = repeated.from * self.float.bytes();
        while bytes.len() < all {
            let to = once.len().min(from + all - bytes.len());
            bytes.extend_from_slice(&once[from..to]);
            from = 0;
        }
        bytes
    }

    /// Compares what `rank` got with what it should have.
    pub fn check(&self, call: Call, rank: usize, closeness: Closeness, got: &[u8]) -> Result<()> {
        let pieces = self.wanted(call, rank);
        let wanted = || pieces.iter().flat_map(Repeated::iter);
        let width = self.float.bytes();
        let count = got.len() / width;
        match closeness {
            Closeness::Exact => {
                let stored: Vec<_> = pieces.iter().map(|p| self.stored(p)).collect();
                let bytes = stored.concat();
                if got == bytes {
                    return Ok(());
                }
                let differ = got.iter().zip(&bytes).position(|(a, b)| a != b);
                let i = differ.map_or(bytes.len().min(got.len()), |at| at) / width;
                let is = got.get(i * width..(i + 1) * width);
                Err(anyhow!(
                    "element {i} of {count} is {:?}, and should be {:?} rounded",
                    is.map(|is| self.float.load(is)),
                    wanted().nth(i)
                ))
            }
            Closeness::Rounded => {
                let (mut error, mut size) = (0.0, 0.0);
                let mut wanted = wanted();
                for got in got.chunks(PERIOD * width) {
                    for (value, wanted) in self.float.load(got).into_iter().zip(&mut wanted) {
                        error += (f64::from(value) - f64::from(wanted)).powi(2);
                        size += f64::from(wanted).powi(2);
                    }
                }
                let (error, size) = (error.sqrt(), size.sqrt());
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

impl Repeated {
    fn new(numbers: Vec<f32>, from: usize, elements: usize) -> Self {
        Self {
            from: from % numbers.len(),
            numbers,
            elements,
        }
    }

    fn iter(&self) -> impl Iterator<Item = f32> + use<'_> {
        let all = self.numbers.iter().cycle().skip(self.from);
        all.take(self.elements).copied()
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
        assert_eq!(inputs.reduced(ReduceOp::Sum)[0], 1.0 + 1.0 / 128.0);
        assert_eq!(inputs.reduced(ReduceOp::Sum)[1], 16_777_216.0);
        assert_eq!(inputs.reduced(ReduceOp::Max)[1], 16_777_216.0);
        assert_eq!(inputs.reduced(ReduceOp::Min)[1], 1.0);
        assert_eq!(inputs.reduced(ReduceOp::Prod)[0], 1.0 / 65_536.0);
        assert_eq!(inputs.reduced(ReduceOp::Avg)[1], 16_777_216.0 / 3.0);
    }

    #[test]
    fn every_collective_gives_every_rank_what_is_its_own() {
        let inputs = Inputs::new(7, Float::F32, 3);
        let want = |which, rank, i| {
            let pieces = inputs.wanted((which, ReduceOp::Sum, SMALL), rank);
            pieces.iter().flat_map(Repeated::iter).nth(i)
        };
        let sum = inputs.reduced(ReduceOp::Sum)[20];
        assert_eq!(want(Which::AllReduce, 2, 20), Some(sum));
        assert_eq!(want(Which::ReduceScatter, 2, 4), Some(sum));
        assert_eq!(want(Which::AllGather, 0, 20), Some(inputs.numbers[2][4]));
        assert_eq!(
            want(Which::Broadcast, 2, 20),
            Some(inputs.numbers[ROOT][20])
        );
        assert_eq!(want(Which::AllToAll, 1, 20), Some(inputs.numbers[2][12]));
        for (which, elements) in [
            (Which::AllReduce, 24),
            (Which::ReduceScatter, 8),
            (Which::AllGather, 24),
            (Which::Broadcast, 24),
            (Which::AllToAll, 24),
        ] {
            assert!(want(which, 1, elements - 1).is_some());
            assert_eq!(want(which, 1, elements), None);
        }
    }

    #[test]
    fn numbers_repeat_after_so_many_wherever_one_begins() {
        let inputs = Inputs::new(5, Float::F16, 2);
        for (from, elements) in [
            (0, 3),
            (7, PERIOD),
            (3 * PERIOD - 2, 2 * PERIOD + 5),
            (9, 0),
        ] {
            let numbers = inputs.numbers[1].clone();
            let each = (from..from + elements).map(|i| numbers[i % PERIOD]);
            let each: Vec<f32> = each.collect();
            let repeated = Repeated::new(numbers.clone(), from, elements);
            assert_eq!(repeated.iter().collect::<Vec<_>>(), each);
            assert_eq!(inputs.stored(&repeated), stored(Float::F16, &each));
        }
    }

    #[test]
    fn a_single_wrong_bit_and_what_was_never_written_are_found() {
        let call = (Which::AllReduce, ReduceOp::Sum, SMALL);
        for float in [Float::Bf16, Float::F16, Float::F32] {
            let inputs = Inputs::new(3, float, 3);
            let right: Vec<f32> = (0..24).map(|i| inputs.reduced(ReduceOp::Sum)[i]).collect();
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
