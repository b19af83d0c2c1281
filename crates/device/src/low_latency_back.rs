//! The way back of a low-latency exchange: what experts made of rows, and how it is added.

use crate::{
    Buffer, CombineSum, DataType, Error, Fp8Cast, Group, Lease, LowLatencyDispatchCall,
    LowLatencyRows, LowLatencySent, Origin, Output, Result, ScaleFormat, Slot, View, ViewMut,
    collectives::summed,
    low_latency::{weighty, whole_row},
    params::float,
    statistics::check_waits,
};

/// Rows are cast by who sends them back, and are f32 again where they are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CombineCast {
    /// To fp8 e4m3, as [`Fp8Cast`] does it. A row has a multiple of 16 columns.
    Fp8(ScaleFormat),
    /// To LogFMT-10: a sign and nine bits of a logarithm each, and two f32 for every 128 columns. Rows are bf16, with a multiple of 128 columns.
    LogFmt10,
}

/// What experts made of rows, on its way back.
#[derive(Clone, Copy, Debug)]
pub struct LowLatencyCombineParams<'a> {
    /// f32, f16 or bf16 `[local experts, max_tokens x ranks, hidden]`, as the received rows lie; a row has a multiple of 16 bytes. What
    /// is behind an expert's count is not read.
    pub rows: View<'a>,
    /// By `Expert`, a row for every expert of a token comes back; by `ExpertByRank`, one of every rank that has some of them: for that the
    /// dispatch must have had weights. Not by `Rank`.
    pub sum: CombineSum,
    /// Cast on the way: each row of an expert, or each sum, once it is rounded to the type of the rows.
    pub cast: Option<CombineCast>,
    /// By `Expert`, and only there: the weights of own tokens' experts, f32 `[tokens, k]`. They are read when the rows are received.
    pub weights: Option<View<'a>>,
}

/// The signed part of a low-latency combine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LowLatencyCombineCall {
    /// The dispatch whose rows go back.
    pub there: LowLatencyDispatchCall,
    /// Elements in a row.
    pub hidden: usize,
    /// Their type.
    pub dtype: DataType,
    /// What a token's rows become.
    pub sum: CombineSum,
    /// Cast on the way.
    pub cast: Option<CombineCast>,
}

impl LowLatencyCombineParams<'_> {
    /// Checks types, shapes and places, and gives the signed call. `now` is whose call it is.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(
        &self,
        there: &LowLatencyRows,
        group: &Group,
        now: Origin,
    ) -> Result<LowLatencyCombineCall> {
        there.sent.check(now)?;
        let rows = self.rows;
        float("rows.dtype", rows.dtype())?;
        let experts = there.counts.shape().len();
        let room = there.sent.call.room(group.size);
        let hidden = match rows.shape().dims() {
            &[e, r, hidden] if (e, r) == (experts, room) => hidden,
            _ => {
                let want = format!("[{experts}, {room}, hidden]");
                return Err(Error::invalid("rows.shape", rows.shape(), want));
            }
        };
        whole_row(rows.dtype(), hidden)?;
        match self.cast {
            None => {}
            Some(CombineCast::Fp8(_)) => whole_row(DataType::F8E4M3, hidden)?,
            Some(CombineCast::LogFmt10) if rows.dtype() != DataType::BF16 => {
                let want = "bf16 for LogFMT-10";
                return Err(Error::invalid("rows.dtype", rows.dtype(), want));
            }
            Some(CombineCast::LogFmt10) if !hidden.is_multiple_of(Fp8Cast::BLOCK) => {
                let least = Fp8Cast::BLOCK;
                let want = format!("a multiple of {least} columns for LogFMT-10");
                return Err(Error::invalid("rows.shape", rows.shape(), want));
            }
            Some(CombineCast::LogFmt10) => {}
        }
        match (self.sum, self.weights) {
            (CombineSum::Expert, Some(weights)) => {
                weighty(weights, there.sent.chosen.shape(), rows)?;
            }
            (CombineSum::Expert, None) => {
                let want = "those of own tokens' experts, to add rows by Expert";
                return Err(Error::invalid("weights", "none", want));
            }
            (CombineSum::Rank, _) => {
                let want = "Expert or ExpertByRank";
                return Err(Error::invalid("sum", "Rank", want));
            }
            (CombineSum::ExpertByRank, _) if !there.sent.call.weights => {
                let want = "Expert: the dispatch had no weights";
                return Err(Error::invalid("sum", "ExpertByRank", want));
            }
            (CombineSum::ExpertByRank, Some(weights)) => {
                let want = "none: ExpertByRank takes those of the dispatch";
                return Err(Error::invalid("weights", weights.shape(), want));
            }
            (CombineSum::ExpertByRank, None) => {}
        }
        Ok(LowLatencyCombineCall {
            there: there.sent.call.clone(),
            hidden,
            dtype: rows.dtype(),
            sum: self.sum,
            cast: self.cast,
        })
    }
}

/// A combine of a slot that was sent, for backends.
#[derive(Clone, Debug)]
pub struct LowLatencyBack {
    /// What was sent there, with the ticket of the way back.
    pub sent: LowLatencySent,
    /// The combine.
    pub call: LowLatencyCombineCall,
    /// The weights of own tokens' experts, if rows are multiplied here.
    pub weights: Option<Buffer>,
}

impl LowLatencyBack {
    /// Checks where the result goes.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, output: &Output<'_>) -> Result<()> {
        let tokens = self.sent.chosen.shape().rows();
        output.check(&[tokens, self.call.hidden])?;
        summed("output.dtype", self.call.dtype, output.dtype())
    }
}

/// Rows on their way back, and not yet received.
#[must_use = "the rows have been sent, not received"]
pub struct PendingCombine<'d> {
    pub(crate) back: LowLatencyBack,
    pub(crate) _slot: &'d Slot,
}

impl PendingCombine<'_> {
    /// Waits for them, and adds up those of each token in f32, with one rounding to the type of `output`, `[tokens, hidden]`. By `Expert`
    /// each is multiplied by its weight, that product rounded, in the order of the token's experts. By `ExpertByRank` each rank has done
    /// so with its own and rounded their sum to the type of the rows; those are added in rank order. Rows that were cast are f32
    /// again first; of fp8, values times their scales, rounded. A token without experts gets 0. Gives the result, unless it went into the caller's buffer.
    ///
    /// # Errors
    /// As [`Pending::receive`](crate::Pending::receive); [`Error::Invalid`] also if another exchange has begun in this slot.
    pub fn receive(self, lease: &mut Lease<'_>, output: Output<'_>) -> Result<Option<Buffer>> {
        self.receive_into(lease, output, None)
    }

    /// The same, and adds to `waits`, i64 `[ranks]`, how long this rank waited for each other one, in nanoseconds, as
    /// [`Statistics::waits`](crate::Statistics::waits) has it. Where it fails, some of it may have been added.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`Error::Invalid`] for a type or a shape of `waits`: the exchange is given up then.
    pub fn receive_counted(
        self,
        lease: &mut Lease<'_>,
        output: Output<'_>,
        waits: ViewMut<'_>,
    ) -> Result<Option<Buffer>> {
        self.receive_into(lease, output, Some(waits))
    }

    fn receive_into(
        self,
        lease: &mut Lease<'_>,
        output: Output<'_>,
        waits: Option<ViewMut<'_>>,
    ) -> Result<Option<Buffer>> {
        self.back.check(&output)?;
        let LowLatencySent { group, chosen, .. } = &self.back.sent;
        check_waits(waits.as_ref(), group.size, chosen.memory())?;
        let (experts, turn) = lease.experts()?;
        experts.low_latency_take(turn, &self.back, output, waits)
    }
}
