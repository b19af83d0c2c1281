//! Ranks whose processes are killed in the middle of a call: the others hear of it at once, and go on without them.

use crate::{
    backend::{Backend, Rank, Seat},
    check::{assert_kind, expect_fault},
    faults::{GRACE, Probe},
    gather_linear::config,
    ops::{self, Op},
    processes::{HostProcesses, KILLED},
    suite::{Suite, World},
};
use brigade_device::{Device, FaultKind, FaultRecord};
use brigade_group::{Address, Launch, TcpConfig, TcpGroup};
use brigade_host::HostDevice;
use libtest_mimic::{Failed, Trial};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Kills this process, in so many rounds of idling.
fn kill_soon(rank: &Rank, rounds: u32) {
    rank.dawdle(rounds);
    HostProcesses::default().kill();
}

/// Makes the call until it fails, and gives the record.
fn until_lost(rank: &Rank, op: &Op, culprit: usize) -> FaultRecord {
    loop {
        let start = Instant::now();
        let ended = op.run(rank);
        if ended.result.is_ok() {
            continue;
        }
        assert!(start.elapsed() < GRACE, "took {:?}", start.elapsed());
        let record = expect_fault(ended.result, &op.name);
        assert_kind(&record, FaultKind::PeerLost, &op.name);
        assert_eq!(record.peer as usize, culprit, "{record}");
        return record;
    }
}

/// A place in the group of those that are left. Its address follows from the old one's, and from `round`.
fn survivors(config: &TcpConfig, culprit: usize, round: usize) -> TcpGroup {
    let Address::Unix(path) = &config.address else {
        panic!("{} is no socket of this machine", config.address);
    };
    let path = path.with_extension(format!("without-{culprit}-{round}"));
    let config = config.without(&[culprit], Address::Unix(path)).unwrap();
    TcpGroup::join(&config).unwrap()
}

/// Shared memory that this process has mapped.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.matches("memfd:brigade").count()
}

/// Files that this process has open, of the kinds that groups open.
fn open_files() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = all.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let kinds = ["socket:", "pipe:", "/memfd:"];
    targets
        .filter(|t| kinds.iter().any(|k| t.to_string_lossy().starts_with(k)))
        .count()
}

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// What groups take of this process.
fn held() -> [usize; 3] {
    [open_files(), mapped(), threads()]
}

/// Communication threads end after their communicator, on their own: waits until this holds.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        let now = held();
        assert!(Instant::now() < end, "never {what}, but {now:?}");
        thread::yield_now();
    }
}

/// A rank is killed in the middle of a call.
fn killed(world: &World, op: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let after = Probe::new(&mut rng, world.size - 1);
    let culprit = rng.random_range(0..world.size);
    let rounds = rng.random_range(0..3000);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        // Nobody is killed before all are back from meeting. Who is slow may hear of it here already.
        let _ = ops::barrier().run(rank);
        if rank.rank == culprit {
            thread::scope(|s| {
                let me = &*rank;
                s.spawn(move || kill_soon(me, rounds));
                loop {
                    op.run(me).result.unwrap();
                }
            });
        }
        let record = until_lost(rank, &op, culprit);
        assert_eq!(expect_fault(rank.comm().check(), "check"), record);
        let reset = rank.comm().reset(Duration::from_millis(50));
        assert!(reset.is_err(), "reset without rank {culprit}");
        rank.leave();
        eventually("all shared memory is released", || mapped() == 0);
        let group = survivors(&TcpConfig::from_env().unwrap(), culprit, 0);
        let seat = Seat {
            device: Arc::clone(&rank.device),
            boot: Box::new(group),
        };
        after.run(&Rank::join(seat, &config()));
    });
}

/// Kills in one run of [`many`], unless the environment says otherwise.
const KILLS: usize = 100;

/// The environment variable that says how many.
const KILLS_VARIABLE: &str = "BRIGADE_KILLS";

const WORLD: usize = 3;
const VICTIM: usize = WORLD - 1;

/// Two threads of this process and another process, again and again: the process is killed, and the threads go on without
/// it. In the end this process has what it had at the beginning.
fn many(name: &str, seed: u64) {
    let kills = std::env::var(KILLS_VARIABLE).ok();
    let kills = kills.map_or(KILLS, |n| n.parse().unwrap());
    let mut rng = StdRng::seed_from_u64(seed);
    let before = held();
    for round in 0..kills {
        one(name, &mut rng, round);
        let what = format!("files, memory and threads as before kill {round}: {before:?}");
        eventually(&what, || held() == before);
    }
}

fn one(name: &str, rng: &mut StdRng, round: usize) {
    let launch = Launch::new(WORLD).unwrap();
    let variables = |rank| launch.variables(rank);
    let seed: u64 = rng.random();
    let op = op(seed);
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(crate::suite::SEED, seed.to_string())
        .envs(variables(VICTIM))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let probe = Probe::new(rng, WORLD - 1);
    thread::scope(|s| {
        for number in 0..VICTIM {
            let variables = variables(number);
            let find = move |name: &str| {
                let found = variables.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| value.clone())
            };
            let place = TcpConfig::from_variables(find).unwrap();
            let (op, probe) = (&op, &probe);
            s.spawn(move || {
                let rank = join(TcpGroup::join(&place).unwrap());
                until_lost(&rank, op, VICTIM);
                drop(rank);
                probe.run(&join(survivors(&place, VICTIM, round)));
            });
        }
    });
    assert!(!victim.wait().unwrap().success());
}

fn join(group: TcpGroup) -> Rank {
    let device: Arc<dyn Device> = HostDevice::new().unwrap();
    let boot = Box::new(group);
    Rank::join(Seat { device, boot }, &config())
}

fn op(seed: u64) -> Op {
    let mut ops = ops::all(HostProcesses::default().engines());
    ops.swap_remove(seed as usize % ops.len())
}

/// The process that is killed.
fn victim(seed: u64) {
    let rank = join(TcpGroup::join(&TcpConfig::from_env().unwrap()).unwrap());
    let rounds = StdRng::seed_from_u64(seed).random_range(0..1500);
    let op = op(seed);
    thread::scope(|s| {
        let me = &rank;
        s.spawn(move || kill_soon(me, rounds));
        loop {
            op.run(me).result.unwrap();
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for op in ops::all(suite.backend().engines()) {
        let name = format!("{KILLED}/{}", op.name);
        suite.add_from(2, &name, move |world| killed(world, op.clone()));
    }
}

/// Set in the process that [`many`] has to itself, since it counts what is open there.
const ALONE: &str = "BRIGADE_ALONE";

/// Many kills in a row.
pub fn trial(is_rank: bool, seed: u64) -> Trial {
    let name = format!("processes/w{WORLD}/{KILLED}_again_and_again");
    Trial::test(name.clone(), move || {
        let alone = std::env::var_os(ALONE).is_some();
        if !is_rank && !alone {
            return crate::processes::again(&name, seed, ALONE);
        }
        let run = || {
            if is_rank {
                victim(seed)
            } else {
                many(&name, seed)
            }
        };
        catch_unwind(AssertUnwindSafe(run))
            .map_err(|payload| Failed::from(crate::backend::panic_text(&*payload)))
    })
}
