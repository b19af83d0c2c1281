//! Reductions across machines: the order is that of two, one inside every machine and one across them.

use super::{Entry, Inputs, Results, named};
use crate::{all_reduce::OPS, backend::Rank, hierarchical::config, layer::FLOATS};
use brigade_device::{DataType, HierarchicalAllReduceParams, HierarchicalPath, ReduceOp};

/// Machines, and ranks of each.
const SHAPES: [(usize, usize); 5] = [(2, 1), (2, 2), (4, 1), (4, 2), (2, 4)];

/// More than a block of any implementation, and no multiple of anything.
const ELEMENTS: usize = 2311;

fn all_reduce(
    rank: &Rank,
    mut inputs: Inputs,
    machines: usize,
    (op, dtype, output): (ReduceOp, DataType, DataType),
) -> Results {
    let infinities = matches!(op, ReduceOp::Max | ReduceOp::Min);
    let bytes = inputs.floats(dtype, ELEMENTS, infinities);
    let from = rank.upload_bytes(dtype, &[ELEMENTS], &bytes);
    let over = rank.join_machines(machines, &config());
    let slices = |count| Some(HierarchicalPath::Slices { count });
    let choices = [
        ("auto", None),
        ("whole", Some(HierarchicalPath::Whole)),
        ("one slice", slices(1)),
        ("seven slices", slices(7)),
    ];
    let results = choices.map(|(name, choice)| {
        let mut to = rank.poisoned(output, &[ELEMENTS]);
        let params = HierarchicalAllReduceParams {
            data: to.view_mut(),
            from: Some(from.view()),
            op,
            choice,
        };
        over.lease(&rank.stream)
            .unwrap()
            .all_reduce(params)
            .unwrap();
        (name.into(), rank.raw(to.view()))
    });
    results.into()
}

/// Each with its machines, and ranks of each.
pub(super) fn entries() -> Vec<((usize, usize), Entry)> {
    let mut all = Vec::new();
    for (machines, ranks) in SHAPES {
        for op in OPS {
            for (dtype, output) in FLOATS
                .map(|dtype| (dtype, dtype))
                .into_iter()
                .chain([(DataType::BF16, DataType::F32)])
            {
                let kind = (op, dtype, output);
                let types = format!("{}_to_{}", named(dtype), named(output));
                let name = format!("hierarchical/{machines}x{ranks}/{op:?}/{types}");
                let entry = Entry::new(name, move |rank, inputs| {
                    all_reduce(rank, inputs, machines, kind)
                });
                all.push(((machines, ranks), entry));
            }
        }
    }
    all
}
