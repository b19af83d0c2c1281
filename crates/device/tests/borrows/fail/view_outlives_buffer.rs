//! Views borrow: a parameter cannot point at a buffer that is gone.
use brigade_device::*;

fn dangling(buffer: Buffer, weight: Operand<'_>) -> Result<GemmShape> {
    let p = GemmParams::new(&buffer, weight);
    drop(buffer);
    p.check()
}

fn main() {}
