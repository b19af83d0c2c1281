//! How errors, timeouts and resets look from a server: three ranks make steps; in one of them a rank is late, so all get the same
//! fault, come together again, and repeat the step.
//!
//! `cargo run -p brigade-candle --example server`
#![allow(clippy::print_stdout)]

use brigade::{CommConfig, Error, FaultKind, ParallelMode, group::ThreadGroup};
use brigade_candle::{Parallel, RowParallelLinear, brigade, brigade_error, cut};
use candle_core::{DType, Device, Module, Result, Tensor};
use std::{sync::Barrier, time::Duration};

const STEPS: usize = 4;

// ANCHOR: answer
/// What a server does after a step that failed.
enum Next {
    /// All ranks have started anew: make the step again.
    Again,
    /// This group is of no more use: make another one, of those who are left.
    Regroup,
    /// The request was wrong, and nothing has stopped: answer it with the error.
    Refuse,
}

fn after(parallel: &Parallel, error: &candle_core::Error) -> Result<Next> {
    let Some(error) = brigade_error(error) else {
        // candle's own: this rank cannot go on, and the others should not wait for it.
        parallel.abort();
        parallel.reset(Duration::from_secs(30))?;
        return Ok(Next::Refuse);
    };
    Ok(match error {
        Error::Fault(fault) if fault.kind == FaultKind::PeerLost => Next::Regroup,
        Error::Fault(_) => {
            // The same fault on every rank, so every rank comes here.
            parallel.reset(Duration::from_secs(30))?;
            Next::Again
        }
        _ => Next::Refuse,
    })
}
// ANCHOR_END: answer

/// Makes all steps; in the second one, rank 1 is late.
fn one_rank(boot: &ThreadGroup, told: &Barrier) -> Result<(Vec<Tensor>, usize)> {
    let config = CommConfig {
        deadline: Duration::from_millis(200),
        ..CommConfig::new(ParallelMode::Tp)
    };
    let parallel = Parallel::join(&Device::Cpu, boot, &config)?;
    let weight = Tensor::arange(0f32, 35.0, &Device::Cpu)?.reshape((5, 7))?;
    let linear = RowParallelLinear::new(&parallel, &weight, None)?;
    let x = Tensor::ones((2, 7), DType::F32, &Device::Cpu)?;
    let own = cut::tensor(&parallel, &x, 1)?;
    let (mut out, mut faults) = (Vec::new(), 0);
    while out.len() < STEPS {
        let late = out.len() == 1 && faults == 0;
        if late && parallel.rank() == 1 {
            // As late as can be: the others have given up.
            told.wait();
        }
        match linear.forward(&own) {
            Ok(y) => out.push(y),
            Err(error) => {
                if late && parallel.rank() != 1 {
                    println!("rank {}: {error}", parallel.rank());
                    told.wait();
                }
                faults += 1;
                match after(&parallel, &error)? {
                    Next::Again => {}
                    Next::Regroup | Next::Refuse => return Err(error),
                }
            }
        }
    }
    parallel.close(Duration::from_secs(30))?;
    Ok((out, faults))
}

fn main() -> Result<()> {
    let told = Barrier::new(3);
    let ranks = std::thread::scope(|s| {
        let ranks: Vec<_> = brigade::group::threads(3)
            .into_iter()
            .map(|boot| {
                let told = &told;
                s.spawn(move || one_rank(&boot, told))
            })
            .collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended.collect::<std::thread::Result<Vec<_>>>()
    });
    let Ok(ranks) = ranks else {
        return Err(candle_core::Error::msg("a rank panicked"));
    };
    for (rank, ended) in ranks.into_iter().enumerate() {
        let (out, faults) = ended?;
        assert_eq!((out.len(), faults), (STEPS, 1));
        let first = out[0].to_vec2::<f32>()?;
        for y in out {
            assert_eq!(y.to_vec2::<f32>()?, first);
        }
        println!("rank {rank}: {STEPS} steps, {faults} fault");
    }
    Ok(())
}
