//! Pieces through the halves of an area: while one is taken, the next is on its way.

use crate::{
    job::{Job, Side},
    mark::CudaMark,
    steps::Use,
};
use brigade_device::Result;
use brigade_sync::Area;
use cudarc::driver::sys;

/// What every rank writes into its part of all halves, piece by piece.
pub(crate) trait Pieces {
    /// Where.
    const AREA: Area;

    /// How many: the same on all ranks.
    fn count(&self) -> usize;

    /// Whether the first is little, and so goes beside the second.
    fn begins_with_little(&self) -> bool {
        false
    }

    /// Whether a piece stays in its half when the call has ended.
    fn stays(&self, _piece: usize) -> bool {
        false
    }

    /// What comes before the first.
    fn prepare(&mut self, job: &mut Job<'_>) -> Result<()>;

    /// Writes a piece, on this stream.
    fn push(&self, job: &Job<'_>, of: Use, piece: usize, on: sys::CUstream) -> Result<()>;

    /// Takes what all ranks have written, on the caller's stream.
    fn take(&mut self, job: &mut Job<'_>, of: Use, piece: usize) -> Result<()>;
}

impl Job<'_> {
    /// Passes all pieces. Of several, the next is written while one is taken: on the mover, and announced from the waiter, so that no wait
    /// of this rank's comes between. Two are under way at most, since there are two halves.
    pub(crate) fn relay<P: Pieces>(&mut self, pieces: &mut P) -> Result<()> {
        let count = pieces.count();
        if count < 2 {
            return (0..count).try_for_each(|_| self.at_once(pieces));
        }
        let mut begun = vec![self.begin(P::AREA), self.begin(P::AREA)];
        self.fork_behind_steps(&[Side::Waiter, Side::Mover])?;
        pieces.prepare(self)?;
        self.side_after(Side::Mover, &self.mark()?)?;
        let mut written = match pieces.begins_with_little() {
            true => {
                self.traced_all(
                    || "push 0".into(),
                    |job| pieces.push(job, begun[0], 0, job.stream),
                )?;
                self.mark()?
            }
            false => self.push_aside(pieces, begun[0], 0)?,
        };
        for piece in 0..count {
            let of = begun[piece];
            let here = written;
            written = match begun.get(piece + 1) {
                Some(&next) => self.push_aside(pieces, next, piece + 1)?,
                None => self.mark()?,
            };
            self.side_after(Side::Waiter, &here)?;
            let mut steps = self.core.steps();
            steps.filled_to_all(of, self.core.rank(), 0);
            let say = || self.steps_on(Side::Waiter, steps);
            self.beside(Side::Waiter, || format!("say {piece}"), say)?;
            let again = piece + 2 < count;
            let said = again.then(|| self.side_mark(Side::Waiter)).transpose()?;
            self.steps.await_all(of, 0);
            self.traced_all(|| format!("await {piece}"), Job::steps_now)?;
            self.after(&here)?;
            self.traced_all(
                || format!("take {piece}"),
                |job| pieces.take(job, of, piece),
            )?;
            if !pieces.stays(piece) {
                self.steps.end(of);
            }
            if let Some(said) = said {
                // What is said has the half's count in it, which its next use moves on. It waits for nothing but what was written before.
                self.after(&said)?;
                begun.push(self.begin(P::AREA));
                self.traced_all(|| format!("begin {}", piece + 2), Job::steps_now)?;
                self.side_after(Side::Mover, &self.mark()?)?;
            }
        }
        Ok(())
    }

    /// All of it on the caller's stream.
    fn at_once<P: Pieces>(&mut self, pieces: &mut P) -> Result<()> {
        let of = self.begin(P::AREA);
        pieces.prepare(self)?;
        self.steps_now()?;
        pieces.push(self, of, 0, self.stream)?;
        self.steps.filled_to_all(of, self.core.rank(), 0);
        self.steps.await_all(of, 0);
        pieces.take(self, of, 0)?;
        if !pieces.stays(0) {
            self.steps.end(of);
        }
        Ok(())
    }

    /// Writes a piece beside the caller's stream, and says when that is done.
    fn push_aside<P: Pieces>(&self, pieces: &P, of: Use, piece: usize) -> Result<CudaMark> {
        let on = self.stream_of(Side::Mover);
        let push = || pieces.push(self, of, piece, on);
        self.beside(Side::Mover, || format!("push {piece}"), push)?;
        self.side_mark(Side::Mover)
    }
}
