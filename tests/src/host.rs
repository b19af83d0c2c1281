//! The host device, its ranks threads of this process.

use crate::{
    backend::{Backend, Routes, Seat},
    cover::covers,
};
use brigade_device::{Injector, Result};
use brigade_host::{HostConfig, HostDevice};
use brigade_plan::Engines;
use std::sync::Arc;

/// Ranks as threads, each with a host device of its own.
pub struct HostThreads;

impl Backend for HostThreads {
    fn name(&self) -> &str {
        "host"
    }

    fn worlds(&self) -> Vec<usize> {
        (1..=8).collect()
    }

    /// Everything, but in groups of 6 and 7 what stands for it, and across machines of as many ranks.
    fn tries(&self, name: &[&str]) -> bool {
        match name {
            [_, "hierarchical" | "ledger", ..] => true,
            ["w6" | "w7", rest @ ..] => covers(rest),
            _ => true,
        }
    }

    fn engines(&self) -> Engines {
        Engines::host()
    }

    fn seats(&self, size: usize) -> Result<Vec<Seat>> {
        seats(size, &config(size))
    }

    fn routes(&self) -> Result<Option<Arc<dyn Routes>>> {
        Ok(Some(HostDevice::new()?))
    }

    fn spans(&self, _: (usize, usize)) -> bool {
        true
    }

    fn slows_rails(&self) -> bool {
        true
    }

    fn injects(&self) -> bool {
        true
    }

    fn injected_seats(&self, size: usize, hook: &Injector) -> Result<Vec<Seat>> {
        let config = HostConfig {
            inject: Some(hook.clone()),
            ..config(size)
        };
        seats(size, &config)
    }
}

/// Worlds of an odd size push small copies and reduce-scatters, as GPUs do; the others, as usual, do not.
fn config(size: usize) -> HostConfig {
    HostConfig {
        push_max_bytes: (size % 2 == 1).then_some(8 << 10),
        ..HostConfig::default()
    }
}

fn seats(size: usize, config: &HostConfig) -> Result<Vec<Seat>> {
    brigade_group::threads(size)
        .into_iter()
        .map(|boot| {
            Ok(Seat {
                device: HostDevice::with(config)?,
                boot: Box::new(boot),
            })
        })
        .collect()
}
