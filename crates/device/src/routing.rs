//! Which rows go to which experts, and where those are.

use crate::{Buffer, DataType, Error, Group, Result, View, params::resident};

/// Where experts are. Slots are what experts lie in, and are counted over all ranks, those of rank 0 first.
#[derive(Clone, Copy, Debug)]
pub enum Placement<'a> {
    /// A slot for each of so many experts, spread over the ranks in order, as even as can be: the first ranks have one more.
    Even {
        /// How many.
        experts: usize,
    },
    /// So many slots on every rank, and experts that lie in one or several of them.
    Map {
        /// The slots of every expert, i32 `[experts, copies]`, the same on every rank; -1 behind the last. Token t of rank r goes to
        /// copy `(t + r) % copies` of as many as its expert has.
        slots: View<'a>,
        /// Slots of a rank.
        per_rank: usize,
    },
    /// Ids are ranks, with one slot each.
    Ranks,
}

/// The signed part of a [`Placement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlacementCall {
    /// See [`Placement::Even`].
    Even {
        /// How many.
        experts: usize,
    },
    /// See [`Placement::Map`].
    Map {
        /// How many.
        experts: usize,
        /// Most slots of one.
        copies: usize,
        /// Slots of a rank.
        per_rank: usize,
    },
    /// See [`Placement::Ranks`].
    Ranks,
}

/// Who goes where.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// Experts of every token, i32 or i64 `[tokens, k]`, k from 1 to [`Routing::MOST_K`]. -1 is none, and so is every number that
    /// names no expert. A token may name an expert twice.
    pub ids: View<'a>,
    /// Where they are.
    pub placement: Placement<'a>,
}

impl Routing<'_> {
    /// Most experts of a token.
    pub const MOST_K: usize = 32;

    /// Tokens of this rank.
    pub fn tokens(&self) -> usize {
        self.ids.shape().rows()
    }

    /// Checks types and shapes, and gives k and what all ranks must have in common.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<(usize, PlacementCall)> {
        let &[tokens, k] = self.ids.shape().dims() else {
            let want = "2 dimensions, [tokens, k]";
            return Err(Error::invalid("ids.shape", self.ids.shape(), want));
        };
        countable("ids.shape", tokens)?;
        check_ids(self.ids, k)?;
        Ok((k, self.placement.check(self.ids)?))
    }
}

/// Ids of any tokens, `k` each.
fn check_ids(ids: View<'_>, k: usize) -> Result<()> {
    if !matches!(ids.dtype(), DataType::I32 | DataType::I64) {
        return Err(Error::invalid("ids.dtype", ids.dtype(), "i32 or i64"));
    }
    if !(1..=Routing::MOST_K).contains(&k) {
        let want = format!("a k from 1 to {}", Routing::MOST_K);
        return Err(Error::invalid("ids.shape", ids.shape(), want));
    }
    Ok(())
}

impl Placement<'_> {
    /// Of experts that `ids` name.
    fn check(&self, ids: View<'_>) -> Result<PlacementCall> {
        Ok(match *self {
            Placement::Even { experts } => {
                countable("placement.experts", experts)?;
                PlacementCall::Even { experts }
            }
            Placement::Map { slots, per_rank } => {
                if slots.dtype() != DataType::I32 {
                    let want = DataType::I32;
                    return Err(Error::invalid("placement.slots", slots.dtype(), want));
                }
                let &[experts, copies] = slots.shape().dims() else {
                    let want = "2 dimensions, [experts, copies]";
                    return Err(Error::invalid("placement.slots", slots.shape(), want));
                };
                countable("placement.slots", slots.shape().len())?;
                countable("placement.per_rank", per_rank)?;
                resident("placement.slots", Some(slots.memory()), ids.memory())?;
                PlacementCall::Map {
                    experts,
                    copies,
                    per_rank,
                }
            }
            Placement::Ranks => PlacementCall::Ranks,
        })
    }
}

/// Experts of the tokens of all ranks, where every rank has them already: then no rank tells another which of its rows come.
///
/// What ranks have must agree. A number of rows that comes and is not what these ids say is a fault of
/// [`Mismatch`](crate::FaultKind::Mismatch); so is a number of tokens that cannot be, or that is not that of this rank's rows. Where as many
/// rows come as were expected, but of other tokens, what they hold is anything.
#[derive(Clone, Copy, Debug)]
pub struct GatheredRouting<'a> {
    /// As in [`Routing`]: i32 or i64, `[rows, k]` if they are ragged, `[ranks, max_tokens, k]` if they are padded.
    pub ids: View<'a>,
    /// Whose they are.
    pub lengths: Lengths<'a>,
    /// The weights of the experts, f32 of the same shape.
    pub weights: Option<View<'a>>,
    /// Where they are.
    pub placement: Placement<'a>,
}

/// Which of gathered rows are whose.
#[derive(Clone, Copy, Debug)]
pub enum Lengths<'a> {
    /// Those of a rank behind those of the one before.
    Ragged {
        /// The first of each rank, and at the end their number: i32 `[ranks + 1]`. There may be more rows behind that.
        offsets: View<'a>,
    },
    /// There is room for `max_tokens` of each.
    Padded {
        /// How many there are, i32 `[ranks]`.
        counts: View<'a>,
    },
}

impl<'a> GatheredRouting<'a> {
    /// That of all rows.
    pub const fn routing(&self) -> Routing<'a> {
        Routing {
            ids: self.ids,
            placement: self.placement,
        }
    }

    /// Checks types and shapes, and gives k and what all ranks must have in common.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, ranks: usize, max_tokens: usize) -> Result<(usize, PlacementCall)> {
        let ids = self.ids;
        let (k, field, lengths, n) = match (self.lengths, ids.shape().dims()) {
            (Lengths::Ragged { offsets }, &[rows, k]) => {
                // Counted in 32 bits.
                if i32::try_from(rows).is_err() {
                    let want = format!("at most {} rows", i32::MAX);
                    return Err(Error::invalid("ids.shape", ids.shape(), want));
                }
                (k, "lengths.offsets", offsets, ranks + 1)
            }
            (Lengths::Padded { counts }, &[r, t, k]) if (r, t) == (ranks, max_tokens) => {
                (k, "lengths.counts", counts, ranks)
            }
            (Lengths::Ragged { .. }, _) => {
                let want = "2 dimensions, [rows, k]";
                return Err(Error::invalid("ids.shape", ids.shape(), want));
            }
            (Lengths::Padded { .. }, _) => {
                let want = format!("[{ranks}, {max_tokens}, k]");
                return Err(Error::invalid("ids.shape", ids.shape(), want));
            }
        };
        check_ids(ids, k)?;
        if lengths.dtype() != DataType::I32 {
            return Err(Error::invalid(field, lengths.dtype(), DataType::I32));
        }
        if lengths.shape().dims() != [n] {
            return Err(Error::invalid(field, lengths.shape(), format!("[{n}]")));
        }
        resident(field, Some(lengths.memory()), ids.memory())?;
        check_weights(self.weights, ids)?;
        Ok((k, self.placement.check(ids)?))
    }
}

/// Weights of the experts that `ids` name.
pub(crate) fn check_weights(weights: Option<View<'_>>, ids: View<'_>) -> Result<()> {
    let Some(weights) = weights else {
        return Ok(());
    };
    if weights.dtype() != DataType::F32 {
        let want = DataType::F32;
        return Err(Error::invalid("weights.dtype", weights.dtype(), want));
    }
    if weights.shape() != ids.shape() {
        return Err(Error::invalid(
            "weights.shape",
            weights.shape(),
            ids.shape(),
        ));
    }
    resident("weights", Some(weights.memory()), ids.memory())
}

/// What 32 bits count, over all ranks.
pub(crate) fn countable(field: &'static str, n: usize) -> Result<()> {
    countable_times(field, n, 1)
}

/// The same where each counts so often.
pub(crate) fn countable_times(field: &'static str, n: usize, times: usize) -> Result<()> {
    /// So that as many on each rank of the largest group are still fewer than 2^31.
    const MOST: usize = (1 << 30) / Group::MOST_RANKS;
    let most = MOST / times.max(1);
    if n <= most {
        Ok(())
    } else {
        Err(Error::invalid(field, n, format!("at most {most}")))
    }
}

/// Where the rows of this rank go: a token goes once to a rank, however many of its experts are there.
#[derive(Clone, Debug)]
pub struct ExpertLayout {
    /// Slot of every expert of every token, i32 `[tokens, k]`; -1 for none.
    pub slots: Buffer,
    /// Which of the rows for a rank a token is, i32 `[tokens, ranks]`; -1 if it does not go there.
    pub positions: Buffer,
    /// Tokens that go to each rank, in their order, those of rank 0 first: i32 `[tokens * min(k, ranks)]`, with -1 behind the last.
    pub sent: Buffer,
    /// Where those of each rank begin, and at the end their number: i32 `[ranks + 1]`.
    pub sent_offsets: Buffer,
    /// How often this rank's tokens name each slot, i32 `[slots]`.
    pub rows_per_slot: Buffer,
}

impl ExpertLayout {
    /// For so many tokens with `k` experts each, over ranks that have so many slots in all; `new` makes a buffer.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn new(
        (tokens, k): (usize, usize),
        (size, slots): (usize, usize),
        new: impl Fn(DataType, &[usize]) -> Result<Buffer>,
    ) -> Result<Self> {
        let integers = |shape: &[usize]| new(DataType::I32, shape);
        Ok(Self {
            slots: integers(&[tokens, k])?,
            positions: integers(&[tokens, size])?,
            sent: integers(&[tokens * k.min(size)])?,
            sent_offsets: integers(&[size + 1])?,
            rows_per_slot: integers(&[slots])?,
        })
    }

    /// All buffers.
    pub const fn buffers(&self) -> [&Buffer; 5] {
        [
            &self.slots,
            &self.positions,
            &self.sent,
            &self.sent_offsets,
            &self.rows_per_slot,
        ]
    }
}
