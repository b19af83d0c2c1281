//! Dispatches and combines that are captured, what they are given on each day, and what must come of it.

use crate::{
    backend::Rank,
    experts::{
        case::Case,
        own::{Own, check, f32s, i32s},
    },
    faults::AMPLE,
    matrix::to_f64,
    quantized::fp8,
};
use brigade_device::{
    Activation, Arrangement, Buffer, CombineParams, CombineSum, DataType, Dispatched, ExpertLayout,
    Fp8Cast, Output, Plan, Replay, Transport,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::collections::BTreeSet;

/// Experts of a token, and of all.
pub const K: usize = 3;
pub const EXPERTS: usize = 7;

/// What every byte of an output is before a replay: no number that comes out, and not -1.
pub const OLD: u8 = 0x7F;

/// What is captured.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub tokens: usize,
    pub hidden: usize,
    pub arrangement: Arrangement,
    pub there: Transport,
    pub back: Option<(CombineSum, Transport)>,
    pub cast: Option<Fp8Cast>,
    /// Every token goes to all of two ranks, every day.
    pub to_all: bool,
    pub seed: u64,
}

impl Kind {
    /// Most rows of a rank.
    fn room(self, size: usize) -> Option<usize> {
        match self.arrangement {
            Arrangement::BySource => None,
            Arrangement::Dense => Some(size * self.tokens),
            Arrangement::ByExpert { alignment } => {
                Some(size * self.tokens * K + EXPERTS * (alignment - 1))
            }
        }
    }

    /// What all ranks send on a day.
    pub fn case(self, size: usize, day: u32) -> Case {
        let sizes = (self.tokens, self.hidden);
        let mut case = of_day(self.seed, day, size, sizes, self.to_all);
        case.arrangement = self.arrangement;
        case.by.there = Some(self.there);
        case.by.back = self.back.map(|(_, by)| by);
        case.room = self.room(size);
        case.cast = self.cast;
        if case.cast.is_some() {
            case.rows
                .iter_mut()
                .for_each(|rows| told_by_fp8(rows, self.hidden));
        }
        case
    }
}

/// What all ranks send on a day: small whole numbers, so that sums are exact. So many tokens of each, and columns.
pub fn of_day(
    seed: u64,
    day: u32,
    size: usize,
    (tokens, hidden): (usize, usize),
    to_all: bool,
) -> Case {
    // What is beside rows is of the same kinds every day.
    let any = &mut StdRng::seed_from_u64(seed);
    let mut case = Case::random(any, size, (tokens, hidden, K, EXPERTS));
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(day.into()));
    (case.dtype, case.wide) = (DataType::F32, false);
    case = case.with_tokens(&mut rng, &vec![tokens; size]);
    let some = rng.random_range(0..size);
    match rng.random_range(0..8) {
        _ if to_all => {
            let of_two = [0, EXPERTS as i64 - 1, -1];
            case.ids = vec![of_two.repeat(tokens); size];
        }
        // Now and then a rank's rows go nowhere, or all to one.
        0 => case.ids[some].fill(-1),
        1 => case.ids[some].fill(rng.random_range(0..EXPERTS as i64)),
        _ => {}
    }
    for rows in &mut case.rows {
        let values = (0..rows.len() / 4).map(|_| rng.random_range(-500i16..500));
        *rows = values.flat_map(|x| f32::from(x).to_ne_bytes()).collect();
    }
    for weight in case.weights.iter_mut().flatten().flatten() {
        *weight = f32::from(rng.random_range(1i8..=4));
    }
    case
}

/// Makes of whole numbers in f32 such as fp8 tells exactly: the greatest of a row has scale 1, and others are below 16.
fn told_by_fp8(rows: &mut [u8], hidden: usize) {
    for (i, x) in rows.chunks_exact_mut(4).enumerate() {
        let value: f32 = bytemuck::pod_read_unaligned(x);
        let value = match i % hidden {
            0 => 448f32.copysign(value),
            _ => value % 16.0,
        };
        x.copy_from_slice(&value.to_ne_bytes());
    }
}

/// What a rank's experts add to every row.
pub fn bias(rank: usize, hidden: usize) -> Vec<f32> {
    (0..hidden)
        .map(|c| (1000 * (rank + 1) + c) as f32)
        .collect()
}

/// What a rank gets back: sums, and the weights that its rows went with.
pub fn returned(case: &Case, me: usize, sum: CombineSum) -> [Vec<f32>; 2] {
    let rows: Vec<f32> = bytemuck::pod_collect_to_vec(&case.rows[me]);
    let own = &case.weights.as_ref().unwrap()[me];
    let (mut d, mut back) = (vec![0.0; rows.len()], vec![0.0; own.len()]);
    for token in 0..case.tokens(me) {
        let mut ranks = BTreeSet::new();
        for entry in 0..K {
            let Some(slot) = case.slot(me, token, entry) else {
                continue;
            };
            let (owner, weight) = (case.owner(slot).0, own[token * K + entry]);
            back[token * K + entry] = weight;
            let factor = match sum {
                CombineSum::Rank if !ranks.insert(owner) => continue,
                CombineSum::Rank => 1.0,
                CombineSum::Expert | CombineSum::ExpertByRank => weight,
            };
            for (c, added) in bias(owner, case.hidden).into_iter().enumerate() {
                let at = token * case.hidden + c;
                d[at] += factor * (rows[at] + added);
            }
        }
    }
    [d, back]
}

/// A captured way there, and back if there is one. Experts add something of their rank's to each row.
pub struct Captured {
    graph: Box<dyn Replay>,
    pub kind: Kind,
    own: Own,
    layout: ExpertLayout,
    /// Its rows are a copy, if they stay in place: those are gone at the end.
    pub there: Dispatched,
    pub d: Buffer,
    back: Option<Buffer>,
}

impl Captured {
    pub fn new(rank: &Rank, kind: Kind) -> Self {
        let case = kind.case(rank.size, 0);
        let own = Own::of(rank, &case);
        let bias = rank.upload_f32(&bias(rank.rank, kind.hidden));
        let d = rank.poisoned(DataType::F32, &[kind.tokens, kind.hidden]);
        let mut to = d.clone();
        let copy = rank.poisoned(DataType::F32, &[rank.size, kind.tokens, kind.hidden]);
        let mut left = None;
        let work = &mut || {
            let mut lease = rank.lease();
            let layout = lease.expert_layout(own.routing(&case))?;
            let mut there = own.dispatch(&mut lease, &case)?;
            let in_place = kind.there == Transport::InPlace;
            let came = there.rows.clone();
            if in_place {
                rank.device
                    .copy(&rank.stream, copy.clone().view_mut(), came.view())?;
                there.rows = copy.clone();
            }
            let mut back = None;
            if let Some((sum, choice)) = kind.back {
                let mut place = came.clone();
                let made = rank.device.bias_activation(
                    &rank.stream,
                    there.rows.view(),
                    Some(bias.view()),
                    Activation::None,
                    match in_place {
                        true => Output::Into(place.view_mut()),
                        false => Output::Allocate(DataType::F32),
                    },
                )?;
                // None goes back with rows that stay in place.
                let weights = there.weights.as_ref().filter(|_| !in_place);
                let combined = lease.combine(CombineParams {
                    rows: made.as_ref().unwrap_or(&came).view(),
                    handle: &there.handle,
                    sum,
                    weights: weights.map(Buffer::view),
                    biases: &[],
                    output: Output::Into(to.view_mut()),
                    waits: None,
                    choice: Some(choice),
                })?;
                back = combined.weights;
            }
            left = Some((layout, there, back));
            Ok(())
        };
        let graph = rank.device.capture(&rank.stream, work).unwrap();
        let (layout, there, back) = left.unwrap();
        Self {
            graph,
            kind,
            own,
            layout,
            there,
            d,
            back,
        }
    }

    /// All that a replay writes.
    fn outputs(&self) -> impl Iterator<Item = &Buffer> {
        let parts = self.there.handle.parts();
        [&self.there.rows, &self.d]
            .into_iter()
            .chain(&self.there.beside)
            .chain(&self.there.scales)
            .chain(&self.back)
            .chain(self.layout.buffers())
            .chain(parts.buffers())
    }

    /// Runs with what is sent on a day.
    pub fn replay(&mut self, rank: &Rank, case: &Case) {
        let (device, on) = (&rank.device, &rank.stream);
        for output in self.outputs() {
            let mut to = output.clone();
            device.fill(on, to.view_mut(), OLD).unwrap();
        }
        self.own.write(rank, case);
        self.graph.launch(on).unwrap().sync(AMPLE).unwrap();
    }

    /// Runs with what is sent on a day, and asserts what comes out.
    pub fn check(&mut self, rank: &Rank, day: u32) {
        let case = self.kind.case(rank.size, day);
        self.replay(rank, &case);
        check(rank, &case, &self.there);
        if case.cast.is_some() {
            self.check_cast(rank, &case);
        }
        let known = self.there.handle.layout().buffers();
        for (asked, known) in self.layout.buffers().into_iter().zip(known) {
            assert_eq!(
                i32s(rank, asked),
                i32s(rank, known),
                "layout of replay {day}"
            );
        }
        if let Some((sum, _)) = self.kind.back {
            let [d, weights] = returned(&case, rank.rank, sum);
            let what = format!("what came back in replay {day}: {:?}", self.kind);
            assert_eq!(f32s(rank, &self.d), d, "{what}");
            if let Some(back) = &self.back {
                assert_eq!(f32s(rank, back), weights, "weights of {what}");
            }
        }
    }

    /// Rows that were cast are, times their one scale, what was sent.
    fn check_cast(&self, rank: &Rank, case: &Case) {
        let scales = f32s(rank, self.there.scales.as_ref().unwrap());
        let rows = rank.raw(self.there.rows.view());
        for row in case.received(rank.rank).0 {
            let sent = to_f64(case.dtype, &case.rows[row.source]);
            let sent = &sent[row.token * case.hidden..][..case.hidden];
            let got = rows[row.at * case.hidden..][..case.hidden].iter();
            let got = got.map(|&bits| fp8(bits) * f64::from(scales[row.at]));
            assert!(got.eq(sent.iter().copied()), "{row:?} of {:?}", self.kind);
        }
    }

    /// Of how many pieces the dispatch is.
    pub fn pieces(&self) -> usize {
        match self.there.plan {
            Plan::Experts { pieces, .. } => pieces,
            _ => 0,
        }
    }
}
