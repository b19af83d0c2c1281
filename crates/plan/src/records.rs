//! Rows to experts and back as exchanges that push: what they take of a buffer, and when they are worth it.

mod record;

pub use record::Record;

use crate::{
    Topology,
    combine::Returning,
    dispatch::{Section, Sections},
    pushed::GRANULE_BYTES,
    reason,
};
use brigade_device::{
    Arrangement, CombineCall, CombineSum, DispatchCall, Launch, Plan, Reason, Transport,
};
use record::{PACKET, RUN, most_slots};

/// Most tokens of a rank whose ways the kernels for few find that push rows to experts.
pub const TOKENS: usize = 1024;

/// The same of the kernel that pushes many rows which lie by their source.
pub const MANY_TOKENS: usize = 8192;

/// Most slots of all ranks where rows lie by expert, each with as many as any, and once more those of one.
pub const PLACES: usize = 2048;

/// Most slots of a rank.
pub const SLOTS: usize = 1024;

/// Blocks of a dispatch that find room where one of an all-reduce does: so much shared memory is theirs on the GPUs that have most of it.
const TOGETHER: u16 = 2;

/// For kernels to divide by `d` without a division: `n * inverse(d) >> 32` is `n / d`, or 1 less. For the inverse is not below
/// `2^32 / d - 1`, so the product is above `n / d - 1`, and it is not above `n / d`.
pub fn inverse(d: usize) -> u32 {
    u32::MAX / u32::try_from(d.max(1)).unwrap_or(u32::MAX)
}

/// What comes back for a rank's tokens: weights, and then rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Granules of the weights.
    pub weights: usize,
    /// Granules of a row.
    pub row: usize,
    /// Rows of a token.
    pub rows: usize,
}

impl Returned {
    /// Of a combine.
    pub fn new(call: &CombineCall, size: usize) -> Self {
        let weights = if call.weights {
            call.max_tokens.saturating_mul(call.k)
        } else {
            0
        };
        Self {
            weights: weights.div_ceil(GRANULE_BYTES / 4),
            row: (call.hidden * call.dtype.bytes()).div_ceil(GRANULE_BYTES),
            rows: match call.sum {
                CombineSum::Expert => call.k,
                CombineSum::Rank | CombineSum::ExpertByRank => size.saturating_sub(1),
            },
        }
    }

    /// Bytes of a buffer that so many tokens take.
    pub fn bytes(&self, tokens: usize) -> usize {
        tokens
            .saturating_mul(self.rows)
            .saturating_mul(self.row)
            .saturating_add(self.weights)
            .saturating_mul(GRANULE_BYTES)
    }
}

/// A dispatch that pushes, if it can be: all of it, or all but rows that stay in place.
pub(crate) fn dispatch(call: &DispatchCall, topology: &Topology) -> Result<Pushed, Reason> {
    let size = topology.group.size;
    let most = most_slots(call, size);
    if most > SLOTS {
        return Err(reason::rows_pushed("slots of a rank", most, SLOTS));
    }
    let tokens = match call.arrangement {
        Arrangement::ByExpert { .. } => {
            if most * (size + 1) > PLACES {
                let limit = PLACES / (size + 1);
                return Err(reason::rows_pushed("slots of a rank", most, limit));
            }
            TOKENS
        }
        Arrangement::Dense | Arrangement::BySource => MANY_TOKENS,
    };
    if call.max_tokens > tokens {
        return Err(reason::rows_pushed("max_tokens", call.max_tokens, tokens));
    }
    let counted = matches!(call.arrangement, Arrangement::BySource) || call.max_recv.is_some();
    if !counted && !call.again {
        return Err(reason::rows_uncounted());
    }
    let record = Record::new(call, size);
    let sections = Sections::dispatch(call, call.max_tokens);
    let in_place = call.choice == Some(Transport::InPlace);
    let row = sections.row_bytes(Section::Row);
    if in_place && !row.is_multiple_of(GRANULE_BYTES) {
        return Err(reason::rows_pushed("bytes of a row modulo 16", row % 16, 0));
    }
    let widest = match call.arrangement {
        Arrangement::ByExpert { .. } => WIDE,
        Arrangement::Dense | Arrangement::BySource => 2 * WIDE,
    };
    let (copied, threads, together) = match in_place {
        // Rows are read once for all ranks, and most blocks do nothing else.
        true => (0, (record.runs * RUN / PACKET / 2, call.max_tokens), 1),
        // Own rows are taken, too.
        false => (
            sections.bytes,
            (record.packets(), call.max_tokens.saturating_mul(size)),
            TOGETHER,
        ),
    };
    let pushed = Pushed::new(
        call.max_tokens,
        (record.bytes(call.max_tokens, size), copied),
        threads,
        (CLERKS, together, widest),
        topology,
    )?;
    Ok(Pushed {
        arriving: record.arriving(call.max_tokens, size),
        transport: match in_place {
            true => Transport::InPlace,
            false => Transport::Pushed,
        },
        ..pushed
    })
}

/// A combine that pushes, if it can be.
pub(crate) fn combine(call: &CombineCall, topology: &Topology) -> Result<Pushed, Reason> {
    let size = topology.group.size;
    let row = call.hidden * call.dtype.bytes();
    if !row.is_multiple_of(GRANULE_BYTES) {
        return Err(reason::rows_pushed("bytes of a row modulo 16", row % 16, 0));
    }
    let returned = Returned::new(call, size);
    let sections = Returning::new(call, call.max_rows()).bytes();
    let widest = match call.sum {
        CombineSum::Rank => 2 * WIDE,
        CombineSum::Expert | CombineSum::ExpertByRank => WIDE,
    };
    let pushed = Pushed::new(
        call.max_tokens,
        (returned.bytes(call.max_tokens), sections),
        (
            returned.row,
            call.max_tokens.saturating_mul(size.max(2) - 1),
        ),
        (0, 1, widest),
        topology,
    )?;
    Ok(Pushed {
        rows: call.max_rows(),
        ..pushed
    })
}

/// What an exchange of rows takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pushed {
    /// Most rows from one rank to another.
    rows: usize,
    /// Bytes that may come to a rank.
    pub(crate) arriving: usize,
    /// Bytes that a buffer must have.
    pub(crate) need: usize,
    /// What a byte counts for where a limit is one of a budget: four times by blocks that are not as wide as those which tables know.
    weight: usize,
    transport: Transport,
    launch: Launch,
}

impl Pushed {
    /// `bytes` are those of a buffer, and those that a rank may send to another where rows are copied; `threads` those for a row, and how many
    /// rows there may be; `clerks` blocks do neither, and `together` may have the place of one of an all-reduce. The `widest` are for a budget.
    fn new(
        max_tokens: usize,
        (arriving, sections): (usize, usize),
        (threads, rows): (usize, usize),
        (clerks, together, widest): (usize, u16, u16),
        topology: &Topology,
    ) -> Result<Self, Reason> {
        /// Bytes of a count, and of what stands behind packets.
        const COUNT: usize = 64;
        let size = topology.group.size;
        if !topology.engines.pushes_rows {
            return Err(reason::no_rows_pushed());
        }
        // The host pushes sections as a copy.
        let copied = sections.saturating_add(sections / 16).saturating_add(COUNT);
        let need = match size {
            0 | 1 => 0,
            _ => arriving.max(copied.saturating_mul(size - 1)),
        };
        let have = topology.config.all_reduce_bytes;
        if need > have {
            return Err(reason::capacity("all_reduce_bytes", need, have));
        }
        let (most, together, widest, weight) = match topology.config.sm_budget {
            Some(budget) => (budget, 1, widest, if widest > WIDE { 1 } else { 4 }),
            None => (MOST_BLOCKS, together, WIDE, 1),
        };
        Ok(Self {
            rows: max_tokens,
            arriving,
            need,
            weight,
            transport: Transport::Pushed,
            launch: launch(
                (threads.saturating_mul(rows), clerks),
                (most, together, widest),
            ),
        })
    }

    /// Whether it is not more than such a limit.
    pub(crate) fn is_within(&self, most: usize) -> bool {
        self.arriving.saturating_mul(self.weight) <= most
    }

    pub(crate) fn plan(self) -> Plan {
        Plan::Experts {
            transport: self.transport,
            piece_rows: self.rows,
            pieces: 1,
            launch: self.launch,
        }
    }
}

/// Most blocks that push, of the largest.
pub(crate) const MOST_BLOCKS: u16 = 132;

/// Threads of the largest block where two find room on a multiprocessor.
const WIDE: u16 = 512;

/// Blocks of a dispatch that write down what the caller is told, where there are more.
pub const CLERKS: usize = 5;

/// For so many packets or granules: two threads for each while there are blocks for that, of which one pushes. Blocks with few threads are
/// quicker; but where there are more than `most`, two kernels do not find room beside each other. The `widest` within a budget has all threads of a
/// multiprocessor, and so as much on its way as two of half as many.
fn launch((threads, clerks): (usize, usize), (most, together, widest): (u16, u16, u16)) -> Launch {
    let most = most.clamp(1, MOST_BLOCKS);
    let blocks = |each: u16| 2 * threads.div_ceil(each.into()) + clerks;
    let narrow = [128, 256].map(|each| (each, most));
    let found = narrow
        .into_iter()
        .chain([(256, most * together), (WIDE, most)])
        .find(|&(each, most)| blocks(each) <= usize::from(most));
    match found {
        Some((threads, most)) => Launch {
            blocks: u16::try_from(blocks(threads))
                .unwrap_or(most)
                .clamp(1, most),
            threads,
        },
        None => Launch {
            blocks: most,
            threads: widest,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{record::tests::call, *};
    use crate::{
        Engines, Table, dispatch,
        transports::{ByRows, Figures},
    };
    use brigade_device::{CommConfig, Group, ParallelMode, PlacementCall};

    fn topology(bytes: usize) -> Topology {
        Topology {
            group: Group {
                mode: ParallelMode::Ep,
                rank: 0,
                size: 4,
            },
            config: CommConfig {
                all_reduce_bytes: bytes,
                ..CommConfig::new(ParallelMode::Ep)
            },
            engines: Engines::host(),
        }
    }

    #[test]
    fn rows_in_place_go_to_places_while_the_rest_is_pushed() {
        let in_place = DispatchCall {
            choice: Some(Transport::InPlace),
            ..call(7168, 8)
        };
        let plan = dispatch(&in_place, &topology(1 << 30)).unwrap().plan();
        let Plan::Experts {
            transport, launch, ..
        } = plan
        else {
            panic!("{plan:?}")
        };
        assert_eq!((transport, launch.blocks), (Transport::InPlace, 117));
        // Rows of other sizes go by steps.
        let narrow = DispatchCall {
            hidden: 4,
            ..in_place
        };
        let why = dispatch(&narrow, &topology(1 << 30)).unwrap_err();
        assert_eq!(why.code, reason::ROWS);
    }

    #[test]
    fn what_does_not_fit_is_not_pushed() {
        let need = Record::new(&call(7168, 8), 4).bytes(128, 4);
        assert!(dispatch(&call(7168, 8), &topology(need)).is_ok());
        let short = dispatch(&call(7168, 8), &topology(need - 1)).unwrap_err();
        assert_eq!(short.code, reason::CAPACITY);
        let by_expert = Arrangement::ByExpert { alignment: 1 };
        for (arrangement, most) in [(Arrangement::BySource, 8192), (by_expert, 1024)] {
            let of = |max_tokens| {
                let max_recv = Some(1 << 20);
                let call = DispatchCall {
                    max_tokens,
                    arrangement,
                    max_recv,
                    ..call(8, 1)
                };
                dispatch(&call, &topology(1 << 30))
            };
            assert!(of(most).is_ok(), "{arrangement:?}");
            assert_eq!(of(most + 1).unwrap_err().code, reason::ROWS);
        }
        // By expert a block knows so many slots of all ranks, and once more its own.
        for (experts, ok) in [(4 * 409, true), (4 * 409 + 1, false)] {
            let call = DispatchCall {
                placement: PlacementCall::Even { experts },
                arrangement: by_expert,
                max_recv: Some(1 << 20),
                ..call(8, 1)
            };
            let found = dispatch(&call, &topology(1 << 30));
            assert_eq!(found.is_ok(), ok, "{experts}");
            assert!(ok || found.unwrap_err().what.contains("slots of a rank"));
        }
        let dense = DispatchCall {
            arrangement: Arrangement::Dense,
            ..call(8, 1)
        };
        assert!(dispatch(&dense, &topology(1 << 30)).is_err());
    }

    #[test]
    fn a_budget_pushes_so_much_for_each_multiprocessor() {
        let by = |sm_budget, most: usize, per_sm: usize| {
            let mut topology = topology(1 << 30);
            topology.config.sm_budget = sm_budget;
            topology.engines = Engines::cuda(false, true);
            let table = Table {
                experts: ByRows::all(Figures {
                    push_max_bytes: Some(most),
                    push_max_bytes_per_sm: per_sm,
                    ..Figures::nothing_pushed()
                }),
                ..Table::host()
            };
            match dispatch::plan(&call(7168, 8), &topology, &table) {
                Ok(Plan::Experts { transport, .. }) => transport,
                other => panic!("{other:?}"),
            }
        };
        let need = Record::new(&call(7168, 8), 4).bytes(128, 4);
        let each = need.div_ceil(66);
        assert_eq!(by(None, need, 0), Transport::Pushed);
        assert_eq!(by(None, need - 1, each), Transport::OneSided);
        assert_eq!(by(Some(66), need, each), Transport::Pushed);
        assert_eq!(by(Some(65), need, each), Transport::OneSided);
        assert_eq!(by(Some(131), need - 1, each), Transport::OneSided);
        assert_eq!(by(Some(500), need, 0), Transport::Pushed, "all blocks");
    }

    #[test]
    fn few_rows_take_few_blocks() {
        let of = |threads, most| {
            let launch = launch((threads, CLERKS), (most, 1, WIDE));
            (launch.blocks, launch.threads)
        };
        assert_eq!(of(112, 132), (7, 128));
        assert_eq!(of(129, 132), (9, 128));
        assert_eq!(of(0, 132), (5, 128));
        assert_eq!(of(64 * 224, 132), (117, 256));
        assert_eq!(of(1 << 30, 132), (132, 512));
        assert_eq!(of(1 << 30, 24), (24, 512));
        let budget = |threads| {
            let launch = launch((threads, CLERKS), (24, 1, 2 * WIDE));
            (launch.blocks, launch.threads)
        };
        assert_eq!(budget(112), (7, 128));
        assert_eq!(budget(512 * 9), (23, 512));
        assert_eq!(budget(512 * 9 + 1), (24, 1024));
        let two = |threads| {
            let launch = launch((threads, CLERKS), (132, TOGETHER, WIDE));
            (launch.blocks, launch.threads)
        };
        assert_eq!(two(128 * 63), (131, 128));
        assert_eq!(two(256 * 63), (131, 256));
        assert_eq!(two(256 * 63 + 1), (133, 256));
        assert_eq!(two(256 * 129), (263, 256));
        assert_eq!(two(256 * 129 + 1), (132, 512));
    }

    /// As `divided` in `kernels/slots.cuh`.
    #[test]
    fn a_product_divides() {
        let divided = |n: u32, d: u32| {
            let inverse = inverse(d as usize);
            let q = ((u64::from(n) * u64::from(inverse)) >> 32) as u32;
            let rest = n - q * d;
            if rest >= d {
                (q + 1, rest - d)
            } else {
                (q, rest)
            }
        };
        for d in (1..2000).chain([1 << 16, (1 << 31) - 1, 1 << 31, u32::MAX]) {
            let some = (0..100).chain([u32::MAX - 1, u32::MAX]);
            let near = [d, u32::MAX / d * d]
                .into_iter()
                .flat_map(|n| [n - 1, n, n.saturating_add(d - 1)]);
            for n in some.chain(near) {
                assert_eq!(divided(n, d), (n / d, n % d), "{n} / {d}");
            }
        }
        assert_eq!(inverse(0), u32::MAX);
    }
}
