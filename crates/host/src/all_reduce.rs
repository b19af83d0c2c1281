//! All-reduce: one-shot pull for small inputs, two-shot for large ones; those that push are in a file of their own. All
//! add in rank order.

use crate::{
    comm::HostComm,
    element,
    job::Active,
    memory::{poison, writing},
    pushed,
    queue::HostQueue,
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceParams, Buffer, Call, DataType, Plan, ReduceOp, Result, Turn,
};
use brigade_sync::Area;
use std::ops::Range;

/// What every piece is reduced with.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) dtype: DataType,
    pub(crate) output: DataType,
    pub(crate) op: ReduceOp,
    /// Elements of a row, where rows stay whole.
    pub(crate) row: Option<usize>,
}

/// How one piece is reduced.
pub(crate) type Algorithm = fn(&mut Active<'_>, Kind, &[u8], &mut [u8]) -> Result<()>;

/// What carries an algorithm out, if the host has it.
pub(crate) fn algorithm_of(algorithm: AllReduceAlgorithm) -> Option<Algorithm> {
    Some(match algorithm {
        AllReduceAlgorithm::OneShotPush => pushed::one_shot,
        AllReduceAlgorithm::OneShotPull => one_shot,
        AllReduceAlgorithm::TwoShot => two_shot,
        AllReduceAlgorithm::TwoShotPush => pushed::two_shot,
        AllReduceAlgorithm::Nccl => return None,
    })
}

impl HostComm {
    pub(crate) fn run_all_reduce(&self, turn: &Turn, p: AllReduceParams<'_>) -> Result<Plan> {
        p.check()?;
        let to = p.data.as_view().retain();
        let from = p.from.map_or_else(|| to.clone(), |f| f.retain());
        let call = Call::AllReduce {
            elements: from.shape().len(),
            dtype: from.dtype(),
            output: to.dtype(),
            op: p.op,
            choice: p.choice,
        };
        let plan = self.core.plan(&call)?;
        let Plan::AllReduce {
            algorithm,
            piece_elements,
            ..
        } = plan
        else {
            return Err(crate::comm::unexpected(&plan));
        };
        let kind = Kind {
            dtype: from.dtype(),
            output: to.dtype(),
            op: p.op,
            row: None,
        };
        let algorithm = algorithm_of(algorithm).ok_or_else(|| crate::comm::unexpected(&plan))?;
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| {
                all_reduce(active, (algorithm, kind), piece_elements, &to, &from)
            })
        })?;
        Ok(plan)
    }
}

/// Passes through the scratch memory in pieces of so many elements.
pub(crate) fn all_reduce(
    active: &mut Active<'_>,
    (algorithm, kind): (Algorithm, Kind),
    piece_elements: usize,
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    writing(to, &[from], |out, inputs| {
        // A rank alone takes all at once.
        let bytes = |dtype: DataType| piece_elements.max(1).saturating_mul(dtype.bytes());
        inputs[0]
            .chunks(bytes(kind.dtype))
            .zip(out.chunks_mut(bytes(kind.output)))
            .try_for_each(|(input, out)| algorithm(active, kind, input, out))
            .inspect_err(|_| poison(kind.output, out))
    })
}

/// Every rank lays its input out, and reads everybody's.
fn one_shot(active: &mut Active<'_>, kind: Kind, input: &[u8], out: &mut [u8]) -> Result<()> {
    let _span =
        tracing::info_span!(target: "brigade::comm", "one-shot", bytes = input.len()).entered();
    let of = active.begin(Area::Scratch)?;
    let job = &active.job;
    let range = 0..input.len();
    // SAFETY: own half: all peers have given their credit for it, and it is announced below.
    unsafe { job.bytes_mut(job.rank(), of, range.clone()) }.copy_from_slice(input);
    job.say_filled_to_all(of, job.rank(), 0);
    reduce_from_all(active, kind, of, range, out)?;
    active.end(of);
    Ok(())
}

/// Reduces the same bytes of every rank's half.
fn reduce_from_all(
    active: &Active<'_>,
    kind: Kind,
    of: crate::job::Use,
    range: Range<usize>,
    out: &mut [u8],
) -> Result<()> {
    let job = &active.job;
    for peer in job.peers() {
        job.await_filled(of, peer, 0, peer)?;
        job.count_moved(range.len());
    }
    let inputs: Vec<&[u8]> = (0..job.size())
        // SAFETY: announced by its owner for this use, which this rank has not ended.
        .map(|rank| unsafe { job.bytes(rank, of, range.clone()) })
        .collect();
    element::reduce(kind.op, kind.dtype, &inputs, kind.output, out);
    Ok(())
}

/// Every rank reduces its share of the piece, and reads the others' shares of the result.
fn two_shot(active: &mut Active<'_>, kind: Kind, input: &[u8], out: &mut [u8]) -> Result<()> {
    let _span =
        tracing::info_span!(target: "brigade::comm", "two-shot", bytes = input.len()).entered();
    let of = active.begin(Area::Scratch)?;
    let job = &active.job;
    let (rank, size) = (job.rank(), job.size());
    // SAFETY: own half: all peers have given their credit for it, and it is announced below.
    unsafe { job.bytes_mut(rank, of, 0..input.len()) }.copy_from_slice(input);
    job.say_filled_to_all(of, rank, 0);

    let shares = brigade_plan::rows::offsets(&brigade_plan::rows::split(
        input.len() / kind.dtype.bytes(),
        size,
    ));
    let share = |rank: usize, bytes: usize| shares[rank] * bytes..shares[rank + 1] * bytes;
    let sums = input.len().next_multiple_of(64);
    let sum_place = |rank: usize| {
        let r = share(rank, kind.output.bytes());
        sums + r.start..sums + r.end
    };
    // SAFETY: own half, behind the input: only the sum of this rank's share goes there, announced below.
    let own = unsafe { job.bytes_mut(rank, of, sum_place(rank)) };
    reduce_from_all(active, kind, of, share(rank, kind.dtype.bytes()), own)?;
    job.say_filled_to_all(of, rank, 1);
    for r in (0..size).map(|i| (rank + i) % size) {
        if r != rank {
            job.await_filled(of, r, 1, r)?;
            job.count_moved(sum_place(r).len());
        }
        // SAFETY: announced by its owner for this use, which this rank has not ended.
        let sum = unsafe { job.bytes(r, of, sum_place(r)) };
        out[share(r, kind.output.bytes())].copy_from_slice(sum);
    }
    active.end(of);
    Ok(())
}
