//! Loading a fatbin and launching what is in it.

use crate::{Missing, driver::refused};
use brigade_kernels::{Fatbin, Parameters};
use cudarc::driver::{
    CudaContext,
    result::{launch_kernel, module},
    sys,
};
use std::{ffi::CString, marker::PhantomData, sync::Arc};

/// One fatbin on one GPU. Load before the first wait is enqueued: loading synchronizes the device.
#[derive(Debug)]
pub struct KernelSet {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    file: &'static str,
}

// SAFETY: a CUmodule belongs to its context, not to a thread, and the driver locks what it changes.
unsafe impl Send for KernelSet {}
// SAFETY: as above; nothing here changes through a shared reference.
unsafe impl Sync for KernelSet {}

/// One kernel, with the parameter struct it takes.
#[derive(Clone, Debug)]
pub struct Kernel<P> {
    set: Arc<KernelSet>,
    function: sys::CUfunction,
    parameters: PhantomData<fn(P)>,
}

// SAFETY: a CUfunction is a handle into its module, which `set` keeps loaded.
unsafe impl<P> Send for Kernel<P> {}
// SAFETY: as above.
unsafe impl<P> Sync for Kernel<P> {}

impl KernelSet {
    /// Loads a fatbin.
    ///
    /// # Errors
    /// [`Missing::Refused`] if the driver finds nothing for this GPU in it.
    pub fn load(context: &Arc<CudaContext>, fatbin: &'static Fatbin) -> Result<Arc<Self>, Missing> {
        bind(context)?;
        // SAFETY: the bytes are a whole fatbin made by nvcc, aligned to 16, and live for ever.
        let module = unsafe { module::load_data(fatbin.bytes.as_ptr().cast()) }
            .map_err(refused("cuModuleLoadData"))?;
        Ok(Arc::new(Self {
            context: context.clone(),
            module,
            file: fatbin.name,
        }))
    }

    /// The kernel that takes `P`.
    ///
    /// # Errors
    /// [`Missing::Kernels`] if it is in another file.
    pub fn kernel<P: Parameters>(self: &Arc<Self>) -> Result<Kernel<P>, Missing> {
        let elsewhere = || Missing::Kernels {
            why: format!("{} is not in {}", P::KERNEL, self.file),
        };
        if P::FILE != self.file {
            return Err(elsewhere());
        }
        bind(&self.context)?;
        let name = CString::new(P::KERNEL).map_err(|_| elsewhere())?;
        // SAFETY: `module` is loaded as long as `self` lives.
        let function = unsafe { module::get_function(self.module, name) }
            .map_err(refused("cuModuleGetFunction"))?;
        // Without this the driver loads the code at the first launch, and synchronizes the device to do so.
        // SAFETY: as above.
        unsafe { sys::cuFuncLoad(function) }
            .result()
            .map_err(refused("cuFuncLoad"))?;
        Ok(Kernel {
            set: self.clone(),
            function,
            parameters: PhantomData,
        })
    }
}

impl Drop for KernelSet {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: loaded once, unloaded once; kernels hold an `Arc` of this. A failure leaves it loaded, which harms nobody.
            let _ = unsafe { module::unload(self.module) };
        }
    }
}

impl<P: Parameters> Kernel<P> {
    /// Enqueues the kernel.
    ///
    /// # Errors
    /// [`Missing::Refused`].
    ///
    /// # Safety
    /// Every address in `parameters` must be valid for what the kernel does with it until the kernel has ended, and `stream`
    /// must be of the context that the kernel was loaded in.
    pub unsafe fn launch(
        &self,
        stream: sys::CUstream,
        blocks: u32,
        threads: u32,
        mut parameters: P,
    ) -> Result<(), Missing> {
        bind(&self.set.context)?;
        let pointer = std::ptr::from_mut(&mut parameters).cast();
        // SAFETY: the driver copies the struct during the call; `P` is this kernel's own struct, with offsets that nvcc asserted;
        // the rest is the caller's promise.
        unsafe {
            launch_kernel(
                self.function,
                (blocks, 1, 1),
                (threads, 1, 1),
                0,
                stream,
                &mut [pointer],
            )
        }
        .map_err(refused("cuLaunchKernel"))
    }
}

fn bind(context: &CudaContext) -> Result<(), Missing> {
    context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))
}
