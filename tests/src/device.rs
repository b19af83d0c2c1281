//! The device layer: products, copies, buffers, streams. Contracts of one device alone, so they run with one rank.

mod buffers;
mod few_rows;
mod gemm;
mod grouped;
mod loans;
mod lora;
mod moves;
mod residual_norm;
mod silu_mul;
mod streams;
mod top_k;

use crate::{backend::Rank, gather_linear::config, suite::Suite};
use rand::rngs::StdRng;

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    gemm::add(suite);
    few_rows::add(suite);
    lora::add(suite);
    grouped::add(suite);
    silu_mul::add(suite);
    residual_norm::add(suite);
    top_k::add(suite);
    moves::add(suite);
    buffers::add(suite);
    loans::add(suite);
    streams::add(suite);
}

/// A contract of one device.
fn alone(
    suite: &mut Suite,
    name: &str,
    contract: impl Fn(&Rank, &mut StdRng) + Copy + Send + Sync + 'static,
) {
    suite.add_at(1, &format!("device/{name}"), move |world| {
        let rng = world.rng();
        world.run(&config(), move |rank| contract(rank, &mut rng.clone()));
    });
}
