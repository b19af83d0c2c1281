//! Parameters of products in groups: rows that lie by expert, each group with a weight of its own.

use crate::{
    DataType, Error, Operand, Output, QScheme, Result, Shape, View,
    params::{apart, float, resident},
};

/// `d[i] = x[i] W^T` with the weight `W` of row i's group: what the experts of a layer are, and what low-rank adapters of many requests
/// are (MegaBlocks, Gale et al. 2022; Punica, Chen et al. 2023).
///
/// How many rows a group has is read on the device, so nothing waits for the host, and the call can be captured in a graph. Groups may be
/// empty. Sums are taken in f32 and rounded once. Rows that are in no group are not read, and their places in the result not written:
/// what is there stays, in a new buffer anything.
///
/// Where groups lie is not checked on the host either. What reaches beyond the rows is cut off; rows that are in two groups hold what either
/// makes of them.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemmParams<'a> {
    /// `[rows, k]`. Of the weights' type; or quantized in any way, then it is dequantized and rounded to that type first.
    pub x: Operand<'a>,
    /// `[weights, n, k]`: f32, f16 or bf16.
    pub weights: View<'a>,
    /// Which rows are a group.
    pub groups: Groups<'a>,
    /// Which of the weights each group has, i32 `[groups]`; a group of a number that names none, as -1, is left out. `None`: the first
    /// group has the first, and so on.
    pub which: Option<View<'a>>,
}

/// Where groups of rows lie, in the device's memory.
#[derive(Clone, Copy, Debug)]
pub enum Groups<'a> {
    /// One behind the other, as a dispatch leaves them that arranges [by expert](crate::Arrangement::ByExpert).
    Behind {
        /// First row of each group, i32 `[groups + 1]`, and at the end where the last one ends:
        /// [`Handle::offsets`](crate::Handle::offsets).
        offsets: View<'a>,
        /// Rows of each group, i32 `[groups]`, where the next does not begin behind its last:
        /// [`Dispatched::counts`](crate::Dispatched::counts). `None`: up to the next.
        counts: Option<View<'a>>,
    },
    /// Every group has as many places, `rows / groups`, of which the first ones are taken: as rows lie that were received in
    /// [two halves](crate::LowLatency).
    Places {
        /// Rows of each group, i32 `[groups]`.
        counts: View<'a>,
    },
}

/// The dimensions of a product in groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedShape {
    /// Groups.
    pub groups: usize,
    /// Weights.
    pub weights: usize,
    /// Rows that there are places for.
    pub rows: usize,
    /// Columns of the result.
    pub n: usize,
    /// Inner dimension.
    pub k: usize,
}

impl GroupedShape {
    /// Rows from the beginning of one group to that of the next, where all have as many places.
    pub const fn places(&self) -> usize {
        match self.groups {
            0 => 0,
            groups => self.rows / groups,
        }
    }

    /// Shape of the result.
    pub const fn d(&self) -> [usize; 2] {
        [self.rows, self.n]
    }
}

impl<'a> GroupedGemmParams<'a> {
    /// Rows as a dispatch by expert leaves them.
    pub fn new(x: impl Into<Operand<'a>>, weights: View<'a>, groups: Groups<'a>) -> Self {
        Self {
            x: x.into(),
            weights,
            groups,
            which: None,
        }
    }

    /// Checks everything that can be checked without a device.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, output: &Output<'_>) -> Result<GroupedShape> {
        let (x, weights) = (self.x.kernel(), self.weights);
        let &[rows, k] = x.shape().dims() else {
            let want = "2 dimensions, [rows, k]";
            return Err(Error::invalid("x.shape", x.shape(), want));
        };
        counted("x.shape", x.shape())?;
        float("weights.dtype", weights.dtype())?;
        if self.x.scheme() == QScheme::None && x.dtype() != weights.dtype() {
            let want = format!("{}, as the weights", weights.dtype());
            return Err(Error::invalid("x.dtype", x.dtype(), want));
        }
        let &[count, n, k_of_weights] = weights.shape().dims() else {
            let want = "3 dimensions, [weights, n, k]";
            return Err(Error::invalid("weights.shape", weights.shape(), want));
        };
        counted("weights.shape", weights.shape())?;
        if k_of_weights != k {
            let want = format!("K = {k}, as in x {}", x.shape());
            return Err(Error::invalid("weights.shape", weights.shape(), want));
        }
        resident("weights.memory", Some(weights.memory()), x.memory())?;
        let numbers = |field, view: View<'_>, len: usize| {
            if view.dtype() != DataType::I32 {
                return Err(Error::invalid(field, view.dtype(), DataType::I32));
            }
            if view.shape().dims() != [len] {
                return Err(Error::invalid(field, view.shape(), format!("[{len}]")));
            }
            resident(field, Some(view.memory()), x.memory())
        };
        let groups = match self.groups {
            Groups::Behind { offsets, counts } => {
                let Some(groups) = offsets.shape().len().checked_sub(1) else {
                    let want = "[groups + 1]";
                    return Err(Error::invalid("groups.offsets", offsets.shape(), want));
                };
                counted("groups.offsets", offsets.shape())?;
                numbers("groups.offsets", offsets, groups + 1)?;
                if let Some(counts) = counts {
                    numbers("groups.counts", counts, groups)?;
                }
                groups
            }
            Groups::Places { counts } => {
                let groups = counts.shape().len();
                numbers("groups.counts", counts, groups)?;
                if rows.checked_rem(groups).unwrap_or(rows) != 0 {
                    let want = format!("as many rows for each of {groups} groups");
                    return Err(Error::invalid("x.shape", x.shape(), want));
                }
                groups
            }
        };
        match self.which {
            Some(which) => numbers("which", which, groups)?,
            None if count != groups => {
                let want = format!("[{groups}, n, {k}], one for each group");
                return Err(Error::invalid("weights.shape", weights.shape(), want));
            }
            None => {}
        }
        let shape = GroupedShape {
            groups,
            weights: count,
            rows,
            n,
            k,
        };
        output.check(&shape.d())?;
        if let Output::Into(d) = output {
            resident("output.memory", Some(d.memory()), x.memory())?;
            let scales = match self.x {
                Operand::Quantized(q) => Some(q.scales()),
                Operand::Plain(_) => None,
            };
            let (offsets, counts) = self.groups.views();
            let read = [Some(x), scales, Some(weights), offsets, counts, self.which];
            read.into_iter()
                .flatten()
                .try_for_each(|view| apart(d, view))?;
        }
        Ok(shape)
    }
}

/// Rows, columns and groups are counted in 32 bits.
fn counted(field: &'static str, shape: Shape) -> Result<()> {
    let most = shape.dims().iter().max().copied().unwrap_or(0);
    if i32::try_from(most).is_ok() {
        return Ok(());
    }
    let want = format!("at most {} of each", i32::MAX);
    Err(Error::invalid(field, shape, want))
}

impl<'a> Groups<'a> {
    /// Offsets and counts, as far as there are any.
    pub const fn views(&self) -> (Option<View<'a>>, Option<View<'a>>) {
        match *self {
            Self::Behind { offsets, counts } => (Some(offsets), counts),
            Self::Places { counts } => (None, Some(counts)),
        }
    }
}
