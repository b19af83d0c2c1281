//! The contracts of operations and layers on GPUs: ranks with a GPU each, as many as there are, and ranks that share the first one. Where
//! there is none, the one trial says what is missing; with BRIGADE_TEST_DEVICE=cuda a GPU must be there.
//!
//! Ranks that share a GPU want CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32, and ranks with a GPU each do not want the
//! first: trials whose environment this is not are ignored.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic on what is not as promised"
)]

#[path = "../contracts/mod.rs"]
mod contracts;

use brigade::{Error, ParallelMode, cuda};
use brigade_candle::{AllGather, AllReduce, Parallel, ReduceScatter, brigade, brigade_error};
use candle_core::{DType, Device, Result, Tensor};
use contracts::{
    PATIENCE, Places, config,
    oracle::{bits, random},
};
use libtest_mimic::{Arguments, Failed, Trial};
use std::{
    env,
    ops::RangeInclusive,
    process::ExitCode,
    sync::{Arc, Mutex},
};

/// How a trial ends.
type Ended = std::result::Result<(), Failed>;

/// Ranks of the largest groups.
const LARGEST: usize = 4;

/// Ranks with tensors on GPUs. Their candle devices are opened once for all trials, each with a stream of its own: what a candle device
/// has loaded is its own, too.
struct Gpus {
    name: &'static str,
    sizes: RangeInclusive<usize>,
    /// Whether all are on the first.
    shares: bool,
    opened: Mutex<Vec<Device>>,
}

impl Places for Gpus {
    fn name(&self) -> &'static str {
        self.name
    }

    fn sizes(&self) -> RangeInclusive<usize> {
        self.sizes.clone()
    }

    fn places(&self, size: usize) -> Result<Vec<Device>> {
        let mut opened = self.opened.lock().unwrap();
        for rank in opened.len()..size {
            let place = Device::new_cuda_with_stream(if self.shares { 0 } else { rank })?;
            if self.shares && rank == 0 {
                part_memory();
            }
            load(&place)?;
            opened.push(place);
        }
        Ok(opened[..size].to_vec())
    }

    fn shares(&self) -> bool {
        self.shares
    }
}

/// Keeps candle's streams on the first GPU apart: its memory comes from the driver's pool, which gives a stream what another one has freed by making it wait
/// for that one. Where ranks share the GPU, that can be one which waits for this rank.
fn part_memory() {
    use candle_core::cuda_backend::cudarc::driver::sys;
    let reuse = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    let (mut pool, mut no) = (std::ptr::null_mut(), 0i32);
    // SAFETY: the device exists and its context too, the pool is written before it is read, and the attribute is an int.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&raw mut pool, 0)
            .result()
            .unwrap();
        let no = (&raw mut no).cast();
        sys::cuMemPoolSetAttribute(pool, reuse, no)
            .result()
            .unwrap();
    }
}

/// Has candle load its kernels, before anybody waits on the GPU: one of each module that layers and contracts use, and cuBLAS.
fn load(place: &Device) -> Result<()> {
    let x = Tensor::ones((2, 2), DType::F32, place)?.to_dtype(DType::F64)?;
    let sum = (x.t()?.contiguous()? + (&x * 2.0)?)?;
    let most = Tensor::cat(&[&sum, &x], 1)?.max_keepdim(1)?;
    let there = sum.broadcast_eq(&most)?;
    let rows = sum.index_select(&Tensor::new(&[1u32, 0], place)?, 0)?;
    there.where_cond(&x, &rows.matmul(&x)?.silu()?)?;
    place.synchronize()
}

/// Whether a variable of the environment says so.
fn says(name: &str, value: &str) -> bool {
    env::var(name).is_ok_and(|said| said.eq_ignore_ascii_case(value))
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // They have the same GPUs.
    args.test_threads.get_or_insert(1);
    let found = cuda::devices().and_then(|gpus| {
        cuda::CudaDevice::new(0)?;
        Ok(gpus.len())
    });
    let trials = match found {
        Ok(gpus) => on(gpus),
        Err(missing) => vec![Trial::test("cuda/missing", move || explains(&missing))],
    };
    libtest_mimic::run(&args, trials).exit_code()
}

/// All trials on so many GPUs.
fn on(gpus: usize) -> Vec<Trial> {
    let eager = says("CUDA_MODULE_LOADING", "EAGER");
    let queues = says("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    let group = |name, sizes, shares| {
        contracts::trials(Arc::new(Gpus {
            name,
            sizes,
            shares,
            opened: Mutex::default(),
        }))
    };
    let alone = group("cuda", 1..=1, false).into_iter();
    let alone = alone.chain([
        Trial::test(
            "cuda/w1/tensors_of_another_stream_are_refused",
            tensors_of_another_stream_are_refused,
        ),
        Trial::test(
            "cuda/w1/a_graph_keeps_what_calls_were_lent",
            a_graph_keeps_what_calls_were_lent,
        ),
    ]);
    let own = group("cuda", 2..=gpus.min(LARGEST), false).into_iter();
    let shared = group("shared", 2..=LARGEST, true).into_iter();
    alone
        .chain(own.map(|trial| trial.with_ignored_flag(eager)))
        .chain(shared.map(|trial| trial.with_ignored_flag(!(eager && queues))))
        .collect()
}

/// What is missing is what opening a GPU says.
fn explains(missing: &cuda::Missing) -> Ended {
    if says("BRIGADE_TEST_DEVICE", "cuda") {
        return Err(format!("a GPU is demanded: {missing}").into());
    }
    match cuda::CudaDevice::new(0).map(drop).map_err(Error::from) {
        Err(Error::Unsupported(reason))
            if reason.code == missing.code() && reason.remedy == missing.remedy() =>
        {
            Ok(())
        }
        other => Err(format!("{other:?} instead of {missing}").into()),
    }
}

/// Another candle device of the same GPU works on another stream, behind which nothing of this rank's stands.
fn tensors_of_another_stream_are_refused() -> Ended {
    let [place, other] = [(); 2].map(|()| Device::new_cuda_with_stream(0).unwrap());
    let boot = brigade::group::threads(1).remove(0);
    let parallel = Parallel::join(&place, &boot, &config(ParallelMode::Tp))?;
    let x = Tensor::ones(4, DType::F32, &other)?;
    let at_home = x.to_device(&Device::Cpu)?;
    let (sum, rows) = (AllReduce::sum(&parallel), AllGather::even(&parallel));
    let refused = [
        parallel.lend(&x).err(),
        parallel.all_reduce(&x).err(),
        parallel.all_gather(&x, 0, None).err(),
        parallel.reduce_scatter(&x, None).err(),
        // Operations are not told whose tensors they have.
        x.apply_op1_no_bwd(&sum).err(),
        x.inplace_op1(&sum).err(),
        x.apply_op1_no_bwd(&rows).err(),
        x.apply_op1_no_bwd(&ReduceScatter::sum(&parallel)).err(),
        at_home.apply_op1_no_bwd(&sum).err(),
        at_home.inplace_op1(&sum).err(),
    ];
    for refused in refused {
        let refused = refused.expect("another stream's");
        let Some(Error::Invalid { field, .. }) = brigade_error(&refused) else {
            panic!("{refused}");
        };
        assert_eq!(*field, "device");
    }
    parallel.all_reduce(&at_home.to_device(&place)?)?;
    Ok(())
}

/// A tensor that is dropped behind the capture of a call leaves its memory to the graph, and not to what is allocated next.
fn a_graph_keeps_what_calls_were_lent() -> Ended {
    let place = Device::new_cuda_with_stream(0)?;
    if let Device::Cuda(gpu) = &place {
        // A capture cannot wait for events from before it.
        // SAFETY: all tensors of this device are used on its stream, which orders what is done with them.
        unsafe { gpu.disable_event_tracking() };
    }
    let boot = brigade::group::threads(1).remove(0);
    let parallel = Parallel::join(&place, &boot, &config(ParallelMode::Tp))?;
    let calls: [fn(&Parallel, &Tensor) -> Result<Tensor>; 3] = [
        |p, x| p.all_reduce(x),
        |p, x| p.all_gather(x, 0, None),
        |p, x| p.reduce_scatter(x, None),
    ];
    for (number, call) in calls.into_iter().enumerate() {
        let x = random(&[1024], DType::F32);
        let (want, x) = (bits(&x), x.to_device(&place)?);
        // Loads what a capture cannot load.
        call(&parallel, &x)?;
        let mut made = None;
        let graph = parallel.device().capture(parallel.stream(), &mut || {
            made = Some(call(&parallel, &x));
            Ok(())
        })?;
        drop(x);
        let others = (0..8).map(|_| random(&[1024], DType::F32).to_device(&place));
        let _others = others.collect::<Result<Vec<_>>>()?;
        graph.launch(parallel.stream())?;
        parallel.sync(PATIENCE)?;
        assert_eq!(bits(&made.expect("a call")?), want, "call {number}");
    }
    Ok(())
}
