//! Rows to experts on all machines and back: bit for bit what was sent, in the order of all ranks; and sums in the order of ranks inside
//! each machine, and of machines.

mod faults;

use super::{SHAPES, all_ranks, at, config, settled};
use crate::{
    backend::Rank,
    check::{expect_invalid, expect_unsupported},
    experts::{
        back::Back,
        case::{By, Case, Ids, Where, rounded},
        casts::{FORMATS, check_cast, check_echo},
        own::{Own, check, i32s},
    },
    suite::{Suite, World},
};
use brigade_device::{
    Arrangement, CombineParams, CombineSum, DataType, DispatchParams, Dispatched, Error, Fp8Cast,
    Handle, Hierarchy, HierarchyConfig, Output, ParallelMode, Result, Route, ScaleFormat,
    Transport,
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

/// Little memory, so that rows go in pieces inside, along the rail and through queues.
pub fn with_experts() -> HierarchyConfig {
    let mut config = config();
    config.comm.mode = ParallelMode::Ep;
    config.comm.dispatch_bytes = 64 << 10;
    config.comm.combine_bytes = 96 << 10;
    config.comm.fifo_bytes = 64 << 10;
    config
}

/// Any tokens of all ranks of these machines.
fn case(rng: &mut StdRng, shape: (usize, usize), sizes: (usize, usize, usize, usize)) -> Case {
    let mut case = Case::random(rng, shape.0 * shape.1, sizes);
    case.by_machine = (shape.0 > 1).then_some(shape.1);
    // Scales of a cast are one more, and what is known of a row another.
    case.beside.truncate(DispatchParams::MOST_BESIDE - 2);
    case
}

/// Tokens of `source` that go to each machine.
fn to_machines(case: &Case, source: usize, machines: usize) -> Vec<i32> {
    let ranks = case.size / machines;
    let mut counts = vec![0; machines];
    for token in 0..case.tokens(source) {
        for (machine, count) in counts.iter_mut().enumerate() {
            let mut slots = (0..case.k).filter_map(|entry| case.slot(source, token, entry));
            let goes = |slot| case.owner(slot).0 / ranks == machine;
            *count += i32::from(slots.any(goes));
        }
    }
    counts
}

/// What came, and what is known of machines.
fn check_all(rank: &Rank, over: &Hierarchy, case: &Case, got: &Dispatched) {
    check(rank, case, got);
    let machines = over.machines();
    let Some(ways) = got.handle.machines() else {
        assert_eq!(machines.count(), 1);
        return;
    };
    let numbers = |view| bytemuck::pod_collect_to_vec::<u8, i32>(&rank.raw(view));
    let sent = to_machines(case, rank.rank, machines.count());
    assert_eq!(numbers(ways.sent()), sent, "rows to machines");
    let mut received = vec![0; machines.count()];
    for row in case.received(rank.rank).0 {
        received[machines.machine_of(row.source)] += 1;
    }
    assert_eq!(numbers(ways.received()), received, "rows from machines");
}

fn dispatch(rank: &Rank, over: &Hierarchy, case: &Case) -> Result<Dispatched> {
    Own::of(rank, case).dispatch(&mut over.lease(&rank.stream)?, case)
}

/// There and back again.
fn round_trip(rank: &Rank, over: &Hierarchy, case: &Case, back: &Back) -> Dispatched {
    let got = dispatch(rank, over, case).unwrap();
    check_all(rank, over, case, &got);
    let mut lease = over.lease(&rank.stream).unwrap();
    back.check(rank, &mut lease, case, &got.handle);
    got
}

const TRANSPORTS: [Option<Transport>; 4] = [
    None,
    Some(Transport::OneSided),
    Some(Transport::Fifo),
    Some(Transport::Gather),
];

/// The same, by any transport, in any type, with room for what comes or for more.
fn any(rng: &mut StdRng, mut case: Case) -> (Case, Back) {
    case.by = By {
        there: *TRANSPORTS.choose(rng).unwrap(),
        back: *TRANSPORTS.choose(rng).unwrap(),
        ids: Ids::Own,
    };
    case.dtype = [DataType::BF16, DataType::F32, DataType::I8][rng.random_range(0..3)];
    let case = case.with_rows(rng).with_any_ids(rng);
    let most = (0..case.size).map(|rank| case.received(rank).1).max();
    let room = rng.random::<bool>().then(|| most.unwrap_or(0) + 3);
    let case = Case { room, ..case };
    let back = Back::random(rng, &case);
    (case, back)
}

/// Tokens of a rank at most, hidden, k, experts.
const SIZES: [(usize, usize, usize, usize); 6] = [
    (1, 512, 8, 64),
    (3, 1024, 6, 33),
    (40, 64, 4, 20),
    (130, 16, 1, 7),
    (17, 32, 32, 100),
    (60, 96, 10, 5),
];

fn round_trips(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let cases = SIZES.map(|sizes| {
        let case = case(&mut rng, shape, sizes);
        any(&mut rng, case)
    });
    // Sums in another order, or with one rounding, have other bits: what is asserted below could fail.
    let (case, kind) = (&cases[2].0, (CombineSum::Rank, DataType::BF16));
    let sums = |case: &Case| {
        let all = 0..case.size;
        let kind = (kind.0, kind.1, kind.1, case.hidden);
        all.flat_map(|rank| case.combined(rank, kind, &[]).0)
            .map(|x| rounded(DataType::BF16, x))
            .collect::<Vec<_>>()
    };
    let flat = Case {
        by_machine: None,
        ..case.clone()
    };
    let tokens = (0..case.size).map(|rank| case.tokens(rank)).sum::<usize>();
    if shape.0 > 1 && shape.1 > 1 && tokens > 10 {
        assert!(sums(case) != sums(&flat), "the order of sums is not seen");
    }
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        for (case, back) in &cases {
            round_trip(rank, &over, case, back);
        }
    });
}

/// So many rows that both connections of a rail take part, and words beside them that no driver copies without looking at the stream.
fn many(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let mut case = case(&mut rng, shape, (1100, 128, 8, 64));
    case = case.with_tokens(&mut rng, &vec![1100; world.size]);
    let (case, back) = any(&mut rng, case);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        round_trip(rank, &over, &case, &back);
    });
}

/// Nobody's rows, all to one rank, each to nobody, one expert twice; and no weights.
fn extremes(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let size = world.size;
    let full = case(&mut rng, shape, (20, 32, 3, 2 * size + 1));
    let full = full.with_tokens(&mut rng, &vec![20; size]);
    let none = full.clone().with_tokens(&mut rng, &vec![0; size]);
    let mut one = vec![0; size];
    one[rng.random_range(0..size)] = 20;
    let from_one = full.clone().with_tokens(&mut rng, &one);
    let filled = |case: &Case, id: i64| {
        let mut case = case.clone();
        case.ids.iter_mut().for_each(|ids| ids.fill(id));
        case
    };
    let (to_one, nowhere) = (filled(&full, 2 * size as i64), filled(&full, -1));
    let mut bare = full.clone();
    bare.weights = None;
    let cases = [full, none, from_one, to_one, nowhere, bare].map(|case| any(&mut rng, case));
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        for (case, back) in &cases {
            round_trip(rank, &over, case, back);
        }
    });
}

/// Experts in several slots, slots of none, and ids that are ranks; and the layout that says so beforehand.
fn placements(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let per_rank = 3;
    let all = (per_rank * world.size) as i32;
    let mut mapped = case(&mut rng, shape, (30, 16, 4, 7));
    let mut slots: Vec<i32> = (0..7 * 3).map(|_| rng.random_range(0..all)).collect();
    // One expert has one copy, and one none.
    slots[3..6].copy_from_slice(&[1, -1, -1]);
    slots[6..9].fill(-1);
    mapped.places = Where::Map { slots, per_rank };
    let mut ranks = mapped.clone();
    ranks.places = Where::Ranks;
    let cases = [mapped, ranks].map(|case| {
        let tokens: Vec<usize> = (0..world.size).map(|_| rng.random_range(1..=30)).collect();
        let case = case.with_tokens(&mut rng, &tokens);
        any(&mut rng, case)
    });
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        for (case, back) in &cases {
            let got = round_trip(rank, &over, case, back);
            let own = Own::of(rank, case);
            let mut lease = over.lease(&rank.stream).unwrap();
            let layout = lease.expert_layout(own.routing(case)).unwrap();
            let counts = to_machines(case, rank.rank, shape.0);
            assert_eq!(i32s(rank, &layout.rows_per_machine), counts);
            let known = got.handle.layout().buffers();
            for (told, known) in layout.ranks.buffers().into_iter().zip(known) {
                assert_eq!(i32s(rank, told), i32s(rank, known));
            }
        }
    });
}

/// Other rows the same ways, of another type, and sums of them; statistics count each time.
fn again(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let cases = [0, 1].map(|_| {
        let case = case(&mut rng, shape, (40, 48, 3, 9));
        let (case, back) = any(&mut rng, case);
        let mut other = case.clone();
        other.dtype = DataType::F32;
        (case, other.with_rows(&mut rng), back)
    });
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        for (case, other, back) in &cases {
            let slots = case.slots()[rank.rank];
            let mut before: Vec<i64> = (0..slots as i64).map(|slot| (1 << 40) + slot).collect();
            // What overflows goes round, as on one machine.
            if let Some(first) = before.first_mut() {
                *first = i64::MAX;
            }
            let bytes = bytemuck::cast_slice(&before);
            let totals = rank.upload_bytes(DataType::I64, &[slots], bytes);
            let own = |case| {
                let mut own = Own::of(rank, case);
                own.totals = Some(totals.clone());
                own
            };
            let mut lease = over.lease(&rank.stream).unwrap();
            let there = own(case).dispatch(&mut lease, case).unwrap();
            for case in [other, case, other] {
                let route = Route::Again(&there.handle);
                let got = own(case).dispatch_by(&mut lease, case, route).unwrap();
                check_all(rank, &over, case, &got);
                back.check(rank, &mut lease, case, &got.handle);
            }
            let got: Vec<i64> = bytemuck::pod_collect_to_vec(&rank.raw(totals.view()));
            let counts = case.counts(rank.rank).into_iter();
            let want: Vec<i64> = before
                .iter()
                .zip(counts)
                .map(|(b, n)| b.wrapping_add(4 * n))
                .collect();
            assert_eq!(got, want, "totals of four dispatches");
        }
    });
}

/// Rows that are cast are so before they go along the rail.
fn casts(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let cases = FORMATS.map(|(format, limit)| {
        let mut case = case(&mut rng, shape, (12, 400, 3, 7));
        case.cast = Some(Fp8Cast {
            format,
            column_major: false,
        });
        (case.with_rows(&mut rng), limit)
    });
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        for (case, limit) in &cases {
            let got = dispatch(rank, &over, case).unwrap();
            check_all(rank, &over, case, &got);
            check_cast(rank, case, &got, *limit);
            let mut lease = over.lease(&rank.stream).unwrap();
            check_echo(rank, &mut lease, case, &got, *limit);
        }
    });
}

/// The sum of what all ranks' experts made, as bytes.
fn combined(rank: &Rank, over: &Hierarchy, handle: &Handle, case: &Case) -> Result<Vec<u8>> {
    let rows = rank.poisoned(case.dtype, &[handle.capacity(), case.hidden]);
    let back = over.lease(&rank.stream)?.combine(CombineParams {
        rows: rows.view(),
        handle,
        sum: CombineSum::Rank,
        weights: None,
        biases: &[],
        output: Output::Allocate(case.dtype),
        waits: None,
        choice: None,
    })?;
    settled(rank, over, Ok(()))?;
    Ok(rank.raw(back.d.unwrap().view()))
}

/// Some rows there and back, which may fail.
pub struct Trip(Case);

impl Trip {
    /// Of any tokens.
    pub fn random(rng: &mut StdRng, shape: (usize, usize)) -> Self {
        let mut case = case(rng, shape, (60, 64, 4, 9));
        case.dtype = DataType::F32;
        Self(case.with_rows(rng))
    }

    /// Makes both calls.
    ///
    /// # Errors
    /// As they.
    pub fn run(&self, rank: &Rank, over: &Hierarchy) -> Result<()> {
        let got = dispatch(rank, over, &self.0)?;
        combined(rank, over, &got.handle, &self.0)?;
        over.check()
    }
}

/// What does not go across machines is refused with a reason, and what cannot be with the field; and the hierarchy goes on.
fn refusals(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = case(&mut rng, shape, (10, 128, 3, 7));
    let (case, back) = any(&mut rng, case);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        let got = round_trip(rank, &over, &case, &back);
        let unsupported = |case: &Case, what: &str| {
            let refused = dispatch(rank, &over, case);
            assert_eq!(expect_unsupported(refused, what), "across-machines");
        };
        let with = |change: fn(&mut Case)| {
            let mut case = case.clone();
            (case.by.there, case.room) = (None, None);
            change(&mut case);
            case
        };
        let by_source = with(|case| case.arrangement = Arrangement::BySource);
        unsupported(&by_source, "places of ranks");
        let by_expert = with(|case| case.arrangement = Arrangement::ByExpert { alignment: 1 });
        unsupported(&by_expert, "rows by expert");
        unsupported(&with(|case| case.by.ids = Ids::Padded), "gathered ids");
        let bf16 =
            with(|case| case.dtype = DataType::BF16).with_rows(&mut StdRng::seed_from_u64(1));
        let by_columns = Case {
            cast: Some(Fp8Cast {
                format: ScaleFormat::F32,
                column_major: true,
            }),
            ..bf16
        };
        unsupported(&by_columns, "scales by columns");
        let own = Own::of(rank, &case);
        let tokens = own.rows.shape().rows();
        let tag = rank.poisoned(DataType::U8, &[tokens, 2]);
        let beside = [tag.view(); DispatchParams::MOST_BESIDE];
        let route = || Route::Experts {
            routing: own.routing(&case),
            weights: None,
        };
        let call = |beside, max_tokens| {
            over.lease(&rank.stream)?.dispatch(DispatchParams {
                rows: own.rows.view(),
                beside,
                route: route(),
                arrangement: Arrangement::Dense,
                max_tokens,
                max_recv: None,
                received_ids: case.received_ids,
                totals: None,
                waits: None,
                cast: None,
                choice: None,
            })
        };
        let refused = call(&beside, 10);
        let code = expect_unsupported(refused, "four things beside rows");
        assert_eq!(code, "across-machines");
        let mut late = Own::of(rank, &case);
        late.waits = Some(rank.poisoned(DataType::I64, &[rank.size]));
        let refused = late.dispatch(&mut over.lease(&rank.stream).unwrap(), &case);
        let code = expect_unsupported(refused, "times that ranks are waited for");
        assert_eq!(code, "across-machines");
        let mut wrong = Own::of(rank, &case);
        wrong.totals = Some(rank.poisoned(DataType::I32, &[1]));
        let refused = wrong.dispatch(&mut over.lease(&rank.stream).unwrap(), &case);
        assert_eq!(expect_invalid(refused, "totals of i32"), "totals.dtype");
        let refused = call(&beside[..1], 1 << 20);
        assert_eq!(expect_invalid(refused, "too many tokens"), "max_tokens");
        let captured = rank.device.capture(&rank.stream, &mut || {
            let mut lease = over.lease(&rank.stream)?;
            own.dispatch(&mut lease, &case).map(drop)
        });
        let code = expect_unsupported(captured.map(drop), "captured");
        assert_eq!(code, "not-capturable");
        // Of one group, though it has all ranks.
        let flat = rank.join_another(&crate::experts::config());
        let mut lease = flat.lease(&rank.stream).unwrap();
        let flat = with(|case| case.dtype = DataType::F32).with_rows(&mut StdRng::seed_from_u64(2));
        let there = Own::of(rank, &flat).dispatch(&mut lease, &flat).unwrap();
        let refused = combined(rank, &over, &there.handle, &flat);
        assert_eq!(expect_invalid(refused, "another's handle"), "handle");
        // And the other way round: what went across machines does not go back inside one group.
        let refused = lease.combine(CombineParams {
            rows: got.rows.view(),
            handle: &got.handle,
            sum: CombineSum::Rank,
            weights: None,
            biases: &[],
            output: Output::Allocate(DataType::F32),
            waits: None,
            choice: None,
        });
        assert_eq!(expect_invalid(refused, "a hierarchy's handle"), "handle");
        let again = own.dispatch_by(&mut lease, &case, Route::Again(&got.handle));
        assert_eq!(expect_invalid(again, "a hierarchy's handle"), "handle");
        let mut lease = over.lease(&rank.stream).unwrap();
        back.check(rank, &mut lease, &case, &got.handle);
        drop(lease);
        round_trip(rank, &over, &case, &back);
    });
}

/// More rows than 32 bits count over all ranks may have room, but then their weights do not go back; and the hierarchy goes on.
fn weights_of_too_many(world: &World, shape: (usize, usize)) {
    /// That many of every rank of the largest group can be counted.
    const MOST: usize = 1 << 20;
    let mut rng = world.rng();
    let mut case = case(&mut rng, shape, (10, 4, 1, 7));
    case.dtype = DataType::F32;
    case.beside.clear();
    case.room = Some(MOST + 1);
    let case = case.with_rows(&mut rng);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        let got = dispatch(rank, &over, &case).unwrap();
        let weights = rank.poisoned(DataType::F32, got.ids.shape().dims());
        let mut lease = over.lease(&rank.stream).unwrap();
        let refused = lease.combine(CombineParams {
            rows: got.rows.view(),
            handle: &got.handle,
            sum: CombineSum::Rank,
            weights: Some(weights.view()),
            biases: &[],
            output: Output::Allocate(DataType::F32),
            waits: None,
            choice: None,
        });
        drop(lease);
        match refused {
            Err(Error::Invalid { field, got, want }) => {
                assert_eq!(field, "handle.max_recv");
                assert_eq!((got, want), ("1048577".into(), format!("at most {MOST}")));
            }
            other => panic!("{other:?}"),
        }
        combined(rank, &over, &got.handle, &case).unwrap();
    });
}

/// Without memory for rows a hierarchy refuses them, and its other calls go on.
fn no_memory(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = case(&mut rng, shape, (9, 32, 3, 7));
    let sums = super::Case::sum(&mut rng, shape, 777);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        let code = expect_unsupported(dispatch(rank, &over, &case), "no memory");
        assert_eq!(code, brigade_plan::reason::CAPACITY);
        sums.run(rank, &over, None);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    type Contract = fn(&World, (usize, usize));
    let contracts: [(&str, Contract); 5] = [
        ("round_trips", round_trips),
        ("extremes", extremes),
        ("placements", placements),
        ("again", again),
        ("no_memory", no_memory),
    ];
    let injects = suite.backend().injects();
    for shape in SHAPES {
        let mut add = |name: &str, contract: Contract| {
            at(suite, shape, &format!("experts/{name}"), contract);
        };
        for (name, contract) in contracts {
            add(name, contract);
        }
        let (machines, ranks) = shape;
        if machines * ranks > 1 {
            add("overflow", faults::overflow);
            add("never_calls", faults::never_calls);
            add("other_call", faults::other_call);
            add("leaves", faults::leaves);
            if injects {
                add("delays", faults::delays);
            }
        }
        if machines > 1 {
            add("refusals", refusals);
            add("casts", casts);
            add("other_ways", faults::other_ways);
        }
        if shape == (2, 1) || shape == (2, 2) {
            add("many", many);
            add("weights_of_too_many", weights_of_too_many);
        }
    }
}
