//! Draws measured results: time over bytes or tokens, both logarithmic, a line for ours and one for everybody that was measured beside it.

use crate::workspace::Workspace;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Draw files of docs/results as pictures for the book: microseconds over bytes, or over tokens
///
/// Takes files whose rows have `bytes` and `us`, as `brigade-perf` writes them for collectives and sendrecv. A row's `choice`
/// says whose line its `us` belongs to. Every other time of a row (`nccl_us`), and every number in its object `peers`, is a
/// line too; a peer called `NAME, CHOICE` has the colour of that choice. Of files of `brigade-perf moe`, whose rows have `tokens`,
/// `total_us` is ours and `nccl_us` a line beside it. The same files give the same picture.
#[derive(Debug, Args)]
pub struct Chart {
    /// Files to draw
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Files of other runs, whose lines are drawn into every picture, dashed and named as such: experts by their transport
    #[arg(long, num_args = 1.., value_name = "FILE")]
    beside: Vec<PathBuf>,
    /// Folder for the pictures [default: docs/src/diagrams]
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

impl Chart {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let usual = || workspace.root.join("docs/src/diagrams");
        let folder = self.to.unwrap_or_else(usual);
        for file in &self.files {
            let drawn = picture(file, &self.beside).with_context(|| file.display().to_string())?;
            let name = file.with_extension("svg");
            let path = folder.join(name.file_name().unwrap_or_default());
            fs::write(&path, drawn).with_context(|| format!("writing {}", path.display()))?;
            println!("{}", path.display());
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn picture(file: &Path, beside: &[PathBuf]) -> Result<String> {
    let read = |file: &Path| -> Result<Value> {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        serde_json::from_str(&text).with_context(|| file.display().to_string())
    };
    let results = read(file)?;
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let over = Over::of(&results);
    let mut all = series(&results, over);
    for other in beside {
        let more = other_run(series(&read(other)?, over), &all);
        all.extend(more);
    }
    draw(&title(&stem, &results), &all, over)
}

/// What times are drawn over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Bytes,
    Tokens,
}

impl Over {
    /// Rows that have tokens and no bytes are of experts.
    fn of(results: &Value) -> Self {
        let row = &results["rows"][0];
        match row["bytes"].is_null() && row["tokens"].is_u64() {
            true => Self::Tokens,
            false => Self::Bytes,
        }
    }

    const fn field(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Tokens => "tokens",
        }
    }

    /// The time that is ours.
    const fn ours(self) -> &'static str {
        match self {
            Self::Bytes => "us",
            Self::Tokens => "total_us",
        }
    }

    /// Whether a field is somebody else's time. Those of experts have times of parts, too.
    fn peer(self, field: &str) -> Option<&str> {
        let peer = field.strip_suffix("_us")?;
        (self == Self::Bytes || peer == "nccl").then_some(peer)
    }

    fn told(self, at: u64) -> String {
        match self {
            Self::Bytes => size(at),
            Self::Tokens => at.to_string(),
        }
    }
}

/// Lines of another run, told apart from what was measured together. Ours are named after how rows travel there; whoever has a line
/// already needs no second one.
fn other_run(more: Vec<Series>, known: &[Series]) -> Vec<Series> {
    let is_new = |series: &Series| series.ours || known.iter().all(|k| k.name != series.name);
    let named = |series: Series| Series {
        name: match &series.transport {
            Some(transport) if series.ours => format!("{} {transport} (other run)", series.name),
            _ => format!("{} (other run)", series.name),
        },
        ours: false,
        ..series
    };
    more.into_iter().filter(is_new).map(named).collect()
}

/// The operation, which a file of results is named after, and where it was measured.
fn title(stem: &str, results: &Value) -> String {
    let operation = stem.split('.').next().unwrap_or(stem);
    let (meta, row) = (&results["meta"], &results["rows"][0]);
    let mut parts = vec![operation.to_owned()];
    parts.extend(row["dtype"].as_str().map(str::to_owned));
    if let (Some(gpu), Some(ranks)) = (meta["gpu"].as_str(), meta["ranks"].as_u64()) {
        parts.push(format!("{ranks} x {gpu}"));
    }
    if row["graph"] == true {
        parts.push("in CUDA graphs".to_owned());
    }
    parts.join(", ")
}

/// One line of the picture.
#[derive(Debug, PartialEq)]
struct Series {
    name: String,
    ours: bool,
    /// How its rows travel, of experts.
    transport: Option<String>,
    /// Microseconds of so many bytes or tokens.
    points: BTreeMap<u64, f64>,
}

/// Ours in the order in which they first come, then the others likewise.
fn series(results: &Value, over: Over) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    let mut add = |name: String, ours: bool, row: &Value, us: &Value| {
        // A logarithm has no place for others; what did not run has no time.
        let (Some(us), Some(at)) = (
            us.as_f64().filter(|&us| us > 0.0),
            row[over.field()].as_u64(),
        ) else {
            return;
        };
        let known = all.iter_mut().position(|s| s.name == name);
        let known = known.unwrap_or_else(|| {
            let transport = row["transport"].as_str().map(transport);
            all.push(Series {
                name,
                ours,
                transport,
                points: BTreeMap::new(),
            });
            all.len() - 1
        });
        // The rows of several choices repeat what was measured beside them.
        all[known].points.entry(at).or_insert(us);
    };
    for row in results["rows"].as_array().into_iter().flatten() {
        let Some(fields) = row.as_object() else {
            continue;
        };
        let name = match row["choice"].as_str() {
            None | Some("auto") => "Brigade".to_owned(),
            Some(choice) => format!("Brigade, {choice}"),
        };
        add(name, true, row, &row[over.ours()]);
        for (key, us) in fields {
            if let Some(peer) = over.peer(key).filter(|_| key != over.ours()) {
                add(peer.to_owned(), false, row, us);
            }
        }
        for (peer, us) in row["peers"].as_object().into_iter().flatten() {
            let name = peer.strip_suffix("_us").unwrap_or(peer).replace('_', " ");
            add(name, false, row, us);
        }
    }
    all.sort_by_key(|s| !s.ours);
    all
}

/// A transport, out of a plan in words.
fn transport(plan: &str) -> String {
    let name = match plan.split_once(", ") {
        Some((name, _)) => name,
        None => plan.split(' ').next().unwrap_or(plan),
    };
    // OneSided, as the command line has it.
    let mut told = String::new();
    for (i, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && i > 0 {
            told.push('-');
        }
        told.extend(letter.to_lowercase());
    }
    told.replace(' ', "-")
}

/// At least; long names need more.
const WIDTH: f64 = 780.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 580.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 350.0;

/// Where names begin, and about how wide a letter of them is.
const NAMES: f64 = RIGHT + 46.0;
const LETTER: f64 = 6.5;

/// Told apart by those who do not see all colours, too: Okabe and Ito, <https://jfly.uni-koeln.de/color/>.
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

const HEAD: &str = "<style>\n\
    .p{fill:#fbfaf7;stroke:#b9b4a8}.g{stroke:#e3dfd5}.s{fill:none;stroke-width:2}.o{stroke-dasharray:5 4}\n\
    text{font-family:system-ui,sans-serif;font-size:12px;fill:#1c1c1c}.b{font-size:14px;font-weight:600}\n\
    .m{text-anchor:middle}.r{text-anchor:end}\n\
    </style>\n";

/// A logarithmic axis between two values, which lie at two places.
struct Axis {
    values: [f64; 2],
    places: [f64; 2],
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        let [low, high] = self.values.map(f64::ln);
        let part = if high > low {
            (value.ln() - low) / (high - low)
        } else {
            0.5
        };
        self.places[0] + part * (self.places[1] - self.places[0])
    }
}

/// 1, 2 and 5 times the powers of ten, from the last that is at most `low` to the first that is at least `high`.
fn steps(low: f64, high: f64) -> Vec<f64> {
    let all: Vec<f64> = (-3..=9)
        .flat_map(|power| [1.0, 2.0, 5.0].map(|x| x * 10f64.powi(power)))
        .collect();
    let first = all.iter().rposition(|&x| x <= low).unwrap_or(0);
    let last = all.iter().position(|&x| x >= high);
    all[first..=last.unwrap_or(all.len() - 1)].to_vec()
}

/// Powers of two, twelve of them at most.
fn sizes(low: u64, high: u64) -> Vec<u64> {
    let powers: Vec<u64> = (0..63)
        .map(|n| 1 << n)
        .filter(|b| (low..=high).contains(b))
        .collect();
    let every = powers.len().div_ceil(12).max(1);
    powers.into_iter().step_by(every).collect()
}

fn size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 3] = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = UNITS.into_iter().find(|&(n, _)| bytes >= 1 << n);
    unit.map_or_else(
        || format!("{bytes} B"),
        |(n, unit)| format!("{} {unit}", bytes >> n),
    )
}

/// The colour of every line: what belongs to one choice has one colour.
fn colours(all: &[Series]) -> Vec<&'static str> {
    let mut known = Vec::new();
    let number = |series: &Series| {
        let choice = series.name.split_once(", ").map(|(_, c)| c.to_owned());
        let same = known.iter().position(|k| choice.is_some() && *k == choice);
        same.unwrap_or_else(|| {
            known.push(choice);
            known.len() - 1
        })
    };
    let numbers: Vec<usize> = all.iter().map(number).collect();
    numbers.iter().map(|n| COLOURS[n % COLOURS.len()]).collect()
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

fn draw(title: &str, all: &[Series], over: Over) -> Result<String> {
    let bytes = || all.iter().flat_map(|s| s.points.keys().copied());
    let us = || all.iter().flat_map(|s| s.points.values().copied());
    let (Some(least), Some(most)) = (bytes().min(), bytes().max()) else {
        anyhow::bail!("no row has {} and {}", over.field(), over.ours());
    };
    ensure!(
        all.iter().any(|s| s.ours),
        "no row has a time of ours, which is called {}",
        over.ours()
    );
    let levels = steps(us().fold(f64::INFINITY, f64::min), us().fold(0.0, f64::max));
    let x = Axis {
        values: [least as f64, most as f64],
        places: [LEFT, RIGHT],
    };
    let y = Axis {
        values: [levels[0], levels[levels.len() - 1]],
        places: [BOTTOM, TOP],
    };
    let title = escaped(title);
    let longest = all.iter().map(|s| s.name.chars().count()).max();
    let width = WIDTH.max((NAMES + LETTER * longest.unwrap_or(0) as f64).ceil());
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\" width=\"{width}\" role=\"img\" \
         aria-label=\"{title}\">\n<title>{title}</title>\n{HEAD}\
         <rect class=\"p\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n\
         <text class=\"b\" x=\"{LEFT}\" y=\"24\">{title}</text>\n",
        width - 1.0,
        HEIGHT - 1.0,
    );
    for level in levels {
        let at = y.place(level);
        text += &format!(
            "<path class=\"g\" d=\"M{LEFT} {at:.1} H{RIGHT}\"/><text class=\"r\" x=\"{}\" y=\"{:.1}\">{level}</text>\n",
            LEFT - 8.0,
            at + 4.0,
        );
    }
    for bytes in sizes(least, most) {
        let at = x.place(bytes as f64);
        text += &format!(
            "<path class=\"g\" d=\"M{at:.1} {TOP} V{BOTTOM}\"/><text class=\"m\" x=\"{at:.1}\" y=\"{}\">{}</text>\n",
            BOTTOM + 18.0,
            over.told(bytes),
        );
    }
    if over == Over::Tokens {
        text += &format!(
            "<text class=\"m\" x=\"{}\" y=\"{}\">tokens of a rank</text>\n",
            LEFT.midpoint(RIGHT),
            BOTTOM + 36.0
        );
    }
    text += &format!(
        "<text class=\"r\" x=\"{}\" y=\"{}\">us</text>\n",
        LEFT - 8.0,
        TOP - 10.0
    );
    for (i, (series, colour)) in all.iter().zip(colours(all)).enumerate() {
        let (style, unit) = (if series.ours { "s" } else { "s o" }, over.field());
        let name = escaped(&series.name);
        let places: Vec<_> = series
            .points
            .iter()
            .map(|(&bytes, &us)| (x.place(bytes as f64), y.place(us), bytes, us))
            .collect();
        let line: Vec<String> = places
            .iter()
            .map(|(x, y, ..)| format!("{x:.1},{y:.1}"))
            .collect();
        text += &format!(
            "<polyline class=\"{style}\" stroke=\"{colour}\" points=\"{}\"/>\n",
            line.join(" ")
        );
        for (x, y, bytes, us) in places {
            text += &format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}, {bytes} {unit}: {us} us</title></circle>\n"
            );
        }
        let (from, at) = (RIGHT + 16.0, TOP + 10.0 + 20.0 * i as f64);
        text += &format!(
            "<path class=\"{style}\" stroke=\"{colour}\" d=\"M{from} {at} h24\"/><text x=\"{}\" y=\"{}\">{name}</text>\n",
            NAMES,
            at + 4.0,
        );
    }
    Ok(text + "</svg>\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Two choices of which one does not run everywhere, NCCL, and somebody whose figures were put in by hand.
    fn results() -> Value {
        json!({
            "meta": { "gpu": "A&B", "ranks": 2 },
            "rows": [
                { "bytes": 1024, "dtype": "bf16", "graph": true, "choice": "auto", "us": 4.0, "us_p99": 5.0,
                  "nccl_us": 8.0, "peers": { "other": 16.0 }, "samples": { "ours": [4.0] } },
                { "bytes": 1024, "choice": "two-shot", "us": 10.0, "nccl_us": 8.0, "chain": { "alone_us": 3.0 } },
                { "bytes": 4096, "choice": "auto", "us": 5.0, "nccl_us": 10.0 },
                { "bytes": 4096, "choice": "two-shot", "plan": "it does not fit", "nccl_us": 10.0 },
            ],
        })
    }

    #[test]
    fn there_is_a_line_for_each_of_ours_and_each_peer() {
        let line = |name: &str, ours, points: &[(u64, f64)]| Series {
            name: name.to_owned(),
            ours,
            transport: None,
            points: points.iter().copied().collect(),
        };
        let wanted = [
            line("Brigade", true, &[(1024, 4.0), (4096, 5.0)]),
            line("Brigade, two-shot", true, &[(1024, 10.0)]),
            line("nccl", false, &[(1024, 8.0), (4096, 10.0)]),
            line("other", false, &[(1024, 16.0)]),
        ];
        assert_eq!(series(&results(), Over::Bytes), wanted);
    }

    #[test]
    fn points_lie_where_the_axes_say() {
        let results = results();
        let title = title("all-reduce.h200x2", &results);
        assert_eq!(title, "all-reduce, bf16, 2 x A&B, in CUDA graphs");
        let all = series(&results, Over::of(&results));
        let picture = draw(&title, &all, Over::Bytes).unwrap();
        assert_eq!(picture, draw(&title, &all, Over::Bytes).unwrap());
        // From 2 to 20 us on 306 units of height, from 1 KiB to 4 KiB on 520 of width.
        let at = |us: f64| BOTTOM - (us / 2.0).log10() * (BOTTOM - TOP);
        for [x, y] in [[60.0, at(4.0)], [580.0, at(5.0)], [580.0, at(10.0)]] {
            let point = format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\"");
            assert!(picture.contains(&point), "{point} in {picture}");
        }
        for tick in [">2</text>", ">20</text>", ">1 KiB</text>", ">2 KiB</text>"] {
            assert!(picture.contains(tick), "{tick} in {picture}");
        }
        assert!(picture.contains("2 x A&amp;B") && !picture.contains("A&B"));
        assert_eq!(picture.matches("<polyline").count(), 4);
        assert_eq!(picture.matches("s o\" stroke=\"#009e73\"").count(), 2);
    }

    #[test]
    fn what_belongs_to_one_choice_has_one_colour() {
        let all = [
            "Brigade, near",
            "Brigade",
            "Brigade, far",
            "nccl",
            "bound, far",
            "bound, near",
            "other",
        ];
        let all = all.map(|name| Series {
            name: name.to_owned(),
            ours: name.starts_with("Brigade"),
            transport: None,
            points: BTreeMap::from([(1024, 4.0)]),
        });
        assert_eq!(colours(&all), [0, 1, 2, 3, 2, 0, 4].map(|n| COLOURS[n]));
        let near = format!("stroke=\"{}\"", COLOURS[0]);
        let picture = draw("near and far", &all, Over::Bytes).unwrap();
        assert_eq!(picture.matches(&near).count(), 4);
    }

    #[test]
    fn files_that_hold_no_such_times_are_refused() {
        for (rows, why) in [
            (json!([]), "no row has bytes and us"),
            (json!([{ "m": 512, "us": 3.0 }]), "no row has bytes and us"),
            (
                json!([{ "bytes": 512, "nccl_us": 3.0 }]),
                "no row has a time of ours, which is called us",
            ),
        ] {
            let results = json!({ "rows": rows });
            let over = Over::of(&results);
            let refused = draw("nothing", &series(&results, over), over).unwrap_err();
            assert_eq!(refused.to_string(), why);
        }
    }

    #[test]
    fn experts_are_drawn_over_tokens_with_other_runs_beside_them() {
        let row = |tokens: u64, transport: &str, us: f64| {
            json!({ "tokens": tokens, "transport": transport, "layout_us": 1.0, "dispatch_us": us / 2.0,
                    "total_us": us, "nccl_us": 2.0 * us })
        };
        let results = json!({ "rows": [row(1, "Pushed in 1 pieces", 8.0), row(4096, "OneSided in 4 pieces", 500.0)] });
        let over = Over::of(&results);
        assert_eq!(over, Over::Tokens);
        let mut all = series(&results, over);
        let names = |all: &[Series]| all.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&all), ["Brigade", "nccl"]);
        for other in [
            json!({ "rows": [row(8, "InPlace in 1 pieces", 9.0)] }),
            json!({ "rows": [row(8, "low latency, 5 bytes of places at each rank", 9.0)] }),
            json!({ "rows": [{ "tokens": 8, "peers": { "somebody": 7.0 } }] }),
        ] {
            let more = other_run(series(&other, over), &all);
            all.extend(more);
        }
        let wanted = [
            "Brigade",
            "nccl",
            "Brigade in-place (other run)",
            "Brigade low-latency (other run)",
            "somebody (other run)",
        ];
        assert_eq!(names(&all), wanted);
        assert_eq!(all[0].points, BTreeMap::from([(1, 8.0), (4096, 500.0)]));
        assert!(all[1..].iter().all(|s| !s.ours));
        let picture = draw("moe", &all, over).unwrap();
        for part in [
            "tokens of a rank",
            ">1024</text>",
            "somebody (other run), 8 tokens: 7 us",
        ] {
            assert!(picture.contains(part), "{part} in {picture}");
        }
        // Who measured no time of ours has no picture of their own.
        let peers = json!({ "rows": [{ "tokens": 8, "peers": { "somebody": 7.0 } }] });
        assert!(draw("peers", &series(&peers, over), over).is_err());
    }

    #[test]
    fn axes_are_cut_where_people_count() {
        assert_eq!(steps(3.1, 48.0), [2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(steps(5.0, 5.0), [5.0]);
        assert_eq!(sizes(2048, 16_384), [2048, 4096, 8192, 16_384]);
        assert_eq!(sizes(1, 1 << 24).len(), 9);
        let named = [512, 2048, 16 << 20, 1 << 30].map(size);
        assert_eq!(named, ["512 B", "2 KiB", "16 MiB", "1 GiB"]);
    }
}
