//! Reduce-scatter: every rank pushes every share to its owner; or lays out a slot for every rank. Everybody reduces its own of all.

use crate::{
    all_reduce::Kind,
    comm::{HostComm, unexpected},
    element,
    job::Active,
    memory::{poison, writing},
    pushed,
    queue::HostQueue,
};
use brigade_device::{Buffer, Call, PerRank, Plan, ReduceOp, ReduceScatterParams, Result, Turn};
use brigade_sync::Area;

impl HostComm {
    /// As a call of its own, or as part of one whose signature it bears.
    pub(crate) fn run_reduce_scatter(
        &self,
        turn: &Turn,
        part_of: Option<Call>,
        p: ReduceScatterParams<'_>,
    ) -> Result<Plan> {
        let group = self.core.control.group();
        p.check(group.rank, group.size)?;
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        let row_len = from.shape().row_len();
        let call = Call::ReduceScatter {
            rows: p.rows_per_rank.into(),
            row_len,
            dtype: from.dtype(),
            output: to.dtype(),
            op: p.op,
        };
        let plan = self.core.plan(&call)?;
        let Plan::ReduceScatter {
            piece_elements,
            pushed: launch,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let elements: PerRank = p.rows_per_rank.iter().map(|r| r * row_len).collect();
        let op = p.op;
        let signed = part_of.unwrap_or(call);
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&signed, |active| match launch {
                Some(_) => push(active, op, &elements, &to, &from),
                None => reduce_scatter(active, op, &elements, piece_elements, &to, &from),
            })
        })?;
        Ok(plan)
    }
}

/// `elements` are those that every rank gets, which fit the buffers at once.
fn push(
    active: &mut Active<'_>,
    op: ReduceOp,
    elements: &[usize],
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    let kind = Kind {
        dtype: from.dtype(),
        output: to.dtype(),
        op,
        row: None,
    };
    let shares: PerRank = elements.iter().map(|n| n * kind.dtype.bytes()).collect();
    writing(to, &[from], |out, inputs| {
        pushed::scatter(active, kind, &shares, inputs[0], out)
            .inspect_err(|_| poison(to.dtype(), out))
    })
}

/// `elements` are those that every rank gets; they pass through the scratch memory in pieces of `piece` elements.
pub(crate) fn reduce_scatter(
    active: &mut Active<'_>,
    op: ReduceOp,
    elements: &[usize],
    piece: usize,
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    let (in_bytes, out_bytes) = (from.dtype().bytes(), to.dtype().bytes());
    writing(to, &[from], |out, inputs| {
        let offsets = brigade_plan::rows::offsets(elements);
        let most = elements.iter().copied().max().unwrap_or(0);
        (0..most)
            .step_by(piece.max(1))
            .try_for_each(|start| {
                let _span =
                    tracing::info_span!(target: "brigade::comm", "reduce-scatter", start).entered();
                let of = active.begin(Area::Scratch)?;
                let job = &active.job;
                let (me, size) = (job.rank(), job.size());
                let cut =
                    |rank: usize| start.min(elements[rank])..(start + piece).min(elements[rank]);
                let slot = |rank: usize| {
                    let first = rank * piece * in_bytes;
                    first..first + cut(rank).len() * in_bytes
                };
                for r in 0..size {
                    let part = cut(r);
                    let part =
                        (offsets[r] + part.start) * in_bytes..(offsets[r] + part.end) * in_bytes;
                    // SAFETY: own half: all peers have given their credit for it, and it is announced below.
                    unsafe { job.bytes_mut(me, of, slot(r)) }.copy_from_slice(&inputs[0][part]);
                }
                job.say_filled_to_all(of, me, 0);
                for peer in job.peers() {
                    job.await_filled(of, peer, 0, peer)?;
                    job.count_moved(slot(me).len());
                }
                let parts: Vec<&[u8]> = (0..size)
                    // SAFETY: announced by its owner for this use, which this rank has not ended.
                    .map(|r| unsafe { job.bytes(r, of, slot(me)) })
                    .collect();
                let own = cut(me);
                let out = &mut out[own.start * out_bytes..own.end * out_bytes];
                element::reduce(op, from.dtype(), &parts, to.dtype(), out);
                active.end(of);
                Ok(())
            })
            .inspect_err(|_| poison(to.dtype(), out))
    })
}
