//! The timeline of a run, as `chrome://tracing` and <https://ui.perfetto.dev> read it: for every rank a row of compute
//! and one of communication.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};
use tracing_subscriber::{Layer, filter::filter_fn, layer::SubscriberExt, util::SubscriberInitExt};

/// A timeline being written.
pub struct Trace {
    path: PathBuf,
    guard: tracing_chrome::FlushGuard,
}

impl Trace {
    /// Writes Brigade's spans to a file from now on.
    pub fn start(path: &Path) -> Result<Self> {
        let file = fs::File::create(path)
            .with_context(|| format!("cannot write the trace {}", path.display()))?;
        let (chrome, guard) = tracing_chrome::ChromeLayerBuilder::new()
            .writer(file)
            .include_args(true)
            .include_locations(false)
            .build();
        let ours = filter_fn(|meta| meta.target().starts_with("brigade::"));
        tracing_subscriber::registry()
            .with(chrome.with_filter(ours))
            .try_init()
            .context("a trace is already being written")?;
        Ok(Self {
            path: path.to_owned(),
            guard,
        })
    }

    /// Ends the timeline, and puts its rows in order.
    pub fn finish(self) -> Result<()> {
        drop(self.guard);
        let about = || format!("cannot put the trace {} in order", self.path.display());
        let text = fs::read_to_string(&self.path).with_context(about)?;
        let events = serde_json::from_str(&text).with_context(about)?;
        let text = serde_json::to_string(&in_rows(events)).with_context(about)?;
        fs::write(&self.path, text).with_context(about)
    }
}

/// One row for all threads of a name: a rank has a communication thread for each communicator, but is in one call at a
/// time.
fn in_rows(events: Vec<Value>) -> Vec<Value> {
    let names: HashMap<u64, String> = events
        .iter()
        .filter(|e| e["name"] == "thread_name")
        .filter_map(|e| Some((e["tid"].as_u64()?, e["args"]["name"].as_str()?.to_owned())))
        .collect();
    let mut rows: Vec<&String> = names.values().collect();
    rows.sort_by_key(|name| place(name));
    rows.dedup();
    let row_of = |tid: u64| {
        let name = names.get(&tid)?;
        rows.iter().position(|row| *row == name)
    };
    let heads = rows.iter().enumerate().flat_map(|(tid, name)| {
        [
            json!({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}),
            json!({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}),
        ]
    });
    let spans = events
        .iter()
        .filter(|e| e["ph"] != "M")
        .map(|e| match e["tid"].as_u64() {
            Some(tid) => {
                let mut e = e.clone();
                // Threads without a name stay apart from those with one.
                e["tid"] = json!(row_of(tid).unwrap_or(rows.len() + tid as usize));
                e
            }
            None => e.clone(),
        });
    heads.chain(spans).collect()
}

/// Ranks in order, each one's compute before its communication; other threads behind them.
fn place(name: &str) -> (usize, bool, &str) {
    let rank = name.split(' ').nth(1).and_then(|n| n.parse().ok());
    (rank.unwrap_or(usize::MAX), !name.ends_with("compute"), name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_one_name_share_a_row_behind_that_of_their_ranks_compute() {
        let name = |tid, name: &str| json!({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}});
        let begin = |tid, at| json!({"ph": "B", "pid": 1, "tid": tid, "ts": at, "name": "pass"});
        let events = in_rows(vec![
            begin(9, 1),
            name(3, "rank 10 communication"),
            begin(3, 2),
            name(4, "rank 2 communication"),
            name(0, "rank 2 compute"),
            begin(0, 3),
            name(5, "rank 2 communication"),
            begin(4, 4),
            begin(5, 5),
        ]);
        let heads: Vec<String> = events
            .iter()
            .filter(|e| e["ph"] == "M")
            .map(|e| format!("{} {}", e["tid"], e["args"]))
            .collect();
        assert_eq!(
            heads,
            [
                r#"0 {"name":"rank 2 compute"}"#,
                r#"0 {"sort_index":0}"#,
                r#"1 {"name":"rank 2 communication"}"#,
                r#"1 {"sort_index":1}"#,
                r#"2 {"name":"rank 10 communication"}"#,
                r#"2 {"sort_index":2}"#,
            ]
        );
        let spans: Vec<(u64, u64)> = events
            .iter()
            .filter(|e| e["ph"] == "B")
            .map(|e| (e["ts"].as_u64().unwrap(), e["tid"].as_u64().unwrap()))
            .collect();
        assert_eq!(spans, [(1, 12), (2, 2), (3, 0), (4, 1), (5, 1)]);
    }
}
