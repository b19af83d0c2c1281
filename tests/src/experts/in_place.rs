//! Rows that stay where they came, and go back from there.

use super::{
    ARRANGEMENTS, SIZES,
    back::Back,
    case::{By, Case},
    casts::check_echo,
    config,
    own::{Own, check, f32s},
};
use crate::{
    backend::Rank,
    check::{expect_invalid, expect_unsupported},
    faults::AMPLE,
    matrix::{to_bytes, to_f64},
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherLoraLinearParams, Arrangement, Buffer, Chunk, CombineParams, CombineSum, Combined,
    CommConfig, DataType, DispatchParams, Dispatched, Fp8Cast, Lease, Output, OverlapMode,
    Placement, ReceivedIds, Route, Routing, ScaleFormat, Transport,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};
use std::collections::BTreeSet;

pub const IN_PLACE: By = By::of(Transport::InPlace, Transport::InPlace);

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("experts/in_place/round_trips", round_trips);
    suite.add("experts/in_place/nobody_has_any", |world| {
        in_turn(world, &[7, 7, 0, 0, 7]);
    });
    suite.add("experts/in_place/few_and_many", |world| {
        in_turn(world, &[1030, 1030, 7, 1030, 0, 1030]);
    });
    suite.add("experts/in_place/others_between", others_between);
    suite.add("experts/in_place/casts", casts);
    suite.add("experts/in_place/refused", refused);
    suite.add("experts/in_place/replayed", replayed);
    suite.add_from(2, "experts/in_place/gathered_rows", gathered_rows);
}

/// All rows must fit at once.
fn room() -> CommConfig {
    CommConfig {
        dispatch_bytes: 32 << 20,
        ..config()
    }
}

fn case_of(rng: &mut StdRng, size: usize, sizes: (usize, usize, usize, usize)) -> Case {
    let mut case = Case::random(rng, size, sizes);
    case.dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
    case.arrangement = Arrangement::BySource;
    case.with_rows(rng).by(IN_PLACE).with_any_ids(rng)
}

fn there_and_back(rank: &Rank, case: &Case, back: &Back) {
    let own = Own::of(rank, case);
    let mut lease = rank.lease();
    let got = own.dispatch(&mut lease, case).unwrap();
    check(rank, case, &got);
    back.check_there(rank, &mut lease, case, &got);
}

/// Every size, one behind the other on one communicator, twice each with other routing: both halves in turn.
fn round_trips(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for sizes in SIZES {
        for _ in 0..2 {
            let case = case_of(&mut rng, world.size, sizes);
            let back = Back::in_place(&mut rng, &case);
            cases.push((case, back));
        }
    }
    world.run(&room(), move |rank| {
        for (case, back) in &cases {
            there_and_back(rank, case, back);
        }
    });
}

/// Calls of so many tokens of each rank, one after the other. Where no rank has room for a token, none comes, also where others have come before: in both halves.
/// Many may come in more pieces than few.
fn in_turn(world: &World, tokens: &[usize]) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for &max_tokens in tokens {
        let case = case_of(&mut rng, world.size, (max_tokens, 24, 2, 5));
        let case = case.with_tokens(&mut rng, &vec![max_tokens; world.size]);
        let back = Back::in_place(&mut rng, &case);
        cases.push((case, back));
    }
    world.run(&room(), move |rank| {
        for (case, back) in &cases {
            there_and_back(rank, case, back);
        }
    });
}

/// Rows stay while others go the same ways back, and until the next dispatch; other transports go on behind them.
fn others_between(world: &World) {
    let mut rng = world.rng();
    let sizes = (33, 64, 3, 12);
    let first = case_of(&mut rng, world.size, sizes);
    let again = first.clone().with_rows(&mut rng);
    let back = Back::in_place(&mut rng, &first);
    let copied = Back::random(&mut rng, &first);
    let other = |rng: &mut StdRng, by| case_of(rng, world.size, sizes).by(by);
    let others: Vec<_> = [Transport::OneSided, Transport::Pushed, Transport::Gather]
        .into_iter()
        .map(|by| other(&mut rng, By::of(by, by)))
        .collect();
    world.run(&room(), move |rank| {
        for (round, other) in others.iter().enumerate() {
            let own = Own::of(rank, &first);
            let mut lease = rank.lease();
            let got = own.dispatch(&mut lease, &first).unwrap();
            check(rank, &first, &got);
            // Sums of other rows by the same handle, and then those in place.
            let one_sided = first
                .clone()
                .by(By::of(Transport::InPlace, Transport::OneSided));
            copied.check(rank, &mut lease, &one_sided, &got.handle);
            check(rank, &first, &got);
            back.check_there(rank, &mut lease, &first, &got);
            let own = Own::of(rank, &again);
            let route = Route::Again(&got.handle);
            let got = own.dispatch_by(&mut lease, &again, route).unwrap();
            check(rank, &again, &got);
            if round % 2 == 0 {
                back.check_there(rank, &mut lease, &again, &got);
            }
            drop(lease);
            let mut lease = rank.lease();
            let got = Own::of(rank, other).dispatch(&mut lease, other).unwrap();
            check(rank, other, &got);
            copied.check(rank, &mut lease, other, &got.handle);
        }
    });
}

/// Rows that are cast stay as they are cast; sums go back another way.
fn casts(world: &World) {
    let mut rng = world.rng();
    let mut case = case_of(&mut rng, world.size, (40, 256, 4, 16));
    case.cast = Some(Fp8Cast {
        format: ScaleFormat::F32,
        column_major: false,
    });
    let case = case
        .with_rows(&mut rng)
        .by(By::of(Transport::InPlace, Transport::OneSided));
    let copied = case
        .clone()
        .by(By::of(Transport::OneSided, Transport::OneSided));
    let back = Back::random(&mut rng, &case);
    world.run(&room(), move |rank| {
        let own = Own::of(rank, &case);
        let mut lease = rank.lease();
        let (of, _) = case.received(rank.rank);
        let want = own.dispatch(&mut lease, &copied).unwrap();
        let got = own.dispatch(&mut lease, &case).unwrap();
        check(rank, &case, &got);
        let bytes = |buffer: &Buffer| rank.raw(buffer.view());
        let (rows, rows_want) = (bytes(&got.rows), bytes(&want.rows));
        let (scales, scales_want) = (got.scales.as_ref(), want.scales.as_ref());
        let (scales, scales_want) = (bytes(scales.unwrap()), bytes(scales_want.unwrap()));
        let each = scales.len() / got.handle.capacity();
        for row in &of {
            let part = row.at * case.hidden..(row.at + 1) * case.hidden;
            assert_eq!(rows[part.clone()], rows_want[part], "{row:?}");
            let part = row.at * each..(row.at + 1) * each;
            assert_eq!(scales[part.clone()], scales_want[part], "scales of {row:?}");
        }
        check_echo(rank, &mut lease, &case, &got, 9e-4);
        back.check(rank, &mut lease, &case, &got.handle);
    });
}

/// What cannot stay in place, and what does not lie there.
fn refused(world: &World) {
    let mut rng = world.rng();
    let case = case_of(&mut rng, world.size, (9, 16, 2, 6));
    let copied = case
        .clone()
        .by(By::of(Transport::OneSided, Transport::InPlace));
    world.run(&room(), move |rank| {
        let own = Own::of(rank, &case);
        let mut lease = rank.lease();
        for (_, arrangement) in ARRANGEMENTS {
            if arrangement == Arrangement::BySource {
                continue;
            }
            let mut other = case.clone();
            other.arrangement = arrangement;
            other.room = Some(case.capacity(rank.rank).max(1) * case.k);
            let refused = own.dispatch(&mut lease, &other);
            let code = expect_unsupported(refused, "rows that lie otherwise");
            assert_eq!(code, reason::IN_PLACE);
        }
        let field = |result| expect_invalid::<Combined>(result, "rows that are not there");
        let combine = |lease: &mut Lease<'_>, got: &Dispatched, rows: &Buffer, weighed| {
            let weights = got.weights.as_ref().filter(|_| weighed);
            lease.combine(CombineParams {
                rows: rows.view(),
                handle: &got.handle,
                sum: CombineSum::Rank,
                weights: weights.map(Buffer::view),
                biases: &[],
                output: Output::Allocate(DataType::F32),
                waits: None,
                choice: Some(Transport::InPlace),
            })
        };
        let got = own.dispatch(&mut lease, &copied).unwrap();
        assert_eq!(field(combine(&mut lease, &got, &got.rows, false)), "rows");
        let got = own.dispatch(&mut lease, &case).unwrap();
        let elsewhere = rank.poisoned(case.dtype, got.rows.shape().dims());
        assert_eq!(field(combine(&mut lease, &got, &elsewhere, false)), "rows");
        let weighed = combine(&mut lease, &got, &got.rows, true);
        let code = expect_unsupported(weighed, "weights beside sums in place");
        assert_eq!(code, reason::IN_PLACE);
        // Peers read the rows while sums are written.
        let mut over = got.rows.index(0).unwrap();
        over = over.slice(0, case.tokens(rank.rank)).unwrap();
        let result = lease.combine(CombineParams {
            rows: got.rows.view(),
            handle: &got.handle,
            sum: CombineSum::Rank,
            weights: None,
            biases: &[],
            output: Output::Into(over.view_mut()),
            waits: None,
            choice: Some(Transport::InPlace),
        });
        assert_eq!(field(result), "output");
        // What the next dispatch takes back cannot be what it sends.
        let mut sent = [Own::of(rank, &case), Own::of(rank, &case)];
        sent[0].rows = over.clone();
        sent[1].beside = vec![over];
        for (own, field) in sent.iter().zip(["rows", "beside"]) {
            let result = own.dispatch(&mut lease, &case);
            assert_eq!(expect_invalid(result, "rows that are lent"), field);
        }
        // Nothing of that has touched the group.
        assert!(combine(&mut lease, &got, &got.rows, false).is_ok());
    });
}

/// Rows that a linear has gathered are taken back by any call, too: who dispatches them hears of it before anybody waits for them.
fn gathered_rows(world: &World) {
    world.run(&crate::gather_linear::config(), move |rank| {
        let x = rank.poisoned(DataType::F32, &[2, 8]);
        let weight = rank.poisoned(DataType::F32, &[8, 4]);
        let ids = rank.poisoned(DataType::I32, &[2 * rank.size, 1]);
        let mut lease = rank.lease();
        let rows = vec![2; rank.size];
        let chunk = Chunk::Copy((&x).into());
        let gathered = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            choice: Some(OverlapMode::Chunked { pieces: 1 }),
            ..AllGatherLoraLinearParams::new(chunk, &rows, &weight)
        });
        let gathered = gathered.unwrap().a.operand().unwrap().kernel().retain();
        let refused = lease.dispatch(DispatchParams {
            rows: gathered.view(),
            beside: &[],
            route: Route::Experts {
                routing: Routing {
                    ids: ids.view(),
                    placement: Placement::Ranks,
                },
                weights: None,
            },
            arrangement: Arrangement::BySource,
            max_tokens: 2 * rank.size,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: None,
            choice: None,
        });
        assert_eq!(expect_invalid(refused, "rows that are gathered"), "rows");
        // Nothing of that has touched the group.
        rank.settle(lease.barrier()).unwrap();
    });
}

/// A captured way there and back, with other rows and experts every day: rows go back as they came, so each token gets its own as often as
/// there are ranks with experts of it.
fn replayed(world: &World) {
    const DAYS: usize = 50;
    let mut rng = world.rng();
    let first = case_of(&mut rng, world.size, (24, 48, 3, 7));
    let tokens: Vec<usize> = (0..world.size).map(|rank| first.tokens(rank)).collect();
    let days: Vec<Case> = (0..DAYS)
        .map(|_| {
            let mut day = first.clone().with_tokens(&mut rng, &tokens);
            (day.dtype, day.wide) = (DataType::BF16, false);
            let rows = tokens.iter().map(|n| n * day.hidden);
            let mut row = |n| {
                (0..n)
                    .map(|_| rng.random_range(-1.0..1.0))
                    .collect::<Vec<f64>>()
            };
            day.rows = rows.map(|n| to_bytes(DataType::BF16, &row(n))).collect();
            day
        })
        .collect();
    world.run(&room(), move |rank| {
        let (me, device, on) = (rank.rank, &rank.device, &rank.stream);
        let case = &days[0];
        let mut own = Own::of(rank, case);
        let d = rank.poisoned(DataType::F32, &[case.tokens(me), case.hidden]);
        let mut to = d.clone();
        let work = &mut || {
            let mut lease = rank.lease();
            let got = own.dispatch(&mut lease, case)?;
            lease.combine(CombineParams {
                rows: got.rows.view(),
                handle: &got.handle,
                sum: CombineSum::Rank,
                weights: None,
                biases: &[],
                output: Output::Into(to.view_mut()),
                waits: None,
                choice: Some(Transport::InPlace),
            })?;
            Ok(())
        };
        let graph = device.capture(on, work).unwrap();
        for day in &days {
            let ids: Vec<i32> = day.ids[me].iter().map(|&id| id as i32).collect();
            let ids: &[u8] = bytemuck::cast_slice(&ids);
            device.fill(on, d.clone().view_mut(), 0x7F).unwrap();
            device
                .write(on, own.rows.view_mut(), &day.rows[me])
                .unwrap();
            device.write(on, own.ids.view_mut(), ids).unwrap();
            graph.launch(on).unwrap().sync(AMPLE).unwrap();
            let rows = to_f64(DataType::BF16, &day.rows[me]);
            let times = |token: usize| {
                let slots = (0..day.k).filter_map(|entry| day.slot(me, token, entry));
                let ranks: BTreeSet<usize> = slots.map(|slot| day.owner(slot).0).collect();
                ranks.len() as f64
            };
            let want: Vec<f32> = (0..rows.len())
                .map(|i| (rows[i] * times(i / day.hidden)) as f32)
                .collect();
            assert_eq!(f32s(rank, &d), want);
        }
    });
}
