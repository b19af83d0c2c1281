//! Once own rows are declared written, nobody can write to them.
use brigade_device::*;

fn late(chunk: OwnChunk<'_>) -> (Filled, DataType) {
    let mut chunk = chunk;
    let space = chunk.view_mut();
    let filled = chunk.filled();
    (filled, space.dtype())
}

fn main() {}
