//! Results against sums in f64.

use anyhow::{Result, ensure};
use half::bf16;

/// Largest error relative to the mean size of a sum, for one rounding to bf16. Errors of several add up like those of chance: as a root.
const TOLERANCE: f64 = 4e-3;

/// Rows and columns that are looked at: all of them would take the host minutes.
pub fn some(count: usize, of: usize) -> impl Iterator<Item = usize> {
    let step = (of / count).max(1);
    (0..of).step_by(step).take(count).chain(of.checked_sub(1))
}

/// Compares elements with what they should be, where so many roundings lie between.
pub fn close(what: &str, pairs: &[(bf16, f64)], roundings: u8) -> Result<()> {
    let norm =
        |f: &dyn Fn(&(bf16, f64)) -> f64| pairs.iter().map(|p| f(p) * f(p)).sum::<f64>().sqrt();
    let off = |p: &(bf16, f64)| p.0.to_f64() - p.1;
    let (error, size) = (norm(&off), norm(&|p| p.1));
    let worst = pairs
        .iter()
        .max_by(|a, b| off(a).abs().total_cmp(&off(b).abs()))
        .map_or_else(String::new, |(got, wanted)| {
            format!(", {got} of {wanted} the worst")
        });
    ensure!(
        error <= TOLERANCE * f64::from(roundings).sqrt() * size,
        "{what}: relative error {:.1e} over {} elements{worst}",
        error / size,
        pairs.len()
    );
    Ok(())
}
