//! A device, and what tests do with one.
#![allow(dead_code, reason = "each test program uses a part")]

use brigade_cuda::CudaDevice;
use brigade_device::{
    Activation, Allocate, Buffer, DataType, DeviceExt, Error, GemmParams, Linear, MemoryType,
    Output, Queues, Stream,
};
use std::{sync::Arc, time::Duration};

pub const AMPLE: Duration = Duration::from_secs(60);

/// The first GPU and a stream of it; `None`, after checking the explanation, where there is none to use.
pub fn device() -> Option<(Arc<CudaDevice>, Stream)> {
    match CudaDevice::new(0) {
        Ok(device) => {
            let on = device.stream(0).unwrap();
            Some((device, on))
        }
        Err(missing) => {
            let demanded = std::env::var_os("BRIGADE_TEST_DEVICE").is_some_and(|d| d == "cuda");
            assert!(!demanded, "a GPU is demanded: {missing}");
            assert!(missing.remedy().len() > 20, "{missing:?}");
            None
        }
    }
}

pub fn bytes(device: &CudaDevice, on: &Stream, count: usize, value: u8) -> Buffer {
    let dims = [count];
    let buffer = device.allocate(on, MemoryType::Device, DataType::U8, &dims);
    let mut buffer = buffer.unwrap();
    device.fill(on, buffer.view_mut(), value).unwrap();
    buffer
}

pub fn all(device: &CudaDevice, on: &Stream, buffer: &Buffer, value: u8) -> bool {
    let got: Vec<u8> = device.download(on, buffer.view()).unwrap();
    got.iter().all(|&x| x == value)
}

/// Some ten milliseconds of work.
pub fn dawdle(device: &CudaDevice, on: &Stream) {
    let mut a = bytes(device, on, 1 << 30, 1);
    for _ in 0..20 {
        device.fill(on, a.view_mut(), 2).unwrap();
    }
}

pub fn field(error: Error) -> &'static str {
    match error {
        Error::Invalid { field, .. } => field,
        other => panic!("{other}"),
    }
}

pub fn code(error: Error) -> &'static str {
    match error {
        Error::Unsupported(reason) => reason.code,
        other => panic!("{other}"),
    }
}

pub fn floats(device: &CudaDevice, on: &Stream, rows: usize, columns: usize, seed: u32) -> Buffer {
    let mut state = seed;
    let values: Vec<f32> = (0..rows * columns)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    device.upload(on, &values, &[rows, columns]).unwrap()
}

/// A product with a bias and an activation, which take scratch memory.
pub fn layer(device: &CudaDevice, on: &Stream, x: &Buffer, w: &Buffer, d: &mut Buffer) {
    let params = GemmParams {
        activation: Activation::Silu,
        ..GemmParams::new(x, w)
    };
    let done = device
        .gemm(on, &params, Output::Into(d.view_mut()))
        .unwrap();
    assert!(done.is_none());
}
