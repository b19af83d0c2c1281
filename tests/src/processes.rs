//! Ranks that are processes of this machine, each with a device of its own: the host's, or a GPU.
//!
//! A contract is a program for a rank, and talks to the other ranks through its group alone. So a trial starts this very
//! program once for each rank, to run the same trial there, where `Processes` gives a seat to that rank only.

mod cuda;
mod host;

use crate::{
    backend::{Backend, Seat, takes_no_hook},
    killed,
    suite::{SEED, base_seed},
};
use brigade_cuda::Missing;
use brigade_device::{Bootstrap, Device, Injector, Result};
use brigade_group::{Launch, TcpConfig, TcpGroup};
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

/// What the ranks of a test program compute on, and what is tried with it.
pub trait Devices: Send + Sync {
    /// The first part of every trial's name.
    fn name(&self) -> &str;
    /// Group sizes to run contracts at.
    fn worlds(&self) -> Vec<usize>;
    /// Modes and algorithms that can be forced.
    fn engines(&self) -> Engines;
    /// Whether a contract is tried between processes. Its name comes in parts, from the group size on: `w3`, `faults`, ..
    fn tries(&self, name: &[&str]) -> bool;
    /// The device of a rank of this process.
    ///
    /// # Errors
    /// Why it cannot be opened.
    fn open(&self, rank: usize) -> Result<Arc<dyn Device>>;

    /// Whether devices take a hook for fault injection.
    fn injects(&self) -> bool {
        false
    }

    /// As [`open`](Self::open), with this hook.
    ///
    /// # Errors
    /// As [`open`](Self::open); a reason where [`injects`](Self::injects) is false.
    fn open_injected(&self, _rank: usize, _hook: &Injector) -> Result<Arc<dyn Device>> {
        Err(takes_no_hook(self.name()))
    }

    /// As [`Backend::has_nccl`].
    fn has_nccl(&self) -> bool {
        false
    }

    /// As [`Backend::asks_callers`].
    fn asks_callers(&self) -> bool {
        true
    }

    /// Changes what a rank's process finds in its environment.
    fn prepare(&self, _rank: &mut Command) {}

    /// How many processes are killed in a row, if there are devices for a group of `killed::WORLD` ranks.
    fn kills(&self) -> Option<usize>;

    /// Whether a process keeps files and threads of its first group for good, as a driver does.
    fn keeps(&self) -> bool {
        false
    }
}

/// This process as a rank: the device of its own, and the group that its environment names.
struct Processes {
    devices: Arc<dyn Devices>,
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

impl Processes {
    fn seat(&self, open: impl FnOnce(usize) -> Result<Arc<dyn Device>>) -> Result<Vec<Seat>> {
        let join = || TcpGroup::join(&TcpConfig::from_env()?).map(Arc::new);
        let group = self.group.get_or_init(join).clone()?;
        Ok(vec![Seat {
            device: open(group.rank())?,
            boot: Box::new(Shared(group)),
        }])
    }
}

impl Backend for Processes {
    fn name(&self) -> &str {
        self.devices.name()
    }

    fn worlds(&self) -> Vec<usize> {
        self.devices.worlds()
    }

    fn engines(&self) -> Engines {
        self.devices.engines()
    }

    fn has_nccl(&self) -> bool {
        self.devices.has_nccl()
    }

    fn seats(&self, _: usize) -> Result<Vec<Seat>> {
        self.seat(|rank| self.devices.open(rank))
    }

    fn injects(&self) -> bool {
        self.devices.injects()
    }

    fn injected_seats(&self, _: usize, hook: &Injector) -> Result<Vec<Seat>> {
        self.seat(|rank| self.devices.open_injected(rank, hook))
    }

    fn asks_callers(&self) -> bool {
        self.devices.asks_callers()
    }

    fn kill(&self) -> ! {
        kill()
    }
}

/// Ends this process as hard as it can be done.
pub fn kill() -> ! {
    kill_process(getpid(), Signal::KILL).unwrap();
    unreachable!("this process was killed")
}

/// Whether this process is a rank of a trial.
fn is_rank() -> bool {
    std::env::var_os("RANK").is_some()
}

/// Trials whose ranks are processes on the host device; and in such a process, the trials themselves.
pub fn on_host() -> Vec<Trial> {
    trials(Arc::new(host::Hosts))
}

/// As [`on_host`], with a GPU for each rank. None where there are not GPUs for two.
///
/// # Errors
/// What is missing, on hosts where no GPU can be opened.
pub fn on_gpus() -> Result<Vec<Trial>, Missing> {
    let gpus = cuda::Gpus::find(is_rank())?;
    Ok(gpus.map_or_else(Vec::new, |gpus| trials(Arc::new(gpus))))
}

fn trials(devices: Arc<dyn Devices>) -> Vec<Trial> {
    let mut suite = crate::suite(Arc::new(Processes {
        devices: Arc::clone(&devices),
        group: OnceLock::new(),
    }));
    killed::add(&mut suite);
    let mut contracts = suite.into_trials();
    let seed = base_seed();
    let many = killed::trial(&devices, is_rank(), seed);
    if is_rank() {
        contracts.extend(many);
        return contracts;
    }
    let is_tried = |name: &String| {
        let parts: Vec<_> = name.split('/').collect();
        devices.tries(&parts[1..])
    };
    let trials = contracts
        .into_iter()
        .map(|contract| contract.name().to_owned())
        .filter(is_tried)
        .map(|name| {
            let devices = Arc::clone(&devices);
            Trial::test(name.clone(), move || launch(&*devices, &name, seed))
        });
    trials.chain(many).collect()
}

/// The group's size, as the trial's name says it.
fn world(name: &str) -> Result<usize, Failed> {
    let size = name.split('/').nth(1).and_then(|w| w.strip_prefix('w'));
    let size = size.and_then(|n| n.parse().ok());
    size.ok_or_else(|| Failed::from(format!("{name} does not say how many ranks it has")))
}

/// The command that runs a trial of this program in another process.
pub fn this_trial(devices: &dyn Devices, program: &Path, name: &str, seed: u64) -> Command {
    let mut command = Command::new(program);
    devices.prepare(&mut command);
    command
        .args(["--exact", name, "--test-threads", "1"])
        .env(SEED, seed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a trial once more, in a process that it has to itself, and where `variable` is set.
pub fn again(devices: &dyn Devices, name: &str, seed: u64, variable: &str) -> Result<(), Failed> {
    let mut command = this_trial(devices, &std::env::current_exe()?, name, seed);
    let output = command.env(variable, "1").output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stderr, output.stdout].concat();
    Err(Failed::from(String::from_utf8_lossy(&text).into_owned()))
}

fn launch(devices: &dyn Devices, name: &str, seed: u64) -> Result<(), Failed> {
    let size = world(name)?;
    let program = std::env::current_exe()?;
    let command = |_| this_trial(devices, &program, name, seed);
    let mut ranks = Launch::new(size)?.start(command)?;
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
        Ok(statuses) => complaints(name, statuses, &outputs),
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

/// What the library of trials says at the end of a process that ran one.
const RAN: &str = " 1 passed";

/// What is wrong with how ranks ended.
fn complaints(name: &str, statuses: &[ExitStatus], outputs: &[String]) -> BTreeMap<usize, String> {
    let may_die = name.contains(&format!("/{KILLED}/"));
    let is_killed = |status: &ExitStatus| status.signal() == Some(9);
    let mut wrong = BTreeMap::new();
    for (rank, (status, output)) in statuses.iter().zip(outputs).enumerate() {
        if may_die && is_killed(status) {
            continue;
        }
        if !status.success() {
            wrong.insert(rank, status.to_string());
        } else if !output.contains(RAN) {
            wrong.insert(rank, "ran no trial of this name".into());
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_ran_nothing_or_was_not_killed_is_noticed() {
        let [fine, failed, killed] = [0, 1 << 8, 9].map(ExitStatus::from_raw);
        let (ran, idle) = ("test result: ok. 1 passed; 0 failed", "ok. 0 passed");
        let told = |name, ranks: &[(ExitStatus, &str)]| {
            let statuses: Vec<_> = ranks.iter().map(|r| r.0).collect();
            let outputs: Vec<_> = ranks.iter().map(|r| r.1.to_owned()).collect();
            complaints(name, &statuses, &outputs)
                .into_keys()
                .collect::<Vec<_>>()
        };
        let plain = "processes/w2/life/closed";
        assert_eq!(told(plain, &[(fine, ran), (fine, ran)]), [0; 0]);
        assert_eq!(told(plain, &[(fine, ran), (fine, idle)]), [1]);
        assert_eq!(told(plain, &[(failed, ran), (killed, "")]), [0, 1]);
        let deadly = "processes/w2/killed/barrier";
        assert_eq!(told(deadly, &[(killed, ""), (fine, ran)]), [0; 0]);
        assert_eq!(told(deadly, &[(killed, ""), (fine, idle)]), [1]);
        assert_eq!(told(deadly, &[(fine, ran), (fine, ran)]), [2]);
    }
}
