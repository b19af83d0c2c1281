//! A GPU, as a rank that has no group.

use crate::backend::{Backend, Seat};
use brigade_cuda::{CudaDevice, Missing, devices};
use brigade_device::Result;
use brigade_plan::Engines;

/// One GPU of this host. Every rank opens it anew, so that trials count their own memory.
pub struct CudaBackend {
    name: String,
    ordinal: usize,
}

impl CudaBackend {
    /// Every GPU that can be opened.
    ///
    /// # Errors
    /// What is missing, on hosts where none can be.
    pub fn all() -> Result<Vec<Self>, Missing> {
        let list = devices()?;
        list.iter()
            .map(|gpu| {
                CudaDevice::new(gpu.ordinal)?;
                let name = format!("cuda{}", gpu.ordinal);
                Ok(Self {
                    name,
                    ordinal: gpu.ordinal,
                })
            })
            .collect()
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn worlds(&self) -> Vec<usize> {
        vec![1]
    }

    fn engines(&self) -> Engines {
        Engines::host()
    }

    fn communicates(&self) -> bool {
        false
    }

    fn seats(&self, size: usize) -> Result<Vec<Seat>> {
        brigade_group::threads(size)
            .into_iter()
            .map(|boot| {
                Ok(Seat {
                    device: CudaDevice::new(self.ordinal)?,
                    boot: Box::new(boot),
                })
            })
            .collect()
    }
}
