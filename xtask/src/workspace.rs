//! Where things lie, and how cargo is started.

use anyhow::{Context, Result};
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
};

/// The checkout and its build folder.
#[derive(Clone, Debug)]
pub struct Workspace {
    pub root: PathBuf,
    pub target: PathBuf,
}

impl Workspace {
    /// The checkout that this program was built from.
    pub fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask has no parent folder")?
            .to_owned();
        let metadata = cargo_metadata::MetadataCommand::new()
            .current_dir(&root)
            .no_deps()
            .exec()?;
        Ok(Self {
            target: metadata.target_directory.into_std_path_buf(),
            root,
        })
    }

    /// The folder that `cargo xtask toolchain` fills.
    pub fn toolchain(&self) -> PathBuf {
        self.target.join("toolchain")
    }

    /// The cargo that started us, in the checkout.
    pub fn cargo(&self) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.root);
        cargo
    }

    /// Whether `cargo nextest` is installed.
    pub fn has_nextest(&self) -> bool {
        self.cargo()
            .args(["nextest", "--version"])
            .output()
            .is_ok_and(|o| o.status.success())
    }
}

/// Runs to the end, with our own standard streams. `Err` only if it does not start.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    let program = command.get_program().to_string_lossy().into_owned();
    command
        .status()
        .with_context(|| format!("{program} does not start"))
}

/// Our exit code for a child's: its own, or 1 where a signal ended it.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    match status.code() {
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    }
}

/// The Python to call.
pub fn python() -> &'static str {
    if cfg!(windows) { "python" } else { "python3" }
}
