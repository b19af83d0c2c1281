//! All-gather: every rank pushes its rows to all; or lays them out, and reads everybody's.

use crate::{
    comm::{HostComm, unexpected},
    job::Active,
    memory::{poison, writing},
    pushed,
    queue::HostQueue,
};
use brigade_device::{AllGatherParams, Buffer, Call, PerRank, Plan, Result, Turn};
use brigade_sync::Area;

impl HostComm {
    pub(crate) fn run_all_gather(&self, turn: &Turn, p: AllGatherParams<'_>) -> Result<Plan> {
        let group = self.core.control.group();
        p.check(group.rank, group.size)?;
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        let row_len = to.shape().row_len();
        let call = Call::AllGather {
            rows: p.rows_per_rank.into(),
            row_len,
            dtype: to.dtype(),
        };
        let plan = self.core.plan(&call)?;
        let Plan::Copy {
            piece_elements,
            pushed: launch,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let bytes: PerRank = p
            .rows_per_rank
            .iter()
            .map(|rows| rows * row_len * to.dtype().bytes())
            .collect();
        let piece = piece_elements * to.dtype().bytes();
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| match launch {
                Some(_) => push(active, &bytes, &to, &from),
                None => all_gather(active, &bytes, piece, &to, &from),
            })
        })?;
        Ok(plan)
    }
}

/// `bytes` are those of every rank, which fit the buffers at once.
fn push(active: &mut Active<'_>, bytes: &[usize], to: &Buffer, from: &Buffer) -> Result<()> {
    writing(to, &[from], |out, inputs| {
        let first: usize = bytes[..active.job.rank()].iter().sum();
        out[first..first + inputs[0].len()].copy_from_slice(inputs[0]);
        pushed::copy(active, bytes, out).inspect_err(|_| poison(to.dtype(), out))
    })
}

/// `bytes` are those of every rank; they pass through the scratch memory in pieces of `piece` bytes.
pub(crate) fn all_gather(
    active: &mut Active<'_>,
    bytes: &[usize],
    piece: usize,
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    writing(to, &[from], |out, inputs| {
        let offsets = brigade_plan::rows::offsets(bytes);
        let most = bytes.iter().copied().max().unwrap_or(0);
        (0..most)
            .step_by(piece.max(1))
            .try_for_each(|start| {
                let _span =
                    tracing::info_span!(target: "brigade::comm", "all-gather", start).entered();
                let of = active.begin(Area::Scratch)?;
                let job = &active.job;
                let cut = |rank: usize| start.min(bytes[rank])..(start + piece).min(bytes[rank]);
                let own = &inputs[0][cut(job.rank())];
                // SAFETY: own half: all peers have given their credit for it, and it is announced below.
                unsafe { job.bytes_mut(job.rank(), of, 0..own.len()) }.copy_from_slice(own);
                job.say_filled_to_all(of, job.rank(), 0);
                for r in std::iter::once(job.rank()).chain(job.peers()) {
                    let range = cut(r);
                    if r != job.rank() {
                        job.await_filled(of, r, 0, r)?;
                        job.count_moved(range.len());
                    }
                    // SAFETY: announced by its owner for this use, which this rank has not ended.
                    let rows = unsafe { job.bytes(r, of, 0..range.len()) };
                    out[offsets[r] + range.start..offsets[r] + range.end].copy_from_slice(rows);
                }
                active.end(of);
                Ok(())
            })
            .inspect_err(|_| poison(to.dtype(), out))
    })
}
