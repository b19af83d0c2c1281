//! Lists the kernels of this build: `cargo run -p brigade-kernels --example list`.
#![allow(clippy::print_stdout)]

fn main() {
    match brigade_kernels::compiler() {
        Some((major, minor)) => println!("compiled by nvcc {major}.{minor}"),
        None => println!("no kernels: {:?}", brigade_kernels::fatbin("fill")),
    }
    for fatbin in brigade_kernels::kernels() {
        println!("{:<12} {:>8} bytes", fatbin.name, fatbin.bytes.len());
    }
}
