//! How ranks find each other's GPU memory.

use crate::{CudaDevice, Pages, Symmetric, devices};
use brigade_device::{Bootstrap, CommConfig, Device, Error, Result};
use brigade_group::{Sharing, agree, vote};
use brigade_plan::Table;
use std::{sync::Arc, time::Duration};

/// All ranks want the same.
pub(crate) fn vote_on(boot: &dyn Bootstrap, config: &CommConfig, table: &Table) -> Result<()> {
    let voted = format!("{config:?}, tables {:016x}", table.digest());
    let within = config.first_deadline;
    vote(boot, "join: configuration", voted.as_bytes(), within)
}

/// What the ranks' GPUs are to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpus {
    /// Some ranks of the group have the same one.
    pub(crate) shared: bool,
    /// Every one has the kernels for [`OverlapMode::Tiles`](brigade_device::OverlapMode::Tiles).
    pub(crate) tiles: bool,
}

/// Compares the ranks' GPUs.
pub(crate) fn compare_gpus(
    boot: &dyn Bootstrap,
    device: &CudaDevice,
    within: Duration,
) -> Result<Gpus> {
    let ordinal = device.info().ordinal as usize;
    let uuid = devices()?.get(ordinal).map_or([0; 16], |gpu| gpu.uuid);
    let tiles = device.opened.kernels.tiles.is_some();
    let mut own = uuid.to_vec();
    own.push(tiles.into());
    let mut all = boot.all_gather(&own, within)?;
    let ranks = all.len();
    let tiles = all.iter().all(|gpu| gpu.last() == Some(&1));
    all.sort_unstable();
    all.dedup();
    Ok(Gpus {
        shared: all.len() < ranks,
        tiles,
    })
}

const STEP: &str = "join: device memory";

/// Makes this rank's part of `bytes` bytes, and maps everybody's. All ranks succeed, or all fail.
pub(crate) fn exchange(
    boot: &dyn Bootstrap,
    device: &CudaDevice,
    sharing: &Sharing,
    bytes: usize,
    within: Duration,
) -> Result<Arc<Symmetric>> {
    let made = Pages::new(device, bytes);
    let own = agree(boot, STEP, made, within)?;
    let parts = all_parts(boot, device, sharing, &own, within);
    let mapped = parts.and_then(|parts| {
        let all = Symmetric::map(&parts, &[device])?;
        let own = all.base() + (boot.rank() * all.stride()) as u64;
        device.card.zero_now(own, all.stride())?;
        Ok(all)
    });
    // Nobody writes flags before everybody's memory is zero.
    agree(boot, STEP, mapped, within)
}

/// Every rank's pages, by descriptors: their numbers where all ranks are threads of one process, else the descriptors
/// themselves, through a socket.
#[cfg(unix)]
fn all_parts(
    boot: &dyn Bootstrap,
    device: &CudaDevice,
    sharing: &Sharing,
    own: &Arc<Pages>,
    within: Duration,
) -> Result<Vec<Arc<Pages>>> {
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
    let descriptor = agree(boot, STEP, own.export(), within)?;
    let import = |rank: usize, fd: BorrowedFd<'_>| {
        if rank == boot.rank() {
            Ok(Arc::clone(own))
        } else {
            Pages::import(device, fd, own.bytes())
        }
    };
    if !sharing.one_process() {
        let all = brigade_group::exchange_fds(boot, descriptor.as_fd(), within)?;
        return all
            .iter()
            .enumerate()
            .map(|(rank, fd)| import(rank, fd.as_fd()))
            .collect();
    }
    let number = descriptor.as_raw_fd().to_le_bytes();
    let numbers = boot.all_gather(&number, within)?;
    let taken = numbers.iter().enumerate().map(|(rank, number)| {
        let number = number.as_slice().try_into().map_err(|_| Error::Group {
            step: STEP,
            what: format!("rank {rank} sent {} bytes instead of 4", number.len()),
        })?;
        // SAFETY: a descriptor of this process, which its owner keeps open until all ranks have agreed below.
        import(rank, unsafe {
            BorrowedFd::borrow_raw(i32::from_le_bytes(number))
        })
    });
    let taken: Result<Vec<_>> = taken.collect();
    agree(boot, STEP, taken, within)
}

#[cfg(not(unix))]
fn all_parts(
    _: &dyn Bootstrap,
    _: &CudaDevice,
    _: &Sharing,
    own: &Arc<Pages>,
    _: Duration,
) -> Result<Vec<Arc<Pages>>> {
    Ok(vec![Arc::clone(own)])
}
