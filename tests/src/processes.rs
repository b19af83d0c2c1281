//! Ranks that are processes of this machine, each with a device of its own: the host's, or a GPU.
//!
//! A contract is a program for a rank, and talks to the other ranks through its group alone. So this very program is started
//! once more for each rank, to run the same trial there, where `Processes` gives a seat to that rank only. These processes are
//! a *crew*. To start takes seconds on a GPU, so they stay for the next trial of as many ranks, which makes its own group,
//! devices and communicators. Only a trial that passed leaves its crew to another; `crews.rs` says which have new processes.

mod crew;
pub(crate) mod crews;
pub(crate) mod cuda;
mod host;
pub(crate) mod turn;

use crate::{
    backend::{Backend, Seat, takes_no_hook},
    hierarchical, killed, stress,
    suite::{SEED, Suite, asked, base_seed},
};
use brigade_cuda::Missing;
use brigade_device::{Bootstrap, Device, Injector, Result};
use brigade_group::{Address, TcpConfig, TcpGroup};
use brigade_plan::Engines;
use crews::Crews;
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    error::Error,
    fmt,
    io::{self, BufReader},
    process::{Command, ExitCode, Stdio},
    sync::{Arc, OnceLock},
    time::Duration,
};

/// Longest that one trial may run, beside the time for which somebody wants stress to go on.
const LIMIT: Duration = Duration::from_secs(160);

/// Set in the processes of a crew: the name of its devices.
const CREW: &str = "BRIGADE_CREW";

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

    /// As [`Backend::spans`].
    fn spans(&self, _shape: (usize, usize)) -> bool {
        false
    }

    /// As [`Backend::slows_rails`].
    fn slows_rails(&self) -> bool {
        false
    }

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

/// This process as a rank of one trial: the device of its own, and the group that meets at this place.
struct Processes {
    devices: Arc<dyn Devices>,
    place: Result<TcpConfig>,
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
        let join = || TcpGroup::join(self.place.as_ref().map_err(Clone::clone)?).map(Arc::new);
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

    fn spans(&self, shape: (usize, usize)) -> bool {
        self.devices.spans(shape)
    }

    fn slows_rails(&self) -> bool {
        self.devices.slows_rails()
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

/// Whether this process is a rank.
fn is_rank() -> bool {
    std::env::var_os("RANK").is_some()
}

/// A program of trials whose ranks are processes on the host device; and one of these processes.
pub fn on_host(args: &Arguments) -> ExitCode {
    run(args, &[Arc::new(host::Hosts)])
}

/// As [`on_host`], with a GPU for each rank; and with several machines, between which NCCL goes through sockets, and whose ranks have a GPU
/// each, which those of another may have too. No trials where there is no GPU.
///
/// # Errors
/// What is missing, on hosts where no GPU can be opened.
pub fn on_gpus(args: &Arguments) -> Result<ExitCode, Missing> {
    let Some(gpus) = cuda::Gpus::find(is_rank())? else {
        return Ok(libtest_mimic::run(args, Vec::new()).exit_code());
    };
    let machines = cuda::Machines::of(gpus);
    Ok(run(args, &[Arc::new(gpus), Arc::new(machines)]))
}

fn run(args: &Arguments, all: &[Arc<dyn Devices>]) -> ExitCode {
    if let Some(crew) = std::env::var_os(CREW) {
        let mine = all.iter().find(|devices| crew == devices.name());
        let served = mine.map_or_else(|| Err("no such devices".into()), serve);
        return told("this rank", served);
    }
    let seed = base_seed();
    let limit = LIMIT.saturating_add(stress::asked().unwrap_or_default());
    let crews: Vec<_> = all
        .iter()
        .map(|devices| {
            let starter = Arc::clone(devices);
            Arc::new(Crews::new(limit, move || rank_of_crew(&*starter, seed)))
        })
        .collect();
    let with_crews = all.iter().zip(&crews);
    let trials = with_crews.flat_map(|(devices, crews)| trials(devices, crews, seed, asked(args)));
    let conclusion = libtest_mimic::run(args, trials.collect());
    // What ranks' processes end with counts too: a tool around them may have found something.
    let ended = crews.iter().try_for_each(|crews| crews.end());
    match told("ranks after their trials", ended) {
        ExitCode::SUCCESS => conclusion.exit_code(),
        failure => failure,
    }
}

#[allow(clippy::print_stderr, reason = "this is the whole of a test program")]
fn told(whose: &str, ended: Result<(), impl fmt::Display>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{whose}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs trials as a rank of a crew.
fn serve(devices: &Arc<dyn Devices>) -> Result<(), Box<dyn Error>> {
    let config = TcpConfig::from_env()?;
    let input = BufReader::new(io::stdin());
    turn::serve(
        &config,
        input,
        io::stdout(),
        || kill(),
        |place, name| suite(devices, Ok(place), Some(name)).run(name),
    )?;
    Ok(())
}

/// All contracts, or the one of this name, for a rank with this place in a group.
fn suite(devices: &Arc<dyn Devices>, place: Result<TcpConfig>, only: Option<&str>) -> Suite {
    let ranks = Processes {
        devices: Arc::clone(devices),
        place,
        group: OnceLock::new(),
    };
    let mut suite = crate::suite(Arc::new(ranks), only);
    killed::add(&mut suite);
    hierarchical::add_killed(&mut suite);
    suite
}

/// The trials, each of which is run by a crew. In a process that is a rank, only those that tell ranks apart themselves.
fn trials(
    devices: &Arc<dyn Devices>,
    crews: &Arc<Crews>,
    seed: u64,
    only: Option<&str>,
) -> Vec<Trial> {
    let many = killed::trial(devices, is_rank(), seed);
    if is_rank() {
        return many.into_iter().collect();
    }
    let trials = names(devices, only).map(|name| {
        let crews = Arc::clone(crews);
        Trial::test(name.clone(), move || crews.run(&name))
    });
    trials.chain(many).collect()
}

/// The contracts that are tried, or the one of this name.
fn names(devices: &Arc<dyn Devices>, only: Option<&str>) -> impl Iterator<Item = String> {
    let all = suite(devices, TcpConfig::from_env(), only).into_names();
    all.filter(|name| {
        let parts: Vec<_> = name.split('/').collect();
        devices.tries(&parts[1..])
    })
}

/// A meeting place beside that where a group met at first.
pub fn beside(config: &TcpConfig, what: &str) -> Address {
    match &config.address {
        Address::Unix(path) => Address::Unix(path.with_extension(what)),
        other => panic!("{other} is no socket of this machine"),
    }
}

/// The command that starts this program once more.
fn this_program(devices: &dyn Devices, seed: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    devices.prepare(&mut command);
    command.env(SEED, seed.to_string());
    command
}

/// The command that starts a rank of a crew.
fn rank_of_crew(devices: &dyn Devices, seed: u64) -> Command {
    let mut command = this_program(devices, seed);
    command.env(CREW, devices.name());
    command
}

/// The command that runs a trial of this program in another process.
pub fn this_trial(devices: &dyn Devices, name: &str, seed: u64) -> Command {
    let mut command = this_program(devices, seed);
    command
        .args(["--exact", name, "--test-threads", "1"])
        .stdin(Stdio::null());
    command
}

/// Runs a trial once more, in a process that it has to itself, and where `variable` is set.
pub fn again(devices: &dyn Devices, name: &str, seed: u64, variable: &str) -> Result<(), Failed> {
    let mut command = this_trial(devices, name, seed);
    let output = command.env(variable, "1").output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stderr, output.stdout].concat();
    Err(Failed::from(String::from_utf8_lossy(&text).into_owned()))
}
