//! Plans of a group that goes on without some of its ranks.

use crate::{Table, Topology, plan, reason};
use brigade_device::{Absent, Call, CombineCall, DispatchCall, Plan, Reason, Transport};

/// As [`plan`], in a group where these ranks are absent: calls with experts, which then go one-sided or by low latency, and those in
/// which ranks just meet.
///
/// # Errors
/// As [`plan`]; [`ABSENT_RANKS`](reason::ABSENT_RANKS) and [`ABSENT_ALIVE`](reason::ABSENT_ALIVE).
pub fn plan_without(
    absent: Absent,
    call: &Call,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    if absent.is_empty() {
        return plan(call, topology, table);
    }
    check(absent, call)?;
    if matches!(call, Call::Dispatch(c) if c.gathered) {
        return Err(reason::absent_ids(absent));
    }
    let one_sided = |choice: Option<Transport>, by: &dyn Fn(Option<Transport>) -> Call| match choice
    {
        None | Some(Transport::OneSided) => Ok(by(Some(Transport::OneSided))),
        Some(other) => Err(reason::absent_by(other, absent)),
    };
    let call = match call {
        Call::Dispatch(c) => one_sided(c.choice, &|choice| {
            Call::Dispatch(DispatchCall {
                choice,
                ..c.clone()
            })
        })?,
        Call::Combine(c) => one_sided(c.choice, &|choice| {
            Call::Combine(CombineCall {
                choice,
                ..c.clone()
            })
        })?,
        other => other.clone(),
    };
    plan(&call, topology, table)
}

/// Whether a call can be made without these ranks.
///
/// # Errors
/// Why not.
pub fn check(absent: Absent, call: &Call) -> Result<(), Reason> {
    if absent.is_empty() {
        return Ok(());
    }
    match call {
        Call::Barrier | Call::Close | Call::Dispatch(_) | Call::Combine(_) => Ok(()),
        Call::LowLatencyDispatch(_) | Call::LowLatencyCombine(_) => {
            let alive = absent.perhaps_alive();
            match alive.is_empty() {
                true => Ok(()),
                false => Err(reason::absent_alive(alive)),
            }
        }
        other => Err(reason::absent_ranks(absent, other.operation())),
    }
}
