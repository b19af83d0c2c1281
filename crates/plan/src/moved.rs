//! Bytes that a rank itself moves to or from the memory of others, as
//! [`Traffic::moved_bytes`](brigade_device::Traffic::moved_bytes) counts them: pushes count where they are made, pulls
//! where they are made, and nothing is counted twice.
//!
//! `chunk_bytes[c]` is the size of chunk `c` (in the twin, of the part that becomes rank `c`'s).

use crate::{
    dispatch::{Load, Sections},
    low_latency::{BackRow, Section, There},
    pushed::{Granules, Packets, RowShares},
    ring, rows,
};
use brigade_device::{
    AllReduceAlgorithm, CombineCall, DataType, DispatchCall, LowLatencyCombineCall,
    LowLatencyDispatchCall,
};

fn all(chunk_bytes: &[usize]) -> u64 {
    chunk_bytes.iter().map(|&b| b as u64).sum()
}

/// Ring gather: every chunk is handed on, except the next neighbour's own.
pub fn ring_gather(rank: usize, chunk_bytes: &[usize]) -> u64 {
    all(chunk_bytes) - chunk_bytes[ring::next(rank, chunk_bytes.len())] as u64
}

/// Gather by push: the own chunk, to every peer.
pub fn push_gather(rank: usize, chunk_bytes: &[usize]) -> u64 {
    chunk_bytes[rank] as u64 * (chunk_bytes.len() as u64 - 1)
}

/// Gather by pull: every chunk but the own one.
pub fn pull_gather(rank: usize, chunk_bytes: &[usize]) -> u64 {
    all(chunk_bytes) - chunk_bytes[rank] as u64
}

/// Reduce-scatter by push, as in the twin of gather-linear: every part but the own one, to its owner.
pub fn push_scatter(rank: usize, chunk_bytes: &[usize]) -> u64 {
    all(chunk_bytes) - chunk_bytes[rank] as u64
}

/// Reduce-scatter by pull: the own part, from every peer.
pub fn pull_scatter(rank: usize, chunk_bytes: &[usize]) -> u64 {
    push_gather(rank, chunk_bytes)
}

/// One-shot all-reduce, by push or by pull: the whole input, to or from every peer.
pub fn one_shot(size: usize, bytes: usize) -> u64 {
    bytes as u64 * (size as u64 - 1)
}

/// Two-shot all-reduce: in every piece a rank meets the peers' inputs of its part, and the peers' sums of the others.
/// Each piece is cut by [`rows::split`].
pub fn two_shot(
    rank: usize,
    size: usize,
    elements: usize,
    piece_elements: usize,
    input_bytes: usize,
    output_bytes: usize,
) -> u64 {
    let per_piece = |elements: usize| {
        let own = rows::piece(elements, size, rank).len();
        (own * input_bytes * (size - 1) + (elements - own) * output_bytes) as u64
    };
    let piece = piece_elements.max(1);
    (elements / piece) as u64 * per_piece(piece) + per_piece(elements % piece)
}

/// Two-shot all-reduce by push: of every piece, each peer's share to that peer, and the sums of the own share to all.
/// `types` are those of the input and of the result. Each piece is cut by [`Granules`].
pub fn two_shot_push(
    rank: usize,
    size: usize,
    elements: usize,
    piece_elements: usize,
    types: (DataType, DataType),
) -> u64 {
    let piece = piece_elements.max(1);
    (0..elements)
        .step_by(piece)
        .map(|start| {
            let elements = piece.min(elements - start);
            let cut = Granules::new(AllReduceAlgorithm::TwoShotPush, elements, types, size);
            let own = cut.elements_of(rank, elements).len();
            ((elements - own) * types.0.bytes() + own * types.1.bytes() * (size - 1)) as u64
        })
        .sum()
}

/// The same where rows of `hidden` elements stay whole, as with a norm. Each piece is cut by [`RowShares`].
pub fn two_shot_push_rows(
    rank: usize,
    size: usize,
    (rows, hidden): (usize, usize),
    piece_elements: usize,
    dtype: DataType,
) -> u64 {
    let piece = (piece_elements / hidden.max(1)).max(1);
    (0..rows)
        .step_by(piece)
        .map(|start| {
            let rows = piece.min(rows - start);
            let cut = RowShares::new(AllReduceAlgorithm::TwoShotPush, (rows, hidden), dtype, size);
            let own = cut.of(rank).len();
            ((rows - own + own * (size - 1)) * hidden * dtype.bytes()) as u64
        })
        .sum()
}

/// Broadcast by push: the root moves everything to every peer, everybody else nothing.
pub fn push_broadcast(rank: usize, root: usize, size: usize, bytes: usize) -> u64 {
    if rank == root {
        one_shot(size, bytes)
    } else {
        0
    }
}

/// Broadcast by push where peers pass it on: the root moves everything once, and everybody else a part of it to all but the root.
pub fn relayed_broadcast(rank: usize, root: usize, size: usize, packets: Packets) -> u64 {
    match (rank + size - root) % size {
        0 => packets.bytes as u64,
        distance => (packets.relayed_bytes(distance, size) * (size - 2)) as u64,
    }
}

/// Broadcast by pull: the root moves nothing, everybody else everything.
pub fn broadcast(rank: usize, root: usize, bytes: usize) -> u64 {
    if rank == root { 0 } else { bytes as u64 }
}

/// Dispatch, by either transport and in any pieces: each row that goes to a peer, with all that belongs to it. That is its scales, its
/// token, a slot and a weight for each of the token's experts, and what is beside it; the same ways again, or where every rank has the
/// experts of all tokens, only the row, its scales and what is beside it. `rows_to[r]` go to rank `r`. What pads or marks them on the way
/// does not count.
pub fn dispatch(rank: usize, rows_to: &[usize], call: &DispatchCall) -> u64 {
    pull_gather(rank, rows_to) * Sections::dispatch(call, 1).all_bytes() as u64
}

/// A dispatch that gathers, in any pieces: own `tokens` to every peer, each with its scales and what is beside it; and of each row that is
/// for a peer its token, a slot and a weight for each of the token's experts, unless that is known there.
pub fn gather_dispatch(rank: usize, rows_to: &[usize], tokens: usize, call: &DispatchCall) -> u64 {
    let bytes = |load| Sections::part(call, load, 1).all_bytes() as u64;
    let ways = match Load::of(call) {
        Load::Rest => 0,
        Load::Whole | Load::Ways => pull_gather(rank, rows_to) * bytes(Load::Ways),
    };
    let peers = rows_to.len() as u64 - 1;
    ways + peers * tokens as u64 * bytes(Load::Rest)
}

/// Combine, by either transport and in any pieces: each row that goes back to a peer, and a weight with it for each expert that it may
/// be for. `rows_to[r]` go back to rank `r`: by expert all of its rows, otherwise one for each of its tokens.
pub fn combine(rank: usize, rows_to: &[usize], call: &CombineCall) -> u64 {
    let each = call.hidden * call.dtype.bytes() + 4 * call.row_weights();
    pull_gather(rank, rows_to) * each as u64
}

/// A low-latency dispatch: each row that goes to a peer, with its scales and weights. Which experts each token names does not count.
pub fn low_latency_dispatch(rank: usize, rows_to: &[usize], call: &LowLatencyDispatchCall) -> u64 {
    let there = There::new(call);
    let each: usize = [Section::Row, Section::Scales, Section::Weights]
        .map(|s| there.of(s).1)
        .iter()
        .sum();
    pull_gather(rank, rows_to) * each as u64
}

/// A low-latency combine, `rows_to[r]` to rank `r`: a row for each expert of each token of a peer, of an expert that a token names
/// twice, two; or one for each token that has some here, if they are added before they go. Each with its scales, if it is cast.
pub fn low_latency_combine(rank: usize, rows_to: &[usize], call: &LowLatencyCombineCall) -> u64 {
    pull_gather(rank, rows_to) * BackRow::new(call).bytes() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{
        Arrangement, CombineSum, Fp8Cast, PlacementCall, ReceivedIds, ScaleFormat,
    };

    #[test]
    fn rows_count_with_what_belongs_to_them() {
        let call = DispatchCall {
            max_tokens: 9,
            hidden: 144,
            dtype: DataType::BF16,
            beside_bytes: [3, 4].into_iter().collect(),
            k: 5,
            weights: true,
            placement: PlacementCall::Ranks,
            arrangement: Arrangement::Dense,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            again: false,
            gathered: false,
            cast: None,
            choice: None,
        };
        let rows = [7, 1, 2];
        let of = |call: &DispatchCall| dispatch(0, &rows, call);
        assert_eq!(of(&call), 3 * (288 + 4 + 20 + 20 + 7));
        assert_eq!(dispatch(0, &rows[..1], &call), 0);
        assert_eq!(
            gather_dispatch(0, &rows, 8, &call),
            3 * (4 + 20 + 20) + 2 * 8 * (288 + 7)
        );
        let again = DispatchCall {
            again: true,
            ..call.clone()
        };
        assert_eq!(of(&again), 3 * (288 + 7));
        assert_eq!(gather_dispatch(0, &rows, 8, &again), 2 * 8 * (288 + 7));
        assert_eq!(gather_dispatch(0, &rows[..1], 8, &again), 0);
        let cast = DispatchCall {
            cast: Some(Fp8Cast {
                format: ScaleFormat::F32,
                column_major: true,
            }),
            weights: false,
            ..call
        };
        assert_eq!(of(&cast), 3 * (144 + 8 + 4 + 20 + 7));
        let mut back = CombineCall {
            max_tokens: 9,
            hidden: 144,
            dtype: DataType::F16,
            output: DataType::F32,
            k: 5,
            arrangement: Arrangement::Dense,
            sum: CombineSum::Rank,
            weights: true,
            choice: None,
        };
        assert_eq!(combine(1, &rows, &back), 9 * (288 + 20));
        back.sum = CombineSum::Expert;
        assert_eq!(combine(1, &rows, &back), 9 * (288 + 4));
        back.weights = false;
        assert_eq!(combine(1, &rows, &back), 9 * 288);
    }
}
