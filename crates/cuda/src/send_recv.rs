//! Send and receive between two ranks.

use crate::{
    comm::CudaComm,
    memory::check_reach,
    messages::{BLOCKS_ALONE, Message},
};
use brigade_device::{
    Buffer, Call, Operation, PerRank, RecvParams, Result, SendParams, Turn, check_peer,
};

/// Both sides sign the same: shape and type of what is sent.
pub(crate) fn signature(elements: usize, dtype: brigade_device::DataType) -> u32 {
    let rows = PerRank::from_slice(&[elements]);
    Call::AllGather {
        rows,
        row_len: 0,
        dtype,
    }
    .signature()
}

impl CudaComm {
    pub(crate) fn run_send(&self, turn: &Turn, p: SendParams<'_>) -> Result<()> {
        self.exchange(turn, p.from.retain(), p.peer, false)
    }

    pub(crate) fn run_recv(&self, turn: &Turn, p: RecvParams<'_>) -> Result<()> {
        self.exchange(turn, p.to.as_view().retain(), p.peer, true)
    }

    fn exchange(&self, turn: &Turn, data: Buffer, peer: usize, receives: bool) -> Result<()> {
        check_peer(peer, self.core.rank(), self.core.size())?;
        check_reach(
            &self.gpu().card,
            if receives { "to.memory" } else { "from.memory" },
            &data,
        )?;
        let signed = (
            Operation::SendRecv,
            signature(data.shape().len(), data.dtype()),
        );
        let message = Message {
            peer,
            receives,
            signature: signed.1,
            address: data.address(),
            bytes: data.bytes(),
        };
        let out = Some(&data).filter(|_| receives);
        self.core
            .pairwise(turn.stream(), signed, &[&data], out, |job| {
                job.messages(&[message], BLOCKS_ALONE)
            })
    }
}
