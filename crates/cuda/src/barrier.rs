//! Barrier: a call with nothing in it, since every call ends with all ranks having met.

use crate::comm::CudaComm;
use brigade_device::{Call, Result, Turn};

impl CudaComm {
    pub(crate) fn run_barrier(&self, turn: &Turn) -> Result<()> {
        let on = turn.stream();
        self.core
            .collective(on, &Call::Barrier, &[], None, |_| Ok(()))
    }
}
