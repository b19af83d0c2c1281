//! `brigade-demo`: real models on Brigade. `cargo xtask demo` builds and runs it.

mod experts;
mod processes;
mod report;
mod trace;

use anyhow::Result;
use brigade::{DataType, DeviceChoice, OverlapMode};
use brigade_demo::{
    AdapterSpec, Message, ModelFile, Source, Synthetic, Tokenizer, divergence, fetch,
    model::cache_directory,
    parallel::{Options, Seat, TcpSeat, generate, generate_as_rank},
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::{
    io::{IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

/// Real models on Brigade.
#[derive(Parser)]
#[command(name = "brigade-demo", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch SmolLM2-135M-Instruct once, check it, and print where it lies
    Fetch,
    /// Split a model over several ranks, and let it speak
    Run(Box<Run>),
    /// Run a layer of experts over several ranks, and compare it with f64
    Moe(experts::Moe),
}

#[derive(Args)]
struct Run {
    /// How many ranks to split the model over
    #[arg(long, value_name = "N", default_value_t = 2)]
    ranks: usize,
    /// What to ask the model; several are answered side by side
    #[arg(
        long = "prompt",
        value_name = "TEXT",
        default_value = "What is gravity?"
    )]
    prompts: Vec<String>,
    /// Stop after so many tokens
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_tokens: usize,
    /// Which device carries it out
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// How communication overlaps with matrix products; auto lets the plan choose
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    mode: Mode,
    /// Make each rank a process instead of a thread. Where the environment says which rank this one is, as torchrun sets it, no others are
    /// started
    #[arg(long)]
    processes: bool,
    /// Add a random low-rank adapter for each prompt to the linears
    #[arg(long)]
    lora: bool,
    /// Write a timeline of every rank to this file (Chrome trace format); with --processes, of each rank to a file beside
    /// it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// Take this GGUF file instead of the fetched model
    #[arg(long, value_name = "PATH", conflicts_with = "synthetic")]
    model: Option<PathBuf>,
    /// Take a small random model instead of a real one
    #[arg(long)]
    synthetic: bool,
    /// Seconds after which a rank that waits for another gives up
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    deadline: u64,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Compare with the reference on one rank in f32: say where a token is another one
    #[arg(long)]
    check: bool,
    /// Go on without ranks that are lost, in a new group
    #[arg(long)]
    regroup: bool,
    /// Lose a rank after so many tokens, for instance 1@5: a thread goes away without a word, a process aborts
    #[arg(long, value_name = "RANK@TOKENS", value_parser = rank_at)]
    lose: Option<(usize, usize)>,
    /// Let a rank hang after so many tokens, likewise, until the others have gone on without it
    #[arg(long, value_name = "RANK@TOKENS", value_parser = rank_at)]
    stall: Option<(usize, usize)>,
    /// Capture a step of decoding in a CUDA graph, and launch that for the next ones (seen on two to four GPUs, with the real model); where that cannot be, say
    /// why, and go on without
    #[arg(long)]
    graph: bool,
}

fn rank_at(text: &str) -> Result<(usize, usize), String> {
    let parsed = text.split_once('@').and_then(|(rank, at)| {
        let (rank, at) = (rank.parse().ok()?, at.parse().ok()?);
        Some((rank, at))
    });
    parsed.ok_or_else(|| "a rank and a number of tokens, as 1@5".into())
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl From<Dtype> for DataType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::BF16,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Device {
    Auto,
    Host,
    Cuda,
}

impl From<Device> for DeviceChoice {
    fn from(device: Device) -> Self {
        match device {
            Device::Auto => Self::Auto,
            Device::Host => Self::Host,
            Device::Cuda => Self::Cuda,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Auto,
    Off,
    Chunked,
    Ring,
}

/// Pieces of a chunk in chunked mode.
const PIECES: u16 = 2;

/// Adapters of the `--lora` option: seed, inner width, and a scale at which they are heard without drowning the model.
const LORA: (u64, usize, f32) = (1, 8, 0.1);

impl Run {
    fn options(&self) -> Options {
        Options {
            ranks: self.ranks,
            max_tokens: self.max_tokens,
            device: self.device.into(),
            mode: match self.mode {
                Mode::Auto => None,
                Mode::Off => Some(OverlapMode::Off),
                Mode::Chunked => Some(OverlapMode::Chunked { pieces: PIECES }),
                Mode::Ring => Some(OverlapMode::Ring),
            },
            dtype: self.dtype.into(),
            lora: self.lora.then(|| AdapterSpec::new(LORA.0, LORA.1, LORA.2)),
            deadline: Duration::from_secs(self.deadline),
            regroup: self.regroup,
            // A process aborts once a token is told.
            leave: self.lose.filter(|(_, at)| !self.processes || *at == 0),
            stall: self.stall,
            graph: self.graph,
        }
    }

    fn source(&self) -> Result<(Box<dyn Source>, Tokenizer)> {
        if self.synthetic {
            let config = Synthetic::small_config();
            let tokenizer = Tokenizer::bytes(config.vocabulary)?;
            return Ok((Box::new(Synthetic::new(config, 1)?), tokenizer));
        }
        let path = match &self.model {
            Some(path) => path.clone(),
            None => fetch::fetch_model(&cache_directory()?)?,
        };
        let file = ModelFile::open(&path)?;
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        Ok((Box::new(file), tokenizer))
    }

    fn run(self) -> Result<ExitCode> {
        if !self.processes {
            return self.generate(None);
        }
        if processes::is_rank() {
            return self.generate(Some(&mut TcpSeat::from_env()?));
        }
        // Once, and not by all ranks at the same time.
        drop(self.source()?);
        let lost = [self.lose, self.stall].into_iter().flatten();
        let lost: Vec<_> = lost.map(|(rank, _)| rank).collect();
        processes::start(self.ranks, &lost)
    }

    /// With all ranks, or as the one of a group.
    fn generate(self, mut seat: Option<&mut TcpSeat>) -> Result<ExitCode> {
        let (source, tokenizer) = self.source()?;
        let prompts = self
            .prompts
            .iter()
            .map(|text| tokenizer.chat(&[Message::user(text)]))
            .collect::<brigade_demo::Result<Vec<_>>>()?;
        let me = seat.as_ref().map(|seat| seat.group().rank());
        let trace = self.trace.as_deref().map(|path| match me {
            None => trace::Trace::start(path),
            Some(rank) => trace::Trace::start(&processes::beside(path, rank)),
        });
        let trace = trace.transpose()?;
        let speaks = me.is_none_or(|rank| rank == 0);
        let mut out = std::io::stdout();
        // One answer can be shown as it grows; several are shown when they are whole.
        let live = speaks && !self.json && prompts.len() == 1 && out.is_terminal();
        let mut told = Vec::new();
        let mut shown = String::new();
        let mut first = 0;
        let lost = |told| me.is_some_and(|me| self.lose == Some((me, told)));
        let mut on_token = |sequence, token| {
            first += usize::from(sequence == 0);
            if lost(first) {
                std::process::abort();
            }
            told.push(token);
            if live && let Ok(text) = tokenizer.decode(&told) {
                let _ = write!(out, "{}", text.strip_prefix(&shown).unwrap_or(""));
                let _ = out.flush();
                shown = text;
            }
        };
        let (end, mut options) = (tokenizer.end(), self.options());
        let generated = match seat.as_deref_mut() {
            None => generate(&*source, &prompts, end, &options, &mut on_token),
            Some(seat) => {
                options.ranks = seat.group().size();
                generate_as_rank(&*source, &prompts, end, &options, seat, &mut on_token)
            }
        };
        // A timeline of what went wrong is one too.
        let traced = trace.map_or(Ok(()), trace::Trace::finish);
        let generated = generated?;
        traced?;
        // Whoever is first now.
        if seat.is_some_and(|seat| seat.group().rank() != 0) {
            return Ok(ExitCode::SUCCESS);
        }
        let divergences = match self.check {
            true => Some(divergence::of(
                &*source,
                &prompts,
                &generated.tokens,
                options.lora.as_ref(),
            )?),
            false => None,
        };
        let texts = generated
            .tokens
            .iter()
            .map(|ids| tokenizer.decode(ids))
            .collect::<brigade_demo::Result<Vec<_>>>()?;
        let report = report::Report {
            prompts: &self.prompts,
            prompt_ids: &prompts,
            texts: &texts,
            ranks: options.ranks,
            generated: &generated,
            divergences: divergences.as_deref(),
        };
        if self.json {
            writeln!(out, "{}", report.json())?;
        } else {
            write!(out, "{}", report.text(live))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Fetch => fetch_only(),
        Command::Run(run) => run.run(),
        Command::Moe(moe) => moe.run(),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            let who = processes::who();
            let _ = writeln!(std::io::stderr(), "error: {who}{}", whole(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, but for those that it tells itself.
fn whole(error: &anyhow::Error) -> String {
    let mut told = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !told.contains(&cause) {
            told = format!("{told}: {cause}");
        }
    }
    told
}

fn fetch_only() -> Result<ExitCode> {
    let path = fetch::fetch_model(&cache_directory()?)?;
    writeln!(std::io::stdout(), "{}", path.display())?;
    Ok(ExitCode::SUCCESS)
}
