//! Packs the tests that need a GPU, and the benchmark, for a host that has one, and neither Rust nor a network.

mod candle;
mod runner;

use crate::{
    nvcc, toolchain,
    workspace::{Workspace, status},
};
use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::Message;
use clap::Args;
use std::{
    ffi::OsString,
    fs,
    io::BufReader,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

/// Pack GPU tests and brigade-perf for a host without Rust: stripped programs, kernels and run.sh
///
/// The programs hold their kernels and make their trials from the GPUs that they find. On the GPU host, `brigade-perf
/// doctor` says what it has and lacks, `run.sh` runs them all, and `run.sh gemm quantize` those trials whose names hold
/// one of the words. `run.sh memcheck` runs some with small shapes under compute-sanitizer, behind a planted fault that it must
/// find. With `BRIGADE_WRAP` set, each program runs under that command.
#[derive(Debug, Args)]
pub struct Bundle {
    /// Folder to fill; what it holds is removed first [default: bundle in the build folder]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Pack brigade-candle's GPU tests, the demo and `brigade-perf block` instead, with candle's kernels [default folder: bundle-candle]
    #[arg(long)]
    candle: bool,
    /// With --candle: load the libraries of this CUDA, as cudarc writes versions: 12060, 13000
    #[arg(
        long,
        value_name = "VERSION",
        default_value = "13000",
        requires = "candle"
    )]
    cuda: String,
    /// With --candle: the GPUs that candle's kernels are compiled for, as it writes compute capabilities
    #[arg(long, value_name = "NUMBER", default_value_t = 90, requires = "candle")]
    compute_cap: u32,
}

/// Packages and their test programs.
const PROGRAMS: [(&str, &str); 3] = [
    ("brigade-cuda", "gpu"),
    ("brigade-conformance", "cuda"),
    ("brigade-conformance", "cuda_processes"),
];

/// The program that measures, and its package. It is run by hand.
const BENCHMARK: &str = "brigade-perf";

/// More than this does not travel well.
const LARGEST_BYTES: u64 = 64 << 20;

/// What the programs travel in.
const ARCHIVE: &str = "programs.tar.xz";

/// Each program has the same kernels: a window as wide as all of them finds those again, where gzip's of 32 KiB finds none.
const PACKER: &str = "--use-compress-program=xz -T1 --lzma2=preset=4,dict=256MiB";

/// What runs everything, and marks a folder as a bundle by its title, so that no other is emptied.
const MARK: &str = "run.sh";

impl Bundle {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let nvcc = toolchain::ensure(workspace)?;
        let folder = if self.candle {
            "bundle-candle"
        } else {
            "bundle"
        };
        let out = self.out.clone();
        let out = out.unwrap_or_else(|| workspace.target.join(folder));
        empty(&out)?;
        let programs = match self.candle {
            true => self.build_candle(workspace, &nvcc)?,
            false => self.build(workspace)?,
        };
        for (name, from) in &programs {
            let to = out.join(name);
            fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))?;
        }
        let by_hand = |name: &str| candle::BINARIES.contains(&name);
        let all: Vec<_> = programs.iter().map(|(name, _)| name.as_str()).collect();
        let tests: Vec<_> = all.iter().copied().filter(|name| !by_hand(name)).collect();
        pack(&out, &all)?;
        if !self.candle {
            kernels(workspace, &nvcc, &out.join("kernels"))?;
        }
        script(&out.join(MARK), &runner::text(&tests))?;
        let bytes = size(&out)?;
        if bytes > LARGEST_BYTES {
            bail!("the bundle has {bytes} bytes, {LARGEST_BYTES} at most");
        }
        println!("{:.1} MB in {}", bytes as f64 / 1e6, out.display());
        Ok(ExitCode::SUCCESS)
    }

    /// Builds all programs; names and paths.
    fn build(&self, workspace: &Workspace) -> Result<Vec<(String, PathBuf)>> {
        let tests = PROGRAMS.map(|(_, test)| test);
        let mut found = self.artifacts(workspace, &self.arguments(), &tests, &[])?;
        found.extend(self.artifacts(workspace, &self.benchmark(), &[BENCHMARK], &[])?);
        Ok(found)
    }

    /// The same of those that are built with candle's kernels.
    fn build_candle(
        &self,
        workspace: &Workspace,
        nvcc: &nvcc::Nvcc,
    ) -> Result<Vec<(String, PathBuf)>> {
        let home = candle::home(workspace, nvcc, &self.cuda)?;
        let environment = [
            ("CUDA_HOME", home.clone().into_os_string()),
            ("CUDA_PATH", home.into_os_string()),
            ("NVCC", nvcc.path.clone().into_os_string()),
            ("CUDARC_CUDA_VERSION", self.cuda.clone().into()),
            ("CUDA_COMPUTE_CAP", self.compute_cap.to_string().into()),
        ];
        let [binaries, tests] = self.with_candle();
        let mut found = self.artifacts(workspace, &binaries, &candle::BINARIES, &environment)?;
        let (target, name) = candle::TEST;
        let tests = self.artifacts(workspace, &tests, &[target], &environment)?;
        found.extend(tests.into_iter().map(|(_, path)| (name.to_owned(), path)));
        Ok(found)
    }

    /// Builds what cargo is asked for, with these variables; names and paths of the wanted programs, sorted.
    fn artifacts(
        &self,
        workspace: &Workspace,
        arguments: &[&str],
        wanted: &[&str],
        environment: &[(&str, OsString)],
    ) -> Result<Vec<(String, PathBuf)>> {
        let mut cargo = workspace.cargo();
        cargo
            .args(arguments)
            .env("BRIGADE_REQUIRE_CUDA", "1")
            .env("BRIGADE_COMMIT", commit(workspace))
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped());
        let mut child = cargo.spawn().context("cargo does not start")?;
        let output = child.stdout.take().context("cargo has no output")?;
        let mut found = Vec::new();
        for message in Message::parse_stream(BufReader::new(output)) {
            let Message::CompilerArtifact(artifact) = message? else {
                continue;
            };
            let wanted = wanted.contains(&artifact.target.name.as_str());
            if let Some(path) = artifact.executable.filter(|_| wanted) {
                found.push((artifact.target.name.clone(), path.into_std_path_buf()));
            }
        }
        if !child.wait()?.success() {
            bail!("the programs do not build");
        }
        if found.len() != wanted.len() {
            bail!("{} programs instead of {}", found.len(), wanted.len());
        }
        found.sort();
        Ok(found)
    }

    fn arguments(&self) -> Vec<&'static str> {
        let mut arguments = command(&["test", "--no-run"]);
        for (package, test) in PROGRAMS {
            arguments.extend(["--package", package, "--test", test]);
        }
        arguments
    }

    fn benchmark(&self) -> Vec<&'static str> {
        let mut arguments = command(&["build"]);
        arguments.extend(["--package", BENCHMARK, "--bin", BENCHMARK]);
        arguments
    }

    /// Programs, and tests: of the same packages with the same features, so that what both need is built once.
    fn with_candle(&self) -> [Vec<&'static str>; 2] {
        let of_all = |what: &[&'static str]| {
            let mut arguments = command(what);
            for package in candle::PACKAGES {
                arguments.extend(["--package", package]);
            }
            arguments.extend(["--features", candle::FEATURES]);
            arguments
        };
        let mut binaries = of_all(&["build"]);
        for name in candle::BINARIES {
            binaries.extend(["--bin", name]);
        }
        let mut tests = of_all(&["test", "--no-run"]);
        tests.extend(["--test", candle::TEST.0]);
        [binaries, tests]
    }
}

/// Arguments of a call of cargo's that tells what it built.
fn command(what: &[&'static str]) -> Vec<&'static str> {
    let mut arguments = what.to_vec();
    arguments.extend(["--message-format", "json-render-diagnostics", "--release"]);
    arguments
}

/// The commit that the programs are made from, with a plus behind it if there is more than that.
pub fn commit(workspace: &Workspace) -> String {
    let said = |arguments: &[&str]| {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(&workspace.root)
            .output();
        output
            .ok()
            .filter(|o| o.status.success())
            .map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
    };
    let sources = [
        "status",
        "--porcelain",
        "--",
        "*.rs",
        "*.cu",
        "*.cuh",
        "*.toml",
        "Cargo.lock",
        "crates/plan/tables",
    ];
    let more = said(&sources).is_some_and(|s| !s.is_empty());
    let commit = said(&["rev-parse", "--short=12", "HEAD"]);
    commit.map_or_else(|| "unknown".into(), |c| if more { c + "+" } else { c })
}

/// Removes what an earlier bundle left, and nothing that is not one.
fn empty(out: &Path) -> Result<()> {
    if out.exists() {
        let script = fs::read_to_string(out.join(MARK));
        let ours = script.is_ok_and(|text| text.contains(runner::TITLE));
        let ours = ours || fs::read_dir(out)?.next().is_none();
        if !ours {
            bail!("{} holds something else than a bundle", out.display());
        }
        fs::remove_dir_all(out).with_context(|| format!("removing {}", out.display()))?;
    }
    fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))
}

/// The fatbins, for cuobjdump and the like; the programs hold the same.
fn kernels(workspace: &Workspace, nvcc: &nvcc::Nvcc, out: &Path) -> Result<()> {
    fs::create_dir_all(out)?;
    for one in crate::kernels::compile(workspace, nvcc)? {
        let to = out.join(format!("{}.fatbin", one.name));
        fs::copy(&one.fatbin, &to).with_context(|| to.display().to_string())?;
    }
    Ok(())
}

/// Moves these files of a folder into the archive there.
fn pack(folder: &Path, names: &[&str]) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--remove-files", PACKER, "-cf", ARCHIVE]);
    let ended = status(tar.args(names).current_dir(folder))?;
    ensure!(ended.success(), "tar does not pack {}", names.join(" "));
    Ok(())
}

fn script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() {
            size(&entry.path())?
        } else {
            entry.metadata()?.len()
        };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle() -> Bundle {
        Bundle {
            out: None,
            candle: false,
            cuda: "13000".into(),
            compute_cap: 90,
        }
    }

    #[test]
    fn which_cuda_is_asked_with_candle_alone() {
        let parsed = |line: &str| {
            let command = Bundle::augment_args(clap::Command::new("bundle"));
            let words = line.split_whitespace();
            command.try_get_matches_from(words).is_ok()
        };
        assert!(parsed("bundle") && parsed("bundle --candle"));
        assert!(parsed("bundle --candle --cuda 12060 --compute-cap 80"));
        assert!(!parsed("bundle --cuda 12060") && !parsed("bundle --compute-cap 80"));
    }

    #[test]
    fn programs_with_candle_are_built_with_the_same_features() {
        let packages = "--package brigade-candle --package brigade-demo --package brigade-perf \
                        --features brigade-candle/cuda,brigade-demo/cuda,brigade-perf/candle";
        let told = "--message-format json-render-diagnostics";
        let [binaries, tests] = bundle().with_candle().map(|words| words.join(" "));
        assert_eq!(
            binaries,
            format!("build {told} --release {packages} --bin brigade-demo --bin brigade-perf")
        );
        assert_eq!(
            tests,
            format!("test --no-run {told} --release {packages} --test gpu")
        );
    }

    #[test]
    fn the_programs_are_built_in_one_call() {
        let release = bundle().arguments().join(" ");
        assert!(
            release.starts_with(
                "test --no-run --message-format json-render-diagnostics --release --package"
            ),
            "{release}"
        );
        assert!(
            release.ends_with("--package brigade-conformance --test cuda_processes"),
            "{release}"
        );
        assert_eq!(release.matches("--test ").count(), PROGRAMS.len());
    }

    #[test]
    fn only_a_bundle_or_nothing_is_removed() {
        let shell = xshell::Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        let out = folder.path().join("out");
        empty(&out).unwrap();
        empty(&out).unwrap();
        fs::write(out.join("letter"), "dear").unwrap();
        assert!(empty(&out).is_err());
        assert!(out.join("letter").is_file());
        // A script of somebody else's.
        script(&out.join(MARK), "#!/bin/sh\nall my work\n").unwrap();
        assert!(empty(&out).is_err());
        assert!(out.join("letter").is_file());
        script(&out.join(MARK), &runner::text(&["a"])).unwrap();
        empty(&out).unwrap();
        assert_eq!(size(&out).unwrap(), 0);
    }
}
