//! All-to-all of rows. Ranks first show each other how much they send to whom, so that all know how many pieces there
//! are, and a pair that disagrees is found before anything is written.

use crate::{
    comm::{HostComm, unexpected},
    job::Active,
    memory::{poison, writing},
    queue::HostQueue,
};
use brigade_device::{AllToAllParams, Buffer, Call, FaultKind, PerRank, Plan, Result, Turn};
use brigade_sync::Area;

struct Counts {
    row_bytes: usize,
    send: PerRank,
    recv: PerRank,
}

impl HostComm {
    pub(crate) fn run_all_to_all(&self, turn: &Turn, p: AllToAllParams<'_>) -> Result<Plan> {
        let group = self.core.control.group();
        p.check(group.rank, group.size)?;
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        let call = Call::AllToAll {
            row_len: from.shape().row_len(),
            dtype: from.dtype(),
        };
        let plan = self.core.plan(&call)?;
        let Plan::Copy { piece_elements, .. } = plan else {
            return Err(unexpected(&plan));
        };
        let counts = Counts {
            row_bytes: from.shape().row_len() * from.dtype().bytes(),
            send: p.send_rows.into(),
            recv: p.recv_rows.into(),
        };
        let piece = piece_elements * from.dtype().bytes();
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| {
                all_to_all(active, &counts, piece, &to, &from)
            })
        })?;
        Ok(plan)
    }
}

/// Every rank's send counts, checked against what this rank expects: the most rows that any pair exchanges.
fn agree(active: &mut Active<'_>, counts: &Counts) -> Result<usize> {
    let of = active.begin(Area::Scratch)?;
    let job = &active.job;
    let (me, size) = (job.rank(), job.size());
    let send: Vec<u64> = counts.send.iter().map(|&n| n as u64).collect();
    // SAFETY: own half: all peers have given their credit for it, and it is announced below.
    unsafe { job.bytes_mut(me, of, 0..8 * size) }.copy_from_slice(bytemuck::cast_slice(&send));
    job.say_filled_to_all(of, me, 0);
    let mut most = counts.send.iter().copied().max().unwrap_or(0);
    for peer in job.peers() {
        job.await_filled(of, peer, 0, peer)?;
        // SAFETY: announced by its owner for this use, which this rank has not ended.
        let theirs = unsafe { job.bytes(peer, of, 0..8 * size) };
        let theirs: &[u64] = bytemuck::cast_slice(theirs);
        let want = counts.recv[peer] as u64;
        if theirs[me] != want {
            return Err(job.fail(FaultKind::Mismatch, peer, peer, want, theirs[me]));
        }
        most = most.max(theirs.iter().copied().max().unwrap_or(0) as usize);
    }
    active.end(of);
    Ok(most)
}

fn all_to_all(
    active: &mut Active<'_>,
    counts: &Counts,
    piece: usize,
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    writing(to, &[from], |out, inputs| {
        let in_bytes =
            |rows: &[usize]| -> PerRank { rows.iter().map(|r| r * counts.row_bytes).collect() };
        let (send, recv) = (in_bytes(&counts.send), in_bytes(&counts.recv));
        let (send_at, recv_at) = (
            brigade_plan::rows::offsets(&send),
            brigade_plan::rows::offsets(&recv),
        );
        let result = agree(active, counts).and_then(|most| {
            (0..most * counts.row_bytes)
                .step_by(piece.max(1))
                .try_for_each(|start| {
                    let _span =
                        tracing::info_span!(target: "brigade::comm", "all-to-all", start).entered();
                    let of = active.begin(Area::Scratch)?;
                    let job = &active.job;
                    let me = job.rank();
                    let cut = |all: usize| start.min(all)..(start + piece).min(all);
                    for r in 0..job.size() {
                        let part = cut(send[r]);
                        let slot = r * piece..r * piece + part.len();
                        let part = send_at[r] + part.start..send_at[r] + part.end;
                        // SAFETY: own half: all peers have given their credit for it, and it is announced below.
                        unsafe { job.bytes_mut(me, of, slot) }.copy_from_slice(&inputs[0][part]);
                    }
                    job.say_filled_to_all(of, me, 0);
                    for r in std::iter::once(me).chain(job.peers()) {
                        let part = cut(recv[r]);
                        if r != me {
                            job.await_filled(of, r, 0, r)?;
                            job.count_moved(part.len());
                        }
                        // SAFETY: announced by its owner for this use, which this rank has not ended.
                        let rows = unsafe { job.bytes(r, of, me * piece..me * piece + part.len()) };
                        out[recv_at[r] + part.start..recv_at[r] + part.end].copy_from_slice(rows);
                    }
                    active.end(of);
                    Ok(())
                })
        });
        result.inspect_err(|_| poison(to.dtype(), out))
    })
}
