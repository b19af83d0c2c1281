//! Reductions across machines, and sums of experts' rows: the order is that of two, one inside every machine and one across them.

use super::{
    Entry, Inputs, Results,
    experts::{HIDDEN, Own, Placed, left, tokens},
    moves::{COLUMNS, infinities, rows},
    named,
};
use crate::{
    all_reduce::OPS,
    backend::Rank,
    hierarchical::{config, experts::with_experts},
    layer::FLOATS,
};
use brigade_device::{
    Arrangement, Buffer, ByPath, CombineParams, CombineSum, DataType, DispatchParams,
    HierarchicalAllReduceParams, HierarchicalPath, Output, ReduceOp, ReduceScatterParams,
    Transport,
};

/// Machines, and ranks of each.
const SHAPES: [(usize, usize); 7] = [(2, 1), (2, 2), (4, 1), (3, 2), (4, 2), (2, 4), (4, 4)];

/// More than a block of any implementation, and no multiple of anything.
const ELEMENTS: usize = 2311;

/// Ways of a call, all of which have its bits.
fn ways() -> [(&'static str, Option<HierarchicalPath>); 5] {
    let slices = |count| Some(HierarchicalPath::Slices { count });
    [
        ("auto", None),
        ("whole", Some(HierarchicalPath::Whole)),
        ("one slice", slices(1)),
        ("seven slices", slices(7)),
        ("one shot", Some(HierarchicalPath::OneShot { count: 3 })),
    ]
}

fn all_reduce(
    rank: &Rank,
    mut inputs: Inputs,
    machines: usize,
    (op, dtype, output): (ReduceOp, DataType, DataType),
) -> Results {
    let bytes = inputs.floats(dtype, ELEMENTS, infinities(op));
    let from = rank.upload_bytes(dtype, &[ELEMENTS], &bytes);
    let over = rank.join_machines(machines, &config());
    let results = ways().map(|(name, choice)| {
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

fn reduce_scatter(
    rank: &Rank,
    mut inputs: Inputs,
    machines: usize,
    (op, dtype, output): (ReduceOp, DataType, DataType),
) -> Results {
    let rows = rows(rank.size);
    let dims = [rows.iter().sum(), COLUMNS];
    let bytes = inputs.floats(dtype, dims.iter().product(), infinities(op));
    let from = rank.upload_bytes(dtype, &dims, &bytes);
    let over = rank.join_machines(machines, &config());
    let results = ways().map(|(name, choice)| {
        let mut to = rank.poisoned(output, &[rows[rank.rank], COLUMNS]);
        let params = ReduceScatterParams {
            from: from.view(),
            rows_per_rank: &rows,
            to: to.view_mut(),
            op,
        };
        over.lease(&rank.stream)
            .unwrap()
            .reduce_scatter(ByPath { params, choice })
            .unwrap();
        (name.into(), rank.raw(to.view()))
    });
    results.into()
}

/// What a dispatch leaves, and what comes back of rows that experts made, whatever carries rows inside.
fn experts(
    rank: &Rank,
    mut inputs: Inputs,
    machines: usize,
    (dtype, output): (DataType, DataType),
) -> Results {
    let own = Own::new(rank, &mut inputs, dtype, Placed::Even);
    let over = rank.join_machines(machines, &with_experts());
    let beside = [own.beside()];
    let mut made: Option<[Buffer; 4]> = None;
    let by = [
        ("one_sided", Transport::OneSided),
        ("fifo", Transport::Fifo),
        ("gather", Transport::Gather),
    ];
    by.map(|(name, choice)| {
        let mut lease = over.lease(&rank.stream).unwrap();
        let got = lease.dispatch(DispatchParams {
            beside: &beside,
            ..own.params(rank, Arrangement::Dense, None, choice)
        });
        let got = got.unwrap();
        let mut all = left(rank, &got);
        if let Some(ways) = got.handle.machines() {
            let counts = [ways.sent(), ways.received()];
            all.extend(counts.into_iter().flat_map(|view| rank.raw(view)));
        }
        let matrix = [tokens(rank.rank), HIDDEN];
        let [rows, back, first, second] = made.get_or_insert_with(|| {
            let mut upload = |dtype, dims: &[usize]| {
                let bytes = inputs.floats(dtype, dims.iter().product(), false);
                rank.upload_bytes(dtype, dims, &bytes)
            };
            let rows = upload(dtype, &[got.handle.capacity(), HIDDEN]);
            let back = upload(DataType::F32, got.ids.shape().dims());
            [rows, back, upload(dtype, &matrix), upload(dtype, &matrix)]
        });
        let mut d = rank.poisoned(output, &matrix);
        let combined = lease.combine(CombineParams {
            rows: rows.view(),
            handle: &got.handle,
            sum: CombineSum::Rank,
            weights: Some(back.view()),
            biases: &[first.view(), second.view()],
            output: Output::Into(d.view_mut()),
            waits: None,
            choice: Some(choice),
        });
        let weights = combined.unwrap().weights.unwrap();
        all.extend(rank.raw(d.view()));
        all.extend(rank.raw(weights.view()));
        (name.into(), all)
    })
    .into()
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
                let name = format!("hierarchical/{machines}x{ranks}/reduce_scatter/{op:?}/{types}");
                let entry = Entry::new(name, move |rank, inputs| {
                    reduce_scatter(rank, inputs, machines, kind)
                });
                all.push(((machines, ranks), entry));
            }
        }
        for (dtype, output) in [
            (DataType::BF16, DataType::BF16),
            (DataType::BF16, DataType::F32),
            (DataType::F32, DataType::F32),
        ] {
            let types = format!("{}_to_{}", named(dtype), named(output));
            let name = format!("hierarchical/{machines}x{ranks}/experts/{types}");
            let entry = Entry::new(name, move |rank, inputs| {
                experts(rank, inputs, machines, (dtype, output))
            });
            all.push(((machines, ranks), entry));
        }
    }
    all
}
