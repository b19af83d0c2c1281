//! Exchanges that nobody receives, graphs, and what is refused.

use super::{
    Contract, FORMATS,
    back::{Back, weights},
    came::{check, received},
    config, drawn, exchanges, round_trips, send,
};
use crate::{
    backend::Rank,
    check::{expect_invalid, expect_unsupported},
    experts::{
        case::Case,
        own::Own,
        waits::{self, ROUNDS, Waits, late_rank, try_all},
    },
    suite::{Suite, World},
};
use brigade_device::{
    Buffer, CombineCast, CombineSum, CommConfig, DataType, Error, LowLatencyCombineParams, Output,
    Result, Statistics,
};
use rand::Rng;
use std::time::Duration;

/// Every rank gives up other exchanges than the next, and is late at others; what it does receive is what was sent then.
fn given_up(world: &World) {
    let mut rng = world.rng();
    let rounds: Vec<(Case, Vec<(bool, u32)>)> = (0..40)
        .map(|_| {
            let case = drawn(&mut rng, world.size, (8, 32, 2, 5)).0;
            let each = (0..world.size).map(|_| (rng.random(), rng.random_range(0..150)));
            (case, each.collect())
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut exchange = rank.low_latency();
        let slot = exchange.slots().0;
        for (case, each) in &rounds {
            let (receives, late) = each[rank.rank];
            let pending = send(&mut lease, slot, (&Own::of(rank, case), case), true).unwrap();
            if receives {
                rank.dawdle(late);
                check(rank, case, &pending.receive(&mut lease).unwrap());
            }
        }
        // Of the last, some are given up by the end.
        lease.barrier().unwrap();
    });
}

/// Other calls go on between a send and its receive.
fn between(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..3)
        .map(|_| drawn(&mut rng, world.size, (8, 32, 2, 5)))
        .collect();
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut exchange = rank.low_latency();
        for (case, back) in &cases {
            let own = Own::of(rank, case);
            let (a, _) = exchange.slots();
            let pending = send(&mut lease, a, (&own, case), back.weighted).unwrap();
            lease.barrier().unwrap();
            let there = pending.receive(&mut lease).unwrap();
            lease.barrier().unwrap();
            let pending = back.send(rank, &mut lease, (&own, case), &there);
            lease.barrier().unwrap();
            check(rank, case, &there);
            back.receive(rank, &mut lease, case, pending);
        }
    });
}

/// A captured exchange follows what its inputs hold when it is replayed.
fn captured(world: &World) {
    for sum in [CombineSum::Expert, CombineSum::ExpertByRank] {
        captured_by(world, sum);
    }
}

fn captured_by(world: &World, sum: CombineSum) {
    let mut rng = world.rng();
    let cases: Vec<(Case, Back)> = (0..4)
        .map(|_| {
            let (case, back) = drawn(&mut rng, world.size, (10, 32, 3, 7));
            let case = Case {
                dtype: DataType::BF16,
                wide: true,
                ..case
            };
            let back = Back {
                dtype: DataType::BF16,
                output: DataType::F32,
                sum,
                weighted: true,
                ..back
            };
            (case.with_tokens(&mut rng, &vec![10; world.size]), back)
        })
        .collect();
    world.run(&config(), move |rank| {
        let (first, back) = &cases[0];
        let mut own = Own::of(rank, first);
        let mut made = back.rows(rank, first);
        let mut exchange = rank.low_latency();
        let mut kept = None;
        let (slot, _) = exchange.slots();
        let graph = rank.device.capture(&rank.stream, &mut || {
            let mut lease = rank.lease();
            let there =
                send(&mut lease, slot, (&own, first), back.weighted)?.receive(&mut lease)?;
            let p = back.params(&made, &own);
            let d = lease
                .low_latency_combine(&there, p)?
                .receive(&mut lease, Output::Allocate(DataType::F32))?;
            kept = Some((there.counts().retain(), d.unwrap()));
            Ok(())
        });
        let (graph, (counts, d)) = (graph.unwrap(), kept.unwrap());
        // A graph outlives the loan of its slot.
        drop(exchange);
        for (i, (case, _)) in cases.iter().enumerate() {
            let (new, new_made) = (Own::of(rank, case), back.rows(rank, case));
            for (to, from) in [
                (&mut own.rows, &new.rows),
                (&mut own.ids, &new.ids),
                (own.weights.as_mut().unwrap(), weights(&new)),
                (&mut made, &new_made),
            ] {
                let (device, stream) = (&rank.device, &rank.stream);
                device.copy(stream, to.view_mut(), from.view()).unwrap();
            }
            graph.launch(&rank.stream).unwrap();
            let came: i32 = crate::experts::own::i32s(rank, &counts).iter().sum();
            let want: usize = received(case, rank.rank).iter().map(Vec::len).sum();
            assert_eq!(came as usize, want, "rows of replay {i}");
            back.check(rank, case, &d);
            // Eager exchanges go on beside the graph's.
            if i % 2 == 0 {
                round_trips(rank, &mut rank.lease(), [&cases[i], &cases[0]]);
            }
        }
    });
}

/// Where what experts got adds up.
fn counted(totals: &mut Buffer) -> Statistics<'_> {
    Statistics {
        totals: Some(totals.view_mut()),
        waits: None,
    }
}

/// What experts got adds up, call by call and replay by replay.
fn totals(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<Case> = (0..4)
        .map(|_| drawn(&mut rng, world.size, (12, 16, 3, 7)).0)
        .collect();
    world.run(&config(), move |rank| {
        let experts = cases[0].slots()[rank.rank];
        // More than an i32 holds.
        let mut want: Vec<i64> = (0..experts as i64).map(|e| (1 << 40) + e).collect();
        let mut totals = rank.upload_bytes(
            DataType::I64,
            &[experts],
            bytemuck::cast_slice(want.as_slice()),
        );
        let mut exchange = rank.low_latency();
        let (slot, _) = exchange.slots();
        let mut add = |case: &Case, times: i64| {
            let rows = received(case, rank.rank);
            let all = want.iter_mut().zip(rows);
            all.for_each(|(want, rows)| *want += times * rows.len() as i64);
            want.clone()
        };
        let now = |totals: &Buffer| -> Vec<i64> {
            bytemuck::pod_collect_to_vec(&rank.raw(totals.view()))
        };
        for case in &cases {
            let mut lease = rank.lease();
            let pending = send(&mut lease, slot, (&Own::of(rank, case), case), true).unwrap();
            let there = pending.receive_counted(&mut lease, counted(&mut totals));
            check(rank, case, &there.unwrap());
            assert_eq!(now(&totals), add(case, 1));
        }
        let (case, own) = (&cases[0], Own::of(rank, &cases[0]));
        let graph = rank.device.capture(&rank.stream, &mut || {
            let mut lease = rank.lease();
            send(&mut lease, slot, (&own, case), false)?
                .receive_counted(&mut lease, counted(&mut totals))
                .map(drop)
        });
        let graph = graph.unwrap();
        for _ in 0..3 {
            graph.launch(&rank.stream).unwrap();
        }
        assert_eq!(now(&totals), add(case, 3));
        // Who asks for something else has given the exchange up, and nothing was added.
        for (field, mut wrong) in [
            ("totals.dtype", rank.poisoned(DataType::I32, &[experts])),
            ("totals.shape", rank.poisoned(DataType::I64, &[experts + 1])),
        ] {
            let mut lease = rank.lease();
            let pending = send(&mut lease, slot, (&own, case), true).unwrap();
            let result = pending.receive_counted(&mut lease, counted(&mut wrong));
            assert_eq!(expect_invalid(result, field), field);
        }
        assert_eq!(now(&totals), add(case, 0));
        rank.lease().barrier().unwrap();
    });
}

/// How long was waited for whom adds up, in both receives, call by call and replay by replay.
fn waits(world: &World) {
    let mut rng = world.rng();
    let (late, hook) = late_rank(world);
    let (case, _) = drawn(&mut rng, world.size, (12, 16, 3, 7));
    world.run_injected(&config(), hook, move |rank| {
        let (own, back) = (Own::of(rank, &case), plain(case.dtype));
        let made = back.rows(rank, &case);
        let mut exchange = rank.low_latency();
        let (slot, _) = exchange.slots();
        let (mut gone, mut came) = (Waits::new(rank), Waits::new(rank));
        let mut round_trip = |to: [&mut Buffer; 2]| -> Result<()> {
            let [gone, came] = to.map(Buffer::view_mut);
            let mut lease = rank.lease();
            let to = Statistics {
                totals: None,
                waits: Some(gone),
            };
            let there = send(&mut lease, slot, (&own, &case), back.weighted)?;
            let there = there.receive_counted(&mut lease, to)?;
            let p = back.params(&made, &own);
            let pending = lease.low_latency_combine(&there, p)?;
            let output = Output::Allocate(back.output);
            pending.receive_counted(&mut lease, output, came).map(drop)
        };
        // What is loaded first takes its time.
        round_trip([&mut gone.buffer, &mut came.buffer]).unwrap();
        gone.more(rank);
        came.more(rank);
        try_all(rank, "calls", || {
            for _ in 0..ROUNDS {
                round_trip([&mut gone.buffer, &mut came.buffer]).unwrap();
            }
            gone.show(rank, late) & came.show(rank, late)
        });
        let graph = rank.device.capture(&rank.stream, &mut || {
            round_trip([&mut gone.buffer, &mut came.buffer])
        });
        let graph = graph.unwrap();
        try_all(rank, "replays", || {
            for _ in 0..ROUNDS {
                graph.launch(&rank.stream).unwrap();
            }
            gone.show(rank, late) & came.show(rank, late)
        });
        // Who asks for something else has given the exchange up, and nothing was added.
        for (field, mut wrong) in [
            ("waits.dtype", rank.poisoned(DataType::I32, &[rank.size])),
            (
                "waits.shape",
                rank.poisoned(DataType::I64, &[rank.size + 1]),
            ),
        ] {
            let result = round_trip([&mut wrong, &mut came.buffer]);
            assert_eq!(expect_invalid(result, field), field);
            let result = round_trip([&mut gone.buffer, &mut wrong]);
            assert_eq!(expect_invalid(result, field), field);
        }
        assert_eq!(came.more(rank), vec![0; rank.size]);
        rank.lease().barrier().unwrap();
    });
}

/// What is added up where it comes back to.
fn plain(dtype: DataType) -> Back {
    Back {
        dtype,
        output: dtype,
        sum: CombineSum::Expert,
        cast: None,
        weighted: false,
        into: false,
    }
}

/// What is wrong is named.
fn refused(world: &World) {
    let mut rng = world.rng();
    let case = drawn(&mut rng, world.size, (4, 16, 2, 4)).0;
    let case = case.with_tokens(&mut rng, &vec![4; world.size]);
    let small = CommConfig {
        low_latency_bytes: 64,
        ..config()
    };
    let (other, none) = (
        case.clone(),
        CommConfig::new(brigade_device::ParallelMode::Ep),
    );
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut exchange = rank.low_latency();
        let mut with = |field: &str, change: &dyn Fn(&mut Case, &mut Own)| {
            let (mut case, mut own) = (case.clone(), Own::of(rank, &case));
            change(&mut case, &mut own);
            let result = send(&mut lease, exchange.slots().0, (&own, &case), true);
            assert_eq!(expect_invalid(result, field), field);
        };
        with("rows.shape", &|case, _| case.max_tokens = 3);
        with("rows.shape", &|case, own| {
            own.rows = rank.poisoned(case.dtype, &[4, 2, 8]);
        });
        with("rows.shape", &|_, own| {
            own.rows = rank.poisoned(DataType::BF16, &[4, 12]);
        });
        with("rows.dtype", &|_, own| {
            own.rows = rank.poisoned(DataType::I32, &[4, 16]);
        });
        with("ids", &|_, own| {
            own.ids = rank.poisoned(DataType::I32, &[3, 2]);
        });
        with("ids.dtype", &|_, own| {
            own.ids = rank.poisoned(DataType::F32, &[4, 2]);
        });
        with("ids.shape", &|_, own| {
            own.ids = rank.poisoned(DataType::I32, &[4, 33]);
        });
        with("weights.dtype", &|_, own| {
            own.weights = Some(rank.poisoned(DataType::BF16, &[4, 2]));
        });
        with("weights.shape", &|_, own| {
            own.weights = Some(rank.poisoned(DataType::F32, &[4, 1]));
        });
        with("max_tokens", &|case, _| case.max_tokens = usize::MAX);
        let own = Own::of(rank, &case);
        let (a, b) = exchange.slots();
        let plain = send(&mut lease, b, (&own, &case), false).unwrap();
        let plain = plain.receive(&mut lease).unwrap();
        let there = send(&mut lease, a, (&own, &case), true).unwrap();
        let there = there.receive(&mut lease).unwrap();
        let dims = there.rows().shape().dims().to_vec();
        let rows = rank.poisoned(DataType::BF16, &dims);
        let mut combine = |field: &str, rows: &Buffer, weights: &Buffer| {
            let p = LowLatencyCombineParams {
                rows: rows.view(),
                sum: CombineSum::Expert,
                cast: None,
                weights: Some(weights.view()),
            };
            let result = lease.low_latency_combine(&there, p);
            assert_eq!(expect_invalid(result, field), field);
        };
        let room = dims[1];
        let more = rank.poisoned(DataType::BF16, &[dims[0], room + 1, 16]);
        combine("rows.shape", &more, weights(&own));
        let numbers = rank.poisoned(DataType::I32, &dims);
        combine("rows.dtype", &numbers, weights(&own));
        let half = rank.poisoned(DataType::BF16, &[4, 2]);
        combine("weights.dtype", &rows, &half);
        let fewer = rank.poisoned(DataType::F32, &[4, 1]);
        combine("weights.shape", &rows, &fewer);
        // 24 bytes of a row are no multiple of 16.
        let odd = rank.poisoned(DataType::BF16, &[dims[0], room, 24]);
        for format in FORMATS {
            let p = LowLatencyCombineParams {
                rows: odd.view(),
                sum: CombineSum::Expert,
                cast: Some(CombineCast::Fp8(format)),
                weights: Some(weights(&own).view()),
            };
            let result = lease.low_latency_combine(&there, p);
            assert_eq!(expect_invalid(result, "rows.shape"), "rows.shape");
        }
        // Of LogFMT-10, whole blocks of bf16.
        let half = rank.poisoned(DataType::F16, &[dims[0], room, 128]);
        for (field, rows) in [("rows.shape", &rows), ("rows.dtype", &half)] {
            let p = LowLatencyCombineParams {
                rows: rows.view(),
                sum: CombineSum::Expert,
                cast: Some(CombineCast::LogFmt10),
                weights: Some(weights(&own).view()),
            };
            let result = lease.low_latency_combine(&there, p);
            assert_eq!(expect_invalid(result, field), field);
        }
        // Weights, where they are needed and nowhere else.
        let (expert, by_rank) = (CombineSum::Expert, CombineSum::ExpertByRank);
        let given = Some(weights(&own).view());
        for (field, there, sum, weights) in [
            ("weights", &there, expert, None),
            ("weights", &there, by_rank, given),
            ("sum", &there, CombineSum::Rank, None),
            ("sum", &plain, by_rank, None),
            ("sum", &plain, by_rank, given),
        ] {
            let p = LowLatencyCombineParams {
                rows: rows.view(),
                sum,
                cast: None,
                weights,
            };
            let result = lease.low_latency_combine(there, p);
            assert_eq!(expect_invalid(result, field), field);
        }
        // The first of two combines is given up.
        let mut begin = || {
            let p = LowLatencyCombineParams {
                rows: rows.view(),
                sum: CombineSum::Expert,
                cast: None,
                weights: Some(weights(&own).view()),
            };
            lease.low_latency_combine(&there, p).unwrap()
        };
        let (first, second) = (begin(), begin());
        let output = || Output::Allocate(DataType::F32);
        let late = first.receive(&mut lease, output());
        assert_eq!(expect_invalid(late, "a combine that is over"), "slot");
        second.receive(&mut lease, output()).unwrap();
    });
    for config in [small, none] {
        let case = other.clone();
        world.run(&config, move |rank| {
            let mut exchange = rank.low_latency();
            let (mut lease, own) = (rank.lease(), Own::of(rank, &case));
            let result = send(&mut lease, exchange.slots().0, (&own, &case), true);
            let code = expect_unsupported(result, "places that there is no memory for");
            assert_eq!(code, brigade_plan::reason::CAPACITY);
        });
    }
}

/// What was sent before a reset is not received after it, and the slots are free again.
fn reset(world: &World) {
    let mut rng = world.rng();
    let cases = [(); 2].map(|()| drawn(&mut rng, world.size, (6, 16, 2, 5)));
    world.run(&config(), move |rank: &mut Rank| {
        let mut exchange = rank.low_latency();
        let own = Own::of(rank, &cases[0].0);
        for _ in 0..3 {
            let (mut lease, slot) = (rank.lease(), exchange.slots().0);
            let pending = send(&mut lease, slot, (&own, &cases[0].0), true).unwrap();
            drop(lease);
            rank.meet();
            rank.comm().abort();
            rank.meet();
            rank.comm().reset(Duration::from_secs(30)).unwrap();
            let late = pending.receive(&mut rank.lease());
            assert_eq!(expect_invalid(late, "an old exchange"), "slot");
            let both = [&cases[0], &cases[1]];
            exchanges(rank, &mut rank.lease(), &mut exchange, both, &[]);
        }
    });
}

/// Nobody has slots while somebody else has them, on any clone of the communicator: two results can be live, whoever asks. What is refused
/// touches nobody.
fn lent_once(world: &World) {
    let mut rng = world.rng();
    let cases = [(); 3].map(|()| drawn(&mut rng, world.size, (6, 16, 2, 5)).0);
    world.run(&config(), move |rank| {
        let own = [0, 1, 2].map(|i| Own::of(rank, &cases[i]));
        let mut lease = rank.lease();
        let expect_busy = |what: &str| match rank.comm().clone().low_latency().map(drop) {
            Err(Error::Busy(_)) => {}
            other => panic!("{what}: {other:?}"),
        };
        let mut exchange = rank.low_latency();
        expect_busy("nothing is sent");
        let (a, b) = exchange.slots();
        let first = send(&mut lease, a, (&own[0], &cases[0]), false).unwrap();
        let second = send(&mut lease, b, (&own[1], &cases[1]), false).unwrap();
        expect_busy("both slots are sent in");
        let [first, second] = [first, second].map(|sent| sent.receive(&mut lease).unwrap());
        expect_busy("two results are live");
        check(rank, &cases[0], &first);
        check(rank, &cases[1], &second);
        drop(exchange);
        let mut again = rank.low_latency();
        let third = send(&mut lease, again.slots().1, (&own[2], &cases[2]), false).unwrap();
        check(rank, &cases[2], &third.receive(&mut lease).unwrap());
    });
}

/// What was sent by another communicator of the same ranks, in the same slot, is not received here, and nothing of it goes back.
fn other_communicator(world: &World) {
    let mut rng = world.rng();
    let (case, back) = drawn(&mut rng, world.size, (6, 16, 2, 5));
    world.run(&config(), move |rank: &mut Rank| {
        let other = rank.join_another(&config());
        let (own, made) = (Own::of(rank, &case), back.rows(rank, &case));
        let (mut ours, mut theirs) = (rank.lease(), other.lease(&rank.stream).unwrap());
        let (mut here, mut there) = (rank.low_latency(), other.low_latency().unwrap());
        let (here, there) = (here.slots().0, there.slots().0);
        let sent = send(&mut ours, here, (&own, &case), back.weighted).unwrap();
        let refused = send(&mut ours, there, (&own, &case), back.weighted).map(drop);
        assert_eq!(expect_invalid(refused, "another's slot"), "slot");
        let foreign = send(&mut theirs, there, (&own, &case), back.weighted).unwrap();
        let refused = foreign.receive(&mut ours).map(drop);
        assert_eq!(expect_invalid(refused, "another's exchange"), "slot");
        let got = sent.receive(&mut ours).unwrap();
        check(rank, &case, &got);
        let sent = send(&mut theirs, there, (&own, &case), back.weighted).unwrap();
        let foreign = sent.receive(&mut theirs).unwrap();
        check(rank, &case, &foreign);
        let refused = ours.low_latency_combine(&foreign, back.params(&made, &own));
        assert_eq!(expect_invalid(refused.map(drop), "another's rows"), "slot");
        let output = || Output::Allocate(DataType::F32);
        let mut returning = |of| ours.low_latency_combine(of, back.params(&made, &own));
        let sent = returning(&got).unwrap();
        let pending = theirs.low_latency_combine(&foreign, back.params(&made, &own));
        let refused = pending.unwrap().receive(&mut ours, output());
        assert_eq!(expect_invalid(refused, "another's way back"), "slot");
        sent.receive(&mut ours, output()).unwrap();
    });
}

pub(super) fn add(suite: &mut Suite) {
    waits::add(suite, "low_latency/waits", waits);
    let contracts: [(&str, Contract); 8] = [
        ("given_up", given_up),
        ("totals", totals),
        ("between", between),
        ("captured", captured),
        ("refused", refused),
        ("reset", reset),
        ("lent_once", lent_once),
        ("other_communicator", other_communicator),
    ];
    for (name, contract) in contracts {
        suite.add(&format!("low_latency/{name}"), contract);
    }
}
