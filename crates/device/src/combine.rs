//! What experts made of rows, back to the ranks that the rows came from.

use crate::{
    Arrangement, Buffer, DataType, Error, Group, Handle, Origin, Output, Plan, Result, Transport,
    View, ViewMut,
    collectives::summed,
    params::{float, meet, resident, span},
    statistics::check_waits,
};

/// What a token's rows become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CombineSum {
    /// Every rank has made one row of each that it was sent. They are added in rank order.
    Rank,
    /// There is a row for every expert. Each is multiplied by its weight, and they are added in the order of the token's experts.
    Expert,
    /// There is a row for every expert. Each rank multiplies its own by their weights, adds them in the order of the token's experts and
    /// rounds the sum; the sums are added in rank order. Fewer bytes travel, and one rounding more is made.
    ExpertByRank,
}

/// Rows back to where they came from, and added there.
///
/// Sums are taken in f32, each product rounded before it is added; biases follow, in their order, and one rounding. A token without
/// experts gets the sum of its biases, or 0.
#[derive(Debug)]
pub struct CombineParams<'a> {
    /// f32, f16 or bf16, as the rows of the dispatch lie: `[rows, hidden]` or `[ranks, max_tokens, hidden]`.
    pub rows: View<'a>,
    /// What the dispatch left.
    pub handle: &'a Handle,
    /// What a token's rows become. By expert where rows lie by expert, and only there.
    pub sum: CombineSum,
    /// f32 `[rows, k]`, or `[rows]` where rows lie by expert: what goes back to the token's experts, for [`Combined::weights`].
    pub weights: Option<View<'a>>,
    /// Up to two tensors `[tokens, hidden]` of the rows' type that are added.
    pub biases: &'a [View<'a>],
    /// `[tokens, hidden]`. It may share memory with rows, weights and biases, but not with rows that go back from where they lie in place: peers
    /// read those.
    pub output: Output<'a>,
    /// i64 `[ranks]`: how long this rank waited for each other one in this call is added to it, as by
    /// [`DispatchParams::waits`](crate::DispatchParams::waits).
    pub waits: Option<ViewMut<'a>>,
    /// Forced transport.
    pub choice: Option<Transport>,
}

/// The signed part of a combine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CombineCall {
    /// Most tokens of any rank.
    pub max_tokens: usize,
    /// Elements in a row.
    pub hidden: usize,
    /// Their type.
    pub dtype: DataType,
    /// Type of the result.
    pub output: DataType,
    /// Experts of a token.
    pub k: usize,
    /// How rows lie.
    pub arrangement: Arrangement,
    /// What a token's rows become.
    pub sum: CombineSum,
    /// Whether weights go back.
    pub weights: bool,
    /// Forced transport.
    pub choice: Option<Transport>,
}

impl CombineParams<'_> {
    /// Most tensors that are added.
    pub const MOST_BIASES: usize = 2;

    /// Checks types, shapes and places, and gives the signed call. `now` is whose call it is.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, group: &Group, now: Origin) -> Result<CombineCall> {
        let (rows, handle) = (self.rows, self.handle);
        handle.check(now)?;
        float("rows.dtype", rows.dtype())?;
        let (made, hidden) = (
            handle.call(),
            rows.shape().dims().last().copied().unwrap_or(0),
        );
        let want = handle.shape(hidden)?;
        if hidden == 0 || rows.shape() != want {
            return Err(Error::invalid("rows.shape", rows.shape(), want));
        }
        let by_expert = matches!(made.arrangement, Arrangement::ByExpert { .. });
        if by_expert != (self.sum != CombineSum::Rank) {
            let got = format!("{:?} of rows {:?}", self.sum, made.arrangement);
            let want = "Rank, or by expert where rows lie by expert";
            return Err(Error::invalid("sum", got, want));
        }
        if self.sum != CombineSum::Rank && !made.weights {
            let want = "Rank: the dispatch had no weights";
            return Err(Error::invalid("sum", format!("{:?}", self.sum), want));
        }
        if let Some(weights) = self.weights {
            if weights.dtype() != DataType::F32 {
                return Err(Error::invalid(
                    "weights.dtype",
                    weights.dtype(),
                    DataType::F32,
                ));
            }
            let want = handle.parts().ids.shape();
            if weights.shape() != want {
                return Err(Error::invalid("weights.shape", weights.shape(), want));
            }
            resident("weights", Some(weights.memory()), rows.memory())?;
        }
        if self.choice == Some(Transport::InPlace) {
            let there = handle.parts().in_place.as_ref();
            let same = |b: &Buffer| (b.address(), b.bytes()) == (rows.address(), rows.bytes());
            if !there.is_some_and(same) {
                let want = "the rows of the handle's dispatch, in place";
                return Err(Error::invalid("rows", "other memory", want));
            }
            if let Output::Into(d) = &self.output {
                // A rank without tokens is refused what all others are.
                let d = d.as_view();
                if meet(d, rows) || span(rows).contains(&d.address()) {
                    let want = "memory apart from the rows, which peers read";
                    return Err(Error::invalid("output", "memory of rows in place", want));
                }
            }
        }
        let matrix = [handle.tokens(), hidden];
        if self.biases.len() > Self::MOST_BIASES {
            let want = format!("at most {}", Self::MOST_BIASES);
            return Err(Error::invalid("biases", self.biases.len(), want));
        }
        for bias in self.biases {
            if bias.dtype() != rows.dtype() {
                return Err(Error::invalid("biases", bias.dtype(), rows.dtype()));
            }
            if bias.shape().dims() != matrix {
                return Err(Error::invalid(
                    "biases",
                    bias.shape(),
                    format!("{matrix:?}"),
                ));
            }
            resident("biases", Some(bias.memory()), rows.memory())?;
        }
        check_waits(self.waits.as_ref(), group.size, rows.memory())?;
        self.output.check(&matrix)?;
        let output = self.output.dtype();
        summed("output.dtype", rows.dtype(), output)?;
        Ok(CombineCall {
            max_tokens: made.max_tokens,
            hidden,
            dtype: rows.dtype(),
            output,
            k: made.k,
            arrangement: made.arrangement,
            sum: self.sum,
            weights: self.weights.is_some(),
            choice: self.choice,
        })
    }
}

impl CombineCall {
    /// Most rows that go from one rank to another.
    pub const fn max_rows(&self) -> usize {
        self.max_tokens * self.rows_per_token()
    }

    /// Most rows of one token that go from one rank to another.
    pub const fn rows_per_token(&self) -> usize {
        match self.sum {
            CombineSum::Expert => self.k,
            CombineSum::Rank | CombineSum::ExpertByRank => 1,
        }
    }

    /// Weights that go with each of them.
    pub const fn row_weights(&self) -> usize {
        match (self.weights, self.sum) {
            (false, _) => 0,
            (true, CombineSum::Expert) => 1,
            (true, _) => self.k,
        }
    }
}

/// What a combine gives.
#[derive(Clone, Debug)]
pub struct Combined {
    /// The result, unless it went into the caller's buffer.
    pub d: Option<Buffer>,
    /// What came back for each of a token's experts, f32 `[tokens, k]`, 0 for none.
    pub weights: Option<Buffer>,
    /// What was done.
    pub plan: Plan,
}
