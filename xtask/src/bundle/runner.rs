//! The script that runs a bundle's programs over there.

use super::{ARCHIVE, BENCHMARK};

/// Small shapes of what moves memory in a way of its own, for compute-sanitizer, a line each: which program, and a part of trials' names.
/// Groups are of ranks that share a GPU, so one is enough. The suite knows whether it has trials of these names (`tests/src/cuda.rs`).
const MEMCHECK: &str = include_str!("memcheck.txt");

/// What the script says of itself.
pub(super) const TITLE: &str = "# Runs Brigade's GPU tests: ";

/// The lines in two parts.
fn listed() -> impl Iterator<Item = (&'static str, &'static str)> {
    MEMCHECK.lines().filter_map(|line| line.split_once(' '))
}

/// The programs are taken out of their archive, and every one runs, also after one that failed; what they showed becomes a file of results.
/// Where the programs for it are there, the word `memcheck` has a meaning.
pub(super) fn text(programs: &[&str]) -> String {
    let there = listed().all(|(name, _)| programs.contains(&name));
    let memcheck = if there { memcheck() } else { String::new() };
    let unpack = format!("[ -e {BENCHMARK} ] || tar -xJf {ARCHIVE} || exit 1\n");
    format!(
        r#"#!/usr/bin/env bash
{TITLE}all of them, or those whose names hold one of the arguments.
set -u
cd "$(dirname "${{BASH_SOURCE[0]}}")"
export BRIGADE_TEST_DEVICE=cuda CUDA_DEVICE_MAX_CONNECTIONS=32
# Machines that are threads of one process: NCCL writes into no memory of a rank that makes another call.
export NCCL_NVLS_ENABLE=0 NCCL_P2P_DIRECT_DISABLE=1
export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:-}}${{LD_LIBRARY_PATH:+:}}/usr/local/cuda/lib64"
worst=0
{unpack}{memcheck}# One seed for all, so that what is written down can be run again.
export BRIGADE_SEED="${{BRIGADE_SEED:-$((RANDOM << 15 | RANDOM))}}"
all() {{
    for program in {}; do
        for filter in "${{@:-}}"; do
            once() {{
                echo "== $program $filter"
                ${{BRIGADE_WRAP:-}} "./$program" ${{filter:+"$filter"}} --test-threads "${{BRIGADE_THREADS:-1}}" "$@" || worst=1
            }}
            # Ranks that are all on one GPU want kernels loaded ahead, and ranks on several GPUs of one process want nothing of the kind.
            if [ "$program" = cuda ] || [ "$program" = candle-gpu ]; then
                once --skip shared/
                CUDA_MODULE_LOADING=EAGER once --skip cuda/ --skip machines/ --skip spread/
            else
                once
            fi
        done
    done
    return $worst
}}
all "$@" | tee run.log
worst=${{PIPESTATUS[0]}}
./{BENCHMARK} conformance run.log --seed "$BRIGADE_SEED" --json conformance.json -- "$@" || worst=1
exit $worst
"#,
        programs.join(" ")
    )
}

/// What is listed for it runs under compute-sanitizer, once that has found a fault that is there to be found.
fn memcheck() -> String {
    format!(
        r#"# With the word `memcheck`: some of them, with small shapes, under compute-sanitizer.
if [ "${{1:-}}" = memcheck ]; then
    export PATH="$PATH:/usr/local/cuda/bin"
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is missing: it comes with CUDA's toolkit" >&2
        exit 1
    fi
    # Ranks that share a GPU want kernels loaded ahead. Calls that the driver refuses are told of by their callers, where they are errors.
    checked() {{
        CUDA_MODULE_LOADING=EAGER compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 99 "$@" --test-threads 1 </dev/null
    }}
    echo "== memcheck gpu, a planted fault"
    said=$(BRIGADE_PLANT_FAULT=1 checked ./gpu a_post_lies_in_its_memory 2>&1)
    if [ $? -ne 99 ] || [[ $said != *"Invalid "*brigade_probe_post* ]]; then
        echo "$said"
        echo "compute-sanitizer did not find the planted fault" >&2
        exit 1
    fi
    echo "the planted fault was found"
    while read -r program filter; do
        echo "== memcheck $program $filter"
        if [[ $("./$program" --list "$filter" </dev/null) != *": test"* ]]; then
            echo "$program has no trial of this name" >&2
            worst=1
            continue
        fi
        checked "./$program" "$filter" || worst=1
    done <<'TRIALS'
{MEMCHECK}TRIALS
    exit $worst
fi
"#
    )
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::bundle::{MARK, pack, script};
    use std::process::Command;

    /// A folder with these scripts and the runner.
    fn folder(programs: &[&str], scripts: &[(&str, &str)]) -> xshell::TempDir {
        let shell = xshell::Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        script(&folder.path().join(MARK), &text(programs)).unwrap();
        for (name, text) in [WRITES].iter().chain(scripts) {
            script(&folder.path().join(name), &format!("#!/bin/sh\n{text}\n")).unwrap();
        }
        folder
    }

    /// What writes results: says as what it was called.
    const WRITES: (&str, &str) = (BENCHMARK, "echo \"written $*\" >&2");

    /// The same as it must have been called, behind what all programs said.
    fn and_written(said: &str, arguments: &str) -> String {
        format!("{said}written conformance run.log --seed 7 --json conformance.json --{arguments}|")
    }

    /// How the runner ends, and what it says, on one line.
    fn run(folder: &xshell::TempDir, arguments: &[&str]) -> (Option<i32>, String) {
        let at = folder.path();
        let path = format!("{}:/usr/bin:/bin", at.join("bin").display());
        let output = Command::new(at.join(MARK))
            .args(arguments)
            .env("PATH", path)
            .env_remove("BRIGADE_THREADS")
            .env_remove("BRIGADE_WRAP")
            .env_remove("CUDA_MODULE_LOADING")
            .env("BRIGADE_SEED", "7")
            .output();
        let output = output.unwrap();
        let said = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(said).unwrap();
        (output.status.code(), text.replace('\n', "|"))
    }

    /// The script hands filters on, runs every program, and tells of a failure in any.
    #[test]
    fn every_program_runs_with_every_filter() {
        let both = [
            ("bad", "echo bad \"$@\"\nexit 3"),
            ("good", "echo good \"$@\""),
        ];
        let both = folder(&["bad", "good"], &both);
        let all = "== bad |bad --test-threads 1|== good |good --test-threads 1|";
        assert_eq!(run(&both, &[]), (Some(1), and_written(all, "")));
        let (code, text) = run(&both, &["x", "y z"]);
        assert_eq!(code, Some(1));
        assert!(text.contains("bad x --test-threads 1|"), "{text}");
        assert!(
            text.ends_with(&and_written(
                "== good y z|good y z --test-threads 1|",
                " x y z"
            )),
            "{text}"
        );
        for program in ["cuda", "candle-gpu"] {
            let says = [(program, "echo ${CUDA_MODULE_LOADING:-usual} \"$@\"")];
            let both = format!(
                "== {program} x|usual x --test-threads 1 --skip shared/|\
                 == {program} x|EAGER x --test-threads 1 --skip cuda/ --skip machines/ --skip spread/|"
            );
            let both = and_written(&both, " x");
            assert_eq!(run(&folder(&[program], &says), &["x"]), (Some(0), both));
        }
    }

    /// What was shown lies there for whoever writes results, who is told of a failure, and whose own failure is one.
    #[test]
    fn results_are_written_of_what_was_shown() {
        let shows = [("one", "echo $BRIGADE_SEED\necho beside >&2\nexit 3")];
        let failed = folder(&["one"], &shows);
        assert_eq!(run(&failed, &[]).0, Some(1));
        let log = std::fs::read_to_string(failed.path().join("run.log")).unwrap();
        assert_eq!(log, "== one \n7\n");
        for (writes, code) in [("exit 0", 0), ("exit 4", 1)] {
            let passed = folder(&["one"], &[("one", "exit 0"), (BENCHMARK, writes)]);
            assert_eq!(run(&passed, &[]).0, Some(code));
        }
    }

    #[test]
    fn programs_are_taken_out_of_their_archive_once() {
        let packed = folder(&[], &[("one", "echo \"$@\""), ("two", "exit 0")]);
        let at = packed.path();
        script(&at.join(MARK), &text(&["one"])).unwrap();
        pack(at, &["one", "two", BENCHMARK]).unwrap();
        assert!(!at.join("one").exists());
        for _ in 0..2 {
            let (code, said) = run(&packed, &["x"]);
            assert_eq!(
                (code, said),
                (Some(0), and_written("== one x|x --test-threads 1|", " x"))
            );
            assert!(at.join("two").is_file());
            // It is not needed any more.
            std::fs::remove_file(at.join(ARCHIVE)).ok();
        }
        std::fs::remove_file(at.join(BENCHMARK)).unwrap();
        assert_eq!(run(&packed, &[]).0, Some(1));
    }

    /// Finds what is planted, and ends as the program does otherwise.
    const FINDS: &str = r#"while [ "${1#./}" = "$1" ]; do shift; done
if [ -n "$BRIGADE_PLANT_FAULT" ]; then echo "Invalid write at brigade_probe_post"; exit 99; fi
exec "$@""#;
    const LISTS: &str = r#"[ "$1" = --list ] && echo "$2: test" && exit
[ "$BRIGADE_TEST_DEVICE/$CUDA_MODULE_LOADING" = cuda/EAGER ] || exit 5
echo "ran $1""#;

    fn checked(sanitizer: Option<&str>, cuda: &str) -> (Option<i32>, String) {
        let folder = folder(&["gpu", "cuda"], &[("gpu", LISTS), ("cuda", cuda)]);
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        if let Some(text) = sanitizer {
            let at = folder.path().join("bin/compute-sanitizer");
            script(&at, &format!("#!/bin/sh\n{text}\n")).unwrap();
        }
        run(&folder, &["memcheck"])
    }

    #[test]
    fn memcheck_runs_what_is_listed_once_the_planted_fault_was_found() {
        let (code, text) = checked(Some(FINDS), LISTS);
        assert_eq!(code, Some(0), "{text}");
        let first = "== memcheck gpu, a planted fault|the planted fault was found|== memcheck gpu fill_|ran fill_|";
        assert!(text.starts_with(first), "{text}");
        assert_eq!(text.matches("|ran ").count(), listed().count(), "{text}");
    }

    #[test]
    fn memcheck_fails_without_a_checker_that_finds_something() {
        let (code, text) = checked(None, LISTS);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("compute-sanitizer is missing"), "{text}");
        // It says that all is well; that something is wrong, but not where; or it cannot run.
        for blind in [
            "exit 0",
            "echo Invalid write elsewhere; exit 99",
            "echo Invalid brigade_probe_post; exit 1",
        ] {
            let (code, text) = checked(Some(blind), LISTS);
            assert_eq!(code, Some(1), "{text}");
            assert!(text.contains("did not find the planted fault"), "{text}");
            assert!(!text.contains("ran "), "{text}");
        }
    }

    #[test]
    fn memcheck_tells_of_a_fault_in_any_trial_and_of_trials_that_are_not_there() {
        let fails = LISTS.replace("ran", "tried") + "\nexit 99";
        let none = r#"[ "$1" = --list ] && exit"#;
        for (cuda, says) in [(fails.as_str(), "tried "), (none, "no trial of this name")] {
            let (code, text) = checked(Some(FINDS), cuda);
            assert_eq!(code, Some(1), "{text}");
            let trials = listed().filter(|(program, _)| *program == "cuda").count();
            assert_eq!(text.matches(says).count(), trials, "{text}");
        }
    }
}
