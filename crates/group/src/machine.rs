//! This machine, as the system tells it: which one it is, and its memory.

use brigade_device::{Bootstrap, Machines, Result};
use std::time::Duration;

/// What only ranks of this machine have, since it was last started: the kernel's number of that (`boot_id`), or the host's name where
/// there is none. Containers of one machine have the same; whoever sees to it that they share no memory gives another name to
/// [`machines`].
pub fn identity() -> Vec<u8> {
    let read = |path| std::fs::read(path).ok().filter(|text| !text.is_empty());
    read("/proc/sys/kernel/random/boot_id")
        .or_else(|| read("/etc/hostname"))
        .unwrap_or_default()
}

/// Which ranks of a group share a machine, by what each calls its own: [`identity`], or any other name.
///
/// # Errors
/// [`Error::Unsupported`](brigade_device::Error::Unsupported) if machines have unequal numbers of ranks, or ranks are not numbered machine
/// by machine; [`Error::Group`](brigade_device::Error::Group) naming the ranks that did not come.
pub fn machines(boot: &dyn Bootstrap, name: &[u8], within: Duration) -> Result<Machines> {
    let names = boot.all_gather(name, within)?;
    Ok(Machines::of(&names)?)
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
