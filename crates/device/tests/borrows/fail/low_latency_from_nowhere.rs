//! A communicator lends the slots of its exchange; nobody else makes any.
use brigade_device::*;

fn another() -> LowLatency {
    LowLatency::default()
}

fn main() {}
