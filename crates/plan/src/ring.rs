//! Who handles which chunk when. Chunk `c` is the one that rank `c` owns (or, in the twin, will own).
//!
//! The ring is that of Patarasuk and Yuan (2009): chunks go from every rank to the next one. With `i` as the step, a rank
//! multiplies chunk `(size + rank - i) mod size`, which came to it in step `i - 1`.

use smallvec::SmallVec;

/// Chunk numbers, in the order of their use.
pub type Order = SmallVec<[u16; 8]>;

fn order(size: usize, chunk: impl Fn(usize) -> usize) -> Order {
    (0..size).map(|i| (chunk(i) % size) as u16).collect()
}

/// The order in which chunks pass a rank in the ring: its own, then those of the ranks before it.
///
/// ```
/// assert_eq!(brigade_plan::ring::gather_order(1, 4)[..], [1, 0, 3, 2]);
/// ```
pub fn gather_order(rank: usize, size: usize) -> Order {
    order(size, |i| size + rank - i)
}

/// The order in which a rank fetches chunks from their owners: its own, then those of the ranks after it, so that no two
/// ranks read from the same owner in the same step.
pub fn pull_order(rank: usize, size: usize) -> Order {
    order(size, |i| rank + i)
}

/// The order in which the twin computes parts: `(rank + i + 1) mod size`, so that in every step all ranks send to
/// different owners, and a rank's own part comes last.
pub fn scatter_order(rank: usize, size: usize) -> Order {
    order(size, |i| rank + i + 1)
}

/// Whom a rank sends to in the ring.
pub const fn next(rank: usize, size: usize) -> usize {
    (rank + 1) % size
}

/// Whom a rank receives from in the ring.
pub const fn prev(rank: usize, size: usize) -> usize {
    (rank + size - 1) % size
}

/// The chunks that a rank hands on to the next one, in order: all but that rank's own, which would come home.
pub fn ring_sends(rank: usize, size: usize) -> Order {
    let mut sends = gather_order(rank, size);
    sends.pop();
    sends
}
