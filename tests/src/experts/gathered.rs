//! Ids of all ranks that do not agree, or cannot be.

use super::{
    case::{By, Case, Ids},
    config,
    own::{Own, check},
};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault, expect_invalid, expect_unsupported},
    suite::World,
};
use brigade_device::{Buffer, DataType, FaultKind, Plan, Transport};
use std::time::Duration;

const TOKENS: usize = 6;

/// All tokens of all ranks go to rank 0.
fn to_first(world: &World, there: Transport, ids: Ids) -> Case {
    let mut rng = world.rng();
    let case = Case::random(&mut rng, world.size, (TOKENS, 16, 1, 4));
    let mut case = case.with_tokens(&mut rng, &vec![TOKENS; world.size]);
    case.ids.iter_mut().for_each(|ids| ids.fill(0));
    case.room = Some(TOKENS * world.size);
    case.by = By {
        ids,
        ..By::of(there, there)
    };
    case
}

fn write(rank: &Rank, to: &Buffer, bytes: &[u8]) {
    let mut to = to.clone();
    rank.device
        .write(&rank.stream, to.view_mut(), bytes)
        .unwrap();
}

/// Other numbers of tokens or of rows than there are stop the group, and nothing is read or written where it should not.
pub fn mismatch(world: &World, there: Transport) {
    let cases = [Ids::Ragged, Ids::Padded].map(|ids| to_first(world, there, ids));
    world.run(&config(), move |rank| {
        let size = rank.size;
        let last = size - 1;
        for case in &cases {
            let good = bytemuck::pod_collect_to_vec::<u8, i32>(
                &rank.raw(Own::of(rank, case).all.unwrap().lengths.view()),
            );
            let with = |i: usize, value: i32| {
                let mut lengths = good.clone();
                lengths[i] = value;
                lengths
            };
            let mut wrong = vec![
                // Fewer own tokens than rows, and lengths that are none.
                with(good.len() - 1, good[good.len() - 1] - 1),
                with(good.len() - 1, -1),
                with(0, -3),
                with(last, i32::MAX),
                with(0, i32::MIN),
            ];
            wrong.dedup();
            let expect = |what: &str, change: &dyn Fn(&Own)| {
                let own = Own::of(rank, case);
                if rank.rank == last {
                    change(&own);
                }
                // A rank that had no part in it may hear of it before the call, or after it.
                let lease = || rank.comm().lease(&rank.stream);
                let result = lease().and_then(|mut l| own.dispatch(&mut l, case).map(drop));
                let result = rank.settle(result);
                let result = result.and_then(|()| rank.settle(lease()?.barrier()));
                let record = expect_fault(result, what);
                assert_kind(&record, FaultKind::Mismatch, what);
                rank.comm().reset(Duration::from_secs(20)).unwrap();
                let own = Own::of(rank, case);
                check(rank, case, &own.dispatch(&mut rank.lease(), case).unwrap());
                // Nobody is stopped by the next fault while it still looks at this.
                rank.meet();
            };
            for lengths in &wrong {
                expect(&format!("{lengths:?}"), &|own| {
                    let to = &own.all.as_ref().unwrap().lengths;
                    write(rank, to, bytemuck::cast_slice(lengths));
                });
            }
            if size > 1 {
                // Its own rows go where nobody expects them.
                expect("own ids of others", &|own| {
                    let to = &own.all.as_ref().unwrap().ids;
                    let bytes = rank.raw(to.view());
                    write(rank, to, &vec![0xFF; bytes.len()]);
                });
            }
        }
    });
}

/// What is wrong is named, and what has no use for them refuses.
pub fn refused(world: &World) {
    let cases = [Ids::Ragged, Ids::Padded].map(|ids| to_first(world, Transport::OneSided, ids));
    world.run(&config(), move |rank| {
        let (size, mut lease) = (rank.size, rank.lease());
        for case in &cases {
            let ragged = case.by.ids == Ids::Ragged;
            let lengths = if ragged { size + 1 } else { size };
            let field = if ragged {
                "lengths.offsets"
            } else {
                "lengths.counts"
            };
            let mut with = |field: &str, change: &dyn Fn(&mut Own)| {
                let mut own = Own::of(rank, case);
                change(&mut own);
                let refused = own.dispatch(&mut lease, case);
                assert_eq!(expect_invalid(refused, field), field);
            };
            let new = |dtype, dims: &[usize]| rank.poisoned(dtype, dims);
            let short = || new(DataType::I32, &[lengths + 1]);
            with(field, &|own| own.all.as_mut().unwrap().lengths = short());
            let wide = || new(DataType::I64, &[lengths]);
            with(field, &|own| own.all.as_mut().unwrap().lengths = wide());
            let flat = || new(DataType::I32, &[size * TOKENS + 1]);
            with("ids.shape", &|own| own.all.as_mut().unwrap().ids = flat());
            let other = || Some(new(DataType::F32, &[2, 3]));
            with("weights.shape", &|own| {
                own.all.as_mut().unwrap().weights = other();
            });
            let dims = if ragged {
                vec![size * TOKENS, 1]
            } else {
                vec![size, TOKENS, 1]
            };
            with("ids.dtype", &|own| {
                own.all.as_mut().unwrap().ids = new(DataType::F32, &dims);
            });
            let own = Own::of(rank, case);
            for there in [Transport::Pushed, Transport::Fifo] {
                let mut case = case.clone();
                case.by.there = Some(there);
                let code = expect_unsupported(own.dispatch(&mut lease, &case), "ids of all");
                assert_eq!(code, brigade_plan::reason::GATHERED_IDS);
            }
            let mut free = case.clone();
            free.by.there = None;
            let got = own.dispatch(&mut lease, &free).unwrap();
            check(rank, &free, &got);
            let Plan::Experts { transport, .. } = got.plan else {
                panic!("{:?}", got.plan)
            };
            assert_eq!(transport, Transport::OneSided);
        }
    });
}
