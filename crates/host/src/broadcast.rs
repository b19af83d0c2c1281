//! Broadcast: the root pushes its data to all; or lays it out, and everybody reads it.

use crate::{
    comm::{HostComm, unexpected},
    job::Active,
    memory::{poison, writing},
    pushed,
    queue::HostQueue,
};
use brigade_device::{BroadcastParams, Call, PerRank, Plan, Result, Turn};
use brigade_sync::Area;
use smallvec::smallvec;

impl HostComm {
    pub(crate) fn run_broadcast(&self, turn: &Turn, p: BroadcastParams<'_>) -> Result<Plan> {
        let group = self.core.control.group();
        p.check(group.rank, group.size)?;
        let data = p.data.as_view().retain();
        let root = p.root;
        let call = Call::Broadcast {
            elements: data.shape().len(),
            dtype: data.dtype(),
            root,
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
        let piece = piece_elements * data.dtype().bytes();
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| {
                writing(&data, &[], |out, _| {
                    let done = match launch {
                        Some(_) => push(active, root, out),
                        None => pull(active, root, piece, out),
                    };
                    let is_root = active.job.rank() == root;
                    // The root's data says nothing about the others.
                    done.and_then(|()| active.job.meet()).inspect_err(|_| {
                        if !is_root {
                            poison(data.dtype(), out);
                        }
                    })
                })
            })
        })?;
        Ok(plan)
    }
}

/// All of it at once.
fn push(active: &mut Active<'_>, root: usize, out: &mut [u8]) -> Result<()> {
    let mut parts: PerRank = smallvec![0; active.job.size()];
    parts[root] = out.len();
    pushed::copy(active, &parts, out)
}

/// Through the root's scratch memory, in pieces of `piece` bytes.
fn pull(active: &mut Active<'_>, root: usize, piece: usize, out: &mut [u8]) -> Result<()> {
    out.chunks_mut(piece.max(1)).try_for_each(|out| {
        let _span = tracing::info_span!(target: "brigade::comm", "broadcast", root).entered();
        let of = active.begin(Area::Scratch)?;
        let job = &active.job;
        if job.rank() == root {
            // SAFETY: own half: all peers have given their credit for it, and it is announced below.
            unsafe { job.bytes_mut(root, of, 0..out.len()) }.copy_from_slice(out);
            job.say_filled_to_all(of, root, 0);
        } else {
            job.await_filled(of, root, 0, root)?;
            job.count_moved(out.len());
            // SAFETY: announced by the root for this use, which this rank has not ended.
            out.copy_from_slice(unsafe { job.bytes(root, of, 0..out.len()) });
        }
        active.end(of);
        Ok(())
    })
}
