//! All-gather: every rank pushes its rows to all, in one kernel, or one for each piece; or lays them out, and reads everybody's.

use crate::{
    comm::{CudaComm, unexpected},
    job::Job,
    memory::check_reach,
};
use brigade_device::{AllGatherParams, Buffer, Call, PerRank, Plan, Result, Stream};
use brigade_plan::{moved, pushed::Packets};
use brigade_sync::Area;

impl CudaComm {
    /// As a call of its own, or as part of one whose signature it bears.
    pub(crate) fn run_all_gather(
        &self,
        on: &Stream,
        part_of: Option<&Call>,
        p: AllGatherParams<'_>,
    ) -> Result<Plan> {
        let (rank, size) = (self.core.rank(), self.core.size());
        p.check(rank, size)?;
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        check_reach(&self.gpu().card, "to.memory", &to)?;
        check_reach(&self.gpu().card, "from.memory", &from)?;
        let row_len = to.shape().row_len();
        let call = Call::AllGather {
            rows: p.rows_per_rank.into(),
            row_len,
            dtype: to.dtype(),
        };
        let plan = self.core.plan(&call)?;
        let Plan::Copy {
            piece_elements,
            pushed,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let row_bytes = row_len * to.dtype().bytes();
        let bytes: PerRank = p
            .rows_per_rank
            .iter()
            .map(|rows| rows * row_bytes)
            .collect();
        let piece = piece_elements * to.dtype().bytes();
        let from = self.apart(on, from, &to)?;
        let signed = part_of.unwrap_or(&call);
        if let Some(launch) = pushed {
            let offsets = brigade_plan::rows::offsets(&bytes);
            let at = |&offset: &usize| to.address() + offset as u64;
            let parts: Vec<_> = bytes.iter().copied().zip(offsets.iter().map(at)).collect();
            let how = |cut: &[usize]| (Packets::gathered(cut), moved::push_gather(rank, cut));
            self.core.exchange(on, signed, &[&from, &to], |job| {
                job.push_copy((launch, piece), &from, &parts, how)
            })?;
            return Ok(plan);
        }
        self.core
            .collective(on, signed, &[&from], Some(&to), |job| {
                all_gather(job, &bytes, piece, &to, &from)
            })?;
        Ok(plan)
    }

    /// `from`, or a copy of it where it shares memory with `to`.
    pub(crate) fn apart(&self, on: &Stream, from: Buffer, to: &Buffer) -> Result<Buffer> {
        if !crate::memory::overlap(&from, to) {
            return Ok(from);
        }
        let lane = self.gpu().lane(on)?;
        let copy = self
            .gpu()
            .scratch(lane, from.dtype(), from.shape().dims())?;
        self.gpu().copy_bytes(lane, &copy, &from)?;
        Ok(copy)
    }
}

/// `bytes` are those of every rank; they pass through the scratch memory in pieces of `piece` bytes.
pub(crate) fn all_gather(
    job: &mut Job<'_>,
    bytes: &[usize],
    piece: usize,
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    let core = job.core;
    let (me, size) = (core.rank(), core.size());
    let offsets = brigade_plan::rows::offsets(bytes);
    let most = bytes.iter().copied().max().unwrap_or(0);
    for start in (0..most).step_by(piece.max(1)) {
        let cut = |rank: usize| start.min(bytes[rank])..(start + piece).min(bytes[rank]);
        let of = job.begin(Area::Scratch);
        let own = cut(me);
        let source = from.address() + own.start as u64;
        job.moves(&[(core.place(me, of, 0), source, own.len())])?;
        job.steps.filled_to_all(of, me, 0);
        job.steps.await_all(of, 0);
        let list: Vec<_> = (0..size)
            .map(|r| {
                let range = cut(r);
                let target = to.address() + (offsets[r] + range.start) as u64;
                (target, core.place(r, of, 0), range.len())
            })
            .collect();
        for r in core.peers() {
            job.count_moved(cut(r).len());
        }
        job.moves(&list)?;
        job.steps.end(of);
    }
    Ok(())
}
