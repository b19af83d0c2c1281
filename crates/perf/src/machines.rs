//! Ranks of one host as several machines: what their processes find in their environment.

use anyhow::{Result, ensure};
use brigade::Machines;
use clap::Args;
use std::process::Command;

/// How NCCL goes from one machine to another.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Sockets {
    /// With --processes: NCCL takes every machine for one, and goes from one to the other through sockets of this host
    #[arg(long, requires = "processes")]
    pub sockets: bool,
}

impl Sockets {
    /// What a rank's process finds in its environment, where ranks are cut into so many machines. Of ranks that share GPUs, each is a
    /// machine of its own for NCCL, which has no two ranks of a machine on one GPU.
    pub fn prepare(
        self,
        (machines, shared): (usize, bool),
        (ranks, rank): (usize, usize),
        command: &mut Command,
    ) -> Result<()> {
        let of = machines_of(ranks, machines)?.machine_of(rank);
        if !self.sockets {
            return Ok(());
        }
        let host = match shared {
            true => format!("rank-{rank}"),
            false => format!("machine-{of}"),
        };
        command
            .env("NCCL_HOSTID", host)
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_IB_DISABLE", "1");
        Ok(())
    }
}

/// Ranks cut into machines.
pub fn machines_of(ranks: usize, machines: usize) -> Result<Machines> {
    let cut = Machines::cut(ranks, machines)?;
    ensure!(ranks > 1, "there must be two ranks");
    Ok(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(shared: bool) -> Vec<Option<String>> {
        let of = |rank| {
            let mut command = Command::new("none");
            let how = Sockets { sockets: true };
            how.prepare((2, shared), (4, rank), &mut command).unwrap();
            let mut variables = command.get_envs();
            let host = variables.find(|(name, _)| *name == "NCCL_HOSTID");
            host.and_then(|(_, value)| value?.to_str().map(str::to_owned))
        };
        (0..4).map(of).collect()
    }

    #[test]
    fn processes_of_a_machine_have_one_name_for_nccl() {
        let of = |name: &str| Some(name.to_owned());
        let (first, second) = (of("machine-0"), of("machine-1"));
        assert_eq!(hosts(false), [first.clone(), first, second.clone(), second]);
        assert_eq!(hosts(true), [0, 1, 2, 3].map(|r| of(&format!("rank-{r}"))));
        let mut command = Command::new("none");
        let prepare = |sockets, cut, ranks, command: &mut Command| {
            Sockets { sockets }.prepare(cut, (ranks, 0), command)
        };
        for (machines, ranks) in [(2, 3), (1, 1), (0, 2)] {
            assert!(prepare(true, (machines, false), ranks, &mut command).is_err());
        }
        prepare(false, (2, true), 4, &mut command).unwrap();
        assert!(command.get_envs().next().is_none());
    }
}
