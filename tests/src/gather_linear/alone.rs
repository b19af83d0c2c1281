//! What one rank does alone, or with its own memory, which must not matter to the others.

use super::{Case, config};
use crate::{
    backend::Rank,
    layer::Spec,
    matrix::Matrix,
    suite::{Suite, World},
    themes::modes_of_any_rows,
};
use brigade_device::{
    AllGatherLoraLinearParams, Buffer, Chunk, DataType, MemoryType, Output, OverlapMode, Result,
};
use rand::Rng;

/// Every mode that is there, and none.
fn choices(world: &World) -> Vec<Option<OverlapMode>> {
    let modes = modes_of_any_rows(world.backend.engines());
    modes.into_iter().flat_map(|(_, all)| all).collect()
}

/// A call whose result, of more bytes than processors address, finds no memory on this rank.
fn without_memory(rank: &Rank, choice: Option<OverlapMode>) -> Result<()> {
    const ALL: usize = 1 << 45;
    let empty = |dims: &[usize]| {
        let (memory, dtype) = (MemoryType::Device, DataType::F32);
        rank.device.allocate(&rank.stream, memory, dtype, dims)
    };
    let (x, weight) = (empty(&[2, 0])?, empty(&[ALL / rank.size, 0])?);
    let rows = vec![2; rank.size];
    let params = AllGatherLoraLinearParams {
        transpose_weight: true,
        total_n: Some(ALL),
        choice,
        ..AllGatherLoraLinearParams::new(Chunk::Copy((&x).into()), &rows, &weight)
    };
    rank.lease().all_gather_lora_linear(params).map(drop)
}

/// An overlapped call that is refused on one rank alone was no call: the ranks go on together. One that is not overlapped is two, and the
/// first may have been made by then.
fn refused(world: &World) {
    let mut rng = world.rng();
    let alone = rng.random_range(0..world.size);
    let case = Case::new(&mut rng, Spec::even(&mut world.rng(), world.size));
    let off = Some(OverlapMode::Off);
    let choices = choices(world).into_iter();
    let choices: Vec<_> = choices.filter(|c| c.is_some() && *c != off).collect();
    world.run(&config(), move |rank| {
        for &choice in &choices {
            if rank.rank == alone {
                let refused = without_memory(rank, choice);
                assert!(refused.is_err(), "{choice:?}");
                rank.comm().check().unwrap();
            }
            // Through both halves, and the first one again.
            for _ in 0..3 {
                case.run(rank, choice);
            }
        }
    });
}

/// Rows, weight and result may be parts of one allocation.
fn one_allocation(world: &World) {
    const ROWS: usize = 3;
    const K: usize = 16;
    const N: usize = 8;
    let mut rng = world.rng();
    let mut draw = |dims: &[usize]| Matrix::random(&mut rng, DataType::F32, dims, 1.0);
    let (x, weight) = (draw(&[ROWS, K]), draw(&[K, N]));
    let choices = choices(world);
    world.run(&config(), move |rank| {
        let rows = vec![ROWS; rank.size];
        let all = ROWS * rank.size * N;
        let call = |x: &Buffer, weight: &Buffer, d: &mut Buffer, choice| {
            let params = AllGatherLoraLinearParams {
                output: Output::Into(d.view_mut()),
                choice,
                ..AllGatherLoraLinearParams::new(Chunk::Copy(x.into()), &rows, weight)
            };
            rank.lease().all_gather_lora_linear(params).map(drop)
        };
        let (x, weight) = (rank.upload(&x), rank.upload(&weight));
        for &choice in &choices {
            let mut apart = rank.poisoned(DataType::F32, &[ROWS * rank.size, N]);
            call(&x, &weight, &mut apart, choice).unwrap();
            // Each part begins at a multiple of 64 bytes.
            let arena = rank.poisoned(DataType::F32, &[ROWS * K + K * N + all]);
            let part = |first, count, dims: &[usize]| {
                arena.slice(first, count).unwrap().reshape(dims).unwrap()
            };
            let mut own = part(0, ROWS * K, &[ROWS, K]);
            let mut weight_here = part(ROWS * K, K * N, &[K, N]);
            let mut d = part(ROWS * K + K * N, all, &[ROWS * rank.size, N]);
            for (to, from) in [(&mut own, &x), (&mut weight_here, &weight)] {
                let copied = rank.device.copy(&rank.stream, to.view_mut(), from.view());
                copied.unwrap();
            }
            let done = call(&own, &weight_here, &mut d, choice);
            rank.settle(done).unwrap();
            assert_eq!(rank.raw(d.view()), rank.raw(apart.view()), "{choice:?}");
            rank.meet();
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("gather_linear/alone/refused", refused);
    suite.add("gather_linear/alone/one_allocation", one_allocation);
}
