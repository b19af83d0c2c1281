//! Whether Brigade builds in one program with candle's CUDA feature, on a machine that has no CUDA.

use crate::workspace::{Workspace, exit_code, status};
use anyhow::{Context, Result};
use clap::Args;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Check that brigade-candle compiles with CUDA, where candle and Brigade share one cudarc
///
/// cargo gives a crate that two others use the features of both, and candle asks cudarc for others than Brigade does: so the check is
/// a program of its own, under the build folder. candle's kernels are not compiled: a script that makes empty files takes nvcc's place.
#[derive(Debug, Args)]
pub struct Beside {
    /// Follow the bindings of this CUDA, as cudarc writes versions: 12060, 13000
    #[arg(long, value_name = "VERSION", default_value = "13000")]
    cuda: String,
}

const MANIFEST: &str = r#"[package]
name = "beside"
version = "0.0.0"
edition = "2024"
publish = false

[workspace]

[dependencies]
brigade-candle = { path = "ROOT/crates/candle", features = ["cuda"] }
brigade-demo = { path = "ROOT/crates/demo", features = ["cuda"] }
candle-core = { version = "0.11", features = ["nccl"] }
libtest-mimic = "0.8"
rand = "0.9"

[features]
default = ["cuda"]
cuda = []

# Tests of the layers on GPUs, which nothing else compiles here.
[[test]]
name = "gpu"
path = "ROOT/crates/candle/tests/gpu/main.rs"
harness = false

"#;

/// So that nobody else is given these kernels, which are empty.
const APART: &str = "profile.dev.package.candle-kernels.codegen-units=3";

/// The library: what the book shows of cudarc's NCCL, which nothing else compiles either.
const LIBRARY: &str = r#"#[path = "ROOT/docs/examples/from_nccl.rs"]
pub mod from_nccl;
"#;

/// What candle's build script asks of nvcc: its version, and files that are there when it has ended.
const NVCC: &str = r#"#!/bin/sh
# In place of nvcc, where nothing is compiled to be run. So old that Brigade's own kernels look for another one.
into=.
while [ $# -gt 0 ]; do
    case $1 in
        --version) echo "Cuda compilation tools, release 1.0, V1.0.0" ;;
        -o) shift; : > "$1" ;;
        --output-directory) shift; into=$1 ;;
        --ptx) ptx=yes ;;
        *.cu) [ -z "$ptx" ] || : > "$into/$(basename "$1" .cu).ptx" ;;
    esac
    shift
done
"#;

impl Beside {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let folder = workspace.target.join("beside");
        let bin = lay_out(workspace, &folder)?;
        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths([bin].into_iter().chain(env::split_paths(&path)))?;
        // With the same candle as the program, which is built once then.
        let perf =
            "clippy --package brigade-perf --features candle,candle-core/nccl -- -D warnings";
        for (from, what) in [(&folder, "check --tests"), (&workspace.root, perf)] {
            let mut cargo = workspace.cargo();
            cargo
                .args(["--config", APART])
                .current_dir(from)
                .args(what.split(' '))
                .env("PATH", &path)
                // candle would take it before the one in `PATH`.
                .env_remove("NVCC")
                // Most of it is what clippy has built, or the next one will.
                .env("CARGO_TARGET_DIR", &workspace.target)
                .env("CUDARC_CUDA_VERSION", &self.cuda)
                .env("CUDA_COMPUTE_CAP", "90");
            let ended = status(&mut cargo)?;
            if !ended.success() {
                return Ok(exit_code(ended));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes the program and the script. Returns the folder of the script.
fn lay_out(workspace: &Workspace, folder: &Path) -> Result<PathBuf> {
    let bin = folder.join("cuda/bin");
    for folder in [&bin, &folder.join("cuda/include"), &folder.join("src")] {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let rooted = |text: &str| text.replace("ROOT", &workspace.root.display().to_string());
    let manifest = rooted(MANIFEST);
    let ours = fs::read_to_string(workspace.root.join("Cargo.toml"))?;
    let profiles = ours.find("[profile.").map_or("", |at| &ours[at..]);
    let manifest = manifest + profiles;
    write(&folder.join("Cargo.toml"), &manifest)?;
    write(&folder.join("src/lib.rs"), &rooted(LIBRARY))?;
    // The same versions as everywhere.
    fs::copy(workspace.root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let nvcc = bin.join("nvcc");
    write(&nvcc, NVCC)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))?;
    }
    Ok(bin)
}

/// Leaves a file alone that is as it should be, so that nothing is built anew.
fn write(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    fs::write(path, text).with_context(|| path.display().to_string())
}
