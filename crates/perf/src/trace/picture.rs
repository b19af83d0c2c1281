//! Spans of ranks as a Chrome trace, and drawn. The benchmarks of the host draw with this file too, so it knows no device.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// Spans of one rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct Spans {
    pub rank: usize,
    pub list: Vec<Bar>,
}

/// One of them, in microseconds of a clock that begins where the picture does.
#[derive(Debug, Serialize, Deserialize)]
pub struct Bar {
    /// Which row it is in: one of [`STREAMS`].
    pub stream: String,
    /// A slice's is named after its phase, with the slice's number behind.
    pub name: String,
    pub start: f64,
    pub end: f64,
}

impl Bar {
    fn took(&self) -> f64 {
        (self.end - self.start).max(0.0)
    }

    /// Which slice it is a phase of, if it is one's.
    fn slice(&self) -> Option<usize> {
        let number = self.name.strip_prefix(self.stream.as_str())?;
        number.trim_start().parse().ok()
    }

    /// In its row, whose colour is that of spans of no slice. Those of slices have colours of their own, and their number where there is
    /// room, so that one can be followed from row to row.
    fn drawn(&self, longest: f64, y: f64, colour: &str) -> String {
        let took = self.took();
        let (x, width) = (LEFT + self.start / longest * WIDTH, took / longest * WIDTH);
        let slice = self.slice();
        let colour = slice.map_or(colour, |slice| SLICES[slice % SLICES.len()]);
        let mut text = format!(
            "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\" \
             stroke=\"white\" stroke-width=\"0.5\"><title>{}: {took:.1} us</title></rect>\n",
            ROW - 3.0,
            self.name
        );
        if let Some(slice) = slice.filter(|_| width >= NUMBER) {
            text += &format!(
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{slice}</text>\n",
                x + width / 2.0,
                y + 11.5
            );
        }
        text
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

/// Colours of slices in turn, in whichever row they are.
const SLICES: [&str; 8] = [
    "#7aa6e8", "#f2a65e", "#8fd18a", "#e88b8b", "#b79ad6", "#c9a57a", "#e6a1d0", "#b5b5b5",
];

/// How wide a slice's number is.
const NUMBER: f64 = 14.0;

const LEFT: f64 = 130.0;
const WIDTH: f64 = 1000.0;
const ROW: f64 = 18.0;

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

/// The same as a picture, up to the last span of any rank: a row for each stream of a rank.
pub fn svg(title: &str, ranks: &[Spans]) -> String {
    let ends = ranks.iter().flat_map(|r| r.list.iter().map(|s| s.end));
    let longest = ends.fold(1.0, f64::max);
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
        LEFT + WIDTH + 40.0
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
                text += &s.drawn(longest, y, colour);
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

    fn bar(stream: &str, name: &str, (start, end): (f64, f64)) -> Bar {
        Bar {
            stream: stream.to_owned(),
            name: name.to_owned(),
            start,
            end,
        }
    }

    #[test]
    fn spans_are_drawn_where_they_are() {
        let list = vec![
            bar("compute", "multiply", (0.0, 50.0)),
            bar("copy", "0 from 0 to 1", (50.0, 100.0)),
        ];
        // As another process gets them.
        let sent = serde_json::to_vec(&Spans { rank: 0, list }).unwrap();
        let ranks = [serde_json::from_slice(&sent).unwrap()];
        let picture = svg("two spans", &ranks);
        assert!(
            picture.contains("x=\"130.0\" y=\"40\" width=\"500.0\" height=\"15\" fill=\"#4878d0\""),
            "{picture}"
        );
        assert!(
            picture.contains("x=\"630.0\" y=\"58\" width=\"500.0\" height=\"15\" fill=\"#ee854a\""),
            "{picture}"
        );
        assert_eq!(chrome(&ranks)["traceEvents"][1]["dur"], 50.0);
    }

    #[test]
    fn a_slice_has_its_number_and_one_colour_in_all_rows() {
        let list = vec![
            bar("collect", "collect 9", (0.0, 40.0)),
            bar("add", "add 9", (40.0, 40.5)),
            bar("collect", "collect 10", (40.0, 80.0)),
            bar("diffuse", "diffuse 9", (41.0, 100.0)),
        ];
        let picture = svg("two slices", &[Spans { rank: 2, list }]);
        let coloured = |slice: usize| {
            let fill = format!("fill=\"{}\"", SLICES[slice % SLICES.len()]);
            picture.matches(&fill).count()
        };
        assert_eq!((coloured(9), coloured(10)), (3, 1), "{picture}");
        // There is no room for one on the short one.
        let numbers = |slice: &str| picture.matches(&format!(">{slice}</text>")).count();
        assert_eq!((numbers("9"), numbers("10")), (2, 1), "{picture}");
        assert!(picture.contains(">rank 2 diffuse</text>"), "{picture}");
    }
}
