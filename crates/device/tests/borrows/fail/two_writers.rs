//! Writing takes an exclusive borrow.
use brigade_device::*;

fn twice(buffer: &mut Buffer, root: usize) {
    let a = BroadcastParams { data: buffer.view_mut(), root };
    let b = BroadcastParams { data: buffer.view_mut(), root };
    let _ = (a.check(0, 2), b.check(0, 2));
}

fn main() {}
