//! The rows that gather-linear leaves behind, in every mode: as they are, and quantized with their scales. And results whose sums are exact,
//! which are the same in every mode.

use super::{Entry, Inputs, Results, named};
use crate::{
    backend::Rank,
    layer::FLOATS,
    quantized::SCHEMES,
    themes::{modes, modes_of_any_rows, scatters},
};
use brigade_device::{
    Activation, AllGatherLoraLinearParams, Chunk, DataType, LoraLinearReduceScatterParams, Operand,
    Output, OverlapMode, QScheme,
};
use brigade_plan::Engines;

const COLUMNS: usize = 130;

/// Rows of every rank, none on some.
fn rows(size: usize) -> Vec<usize> {
    (0..size).map(|r| (3 * r + 4) % 7).collect()
}

fn gathered(
    rank: &Rank,
    engines: Engines,
    mut inputs: Inputs,
    dtype: DataType,
    scheme: QScheme,
) -> Results {
    let rows = rows(rank.size);
    let dims = [rows[rank.rank], COLUMNS];
    let x = inputs.floats(dtype, dims[0] * COLUMNS, false);
    let x = rank.upload_bytes(dtype, &dims, &x);
    let weight = rank.poisoned(dtype, &[COLUMNS, 1]);
    let quantized = (scheme != QScheme::None).then(|| {
        rank.device
            .quantize(&rank.stream, x.view(), scheme)
            .unwrap()
    });
    let overlaps = matches!(
        scheme,
        QScheme::None | QScheme::Int8PerToken | QScheme::Fp8PerTensor
    );
    modes_of_any_rows(engines)
        .into_iter()
        .flat_map(|(name, choices)| choices.into_iter().map(move |c| (name, c)))
        .filter(|(_, choice)| overlaps || choice.is_none_or(|mode| mode == OverlapMode::Off))
        .map(|(name, choice)| {
            let operand = quantized
                .as_ref()
                .map_or(Operand::Plain(x.view()), |q| Operand::Quantized(q.view()));
            let params = AllGatherLoraLinearParams {
                choice,
                ..AllGatherLoraLinearParams::new(Chunk::Copy(operand), &rows, &weight)
            };
            let mut lease = rank.lease();
            let result = lease.all_gather_lora_linear(params).unwrap();
            let mut bytes = vec![];
            for owner in 0..rank.size {
                match result.a.chunk(owner).unwrap() {
                    Operand::Plain(rows) => bytes.extend(rank.raw(rows)),
                    Operand::Quantized(q) => {
                        bytes.extend(rank.raw(q.kernel()));
                        bytes.extend(rank.raw(q.scales()));
                    }
                }
            }
            (format!("{name} {choice:?}"), bytes)
        })
        .collect()
}

/// Results of int8, whose rows and weights have scales, with a row of C.
fn products(rank: &Rank, engines: Engines, mut inputs: Inputs, dtype: DataType) -> Results {
    const K: usize = 144;
    const N: usize = 40;
    let rows: Vec<usize> = (0..rank.size).map(|r| (97 * r + 131) % 200).collect();
    let mut quantized = |dims: [usize; 2]| {
        let values = inputs.floats(dtype, dims[0] * dims[1], false);
        let values = rank.upload_bytes(dtype, &dims, &values);
        let scheme = QScheme::Int8PerToken;
        let quantized = rank.device.quantize(&rank.stream, values.view(), scheme);
        quantized.unwrap()
    };
    let (x, weight) = (quantized([rows[rank.rank], K]), quantized([N, K]));
    let bias = inputs.floats(dtype, N, false);
    let bias = rank.upload_bytes(dtype, &[N], &bias);
    let all = modes(engines).into_iter();
    all.flat_map(|(name, choices)| choices.into_iter().map(move |c| (name, c)))
        .map(|(name, choice)| {
            let (x, weight) = (
                Operand::Quantized(x.view()),
                Operand::Quantized(weight.view()),
            );
            let params = AllGatherLoraLinearParams {
                transpose_weight: true,
                bias: Some(bias.view()),
                output: Output::Allocate(dtype),
                choice,
                ..AllGatherLoraLinearParams::new(Chunk::Copy(x), &rows, weight)
            };
            let mut lease = rank.lease();
            let d = lease.all_gather_lora_linear(params).unwrap().d.unwrap();
            (format!("{name} {choice:?}"), rank.raw(d.view()))
        })
        .collect()
}

/// Both linears of whole numbers, whose sums are exact whatever adds them up, so that floats are tied to the host's as well. Products are
/// batch-invariant: on a GPU they are all by the kernel of tiles.
fn exact(rank: &Rank, engines: Engines, mut inputs: Inputs, dtype: DataType) -> Results {
    const K: usize = 144;
    const N: usize = 40;
    let rows: Vec<usize> = (0..rank.size).map(|r| (97 * r + 131) % 200).collect();
    let all: usize = rows.iter().sum();
    let mut whole = |dims: &[usize]| {
        let values = inputs.whole(dtype, dims.iter().product());
        rank.upload_bytes(dtype, dims, &values)
    };
    let (x, weight, bias) = (whole(&[all, K]), whole(&[N, K]), whole(&[N]));
    let first = rows[..rank.rank].iter().sum();
    let own = x.slice(first, rows[rank.rank]).unwrap();
    let list = modes(engines).into_iter();
    list.flat_map(|(name, choices)| choices.into_iter().map(move |c| (name, c)))
        .map(|(name, choice)| {
            let params = AllGatherLoraLinearParams {
                transpose_weight: true,
                bias: Some(bias.view()),
                activation: Activation::Relu,
                choice,
                batch_invariant: true,
                ..AllGatherLoraLinearParams::new(Chunk::Copy((&own).into()), &rows, &weight)
            };
            let d = rank.lease().all_gather_lora_linear(params).unwrap().d;
            let mut bytes = rank.raw(d.unwrap().view());
            let params = LoraLinearReduceScatterParams {
                transpose_weight: true,
                bias: Some(bias.view()),
                activation: Activation::Relu,
                choice: choice.filter(|_| scatters(choice)),
                batch_invariant: true,
                ..LoraLinearReduceScatterParams::new(&x, &rows, &weight)
            };
            let d = rank.lease().lora_linear_reduce_scatter(params).unwrap().d;
            bytes.extend(rank.raw(d.unwrap().view()));
            (format!("{name} {choice:?}"), bytes)
        })
        .collect()
}

pub(super) fn entries(engines: Engines) -> Vec<Entry> {
    let plain = FLOATS.map(|dtype| (dtype, QScheme::None));
    let quantized = SCHEMES.map(|scheme| (DataType::BF16, scheme));
    let products = [DataType::F16, DataType::BF16].map(|dtype| {
        let name = format!("int8_products/{}", named(dtype));
        Entry::new(name, move |rank, inputs| {
            products(rank, engines, inputs, dtype)
        })
    });
    let floats = [DataType::F16, DataType::BF16].map(|dtype| {
        let name = format!("exact_products/{}", named(dtype));
        Entry::new(name, move |rank, inputs| {
            exact(rank, engines, inputs, dtype)
        })
    });
    plain
        .into_iter()
        .chain(quantized)
        .map(|(dtype, scheme)| {
            let name = format!("gathered_rows/{scheme:?}/{}", named(dtype));
            Entry::new(name, move |rank, inputs| {
                gathered(rank, engines, inputs, dtype, scheme)
            })
        })
        .chain(products)
        .chain(floats)
        .collect()
}
