//! Measured results: every file parses, and says when, at which commit and by which command it was measured. A file of other
//! programs alone says which they are, in place of a commit.

use super::{Problem, Tree};
use serde_json::Value;

const FOLDER: &str = "docs/results/";

pub fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree
        .under(FOLDER)
        .filter(|(path, _)| path.ends_with(".json"))
    {
        match serde_json::from_str::<Value>(text) {
            Err(error) => problems.push(Problem::at(path, error.line(), error.to_string())),
            Ok(value) => problems.extend(faults(&value).into_iter().map(|f| Problem::new(path, f))),
        }
    }
    problems
}

fn faults(value: &Value) -> Vec<String> {
    let Some(meta) = value.get("meta") else {
        return vec!["has no meta".into()];
    };
    type Check = fn(&str) -> bool;
    let fields: [(&str, &str, Check); 3] = [
        ("date", "YYYY-MM-DD", is_date),
        ("commit", "7 to 40 hex digits", is_commit),
        ("command", "the command that measured it", is_text),
    ];
    let given = |name: &str, good: Check| meta.get(name).and_then(Value::as_str).is_some_and(good);
    let of_others = given("of", is_text);
    fields
        .into_iter()
        .filter(|(name, _, _)| !(of_others && *name == "commit"))
        .filter(|(name, _, good)| !given(name, *good))
        .map(|(name, want, _)| format!("meta.{name} must be {want}"))
        .collect()
}

fn is_date(text: &str) -> bool {
    let shape: String = text
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    shape == "0000-00-00"
}

fn is_commit(text: &str) -> bool {
    (7..=40).contains(&text.len()) && text.chars().all(|c| c.is_ascii_hexdigit())
}

fn is_text(text: &str) -> bool {
    !text.trim().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::{lines, tree};

    fn told(text: &str) -> String {
        lines(&check(&tree(&[("docs/results/a.json", text)])))
    }

    #[test]
    fn a_result_that_says_where_it_comes_from_passes() {
        let sound = r#"{"meta": {"date": "2026-01-31", "commit": "0123abc", "command": "cargo xtask bench"}, "rows": []}"#;
        assert_eq!(told(sound), "");
        assert_eq!(check(&tree(&[("docs/results/notes.md", "{")])), []);
    }

    #[test]
    fn a_report_on_a_machine_passes() {
        assert_eq!(told(&crate::doctor::file("0123abc", &[]).to_string()), "");
    }

    #[test]
    fn a_result_of_others_needs_no_commit_but_their_names() {
        let with = |of: &str| {
            format!(
                r#"{{"meta": {{"date": "2026-01-31", "of": "{of}", "command": "theirs"}}, "rows": []}}"#
            )
        };
        assert_eq!(told(&with("vLLM")), "");
        assert!(told(&with(" ")).contains("meta.commit must be"));
    }

    #[test]
    fn a_result_that_does_not_is_told_what_it_lacks() {
        assert!(told("{\"meta\":\n{").starts_with("docs/results/a.json:2: EOF"));
        assert_eq!(told("{}"), "docs/results/a.json: has no meta");
        assert_eq!(
            told(r#"{"meta": {"date": "yesterday", "commit": "HEAD", "command": " "}}"#),
            "docs/results/a.json: meta.date must be YYYY-MM-DD\n\
             docs/results/a.json: meta.commit must be 7 to 40 hex digits\n\
             docs/results/a.json: meta.command must be the command that measured it"
        );
    }
}
