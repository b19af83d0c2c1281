//! The book: every page is in the table of contents, and every entry has its page.

use super::{Problem, Tree};

const FOLDER: &str = "docs/src/";
const SUMMARY: &str = "docs/src/SUMMARY.md";

pub fn check(tree: &Tree) -> Vec<Problem> {
    let pages: Vec<_> = tree
        .under(FOLDER)
        .map(|(path, _)| path)
        .filter(|path| path.ends_with(".md") && *path != SUMMARY)
        .collect();
    let summary = tree.under(SUMMARY).next().map_or("", |(_, text)| text);
    let mut problems = Vec::new();
    let mut linked = Vec::new();
    for (number, line) in (1..).zip(summary.lines()) {
        for target in links(line) {
            let path = format!("{FOLDER}{}", target.trim_start_matches("./"));
            if !pages.contains(&path.as_str()) {
                let what = format!("links {target}, which is not there");
                problems.push(Problem::at(SUMMARY, number, what));
            }
            linked.push(path);
        }
    }
    for page in pages {
        if !linked.iter().any(|path| path == page) {
            problems.push(Problem::new(page, "is not linked in SUMMARY.md"));
        }
    }
    problems
}

/// The local pages that a line links: `a.md` of `[A](a.md#part)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|target| target.ends_with(".md") && !target.contains("://"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::{lines, tree};

    #[test]
    fn pages_and_entries_match() {
        let book = tree(&[
            (
                SUMMARY,
                "# Summary\n- [A](a.md)\n  - [B](./b/b.md#x)\n[web](https://example.com/x.md)\n",
            ),
            ("docs/src/a.md", ""),
            ("docs/src/b/b.md", ""),
            ("docs/README.md", ""),
        ]);
        assert_eq!(check(&book), []);
        assert_eq!(check(&tree(&[])), []);
    }

    #[test]
    fn a_page_left_out_and_an_entry_without_page_are_told() {
        let book = tree(&[(SUMMARY, "- [A](a.md)\n"), ("docs/src/b.md", "")]);
        assert_eq!(
            lines(&check(&book)),
            "docs/src/SUMMARY.md:1: links a.md, which is not there\ndocs/src/b.md: is not linked in SUMMARY.md"
        );
        assert_eq!(
            lines(&check(&tree(&[("docs/src/b.md", "")]))),
            "docs/src/b.md: is not linked in SUMMARY.md"
        );
    }
}
