//! How ranks find each other's segments.

use crate::{
    layout::Layout,
    segment::SharedSegment,
    sharing::{Sharing, random},
};
use brigade_device::{Bootstrap, CommConfig, Error, Result};
use brigade_plan::Table;
use std::sync::LazyLock;

/// Tells this process from others, on this machine and elsewhere.
static PROCESS: LazyLock<u64> = LazyLock::new(random);

/// Makes this rank's segment, and gives everybody's in rank order. All ranks succeed, or all fail.
pub(crate) fn exchange(
    boot: &dyn Bootstrap,
    config: &CommConfig,
    table: &Table,
    layout: &Layout,
) -> Result<(Sharing, Vec<SharedSegment>)> {
    let within = config.first_deadline;
    let voted = format!("{config:?}, tables {:016x}", table.digest());
    brigade_group::vote(boot, "join: configuration", voted.as_bytes(), within)?;

    // The number of a process tells it from its own forks.
    let process = format!("{:016x} {}", *PROCESS, std::process::id());
    let processes = boot.all_gather(process.as_bytes(), within)?;
    let sharing = if processes.iter().all(|p| p == process.as_bytes()) {
        Sharing::Table
    } else {
        Sharing::between_processes(boot, within)?
    };

    let (words, bytes) = (layout.words, layout.bytes);
    let offer = sharing.offer(boot.rank(), words, bytes);
    let key = offer.as_ref().map_or(0, |offer| offer.key);
    let keys = boot.all_gather(&key.to_le_bytes(), within)?;
    let take = |(owner, key): (usize, &Vec<u8>)| {
        let key = u64::from_le_bytes(key.as_slice().try_into().map_err(|_| Error::Group {
            step: "join: shared memory",
            what: format!("rank {owner} sent {} bytes instead of 8", key.len()),
        })?);
        sharing.take(owner, key, words, bytes).map(SharedSegment)
    };
    // The offer stands until all ranks have taken it.
    let found = match &offer {
        Ok(_) => keys
            .iter()
            .enumerate()
            .map(take)
            .collect::<Result<Vec<_>>>(),
        Err(error) => Err(error.clone()),
    };
    let segments = brigade_group::agree(boot, "join: shared memory", found, within)?;
    Ok((sharing, segments))
}
