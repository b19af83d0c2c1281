//! Calls of gather-linear and its twin that differ in one thing.

use crate::ops::{Linear, Op};
use brigade_device::{DataType, OverlapMode, QScheme};
use brigade_plan::Engines;

/// Rows in every mode that plans have by themselves, and what else all ranks must have in common.
pub(super) fn mismatches(engines: Engines) -> Vec<(String, Op, Op)> {
    let ring = Linear::new(3, 6, Some(OverlapMode::Ring));
    let scheme = |scheme| ring.with(|l| l.scheme = scheme);
    let (int8, fp8) = (scheme(QScheme::Int8PerToken), scheme(QScheme::Fp8PerTensor));
    let mut pairs = vec![
        ("scheme", int8, fp8),
        (
            "output",
            ring,
            ring.with(|l| l.output = Some(DataType::BF16)),
        ),
        ("lora", ring, ring.with(|l| l.lora = true)),
    ];
    let mut rows = |name, choice| {
        let of = |rows| Linear::new(rows, 6, choice);
        pairs.push((name, of(3), of(4)));
    };
    rows("rows_auto", None);
    rows("rows_chunked", Some(OverlapMode::Chunked { pieces: 1 }));
    if engines.tiles {
        rows("rows_tiles", Some(OverlapMode::Tiles));
    }
    let both = |(name, one, other): (_, Linear, Linear)| {
        [
            (format!("gather_{name}"), one.gather(), other.gather()),
            (format!("twin_{name}"), one.scatter(), other.scatter()),
        ]
    };
    // As many elements of a row, and as many parts of sums, that are no more alike than others.
    let inner = |columns, inner| Linear::new(3, columns, None).with(|l| l.inner = Some(inner));
    let inner = [
        (
            "gather_inner".to_owned(),
            inner(6, 2).gather(),
            inner(4, 3).gather(),
        ),
        (
            "twin_inner".to_owned(),
            inner(6, 2).scatter(),
            inner(6, 3).scatter(),
        ),
    ];
    pairs.into_iter().flat_map(both).chain(inner).collect()
}
