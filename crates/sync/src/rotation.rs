//! Buffers that are used in turn: one is written and read, and the one before is emptied.

/// Buffers that rotate.
pub const BUFFERS: usize = 3;

/// One use of the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turnover {
    /// Which use, from 1; wraps.
    pub epoch: u32,
    /// The buffer that is written and read.
    pub buffer: usize,
    /// The buffer to be cleared.
    pub stale: usize,
    /// Words that were filled there, from its first one on.
    pub stale_words: usize,
}

/// Which buffer is next, and how far each of them is filled: the same on every rank, since all make the same calls. The
/// buffers are counted by themselves, because 3 does not divide the number of epochs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rotation {
    uses: u32,
    next: usize,
    filled: [usize; BUFFERS],
}

impl Rotation {
    /// Begins a use that takes so many words of every rank's buffer.
    pub fn begin(&mut self, words: usize) -> Turnover {
        let buffer = self.next;
        let stale = (buffer + BUFFERS - 1) % BUFFERS;
        self.uses = self.uses.wrapping_add(1);
        self.next = (buffer + 1) % BUFFERS;
        self.filled[buffer] = words;
        Turnover {
            epoch: self.uses,
            buffer,
            stale,
            stale_words: std::mem::take(&mut self.filled[stale]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_use_clears_what_the_one_before_left() {
        let mut rotation = Rotation::default();
        let turns: Vec<_> = [5, 0, 9, 2, 1]
            .map(|n| rotation.begin(n))
            .map(|t| (t.epoch, t.buffer, t.stale, t.stale_words))
            .into();
        let want = [
            (1, 0, 2, 0),
            (2, 1, 0, 5),
            (3, 2, 1, 0),
            (4, 0, 2, 9),
            (5, 1, 0, 2),
        ];
        assert_eq!(turns, want);
    }
}
