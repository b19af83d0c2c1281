//! What a model is made of: a program per rank, out of steps that run the machines' own code on shared memory.

use brigade_sync::{AbortCell, Budget, Memory, Post, Stop, Wait, Word, post, wait};

/// Memory with cells of plain data beside the words, as one rank sees it.
pub trait Shared: Memory {
    /// Writes plain data.
    fn write(&self, at: Word, value: u64);
    /// Reads plain data.
    fn read(&self, at: Word) -> u64;
    /// The end of a kernel: what was done before is visible before whatever comes behind.
    fn fence(&self);
    /// Whether this rank has heard that the group was stopped.
    fn stopped(&self) -> bool;
}

/// Why a step did not end well.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A wait gave up on a peer.
    Stop(Stop, usize),
    /// What must not be.
    Wrong(String),
}

/// A fault record.
pub type Record = [u64; AbortCell::RECORD];

/// How a rank stops the group.
pub type Raise = dyn Fn(&dyn Memory, AbortCell, usize, Record) -> Record + Send + Sync;

type Run = dyn Fn(&dyn Shared, &mut dyn Budget) -> Result<(), Fault> + Send + Sync;

/// One step of a rank's program.
pub struct Step {
    /// Whether it only reads until something is there.
    pub waits: bool,
    pub run: Box<Run>,
}

pub type Program = Vec<Step>;

/// What must be the case when nothing can happen any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// All ranks are through.
    Through,
    /// All ranks found out that they are in different calls.
    Mismatch,
    /// Ranks that live are through or have given up, all with the same record.
    Ended,
}

/// When a wait's budget may be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeouts {
    /// When nothing else can happen any more.
    Last,
    /// At any time: peers may be slow.
    Any,
    /// Never.
    Unbounded,
}

/// How ranks rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rests {
    /// A rest ends as soon as the waiter would find something.
    Looks,
    /// A rest ends by a store to a word of the rank since the waiter began to look, or with the budget.
    Counts,
    /// A rest ends by a store to a word of the rank since it began, or with the budget.
    Sleeps,
}

/// A model.
pub struct Scenario {
    pub programs: Vec<Program>,
    /// Words of every rank.
    pub words: usize,
    /// Cells of plain data of every rank.
    pub cells: usize,
    /// By which ranks stop the group.
    pub abort: Option<AbortCell>,
    pub raise: Box<Raise>,
    /// Stopping the group takes one step here: it has models of its own.
    pub stops_at_once: bool,
    /// A rank that may die at any point.
    pub mortal: Option<usize>,
    /// A rank whose budgets are never spent.
    pub patient: Option<usize>,
    pub timeouts: Timeouts,
    pub rests: Rests,
    /// Stores become visible later, in an order that only releases restrict.
    pub weak: bool,
    /// No store releases.
    pub relaxed: bool,
    pub expect: Expect,
}

pub const GENERATION: u8 = 1;

impl Scenario {
    /// Ranks that work on words and cells, and nothing goes wrong.
    pub fn new(words: usize, cells: usize, programs: Vec<Program>) -> Self {
        Self {
            programs,
            words,
            cells,
            abort: None,
            raise: Box::new(|memory, abort, _, record| abort.raise(memory, GENERATION, record)),
            stops_at_once: true,
            mortal: None,
            patient: None,
            timeouts: Timeouts::Last,
            rests: Rests::Looks,
            weak: false,
            relaxed: false,
            expect: Expect::Through,
        }
    }

    pub fn ranks(&self) -> usize {
        self.programs.len()
    }

    /// Adds a cell for aborts behind the words.
    pub fn with_abort(mut self) -> Self {
        self.abort = Some(AbortCell {
            size: self.ranks(),
            base: self.words,
        });
        self.words += AbortCell::WORDS;
        self
    }

    /// A rank may die at any point.
    pub fn with_death(mut self, rank: usize) -> Self {
        self.mortal = Some(rank);
        self.expect = Expect::Ended;
        self.with_abort()
    }

    pub fn weak(mut self, relaxed: bool) -> Self {
        self.weak = true;
        self.relaxed = relaxed;
        self
    }
}

/// What use `n` of rank `from` puts somewhere. No value is 0.
pub const fn value(n: u32, from: usize) -> u64 {
    (n as u64 + 1) << 8 | from as u64
}

fn shown(value: u64) -> String {
    match value >> 8 {
        0 => "nothing".into(),
        n => format!("use {} of rank {}", n - 1, value & 0xFF),
    }
}

pub fn wrong(rank: usize, got: u64, want: u64) -> Fault {
    Fault::Wrong(format!(
        "rank {rank} reads {} in place of {}",
        shown(got),
        shown(want)
    ))
}

/// Runs code that does not wait, and may find something wrong.
pub fn acts(run: impl Fn(&dyn Shared) -> Result<(), Fault> + Send + Sync + 'static) -> Step {
    Step {
        waits: false,
        run: Box::new(move |shared, _| run(shared)),
    }
}

/// Runs a machine's code that does not wait.
pub fn does(run: impl Fn(&dyn Shared) + Send + Sync + 'static) -> Step {
    acts(move |shared| {
        run(shared);
        Ok(())
    })
}

/// Runs a machine's code that waits for `peer`.
pub fn awaits(
    peer: usize,
    run: impl Fn(&dyn Shared, &mut dyn Budget) -> Result<Result<(), Stop>, Fault>
    + Send
    + Sync
    + 'static,
) -> Step {
    Step {
        waits: true,
        run: Box::new(move |shared, budget| {
            run(shared, budget)?.map_err(|stop| Fault::Stop(stop, peer))
        }),
    }
}

pub fn posts(p: Post) -> Step {
    does(move |shared| post(shared, p))
}

pub fn waits(w: Wait) -> Step {
    awaits(w.peer, move |shared, budget| {
        Ok(wait(shared, w, budget, || shared.stopped()))
    })
}

pub fn writes(at: Word, value: u64) -> Step {
    does(move |shared| shared.write(at, value))
}

/// Reads slowly: what is there must stay there meanwhile.
pub fn reads(rank: usize, at: Word, want: u64) -> Step {
    acts(move |shared| {
        for _ in 0..2 {
            let got = shared.read(at);
            if got != want {
                return Err(wrong(rank, got, want));
            }
        }
        Ok(())
    })
}

pub fn cell(owner: usize, index: usize) -> Word {
    Word { owner, index }
}

pub fn peers(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |i| (rank + i) % size)
}
