//! Copies, fills, conversions and transposes.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_bits, expect_invalid, expect_unsupported},
    copies::{ANY, noise},
    suite::Suite,
};
use brigade_device::{DataType, DeviceExt, Element, MemoryType};
use half::{bf16, f16};
use rand::{Rng, rngs::StdRng};

fn copy(rank: &Rank, rng: &mut StdRng) {
    let device = &rank.device;
    for memory in [MemoryType::Host, MemoryType::HostPinned, MemoryType::Device] {
        for dtype in ANY {
            let dims = [rng.random_range(0..9), 7, 3];
            let bytes = noise(rng, dims.iter().product::<usize>() * dtype.bytes());
            let from = rank.upload_bytes(dtype, &dims, &bytes);
            let mut to = device.allocate(&rank.stream, memory, dtype, &dims).unwrap();
            assert!(
                rank.raw(to.view()).iter().all(|&b| b == 0),
                "a new buffer is zero"
            );
            device
                .copy(&rank.stream, to.view_mut(), from.view())
                .unwrap();
            assert_bits(&rank.raw(to.view()), &bytes, dtype, "a copy");
        }
    }
    let from = rank.poisoned(DataType::F32, &[4, 2]);
    let mut other = rank.poisoned(DataType::F32, &[2, 4]);
    let result = device.copy(&rank.stream, other.view_mut(), from.view());
    assert_eq!(expect_invalid(result, "shapes"), "from.shape");
    let mut other = rank.poisoned(DataType::I32, &[4, 2]);
    let result = device.copy(&rank.stream, other.view_mut(), from.view());
    assert_eq!(expect_invalid(result, "types"), "from.dtype");
    let result = device.write(&rank.stream, other.view_mut(), &[0; 31]);
    assert_eq!(expect_invalid(result, "too few bytes"), "bytes");
    let result = device.read(&rank.stream, from.view(), &mut [0; 33]);
    assert_eq!(expect_invalid(result, "too many bytes"), "bytes");
}

/// Rows of a buffer are copied to other rows of it, as if they had been read first.
fn overlapping(rank: &Rank, rng: &mut StdRng) {
    for (from, to) in [(0, 3), (3, 0), (2, 2)] {
        let bytes = noise(rng, 10 * 16);
        let mut buffer = rank.upload_bytes(DataType::F32, &[10, 4], &bytes);
        let source = buffer.slice(from, 5).unwrap();
        let mut view = buffer.view_mut();
        let view = view.rows(to..to + 5).unwrap();
        rank.device.copy(&rank.stream, view, source.view()).unwrap();
        let mut want = bytes.clone();
        want[to * 16..(to + 5) * 16].copy_from_slice(&bytes[from * 16..(from + 5) * 16]);
        assert_bits(
            &rank.raw(buffer.view()),
            &want,
            DataType::F32,
            "an overlapping copy",
        );
    }
}

fn fill(rank: &Rank, rng: &mut StdRng) {
    let mut buffer = rank.upload_bytes(DataType::I32, &[6, 3], &[1; 72]);
    let byte = rng.random();
    let mut view = buffer.view_mut();
    let view = view.rows(2..4).unwrap();
    rank.device.fill(&rank.stream, view, byte).unwrap();
    let want = [vec![1; 24], vec![byte; 24], vec![1; 24]].concat();
    assert_bits(
        &rank.raw(buffer.view()),
        &want,
        DataType::I32,
        "a fill of some rows",
    );
}

fn transpose(rank: &Rank, rng: &mut StdRng) {
    for dtype in ANY {
        let (rows, columns) = (rng.random_range(1..40), rng.random_range(1..40));
        let size = dtype.bytes();
        let bytes = noise(rng, rows * columns * size);
        let from = rank.upload_bytes(dtype, &[rows, columns], &bytes);
        let mut to = rank.poisoned(dtype, &[columns, rows]);
        rank.device
            .transpose(&rank.stream, to.view_mut(), from.view())
            .unwrap();
        let element = |i: usize, j: usize| &bytes[(i * columns + j) * size..][..size];
        let want: Vec<u8> = (0..columns)
            .flat_map(|j| (0..rows).flat_map(move |i| element(i, j).to_vec()))
            .collect();
        assert_bits(&rank.raw(to.view()), &want, dtype, "a transpose");
    }
    let from = rank.poisoned(DataType::F32, &[2, 3]);
    let mut same = rank.poisoned(DataType::F32, &[2, 3]);
    let result = rank
        .device
        .transpose(&rank.stream, same.view_mut(), from.view());
    assert_eq!(expect_invalid(result, "no transpose"), "to.shape");
}

#[track_caller]
fn converts<A: Element, B: Element + PartialEq + std::fmt::Debug>(
    rank: &Rank,
    from: &[A],
    want: &[B],
) {
    let from = rank
        .device
        .upload(&rank.stream, from, &[from.len()])
        .unwrap();
    let mut to = rank.poisoned(B::DTYPE, &[want.len()]);
    rank.device
        .convert(&rank.stream, to.view_mut(), from.view())
        .unwrap();
    let got: Vec<B> = rank.device.download(&rank.stream, to.view()).unwrap();
    let what = format!("{} to {}", A::DTYPE, B::DTYPE);
    assert_eq!(got, want, "{what}");
}

/// To a narrower float rounds to nearest, ties to even; to an integer truncates and saturates.
fn convert(rank: &Rank, rng: &mut StdRng) {
    let values: Vec<f32> = (0..777).map(|_| rng.random_range(-200.0..200.0)).collect();
    let map = |f: fn(f32) -> f64| values.iter().map(|&x| f(x)).collect::<Vec<f64>>();
    let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    let brains: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    converts(rank, &values, &halves);
    converts(rank, &values, &brains);
    converts(rank, &values, &map(f64::from));
    converts(
        rank,
        &halves,
        &halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>(),
    );
    converts(
        rank,
        &brains,
        &brains.iter().map(|x| x.to_f32()).collect::<Vec<_>>(),
    );
    converts(
        rank,
        &halves,
        &halves
            .iter()
            .map(|&x| bf16::from_f32(x.to_f32()))
            .collect::<Vec<_>>(),
    );
    converts(
        rank,
        &values,
        &values.iter().map(|&x| x as i32).collect::<Vec<_>>(),
    );
    converts(
        rank,
        &values,
        &values.iter().map(|&x| x as u8).collect::<Vec<_>>(),
    );
    converts(
        rank,
        &[1e30f32, -1e30, 3.99, -3.99],
        &[i64::MAX, i64::MIN, 3, -3],
    );
    converts(rank, &[300i32, -5, 17], &[255u8, 0, 17]);
    converts(rank, &[u64::MAX, 5], &[i64::MAX, 5]);
    converts(rank, &[1i8, -128, 127], &[1.0f32, -128.0, 127.0]);
    let ties = [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0].map(bf16::from_f32);
    assert_eq!(ties.map(f32::from), [1.0, 1.0 + 1.0 / 64.0]);
    converts(rank, &[1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0], &ties);
    converts(
        rank,
        &[f32::INFINITY, 1e6, -0.0],
        &[f16::INFINITY, f16::INFINITY, f16::NEG_ZERO],
    );

    let from = rank.poisoned(DataType::F32, &[3]);
    let mut to = rank.poisoned(DataType::F16, &[4]);
    let result = rank
        .device
        .convert(&rank.stream, to.view_mut(), from.view());
    assert_eq!(expect_invalid(result, "shapes"), "from.shape");
    let mut to = rank.poisoned(DataType::Bool, &[3]);
    let result = rank
        .device
        .convert(&rank.stream, to.view_mut(), from.view());
    expect_unsupported(result, "floats to booleans");
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "copy/types_and_memories", copy);
    alone(suite, "copy/overlapping", overlapping);
    alone(suite, "fill", fill);
    alone(suite, "transpose", transpose);
    alone(suite, "convert", convert);
}
