//! The ledger: SHA-256 of every result whose bits are promised, for inputs that anybody can make again.
//!
//! An entry is a group size and an operation; its hash is over the results of all ranks, in rank order. Where several
//! algorithms or modes promise the same bits, all of them are run and must agree. Of products only those are in it
//! whose sums are exact: the bits of others are not promised, and neither are those of activations that a library computes.
//!
//! `BRIGADE_LEDGER=update` writes the file anew instead of comparing.

mod experts;
mod inputs;
mod linears;
mod local;
mod low_latency;
mod machines;
mod moves;
mod norms;

use crate::{
    backend::Rank,
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{CommConfig, DataType};
use brigade_plan::Engines;
use inputs::Inputs;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

/// The environment variable that says what to do with the file.
const ACTION: &str = "BRIGADE_LEDGER";

/// The results of one rank, by what promises the same bits. The first names nothing beside which it could be wrong.
type Results = Vec<(String, Vec<u8>)>;

type Run = dyn Fn(&Rank, Inputs) -> Results + Send + Sync;

/// Results whose bits are promised.
#[derive(Clone)]
struct Entry {
    name: String,
    config: fn() -> CommConfig,
    run: Arc<Run>,
}

impl Entry {
    fn new(
        name: impl Into<String>,
        run: impl Fn(&Rank, Inputs) -> Results + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into().to_lowercase(),
            config,
            run: Arc::new(run),
        }
    }

    /// An entry that is made in one way.
    fn one(
        name: impl Into<String>,
        run: impl Fn(&Rank, Inputs) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, move |rank, inputs| {
            vec![("it".into(), run(rank, inputs))]
        })
    }
}

fn key(size: usize, name: &str) -> String {
    format!("w{size}/{name}")
}

/// The file, and who may write it: one trial at a time.
static FILE: Mutex<()> = Mutex::new(());

fn path() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "ledger", "bits.json"]
        .iter()
        .collect()
}

type Hashes = BTreeMap<String, String>;

/// The file as it was when this was built: programs of this suite also run where there is no checkout.
const WRITTEN: &str = include_str!("../ledger/bits.json");

fn written() -> Hashes {
    serde_json::from_str(WRITTEN).unwrap()
}

fn update(change: impl FnOnce(&mut Hashes)) {
    let _alone = FILE.lock();
    let text = std::fs::read_to_string(path()).unwrap();
    let mut all = serde_json::from_str(&text).unwrap();
    change(&mut all);
    let text = serde_json::to_string_pretty(&all).unwrap() + "\n";
    std::fs::write(path(), text).unwrap();
}

fn updating() -> bool {
    match std::env::var(ACTION).as_deref() {
        Ok("update") => true,
        Ok(other) => panic!("{ACTION} is {other:?} instead of \"update\""),
        Err(_) => false,
    }
}

/// What the file says against what came out.
fn judge(written: Option<&String>, key: &str, got: &str) -> Result<(), String> {
    match written {
        Some(want) if want == got => Ok(()),
        Some(want) => Err(format!("ledger entry {key}: {got} instead of {want}")),
        None => Err(format!("{key} is not in the ledger: it has {got}")),
    }
}

/// Entries of these group sizes that nothing computes.
fn dead<'a>(written: &'a Hashes, known: &[String], worlds: &[usize]) -> Vec<&'a String> {
    let here = |k: &&String| worlds.iter().any(|w| k.starts_with(&format!("w{w}/")));
    written
        .keys()
        .filter(here)
        .filter(|k| !known.contains(k))
        .collect()
}

/// Computes the entry on all ranks, and compares.
fn check(world: &World, entry: &Entry) {
    let key = key(world.size, &entry.name);
    let hash = Arc::new(Mutex::new(String::new()));
    let (name, run, result) = (key.clone(), Arc::clone(&entry.run), Arc::clone(&hash));
    world.run(&(entry.config)(), move |rank| {
        let results = run(rank, Inputs::new(&name, rank.rank));
        let (first, bytes) = &results[0];
        for (other, others) in &results[1..] {
            assert!(
                bytes == others,
                "{name}: {other} has other bits than {first}"
            );
        }
        let all = rank.share(bytes);
        let digest = Sha256::digest(all.concat());
        *result.lock() = digest.iter().map(|b| format!("{b:02x}")).collect();
    });
    let got = hash.lock().clone();
    if updating() {
        update(|all| drop(all.insert(key, got)));
    } else if let Err(why) = judge(written().get(&key), &key, &got) {
        panic!("{why}");
    }
}

/// Every entry at every group size of a device.
fn entries(worlds: &[usize], engines: Engines) -> Vec<(usize, Entry)> {
    let mut everywhere = moves::entries(engines);
    everywhere.extend(linears::entries(engines));
    everywhere.extend(norms::entries(engines));
    everywhere.extend(experts::entries(engines));
    everywhere.extend(low_latency::entries(engines));
    let mut all: Vec<_> = worlds
        .iter()
        .flat_map(|&size| everywhere.iter().map(move |e| (size, e.clone())))
        .collect();
    if worlds.contains(&1) {
        all.extend(local::entries().into_iter().map(|e| (1, e)));
    }
    all
}

/// The guards themselves: an entry that is wrong, missing or dead is found.
fn guards() {
    let written: Hashes = [("w1/a", "00"), ("w2/b", "11"), ("w9/c", "22")]
        .map(|(k, v)| (k.into(), v.into()))
        .into();
    let known = ["w1/a".to_string()];
    judge(written.get("w1/a"), "w1/a", "00").unwrap();
    assert!(
        judge(written.get("w1/a"), "w1/a", "01")
            .unwrap_err()
            .contains("w1/a")
    );
    assert!(
        judge(written.get("w1/b"), "w1/b", "00")
            .unwrap_err()
            .contains("w1/b")
    );
    assert_eq!(dead(&written, &known, &[1, 2]), ["w2/b"]);
    assert_eq!(dead(&written, &known, &[1]), [""; 0]);
}

/// Adds the entries of a device alone.
pub fn add_alone(suite: &mut Suite) {
    for entry in local::entries() {
        let name = format!("ledger/{}", entry.name);
        suite.add_at(1, &name, move |world| check(world, &entry));
    }
}

/// Adds the entries of groups that span machines.
pub fn add_machines(suite: &mut Suite) {
    for (shape, entry) in machines::entries() {
        let name = format!("ledger/{}", entry.name);
        suite.add_across(shape, &name, move |world| check(world, &entry));
    }
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    let worlds = suite.backend().worlds();
    let all = entries(&worlds, suite.backend().engines());
    // An operation that this device has not is not dead.
    let some_device = Engines {
        norms: true,
        dispatches: true,
        ..suite.backend().engines()
    };
    let across = machines::entries();
    let across = across.iter().map(|((m, r), e)| key(m * r, &e.name));
    let known: Vec<_> = entries(&worlds, some_device)
        .iter()
        .map(|(size, e)| key(*size, &e.name))
        .chain(across)
        .collect();
    add_machines(suite);
    for (size, entry) in all {
        let name = format!("ledger/{}", entry.name);
        suite.add_at(size, &name, move |world| check(world, &entry));
    }
    if suite.backend().engines().dispatches {
        suite.add("ledger/guards/experts", experts::guards);
    }
    suite.add_at(1, "ledger/no_dead_entries", move |_| {
        guards();
        let mut once = known.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), known.len(), "two entries of one name");
        if updating() {
            update(|all| {
                let dead: Vec<_> = dead(all, &known, &worlds).into_iter().cloned().collect();
                all.retain(|k, _| !dead.contains(k));
            });
        } else {
            assert_eq!(
                dead(&written(), &known, &worlds),
                [""; 0],
                "nothing computes these"
            );
        }
    });
}

/// The name of a type in a path.
fn named(dtype: DataType) -> String {
    dtype.to_string()
}
