//! How ranks find out that they have the same configuration, and find each other's segments.

use brigade_device::{Bootstrap, CommConfig, Result};
use brigade_group::{SharedSegment, Sharing};
use brigade_plan::Table;
use brigade_sync::Layout;

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
    let sharing = Sharing::between(boot, within)?;
    let segments = sharing.exchange(boot, layout.words, layout.bytes, within)?;
    Ok((sharing, segments))
}
