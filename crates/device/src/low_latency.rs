//! The low-latency exchange of rows with experts (after DeepEP's low-latency dispatch and combine): every call in two halves, a send
//! and a receive, and nobody waits between them. Places are fixed, so no counts go ahead, and two slots let two exchanges overlap.

use crate::{
    Buffer, Comm, DataType, DispatchParams, Error, Fp8Cast, Group, Lease, LowLatencyCombineParams,
    Origin, PendingCombine, PlacementCall, Result, Routing, ScaleFormat, Shape, Statistics, View,
    ViewMut,
    params::{check_totals, float, resident},
    routing::countable,
    statistics::check_waits,
};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// One of two places for low-latency results: two can be live, and a third has no slot to borrow.
pub struct Slot {
    number: u8,
    lent: Arc<Lent>,
}

/// The two slots of a communicator's low-latency exchange, as [`Comm::low_latency`] lends them: until both are dropped, nobody else has
/// them. All ranks take the same slots in the same order.
pub struct LowLatency {
    slots: [Slot; 2],
}

impl LowLatency {
    /// Both slots.
    pub fn slots(&mut self) -> (&mut Slot, &mut Slot) {
        let [a, b] = &mut self.slots;
        (a, b)
    }
}

/// What slots that are lent together have in common. Each has it, and not their owner alone: slots can change places with those of
/// another communicator.
struct Lent;

/// What a communicator knows of the slots that it lends.
#[derive(Default)]
pub(crate) struct Lender(Mutex<Weak<Lent>>);

impl Lender {
    fn lend(&self) -> Result<LowLatency> {
        let mut last = self.0.lock();
        if last.strong_count() > 0 {
            return Err(Error::Busy("the low-latency exchange"));
        }
        let lent = Arc::new(Lent);
        *last = Arc::downgrade(&lent);
        Ok(LowLatency {
            slots: [0, 1].map(|number| Slot {
                number,
                lent: Arc::clone(&lent),
            }),
        })
    }

    fn check(&self, slot: &Slot) -> Result<()> {
        if self.0.lock().as_ptr() == Arc::as_ptr(&slot.lent) {
            return Ok(());
        }
        let (got, want) = ("another communicator's", "one that this communicator lent");
        Err(Error::invalid("slot", got, want))
    }
}

impl Comm {
    /// The slots of the low-latency exchange, for whoever asks first. They are good until they are dropped, through resets too; graphs
    /// that were captured with them may be launched after that.
    ///
    /// # Errors
    /// [`Error::Busy`] while somebody has them: whoever has not received what was sent there, or has results there, would lose it.
    pub fn low_latency(&self) -> Result<LowLatency> {
        self.0.slots.lend()
    }
}

/// Rows for their experts. A token has one row at an expert, however often it names it.
#[derive(Clone, Copy, Debug)]
pub struct LowLatencyDispatchParams<'a> {
    /// f32, f16 or bf16 `[tokens, hidden]`; a row has a multiple of 16 bytes.
    pub rows: View<'a>,
    /// Where they go.
    pub routing: Routing<'a>,
    /// The weights of own tokens' experts, f32 `[tokens, k]`: for a combine by [`CombineSum::ExpertByRank`](crate::CombineSum::ExpertByRank).
    pub weights: Option<View<'a>>,
    /// Most tokens of any rank: the same on every rank.
    pub max_tokens: usize,
    /// Cast to fp8 on the way.
    pub cast: Option<Fp8Cast>,
}

/// The signed part of a low-latency dispatch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LowLatencyDispatchCall {
    /// Which slot.
    pub slot: u8,
    /// Most tokens of any rank.
    pub max_tokens: usize,
    /// Elements in a row.
    pub hidden: usize,
    /// Their type, before a cast.
    pub dtype: DataType,
    /// Experts of a token.
    pub k: usize,
    /// Whether their weights go along.
    pub weights: bool,
    /// Where experts are.
    pub placement: PlacementCall,
    /// Cast on the way.
    pub cast: Option<Fp8Cast>,
}

impl LowLatencyDispatchParams<'_> {
    /// Checks types, shapes and places, and gives the signed call.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, slot: u8) -> Result<LowLatencyDispatchCall> {
        let rows = self.rows;
        float("rows.dtype", rows.dtype())?;
        let &[tokens, hidden] = rows.shape().dims() else {
            let want = "2 dimensions, [tokens, hidden]";
            return Err(Error::invalid("rows.shape", rows.shape(), want));
        };
        whole_row(rows.dtype(), hidden)?;
        countable("max_tokens", self.max_tokens)?;
        if tokens > self.max_tokens {
            let want = format!("at most max_tokens, {}", self.max_tokens);
            return Err(Error::invalid("rows.shape", rows.shape(), want));
        }
        let ids = self.routing.ids;
        let (k, placement) = self.routing.check()?;
        if ids.shape().rows() != tokens {
            return Err(Error::invalid(
                "ids",
                ids.shape(),
                format!("[{tokens}, ..]"),
            ));
        }
        resident("ids", Some(ids.memory()), rows.memory())?;
        if let Some(weights) = self.weights {
            weighty(weights, ids.shape(), rows)?;
        }
        if self.cast.is_some() {
            whole_row(DataType::F8E4M3, hidden)?;
        }
        Ok(LowLatencyDispatchCall {
            slot,
            max_tokens: self.max_tokens,
            hidden,
            dtype: rows.dtype(),
            k,
            weights: self.weights.is_some(),
            placement,
            cast: self.cast,
        })
    }
}

/// Weights of own tokens' experts, beside rows of theirs.
pub(crate) fn weighty(weights: View<'_>, want: Shape, rows: View<'_>) -> Result<()> {
    if weights.dtype() != DataType::F32 {
        let want = DataType::F32;
        return Err(Error::invalid("weights.dtype", weights.dtype(), want));
    }
    if weights.shape() != want {
        return Err(Error::invalid("weights.shape", weights.shape(), want));
    }
    resident("weights", Some(weights.memory()), rows.memory())
}

pub(crate) fn whole_row(dtype: DataType, hidden: usize) -> Result<()> {
    let bytes = hidden * dtype.bytes();
    if bytes == 0 || !bytes.is_multiple_of(DispatchParams::ROW_BYTES) {
        let got = format!("{hidden} columns of {dtype}");
        let least = DispatchParams::ROW_BYTES;
        let want = format!("rows of a multiple of {least} bytes");
        return Err(Error::invalid("rows.shape", got, want));
    }
    Ok(())
}

impl LowLatencyDispatchCall {
    /// Type of rows as they travel.
    pub const fn wire_type(&self) -> DataType {
        match self.cast {
            Some(_) => DataType::F8E4M3,
            None => self.dtype,
        }
    }

    /// Rows that each expert has room for.
    pub const fn room(&self, size: usize) -> usize {
        self.max_tokens * size
    }

    /// Type and number of a row's scales, if it is cast.
    pub fn scales(&self) -> Option<(DataType, usize)> {
        self.cast.map(|cast| cast.scales(self.hidden))
    }
}

/// An exchange of a slot that was sent, for backends.
#[derive(Clone, Debug)]
pub struct LowLatencySent {
    /// The group it was made in.
    pub group: Group,
    /// Whose it is.
    pub origin: Origin,
    /// Which of the exchanges of its slot it is: a later one gives it up.
    pub ticket: u64,
    /// The dispatch.
    pub call: LowLatencyDispatchCall,
    /// Slots of own tokens' experts, i32 `[tokens, k]`; -1 for none.
    pub chosen: Buffer,
}

impl LowLatencySent {
    /// Checks that it is of this communicator, and was made since its last reset.
    ///
    /// # Errors
    /// [`Error::Invalid`] otherwise.
    pub fn check(&self, now: Origin) -> Result<()> {
        self.origin.check("slot", now)
    }
}

/// What a low-latency dispatch gives, for backends.
#[derive(Clone, Debug)]
pub struct LowLatencyRows {
    /// What was sent.
    pub sent: LowLatencySent,
    /// `[local experts, max_tokens x ranks, hidden]`
    pub rows: Buffer,
    /// `[local experts, max_tokens x ranks, blocks]`, if rows were cast; by columns, what [`Fp8Cast`] says of each expert's.
    pub scales: Option<Buffer>,
    /// i32 `[local experts]`
    pub counts: Buffer,
    /// i32 `[local experts, ranks, 2]`
    pub ranges: Buffer,
    /// i32 `[local experts, max_tokens x ranks, 3]`
    pub sources: Buffer,
    /// If the dispatch had weights.
    pub held: Option<LowLatencyHeld>,
}

/// What a rank keeps of the tokens whose rows came with weights, for backends.
#[derive(Clone, Debug)]
pub struct LowLatencyHeld {
    /// The row that each of their experts got here, counted over all local experts, or -1: i32 `[ranks, max_tokens, k]`.
    pub rows: Buffer,
    /// The weights of those that have a row, f32 `[ranks, max_tokens, k]`.
    pub weights: Buffer,
}

impl LowLatencyRows {
    /// Checks where rows are counted.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check_totals(&self, totals: &ViewMut<'_>) -> Result<()> {
        check_totals(totals, &self.counts)
    }

    /// For this rank's `experts`; `new` makes a buffer.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn new(
        sent: &LowLatencySent,
        experts: usize,
        new: impl Fn(DataType, &[usize]) -> Result<Buffer>,
    ) -> Result<Self> {
        let (call, room) = (&sent.call, sent.call.room(sent.group.size));
        let of_rows = |dtype, row_len| new(dtype, &[experts, room, row_len]);
        Ok(Self {
            sent: sent.clone(),
            rows: of_rows(call.wire_type(), call.hidden)?,
            scales: match call.cast {
                Some(cast) if cast.column_major => {
                    let (dtype, mut dims) = cast.by_columns(call.hidden, room);
                    dims.insert(0, experts);
                    Some(new(dtype, &dims)?)
                }
                Some(cast) => {
                    let (dtype, n) = cast.scales(call.hidden);
                    Some(of_rows(dtype, n)?)
                }
                None => None,
            },
            counts: new(DataType::I32, &[experts])?,
            ranges: new(DataType::I32, &[experts, sent.group.size, 2])?,
            sources: of_rows(DataType::I32, 3)?,
            held: match call.weights {
                true => {
                    let dims = [sent.group.size, call.max_tokens, call.k];
                    Some(LowLatencyHeld {
                        rows: new(DataType::I32, &dims)?,
                        weights: new(DataType::F32, &dims)?,
                    })
                }
                false => None,
            },
        })
    }

    /// All buffers that a receive fills.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let held = self.held.iter().flat_map(|h| [&h.rows, &h.weights]);
        [&self.rows, &self.counts, &self.ranges, &self.sources]
            .into_iter()
            .chain(&self.scales)
            .chain(held)
    }
}

impl Lease<'_> {
    /// Sends rows to their experts by the low-latency transport, and waits for nothing but, if they are very late, receivers of the
    /// exchange before the last in this slot. Whoever drops what this gives without receiving it has given the exchange up; no peer
    /// minds.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no experts, or the communicator less memory than the call needs (see
    /// [`CommConfig::low_latency_bytes`](crate::CommConfig::low_latency_bytes)); [`Error::Invalid`] for a slot of another communicator;
    /// otherwise as [`all_reduce`](Self::all_reduce).
    pub fn low_latency_dispatch<'s>(
        &mut self,
        slot: &'s mut Slot,
        p: LowLatencyDispatchParams<'_>,
    ) -> Result<Pending<'s>> {
        self.comm.0.slots.check(slot)?;
        let (experts, turn) = self.experts()?;
        let sent = experts.low_latency_dispatch(turn, slot.number, p)?;
        Ok(Pending { slot, sent })
    }

    /// Sends back what experts made of the rows of `there`.
    ///
    /// # Errors
    /// As [`low_latency_dispatch`](Self::low_latency_dispatch).
    pub fn low_latency_combine<'d>(
        &mut self,
        there: &'d LowLatencyDispatched<'_>,
        p: LowLatencyCombineParams<'_>,
    ) -> Result<PendingCombine<'d>> {
        let (experts, turn) = self.experts()?;
        let back = experts.low_latency_combine(turn, &there.parts, p)?;
        Ok(PendingCombine {
            back,
            _slot: &*there.slot,
        })
    }
}

/// Rows that have been sent, and not yet received.
#[must_use = "the rows have been sent, not received"]
pub struct Pending<'s> {
    slot: &'s mut Slot,
    sent: LowLatencySent,
}

impl<'s> Pending<'s> {
    /// Waits for them, and packs them expert by expert.
    ///
    /// # Errors
    /// [`Error::Fault`](crate::Error::Fault) if a rank did not send, or sent something else; [`Error::Invalid`] if it is
    /// another communicator's lease, or the group was reset since.
    pub fn receive(self, lease: &mut Lease<'_>) -> Result<LowLatencyDispatched<'s>> {
        self.receive_counted(lease, Statistics::default())
    }

    /// The same, and adds up what is asked for. Where it fails, some of it may have been added.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`Error::Invalid`] for a type or a shape of what is added to: the exchange is given up then.
    pub fn receive_counted(
        self,
        lease: &mut Lease<'_>,
        to: Statistics<'_>,
    ) -> Result<LowLatencyDispatched<'s>> {
        let LowLatencySent { group, chosen, .. } = &self.sent;
        check_waits(to.waits.as_ref(), group.size, chosen.memory())?;
        let (experts, turn) = lease.experts()?;
        let parts = experts.low_latency_receive(turn, &self.sent, to)?;
        Ok(LowLatencyDispatched {
            parts,
            slot: self.slot,
        })
    }
}

/// Received rows, which keep their slot.
pub struct LowLatencyDispatched<'s> {
    parts: LowLatencyRows,
    slot: &'s mut Slot,
}

impl LowLatencyDispatched<'_> {
    /// `[local experts, max_tokens x ranks, hidden]`: for each expert of this rank the rows of the tokens that name it, by source rank and
    /// then token, one behind the other from its first place on. What is behind them is anything.
    pub fn rows(&self) -> View<'_> {
        self.parts.rows.view()
    }

    /// Scales, if rows were cast: `[local experts, max_tokens x ranks, blocks]`, as [`ScaleFormat`] has them. By columns,
    /// `[local experts, blocks, max_tokens x ranks]`; packed ones `[local experts, blocks / 4, max_tokens x ranks, 4]`.
    pub fn scales(&self) -> Option<View<'_>> {
        self.parts.scales.as_ref().map(Buffer::view)
    }

    /// Rows of each expert of this rank, i32 `[local experts]`.
    pub fn counts(&self) -> View<'_> {
        self.parts.counts.view()
    }

    /// For each expert and source rank, which of the expert's rows is the first from there, and how many are: i32
    /// `[local experts, ranks, 2]` (DeepEP's `layout_range`). Where none are, the first is where they would be.
    pub fn ranges(&self) -> View<'_> {
        self.parts.ranges.view()
    }

    /// Where each row is from, i32 `[local experts, max_tokens x ranks, 3]`: source rank, its token, and, as bits, which of the token's
    /// experts this one is.
    pub fn sources(&self) -> View<'_> {
        self.parts.sources.view()
    }

    /// How scales are told, if rows were cast.
    pub fn scale_format(&self) -> Option<ScaleFormat> {
        self.parts.sent.call.cast.map(|cast| cast.format)
    }
}
