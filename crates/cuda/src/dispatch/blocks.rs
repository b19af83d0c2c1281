//! How many blocks take rows, within the multiprocessors that a communicator may use.

use crate::{Launch, core::Core, job::Job};
use brigade_device::Device;

/// Threads of the largest block that takes rows.
pub(crate) const WIDEST: u32 = 1024;
/// Threads of a block that takes rows.
const ROW_THREADS: u32 = 256;

/// Threads for each of so many rows, so that a few of them keep a GPU busy too; or, within a budget, so that all groups of threads have
/// about as many of them.
pub(crate) fn row_threads(core: &Core, rows: usize, row_bytes: usize) -> u32 {
    /// What keeps a multiprocessor busy.
    const THREADS: usize = 1024;
    /// Rows for each group of threads within a budget: with a few more or less, one of them would be late.
    const TURNS: usize = 8;
    let turns = core.config.sm_budget.map_or(1, |_| TURNS);
    let all = own_sms(core) * THREADS * turns;
    [ROW_THREADS, 128, 64]
        .into_iter()
        .find(|&t| rows * t as usize <= all && t as usize * 16 <= row_bytes)
        .unwrap_or(32)
}

/// Blocks for so many rows. `widest` is the largest block of the kernel.
pub(crate) fn row_blocks(job: &Job<'_>, rows: usize, threads: u32, widest: u32) -> Launch {
    row_blocks_on(job, own_sms(job.core), (rows, threads), widest)
}

pub(crate) fn row_blocks_on(
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

/// Blocks for so many rows of which each has a multiprocessor to itself, and no more than so many.
pub(crate) fn row_blocks_alone(alone: Launch, (rows, threads): (usize, u32), sms: usize) -> Launch {
    let blocks = (rows * threads as usize).div_ceil(alone.threads as usize);
    Launch {
        blocks: blocks.clamp(1, sms) as u32,
        ..alone
    }
}

/// Multiprocessors that a communicator may use.
fn own_sms(core: &Core) -> usize {
    let all = usize::from(core.device.info().sms);
    core.config
        .sm_budget
        .map_or(all, |n| usize::from(n.max(1)).min(all))
}

/// Where there are several pieces, one is written while another is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Writes,
    Takes,
}

/// A call's pieces, and what each side does of a token's rows: what takes one multiprocessor as long, whatever it is.
///
/// On an H100 a multiprocessor copies 47 GB/s within its memory, and 40 GB/s to a peer: 6 and 7 of these. A sum takes
/// somewhat longer than a copy for each row that is read, and for the one that is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// There are sides where there are two or more.
    pub(crate) pieces: usize,
    /// How many ranks rows are written to.
    pub(crate) targets: usize,
    /// Writing rows to peers.
    pub(crate) pushes: usize,
    /// Making them, before.
    pub(crate) makes: usize,
    /// Taking to where they belong what has come, or adding it up.
    pub(crate) takes: usize,
}

impl Work {
    /// To copy a row to a peer.
    pub(crate) const PUSH: usize = 7;
    /// To copy it to somewhere near.
    pub(crate) const COPY: usize = 6;
    /// To read it, or to write it.
    pub(crate) const HALF: usize = 3;
    /// The same where rows are added.
    pub(crate) const ADD: usize = 4;

    /// Multiprocessors of a side. Where there are two, each has its own, since stores that wait for the link keep all accesses of their
    /// multiprocessor waiting.
    pub(crate) fn sms(self, job: &Job<'_>, side: Side) -> usize {
        self.share(own_sms(job.core), side)
    }

    /// Where each side may have all multiprocessors: a budget is shared.
    pub(crate) fn budgeted_sms(self, job: &Job<'_>, side: Side) -> usize {
        match job.core.config.sm_budget {
            Some(_) => self.sms(job, side),
            None => own_sms(job.core),
        }
    }

    /// A side's part of so many multiprocessors, where there are sides: one at least.
    fn share(self, sms: usize, side: Side) -> usize {
        /// For each rank that rows are written to. To one peer they fill an H100's link, if they do nothing else; to three, 96 were as quick as 131.
        const MOST_PUSHING: usize = 32;
        let writes = self.pushes + self.makes;
        let both = (writes + self.takes).max(1);
        let writing = (sms * writes + both / 2) / both;
        let most = MOST_PUSHING * self.targets.max(1) * writes / self.pushes.max(1);
        let writing = writing.min(most).min(sms.saturating_sub(1)).max(1);
        match side {
            _ if self.pieces < 2 => sms,
            Side::Writes => writing,
            Side::Takes => sms.saturating_sub(writing).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(
        sms: usize,
        pieces: usize,
        (pushes, makes, takes): (usize, usize, usize),
    ) -> [usize; 2] {
        let work = Work {
            pieces,
            targets: pushes / Work::PUSH,
            pushes,
            makes,
            takes,
        };
        [Side::Writes, Side::Takes].map(|side| work.share(sms, side))
    }

    #[test]
    fn both_sides_together_keep_to_a_budget_that_has_one_for_each() {
        for sms in 1..=132 {
            for work in [(7, 0, 12), (49, 0, 27), (7, 30, 9), (0, 30, 9)] {
                for pieces in [0, 1] {
                    assert_eq!(shares(sms, pieces, work), [sms; 2]);
                }
                for pieces in [2, 7] {
                    let both = shares(sms, pieces, work);
                    assert_eq!(both.iter().sum::<usize>(), sms.max(2), "{work:?}");
                    assert!(!both.contains(&0), "{work:?}");
                }
            }
        }
    }

    #[test]
    fn who_has_more_to_do_has_more_of_them() {
        let writing = |sms, work| shares(sms, 4, work)[0];
        assert_eq!(writing(24, (7, 0, 12)), 9);
        assert_eq!(writing(24, (21, 0, 15)), 14);
        assert_eq!(writing(132, (7, 0, 12)), 32, "the link is full");
        assert_eq!(writing(132, (21, 0, 6)), 96, "all three are");
        assert_eq!(writing(132, (21, 0, 24)), 62, "others take");
        assert_eq!(writing(132, (7, 30, 9)), 106, "sums are made");
    }
}
