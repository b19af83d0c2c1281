//! All-reduces with a norm, by every algorithm: the new residual, the normalized rows, and their scales.

use super::{Entry, Inputs, Results, named};
use crate::{
    all_reduce::algorithms,
    all_reduce_norm::{NORMED, case::normed},
    backend::Rank,
    layer::FLOATS,
};
use brigade_device::{AllReduceNormParams, DataType, QScheme};
use brigade_plan::Engines;

/// More rows than ranks, and no whole number of granules in a row.
const DIMS: [usize; 2] = [11, 301];

const EPS: f32 = 1e-5;

fn all_reduce_norm(
    rank: &Rank,
    engines: Engines,
    mut inputs: Inputs,
    (dtype, scheme): (DataType, QScheme),
) -> Results {
    let mut upload = |dims: &[usize]| {
        let bytes = inputs.floats(dtype, dims.iter().product(), false);
        rank.upload_bytes(dtype, dims, &bytes)
    };
    let (from, residual, weight) = (upload(&DIMS), upload(&DIMS), upload(&DIMS[1..]));
    algorithms(engines)
        .into_iter()
        .map(|(name, choice)| {
            let mut sum = rank.poisoned(dtype, &DIMS);
            let mut out = rank.poisoned(scheme.kernel_type().unwrap_or(dtype), &DIMS);
            let mut scales = rank.poisoned(DataType::F32, &DIMS[..1]);
            let params = AllReduceNormParams {
                from: from.view(),
                residual: residual.view(),
                weight: weight.view(),
                eps: EPS,
                sum: sum.view_mut(),
                normed: normed(scheme, &mut out, &mut scales, 1.0 / 64.0),
                choice,
            };
            rank.lease().all_reduce_norm(params).unwrap();
            let all = [sum, out, scales].map(|part| rank.raw(part.view()));
            (name.into(), all.concat())
        })
        .collect()
}

pub(super) fn entries(engines: Engines) -> Vec<Entry> {
    let kinds = FLOATS.into_iter().flat_map(|d| NORMED.map(|n| (d, n)));
    let entry = |kind: (DataType, QScheme)| {
        let name = format!("all_reduce_norm/{}_{:?}", named(kind.0), kind.1);
        Entry::new(name, move |rank, inputs| {
            all_reduce_norm(rank, engines, inputs, kind)
        })
    };
    kinds.filter(|_| engines.norms).map(entry).collect()
}
