//! A picture of what overlaps: spans of all ranks, as a Chrome trace and as an SVG.

use crate::ranks::{PATIENCE, Rank};
use anyhow::{Context, Result};
use brigade::cuda::{CudaDevice, Span};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{fs, path::Path, time::Duration};

/// Spans of one rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct Spans {
    rank: usize,
    list: Vec<Bar>,
}

/// One of them, in microseconds.
#[derive(Debug, Serialize, Deserialize)]
struct Bar {
    stream: String,
    name: String,
    start: f64,
    end: f64,
}

impl Spans {
    /// What a rank's GPU has recorded.
    pub fn new(rank: usize, recorded: &[Span]) -> Self {
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        let bar = |span: &Span| Bar {
            stream: span.stream.to_owned(),
            name: span.name.clone(),
            start: us(span.start),
            end: us(span.end),
        };
        Self {
            rank,
            list: recorded.iter().map(bar).collect(),
        }
    }
}

impl Bar {
    fn took(&self) -> f64 {
        (self.end - self.start).max(0.0)
    }
}

/// Rows of the picture for each rank, from top to bottom, and their colours; those that there are.
const STREAMS: [(&str, &str); 8] = [
    ("compute", "#4878d0"),
    ("copy", "#ee854a"),
    ("wait", "#bbbbbb"),
    ("reduce inside", "#4878d0"),
    ("collect", "#ee854a"),
    ("add", "#6acc64"),
    ("diffuse", "#d65f5f"),
    ("gather inside", "#956cb4"),
];

const LEFT: f64 = 120.0;
const WIDTH: f64 = 1000.0;
const ROW: f64 = 18.0;

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
    let mine = Spans::new(rank.number(), &device.spans(PATIENCE)?);
    let all = rank.share(&serde_json::to_vec(&mine)?)?;
    let read = |bytes: &Vec<u8>| Ok(serde_json::from_slice(bytes)?);
    all.iter().map(read).collect()
}

/// Writes the trace to this file, and the picture beside it, with .svg behind the name.
pub fn draw(path: &Path, title: &str, ranks: &[Spans]) -> Result<()> {
    let write = |path: &Path, text: String| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    write(path, chrome(ranks).to_string())?;
    let mut picture = path.as_os_str().to_owned();
    picture.push(".svg");
    write(Path::new(&picture), svg(title, ranks))
}

/// What `chrome://tracing` and Perfetto read.
pub fn chrome(ranks: &[Spans]) -> Value {
    let events: Vec<Value> = ranks
        .iter()
        .flat_map(|r| r.list.iter().map(move |s| (r.rank, s)))
        .map(|(rank, s)| {
            json!({
                "name": s.name, "ph": "X", "pid": rank, "tid": s.stream,
                "ts": s.start, "dur": s.took(),
            })
        })
        .collect();
    json!({ "traceEvents": events })
}

/// The same as a picture, from the first span of any rank to the last. Every rank's clock begins with its first span.
pub fn svg(title: &str, ranks: &[Spans]) -> String {
    let first = |r: &Spans| {
        let first = r.list.iter().map(|s| s.start).fold(f64::INFINITY, f64::min);
        if first.is_finite() { first } else { 0.0 }
    };
    let longest = ranks
        .iter()
        .flat_map(|r| r.list.iter().map(move |s| s.end - first(r)))
        .fold(1.0, f64::max);
    let has = |stream: &str| {
        ranks
            .iter()
            .any(|r| r.list.iter().any(|s| s.stream == stream))
    };
    let rows: Vec<_> = STREAMS.iter().filter(|(stream, _)| has(stream)).collect();
    let block = ROW * rows.len() as f64 + 10.0;
    let height = 50.0 + block * ranks.len() as f64 + 30.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"22\" font-size=\"14\">{title}</text>\n",
        LEFT + WIDTH + 20.0
    );
    for (i, r) in ranks.iter().enumerate() {
        let top = 40.0 + block * i as f64;
        for (row, (stream, colour)) in rows.iter().enumerate() {
            let y = top + ROW * row as f64;
            text += &format!(
                "<text x=\"10\" y=\"{}\">rank {} {stream}</text>\n",
                y + 12.0,
                r.rank
            );
            for s in r.list.iter().filter(|s| s.stream == *stream) {
                let (start, took) = (s.start - first(r), s.took());
                let (x, width) = (LEFT + start / longest * WIDTH, took / longest * WIDTH);
                text += &format!(
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\" \
                     stroke=\"white\" stroke-width=\"0.5\"><title>{}: {took:.1} us</title></rect>\n",
                    ROW - 3.0,
                    s.name
                );
            }
        }
    }
    let bottom = 40.0 + block * ranks.len() as f64 + 14.0;
    for part in 0..=10 {
        let x = LEFT + WIDTH * f64::from(part) / 10.0;
        let at = longest * f64::from(part) / 10.0;
        text +=
            &format!("<text x=\"{x}\" y=\"{bottom}\" text-anchor=\"middle\">{at:.0} us</text>\n");
    }
    text + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_drawn_where_they_are() {
        let span = |stream, from, to| Span {
            stream,
            name: format!("{from}"),
            start: Duration::from_micros(from),
            end: Duration::from_micros(to),
        };
        let recorded = [span("compute", 100, 150), span("copy", 150, 200)];
        // As another process gets them.
        let sent = serde_json::to_vec(&Spans::new(0, &recorded)).unwrap();
        let ranks = [serde_json::from_slice(&sent).unwrap()];
        let picture = svg("two spans", &ranks);
        assert!(
            picture.contains("x=\"120.0\" y=\"40\" width=\"500.0\""),
            "{picture}"
        );
        assert!(
            picture.contains("x=\"620.0\" y=\"58\" width=\"500.0\""),
            "{picture}"
        );
        assert_eq!(chrome(&ranks)["traceEvents"][1]["dur"], 50.0);
    }
}
