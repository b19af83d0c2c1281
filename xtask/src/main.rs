//! Brigade's developer commands, run as `cargo xtask COMMAND`: one file each.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod beside;
mod bundle;
mod chart;
mod demo;
mod doctor;
mod glance;
mod kernels;
mod memcheck;
mod model;
mod progress;
mod test;
mod tidy;
mod toolchain;
mod workspace;

// Shared with the build script of brigade-kernels, so that both compile alike.
#[path = "../../crates/kernels/build/nvcc.rs"]
mod nvcc;
#[path = "../../crates/kernels/src/params.rs"]
#[allow(dead_code)]
mod params;
// Shared with the contracts, so that both read times alike.
#[path = "../../tests/src/stress/span.rs"]
mod span;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use workspace::Workspace;

/// Brigade's developer commands.
#[derive(Debug, Parser)]
#[command(name = "xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Demo),
    Test(test::Test),
    Doctor(doctor::Doctor),
    Tidy(tidy::Tidy),
    Toolchain(toolchain::Toolchain),
    Kernels(kernels::Kernels),
    Model(model::Model),
    Bench(bench::Bench),
    Beside(beside::Beside),
    Memcheck(memcheck::Memcheck),
    Bundle(bundle::Bundle),
    Chart(chart::Chart),
    Glance(glance::Glance),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let outcome = Workspace::find().and_then(|workspace| match command {
        Command::Demo(demo) => demo.run(&workspace),
        Command::Test(test) => test.run(&workspace),
        Command::Doctor(doctor) => doctor.run(&workspace),
        Command::Tidy(tidy) => tidy.run(&workspace),
        Command::Toolchain(toolchain) => toolchain.run(&workspace),
        Command::Kernels(kernels) => kernels.run(&workspace),
        Command::Model(model) => model.run(&workspace),
        Command::Bench(bench) => bench.run(&workspace),
        Command::Beside(beside) => beside.run(&workspace),
        Command::Memcheck(memcheck) => memcheck.run(&workspace),
        Command::Bundle(bundle) => bundle.run(&workspace),
        Command::Chart(chart) => chart.run(&workspace),
        Command::Glance(glance) => glance.run(&workspace),
    });
    outcome.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn help_is_what_the_snapshots_say() {
        let mut top = Cli::command();
        top.build();
        insta::assert_snapshot!("help", top.render_long_help().to_string());
        for command in top.get_subcommands_mut().filter(|c| c.get_name() != "help") {
            let name = format!("help_{}", command.get_name());
            insta::assert_snapshot!(name, command.render_long_help().to_string());
        }
    }

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
