//! Send and receive between two ranks, through a slot per sender in the receiver's memory.

use crate::{
    comm::HostComm,
    core::Pairs,
    job::{Active, Job, Use},
    memory::{poison, reading, writing},
    queue::HostQueue,
};
use brigade_device::{
    Buffer, Operation, RecvParams, Result, SendParams, Turn, check_peer, message_signature,
};
use brigade_sync::{Area, Half, Wait};
use std::{collections::VecDeque, ops::Range};

fn signature(data: &Buffer) -> u32 {
    message_signature(data.shape().len(), data.dtype())
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

fn slot_bytes(job: &Job) -> usize {
    job.core.control.layout().half_bytes(Area::Mail) / job.size()
}

/// This rank's side of a message: pieces that are left, and the call as this message signs it.
struct Side {
    job: Job,
    peer: usize,
    left: VecDeque<Range<usize>>,
}

impl Side {
    /// Nothing is sent in one empty piece, so that the receiver hears of it.
    fn new(call: &Job, peer: usize, data: &Buffer) -> Self {
        let (bytes, slot) = (data.bytes(), slot_bytes(call));
        let piece = |start: usize| start.min(bytes)..(start + slot).min(bytes);
        Self {
            job: call.signed(signature(data)),
            peer,
            left: (0..bytes.max(1)).step_by(slot).map(piece).collect(),
        }
    }

    /// Sends the next piece.
    fn send(&mut self, mails: &mut Pairs, from: &[u8]) -> Result<()> {
        let Some(piece) = self.left.pop_front() else {
            return Ok(());
        };
        let (job, peer) = (&self.job, self.peer);
        let (of, again) = mail(mails.sent[peer]);
        if again {
            job.await_credit(of, peer)?;
        }
        let first = job.rank() * slot_bytes(job);
        // SAFETY: this rank's slot at the peer, for which the peer has given its credit; announced below.
        unsafe { job.bytes_mut(peer, of, first..first + piece.len()) }
            .copy_from_slice(&from[piece.clone()]);
        job.count_moved(piece.len());
        job.say_filled(peer, of, job.rank(), 0);
        mails.sent[peer] += 1;
        Ok(())
    }

    /// Receives the next piece.
    fn receive(&mut self, mails: &mut Pairs, out: &mut [u8]) -> Result<()> {
        let Some(piece) = self.left.pop_front() else {
            return Ok(());
        };
        let (job, peer) = (&self.job, self.peer);
        let (of, _) = mail(mails.received[peer]);
        job.await_filled(of, peer, 0, peer)?;
        let first = peer * slot_bytes(job);
        // SAFETY: announced by the peer for this use, which this rank has not ended.
        let came = unsafe { job.bytes(job.rank(), of, first..first + piece.len()) };
        out[piece].copy_from_slice(came);
        job.say_done_to(peer, of);
        mails.received[peer] += 1;
        Ok(())
    }

    fn send_all(&mut self, mails: &mut Pairs, from: &[u8]) -> Result<()> {
        while !self.left.is_empty() {
            self.send(mails, from)?;
        }
        Ok(())
    }

    fn receive_all(&mut self, mails: &mut Pairs, out: &mut [u8]) -> Result<()> {
        while !self.left.is_empty() {
            self.receive(mails, out)?;
        }
        Ok(())
    }

    /// What the next piece that is sent waits for.
    fn credit(&self, mails: &Pairs) -> Option<Wait> {
        let (of, again) = mail(mails.sent[self.peer]);
        let ring = self.job.core.control.layout().ring(of.area);
        again.then(|| ring.credit(of.half, self.peer, self.job.flag_of(of)))
    }

    /// What the next piece that is received waits for.
    fn arrival(&self, mails: &Pairs) -> Wait {
        let (of, _) = mail(mails.received[self.peer]);
        let ring = self.job.core.control.layout().ring(of.area);
        ring.arrival(of.half, self.peer, 0, self.peer, self.job.flag_of(of))
    }
}

/// Sends and receives at once: whatever can go on does, so that ranks which all send first wait for none of them.
fn swap(
    mails: &mut Pairs,
    (mut sends, from): (Side, &[u8]),
    (mut receives, out): (Side, &mut [u8]),
) -> Result<()> {
    while !sends.left.is_empty() && !receives.left.is_empty() {
        let (credit, arrival) = (sends.credit(mails), receives.arrival(mails));
        let Some(credit) = credit.filter(|w| !sends.job.is_decided(w)) else {
            sends.send(mails, from)?;
            continue;
        };
        if receives.job.is_decided(&arrival) {
            receives.receive(mails, out)?;
        } else {
            let waits = [(credit, sends.peer), (arrival, receives.peer)];
            sends.job.wait_any(&waits)?;
        }
    }
    sends.send_all(mails, from)?;
    receives.receive_all(mails, out)
}

impl HostComm {
    pub(crate) fn run_send(&self, turn: &Turn, p: SendParams<'_>) -> Result<()> {
        let (from, peer) = (p.from.retain(), p.peer);
        self.by_mail(turn, &[peer], signature(&from), move |active| {
            reading(&[&from], |inputs| {
                let mut side = Side::new(&active.job, peer, &from);
                side.send_all(&mut active.state.mail, inputs[0])
            })
        })
    }

    pub(crate) fn run_recv(&self, turn: &Turn, p: RecvParams<'_>) -> Result<()> {
        let (to, peer) = (p.to.as_view().retain(), p.peer);
        self.by_mail(turn, &[peer], signature(&to), move |active| {
            writing(&to, &[], |out, _| {
                let mut side = Side::new(&active.job, peer, &to);
                side.receive_all(&mut active.state.mail, out)
                    .inspect_err(|_| poison(to.dtype(), out))
            })
        })
    }

    pub(crate) fn run_send_recv(
        &self,
        turn: &Turn,
        send: SendParams<'_>,
        recv: RecvParams<'_>,
    ) -> Result<()> {
        let (from, to) = (send.from.retain(), recv.to.as_view().retain());
        let peers = [send.peer, recv.peer];
        self.by_mail(turn, &peers, signature(&from), move |active| {
            writing(&to, &[&from], |out, inputs| {
                let [sends, receives] = [(peers[0], &from), (peers[1], &to)]
                    .map(|(peer, data)| Side::new(&active.job, peer, data));
                let mails = &mut active.state.mail;
                swap(mails, (sends, inputs[0]), (receives, &mut *out))
                    .inspect_err(|_| poison(to.dtype(), out))
            })
        })
    }

    fn by_mail(
        &self,
        turn: &Turn,
        peers: &[usize],
        signature: u32,
        work: impl Fn(&mut Active<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let group = self.core.control.group();
        for &peer in peers {
            check_peer(peer, group.rank, group.size)?;
        }
        let core = self.core.clone();
        HostQueue::of(turn.stream())?
            .run(move || core.pairwise(Operation::SendRecv, signature, |active| work(active)))
    }
}
