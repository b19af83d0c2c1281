//! The house rules that no compiler checks. Each rule is a file; each has a test in which it must fire.

mod book;
mod files;
mod glance;
mod layers;
mod packages;
mod results;

use crate::workspace::Workspace;
use anyhow::{Context, Result};
use clap::Args;
use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Check the house rules: dependency directions, file lengths, forbidden words, the book, the results
#[derive(Debug, Args)]
pub struct Tidy {}

/// One breach of one rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Problem {
    /// Relative to the workspace's root, or a package's name.
    place: String,
    line: Option<usize>,
    what: String,
}

impl Problem {
    fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self {
            place: place.into(),
            line: None,
            what: what.into(),
        }
    }

    fn at(place: impl Into<String>, line: usize, what: impl Into<String>) -> Self {
        Self {
            line: Some(line),
            ..Self::new(place, what)
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.place, self.what),
            None => write!(f, "{}: {}", self.place, self.what),
        }
    }
}

impl Tidy {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let problems = check(&workspace.root)?;
        for problem in &problems {
            eprintln!("{problem}");
        }
        if problems.is_empty() {
            println!("tidy");
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("{} breaches of the house rules", problems.len());
        Ok(ExitCode::FAILURE)
    }
}

/// Everything that is wrong under `root`, sorted.
fn check(root: &Path) -> Result<Vec<Problem>> {
    let packages = packages::load(root)?;
    let tree = Tree::read(root)?;
    let mut problems = layers::check(&packages);
    problems.extend(packages::check(&packages));
    problems.extend(files::check(&tree));
    problems.extend(book::check(&tree));
    problems.extend(results::check(&tree));
    problems.extend(glance::check(&tree));
    problems.sort();
    Ok(problems)
}

/// Every text file of the checkout, by its path relative to the root, with `/` between its parts.
#[derive(Debug, Default)]
struct Tree {
    files: Vec<(String, String)>,
}

impl Tree {
    fn read(root: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        walk(root, &mut paths)?;
        let mut files = Vec::new();
        for path in paths {
            let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
            let Ok(text) = String::from_utf8(bytes) else {
                continue;
            };
            let relative = path.strip_prefix(root)?;
            let parts: Vec<_> = relative.iter().map(|part| part.to_string_lossy()).collect();
            files.push((parts.join("/"), text));
        }
        files.sort();
        Ok(Self { files })
    }

    /// The files under a folder, or all with the empty string.
    fn under<'a>(&'a self, folder: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(move |(path, _)| path.starts_with(folder))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }
}

/// Follows no links, and leaves out what is built, downloaded or git's own.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        if kind.is_dir() && name != "target" && name != ".git" {
            walk(&entry.path(), found)?;
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of these files.
    pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
        let own = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
        Tree {
            files: files.iter().map(own).collect(),
        }
    }

    pub(super) fn lines(problems: &[Problem]) -> String {
        let lines: Vec<_> = problems.iter().map(Problem::to_string).collect();
        lines.join("\n")
    }

    #[test]
    fn this_checkout_is_tidy() {
        let root = Workspace::find().unwrap().root;
        let problems = check(&root).unwrap();
        assert!(problems.is_empty(), "\n{}", lines(&problems));
    }

    /// A whole checkout on disk in which every rule is broken once.
    #[test]
    fn a_checkout_that_breaks_every_rule_is_told_so() {
        let shell = xshell::Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "Cargo.toml",
            "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n",
        );
        let package = |name: &str| {
            format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n")
        };
        write("crates/cuda/Cargo.toml", &package("brigade-cuda"));
        write("crates/cuda/src/lib.rs", "// Trailing. \n");
        let host =
            package("brigade-host") + "[dependencies]\nbrigade-cuda = { path = \"../cuda\" }\n";
        write("crates/host/Cargo.toml", &host);
        write("crates/host/src/lib.rs", &"//\n".repeat(601));
        write("docs/src/SUMMARY.md", "- [Gone](gone.md)\n");
        write("docs/results/one.json", "{}");
        // What is built is nobody's business.
        write("target/debug/x.rs", &"//\n".repeat(601));

        let told = lines(&check(folder.path()).unwrap());
        for want in [
            "brigade-host: must not depend on brigade-cuda",
            "brigade-cuda: has no example",
            "crates/cuda/src/lib.rs:1: trailing whitespace",
            "crates/host/src/lib.rs: 601 lines",
            "docs/src/SUMMARY.md:1: links gone.md",
            "docs/results/one.json: has no meta",
            "docs/src/at_a_glance.md: cannot be made",
        ] {
            assert!(told.contains(want), "{want} is not in\n{told}");
        }
        assert!(!told.contains("target/"), "{told}");
    }
}
