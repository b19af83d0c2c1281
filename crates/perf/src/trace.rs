//! A picture of what overlaps: spans of all ranks, as a Chrome trace and as an SVG.

mod picture;

pub use picture::{Bar, Spans, draw};

use crate::ranks::{PATIENCE, Rank};
use anyhow::Result;
use brigade::cuda::{CudaDevice, Span};
use std::time::Duration;

/// What a rank's GPU has recorded. Every rank's clock begins with its first span.
fn spans(rank: usize, recorded: &[Span]) -> Spans {
    let first = recorded.iter().map(|span| span.start).min();
    let us = |d: Duration| d.saturating_sub(first.unwrap_or_default()).as_secs_f64() * 1e6;
    let bar = |span: &Span| Bar {
        stream: span.stream.to_owned(),
        name: span.name.clone(),
        start: us(span.start),
        end: us(span.end),
    };
    Spans {
        rank,
        list: recorded.iter().map(bar).collect(),
    }
}

/// Spans of one call on every rank, behind some that are not recorded.
pub fn record(rank: &Rank, call: impl FnMut() -> brigade::Result<()>) -> Result<Vec<Spans>> {
    record_on(&rank.device, rank, call)
}

/// The same of a call on another device of the rank's GPU.
pub fn record_on(
    device: &CudaDevice,
    rank: &Rank,
    mut call: impl FnMut() -> brigade::Result<()>,
) -> Result<Vec<Spans>> {
    call()?;
    rank.on.sync(PATIENCE)?;
    rank.meet()?;
    // One call before the recorded one, so that the ranks' GPUs begin together.
    call()?;
    device.record_spans()?;
    call()?;
    let mine = spans(rank.number(), &device.spans(PATIENCE)?);
    let all = rank.share(&serde_json::to_vec(&mine)?)?;
    let read = |bytes: &Vec<u8>| Ok(serde_json::from_slice(bytes)?);
    all.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ranks_clock_begins_with_its_first_span() {
        let span = |stream, from, to| Span {
            stream,
            name: format!("{stream} 3"),
            start: Duration::from_micros(from),
            end: Duration::from_micros(to),
        };
        let all = spans(1, &[span("diffuse", 150, 200), span("collect", 100, 130)]);
        let list: Vec<_> = all.list.iter().map(|b| (b.start, b.end)).collect();
        assert_eq!(all.rank, 1);
        assert_eq!(list, [(50.0, 100.0), (0.0, 30.0)]);
    }
}
