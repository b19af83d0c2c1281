//! Experts of all ranks' tokens, where every rank has them: whose they are, and where all rows go.

use crate::routes::{Chooser, Routes};
use std::ops::Range;

/// What lengths say of gathered ids.
#[derive(Clone, Copy, Debug)]
pub struct Lengths<'a> {
    /// First rows of all ranks and their end if they are ragged, and numbers of rows if there is room for as many of each.
    pub lengths: &'a [i32],
    /// Whether they are ragged.
    pub ragged: bool,
    /// Rows of ids in all.
    pub rows: usize,
    /// Most rows of a rank.
    pub max_tokens: usize,
}

/// A number of rows that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Whose.
    pub source: usize,
    /// What they should have been, or at most.
    pub want: usize,
    /// What they are said to be.
    pub seen: i64,
}

impl Lengths<'_> {
    /// The rows of each of `size` ranks, of which rank `me` has so many.
    ///
    /// ```
    /// use brigade_plan::known::Lengths;
    /// let padded = Lengths { lengths: &[2, 0, 3], ragged: false, rows: 12, max_tokens: 4 };
    /// assert_eq!(padded.runs(3, (2, 3)), Ok(vec![0..2, 4..4, 8..11]));
    /// let ragged = Lengths { lengths: &[0, 2, 2, 5], ragged: true, ..padded };
    /// assert_eq!(ragged.runs(3, (2, 3)), Ok(vec![0..2, 2..2, 2..5]));
    /// assert_eq!(ragged.runs(3, (2, 4)).unwrap_err().seen, 3);
    /// ```
    ///
    /// # Errors
    /// The first number of rows that cannot be.
    pub fn runs(
        &self,
        size: usize,
        (me, tokens): (usize, usize),
    ) -> Result<Vec<Range<usize>>, Unfit> {
        let most = self.max_tokens;
        let run = |source: usize| {
            let at = |i: usize| i64::from(self.lengths[i]);
            let (first, end) = match self.ragged {
                true => (at(source), at(source + 1)),
                false => ((source * most) as i64, (source * most) as i64 + at(source)),
            };
            let seen = end - first;
            let fits = first >= 0 && seen >= 0 && end <= self.rows as i64 && seen <= most as i64;
            match fits && (source != me || seen == tokens as i64) {
                true => Ok(first as usize..end as usize),
                false => {
                    let want = if source == me { tokens } else { most };
                    Err(Unfit { source, want, seen })
                }
            }
        };
        (0..size).map(run).collect()
    }
}

/// Where the rows of every rank go, whose tokens' ids are in these runs of all, `k` each; `chooser` is of any rank.
pub fn routes_of_all(
    ids: &[i64],
    k: usize,
    runs: &[Range<usize>],
    chooser: Chooser<'_>,
) -> Vec<Routes> {
    let of = |(rank, run): (usize, &Range<usize>)| {
        let ids = &ids[run.start * k..run.end * k];
        Routes::new(ids, k, &Chooser { rank, ..chooser })
    };
    runs.iter().enumerate().map(of).collect()
}
