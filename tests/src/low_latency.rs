//! The low-latency exchange: bit for bit what was sent, expert by expert, in the order that the contract promises; and sums in the order
//! of a token's experts. Two slots are in use at once, and ranks receive them in different orders.

mod limits;

use crate::{
    backend::Rank,
    check::assert_bits,
    experts::{
        back::diff,
        case::{Came, Case, Where, rounded},
        own::{Own, i32s},
    },
    matrix::{to_bytes, to_f32, to_f64},
    quantized::fp8,
    suite::{Suite, World},
};
use brigade_device::{
    Buffer, CombineCast, CombineSum, CommConfig, DataType, Fp8Cast, Lease, LowLatency,
    LowLatencyCombineParams, LowLatencyDispatchParams, LowLatencyDispatched, Output, ParallelMode,
    Pending, Result, ScaleFormat, Slot,
};
use rand::{Rng, rngs::StdRng};
use std::collections::BTreeMap;

/// Tokens of a rank at most, hidden, k, experts.
const SIZES: [(usize, usize, usize, usize); 8] = [
    (1, 2048, 8, 16),
    (3, 7168, 8, 32),
    (33, 288, 4, 60),
    (128, 8, 1, 8),
    (9, 64, 32, 100),
    (65, 16, 10, 11),
    (2, 5120, 22, 64),
    (4, 24, 3, 5),
];

const FORMATS: [ScaleFormat; 3] = [
    ScaleFormat::F32,
    ScaleFormat::PowerOfTwo,
    ScaleFormat::Ue8m0,
];

/// What has memory for all that is exchanged here, and for little else.
fn config() -> CommConfig {
    CommConfig {
        low_latency_bytes: 8 << 20,
        dispatch_bytes: 0,
        combine_bytes: 0,
        fifo_bytes: 0,
        scratch_bytes: 4096,
        gather_bytes: 0,
        reduce_scatter_bytes: 0,
        all_reduce_bytes: 64 << 10,
        region_bytes: 0,
        ..CommConfig::new(ParallelMode::Ep)
    }
}

/// Sends a case's rows, with their weights or without.
fn send<'s>(
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

/// What each expert of a rank must get: source rank, token, and which of the token's experts it is, as bits.
fn received(case: &Case, rank: usize) -> Vec<Vec<[i32; 3]>> {
    let of_expert = |expert: usize| {
        let tokens = (0..case.size).flat_map(|s| (0..case.tokens(s)).map(move |t| (s, t)));
        let row = |(source, token): (usize, usize)| {
            let names = |&entry: &usize| case.local(rank, source, token, entry) == Some(expert);
            let bits: u32 = (0..case.k).filter(names).map(|entry| 1 << entry).sum();
            (bits > 0).then_some([source as i32, token as i32, bits as i32])
        };
        tokens.filter_map(row).collect()
    };
    (0..case.slots()[rank]).map(of_expert).collect()
}

/// Asserts what has come.
fn check(rank: &Rank, case: &Case, got: &LowLatencyDispatched<'_>) {
    let want = received(case, rank.rank);
    let room = case.max_tokens * case.size;
    let counts: Vec<i32> = want.iter().map(|rows| rows.len() as i32).collect();
    assert_eq!(i32s(rank, &got.counts().retain()), counts, "counts");
    assert_eq!(
        got.rows().shape().dims(),
        [want.len(), room, case.hidden],
        "rows"
    );
    let sources = i32s(rank, &got.sources().retain());
    let rows = rank.raw(got.rows());
    let scales = got.scales().map(|scales| rank.raw(scales));
    for (expert, want) in want.iter().enumerate() {
        let first = expert * room;
        let named = &sources[first * 3..][..want.len() * 3];
        assert_eq!(named, want.as_flattened(), "sources of expert {expert}");
        for (i, &[source, token, _]) in want.iter().enumerate() {
            let each = case.hidden * case.dtype.bytes();
            let sent = &case.rows[source as usize][token as usize * each..][..each];
            let at = first + i;
            match (case.cast, &scales) {
                (Some(cast), Some(scales)) => check_cast(case, cast, (&rows, scales), at, sent),
                _ => assert_bits(&rows[at * each..][..each], sent, case.dtype, "a row"),
            }
        }
    }
}

/// Asserts that a row that was cast is what was sent, as far as fp8 can tell.
fn check_cast(case: &Case, cast: Fp8Cast, (rows, scales): (&[u8], &[u8]), at: usize, sent: &[u8]) {
    let (_, per_row) = cast.scales(case.hidden);
    let scale = |block: usize| match cast.format {
        ScaleFormat::Ue8m0 => 2f64.powi(i32::from(scales[at * per_row + block]) - 127),
        _ => f64::from(to_f32(DataType::F32, scales)[at * per_row + block]),
    };
    let original = to_f64(case.dtype, sent);
    let (mut back, mut want) = (vec![], vec![]);
    for (column, x) in original.into_iter().enumerate() {
        let s = scale(column / 128);
        if cast.format != ScaleFormat::F32 {
            assert_eq!(s.log2().fract(), 0.0, "{s} is no power of two");
        }
        // Blocks of very different sizes count the same.
        let size = 10f64.powi((column / 128 % 9) as i32 - 4);
        back.push(fp8(rows[at * case.hidden + column]) * s / size);
        want.push(x / size);
    }
    let limit = match cast.format {
        ScaleFormat::F32 => 2e-3,
        _ => 8e-3,
    };
    let diff = diff(&back, &want);
    assert!(diff < limit, "{diff:e} of {cast:?}");
}

/// What everybody's experts make of rows, and how it comes back.
#[derive(Clone, Copy, Debug)]
pub struct Back {
    dtype: DataType,
    output: DataType,
    sum: CombineSum,
    cast: Option<CombineCast>,
    /// Whether weights go ahead with the rows.
    weighted: bool,
    /// Whether the result goes into a buffer of the caller's.
    into: bool,
}

impl Back {
    fn random(rng: &mut StdRng) -> Self {
        let dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
        let by_rank = rng.random();
        Self {
            dtype,
            output: if rng.random() { dtype } else { DataType::F32 },
            sum: match by_rank {
                true => CombineSum::ExpertByRank,
                false => CombineSum::Expert,
            },
            cast: None,
            weighted: by_rank || rng.random(),
            into: rng.random(),
        }
    }

    /// The same with rows that are bf16, and LogFMT-10 on the way.
    fn in_logfmt(self) -> Self {
        Self {
            dtype: DataType::BF16,
            output: match self.output {
                DataType::F32 => DataType::F32,
                _ => DataType::BF16,
            },
            cast: Some(CombineCast::LogFmt10),
            ..self
        }
    }

    fn made(self, case: &Case, owner: usize, expert: usize, from: (usize, usize)) -> Vec<f64> {
        let row = Came {
            at: 0,
            source: from.0,
            token: from.1,
            entry: Some(expert),
        };
        case.made(owner, &row, case.hidden, self.dtype)
    }

    /// What this rank's experts make of the rows that must have come; behind them, NaNs, of which nothing may come back.
    fn rows(self, rank: &Rank, case: &Case) -> Buffer {
        let want = received(case, rank.rank);
        let room = case.max_tokens * case.size;
        let mut rows = vec![f64::NAN; want.len() * room * case.hidden];
        for (expert, want) in want.iter().enumerate() {
            for (i, &[source, token, _]) in want.iter().enumerate() {
                let made = self.made(case, rank.rank, expert, (source as usize, token as usize));
                rows[(expert * room + i) * case.hidden..][..case.hidden].copy_from_slice(&made);
            }
        }
        let dims = [want.len(), room, case.hidden];
        rank.upload_bytes(self.dtype, &dims, &to_bytes(self.dtype, &rows))
    }

    /// Asserts what came back: to the last bit, or, if it was cast, as far as that can tell.
    fn check(self, rank: &Rank, case: &Case, got: &Buffer) {
        let (me, hidden) = (rank.rank, case.hidden);
        let weights = &case.weights.as_ref().unwrap()[me];
        // And what the greatest magnitudes of rows would add up to.
        let (mut exact, mut wide, mut most) = (vec![], vec![], vec![]);
        for token in 0..case.tokens(me) {
            // What is added by rank, and there by entry; or all by entry.
            let mut parts: BTreeMap<usize, Vec<Vec<f32>>> = BTreeMap::new();
            let mut sums_wide = vec![0.0; hidden];
            let mut greatest = 0.0;
            for entry in 0..case.k {
                let Some(slot) = case.slot(me, token, entry) else {
                    continue;
                };
                let (owner, expert) = case.owner(slot);
                let weight = weights[token * case.k + entry];
                let made = self.made(case, owner, expert, (me, token));
                let row = made.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                greatest += row * f64::from(weight.abs());
                let each = sums_wide.iter_mut().zip(&made);
                each.for_each(|(sum, x)| *sum += x * f64::from(weight));
                let products = made.into_iter().map(|x| x as f32 * weight).collect();
                let part = match self.sum {
                    CombineSum::ExpertByRank => owner,
                    _ => entry,
                };
                parts.entry(part).or_default().push(products);
            }
            let parts = parts.into_values().map(|part| match self.sum {
                CombineSum::ExpertByRank => added(part, hidden)
                    .into_iter()
                    .map(|x| rounded(self.dtype, x))
                    .collect(),
                _ => added(part, hidden),
            });
            exact.extend(added(parts, hidden));
            wide.extend(sums_wide);
            most.extend(vec![greatest; hidden]);
        }
        let rounded = |&x: &f32| f64::from(rounded(self.output, x));
        let want = to_bytes(self.output, &exact.iter().map(rounded).collect::<Vec<_>>());
        let got = rank.raw(got.view());
        let limit = match self.cast {
            None => {
                assert_bits(&got, &want, self.output, "sums");
                5e-6
            }
            Some(CombineCast::Fp8(_)) => 9e-4,
            Some(CombineCast::LogFmt10) => 1e-4,
        };
        let got = to_f64(self.output, &got);
        if wide.len() >= 1000 {
            let diff = diff(&got, &wide);
            assert!(diff < limit, "{diff:e} of {self:?}");
            return;
        }
        // A few sums may all nearly cancel: each is as near as its addends are.
        let near = if self.cast.is_some() {
            1.0 / 16.0
        } else {
            1.0 / 128.0
        };
        for ((got, want), most) in got.iter().zip(&wide).zip(&most) {
            let off = (got - want).abs();
            assert!(off <= near * most, "{got} for {want}, of {most}: {self:?}");
        }
    }

    fn params<'a>(self, rows: &'a Buffer, own: &'a Own) -> LowLatencyCombineParams<'a> {
        let here = self.sum == CombineSum::Expert;
        LowLatencyCombineParams {
            rows: rows.view(),
            sum: self.sum,
            cast: self.cast,
            weights: here.then(|| weights(own).view()),
        }
    }

    /// There and back, behind what was received.
    fn send<'d>(
        self,
        rank: &Rank,
        lease: &mut Lease<'_>,
        (own, case): (&Own, &Case),
        there: &'d LowLatencyDispatched<'_>,
    ) -> brigade_device::PendingCombine<'d> {
        let rows = self.rows(rank, case);
        let p = self.params(&rows, own);
        lease.low_latency_combine(there, p).unwrap()
    }

    fn receive(
        self,
        rank: &Rank,
        lease: &mut Lease<'_>,
        case: &Case,
        pending: brigade_device::PendingCombine<'_>,
    ) {
        let dims = [case.tokens(rank.rank), case.hidden];
        let mut d = rank.poisoned(self.output, &dims);
        let output = match self.into {
            true => Output::Into(d.view_mut()),
            false => Output::Allocate(self.output),
        };
        let given = pending.receive(lease, output).unwrap();
        assert_eq!(given.is_none(), self.into);
        self.check(rank, case, given.as_ref().unwrap_or(&d));
    }
}

/// The sums of all columns, in the order of the rows; 0 of none.
fn added(rows: impl IntoIterator<Item = Vec<f32>>, columns: usize) -> Vec<f32> {
    let add = |sum: Vec<f32>, row: Vec<f32>| sum.iter().zip(row).map(|(s, x)| s + x).collect();
    rows.into_iter()
        .reduce(add)
        .unwrap_or_else(|| vec![0.0; columns])
}

/// A case, and what comes back of it.
pub type RoundTrip = (Case, Back);

/// Small ones, one for each sum.
pub fn both_sums(rng: &mut StdRng, size: usize) -> [RoundTrip; 2] {
    let mut small = || drawn(rng, size, (12, 32, 3, 2 * size + 1));
    [here(small()), by_rank(small())]
}

/// Sends, and gives it up.
pub fn try_send(rank: &Rank, exchange: &mut LowLatency, (case, back): &RoundTrip) -> Result<()> {
    let own = Own::of(rank, case);
    send(
        &mut rank.lease(),
        exchange.slots().0,
        (&own, case),
        back.weighted,
    )
    .map(drop)
}

/// Two exchanges at once, there and back, in a group without these ranks.
pub fn round_trips_without(rank: &Rank, absent: &[usize], both: &[RoundTrip; 2]) {
    for _ in 0..2 {
        exchanges(rank, &mut rank.lease(), [&both[0], &both[1]], absent);
        exchanges(rank, &mut rank.lease(), [&both[1], &both[0]], absent);
    }
}

/// Two exchanges at once, there and back.
fn round_trips(rank: &Rank, lease: &mut Lease<'_>, both: [&RoundTrip; 2]) {
    exchanges(rank, lease, both, &[]);
}

fn exchanges(rank: &Rank, lease: &mut Lease<'_>, both: [&RoundTrip; 2], absent: &[usize]) {
    let mut exchange = LowLatency::default();
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
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        for (i, case) in cases.iter().enumerate() {
            round_trips(rank, &mut lease, [case, &cases[(i + 1) % cases.len()]]);
        }
    });
}

fn drawn(rng: &mut StdRng, size: usize, sizes: (usize, usize, usize, usize)) -> (Case, Back) {
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
        format: ScaleFormat::F32,
        column_major: false,
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

/// Rows that are cast on the way there.
fn casts(world: &World) {
    let mut rng = world.rng();
    let cases = FORMATS.map(|format| {
        let (mut case, back) = drawn(&mut rng, world.size, (12, 400, 3, 7));
        case.cast = Some(Fp8Cast {
            format,
            column_major: false,
        });
        (case.with_rows(&mut rng), back)
    });
    all_round_trips(world, cases.into());
}

/// Rows that are cast on the way back, and a last block of columns that is not whole.
fn casts_back(world: &World) {
    let mut rng = world.rng();
    let sizes = [(12, 400, 3, 7), (2, 7168, 8, 32), (33, 16, 4, 9)];
    let mut cases = vec![];
    for (format, sizes) in FORMATS.into_iter().zip(sizes) {
        for by in [here, by_rank] {
            let (case, back) = by(drawn(&mut rng, world.size, sizes));
            let cast = Some(CombineCast::Fp8(format));
            cases.push((case, Back { cast, ..back }));
        }
    }
    for sizes in [(12, 128, 3, 7), (2, 7168, 8, 32)] {
        for by in [here, by_rank] {
            let (case, back) = by(drawn(&mut rng, world.size, sizes));
            cases.push((case, back.in_logfmt()));
        }
    }
    all_round_trips(world, cases);
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
    let contracts: [(&str, Contract); 6] = [
        ("sizes", sizes),
        ("extremes", extremes),
        ("placements", placements),
        ("casts", casts),
        ("casts_back", casts_back),
        ("many_rounds", many_rounds),
    ];
    for (name, contract) in contracts {
        suite.add(&format!("low_latency/{name}"), contract);
    }
    limits::add(suite);
}

/// Weights that come beside a case.
fn weights(own: &Own) -> &Buffer {
    own.weights.as_ref().unwrap()
}
