//! Which mode plans have for a call, where overlap pays.

use anyhow::{Result, bail};
use brigade::{
    Call, Comm, CommConfig, Error, Group, OverlapMode, Plan,
    plan::{
        Engines, Entries, Table, Topology,
        crossover::{Gpus, Least, Links},
        plan,
    },
};

/// That of a group for a call in which no mode is forced.
pub fn preferred(comm: &Comm, config: &CommConfig, call: &Call) -> Result<OverlapMode> {
    let tiles = comm.explain(&forced(call, OverlapMode::Tiles)).is_ok();
    of(call, comm.group(), config, tiles)
}

/// The same call in a mode.
fn forced(call: &Call, mode: OverlapMode) -> Call {
    let mut call = call.clone();
    if let Call::GatherLinear(linear) | Call::LinearReduceScatter(linear) = &mut call {
        linear.choice = Some(mode);
    }
    call
}

/// What is planned by figures that let every size overlap.
fn of(call: &Call, group: Group, config: &CommConfig, tiles: bool) -> Result<OverlapMode> {
    let gpus = Gpus {
        model: None,
        links: Links::Nvlink,
        ranks: group.size,
    };
    let mut table = Table::cuda(&gpus, &Entries::default()).map_err(Error::from)?;
    for crossovers in [&mut table.gather, &mut table.scatter] {
        for one in [
            &mut crossovers.bf16,
            &mut crossovers.int8,
            &mut crossovers.fp8,
        ] {
            one.least = Some(Least::Outputs(0));
        }
    }
    let topology = Topology {
        group,
        config: config.clone(),
        engines: Engines::cuda(tiles, true),
    };
    match plan(call, &topology, &table).map_err(Error::from)? {
        Plan::GatherLinear(plan) | Plan::LinearReduceScatter(plan) => match plan.instead_of {
            Some(why) => Err(Error::from(why).into()),
            None => Ok(plan.mode),
        },
        other => bail!("{other} is no plan of a linear"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::{DataType, LinearCall, ParallelMode, QScheme};

    const GROUP: Group = Group {
        mode: ParallelMode::Tp,
        rank: 0,
        size: 2,
    };

    fn linear(k: usize, scheme: QScheme) -> LinearCall {
        LinearCall {
            rows: [3, 3].into_iter().collect(),
            k,
            n: 64,
            input: scheme.kernel_type().unwrap_or(DataType::BF16),
            output: DataType::BF16,
            scheme,
            lora: false,
            transpose_a: false,
            inner: None,
            choice: None,
        }
    }

    /// However small it is: that is what is to be found out.
    #[test]
    fn a_mode_is_that_of_plans_that_overlap() {
        let config = CommConfig::new(ParallelMode::Tp);
        let mode = |call: Call, tiles| of(&call, GROUP, &config, tiles).unwrap();
        let piece = OverlapMode::Chunked { pieces: 1 };
        let gather = |k, scheme| Call::GatherLinear(linear(k, scheme));
        assert_eq!(mode(gather(64, QScheme::None), true), OverlapMode::Tiles);
        let int8 = gather(64, QScheme::Int8PerToken);
        assert_eq!(mode(int8, true), OverlapMode::Tiles);
        // Where plans have no tiles, for what they are, or on these GPUs.
        assert_eq!(mode(gather(64, QScheme::Fp8PerTensor), true), piece);
        assert_eq!(mode(gather(63, QScheme::None), true), piece);
        assert_eq!(mode(gather(64, QScheme::None), false), piece);
        let twin = |scheme| Call::LinearReduceScatter(linear(64, scheme));
        assert_eq!(mode(twin(QScheme::None), true), OverlapMode::Tiles);
        assert_eq!(mode(twin(QScheme::Int8PerToken), true), piece);
    }

    #[test]
    fn what_cannot_overlap_says_why() {
        let config = CommConfig {
            gather_bytes: 1,
            ..CommConfig::new(ParallelMode::Tp)
        };
        let call = Call::GatherLinear(linear(64, QScheme::None));
        let refused = of(&call, GROUP, &config, true).unwrap_err().to_string();
        assert!(refused.contains("gather_bytes"), "{refused}");
        let barrier = of(&Call::Barrier, GROUP, &config, true).unwrap_err();
        assert!(barrier.to_string().ends_with("is no plan of a linear"));
    }
}
