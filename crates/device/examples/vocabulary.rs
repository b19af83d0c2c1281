//! The vocabulary alone, without a device: buffers over memory of one's own, parameters and their checks, calls and
//! their signatures, errors. `cargo run -p brigade-device --example vocabulary`.
#![allow(clippy::print_stdout)]

use brigade_device::*;
use std::sync::Arc;

/// Somebody else's memory as a buffer, without a copy.
fn adopt(values: Vec<f32>, shape: &[usize]) -> Result<Buffer> {
    let owner = Arc::new(values);
    let need = Shape::new(shape)?.len();
    if owner.len() < need {
        return Err(Error::invalid("values", owner.len(), need));
    }
    let address = owner.as_ptr() as u64;
    // SAFETY: the vector has that many floats, is kept by the buffer, and nobody else has it.
    unsafe { Buffer::adopt(address, MemoryType::Host, DataType::F32, shape, owner) }
}

fn main() -> Result<()> {
    let x = adopt(vec![1.0; 6 * 8], &[6, 8])?;
    let weight = adopt(vec![0.5; 8 * 4], &[8, 4])?;

    // Views cost nothing, and slices know where they lie.
    let own = x.slice(4, 2)?;
    println!(
        "rows 4 and 5 of {} begin at byte {}",
        x.shape(),
        own.offset_bytes()
    );

    // A parameter struct is checked before anything is launched.
    let shape = GemmParams::new(&x, &weight).check()?;
    println!("a product of {} x {} x {}", shape.m, shape.k, shape.n);
    let transposed = GemmParams {
        transpose_b: true,
        ..GemmParams::new(&x, &weight)
    };
    if let Err(error) = transposed.check() {
        println!("refused: {error}");
    }

    // This is rank 1 of 2 and has the last two of six rows. What all ranks must agree on is a call, and is signed.
    let group = Group {
        mode: ParallelMode::Tp,
        rank: 1,
        size: 2,
    };
    let chunk = || Chunk::Copy(Operand::from(&own));
    let ragged = AllGatherLoraLinearParams::new(chunk(), &[4, 2], &weight);
    let call = Call::GatherLinear(ragged.check(&group)?);
    println!("{} is signed {:#08x}", call.operation(), call.signature());
    let other = Call::Barrier;
    println!("{} is signed {:#08x}", other.operation(), other.signature());
    let wrong = AllGatherLoraLinearParams::new(chunk(), &[3, 3], &weight);
    if let Err(error) = wrong.check(&group) {
        println!("refused: {error}");
    }

    // Where the ranks do not keep to it, every rank gets the same record.
    let record = FaultRecord {
        kind: FaultKind::Mismatch,
        operation: call.operation() as u32,
        rank: 1,
        peer: 0,
        slot: 0,
        generation: 1,
        expected: u64::from(call.signature()) << 32 | 1,
        seen: u64::from(other.signature()) << 32 | 1,
        waited_ns: 1_500_000,
        call: 1,
        claimed: 1,
        across: 0,
    };
    println!("{}", Error::Fault(record));
    Ok(())
}
