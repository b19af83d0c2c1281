//! A store that is where it should be; and, if that is asked for, one that is not. `run.sh memcheck` of a bundle demands that
//! compute-sanitizer finds the second, before it takes its silence about other tests for a good sign.

use crate::common::{AMPLE, device};
use brigade_cuda::{Kernel, KernelSet, Launch};
use brigade_kernels::{PostParams, fatbin};
use cudarc::driver::{CudaContext, result};

/// Where the store goes behind its memory, if this is 1.
const PLANT: &str = "BRIGADE_PLANT_FAULT";

/// Words of the memory.
const WORDS: usize = 8;

#[test]
fn a_post_lies_in_its_memory() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    let context = CudaContext::new(0).unwrap();
    let probe = KernelSet::load(&context, fatbin("probe").unwrap()).unwrap();
    let post: Kernel<PostParams> = probe.kernel().unwrap();
    context.bind_to_thread().unwrap();
    // An allocation of its own: of parts of a larger one a checker knows nothing.
    // SAFETY: a context is current; freed once, below.
    let memory = unsafe { result::malloc_sync(8 * WORDS) }.unwrap();
    let mut words = [0u64; WORDS];
    // SAFETY: as many words as were allocated.
    unsafe { result::memcpy_htod_sync(memory, &words) }.unwrap();
    let planted = std::env::var_os(PLANT).is_some_and(|asked| asked == "1");
    let word = if planted { WORDS } else { WORDS - 1 };
    let parameters = PostParams {
        flag: memory + 8 * word as u64,
        value: 7,
        delay_ns: 0,
    };
    let stream = device.raw_stream(&on).unwrap();
    // SAFETY: the last word of what was allocated. If a fault is planted, none: this is what the checker must find. The driver allocates
    // by 256 bytes or more, so that without one nothing happens.
    unsafe { post.launch(stream.cast(), Launch::grid(1, 1), parameters) }.unwrap();
    on.sync(AMPLE).unwrap();
    // SAFETY: as many words as were allocated; the kernel has ended.
    unsafe { result::memcpy_dtoh_sync(&mut words, memory) }.unwrap();
    // SAFETY: allocated above, and nothing uses it any more.
    unsafe { result::free_sync(memory) }.unwrap();
    let want = if planted { 0 } else { 7 };
    assert_eq!(words, [0, 0, 0, 0, 0, 0, 0, want]);
}
