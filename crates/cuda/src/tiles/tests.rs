use super::*;
use brigade_device::{Lora, MemoryType, QBuffer, Shape, Storage};
use std::{any::Any, sync::Arc};

/// Where rows of peers come.
const ARRIVING: Range<u64> = 0x10_0000..0x20_0000;

/// Addresses that nobody looks behind.
#[derive(Debug)]
struct At(u64, usize);

impl Storage for At {
    fn address(&self) -> u64 {
        self.0
    }
    fn bytes(&self) -> usize {
        self.1
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(crate) fn at(address: u64, dtype: DataType, dims: &[usize]) -> Buffer {
    let bytes = dims.iter().product::<usize>() * dtype.bytes();
    let shape = Shape::new(dims).unwrap();
    Buffer::new(Arc::new(At(address, bytes)), dtype, shape).unwrap()
}

/// A weight, or rows.
enum Factor {
    Plain(Buffer),
    Quantized(QBuffer),
}

impl Factor {
    fn operand(&self) -> Operand<'_> {
        match self {
            Self::Plain(b) => Operand::Plain(b.view()),
            Self::Quantized(q) => Operand::Quantized(q.view()),
        }
    }
}

/// A layer of K 64 and N 24, for 100 own rows of 300, as tiles take it.
struct Layer {
    dtype: DataType,
    scheme: QScheme,
    rows: usize,
    parts: usize,
    own: Option<Factor>,
    weight: Factor,
    transpose_weight: bool,
    bias: Option<Buffer>,
    /// Rows, and their adapter.
    runs: Vec<(usize, Option<Adapter>)>,
    batch_invariant: bool,
    d: Option<Buffer>,
}

/// Both factors, and the scale.
type Adapter = (Buffer, Buffer, f32);

const BF16: DataType = DataType::BF16;

fn layer() -> Layer {
    Layer {
        dtype: BF16,
        scheme: QScheme::None,
        rows: 300,
        parts: 3,
        own: Some(Factor::Plain(at(0x1_0000, BF16, &[100, 64]))),
        weight: Factor::Plain(at(0x2_0000, BF16, &[24, 64])),
        transpose_weight: true,
        bias: Some(at(0x3_0004, BF16, &[24])),
        runs: vec![(300, Some(adapter(BF16, 4, 0.5)))],
        batch_invariant: false,
        d: Some(at(0x4_0000, BF16, &[300, 24])),
    }
}

fn adapter(dtype: DataType, width: usize, scale: f32) -> Adapter {
    (
        at(0x5_0002, dtype, &[64, width]),
        at(0x6_0002, dtype, &[width, 24]),
        scale,
    )
}

/// 100 rows or 24 columns of 64 bytes, with scales.
fn quantized(address: u64, rows: usize, scheme: QScheme) -> Factor {
    let (dtype, scales) = match scheme {
        QScheme::Fp8PerTensor => (DataType::F8E4M3, 1),
        QScheme::Int8PerTensor => (DataType::I8, 1),
        _ => (DataType::I8, rows),
    };
    let kernel = at(address, dtype, &[rows, 64]);
    let scales = at(address + 0x8000, DataType::F32, &[scales]);
    Factor::Quantized(QBuffer::new(kernel, scales, None, scheme).unwrap())
}

/// The same with quantized factors, and without adapters.
fn of_bytes(rows: QScheme, weight: QScheme) -> Layer {
    let own = quantized(0x1_0000, 100, rows);
    Layer {
        dtype: own.operand().kernel().dtype(),
        scheme: rows,
        weight: quantized(0x2_0000, 24, weight),
        own: Some(own),
        runs: Vec::new(),
        ..layer()
    }
}

impl Layer {
    fn taken(&self) -> Result<(Option<Scales>, Vec<Run>), Reason> {
        let runs: Vec<_> = self
            .runs
            .iter()
            .map(|(rows, adapter)| LoraRun {
                rows: *rows,
                adapter: adapter.as_ref().map(|(a, b, scale)| Lora {
                    a: a.view(),
                    b: b.view(),
                    scale: *scale,
                }),
            })
            .collect();
        let operands = Operands {
            dtype: self.dtype,
            scheme: self.scheme,
            rows: self.rows,
            parts: self.parts,
            own: self.own.as_ref().map(Factor::operand),
            weight: self.weight.operand(),
            transpose_weight: self.transpose_weight,
            bias: self.bias.as_ref().map(|c| c.view()),
            runs: &runs,
            batch_invariant: self.batch_invariant,
            output: BF16,
            d: self.d.as_ref(),
        };
        operands.taken(&operands.buffers(), &ARRIVING)
    }

    /// Which parameter is not taken.
    fn refused(&self) -> String {
        let why = self.taken().unwrap_err();
        assert_eq!(why.code, brigade_plan::reason::TILES_OPERANDS);
        let (field, _) = why.what.split_once(": ").unwrap();
        field.to_owned()
    }
}

#[test]
fn what_tiles_are_for_is_taken() {
    let (scales, runs) = layer().taken().unwrap();
    assert!(scales.is_none());
    let found: Vec<_> = runs.iter().map(|r| (r.rows.clone(), r.width)).collect();
    assert_eq!(found, [(0..300, 4)]);
    let bare = Layer {
        own: None,
        bias: None,
        runs: Vec::new(),
        d: None,
        ..layer()
    };
    assert!(bare.taken().unwrap().1.is_empty());
    let idle = Layer {
        own: Some(Factor::Plain(at(0x1_0008, BF16, &[0, 64]))),
        ..layer()
    };
    assert!(idle.taken().is_ok(), "no own rows lie nowhere");
}

#[test]
fn each_parameter_that_tiles_do_not_take_is_named() {
    type Change = fn(&mut Layer);
    let cases: [(&str, Change); 15] = [
        ("weight.dtype", |l| {
            l.weight = Factor::Plain(at(0x2_0000, DataType::F16, &[24, 64]));
        }),
        ("weight.dtype", |l| {
            l.weight = quantized(0x2_0000, 24, QScheme::Int8PerToken);
        }),
        ("transpose_weight", |l| {
            l.weight = Factor::Plain(at(0x2_0000, BF16, &[64, 24]));
            l.transpose_weight = false;
        }),
        ("bias", |l| l.bias = Some(at(0x3_0002, BF16, &[24]))),
        ("bias", |l| {
            l.bias = Some(at(0x3_0004, DataType::F32, &[300, 24]));
        }),
        ("runs.adapter", |l| {
            l.runs[0].1 = Some(adapter(DataType::F32, 4, 0.5));
        }),
        ("runs", |l| l.runs[0].1 = Some(adapter(BF16, 65, 0.5))),
        ("runs", |l| {
            l.runs = (0..=MOST_RUNS)
                .map(|_| (1, Some(adapter(BF16, 1, 0.5))))
                .collect();
        }),
        ("weight.shape", |l| {
            l.weight = Factor::Plain(at(0x2_0000, BF16, &[24, 60]));
        }),
        ("weight.shape", |l| {
            l.weight = Factor::Plain(at(0x2_0000, BF16, &[20, 64]));
            l.bias = None;
        }),
        ("rows_per_rank", |l| l.rows = 1 << 31),
        ("rows_per_rank", |l| l.parts = MOST_PARTS + 1),
        ("weight", |l| {
            l.weight = Factor::Plain(at(0x2_0008, BF16, &[24, 64]));
        }),
        ("chunk", |l| {
            l.own = Some(Factor::Plain(at(0x1_0008, BF16, &[100, 64])));
        }),
        ("output", |l| l.d = Some(at(0x4_0008, BF16, &[300, 24]))),
    ];
    for (i, (field, change)) in cases.into_iter().enumerate() {
        let mut changed = layer();
        change(&mut changed);
        assert_eq!(changed.refused(), field, "case {i}");
    }
}

#[test]
fn adapters_that_add_nothing_are_no_matter() {
    let mut idle = layer();
    idle.runs = vec![
        (300, None),
        (0, Some(adapter(DataType::F32, 99, 3.0))),
        (0, Some(adapter(BF16, 4, 0.5))),
    ];
    assert!(idle.taken().unwrap().1.is_empty());
}

#[test]
fn what_f16_would_lose_of_a_scale_is_refused() {
    let with = |scale| {
        let mut f16 = layer();
        f16.dtype = DataType::F16;
        f16.weight = Factor::Plain(at(0x2_0000, DataType::F16, &[24, 64]));
        f16.runs[0].1 = Some(adapter(DataType::F16, 4, scale));
        f16
    };
    for scale in [0.25, 1.0, -0.5] {
        assert!(with(scale).taken().is_ok(), "{scale}");
    }
    for scale in [0.2, 1.5, -2.0, f32::NAN] {
        assert_eq!(with(scale).refused(), "runs.adapter.scale", "{scale}");
    }
    let mut wide = layer();
    wide.runs[0].1 = Some(adapter(BF16, 4, 1.5));
    assert!(wide.taken().is_ok(), "bf16 has the exponents of f32");
}

#[test]
fn weights_are_quantized_as_rows_are() {
    use QScheme::{Fp8PerTensor, Int8PerTensor, Int8PerToken, Int8WeightOnly};
    let scales = |rows, weight| {
        let (scales, _) = of_bytes(rows, weight).taken().unwrap();
        scales.map(|s| (s.by_row, s.by_column, s.columns)).unwrap()
    };
    let lie_at = 0x2_8000;
    assert_eq!(scales(Int8PerToken, Int8PerToken), (true, true, lie_at));
    assert_eq!(scales(Int8PerToken, Int8PerTensor), (true, false, lie_at));
    assert_eq!(scales(Fp8PerTensor, Fp8PerTensor), (false, false, lie_at));
    let one_for_all = of_bytes(Int8PerTensor, Int8PerTensor);
    assert_eq!(one_for_all.refused(), "weight");
    let mut by_k = of_bytes(Int8PerToken, Int8PerToken);
    let kernel = at(0x2_0000, DataType::I8, &[24, 64]);
    let columns = at(0x2_8000, DataType::F32, &[64]);
    by_k.weight = Factor::Quantized(QBuffer::new(kernel, columns, None, Int8WeightOnly).unwrap());
    assert_eq!(by_k.refused(), "weight");
    assert_eq!(
        of_bytes(Int8PerToken, Fp8PerTensor).refused(),
        "weight.dtype"
    );
    let mut adapted = of_bytes(Int8PerToken, Int8PerToken);
    adapted.runs = layer().runs;
    assert_eq!(adapted.refused(), "runs.adapter");
}

#[test]
fn d_lies_in_nothing_that_is_read_meanwhile() {
    const D_BYTES: u64 = 300 * 24 * 2;
    let bytes = of_bytes(QScheme::Int8PerToken, QScheme::Int8PerToken);
    // All that is read of a layer, and how many bytes there are.
    let plain = [
        (0x1_0000, 100 * 64 * 2),
        (0x2_0000, 24 * 64 * 2),
        (0x3_0000, 0x34),
        (0x5_0000, 64 * 4 * 2 + 2),
        (0x6_0000, 4 * 24 * 2 + 2),
        (ARRIVING.start, ARRIVING.end - ARRIVING.start),
    ];
    let scales = [(0x1_8000, 400), (0x2_8000, 96)];
    let cases = plain
        .map(|read| (layer(), read))
        .into_iter()
        .chain(scales.map(|read| {
            let bytes = of_bytes(bytes.scheme, bytes.weight.operand().scheme());
            (bytes, read)
        }));
    for (mut layer, (first, bytes)) in cases {
        let end = (first + bytes).next_multiple_of(GRAIN as u64);
        let mut with = |d: u64| {
            layer.d = Some(at(d, BF16, &[300, 24]));
            layer.taken().map(drop)
        };
        let before = first - D_BYTES.next_multiple_of(GRAIN as u64);
        assert!(with(before).is_ok(), "right before {first:#x}");
        assert!(with(end).is_ok(), "right behind {first:#x}");
        for inside in [before + GRAIN as u64, end - GRAIN as u64] {
            let why = with(inside).unwrap_err();
            assert!(why.what.starts_with("output: "), "{inside:#x}: {why}");
        }
    }
}
