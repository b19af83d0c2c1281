//! What a call with experts needs and what it does, before anything is allocated: in bytes, and in words for people.

use crate::{
    Engines, Table, Topology,
    combine::{Returning, queued_sections},
    dispatch::{InPlace, Load, Sections, half_bytes, sections},
    fifo::Queues,
    low_latency::{BackRow, Section, There, back_bytes, told_back, told_there},
    plan, reason,
    records::{self, Record, Returned},
    routes::Slots,
    transports::Asked,
};
use brigade_device::{
    Arrangement, Buffer, Call, CombineCall, CommConfig, DataType, DispatchCall, DispatchOutputs,
    Expected, ExpertLayout, Group, LowLatencyDispatchCall, LowLatencyRows, LowLatencySent,
    MemoryType, Origin, ParallelMode, Plan, Reason, Shape, Storage, Transport, Ways,
};
use std::{any::Any, sync::Arc};

/// What a call wants of a communicator's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// The field of [`CommConfig`] that says how much there is.
    pub field: &'static str,
    /// So much of it, and all rows go at once; of queues, which any number of rows pass, so much that none is shorter than it should be
    /// where the plan cuts them.
    pub bytes: usize,
    /// With less, not even a row goes at a time.
    pub least_bytes: usize,
    /// How often a rank takes that at `join`: for each half, slot or buffer.
    pub copies: usize,
}

/// What data begins at a multiple of in a rank's memory.
const LINE: usize = 128;

impl Need {
    /// What it adds to [`Device::memory_need`](brigade_device::Device::memory_need). The first queues of a group have counters besides:
    /// 8 KiB for each of its ranks.
    pub fn joined_bytes(&self) -> usize {
        let lines = |bytes: usize| {
            let each = bytes.checked_next_multiple_of(LINE);
            each.map_or(usize::MAX, |each| each.saturating_mul(self.copies))
        };
        let told = match self.field {
            SLOTS => self.bytes / CommConfig::LOW_LATENCY_WORD_BYTES * 8,
            _ => 0,
        };
        lines(self.bytes).saturating_add(lines(told))
    }

    /// The configuration with room for it.
    #[must_use]
    pub fn fit(&self, mut config: CommConfig) -> CommConfig {
        let field = match self.field {
            DISPATCH => &mut config.dispatch_bytes,
            COMBINE => &mut config.combine_bytes,
            QUEUES => &mut config.fifo_bytes,
            SLOTS => &mut config.low_latency_bytes,
            _ => &mut config.all_reduce_bytes,
        };
        *field = (*field).max(self.bytes);
        config
    }
}

const DISPATCH: &str = "dispatch_bytes";
const COMBINE: &str = "combine_bytes";
const QUEUES: &str = "fifo_bytes";
const SLOTS: &str = "low_latency_bytes";
const PUSHED: &str = "all_reduce_bytes";

/// What a dispatch, a combine or half of a low-latency exchange needs in a group of `size`: by the transport that it forces, one-sided
/// if it forces none.
///
/// ```
/// use brigade_device::{Arrangement, Call, CommConfig, DataType, DispatchCall, ParallelMode, PerRank, PlacementCall, ReceivedIds};
/// use brigade_plan::experts::need;
/// let call = DispatchCall {
///     max_tokens: 4096,
///     hidden: 7168,
///     dtype: DataType::BF16,
///     beside_bytes: PerRank::new(),
///     k: 8,
///     weights: true,
///     placement: PlacementCall::Even { experts: 256 },
///     arrangement: Arrangement::ByExpert { alignment: 1 },
///     max_recv: None,
///     received_ids: ReceivedIds::Local,
///     again: false,
///     gathered: false,
///     cast: None,
///     choice: None,
/// };
/// let need = need(&Call::Dispatch(call), 8)?;
/// assert_eq!((need.field, need.bytes), ("dispatch_bytes", 471_991_296));
/// assert_eq!(need.joined_bytes(), 2 * need.bytes);
/// let config = need.fit(CommConfig::new(ParallelMode::Ep));
/// assert_eq!(config.dispatch_bytes, need.bytes);
/// # Ok::<_, brigade_device::Reason>(())
/// ```
///
/// # Errors
/// Why that transport cannot carry it with any memory; [`UNKNOWN`](reason::UNKNOWN) for another call.
pub fn need(call: &Call, size: usize) -> Result<Need, Reason> {
    let size = size.max(1);
    let parts = |bytes| half_bytes(bytes, size);
    let of = |field, copies, bytes, least_bytes| Need {
        field,
        bytes,
        least_bytes,
        copies,
    };
    let pushed = || {
        let bytes = records_of(call, &boundless(size))?.need;
        Ok(of(PUSHED, 3, bytes, bytes))
    };
    let queued = |each: &[usize]| {
        let (bytes, least) = Queues::bytes(size, each);
        of(QUEUES, 1, bytes, least)
    };
    Ok(match call {
        Call::Dispatch(c) => match c.choice {
            Some(Transport::Pushed) => pushed()?,
            Some(Transport::Fifo) => queued(&sections(c)),
            Some(Transport::InPlace) => {
                let bytes = |rows| {
                    let call = DispatchCall {
                        max_tokens: rows,
                        ..c.clone()
                    };
                    InPlace::of(&call, size).bytes(size)
                };
                of(
                    DISPATCH,
                    2,
                    bytes(c.max_tokens.max(1)),
                    bytes(c.max_tokens.max(1)),
                )
            }
            choice => {
                let loads: &[Load] = match (choice, Load::of(c)) {
                    (Some(Transport::Gather), Load::Whole) => &[Load::Ways, Load::Rest],
                    (Some(Transport::Gather), _) => &[Load::Rest],
                    (_, Load::Rest) => &[Load::Rest],
                    (_, _) => &[Load::Whole],
                };
                let of_load = |load: &Load, rows| parts(Sections::part(c, *load, rows).bytes);
                let bytes = |rows| loads.iter().map(|l| of_load(l, rows)).max().unwrap_or(0);
                of(DISPATCH, 2, bytes(c.max_tokens.max(1)), bytes(1))
            }
        },
        Call::Combine(c) => match c.choice {
            Some(Transport::Pushed) => pushed()?,
            Some(Transport::Fifo) => queued(&queued_sections(c)),
            _ => {
                let bytes = |rows| parts(Returning::new(c, rows).bytes());
                // Whole tokens go back.
                let least = c.rows_per_token();
                of(COMBINE, 2, bytes(c.max_rows().max(least)), bytes(least))
            }
        },
        Call::LowLatencyDispatch(c) => {
            let bytes = parts(There::new(c).bytes()).max(told_there(c, size));
            of(SLOTS, 4, bytes, bytes)
        }
        Call::LowLatencyCombine(c) => {
            let bytes = back_bytes(c).max(told_back(c)).max(1);
            of(SLOTS, 4, bytes, bytes)
        }
        other => return Err(reason::unknown(other.operation())),
    })
}

/// A group with all memory that there can be.
fn boundless(size: usize) -> Topology {
    let mode = ParallelMode::Ep;
    Topology {
        group: Group {
            mode,
            rank: 0,
            size,
        },
        config: CommConfig {
            all_reduce_bytes: usize::MAX,
            ..CommConfig::new(mode)
        },
        engines: Engines::host(),
    }
}

fn records_of(call: &Call, topology: &Topology) -> Result<records::Pushed, Reason> {
    match call {
        Call::Dispatch(c) => records::dispatch(c, topology),
        Call::Combine(c) => records::combine(c, topology),
        other => Err(reason::unknown(other.operation())),
    }
}

/// Bytes of all that a call gives a rank with so many tokens: results, and what the handle keeps. Where rows are counted only when they
/// have come, of the most that can come. Beside rows a device may take scratch memory.
///
/// # Errors
/// [`Error::Invalid`](brigade_device::Error::Invalid) for sizes that do not fit in memory;
/// [`Error::Unsupported`](brigade_device::Error::Unsupported) for another call.
pub fn given_bytes(call: &Call, group: &Group, tokens: usize) -> brigade_device::Result<usize> {
    let slots = |placement| Slots::new(placement, group.size);
    let buffers = match call {
        Call::Dispatch(c) => {
            let (all, own) = (
                slots(c.placement).total(),
                slots(c.placement).of(group.rank),
            );
            let layout = ExpertLayout::new((tokens, c.k), (group.size, all), imagined)?;
            // Of the weights of all ranks, those of own tokens.
            let weights = match c.gathered && c.weights {
                true => Some(imagined(DataType::F32, &[tokens, c.k])?),
                false => None,
            };
            let of = (layout, weights);
            let expected = Expected::new(c, (group.size, own.len()), of, imagined)?;
            let ways = Ways::New(Box::new(expected));
            let room = ways
                .room(c, group.size)
                .unwrap_or_else(|| most_rows(c, group.size, own.len()));
            let beside: Vec<_> = c.beside_bytes.iter().map(|&n| (DataType::U8, n)).collect();
            let outputs = DispatchOutputs::new(
                c,
                (*group, Origin::default()),
                room,
                &beside,
                &ways,
                None,
                imagined,
            )?;
            outputs.buffers().cloned().collect()
        }
        Call::Combine(c) => {
            let mut given = vec![imagined(c.output, &[tokens, c.hidden])?];
            if c.weights {
                given.push(imagined(DataType::F32, &[tokens, c.k])?);
            }
            given
        }
        Call::LowLatencyDispatch(c) => {
            let sent = LowLatencySent {
                group: *group,
                origin: Origin::default(),
                ticket: 0,
                chosen: imagined(DataType::I32, &[tokens, c.k])?,
                call: c.clone(),
            };
            let rows =
                LowLatencyRows::new(&sent, slots(c.placement).of(group.rank).len(), imagined)?;
            rows.buffers().cloned().chain([sent.chosen]).collect()
        }
        Call::LowLatencyCombine(c) => vec![imagined(c.dtype, &[tokens, c.hidden])?],
        other => return Err(reason::unknown(other.operation()).into()),
    };
    Ok(buffers.iter().map(Buffer::bytes).sum())
}

/// Most rows that can come to a rank, with what lies between those of two slots.
fn most_rows(call: &DispatchCall, size: usize, slots: usize) -> usize {
    let tokens = call.max_tokens * size;
    match call.arrangement {
        Arrangement::ByExpert { alignment } => tokens * call.k + slots * (alignment - 1),
        Arrangement::Dense | Arrangement::BySource => tokens,
    }
}

/// A buffer that nobody has.
#[derive(Debug)]
struct Imagined(usize);

impl Storage for Imagined {
    fn address(&self) -> u64 {
        0
    }
    fn bytes(&self) -> usize {
        self.0
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn imagined(dtype: DataType, dims: &[usize]) -> brigade_device::Result<Buffer> {
    let shape = Shape::new(dims)?;
    let storage = Arc::new(Imagined(shape.len() * dtype.bytes()));
    Buffer::new(storage, dtype, shape)
}

/// What is done for a call with experts, and why that way, in one line for people: transport and pieces, blocks, the most bytes that one
/// rank sends to another, and what the choice rests on.
///
/// # Errors
/// As [`plan`].
pub fn told(call: &Call, topology: &Topology, table: &Table) -> Result<String, Reason> {
    let plan = plan(call, topology, table)?;
    let (rows, row_bytes) = match call {
        Call::Dispatch(c) => (c.max_tokens, Sections::dispatch(c, 1).all_bytes()),
        Call::Combine(c) => (c.max_rows(), queued_sections(c)[..2].iter().sum()),
        Call::LowLatencyDispatch(c) => (c.max_tokens, there_bytes(c)),
        Call::LowLatencyCombine(c) => (c.there.max_tokens * c.there.k, BackRow::new(c).bytes()),
        other => return Err(reason::unknown(other.operation())),
    };
    let moved = format!("at most {} bytes to each rank", rows * row_bytes);
    let parts = match plan {
        Plan::Experts {
            transport,
            piece_rows,
            pieces,
            launch,
        } => {
            let s = if pieces == 1 { "" } else { "s" };
            let how = format!("{transport:?} in {pieces} piece{s} of {piece_rows} rows");
            let how = match queues(call, topology)? {
                Some(queues) => format!("{how}: {}", queues.told(&topology.config)),
                None => how,
            };
            let blocks = launch.blocks;
            let launched = match (transport, topology.config.sm_budget) {
                (Transport::Pushed, _) => {
                    let s = if blocks == 1 { "" } else { "s" };
                    format!("{blocks} block{s} of {} threads", launch.threads)
                }
                (_, Some(sms)) => format!("rows move on at most {sms} SMs"),
                (_, None) => "rows move on all SMs".into(),
            };
            vec![how, launched, moved, why(call, transport, topology, table)]
        }
        Plan::LowLatency { bytes } => {
            let have = topology.config.low_latency_bytes;
            let memory = format!("{bytes} bytes of places of {have} in each half");
            let why = "places are fixed, so nothing is counted".into();
            vec!["in two halves".into(), memory, moved, why]
        }
        other => {
            return Err(Reason::new(
                reason::UNKNOWN,
                format!("{other} is no plan for experts"),
                "report it",
            ));
        }
    };
    Ok(parts.join("; "))
}

/// The queues that rows go through, if they do.
fn queues(call: &Call, topology: &Topology) -> Result<Option<Queues>, Reason> {
    let through = |each: &[usize], rows| Queues::for_rows(topology, each, rows).map(Some);
    match call {
        Call::Dispatch(c) if c.choice == Some(Transport::Fifo) => {
            through(&sections(c), c.max_tokens)
        }
        Call::Combine(c) if c.choice == Some(Transport::Fifo) => {
            through(&queued_sections(c), c.max_rows())
        }
        _ => Ok(None),
    }
}

fn there_bytes(call: &LowLatencyDispatchCall) -> usize {
    let there = There::new(call);
    let sections = [
        Section::Row,
        Section::Scales,
        Section::Experts,
        Section::Weights,
    ];
    sections.into_iter().map(|s| there.of(s).1).sum()
}

/// Bytes that may come to a rank of `size` in a dispatch or a combine, as [figures](crate::transports) count them: what its peers push,
/// or would.
///
/// # Errors
/// [`UNKNOWN`](reason::UNKNOWN) for another call.
pub fn arriving_bytes(call: &Call, size: usize) -> Result<usize, Reason> {
    match call {
        Call::Dispatch(c) => Ok(Record::new(c, size).arriving(c.max_tokens, size)),
        Call::Combine(c) => Ok(Returned::new(c, size).bytes(c.max_tokens)),
        other => Err(reason::unknown(other.operation())),
    }
}

/// Why rows travel by this transport, and by which figures.
fn why(call: &Call, transport: Transport, topology: &Topology, table: &Table) -> String {
    let sm_budget = topology.config.sm_budget;
    let (figures, limit, choice, asked, field) = match call {
        // What goes back from a gather is one-sided.
        Call::Combine(CombineCall { choice, .. }) => (
            &table.experts.plain,
            table.experts.plain.push_back_limit(sm_budget),
            *choice,
            &[Asked::InPlace, Asked::Fifo][..],
            COMBINE,
        ),
        Call::Dispatch(c) => {
            let figures = table.experts.of(c);
            let limit = figures.push_limit(sm_budget);
            (figures, limit, c.choice, &Asked::ALL[..], DISPATCH)
        }
        _ => return String::new(),
    };
    if choice.is_some() {
        return "forced".into();
    }
    let pushed = records_of(call, topology);
    let few = |pushed: &records::Pushed| limit.is_some_and(|most| pushed.arriving <= most);
    if transport == Transport::Pushed && !pushed.as_ref().is_ok_and(few) {
        return format!("pushed, since the halves of {field} hold no row");
    }
    let Some(limit) = limit else {
        return "this device pushes no rows by itself".into();
    };
    let pushed = match pushed {
        Err(reason) => format!("not pushed: {}", reason.what),
        Ok(pushed) => {
            let than = match transport {
                Transport::Pushed => "not more",
                _ => "more",
            };
            let come = pushed.arriving;
            format!(
                "{come} bytes may come to a rank, {than} than the {limit} up to which rows are pushed"
            )
        }
    };
    [pushed, figures.source.to_string(), figures.asked_for(asked)].join("; ")
}
