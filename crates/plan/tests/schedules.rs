//! Properties of chunks, orders, moved bytes and scratch sizes, against naive counts.

mod common;

use brigade_device::*;
use brigade_plan::{Engines, Table, moved, plan, ring, rows};
use common::topology;
use proptest::prelude::*;
use std::collections::VecDeque;

fn permutation(order: &[u16], size: usize) -> bool {
    let mut sorted: Vec<_> = order.iter().map(|&c| usize::from(c)).collect();
    sorted.sort_unstable();
    sorted == (0..size).collect::<Vec<_>>()
}

/// A world of 1 to 12 ranks, one of them, and bytes or rows for each.
fn world() -> impl Strategy<Value = (usize, Vec<usize>)> {
    prop::collection::vec(0..5000usize, 1..=12).prop_flat_map(|v| (0..v.len(), Just(v)))
}

/// Runs the ring as queues between neighbours; `sends(rank)` is what the rank hands on, and a rank may hand on only what
/// it has. True if every rank sees the chunks in the order in which it multiplies them.
fn ring_delivers(size: usize, sends: impl Fn(usize) -> ring::Order) -> bool {
    let mut to: Vec<VecDeque<u16>> = vec![VecDeque::new(); size];
    let mut seen: Vec<Vec<u16>> = (0..size).map(|r| vec![r as u16]).collect();
    for step in 0..size.saturating_sub(1) {
        for rank in 0..size {
            let Some(&chunk) = sends(rank).get(step) else {
                return false;
            };
            if !seen[rank].contains(&chunk) {
                return false;
            }
            to[ring::next(rank, size)].push_back(chunk);
        }
        for rank in 0..size {
            seen[rank].extend(to[rank].pop_front());
        }
    }
    let left = to.iter().any(|q| !q.is_empty());
    let wanted = |(rank, seen): (usize, &Vec<u16>)| seen[..] == ring::gather_order(rank, size)[..];
    !left && seen.iter().enumerate().all(wanted)
}

#[test]
fn a_ring_that_hands_on_in_another_order_is_caught() {
    for size in 3..=8 {
        assert!(ring_delivers(size, |r| ring::ring_sends(r, size)));
        assert!(!ring_delivers(size, |r| ring::pull_order(r, size)));
        assert!(!ring_delivers(size, |r| {
            let mut wrong = ring::ring_sends(r, size);
            wrong.swap(0, 1);
            wrong
        }));
        assert!(!ring_delivers(size, |r| {
            let mut short = ring::ring_sends(r, size);
            short.pop();
            short
        }));
    }
}

proptest! {
    #[test]
    fn split_is_even_and_complete(total in 0..100_000usize, size in 1..=64usize) {
        let split = rows::split(total, size);
        prop_assert_eq!(split.len(), size);
        prop_assert_eq!(split.iter().sum::<usize>(), total);
        prop_assert!(split.is_sorted_by(|a, b| a >= b), "the first ranks get more");
        prop_assert!(split[0] - split[size - 1] <= 1);
    }

    #[test]
    fn offsets_are_prefix_sums((_, counts) in world()) {
        let offsets = rows::offsets(&counts);
        prop_assert_eq!(offsets.len(), counts.len() + 1);
        prop_assert_eq!(offsets[0], 0);
        for (i, &n) in counts.iter().enumerate() {
            prop_assert_eq!(offsets[i + 1] - offsets[i], n);
        }
    }

    #[test]
    fn pieces_cover_a_chunk_exactly(rows in 0..5000usize, pieces in 1..=32usize) {
        let cut: Vec<_> = (0..pieces).map(|p| rows::piece(rows, pieces, p)).collect();
        prop_assert!(cut.iter().cloned().flatten().eq(0..rows));
        prop_assert!(rows::piece(rows, pieces, pieces).is_empty());
        prop_assert!(rows::piece(rows, 0, 0).is_empty());
    }

    #[test]
    fn orders_are_permutations_and_steps_do_not_collide(size in 1..=32usize) {
        for order in [ring::gather_order, ring::pull_order, ring::scatter_order] {
            let orders: Vec<_> = (0..size).map(|r| order(r, size)).collect();
            for o in &orders {
                prop_assert!(permutation(o, size));
            }
            for step in 0..size {
                let at: Vec<_> = orders.iter().map(|o| o[step]).collect();
                prop_assert!(permutation(&at, size), "two ranks are at the same chunk");
            }
        }
        for rank in 0..size {
            prop_assert_eq!(usize::from(ring::gather_order(rank, size)[0]), rank);
            prop_assert_eq!(usize::from(ring::pull_order(rank, size)[0]), rank);
            prop_assert_eq!(usize::from(ring::scatter_order(rank, size)[size - 1]), rank);
            prop_assert_eq!(ring::prev(ring::next(rank, size), size), rank);
        }
    }

    #[test]
    fn the_ring_delivers_every_chunk_once_in_the_order_of_use(size in 1..=32usize) {
        prop_assert!(ring_delivers(size, |r| ring::ring_sends(r, size)));
    }

    #[test]
    fn moved_bytes_are_those_of_the_schedules((rank, chunks) in world()) {
        let size = chunks.len();
        let sum = |order: ring::Order| -> u64 { order.iter().map(|&c| chunks[usize::from(c)] as u64).sum() };
        prop_assert_eq!(moved::ring_gather(rank, &chunks), sum(ring::ring_sends(rank, size)));
        let others = |mut order: ring::Order| {
            order.retain(|c| usize::from(*c) != rank);
            order
        };
        prop_assert_eq!(moved::pull_gather(rank, &chunks), sum(others(ring::pull_order(rank, size))));
        prop_assert_eq!(moved::push_scatter(rank, &chunks), sum(others(ring::scatter_order(rank, size))));
        let (mut pushed, mut fetched) = (0, 0);
        for peer in (0..size).filter(|&p| p != rank) {
            pushed += chunks[rank] as u64;
            fetched += moved::broadcast(rank, peer, chunks[rank]);
        }
        prop_assert_eq!(moved::push_gather(rank, &chunks), pushed);
        prop_assert_eq!(moved::pull_scatter(rank, &chunks), fetched);
        prop_assert_eq!(moved::one_shot(size, chunks[rank]), pushed);
        prop_assert_eq!(moved::broadcast(rank, rank, chunks[rank]), 0);
        // However a gather is done, the group as a whole moves the same bytes.
        let group = |f: fn(usize, &[usize]) -> u64| (0..size).map(|r| f(r, &chunks)).sum::<u64>();
        prop_assert_eq!(group(moved::ring_gather), group(moved::push_gather));
        prop_assert_eq!(group(moved::ring_gather), group(moved::pull_gather));
        prop_assert_eq!(group(moved::push_scatter), group(moved::pull_scatter));
    }

    #[test]
    fn two_shot_moves_what_a_naive_count_says(size in 1..=12usize, elements in 0..2000usize, piece in 1..600usize) {
        for rank in 0..size {
            let mut naive = 0;
            for start in (0..elements).step_by(piece) {
                let parts = rows::split(piece.min(elements - start), size);
                for peer in (0..size).filter(|&p| p != rank) {
                    naive += 2 * parts[rank] as u64 + 4 * parts[peer] as u64;
                }
            }
            prop_assert_eq!(moved::two_shot(rank, size, elements, piece, 2, 4), naive);
        }
    }

    #[test]
    fn a_plan_depends_on_the_rank_in_its_order_alone(
        (_, rows) in world(),
        (k, n) in (0..3000usize, 0..3000usize),
        choice in prop::sample::select(common::CHOICES.to_vec()),
    ) {
        let size = rows.len();
        for (_, call) in common::both(&LinearCall { k, n, choice, ..common::linear(&rows) }) {
            let unordered = |rank| match plan(&call, &topology(rank, size), &Table::host()) {
                Ok(Plan::GatherLinear(mut p) | Plan::LinearReduceScatter(mut p)) => {
                    assert!(permutation(&p.order, size));
                    p.order.clear();
                    Ok(p)
                }
                Ok(other) => panic!("{other:?}"),
                Err(reason) => Err(reason),
            };
            for rank in 1..size {
                prop_assert_eq!(unordered(rank), unordered(0));
            }
        }
    }

    #[test]
    fn a_piece_of_an_all_reduce_is_the_largest_that_fits(scratch_bytes in 4096..100_000usize, f32_out in any::<bool>(), f32_in in any::<bool>()) {
        let of = |f32: bool| if f32 { DataType::F32 } else { DataType::BF16 };
        let (dtype, output) = (of(f32_in), of(f32_in || f32_out));
        let mut topology = topology(0, 4);
        topology.config.scratch_bytes = scratch_bytes;
        let call = Call::AllReduce { elements: 1, dtype, output, op: ReduceOp::Sum, choice: None };
        let Ok(Plan::AllReduce { piece_elements, .. }) = plan(&call, &topology, &Table::host()) else {
            panic!("no plan");
        };
        let need = |p: usize| (p * dtype.bytes()).next_multiple_of(64) + p * output.bytes();
        prop_assert!(need(piece_elements) <= scratch_bytes);
        prop_assert!(need(piece_elements + 1) > scratch_bytes);
    }

    #[test]
    fn pieces_of_messages_are_what_a_slot_holds(message_bytes in 4096..200_000usize, size in 1..=1024usize) {
        let mut topology = topology(0, size);
        topology.engines = Engines::cuda(false, false);
        topology.config.message_bytes = message_bytes;
        // Nothing passes through it.
        topology.config.scratch_bytes = 4096;
        let call = Call::AllToAll { row_len: 1, dtype: DataType::BF16 };
        let Ok(Plan::Copy { piece_elements, .. }) = plan(&call, &topology, &Table::host()) else {
            panic!("an all-to-all of {size} ranks");
        };
        let piece = piece_elements * DataType::BF16.bytes();
        prop_assert!(piece > 0 && piece.is_multiple_of(64));
        let share = message_bytes / size;
        prop_assert!(piece >= share && piece <= (share + 63).max(64));
    }

    #[test]
    fn shares_of_ranks_are_aligned_and_fit(scratch_bytes in 4096..200_000usize, size in 1..=1024usize) {
        let mut topology = topology(0, size);
        topology.config.scratch_bytes = scratch_bytes;
        let call = Call::AllToAll { row_len: 1, dtype: DataType::BF16 };
        match plan(&call, &topology, &Table::host()) {
            Ok(Plan::Copy { piece_elements, .. }) => {
                let share = piece_elements * DataType::BF16.bytes();
                prop_assert!(share > 0 && share.is_multiple_of(64));
                prop_assert!(share * size <= scratch_bytes && (share + 64) * size > scratch_bytes);
            }
            Ok(other) => panic!("{other:?}"),
            Err(reason) => {
                prop_assert_eq!(reason.code, brigade_plan::reason::SCRATCH);
                prop_assert!(scratch_bytes < 64 * size);
            }
        }
    }
}
