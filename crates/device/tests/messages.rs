//! `check()` names the field that is wrong, what it was, and what it should have been: one wrong case for every field.
#![allow(clippy::unwrap_used)]

mod common;

use brigade_device::*;
use common::*;
use std::time::Duration;

fn device_f32(dims: &[usize]) -> Buffer {
    buffer(DataType::F32, dims)
}

fn host(dims: &[usize]) -> Buffer {
    buffer_in(MemoryType::Host, DataType::BF16, dims)
}

#[test]
fn shapes_buffers_and_configurations() {
    let mut told = Told::default();
    told.wrong("seven dimensions", Shape::new(&[1; 7]));
    told.wrong("too large", Shape::new(&[usize::MAX, 2]));
    let shape = Shape::new(&[2, 3]).unwrap();
    told.wrong(
        "small storage",
        Buffer::new(storage(11), DataType::F16, shape),
    );
    told.wrong(
        "odd offset",
        Buffer::at(storage(99), 1, DataType::F16, shape),
    );
    let b = plain(&[4, 3]);
    told.wrong("slice", b.slice(3, 2));
    told.wrong("slice that overflows", b.slice(1, usize::MAX));
    told.wrong("index", b.index(4));
    told.wrong("reshape", b.reshape(&[5]));
    told.wrong("type", b.expect_type::<f32>("from.dtype"));
    for (case, address) in [("null", 0), ("misaligned", 0x1002)] {
        let owner = std::sync::Arc::new(());
        // SAFETY: refused before anything could be read.
        let adopted =
            unsafe { Buffer::adopt(address, MemoryType::Host, DataType::F32, &[1], owner) };
        told.wrong(case, adopted);
    }
    let config = || CommConfig::new(ParallelMode::Tp);
    assert!(config().check().is_ok());
    let cases = [
        (
            "scratch",
            CommConfig {
                scratch_bytes: 4095,
                ..config()
            },
        ),
        (
            "slots",
            CommConfig {
                message_bytes: 4095,
                ..config()
            },
        ),
        (
            "three entries",
            CommConfig {
                fifo_depth: Some(3),
                ..config()
            },
        ),
        (
            "no entries",
            CommConfig {
                fifo_depth: Some(0),
                ..config()
            },
        ),
        (
            "too many entries",
            CommConfig {
                fifo_depth: Some(1 << 17),
                ..config()
            },
        ),
        (
            "empty entries",
            CommConfig {
                fifo_entry_bytes: Some(0),
                ..config()
            },
        ),
        (
            "half a line",
            CommConfig {
                fifo_entry_bytes: Some(96),
                ..config()
            },
        ),
        (
            "no deadline",
            CommConfig {
                deadline: Duration::ZERO,
                ..config()
            },
        ),
        (
            "long deadline",
            CommConfig {
                first_deadline: Duration::MAX,
                ..config()
            },
        ),
    ];
    for (case, config) in cases {
        told.wrong(case, config.check());
    }
    insta::assert_snapshot!(told.0);
}

#[test]
fn quantized_tensors() {
    use QScheme::{Fp8PerTensor, Fp8PerTokenBlock, Int8PerTensor, Int8PerToken, Int8WeightOnly};
    let mut told = Told::default();
    let i8 = buffer(DataType::I8, &[4, 256]);
    let f8 = buffer(DataType::F8E4M3, &[4, 256]);
    let host_scales = buffer_in(MemoryType::Host, DataType::F32, &[4]);
    let mut case =
        |name: &str, kernel: &Buffer, scales: &Buffer, zeros: Option<&Buffer>, scheme| {
            let zeros = zeros.map(Buffer::view);
            told.wrong(
                name,
                QView::new(kernel.view(), scales.view(), zeros, scheme),
            );
        };
    let s = device_f32;
    case("no scheme", &i8, &s(&[4]), None, QScheme::None);
    case("kernel", &f8, &s(&[4]), None, Int8PerToken);
    case(
        "scales of f16",
        &i8,
        &buffer(DataType::F16, &[4]),
        None,
        Int8PerToken,
    );
    case("scales elsewhere", &i8, &host_scales, None, Int8PerToken);
    case(
        "zeros elsewhere",
        &i8,
        &s(&[4]),
        Some(&host_scales),
        Int8PerToken,
    );
    case("no dimension", &i8, &s(&[]), None, Int8PerTensor);
    case(
        "four dimensions",
        &i8,
        &s(&[4, 1, 1, 1]),
        None,
        Int8PerToken,
    );
    case("one scale too few", &i8, &s(&[3]), None, Int8PerToken);
    case("scales in a row", &i8, &s(&[1, 4]), None, Int8PerToken);
    case("per channel", &i8, &s(&[4]), None, Int8WeightOnly);
    case("two for a tensor", &f8, &s(&[2]), None, Fp8PerTensor);
    case("blocks", &f8, &s(&[4, 3]), None, Fp8PerTokenBlock);
    case("blocks first", &f8, &s(&[2, 4]), None, Fp8PerTokenBlock);
    case("zeros", &i8, &s(&[4]), Some(&s(&[3])), Int8PerToken);
    let per_token = QBuffer::new(i8.clone(), s(&[4]), None, Int8PerToken).unwrap();
    let per_tensor = QBuffer::new(f8, s(&[1]), None, Fp8PerTensor).unwrap();
    told.wrong("slice", per_token.slice(3, 2));
    told.wrong("slice of one scale", per_tensor.slice(0, 1));
    told.wrong("slice_per_tensor", per_token.slice_per_tensor(0, 1));
    insta::assert_snapshot!(told.0);
}

#[test]
fn gemm() {
    let mut told = Told::default();
    let (a, b) = (plain(&[4, 8]), plain(&[8, 6]));
    let good = GemmParams::new(&a, &b);
    let shape = good.check().unwrap();
    assert_eq!((shape.batch, shape.m, shape.n, shape.k), (1, 4, 6, 8));
    let mut pair =
        |name: &str, a: Buffer, b: Buffer| told.wrong(name, GemmParams::new(&a, &b).check());
    pair("a of one dimension", plain(&[8]), b.clone());
    pair("b of four", a.clone(), plain(&[1, 1, 8, 6]));
    pair("a of i32", buffer(DataType::I32, &[4, 8]), b.clone());
    pair("b of f64", a.clone(), buffer(DataType::F64, &[8, 6]));
    pair("batch of a alone", plain(&[2, 4, 8]), b.clone());
    pair("other batch", plain(&[2, 4, 8]), plain(&[3, 8, 6]));
    pair("inner dimension", a.clone(), plain(&[9, 6]));
    pair("b elsewhere", a.clone(), host(&[8, 6]));
    let cases = [
        (
            "transposed a",
            GemmParams {
                transpose_a: true,
                ..good
            },
        ),
        (
            "transposed b",
            GemmParams {
                transpose_b: true,
                ..good
            },
        ),
        (
            "compute type",
            GemmParams {
                compute_type: DataType::F16,
                ..good
            },
        ),
    ];
    for (name, p) in cases {
        told.wrong(name, p.check());
    }
    for (name, c) in [
        ("c of u8", buffer(DataType::U8, &[6])),
        ("c that is too long", plain(&[7])),
        ("c of one column", plain(&[4, 1])),
        ("c elsewhere", host(&[6])),
    ] {
        let c = Some(c.view());
        told.wrong(name, GemmParams { c, ..good }.check());
    }
    for c in [plain(&[6]), plain(&[1, 6]), plain(&[4, 6])] {
        let c = Some(c.view());
        assert!(GemmParams { c, ..good }.check().is_ok());
    }
    insta::assert_snapshot!(told.0);
}

#[test]
fn adapters() {
    let mut told = Told::default();
    let (x, w) = (plain(&[4, 8]), plain(&[8, 6]));
    let (a, b) = (plain(&[8, 2]), plain(&[2, 6]));
    let run = |rows, a, b, scale| LoraRun {
        rows,
        adapter: Some(Lora { a, b, scale }),
    };
    let good = run(4, a.view(), b.view(), 0.5);
    let none = LoraRun {
        rows: 2,
        adapter: None,
    };
    let check = |runs: &[LoraRun<'_>]| {
        let gemm = GemmParams::new(&x, &w);
        LoraLinearParams { gemm, runs }.check()
    };
    assert!(check(&[good]).is_ok() && check(&[]).is_ok() && check(&[none, none]).is_ok());
    let other = [plain(&[7, 2]), plain(&[2, 5]), plain(&[3, 6]), plain(&[8])];
    let typed = buffer(DataType::I8, &[8, 2]);
    let endless = LoraRun {
        rows: usize::MAX,
        adapter: None,
    };
    let cases: [(&str, &[LoraRun<'_>]); 9] = [
        ("too few rows", &[none]),
        ("too many rows", &[good, none]),
        ("more rows than there are numbers", &[endless, endless]),
        (
            "a of another k",
            &[none, run(2, other[0].view(), b.view(), 1.0)],
        ),
        ("b of another n", &[run(4, a.view(), other[1].view(), 1.0)]),
        ("another r", &[run(4, a.view(), other[2].view(), 1.0)]),
        (
            "a of one dimension",
            &[run(4, other[3].view(), b.view(), 1.0)],
        ),
        ("a of i8", &[run(4, typed.view(), b.view(), 1.0)]),
        ("scale", &[run(4, a.view(), b.view(), f32::NAN)]),
    ];
    for (name, runs) in cases {
        told.wrong(name, check(runs));
    }
    let (x, w) = (plain(&[1, 4, 8]), plain(&[1, 8, 6]));
    let gemm = GemmParams::new(&x, &w);
    told.wrong(
        "batch",
        LoraLinearParams {
            gemm,
            runs: &[good],
        }
        .check(),
    );
    insta::assert_snapshot!(told.0);
}
