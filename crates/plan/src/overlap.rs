//! What gather-linear and its twin have in common.
//!
//! Reasons are looked for in a fixed order, and the first one counts: pieces, one rank, group, scheme, layout, engine,
//! capacity, and, where nothing is forced, whether it pays.

use crate::{Topology, crossover::Crossovers, reason, ring::Order, rows};
use brigade_device::{DataType, LinearCall, OverlapMode, OverlapPlan, QScheme, Reason, SumOrder};

/// Most pieces that [`OverlapMode::Chunked`] cuts a chunk into.
pub const MAX_PIECES: u16 = 16;

/// The mode, and why it is another than the one asked for. `fits(forced)` has the operation's own conditions.
pub(crate) fn choose(
    call: &LinearCall,
    topology: &Topology,
    preferred: OverlapMode,
    fits: impl FnOnce(bool) -> Result<(), Reason>,
) -> Result<(OverlapMode, Option<Reason>), Reason> {
    check_rows(&call.rows, topology)?;
    if let Some(OverlapMode::Chunked { pieces }) = call.choice
        && !(1..=MAX_PIECES).contains(&pieces)
    {
        return Err(reason::pieces(pieces));
    }
    if call.choice == Some(OverlapMode::Off) {
        return Ok((OverlapMode::Off, None));
    }
    // Alone it does not overlap either, but who wants tiles wants their bits.
    if topology.group.size <= 1 && call.choice != Some(OverlapMode::Tiles) {
        return Ok((OverlapMode::Off, Some(reason::single_rank())));
    }
    let mode = overlappable(call, topology).and_then(|()| match call.choice {
        Some(mode) if topology.engines.overlaps(mode) => Ok(mode),
        Some(mode) => Err(reason::no_engine(mode)),
        None => available(topology, preferred),
    });
    let fitting = mode.and_then(|mode| fits(call.choice.is_some()).map(|()| mode));
    match fitting {
        Ok(mode) => Ok((mode, None)),
        Err(why) if call.choice.is_none() => Ok((OverlapMode::Off, Some(why))),
        Err(why) => Err(why),
    }
}

/// Conditions that no configuration can change.
fn overlappable(call: &LinearCall, topology: &Topology) -> Result<(), Reason> {
    if !topology.group.mode.overlaps() {
        return Err(reason::group_mode(topology.group.mode));
    }
    match call.scheme {
        QScheme::None | QScheme::Int8PerToken | QScheme::Fp8PerTensor => {}
        other => return Err(reason::scheme(other)),
    }
    if call.transpose_a {
        return Err(reason::transposed());
    }
    if call.inner.is_some() {
        return Err(reason::three_dimensional());
    }
    Ok(())
}

/// The preferred mode if the backend has it, else another one that it has.
fn available(topology: &Topology, preferred: OverlapMode) -> Result<OverlapMode, Reason> {
    if preferred == OverlapMode::Off {
        return Err(reason::tuned_off());
    }
    let in_range = |mode: OverlapMode| match mode {
        OverlapMode::Chunked { pieces } => OverlapMode::Chunked {
            pieces: pieces.clamp(1, MAX_PIECES),
        },
        other => other,
    };
    [
        in_range(preferred),
        instead(preferred),
        OverlapMode::Chunked { pieces: 2 },
    ]
    .into_iter()
    .find(|&mode| topology.engines.overlaps(mode))
    .ok_or_else(|| reason::no_engine(preferred))
}

/// Bytes that rows of tiles are aligned to.
const TILE_BYTES: usize = 16;

/// Greatest K whose sums of products of int8 stay in 32 bits.
const LONGEST_INT8: usize = (1 << 17) - 1;

/// Whether the rows can be multiplied in [`OverlapMode::Tiles`]: floats of 16 bits, and, if `quantized` may come, rows of 8 bits with results of 16.
pub(crate) fn in_tiles(call: &LinearCall, quantized: bool) -> Result<(), Reason> {
    let half = |dtype| matches!(dtype, DataType::F16 | DataType::BF16);
    let types = match call.scheme {
        QScheme::None => half(call.input) && call.output == call.input,
        QScheme::Int8PerToken => quantized && half(call.output) && call.k <= LONGEST_INT8,
        QScheme::Fp8PerTensor => quantized && half(call.output),
        _ => false,
    };
    if types && call.k > 0 && call.k.is_multiple_of(TILE_BYTES / call.input.bytes()) {
        return Ok(());
    }
    Err(reason::tiles(call))
}

/// What comes closest to a mode that cannot be had.
pub(crate) const fn instead(mode: OverlapMode) -> OverlapMode {
    match mode {
        OverlapMode::Tiles => OverlapMode::Chunked { pieces: 1 },
        _ => OverlapMode::Ring,
    }
}

/// Rows of a chunk from which on the twin's parts travel in two pieces where products are of tiles.
const TWO_PIECES: usize = 1024;

/// Pieces in which parts of a twin's chunks travel where products are of tiles: own tiles end with what others made of the same rows, and the first of
/// them must not wait until all of it has come. The same on all ranks, by the signed rows.
pub fn twin_pieces(rows: &[usize]) -> u16 {
    let most = rows.iter().max().copied().unwrap_or(0);
    if most < TWO_PIECES { 1 } else { 2 }
}

/// What is left of a plan of [`OverlapMode::Tiles`] on a rank that cannot do it, because of what is its own: how its weight is stored, its C and
/// adapters, addresses, other work on its GPU. The signed call has none of that, and ranks may differ in it, since rows travel alike. So the rank
/// multiplies chunk by chunk, in as many pieces as come of each, and its plan says so and why, unless tiles were forced.
///
/// # Errors
/// `why`, where tiles were forced.
pub fn without_tiles(
    plan: &mut OverlapPlan,
    pieces: u16,
    forced: bool,
    why: Reason,
) -> Result<(), Reason> {
    if forced {
        return Err(why);
    }
    plan.mode = OverlapMode::Chunked { pieces };
    plan.instead_of = Some(why);
    Ok(())
}

/// Bytes of rows that a gather-linear moves.
pub(crate) fn gathered_bytes(call: &LinearCall) -> usize {
    bytes(&[call.total_rows(), call.k, call.input.bytes()])
}

/// Bytes of sums that its twin moves.
pub(crate) fn scattered_bytes(call: &LinearCall) -> usize {
    bytes(&[call.total_rows(), call.n, call.output.bytes()])
}

/// What a rank multiplies in a call, on the mean of all ranks, which plan by the same numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    /// Elements of the product.
    pub(crate) outputs: usize,
    /// One for each of them and of the inner dimension.
    pub(crate) multiplications: usize,
}

impl Product {
    /// Of a gather-linear: all rows, by the columns of one rank.
    pub(crate) fn gathered(call: &LinearCall) -> Self {
        Self::of(call, call.n.div_ceil(call.rows.len().max(1)), call.k)
    }

    /// Of its twin: by all columns, over one rank's part of the inner dimension.
    pub(crate) fn scattered(call: &LinearCall) -> Self {
        Self::of(call, call.n, call.k.div_ceil(call.rows.len().max(1)))
    }

    fn of(call: &LinearCall, columns: usize, inner: usize) -> Self {
        let outputs = call.total_rows().saturating_mul(columns);
        Self {
            outputs,
            multiplications: outputs.saturating_mul(inner),
        }
    }
}

/// Whether so few are worth overlapping, when nothing forces it.
pub(crate) fn pays(
    call: &LinearCall,
    topology: &Topology,
    (travels_bytes, product): (usize, Product),
    crossovers: &Crossovers,
) -> Result<(), Reason> {
    if call.total_rows() == 0 || call.k == 0 || call.n == 0 {
        return Err(reason::empty(call));
    }
    let crossover = crossovers.of(call.scheme);
    let Some(least) = crossover.least else {
        return Err(reason::never_paid(&crossover.source));
    };
    let have = least.had(product, travels_bytes / topology.group.size);
    if have.count() >= least.count() {
        return Ok(());
    }
    Err(reason::too_small(have, least, &crossover.source))
}

pub(crate) fn finish(
    call: &LinearCall,
    mode: OverlapMode,
    order: Order,
    instead_of: Option<Reason>,
) -> OverlapPlan {
    OverlapPlan {
        mode,
        offsets: rows::offsets(&call.rows),
        order,
        sums: SumOrder::Flat,
        instead_of,
    }
}

/// One count for each rank, with a sum that does not overflow.
pub(crate) fn check_rows(rows: &[usize], topology: &Topology) -> Result<(), Reason> {
    brigade_device::check_rows("rows_per_rank", rows, topology.group.size)
        .map(drop)
        .map_err(|e| reason::rows(&e))
}

/// A product of sizes; one too great to count is too great for every region.
pub(crate) fn bytes(sizes: &[usize]) -> usize {
    if sizes.contains(&0) {
        return 0;
    }
    sizes.iter().fold(1, |a, &b| a.saturating_mul(b))
}
