//! This machine, as the system tells it: which one it is, and its memory.

use crate::{messages, vote};
use brigade_device::{Bootstrap, Error, Group, HierarchyConfig, Machines, Reason, Result};
use std::time::Duration;

/// What only ranks of this machine have, since it was last started: the kernel's number of that (`boot_id`), or the host's name where
/// there is none. Containers of one machine have the same; whoever sees to it that they share no memory gives another name to
/// [`machines`].
///
/// # Errors
/// [`Error::Unsupported`] (`no-machine-name`) where there is neither: with no name, strangers would be of one machine.
pub fn identity() -> Result<Vec<u8>> {
    Ok(identity_by(|path| std::fs::read(path).ok())?)
}

fn identity_by(read: impl Fn(&str) -> Option<Vec<u8>>) -> Result<Vec<u8>, Reason> {
    let mut texts = NAMED_BY.into_iter().filter_map(read);
    let named = texts.find(|text| !text.trim_ascii().is_empty());
    named.ok_or_else(|| {
        Reason::new(
            "no-machine-name",
            format!(
                "nothing says which machine this is: no {}",
                NAMED_BY.join(", no ")
            ),
            "give machines names of your own, or cut the group into machines",
        )
    })
}

/// What [`identity`] reads, the first that there is.
const NAMED_BY: [&str; 2] = ["/proc/sys/kernel/random/boot_id", "/etc/hostname"];

/// Which ranks of a group share a machine, by what each calls its own: [`identity`], or any other name.
///
/// # Errors
/// [`Error::Unsupported`] if machines have unequal numbers of ranks, or ranks are not numbered machine
/// by machine; [`Error::Invalid`] if a rank gives no name; [`Error::Group`] naming the ranks that did not come.
pub fn machines(boot: &dyn Bootstrap, name: &[u8], within: Duration) -> Result<Machines> {
    let names = messages(boot, name, within)?;
    if let Some(rank) = names.iter().position(Vec::is_empty) {
        let got = format!("none of rank {rank}");
        return Err(Error::invalid("name", got, "one of every rank's machine"));
    }
    Ok(Machines::of(&names)?)
}

/// What all ranks of all machines do first when they join: they pass the same machines and settings, and plan with the same costs, of
/// which `costs` is the digest. Gives this rank's place among them.
///
/// # Errors
/// [`Error::Invalid`] naming the field; [`Error::Group`] naming the ranks that have something else, or did not come.
pub fn vote_on(
    boot: &dyn Bootstrap,
    machines: Machines,
    config: &HierarchyConfig,
    costs: u64,
) -> Result<Group> {
    config.check()?;
    let (rank, size) = (boot.rank(), boot.size());
    if size != machines.size() || rank >= size {
        let want = format!("the {size} ranks of the group");
        return Err(Error::invalid("machines", machines, want));
    }
    let voted = format!("{machines}, {config:?}, costs {costs:016x}");
    let within = config.comm.first_deadline;
    vote(boot, "join: machines", voted.as_bytes(), within).map_err(|error| match error {
        Error::Group { step, what } => Error::Group {
            step,
            what: format!(
                "{what}; all ranks need the same machines, HierarchyConfig, and costs (entries and wire of their devices, and build)"
            ),
        },
        other => other,
    })?;
    let mode = config.comm.mode;
    Ok(Group { mode, rank, size })
}

/// All of it, or 0 where it cannot be known.
pub fn total_bytes() -> u64 {
    meminfo("MemTotal:")
}

/// What can still be had, or 0 where it cannot be known.
pub fn available_bytes() -> u64 {
    meminfo("MemAvailable:")
}

fn meminfo(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix(key))
        .and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_name_says_so() {
        let by = |there: &[(&str, &str)]| {
            let there = there.to_vec();
            let read = |path: &str| {
                let found = there.iter().find(|(name, _)| *name == path);
                found.map(|(_, text)| text.as_bytes().to_vec())
            };
            identity_by(read).map_err(|reason| reason.code)
        };
        let [first, second] = NAMED_BY;
        assert_eq!(by(&[(first, "7\n"), (second, "host")]), Ok(b"7\n".to_vec()));
        assert_eq!(by(&[(second, "host")]), Ok(b"host".to_vec()));
        assert_eq!(by(&[(first, ""), (second, "host")]), Ok(b"host".to_vec()));
        assert_eq!(by(&[]), Err("no-machine-name"));
        assert_eq!(by(&[(first, ""), (second, "\n")]), Err("no-machine-name"));
    }
}
