//! What the benchmarks of the host share: matrices, ranks, and medians.

mod product;
mod ranks;
mod sample;

pub use product::{Host, Product, Shape, element, matrix, value};
pub use ranks::{Rank, as_rank, on_ranks};
pub use sample::{Pairs, median, time_us};
