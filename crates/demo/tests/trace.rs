//! The timeline that the program writes: its rows, and what stands in them.
#![allow(clippy::unwrap_used)]

mod common;

use common::program::{folder, run};
use serde_json::Value;

/// A span of a timeline.
#[derive(Debug)]
struct Span {
    row: String,
    name: String,
    start: f64,
    end: f64,
    arguments: Value,
}

impl Span {
    fn number(&self, argument: &str) -> Option<usize> {
        self.arguments[argument].as_str()?.parse().ok()
    }
}

/// Runs with a trace, and reads its spans; that each begins and ends in its row, inside the one around it.
fn traced(name: &str, arguments: &[&str]) -> (Vec<String>, Vec<Span>) {
    let path = folder(name).join("trace.json");
    let prompt = "a prompt that is long enough to take a while".repeat(12);
    let trace = ["--prompt", &prompt, "--max-tokens", "2", "--trace"];
    run(&[arguments, &trace, &[path.to_str().unwrap()]].concat());
    let events: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let (mut rows, mut open, mut spans) = (Vec::new(), Vec::<(usize, Span)>::new(), Vec::new());
    for event in &events {
        let tid = usize::try_from(event["tid"].as_u64().unwrap()).unwrap();
        match event["ph"].as_str().unwrap() {
            "M" if event["name"] == "thread_name" => {
                assert_eq!(tid, rows.len());
                rows.push(event["args"]["name"].as_str().unwrap().to_owned());
            }
            "B" => open.push((
                tid,
                Span {
                    row: rows[tid].clone(),
                    name: event["name"].as_str().unwrap().to_owned(),
                    start: event["ts"].as_f64().unwrap(),
                    end: f64::NAN,
                    arguments: event["args"].clone(),
                },
            )),
            "E" => {
                let last = open.iter().rposition(|(of, _)| *of == tid).unwrap();
                let (_, mut span) = open.remove(last);
                assert_eq!(event["name"], span.name);
                span.end = event["ts"].as_f64().unwrap();
                spans.push(span);
            }
            _ => {}
        }
    }
    assert!(open.is_empty(), "{open:?}");
    (rows, spans)
}

fn expected_rows(ranks: usize) -> Vec<String> {
    let row = |rank| ["compute", "communication"].map(|what| format!("rank {rank} {what}"));
    (0..ranks).flat_map(row).collect()
}

fn count(spans: &[Span], row: &str, name: &str) -> usize {
    spans
        .iter()
        .filter(|s| s.row == row && s.name == name)
        .count()
}

const LAYERS: usize = 4;

#[test]
fn a_ring_is_traced_as_compute_beside_communication() {
    for ranks in [2, 3] {
        let (rows, spans) = traced(
            &format!("ring-{ranks}"),
            &["--ranks", &ranks.to_string(), "--mode", "ring"],
        );
        assert_eq!(rows, expected_rows(ranks));
        for rank in 0..ranks {
            let [compute, comm] = ["compute", "communication"].map(|w| format!("rank {rank} {w}"));
            // Two gathers and two twins a layer, of a chunk for every rank.
            assert_eq!(count(&spans, &compute, "multiply"), 4 * LAYERS * ranks);
            assert_eq!(count(&spans, &compute, "sum"), 2 * LAYERS);
            assert_eq!(count(&spans, &comm, "pass"), 2 * LAYERS * (ranks - 1));
            assert_eq!(count(&spans, &comm, "send part"), 2 * LAYERS * (ranks - 1));
            assert_eq!(count(&spans, &comm, "multiply"), 0);
        }
        // No chunk is multiplied before it was on its way.
        for to in 0..ranks {
            let own = format!("rank {to} compute");
            for chunk in (0..ranks).filter(|&c| c != to) {
                let passed = spans.iter().filter(|s| {
                    s.name == "pass"
                        && (s.number("chunk"), s.number("to")) == (Some(chunk), Some(to))
                });
                let mut multiplied: Vec<&Span> = spans
                    .iter()
                    .filter(|s| s.row == own && s.name == "multiply")
                    .filter(|s| s.number("chunk") == Some(chunk))
                    .collect();
                // A layer's calls: gather, twin, gather, twin.
                multiplied.sort_by(|a, b| a.start.total_cmp(&b.start));
                let gathers = multiplied.iter().step_by(2);
                let mut passed: Vec<f64> = passed.map(|s| s.start).collect();
                passed.sort_by(f64::total_cmp);
                assert_eq!(passed.len(), gathers.len());
                assert!(passed.iter().zip(gathers).all(|(p, m)| *p <= m.start));
            }
        }
    }
}

/// Whether something was sent, by whomever, while a rank multiplied.
fn overlaps(spans: &[Span]) -> bool {
    let sent = |m: &Span| {
        spans
            .iter()
            .filter(|s| s.row.ends_with("communication"))
            .any(|s| s.start < m.end && m.start < s.end)
    };
    spans.iter().filter(|s| s.name == "multiply").any(sent)
}

/// Once is enough: when threads get their cores is the system's affair.
#[test]
fn ranks_multiply_while_chunks_travel() {
    const RUNS: usize = 20;
    let mut runs = (0..RUNS).map(|_| traced("overlap", &["--ranks", "2", "--mode", "ring"]));
    assert!(
        runs.any(|(_, spans)| overlaps(&spans)),
        "in {RUNS} runs nothing was sent while a rank multiplied"
    );
    let (_, spans) = traced("no-overlap", &["--ranks", "2", "--mode", "off"]);
    assert!(!overlaps(&spans));
}

#[test]
fn pieces_are_traced_as_pushes() {
    let ranks = 3;
    let (rows, spans) = traced("chunked", &["--ranks", "3", "--mode", "chunked"]);
    assert_eq!(rows, expected_rows(ranks));
    for rank in 0..ranks {
        let comm = format!("rank {rank} communication");
        // Two gathers a layer, in two pieces, to every peer.
        let pushes = 2 * LAYERS * 2 * (ranks - 1);
        assert_eq!(count(&spans, &comm, "push"), pushes);
        assert_eq!(count(&spans, &comm, "pass"), 0);
    }
}

#[test]
fn without_overlap_there_is_no_communication_thread_to_trace() {
    let (rows, spans) = traced("off", &["--ranks", "2", "--mode", "off"]);
    assert_eq!(rows, ["rank 0 compute", "rank 1 compute"]);
    assert!(count(&spans, "rank 0 compute", "reduce-scatter") > 0);
    assert_eq!(count(&spans, "rank 0 compute", "pass"), 0);
}
