//! Buffers: slices share, parents live on, foreign memory comes in without a copy, and memory comes back.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, expect_invalid},
    copies::noise,
    gather_linear::{self, config},
    layer::Spec,
    suite::{Suite, World},
};
use brigade_device::{Buffer, DataType, DeviceExt, GemmParams, MemoryType, Output, Shape, Storage};
use rand::rngs::StdRng;
use std::{any::Any, sync::Arc};

/// What is written through a slice is seen by its parent, and nothing else is.
fn slices(rank: &Rank, rng: &mut StdRng) {
    let bytes = noise(rng, 6 * 4 * 4);
    let buffer = rank.upload_bytes(DataType::F32, &[6, 4], &bytes);
    let mut slice = buffer.slice(2, 3).unwrap();
    assert_eq!(slice.shape().dims(), [3, 4]);
    assert_bits(
        &rank.raw(slice.view()),
        &bytes[32..80],
        DataType::F32,
        "a slice",
    );
    let mut row = slice.index(1).unwrap();
    assert_eq!(row.shape().dims(), [4]);
    assert_bits(
        &rank.raw(row.view()),
        &bytes[48..64],
        DataType::F32,
        "an index",
    );
    let square = slice.reshape(&[2, 6]).unwrap();
    assert_bits(
        &rank.raw(square.view()),
        &bytes[32..80],
        DataType::F32,
        "a reshape",
    );

    let new = noise(rng, 16);
    rank.device
        .write(&rank.stream, row.view_mut(), &new)
        .unwrap();
    let mut want = bytes.clone();
    want[48..64].copy_from_slice(&new);
    assert_bits(&rank.raw(buffer.view()), &want, DataType::F32, "the parent");
    rank.device.fill(&rank.stream, slice.view_mut(), 7).unwrap();
    want[32..80].fill(7);
    assert_bits(
        &rank.raw(buffer.view()),
        &want,
        DataType::F32,
        "the parent again",
    );

    drop(buffer);
    assert_bits(
        &rank.raw(slice.view()),
        &want[32..80],
        DataType::F32,
        "without a parent",
    );
    assert_eq!(expect_invalid(slice.slice(2, 2), "too long"), "rows");
    assert_eq!(expect_invalid(slice.index(3), "no such row"), "rows");
    assert_eq!(
        expect_invalid(slice.reshape(&[5, 2]), "other size"),
        "shape"
    );
    let typed = rank.device.download::<i32>(&rank.stream, slice.view());
    assert_eq!(expect_invalid(typed, "another type"), "from.dtype");
}

/// Products read slices where they lie.
fn products_of_slices(rank: &Rank, _: &mut StdRng) {
    let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
    let all = rank.device.upload(&rank.stream, &values, &[6, 4]).unwrap();
    let (a, b) = (all.slice(1, 2).unwrap(), all.slice(2, 4).unwrap());
    let output = Output::Allocate(DataType::F32);
    let params = GemmParams::new(&a, &b);
    let d = rank
        .device
        .gemm(&rank.stream, &params, output)
        .unwrap()
        .unwrap();
    let want: Vec<f64> = (0..8)
        .map(|i| {
            let (row, column) = (i / 4, i % 4);
            (0..4)
                .map(|k| f64::from(values[4 * (row + 1) + k] * values[4 * (k + 2) + column]))
                .sum()
        })
        .collect();
    assert_close(&rank.values(d.view()), &want, DataType::F32, "slices");
}

/// Host memory of somebody else's is read and written where it lies, and lives as long as a buffer needs it.
fn adopted(rank: &Rank, rng: &mut StdRng) {
    let owner: Arc<Vec<u64>> = Arc::new(bytemuck::pod_collect_to_vec(&noise(rng, 64)));
    let address = owner.as_ptr() as u64;
    let adopt = |address| {
        // SAFETY: the vector's 16 floats live as long as the owner that the buffer keeps; nobody else touches them.
        unsafe {
            Buffer::adopt(
                address,
                MemoryType::Host,
                DataType::F32,
                &[4, 4],
                Arc::<Vec<u64>>::clone(&owner),
            )
        }
    };
    assert_eq!(expect_invalid(adopt(0), "null"), "address");
    assert_eq!(expect_invalid(adopt(address + 2), "unaligned"), "address");
    let adopted = adopt(address).unwrap();
    assert_eq!(Arc::strong_count(&owner), 2);
    let bytes: &[u8] = bytemuck::cast_slice(&owner);
    assert_bits(&rank.raw(adopted.view()), bytes, DataType::F32, "adopted");
    let row = adopted.slice(3, 1).unwrap();
    drop(adopted);
    assert_eq!(Arc::strong_count(&owner), 2);
    assert_bits(
        &rank.raw(row.view()),
        &bytes[48..],
        DataType::F32,
        "a slice of it",
    );
    drop(row);
    assert_eq!(Arc::strong_count(&owner), 1);
}

/// Memory is counted while it is held, and all of it comes back.
fn memory_status(rank: &Rank, _: &mut StdRng) {
    let held = || rank.device.memory_status().unwrap().held_bytes;
    let before = held();
    let buffer = rank.poisoned(DataType::F32, &[1 << 18]);
    assert!(held() >= before + (1 << 20), "an allocation is counted");
    let slice = buffer.slice(3, 5).unwrap();
    drop(buffer);
    assert!(held() >= before + (1 << 20), "a slice holds all of it");
    drop(slice);
    assert_eq!(held(), before, "all of it came back");
    let status = rank.device.memory_status().unwrap();
    assert!(status.total_bytes >= status.held_bytes);
}

/// After many calls, no rank holds more memory than before.
fn calls_hold_no_memory(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let case = gather_linear::Case::new(&mut rng, spec);
    let probe = crate::faults::Probe::new(&mut rng, world.size);
    world.run(&config(), move |rank| {
        let held = || rank.device.memory_status().unwrap().held_bytes;
        let before = held();
        for _ in 0..10 {
            case.run(rank, None);
            probe.run(rank);
        }
        assert_eq!(held(), before);
    });
}

/// What holds a device's memory and says that it is larger.
#[derive(Debug)]
struct Wrapper(Arc<dyn Storage>);

impl Storage for Wrapper {
    fn address(&self) -> u64 {
        self.0.address()
    }
    fn bytes(&self) -> usize {
        1 << 12
    }
    fn memory(&self) -> MemoryType {
        self.0.memory()
    }
    fn as_any(&self) -> &dyn Any {
        self.0.as_any()
    }
}

/// A device believes what its own memory says of itself, and nobody else.
fn wrapped(rank: &Rank, _: &mut StdRng) {
    let (device, on) = (&rank.device, &rank.stream);
    let owner = Arc::new(vec![7u8; 64]);
    let (memory, address) = (MemoryType::Host, owner.as_ptr() as u64);
    // SAFETY: 64 bytes, kept by the owner; nobody writes them.
    let adopted = unsafe { Buffer::adopt(address, memory, DataType::U8, &[64], owner) }.unwrap();
    let own = rank.upload_bytes(DataType::U8, &[64], &[7; 64]);
    for inner in [adopted, own] {
        let storage = Arc::new(Wrapper(inner.storage().clone()));
        for len in [64, 1 << 12] {
            let shape = Shape::new(&[len]).unwrap();
            let mut outer = Buffer::new(storage.clone(), DataType::U8, shape).unwrap();
            let read = device.download::<u8>(on, outer.view());
            assert_eq!(expect_invalid(read, "a read"), "memory");
            let written = device.fill(on, outer.view_mut(), 1);
            assert_eq!(expect_invalid(written, "a fill"), "memory");
        }
        assert_eq!(device.download::<u8>(on, inner.view()).unwrap(), [7; 64]);
    }
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "buffers/slices", slices);
    alone(suite, "buffers/products_of_slices", products_of_slices);
    alone(suite, "buffers/adopted", adopted);
    alone(suite, "buffers/wrapped", wrapped);
    alone(suite, "buffers/memory_status", memory_status);
    suite.add("device/buffers/calls_hold_no_memory", calls_hold_no_memory);
}
