//! All-to-all of rows: a message to and from every peer, and a copy of what a rank has for itself, in one launch. Each message is signed with
//! its count, so that a pair that disagrees is found before anything is read.

use crate::{comm::CudaComm, memory::check_reach, messages::Message};
use brigade_device::{AllToAllParams, Call, PerRank, Plan, Result, Turn, message_signature};

impl CudaComm {
    pub(crate) fn run_all_to_all(&self, turn: &Turn, p: AllToAllParams<'_>) -> Result<Plan> {
        let me = self.core.rank();
        p.check(me, self.core.size())?;
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        check_reach(&self.gpu().card, "to.memory", &to)?;
        check_reach(&self.gpu().card, "from.memory", &from)?;
        let call = Call::AllToAll {
            row_len: from.shape().row_len(),
            dtype: from.dtype(),
        };
        let plan = self.core.plan(&call)?;
        let from = self.apart(turn.stream(), from, &to)?;
        let row_bytes = from.shape().row_len() * from.dtype().bytes();
        let in_bytes = |rows: &[usize]| -> PerRank { rows.iter().map(|r| r * row_bytes).collect() };
        let (send, recv) = (in_bytes(p.send_rows), in_bytes(p.recv_rows));
        let (send_at, recv_at) = (
            brigade_plan::rows::offsets(&send),
            brigade_plan::rows::offsets(&recv),
        );
        let message = |peer: usize, receives: bool| {
            let (buffer, rows, at, bytes) = if receives {
                (&to, p.recv_rows, &recv_at, &recv)
            } else {
                (&from, p.send_rows, &send_at, &send)
            };
            Message {
                peer,
                receives,
                signature: message_signature(rows[peer], from.dtype()) ^ call.signature(),
                address: buffer.address() + at[peer] as u64,
                bytes: bytes[peer],
            }
        };
        let mut list: Vec<_> = self
            .core
            .peers()
            .flat_map(|peer| [message(peer, false), message(peer, true)])
            .collect();
        list.push(message(me, true));
        let own = message(me, false).address;
        let buffers = [&from, &to];
        self.core.exchange(turn.stream(), &call, &buffers, |job| {
            job.messages_to_all(&list, own, to.dtype())
        })?;
        Ok(plan)
    }
}
