//! All-reduce with a norm: as an all-reduce of one type, but rows stay whole, and the launch goes by them.

use crate::{
    Table, Topology, all_reduce,
    pushed::{self, GRANULE_BYTES, RowShares},
    reason, scratch,
};
use brigade_device::{AllReduceAlgorithm as A, DataType, Launch, Plan, Reason, SumOrder};

/// Largest input, in bytes, that is normed in one shot, also where sums alone take one shot at more, as those of two ranks do: every rank adds up
/// and norms all rows, and beyond so many they have no large clusters (`docs/results/all-reduce-norm-one-shot.h100x2.json`, `-two-shot`).
const ONE_SHOT_MOST: usize = 256 << 10;

pub(crate) fn plan(
    (rows, hidden): (usize, usize),
    dtype: DataType,
    choice: Option<A>,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    reason::check_sum(dtype, dtype)?;
    if !topology.engines.norms {
        return Err(reason::no_norm());
    }
    let figures = table.all_reduce.of(dtype);
    let (room, size) = (topology.config.all_reduce_bytes, topology.group.size);
    let piece_rows = |algorithm| match algorithm {
        A::OneShotPush | A::TwoShotPush => {
            pushed::piece_rows(algorithm, room, (hidden, dtype), size)
        }
        _ => scratch::rows_twice(topology, hidden, dtype),
    };
    let algorithm = match choice {
        Some(a) if topology.engines.reduces(a) && a != A::Nccl => a,
        Some(a) => return Err(reason::no_algorithm(a)),
        None => {
            let bytes = rows.saturating_mul(hidden).saturating_mul(dtype.bytes());
            let one_first = bytes <= figures.one_shot_max_bytes.min(ONE_SHOT_MOST);
            let ways = all_reduce::by_shots(one_first, topology);
            let fits = |&a: &A| piece_rows(a).is_ok();
            let usual = |&a: &A| all_reduce::is_pull(a) || figures.pushes(bytes);
            // A row that is too long for scratch memory may fit the buffers, and the other way round.
            ways.clone()
                .find(|a| usual(a) && fits(a))
                .or_else(|| ways.clone().find(fits))
                .or_else(|| ways.clone().find(usual))
                .ok_or_else(reason::no_all_reduce)?
        }
    };
    let most = piece_rows(algorithm)?;
    Ok(Plan::AllReduce {
        algorithm,
        order: SumOrder::Flat,
        piece_elements: most
            .checked_mul(hidden)
            .unwrap_or_else(|| usize::MAX / hidden * hidden),
        launch: match algorithm {
            A::OneShotPush | A::TwoShotPush => {
                let cut = RowShares::new(algorithm, (rows.min(most), hidden), dtype, size);
                let room = Room::planned(topology, figures.max_blocks, (hidden, dtype));
                Blocks::new(algorithm, &cut, size, &room).launch()
            }
            _ => Launch::default(),
        },
    })
}

/// Most threads of a block of the kernel.
pub const MOST_THREADS: u32 = 1024;

/// Ranks up to which a group can have clusters.
pub const MOST_RANKS_IN_CLUSTERS: usize = 4;

/// Most threads of a block of a cluster.
pub const MOST_THREADS_IN_CLUSTERS: u32 = 256;

/// Threads of the blocks that places are reserved for.
pub const PLACE_THREADS: u32 = 512;

/// Threads that a small block counts for at least: the smallest GPUs hold sixteen blocks on a multiprocessor.
const LEAST_THREADS: u32 = 64;

/// Granules that are pushed by a block, where there are blocks enough.
const PUSHING: usize = 128;

/// What a rank's GPU has for the kernel. Plans take what all ranks know of; a rank launches by what it finds, which is the same where its
/// GPU is as large as those of the [figures](crate::tuned), nobody else has a part of it, and memory is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Multiprocessors.
    pub sms: u32,
    /// Those that the call may use: of a budget, and as many blocks as figures say.
    pub most: u32,
    /// Whether that is a budget. Without one a multiprocessor has as many small blocks as a large one has threads.
    pub budget: bool,
    /// Places of blocks that may wait.
    pub places: u32,
    /// Whether a place has one block, however small: where ranks share a GPU.
    pub shared: bool,
    /// Whether blocks may form clusters, and launches begin while the one before them ends.
    pub overtakes: bool,
    /// Whether all rows can be taken in whole granules.
    pub wide: bool,
    /// Whether a hook is asked, which one block does.
    pub hooked: bool,
}

impl Room {
    /// As far as all ranks know it.
    fn planned(topology: &Topology, max_blocks: u16, (hidden, dtype): (usize, DataType)) -> Self {
        let all = u32::from(max_blocks.max(1));
        let budget = topology.config.sm_budget.map_or(all, u32::from);
        Self {
            sms: all,
            most: budget.clamp(1, all),
            budget: topology.config.sm_budget.is_some(),
            places: all,
            shared: false,
            // GPUs that have tiles have clusters.
            overtakes: topology.engines.tiles,
            wide: hidden
                .saturating_mul(dtype.bytes())
                .is_multiple_of(GRANULE_BYTES),
            hooked: false,
        }
    }

    /// Blocks of so many threads that a call may have in a group of `size`, at least one.
    fn fit(&self, threads: u32, size: usize) -> u32 {
        let small = in_a_place(threads).max(1);
        let most = if self.budget {
            self.most
        } else {
            self.most.saturating_mul(small)
        };
        self.places(threads, size).min(most).max(1)
    }

    /// Blocks of so many threads that find a place in a group of `size`.
    fn places(&self, threads: u32, size: usize) -> u32 {
        match size {
            // Nobody to wait for.
            1 => self.sms,
            _ if self.hooked => 1,
            _ if self.shared => self.places,
            _ => self.places * in_a_place(threads),
        }
    }
}

/// Blocks of so many threads that a place holds: by their threads, and no more than all GPUs have slots for.
const fn in_a_place(threads: u32) -> u32 {
    let threads = if threads < LEAST_THREADS {
        LEAST_THREADS
    } else {
        threads
    };
    PLACE_THREADS / threads
}

/// A launch of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// How many.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// Blocks of a cluster, by which `blocks` can be divided.
    pub cluster: u32,
    /// Whether it may begin while the launch before it ends, as there are places for both.
    pub programmatic: bool,
    /// Whether every other block pushes and adds up, and the rest take rows, of many long rows in two shots: so something is on its way while others
    /// are normed.
    pub split: bool,
}

/// From so many rows of two blocks on, one of them pushes, where a row is enough for all threads that a multiprocessor has for it: of short rows, one after
/// the other by half of the blocks, it would take longer.
const SPLIT_ROWS: u32 = 3;

/// And from so many blocks on: the wire has enough of half of them, as measured with 132.
const SPLIT_BLOCKS: u32 = 64;

impl Blocks {
    /// Of a call by pushing, or of a rank alone, whose rows are cut so.
    ///
    /// A block for each row, with a thread for each granule of it; where there are many rows, twice as many blocks with a thread for
    /// two, and where there are few, a cluster of small blocks for each, as all threads of a multiprocessor take turns. Beside few
    /// rows there are blocks that push and nothing else. All within the places that a rank has for blocks that wait, and half
    /// of them where that is enough, so that the next kernel finds its places too.
    pub fn new(algorithm: A, cut: &RowShares, size: usize, room: &Room) -> Self {
        let fit = |threads: u32| room.fit(threads, size);
        let threads = |granules: u32| granules.next_multiple_of(32).clamp(32, MOST_THREADS);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        // More than any kernel takes is refused, but can be asked about.
        let granules = count(cut.row_granules).min(1 << 30);
        // In two shots every rank has a share as large as the largest.
        let rows = match algorithm {
            A::TwoShotPush => count(cut.share.saturating_mul(size)),
            _ => count(cut.rows),
        };
        let twice = rows.saturating_mul(2);
        // What the kernel does in one turn alone is what it has clusters for.
        let short = room.wide && (2..=MOST_RANKS_IN_CLUSTERS).contains(&size) && !room.hooked;
        let cluster = [8, 4].into_iter().find(|blocks| {
            let each = threads(granules.div_ceil(*blocks));
            // Clusters were measured with a block on each multiprocessor.
            let fits = rows.max(1).saturating_mul(*blocks) <= fit(each).min(room.most.max(1));
            let much = (64 * blocks..=MOST_THREADS).contains(&granules);
            let small = each <= MOST_THREADS_IN_CLUSTERS;
            short && room.overtakes && much && small && fits
        });
        let whole = threads(granules);
        let (cluster, threads) = match cluster {
            Some(blocks) => (blocks, threads(granules.div_ceil(blocks))),
            None if twice <= fit(whole) => (1, whole),
            None => (1, threads(granules.div_ceil(2))),
        };
        let pushing = match size {
            1 => 0,
            _ => count(cut.granules().div_ceil(PUSHING)),
        };
        // Blocks that push and nothing else, of which more than one on a multiprocessor were not quicker.
        let alone = room.places(threads, size).min(room.most).max(1);
        let halved = cluster == 1 && twice <= alone;
        let pushing = pushing.min(if halved { alone / 2 } else { alone });
        let fit = fit(threads);
        let most = if cluster == 1 && twice <= fit {
            fit / 2
        } else {
            fit
        };
        let wanted = rows.saturating_mul(cluster).max(pushing);
        let blocks = wanted.clamp(1, most.max(1));
        let split = algorithm == A::TwoShotPush
            && (size > 1 && blocks >= SPLIT_BLOCKS && cluster == 1)
            && (room.wide && !room.hooked && threads == PLACE_THREADS)
            && rows.saturating_mul(2) >= blocks.saturating_mul(SPLIT_ROWS);
        Self {
            split,
            blocks: (blocks / cluster).max(1) * cluster,
            threads,
            cluster,
            programmatic: size > 1 && room.overtakes && 2 * blocks <= room.places(threads, size),
        }
    }

    /// As plans have it.
    fn launch(self) -> Launch {
        let narrow = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
        Launch {
            blocks: narrow(self.blocks),
            threads: narrow(self.threads),
        }
    }
}
