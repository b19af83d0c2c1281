//! A model of the ring of stages in `kernels/gemm_sums.cu`, in which a tile's operands, others' parts of it and its own rounded rows follow each
//! other: threads of a block as programs, gone through in random orders.
//!
//! What holds: nobody finds what was there before or comes after, or rows that not all warps of a group have written; and all get to their ends.

use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedMutRandom, IndexedRandom},
};
use std::collections::BTreeSet;

const GROUPS: usize = 2;
const WARPS: usize = 3;

/// What is in a stage: for which tile, and what of it.
type Content = (usize, Use);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Products(usize),
    Parts(usize),
    /// Rows of a group, on their way out.
    Rows(usize),
    End,
}

/// How many stages of products and of parts a tile has, and whether it is another rank's.
#[derive(Clone, Copy, Debug)]
struct Tile {
    products: usize,
    parts: usize,
    leaves: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Barrier {
    Full(usize),
    Empty(usize),
    Written(usize),
    Heard(usize),
}

/// One thing that a thread does without another between.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Waits for the end of the phase of this parity.
    Wait(Barrier, bool),
    Arrive(Barrier),
    /// All warps of a group meet.
    Meet(usize),
    Fill(usize, Content),
    Find(usize, Content),
    Write(usize, usize),
    /// Says which stage a group has written; none at the end.
    Say(usize, Option<usize>),
    /// Reads that, and the rows.
    Hear(usize, Option<Content>),
    /// Gives the stage that was heard of back, for both groups.
    Free,
}

#[derive(Clone, Copy, Default)]
struct Ring {
    stage: usize,
    phase: bool,
}

impl Ring {
    fn next(&mut self, stages: usize) {
        self.stage += 1;
        if self.stage == stages {
            (self.stage, self.phase) = (0, !self.phase);
        }
    }
}

/// What the loading thread gives a tile, in order.
fn uses(tile: &Tile) -> Vec<Use> {
    let products = (0..tile.products).map(Use::Products);
    let behind = match tile.leaves {
        true => (0..GROUPS).map(Use::Rows).collect::<Vec<_>>(),
        false => (0..tile.parts).map(Use::Parts).collect(),
    };
    products.chain(behind).collect()
}

fn loader(tiles: &[Tile], stages: usize) -> Vec<Step> {
    let (mut ring, mut steps) = (Ring::default(), Vec::new());
    let of_tiles = tiles.iter().enumerate();
    let all = of_tiles.flat_map(|(t, tile)| uses(tile).into_iter().map(move |u| (t, u)));
    for content in all.chain([(tiles.len(), Use::End)]) {
        let s = ring.stage;
        steps.push(Step::Wait(Barrier::Empty(s), !ring.phase));
        steps.push(Step::Fill(s, content));
        steps.push(Step::Arrive(Barrier::Full(s)));
        ring.next(stages);
    }
    steps
}

/// A warp of a group. With `meets`, all of it meet before one tells that rows are written; else each tells.
fn warp(tiles: &[Tile], stages: usize, group: usize, warp: usize, meets: bool) -> Vec<Step> {
    let leads = warp == 0;
    let (mut ring, mut steps, mut told) = (Ring::default(), Vec::new(), false);
    let mut hand_over = |steps: &mut Vec<Step>, stage| {
        if meets {
            steps.push(Step::Meet(group));
        }
        if leads {
            steps.push(Step::Wait(Barrier::Heard(group), !told));
            steps.push(Step::Say(group, stage));
        }
        if leads || !meets {
            steps.push(Step::Arrive(Barrier::Written(group)));
        }
        told = !told;
    };
    for (t, tile) in tiles.iter().enumerate() {
        for content in uses(tile) {
            let s = ring.stage;
            if content == Use::Rows(1 - group) {
                ring.next(stages);
                continue;
            }
            steps.push(Step::Wait(Barrier::Full(s), ring.phase));
            steps.push(Step::Find(s, (t, content)));
            if content == Use::Rows(group) {
                steps.push(Step::Write(s, warp));
                hand_over(&mut steps, Some(s));
            } else {
                // Products are a group's, and so is a meeting behind parts.
                steps.push(Step::Meet(group));
                steps.extend(leads.then_some(Step::Arrive(Barrier::Empty(s))));
            }
            ring.next(stages);
        }
    }
    steps.push(Step::Wait(Barrier::Full(ring.stage), ring.phase));
    steps.push(Step::Find(ring.stage, (tiles.len(), Use::End)));
    hand_over(&mut steps, None);
    steps
}

fn writer(tiles: &[Tile], group: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    let leave = tiles.iter().enumerate().filter(|(_, tile)| tile.leaves);
    let contents = leave.map(|(t, _)| Some((t, Use::Rows(group))));
    let mut phase = false;
    for content in contents.chain([None]) {
        steps.push(Step::Wait(Barrier::Written(group), phase));
        steps.push(Step::Hear(group, content));
        if content.is_some() {
            steps.extend([Step::Arrive(Barrier::Heard(group)), Step::Free]);
        }
        phase = !phase;
    }
    steps
}

/// A block's shared memory.
struct Block {
    barriers: Vec<(Barrier, usize, usize, bool)>,
    contents: Vec<Option<Content>>,
    written: Vec<BTreeSet<usize>>,
    said: [Option<Option<usize>>; GROUPS],
    heard_of: [Option<usize>; GROUPS],
    meeting: [(usize, usize); GROUPS],
}

impl Block {
    fn new(stages: usize, tellers: usize) -> Self {
        let all = (0..stages).flat_map(|s| [(Barrier::Full(s), 1), (Barrier::Empty(s), GROUPS)]);
        let groups =
            (0..GROUPS).flat_map(|g| [(Barrier::Written(g), tellers), (Barrier::Heard(g), 1)]);
        Self {
            barriers: all.chain(groups).map(|(b, of)| (b, of, 0, false)).collect(),
            contents: vec![None; stages],
            written: vec![BTreeSet::new(); stages],
            said: [None; GROUPS],
            heard_of: [None; GROUPS],
            meeting: [(0, 0); GROUPS],
        }
    }

    fn arrive(&mut self, barrier: Barrier) {
        let found = self.barriers.iter_mut().find(|b| b.0 == barrier);
        let Some((_, of, come, phase)) = found else {
            unreachable!("{barrier:?} is none of this block")
        };
        *come += 1;
        if *come == *of {
            (*come, *phase) = (0, !*phase);
        }
    }

    fn is_over(&self, barrier: Barrier, parity: bool) -> bool {
        self.barriers
            .iter()
            .any(|b| b.0 == barrier && b.3 != parity)
    }
}

/// A thread, and which meeting it waits in.
struct Thread {
    steps: Vec<Step>,
    at: usize,
    meets: Option<usize>,
}

impl Thread {
    /// Takes a step if it can. What must not be is an error.
    fn go_on(&mut self, block: &mut Block) -> Result<bool, String> {
        let step = self.steps[self.at];
        match step {
            Step::Wait(barrier, parity) if !block.is_over(barrier, parity) => return Ok(false),
            Step::Wait(..) => {}
            Step::Arrive(barrier) => block.arrive(barrier),
            Step::Meet(group) => {
                let (come, meeting) = &mut block.meeting[group];
                let mine = *self.meets.get_or_insert_with(|| {
                    *come += 1;
                    *meeting
                });
                if *come == WARPS {
                    (*come, *meeting) = (0, *meeting + 1);
                }
                if *meeting == mine {
                    return Ok(false);
                }
                self.meets = None;
            }
            Step::Fill(stage, content) => {
                block.contents[stage] = Some(content);
                block.written[stage].clear();
            }
            Step::Find(stage, content) => {
                let found = block.contents[stage];
                if found != Some(content) {
                    return Err(format!("{content:?} wanted, {found:?} found"));
                }
            }
            Step::Write(stage, warp) => drop(block.written[stage].insert(warp)),
            Step::Say(group, stage) => block.said[group] = Some(stage),
            Step::Hear(group, content) => {
                let said = block.said[group].ok_or("nothing was said")?;
                let found = said.and_then(|stage| block.contents[stage]);
                let rows = said.map_or(WARPS, |stage| block.written[stage].len());
                if (found, rows) != (content, WARPS) {
                    return Err(format!(
                        "{content:?} wanted, {found:?} of {rows} warps found"
                    ));
                }
                block.heard_of[group] = said;
            }
            Step::Free => {
                let group = match self.steps[0] {
                    Step::Wait(Barrier::Written(group), _) => group,
                    other => return Err(format!("{other:?} is no writer's")),
                };
                let stage = block.heard_of[group].ok_or("nothing was heard")?;
                (0..GROUPS).for_each(|_| block.arrive(Barrier::Empty(stage)));
            }
        }
        self.at += 1;
        Ok(true)
    }
}

/// One random block in one random order, in which some threads are much slower than others.
fn walk(seed: u64, meets: bool) -> Result<(), String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let stages = *[4, 5, 6, 9].choose(&mut rng).ok_or("no stages")?;
    let tiles: Vec<_> = (0..rng.random_range(1..=6))
        .map(|_| Tile {
            products: rng.random_range(1..=3),
            parts: rng.random_range(0..=3),
            leaves: rng.random(),
        })
        .collect();
    let groups = 0..GROUPS;
    let warps = groups.clone().flat_map(|g| (0..WARPS).map(move |w| (g, w)));
    let programs = [loader(&tiles, stages)]
        .into_iter()
        .chain(warps.map(|(g, w)| warp(&tiles, stages, g, w, meets)))
        .chain(groups.map(|g| writer(&tiles, g)));
    let mut threads: Vec<_> = programs
        .map(|steps| {
            (
                0.01 + rng.random::<f64>().powi(3),
                Thread {
                    steps,
                    at: 0,
                    meets: None,
                },
            )
        })
        .collect();
    let mut block = Block::new(stages, if meets { 1 } else { WARPS });
    for _ in 0..200_000 {
        threads.retain(|(_, thread)| thread.at < thread.steps.len());
        let Ok((_, thread)) = threads.choose_weighted_mut(&mut rng, |t| t.0) else {
            return Ok(());
        };
        thread.go_on(&mut block)?;
    }
    Err("not all get to their ends".into())
}

#[test]
fn stages_pass_from_who_loads_to_who_multiplies_and_to_who_writes() {
    for seed in 0..500 {
        assert_eq!(walk(seed, true), Ok(()), "seed {seed}");
    }
}

#[test]
fn without_the_meeting_rows_are_told_of_that_are_not_written() {
    let failures: Vec<_> = (0..500)
        .filter_map(|seed| walk(seed, false).err())
        .collect();
    assert!(
        failures.iter().any(|why| why.contains("warps found")),
        "{failures:?}"
    );
}
