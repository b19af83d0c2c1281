//! What the test programs of a bundle showed, as a file of results: which trials ran, and how each of them ended.

use crate::{meta, write_rows};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

/// What is read, and where it goes.
#[derive(Clone, Debug, Args)]
pub struct Conformance {
    /// What run.sh showed
    #[arg(value_name = "LOG")]
    log: PathBuf,
    /// The seed of all trials
    #[arg(long)]
    seed: u64,
    /// Write all trials to this file
    #[arg(long, value_name = "FILE")]
    json: PathBuf,
    /// What run.sh was told
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// One start of a program.
#[derive(Debug, Default, PartialEq)]
struct Run {
    program: String,
    filter: String,
    /// How many trials it announced; none, if it did not come to that.
    trials: Option<usize>,
    ok: Vec<String>,
    failed: Vec<String>,
    ignored: Vec<String>,
    /// What it was in when it ended, if it came to no end of its own.
    unfinished: Option<String>,
    /// Whether it said how all of them ended.
    ended: bool,
}

/// Writes the file; gives a line for people.
pub fn run(options: &Conformance) -> Result<String> {
    let path = options.log.display();
    let log = fs::read_to_string(&options.log).with_context(|| format!("reading {path}"))?;
    let runs = read(&log).with_context(|| path.to_string())?;
    for run in &runs {
        let mut alike = runs.iter().filter(|other| other.filter == run.filter);
        ensure!(
            alike.any(|other| other.trials != Some(0)),
            "no program has a trial with {:?} in its name",
            run.filter
        );
    }
    let command = ["run.sh"].into_iter();
    let words: Vec<_> = command
        .chain(options.arguments.iter().map(String::as_str))
        .collect();
    let mut meta = meta::here(&words.join(" "))?;
    meta["seed"] = options.seed.into();
    let rows: Vec<_> = runs.iter().map(row).collect();
    write_rows(&options.json, &meta, &rows)?;
    let count = |of: fn(&Run) -> usize| runs.iter().map(of).sum::<usize>();
    Ok(format!(
        "{}: {} trials passed, {} failed, {} ignored; {} programs came to no end\n",
        options.json.display(),
        count(|run| run.ok.len()),
        count(|run| run.failed.len()),
        count(|run| run.ignored.len()),
        count(|run| usize::from(!run.ended)),
    ))
}

fn row(run: &Run) -> Value {
    let Run {
        program,
        filter,
        trials,
        ok,
        failed,
        ignored,
        unfinished,
        ended,
    } = run;
    json!({
        "program": program, "filter": filter, "trials": trials, "ended": ended, "ok": ok, "failed": failed, "ignored": ignored,
        "unfinished": unfinished,
    })
}

/// All runs of a log: what libtest and libtest-mimic print, behind a line `== PROGRAM FILTER` for each start.
fn read(log: &str) -> Result<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    // Behind these, a program prints what failed trials said.
    let mut lists = false;
    for (number, line) in (1..).zip(log.lines()) {
        if let Some(started) = line.strip_prefix("== ") {
            runs.push(begun(started));
            continue;
        }
        let Some(run) = runs.last_mut() else { continue };
        if let Some(announced) = line.strip_prefix("running ")
            && run.trials.is_none()
        {
            let trials = announced.split(' ').next().unwrap_or_default().parse();
            run.trials = Some(trials.with_context(|| format!("line {number}: {line}"))?);
            lists = true;
        } else if line == "failures:" {
            lists = false;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            let counts = [
                ("passed", &run.ok),
                ("failed", &run.failed),
                ("ignored", &run.ignored),
            ];
            for (what, names) in counts {
                let told = format!(" {} {what};", names.len());
                ensure!(result.contains(&told), "line {number}: not{told} {result}");
            }
            (run.ended, lists) = (true, false);
        } else if lists
            && let Some(trial) = line.strip_prefix("test ")
            && let Some((name, outcome)) = trial.split_once(" ... ")
        {
            let name = name.trim_end().to_owned();
            match outcome.trim() {
                "ok" => run.ok.push(name),
                "FAILED" => run.failed.push(name),
                "ignored" => run.ignored.push(name),
                "" => run.unfinished = Some(name),
                // It died in there, and the next one began on the same line.
                next if next.starts_with("== ") => {
                    run.unfinished = Some(name);
                    lists = false;
                    runs.push(begun(&next[3..]));
                }
                other => bail!("line {number}: {name} ended as {other:?}"),
            }
        }
    }
    ensure!(!runs.is_empty(), "no program has run");
    for run in runs.iter().filter(|run| run.ended) {
        let seen = run.ok.len() + run.failed.len() + run.ignored.len();
        let trials = run.trials.unwrap_or_default();
        ensure!(seen == trials, "{}: {seen} trials of {trials}", run.program);
    }
    Ok(runs)
}

/// A program that was started with a filter.
fn begun(heading: &str) -> Run {
    let (program, filter) = heading.split_once(' ').unwrap_or((heading, ""));
    Run {
        program: program.to_owned(),
        filter: filter.to_owned(),
        ..Run::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What programs print: of libtest, of libtest-mimic, which aligns outcomes, with a failure, and of one that died in a trial.
    const LOG: &str = "== gpu w2

running 2 tests
test device::fills ... ok
test probe::late ... ignored

test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.10s

== cuda w2

running 2 tests
test cuda/w2/barrier/meets     ... ok
test cuda/w2/faults/late/sums  ... FAILED

failures:

---- cuda/w2/faults/late/sums ----
test of something ... it said
rank 1: late

failures:
    cuda/w2/faults/late/sums

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1.00s

== cuda w2

running 3 tests
test shared/w2/barrier/meets ... ok
test shared/w2/life/leases   ... == cuda_processes w2

running 0 tests

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 0.00s

== gone w2
";

    /// A word that is in no trial's name has shown nothing.
    #[test]
    fn a_filter_without_trials_is_refused() {
        let folder = std::env::temp_dir().join(format!("brigade-filter-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (log, json) = (folder.join("run.log"), folder.join("run.json"));
        let of = |trials: usize| {
            let text = format!(
                "== gpu gemn\n\nrunning 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out\n\n\
                 == cuda gemn\n\nrunning {trials} tests\n{}\ntest result: ok. {trials} passed; 0 failed; 0 ignored; 0 measured; 3 filtered out\n",
                "test cuda/gemn ... ok\n".repeat(trials)
            );
            fs::write(&log, text).unwrap();
            run(&Conformance {
                log: log.clone(),
                seed: 1,
                json: json.clone(),
                arguments: vec!["gemn".into()],
            })
        };
        let refused = of(0).unwrap_err().to_string();
        assert!(
            refused.contains("no program has a trial with \"gemn\""),
            "{refused}"
        );
        assert!(!json.exists());
        assert!(of(1).unwrap().contains("1 trials passed"));
        fs::remove_dir_all(folder).unwrap();
    }

    fn names(all: &[&str]) -> Vec<String> {
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_trial_has_its_outcome() {
        let runs = read(LOG).unwrap();
        let programs: Vec<_> = runs.iter().map(|r| (&*r.program, &*r.filter)).collect();
        let want = ["gpu", "cuda", "cuda", "cuda_processes", "gone"].map(|program| (program, "w2"));
        assert_eq!(programs, want);
        assert_eq!(runs[0].ok, names(&["device::fills"]));
        assert_eq!(runs[0].ignored, names(&["probe::late"]));
        assert_eq!(runs[1].ok, names(&["cuda/w2/barrier/meets"]));
        assert_eq!(runs[1].failed, names(&["cuda/w2/faults/late/sums"]));
        let ended: Vec<_> = runs.iter().map(|r| r.ended).collect();
        assert_eq!(ended, [true, true, false, true, false]);
        let died = row(&runs[2]);
        assert_eq!(died["unfinished"], "shared/w2/life/leases");
        assert_eq!(
            (&died["trials"], &died["ended"]),
            (&json!(3), &json!(false))
        );
        assert_eq!(died["ok"], json!(["shared/w2/barrier/meets"]));
        // It did not even begin.
        assert_eq!(row(&runs[4])["trials"], Value::Null);
    }

    #[test]
    fn a_log_that_does_not_add_up_is_refused() {
        let refused = |from: &str, to: &str| {
            assert!(LOG.contains(from));
            read(&LOG.replacen(from, to, 1)).unwrap_err().to_string()
        };
        assert_eq!(
            read("cuda\n").unwrap_err().to_string(),
            "no program has run"
        );
        let lost = refused("test device::fills ... ok\n", "");
        assert!(lost.starts_with("line 6: not 0 passed;"), "{lost}");
        let fewer = refused("running 2 tests\ntest cuda", "running 3 tests\ntest cuda");
        assert_eq!(fewer, "cuda: 2 trials of 3");
        let other = refused("meets     ... ok", "meets     ... okay");
        assert_eq!(other, "line 12: cuda/w2/barrier/meets ended as \"okay\"");
        let uncounted = refused("running 2 tests\ntest dev", "running two tests\ntest dev");
        assert!(uncounted.starts_with("line 3: running two"), "{uncounted}");
    }

    /// On any host.
    #[test]
    fn results_say_where_they_come_from() {
        let folder = std::env::temp_dir().join(format!("brigade-log-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [log, json] = ["run.log", "all.json"].map(|name| folder.join(name));
        fs::write(&log, LOG).unwrap();
        let options = Conformance {
            log,
            seed: u64::MAX,
            json: json.clone(),
            arguments: names(&["w2", "quantize"]),
        };
        let told = run(&options).unwrap();
        assert!(
            told.ends_with("3 trials passed, 1 failed, 1 ignored; 2 programs came to no end\n"),
            "{told}"
        );
        let all: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        fs::remove_dir_all(folder).unwrap();
        assert_eq!(all["meta"]["command"], "run.sh w2 quantize");
        assert_eq!(all["meta"]["seed"], u64::MAX);
        assert_eq!(all["meta"]["date"].as_str().unwrap().len(), 10);
        assert!(all["meta"]["commit"].is_string());
        assert_eq!(all["rows"].as_array().unwrap().len(), 5);
    }
}
