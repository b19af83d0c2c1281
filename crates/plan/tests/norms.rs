//! How sums with a norm are launched: by rows, within what a rank has for blocks that wait.

#![allow(clippy::unwrap_used, reason = "what is not as promised panics")]

mod common;

use brigade_device::{
    AllReduceAlgorithm as A, Call, CommConfig, DataType, Launch, ParallelMode, Plan, QScheme,
};
use brigade_plan::{
    Engines, Entries, Table, Topology,
    crossover::{Gpus, Links},
    norm::{Blocks, MOST_THREADS, Room},
    plan,
    pushed::RowShares,
    reason, told,
};
use common::topology;
use proptest::prelude::*;
use std::fmt::Write;

const ROWS: [usize; 11] = [0, 1, 2, 4, 8, 16, 32, 64, 128, 512, 2048];

/// An H200 that nobody shares.
fn room(sm_budget: Option<u16>) -> Room {
    Room {
        sms: 132,
        most: sm_budget.map_or(132, u32::from),
        budget: sm_budget.is_some(),
        places: 132,
        shared: false,
        overtakes: true,
        wide: true,
        hooked: false,
    }
}

fn on_gpus(size: usize, sm_budget: Option<u16>) -> (Topology, Table) {
    let gpus = Gpus {
        model: Some("NVIDIA H200".into()),
        links: Links::Nvlink,
        ranks: size,
    };
    let mut topology = Topology {
        engines: Engines::cuda(true, true),
        ..topology(0, size)
    };
    topology.config.all_reduce_bytes = 128 << 20;
    topology.config.sm_budget = sm_budget;
    (topology, Table::cuda(&gpus, &Entries::default()).unwrap())
}

fn norm(rows: usize, hidden: usize) -> Call {
    Call::AllReduceNorm {
        rows,
        hidden,
        dtype: DataType::BF16,
        scheme: QScheme::None,
        eps_bits: 0,
        scale_bits: None,
        choice: None,
    }
}

fn planned(call: &Call, (topology, table): &(Topology, Table)) -> (A, Launch) {
    match plan(call, topology, table).unwrap() {
        Plan::AllReduce {
            algorithm, launch, ..
        } => (algorithm, launch),
        other => panic!("{other:?}"),
    }
}

/// And what a plan says is what a GPU launches that has as much as plans take for granted.
#[test]
fn launches_of_sums_with_a_norm() {
    let mut text = String::new();
    for (size, sm_budget) in [
        (1, None),
        (2, None),
        (4, None),
        (8, None),
        (4, Some(24)),
        (4, Some(1)),
    ] {
        let on = on_gpus(size, sm_budget);
        let budget = sm_budget.map_or(String::new(), |sms| format!(", {sms} SMs"));
        for hidden in [100, 1024, 4096, 8192, 16_384] {
            writeln!(text, "world {size}{budget}, rows of {hidden}").unwrap();
            for rows in ROWS {
                let (algorithm, launch) = planned(&norm(rows, hidden), &on);
                let cut = RowShares::new(algorithm, (rows, hidden), DataType::BF16, size);
                let found = Room {
                    wide: hidden % 8 == 0,
                    ..room(sm_budget)
                };
                let of = Blocks::new(algorithm, &cut, size, &found);
                let Launch { blocks, threads } = launch;
                assert_eq!((of.blocks, of.threads), (blocks.into(), threads.into()));
                let cluster = match of.cluster {
                    1 => String::new(),
                    n => format!(" in clusters of {n}"),
                };
                let split = if of.split { ", split" } else { "" };
                let early = if of.programmatic { ", early" } else { "" };
                let algorithm = format!("{algorithm:?}");
                writeln!(
                    text,
                    "  {rows:>4} {algorithm:<11} {blocks:>3} x {threads}{cluster}{early}{split}"
                )
                .unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

/// A row that is too long for one memory may fit another: what is left is taken, whatever is quicker.
#[test]
fn a_row_goes_where_it_fits() {
    let with = |config: CommConfig| {
        let (mut topology, table) = on_gpus(8, None);
        topology.config = config;
        (topology, table)
    };
    let usual = with(CommConfig::new(ParallelMode::Tp));
    // In one shot a row has a place of 2048 granules for each of 7 peers, in two 15.
    let few = CommConfig {
        all_reduce_bytes: 8 * 2048 * 16,
        scratch_bytes: 4096,
        ..usual.0.config.clone()
    };
    let call = norm(5, 16_384);
    assert_eq!(planned(&call, &usual).0, A::TwoShotPush);
    assert_eq!(planned(&call, &with(few.clone())).0, A::OneShotPush);
    let host = (
        Topology {
            engines: Engines::host(),
            ..with(few.clone()).0
        },
        Table::host(),
    );
    assert_eq!(planned(&call, &host).0, A::OneShotPush);
    let none = CommConfig {
        all_reduce_bytes: 0,
        ..few
    };
    let (topology, table) = with(none);
    let why = plan(&call, &topology, &table).unwrap_err();
    assert_eq!(why.code, reason::SCRATCH, "{why}");
}

/// So many rows of 8192 columns, of which a block has at most one at a time: blocks that push beside it count, too.
#[test]
fn what_is_told_counts_all_blocks() {
    let told_of = |rows, sm_budget| {
        let (topology, table) = on_gpus(4, sm_budget);
        told(&norm(rows, 8192), &topology, &table).unwrap()
    };
    let one = told_of(1, None);
    assert!(
        one.contains("8 blocks of 128 threads on at most 8 SMs"),
        "{one}"
    );
    let budget = told_of(1, Some(4));
    assert!(budget.contains(" on at most 4 SMs"), "{budget}");
    let mut figures = on_gpus(4, None);
    figures.1.all_reduce.bf16.max_blocks = 2;
    let (topology, table) = figures;
    let few = told(&norm(2048, 8192), &topology, &table).unwrap();
    assert!(few.contains(" on at most 2 SMs"), "{few}");
}

/// Where few places are left, and blocks have a warp more than a whole part of the row would need.
#[test]
fn blocks_that_share_a_row_are_as_many_as_it_takes() {
    let room = |places| Room {
        sms: 132,
        most: 132,
        budget: false,
        places,
        shared: false,
        overtakes: true,
        wide: true,
        hooked: false,
    };
    let mut clusters = 0;
    for (places, rows, granules) in (1..=70)
        .flat_map(|places| (1..=40).map(move |rows| (places, rows)))
        .flat_map(|(places, rows)| [256, 257, 513, 1024].map(|g| (places, rows, g)))
    {
        let cut = RowShares::new(A::OneShotPush, (rows, 4 * granules), DataType::F32, 2);
        let of = Blocks::new(A::OneShotPush, &cut, 2, &room(places));
        if of.cluster > 1 {
            clusters += 1;
            assert!(of.blocks as usize >= rows * of.cluster as usize, "{of:?}");
        }
    }
    assert!(clusters > 100, "{clusters}");
}

/// Any, and such that blocks which share a row have a few granules more than whole warps.
fn columns() -> impl Strategy<Value = usize> {
    let beyond = (1_usize..=8, 1_usize..9).prop_map(|(warps, more)| 4 * (128 * warps + more));
    prop_oneof![1_usize..20_000, beyond]
}

proptest! {
    /// Whatever a rank finds: a launch that its kernel takes, for which there are places, and no cluster is torn.
    #[test]
    fn every_launch_can_be(
        (size, rows, hidden) in (1_usize..=8, prop_oneof![0_usize..40, 0_usize..5000], columns()),
        (sms, most, places) in (1_u32..200, 1_u32..600, 1_u32..200),
        (shared, overtakes, wide, hooked) in any::<(bool, bool, bool, bool)>(),
        (two, budget) in any::<(bool, bool)>(),
    ) {
        let room = Room { sms, most, budget, places, shared, overtakes, wide, hooked };
        let algorithm = if two { A::TwoShotPush } else { A::OneShotPush };
        let cut = RowShares::new(algorithm, (rows, hidden), DataType::F32, size);
        let of = Blocks::new(algorithm, &cut, size, &room);
        let small = if budget { 1 } else { (512 / of.threads).max(1) };
        prop_assert!(of.blocks >= 1 && of.blocks <= most.max(1) * small);
        prop_assert!(of.threads.is_multiple_of(32) && (32..=MOST_THREADS).contains(&of.threads));
        prop_assert!(of.blocks.is_multiple_of(of.cluster) && [1, 4, 8].contains(&of.cluster));
        if of.split {
            // Somebody pushes, and somebody takes rows.
            prop_assert!(two && size > 1 && of.blocks >= 64 && of.cluster == 1 && wide && !hooked);
            prop_assert_eq!(of.threads, 512);
            // And the last rows are one of each block that pushes.
            prop_assert!(size * cut.share >= (of.blocks as usize).div_ceil(2), "{of:?}");
        }
        if of.cluster > 1 {
            prop_assert!(overtakes && wide && !hooked && (2..=4).contains(&size));
            // Kernels by clusters do nothing but what one turn is enough for.
            let shares = if two { size * cut.share } else { cut.rows };
            let (blocks, cluster) = (of.blocks as usize, of.cluster as usize);
            prop_assert!(blocks >= shares * cluster, "{of:?}");
            prop_assert!(of.threads as usize * cluster >= cut.row_granules, "{of:?}");
        }
        if size > 1 {
            let each = if shared { 1 } else { 512 / of.threads };
            let places = if hooked { 1 } else { places * each };
            prop_assert!(of.blocks <= places.max(1));
            prop_assert!(!of.programmatic || 2 * of.blocks <= places);
        }
    }
}
