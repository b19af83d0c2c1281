//! The end of a linear: scales of integer sums, C, activation, one rounding.

use crate::{
    CudaDevice,
    lane::Lane,
    memory::{check_reach, overlap},
    types,
};
use brigade_device::{Activation, Buffer, Output, Result, Stream, View, check_bias_activation};
use brigade_kernels::FinishParams;
use std::sync::Arc;

/// Sums of a product, before what comes after them.
#[derive(Debug)]
pub(crate) enum Sums {
    /// Floats, `stride` elements from row to row.
    Float { values: Buffer, stride: usize },
    /// Exact sums of integers, which `alpha` and a scale of their row and their column turn into floats.
    Integer {
        values: Buffer,
        stride: usize,
        alpha: f32,
        rows: Scales,
        columns: Scales,
    },
}

/// Scales of rows or columns, or one for all.
#[derive(Clone, Debug)]
pub(crate) struct Scales {
    pub(crate) values: Buffer,
    /// From one's to the next's: 0 or 1.
    pub(crate) stride: u32,
}

/// What comes after the sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End<'a> {
    /// C: a row for all, or a row for each.
    pub(crate) bias: Option<&'a Buffer>,
    pub(crate) beta: f32,
    pub(crate) activation: Activation,
}

impl End<'_> {
    /// Nothing but rounding.
    pub(crate) const PLAIN: Self = Self {
        bias: None,
        beta: 0.0,
        activation: Activation::None,
    };
}

/// Columns that a block of `kernels/finish.cu` takes at once.
const TILE: usize = 2048;

impl CudaDevice {
    /// `out = act(sums + beta * bias)` for rows of `columns` elements.
    pub(crate) fn finish(
        &self,
        lane: &Arc<Lane>,
        sums: &Sums,
        end: End<'_>,
        out: &Buffer,
        columns: usize,
    ) -> Result<()> {
        let rows = out.shape().len().checked_div(columns).unwrap_or(0);
        if rows == 0 {
            return Ok(());
        }
        let (Sums::Float { values, stride } | Sums::Integer { values, stride, .. }) = sums;
        let mut parameters = FinishParams {
            out: out.address(),
            from: values.address(),
            rows: rows as u64,
            columns: columns as u64,
            from_stride: *stride as u64,
            beta: end.beta,
            out_type: types::float_code(out.dtype()),
            from_type: types::float_code(values.dtype()),
            activation: types::activation_code(end.activation),
            ..FinishParams::default()
        };
        let mut buffers = vec![out, values];
        if let Some(c) = end.bias.filter(|_| end.beta != 0.0) {
            let one_row = c.shape().len() == columns;
            parameters.bias = c.address();
            parameters.bias_type = types::float_code(c.dtype());
            parameters.bias_stride = if one_row { 0 } else { columns as u64 };
            buffers.push(c);
        }
        if let Sums::Integer {
            alpha,
            rows,
            columns,
            ..
        } = sums
        {
            parameters.from_type = types::I32;
            parameters.alpha = *alpha;
            parameters.row_scales = rows.values.address();
            parameters.row_scale_stride = rows.stride;
            parameters.column_scales = columns.values.address();
            parameters.column_scale_stride = columns.stride;
            buffers.extend([&rows.values, &columns.values]);
        }
        let kernel = &self.opened.kernels.finish;
        let blocks = rows * columns.div_ceil(TILE);
        // SAFETY: sums, C and scales hold what the strides reach for this many rows and columns, as does the result.
        unsafe {
            self.opened
                .kernels
                .launch(kernel, lane, &buffers, blocks, parameters)
        }
    }

    /// The caller's buffer, or a new one with unspecified content.
    pub(crate) fn place(
        &self,
        lane: &Arc<Lane>,
        output: Output<'_>,
        shape: &[usize],
    ) -> Result<(Buffer, bool)> {
        output.check(shape)?;
        match output {
            Output::Into(v) => {
                let d = v.as_view().retain();
                check_reach(&self.card, "output.memory", &d)?;
                Ok((d, false))
            }
            Output::Allocate(dtype) => Ok((self.scratch(lane, dtype, shape)?, true)),
        }
    }

    pub(crate) fn run_bias_activation(
        &self,
        on: &Stream,
        from: View<'_>,
        bias: Option<View<'_>>,
        activation: Activation,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        check_bias_activation(from, bias, &output)?;
        let shape = from.shape();
        let n = shape.columns();
        let lane = self.lane(on)?;
        let (from, bias) = (from.retain(), bias.map(|c| c.retain()));
        check_reach(&self.card, "from.memory", &from)?;
        if let Some(bias) = &bias {
            check_reach(&self.card, "bias.memory", bias)?;
        }
        let (d, new) = self.place(lane, output, shape.dims())?;
        let apart = [Some(&from), bias.as_ref()]
            .into_iter()
            .flatten()
            .all(|input| !overlap(input, &d) || same_elements(input, &d));
        let sums = Sums::Float {
            values: from,
            stride: n,
        };
        let end = End {
            bias: bias.as_ref(),
            beta: 1.0,
            activation,
        };
        self.beside(lane, &d, apart, |d| self.finish(lane, &sums, end, d, n))?;
        Ok(new.then_some(d))
    }

    /// Lets `work` write `d`; or, where that would change what it still has to read, a buffer that is copied there.
    pub(crate) fn beside(
        &self,
        lane: &Arc<Lane>,
        d: &Buffer,
        apart: bool,
        work: impl FnOnce(&Buffer) -> Result<()>,
    ) -> Result<()> {
        if apart {
            return work(d);
        }
        let between = self.scratch(lane, d.dtype(), d.shape().dims())?;
        work(&between)?;
        self.copy_bytes(lane, d, &between)
    }
}

/// Whether two buffers are the same elements of the same type: each can then be read right before it is written.
pub(crate) fn same_elements(a: &Buffer, b: &Buffer) -> bool {
    (a.address(), a.dtype(), a.shape().len()) == (b.address(), b.dtype(), b.shape().len())
}
