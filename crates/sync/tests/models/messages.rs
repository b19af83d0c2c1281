//! Messages between pairs of ranks as GPUs make them (`kernels/messages.cuh`): data is its own flag, a sender has four slots, and the credit for
//! a message's last piece comes with the next one, in a kernel behind that which took it. A kernel's block is a thread of control of its own
//! here; those of a rank share the memory of the first.

use crate::{
    message_launch::{add, begins, leaves},
    shared::*,
};
use brigade_sync::{CreditRing, Flag, Half, Post, Sentinel, Stop, Verdict, Wait, Want, Word, post};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// A slot is filled when what it held was taken.
    Credit,
    /// The credit is for the piece before in the slot.
    CreditOfItsSlot,
    /// Every block waits for credits.
    EveryBlockWaits,
    /// What was taken is emptied.
    Empties,
    /// A credit is given behind the emptying.
    EmptyFirst,
    /// The credit for a message's last piece is given.
    LastCredit,
    /// It is given in the next kernel.
    NextKernel,
    /// And there before the credits for pieces that come then.
    CreditFirst,
    /// A credit is given by the last block that has taken its share.
    LastGives,
    /// Blocks that have taken their shares are counted for each slot.
    CountOfEach,
    /// Of two teams, the one that gives later credits of a half gives back the one of the message before.
    OwnHalf,
    /// Every word of a packet is looked at.
    AllWords,
    /// The flag of a piece is looked at.
    Signed,
    /// There is one more look when a rank has left.
    OneMoreLook,
    /// Who sends and receives does both at once.
    AtOnce,
}

/// A message to or from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub peer: usize,
    pub pieces: usize,
    pub signature: u32,
}

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub sends: Option<Message>,
    pub receives: Option<Message>,
}

/// What a rank enqueues.
pub type Calls = Vec<Call>;

/// A message of so many pieces.
pub const fn message(peer: usize, pieces: usize) -> Message {
    Message {
        peer,
        pieces,
        signature: 0xA11,
    }
}

pub const fn sends(message: Message) -> Call {
    Call {
        sends: Some(message),
        receives: None,
    }
}

pub const fn receives(message: Message) -> Call {
    Call {
        sends: None,
        receives: Some(message),
    }
}

pub const fn both(sent: Message, received: Message) -> Call {
    Call {
        sends: Some(sent),
        receives: Some(received),
    }
}

/// How the model is cut.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Slots of a sender.
    pub slots: usize,
    /// Words of a packet, of which each block takes one.
    pub words: usize,
    /// Blocks that carry a message, on each rank. Where one has fewer, each of them takes several shares.
    pub blocks: [usize; 2],
    /// Whether those of a rank are two teams where a message has more than one piece, which take pieces in turn.
    pub teams: [bool; 2],
}

pub const PLAIN: Shape = Shape {
    slots: 4,
    words: 2,
    blocks: [1; 2],
    teams: [false; 2],
};

/// One word is a packet where packets are not the point.
pub const LEAN: Shape = Shape { words: 1, ..PLAIN };

/// Half as many slots, where their number is not the point either.
pub const HALF: Shape = Shape { slots: 2, ..LEAN };

impl Shape {
    /// So many blocks carry a message.
    pub const fn blocks(self, sender: usize, receiver: usize) -> Self {
        let blocks = [sender, receiver];
        Self { blocks, ..self }
    }

    /// They are two teams there.
    pub const fn teams(self, sender: bool, receiver: bool) -> Self {
        let teams = [sender, receiver];
        Self { teams, ..self }
    }
}

/// What a rank says when it leaves.
const GONE: Flag = Flag::new(GENERATION, 0, 1);

/// Bits that count blocks, for each slot.
const BITS: usize = 8;

/// Words and threads of a group.
#[derive(Clone, Copy)]
struct Group {
    size: usize,
    shape: Shape,
    /// Whether a launch sends and receives at once, in blocks apart.
    apart: bool,
    /// Whether ranks say when they leave.
    leaves: bool,
    without: Without,
}

impl Group {
    fn blocks(self, rank: usize) -> usize {
        self.shape.blocks[rank % 2]
    }

    fn shares(self) -> usize {
        self.blocks(0).max(self.blocks(1))
    }

    fn threads(self, rank: usize) -> usize {
        self.blocks(rank) * (1 + usize::from(self.apart))
    }

    fn first_thread(self, rank: usize) -> usize {
        (0..rank).map(|r| self.threads(r)).sum()
    }

    /// A word that a rank's threads share.
    fn of_rank(self, word: Word) -> Word {
        let owner = self.first_thread(word.owner);
        Word { owner, ..word }
    }

    fn ring(self, rank: usize) -> CreditRing {
        CreditRing {
            rank,
            size: self.size,
            pieces: self.shape.slots / 2,
            base: 0,
        }
    }

    /// Behind the ring: blocks that are out, launches that are over; from each peer, what was taken, and that it has left.
    fn word(self, rank: usize, index: usize) -> Word {
        let behind = CreditRing::words(self.size, self.shape.slots / 2);
        self.of_rank(cell(rank, behind + index))
    }

    fn out(self, rank: usize) -> Word {
        self.word(rank, 0)
    }

    fn over(self, rank: usize) -> Word {
        self.word(rank, 1)
    }

    fn taken(self, rank: usize, peer: usize) -> Word {
        self.word(rank, 2 + peer)
    }

    fn gone(self, rank: usize, peer: usize) -> Word {
        self.word(rank, 2 + self.size + peer)
    }

    fn place(self, to: usize, from: usize, n: usize, share: usize, i: usize) -> Word {
        let slot = from * self.shape.slots + n % self.shape.slots;
        let packet = slot * self.shares() + share;
        self.word(to, 2 + 2 * self.size + packet * self.shape.words + i)
    }

    fn words(self) -> usize {
        let last = self.place(0, self.size, 0, 0, 0);
        last.index
    }
}

fn half(n: usize) -> Half {
    Half::of(n as u32)
}

/// One block's side of a message.
#[derive(Clone, Copy)]
struct Side {
    group: Group,
    rank: usize,
    block: usize,
    message: Message,
    /// Pieces that went before.
    before: usize,
}

impl Side {
    fn flag(self, n: usize) -> Flag {
        Flag::new(GENERATION, self.message.signature, (n / 2 + 1) as u32)
    }

    /// Teams of blocks, which of them this one is in, and as which.
    fn team(self) -> (usize, usize, usize) {
        let teams = match self.group.shape.teams[self.rank % 2] && self.message.pieces > 1 {
            true => 2,
            false => 1,
        };
        (teams, self.block % teams, self.block / teams)
    }

    /// Blocks of a team.
    fn blocks(self) -> usize {
        self.group.blocks(self.rank) / self.team().0
    }

    fn shares(self) -> impl Iterator<Item = usize> + Clone {
        (self.team().2..self.group.shares()).step_by(self.blocks())
    }

    /// Pieces of this block's team.
    fn pieces(self) -> impl Iterator<Item = usize> {
        let (teams, which, _) = self.team();
        (self.before + which..self.before + self.message.pieces).step_by(teams)
    }

    fn waits(self, wait: Wait) -> Step {
        waits(Wait {
            word: self.group.of_rank(wait.word),
            peer: self.group.first_thread(wait.peer),
            ..wait
        })
    }

    /// The flag of piece `n` in the receiver's memory.
    fn filled(self, to: usize, from: usize, n: usize) -> Post {
        let (ring, second) = (self.group.ring(from), n / 2 % (self.group.shape.slots / 2));
        let filled = ring.filled(to, half(n), from, second, self.flag(n));
        Post {
            word: self.group.of_rank(filled.word),
            ..filled
        }
    }

    /// Waits for the credit for piece `n`, which went.
    fn credited(self, n: usize) -> Step {
        let ring = self.group.ring(self.rank);
        self.waits(ring.credit(half(n), self.message.peer, self.flag(n + 2)))
    }

    /// The credit for piece `n`, which came.
    fn credit(self, n: usize) -> Post {
        let (ring, peer) = (self.group.ring(self.rank), self.message.peer);
        let mut credits = ring.release(half(n), self.flag(n));
        let credit = credits.find(|p| p.word.owner == peer).unwrap();
        Post {
            word: self.group.of_rank(credit.word),
            ..credit
        }
    }

    /// This block's share of piece `n`.
    fn sends_piece(self, n: usize) -> Program {
        let (group, rank, peer) = (self.group, self.rank, self.message.peer);
        let mut program = Program::new();
        let slots = match group.without {
            Without::CreditOfItsSlot => group.shape.slots + 2,
            _ => group.shape.slots,
        };
        let waits = match group.without {
            Without::Credit => false,
            Without::EveryBlockWaits => self.team().2 == 0,
            _ => true,
        };
        if n >= slots && waits {
            program.push(self.credited(n - slots));
        }
        let filled = self.filled(peer, rank, n);
        let tells = self.team().2 == 0;
        program.push(does(move |shared| {
            if tells {
                shared.store_relaxed(filled.word, filled.flag.bits());
            }
            for share in self.shares() {
                for i in 0..group.shape.words {
                    let word = packed(n, rank);
                    shared.store_relaxed(group.place(peer, rank, n, share, i), word);
                }
            }
        }));
        program
    }

    /// Takes this block's share of piece `n`.
    fn receives_piece(self, n: usize, last: bool) -> Program {
        let without = self.group.without;
        let mut program = Program::new();
        for share in self.shares() {
            program.push(self.takes(n, share));
            let empties = self.empties(n, share);
            match without {
                Without::Empties => {}
                Without::EmptyFirst if !last => program.extend([self.gives(n), empties]),
                _ => program.push(empties),
            }
        }
        if !last && without != Without::EmptyFirst {
            program.push(self.gives(n));
        }
        if last && without == Without::NextKernel {
            program.push(self.gives_back(n));
        }
        program
    }

    fn places(self, n: usize, share: usize) -> impl DoubleEndedIterator<Item = Word> {
        let (group, rank, peer) = (self.group, self.rank, self.message.peer);
        (0..group.shape.words).map(move |i| group.place(rank, peer, n, share, i))
    }

    /// Looks until a share of piece `n` is there.
    fn takes(self, n: usize, share: usize) -> Step {
        let (group, rank, peer) = (self.group, self.rank, self.message.peer);
        let flag = self.filled(rank, peer, n);
        let want = Want::Exactly(flag.flag);
        // One thread of each block looks for the flag, with its first packet.
        let herald = share == self.team().2 && group.without != Without::Signed;
        let gone = group.gone(rank, peer);
        awaits(group.first_thread(peer), move |shared, budget| {
            let mut hopeless = false;
            loop {
                let events = shared.events(flag.word.owner);
                // The word behind the granules first.
                let places = self.places(n, share).rev();
                let words: Vec<_> = places.map(|at| shared.load_relaxed(at)).collect();
                let seen = match herald {
                    true => shared.load_relaxed(flag.word),
                    false => flag.flag.bits(),
                };
                let looked_at = match group.without {
                    Without::AllWords => &words[words.len() - 1..],
                    _ => &words[..],
                };
                let mut looked_at = looked_at.iter();
                let come = looked_at.all(|&word| Sentinel::unpack(word).is_some());
                let verdict = want.verdict(seen);
                if come && verdict == Verdict::Ready {
                    return words
                        .iter()
                        .try_for_each(|&word| compare(rank, word, n, peer))
                        .map(Ok);
                }
                if verdict == Verdict::Mismatch {
                    return Ok(Err(Stop::Mismatch { seen }));
                }
                if shared.stopped() {
                    return Ok(Err(Stop::Interrupted));
                }
                if budget.spent() || hopeless {
                    return Ok(Err(Stop::Timeout { seen }));
                }
                // What a rank says last is that it is gone: all that it sent would be there.
                if group.leaves && shared.load(gone) == GONE.bits() {
                    hopeless = true;
                    match group.without {
                        Without::OneMoreLook => return Ok(Err(Stop::Timeout { seen })),
                        _ => continue,
                    }
                }
                shared.rest(flag.word.owner, events, budget.until());
            }
        })
    }

    fn empties(self, n: usize, share: usize) -> Step {
        does(move |shared| {
            for at in self.places(n, share) {
                shared.store_relaxed(at, 0);
            }
        })
    }

    /// Gives the credit for a piece, if all other blocks have taken their shares.
    fn gives(self, n: usize) -> Step {
        let (group, credit) = (self.group, self.credit(n));
        let taken = group.taken(self.rank, self.message.peer);
        let slot = match group.without {
            Without::CountOfEach => 0,
            _ => n % group.shape.slots,
        };
        let blocks = self.blocks() as u64;
        let due = match group.without {
            Without::LastGives => 1,
            _ => blocks,
        };
        does(move |shared| {
            if blocks > 1 {
                let before = add(shared, taken, 1 << (BITS * slot)) >> (BITS * slot);
                let now = before % (1 << BITS) + 1;
                if now == blocks {
                    add(shared, taken, (blocks << (BITS * slot)).wrapping_neg());
                }
                if now != due {
                    return;
                }
            }
            post(shared, credit);
        })
    }

    /// Gives the credit for a piece that an earlier kernel has taken: the end of that one is order enough.
    fn gives_back(self, n: usize) -> Step {
        let credit = self.credit(n);
        does(move |shared| shared.store_relaxed(credit.word, credit.flag.bits()))
    }

    fn sends(self) -> Program {
        self.pieces().flat_map(|n| self.sends_piece(n)).collect()
    }

    fn receives(self) -> Program {
        let end = self.before + self.message.pieces;
        let without = self.group.without;
        let pieces = self
            .pieces()
            .flat_map(|n| self.receives_piece(n, n + 1 == end));
        let (teams, which, block) = self.team();
        let gives_back = if without == Without::OwnHalf {
            0
        } else {
            teams - 1
        };
        let owes = self.before > 0 && (which, block) == (gives_back, 0);
        let owes = owes && !matches!(without, Without::LastCredit | Without::NextKernel);
        let owed = owes.then(|| self.gives_back(self.before - 1));
        match without {
            Without::CreditFirst => pieces.chain(owed).collect(),
            _ => owed.into_iter().chain(pieces).collect(),
        }
    }
}

impl Group {
    /// What a thread does in a launch, if it has a part in it.
    fn kernel(
        self,
        rank: usize,
        thread: usize,
        launch: usize,
        sides: [Option<Side>; 2],
    ) -> Program {
        let blocks = self.blocks(rank);
        let mut work = Program::new();
        for (i, side) in sides.into_iter().enumerate() {
            let Some(side) = side.filter(|_| !self.apart || thread / blocks == i) else {
                continue;
            };
            let block = thread % blocks;
            let side = Side { block, ..side };
            work.extend(if i == 0 {
                side.sends()
            } else {
                side.receives()
            });
        }
        if work.is_empty() {
            return work;
        }
        if self.threads(rank) == 1 {
            work.push(does(|shared| shared.fence()));
            return work;
        }
        let parts = match self.apart {
            true => blocks * sides.iter().flatten().count(),
            false => blocks,
        };
        let (out, over) = (self.out(rank), self.over(rank));
        let leaves = does(move |shared| leaves(shared, (out, over), launch, parts));
        let begins = begins(over, launch).into_iter();
        begins.chain(work).chain([leaves]).collect()
    }

    fn program(self, rank: usize, thread: usize, calls: &[Call]) -> Program {
        let mut counts = vec![[0; 2]; self.size];
        let mut program = Program::new();
        for (launch, call) in calls.iter().enumerate() {
            let mut side = |i: usize, message: Message| {
                let count = &mut counts[message.peer][i];
                let before = *count;
                *count += message.pieces;
                Side {
                    group: self,
                    rank,
                    block: 0,
                    message,
                    before,
                }
            };
            let sides = [
                call.sends.map(|message| side(0, message)),
                call.receives.map(|message| side(1, message)),
            ];
            program.extend(self.kernel(rank, thread, launch, sides));
        }
        if self.leaves {
            let left = peers(rank, self.size).map(|peer| Post {
                word: self.gone(peer, rank),
                flag: GONE,
            });
            program.extend(left.map(posts));
        }
        program
    }

    fn scenario(self, calls: &[Calls]) -> Scenario {
        let threads = |rank| (0..self.threads(rank)).map(move |thread| (rank, thread));
        let all = (0..self.size).flat_map(threads);
        let programs = all
            .map(|(rank, thread)| self.program(rank, thread, &calls[rank]))
            .collect();
        Scenario::new(self.words(), 0, programs)
    }
}

/// Ranks that make calls, and perhaps say when they leave.
pub fn scenario(shape: Shape, calls: &[Calls], leaves: bool, without: Without) -> Scenario {
    let is_both = |call: &Call| call.sends.is_some() && call.receives.is_some();
    let group = Group {
        size: calls.len(),
        shape,
        apart: calls.iter().flatten().any(is_both) && without != Without::AtOnce,
        leaves,
        without,
    };
    group.scenario(calls)
}

/// A word of piece `n` as it travels. Each of its lanes says where it comes from.
fn packed(n: usize, from: usize) -> u64 {
    let lane = (value(n as u32, from) as u32).to_ne_bytes();
    Sentinel::pack(&[lane, lane].concat(), 0)
}

fn compare(rank: usize, word: u64, n: usize, from: usize) -> Result<(), Fault> {
    let lane = |bytes: [u8; 8]| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into();
    match Sentinel::unpack(word).map_or(0, lane) {
        got if word == packed(n, from) && got != 0 => Ok(()),
        got => Err(wrong(rank, got, value(n as u32, from))),
    }
}
