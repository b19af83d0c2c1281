//! Reads behind an allocation, so that `cargo xtask memcheck` can see that its checker finds such things.
#![allow(clippy::print_stdout)]

fn main() {
    let bytes = vec![1u8; 64].into_boxed_slice();
    let behind = std::hint::black_box(bytes.as_ptr()).wrapping_add(bytes.len() + 8);
    // SAFETY: none: this is what the checker must find. The allocator's own memory lies there, so that without one
    // nothing happens.
    let byte = unsafe { behind.read_volatile() };
    println!("{byte}");
}
