//! Rows to their experts and back: bit for bit what was sent, in the order that the arrangement promises; and sums in the order of ranks
//! or experts.
//!
//! The sizes cover what the contract lists, not every combination of it: tokens 0, 1, 3, 128 and up to 1025; k 1, 2, 4, 6, 8, 10, 22, 32;
//! experts 8 to 1024, multiples of the ranks and not; hidden 8 to 8192. Every value is in one case at least, with each arrangement.

mod case;

use crate::{
    backend::Rank,
    check::{assert_bits, assert_kind, expect_fault, expect_invalid, expect_unsupported},
    matrix::{to_bytes, to_f32, to_f64},
    quantized::fp8,
    suite::{Suite, World},
};
use brigade_device::{
    Arrangement, Buffer, CombineParams, CombineSum, CommConfig, DataType, DispatchParams,
    Dispatched, FaultKind, Fp8Cast, Lease, Output, ParallelMode, Placement, Result, Route, Routing,
    ScaleFormat,
};
use case::{Case, Where, rounded};
use rand::{Rng, rngs::StdRng};
use std::time::Duration;

const ARRANGEMENTS: [(&str, Arrangement); 4] = [
    ("dense", Arrangement::Dense),
    ("by_source", Arrangement::BySource),
    ("by_expert", Arrangement::ByExpert { alignment: 1 }),
    ("by_aligned_expert", Arrangement::ByExpert { alignment: 16 }),
];

/// Tokens of a rank at most, hidden, k, experts.
const SIZES: [(usize, usize, usize, usize); 9] = [
    (1, 2048, 8, 128),
    (3, 7168, 8, 256),
    (128, 288, 4, 60),
    (512, 8, 1, 8),
    (33, 2880, 6, 64),
    (17, 5120, 22, 1024),
    (5, 8192, 2, 9),
    (9, 64, 32, 100),
    (1025, 16, 10, 11),
];

fn config() -> CommConfig {
    CommConfig {
        dispatch_bytes: 2 << 20,
        combine_bytes: 2 << 20,
        scratch_bytes: 4096,
        gather_bytes: 0,
        reduce_scatter_bytes: 0,
        all_reduce_bytes: 0,
        region_bytes: 0,
        ..CommConfig::new(ParallelMode::Ep)
    }
}

/// A rank's arguments, in its memory.
struct Own {
    rows: Buffer,
    ids: Buffer,
    weights: Option<Buffer>,
    beside: Buffer,
    map: Option<Buffer>,
}

impl Own {
    fn of(rank: &Rank, case: &Case) -> Self {
        let me = rank.rank;
        let tokens = case.tokens(me);
        let ids = &case.ids[me];
        let (id_type, bytes): (_, Vec<u8>) = if case.wide {
            (
                DataType::I64,
                ids.iter().flat_map(|id| id.to_ne_bytes()).collect(),
            )
        } else {
            (
                DataType::I32,
                ids.iter()
                    .flat_map(|&id| (id as i32).to_ne_bytes())
                    .collect(),
            )
        };
        let bytes_of = |values: &[f32]| bytemuck::cast_slice::<_, u8>(values).to_vec();
        Self {
            rows: rank.upload_bytes(case.dtype, &[tokens, case.hidden], &case.rows[me]),
            ids: rank.upload_bytes(id_type, &[tokens, case.k], &bytes),
            weights: case
                .weights
                .as_ref()
                .map(|w| rank.upload_bytes(DataType::F32, &[tokens, case.k], &bytes_of(&w[me]))),
            beside: rank.upload_bytes(DataType::U8, &[tokens, 2], &case.beside[me]),
            map: match &case.places {
                Where::Map { slots, .. } => {
                    let shape = [case.experts, slots.len() / case.experts];
                    Some(rank.upload_bytes(DataType::I32, &shape, bytemuck::cast_slice(slots)))
                }
                _ => None,
            },
        }
    }

    fn routing<'a>(&'a self, case: &Case) -> Routing<'a> {
        Routing {
            ids: self.ids.view(),
            placement: match (&case.places, &self.map) {
                (Where::Map { per_rank, .. }, Some(map)) => Placement::Map {
                    slots: map.view(),
                    per_rank: *per_rank,
                },
                (Where::Ranks, _) => Placement::Ranks,
                _ => Placement::Even {
                    experts: case.experts,
                },
            },
        }
    }

    fn dispatch(&self, lease: &mut Lease<'_>, case: &Case) -> Result<Dispatched> {
        let weights = self.weights.as_ref().map(Buffer::view);
        let routing = self.routing(case);
        self.dispatch_by(lease, case, Route::Experts { routing, weights })
    }

    fn dispatch_by(
        &self,
        lease: &mut Lease<'_>,
        case: &Case,
        route: Route<'_>,
    ) -> Result<Dispatched> {
        lease.dispatch(DispatchParams {
            rows: self.rows.view(),
            beside: &[self.beside.view()],
            route,
            arrangement: case.arrangement,
            max_tokens: case.max_tokens,
            max_recv: case.room,
            cast: case.cast,
            choice: None,
        })
    }
}

fn i32s(rank: &Rank, buffer: &Buffer) -> Vec<i32> {
    bytemuck::pod_collect_to_vec(&rank.raw(buffer.view()))
}

fn f32s(rank: &Rank, buffer: &Buffer) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&rank.raw(buffer.view()))
}

/// What came is what was sent, and is known for what it is.
fn check(rank: &Rank, case: &Case, got: &Dispatched) {
    let me = rank.rank;
    let (came, _) = case.received(me);
    let capacity = case.capacity(me);
    let by_expert = matches!(case.arrangement, Arrangement::ByExpert { .. });
    let per_row = if by_expert { 1 } else { case.k };
    assert_eq!(
        got.handle.capacity(),
        capacity,
        "rows that there is room for"
    );
    let mut sources = vec![[-1; 4]; capacity];
    let (mut ids, mut weights) = (vec![-1; capacity * per_row], vec![0f32; capacity * per_row]);
    let mut counts = vec![0; case.slots()[me]];
    let mut received = vec![0; case.size];
    let mut seen = std::collections::BTreeSet::new();
    let row_bytes = case.hidden * case.dtype.bytes();
    let rows = rank.raw(got.rows.view());
    let beside = rank.raw(got.beside[0].view());
    for row in &came {
        let entry = row.entry.map_or(-1, |e| e as i32);
        let goes = |t: &usize| (0..case.k).any(|e| case.local(me, row.source, *t, e).is_some());
        let before = (0..row.token).filter(goes).count() as i32;
        sources[row.at] = [row.source as i32, row.token as i32, entry, before];
        if seen.insert((row.source, row.token)) {
            received[row.source] += 1;
        }
        let entries = row.entry.map_or(0..case.k, |e| e..e + 1);
        for (i, entry) in entries.enumerate() {
            if let Some(slot) = case.local(me, row.source, row.token, entry) {
                ids[row.at * per_row + i] = slot as i32;
                if let Some(all) = &case.weights {
                    weights[row.at * per_row + i] = all[row.source][row.token * case.k + entry];
                }
                counts[slot] += 1;
            }
        }
        let what = format!("{row:?}");
        if case.cast.is_none() {
            let sent = &case.rows[row.source][row.token * row_bytes..][..row_bytes];
            assert_bits(
                &rows[row.at * row_bytes..][..row_bytes],
                sent,
                DataType::U8,
                &what,
            );
        }
        let sent = &case.beside[row.source][row.token * 2..][..2];
        assert_bits(&beside[row.at * 2..][..2], sent, DataType::U8, &what);
    }
    let handle = &got.handle;
    assert_eq!(
        i32s(rank, &handle.parts().sources),
        sources.concat(),
        "sources"
    );
    assert_eq!(i32s(rank, &got.ids), ids, "ids");
    assert_eq!(i32s(rank, &got.counts), counts, "counts");
    assert_eq!(i32s(rank, &handle.parts().received), received, "received");
    match (&got.weights, &case.weights) {
        (Some(got), Some(_)) => assert_eq!(f32s(rank, got), weights, "weights"),
        (None, None) => {}
        (got, _) => panic!("{got:?} as weights"),
    }
    let offsets = i32s(rank, &handle.parts().offsets);
    for row in &came {
        let run = if by_expert {
            ids[row.at] as usize
        } else {
            row.source
        };
        let of_run = offsets[run] as usize..offsets[run + 1] as usize;
        assert!(of_run.contains(&row.at), "{row:?} in {of_run:?}");
    }
    check_layout(rank, case, got);
}

/// What a rank knows of its own rows.
fn check_layout(rank: &Rank, case: &Case, got: &Dispatched) {
    let layout = got.handle.layout();
    let (me, tokens) = (rank.rank, case.tokens(rank.rank));
    let mut slots = vec![];
    let mut per_slot = vec![0; case.slots().iter().sum()];
    let mut positions = vec![-1; tokens * case.size];
    let mut sent = vec![vec![]; case.size];
    for token in 0..tokens {
        for entry in 0..case.k {
            let slot = case.slot(me, token, entry);
            slots.push(slot.map_or(-1, |s| s as i32));
            let Some(slot) = slot else { continue };
            per_slot[slot] += 1;
            let (owner, _) = case.owner(slot);
            if positions[token * case.size + owner] < 0 {
                positions[token * case.size + owner] = sent[owner].len() as i32;
                sent[owner].push(token as i32);
            }
        }
    }
    let mut offsets = vec![0];
    offsets.extend(sent.iter().scan(0, |sum, list| {
        *sum += list.len() as i32;
        Some(*sum)
    }));
    let mut sent = sent.concat();
    sent.resize(tokens * case.k.min(case.size), -1);
    assert_eq!(i32s(rank, &layout.slots), slots, "slots");
    assert_eq!(i32s(rank, &layout.positions), positions, "positions");
    assert_eq!(i32s(rank, &layout.sent), sent, "sent");
    assert_eq!(i32s(rank, &layout.sent_offsets), offsets, "sent_offsets");
    assert_eq!(i32s(rank, &layout.rows_per_slot), per_slot, "rows_per_slot");
}

/// Everybody's experts make something of each row, and sums of it come back.
struct Back {
    sum: CombineSum,
    dtype: DataType,
    output: DataType,
    hidden: usize,
    biases: usize,
}

impl Back {
    fn random(rng: &mut StdRng, case: &Case) -> Self {
        let by_expert = matches!(case.arrangement, Arrangement::ByExpert { .. });
        let dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
        Self {
            sum: match (by_expert, rng.random()) {
                (false, _) => CombineSum::Rank,
                (true, false) => CombineSum::Expert,
                (true, true) => CombineSum::ExpertByRank,
            },
            dtype,
            output: if rng.random() { dtype } else { DataType::F32 },
            hidden: case.hidden,
            biases: rng.random_range(0..=2),
        }
    }

    /// Combines, and checks every bit.
    fn check(
        &self,
        rank: &Rank,
        lease: &mut Lease<'_>,
        case: &Case,
        handle: &brigade_device::Handle,
    ) {
        let (me, tokens) = (rank.rank, case.tokens(rank.rank));
        let (came, _) = case.received(me);
        let capacity = case.capacity(me);
        // Where there is no row, NaNs: nothing of them may come back.
        let mut rows = vec![f64::NAN; capacity * self.hidden];
        let per_row = handle.parts().ids.shape().len() / capacity.max(1);
        let mut weights = vec![f32::NAN; capacity * per_row];
        let back =
            |source: usize, token: usize, entry: usize| (source * 7 + token * 3 + entry + 1) as f32;
        for row in &came {
            let made = case.made(me, row, self.hidden, self.dtype);
            rows[row.at * self.hidden..][..self.hidden].copy_from_slice(&made);
            for (i, entry) in row.entry.map_or(0..case.k, |e| e..e + 1).enumerate() {
                weights[row.at * per_row + i] = back(row.source, row.token, entry);
            }
        }
        let shape = handle.shape(self.hidden).unwrap();
        let rows = rank.upload_bytes(self.dtype, shape.dims(), &to_bytes(self.dtype, &rows));
        let ids = handle.parts().ids.shape();
        let weights = rank.upload_bytes(DataType::F32, ids.dims(), bytemuck::cast_slice(&weights));
        let bias = |n: usize| -> Vec<f64> {
            (0..tokens * self.hidden)
                .map(|i| ((i * 5 + n + me) % 23) as f64 / 8.0 - 1.0)
                .collect()
        };
        let biases: Vec<_> = (0..self.biases).map(bias).collect();
        let uploaded: Vec<_> = biases
            .iter()
            .map(|b| {
                rank.upload_bytes(self.dtype, &[tokens, self.hidden], &to_bytes(self.dtype, b))
            })
            .collect();
        let views: Vec<_> = uploaded.iter().map(Buffer::view).collect();
        let mut d = rank.poisoned(self.output, &[tokens, self.hidden]);
        let combined = lease
            .combine(CombineParams {
                rows: rows.view(),
                handle,
                sum: self.sum,
                weights: Some(weights.view()),
                biases: &views,
                output: Output::Into(d.view_mut()),
                choice: None,
            })
            .unwrap();
        let (exact, wide) = case.combined(me, (self.sum, self.dtype, self.hidden), &biases);
        let rounded = |&x: &f32| f64::from(rounded(self.output, x));
        let want = to_bytes(self.output, &exact.iter().map(rounded).collect::<Vec<_>>());
        let got = rank.raw(d.view());
        assert_bits(&got, &want, self.output, "combined rows");
        let limit = if self.dtype == DataType::F32 {
            1e-12
        } else {
            5e-6
        };
        let diff = diff(&to_f64(self.output, &got), &wide);
        assert!(diff < limit, "{diff:e} of {:?}", self.dtype);
        let mut want = vec![0f32; tokens * case.k];
        for token in 0..tokens {
            for entry in 0..case.k {
                if case.slot(me, token, entry).is_some() {
                    want[token * case.k + entry] = back(me, token, entry);
                }
            }
        }
        assert_eq!(
            f32s(rank, &combined.weights.unwrap()),
            want,
            "weights that come back"
        );
    }
}

/// 1 - 2 sum(xy) / sum(x^2 + y^2)
fn diff(x: &[f64], y: &[f64]) -> f64 {
    let (mut both, mut squares) = (0.0, 0.0);
    for (x, y) in x.iter().zip(y) {
        both += 2.0 * x * y;
        squares += x * x + y * y;
    }
    if squares == 0.0 {
        0.0
    } else {
        1.0 - both / squares
    }
}

/// There and back again.
fn round_trip(rank: &Rank, case: &Case, back: &Back) {
    let own = Own::of(rank, case);
    let mut lease = rank.lease();
    let got = own.dispatch(&mut lease, case).unwrap();
    check(rank, case, &got);
    back.check(rank, &mut lease, case, &got.handle);
}

/// Any small round trip, for stress.
pub fn draw(rng: &mut StdRng, size: usize) -> impl Fn(&Rank) + Send + Sync + use<> {
    let sizes = (
        rng.random_range(0..20),
        8 * rng.random_range(1..5),
        rng.random_range(1..5),
        rng.random_range(1..20),
    );
    let mut case = Case::random(rng, size, sizes);
    case.arrangement = ARRANGEMENTS[rng.random_range(0..ARRANGEMENTS.len())].1;
    let back = Back::random(rng, &case);
    move |rank| round_trip(rank, &case, &back)
}

fn arranged(world: &World, arrangement: Arrangement) {
    let mut rng = world.rng();
    let cases: Vec<(Case, Back)> = SIZES
        .into_iter()
        .map(|sizes| {
            let mut case = Case::random(&mut rng, world.size, sizes);
            case.arrangement = arrangement;
            case.dtype = [DataType::BF16, DataType::F16, DataType::I8][rng.random_range(0..3)];
            if !(case.hidden * case.dtype.bytes()).is_multiple_of(16) {
                case.dtype = DataType::BF16;
            }
            let case = case.with_rows(&mut rng);
            let back = Back::random(&mut rng, &case);
            (case, back)
        })
        .collect();
    world.run(&config(), move |rank| {
        cases
            .iter()
            .for_each(|(case, back)| round_trip(rank, case, back));
    });
}

/// Room for more rows than come, nobody's rows, all to one rank, and no weights.
fn extremes(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = vec![];
    for (_, arrangement) in ARRANGEMENTS {
        let mut case = Case::random(&mut rng, size, (20, 32, 3, 2 * size + 1));
        case.arrangement = arrangement;
        if arrangement != Arrangement::BySource {
            case.room = Some(20 * 3 * size + 16 * 4);
        }
        let full = case.clone().with_tokens(&mut rng, &vec![20; size]);
        let none = case.clone().with_tokens(&mut rng, &vec![0; size]);
        let mut to_one = full.clone();
        to_one.ids.iter_mut().for_each(|ids| ids.fill(0));
        let mut nowhere = full.clone();
        nowhere.ids.iter_mut().for_each(|ids| ids.fill(-1));
        cases.extend([full, none, to_one, nowhere].map(|case| {
            let back = Back::random(&mut rng, &case);
            (case, back)
        }));
    }
    let mut bare = Case::random(&mut rng, size, (6, 16, 2, 5));
    bare.weights = None;
    let back = Back::random(&mut rng, &bare);
    cases.push((bare, back));
    world.run(&config(), move |rank| {
        cases
            .iter()
            .for_each(|(case, back)| round_trip(rank, case, back));
    });
}

/// Experts in several slots, slots of none, and ids that are ranks.
fn placements(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for (_, arrangement) in ARRANGEMENTS {
        let per_rank = 3;
        let all = (per_rank * world.size) as i32;
        let mut case = Case::random(&mut rng, world.size, (30, 16, 4, 7));
        case.arrangement = arrangement;
        let mut slots: Vec<i32> = (0..7 * 3).map(|_| rng.random_range(0..all)).collect();
        // One expert has one copy, and one none.
        slots[3..6].copy_from_slice(&[1, -1, -1]);
        slots[6..9].fill(-1);
        case.places = Where::Map { slots, per_rank };
        let mut ranks = case.clone();
        ranks.places = Where::Ranks;
        for case in [case, ranks] {
            let tokens: Vec<usize> = (0..world.size).map(|_| rng.random_range(1..=30)).collect();
            let case = case.with_tokens(&mut rng, &tokens);
            let back = Back::random(&mut rng, &case);
            cases.push((case, back));
        }
    }
    world.run(&config(), move |rank| {
        cases
            .iter()
            .for_each(|(case, back)| round_trip(rank, case, back));
    });
}

/// What does not fit goes in pieces, and what no piece holds is refused.
fn pieces(world: &World) {
    let mut rng = world.rng();
    let cases = ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (50, 64, 3, 10));
        case.arrangement = arrangement;
        let back = Back::random(&mut rng, &case);
        (case, back)
    });
    let config = CommConfig {
        dispatch_bytes: 1000 * world.size,
        combine_bytes: 900 * world.size,
        ..config()
    };
    world.run(&config, move |rank| {
        for (case, back) in &cases {
            round_trip(rank, case, back);
            let mut wide = case.clone();
            wide.hidden = 1024;
            wide.rows = wide
                .ids
                .iter()
                .map(|ids| vec![1; ids.len() / 3 * 2048])
                .collect();
            let refused = Own::of(rank, &wide).dispatch(&mut rank.lease(), &wide);
            let code = expect_unsupported(refused, "a row that no piece holds");
            assert_eq!(code, brigade_plan::reason::CAPACITY);
        }
    });
}

/// Other rows the same ways.
fn again(world: &World) {
    let mut rng = world.rng();
    let cases = ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (40, 24, 3, 9));
        case.arrangement = arrangement;
        let mut other = case.clone();
        other.dtype = DataType::F32;
        let other = other.with_rows(&mut rng);
        (case, other)
    });
    world.run(&config(), move |rank| {
        for (case, other) in &cases {
            let mut lease = rank.lease();
            let first = Own::of(rank, case).dispatch(&mut lease, case).unwrap();
            for case in [other, case] {
                let route = Route::Again(&first.handle);
                let got = Own::of(rank, case)
                    .dispatch_by(&mut lease, case, route)
                    .unwrap();
                check(rank, case, &got);
            }
        }
    });
}

/// Rows that are cast on the way are what was sent, as far as fp8 can tell.
fn casts(world: &World) {
    let mut rng = world.rng();
    let formats = [
        (ScaleFormat::F32, 9e-4),
        (ScaleFormat::PowerOfTwo, 7e-3),
        (ScaleFormat::Ue8m0, 7e-3),
    ];
    let mut cases = vec![];
    for (format, limit) in formats {
        for (i, column_major) in [false, true].into_iter().enumerate() {
            for dtype in [DataType::BF16, DataType::F32] {
                let mut case = Case::random(&mut rng, world.size, (12, 400, 3, 7));
                (case.dtype, case.arrangement) = (dtype, ARRANGEMENTS[2 * i].1);
                case.cast = Some(Fp8Cast {
                    format,
                    column_major,
                });
                cases.push((case.with_rows(&mut rng), limit));
            }
        }
    }
    world.run(&config(), move |rank| {
        for (case, limit) in &cases {
            let got = Own::of(rank, case)
                .dispatch(&mut rank.lease(), case)
                .unwrap();
            check(rank, case, &got);
            check_cast(rank, case, &got, *limit);
        }
    });
}

fn check_cast(rank: &Rank, case: &Case, got: &Dispatched, limit: f64) {
    let cast = case.cast.unwrap();
    let (_, per_row) = cast.scales(case.hidden);
    let (values, scales) = (
        rank.raw(got.rows.view()),
        rank.raw(got.scales.as_ref().unwrap().view()),
    );
    let capacity = case.capacity(rank.rank);
    let scale = |at: usize, block: usize| match (cast.format, cast.column_major) {
        (ScaleFormat::Ue8m0, major) => {
            let i = if major {
                (block / 4 * capacity + at) * 4 + block % 4
            } else {
                at * per_row + block
            };
            2f64.powi(i32::from(scales[i]) - 127)
        }
        (_, major) => {
            let i = if major {
                block * capacity + at
            } else {
                at * per_row + block
            };
            f64::from(to_f32(DataType::F32, &scales)[i])
        }
    };
    let (mut back, mut sent) = (vec![], vec![]);
    for row in case.received(rank.rank).0 {
        let bytes = case.hidden * case.dtype.bytes();
        let original = to_f64(
            case.dtype,
            &case.rows[row.source][row.token * bytes..][..bytes],
        );
        for (column, x) in original.into_iter().enumerate() {
            let q = fp8(values[row.at * case.hidden + column]);
            let s = scale(row.at, column / 128);
            if cast.format != ScaleFormat::F32 {
                assert_eq!(s.log2().fract(), 0.0, "{s} is no power of two");
            }
            // Blocks of very different sizes count the same.
            let size = 10f64.powi((column / 128 % 9) as i32 - 4);
            back.push(q * s / size);
            sent.push(x / size);
        }
    }
    let diff = diff(&back, &sent);
    assert!(diff < limit, "{diff:e} of {cast:?}");
}

/// More rows than there is room for stop the group, and nothing is written behind the last.
fn overflow(world: &World) {
    let mut rng = world.rng();
    let mut case = Case::random(&mut rng, world.size, (8, 16, 1, 4));
    case = case.with_tokens(&mut rng, &vec![8; world.size]);
    case.ids.iter_mut().for_each(|ids| ids.fill(0));
    case.room = Some(8 * world.size - 1);
    world.run(&config(), move |rank| {
        let result = Own::of(rank, &case).dispatch(&mut rank.lease(), &case);
        let result = rank.settle(result.map(drop));
        // A rank that had no part in it may have ended the call, and hears of it in the next one.
        let result = result.and_then(|()| rank.settle(rank.lease().barrier()));
        let record = expect_fault(result, "one row too many");
        assert_kind(&record, FaultKind::Overflow, "one row too many");
        rank.comm().reset(Duration::from_secs(20)).unwrap();
        let mut fits = case.clone();
        fits.room = Some(8 * rank.size);
        let got = Own::of(rank, &fits)
            .dispatch(&mut rank.lease(), &fits)
            .unwrap();
        check(rank, &fits, &got);
    });
}

/// A graph sends what its buffers hold when it is replayed.
fn captured(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<Case> = (0..6)
        .map(|_| {
            let mut case = Case::random(&mut rng, world.size, (10, 16, 3, 6));
            case.room = Some(30 * world.size);
            case.wide = true;
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
                choice: None,
            })?;
            (got, combined) = (Some(there), back.d);
            Ok(())
        });
        let (graph, got, combined) = (graph.unwrap(), got.unwrap(), combined.unwrap());
        for case in &cases {
            let new = Own::of(rank, case);
            for (to, from) in [
                (&mut own.rows, &new.rows),
                (&mut own.ids, &new.ids),
                (own.weights.as_mut().unwrap(), new.weights.as_ref().unwrap()),
                (&mut own.beside, &new.beside),
            ] {
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

/// Without room that is known before, no graph can be made.
fn not_capturable(world: &World) {
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
fn refused(world: &World) {
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
            own.beside = rank.poisoned(DataType::U8, &[5, 2])
        });
        with("max_recv", &|case, _| {
            (case.arrangement, case.room) = (Arrangement::BySource, Some(9));
        });
        with("arrangement.alignment", &|case, _| {
            case.arrangement = Arrangement::ByExpert { alignment: 0 };
        });
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

/// Adds all trials.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    for (name, arrangement) in ARRANGEMENTS {
        suite.add(&format!("experts/{name}"), move |world| {
            arranged(world, arrangement)
        });
    }
    suite.add("experts/extremes", extremes);
    suite.add("experts/placements", placements);
    suite.add("experts/pieces", pieces);
    suite.add("experts/again", again);
    suite.add("experts/casts", casts);
    suite.add("experts/overflow", overflow);
    suite.add("experts/captured", captured);
    suite.add("experts/not_capturable", not_capturable);
    suite.add("experts/refused", refused);
}
