//! Which rows go where, as every rank knows it beforehand, and how long the wire alone would take for them.

use brigade::{CombineSum, Machines, PlacementCall, plan::routes::Slots};
use rand::{SeedableRng, rngs::StdRng, seq::index::sample};

/// Experts of every rank's tokens, spread evenly over the ranks.
pub struct Ways {
    ids: Vec<Vec<i32>>,
    k: usize,
    slots: Slots,
}

impl Ways {
    /// Different experts for each token of every rank, the same in every run.
    pub fn drawn(ranks: usize, tokens: usize, k: usize, experts: usize) -> Self {
        let of = |rank: usize| {
            let mut rng = StdRng::seed_from_u64(77 + rank as u64);
            (0..tokens)
                .flat_map(|_| sample(&mut rng, experts, k).into_vec())
                .map(|e| e as i32)
                .collect()
        };
        Self::new((0..ranks).map(of).collect(), k, experts)
    }

    fn new(ids: Vec<Vec<i32>>, k: usize, experts: usize) -> Self {
        let slots = Slots::new(PlacementCall::Even { experts }, ids.len());
        Self { ids, k, slots }
    }

    /// Experts of a rank's tokens.
    pub fn ids(&self, rank: usize) -> &[i32] {
        &self.ids[rank]
    }

    /// Experts that a rank has.
    pub fn experts_of(&self, rank: usize) -> usize {
        self.slots.of(rank).len()
    }

    /// Who has an expert.
    pub fn owner(&self, expert: i32) -> usize {
        self.slots.rank_of(expert as usize).unwrap_or(0)
    }

    /// Rows that go from one rank to another: a token goes once, however many of its experts are there.
    pub fn rows_between(&self, from: usize, to: usize) -> usize {
        let is_there = |ids: &&[i32]| ids.iter().any(|&e| self.owner(e) == to);
        self.ids[from].chunks(self.k).filter(is_there).count()
    }

    /// Rows that go from one rank to another machine: a token goes once, however many of its experts are there.
    fn rows_to_machine(&self, from: usize, cut: Machines, to: usize) -> usize {
        let is_there = |ids: &&[i32]| ids.iter().any(|&e| cut.machine_of(self.owner(e)) == to);
        self.ids[from].chunks(self.k).filter(is_there).count()
    }

    /// Rows that a rank sends along its rail: its own tokens', to all other machines.
    pub fn rows_along(&self, from: usize, cut: Machines) -> usize {
        let others = (0..cut.count()).filter(|&m| m != cut.machine_of(from));
        others.map(|m| self.rows_to_machine(from, cut, m)).sum()
    }

    /// Microseconds that rows of so many bytes there and so many back take on rails that carry `bytes_per_us` from every rank: those of the
    /// rank that sends most.
    pub fn rail_floor_us(
        &self,
        (there_bytes, back_bytes): (usize, usize),
        cut: Machines,
        bytes_per_us: f64,
    ) -> f64 {
        let there = (0..cut.size()).map(|rank| self.rows_along(rank, cut));
        // A rank sends back what came along its rail.
        let back = (0..cut.size()).map(|rank| -> usize {
            let rail = cut.rail(cut.local_of(rank)).filter(|&r| r != rank);
            rail.map(|from| self.rows_to_machine(from, cut, cut.machine_of(rank)))
                .sum()
        });
        let most = |rows: Option<usize>| rows.unwrap_or(0);
        let bytes = most(there.max()) * there_bytes + most(back.max()) * back_bytes;
        bytes as f64 / bytes_per_us
    }

    /// Experts of one rank's tokens that another has, one by one.
    fn entries_between(&self, from: usize, to: usize) -> usize {
        let ids = self.ids[from].iter();
        ids.filter(|&&e| self.owner(e) == to).count()
    }

    /// The most that one rank sends to all others, of what `between` says.
    fn most_out(&self, between: impl Fn(usize, usize) -> usize) -> usize {
        let ranks = self.ids.len();
        let out = |from: usize| -> usize {
            let others = (0..ranks).filter(|&to| to != from);
            others.map(|to| between(from, to)).sum()
        };
        (0..ranks).map(out).max().unwrap_or(0)
    }

    /// Microseconds that rows of so many bytes there and so many back take on a wire that carries `bytes_per_us` out of every GPU:
    /// those of the rank that sends most.
    pub fn floor_us(
        &self,
        (there_bytes, back_bytes): (usize, usize),
        sum: CombineSum,
        bytes_per_us: f64,
    ) -> f64 {
        let there = self.most_out(|from, to| self.rows_between(from, to));
        // Who got rows sends them back.
        let back = self.most_out(|from, to| match sum {
            CombineSum::Expert => self.entries_between(to, from),
            CombineSum::Rank | CombineSum::ExpertByRank => self.rows_between(to, from),
        });
        (there * there_bytes + back * back_bytes) as f64 / bytes_per_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks with two experts each; the first has two tokens, the second one.
    fn ways() -> Ways {
        Ways::new(vec![vec![0, 1, 2, 3], vec![0, 3]], 2, 4)
    }

    #[test]
    fn rows_go_once_to_each_rank() {
        let ways = ways();
        let rows = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(from, to)| ways.rows_between(from, to));
        assert_eq!(rows, [1, 1, 1, 1]);
        assert_eq!(ways.entries_between(0, 1), 2);
        assert_eq!(
            (ways.owner(1), ways.owner(2), ways.experts_of(1)),
            (0, 1, 2)
        );
    }

    #[test]
    fn the_floor_is_that_of_the_rank_that_sends_most() {
        let ways = ways();
        let of = |sum| ways.floor_us((10, 100), sum, 10.0);
        assert!((of(CombineSum::Rank) - 11.0).abs() < 1e-9);
        assert!((of(CombineSum::ExpertByRank) - 11.0).abs() < 1e-9);
        // Rank 1 sends back a row for each of two experts.
        assert!((of(CombineSum::Expert) - 21.0).abs() < 1e-9);
        let alone = Ways::new(vec![vec![0, 1]], 2, 4);
        assert!(alone.floor_us((10, 100), CombineSum::Rank, 10.0).abs() < 1e-9);
    }

    /// Four ranks of two machines, an expert each: what is on the other machine goes there once.
    #[test]
    fn rows_go_once_to_each_machine() {
        let cut = Machines::cut(4, 2).unwrap();
        let ids = vec![vec![2, 3, 0, 1, 1, 2], vec![0, 1], vec![2, 3], vec![0, 3]];
        let ways = Ways::new(ids, 2, 4);
        let along: Vec<_> = (0..4).map(|rank| ways.rows_along(rank, cut)).collect();
        assert_eq!(along, [2, 0, 0, 1]);
        assert_eq!(ways.rows_between(0, 2) + ways.rows_between(0, 3), 3);
        // Two rows from rank 0, which come back from rank 2.
        let floor = ways.rail_floor_us((10, 100), cut, 10.0);
        assert!((floor - 22.0).abs() < 1e-9, "{floor}");
        let alone = ways.rail_floor_us((10, 100), Machines::cut(4, 1).unwrap(), 10.0);
        assert!(alone.abs() < 1e-9);
    }

    #[test]
    fn tokens_name_different_experts_and_the_same_in_every_run() {
        let (a, b) = (Ways::drawn(3, 50, 8, 64), Ways::drawn(3, 50, 8, 64));
        for rank in 0..3 {
            assert_eq!(a.ids(rank), b.ids(rank));
            for token in a.ids(rank).chunks(8) {
                let mut sorted = token.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!(sorted.len(), 8);
                assert!(sorted.iter().all(|e| (0..64).contains(e)));
            }
            let all: usize = (0..3).map(|to| a.entries_between(rank, to)).sum();
            assert_eq!(all, 400);
        }
        assert_ne!(a.ids(0), a.ids(1));
    }
}
