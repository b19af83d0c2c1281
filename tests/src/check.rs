//! Comparisons: by tolerance against an f64 oracle, or bit for bit.

use brigade_device::{DataType, Error, FaultKind, FaultRecord, Plan, Reason};

/// Relative Frobenius error that a result of this type may have.
pub fn tolerance(dtype: DataType) -> f64 {
    match dtype {
        DataType::F16 => 1e-3,
        DataType::BF16 => 4e-3,
        _ => 1e-5,
    }
}

/// How far a single element may be off, in tolerances of the mean magnitude: far less than a lost or swapped element.
const ELEMENT_TOLERANCES: f64 = 16.0;

/// Frobenius norm.
pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// What is wrong with `got`, if anything is. `parts` is the norm of what was added up to get it, where that was rounded
/// too: if parts cancel, their rounding does not; and where there are few elements, both may well be off to the same side.
///
/// # Errors
/// What is wrong.
pub fn compare(got: &[f64], want: &[f64], tolerance: f64, parts: f64) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{} elements instead of {}", got.len(), want.len()));
    }
    let size = norm(want) + parts;
    let mean = size / (want.len().max(1) as f64).sqrt();
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let off = (g - w).abs();
        let allowed = ELEMENT_TOLERANCES * tolerance * mean.max(w.abs());
        if off.is_nan() || off > allowed {
            return Err(format!("element {i} of {}: {g} instead of {w}", got.len()));
        }
    }
    let off: Vec<_> = got.iter().zip(want).map(|(g, w)| g - w).collect();
    let error = norm(&off);
    if error <= tolerance * size {
        Ok(())
    } else {
        Err(format!(
            "relative error {:e}, allowed {tolerance:e}",
            error / size
        ))
    }
}

/// Asserts that `got` is `want`, as far as `dtype` can tell.
///
/// # Panics
/// If it is not.
#[track_caller]
pub fn assert_close(got: &[f64], want: &[f64], dtype: DataType, what: &str) {
    assert_sum_close(got, want, dtype, 0.0, what);
}

/// As [`assert_close`], for a sum of parts of this norm.
///
/// # Panics
/// If it is not.
#[track_caller]
pub fn assert_sum_close(got: &[f64], want: &[f64], dtype: DataType, parts: f64, what: &str) {
    if let Err(why) = compare(got, want, tolerance(dtype), parts) {
        panic!("{what}: {why}");
    }
}

/// Asserts that bytes are the same, and names the first element that is not.
///
/// # Panics
/// If they differ.
#[track_caller]
pub fn assert_bits(got: &[u8], want: &[u8], dtype: DataType, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: bytes");
    let size = dtype.bytes();
    // All at once first: element by element takes many times as long.
    let differs = || {
        (0..got.len())
            .step_by(size)
            .find(|&i| got[i..i + size] != want[i..i + size])
    };
    if got != want
        && let Some(i) = differs()
    {
        panic!(
            "{what}: element {} of {}: {:02x?} instead of {:02x?}",
            i / size,
            got.len() / size,
            &got[i..i + size],
            &want[i..i + size]
        );
    }
}

/// Whether every element says that nobody may trust it: a NaN, or all ones for integers.
pub fn is_poisoned(dtype: DataType, bytes: &[u8]) -> bool {
    match dtype {
        DataType::F32 | DataType::F16 | DataType::BF16 => crate::matrix::to_f32(dtype, bytes)
            .iter()
            .all(|x| x.is_nan()),
        DataType::F8E4M3 => bytes.iter().all(|b| b & 0x7F == 0x7F),
        _ => bytes.iter().all(|&b| b == 0xFF),
    }
}

/// The fault that a call ended with.
///
/// # Panics
/// If it ended otherwise.
#[track_caller]
pub fn expect_fault<T>(result: Result<T, Error>, what: &str) -> FaultRecord {
    match result {
        Err(Error::Fault(record)) => record,
        Err(other) => panic!("{what}: {other} instead of a fault"),
        Ok(_) => panic!("{what}: no fault"),
    }
}

/// Asserts the kind of a fault.
///
/// # Panics
/// If it is another one.
#[track_caller]
pub fn assert_kind(record: &FaultRecord, kind: FaultKind, what: &str) {
    assert!(record.kind == kind, "{what}: {record}, wanted {kind:?}");
}

/// The code of the reason why a call is not supported.
///
/// # Panics
/// If it ended otherwise.
#[track_caller]
pub fn expect_unsupported<T>(result: Result<T, Error>, what: &str) -> &'static str {
    match result {
        Err(Error::Unsupported(Reason { code, .. })) => code,
        Err(other) => panic!("{what}: {other} instead of a reason"),
        Ok(_) => panic!("{what}: done, though it is not supported"),
    }
}

/// The field that a call was refused for.
///
/// # Panics
/// If it ended otherwise.
#[track_caller]
pub fn expect_invalid<T>(result: Result<T, Error>, what: &str) -> &'static str {
    match result {
        Err(Error::Invalid { field, .. }) => field,
        Err(other) => panic!("{what}: {other} instead of an invalid field"),
        Ok(_) => panic!("{what}: done, though a field is wrong"),
    }
}

/// The overlap part of a plan.
///
/// # Panics
/// If it is another kind of plan.
#[track_caller]
pub fn overlap_of(plan: &Plan) -> &brigade_device::OverlapPlan {
    match plan {
        Plan::GatherLinear(p) | Plan::LinearReduceScatter(p) => p,
        other => panic!("{other:?} is no plan of a linear"),
    }
}
