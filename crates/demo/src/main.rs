//! The demo's command line.

fn main() {}
