//! Room that is too small, graphs, and arguments that are wrong.

use super::{
    back::Back,
    case::{By, Case, rounded},
    config,
    own::{Own, check},
};
use crate::{
    check::{assert_kind, expect_fault, expect_invalid, expect_unsupported},
    matrix::{to_f32, to_f64},
    ops,
    suite::World,
};
use brigade_device::{
    Arrangement, Buffer, Call, CombineParams, CombineSum, CommConfig, DataType, Dispatched,
    FaultKind, Fp8Cast, Output, Plan, Route, ScaleFormat, Transport,
};
use brigade_plan::reason;
use rand::Rng;
use std::time::Duration;

/// More rows than there is room for stop the group, and nothing is written behind the last.
pub fn overflow(world: &World, by: By) {
    let mut rng = world.rng();
    let mut case = Case::random(&mut rng, world.size, (8, 16, 1, 4));
    case = case.with_tokens(&mut rng, &vec![8; world.size]);
    case.ids.iter_mut().for_each(|ids| ids.fill(0));
    case.room = Some(8 * world.size - 1);
    case.by = by;
    world.run(&config(), move |rank| {
        let result = Own::of(rank, &case).dispatch(&mut rank.lease(), &case);
        let result = rank.settle(result.map(drop));
        // A rank that had no part in it may have ended the call, and hears of it in the next one.
        let result = result.and_then(|()| ops::barrier().run(rank).result);
        let record = expect_fault(result, "one row too many");
        assert_kind(&record, FaultKind::Overflow, "one row too many");
        let mut fits = case.clone();
        fits.room = Some(8 * rank.size);
        let own = Own::of(rank, &fits);
        let mut before = None;
        for _ in 0..2 {
            rank.comm().reset(Duration::from_secs(20)).unwrap();
            let got = own.dispatch(&mut rank.lease(), &fits).unwrap();
            check(rank, &fits, &got);
            before = before.or(Some(got));
        }
        let route = Route::Again(&before.as_ref().unwrap().handle);
        let again = own.dispatch_by(&mut rank.lease(), &fits, route);
        assert_eq!(
            expect_invalid(again, "a handle from before a reset"),
            "handle"
        );
    });
}

/// A handle of another communicator of the same ranks, of the same call, is refused to the one rank that has taken it for its own, before
/// anybody hears of a call.
pub fn other_communicator(world: &World) {
    let mut rng = world.rng();
    let case = Case::random(&mut rng, world.size, (8, 16, 2, 4));
    let mistaken = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        let other = rank.join_another(&config());
        let own = Own::of(rank, &case);
        let ours = own.dispatch(&mut rank.lease(), &case).unwrap();
        let mut lease = other.lease(&rank.stream).unwrap();
        let theirs = own.dispatch(&mut lease, &case).unwrap();
        check(rank, &case, &theirs);
        let mut back = |of: &Dispatched| {
            let p = CombineParams {
                rows: of.rows.view(),
                handle: &of.handle,
                sum: CombineSum::Rank,
                weights: None,
                biases: &[],
                output: Output::Allocate(DataType::BF16),
                waits: None,
                choice: case.by.back,
            };
            lease.combine(p)
        };
        if rank.rank == mistaken {
            let refused = back(&ours);
            assert_eq!(expect_invalid(refused, "another's handle"), "handle");
        }
        back(&theirs).unwrap();
        if rank.rank == mistaken {
            let again = own.dispatch_by(&mut lease, &case, Route::Again(&ours.handle));
            assert_eq!(expect_invalid(again, "another's handle"), "handle");
        }
        let again = own.dispatch_by(&mut lease, &case, Route::Again(&theirs.handle));
        let again = again.unwrap();
        assert_eq!(rank.raw(again.rows.view()), rank.raw(theirs.rows.view()));
    });
}

/// A graph sends what its buffers hold when it is replayed.
pub fn captured(world: &World, by: By) {
    let mut rng = world.rng();
    let first = Case::random(&mut rng, world.size, (10, 16, 3, 6));
    let cases: Vec<Case> = (0..6)
        .map(|_| {
            let mut case = first.clone();
            case.room = Some(30 * world.size);
            case.wide = true;
            case.by = by;
            case.with_tokens(&mut rng, &vec![10; world.size])
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut own = Own::of(rank, &cases[0]);
        let mut got = None;
        let mut combined = None;
        let graph = rank.device.capture(&rank.stream, &mut || {
            let mut lease = rank.lease();
            let there = own.dispatch(&mut lease, &cases[0])?;
            let back = lease.combine(CombineParams {
                rows: there.rows.view(),
                handle: &there.handle,
                sum: CombineSum::Rank,
                weights: None,
                biases: &[],
                output: Output::Allocate(DataType::BF16),
                waits: None,
                choice: by.back,
            })?;
            (got, combined) = (Some(there), back.d);
            Ok(())
        });
        let (graph, got, combined) = (graph.unwrap(), got.unwrap(), combined.unwrap());
        for case in &cases {
            let new = Own::of(rank, case);
            let mut changed = vec![
                (&mut own.rows, &new.rows),
                (&mut own.ids, &new.ids),
                (own.weights.as_mut().unwrap(), new.weights.as_ref().unwrap()),
            ];
            changed.extend(own.beside.iter_mut().zip(&new.beside));
            if let (Some(to), Some(from)) = (&mut own.all, &new.all) {
                let weights = (to.weights.as_mut().unwrap(), from.weights.as_ref().unwrap());
                changed.extend([(&mut to.ids, &from.ids), weights]);
            }
            for (to, from) in changed {
                rank.device
                    .copy(&rank.stream, to.view_mut(), from.view())
                    .unwrap();
            }
            graph.launch(&rank.stream).unwrap();
            check(rank, case, &got);
            let me = rank.rank;
            let mut want = vec![];
            for (token, row) in to_f32(case.dtype, &case.rows[me])
                .chunks(case.hidden)
                .enumerate()
            {
                let owners: std::collections::BTreeSet<_> = (0..case.k)
                    .filter_map(|e| Some(case.owner(case.slot(me, token, e)?).0))
                    .collect();
                want.extend(row.iter().map(|&x| {
                    let sum = (1..owners.len()).fold(x, |sum, _| sum + x);
                    f64::from(rounded(
                        case.dtype,
                        if owners.is_empty() { 0.0 } else { sum },
                    ))
                }));
            }
            // NaNs are the canonical one, whatever they were.
            let back = to_f64(case.dtype, &rank.raw(combined.view()));
            for (got, want) in back.iter().zip(&want) {
                assert!(
                    got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                    "{got} instead of {want}"
                );
            }
        }
    });
}

/// What a captured dispatch leaves says nothing before its graph is launched: who sends rows its ways, or back, hears of that, and the
/// group goes on after a reset. On a GPU kernels take what is there, and may find nothing wrong with it.
pub fn never_launched(world: &World, by: By) {
    let mut rng = world.rng();
    let cases = super::ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (10, 16, 3, 6));
        case.arrangement = arrangement;
        case.room = (arrangement != Arrangement::BySource).then_some(30 * world.size + 16 * 6);
        case.by = by;
        case.with_tokens(&mut rng, &vec![10; world.size])
    });
    let unheard = !world.backend.asks_callers();
    let config = CommConfig {
        deadline: Duration::from_secs(2),
        // A reset clears them.
        all_reduce_bytes: 1 << 20,
        ..config()
    };
    world.run(&config, move |rank| {
        for (case, back) in cases.iter().flat_map(|case| [(case, false), (case, true)]) {
            // The first call of a generation may take longer.
            rank.settle(rank.lease().barrier()).unwrap();
            let own = Own::of(rank, case);
            let mut got = None;
            let graph = rank.device.capture(&rank.stream, &mut || {
                got = Some(own.dispatch(&mut rank.lease(), case)?);
                Ok(())
            });
            let (graph, got) = (graph.unwrap(), got.unwrap());
            // Nobody is stopped while it still captures; but before its call, by who was sooner.
            rank.meet();
            let again = Route::Again(&got.handle);
            let lease = rank.comm().lease(&rank.stream);
            let result = lease.and_then(|mut lease| match back {
                false => own.dispatch_by(&mut lease, case, again).map(drop),
                true => {
                    let rows = rank.poisoned(case.dtype, got.rows.shape().dims());
                    let by_expert = matches!(case.arrangement, Arrangement::ByExpert { .. });
                    let p = CombineParams {
                        rows: rows.view(),
                        handle: &got.handle,
                        sum: match by_expert {
                            true => CombineSum::Expert,
                            false => CombineSum::Rank,
                        },
                        weights: None,
                        biases: &[],
                        output: Output::Allocate(DataType::F32),
                        waits: None,
                        choice: by.back,
                    };
                    lease.combine(p).map(drop)
                }
            });
            let what = format!("{:?}, back {back}", case.arrangement);
            match rank.settle(result) {
                Ok(()) => assert!(unheard, "{what}: done"),
                failed => drop(expect_fault(failed, &what)),
            }
            rank.meet();
            rank.comm().reset(Duration::from_secs(20)).unwrap();
            graph.launch(&rank.stream).unwrap();
            check(rank, case, &got);
        }
    });
}

/// Where halves hold no row, those that nobody forces another way are pushed; what cannot be is refused.
pub fn without_halves(world: &World) {
    /// More than are pushed within the budget where there are halves.
    const TOKENS: usize = 100;
    let mut rng = world.rng();
    let cases = super::ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (TOKENS, 2048, 3, 10));
        (case.arrangement, case.by.there, case.by.back) = (arrangement, None, None);
        // With what lies between rows of two experts.
        let most = 3 * TOKENS * world.size + 160;
        case.room = (arrangement != Arrangement::BySource).then_some(most);
        let back = Back::random(&mut rng, &case);
        (case, back)
    });
    let config = CommConfig {
        dispatch_bytes: 0,
        combine_bytes: 0,
        sm_budget: Some(1),
        ..config()
    };
    let pushes = world.backend.engines().pushes_rows;
    world.run(&config, move |rank| {
        for (case, back) in &cases {
            let own = Own::of(rank, case);
            let mut lease = rank.lease();
            let result = own.dispatch(&mut lease, case);
            if !pushes {
                let code = expect_unsupported(result, "rows with nowhere to go");
                assert_eq!(code, reason::CAPACITY);
                continue;
            }
            let got = result.unwrap();
            let pushed = |plan: &Plan| {
                let by = Transport::Pushed;
                assert!(
                    matches!(plan, Plan::Experts { transport, .. } if *transport == by),
                    "{plan}"
                );
            };
            pushed(&got.plan);
            check(rank, case, &got);
            back.check(rank, &mut lease, case, &got.handle);
            let told = rank.comm().told(&Call::Dispatch(got.handle.call().clone()));
            let (told, why) = (told.unwrap(), "the halves of dispatch_bytes hold no row");
            assert!(told.contains(why) || rank.size == 1, "{told}");
            let uncounted = Case {
                room: None,
                ..case.clone()
            };
            if case.room.is_some() {
                let refused = own.dispatch(&mut lease, &uncounted);
                let code = expect_unsupported(refused, "rows that nobody counts");
                assert_eq!(code, reason::CAPACITY);
            }
        }
    });
}

/// Without room that is known before, no graph can be made.
pub fn not_capturable(world: &World) {
    let case = Case::random(&mut world.rng(), world.size, (4, 8, 2, 4));
    world.run(&config(), move |rank| {
        let own = Own::of(rank, &case);
        let captured = rank.device.capture(&rank.stream, &mut || {
            own.dispatch(&mut rank.lease(), &case).map(drop)
        });
        let code = expect_unsupported(captured.map(drop), "a graph that waits for the host");
        assert_eq!(code, "not-capturable");
    });
}

/// What is wrong is named.
pub fn refused(world: &World) {
    let case = Case::random(&mut world.rng(), world.size, (4, 16, 2, 4));
    let case = case.with_tokens(&mut world.rng(), &vec![4; world.size]);
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let own = Own::of(rank, &case);
        let mut with = |field: &str, change: &dyn Fn(&mut Case, &mut Own)| {
            let (mut case, mut own) = (case.clone(), Own::of(rank, &case));
            change(&mut case, &mut own);
            assert_eq!(
                expect_invalid(own.dispatch(&mut lease, &case), field),
                field
            );
        };
        with("rows.shape", &|case, _| case.max_tokens = 3);
        with("rows.shape", &|_, own| {
            own.rows = rank.poisoned(DataType::BF16, &[4, 12])
        });
        with("rows.dtype", &|case, own| {
            case.cast = Some(Fp8Cast {
                format: ScaleFormat::F32,
                column_major: false,
            });
            own.rows = rank.poisoned(DataType::I32, &[4, 16]);
        });
        with("ids", &|_, own| {
            own.ids = rank.poisoned(DataType::I32, &[3, 2])
        });
        with("ids.dtype", &|_, own| {
            own.ids = rank.poisoned(DataType::F32, &[4, 2])
        });
        with("ids.shape", &|_, own| {
            own.ids = rank.poisoned(DataType::I32, &[4, 33]);
        });
        with("weights.shape", &|_, own| {
            own.weights = Some(rank.poisoned(DataType::F32, &[4, 3]))
        });
        with("beside", &|_, own| {
            own.beside = vec![rank.poisoned(DataType::U8, &[5, 2])];
        });
        with("beside", &|_, own| {
            own.beside = vec![rank.poisoned(DataType::U8, &[4, 2]); 5];
        });
        with("max_recv", &|case, _| {
            (case.arrangement, case.room) = (Arrangement::BySource, Some(9));
        });
        with("arrangement.alignment", &|case, _| {
            case.arrangement = Arrangement::ByExpert { alignment: 0 };
        });
        with("arrangement.alignment", &|case, _| {
            case.arrangement = Arrangement::ByExpert { alignment: 4097 };
        });
        with("max_recv", &|case, _| case.room = Some(1 << 31));
        with("max_tokens", &|case, _| case.max_tokens = usize::MAX);
        let got = own.dispatch(&mut lease, &case).unwrap();
        let mut combine = |field: &str, rows: &Buffer, sum: CombineSum| {
            let result = lease.combine(CombineParams {
                rows: rows.view(),
                handle: &got.handle,
                sum,
                weights: None,
                biases: &[],
                output: Output::Allocate(DataType::BF16),
                waits: None,
                choice: None,
            });
            assert_eq!(expect_invalid(result, field), field);
        };
        combine("sum", &got.rows, CombineSum::Expert);
        let rows = got.handle.capacity();
        combine(
            "rows.shape",
            &rank.poisoned(DataType::BF16, &[rows + 1, 16]),
            CombineSum::Rank,
        );
        combine(
            "rows.dtype",
            &rank.poisoned(DataType::I32, &[rows, 16]),
            CombineSum::Rank,
        );
        let mut longer = case.clone();
        longer.max_tokens += 1;
        let route = Route::Again(&got.handle);
        let result = own.dispatch_by(&mut lease, &longer, route);
        assert_eq!(expect_invalid(result, "max_tokens"), "max_tokens");
    });
}
