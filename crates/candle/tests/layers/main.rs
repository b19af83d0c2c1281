//! The contracts of operations and layers on the CPU.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic on what is not as promised"
)]

#[path = "../contracts/mod.rs"]
mod contracts;

use candle_core::{Device, Result};
use contracts::Places;
use std::{ops::RangeInclusive, process::ExitCode, sync::Arc};

/// Ranks with tensors in the host's memory.
struct Host;

impl Places for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn sizes(&self) -> RangeInclusive<usize> {
        1..=4
    }

    fn places(&self, size: usize) -> Result<Vec<Device>> {
        Ok(vec![Device::Cpu; size])
    }

    fn on_host(&self) -> bool {
        true
    }
}

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    libtest_mimic::run(&args, contracts::trials(Arc::new(Host))).exit_code()
}
