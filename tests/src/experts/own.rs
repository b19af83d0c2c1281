//! A rank's arguments, and what must come of them.

use super::case::{Case, Ids, Where};
use crate::{backend::Rank, check::assert_bits};
use brigade_device::{
    Arrangement, Buffer, CombineParams, Combined, DataType, DispatchParams, Dispatched,
    GatheredRouting, HierarchyLease, Lease, Lengths, Placement, Result, Route, Routing,
};

/// A lease of a communicator or of a hierarchy.
pub trait Leased {
    /// As [`Lease::dispatch`].
    ///
    /// # Errors
    /// As there.
    fn dispatch(&mut self, p: DispatchParams<'_>) -> Result<Dispatched>;
    /// As [`Lease::combine`].
    ///
    /// # Errors
    /// As there.
    fn combine(&mut self, p: CombineParams<'_>) -> Result<Combined>;
}

impl Leased for Lease<'_> {
    fn dispatch(&mut self, p: DispatchParams<'_>) -> Result<Dispatched> {
        Lease::dispatch(self, p)
    }
    fn combine(&mut self, p: CombineParams<'_>) -> Result<Combined> {
        Lease::combine(self, p)
    }
}

impl Leased for HierarchyLease<'_> {
    fn dispatch(&mut self, p: DispatchParams<'_>) -> Result<Dispatched> {
        HierarchyLease::dispatch(self, p)
    }
    fn combine(&mut self, p: CombineParams<'_>) -> Result<Combined> {
        HierarchyLease::combine(self, p)
    }
}

/// A rank's arguments, in its memory.
pub struct Own {
    pub rows: Buffer,
    pub ids: Buffer,
    pub weights: Option<Buffer>,
    pub beside: Vec<Buffer>,
    map: Option<Buffer>,
    /// What it knows of all ranks' tokens.
    pub all: Option<All>,
    /// Where what slots get is added up.
    pub totals: Option<Buffer>,
    /// Where waits for each rank are added up.
    pub waits: Option<Buffer>,
}

/// Experts of all ranks' tokens, how many of whom they are, and their weights.
pub struct All {
    pub ids: Buffer,
    pub lengths: Buffer,
    pub weights: Option<Buffer>,
}

/// Experts of all ranks' tokens, with what pads them or is behind them, their weights, and how many of whom they are.
pub struct Gathered {
    pub ids: Vec<i64>,
    pub weights: Vec<f32>,
    dims: Vec<usize>,
    pub lengths: Vec<i32>,
}

impl Gathered {
    /// What is nobody's names experts as well.
    pub fn of(case: &Case) -> Option<Self> {
        const BEHIND: usize = 5;
        let (size, k) = (case.size, case.k);
        let counts = (0..size).map(|r| case.tokens(r) as i32);
        let (room, dims, lengths): (_, Vec<usize>, Vec<i32>) = match case.by.ids {
            Ids::Own => return None,
            Ids::Padded => (
                vec![case.max_tokens; size],
                vec![size, case.max_tokens, k],
                counts.collect(),
            ),
            Ids::Ragged => {
                let mut room: Vec<usize> = (0..size).map(|r| case.tokens(r)).collect();
                room[size - 1] += BEHIND;
                let dims = vec![room.iter().sum(), k];
                let sums = counts.scan(0, |sum, n| {
                    *sum += n;
                    Some(*sum)
                });
                (room, dims, std::iter::once(0).chain(sums).collect())
            }
        };
        let (mut ids, mut weights) = (vec![], vec![]);
        for (r, &room) in room.iter().enumerate() {
            ids.extend(&case.ids[r]);
            weights.extend(case.weights.iter().flat_map(|all| &all[r]));
            let behind = (room - case.tokens(r)) * k;
            ids.extend((0..behind).map(|i| i as i64 % 3));
            weights.extend(case.weights.iter().flat_map(|_| vec![f32::NAN; behind]));
        }
        Some(Self {
            ids,
            weights,
            dims,
            lengths,
        })
    }
}

impl All {
    fn of(rank: &Rank, case: &Case) -> Option<Self> {
        let all = Gathered::of(case)?;
        let (dtype, ids) = id_bytes(case, &all.ids);
        let weights = bytemuck::cast_slice(&all.weights);
        let weights_of = |_| rank.upload_bytes(DataType::F32, &all.dims, weights);
        let lengths = bytemuck::cast_slice(&all.lengths);
        Some(Self {
            ids: rank.upload_bytes(dtype, &all.dims, &ids),
            weights: case.weights.as_ref().map(weights_of),
            lengths: rank.upload_bytes(DataType::I32, &[all.lengths.len()], lengths),
        })
    }
}

fn id_bytes(case: &Case, ids: &[i64]) -> (DataType, Vec<u8>) {
    match case.wide {
        true => (DataType::I64, bytemuck::cast_slice(ids).to_vec()),
        false => {
            let narrow = ids.iter().flat_map(|&id| (id as i32).to_ne_bytes());
            (DataType::I32, narrow.collect())
        }
    }
}

impl Own {
    pub fn of(rank: &Rank, case: &Case) -> Self {
        let me = rank.rank;
        let tokens = case.tokens(me);
        let (id_type, bytes) = id_bytes(case, &case.ids[me]);
        let bytes_of = |values: &[f32]| bytemuck::cast_slice::<_, u8>(values).to_vec();
        Self {
            rows: rank.upload_bytes(case.dtype, &[tokens, case.hidden], &case.rows[me]),
            ids: rank.upload_bytes(id_type, &[tokens, case.k], &bytes),
            weights: case
                .weights
                .as_ref()
                .map(|w| rank.upload_bytes(DataType::F32, &[tokens, case.k], &bytes_of(&w[me]))),
            beside: case
                .beside
                .iter()
                .map(|b| rank.upload_bytes(b.dtype, &[tokens, b.width], &b.of_ranks[me]))
                .collect(),
            map: match &case.places {
                Where::Map { slots, .. } => {
                    let shape = [case.experts, slots.len() / case.experts];
                    Some(rank.upload_bytes(DataType::I32, &shape, bytemuck::cast_slice(slots)))
                }
                _ => None,
            },
            all: All::of(rank, case),
            totals: None,
            waits: None,
        }
    }

    /// What another case of as many tokens has, in its place.
    pub fn write(&mut self, rank: &Rank, case: &Case) {
        let me = rank.rank;
        let write = |to: &mut Buffer, bytes: &[u8]| {
            rank.device
                .write(&rank.stream, to.view_mut(), bytes)
                .unwrap();
        };
        write(&mut self.rows, &case.rows[me]);
        write(&mut self.ids, &id_bytes(case, &case.ids[me]).1);
        if let (Some(to), Some(all)) = (&mut self.weights, &case.weights) {
            write(to, bytemuck::cast_slice(&all[me]));
        }
        for (to, from) in self.beside.iter_mut().zip(&case.beside) {
            write(to, &from.of_ranks[me]);
        }
    }

    pub fn routing<'a>(&'a self, case: &Case) -> Routing<'a> {
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

    pub fn dispatch(&self, lease: &mut impl Leased, case: &Case) -> Result<Dispatched> {
        let routing = self.routing(case);
        let route = match &self.all {
            None => Route::Experts {
                routing,
                weights: self.weights.as_ref().map(Buffer::view),
            },
            Some(all) => Route::Gathered(GatheredRouting {
                ids: all.ids.view(),
                lengths: match case.by.ids {
                    Ids::Padded => Lengths::Padded {
                        counts: all.lengths.view(),
                    },
                    _ => Lengths::Ragged {
                        offsets: all.lengths.view(),
                    },
                },
                weights: all.weights.as_ref().map(Buffer::view),
                placement: routing.placement,
            }),
        };
        self.dispatch_by(lease, case, route)
    }

    pub fn dispatch_by(
        &self,
        lease: &mut impl Leased,
        case: &Case,
        route: Route<'_>,
    ) -> Result<Dispatched> {
        let [mut totals, mut waits] = [&self.totals, &self.waits].map(Clone::clone);
        let beside: Vec<_> = self.beside.iter().map(Buffer::view).collect();
        lease.dispatch(DispatchParams {
            rows: self.rows.view(),
            beside: &beside,
            route,
            arrangement: case.arrangement,
            max_tokens: case.max_tokens,
            max_recv: case.room,
            received_ids: case.received_ids,
            totals: totals.as_mut().map(Buffer::view_mut),
            waits: waits.as_mut().map(Buffer::view_mut),
            cast: case.cast,
            choice: case.by.there,
        })
    }
}

pub fn i32s(rank: &Rank, buffer: &Buffer) -> Vec<i32> {
    bytemuck::pod_collect_to_vec(&rank.raw(buffer.view()))
}

pub fn f32s(rank: &Rank, buffer: &Buffer) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&rank.raw(buffer.view()))
}

/// What a rank must be told of the rows that come to it, and of nothing where there is room for more.
pub struct Told {
    pub sources: Vec<i32>,
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
    pub counts: Vec<i32>,
    pub received: Vec<i32>,
}

impl Told {
    /// In the words of the contract, row by row.
    pub fn of(case: &Case, me: usize) -> Self {
        let (came, capacity) = (case.received(me).0, case.capacity(me));
        let by_expert = matches!(case.arrangement, Arrangement::ByExpert { .. });
        let per_row = if by_expert { 1 } else { case.k };
        let mut sources = vec![[-1; 4]; capacity];
        let mut ids = vec![case.called(me, None); capacity * per_row];
        let mut weights = vec![0f32; capacity * per_row];
        let mut counts = vec![0; case.slots()[me]];
        let mut received = vec![0; case.size];
        let mut seen = std::collections::BTreeSet::new();
        // Of the tokens of each rank, those in front of each that come.
        let before: Vec<Vec<i32>> = (0..case.size)
            .map(|source| {
                let goes = |token| (0..case.k).any(|e| case.local(me, source, token, e).is_some());
                let tokens = (0..case.tokens(source)).scan(0, |sum, token| {
                    let before = *sum;
                    *sum += i32::from(goes(token));
                    Some(before)
                });
                tokens.collect()
            })
            .collect();
        for row in &came {
            let entry = row.entry.map_or(-1, |e| e as i32);
            let before = before[row.source][row.token];
            sources[row.at] = [row.source as i32, row.token as i32, entry, before];
            if seen.insert((row.source, row.token)) {
                received[row.source] += 1;
            }
            let entries = row.entry.map_or(0..case.k, |e| e..e + 1);
            for (i, entry) in entries.enumerate() {
                if let Some(slot) = case.local(me, row.source, row.token, entry) {
                    ids[row.at * per_row + i] = case.called(me, Some(slot));
                    if let Some(all) = &case.weights {
                        weights[row.at * per_row + i] = all[row.source][row.token * case.k + entry];
                    }
                    counts[slot] += 1;
                }
            }
        }
        Self {
            sources: sources.concat(),
            ids,
            weights,
            counts,
            received,
        }
    }
}

/// What came is what was sent, and is known for what it is.
pub fn check(rank: &Rank, case: &Case, got: &Dispatched) {
    let me = rank.rank;
    let (came, _) = case.received(me);
    assert_eq!(
        got.handle.capacity(),
        case.capacity(me),
        "rows that there is room for"
    );
    let row_bytes = case.hidden * case.dtype.bytes();
    let rows = rank.raw(got.rows.view());
    let types = got.beside.iter().map(Buffer::dtype);
    assert!(types.eq(case.beside.iter().map(|b| b.dtype)), "beside");
    let beside: Vec<_> = got.beside.iter().map(|b| rank.raw(b.view())).collect();
    for row in &came {
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
        for (sent, got) in case.beside.iter().zip(&beside) {
            let each = sent.row_bytes();
            let sent = &sent.of_ranks[row.source][row.token * each..][..each];
            assert_bits(&got[row.at * each..][..each], sent, DataType::U8, &what);
        }
    }
    let (handle, told) = (&got.handle, Told::of(case, me));
    let parts = handle.parts();
    assert_eq!(i32s(rank, &parts.sources), told.sources, "sources");
    assert_eq!(i32s(rank, &got.ids), told.ids, "ids");
    assert_eq!(i32s(rank, &got.counts), told.counts, "counts");
    assert_eq!(i32s(rank, &parts.received), told.received, "received");
    match (&got.weights, &case.weights) {
        (Some(got), Some(_)) => assert_eq!(f32s(rank, got), told.weights, "weights"),
        (None, None) => {}
        (got, _) => panic!("{got:?} as weights"),
    }
    let offsets = i32s(rank, &parts.offsets);
    for row in &came {
        let slot = |entry| case.local(me, row.source, row.token, entry).unwrap();
        let run = row.entry.map_or(row.source, slot);
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
