//! Send and receive between two ranks, or both at once: messages, in one launch.

use crate::{comm::CudaComm, memory::check_reach, messages::Message};
use brigade_device::{
    Buffer, Operation, RecvParams, Result, SendParams, Turn, check_peer, message_signature,
};

impl CudaComm {
    pub(crate) fn run_send(&self, turn: &Turn, p: SendParams<'_>) -> Result<()> {
        let from = p.from.retain();
        let sent = self.message(&from, p.peer, false)?;
        self.by_mail(turn, &[&from], &[sent])
    }

    pub(crate) fn run_recv(&self, turn: &Turn, p: RecvParams<'_>) -> Result<()> {
        let to = p.to.as_view().retain();
        let received = self.message(&to, p.peer, true)?;
        self.by_mail(turn, &[&to], &[received])
    }

    pub(crate) fn run_send_recv(
        &self,
        turn: &Turn,
        send: SendParams<'_>,
        recv: RecvParams<'_>,
    ) -> Result<()> {
        let (from, to) = (send.from.retain(), recv.to.as_view().retain());
        let received = self.message(&to, recv.peer, true)?;
        self.message(&from, send.peer, false)?;
        let from = self.apart(turn.stream(), from, &to)?;
        let sent = self.message(&from, send.peer, false)?;
        self.by_mail(turn, &[&from, &to], &[sent, received])
    }

    fn message(&self, data: &Buffer, peer: usize, receives: bool) -> Result<Message> {
        check_peer(peer, self.core.rank(), self.core.size())?;
        let field = if receives { "to.memory" } else { "from.memory" };
        check_reach(&self.gpu().card, field, data)?;
        Ok(Message {
            peer,
            receives,
            signature: message_signature(data.shape().len(), data.dtype()),
            address: data.address(),
            bytes: data.bytes(),
        })
    }

    /// Messages that lie in these buffers, of which the last is the one that is received, if any is.
    fn by_mail(&self, turn: &Turn, buffers: &[&Buffer], list: &[Message]) -> Result<()> {
        let signed = (Operation::SendRecv, list[0].signature);
        let poison = buffers[buffers.len() - 1].dtype();
        self.core
            .pairwise_alone(turn.stream(), signed, buffers, |job| {
                job.messages(list, poison)
            })
    }
}
