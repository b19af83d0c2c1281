//! The waiting protocols of Brigade, written once over a small memory trait.
//!
//! A *machine* ([`FlagBarrier`], [`CreditRing`], [`Fifo`], [`Packets`], [`Sentinel`], [`AbortCell`], [`ResetGate`], [`RollCall`]) is
//! arithmetic: it says which [`Post`]s a rank makes and which [`Wait`]s it holds, as data. [`post`] and [`wait`] carry them
//! out on anything that is a [`Memory`]: std atomics shared by threads here ([`Words`]), a model checker's atomics in
//! tests, and the same layout in CUDA in `kernels/sync.cuh`. So what is checked is what runs.
//!
//! [`Layout`] says where the machines of a communicator have their words, and where its data lies: the same in memory of
//! the host and of a GPU.
//!
//! Rules that every wait follows: it is bounded by a [`Budget`]; it compares wrap-safe; counters only grow and no flag
//! is cleared between calls; a [`Flag`] carries generation and signature, so that a peer in another call is noticed.

mod abort;
mod barrier;
mod bell;
mod carried;
mod escaped;
mod exchanges;
mod fifo;
mod flag;
mod layout;
mod memory;
mod packet;
mod reset;
mod ring;
mod roll;
mod rotation;
mod sentinel;
mod wait;

pub use abort::AbortCell;
pub use barrier::FlagBarrier;
pub use bell::Bell;
pub use exchanges::Exchanges;
pub use fifo::{Fifo, FifoReceiver, FifoSender};
pub use flag::{Flag, Verdict, Want};
pub use layout::{Area, Layout};
pub use memory::{BELL_WORDS, Memory, Word, Words};
pub use packet::Packets;
pub use reset::ResetGate;
pub use ring::{CreditRing, HALVES, Half, Role, Uses};
pub use roll::{Called, RollCall};
pub use rotation::{BUFFERS, Rotation, Turnover};
pub use sentinel::{Sentinel, Shot};
pub use wait::{Budget, Deadline, Post, Stop, Wait, post, wait};
