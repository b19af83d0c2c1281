//! What a dispatch gives: received rows, and the handle that takes rows back.

use crate::{
    Arrangement, Buffer, DataType, DispatchCall, ExpertLayout, Group, MachineWays, Origin, Plan,
    Result, Shape, View, ViewMut, params::check_totals,
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Received rows.
#[derive(Clone, Debug)]
pub struct Dispatched {
    /// `[rows, hidden]`, or as the [`Arrangement`] has them.
    pub rows: Buffer,
    /// Scales, if rows were cast.
    pub scales: Option<Buffer>,
    /// What came beside them, in the order in which it was given.
    pub beside: Vec<Buffer>,
    /// Slots of every row, i32 `[rows, k]`; by expert, where a row is for one, `[rows]`. Counted from the first of this rank, with -1 for
    /// none, or as [`ReceivedIds`](crate::ReceivedIds) has it. None in all that is behind the last row, and between those of two experts.
    pub ids: Buffer,
    /// Their weights, f32 of the same shape, 0 for none.
    pub weights: Option<Buffer>,
    /// Rows for each slot of this rank, i32 `[slots]`.
    pub counts: Buffer,
    /// What takes rows back, and further rows the same ways.
    pub handle: Handle,
    /// What was done.
    pub plan: Plan,
}

/// Which ways rows went. Needed to take them back; may be used again, for rows that go the same ways.
#[derive(Clone, Debug)]
pub struct Handle(pub(crate) HandleParts);

/// What a handle is made of, for backends.
#[derive(Clone, Debug)]
pub struct HandleParts {
    /// The group it was made in.
    pub group: Group,
    /// Whose it is.
    pub origin: Origin,
    /// The call that made it.
    pub call: DispatchCall,
    /// Where own rows went.
    pub layout: ExpertLayout,
    /// Own weights, f32 `[tokens, k]`.
    pub own_weights: Option<Buffer>,
    /// Rows that came from each rank, i32 `[ranks]`.
    pub received: Buffer,
    /// Where each row is from, i32 `[rows, 4]`: source rank, its token, which of the token's experts it is for (-1 where a row is for
    /// all of them), and which of the tokens from there it is. -1 where there is no row.
    pub sources: Buffer,
    /// First row of each source rank, or of each slot where rows lie by expert, and at the end their number with what lies between
    /// them: i32 `[ranks + 1]` or `[slots + 1]`.
    pub offsets: Buffer,
    /// By expert, the row of every expert of every token that came, i32 `[ranks, max_tokens, k]`; -1 for none.
    pub rows_of: Option<Buffer>,
    /// As in [`Dispatched`].
    pub ids: Buffer,
    /// As in [`Dispatched`].
    pub weights: Option<Buffer>,
    /// As in [`Dispatched`].
    pub counts: Buffer,
    /// The rows themselves, where they stay [in place](crate::Transport::InPlace).
    pub in_place: Option<Buffer>,
    /// How rows went across machines, if they did.
    pub machines: Option<Arc<MachineWays>>,
}

impl Handle {
    /// For backends.
    pub fn new(parts: HandleParts) -> Self {
        Self(parts)
    }

    /// For backends.
    pub fn parts(&self) -> &HandleParts {
        &self.0
    }

    /// The call that made it.
    pub fn call(&self) -> &DispatchCall {
        &self.0.call
    }

    /// Tokens of this rank.
    pub fn tokens(&self) -> usize {
        self.0.layout.slots.shape().rows()
    }

    /// Where own rows went.
    pub fn layout(&self) -> &ExpertLayout {
        &self.0.layout
    }

    /// How many rows went to and came from each machine, if it is of a [`Hierarchy`](crate::Hierarchy) of several.
    pub fn machines(&self) -> Option<&MachineWays> {
        self.0.machines.as_deref()
    }

    /// Rows that came from each rank, i32 `[ranks]`.
    pub fn received(&self) -> View<'_> {
        self.0.received.view()
    }

    /// Where each row is from, i32 `[rows, 4]`: source rank, its token, which of the token's experts it is for (-1 where a row is for
    /// all of them), and which of the tokens from there it is. -1 where there is no row.
    pub fn sources(&self) -> View<'_> {
        self.0.sources.view()
    }

    /// First row of each source rank, or of each slot where rows lie by expert, and at the end their number.
    pub fn offsets(&self) -> View<'_> {
        self.0.offsets.view()
    }

    /// Rows that there is room for.
    pub fn capacity(&self) -> usize {
        self.0.sources.shape().rows()
    }

    /// Checks that it is of this communicator, and was made since its last reset: what a dispatch leaves that ended in a fault is poisoned.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) otherwise.
    pub fn check(&self, now: Origin) -> Result<()> {
        self.0.origin.check("handle", now)
    }

    /// Shape of what has `row_len` elements for each row, as received rows lie.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for sizes that do not fit in memory.
    pub fn shape(&self, row_len: usize) -> Result<Shape> {
        let size = self.0.group.size;
        Shape::new(&self.0.call.dims(size, self.capacity(), row_len))
    }
}

impl HandleParts {
    /// All buffers.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let own = [
            &self.received,
            &self.sources,
            &self.offsets,
            &self.ids,
            &self.counts,
        ];
        self.layout
            .buffers()
            .into_iter()
            .chain(own)
            .chain(&self.own_weights)
            .chain(&self.weights)
            .chain(&self.rows_of)
    }
}

impl DispatchCall {
    /// Shape of what has `row_len` elements for each of `room` rows, as received rows lie.
    fn dims(&self, size: usize, room: usize, row_len: usize) -> SmallVec<[usize; 3]> {
        match self.arrangement {
            Arrangement::BySource => smallvec![size, self.max_tokens, row_len],
            Arrangement::Dense | Arrangement::ByExpert { .. } => smallvec![room, row_len],
        }
    }
}

/// How the ways of rows are known, for backends.
#[derive(Clone, Debug)]
pub enum Ways {
    /// They are found out in this call, and kept there.
    New(Box<Expected>),
    /// From an earlier call.
    Again(Box<HandleParts>),
}

/// What a handle has before it is known how many rows come.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Where own rows go.
    pub layout: ExpertLayout,
    /// Own weights.
    pub own_weights: Option<Buffer>,
    /// Rows from each rank, i32 `[ranks]`.
    pub received: Buffer,
    /// First row of each rank or slot.
    pub offsets: Buffer,
    /// Rows for each slot.
    pub counts: Buffer,
}

impl Expected {
    /// For this rank's `slots`; `new` makes a buffer.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn new(
        call: &DispatchCall,
        (size, slots): (usize, usize),
        (layout, own_weights): (ExpertLayout, Option<Buffer>),
        new: impl Fn(DataType, &[usize]) -> Result<Buffer>,
    ) -> Result<Self> {
        let runs = match call.arrangement {
            Arrangement::ByExpert { .. } => slots,
            Arrangement::Dense | Arrangement::BySource => size,
        };
        // One behind the other, to be poisoned as one.
        let counted = new(DataType::I32, &[size + runs + 1 + slots])?;
        Ok(Self {
            layout,
            own_weights,
            received: counted.slice(0, size)?,
            offsets: counted.slice(size, runs + 1)?,
            counts: counted.slice(size + runs + 1, slots)?,
        })
    }
}

impl Ways {
    /// Rows that there must be room for, if that is known before they come.
    pub fn room(&self, call: &DispatchCall, size: usize) -> Option<usize> {
        match (self, call.arrangement) {
            (Self::Again(parts), _) => Some(parts.sources.shape().rows()),
            (_, Arrangement::BySource) => Some(size * call.max_tokens),
            _ => call.max_recv,
        }
    }

    /// Checks where what slots get is added up.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) naming the field.
    pub fn check_totals(&self, totals: &ViewMut<'_>) -> Result<()> {
        let [_, _, counts] = self.counted();
        check_totals(totals, counts)
    }

    /// Where own rows go.
    pub fn layout(&self) -> &ExpertLayout {
        match self {
            Self::New(expected) => &expected.layout,
            Self::Again(parts) => &parts.layout,
        }
    }

    /// Rows from each rank, first rows, and rows for each slot.
    pub fn counted(&self) -> [&Buffer; 3] {
        match self {
            Self::New(of) => [&of.received, &of.offsets, &of.counts],
            Self::Again(of) => [&of.received, &of.offsets, &of.counts],
        }
    }

    /// All buffers.
    pub fn buffers(&self) -> Vec<&Buffer> {
        match self {
            Self::New(expected) => {
                let mut list = expected.layout.buffers().to_vec();
                list.extend(self.counted());
                list.extend(&expected.own_weights);
                list
            }
            Self::Again(parts) => parts.buffers().collect(),
        }
    }
}

/// Buffers that a dispatch fills, for backends.
#[derive(Clone, Debug)]
pub struct DispatchOutputs {
    /// As in [`Dispatched`].
    pub rows: Buffer,
    /// As in [`Dispatched`].
    pub scales: Option<Buffer>,
    /// As in [`Dispatched`].
    pub beside: Vec<Buffer>,
    /// Of the handle.
    pub parts: HandleParts,
}

impl DispatchOutputs {
    /// For `room` rows, each with as many elements of these types beside it; `new` makes a buffer. That of the rows may be given.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn new(
        call: &DispatchCall,
        (group, origin): (Group, Origin),
        room: usize,
        beside: &[(DataType, usize)],
        ways: &Ways,
        rows: Option<Buffer>,
        new: impl Fn(DataType, &[usize]) -> Result<Buffer>,
    ) -> Result<Self> {
        let of_rows = |dtype, row_len| new(dtype, &call.dims(group.size, room, row_len));
        let of_experts = |dtype| match call.arrangement {
            Arrangement::ByExpert { .. } => new(dtype, &[room]),
            Arrangement::Dense | Arrangement::BySource => of_rows(dtype, call.k),
        };
        let scales = match call.cast {
            Some(cast) if cast.column_major => {
                let (dtype, dims) = cast.by_columns(call.hidden, room);
                Some(new(dtype, &dims)?)
            }
            Some(cast) => {
                let (dtype, n) = cast.scales(call.hidden);
                Some(of_rows(dtype, n)?)
            }
            None => None,
        };
        let beside = beside.iter().map(|&(dtype, n)| of_rows(dtype, n));
        Ok(Self {
            rows: match rows {
                Some(rows) => rows,
                None => of_rows(call.wire_type(), call.hidden)?,
            },
            scales,
            beside: beside.collect::<Result<_>>()?,
            parts: match ways {
                Ways::Again(parts) => (**parts).clone(),
                Ways::New(expected) => HandleParts {
                    group,
                    origin,
                    call: call.clone(),
                    layout: expected.layout.clone(),
                    own_weights: expected.own_weights.clone(),
                    received: expected.received.clone(),
                    sources: new(DataType::I32, &[room, 4])?,
                    offsets: expected.offsets.clone(),
                    rows_of: match call.arrangement {
                        Arrangement::ByExpert { .. } => {
                            let dims = [group.size, call.max_tokens, call.k];
                            Some(new(DataType::I32, &dims)?)
                        }
                        Arrangement::Dense | Arrangement::BySource => None,
                    },
                    ids: of_experts(DataType::I32)?,
                    weights: match call.weights {
                        true => Some(of_experts(DataType::F32)?),
                        false => None,
                    },
                    counts: expected.counts.clone(),
                    in_place: None,
                    machines: None,
                },
            },
        })
    }

    /// The same where rows stay in place, if they do: there is no other buffer for them.
    #[must_use]
    pub fn in_place(mut self, rows: Option<Buffer>) -> Self {
        if let Some(rows) = &rows {
            self.rows = rows.clone();
        }
        self.parts.in_place = rows;
        self
    }

    /// Rows that there is room for.
    pub fn capacity(&self) -> usize {
        self.parts.sources.shape().rows()
    }

    /// All buffers.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let given = [&self.rows].into_iter().chain(&self.scales);
        given.chain(&self.beside).chain(self.parts.buffers())
    }

    /// What nobody may trust if the call ends in a fault: all that callers see of what came. What was counted of it lies together.
    pub fn poisoned(&self) -> impl Iterator<Item = &Buffer> {
        let parts = &self.parts;
        let counted = [&parts.received, &parts.offsets, &parts.counts];
        [&self.rows, &parts.ids, &parts.sources]
            .into_iter()
            .chain(counted)
            .chain(&self.scales)
            .chain(&parts.weights)
            .chain(&self.beside)
    }

    /// What the caller gets.
    pub fn dispatched(self, plan: Plan) -> Dispatched {
        let Self {
            rows,
            scales,
            beside,
            parts,
        } = self;
        Dispatched {
            rows,
            scales,
            beside,
            ids: parts.ids.clone(),
            weights: parts.weights.clone(),
            counts: parts.counts.clone(),
            handle: Handle::new(parts),
            plan,
        }
    }
}
