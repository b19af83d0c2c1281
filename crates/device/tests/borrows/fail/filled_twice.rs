//! The proof that own rows are in place is spent by the call that uses them.
use brigade_device::*;

fn twice(filled: Filled, rows: &[usize], weight: Operand<'_>) {
    let _ = AllGatherLoraLinearParams::new(Chunk::Resident(filled), rows, weight);
    let _ = AllGatherLoraLinearParams::new(Chunk::Resident(filled), rows, weight);
}

fn main() {}
