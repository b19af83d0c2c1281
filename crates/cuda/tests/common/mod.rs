//! A device, and what tests do with one.
#![allow(dead_code, reason = "each test program uses a part")]

use brigade_cuda::{CudaDevice, Kernel, KernelSet, Launch};
use brigade_device::{
    Activation, Allocate, Buffer, DataType, Device, DeviceExt, Error, GemmParams, Linear,
    MemoryType, Output, Queues, Stream,
};
use brigade_kernels::{PostParams, fatbin};
use cudarc::driver::CudaContext;
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

/// Keeps the stream busy for a while, however long others keep this thread from going on.
pub fn dawdle(device: &CudaDevice, on: &Stream) {
    let context = CudaContext::new(device.info().ordinal as usize).unwrap();
    let probe = KernelSet::load(&context, fatbin("probe").unwrap()).unwrap();
    let post: Kernel<PostParams> = probe.kernel().unwrap();
    let flag = bytes(device, on, 8, 0);
    let parameters = PostParams {
        flag: flag.address(),
        value: 1,
        delay_ns: 150_000_000,
    };
    let stream = device.raw_stream(on).unwrap();
    // SAFETY: the hook keeps the flag, and the kernel loaded, until it has ended.
    unsafe { post.launch(stream.cast(), Launch::grid(1, 1), parameters) }.unwrap();
    on.on_complete(Box::new(move |_| drop((flag, post))))
        .unwrap();
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
