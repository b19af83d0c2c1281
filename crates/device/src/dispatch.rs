//! Rows of tokens to the ranks of their experts.

use crate::{
    DataType, Error, GatheredRouting, Group, Handle, Origin, PerRank, PlacementCall, Result,
    Routing, View, ViewMut,
    params::{float, plain, resident},
    routing::{check_weights, countable},
    statistics::check_waits,
};
use smallvec::{SmallVec, smallvec};

/// How received rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// One after the other: by source rank, then token. A row for each token.
    Dense,
    /// `[ranks, max_tokens, ..]`, a place for every row that a rank can send; those of a rank in the order of its tokens.
    BySource,
    /// By slot, then source rank, token, and place among the token's experts: a row for each expert that a token names. What a
    /// slot gets begins at a multiple of `alignment` rows.
    ByExpert {
        /// From 1 to [`DispatchParams::MOST_ALIGNMENT`].
        alignment: usize,
    },
}

/// How rows travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Every rank writes its rows to their places at each receiver, in pieces where they do not fit.
    OneSided,
    /// Rows tell by themselves that they are there, and one kernel pushes, takes and arranges them: for few tokens. There must be room for a
    /// known number of rows. A combine that is pushed makes the type's canonical NaN of those that are all ones.
    Pushed,
    /// Rows pass through queues in the receivers' memory, however many they are: see
    /// [`CommConfig::fifo_bytes`](crate::CommConfig::fifo_bytes).
    Fifo,
    /// All ranks hear first which rows are for them; then every rank gets all rows, in the order of their tokens, in pieces where they do
    /// not fit, and keeps its own. As vLLM's `allgather_reducescatter` does, for large batches on one host. A combine goes
    /// [one-sided](Self::OneSided): each rank sends a token's owner the one row that it has made of it, and none where it has none, which
    /// is a reduce-scatter.
    Gather,
    /// Rows are written to their places in the receivers' memory, and stay there: what the dispatch gives as its rows is memory of the group,
    /// good until the next dispatch. Experts may write what they make where it lies. A combine of the same transport adds rows up
    /// straight from where they lie at each rank, and they are gone then. Nothing is copied on either side; all rows must fit at once,
    /// [`Arrangement::BySource`], and sums are those of ranks, with no weights beside them. The next dispatch cannot send them as they lie.
    InPlace,
}

/// How the ids of received rows number slots. A rank is told of its own alone: all others are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReceivedIds {
    /// From the first slot of the rank; -1 for none.
    #[default]
    Local,
    /// Over all ranks, as experts are numbered where each has one slot; -1 for none.
    Global,
    /// The same, and the number of all slots for none: nothing is below 0, so rows that are sorted by their ids have those of nobody
    /// behind all others. With weights, which are 0 there, that is what TensorRT-LLM's local gather gives.
    Padded,
}

/// Scales of rows that are cast to fp8 on the way: one for each 128 columns of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// f32 `[rows, blocks]`: the greatest magnitude divided by 448.
    F32,
    /// The same, rounded up to a power of two.
    PowerOfTwo,
    /// That power's biased exponent as a byte (UE8M0 of the OCP's microscaling formats), u8 `[rows, blocks]`, with blocks filled up to
    /// a multiple of 4 so that four of them are a word.
    Ue8m0,
}

/// Rows are cast to fp8 e4m3 by their sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Cast {
    /// What their scales are.
    pub format: ScaleFormat,
    /// Scales lie by columns: `[blocks, rows]`; packed ones `[blocks / 4, rows, 4]`.
    pub column_major: bool,
}

impl Fp8Cast {
    /// Columns that share a scale.
    pub const BLOCK: usize = 128;

    /// Type of the scales, and how many a row of `hidden` columns has.
    pub const fn scales(self, hidden: usize) -> (DataType, usize) {
        let blocks = hidden.div_ceil(Self::BLOCK);
        match self.format {
            ScaleFormat::Ue8m0 => (DataType::U8, blocks.next_multiple_of(4)),
            ScaleFormat::F32 | ScaleFormat::PowerOfTwo => (DataType::F32, blocks),
        }
    }

    /// Type and shape of the scales of so many rows where they lie by columns.
    pub fn by_columns(self, hidden: usize, rows: usize) -> (DataType, SmallVec<[usize; 3]>) {
        let (dtype, n) = self.scales(hidden);
        let dims = match self.format {
            ScaleFormat::Ue8m0 => smallvec![n / 4, rows, 4],
            ScaleFormat::F32 | ScaleFormat::PowerOfTwo => smallvec![n, rows],
        };
        (dtype, dims)
    }

    /// 4-byte words of a row's scales if they lie by columns: each has a place of its own then.
    pub const fn words_by_columns(self, hidden: usize) -> Option<usize> {
        let (dtype, n) = self.scales(hidden);
        match self.column_major {
            true => Some(n * dtype.bytes() / 4),
            false => None,
        }
    }
}

/// Rows to the ranks of their experts.
#[derive(Debug)]
pub struct DispatchParams<'a> {
    /// `[tokens, hidden]` of any type; a row has a multiple of 16 bytes.
    pub rows: View<'a>,
    /// What goes with every row: its scales, an adapter's number. `[tokens, ..]` of any types, at most
    /// [`DispatchParams::MOST_BESIDE`].
    pub beside: &'a [View<'a>],
    /// Where they go.
    pub route: Route<'a>,
    /// How they lie at the receiver.
    pub arrangement: Arrangement,
    /// Most tokens of any rank: the same on every rank.
    pub max_tokens: usize,
    /// Rows that there is room for at every receiver, the same on every rank: more stop the group with
    /// [`Overflow`](crate::FaultKind::Overflow), and nothing is written behind the last. `None` waits for the counts on the host, which
    /// no graph can. Not for [`Arrangement::BySource`], which has room for all.
    pub max_recv: Option<usize>,
    /// How the ids of received rows number slots.
    pub received_ids: ReceivedIds,
    /// i64 `[slots of this rank]`: what each slot gets is added to it, as [`Dispatched::counts`](crate::Dispatched::counts) has it, for
    /// statistics over many calls. In the order of the stream, in replays of graphs too. Of a call that ends in a fault, some may have been added.
    pub totals: Option<ViewMut<'a>>,
    /// i64 `[ranks]`: how long this rank waited for each other one in this call, in nanoseconds, is added to it; its own entry stays as it
    /// is. In the order of the stream, as `totals`. Waits for several ranks go on side by side, so their sum may be longer than the call; and
    /// so do those of the queues of a [`Transport::Fifo`](crate::Transport), which are added up for each rank.
    pub waits: Option<ViewMut<'a>>,
    /// Cast to fp8 on the way. Rows are f32, f16 or bf16 then.
    pub cast: Option<Fp8Cast>,
    /// Forced transport.
    pub choice: Option<Transport>,
}

/// How the ways of rows are known.
#[derive(Clone, Copy, Debug)]
pub enum Route<'a> {
    /// By the experts of every token.
    Experts {
        /// Which, and where they are.
        routing: Routing<'a>,
        /// The weights of a token's experts, f32 `[tokens, k]`.
        weights: Option<View<'a>>,
    },
    /// By those of all ranks' tokens: one-sided, or where all rows are gathered.
    Gathered(GatheredRouting<'a>),
    /// The same ways as before.
    Again(&'a Handle),
}

/// The signed part of a dispatch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DispatchCall {
    /// Most tokens of any rank.
    pub max_tokens: usize,
    /// Elements in a row.
    pub hidden: usize,
    /// Their type, before a cast.
    pub dtype: DataType,
    /// Bytes of a row of each thing beside.
    pub beside_bytes: PerRank,
    /// Experts of a token.
    pub k: usize,
    /// Whether they have weights.
    pub weights: bool,
    /// Where experts are.
    pub placement: PlacementCall,
    /// How received rows lie.
    pub arrangement: Arrangement,
    /// Rows that there is room for.
    pub max_recv: Option<usize>,
    /// How the ids of received rows number slots.
    pub received_ids: ReceivedIds,
    /// Whether rows go the ways of an earlier dispatch.
    pub again: bool,
    /// Whether every rank has the experts of all ranks' tokens.
    pub gathered: bool,
    /// Cast on the way.
    pub cast: Option<Fp8Cast>,
    /// Forced transport.
    pub choice: Option<Transport>,
}

impl DispatchParams<'_> {
    /// Most things beside rows.
    pub const MOST_BESIDE: usize = 4;
    /// Most rows that what a slot gets can begin at a multiple of.
    pub const MOST_ALIGNMENT: usize = 4096;
    /// A row has a multiple of so many bytes.
    pub const ROW_BYTES: usize = 16;

    /// Checks types, shapes and places, and gives the signed call. `now` is whose call it is.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, group: &Group, now: Origin) -> Result<DispatchCall> {
        let rows = self.rows;
        plain("rows.dtype", rows.dtype())?;
        let &[tokens, hidden] = rows.shape().dims() else {
            let want = "2 dimensions, [tokens, hidden]";
            return Err(Error::invalid("rows.shape", rows.shape(), want));
        };
        let row_bytes = hidden * rows.dtype().bytes();
        if row_bytes == 0 || !row_bytes.is_multiple_of(Self::ROW_BYTES) {
            let got = format!("{hidden} columns of {}", rows.dtype());
            let want = format!("rows of a multiple of {} bytes", Self::ROW_BYTES);
            return Err(Error::invalid("rows.shape", got, want));
        }
        countable("max_tokens", self.max_tokens)?;
        if tokens > self.max_tokens {
            let want = format!("at most max_tokens, {}", self.max_tokens);
            return Err(Error::invalid("rows.shape", rows.shape(), want));
        }
        let of_tokens = |field, view: View<'_>| {
            if view.shape().dims().first() != Some(&tokens) {
                let want = format!("[{tokens}, ..]");
                return Err(Error::invalid(field, view.shape(), want));
            }
            resident(field, Some(view.memory()), rows.memory())
        };
        if self.beside.len() > Self::MOST_BESIDE {
            let want = format!("at most {}", Self::MOST_BESIDE);
            return Err(Error::invalid("beside", self.beside.len(), want));
        }
        for &view in self.beside {
            plain("beside", view.dtype())?;
            of_tokens("beside", view)?;
        }
        let beside = self.beside.iter();
        let beside_bytes = beside.map(|v| v.shape().row_len() * v.dtype().bytes());
        let (k, weights, placement) = match &self.route {
            Route::Experts { routing, weights } => {
                of_tokens("ids", routing.ids)?;
                let (k, placement) = routing.check()?;
                check_weights(*weights, routing.ids)?;
                (k, weights.is_some(), placement)
            }
            Route::Gathered(all) => {
                let (k, placement) = all.check(group.size, self.max_tokens)?;
                resident("ids", Some(all.ids.memory()), rows.memory())?;
                (k, all.weights.is_some(), placement)
            }
            Route::Again(handle) => {
                let made = handle.call();
                let same = |field, got: usize, want: usize| match got == want {
                    true => Ok(()),
                    false => Err(Error::invalid(field, got, format!("{want}, as at first"))),
                };
                handle.check(now)?;
                same("rows.shape", tokens, handle.tokens())?;
                same("max_tokens", self.max_tokens, made.max_tokens)?;
                if (self.arrangement, self.max_recv) != (made.arrangement, made.max_recv) {
                    let got = format!("{:?}, {:?}", self.arrangement, self.max_recv);
                    let want = format!("{:?}, {:?}, as at first", made.arrangement, made.max_recv);
                    return Err(Error::invalid("arrangement", got, want));
                }
                if self.received_ids != made.received_ids {
                    let got = format!("{:?}", self.received_ids);
                    let want = format!("{:?}, as at first", made.received_ids);
                    return Err(Error::invalid("received_ids", got, want));
                }
                (made.k, made.weights, made.placement)
            }
        };
        match (self.arrangement, self.max_recv) {
            (Arrangement::ByExpert { alignment: 0 }, _) => {
                return Err(Error::invalid("arrangement.alignment", 0, "at least 1"));
            }
            (Arrangement::BySource, Some(rows)) => {
                return Err(Error::invalid("max_recv", rows, "None with BySource"));
            }
            (Arrangement::ByExpert { alignment }, _) if alignment > Self::MOST_ALIGNMENT => {
                let want = format!("at most {}", Self::MOST_ALIGNMENT);
                return Err(Error::invalid("arrangement.alignment", alignment, want));
            }
            // Rows are counted in 32 bits.
            (_, Some(rows)) if i32::try_from(rows).is_err() => {
                let want = format!("at most {}", i32::MAX);
                return Err(Error::invalid("max_recv", rows, want));
            }
            _ => {}
        }
        if self.cast.is_some() {
            float("rows.dtype", rows.dtype())?;
            if !hidden.is_multiple_of(Self::ROW_BYTES) {
                let want = format!("a multiple of {} columns to be cast", Self::ROW_BYTES);
                return Err(Error::invalid("rows.shape", rows.shape(), want));
            }
        }
        check_waits(self.waits.as_ref(), group.size, rows.memory())?;
        Ok(DispatchCall {
            max_tokens: self.max_tokens,
            hidden,
            dtype: rows.dtype(),
            beside_bytes: beside_bytes.collect(),
            k,
            weights,
            placement,
            arrangement: self.arrangement,
            max_recv: self.max_recv,
            received_ids: self.received_ids,
            again: matches!(self.route, Route::Again(_)),
            gathered: matches!(self.route, Route::Gathered(_)),
            cast: self.cast,
            choice: self.choice,
        })
    }
}

/// What a dispatch says of rows that it takes back from the caller, and was to send; for backends.
pub fn taken_back(field: &'static str) -> Error {
    let got = "rows in place of an earlier call, which this one takes back";
    Error::invalid(field, got, "a copy of them")
}

impl DispatchCall {
    /// Type of rows as they travel.
    pub const fn wire_type(&self) -> DataType {
        match self.cast {
            Some(_) => DataType::F8E4M3,
            None => self.dtype,
        }
    }
}
