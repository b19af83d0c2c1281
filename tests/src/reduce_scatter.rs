//! Reduce-scatter: every rank gets its rows of the reduction in rank order, bit for bit.

use crate::{
    all_reduce::OPS,
    backend::Rank,
    check::assert_bits,
    gather_linear::config,
    layer::FLOATS,
    matrix::{Matrix, to_bytes},
    oracle,
    suite::{Suite, World},
};
use brigade_device::{DataType, Plan, ReduceOp, ReduceScatterParams, SumOrder};
use rand::{Rng, rngs::StdRng};

/// A case with its numbers, and what must come out.
pub struct Case {
    rows: Vec<usize>,
    columns: usize,
    dtype: DataType,
    output: DataType,
    op: ReduceOp,
    inputs: Vec<Matrix>,
    want: Vec<u8>,
}

impl Case {
    /// Draws the numbers. The last are the types of inputs and result, and the reduction.
    pub fn new(
        rng: &mut StdRng,
        rows: Vec<usize>,
        columns: usize,
        (dtype, output, op): (DataType, DataType, ReduceOp),
    ) -> Self {
        let dims = [rows.iter().sum(), columns];
        let inputs: Vec<_> = rows
            .iter()
            .map(|_| {
                let mut m = Matrix::random(rng, dtype, &dims, 1.0);
                // Exact in every type, and of magnitudes whose sums depend on their order.
                let spread = |x: &mut f64| *x *= 2f64.powi(rng.random_range(-4..=4));
                m.values.iter_mut().for_each(spread);
                m
            })
            .collect();
        let values: Vec<Vec<f32>> = inputs
            .iter()
            .map(|m| m.values.iter().map(|&x| x as f32).collect())
            .collect();
        Self {
            want: oracle::reduce(op, &values, output),
            rows,
            columns,
            dtype,
            output,
            op,
            inputs,
        }
    }

    /// Makes the call, and asserts its bits.
    pub fn run(&self, rank: &Rank) {
        let (me, row_bytes) = (rank.rank, self.columns * self.output.bytes());
        let from = rank.upload(&self.inputs[me]);
        let mut to = rank.poisoned(self.output, &[self.rows[me], self.columns]);
        let plan = rank
            .lease()
            .reduce_scatter(ReduceScatterParams {
                from: from.view(),
                rows_per_rank: &self.rows,
                to: to.view_mut(),
                op: self.op,
            })
            .unwrap();
        let flat = matches!(
            plan,
            Plan::ReduceScatter {
                order: SumOrder::Flat,
                ..
            }
        );
        assert!(flat, "{plan:?}");
        let first = self.rows[..me].iter().sum::<usize>() * row_bytes;
        let want = &self.want[first..first + self.rows[me] * row_bytes];
        let what = format!(
            "{:?} of {:?} x {} {} to {}",
            self.op, self.rows, self.columns, self.dtype, self.output
        );
        assert_bits(&rank.raw(to.view()), want, self.output, &what);
        let kept = to_bytes(self.dtype, &self.inputs[me].values);
        assert_bits(&rank.raw(from.view()), &kept, self.dtype, "input kept");
    }
}

fn ragged(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = vec![];
    for op in OPS {
        for dtype in FLOATS {
            for output in [dtype, DataType::F32] {
                let rows = (0..size).map(|_| rng.random_range(0..9)).collect();
                let columns = rng.random_range(1..20);
                cases.push(Case::new(&mut rng, rows, columns, (dtype, output, op)));
            }
        }
    }
    let sum = (DataType::F32, DataType::F32, ReduceOp::Sum);
    let mut one = vec![0; size];
    one[rng.random_range(0..size)] = 4;
    cases.push(Case::new(&mut rng, one, 3, sum));
    cases.push(Case::new(&mut rng, vec![0; size], 3, sum));
    cases.push(Case::new(&mut rng, vec![2; size], 0, sum));
    // Several times the scratch memory.
    let large = (0..size).map(|r| 700 + 111 * r).collect();
    cases.push(Case::new(&mut rng, large, 31, sum));
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank));
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("reduce_scatter/ragged", ragged);
}
