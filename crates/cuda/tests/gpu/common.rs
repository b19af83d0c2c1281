//! A device, and what tests do with one.

use brigade_cuda::{CudaDevice, Kernel, KernelSet, Launch};
use brigade_device::{
    Activation, Allocate, Buffer, DataType, DeviceExt, Error, GemmParams, Linear, MemoryType,
    Output, Queues, Stream,
};
use brigade_kernels::{PostParams, fatbin};
use cudarc::driver::CudaContext;
use parking_lot::{Mutex, MutexGuard};
use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

pub const AMPLE: Duration = Duration::from_secs(60);

/// One test of a program at a time: some load kernels or allocate by calls that synchronize, which may break others' captures.
pub static ALONE: Mutex<()> = Mutex::new(());

/// The first GPU, a stream of it, and the right to use it; `None`, after checking the explanation, where there is none.
pub fn device() -> Option<(Arc<CudaDevice>, Stream, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock();
    match CudaDevice::new(0) {
        Ok(device) => {
            let on = device.stream(0).unwrap();
            Some((device, on, alone))
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

/// Posts a flag after a while. Loaded once: loading waits for the whole GPU.
static POST: LazyLock<Kernel<PostParams>> = LazyLock::new(|| {
    let context = CudaContext::new(0).unwrap();
    let probe = KernelSet::load(&context, fatbin("probe").unwrap()).unwrap();
    probe.kernel().unwrap()
});

/// Keeps the stream busy for a while, however long others keep this thread from going on.
pub fn dawdle(device: &CudaDevice, on: &Stream) {
    let flag = bytes(device, on, 8, 0);
    let parameters = PostParams {
        flag: flag.address(),
        value: 1,
        delay_ns: 150_000_000,
    };
    let stream = device.raw_stream(on).unwrap();
    // SAFETY: the hook keeps the flag until the kernel has ended.
    unsafe { POST.launch(stream.cast(), Launch::grid(1, 1), parameters) }.unwrap();
    on.on_complete(Box::new(move |_| drop(flag))).unwrap();
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
