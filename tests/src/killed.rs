//! Ranks whose processes are killed in the middle of a call: the others hear of it at once, and go on without them.

use crate::{
    backend::{Rank, Seat},
    check::{assert_close, assert_kind, expect_fault},
    faults::{GRACE, Probe},
    gather_linear::config,
    matrix::Matrix,
    ops::{self, Op},
    oracle,
    processes::{self, Devices, KILLED},
    suite::{Suite, World},
};
use brigade_device::{DataType, FaultKind, FaultRecord, GemmParams, Output};
use brigade_group::{Launch, TcpConfig, TcpGroup};
use brigade_plan::Engines;
use libtest_mimic::{Failed, Trial};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::Stdio,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Kills this process, in so many rounds of idling.
fn kill_soon(rank: &Rank, rounds: u32) {
    rank.dawdle(rounds);
    processes::kill();
}

/// A plain product: what a device can do without a group.
struct Product {
    a: Matrix,
    b: Matrix,
    want: Vec<f64>,
}

impl Product {
    /// Draws its numbers.
    fn new(rng: &mut StdRng) -> Self {
        let mut draw = |dims| Matrix::random(rng, DataType::F32, dims, 1.0);
        let (a, b) = (draw(&[7, 11]), draw(&[11, 5]));
        let want = oracle::multiply(&a, false, &b, false);
        Self { a, b, want }
    }

    /// Makes it on the stream of the lost group's calls, and asserts the result.
    fn run(&self, rank: &Rank) {
        let (a, b) = (rank.upload(&self.a), rank.upload(&self.b));
        let output = Output::Allocate(DataType::F32);
        let product = GemmParams::new(&a, &b);
        let d = rank.device.gemm(&rank.stream, &product, output);
        let got = rank.values(d.unwrap().unwrap().view());
        assert_close(&got, &self.want, DataType::F32, "after a rank was lost");
    }
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

/// A place in the group of those that are left. Its address follows from the old one's, from who is lost, and from `round`.
pub fn survivors(config: &TcpConfig, lost: &[usize], round: usize) -> TcpGroup {
    let names: Vec<_> = lost.iter().map(usize::to_string).collect();
    let address = processes::beside(config, &format!("without-{}-{round}", names.join("-")));
    let config = config.without(lost, address).unwrap();
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

/// What groups take of this process: files, memory and threads.
fn held() -> [usize; 3] {
    [open_files(), mapped(), threads()]
}

/// Whether this process has no more of anything than it had.
fn no_more_than(before: [usize; 3]) -> bool {
    held()
        .iter()
        .zip(before)
        .all(|(&now, before)| now <= before)
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
    let product = Product::new(&mut rng);
    let culprit = rng.random_range(0..world.size);
    let rounds = rng.random_range(0..3000);
    world.run(&config(), move |rank| {
        probe.run(rank);
        // What the device loads at the first call is there when a rank is killed in one.
        op.run(rank).result.unwrap();
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
        product.run(rank);
        assert_eq!(expect_fault(rank.comm().check(), "check"), record);
        let reset = rank.comm().reset(Duration::from_millis(50));
        assert!(reset.is_err(), "reset without rank {culprit}");
        rank.leave();
        eventually("all shared memory is released", || mapped() == 0);
        let group = survivors(&TcpConfig::from_env().unwrap(), &[culprit], 0);
        let seat = Seat {
            device: Arc::clone(&rank.device),
            boot: Box::new(group),
        };
        after.run(&Rank::join(seat, &config()));
    });
}

/// The environment variable that says how many are killed in one run of [`many`].
const KILLS_VARIABLE: &str = "BRIGADE_KILLS";

/// Ranks in the groups of [`many`].
pub const WORLD: usize = 3;
const VICTIM: usize = WORLD - 1;

/// Two threads of this process and another process, again and again: the process is killed, and the threads go on without
/// it. In the end this process has what it had at the beginning.
fn many(devices: &dyn Devices, name: &str, seed: u64, kills: usize) {
    let set = std::env::var(KILLS_VARIABLE).ok();
    let kills = set.map_or(kills, |n| n.parse().unwrap());
    let mut rng = StdRng::seed_from_u64(seed);
    let mut before = held();
    let first = usize::from(devices.keeps());
    for round in 0..first + kills {
        one(devices, name, &mut rng, round);
        if round < first {
            eventually("all shared memory is released", || mapped() == 0);
            before = held();
        }
        let what = format!("files, memory and threads as before kill {round}: {before:?}");
        eventually(&what, || no_more_than(before));
    }
}

fn one(devices: &dyn Devices, name: &str, rng: &mut StdRng, round: usize) {
    let launch = Launch::new(WORLD).unwrap();
    let variables = |rank| launch.variables(rank);
    let seed: u64 = rng.random();
    let op = op(devices.engines(), seed);
    let mut victim = processes::this_trial(devices, name, seed)
        .envs(variables(VICTIM))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
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
                let join = |group| join(devices, number, group);
                let rank = join(TcpGroup::join(&place).unwrap());
                until_lost(&rank, op, VICTIM);
                drop(rank);
                probe.run(&join(survivors(&place, &[VICTIM], round)));
            });
        }
    });
    assert!(!victim.wait().unwrap().success());
}

/// Rank `number` of the first group, in this one.
fn join(devices: &dyn Devices, number: usize, group: TcpGroup) -> Rank {
    let device = devices.open(number).unwrap();
    let boot = Box::new(group);
    Rank::join(Seat { device, boot }, &config())
}

fn op(engines: Engines, seed: u64) -> Op {
    let mut ops = ops::all(engines);
    ops.swap_remove(seed as usize % ops.len())
}

/// The process that is killed.
fn victim(devices: &dyn Devices, seed: u64) {
    let group = TcpGroup::join(&TcpConfig::from_env().unwrap()).unwrap();
    let rank = join(devices, VICTIM, group);
    let rounds = StdRng::seed_from_u64(seed).random_range(0..1500);
    let op = op(devices.engines(), seed);
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
    // In the midst of a message of many pieces, too.
    let long = ops::send_recv(500_000);
    for op in ops::all(suite.backend().engines())
        .into_iter()
        .chain([long])
    {
        let name = format!("{KILLED}/{}", op.name);
        suite.add_from(2, &name, move |world| killed(world, op.clone()));
    }
}

/// Set in the process that [`many`] has to itself, since it counts what is open there.
const ALONE: &str = "BRIGADE_ALONE";

/// Many kills in a row, where there are devices for that.
pub fn trial(devices: &Arc<dyn Devices>, is_rank: bool, seed: u64) -> Option<Trial> {
    let kills = devices.kills()?;
    let devices = Arc::clone(devices);
    let name = format!("{}/w{WORLD}/{KILLED}_again_and_again", devices.name());
    Some(Trial::test(name.clone(), move || {
        let alone = std::env::var_os(ALONE).is_some();
        if !is_rank && !alone {
            return processes::again(&*devices, &name, seed, ALONE);
        }
        let run = || {
            if is_rank {
                victim(&*devices, seed);
            } else {
                many(&*devices, &name, seed, kills);
            }
        };
        catch_unwind(AssertUnwindSafe(run))
            .map_err(|payload| Failed::from(crate::backend::panic_text(&*payload)))
    }))
}
