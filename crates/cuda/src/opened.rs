//! What a process loads once for each GPU and keeps: the kernels, the library that multiplies, and the driver's pools.
//!
//! Loading kernels, and making or closing the library's handle, synchronizes the GPU: it waits for kernels that wait for others,
//! holds up every other thread meanwhile, and breaks captures. So it is done when the first device is opened, and never again.

use crate::{DeviceInfo, Missing, kernels::Kernels, lt::Lt, pools};
use cudarc::driver::CudaContext;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// What devices of one GPU share.
pub(crate) struct Opened {
    pub(crate) kernels: Kernels,
    pub(crate) lt: Lt,
}

/// The GPUs that were opened.
static OPENED: Mutex<BTreeMap<usize, Arc<Opened>>> = Mutex::new(BTreeMap::new());

impl Opened {
    /// Of this GPU. Kernels and library keep the context.
    pub(crate) fn of(gpu: &DeviceInfo, context: &Arc<CudaContext>) -> Result<Arc<Self>, Missing> {
        let mut all = OPENED.lock();
        if let Some(opened) = all.get(&gpu.ordinal) {
            return Ok(Arc::clone(opened));
        }
        let opened = Arc::new(Self {
            kernels: Kernels::load(context, gpu.capability, gpu.multiprocessors)?,
            lt: Lt::open(context)?,
        });
        pools::grow(context, &opened.kernels)?;
        all.insert(gpu.ordinal, Arc::clone(&opened));
        Ok(opened)
    }
}
