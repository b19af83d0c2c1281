//! Captures beside what other threads do on the same GPU.

use crate::common::{AMPLE, all, bytes, dawdle, device, floats, layer};
use brigade_cuda::CudaDevice;
use brigade_device::{
    Allocate, Buffer, CommConfig, DataType, Device, Error, GemmParams, Linear, Lora,
    LoraLinearParams, LoraRun, MemoryType, Output, ParallelMode, Queues, Stream,
};
use cudarc::driver::{result, sys};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long each pair runs side by side.
const TOGETHER: Duration = Duration::from_millis(700);

/// Captures again and again while another thread acts.
fn beside(act: impl Fn(&Arc<CudaDevice>, usize) + Send + Sync) {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let mut a = bytes(&device, &on, 1000, 1);
    let (stop, mut captures) = (AtomicBool::new(false), 0);
    let other = Arc::clone(&device);
    let (failure, acted) = std::thread::scope(|s| {
        let other = s.spawn(|| {
            let mut acted = 0;
            while !stop.load(Ordering::SeqCst) {
                act(&other, acted);
                acted += 1;
            }
            acted
        });
        let end = Instant::now() + TOGETHER;
        let mut failure = None;
        while Instant::now() < end && failure.is_none() {
            let graph = device.capture(&on, &mut || {
                (0..20).try_for_each(|i| device.fill(&on, a.view_mut(), i))
            });
            captures += 1;
            failure = graph.err();
        }
        stop.store(true, Ordering::SeqCst);
        (failure, other.join().unwrap())
    });
    if let Some(error) = failure {
        panic!("capture {captures}, beside {acted} acts: {error}");
    }
}

#[test]
fn streams_and_hooks() {
    beside(|device, _| {
        let on = device.stream(0).unwrap();
        on.on_complete(Box::new(drop)).unwrap();
    });
}

#[test]
fn memory_of_all_kinds() {
    beside(|device, _| {
        let on = device.stream(0).unwrap();
        for memory in [MemoryType::Device, MemoryType::HostPinned] {
            let new = device.allocate(&on, memory, DataType::U8, &[1 << 16]);
            device.fill(&on, new.unwrap().view_mut(), 1).unwrap();
        }
        let a = bytes(device, &on, 1 << 10, 1);
        assert!(all(device, &on, &a, 1));
        on.sync(AMPLE).unwrap();
    });
}

#[test]
fn other_captures() {
    beside(|device, _| {
        let on = device.stream(0).unwrap();
        let mut a = bytes(device, &on, 1 << 10, 1);
        let graph = device.capture(&on, &mut || device.fill(&on, a.view_mut(), 2));
        graph.unwrap().launch(&on).unwrap();
    });
}

#[test]
fn products_of_new_shapes() {
    beside(|device, i| {
        let (m, n, k) = (1 + i % 60, 7 + i % 13, 9 + i % 31);
        let on = device.stream(0).unwrap();
        let (x, w) = (floats(device, &on, m, k, 1), floats(device, &on, k, n, 2));
        let out = device.allocate(&on, MemoryType::Device, DataType::F32, &[m, n]);
        layer(device, &on, &x, &w, &mut out.unwrap());
    });
}

#[test]
fn devices_that_come_and_go() {
    beside(|_, _| drop(CudaDevice::new(0).unwrap()));
}

/// Also in the midst of a capture, a reset waits for what was enqueued before that and still runs.
#[test]
fn a_reset_waits_for_work_before_the_capture() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let config = CommConfig::new(ParallelMode::Tp);
    let boot = &brigade_group::threads(1)[0];
    let comm = Arc::clone(&device).join(boot, &config).unwrap();
    comm.lease(&on).unwrap().barrier().unwrap();
    let mut a = bytes(&device, &on, 1000, 1);
    dawdle(&device, &on);
    let mut early = None;
    let graph = device.capture(&on, &mut || {
        early = Some(comm.reset(Duration::from_millis(1)));
        device.fill(&on, a.view_mut(), 2)
    });
    graph.unwrap();
    let early = early.unwrap();
    assert!(
        matches!(early, Err(Error::Group { step: "reset", .. })),
        "{early:?}"
    );
    comm.reset(AMPLE).unwrap();
}

/// Nodes of a graph of one call.
fn nodes(device: &CudaDevice, on: &Stream, call: &mut dyn FnMut()) -> usize {
    let raw = device.raw_stream(on).unwrap().cast();
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    let mut count = 0;
    // SAFETY: the stream is alive, and nobody else captures on it; the graph is destroyed once, and never run.
    unsafe {
        result::stream::begin_capture(raw, mode).unwrap();
        call();
        let graph = result::stream::end_capture(raw).unwrap();
        let counted = sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count);
        counted.result().unwrap();
        result::graph::destroy(graph).unwrap();
    }
    count
}

/// So many runs of a row each, and some without an adapter, take as many launches as one run of all rows.
#[test]
fn many_adapters_take_no_more_launches_than_three() {
    const ROWS: usize = 63;
    let Some((device, on, _alone)) = device() else {
        return;
    };
    for dtype in [DataType::BF16, DataType::F32] {
        let of = |rows, columns, seed| {
            let from = floats(&device, &on, rows, columns, seed);
            let to = device.allocate(&on, MemoryType::Device, dtype, &[rows, columns]);
            let mut to = to.unwrap();
            device.convert(&on, to.view_mut(), from.view()).unwrap();
            to
        };
        let (k, n, width) = (128, 256, 16);
        let (x, w) = (of(ROWS, k, 1), of(k, n, 2));
        let factors: Vec<[Buffer; 2]> = (0..ROWS as u32)
            .map(|i| [of(k, width, 2 * i), of(width, n, 2 * i + 1)])
            .collect();
        let counted = |each: usize| {
            let runs: Vec<_> = (0..ROWS / each)
                .map(|i| LoraRun {
                    rows: each,
                    adapter: (i % 4 != 3).then(|| Lora {
                        a: factors[i][0].view(),
                        b: factors[i][1].view(),
                        scale: 0.5,
                    }),
                })
                .collect();
            let gemm = GemmParams::new(&x, &w);
            let params = LoraLinearParams { gemm, runs: &runs };
            let mut d = of(ROWS, n, 3);
            let mut call = || {
                let output = Output::Into(d.view_mut());
                assert!(device.lora_linear(&on, &params, output).unwrap().is_none());
            };
            // What is loaded and chosen is by then.
            call();
            nodes(&device, &on, &mut call)
        };
        assert_eq!(counted(1), counted(ROWS / 3), "{dtype}");
    }
}
