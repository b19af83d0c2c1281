//! All-reduce: pushed, in one shot or two, by a kernel that is all of it; or pulled through the scratch memory, in one shot or
//! two, between steps. All combine in rank order. Or by NCCL, which combines as it likes (`nccl_sums.rs`).

use crate::{
    comm::{CudaComm, unexpected},
    finish::same_elements,
    job::Job,
    kept::Kept,
    memory::check_reach,
    pushed,
    reduce_scatter::Reduction,
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceParams, Buffer, Call, DataType, Launch, Plan, ReduceOp, Result,
    Stream,
};
use brigade_sync::Area;
use std::sync::Arc;

/// What every piece is reduced with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) dtype: DataType,
    pub(crate) output: DataType,
    pub(crate) op: ReduceOp,
}

/// A piece: its elements, and where they are and go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) elements: usize,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Kind {
    /// Elements from `start` on.
    pub(crate) fn piece(self, start: usize, elements: usize, from: &Buffer, to: &Buffer) -> Piece {
        Piece {
            elements,
            from: from.address() + (start * self.dtype.bytes()) as u64,
            to: to.address() + (start * self.output.bytes()) as u64,
        }
    }
}

impl CudaComm {
    /// As a call of its own, or as part of one whose signature it bears.
    pub(crate) fn run_all_reduce(
        &self,
        on: &Stream,
        part_of: Option<&Call>,
        p: AllReduceParams<'_>,
    ) -> Result<Plan> {
        p.check()?;
        let to = p.data.as_view().retain();
        let from = p.from.map_or_else(|| to.clone(), |f| f.retain());
        check_reach(&self.gpu().card, "data.memory", &to)?;
        check_reach(&self.gpu().card, "from.memory", &from)?;
        let call = Call::AllReduce {
            elements: from.shape().len(),
            dtype: from.dtype(),
            output: to.dtype(),
            op: p.op,
            choice: p.choice,
        };
        // What stopped the group says more than that NCCL's communicator ended with it.
        self.core.usable()?;
        let plan = self.core.plan(&call)?;
        let Plan::AllReduce {
            algorithm,
            piece_elements,
            launch,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let signed = part_of.unwrap_or(&call);
        let kind = Kind {
            dtype: from.dtype(),
            output: to.dtype(),
            op: p.op,
        };
        // In place, a piece is laid out before it is written.
        let from = if same_elements(&from, &to) {
            from
        } else {
            self.apart(on, from, &to)?
        };
        if matches!(
            algorithm,
            AllReduceAlgorithm::OneShotPush | AllReduceAlgorithm::TwoShotPush
        ) {
            let how = (algorithm, launch);
            let most = piece_elements.min(pushed::MOST_ELEMENTS);
            self.core.exchange(on, signed, &[&from, &to], |job| {
                pushed(job, how, kind, most, &from, &to)
            })?;
            return Ok(plan);
        }
        if algorithm == AllReduceAlgorithm::Nccl {
            let sums = self.core.nccl()?;
            let kept = Kept::Nccl(Arc::clone(sums)).buffer()?;
            self.core
                .collective(on, signed, &[&from, &kept], Some(&to), |job| {
                    job.sum_by_nccl(sums, kind, (&from, &to))
                })?;
            return Ok(plan);
        }
        self.core
            .collective(on, signed, &[&from], Some(&to), |job| {
                pulled(job, algorithm, kind, piece_elements, &from, &to)
            })?;
        Ok(plan)
    }
}

/// By pushing, piece by piece, the first one last: behind its address lies all of the result, which it poisons if the group was
/// stopped, in whichever piece that was. Those before it have been taken then, so inputs in the same place are not needed any more.
fn pushed(
    job: &mut Job<'_>,
    how: (AllReduceAlgorithm, Launch),
    kind: Kind,
    piece_elements: usize,
    from: &Buffer,
    to: &Buffer,
) -> Result<()> {
    let all = from.shape().len();
    for start in pushed::pieces(all, piece_elements) {
        let piece = kind.piece(start, piece_elements.min(all - start), from, to);
        job.push(how, kind, piece, (start == 0).then(|| to.bytes()))?;
    }
    Ok(())
}

/// By pulling, piece by piece.
pub(crate) fn pulled(
    job: &mut Job<'_>,
    algorithm: AllReduceAlgorithm,
    kind: Kind,
    piece_elements: usize,
    from: &Buffer,
    to: &Buffer,
) -> Result<()> {
    let all = from.shape().len();
    for start in (0..all).step_by(piece_elements.max(1)) {
        let piece = kind.piece(start, piece_elements.min(all - start), from, to);
        match algorithm {
            AllReduceAlgorithm::TwoShot => two_shot(job, kind, &piece)?,
            _ => one_shot(job, kind, &piece)?,
        }
    }
    Ok(())
}

/// Every rank lays its input out, and reads everybody's.
fn one_shot(job: &mut Job<'_>, kind: Kind, piece: &Piece) -> Result<()> {
    let core = job.core;
    let (me, size) = (core.rank(), core.size());
    let bytes = piece.elements * kind.dtype.bytes();
    let of = job.begin(Area::Scratch);
    job.moves(&[(core.place(me, of, 0), piece.from, bytes)])?;
    job.steps.filled_to_all(of, me, 0);
    job.steps.await_all(of, 0);
    job.count_moved((size - 1) * bytes);
    job.reduce(Reduction {
        parts: size,
        op: kind.op,
        from: core.place(0, of, 0),
        stride: core.memory.symmetric.stride(),
        dtype: kind.dtype,
        elements: piece.elements,
        out: piece.to,
        output: kind.output,
    })?;
    job.steps.end(of);
    Ok(())
}

/// Every rank reduces its share of the piece, and reads the others' shares of the result.
fn two_shot(job: &mut Job<'_>, kind: Kind, piece: &Piece) -> Result<()> {
    let core = job.core;
    let (me, size) = (core.rank(), core.size());
    let (in_bytes, out_bytes) = (kind.dtype.bytes(), kind.output.bytes());
    let bytes = piece.elements * in_bytes;
    let of = job.begin(Area::Scratch);
    job.moves(&[(core.place(me, of, 0), piece.from, bytes)])?;
    job.steps.filled_to_all(of, me, 0);
    job.steps.await_all(of, 0);
    let shares = brigade_plan::rows::offsets(&brigade_plan::rows::split(piece.elements, size));
    let share = |rank: usize| shares[rank]..shares[rank + 1];
    // Sums lie behind the input.
    let sums = bytes.next_multiple_of(64);
    let sum_place = |rank: usize| core.place(rank, of, sums + share(rank).start * out_bytes);
    let own = share(me);
    job.count_moved((size - 1) * own.len() * in_bytes);
    job.reduce(Reduction {
        parts: size,
        op: kind.op,
        from: core.place(0, of, own.start * in_bytes),
        stride: core.memory.symmetric.stride(),
        dtype: kind.dtype,
        elements: own.len(),
        out: sum_place(me),
        output: kind.output,
    })?;
    job.steps.filled_to_all(of, me, 1);
    job.steps.await_all(of, 1);
    let list: Vec<_> = (0..size)
        .map(|r| {
            let target = piece.to + (share(r).start * out_bytes) as u64;
            (target, sum_place(r), share(r).len() * out_bytes)
        })
        .collect();
    for r in core.peers() {
        job.count_moved(share(r).len() * out_bytes);
    }
    job.moves(&list)?;
    job.steps.end(of);
    Ok(())
}
