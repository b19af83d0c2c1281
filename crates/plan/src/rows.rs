//! Rows over ranks, and the pieces of one rank's rows.

use brigade_device::PerRank;
use std::ops::Range;

/// `total` rows over `size` ranks, as even as can be: the first ranks get one more.
///
/// ```
/// assert_eq!(brigade_plan::rows::split(10, 4)[..], [3, 3, 2, 2]);
/// ```
pub fn split(total: usize, size: usize) -> PerRank {
    (0..size).map(|r| piece(total, size, r).len()).collect()
}

/// First row of every rank, and at the end the number of all rows: one entry more than there are ranks.
///
/// ```
/// assert_eq!(brigade_plan::rows::offsets(&[3, 0, 2])[..], [0, 3, 3, 5]);
/// ```
pub fn offsets(rows: &[usize]) -> PerRank {
    std::iter::once(0)
        .chain(rows.iter().scan(0, |sum, &r| {
            *sum += r;
            Some(*sum)
        }))
        .collect()
}

/// What rank `rank` sends to each of `size` ranks, and what it receives from each, out of what each sends to each, row by row.
///
/// ```
/// let (sent, received) = brigade_plan::rows::of_square(&[0, 1, 2, 3], 0, 2);
/// assert_eq!((&sent[..], &received[..]), (&[0, 1][..], &[0, 2][..]));
/// ```
pub fn of_square(all: &[usize], rank: usize, size: usize) -> (PerRank, PerRank) {
    let at = |from: usize, to: usize| all.get(from * size + to).copied().unwrap_or(0);
    let ranks = || 0..size;
    (
        ranks().map(|to| at(rank, to)).collect(),
        ranks().map(|from| at(from, rank)).collect(),
    )
}

/// Piece `p` of `rows` rows cut into `pieces`, as even as can be: the first pieces have one row more, and where there are
/// fewer rows than pieces the last ones are empty. Empty too for a `p` that is none of them.
///
/// ```
/// use brigade_plan::rows::piece;
/// assert_eq!((piece(5, 2, 0), piece(5, 2, 1)), (0..3, 3..5));
/// ```
pub fn piece(rows: usize, pieces: usize, p: usize) -> Range<usize> {
    if pieces == 0 || p >= pieces {
        return rows..rows;
    }
    let (base, more) = (rows / pieces, rows % pieces);
    let start = p * base + p.min(more);
    start..start + base + usize::from(p < more)
}
