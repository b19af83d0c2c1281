//! The host device, its ranks processes of this machine.
//!
//! A contract is a program for a rank, and talks to the other ranks through its group alone. So a trial starts this very
//! program once for each rank, to run the same trial there, where [`HostProcesses`] gives a seat to that rank only.

use crate::{
    backend::{Backend, Seat},
    killed,
    suite::{SEED, base_seed},
};
use brigade_device::{Bootstrap, Injector, Result};
use brigade_group::{Launch, TcpConfig, TcpGroup};
use brigade_host::{HostConfig, HostDevice};
use brigade_plan::Engines;
use libtest_mimic::{Failed, Trial};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    collections::BTreeMap,
    io::Read,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

/// Longest that the processes of one trial may run.
const LIMIT: Duration = Duration::from_secs(160);

/// Where trials stand whose ranks are killed: a rank that ends so is as it should be.
pub const KILLED: &str = "killed";

/// This process as a rank: the device of its own, and the group that its environment names.
#[derive(Default)]
pub struct HostProcesses {
    group: OnceLock<Result<Arc<TcpGroup>>>,
}

/// One process's group, for one communicator after the other.
struct Shared(Arc<TcpGroup>);

impl Bootstrap for Shared {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        self.0.all_gather(mine, within)
    }
}

impl HostProcesses {
    fn seat(&self, config: &HostConfig) -> Result<Vec<Seat>> {
        let join = || TcpGroup::join(&TcpConfig::from_env()?).map(Arc::new);
        let group = self.group.get_or_init(join).clone()?;
        Ok(vec![Seat {
            device: HostDevice::with(config)?,
            boot: Box::new(Shared(group)),
        }])
    }
}

impl Backend for HostProcesses {
    fn name(&self) -> &str {
        "processes"
    }

    fn worlds(&self) -> Vec<usize> {
        vec![1, 2, 3, 4, 5, 8]
    }

    fn engines(&self) -> Engines {
        Engines::host()
    }

    fn seats(&self, _: usize) -> Result<Vec<Seat>> {
        self.seat(&HostConfig::default())
    }

    fn injects(&self) -> bool {
        true
    }

    fn injected_seats(&self, _: usize, hook: &Injector) -> Result<Vec<Seat>> {
        self.seat(&HostConfig {
            inject: Some(hook.clone()),
            ..HostConfig::default()
        })
    }

    fn kill(&self) -> ! {
        kill_process(getpid(), Signal::KILL).unwrap();
        unreachable!("this process was killed")
    }
}

/// Whether this process is a rank of a trial.
fn is_rank() -> bool {
    std::env::var_os("RANK").is_some()
}

/// Whether a contract is tried between processes: linears with collectives in groups of every size, others in one of 3.
/// What is about one device alone is not, nor what is about this suite, or directs ranks through memory of its own.
fn is_tried(name: &str) -> bool {
    let parts: Vec<_> = name.split('/').collect();
    match parts[1..] {
        [_, "device" | "control", ..] | [_, "replays", "without_credits"] => false,
        [
            _,
            "gather_linear" | "linear_reduce_scatter" | "linear_all_reduce",
            ..,
        ] => true,
        [_, "quantized_gather" | "quantized_scatter" | "capture", ..] => true,
        [_, KILLED, ..] | [_, "stress", ..] => true,
        _ => parts.get(1) == Some(&"w3"),
    }
}

/// Trials whose ranks are processes; and in such a process, the trials themselves.
pub fn trials() -> Vec<Trial> {
    let mut suite = crate::suite(Arc::new(HostProcesses::default()));
    killed::add(&mut suite);
    let mut contracts = suite.into_trials();
    let seed = base_seed();
    let many = killed::trial(is_rank(), seed);
    if is_rank() {
        contracts.push(many);
        return contracts;
    }
    let trials = contracts
        .into_iter()
        .map(|contract| contract.name().to_owned())
        .filter(|name| is_tried(name))
        .map(|name| Trial::test(name.clone(), move || launch(&name, seed)));
    trials.chain([many]).collect()
}

/// The group's size, as the trial's name says it.
fn world(name: &str) -> Result<usize, Failed> {
    let size = name.split('/').nth(1).and_then(|w| w.strip_prefix('w'));
    let size = size.and_then(|n| n.parse().ok());
    size.ok_or_else(|| Failed::from(format!("{name} does not say how many ranks it has")))
}

fn this_trial(program: &Path, name: &str, seed: u64) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--exact", name, "--test-threads", "1"])
        .env(SEED, seed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a trial once more, in a process that it has to itself, and where `variable` is set.
pub fn again(name: &str, seed: u64, variable: &str) -> Result<(), Failed> {
    let mut command = this_trial(&std::env::current_exe()?, name, seed);
    let output = command.env(variable, "1").output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stderr, output.stdout].concat();
    Err(Failed::from(String::from_utf8_lossy(&text).into_owned()))
}

fn launch(name: &str, seed: u64) -> Result<(), Failed> {
    let size = world(name)?;
    let program = std::env::current_exe()?;
    let mut ranks = Launch::new(size)?.start(|_| this_trial(&program, name, seed))?;
    let outputs: Vec<_> = (0..size)
        .map(|rank| {
            let child = ranks.child(rank);
            let (out, err) = (child.stdout.take(), child.stderr.take());
            thread::spawn(move || [read(err), read(out)].concat())
        })
        .collect();
    let ended = ranks.wait(LIMIT);
    let outputs: Vec<String> = outputs
        .into_iter()
        .map(|output| output.join().unwrap_or_default())
        .collect();
    let wrong = match &ended {
        Ok(statuses) => complaints(name, statuses),
        Err(error) => BTreeMap::from([(size, error.to_string())]),
    };
    if wrong.is_empty() {
        return Ok(());
    }
    let mut text = String::new();
    for (rank, what) in &wrong {
        text += &format!("rank {rank} of {size}: {what}\n");
    }
    for (rank, output) in outputs.iter().enumerate() {
        text += &format!("---- rank {rank}\n{output}\n");
    }
    Err(text.into())
}

/// What is wrong with how ranks ended.
fn complaints(name: &str, statuses: &[ExitStatus]) -> BTreeMap<usize, String> {
    let may_die = name.contains(&format!("/{KILLED}/"));
    let is_killed = |status: &ExitStatus| status.signal() == Some(9);
    let mut wrong: BTreeMap<usize, String> = statuses
        .iter()
        .enumerate()
        .filter(|(_, status)| !(status.success() || may_die && is_killed(status)))
        .map(|(rank, status)| (rank, status.to_string()))
        .collect();
    if may_die && !statuses.iter().any(is_killed) {
        wrong.insert(statuses.len(), "no rank was killed".into());
    }
    wrong
}

fn read(from: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        // What was read until an error is worth showing.
        let _ = from.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
