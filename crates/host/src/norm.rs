//! A residual and a norm, alone or behind an all-reduce. Every step is one f32 operation in a fixed order, so that other devices can
//! give the same bits:
//!
//! - `h = round(s + residual)`, where `s` is the all-reduce's sum, rounded to its type, or what the caller has.
//! - `q`, the sum of the squares of a row of `h`: elements of 16 bytes one after the other, multiplied and then added, and
//!   those sums pair by pair, neighbours first, until one is left.
//! - `y = round((h * (1 / sqrt(q / hidden + eps))) * weight)`, and what [quantizing](crate::quantize) makes of `y`.
//!
//! A NaN is the canonical one of its type.

use crate::{
    all_reduce::{Algorithm, Kind, algorithm_of},
    comm::{HostComm, unexpected},
    device::HostDevice,
    element,
    job::Active,
    memory::{mark, reading, writing},
    quantize,
    queue::HostQueue,
};
use brigade_device::{
    AllReduceNormParams, Buffer, Call, DataType, Normed, Plan, ReduceOp, ResidualNormParams,
    Result, Stream, Turn, View,
};
use brigade_plan::pushed::GRANULE_BYTES;
use std::ops::Range;

/// What a rank alone takes at a time.
const ALONE_BYTES: usize = 1 << 20;

/// The arguments, kept for as long as the call is in flight or captured.
struct Arguments {
    from: Buffer,
    residual: Buffer,
    weight: Buffer,
    eps: f32,
    sum: Buffer,
    values: Buffer,
    scaling: Scaling,
}

/// What becomes of normalized rows.
enum Scaling {
    None,
    PerToken(Buffer),
    PerTensor(f32),
}

impl Arguments {
    /// Of the rows, the residual, the weight and the new residual.
    fn of([from, residual, weight, sum]: [View<'_>; 4], eps: f32, normed: &Normed<'_>) -> Self {
        Self {
            from: from.retain(),
            residual: residual.retain(),
            weight: weight.retain(),
            eps,
            sum: sum.retain(),
            values: normed.values().retain(),
            scaling: match normed {
                Normed::Plain(_) => Scaling::None,
                Normed::Int8PerToken { scales, .. } => Scaling::PerToken(scales.as_view().retain()),
                Normed::Fp8PerTensor { scale, .. } => Scaling::PerTensor(*scale),
            },
        }
    }

    fn norm(&self) -> Result<Norm> {
        let dtype = self.from.dtype();
        let mut weight = vec![0.0; self.from.shape().columns()];
        reading(&[&self.weight], |inputs| {
            element::load(dtype, inputs[0], &mut weight);
            Ok(())
        })?;
        Ok(Norm::new(dtype, weight, self.eps))
    }

    /// Marks everything that a call writes.
    fn poison(&self) {
        let scales = match &self.scaling {
            Scaling::PerToken(scales) => Some(scales),
            _ => None,
        };
        for out in [Some(&self.sum), Some(&self.values), scales]
            .into_iter()
            .flatten()
        {
            mark(out);
        }
    }
}

impl HostComm {
    pub(crate) fn run_all_reduce_norm(
        &self,
        turn: &Turn,
        p: AllReduceNormParams<'_>,
    ) -> Result<Plan> {
        let call = p.check()?;
        let plan = self.core.plan(&call)?;
        let (
            &Call::AllReduceNorm { hidden, dtype, .. },
            &Plan::AllReduce {
                algorithm,
                piece_elements,
                ..
            },
        ) = (&call, &plan)
        else {
            return Err(unexpected(&plan));
        };
        let algorithm = algorithm_of(algorithm).ok_or_else(|| unexpected(&plan))?;
        let kind = Kind {
            dtype,
            output: dtype,
            op: ReduceOp::Sum,
            row: Some(hidden),
        };
        let alone = self.core.control.group().size == 1;
        let most = match alone {
            true => ALONE_BYTES / dtype.bytes(),
            false => usize::MAX,
        };
        let piece_rows = (piece_elements.min(most) / hidden).max(1);
        let views = [p.from, p.residual, p.weight, p.sum.as_view()];
        let arguments = Arguments::of(views, p.eps, &p.normed);
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| {
                all_reduce_norm(active, (algorithm, kind), piece_rows, &arguments)
                    .inspect_err(|_| arguments.poison())
            })
        })?;
        Ok(plan)
    }
}

fn all_reduce_norm(
    active: &mut Active<'_>,
    (algorithm, kind): (Algorithm, Kind),
    piece_rows: usize,
    of: &Arguments,
) -> Result<()> {
    let shape = of.from.shape();
    let (rows, hidden) = (shape.rows(), shape.columns());
    let mut norm = of.norm()?;
    let core = active.job.core.clone();
    for first in (0..rows).step_by(piece_rows) {
        let piece = first..rows.min(first.saturating_add(piece_rows));
        let mut staged = core
            .staging
            .take(piece.len() * hidden * kind.dtype.bytes())?;
        let sums = staged.as_mut();
        reading(&[&of.from.slice(piece.start, piece.len())?], |inputs| {
            algorithm(active, kind, inputs[0], sums)
        })?;
        let residual = of.residual.slice(piece.start, piece.len())?;
        writing(
            &of.sum.slice(piece.start, piece.len())?,
            &[&residual],
            |out, inputs| {
                element::reduce(
                    ReduceOp::Sum,
                    kind.dtype,
                    &[sums, inputs[0]],
                    kind.dtype,
                    out,
                );
                norm.rows(out, sums);
                Ok(())
            },
        )?;
        of.give(&mut norm, &piece, staged.as_ref())?;
        core.staging.put(staged);
    }
    Ok(())
}

impl HostDevice {
    pub(crate) fn run_residual_norm(&self, on: &Stream, p: &ResidualNormParams<'_>) -> Result<()> {
        let [rows, hidden] = p.check()?;
        let views = [p.from, p.residual, p.weight, p.sum.as_view()];
        let of = Arguments::of(views, p.eps, &p.normed);
        HostQueue::of(on)?.run(move || of.residual_norm([rows, hidden]))
    }
}

impl Arguments {
    fn residual_norm(&self, [rows, hidden]: [usize; 2]) -> Result<()> {
        let (dtype, mut norm) = (self.from.dtype(), self.norm()?);
        let piece_rows = (ALONE_BYTES / dtype.bytes() / hidden).max(1);
        let mut normed = vec![0; rows.min(piece_rows) * hidden * dtype.bytes()];
        for first in (0..rows).step_by(piece_rows) {
            let piece = first..rows.min(first.saturating_add(piece_rows));
            let normed = &mut normed[..piece.len() * hidden * dtype.bytes()];
            let [from, residual, sum] = [&self.from, &self.residual, &self.sum]
                .map(|part| part.slice(piece.start, piece.len()));
            writing(&sum?, &[&from?, &residual?], |out, inputs| {
                let parts = [inputs[0], inputs[1]];
                element::reduce(ReduceOp::Sum, dtype, &parts, dtype, out);
                norm.rows(out, normed);
                Ok(())
            })?;
            self.give(&mut norm, &piece, normed)?;
        }
        Ok(())
    }

    /// Writes normalized rows as they are wanted.
    fn give(&self, norm: &mut Norm, piece: &Range<usize>, rows: &[u8]) -> Result<()> {
        let values = self.values.slice(piece.start, piece.len())?;
        match &self.scaling {
            Scaling::None => writing(&values, &[], |out, _| {
                out.copy_from_slice(rows);
                Ok(())
            }),
            Scaling::PerTensor(scale) => writing(&values, &[], |out, _| {
                norm.each(rows, out, |row, out| {
                    quantize::by_scale(DataType::F8E4M3, row, *scale, out);
                });
                Ok(())
            }),
            Scaling::PerToken(scales) => {
                let mut factors = Vec::with_capacity(piece.len());
                writing(&values, &[], |out, _| {
                    norm.each(rows, out, |row, out| {
                        let scale = quantize::scale_of(DataType::I8, row);
                        quantize::by_scale(DataType::I8, row, scale, out);
                        factors.push(scale);
                    });
                    Ok(())
                })?;
                let scales = scales.slice(piece.start, piece.len())?;
                writing(&scales, &[], |out, _| {
                    out.copy_from_slice(bytemuck::cast_slice(&factors));
                    Ok(())
                })
            }
        }
    }
}

/// Normalizes rows by their root mean square (Zhang and Sennrich: Root Mean Square Layer Normalization, 2019).
struct Norm {
    dtype: DataType,
    weight: Vec<f32>,
    eps: f32,
    /// A row, and the sums of its squares.
    row: Vec<f32>,
    squares: Vec<f32>,
}

impl Norm {
    fn new(dtype: DataType, weight: Vec<f32>, eps: f32) -> Self {
        let row = vec![0.0; weight.len()];
        Self {
            dtype,
            weight,
            eps,
            row,
            squares: vec![],
        }
    }

    /// Normalizes every row of `from` into `to`.
    fn rows(&mut self, from: &[u8], to: &mut [u8]) {
        let row_bytes = self.weight.len() * self.dtype.bytes();
        for (from, to) in from.chunks(row_bytes).zip(to.chunks_mut(row_bytes)) {
            element::load(self.dtype, from, &mut self.row);
            let mean = self.sum_of_squares() / self.weight.len() as f32;
            let inverse = 1.0 / (mean + self.eps).sqrt();
            for (x, w) in self.row.iter_mut().zip(&self.weight) {
                *x = element::canonical((*x * inverse) * w);
            }
            element::store(self.dtype, &self.row, to);
        }
    }

    /// The squares of a row: those of a granule one after the other, and granules by a tree of neighbours. What a last
    /// granule or pair lacks would add +0, which changes no sum of squares.
    fn sum_of_squares(&mut self) -> f32 {
        let granules = self.row.chunks(GRANULE_BYTES / self.dtype.bytes());
        let sum = |g: &[f32]| g.iter().map(|x| x * x).reduce(|a, b| a + b);
        self.squares.clear();
        self.squares.extend(granules.filter_map(sum));
        while self.squares.len() > 1 {
            let half = self.squares.len().div_ceil(2);
            for i in 0..half {
                let right = self.squares.get(2 * i + 1).copied();
                self.squares[i] = self.squares[2 * i] + right.unwrap_or(0.0);
            }
            self.squares.truncate(half);
        }
        self.squares.first().copied().unwrap_or(0.0)
    }

    /// Reads every row as f32, beside its values of one byte each.
    fn each(&mut self, rows: &[u8], out: &mut [u8], mut f: impl FnMut(&[f32], &mut [u8])) {
        let hidden = self.weight.len();
        let rows = rows.chunks(hidden * self.dtype.bytes());
        for (row, out) in rows.zip(out.chunks_mut(hidden)) {
            element::load(self.dtype, row, &mut self.row);
            f(&self.row, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_added_in_granules_and_then_in_pairs() {
        let of = |row: &[f32]| {
            let mut norm = Norm::new(DataType::F32, vec![1.0; row.len()], 0.0);
            norm.row.copy_from_slice(row);
            norm.sum_of_squares()
        };
        // Granules of 4: a unit that is added alone to a great square is lost, and not beside another.
        let great = 4096.0;
        assert_eq!(of(&[great, 1.0, 1.0, 1.0]), great * great);
        assert_eq!(of(&[1.0, 1.0, 1.0, great]), great * great + 4.0);
        let mut row = [0.0; 12];
        (row[0], row[4], row[8]) = (great, 1.0, 1.0);
        assert_eq!(of(&row), great * great);
        (row[0], row[4], row[8]) = (1.0, 1.0, great);
        assert_eq!(of(&row), great * great + 2.0);
        assert_eq!(of(&[-0.0]).to_bits(), 0);
    }
}
