//! Send and receive between two ranks, through a slot per sender in the receiver's memory.

use crate::{
    comm::HostComm,
    job::{Active, Use},
    memory::{poison, reading, writing},
    queue::HostQueue,
};
use brigade_device::{Call, Operation, PerRank, RecvParams, Result, SendParams, Turn, check_peer};
use brigade_sync::{Area, Half};

/// Both sides sign the same: shape and type of what is sent.
fn signature(elements: usize, dtype: brigade_device::DataType) -> u32 {
    let rows = PerRank::from_slice(&[elements]);
    Call::AllGather {
        rows,
        row_len: 0,
        dtype,
    }
    .signature()
}

/// The `n`-th piece between a pair: halves alternate.
fn mail(n: u64) -> (Use, bool) {
    let of = Use {
        area: Area::Mail,
        half: Half::of(n as u32),
        // Epochs wrap; the count of pieces does not.
        epoch: (n / 2 + 1) as u32,
    };
    (of, n >= 2)
}

impl Active<'_> {
    fn slot_bytes(&self) -> usize {
        self.job.core.control.layout().half_bytes(Area::Mail) / self.job.size()
    }

    fn send_piece(&mut self, peer: usize, piece: &[u8]) -> Result<()> {
        let (of, again) = mail(self.state.mail.sent[peer]);
        let (job, slot) = (&self.job, self.slot_bytes());
        if again {
            job.await_credit(of, peer)?;
        }
        let first = job.rank() * slot;
        // SAFETY: this rank's slot at the peer, for which the peer has given its credit; announced below.
        unsafe { job.bytes_mut(peer, of, first..first + piece.len()) }.copy_from_slice(piece);
        job.count_moved(piece.len());
        job.say_filled(peer, of, job.rank(), 0);
        self.state.mail.sent[peer] += 1;
        Ok(())
    }

    fn receive_piece(&mut self, peer: usize, out: &mut [u8]) -> Result<()> {
        let (of, _) = mail(self.state.mail.received[peer]);
        let (job, slot) = (&self.job, self.slot_bytes());
        job.await_filled(of, peer, 0, peer)?;
        let first = peer * slot;
        // SAFETY: announced by the peer for this use, which this rank has not ended.
        out.copy_from_slice(unsafe { job.bytes(job.rank(), of, first..first + out.len()) });
        job.say_done_to(peer, of);
        self.state.mail.received[peer] += 1;
        Ok(())
    }
}

impl HostComm {
    pub(crate) fn run_send(&self, turn: &Turn, p: SendParams<'_>) -> Result<()> {
        let group = self.core.control.group();
        check_peer(p.peer, group.rank, group.size)?;
        let (from, peer) = (p.from.retain(), p.peer);
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.pairwise(
                Operation::SendRecv,
                signature(from.shape().len(), from.dtype()),
                |active| {
                    reading(&[&from], |inputs| {
                        let slot = active.slot_bytes();
                        // Nothing is sent in one empty piece, so that the receiver hears of it.
                        pieces(inputs[0].len(), slot)
                            .try_for_each(|r| active.send_piece(peer, &inputs[0][r]))
                    })
                },
            )
        })
    }

    pub(crate) fn run_recv(&self, turn: &Turn, p: RecvParams<'_>) -> Result<()> {
        let group = self.core.control.group();
        check_peer(p.peer, group.rank, group.size)?;
        let (to, peer) = (p.to.as_view().retain(), p.peer);
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.pairwise(
                Operation::SendRecv,
                signature(to.shape().len(), to.dtype()),
                |active| {
                    writing(&to, &[], |out, _| {
                        let slot = active.slot_bytes();
                        pieces(out.len(), slot)
                            .try_for_each(|r| active.receive_piece(peer, &mut out[r]))
                            .inspect_err(|_| poison(to.dtype(), out))
                    })
                },
            )
        })
    }
}

fn pieces(bytes: usize, piece: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..bytes.max(1))
        .step_by(piece)
        .map(move |start| start.min(bytes)..(start + piece).min(bytes))
}
