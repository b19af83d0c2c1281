//! How many blocks take rows, within the multiprocessors that a communicator may use.

use crate::{CudaDevice, Launch, job::Job};
use brigade_device::Device;

/// Threads of the largest block that takes rows.
pub(crate) const WIDEST: u32 = 1024;
/// Threads of a block that takes rows.
const ROW_THREADS: u32 = 256;

/// Threads for each of so many rows, so that a few of them keep a GPU busy too.
pub(crate) fn row_threads(device: &CudaDevice, rows: usize, row_bytes: usize) -> u32 {
    /// What keeps a multiprocessor busy.
    const THREADS: usize = 1024;
    let all = usize::from(device.info().sms) * THREADS;
    [ROW_THREADS, 128, 64]
        .into_iter()
        .find(|&t| rows * t as usize <= all && t as usize * 16 <= row_bytes)
        .unwrap_or(32)
}

/// Blocks for so many rows. `widest` is the largest block of the kernel.
pub(crate) fn row_blocks(job: &Job<'_>, rows: usize, threads: u32, widest: u32) -> Launch {
    row_blocks_on(job, own_sms(job), (rows, threads), widest)
}

/// The same for one side of a call in so many pieces.
pub(crate) fn row_blocks_of(
    job: &Job<'_>,
    (side, pieces): (Side, usize),
    rows: usize,
    threads: u32,
) -> Launch {
    let sms = budgeted_sms(job, side, pieces);
    row_blocks_on(job, sms, (rows, threads), WIDEST)
}

pub(super) fn row_blocks_on(
    job: &Job<'_>,
    sms: usize,
    (rows, threads): (usize, u32),
    widest: u32,
) -> Launch {
    /// Blocks of a multiprocessor.
    const BLOCKS: usize = 8;
    // Blocks go to whichever multiprocessor has room: to stay within a budget, there are no more of them than it has.
    let (each, most) = match job.core.config.sm_budget {
        Some(_) => (widest, sms),
        None => (ROW_THREADS, BLOCKS * sms),
    };
    let blocks = (rows * threads as usize).div_ceil(each as usize);
    let shape = job.core.device.opened.kernels.shape(blocks.min(most));
    Launch {
        threads: each,
        ..shape
    }
}

/// Where there are several pieces, one is written while another is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Writes,
    Takes,
}

/// Multiprocessors that a communicator may use.
fn own_sms(job: &Job<'_>) -> usize {
    let all = usize::from(job.core.device.info().sms);
    job.core
        .config
        .sm_budget
        .map_or(all, |n| usize::from(n.max(1)).min(all))
}

/// Where each side has multiprocessors of its own, since stores that wait for the link keep all accesses of their multiprocessor waiting:
/// those of one, of a call in so many pieces.
pub(super) fn side_sms(job: &Job<'_>, side: Side, pieces: usize) -> usize {
    share(own_sms(job), side, pieces)
}

/// Where each side may have all multiprocessors: a budget is shared.
pub(super) fn budgeted_sms(job: &Job<'_>, side: Side, pieces: usize) -> usize {
    match job.core.config.sm_budget {
        Some(_) => side_sms(job, side, pieces),
        None => own_sms(job),
    }
}

/// A side's part of so many multiprocessors, where there are sides: one at least.
fn share(sms: usize, side: Side, pieces: usize) -> usize {
    let writing = (sms / 2).max(1);
    match side {
        _ if pieces < 2 => sms,
        Side::Writes => writing,
        Side::Takes => (sms - writing).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_together_keep_to_a_budget_that_has_one_for_each() {
        for sms in 1..=132 {
            let of = |pieces| [Side::Writes, Side::Takes].map(|side| share(sms, side, pieces));
            for pieces in [0, 1] {
                assert_eq!(of(pieces), [sms; 2]);
            }
            for pieces in [2, 7] {
                let both: usize = of(pieces).iter().sum();
                assert_eq!(both, sms.max(2));
                assert!(!of(pieces).contains(&0));
            }
        }
    }
}
