//! What every operation and layer does, against candle on one device and against sums in f64. Stated once, and run on ranks of any kind:
//! groups of one to four, any shape.

/// These functions as contracts, by their names. One that is left out is dead code, which is denied.
macro_rules! contracts {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), $name)),*]
    };
}

mod cuts;
mod experts;
mod faults;
mod lending;
mod linears;
mod ops;
pub mod oracle;
mod vocab;
mod world;

use libtest_mimic::Trial;
use std::{ops::RangeInclusive, sync::Arc};
pub use world::{PATIENCE, Places, World, config};

/// A contract and its name.
type Contract = (&'static str, fn(&World));

/// Contracts with something in common.
struct Theme {
    name: &'static str,
    /// Ranks in the groups that they are about.
    sizes: RangeInclusive<usize>,
    hold: Hold,
    contracts: &'static [Contract],
}

/// Where contracts hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hold {
    Everywhere,
    /// They are about the host's memory, or about no tensor at all.
    OnHost,
    /// Ranks multiply different shapes in them, so no two may share a GPU.
    OnOwnDevices,
}

const ALL: [&[Theme]; 7] = [
    cuts::THEMES,
    experts::THEMES,
    faults::THEMES,
    lending::THEMES,
    linears::THEMES,
    ops::THEMES,
    vocab::THEMES,
];

/// Every contract with groups of these ranks, as `kind/w<ranks>/<theme>/<contract>`.
pub fn trials(places: Arc<dyn Places>) -> Vec<Trial> {
    let holds = |hold| match hold {
        Hold::Everywhere => true,
        Hold::OnHost => places.on_host(),
        Hold::OnOwnDevices => !places.shares(),
    };
    let mut trials = Vec::new();
    for theme in ALL.into_iter().flatten().filter(|t| holds(t.hold)) {
        for size in places.sizes().filter(|size| theme.sizes.contains(size)) {
            trials.extend(theme.contracts.iter().map(|&(name, contract)| {
                let world = World::new(&places, size);
                let name = format!("{}/w{size}/{}/{name}", places.name(), theme.name);
                Trial::test(name, move || {
                    contract(&world);
                    Ok(())
                })
            }));
        }
    }
    trials
}
