//! What kernels took when they were last looked at, kept in the repository: so a change of theirs shows in review, and one that nobody
//! wanted is found.

use super::Usage;
use crate::nvcc::Nvcc;
use anyhow::{Context, Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

/// What is compared with what.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Compared {
    /// Every kernel takes what it took.
    Alike,
    /// The file is of another compiler: what that says is another matter.
    OtherCompiler(String),
}

/// Compares with the file at `path`.
///
/// # Errors
/// Each kernel that takes something else than there, that is not there, or that is no more.
pub(super) fn compare(usages: &[Usage], release: &str, path: &Path) -> Result<Compared> {
    let kept = fs::read_to_string(path).with_context(|| {
        format!(
            "{} (`cargo xtask kernels --update` makes it)",
            path.display()
        )
    })?;
    let of = release_of(&kept).with_context(|| format!("{} names no nvcc", path.display()))?;
    if of != release {
        return Ok(Compared::OtherCompiler(of.to_owned()));
    }
    let changes = changes(&kept, &text(usages, release));
    if changes.is_empty() {
        return Ok(Compared::Alike);
    }
    bail!(
        "kernels take something else than {} says (registers/spilled bytes/stack bytes/shared bytes):\n{}\
         \nif it is to be so: cargo xtask kernels --update",
        path.display(),
        changes.join("\n")
    )
}

/// Writes the file.
pub(super) fn update(usages: &[Usage], release: &str, path: &Path) -> Result<()> {
    fs::write(path, text(usages, release)).with_context(|| path.display().to_string())
}

/// `V13.0.88` out of `Cuda compilation tools, release 13.0, V13.0.88`: other builds of one release allocate otherwise.
pub(super) fn release(nvcc: &Nvcc) -> Result<String> {
    let output = Command::new(&nvcc.path).arg("--version").output();
    let output = output.with_context(|| format!("{} does not run", nvcc.path.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let number = said
        .split(", V")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next());
    let number = number.with_context(|| format!("{} names no release", nvcc.path.display()))?;
    Ok(format!("V{number}"))
}

const HEAD: &str = "# What kernels take, as ptxas says of nvcc ";

/// A line for each kernel, with a column for each target: registers, and bytes of spills, of stack and of shared memory.
fn text(usages: &[Usage], release: &str) -> String {
    let targets: BTreeSet<_> = usages
        .iter()
        .map(|u| (u.number(), &u.architecture))
        .collect();
    let mut kernels: BTreeMap<&str, BTreeMap<u32, String>> = BTreeMap::new();
    for u in usages {
        let (r, spills, stack, shared) =
            (u.registers, u.spill_bytes, u.stack_bytes, u.shared_bytes);
        let all = format!("{r}/{spills}/{stack}/{shared}");
        kernels
            .entry(&u.kernel)
            .or_default()
            .insert(u.number(), all);
    }
    let mut text = format!(
        "{HEAD}{release}: registers/spilled bytes/stack bytes/shared bytes.\n\
         # Made by `cargo xtask kernels --update`, compared by `cargo xtask kernels`.\n"
    );
    let line = |name: &str, cells: Vec<&str>| {
        let cells: String = cells.iter().map(|cell| format!(" {cell:<18}")).collect();
        format!("{name:<36}{cells}").trim_end().to_owned() + "\n"
    };
    let heads = targets.iter().map(|(_, name)| name.as_str()).collect();
    text += &line("kernel", heads);
    for (kernel, by_target) in &kernels {
        let cell = |(number, _): &(u32, &String)| by_target.get(number).map_or("-", String::as_str);
        text += &line(kernel, targets.iter().map(cell).collect());
    }
    text
}

/// The compiler that a file is of.
fn release_of(text: &str) -> Option<&str> {
    text.strip_prefix(HEAD)?.split(':').next()
}

/// Rows by their first word.
fn rows(text: &str) -> BTreeMap<&str, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?, words.collect::<Vec<_>>().join(" ")))
        })
        .collect()
}

/// What stands only in the old text, and what only in the new one, kernel by kernel.
fn changes(old: &str, new: &str) -> Vec<String> {
    let (old, new) = (rows(old), rows(new));
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut all = Vec::new();
    for name in names {
        let (was, is) = (old.get(name), new.get(name));
        if was != is {
            all.extend(was.map(|cells| format!("- {name} {cells}")));
            all.extend(is.map(|cells| format!("+ {name} {cells}")));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(kernel: &str, architecture: &str, registers: u32, spill_bytes: u32) -> Usage {
        Usage {
            kernel: kernel.into(),
            architecture: architecture.into(),
            registers,
            spill_bytes,
            stack_bytes: 8,
            shared_bytes: 1024,
        }
    }

    fn usages() -> Vec<Usage> {
        vec![
            usage("brigade_b", "sm_100", 20, 0),
            usage("brigade_b", "sm_80", 18, 0),
            usage("brigade_a", "sm_90a", 168, 4),
        ]
    }

    #[test]
    fn the_file_has_a_line_for_each_kernel_and_a_column_for_each_target() {
        insta::assert_snapshot!(text(&usages(), "V13.0.88"), @r"
        # What kernels take, as ptxas says of nvcc V13.0.88: registers/spilled bytes/stack bytes/shared bytes.
        # Made by `cargo xtask kernels --update`, compared by `cargo xtask kernels`.
        kernel                               sm_80              sm_90a             sm_100
        brigade_a                            -                  168/4/8/1024       -
        brigade_b                            18/0/8/1024        -                  20/0/8/1024
        ");
    }

    #[test]
    fn what_changed_is_refused_and_named_until_the_file_is_made_anew() {
        let shell = xshell::Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        let path = folder.path().join("resources.txt");
        let compared = |usages: &[Usage], release: &str| compare(usages, release, &path);
        let refused = |usages: &[Usage]| compared(usages, "V1.2.3").unwrap_err().to_string();
        assert!(refused(&usages()).contains("--update"), "no file");
        update(&usages(), "V1.2.3", &path).unwrap();
        assert_eq!(compared(&usages(), "V1.2.3").unwrap(), Compared::Alike);
        // The order in which they were compiled does not matter.
        let mut others = usages();
        others.reverse();
        assert_eq!(compared(&others, "V1.2.3").unwrap(), Compared::Alike);
        // One register more, a kernel more, one less.
        others[2].registers += 1;
        others.push(usage("brigade_c", "sm_80", 7, 0));
        others.retain(|u| u.kernel != "brigade_a");
        let why = refused(&others);
        for line in [
            "- brigade_b 18/0/8/1024 - 20/0/8/1024",
            "+ brigade_c 7/0/8/1024 -",
            "- brigade_a - 168/4/8/1024 -",
        ] {
            assert!(why.lines().any(|l| l == line), "no {line:?} in\n{why}");
        }
        // What another compiler says is not compared.
        let other = Compared::OtherCompiler("V1.2.3".into());
        assert_eq!(compared(&others, "V1.2.4").unwrap(), other);
        update(&others, "V1.2.4", &path).unwrap();
        assert_eq!(compared(&others, "V1.2.4").unwrap(), Compared::Alike);
        fs::write(&path, "something else\n").unwrap();
        assert!(refused(&others).contains("names no nvcc"));
    }
}
