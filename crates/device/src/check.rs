//! Checks of the linears that overlap with a collective: from parameters to the signed call.

use crate::*;

impl Chunk<'_> {
    fn operand_shape(&self) -> Result<(Shape, DataType, QScheme)> {
        Ok(match self {
            Self::Resident(f) => (
                Shape::new(&[f.rows(), f.columns()])?,
                f.dtype(),
                QScheme::None,
            ),
            Self::Copy(o) => (o.shape(), o.dtype(), o.scheme()),
        })
    }
}

/// `[K, N]` of a weight.
fn weight_dims(weight: Operand<'_>, transpose: bool) -> Result<(usize, usize)> {
    match *weight.shape().dims() {
        [n, k] if transpose => Ok((k, n)),
        [k, n] => Ok((k, n)),
        _ => Err(Error::invalid(
            "weight.shape",
            weight.shape(),
            "2 dimensions",
        )),
    }
}

/// Rows and columns of activations of two or three dimensions.
fn activation_dims(field: &'static str, shape: Shape) -> Result<(usize, usize, usize)> {
    match *shape.dims() {
        [rows, columns] => Ok((rows, 1, columns)),
        [rows, inner, columns] => Ok((rows, inner, columns)),
        _ => Err(Error::invalid(field, shape, "2 or 3 dimensions")),
    }
}

/// Quantized activations are plain matrices of rows.
fn check_quantized(scheme: QScheme, transpose_a: bool, three_dimensional: bool) -> Result<()> {
    if scheme != QScheme::None && (transpose_a || three_dimensional) {
        return Err(Reason::new(
            "quantized-layout",
            format!("{scheme:?} activations that are transposed or have three dimensions"),
            "pass quantized rows as [rows, columns]",
        )
        .into());
    }
    Ok(())
}

fn check_bias(bias: Option<View<'_>>, m: usize, n: usize) -> Result<()> {
    let Some(c) = bias else { return Ok(()) };
    params::float("bias.dtype", c.dtype())?;
    let s = c.shape();
    if s.dims() == [n] || s.dims() == [1, n] || s.dims() == [m, n] {
        Ok(())
    } else {
        Err(Error::invalid(
            "bias.shape",
            s,
            format!("[{n}] or [{m}, {n}]"),
        ))
    }
}

/// Checks that everything lies on the same side as the activations: in device memory, or in the host's.
fn check_residency(
    at: MemoryType,
    weight: Operand<'_>,
    bias: Option<View<'_>>,
    runs: &[LoraRun<'_>],
    output: &Output<'_>,
) -> Result<()> {
    params::resident("weight.memory", Some(weight.kernel().memory()), at)?;
    params::resident("bias.memory", bias.map(|c| c.memory()), at)?;
    for lora in runs.iter().filter_map(|r| r.adapter) {
        for part in [lora.a, lora.b] {
            params::resident("runs.adapter.memory", Some(part.memory()), at)?;
        }
    }
    match output {
        Output::Into(d) => params::resident("output.memory", Some(d.memory()), at),
        Output::Allocate(_) => Ok(()),
    }
}

/// Checks that so many elements can be counted, however many of the dimensions are 0.
pub(crate) fn countable(field: &'static str, dims: &[usize]) -> Result<()> {
    Shape::new(dims).map(drop).map_err(|_| {
        let got = format!("{dims:?} elements");
        Error::invalid(field, got, "a size that fits in memory")
    })
}

/// Rows or columns of all ranks, beside so many of the other.
fn total(
    field: &'static str,
    given: Option<usize>,
    own: usize,
    size: usize,
    beside: usize,
) -> Result<usize> {
    let all = match given {
        Some(t) if t < own => {
            let want = format!("at least this rank's {own}");
            return Err(Error::invalid(field, t, want));
        }
        Some(t) => t,
        None => own.saturating_mul(size),
    };
    countable(field, &[all, beside])?;
    Ok(all)
}

impl AllGatherLoraLinearParams<'_> {
    /// Checks shapes, types and counts, and gives the signed call.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, group: &Group) -> Result<LinearCall> {
        let rows = check_rows("rows_per_rank", self.rows_per_rank, group.size)?;
        let (shape, input, scheme) = self.chunk.operand_shape()?;
        let (own, inner, columns) = activation_dims("chunk.shape", shape)?;
        countable("rows_per_rank", &[rows, inner, columns])?;
        if own != self.rows_per_rank[group.rank] {
            return Err(Error::invalid(
                "chunk.shape",
                shape,
                format!(
                    "{} rows, as in rows_per_rank",
                    self.rows_per_rank[group.rank]
                ),
            ));
        }
        if scheme == QScheme::None {
            params::float("chunk.dtype", input)?;
        }
        check_quantized(scheme, self.transpose_a, shape.dims().len() == 3)?;
        let (k, n) = weight_dims(self.weight, self.transpose_weight)?;
        let three_dimensional = shape.dims().len() == 3;
        if self.transpose_a && three_dimensional {
            return Err(Error::invalid(
                "transpose_a",
                format!("true with a chunk of {shape}"),
                "a chunk of 2 dimensions",
            ));
        }
        let (m, inner_k) = if self.transpose_a {
            (columns, rows)
        } else {
            (rows * inner, columns)
        };
        if k != inner_k {
            return Err(Error::invalid(
                "weight.shape",
                format!("{} (K = {k})", self.weight.shape()),
                format!("K = {inner_k}"),
            ));
        }
        check_bias(self.bias, m, n)?;
        check_runs(self.runs, m, k, n)?;
        let d: &[usize] = if three_dimensional {
            &[rows, inner, n]
        } else {
            &[m, n]
        };
        self.output.check(d)?;
        let at = match &self.chunk {
            Chunk::Copy(rows) => rows.kernel().memory(),
            // Own rows in a user buffer lie wherever the device computes: as the weight does.
            Chunk::Resident(_) => self.weight.kernel().memory(),
        };
        check_residency(at, self.weight, self.bias, self.runs, &self.output)?;
        Ok(LinearCall {
            rows: self.rows_per_rank.into(),
            k: columns * inner,
            n: total("total_n", self.total_n, n, group.size, m)?,
            input,
            output: self.output.dtype(),
            scheme,
            lora: !self.runs.is_empty(),
            transpose_a: self.transpose_a,
            inner: three_dimensional.then_some(inner),
            choice: self.choice,
        })
    }
}

impl LoraLinearReduceScatterParams<'_> {
    /// Checks shapes, types and counts, and gives the signed call.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, group: &Group) -> Result<LinearCall> {
        let rows = check_rows("rows_per_rank", self.rows_per_rank, group.size)?;
        let shape = self.x.shape();
        let (first, inner, last) = activation_dims("x.shape", shape)?;
        let three_dimensional = shape.dims().len() == 3;
        if self.transpose_a && three_dimensional {
            return Err(Error::invalid(
                "transpose_a",
                format!("true with x of {shape}"),
                "x of 2 dimensions",
            ));
        }
        let (m, k) = if self.transpose_a {
            (last, first)
        } else {
            (first, last)
        };
        if m != rows {
            return Err(Error::invalid(
                "x.shape",
                shape,
                format!("{rows} rows, the sum of rows_per_rank"),
            ));
        }
        if self.x.scheme() == QScheme::None {
            params::float("x.dtype", self.x.dtype())?;
        }
        check_quantized(self.x.scheme(), self.transpose_a, three_dimensional)?;
        let (weight_k, n) = weight_dims(self.weight, self.transpose_weight)?;
        if weight_k != k {
            return Err(Error::invalid(
                "weight.shape",
                format!("{} (K = {weight_k})", self.weight.shape()),
                format!("K = {k}, as in x {shape}"),
            ));
        }
        check_bias(self.bias, m * inner, n)?;
        check_runs(self.runs, m * inner, k, n)?;
        let own = self.rows_per_rank[group.rank];
        let d: &[usize] = if three_dimensional {
            &[own, inner, n]
        } else {
            &[own, n]
        };
        self.output.check(d)?;
        let at = self.x.kernel().memory();
        check_residency(at, self.weight, self.bias, self.runs, &self.output)?;
        Ok(LinearCall {
            rows: self.rows_per_rank.into(),
            k: total("total_k", self.total_k, k, group.size, m)?,
            n,
            input: self.x.dtype(),
            output: self.output.dtype(),
            scheme: self.x.scheme(),
            lora: !self.runs.is_empty(),
            transpose_a: self.transpose_a,
            inner: three_dimensional.then_some(inner),
            choice: self.choice,
        })
    }
}
