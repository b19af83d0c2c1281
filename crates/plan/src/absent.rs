//! Plans of a group that goes on without some of its ranks.

use crate::{Table, Topology, plan, reason, told};
use brigade_device::{Absent, Call, CombineCall, DispatchCall, Plan, Reason, Transport};
use std::borrow::Cow;

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
    let call = without(absent, call)?;
    plan(&call, topology, table)
}

/// As [`told`], of such a group.
///
/// # Errors
/// As [`plan_without`].
pub fn told_without(
    absent: Absent,
    call: &Call,
    topology: &Topology,
    table: &Table,
) -> Result<String, Reason> {
    let call = without(absent, call)?;
    let told = told(&call, topology, table)?;
    Ok(match absent.is_empty() {
        true => told,
        false => format!("{told}; without ranks {absent}"),
    })
}

/// What is made of a call where ranks are absent.
fn without(absent: Absent, call: &Call) -> Result<Cow<'_, Call>, Reason> {
    if absent.is_empty() {
        return Ok(Cow::Borrowed(call));
    }
    check(absent, call)?;
    if matches!(call, Call::Dispatch(c) if c.gathered) {
        return Err(reason::absent_ids(absent));
    }
    let one_sided = |choice: Option<Transport>| match choice {
        None | Some(Transport::OneSided) => Ok(Some(Transport::OneSided)),
        Some(other) => Err(reason::absent_by(other, absent)),
    };
    Ok(match call {
        Call::Dispatch(c) => Cow::Owned(Call::Dispatch(DispatchCall {
            choice: one_sided(c.choice)?,
            ..c.clone()
        })),
        Call::Combine(c) => Cow::Owned(Call::Combine(CombineCall {
            choice: one_sided(c.choice)?,
            ..c.clone()
        })),
        other => Cow::Borrowed(other),
    })
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
