//! An nvcc for machines with no CUDA: NVIDIA's own wheels, in a Python environment under the build folder.

use crate::{
    nvcc::{self, Nvcc},
    progress,
    workspace::{Workspace, python, status},
};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Find nvcc, or install one under the build folder (105 MB)
///
/// Looks in NVCC, CUDA_HOME, CUDA_PATH, in the folder that this command fills, on PATH and in
/// /usr/local/cuda. Where there is none, pip fetches NVIDIA's wheels. The next build of
/// brigade-kernels then holds kernels.
#[derive(Debug, Args)]
pub struct Toolchain {
    /// Print the CUDA home on stdout and nothing else
    #[arg(long)]
    print: bool,
}

/// Not newer than 13.0: PTX of a newer toolkit may not load on driver 580.
const TOOLKIT: &str = "cuda-toolkit[nvcc,crt,cccl,cudart,nvvm]==13.0.2";
const TOOLS: [&str; 2] = [
    "nvidia-cuda-cuobjdump==13.2.51",
    "nvidia-cuda-nvdisasm==13.2.51",
];

impl Toolchain {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let nvcc = ensure(workspace)?;
        if self.print {
            println!("{}", home(&nvcc)?.display());
        } else {
            let (major, minor) = nvcc.version;
            println!("nvcc {major}.{minor} at {}", nvcc.path.display());
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The nvcc of this machine, installed if need be.
pub fn ensure(workspace: &Workspace) -> Result<Nvcc> {
    let folder = workspace.toolchain();
    if let Ok(nvcc) = nvcc::find(std::slice::from_ref(&folder)) {
        return Ok(nvcc);
    }
    if std::env::var_os("NVCC").is_some() {
        bail!("the nvcc that NVCC names will not do; unset it, or name another");
    }
    install(&folder)?;
    forget_builds_without_kernels(workspace)?;
    nvcc::find(&[folder]).map_err(anyhow::Error::msg)
}

/// Installs beside the final place and moves it there in one step, so that an interrupted run leaves nothing half done.
fn install(folder: &Path) -> Result<()> {
    let part = folder.with_extension("part");
    for old in [&part, folder] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("removing {}", old.display()))?;
        }
    }
    let spinner = progress::spinner("installing nvcc 13.0 by pip (105 MB)");
    let mut venv = Command::new(python());
    venv.args(["-m", "venv"]).arg(&part);
    quietly(
        &mut venv,
        "install Python 3 with its venv module (Debian: apt install python3-venv)",
    )?;
    let pip = |arguments: &[&str]| {
        let mut pip = Command::new(part.join("bin/python"));
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]);
        pip.args(arguments);
        quietly(
            &mut pip,
            "check the network and pip's settings, or set CUDA_HOME to an installed CUDA",
        )
    };
    pip(&[TOOLKIT])?;
    pip(&["--no-deps", TOOLS[0], TOOLS[1]])?;
    spinner.finish_and_clear();
    fs::rename(&part, folder).with_context(|| format!("moving {}", part.display()))?;
    eprintln!("installed nvcc under {}", folder.display());
    Ok(())
}

/// Runs with its output held back, and shows it only where the command fails.
fn quietly(command: &mut Command, remedy: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("{program} does not start; {remedy}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} failed: {}\n{remedy}", said.trim());
    }
    Ok(())
}

/// A build script runs again only when something that it named has changed, and it could not name what was not there.
fn forget_builds_without_kernels(workspace: &Workspace) -> Result<()> {
    for profile in ["dev", "release"] {
        let mut clean = workspace.cargo();
        clean.args([
            "clean",
            "--quiet",
            "--package",
            "brigade-kernels",
            "--profile",
            profile,
        ]);
        if !status(&mut clean)?.success() {
            bail!("cargo clean --package brigade-kernels failed");
        }
    }
    Ok(())
}

/// The CUDA home that an nvcc belongs to.
pub fn home(nvcc: &Nvcc) -> Result<PathBuf> {
    let path = fs::canonicalize(&nvcc.path)
        .with_context(|| format!("{} is not a path", nvcc.path.display()))?;
    path.ancestors()
        .nth(2)
        .map(Path::to_owned)
        .with_context(|| format!("{} lies in no CUDA home", path.display()))
}
