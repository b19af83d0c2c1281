//! Ranks that are processes: this program starts itself once for each rank, and tells each what to do on its input.
#![allow(clippy::expect_used, clippy::unwrap_used)]

#[cfg(unix)]
#[path = "processes/mod.rs"]
mod on_unix;

fn main() {
    #[cfg(unix)]
    on_unix::main();
}
