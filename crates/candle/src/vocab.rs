//! The two ends of a model whose vocabulary is spread over ranks: any number of words over any number of ranks.

use crate::{ColumnParallelLinear, Parallel, cut, error::invalid};
use candle_core::{D, DType, Module, Result, Tensor, safetensors::MmapedSafetensors};
use std::ops::Range;

/// Rows of a table of which each rank has its share (Shoeybi et al. 2019, Megatron-LM): every rank looks up the words that it has,
/// and the sum over ranks is everybody's.
///
/// One rank alone adds something that is not zero, so values come through as they are, but for -0, which becomes 0.
#[derive(Clone, Debug)]
pub struct VocabParallelEmbedding {
    parallel: Parallel,
    /// `[own words, hidden]`
    table: Tensor,
    own: Range<usize>,
    words: usize,
}

impl VocabParallelEmbedding {
    /// From the whole table, `[words, hidden]`, of which this rank keeps its part.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a table that is no matrix.
    pub fn new(parallel: &Parallel, table: &Tensor) -> Result<Self> {
        let part = cut::tensor(parallel, table, 0)?;
        Self::from_shard(parallel, &part, table.dim(0)?)
    }

    /// From this rank's part of `words` in all, as [`cut::share`] gives it.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`brigade::Error::Invalid`] if it has another number of words.
    pub fn from_shard(parallel: &Parallel, table: &Tensor, words: usize) -> Result<Self> {
        parallel.check_place(table)?;
        let own = cut::share(words, 1, parallel.size(), parallel.rank())?;
        match table.dims() {
            &[rows, _] if rows == own.len() => Ok(Self {
                parallel: parallel.clone(),
                table: table.contiguous()?,
                own,
                words,
            }),
            other => {
                let want = format!("[{}, hidden], this rank's part", own.len());
                Err(invalid("table.shape", format!("{other:?}"), want))
            }
        }
    }

    /// From a table in safetensors files: only this rank's part is read.
    ///
    /// # Errors
    /// As [`new`](Self::new); candle's, for files that have no such table.
    pub fn load(parallel: &Parallel, files: &MmapedSafetensors, name: &str) -> Result<Self> {
        let table = cut::load(parallel, files, name, 0)?;
        Self::from_shard(parallel, &table, cut::total(files, name, 0)?)
    }

    /// This rank's part of the table, for a head that shares it.
    pub fn table(&self) -> &Tensor {
        &self.table
    }

    /// `[.., hidden]` of ids `[..]` (u32 or i64), on every rank.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a word that is not in the vocabulary, where ids lie in the host's memory (on a GPU, where nobody
    /// looks, its row is NaN); [`brigade::Error::Fault`] if a rank does not come.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let rows = self.parallel.all_reduce(&self.partial(ids)?)?;
        self.shaped(ids, rows)
    }

    /// Own rows of the same, for what goes on sequence-parallel: ids are `[rows]`, on every rank all of them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_scattered(
        &self,
        ids: &Tensor,
        rows_per_rank: Option<&[usize]>,
    ) -> Result<Tensor> {
        let part = self.partial(&ids.flatten_all()?)?;
        self.parallel.reduce_scatter(&part, rows_per_rank)
    }

    fn shaped(&self, ids: &Tensor, rows: Tensor) -> Result<Tensor> {
        let mut dims = ids.dims().to_vec();
        dims.push(self.table.dim(1)?);
        rows.reshape(dims)
    }

    /// Rows of own words; zeros for others'.
    fn partial(&self, ids: &Tensor) -> Result<Tensor> {
        self.parallel.check_place(ids)?;
        let ids = self.parallel.cast(&ids.flatten_all()?, DType::I64)?;
        let (count, hidden) = (ids.elem_count(), self.table.dim(1)?);
        let (place, dtype) = (self.parallel.place(), self.table.dtype());
        if place.is_cpu() {
            let known = |&id: &i64| usize::try_from(id).is_ok_and(|id| id < self.words);
            if let Some(id) = ids.to_vec1::<i64>()?.iter().find(|id| !known(id)) {
                let want = format!("one of {} words", self.words);
                return Err(invalid("ids", id, want));
            }
        }
        if count == 0 || hidden == 0 {
            return self.parallel.make(dtype, (count, hidden), |_| Ok(()));
        }
        let zeros = Tensor::zeros((count, hidden), dtype, place)?;
        let (first, last) = (self.own.start as i64, self.own.end as i64);
        let rows = if self.own.is_empty() {
            zeros.clone()
        } else {
            let mine = (ids.ge(first)? * ids.lt(last)?)?;
            let from_own = ids.broadcast_sub(&Tensor::new(first, place)?)?;
            let index = mine.where_cond(&from_own, &ids.zeros_like()?)?;
            let rows = self.table.index_select(&index, 0)?;
            let mine = mine.unsqueeze(1)?.broadcast_as((count, hidden))?;
            mine.where_cond(&rows, &zeros)?
        };
        if place.is_cpu() || self.parallel.rank() != 0 {
            return Ok(rows);
        }
        // No rank has such a word, so one of them makes it seen.
        let nowhere = (ids.lt(0i64)? + ids.ge(self.words as i64)?)?;
        let nowhere = nowhere.unsqueeze(1)?.broadcast_as((count, hidden))?;
        let nan = Tensor::new(f32::NAN, place)?.to_dtype(dtype)?;
        nowhere.where_cond(&nan.broadcast_as((count, hidden))?.contiguous()?, &rows)
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        Self::forward(self, ids)
    }
}

/// The linear that scores all words, of which each rank has its share.
#[derive(Clone, Debug)]
pub struct VocabParallelHead {
    parallel: Parallel,
    linear: ColumnParallelLinear,
    own: Range<usize>,
    words: usize,
    constants: Constants,
}

/// What every choice compares with, f64. Made once: what is uploaded at each step takes the host's time, and cannot be captured where it is
/// as long as a vocabulary.
#[derive(Clone, Debug)]
struct Constants {
    /// The numbers of own words, `[1, own words]`.
    numbers: Tensor,
    /// The number of words, which is no word's, `[1, 1]`.
    none: Tensor,
    /// What a rank without words has to say, `[1, 2]`.
    nothing: Tensor,
    /// `[1, 1]`
    infinity: Tensor,
}

impl Constants {
    fn new(parallel: &Parallel, own: &Range<usize>, words: usize) -> Result<Self> {
        let place = parallel.place();
        let row = |values: Vec<f64>| {
            let columns = values.len();
            match columns {
                0 => parallel.make(DType::F64, (1, 0), |_| Ok(())),
                _ => Tensor::from_vec(values, (1, columns), place),
            }
        };
        let words = words as f64;
        Ok(Self {
            numbers: row(own.clone().map(|word| word as f64).collect())?,
            none: row(vec![words])?,
            nothing: row(vec![f64::NEG_INFINITY, words])?,
            infinity: row(vec![f64::INFINITY])?,
        })
    }
}

impl VocabParallelHead {
    /// From the whole weight, `[words, hidden]`, of which this rank keeps its part.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a weight that is no matrix.
    pub fn new(parallel: &Parallel, weight: &Tensor) -> Result<Self> {
        let part = cut::tensor(parallel, weight, 0)?;
        Self::from_shard(parallel, &part, weight.dim(0)?)
    }

    /// From this rank's part of `words` in all, as [`cut::share`] gives it: that of a [`VocabParallelEmbedding`], if the two share it.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`brigade::Error::Invalid`] if it has another number of words.
    pub fn from_shard(parallel: &Parallel, weight: &Tensor, words: usize) -> Result<Self> {
        let own = cut::share(words, 1, parallel.size(), parallel.rank())?;
        if weight.dims().first() != Some(&own.len()) {
            let want = format!("[{}, hidden], this rank's part", own.len());
            return Err(invalid(
                "weight.shape",
                format!("{:?}", weight.dims()),
                want,
            ));
        }
        Ok(Self {
            parallel: parallel.clone(),
            linear: ColumnParallelLinear::from_shard(parallel, weight, None)?,
            constants: Constants::new(parallel, &own, words)?,
            own,
            words,
        })
    }

    /// From a weight in safetensors files: only this rank's part is read.
    ///
    /// # Errors
    /// As [`new`](Self::new); candle's, for files that have no such weight.
    pub fn load(parallel: &Parallel, files: &MmapedSafetensors, name: &str) -> Result<Self> {
        let weight = cut::load(parallel, files, name, 0)?;
        Self::from_shard(parallel, &weight, cut::total(files, name, 0)?)
    }

    /// Which words this rank scores.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Scores of this rank's words alone, `[.., own words]`. Nothing travels.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for activations that do not fit.
    pub fn own_scores(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(x)
    }

    /// The word with the greatest score for each row of `x` `[.., hidden]`: u32 `[..]`, the same on every rank. Of equal scores the
    /// lowest word wins; a row with a score that is NaN has no word, and gets the number of words.
    ///
    /// Sixteen bytes travel for each row and rank, instead of a score for each word.
    ///
    /// # Errors
    /// As [`own_scores`](Self::own_scores); [`brigade::Error::Fault`] if a rank does not come.
    pub fn argmax(&self, x: &Tensor) -> Result<Tensor> {
        let rows: usize = x.dims().iter().rev().skip(1).product();
        let mut dims = x.dims().to_vec();
        dims.pop();
        if rows == 0 {
            return self.parallel.make(DType::U32, dims, |_| Ok(()));
        }
        if self.words == 0 {
            return Tensor::full(0u32, dims, self.parallel.place());
        }
        let best = self.best(x, rows)?;
        let all = self.parallel.all_gather(&best.unsqueeze(0)?, 0, None)?;
        // [ranks, rows]: a score and its word. Both are exact in f64.
        let (scores, words) = (all.narrow(2, 0, 1)?, all.narrow(2, 1, 1)?);
        let (scores, words) = (scores.squeeze(2)?, words.squeeze(2)?);
        let greatest = scores.max_keepdim(0)?;
        let none = self.constants.none.broadcast_as(words.shape())?;
        let there = scores.broadcast_eq(&greatest)?;
        let word = there.where_cond(&words.contiguous()?, &none)?.min(0)?;
        word.to_dtype(DType::U32)?.reshape(dims)
    }

    /// Of each row the greatest own score and its word, f64 `[rows, 2]`. NaN wins over all, with the number of words.
    fn best(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        let Constants {
            numbers,
            none,
            nothing,
            infinity,
        } = &self.constants;
        let own = self.own.len();
        if own == 0 {
            return nothing.broadcast_as((rows, 2))?.contiguous();
        }
        let scores = self.own_scores(x)?.reshape((rows, own))?;
        let scores = scores.to_dtype(DType::F64)?;
        let bad = scores.ne(&scores)?.to_dtype(DType::F64)?.max_keepdim(1)?;
        let bad = bad.to_dtype(DType::U8)?;
        let greatest = scores.max_keepdim(1)?;
        let there = scores.broadcast_eq(&greatest)?;
        let word = there.where_cond(
            &numbers.broadcast_as((rows, own))?,
            &none.broadcast_as((rows, own))?,
        )?;
        let none = none.broadcast_as((rows, 1))?;
        let word = bad.where_cond(&none, &word.min_keepdim(1)?)?;
        let infinity = infinity.broadcast_as((rows, 1))?;
        let greatest = bad.where_cond(&infinity, &greatest)?;
        Tensor::cat(&[greatest, word], D::Minus1)
    }
}

impl Module for VocabParallelHead {
    /// Scores of all words, `[.., words]`, on every rank.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let counts = cut::counts(self.words, self.parallel.size());
        let own = self.own_scores(x)?;
        self.parallel.all_gather(&own, D::Minus1, Some(&counts))
    }
}
