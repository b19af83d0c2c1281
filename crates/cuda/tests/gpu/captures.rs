//! Captures beside what other threads do on the same GPU.

use crate::common::{AMPLE, all, bytes, device, floats, layer};
use brigade_cuda::CudaDevice;
use brigade_device::{Allocate, DataType, MemoryType, Queues};
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
