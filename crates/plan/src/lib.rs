//! Pure decisions of Brigade: chunking, ring schedules, the choice of an algorithm or overlap mode.
//!
//! [`plan`] is a function of the signed call and of voted state, and of nothing else: no clock, no environment, no
//! device. Two ranks that pass the same call, and voted on the same [`Topology`] and [`Table`], get the same plan; only
//! the order in which a rank walks the chunks follows from its number.
//!
//! - [`crossover`]: from which size on overlap pays on which GPUs, as measured.
//! - [`tuned`]: which all-reduce is quickest on which GPUs, as measured.
//! - [`transports`]: which way rows go to experts on which GPUs, as measured.
//! - [`Entries`]: such figures that users measured on GPUs of theirs.
//! - [`rows`]: ragged chunks and the pieces of a chunk.
//! - [`ring`]: who multiplies, sends and receives which chunk when.
//! - [`gathered`]: where the rows of all ranks lie.
//! - [`routes`]: which rows go to which experts; [`dispatch`] and [`combine`]: where they lie on the way, and [`records`] if they are
//!   pushed.
//! - [`norm`]: how a sum with a norm is launched.
//! - [`pushed`]: how sums, copies and shares are cut where they are pushed.
//! - [`reason`]: the code of every reason why a plan is not another.
//! - [`experts`]: what calls with experts need and do, in bytes and in words.
//! - [`absent`]: what is done in a group that goes on without some of its ranks.
//! - [`fifo`]: queues between ranks; [`low_latency`]: places of rows that are sent without waiting; [`logfmt`]: rows of fewer bits.
//! - [`hierarchical`]: slices and phases of collectives across machines.
//! - [`moved`]: the bytes that each schedule makes a rank move, for traffic counters and tests.

pub mod absent;
mod all_gather;
mod all_reduce;
mod all_to_all;
mod all_to_all_rows;
mod broadcast;
pub mod combine;
pub mod crossover;
pub mod dispatch;
mod entries;
pub mod experts;
pub mod fifo;
mod gather_linear;
pub mod gathered;
pub mod hierarchical;
pub mod known;
mod linear_reduce_scatter;
pub mod logfmt;
pub mod low_latency;
pub mod moved;
pub mod norm;
mod overlap;
pub mod pushed;
pub mod reason;
pub mod records;
mod reduce_scatter;
pub mod ring;
pub mod routes;
pub mod rows;
mod scratch;
mod table;
mod told;
mod topology;
pub mod transports;
pub mod tuned;

pub use entries::Entries;
pub use overlap::{MAX_PIECES, twin_pieces, without_tiles};
pub use table::{Copies, Table};
pub use told::told;
pub use topology::{Engines, Topology};

use brigade_device::{Call, Plan, Reason};

/// Decides how `call` is carried out, or says why it cannot be.
///
/// # Errors
/// A [`Reason`] with one of the codes of [`reason`]. Where nothing was forced, an overlap that cannot be or does not pay
/// is no error: the plan is off, and says why.
pub fn plan(call: &Call, topology: &Topology, table: &Table) -> Result<Plan, Reason> {
    match call {
        Call::GatherLinear(c) => gather_linear::plan(c, topology, table),
        Call::LinearReduceScatter(c) => linear_reduce_scatter::plan(c, topology, table),
        Call::AllReduce {
            elements,
            dtype,
            output,
            choice,
            ..
        } => all_reduce::plan(*elements, (*dtype, *output), *choice, topology, table),
        Call::AllReduceNorm {
            rows,
            hidden,
            dtype,
            choice,
            ..
        } => norm::plan((*rows, *hidden), *dtype, *choice, topology, table),
        Call::AllGather {
            rows,
            row_len,
            dtype,
        } => all_gather::plan(rows, *row_len, *dtype, topology, table),
        Call::ReduceScatter {
            rows,
            row_len,
            dtype,
            output,
            ..
        } => reduce_scatter::plan(rows, *row_len, (*dtype, *output), topology, table),
        Call::Broadcast {
            elements,
            dtype,
            root,
        } => broadcast::plan(*elements, *dtype, *root, topology, table),
        Call::AllToAll { dtype, .. } => all_to_all::plan(*dtype, topology),
        Call::Dispatch(c) => dispatch::plan(c, topology, table),
        Call::Combine(c) => combine::plan(c, topology, table),
        Call::AllToAllRows(c) => all_to_all_rows::plan(c, topology),
        Call::LowLatencyDispatch(c) => low_latency::dispatch(c, topology),
        Call::LowLatencyCombine(c) => low_latency::combine(c, topology),
        Call::Barrier | Call::Register { .. } | Call::Deregister { .. } | Call::Close => {
            Ok(Plan::Copy {
                piece_elements: 0,
                pieces: 0,
                pushed: None,
            })
        }
        other => Err(reason::unknown(other.operation())),
    }
}
