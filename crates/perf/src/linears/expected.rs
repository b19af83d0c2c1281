//! What a linear should give: sums in f64 of what the stored rows and weights stand for.

use super::{Which, case::Case};
use crate::check;
use anyhow::{Result, ensure};
use half::bf16;

/// Rows of D, and what some of their elements should be.
type Rows = Vec<(usize, Vec<f64>)>;

/// Columns that are looked at.
const COLUMNS: usize = 8;

/// Compares some elements of D with what they should be.
pub fn check(case: &Case<'_>, which: Which) -> Result<()> {
    let n = case.shape.n;
    let columns: Vec<usize> = check::some(COLUMNS, n).collect();
    let weights = columns
        .iter()
        .map(|&j| Ok(case.options.scheme.meaning(&case.weight_row(j)?)))
        .collect::<Result<Vec<_>>>()?;
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
    check::close(&what, &pairs)
}

fn products(x: &[f64], weights: &[Vec<f64>]) -> Vec<f64> {
    let dot = |w: &Vec<f64>| x.iter().zip(w).map(|(x, w)| x * w).sum();
    weights.iter().map(dot).collect()
}

/// Some rows of every rank, which every rank shows the others, by the own weight.
fn gathered(case: &Case<'_>, weights: &[Vec<f64>]) -> Result<Rows> {
    let picked = |rank: usize| check::some(4, case.counts[rank]);
    let mut mine = Vec::new();
    for i in picked(case.rank.number()) {
        mine.extend(case.row(i)?);
    }
    let scheme = case.options.scheme;
    let row_bytes = size_of::<f32>() + case.shape.k * scheme.bytes();
    let offsets = brigade::plan::rows::offsets(&case.counts);
    let mut rows = Rows::new();
    for (rank, shown) in case.rank.share(&mine)?.iter().enumerate() {
        ensure!(
            shown.len() == picked(rank).count() * row_bytes,
            "rank {rank} shows other rows"
        );
        for (i, row) in picked(rank).zip(shown.chunks_exact(row_bytes)) {
            let sums = products(&scheme.meaning(row), weights);
            rows.push((offsets[rank] + i, sums));
        }
    }
    Ok(rows)
}

/// Some rows for every rank, to which every rank adds its part.
fn scattered(case: &Case<'_>, weights: &[Vec<f64>]) -> Result<Rows> {
    let scheme = case.options.scheme;
    let picked = |rank: usize| check::some(8, case.counts[rank]);
    let offsets = brigade::plan::rows::offsets(&case.counts);
    let me = case.rank.number();
    let mut rows: Rows = picked(me).map(|i| (i, vec![0.0; weights.len()])).collect();
    for owner in 0..case.counts.len() {
        let mut mine = Vec::new();
        for i in picked(owner) {
            let x = scheme.meaning(&case.row(offsets[owner] + i)?);
            mine.extend(products(&x, weights).into_iter().flat_map(f64::to_le_bytes));
        }
        let all = case.rank.share(&mine)?;
        if owner != me {
            continue;
        }
        for (rank, part) in all.iter().enumerate() {
            let (numbers, _) = part.as_chunks();
            ensure!(
                numbers.len() == rows.len() * weights.len(),
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
