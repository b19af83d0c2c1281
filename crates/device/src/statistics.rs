//! What calls with experts add to tensors of the caller's, in the order of the stream and in replays of graphs too: statistics over many
//! calls, after DeepEP's cumulative counts and its costs of waiting.

use crate::{DataType, Error, MemoryType, Result, ViewMut, params::resident};

/// What a receive of a low-latency exchange adds up, and where. A dispatch has the same fields.
#[derive(Debug, Default)]
pub struct Statistics<'a> {
    /// i64 `[local experts]`: rows that each expert of this rank got.
    pub totals: Option<ViewMut<'a>>,
    /// i64 `[ranks]`: how long this rank waited for each other one in this receive, in nanoseconds. Its own entry stays as it is. Waits for
    /// several ranks go on side by side, so their sum may be longer than the call.
    pub waits: Option<ViewMut<'a>>,
}

/// Checks where waits for each of `size` ranks are added up, beside what lies in `memory`.
pub(crate) fn check_waits(
    waits: Option<&ViewMut<'_>>,
    size: usize,
    memory: MemoryType,
) -> Result<()> {
    let Some(waits) = waits else {
        return Ok(());
    };
    if waits.dtype() != DataType::I64 {
        let want = DataType::I64;
        return Err(Error::invalid("waits.dtype", waits.dtype(), want));
    }
    if waits.shape().dims() != [size] {
        let want = format!("[{size}]");
        return Err(Error::invalid("waits.shape", waits.shape(), want));
    }
    waits.check_writable()?;
    resident("waits", Some(waits.as_view().memory()), memory)
}
