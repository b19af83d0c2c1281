//! Memory of this machine, as the system tells it.

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
