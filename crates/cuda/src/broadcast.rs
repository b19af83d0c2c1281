//! Broadcast: the root pushes its data to all, in one kernel, or one for each piece; or lays it out, and everybody reads it.

use crate::{
    comm::{CudaComm, unexpected},
    memory::check_reach,
};
use brigade_device::{BroadcastParams, Call, Plan, Result, Turn};
use brigade_plan::{moved, pushed::Packets};
use brigade_sync::Area;

impl CudaComm {
    pub(crate) fn run_broadcast(&self, turn: &Turn, p: BroadcastParams<'_>) -> Result<Plan> {
        p.check(self.core.rank(), self.core.size())?;
        let data = p.data.as_view().retain();
        check_reach(&self.gpu().card, "data.memory", &data)?;
        let root = p.root;
        let call = Call::Broadcast {
            elements: data.shape().len(),
            dtype: data.dtype(),
            root,
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
        let piece = piece_elements * data.dtype().bytes();
        let is_root = self.core.rank() == root;
        if let Some(launch) = pushed {
            let (rank, size) = (self.core.rank(), self.core.size());
            // The root's data says nothing about the others.
            let out = if is_root { 0 } else { data.address() };
            let parts: Vec<_> = (0..size)
                .map(|r| {
                    if r == root {
                        (data.bytes(), out)
                    } else {
                        (0, 0)
                    }
                })
                .collect();
            let how = |cut: &[usize]| {
                let packets = Packets::broadcast(cut[root], size);
                let moved = match packets.are_relayed(size) {
                    true => moved::relayed_broadcast(rank, root, size, packets),
                    false => moved::push_broadcast(rank, root, size, cut[root]),
                };
                (packets, moved)
            };
            self.core.exchange(turn.stream(), &call, &[&data], |job| {
                job.push_copy((launch, piece), &data, &parts, how)
            })?;
            return Ok(plan);
        }
        // The root's data says nothing about the others.
        let out = Some(&data).filter(|_| !is_root);
        self.core
            .collective(turn.stream(), &call, &[&data], out, |job| {
                for start in (0..data.bytes()).step_by(piece.max(1)) {
                    let bytes = piece.min(data.bytes() - start);
                    let at = data.address() + start as u64;
                    let of = job.begin(Area::Scratch);
                    let place = job.core.place(root, of, 0);
                    if is_root {
                        job.moves(&[(place, at, bytes)])?;
                        job.steps.filled_to_all(of, root, 0);
                    } else {
                        job.steps.await_filled(of, root, 0, root);
                        job.count_moved(bytes);
                        job.moves(&[(at, place, bytes)])?;
                    }
                    job.steps.end(of);
                }
                Ok(())
            })?;
        Ok(plan)
    }
}
