//! What the linears with a collective are tried with: modes, and cases by name.

use crate::layer::{BiasKind, FLOATS, LoraKind, Spec};
use brigade_device::{Activation, DataType, OverlapMode};
use brigade_plan::Engines;
use rand::{Rng, rngs::StdRng};

/// A part of a trial's name, and the choices that it stands for.
pub type Modes = Vec<(&'static str, Vec<Option<OverlapMode>>)>;

/// The modes that a device has.
pub fn modes(engines: Engines) -> Modes {
    let chunked = [1, 2, 3, 5].map(|pieces| Some(OverlapMode::Chunked { pieces }));
    [
        ("off", vec![Some(OverlapMode::Off)]),
        ("chunked", chunked.to_vec()),
        ("ring", vec![Some(OverlapMode::Ring)]),
        ("pull", vec![Some(OverlapMode::Pull)]),
        ("tiles", vec![Some(OverlapMode::Tiles)]),
        ("auto", vec![None]),
    ]
    .into_iter()
    .filter(|(_, choices)| choices[0].is_none_or(|mode| engines.overlaps(mode)))
    .collect()
}

/// The modes of those that take rows of any type and size.
pub fn modes_of_any_rows(engines: Engines) -> Modes {
    let mut list = modes(engines);
    list.retain(|(_, choices)| choices[0] != Some(OverlapMode::Tiles));
    list
}

/// What a device has while it asks a hook, which tiles do not.
pub fn with_a_hook(engines: Engines) -> Engines {
    Engines {
        tiles: false,
        ..engines
    }
}

/// Whether a mode scatters too: pull is only a way to gather.
pub fn scatters(choice: Option<OverlapMode>) -> bool {
    choice != Some(OverlapMode::Pull)
}

/// Every case that a linear with a collective is tried with, by name.
pub type Theme = (&'static str, fn(&mut StdRng, usize) -> Vec<Spec>);

/// The themes that gather-linear and its twin share.
pub const THEMES: [Theme; 9] = [
    ("even", |rng, size| {
        let outputs = [DataType::F32, DataType::F16, DataType::BF16];
        let pairs = FLOATS.into_iter().zip(outputs);
        let half_to_f32 = [DataType::F16, DataType::BF16].map(|d| (d, DataType::F32));
        pairs
            .chain(half_to_f32)
            .map(|(dtype, output)| {
                Spec::even(rng, size)
                    .with(|s| (s.dtype, s.output, s.bias_type) = (dtype, output, dtype))
            })
            .collect()
    }),
    ("ragged", |rng, size| {
        (0..4).map(|_| Spec::ragged(rng, size)).collect()
    }),
    ("idle_ranks", |rng, size| {
        let mut one = vec![0; size];
        one[rng.random_range(0..size)] = 9;
        let some = (0..size).map(|r| if r % 2 == 0 { 6 } else { 0 }).collect();
        let single = (0..size).map(|r| usize::from(r == size - 1)).collect();
        [one, some, single]
            .map(|rows| Spec::even(rng, size).with(|s| s.rows = rows))
            .to_vec()
    }),
    ("empty", |rng, size| {
        let with = |rng: &mut StdRng, change: fn(&mut Spec)| {
            let spec = Spec::ragged(rng, size).with(|s| s.bias = BiasKind::Row);
            spec.with(change)
        };
        vec![
            with(rng, |s| s.rows.fill(0)),
            with(rng, |s| s.n.fill(0)),
            with(rng, |s| s.k.fill(0)),
            with(rng, |s| {
                s.rows.fill(0);
                s.lora = LoraKind::Mixed;
                s.bias = BiasKind::Full;
            }),
            with(rng, |s| {
                s.k.fill(0);
                s.lora = LoraKind::One;
            }),
            with(rng, |s| {
                s.rows.fill(0);
                s.k.fill(0);
                s.n.fill(0);
            }),
        ]
    }),
    ("lora", |rng, size| {
        [
            LoraKind::One,
            LoraKind::Mixed,
            LoraKind::Mixed,
            LoraKind::Bare,
        ]
        .map(|lora| Spec::ragged(rng, size).with(|s| s.lora = lora))
        .to_vec()
    }),
    ("bias", |rng, size| {
        let kinds = [
            BiasKind::Row,
            BiasKind::OneRow,
            BiasKind::Full,
            BiasKind::Full,
        ];
        let mut specs = kinds.map(|bias| Spec::ragged(rng, size).with(|s| s.bias = bias));
        specs[3].bias_type = DataType::F32;
        specs.to_vec()
    }),
    ("activation", |rng, size| {
        let all = [
            Activation::Relu,
            Activation::GeluTanh,
            Activation::GeluErf,
            Activation::Silu,
        ];
        all.map(|activation| {
            Spec::ragged(rng, size).with(|s| {
                s.activation = activation;
                s.bias = BiasKind::Full;
                s.lora = LoraKind::Mixed;
            })
        })
        .to_vec()
    }),
    ("transposed_weight", |rng, size| {
        let mut specs = vec![
            Spec::even(rng, size),
            Spec::ragged(rng, size),
            Spec::ragged(rng, size).with(|s| s.lora = LoraKind::Mixed),
        ];
        specs.iter_mut().for_each(|s| s.transpose = true);
        specs
    }),
    ("output", |rng, size| {
        [true, false]
            .into_iter()
            .flat_map(|into| FLOATS.map(|output| (into, output)))
            .map(|(into, output)| {
                Spec::ragged(rng, size).with(|s| {
                    (s.into, s.output, s.dtype, s.bias_type) =
                        (into, output, DataType::F32, DataType::F32);
                })
            })
            .collect()
    }),
];
