//! Starts the program.
#![allow(clippy::unwrap_used)]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// An empty folder of the test's own.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

pub fn demo() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade-demo"));
    // Errors are told without the stacks that led to them.
    command.env_remove("RUST_BACKTRACE");
    command
}

pub fn output(command: &mut Command) -> (String, String, Option<i32>) {
    let Output {
        stdout,
        stderr,
        status,
    } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(stdout), text(stderr), status.code())
}

/// Runs the synthetic model on the host, and gives what it printed.
pub fn run(arguments: &[&str]) -> String {
    let (out, err, code) = output(
        demo()
            .args(["run", "--synthetic", "--device", "host"])
            .args(arguments),
    );
    assert_eq!((code, err.as_str()), (Some(0), ""), "{arguments:?}");
    out
}

/// Runs what must fail, and gives what it told.
pub fn failure(command: &mut Command, want_code: i32) -> String {
    let (out, err, code) = output(command);
    assert_eq!((code, out.as_str()), (Some(want_code), ""), "{err}");
    err
}
