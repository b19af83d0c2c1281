//! The low-latency exchange: bit for bit what was sent, expert by expert, in the order that the contract promises; and sums in the order
//! of a token's experts. Two slots are in use at once, and ranks receive them in different orders.
//!
//! The sizes cover what the contract lists, not every combination of it: at most 1 to 128 tokens of a rank, none among them; k 1, 2, 3, 4, 6,
//! 7, 8, 10, 22, 32; 5 to 2100 experts, multiples of the ranks and not; hidden 8 to 8192. Each is tried in both slots and by both sums.

mod apart;
mod back;
pub mod came;
mod casts;
mod limits;

use crate::{
    backend::Rank,
    experts::{
        case::{Case, Where},
        own::Own,
    },
    suite::{Suite, World},
};
use back::Back;
use brigade_device::{
    Buffer, CombineCast, CombineSum, CommConfig, DataType, Fp8Cast, Lease, LowLatency,
    LowLatencyDispatchParams, Output, ParallelMode, Pending, Result, ScaleFormat, Slot,
};
use came::{check, promised};
use rand::{Rng, rngs::StdRng};
use sha2::{Digest, Sha256};

/// Tokens of a rank at most, hidden, k, experts.
const SIZES: [(usize, usize, usize, usize); 11] = [
    (1, 2048, 8, 16),
    (3, 7168, 8, 32),
    (33, 288, 4, 60),
    (128, 8, 1, 8),
    (9, 64, 32, 100),
    (65, 16, 10, 11),
    (2, 5120, 22, 64),
    (4, 24, 3, 5),
    (5, 2880, 6, 128),
    (2, 8192, 2, 9),
    // More than kernels count at a time.
    (6, 16, 7, 2100),
];

const FORMATS: [ScaleFormat; 3] = [
    ScaleFormat::F32,
    ScaleFormat::PowerOfTwo,
    ScaleFormat::Ue8m0,
];

/// What has memory for all that is exchanged here, and for little else.
pub fn config() -> CommConfig {
    CommConfig {
        low_latency_bytes: 8 << 20,
        dispatch_bytes: 0,
        combine_bytes: 0,
        fifo_bytes: 0,
        scratch_bytes: 4096,
        message_bytes: 4096,
        gather_bytes: 0,
        reduce_scatter_bytes: 0,
        all_reduce_bytes: 64 << 10,
        region_bytes: 0,
        ..CommConfig::new(ParallelMode::Ep)
    }
}

/// Sends a case's rows, with their weights or without.
pub fn send<'s>(
    lease: &mut Lease<'_>,
    slot: &'s mut Slot,
    (own, case): (&Own, &Case),
    weighted: bool,
) -> Result<Pending<'s>> {
    let weights = own.weights.as_ref().filter(|_| weighted);
    lease.low_latency_dispatch(
        slot,
        LowLatencyDispatchParams {
            rows: own.rows.view(),
            routing: own.routing(case),
            weights: weights.map(Buffer::view),
            max_tokens: case.max_tokens,
            cast: case.cast,
        },
    )
}

/// A case, and what comes back of it.
pub type RoundTrip = (Case, Back);

/// Small ones, one for each sum.
pub fn both_sums(rng: &mut StdRng, size: usize) -> [RoundTrip; 2] {
    let mut small = || drawn(rng, size, (12, 32, 3, 2 * size + 1));
    [here(small()), by_rank(small())]
}

/// Sends, and gives it up.
pub fn try_send(rank: &Rank, (case, back): &RoundTrip) -> Result<()> {
    let (own, mut exchange) = (Own::of(rank, case), rank.low_latency());
    let slot = exchange.slots().0;
    send(&mut rank.lease(), slot, (&own, case), back.weighted).map(drop)
}

/// Two exchanges at once, there and back, in a group without these ranks.
pub fn round_trips_without(rank: &Rank, absent: &[usize], both_sums: &[RoundTrip; 2]) {
    let mut exchange = rank.low_latency();
    for both in [[0, 1], [1, 0]].repeat(2) {
        let both = both.map(|i| &both_sums[i]);
        exchanges(rank, &mut rank.lease(), &mut exchange, both, absent);
    }
}

/// Two exchanges at once, there and back.
fn round_trips(rank: &Rank, lease: &mut Lease<'_>, both: [&RoundTrip; 2]) {
    exchanges(rank, lease, &mut rank.low_latency(), both, &[]);
}

fn exchanges(
    rank: &Rank,
    lease: &mut Lease<'_>,
    exchange: &mut LowLatency,
    both: [&RoundTrip; 2],
    absent: &[usize],
) {
    let (a, b) = exchange.slots();
    let [(case_a, back_a), (case_b, back_b)] = both;
    let own = [Own::of(rank, case_a), Own::of(rank, case_b)];
    let first = send(lease, a, (&own[0], case_a), back_a.weighted).unwrap();
    let second = send(lease, b, (&own[1], case_b), back_b.weighted).unwrap();
    let (first, second) = if rank.rank.is_multiple_of(2) {
        let first = first.receive(lease).unwrap();
        (first, second.receive(lease).unwrap())
    } else {
        let second = second.receive(lease).unwrap();
        (first.receive(lease).unwrap(), second)
    };
    // Of the same tokens.
    let (case_a, case_b) = (&case_a.without(absent), &case_b.without(absent));
    check(rank, case_a, &first);
    check(rank, case_b, &second);
    let back_of_first = back_a.send(rank, lease, (&own[0], case_a), &first);
    let back_of_second = back_b.send(rank, lease, (&own[1], case_b), &second);
    back_b.receive(rank, lease, case_b, back_of_second);
    back_a.receive(rank, lease, case_a, back_of_first);
}

/// Each case beside the next one, and each of them in both slots.
fn all_round_trips(world: &World, cases: Vec<(Case, Back)>) {
    all_round_trips_with(world, &config(), cases);
}

fn all_round_trips_with(world: &World, config: &CommConfig, cases: Vec<(Case, Back)>) {
    world.run(config, move |rank| {
        let mut lease = rank.lease();
        for (i, case) in cases.iter().enumerate() {
            round_trips(rank, &mut lease, [case, &cases[(i + 1) % cases.len()]]);
        }
    });
}

pub fn drawn(rng: &mut StdRng, size: usize, sizes: (usize, usize, usize, usize)) -> (Case, Back) {
    let mut case = Case::random(rng, size, sizes);
    case.dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
    (case.with_rows(rng), Back::random(rng))
}

/// Any small round trip, for stress.
pub fn draw(rng: &mut StdRng, size: usize) -> impl Fn(&Rank) + Send + Sync + use<> {
    let mut both = [(); 2].map(|()| {
        let sizes = (
            rng.random_range(0..12),
            8 * rng.random_range(1..5),
            rng.random_range(1..5),
            rng.random_range(1..20),
        );
        drawn(rng, size, sizes)
    });
    both[0].0.cast = rng.random::<bool>().then_some(Fp8Cast {
        format: FORMATS[rng.random_range(0..3)],
        column_major: rng.random(),
    });
    if both[0].0.cast.is_some() {
        both[0].0.hidden = 144;
        both[0].0 = both[0].0.clone().with_rows(rng);
        both[0].1.cast = Some(CombineCast::Fp8(FORMATS[rng.random_range(0..3)]));
    }
    move |rank| round_trips(rank, &mut rank.lease(), [&both[0], &both[1]])
}

/// Sums are taken where rows arrive, and where experts are.
fn sizes(world: &World) {
    let mut rng = world.rng();
    let cases = SIZES.map(|sizes| drawn(&mut rng, world.size, sizes));
    all_round_trips(
        world,
        [cases.clone().map(here), cases.map(by_rank)].concat(),
    );
}

fn here((case, back): (Case, Back)) -> (Case, Back) {
    let sum = CombineSum::Expert;
    (case, Back { sum, ..back })
}

fn by_rank((case, back): (Case, Back)) -> (Case, Back) {
    let back = Back {
        sum: CombineSum::ExpertByRank,
        weighted: true,
        ..back
    };
    (case, back)
}

/// Few multiprocessors, whose blocks have more warps, and more to do each.
fn few_multiprocessors(world: &World) {
    let mut rng = world.rng();
    let config = CommConfig {
        sm_budget: Some(rng.random_range(1..=3)),
        ..config()
    };
    let cases = [(1, 2048, 8, 16), (3, 7168, 8, 32), (97, 32, 6, 60)]
        .map(|sizes| drawn(&mut rng, world.size, sizes));
    let cases = [cases.clone().map(here), cases.map(by_rank)].concat();
    all_round_trips_with(world, &config, cases);
}

/// All tokens, none, all to one expert, every one twice, and none that goes anywhere.
fn extremes(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let (case, back) = drawn(&mut rng, size, (20, 32, 3, 2 * size + 1));
    let full = case.clone().with_tokens(&mut rng, &vec![20; size]);
    let none = case.clone().with_tokens(&mut rng, &vec![0; size]);
    let mut to_one = full.clone();
    to_one.ids.iter_mut().for_each(|ids| ids.fill(0));
    let mut twice = full.clone();
    for ids in twice.ids.iter_mut().flat_map(|ids| ids.chunks_mut(3)) {
        ids[2] = ids[0];
    }
    let mut nowhere = full.clone();
    nowhere.ids.iter_mut().for_each(|ids| ids.fill(-1));
    let mut bare = full.clone();
    bare.max_tokens = 0;
    let bare = bare.with_tokens(&mut rng, &vec![0; size]);
    let cases = [full, none, to_one, twice, nowhere, bare].map(|case| (case, back));
    all_round_trips(
        world,
        [cases.clone().map(here), cases.map(by_rank)].concat(),
    );
}

/// Experts in several slots, slots of none, ids that are ranks, and fewer experts than ranks.
fn placements(world: &World) {
    let mut rng = world.rng();
    let per_rank = 3;
    let all = (per_rank * world.size) as i32;
    let (mut case, back) = drawn(&mut rng, world.size, (30, 16, 4, 7));
    let mut slots: Vec<i32> = (0..7 * 3).map(|_| rng.random_range(0..all)).collect();
    // One expert has one copy, and one none.
    slots[3..6].copy_from_slice(&[1, -1, -1]);
    slots[6..9].fill(-1);
    case.places = Where::Map { slots, per_rank };
    let mut ranks = case.clone();
    ranks.places = Where::Ranks;
    let mut few = case.clone();
    (few.places, few.experts) = (Where::Even, world.size / 2);
    let cases = [case, ranks, few].map(|case| {
        let tokens: Vec<usize> = (0..world.size).map(|_| rng.random_range(1..=30)).collect();
        (case.with_tokens(&mut rng, &tokens), back)
    });
    all_round_trips(
        world,
        [cases.clone().map(here), cases.map(by_rank)].concat(),
    );
}

/// The same exchange has the same bits, each time that it is made: in both slots, and whoever is late.
fn repeats(world: &World) {
    const TIMES: usize = 20;
    let mut rng = world.rng();
    let plain = drawn(&mut rng, world.size, (40, 64, 4, 9));
    let mut cases = vec![here(plain.clone()), by_rank(plain)];
    for (i, format) in FORMATS.into_iter().enumerate() {
        let (mut case, back) = by_rank(drawn(&mut rng, world.size, (30, 384, 4, 9)));
        case.cast = Some(Fp8Cast {
            format,
            column_major: i == 1,
        });
        let cast = Some(CombineCast::Fp8(format));
        cases.push((case.with_rows(&mut rng), Back { cast, ..back }));
    }
    let (case, back) = here(drawn(&mut rng, world.size, (30, 256, 4, 9)));
    cases.push((case, back.in_logfmt()));
    let late: Vec<(usize, u32)> = (0..TIMES * cases.len())
        .map(|_| (rng.random_range(0..world.size), rng.random_range(0..200)))
        .collect();
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut exchange = rank.low_latency();
        let (a, b) = exchange.slots();
        for ((case, back), late) in cases.iter().zip(late.chunks(TIMES)) {
            let own = Own::of(rank, case);
            let mut first = None;
            for (time, &(who, rounds)) in late.iter().enumerate() {
                if who == rank.rank {
                    rank.dawdle(rounds);
                }
                let slot = if time % 2 == 0 { &mut *a } else { &mut *b };
                let pending = send(&mut lease, slot, (&own, case), back.weighted).unwrap();
                let there = pending.receive(&mut lease).unwrap();
                let mut all = promised(rank, &there, case.cast);
                all.extend(rank.raw(there.ranges()));
                let pending = back.send(rank, &mut lease, (&own, case), &there);
                let d = pending.receive(&mut lease, Output::Allocate(back.output));
                all.extend(rank.raw(d.unwrap().unwrap().view()));
                let hash = Sha256::digest(&all);
                assert_eq!(hash, *first.get_or_insert(hash), "time {time} of {back:?}");
            }
        }
    });
}

/// What is received may go where its own send still reads: into memory that own rows gave back, and over the rows that go back.
fn memory_again(world: &World) {
    let mut rng = world.rng();
    let sizes = (20, 512, 3, 2 * world.size + 1);
    let mut drawn = || {
        let (case, back) = drawn(&mut rng, world.size, sizes);
        let output = back.dtype;
        (case, Back { output, ..back })
    };
    let cases = [here(drawn()), by_rank(drawn())];
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut exchange = rank.low_latency();
        let slot = exchange.slots().0;
        for (case, back) in cases.iter().cycle().take(16) {
            let (own, kept) = (Own::of(rank, case), Own::of(rank, case));
            let pending = send(&mut lease, slot, (&own, case), back.weighted).unwrap();
            drop(own);
            let there = pending.receive(&mut lease).unwrap();
            check(rank, case, &there);
            let rows = back.rows(rank, case);
            let p = back.params(&rows, &kept);
            let pending = lease.low_latency_combine(&there, p).unwrap();
            let all = rows.shape().len() / case.hidden;
            let rows = rows.reshape(&[all, case.hidden]).unwrap();
            let mut over = rows.slice(0, case.tokens(rank.rank)).unwrap();
            let output = Output::Into(over.view_mut());
            assert!(pending.receive(&mut lease, output).unwrap().is_none());
            back.check(rank, case, &over);
        }
    });
}

/// Ranks are late in turn, for many rounds in the same memory.
fn many_rounds(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..6)
        .map(|_| drawn(&mut rng, world.size, (8, 16, 2, 5)))
        .collect();
    let late: Vec<(usize, u32)> = (0..60)
        .map(|_| (rng.random_range(0..world.size), rng.random_range(0..200)))
        .collect();
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        for (i, &(who, rounds)) in late.iter().enumerate() {
            if who == rank.rank {
                rank.dawdle(rounds);
            }
            let both = [&cases[i % cases.len()], &cases[(i * 5 + 1) % cases.len()]];
            round_trips(rank, &mut lease, both);
        }
    });
}

/// What is tried at every size.
type Contract = fn(&World);

/// Adds all trials.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    let contracts: [(&str, Contract); 11] = [
        ("apart", apart::apart),
        ("sizes", sizes),
        ("few_multiprocessors", few_multiprocessors),
        ("repeats", repeats),
        ("extremes", extremes),
        ("placements", placements),
        ("casts", casts::there),
        ("casts_back", casts::back),
        ("casts_echoed", casts::echoed),
        ("memory_again", memory_again),
        ("many_rounds", many_rounds),
    ];
    for (name, contract) in contracts {
        suite.add(&format!("low_latency/{name}"), contract);
    }
    limits::add(suite);
}
