//! Rows to their experts and back. Of what a dispatch leaves, all is promised but the bytes of rows that nobody sent: of those, only
//! that they are named as none.

use super::{Entry, Inputs, Results, named};
use crate::{
    backend::Rank,
    experts::{self, own::i32s, transports},
    layer::FLOATS,
    suite::World,
};
use brigade_device::{
    Arrangement, Buffer, CombineParams, CombineSum, DataType, DispatchParams, Dispatched,
    ExpertLayout, Fp8Cast, GatheredRouting, Lengths, Output, Placement, ReceivedIds, Route,
    Routing, ScaleFormat, Transport, View,
};
use brigade_plan::Engines;

/// Experts of a token, and of all: more on the first ranks, where they do not divide.
const K: usize = 3;
pub(super) const EXPERTS: usize = 11;
/// Columns of a row: no whole block of scales.
pub(super) const HIDDEN: usize = 208;
/// Rows that slots begin at a multiple of.
const ALIGNMENT: usize = 8;
/// Slots of a rank, where there is a map.
const PER_RANK: usize = 4;
/// Slots of an expert there, at most.
const COPIES: usize = 3;

const BY_EXPERT: Arrangement = Arrangement::ByExpert {
    alignment: ALIGNMENT,
};

const ARRANGEMENTS: [(&str, Arrangement); 4] = [
    ("dense", Arrangement::Dense),
    ("by_source", Arrangement::BySource),
    ("by_expert", Arrangement::ByExpert { alignment: 1 }),
    ("by_aligned_expert", BY_EXPERT),
];

/// Tokens of a rank, none of some.
pub(super) fn tokens(rank: usize) -> usize {
    5 * ((3 * rank + 4) % 7)
}

pub(super) const MOST_TOKENS: usize = 30;

/// How experts are found.
#[derive(Clone, Copy, Debug)]
pub(super) enum Placed {
    Even,
    Map,
    Ranks,
}

/// Tokens and what belongs to them, in a rank's memory.
pub(super) struct Own {
    pub(super) rows: Buffer,
    ids: Buffer,
    map: Option<Buffer>,
    pub(super) weights: Buffer,
    beside: Buffer,
}

impl Own {
    pub(super) fn new(rank: &Rank, inputs: &mut Inputs, dtype: DataType, placed: Placed) -> Self {
        let tokens = tokens(rank.rank);
        let experts = match placed {
            Placed::Even | Placed::Map => EXPERTS,
            Placed::Ranks => rank.size,
        };
        let ids = inputs.ids(tokens * K, experts);
        let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
        let map = matches!(placed, Placed::Map).then(|| {
            // The same on every rank; an expert has from none to all of its copies.
            let mut inputs = Inputs::new("map", 0);
            let there = inputs.ids(EXPERTS, COPIES + 1);
            let slots = inputs.ids(EXPERTS * COPIES, PER_RANK * rank.size);
            let slot = |i: usize| {
                let lies = (i % COPIES) < there[i / COPIES].max(0) as usize;
                let all = (PER_RANK * rank.size) as i64;
                if lies {
                    slots[i].rem_euclid(all) as i32
                } else {
                    -1
                }
            };
            let slots: Vec<i32> = (0..EXPERTS * COPIES).map(slot).collect();
            let bytes = bytemuck::cast_slice(&slots);
            rank.upload_bytes(DataType::I32, &[EXPERTS, COPIES], bytes)
        });
        let rows = inputs.floats(dtype, tokens * HIDDEN, false);
        let weights = inputs.floats(DataType::F32, tokens * K, false);
        let beside = inputs.bytes(tokens * 3);
        Self {
            rows: rank.upload_bytes(dtype, &[tokens, HIDDEN], &rows),
            ids: rank.upload_bytes(DataType::I32, &[tokens, K], bytemuck::cast_slice(&ids)),
            map,
            weights: rank.upload_bytes(DataType::F32, &[tokens, K], &weights),
            beside: rank.upload_bytes(DataType::U8, &[tokens, 3], &beside),
        }
    }

    pub(super) fn routing(&self, placed: Placed) -> Routing<'_> {
        Routing {
            ids: self.ids.view(),
            placement: match (placed, &self.map) {
                (Placed::Map, Some(map)) => Placement::Map {
                    slots: map.view(),
                    per_rank: PER_RANK,
                },
                (Placed::Ranks, _) => Placement::Ranks,
                _ => Placement::Even { experts: EXPERTS },
            },
        }
    }

    pub(super) fn beside(&self) -> View<'_> {
        self.beside.view()
    }

    /// There is room for all that may come.
    pub(super) fn params<'a>(
        &'a self,
        rank: &Rank,
        arrangement: Arrangement,
        cast: Option<Fp8Cast>,
        choice: Transport,
    ) -> DispatchParams<'a> {
        let all = MOST_TOKENS * rank.size;
        DispatchParams {
            rows: self.rows.view(),
            beside: &[],
            route: Route::Experts {
                routing: self.routing(Placed::Even),
                weights: Some(self.weights.view()),
            },
            arrangement,
            max_tokens: MOST_TOKENS,
            max_recv: match arrangement {
                Arrangement::BySource => None,
                Arrangement::Dense => Some(all),
                Arrangement::ByExpert { alignment } => Some(all * K + EXPERTS * (alignment - 1)),
            },
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast,
            choice: Some(choice),
        }
    }
}

/// Experts of all ranks' tokens, how many there are of each, and their weights: every rank has room for as many.
fn gathered(rank: &Rank, own: &Own) -> [Buffer; 3] {
    let all = |of: &Buffer| -> Vec<u8> {
        let mut parts = rank.share(&rank.raw(of.view()));
        let room = MOST_TOKENS * K * of.dtype().bytes();
        parts.iter_mut().for_each(|part| part.resize(room, 0));
        parts.concat()
    };
    let counts: Vec<i32> = (0..rank.size).map(|r| tokens(r) as i32).collect();
    let counts = rank.upload_bytes(DataType::I32, &[rank.size], bytemuck::cast_slice(&counts));
    let dims = [rank.size, MOST_TOKENS, K];
    let upload = |of: &Buffer| rank.upload_bytes(of.dtype(), &dims, &all(of));
    [upload(&own.ids), counts, upload(&own.weights)]
}

fn laid_out(rank: &Rank, layout: &ExpertLayout) -> Vec<u8> {
    layout
        .buffers()
        .iter()
        .flat_map(|b| rank.raw(b.view()))
        .collect()
}

/// All that is promised of what a dispatch leaves.
pub(super) fn left(rank: &Rank, got: &Dispatched) -> Vec<u8> {
    let handle = &got.handle;
    let sources = i32s(rank, &handle.parts().sources);
    let there: Vec<usize> = (0..handle.capacity())
        .filter(|at| sources[4 * at] >= 0)
        .collect();
    let mut all: Vec<u8> = [
        handle.sources(),
        got.ids.view(),
        got.counts.view(),
        handle.received(),
        handle.offsets(),
    ]
    .into_iter()
    .chain(got.weights.iter().map(Buffer::view))
    .flat_map(|view| rank.raw(view))
    .collect();
    let mut rows_of = |buffer: &Buffer| {
        let bytes = rank.raw(buffer.view());
        let each = bytes.len() / handle.capacity();
        all.extend(there.iter().flat_map(|at| &bytes[at * each..][..each]));
    };
    rows_of(&got.rows);
    got.beside.iter().for_each(&mut rows_of);
    if let (Some(scales), Some(cast)) = (&got.scales, handle.call().cast) {
        if cast.column_major {
            // By blocks, or words of four of them.
            let bytes = rank.raw(scales.view());
            let words = bytes.chunks_exact(4);
            let word = |(i, word)| {
                there
                    .binary_search(&(i % handle.capacity()))
                    .is_ok()
                    .then_some(word)
            };
            all.extend(words.enumerate().filter_map(word).flatten());
        } else {
            rows_of(scales);
        }
    }
    all.extend(laid_out(rank, handle.layout()));
    all
}

fn dispatch(
    rank: &Rank,
    engines: Engines,
    mut inputs: Inputs,
    (arrangement, dtype, cast): (Arrangement, DataType, Option<Fp8Cast>),
) -> Results {
    let own = Own::new(rank, &mut inputs, dtype, Placed::Even);
    let [ids, counts, weights] = gathered(rank, &own);
    let known = Route::Gathered(GatheredRouting {
        ids: ids.view(),
        lengths: Lengths::Padded {
            counts: counts.view(),
        },
        weights: Some(weights.view()),
        placement: own.routing(Placed::Even).placement,
    });
    let by = transports(engines, arrangement).map(|(name, choice)| (name, choice, None));
    by.chain([
        ("one_sided, known", Transport::OneSided, Some(known)),
        ("gather, known", Transport::Gather, Some(known)),
    ])
    .map(|(name, choice, route)| {
        let beside = [own.beside.view()];
        let params = || DispatchParams {
            beside: &beside,
            ..own.params(rank, arrangement, cast, choice)
        };
        let mut lease = rank.lease();
        let mut ways = params();
        ways.route = route.unwrap_or(ways.route);
        let first = lease.dispatch(ways).unwrap();
        let found = left(rank, &first);
        let again = lease
            .dispatch(DispatchParams {
                route: Route::Again(&first.handle),
                ..params()
            })
            .unwrap();
        drop(lease);
        assert!(found == left(rank, &again), "the same ways: {name}");
        (name.into(), found)
    })
    .collect()
}

/// Rows that experts made, what goes back with them, and what is added.
type Made = (Buffer, Buffer, [Buffer; 2]);

fn combine(
    rank: &Rank,
    engines: Engines,
    mut inputs: Inputs,
    (sum, dtype, output): (CombineSum, DataType, DataType),
) -> Results {
    let arrangement = match sum {
        CombineSum::Rank => Arrangement::Dense,
        CombineSum::Expert | CombineSum::ExpertByRank => BY_EXPERT,
    };
    let own = Own::new(rank, &mut inputs, dtype, Placed::Even);
    let mut made: Option<Made> = None;
    let mut results: Results = transports(engines, arrangement)
        .map(|(name, choice)| {
            let mut lease = rank.lease();
            let there = lease
                .dispatch(own.params(rank, arrangement, None, choice))
                .unwrap();
            let capacity = there.handle.capacity();
            let matrix = [tokens(rank.rank), HIDDEN];
            let (rows, back, biases) = &*made.get_or_insert_with(|| {
                let mut upload = |dtype, dims: &[usize]| {
                    let bytes = inputs.floats(dtype, dims.iter().product(), false);
                    rank.upload_bytes(dtype, dims, &bytes)
                };
                let rows = upload(dtype, &[capacity, HIDDEN]);
                let back = upload(DataType::F32, there.ids.shape().dims());
                (rows, back, [0; 2].map(|_| upload(dtype, &matrix)))
            });
            let mut d = rank.poisoned(output, &matrix);
            let combined = lease
                .combine(CombineParams {
                    rows: rows.view(),
                    handle: &there.handle,
                    sum,
                    weights: Some(back.view()),
                    biases: &[biases[0].view(), biases[1].view()],
                    output: Output::Into(d.view_mut()),
                    waits: None,
                    choice: Some(choice),
                })
                .unwrap();
            drop(lease);
            let mut all = rank.raw(d.view());
            all.extend(rank.raw(combined.weights.unwrap().view()));
            (name.into(), all)
        })
        .collect();
    if let (CombineSum::Rank, Some(made)) = (sum, &made) {
        results.push(("in_place".into(), in_place(rank, &own, made, output)));
    }
    results
}

/// The same from rows that lie where those of the dispatch do, each with a place for its token; weights go back another way.
fn in_place(rank: &Rank, own: &Own, (made, back, biases): &Made, output: DataType) -> Vec<u8> {
    let mut lease = rank.lease();
    let dtype = made.dtype();
    let mut send = |arrangement, choice| {
        let params = own.params(rank, arrangement, None, choice);
        lease.dispatch(params).unwrap()
    };
    let dense = send(Arrangement::Dense, Transport::OneSided);
    let there = send(Arrangement::BySource, Transport::InPlace);
    let mut rows = there.rows.clone();
    let each = HIDDEN * dtype.bytes();
    let first = i32s(rank, &dense.handle.parts().offsets);
    let (from, mut to) = (rank.raw(made.view()), rank.raw(rows.view()));
    for (source, &count) in i32s(rank, &there.handle.parts().received)
        .iter()
        .enumerate()
    {
        let run = |first: usize| first * each..(first + count as usize) * each;
        let theirs = &from[run(first[source] as usize)];
        to[run(source * MOST_TOKENS)].copy_from_slice(theirs);
    }
    let on = &rank.stream;
    rank.device.write(on, rows.view_mut(), &to).unwrap();
    let mut d = rank.poisoned(output, &[tokens(rank.rank), HIDDEN]);
    let combined = lease.combine(CombineParams {
        rows: rows.view(),
        handle: &there.handle,
        sum: CombineSum::Rank,
        weights: None,
        biases: &[biases[0].view(), biases[1].view()],
        output: Output::Into(d.view_mut()),
        waits: None,
        choice: Some(Transport::InPlace),
    });
    assert!(combined.unwrap().weights.is_none());
    let weights = lease.combine(CombineParams {
        rows: made.view(),
        handle: &dense.handle,
        sum: CombineSum::Rank,
        weights: Some(back.view()),
        biases: &[],
        output: Output::Allocate(dtype),
        waits: None,
        choice: Some(Transport::OneSided),
    });
    let weights = weights.unwrap().weights.unwrap();
    drop(lease);
    let mut all = rank.raw(d.view());
    all.extend(rank.raw(weights.view()));
    all
}

fn layout(rank: &Rank, mut inputs: Inputs, placed: Placed) -> Vec<u8> {
    let own = Own::new(rank, &mut inputs, DataType::BF16, placed);
    let layout = rank.lease().expert_layout(own.routing(placed)).unwrap();
    laid_out(rank, &layout)
}

/// The guard of the entries: bytes of rows that nobody sent change nothing, and every bit of the others, or of what names them, does.
pub(super) fn guards(world: &World) {
    let engines = world.backend.engines();
    world.run(&experts::config(), move |rank| {
        let mut inputs = Inputs::new("guards", rank.rank);
        let own = Own::new(rank, &mut inputs, DataType::BF16, Placed::Even);
        for (name, choice) in transports(engines, BY_EXPERT) {
            let params = own.params(rank, BY_EXPERT, None, choice);
            let got = rank.lease().dispatch(params).unwrap();
            let sources = i32s(rank, &got.handle.parts().sources);
            let at = |there: bool| sources.chunks(4).position(|s| (s[0] >= 0) == there);
            let before = left(rank, &got);
            let change = |of: &Buffer, byte: usize| {
                let mut bytes = rank.raw(of.view());
                bytes[byte] ^= 1;
                let mut to = of.clone();
                rank.device
                    .write(&rank.stream, to.view_mut(), &bytes)
                    .unwrap();
            };
            let row_bytes = HIDDEN * DataType::BF16.bytes();
            // There is room for more than comes.
            change(&got.rows, at(false).unwrap() * row_bytes);
            assert!(before == left(rank, &got), "{name}: a row that nobody sent");
            let there = at(true).map(|at| (&got.rows, at * row_bytes + row_bytes - 1));
            let named = [&got.ids, &got.counts, &got.handle.parts().offsets].map(|b| (b, 0));
            for (of, byte) in there.into_iter().chain(named) {
                change(of, byte);
                assert!(before != left(rank, &got), "{name}: byte {byte} of {of:?}");
                change(of, byte);
            }
        }
    });
}

pub(super) fn entries(engines: Engines) -> Vec<Entry> {
    if !engines.dispatches {
        return vec![];
    }
    let mut all = vec![];
    for placed in [Placed::Even, Placed::Map, Placed::Ranks] {
        all.push(Entry::one(
            format!("expert_layout/{placed:?}"),
            move |rank, inputs| layout(rank, inputs, placed),
        ));
    }
    let mut dispatches = vec![];
    for (name, arrangement) in ARRANGEMENTS {
        let plain = (arrangement, DataType::BF16, None);
        dispatches.push((format!("{name}/bf16"), plain));
        for format in [
            ScaleFormat::F32,
            ScaleFormat::PowerOfTwo,
            ScaleFormat::Ue8m0,
        ] {
            for (major, column_major) in [("rows", false), ("columns", true)] {
                let cast = Some(Fp8Cast {
                    format,
                    column_major,
                });
                let name = format!("{name}/fp8_{format:?}_by_{major}");
                dispatches.push((name, (arrangement, DataType::BF16, cast)));
            }
        }
    }
    for (name, kind) in dispatches {
        all.push(Entry::new(
            format!("dispatch/{name}"),
            move |rank, inputs| dispatch(rank, engines, inputs, kind),
        ));
    }
    for sum in [
        CombineSum::Rank,
        CombineSum::Expert,
        CombineSum::ExpertByRank,
    ] {
        for dtype in FLOATS {
            let outputs = [dtype, DataType::F32];
            let different = if dtype == DataType::F32 { 1 } else { 2 };
            for output in &outputs[..different] {
                let kind = (sum, dtype, *output);
                let name = format!("{sum:?}/{}_to_{}", named(dtype), named(*output));
                all.push(Entry::new(
                    format!("combine/{name}"),
                    move |rank, inputs| combine(rank, engines, inputs, kind),
                ));
            }
        }
    }
    for entry in &mut all {
        entry.config = experts::config;
    }
    all
}
