//! Loading a fatbin and launching what is in it.

use crate::{Missing, driver::refused};
use brigade_kernels::{Fatbin, Parameters};
use cudarc::driver::{
    CudaContext,
    result::{module, occupancy},
    sys,
};
use smallvec::SmallVec;
use std::{ffi::CString, marker::PhantomData, ptr, sync::Arc};

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
        self.variant("")
    }

    /// One of several kernels that take `P`: what its name has behind the common part.
    ///
    /// # Errors
    /// As [`kernel`](Self::kernel).
    pub fn variant<P: Parameters>(
        self: &Arc<Self>,
        behind: impl AsRef<str>,
    ) -> Result<Kernel<P>, Missing> {
        let name = format!("{}{}", P::KERNEL, behind.as_ref());
        let elsewhere = || Missing::Kernels {
            why: format!("{name} is not in {}", self.file),
        };
        // Variants may have a file of their own.
        let own = self.file.strip_prefix(P::FILE);
        if own.is_none_or(|own| !behind.as_ref().starts_with(own)) {
            return Err(elsewhere());
        }
        bind(&self.context)?;
        let name = CString::new(name.clone()).map_err(|_| elsewhere())?;
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

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Shared memory of a block beside what the kernel declares, in bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster, which must divide `blocks`; more than 1 needs compute capability 9.0.
    pub cluster: u32,
    /// All blocks are resident at once, or the launch is refused.
    pub cooperative: bool,
    /// The kernel may start while the one before it ends: it must wait for it itself (`wait_for_previous_kernel` of
    /// `kernels/sync.cuh`). Needs compute capability 9.0.
    pub programmatic: bool,
}

impl Launch {
    /// A plain grid.
    pub const fn grid(blocks: u32, threads: u32) -> Self {
        Self {
            blocks,
            threads,
            shared_bytes: 0,
            cluster: 1,
            cooperative: false,
            programmatic: false,
        }
    }

    /// As the driver takes it, with these attributes, on this stream.
    fn config(
        &self,
        attributes: &mut [sys::CUlaunchAttribute],
        stream: sys::CUstream,
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    /// What the driver calls attributes: those that differ from a plain grid's.
    fn attributes(&self) -> SmallVec<[sys::CUlaunchAttribute; 3]> {
        use sys::CUlaunchAttributeID_enum as Id;
        let mut list = SmallVec::new();
        let mut add = |id, value| {
            list.push(sys::CUlaunchAttribute {
                id,
                pad: [0; 4],
                value,
            });
        };
        // Shorter members than the union's longest leave the rest of it unspecified, which the driver does not read.
        let none = sys::CUlaunchAttributeValue { pad: [0; 64] };
        if self.cluster > 1 {
            let mut value = none;
            value.clusterDim.x = self.cluster;
            value.clusterDim.y = 1;
            value.clusterDim.z = 1;
            add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
        }
        if self.cooperative {
            let mut value = none;
            value.cooperative = 1;
            add(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value);
        }
        if self.programmatic {
            let mut value = none;
            value.programmaticStreamSerializationAllowed = 1;
            add(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                value,
            );
        }
        list
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
        shape: Launch,
        mut parameters: P,
    ) -> Result<(), Missing> {
        bind(&self.set.context)?;
        let mut attributes = shape.attributes();
        let config = shape.config(&mut attributes, stream);
        let mut pointer = ptr::from_mut(&mut parameters).cast();
        // SAFETY: the driver copies the struct during the call; `P` is this kernel's own struct, with offsets that nvcc asserted;
        // the rest is the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&config, self.function, &mut pointer, ptr::null_mut()) }
            .result()
            .map_err(refused("cuLaunchKernelEx"))
    }

    /// Lets launches ask for so much shared memory beside what the kernel declares, where it is more than 48 KiB.
    ///
    /// # Errors
    /// [`Missing::Refused`] for more than the GPU has.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), Missing> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
        bind(&self.set.context)?;
        // SAFETY: the function is loaded as long as `set` lives.
        unsafe { sys::cuFuncSetAttribute(self.function, MOST, bytes as i32) }
            .result()
            .map_err(refused("cuFuncSetAttribute"))
    }

    /// The launch of a block that has a multiprocessor, with nothing else on it: it takes all of its registers, or else all of its shared
    /// memory. Accesses go through what is left of that, so it is the worse of the two.
    ///
    /// # Errors
    /// [`Missing::Refused`].
    pub fn alone(&self, threads: u32) -> Result<Launch, Missing> {
        use sys::{
            CUdevice_attribute_enum::{
                CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR as REGISTERS,
                CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST,
            },
            CUfunction_attribute_enum::{
                CU_FUNC_ATTRIBUTE_NUM_REGS as EACH, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as DECLARED,
            },
        };
        bind(&self.set.context)?;
        let most = |which| {
            let most = self.set.context.attribute(which);
            most.map_err(refused("cuDeviceGetAttribute"))
        };
        let own = |which| {
            let mut own = 0;
            // SAFETY: the function is loaded as long as `set` lives.
            unsafe { sys::cuFuncGetAttribute(&mut own, which, self.function) }
                .result()
                .map_err(refused("cuFuncGetAttribute"))?;
            Ok::<i32, Missing>(own)
        };
        let shape = Launch::grid(1, threads);
        if own(EACH)? * threads as i32 >= most(REGISTERS)? {
            return Ok(shape);
        }
        let shared_bytes = (most(MOST)? - own(DECLARED)?).max(0).unsigned_abs();
        self.allow_shared_bytes(shared_bytes)?;
        Ok(Launch {
            shared_bytes,
            ..shape
        })
    }

    /// Clusters of this shape that the GPU holds at once.
    ///
    /// # Errors
    /// [`Missing::Refused`].
    pub fn resident_clusters(&self, shape: Launch) -> Result<u32, Missing> {
        bind(&self.set.context)?;
        let mut attributes = shape.attributes();
        let config = shape.config(&mut attributes, ptr::null_mut());
        let mut clusters = 0;
        // SAFETY: the function is loaded as long as `set` lives, and the attributes as long as the configuration.
        unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.function, &config) }
            .result()
            .map_err(refused("cuOccupancyMaxActiveClusters"))?;
        Ok(clusters.unsigned_abs())
    }

    /// Blocks of this shape that an SM holds at once.
    ///
    /// # Errors
    /// [`Missing::Refused`].
    pub fn resident_per_sm(&self, shape: Launch) -> Result<u32, Missing> {
        bind(&self.set.context)?;
        let (threads, bytes) = (shape.threads as i32, shape.shared_bytes as usize);
        // SAFETY: the function is loaded as long as `set` lives.
        unsafe { occupancy::max_active_block_per_multiprocessor(self.function, threads, bytes) }
            .map(i32::unsigned_abs)
            .map_err(refused("cuOccupancyMaxActiveBlocksPerMultiprocessor"))
    }
}

fn bind(context: &CudaContext) -> Result<(), Missing> {
    context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))
}
