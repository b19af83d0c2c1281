//! Every operation and layer against candle on one device, and against sums in f64: groups of one to four ranks, any shape.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic on what is not as promised"
)]

mod common;
mod cuts;
mod experts;
mod faults;
mod lending;
mod linears;
mod ops;
mod vocab;
