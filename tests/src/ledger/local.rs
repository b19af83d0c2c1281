//! What a device does alone: quantizing, converting, a router's choice, the end of a linear, and a norm behind a residual.

use super::{Entry, Inputs, named};
use crate::{
    all_reduce_norm::{NORMED, case::normed},
    backend::Rank,
    layer::FLOATS,
    quantized::SCHEMES,
};
use brigade_device::{Activation, DataType, Output, QScheme, ResidualNormParams, TopKParams};

const DIMS: [usize; 2] = [23, 300];
const ELEMENTS: usize = DIMS[0] * DIMS[1];

fn quantize(rank: &Rank, mut inputs: Inputs, dtype: DataType, scheme: QScheme) -> [Vec<u8>; 2] {
    let x = inputs.floats(dtype, ELEMENTS, false);
    let x = rank.upload_bytes(dtype, &DIMS, &x);
    let q = rank
        .device
        .quantize(&rank.stream, x.view(), scheme)
        .unwrap();
    [rank.raw(q.kernel().view()), rank.raw(q.scales().view())]
}

/// Activations that are more than a comparison are a library's, and are not promised.
fn bias_activation(
    rank: &Rank,
    mut inputs: Inputs,
    (from, output): (DataType, DataType),
    activation: Activation,
) -> Vec<u8> {
    let x = inputs.floats(from, ELEMENTS, false);
    let x = rank.upload_bytes(from, &DIMS, &x);
    let bias = inputs.floats(from, DIMS[1], false);
    let bias = rank.upload_bytes(from, &DIMS[1..], &bias);
    let output = Output::Allocate(output);
    let d = rank
        .device
        .bias_activation(
            &rank.stream,
            x.view(),
            Some(bias.view()),
            activation,
            output,
        )
        .unwrap()
        .unwrap();
    rank.raw(d.view())
}

fn convert(rank: &Rank, mut inputs: Inputs, from: DataType, to: DataType) -> Vec<u8> {
    let bytes = if from.is_float() {
        inputs.floats(from, ELEMENTS, true)
    } else {
        inputs.bytes(ELEMENTS * from.bytes())
    };
    let x = rank.upload_bytes(from, &[ELEMENTS], &bytes);
    let mut d = rank.poisoned(to, &[ELEMENTS]);
    rank.device
        .convert(&rank.stream, d.view_mut(), x.view())
        .unwrap();
    rank.raw(d.view())
}

/// Which experts are chosen, of scores of which many are equal; what they weigh is a library's.
fn top_k(rank: &Rank, mut inputs: Inputs, dtype: DataType) -> Vec<u8> {
    let scores = inputs.floats(dtype, ELEMENTS, true);
    let scores = rank.upload_bytes(dtype, &DIMS, &scores);
    let params = TopKParams::new(scores.view(), 32);
    let made = rank.device.top_k(&rank.stream, &params).unwrap();
    rank.raw(made.ids.view())
}

/// Of rows that a GPU holds, and of longer ones.
fn residual_norm(
    rank: &Rank,
    mut inputs: Inputs,
    (dtype, scheme): (DataType, QScheme),
    dims: [usize; 2],
) -> Vec<u8> {
    let mut upload = |dims: &[usize]| {
        let bytes = inputs.floats(dtype, dims.iter().product(), false);
        rank.upload_bytes(dtype, dims, &bytes)
    };
    let (from, residual, weight) = (upload(&dims), upload(&dims), upload(&dims[1..]));
    let mut sum = rank.poisoned(dtype, &dims);
    let mut out = rank.poisoned(scheme.kernel_type().unwrap_or(dtype), &dims);
    let mut scales = rank.poisoned(DataType::F32, &dims[..1]);
    let params = ResidualNormParams {
        from: from.view(),
        residual: residual.view(),
        weight: weight.view(),
        eps: 1e-5,
        sum: sum.view_mut(),
        normed: normed(scheme, &mut out, &mut scales, 1.0 / 64.0),
    };
    rank.device.residual_norm(&rank.stream, &params).unwrap();
    [sum, out, scales]
        .map(|part| rank.raw(part.view()))
        .concat()
}

pub(super) fn entries() -> Vec<Entry> {
    let mut all = vec![];
    for (dtype, scheme) in FLOATS.into_iter().flat_map(|d| NORMED.map(|n| (d, n))) {
        for (kind, dims) in [
            ("held", [11, 304]),
            ("uneven", [11, 301]),
            ("long", [2, 36_000]),
        ] {
            let name = format!("residual_norm/{}_{scheme:?}/{kind}", named(dtype));
            all.push(Entry::one(name, move |rank, inputs| {
                residual_norm(rank, inputs, (dtype, scheme), dims)
            }));
        }
    }
    for dtype in FLOATS {
        let name = format!("top_k/{}/ids", named(dtype));
        all.push(Entry::one(name, move |rank, inputs| {
            top_k(rank, inputs, dtype)
        }));
    }
    for scheme in SCHEMES {
        for dtype in FLOATS {
            for (part, name) in ["kernel", "scales"].into_iter().enumerate() {
                let name = format!("quantize/{scheme:?}/{}/{name}", named(dtype));
                all.push(Entry::one(name, move |rank, inputs| {
                    let [kernel, scales] = quantize(rank, inputs, dtype, scheme);
                    if part == 0 { kernel } else { scales }
                }));
            }
        }
    }
    for (from, to) in FLOATS
        .into_iter()
        .flat_map(|from| FLOATS.map(|to| (from, to)))
    {
        for activation in [Activation::None, Activation::Relu] {
            let name = format!(
                "bias_activation/{activation:?}/{}_to_{}",
                named(from),
                named(to)
            );
            all.push(Entry::one(name, move |rank, inputs| {
                bias_activation(rank, inputs, (from, to), activation)
            }));
        }
    }
    let numbers = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::I64,
        DataType::F16,
        DataType::BF16,
        DataType::F32,
        DataType::F64,
    ];
    for (from, to) in numbers
        .into_iter()
        .flat_map(|from| numbers.map(|to| (from, to)))
    {
        if from != to {
            let name = format!("convert/{}_to_{}", named(from), named(to));
            all.push(Entry::one(name, move |rank, inputs| {
                convert(rank, inputs, from, to)
            }));
        }
    }
    all
}
