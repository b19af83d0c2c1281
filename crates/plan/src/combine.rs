//! Combine: how many rows go back at a time, and where they lie on the way.

use crate::{
    Table, Topology,
    dispatch::{Sections, in_pieces, or_pushed, pieces, queued, rows_pushed},
    fifo::Queues,
    reason, records,
};
use brigade_device::{Arrangement, CombineCall, CombineSum, Plan, Reason, Transport};
use std::ops::Range;

pub(crate) fn plan(call: &CombineCall, topology: &Topology, table: &Table) -> Result<Plan, Reason> {
    let pushed = || records::combine(call, topology);
    let limit = table
        .experts
        .plain
        .push_back_limit(topology.config.sm_budget);
    if let Some(plan) = rows_pushed(call.choice, pushed, topology, limit)? {
        return Ok(plan);
    }
    if call.choice == Some(Transport::Fifo) {
        let rows = call.max_rows();
        return queued(
            rows,
            &Queues::for_rows(topology, &queued_sections(call), rows)?,
        );
    }
    let in_place = call.choice == Some(Transport::InPlace);
    if in_place {
        if call.arrangement != Arrangement::BySource || call.weights {
            return Err(reason::not_in_place());
        }
        if topology.engines.rows_in_place {
            return Ok(in_pieces(Transport::InPlace, call.max_rows(), 1));
        }
    }
    // Sums of a rank go back as one row each, to be added in the order of ranks: there is nothing else to scatter.
    // Whole tokens, so that each can be added up as soon as it is there.
    let per_token = call.rows_per_token();
    let room = ("combine_bytes", topology.config.combine_bytes);
    let bytes = |tokens: usize| Returning::new(call, tokens.saturating_mul(per_token)).bytes();
    // While some are added up, the next are on their way.
    let cut = (call.max_tokens, table.experts.plain.rows_at_a_time);
    let transport = match in_place {
        true => Transport::InPlace,
        false => Transport::OneSided,
    };
    let halves = pieces(cut, topology, room, bytes)
        .map(|(tokens, pieces)| in_pieces(transport, tokens * per_token, pieces));
    or_pushed(call.choice, halves, pushed)
}

/// Bytes of a row that goes back through a queue: its elements, the weights beside it, and which of the rows from there it is, i32.
pub fn queued_sections(call: &CombineCall) -> [usize; 3] {
    [call.hidden * call.dtype.bytes(), 4 * call.row_weights(), 4]
}

/// What a sender's part of a half holds, for so many rows: counts, rows, and the weights that go back with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returning(Sections);

impl Returning {
    /// For rows of a combine.
    pub fn new(call: &CombineCall, rows: usize) -> Self {
        let row = call.hidden * call.dtype.bytes();
        Self(Sections::new(&[row, 4 * call.row_weights()], rows))
    }

    /// All of it.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Where the elements of `rows` rows lie.
    pub fn rows(&self, rows: usize) -> Range<usize> {
        self.0.at(0, rows)
    }

    /// Where the weights of `rows` rows lie.
    pub fn weights(&self, rows: usize) -> Range<usize> {
        self.0.at(1, rows)
    }
}

/// The rows that a rank gets back from `rank`, in their order: tokens, and which of their experts each is for, where there is a row for each.
/// `slot_ranks` says whose the slots of every token are, `k` each.
pub fn returned(
    sum: CombineSum,
    slot_ranks: &[Option<usize>],
    k: usize,
    rank: usize,
) -> Vec<(usize, Option<usize>)> {
    let mut rows = Vec::new();
    for (token, ranks) in slot_ranks.chunks_exact(k).enumerate() {
        let mut of_rank = (0..k).filter(|&entry| ranks[entry] == Some(rank));
        match sum {
            CombineSum::Expert => rows.extend(of_rank.map(|entry| (token, Some(entry)))),
            CombineSum::Rank | CombineSum::ExpertByRank => {
                rows.extend(of_rank.next().map(|_| (token, None)));
            }
        }
    }
    rows
}
