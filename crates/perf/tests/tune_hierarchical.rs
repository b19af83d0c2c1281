//! `brigade-perf tune-hierarchical` from its command line to a file that devices plan by, on virtual machines of processes.

#![allow(clippy::unwrap_used, reason = "tests")]
#![cfg(target_os = "linux")]

use brigade::{Machines, plan::Entries};
use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

fn run(words: &str, files: &[(&str, &PathBuf)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade-perf"));
    command.arg("tune-hierarchical").args(words.split(' '));
    for (option, path) in files {
        command.arg(option).arg(path);
    }
    command.output().unwrap()
}

#[test]
fn ranks_that_are_processes_write_one_entry() {
    let folder = std::env::temp_dir().join(format!("brigade-tune-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (entry, rows) = (folder.join("entry.json"), folder.join("rows.json"));
    let words = "--device host -w 4 --processes --rail-latency-us 20000 --rail-bytes-per-us 100 -n 2 --calls 1 -b 8K -e 128K -f 16 -d f32";
    let ended = run(words, &[("--entry", &entry), ("--json", &rows)]);
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{ended:?}");
    // Of four processes, one speaks.
    assert_eq!(told.matches("wire, latency").count(), 1, "{told}");
    assert!(told.contains("furthest off"), "{told}");
    let own = Entries::read(&fs::read_to_string(&entry).unwrap()).unwrap();
    let machines = Machines::cut(4, 2).unwrap();
    let costs = own.costs("host", machines).unwrap();
    let latency_ns = costs.across.call_ns + costs.wire.latency_ns;
    assert!((19_000_000..40_000_000).contains(&latency_ns), "{costs:?}");
    assert!(costs.told(machines).contains("in the user's table"));
    let written: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&rows).unwrap()).unwrap();
    let (meta, rows) = (&written["meta"], written["rows"].as_array().unwrap());
    assert_eq!(
        (&meta["gpu"], &meta["machines"]),
        (&"host".into(), &2.into())
    );
    assert!(meta["processes"] == true && meta["command"].as_str().unwrap().contains("-w 4"));
    // Three operations inside and by three ways across, and one by two more, of two sizes; and one of nothing.
    assert_eq!(rows.len(), 3 * 4 * 2 + 2 * 2 + 1);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (words, why) in [
        ("--device host -w 3", "3 ranks"),
        ("--device host -w 2 --machines 1", "two machines"),
        ("--device host", "--ranks"),
    ] {
        let ended = run(words, &[]);
        let told = String::from_utf8_lossy(&ended.stderr);
        assert!(
            !ended.status.success() && told.contains(why),
            "{words}: {told}"
        );
    }
}
