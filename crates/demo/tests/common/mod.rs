//! What the demo's tests share: the modes, and what the reference answers.
#![allow(dead_code, reason = "every test file takes its part")]
#![allow(clippy::unwrap_used)]

pub mod program;

use brigade::{DeviceChoice, OverlapMode};
use brigade_demo::{AdapterSpec, Source, parallel::Options, reference::Reference};
use std::time::Duration;

pub const CHUNKED: fn(u16) -> Option<OverlapMode> = |pieces| Some(OverlapMode::Chunked { pieces });

/// Every mode that gather-linear and its twin both have, and the plan's own choice.
pub fn modes() -> [Option<OverlapMode>; 6] {
    [
        None,
        Some(OverlapMode::Off),
        Some(OverlapMode::Ring),
        CHUNKED(1),
        CHUNKED(2),
        CHUNKED(3),
    ]
}

/// On the host, with a deadline that a test can wait for.
pub fn options(ranks: usize, max_tokens: usize, mode: Option<OverlapMode>) -> Options {
    Options {
        ranks,
        max_tokens,
        device: DeviceChoice::Host,
        mode,
        deadline: Duration::from_secs(20),
        ..Options::default()
    }
}

/// What the reference says to each prompt, every sequence with its own adapters. The end token is the last one where it
/// came in time, as ranks in parallel tell it.
pub fn answers(
    source: &dyn Source,
    prompts: &[Vec<u32>],
    end: u32,
    max_tokens: usize,
    lora: Option<&AdapterSpec>,
) -> Vec<Vec<u32>> {
    let mut model = Reference::new(source).unwrap();
    let mut answers = Vec::new();
    for (sequence, prompt) in prompts.iter().enumerate() {
        if let Some(spec) = lora {
            let seed = spec.seed + sequence as u64;
            model
                .set_adapters(&AdapterSpec {
                    seed,
                    ..spec.clone()
                })
                .unwrap();
        }
        let mut tokens = model.generate(prompt, max_tokens, end).unwrap();
        if tokens.len() < max_tokens {
            tokens.push(end);
        }
        answers.push(tokens);
    }
    answers
}
