//! A view of gathered rows is Copy, and still cannot outlive them.
use brigade_device::*;

fn escape<'a>(gathered: Gathered<'a>) -> Result<Operand<'a>> {
    let operand = gathered.operand()?;
    Ok(operand)
}

fn main() {}
