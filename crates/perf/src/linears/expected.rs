//! What a linear should give: sums in f64 of what the stored rows and weights stand for.

use super::{
    Which,
    case::{ADAPTER_SCALE, Case},
};
use crate::check;
use anyhow::{Result, ensure};
use brigade::plan::rows::offsets;
use half::bf16;

/// Rows of D, and what some of their elements should be.
type Rows = Vec<(usize, Vec<f64>)>;

/// Columns that are looked at.
const COLUMNS: usize = 8;

/// Compares some elements of D with what they should be.
pub fn check(case: &Case<'_>, which: Which) -> Result<()> {
    let n = case.shape.n;
    let columns: Vec<usize> = check::some(COLUMNS, n).collect();
    let weights = Weights::of(case, &columns)?;
    let wanted = match which {
        Which::Gather => gathered(case, &weights)?,
        Which::Scatter => scattered(case, &weights)?,
    };
    let d = case.result()?;
    let elements = |(i, sums): &(usize, Vec<f64>)| -> Vec<(bf16, f64)> {
        let pairs = columns.iter().zip(sums);
        pairs.map(|(j, &want)| (d[i * n + j], want)).collect()
    };
    let pairs: Vec<_> = wanted.iter().flat_map(elements).collect();
    let what = format!("rank {}, {:?}", case.rank.number(), case.shape);
    // With an adapter: rows times its first factor, the product without it, and their sum.
    let roundings = if case.adapters.is_empty() { 1 } else { 3 };
    check::close(&what, &pairs, roundings)
}

/// What rows meet on this rank: some columns of its weight, and of its adapters.
struct Weights {
    columns: Vec<Vec<f64>>,
    adapters: Vec<Adapter>,
    /// The first row that goes by each, and the end of all rows.
    run_starts: brigade::PerRank,
}

/// The columns of A, and those of B that are looked at.
struct Adapter {
    a: Vec<Vec<f64>>,
    b: Vec<Vec<f64>>,
}

impl Adapter {
    /// Out of A `[k, lora]` and B `[lora, n]`.
    fn new(a: &[bf16], b: &[bf16], (lora, n): (usize, usize), columns: &[usize]) -> Self {
        let column = |values: &[bf16], width: usize, j: usize| -> Vec<f64> {
            let rows = values.chunks_exact(width);
            rows.map(|row| row[j].to_f64()).collect()
        };
        Self {
            a: (0..lora).map(|r| column(a, lora, r)).collect(),
            b: columns.iter().map(|&j| column(b, n, j)).collect(),
        }
    }
}

fn dot(x: &[f64], w: &[f64]) -> f64 {
    x.iter().zip(w).map(|(x, w)| x * w).sum()
}

impl Weights {
    fn of(case: &Case<'_>, columns: &[usize]) -> Result<Self> {
        let (lora, n) = (case.options.lora, case.shape.n);
        let column = |&j: &usize| Ok(case.options.scheme.meaning(&case.weight_row(j)?));
        let adapter = |i| {
            let (a, b) = (case.adapter(i, 0)?, case.adapter(i, 1)?);
            Ok(Adapter::new(&a, &b, (lora, n), columns))
        };
        Ok(Self {
            columns: columns.iter().map(column).collect::<Result<_>>()?,
            adapters: (0..case.adapters.len())
                .map(adapter)
                .collect::<Result<_>>()?,
            run_starts: offsets(&case.run_rows()),
        })
    }

    /// What becomes of row `i` of all ranks' rows in these columns.
    fn products(&self, i: usize, x: &[f64]) -> Vec<f64> {
        let begun = self.run_starts.partition_point(|&start| start <= i);
        let adapter = self.adapters.get(begun - 1);
        let inner: Vec<f64> = adapter.map_or_else(Vec::new, |adapter| {
            adapter.a.iter().map(|a| dot(x, a)).collect()
        });
        let of_adapter = |j: usize| {
            adapter.map_or(0.0, |adapter| {
                f64::from(ADAPTER_SCALE) * dot(&inner, &adapter.b[j])
            })
        };
        let columns = self.columns.iter().enumerate();
        columns.map(|(j, w)| dot(x, w) + of_adapter(j)).collect()
    }
}

/// Some rows of every rank, which every rank shows the others, by the own weight.
fn gathered(case: &Case<'_>, weights: &Weights) -> Result<Rows> {
    let picked = |rank: usize| check::some(4, case.counts[rank]);
    let mut mine = Vec::new();
    for i in picked(case.rank.number()) {
        mine.extend(case.row(i)?);
    }
    let scheme = case.options.scheme;
    let row_bytes = size_of::<f32>() + case.shape.k * scheme.bytes();
    let offsets = offsets(&case.counts);
    let mut rows = Rows::new();
    for (rank, shown) in case.rank.share(&mine)?.iter().enumerate() {
        ensure!(
            shown.len() == picked(rank).count() * row_bytes,
            "rank {rank} shows other rows"
        );
        for (i, row) in picked(rank).zip(shown.chunks_exact(row_bytes)) {
            let at = offsets[rank] + i;
            rows.push((at, weights.products(at, &scheme.meaning(row))));
        }
    }
    Ok(rows)
}

/// Some rows for every rank, to which every rank adds its part.
fn scattered(case: &Case<'_>, weights: &Weights) -> Result<Rows> {
    let scheme = case.options.scheme;
    let picked = |rank: usize| check::some(8, case.counts[rank]);
    let columns = weights.columns.len();
    let offsets = offsets(&case.counts);
    let me = case.rank.number();
    let mut rows: Rows = picked(me).map(|i| (i, vec![0.0; columns])).collect();
    for owner in 0..case.counts.len() {
        let mut mine = Vec::new();
        for i in picked(owner) {
            let at = offsets[owner] + i;
            let sums = weights.products(at, &scheme.meaning(&case.row(at)?));
            mine.extend(sums.into_iter().flat_map(f64::to_le_bytes));
        }
        let all = case.rank.share(&mine)?;
        if owner != me {
            continue;
        }
        for (rank, part) in all.iter().enumerate() {
            let (numbers, _) = part.as_chunks();
            ensure!(
                numbers.len() == rows.len() * columns,
                "rank {rank} sent another part"
            );
            let sums = rows.iter_mut().flat_map(|(_, sums)| sums);
            for (sum, part) in sums.zip(numbers) {
                *sum += f64::from_le_bytes(*part);
            }
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16s(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&v| bf16::from_f32(v)).collect()
    }

    #[test]
    fn rows_meet_the_adapter_of_their_run() {
        // k = 2, lora = 1, n = 3, of which columns 0 and 2 are looked at.
        let adapter =
            |a: [f32; 2], b: [f32; 3]| Adapter::new(&bf16s(&a), &bf16s(&b), (1, 3), &[0, 2]);
        let weights = Weights {
            columns: vec![vec![1.0, 2.0], vec![3.0, 4.0]],
            adapters: vec![
                adapter([1.0, 1.0], [10.0, 99.0, 20.0]),
                adapter([7.0, 7.0], [7.0, 7.0, 7.0]),
                adapter([2.0, 0.0], [1.0, 99.0, 0.0]),
            ],
            run_starts: offsets(&[4, 0, 2]),
        };
        let x = [1.0, -3.0];
        // -5 and -9 of the weight; half of -2 times 10 and 20, then half of 2 times 1 and 0.
        assert_eq!(weights.products(3, &x), [-15.0, -29.0]);
        assert_eq!(weights.products(4, &x), [-4.0, -9.0]);
        let plain = Weights {
            adapters: Vec::new(),
            ..weights
        };
        assert_eq!(plain.products(0, &x), [-5.0, -9.0]);
    }

    #[test]
    fn an_adapter_has_the_columns_that_are_looked_at() {
        let adapter = Adapter::new(
            &bf16s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            &bf16s(&[1.0, 2.0, 3.0, 4.0]),
            (2, 2),
            &[1],
        );
        assert_eq!(adapter.a, [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]);
        assert_eq!(adapter.b, [[2.0, 4.0]]);
    }
}
