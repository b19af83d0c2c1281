//! When a gather-linear is one product whose tiles wait.

mod common;

use brigade_device::{Call, DataType, LinearCall, OverlapMode, Plan, QScheme, Reason};
use brigade_plan::{
    Engines, Entries, Table, Topology,
    crossover::{Gpus, Links},
    plan, reason, twin_pieces, without_tiles,
};
use common::{linear, topology};

fn on_gpus(tiles: bool) -> (Topology, Table) {
    let gpus = Gpus {
        model: Some("NVIDIA H200".into()),
        links: Links::Nvlink,
        ranks: 4,
    };
    let Ok(table) = Table::cuda(&gpus, &Entries::default()) else {
        panic!("the figures of this build cannot be read");
    };
    let topology = Topology {
        engines: Engines::cuda(tiles, true),
        ..topology(1, 4)
    };
    (topology, table)
}

/// Products of 8 Mi elements on each rank.
fn large() -> LinearCall {
    LinearCall {
        k: 8192,
        n: 4 * 2048,
        ..linear(&[1024; 4])
    }
}

fn gather(call: LinearCall, tiles: bool) -> Result<OverlapMode, Reason> {
    let (mut topology, table) = on_gpus(tiles);
    topology.config.gather_bytes = 1 << 30;
    match plan(&Call::GatherLinear(call), &topology, &table)? {
        Plan::GatherLinear(plan) => Ok(plan.mode),
        other => panic!("{other:?}"),
    }
}

const ONE_PIECE: OverlapMode = OverlapMode::Chunked { pieces: 1 };

#[test]
fn halves_with_whole_16_bytes_are_taken_and_others_go_in_one_piece() {
    let change = |change: fn(&mut LinearCall)| {
        let mut call = large();
        change(&mut call);
        gather(call, true).unwrap()
    };
    assert_eq!(change(|_| {}), OverlapMode::Tiles);
    let f16 = change(|c| (c.input, c.output) = (DataType::F16, DataType::F16));
    assert_eq!(f16, OverlapMode::Tiles);
    assert_eq!(change(|c| c.output = DataType::F32), ONE_PIECE);
    assert_eq!(change(|c| c.k = 8188), ONE_PIECE);
    let f32 = change(|c| (c.input, c.output) = (DataType::F32, DataType::F32));
    assert_eq!(f32, ONE_PIECE);
    let int8 = change(|c| {
        (c.input, c.scheme) = (DataType::I8, QScheme::Int8PerToken);
    });
    assert_eq!(int8, OverlapMode::Tiles);
    let f32_of_int8 = change(|c| {
        (c.input, c.output, c.scheme) = (DataType::I8, DataType::F32, QScheme::Int8PerToken);
    });
    assert_eq!(f32_of_int8, ONE_PIECE);
    // The library is quicker.
    let fp8 = change(|c| (c.input, c.scheme) = (DataType::F8E4M3, QScheme::Fp8PerTensor));
    assert_eq!(fp8, ONE_PIECE);
    assert_eq!(gather(large(), false), Ok(ONE_PIECE), "no kernels for it");
    assert_eq!(
        change(|c| c.rows = [8; 4].as_slice().into()),
        OverlapMode::Off
    );
}

#[test]
fn what_is_forced_is_done_or_refused_by_name() {
    let forced = |call: LinearCall, tiles| {
        let choice = Some(OverlapMode::Tiles);
        gather(LinearCall { choice, ..call }, tiles).map_err(|why| why.code)
    };
    assert_eq!(forced(linear(&[8; 4]), true), Ok(OverlapMode::Tiles));
    assert_eq!(forced(large(), false), Err(reason::NO_ENGINE));
    let uneven = LinearCall { k: 1020, ..large() };
    assert_eq!(forced(uneven, true), Err(reason::TILES));
    let fp8 = LinearCall {
        input: DataType::F8E4M3,
        scheme: QScheme::Fp8PerTensor,
        ..large()
    };
    assert_eq!(forced(fp8.clone(), true), Ok(OverlapMode::Tiles));
    let uneven = LinearCall { k: 8200, ..fp8 };
    assert_eq!(forced(uneven, true), Err(reason::TILES));
}

#[test]
fn a_rank_without_tiles_says_so_or_fails_where_they_were_forced() {
    let (topology, table) = on_gpus(true);
    let choice = Some(OverlapMode::Tiles);
    let call = LinearCall {
        choice,
        ..linear(&[8; 4])
    };
    let Ok(Plan::GatherLinear(plan)) = plan(&Call::GatherLinear(call), &topology, &table) else {
        panic!("forced");
    };
    let why = || reason::tiles_operands("activation: one", "none");
    let mut other = plan.clone();
    assert_eq!(without_tiles(&mut other, 1, true, why()), Err(why()));
    assert_eq!(other, plan, "nothing is changed where it fails");
    without_tiles(&mut other, 1, false, why()).unwrap();
    assert_eq!((other.mode, other.instead_of), (ONE_PIECE, Some(why())));
    // Rows travel alike, in the same order: only who multiplies differs.
    assert_eq!((other.order, other.offsets), (plan.order, plan.offsets));
}

#[test]
fn the_twin_takes_halves_alone_and_others_go_in_one_piece() {
    let (mut topology, table) = on_gpus(true);
    topology.config.reduce_scatter_bytes = 1 << 30;
    let planned = |call: LinearCall| -> Result<OverlapMode, Reason> {
        match plan(&Call::LinearReduceScatter(call), &topology, &table)? {
            Plan::LinearReduceScatter(plan) => Ok(plan.mode),
            other => panic!("{other:?}"),
        }
    };
    let larger = || LinearCall { n: 8192, ..large() };
    assert_eq!(planned(larger()), Ok(OverlapMode::Tiles));
    let int8 = || LinearCall {
        input: DataType::I8,
        scheme: QScheme::Int8PerToken,
        ..larger()
    };
    assert_eq!(planned(int8()), Ok(ONE_PIECE));
    let forced = |call: LinearCall| {
        let choice = Some(OverlapMode::Tiles);
        planned(LinearCall { choice, ..call }).map_err(|why| why.code)
    };
    assert_eq!(forced(linear(&[8; 4])), Ok(OverlapMode::Tiles));
    assert_eq!(forced(int8()), Err(reason::TILES));
}

#[test]
fn parts_of_a_twin_travel_in_two_pieces_where_they_are_many_rows() {
    assert_eq!(twin_pieces(&[]), 1);
    assert_eq!(twin_pieces(&[1023, 0]), 1);
    // The same on all ranks, whoever has them.
    assert_eq!(twin_pieces(&[1, 1024]), 2);
    assert_eq!(twin_pieces(&[1024, 1]), 2);
}
