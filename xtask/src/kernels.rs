//! Compiles the kernels as the build does, says what each costs, and compares that with what it cost before.

mod resources;

use crate::{
    nvcc::{self, Compiled, Nvcc},
    params, progress, toolchain,
    workspace::Workspace,
};
use anyhow::{Context, Result, bail};
use clap::Args;
use resources::Compared;
use std::{path::PathBuf, process::ExitCode};

/// Compile kernels/*.cu to fatbins under the build folder, and report registers, spills and shared memory
///
/// One fatbin per file, with machine code for sm_80, sm_90a and sm_100 and PTX for later GPUs. What they take is compared with
/// kernels/resources.txt, where nvcc is the one that the file is of: a difference is a failure.
#[derive(Debug, Args)]
pub struct Kernels {
    /// Fail if a kernel spills registers to memory
    #[arg(long)]
    deny_spills: bool,
    /// Write kernels/resources.txt anew instead of comparing with it
    #[arg(long)]
    update: bool,
}

/// What ptxas says about one kernel on one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Usage {
    kernel: String,
    architecture: String,
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
    shared_bytes: u32,
}

impl Kernels {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let nvcc = toolchain::ensure(workspace)?;
        let all = compile(workspace, &nvcc)?;
        let mut usages = Vec::new();
        for one in &all {
            let about = || format!("ptxas about {}.cu", one.name);
            usages.extend(parse(&one.said).with_context(about)?);
        }
        usages.sort_by(|a, b| (&a.kernel, a.number()).cmp(&(&b.kernel, b.number())));
        print!("{}", table(&usages));
        println!("{} fatbins in {}", all.len(), folder(workspace).display());
        self.keep_or_compare(workspace, &nvcc, &usages)?;
        let spilling = usages.iter().filter(|u| u.spill_bytes > 0).count();
        if self.deny_spills && spilling > 0 {
            bail!("{spilling} kernels spill registers");
        }
        Ok(ExitCode::SUCCESS)
    }

    fn keep_or_compare(&self, workspace: &Workspace, nvcc: &Nvcc, usages: &[Usage]) -> Result<()> {
        let path = workspace.root.join("kernels/resources.txt");
        let release = resources::release(nvcc)?;
        if self.update {
            resources::update(usages, &release, &path)?;
            println!("{} is of nvcc {release}", path.display());
            return Ok(());
        }
        match resources::compare(usages, &release, &path)? {
            Compared::Alike => println!("as {} says", path.display()),
            Compared::OtherCompiler(of) => {
                println!(
                    "not compared: {} is of nvcc {of}, this is {release}",
                    path.display()
                );
            }
        }
        Ok(())
    }
}

/// Where fatbins are kept: builds take them from there.
fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("kernels")
}

/// Compiles all kernels that are not compiled.
pub fn compile(workspace: &Workspace, nvcc: &Nvcc) -> Result<Vec<Compiled>> {
    let from = workspace.root.join("kernels");
    let bar = progress::bar(nvcc::sources(&from)?.len());
    let told = |name: &str| {
        bar.set_message(format!("{name}.cu"));
        bar.inc(1);
    };
    let all = nvcc.compile(&from, &params::header(), &folder(workspace), &told);
    bar.finish_and_clear();
    all.map_err(anyhow::Error::msg)
}

fn table(usages: &[Usage]) -> String {
    let mut text = format!(
        "{:<24} {:<8} {:>9} {:>7} {:>7} {:>8}\n",
        "kernel", "target", "registers", "spill B", "stack B", "shared B"
    );
    for u in usages {
        text += &format!(
            "{:<24} {:<8} {:>9} {:>7} {:>7} {:>8}\n",
            u.kernel, u.architecture, u.registers, u.spill_bytes, u.stack_bytes, u.shared_bytes
        );
    }
    text
}

/// Reads the output of `ptxas -v`: an entry line, a line of stack and spills, a line of registers and shared memory; then
/// lines of stack and spills of the functions that the kernel calls, which count as its own.
fn parse(said: &str) -> Result<Vec<Usage>> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in said.lines() {
        if line.contains("Compiling entry function") {
            let mut quoted = line.split('\'').skip(1).step_by(2);
            usages.push(Usage {
                kernel: quoted.next().context("no kernel")?.to_owned(),
                architecture: quoted.next().context("no architecture")?.to_owned(),
                ..Usage::default()
            });
            continue;
        }
        let Some(usage) = usages.last_mut() else {
            continue;
        };
        if line.contains("bytes stack frame") {
            usage.stack_bytes += before(line, " bytes stack frame").context("no stack")?;
            usage.spill_bytes += before(line, " bytes spill stores").context("no spill stores")?
                + before(line, " bytes spill loads").context("no spill loads")?;
        } else if line.contains(" registers") && line.contains("Used ") {
            usage.registers = before(line, " registers").context("no registers")?;
            usage.shared_bytes = before(line, " bytes smem").unwrap_or(0);
        }
    }
    if let Some(bare) = usages.iter().find(|u| u.registers == 0) {
        bail!("no registers for {}", bare.kernel);
    }
    usages.sort_by(|a, b| (&a.kernel, a.number()).cmp(&(&b.kernel, b.number())));
    Ok(usages)
}

impl Usage {
    /// 80 of `sm_80`, 90 of `sm_90a`.
    fn number(&self) -> u32 {
        let digits: String = self
            .architecture
            .chars()
            .filter(char::is_ascii_digit)
            .collect();
        digits.parse().unwrap_or(0)
    }
}

/// The number right before `what`.
fn before(line: &str, what: &str) -> Option<u32> {
    let head = &line[..line.find(what)?];
    let digits = head
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + 1);
    head[digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A compiler that writes what it was given, and counts its runs.
    #[cfg(unix)]
    const COUNTS: &str = r#"#!/bin/sh
if [ "$1" = --version ]; then echo "release 13.0, V13.0.0"; exit 0; fi
for last; do :; done
while [ "$1" != -o ]; do shift; done
grep -q broken "$last" && { echo "$last is broken" >&2; exit 1; }
echo run >> "$(dirname "$0")/runs"
cat "$last" > "$2"
echo "ptxas about $(basename "$last")"
"#;

    #[cfg(unix)]
    #[test]
    fn what_is_compiled_is_compiled_again_only_if_its_text_changed() {
        use std::{fs, os::unix::fs::PermissionsExt};
        let shell = xshell::Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("cu")).unwrap();
        let write = |name: &str, text: &str| fs::write(at("cu").join(name), text).unwrap();
        write("one.cu", "#include \"a.cuh\"\n");
        write("two.cu", "#include \"params.cuh\"\n");
        write("a.cuh", "#include \"b.cuh\"\n");
        write("b.cuh", "\n");
        fs::write(at("nvcc"), COUNTS).unwrap();
        fs::set_permissions(at("nvcc"), fs::Permissions::from_mode(0o755)).unwrap();
        let nvcc = Nvcc::at(&at("nvcc")).unwrap();
        let compile = |header: &str| {
            let _ = fs::remove_file(at("runs"));
            let all = nvcc.compile(&at("cu"), header, &at("out"), &|_| {})?;
            let names: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
            assert_eq!(names, ["one", "two"]);
            for one in &all {
                let source = at("cu").join(format!("{}.cu", one.name));
                assert_eq!(fs::read(&one.fatbin).unwrap(), fs::read(source).unwrap());
                assert_eq!(one.said, format!("ptxas about {}.cu\n", one.name));
            }
            let runs = fs::read_to_string(at("runs")).unwrap_or_default();
            Ok::<_, String>(runs.lines().count())
        };
        assert_eq!(compile("struct P;"), Ok(2));
        assert_eq!(compile("struct P;"), Ok(0));
        // What only one of them includes, and through another file.
        write("b.cuh", "// other\n");
        assert_eq!(compile("struct P;"), Ok(1));
        assert_eq!(compile("struct Q;"), Ok(1));
        assert_eq!(compile("struct P;"), Ok(0));
        write("two.cu", "broken\n");
        let error = compile("struct P;").unwrap_err();
        assert!(error.contains("two.cu is broken"), "{error}");
    }

    const SAID: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'brigade_b' for 'sm_100'
ptxas info    : Function properties for brigade_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers
ptxas info    : Compiling entry function 'brigade_b' for 'sm_90a'
ptxas info    : Function properties for brigade_b
    40 bytes stack frame, 36 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 40 bytes cumulative stack size, 1024 bytes smem, 384 bytes cmem[0]
ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
";

    #[test]
    fn ptxas_output_becomes_a_table() {
        insta::assert_snapshot!(table(&parse(SAID).unwrap()), @r"
        kernel                   target   registers spill B stack B shared B
        brigade_b                sm_90a          32      68      48     1024
        brigade_b                sm_100          18       0       0        0
        ");
    }

    #[test]
    fn a_report_without_registers_is_refused() {
        let cut = SAID.lines().take(2).collect::<Vec<_>>().join("\n");
        assert!(parse(&cut).is_err());
        assert_eq!(parse("").unwrap(), []);
    }
}
