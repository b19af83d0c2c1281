//! The host device, for ranks that are processes.

use super::{Devices, KILLED};
use crate::cover::covers;
use brigade_device::{Device, Injector, Result};
use brigade_host::{HostConfig, HostDevice};
use brigade_plan::Engines;
use std::sync::Arc;

/// A host device for each process.
pub(super) struct Hosts;

impl Devices for Hosts {
    fn name(&self) -> &str {
        "processes"
    }

    fn worlds(&self) -> Vec<usize> {
        vec![1, 2, 3, 4, 5, 8]
    }

    fn engines(&self) -> Engines {
        Engines::host()
    }

    /// Linears with collectives in groups of every size, collectives across some machines, others in a group of 3, and some of those in one of
    /// 8. What is about one device alone is not, nor what is about this suite, or directs ranks through memory of its own.
    fn tries(&self, name: &[&str]) -> bool {
        match name {
            [_, "device" | "control", ..] | [_, "replays", .., "without_credits"] => false,
            [
                _,
                "gather_linear" | "linear_reduce_scatter" | "linear_all_reduce",
                ..,
            ] => true,
            [_, "quantized_gather" | "quantized_scatter" | "capture", ..] => true,
            [_, "hierarchical", "2x2" | "3x2", _] => true,
            [_, "hierarchical", "2x2" | "3x2", "experts", _] => true,
            [_, "hierarchical", "2x4", what] => {
                matches!(
                    *what,
                    "sums" | "all_gathers" | "reduce_scatters" | "never_calls" | "leaves"
                )
            }
            [_, "hierarchical", "2x4", "experts", what] => *what == "round_trips",
            [_, "hierarchical", "4x4", "sums"] | [_, KILLED | "shrink" | "stress", ..] => true,
            // Their rows are many, and each transport is tried with a few.
            ["w8", "experts", "by_expert"] | ["w8", "experts", _, "dense" | "round_trips"] => false,
            ["w8", rest @ ..] => covers(rest),
            _ => name.first() == Some(&"w3"),
        }
    }

    fn open(&self, _: usize) -> Result<Arc<dyn Device>> {
        Ok(HostDevice::new()?)
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

    fn open_injected(&self, _: usize, hook: &Injector) -> Result<Arc<dyn Device>> {
        Ok(HostDevice::with(&HostConfig {
            inject: Some(hook.clone()),
            ..HostConfig::default()
        })?)
    }

    fn kills(&self) -> Option<usize> {
        Some(100)
    }
}
