//! Symmetric memory, launches of every shape, and places for blocks that wait.

use crate::common::{AMPLE, bytes, code, dawdle, device, field};
use brigade_cuda::{CudaDevice, Kernel, KernelSet, Launch, Pages, Symmetric, devices, link};
use brigade_device::{Allocate, Buffer, DataType, Device, DeviceExt, Stream};
use brigade_kernels::{FillParams, WaitParams, fatbin};
use cudarc::driver::CudaContext;
use std::sync::Arc;

/// Bytes of one part, as a buffer.
fn part(symmetric: &Arc<Symmetric>, part: usize, offset: usize, count: usize) -> Buffer {
    // SAFETY: tests use a part from one stream at a time.
    unsafe { symmetric.buffer(part, offset, DataType::U8, &[count]) }.unwrap()
}

fn read(device: &CudaDevice, on: &Stream, from: &Buffer) -> Vec<u8> {
    device.download(on, from.view()).unwrap()
}

#[test]
fn parts_lie_side_by_side_and_are_reached_by_base_and_stride() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let grain = Pages::granularity(&device).unwrap();
    let pages: Vec<_> = (0..3).map(|_| Pages::new(&device, 1000).unwrap()).collect();
    assert!(pages.iter().all(|p| p.bytes() == grain));
    let symmetric = Symmetric::map(&pages, &[&device]).unwrap();
    assert_eq!((symmetric.stride(), symmetric.parts()), (grain, 3));
    for rank in 0..3 {
        let mut own = part(&symmetric, rank, 16, 100);
        assert_eq!(own.address(), symmetric.base() + (rank * grain + 16) as u64);
        device.fill(&on, own.view_mut(), rank as u8 + 1).unwrap();
    }
    for rank in 0..3 {
        let own = part(&symmetric, rank, 16, 100);
        assert_eq!(read(&device, &on, &own), vec![rank as u8 + 1; 100]);
    }
    // The same memory at other addresses.
    let again = Symmetric::map(&pages[1..2], &[&device]).unwrap();
    assert_ne!(again.base(), symmetric.base());
    assert_eq!(read(&device, &on, &part(&again, 0, 16, 100)), vec![2; 100]);
}

#[cfg(unix)]
#[test]
fn memory_travels_as_a_descriptor() {
    use std::os::fd::AsFd;
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let pages = Pages::new(&device, 1 << 20).unwrap();
    let mine = Symmetric::map(std::slice::from_ref(&pages), &[&device]).unwrap();
    device
        .fill(&on, part(&mine, 0, 0, 4096).view_mut(), 0x5A)
        .unwrap();
    on.sync(AMPLE).unwrap();
    let fd = pages.export().unwrap();
    let theirs = Pages::import(&device, fd.as_fd(), pages.bytes()).unwrap();
    let theirs = Symmetric::map(&[theirs], &[&device]).unwrap();
    // The memory outlives whoever made it.
    drop((fd, pages, mine));
    assert_eq!(
        read(&device, &on, &part(&theirs, 0, 0, 4096)),
        vec![0x5A; 4096]
    );
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(Pages::import(&device, file.as_fd(), 2 << 20).is_err());
}

#[test]
fn a_mapping_lives_as_long_as_the_work_that_uses_it() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let pages = Pages::new(&device, 4 << 20).unwrap();
    let symmetric = Symmetric::map(&[pages], &[&device]).unwrap();
    let mut to = bytes(&device, &on, 4 << 20, 0);
    dawdle(&device, &on);
    let mut from = part(&symmetric, 0, 0, 4 << 20);
    drop(symmetric);
    device.fill(&on, from.view_mut(), 7).unwrap();
    device.copy(&on, to.view_mut(), from.view()).unwrap();
    drop(from);
    assert!(read(&device, &on, &to).iter().all(|&x| x == 7));
}

#[test]
fn what_cannot_be_mapped_is_refused_by_name() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    assert_eq!(field(Pages::new(&device, 0).unwrap_err()), "bytes");
    assert_eq!(field(Symmetric::map(&[], &[&device]).unwrap_err()), "parts");
    let sizes = [1, 5 << 20].map(|bytes| Pages::new(&device, bytes).unwrap());
    assert_eq!(
        field(Symmetric::map(&sizes, &[&device]).unwrap_err()),
        "parts.bytes"
    );
    let symmetric = Symmetric::map(&sizes[..1], &[&device]).unwrap();
    for (rank, offset, count) in [
        (1, 0, 1),
        (0, symmetric.stride(), 1),
        (0, 1, symmetric.stride()),
    ] {
        // SAFETY: refused.
        let refused = unsafe { symmetric.buffer(rank, offset, DataType::U8, &[count]) };
        assert_eq!(field(refused.unwrap_err()), "shape");
    }
    // SAFETY: refused.
    let unaligned = unsafe { symmetric.buffer(0, 2, DataType::F32, &[1]) };
    assert_eq!(field(unaligned.unwrap_err()), "address");
}

#[test]
fn every_gpu_of_the_host_is_mapped_where_links_allow() {
    let Some((first, on, _alone)) = device() else {
        return;
    };
    let all: Vec<_> = (0..devices().unwrap().len())
        .map(|i| CudaDevice::new(i).unwrap())
        .collect();
    let links: Vec<_> = (0..all.len()).map(|to| link(0, to).unwrap()).collect();
    assert!(links[0].access && links[0].native_atomics);
    assert!(link(0, 1000).is_err());
    let near: Vec<_> = all
        .iter()
        .zip(&links)
        .filter(|(_, l)| l.access)
        .map(|(d, _)| d)
        .collect();
    let pages: Vec<_> = near
        .iter()
        .map(|d| Pages::new(d, 1 << 20).unwrap())
        .collect();
    let devices: Vec<&CudaDevice> = near.iter().map(|d| &***d).collect();
    let symmetric = Symmetric::map(&pages, &devices).unwrap();
    for rank in 0..symmetric.parts() {
        let mut own = part(&symmetric, rank, 0, 1 << 20);
        first.fill(&on, own.view_mut(), rank as u8 + 3).unwrap();
        let got = read(&first, &on, &part(&symmetric, rank, 0, 1 << 20));
        assert!(got.iter().all(|&x| x == rank as u8 + 3), "rank {rank}");
    }
}

#[test]
fn launches_of_every_shape_do_the_same() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let context = CudaContext::new(0).unwrap();
    let set = KernelSet::load(&context, fatbin("fill").unwrap()).unwrap();
    let kernel: Kernel<FillParams> = set.kernel().unwrap();
    let plain = Launch::grid(8, 256);
    let mut shapes = vec![
        plain,
        Launch {
            cooperative: true,
            ..plain
        },
        Launch {
            shared_bytes: 4096,
            ..plain
        },
    ];
    if devices().unwrap()[0].capability >= (9, 0) {
        shapes.push(Launch {
            cluster: 2,
            ..plain
        });
        shapes.push(Launch {
            programmatic: true,
            ..plain
        });
    }
    for (i, shape) in shapes.into_iter().enumerate() {
        let to = bytes(&device, &on, 100_003, 0);
        let parameters = FillParams {
            out: to.address(),
            bytes: 100_003,
            pattern: 0x0101_0101_0101_0101 * (i as u64 + 1),
        };
        let stream = device.raw_stream(&on).unwrap();
        // SAFETY: the buffer is this long, and read back below.
        unsafe { kernel.launch(stream.cast(), shape, parameters) }.unwrap();
        let got = read(&device, &on, &to);
        assert!(got.iter().all(|&x| usize::from(x) == i + 1), "{shape:?}");
    }
    let refused = Launch {
        threads: 5000,
        ..plain
    };
    let parameters = FillParams::default();
    let stream = device.raw_stream(&on).unwrap();
    // SAFETY: nothing is written.
    let refused = unsafe { kernel.launch(stream.cast(), refused, parameters) };
    assert_eq!(refused.unwrap_err().code(), "cuda_call_refused");
}

#[test]
fn blocks_that_wait_have_places_or_a_reason() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    let context = CudaContext::new(0).unwrap();
    let set = KernelSet::load(&context, fatbin("probe").unwrap()).unwrap();
    let kernel: Kernel<WaitParams> = set.kernel().unwrap();
    let threads = 512;
    let per_sm = kernel.resident_per_sm(Launch::grid(1, threads)).unwrap();
    let places = per_sm * u32::from(device.info().sms);
    assert!(places >= u32::from(device.info().sms));
    let reserve = |blocks| device.reserve_spinning(&kernel, Launch::grid(blocks, threads));
    let half = reserve(places / 2).unwrap();
    let other = CudaDevice::new(0).unwrap();
    let too_many = other.reserve_spinning(&kernel, Launch::grid(places, threads));
    assert_eq!(code(too_many.map(drop).unwrap_err()), "cuda-residency");
    drop(half);
    assert!(reserve(places).is_ok());
}
