//! What only a device that works later can get wrong: lifetimes of what is in flight, bounds of waits, graphs beside eager
//! work, and what comes from elsewhere.

use crate::common::{AMPLE, all, bytes, code, dawdle, device, field, floats, layer};
use brigade_cuda::{CudaDevice, devices};
use brigade_device::{
    Activation, Allocate, Buffer, CommConfig, DataType, Device, DeviceExt, Error, GemmParams,
    Linear, MemoryType, Output, ParallelMode, Queues,
};
use cudarc::driver::{CudaContext, result, sys};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    time::{Duration, Instant},
};

#[test]
fn waits_on_the_host_end_in_time() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    dawdle(&device, &on);
    let mark = on.record().unwrap();
    assert!(!mark.done().unwrap());
    for waited in [
        on.sync(Duration::ZERO),
        mark.sync(Duration::from_micros(100)),
    ] {
        match waited.unwrap_err() {
            Error::Backend { code, .. } => assert_eq!(code, 600),
            other => panic!("{other}"),
        }
    }
    let start = Instant::now();
    mark.sync(AMPLE).unwrap();
    on.sync(AMPLE).unwrap();
    assert!(mark.done().unwrap() && start.elapsed() < AMPLE);
}

#[test]
fn dropping_a_buffer_in_use_neither_blocks_nor_frees_it_early() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let other = device.stream(0).unwrap();
    let size = 64 << 20;
    for round in 0..8 {
        let from = bytes(&device, &on, size, round);
        let mut to = bytes(&device, &other, size, 0xFF);
        other.wait(&on.record().unwrap()).unwrap();
        dawdle(&device, &other);
        device.copy(&other, to.view_mut(), from.view()).unwrap();
        let late = other.record().unwrap();
        drop(from);
        assert!(!late.done().unwrap(), "the drop waited");
        // Memory that is free gets other bytes at once.
        let scramble: Vec<_> = (0..4).map(|_| bytes(&device, &on, size, 0xEE)).collect();
        assert!(all(&device, &other, &to, round), "round {round}");
        drop(scramble);
    }
}

#[test]
fn a_graph_keeps_what_it_needs_and_runs_beside_eager_work() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let other = device.stream(1).unwrap();
    let (x, w) = (
        floats(&device, &on, 300, 500, 1),
        floats(&device, &on, 500, 700, 2),
    );
    let new = || {
        let dims = [300, 700];
        device
            .allocate(&on, MemoryType::Device, DataType::F32, &dims)
            .unwrap()
    };
    let (mut eager, mut replayed) = (new(), new());
    layer(&device, &on, &x, &w, &mut eager);
    let want: Vec<f32> = device.download(&on, eager.view()).unwrap();
    assert!(want.iter().any(|&v| v > 0.1));

    let private = floats(&device, &on, 300, 500, 1);
    on.sync(AMPLE).unwrap();
    let mut work = || {
        layer(&device, &on, &private, &w, &mut replayed);
        Ok(())
    };
    let graph = device.capture(&on, &mut work).unwrap();
    drop(private);
    let scramble = bytes(&device, &on, 300 * 500 * 4, 0x7F);
    on.sync(AMPLE).unwrap();
    for _ in 0..50 {
        let mut poisoned = replayed.clone();
        device.fill(&other, poisoned.view_mut(), 0xFF).unwrap();
        graph.launch(&other).unwrap();
        layer(&device, &on, &x, &w, &mut eager);
        let got: Vec<f32> = device.download(&other, replayed.view()).unwrap();
        assert!(got == want, "a replay beside eager work");
        let got: Vec<f32> = device.download(&on, eager.view()).unwrap();
        assert!(got == want, "eager work beside a replay");
    }
    // The graph, and all that only it kept, goes while it runs.
    device.fill(&other, replayed.view_mut(), 0xFF).unwrap();
    dawdle(&device, &other);
    let end = graph.launch(&other).unwrap();
    drop(graph);
    assert!(!end.done().unwrap(), "the drop waited");
    let more: Vec<_> = (0..8).map(|_| bytes(&device, &on, 1 << 20, 0x7F)).collect();
    let got: Vec<f32> = device.download(&other, replayed.view()).unwrap();
    assert!(got == want, "a graph dropped in flight");
    drop((scramble, more));
}

#[test]
fn a_capture_that_fails_or_panics_leaves_the_stream_usable() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let mut a = bytes(&device, &on, 1000, 1);
    let failed = device.capture(&on, &mut || {
        device.fill(&on, a.view_mut(), 2)?;
        Err(Error::Closed)
    });
    assert!(matches!(failed.err().unwrap(), Error::Closed));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        device
            .capture(&on, &mut || panic!("within a capture"))
            .map(drop)
    }));
    assert!(panicked.is_err() && !on.capturing());
    // What dies during a capture is freed after it.
    let held = || device.memory_status().unwrap().held_bytes;
    let before = held();
    let mut doomed = Some(bytes(&device, &on, 5000, 3));
    let graph = device.capture(&on, &mut || {
        doomed = None;
        device.fill(&on, a.view_mut(), 4)
    });
    assert_eq!(held(), before);
    let graph = graph.unwrap();
    assert!(all(&device, &on, &a, 1), "a capture runs nothing");
    graph.launch(&on).unwrap();
    assert!(all(&device, &on, &a, 4));
    let nested = device.capture(&on, &mut || graph.launch(&on).map(drop));
    assert_eq!(code(nested.err().unwrap()), "not-capturable");
}

/// Says when it dies.
struct Foreign {
    address: u64,
    context: Arc<CudaContext>,
    gone: Arc<AtomicBool>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: allocated in the test below, freed once.
        unsafe { result::free_sync(self.address) }.unwrap();
        self.gone.store(true, Ordering::SeqCst);
    }
}

#[test]
fn memory_of_others_lives_as_long_as_the_work_that_uses_it() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let size = 1 << 20;
    // SAFETY: a context is current; `Foreign` frees it.
    let address = unsafe { result::malloc_sync(size) }.unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let owner = Arc::new(Foreign {
        address,
        context,
        gone: Arc::clone(&gone),
    });
    // SAFETY: as long as the owner lives, and used by nobody else.
    let adopted =
        unsafe { Buffer::adopt(address, MemoryType::Device, DataType::U8, &[size], owner) };
    let mut adopted = adopted.unwrap();
    let mut to = bytes(&device, &on, size, 0);
    dawdle(&device, &on);
    device.fill(&on, adopted.view_mut(), 9).unwrap();
    device.copy(&on, to.view_mut(), adopted.view()).unwrap();
    drop(adopted);
    assert!(!gone.load(Ordering::SeqCst), "freed while in use");
    on.sync(AMPLE).unwrap();
    assert!(gone.load(Ordering::SeqCst), "kept after its last use");
    assert!(all(&device, &on, &to, 9));
}

#[test]
fn streams_of_others_are_used_in_their_order_and_their_captures_are_seen() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    let context = CudaContext::new(0).unwrap();
    let theirs = context.new_stream().unwrap();
    let raw = theirs.cu_stream();
    // SAFETY: a stream of this GPU's primary context, kept by its owner.
    let on = unsafe { device.adopt_stream(raw.cast(), Arc::new(theirs)) }.unwrap();
    assert_eq!(device.raw_stream(&on).unwrap(), raw.cast());
    let mut a = bytes(&device, &on, 4096, 5);
    assert!(all(&device, &on, &a, 5) && !on.capturing());

    let each = context.per_thread_stream();
    let raw_each = each.cu_stream().cast();
    // SAFETY: as above.
    let refused = unsafe { device.adopt_stream(raw_each, Arc::new(each)) };
    assert_eq!(field(refused.unwrap_err()), "raw");

    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    context.bind_to_thread().unwrap();
    // SAFETY: the stream is alive, and nobody else captures on it.
    unsafe { result::stream::begin_capture(raw, mode) }.unwrap();
    assert!(on.capturing());
    device.fill(&on, a.view_mut(), 6).unwrap();
    let refused = device.read(&on, a.view(), &mut [0; 4096]);
    assert_eq!(code(refused.unwrap_err()), "not-capturable");
    // SAFETY: begun above; the graph is run and destroyed once.
    unsafe {
        let graph = result::stream::end_capture(raw).unwrap();
        assert!(all(&device, &on, &a, 5));
        let flags = sys::CUgraphInstantiate_flags_enum(0);
        let run = result::graph::instantiate(graph, flags).unwrap();
        result::graph::launch(run, raw).unwrap();
        assert!(all(&device, &on, &a, 6));
        result::graph::exec_destroy(run).unwrap();
        result::graph::destroy(graph).unwrap();
    }
}

#[test]
fn hooks_may_drop_what_they_hold_and_outlive_their_device() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let (tell, heard) = channel();
    let a = bytes(&device, &on, 1 << 20, 1);
    dawdle(&device, &on);
    let last = Arc::clone(&device);
    on.on_complete(Box::new(move |result| {
        drop((a, last));
        tell.send(result.is_ok()).unwrap();
    }))
    .unwrap();
    on.on_complete(Box::new(|_| panic!("a hook that panics")))
        .unwrap();
    let (again, after) = channel();
    on.on_complete(Box::new(move |_| again.send(()).unwrap()))
        .unwrap();
    drop((device, on));
    assert!(heard.recv_timeout(AMPLE).unwrap());
    after.recv_timeout(AMPLE).unwrap();
}

#[test]
fn products_show_nans_repeat_their_bits_and_keep_to_a_cap() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let (x, w) = (
        floats(&device, &on, 64, 256, 3),
        floats(&device, &on, 256, 128, 4),
    );
    let run = |activation, sm_cap| {
        let params = GemmParams {
            activation,
            sm_cap,
            ..GemmParams::new(&x, &w)
        };
        let d = device
            .gemm(&on, &params, Output::Allocate(DataType::BF16))
            .unwrap();
        let d = d.unwrap();
        let mut raw = vec![0; d.bytes()];
        device.read(&on, d.view(), &mut raw).unwrap();
        raw
    };
    assert_eq!(run(Activation::None, None), run(Activation::None, None));
    assert_eq!(run(Activation::None, Some(16)).len(), 64 * 128 * 2);
    let row = [f32::NAN, -0.0, -1.0, 2.0];
    let from = device.upload(&on, &row, &[1, 4]).unwrap();
    let output = Output::Allocate(DataType::F32);
    let d = device
        .bias_activation(&on, from.view(), None, Activation::Relu, output)
        .unwrap();
    let got: Vec<f32> = device.download(&on, d.unwrap().view()).unwrap();
    assert!(got[0].is_nan() && got[1..] == [0.0, 0.0, 2.0], "{got:?}");
}

#[test]
fn what_a_kernel_cannot_reach_is_refused_by_name() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let new = |memory, dims: &[usize]| device.allocate(&on, memory, DataType::F32, dims).unwrap();
    let (host, w) = (
        new(MemoryType::Host, &[4, 4]),
        new(MemoryType::Host, &[4, 4]),
    );
    let output = Output::Allocate(DataType::F32);
    let refused = device.gemm(&on, &GemmParams::new(&host, &w), output);
    assert_eq!(field(refused.unwrap_err()), "a.memory");
    let mut other = host.clone();
    assert_eq!(
        field(device.fill(&on, other.view_mut(), 1).unwrap_err()),
        "to.memory"
    );
    let mut pinned = new(MemoryType::HostPinned, &[4, 4]);
    device.fill(&on, pinned.view_mut(), 0).unwrap();
    let values = [1.5f32; 16];
    device
        .write(&on, pinned.view_mut(), bytemuck::cast_slice(&values))
        .unwrap();
    let output = Output::Allocate(DataType::F32);
    let d = device
        .gemm(&on, &GemmParams::new(&pinned, &pinned), output)
        .unwrap()
        .unwrap();
    let got: Vec<f32> = device.download(&on, d.view()).unwrap();
    assert_eq!(got, [9.0; 16]);
    assert_eq!(device.info().ordinal, 0);
}

#[test]
fn rows_in_a_communicator_of_another_gpu_are_out_of_reach() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    if devices().unwrap().len() < 2 {
        return;
    }
    let (other, boot) = (CudaDevice::new(1).unwrap(), brigade_group::threads(1));
    let there = other.stream(0).unwrap();
    let config = CommConfig::new(ParallelMode::Tp);
    let comm = Arc::clone(&device).join(&boot[0], &config).unwrap();
    let mut lease = comm.lease(&on).unwrap();
    let mut own = lease.own_chunk(&[2], 4, DataType::F32).unwrap();
    device.fill(&on, own.view_mut(), 0x3F).unwrap();
    let rows = own.view_mut().as_view().retain();
    let new = |device: &CudaDevice, on| {
        let made = device.allocate(on, MemoryType::Device, DataType::F32, &[4, 2]);
        made.unwrap()
    };
    let (mut near, mut far) = (new(&device, &on), new(&other, &there));
    device.transpose(&on, near.view_mut(), rows.view()).unwrap();
    let refused = other.transpose(&there, far.view_mut(), rows.view());
    assert_eq!(field(refused.unwrap_err()), "from.memory");
    let near: Vec<f32> = device.download(&on, near.view()).unwrap();
    assert_eq!(near, [f32::from_bits(0x3F3F_3F3F); 8]);
}
