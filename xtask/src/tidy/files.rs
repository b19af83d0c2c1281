//! What no source file may hold: too many lines, unfinished work, sleeps, prints of a library, trailing whitespace.

use super::{Problem, Tree};

const LONGEST: usize = 600;

/// A line with this comment, or right under one, may sleep; the rest of the comment says why.
const SLEEP_MARK: &str = "// tidy: sleeps because ";

// Put together here, so that this file does not hold them.
const NEVER: &[(&str, &str)] = &[
    (concat!("todo", "!("), "unfinished work"),
    (concat!("unimplemented", "!("), "unfinished work"),
    (concat!("#[", "ignore"), "a test that does not run"),
];
const SLEEP: &str = concat!("thread::", "sleep");
const PRINTS: &[&str] = &[
    concat!("println", "!("),
    concat!("print", "!("),
    concat!("dbg", "!("),
];

/// Packages under crates/ whose own purpose is to print.
const PROGRAMS: &[&str] = &["crates/demo/", "crates/perf/"];

pub fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.under("") {
        if is_source(path) {
            let count = text.lines().count();
            if count > LONGEST {
                let what =
                    format!("{count} lines, {LONGEST} at most: look for the second thing in it");
                problems.push(Problem::new(path, what));
            }
        }
        if has_ending(path, &["rs"]) {
            problems.extend(words(path, text));
        }
        if is_written_by_hand(path) {
            problems.extend(trailing(path, text));
        }
    }
    problems
}

fn words(path: &str, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut above = "";
    for (number, line) in (1..).zip(text.lines()) {
        let code = line.trim_start();
        let comment = code.starts_with("//");
        for (word, what) in NEVER
            .iter()
            .filter(|(word, _)| !comment && code.contains(word))
        {
            problems.push(Problem::at(path, number, format!("{what}: {word}")));
        }
        let excused = [line, above].iter().any(|l| reason(l).is_some());
        if !comment && code.contains(SLEEP) && !code.starts_with("use ") && !excused {
            let what = format!(
                "{SLEEP}: wait for what happens, or say why not with `{}...`",
                SLEEP_MARK
            );
            problems.push(Problem::at(path, number, what));
        }
        if !comment && is_library(path) && PRINTS.iter().any(|word| code.contains(word)) {
            problems.push(Problem::at(
                path,
                number,
                "a library does not print: use tracing",
            ));
        }
        above = line;
    }
    problems
}

/// What follows the mark, if anything does.
fn reason(line: &str) -> Option<&str> {
    let (_, reason) = line.split_once(SLEEP_MARK)?;
    Some(reason.trim()).filter(|r| !r.is_empty())
}

fn trailing(path: &str, text: &str) -> Vec<Problem> {
    (1..)
        .zip(text.split('\n'))
        .filter(|(_, line)| line.ends_with([' ', '\t', '\r']))
        .map(|(number, _)| Problem::at(path, number, "trailing whitespace"))
        .collect()
}

fn has_ending(path: &str, endings: &[&str]) -> bool {
    path.rsplit_once('.')
        .is_some_and(|(_, ending)| endings.contains(&ending))
}

fn is_source(path: &str) -> bool {
    has_ending(path, &["rs", "cu", "cuh"])
}

fn is_library(path: &str) -> bool {
    path.starts_with("crates/")
        && path.contains("/src/")
        && !PROGRAMS.iter().any(|program| path.starts_with(program))
}

fn is_written_by_hand(path: &str) -> bool {
    is_source(path)
        || has_ending(path, &["md", "toml", "yml", "yaml", "sh", "py"])
        || path == ".ci/run"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::{lines, tree};

    fn told(path: &str, text: &str) -> String {
        lines(&check(&tree(&[(path, text)])))
    }

    #[test]
    fn long_sources_are_told_and_long_texts_are_not() {
        let long = "x\n".repeat(LONGEST + 1);
        for path in ["a/b.rs", "kernels/a.cu", "kernels/a.cuh"] {
            assert!(
                told(path, &long).contains("601 lines, 600 at most"),
                "{path}"
            );
            assert_eq!(told(path, &"x\n".repeat(LONGEST)), "");
        }
        assert_eq!(told("docs/src/a.md", &long), "");
    }

    #[test]
    fn unfinished_work_is_told_wherever_it_stands() {
        for (word, what) in NEVER {
            let text = format!("fn f() {{\n    {word}\n");
            assert_eq!(
                told("tests/a.rs", &text),
                format!("tests/a.rs:2: {what}: {word}")
            );
            assert_eq!(told("tests/a.rs", &format!("// {word}")), "");
        }
    }

    #[test]
    fn a_sleep_needs_a_reason() {
        let sleep = format!("std::{SLEEP}(d);");
        assert!(told("crates/host/src/a.rs", &sleep).contains(SLEEP));
        let bare = format!("{SLEEP_MARK}\n{sleep}");
        assert!(told("crates/host/src/a.rs", &bare).contains(SLEEP));
        let reasoned = format!("{SLEEP_MARK}the peer must be late\n{sleep}");
        assert_eq!(told("crates/host/src/a.rs", &reasoned), "");
        let far = format!("{SLEEP_MARK}the peer must be late\n\n{sleep}");
        assert!(told("crates/host/src/a.rs", &far).contains(SLEEP));
    }

    #[test]
    fn libraries_do_not_print_and_programs_do() {
        let print = format!("{}\"x\");", PRINTS[0]);
        assert!(told("crates/host/src/a.rs", &print).contains("does not print"));
        for path in [
            "crates/demo/src/a.rs",
            "crates/host/examples/a.rs",
            "crates/host/tests/a.rs",
            "xtask/src/a.rs",
        ] {
            assert_eq!(told(path, &print), "", "{path}");
        }
        assert_eq!(told("crates/host/src/a.rs", &format!("/// {print}")), "");
    }

    #[test]
    fn trailing_whitespace_is_told_where_people_write() {
        for path in ["a.rs", "README.md", ".ci/run", "Cargo.toml", "kernels/a.cu"] {
            assert_eq!(
                told(path, "a\nb \nc"),
                format!("{path}:2: trailing whitespace")
            );
            assert_eq!(
                told(path, "a\nb\nc\t"),
                format!("{path}:3: trailing whitespace")
            );
        }
        assert_eq!(told("a.snap", "a \n"), "");
    }
}
