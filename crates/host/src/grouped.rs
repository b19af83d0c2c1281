//! Products in groups: one product after the other, by the numbers that lie in memory when the work runs.

use crate::{
    device::HostDevice,
    element,
    gemm::{Matrix, Scratch},
    memory::{Bytes, writing},
    operand::OwnedOperand,
    queue::HostQueue,
};
use brigade_device::{
    Buffer, DataType, GroupedGemmParams, GroupedShape, Output, QScheme, Result, Stream,
};
use std::{ops::Range, sync::Arc};

impl HostDevice {
    pub(crate) fn run_grouped_gemm(
        &self,
        on: &Stream,
        p: &GroupedGemmParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let shape = p.check(&output)?;
        let (d, new) = self.place(output, &shape.d())?;
        let x = OwnedOperand::new(&p.x)?;
        let weights = p.weights.retain();
        let (offsets, counts) = p.groups.views();
        let lists = [offsets, counts, p.which].map(|view| view.map(|v| v.retain()));
        let (engine, out) = (Arc::clone(&self.engine), d.clone());
        HostQueue::of(on)?.run(move || {
            let inputs: Vec<&Buffer> = x
                .buffers()
                .chain([&weights])
                .chain(lists.iter().flatten())
                .collect();
            writing(&out, &inputs, |bytes, inputs| {
                let scratch = &engine.scratch;
                let mut inputs = inputs.iter().copied();
                let dtype = weights.dtype();
                let rows = Rows::new(&x, dtype, &mut inputs, scratch)?;
                let weights = inputs.next().unwrap_or_default();
                let mut list = |there: &Option<Buffer>| -> &[i32] {
                    let bytes = there.as_ref().and_then(|_| inputs.next());
                    bytes.map_or(&[], bytemuck::cast_slice)
                };
                let lists = Lists {
                    shape,
                    offsets: list(&lists[0]),
                    counts: list(&lists[1]),
                    which: list(&lists[2]),
                };
                let GroupedShape { n, k, .. } = shape;
                let (weight_bytes, row_bytes) = (n * k * dtype.bytes(), n * out.dtype().bytes());
                for group in 0..shape.groups {
                    let (range, Some(weight)) = (lists.rows(group), lists.weight(group)) else {
                        continue;
                    };
                    if range.is_empty() {
                        continue;
                    }
                    let weight = &weights[weight * weight_bytes..][..weight_bytes];
                    let weight = Matrix::new(dtype, weight, [n, k], true, scratch)?;
                    let mut sums = scratch.take(range.len() * n)?;
                    let x = rows.matrix(range.clone(), k, scratch)?;
                    engine.workers.multiply(&mut sums, &x, &weight, 1.0, false);
                    let to = &mut bytes[range.start * row_bytes..range.end * row_bytes];
                    element::store(out.dtype(), &sums, to);
                }
                Ok(())
            })
        })?;
        Ok(new.then_some(d))
    }
}

/// The left factor.
enum Rows<'a> {
    /// As it lies.
    Plain(DataType, &'a [u8]),
    /// Dequantized, and rounded to the type of the weights.
    Made(Matrix<'a>),
}

impl<'a> Rows<'a> {
    fn new(
        x: &OwnedOperand,
        dtype: DataType,
        bytes: &mut impl Iterator<Item = &'a [u8]>,
        scratch: &'a Scratch,
    ) -> Result<Self> {
        if x.scheme == QScheme::None {
            return Ok(Self::Plain(dtype, bytes.next().unwrap_or_default()));
        }
        let dims = x.kernel.shape();
        let factor = x.bind(bytes, false, scratch)?;
        let mut values = scratch.take(dims.len())?;
        factor.float(scratch)?.with(|m| values.copy_from_slice(m));
        if dtype != DataType::F32 {
            let mut rounded = Bytes::zeroed(values.len() * dtype.bytes())?;
            element::store(dtype, &values, rounded.as_mut());
            element::load(dtype, rounded.as_ref(), &mut values);
        }
        let dims = [dims.rows(), dims.columns()];
        Ok(Self::Made(Matrix::converted(values, dims, false)))
    }

    fn matrix<'s>(
        &'s self,
        rows: Range<usize>,
        k: usize,
        scratch: &'s Scratch,
    ) -> Result<Matrix<'s>> {
        match self {
            Self::Plain(dtype, bytes) => {
                let row = k * dtype.bytes();
                let bytes = &bytes[rows.start * row..rows.end * row];
                Matrix::new(*dtype, bytes, [rows.len(), k], false, scratch)
            }
            Self::Made(all) => Ok(all.slice(rows.start, rows.len())),
        }
    }
}

/// What is read when the work runs; lists that there are not are empty.
struct Lists<'a> {
    shape: GroupedShape,
    offsets: &'a [i32],
    counts: &'a [i32],
    which: &'a [i32],
}

impl Lists<'_> {
    /// The rows of a group, as far as there are any.
    fn rows(&self, group: usize) -> Range<usize> {
        let number = |n: i32| usize::try_from(n).unwrap_or(0);
        let begin = match self.offsets.get(group) {
            Some(&first) => number(first),
            None => group * self.shape.places(),
        };
        let begin = begin.min(self.shape.rows);
        let most = match self.offsets.is_empty() {
            true => self.shape.places(),
            false => self.shape.rows - begin,
        };
        let count = match (self.counts.get(group), self.offsets.get(group + 1)) {
            (Some(&count), _) => number(count),
            (None, Some(&end)) => number(end).saturating_sub(begin),
            (None, None) => 0,
        };
        begin..begin + count.min(most)
    }

    /// Its weight.
    fn weight(&self, group: usize) -> Option<usize> {
        let which = match self.which.get(group) {
            Some(&which) => usize::try_from(which).ok()?,
            None => group,
        };
        (which < self.shape.weights).then_some(which)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_off_where_there_are_none() {
        let shape = GroupedShape {
            groups: 4,
            weights: 3,
            rows: 12,
            n: 1,
            k: 1,
        };
        let of = |offsets: &[i32], counts: &[i32], which: &[i32]| -> Vec<_> {
            let lists = Lists {
                shape,
                offsets,
                counts,
                which,
            };
            (0..4).map(|g| (lists.rows(g), lists.weight(g))).collect()
        };
        let rows = |of: &[(Range<usize>, Option<usize>)]| -> Vec<Range<usize>> {
            of.iter().map(|g| g.0.clone()).collect()
        };
        assert_eq!(
            rows(&of(&[0, 2, 2, 9, 12], &[], &[])),
            [0..2, 2..2, 2..9, 9..12]
        );
        assert_eq!(
            rows(&of(&[0, 4, 8, 8, 12], &[3, 1, 0, 4], &[])),
            [0..3, 4..5, 8..8, 8..12]
        );
        // As a fault leaves them, or worse.
        assert_eq!(rows(&of(&[-1; 5], &[-1; 4], &[])), [0..0, 0..0, 0..0, 0..0]);
        assert_eq!(
            rows(&of(&[i32::MAX, 5, 3, 11, 40], &[], &[])),
            [12..12, 5..5, 3..11, 11..12]
        );
        assert_eq!(
            rows(&of(&[], &[3, 4, -2, 1], &[])),
            [0..3, 3..6, 6..6, 9..10]
        );
        let weights: Vec<_> = of(&[0; 5], &[], &[2, -1, 3, 0])
            .iter()
            .map(|g| g.1)
            .collect();
        assert_eq!(weights, [Some(2), None, None, Some(0)]);
    }
}
