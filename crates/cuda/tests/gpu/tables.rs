//! Tables that users give to devices, at `join` and in plans.

use crate::common::{AMPLE, device};
use brigade_cuda::{CudaConfig, CudaDevice, devices};
use brigade_device::{
    AllReduceAlgorithm, AllReduceParams, Bootstrap, Comm, CommConfig, Device, DeviceExt, Error,
    HierarchyConfig, Machines, NcclUse, ParallelMode, Plan, Queues, ReduceOp, Result,
};
use brigade_plan::Entries;
use std::{sync::Arc, thread};

/// An entry of two ranks on one GPU of a model, with pulls from so many bytes on.
fn entries(gpu: &str, pull_from_bytes: usize) -> Entries {
    figures(
        gpu,
        "shared",
        &format!(r#""pull_from_bytes": {pull_from_bytes}, "nccl_from_bytes": null"#),
    )
}

fn figures(gpu: &str, links: &str, from_bytes: &str) -> Entries {
    let text = format!(
        r#"{{"gpu": "{gpu}", "links": "{links}", "ranks": 2, "one_shot_max_bytes": 4096, {from_bytes},
        "max_blocks": 8, "measured": {{"from_bytes": 1, "to_bytes": 2}},
        "versions": {{"driver": "13.0", "cuda": "13.0", "nccl": null}},
        "source": {{"command": "brigade-perf tune", "date": "2026-01-02", "commit": "0123456"}}}}"#
    );
    Entries::read(&text).unwrap()
}

/// Two ranks on the first GPU, each with these entries; what they do once they have joined.
fn ranks<R: Send>(
    each: [Entries; 2],
    work: impl Fn(&Arc<CudaDevice>, Comm) -> R + Sync,
) -> Vec<Result<R>> {
    opened(each, [0, 0], |boot, device| {
        let comm = Arc::clone(device).join(boot, &CommConfig::new(ParallelMode::Tp))?;
        Ok(work(device, comm))
    })
}

/// The same on GPUs of these numbers, before they join.
fn opened<R: Send>(
    each: [Entries; 2],
    gpus: [usize; 2],
    work: impl Fn(&dyn Bootstrap, &Arc<CudaDevice>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let work = &work;
    thread::scope(|scope| {
        let all: Vec<_> = brigade_group::threads(2)
            .into_iter()
            .zip(each.into_iter().zip(gpus))
            .map(|(boot, (entries, gpu))| {
                scope.spawn(move || {
                    let config = CudaConfig {
                        entries,
                        ..CudaConfig::default()
                    };
                    work(&boot, &CudaDevice::with(gpu, &config).unwrap())
                })
            })
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// By which algorithm 1024 numbers go, in f32; the sum is right.
fn algorithm(device: &Arc<CudaDevice>, comm: &Comm) -> AllReduceAlgorithm {
    let on = device.stream(0).unwrap();
    let from = device.upload(&on, &[1.5f32; 1024], &[1024]).unwrap();
    let mut to = device.upload(&on, &[0f32; 1024], &[1024]).unwrap();
    let params = AllReduceParams {
        from: Some(from.view()),
        data: to.view_mut(),
        op: ReduceOp::Sum,
        choice: None,
    };
    let plan = comm.lease(&on).unwrap().all_reduce(params).unwrap();
    let sums: Vec<f32> = device.download(&on, to.view()).unwrap();
    assert_eq!(sums, [3.0; 1024]);
    match plan {
        Plan::AllReduce { algorithm, .. } => algorithm,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_users_entries_decide_on_plans() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    let model = &device.info().name;
    let with = |own: &dyn Fn() -> Entries| {
        ranks([own(), own()], |device, comm| algorithm(device, &comm))
            .into_iter()
            .map(|algorithm| algorithm.unwrap())
            .collect::<Vec<_>>()
    };
    let all = |algorithm| vec![algorithm; 2];
    assert_eq!(
        with(&Entries::default),
        all(AllReduceAlgorithm::OneShotPush)
    );
    let pulls = || entries(model, 1024);
    assert_eq!(with(&pulls), all(AllReduceAlgorithm::OneShotPull));
    // Of another model they say nothing.
    let another = || entries("another GPU", 1024);
    assert_eq!(with(&another), all(AllReduceAlgorithm::OneShotPush));
}

#[test]
fn ranks_with_other_entries_form_no_group() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    let model = &device.info().name;
    for each in [
        [entries(model, 1024), Entries::default()],
        [entries(model, 1024), entries(model, 2048)],
    ] {
        for joined in ranks(each, |_, _| ()) {
            match joined {
                Err(Error::Group { step, what }) => {
                    assert_eq!(step, "join: tables");
                    assert!(what.contains("the ranks do not agree"), "{what}");
                    assert!(what.contains("CudaConfig::entries"), "{what}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// On two GPUs; ranks that share one hear that NCCL does not serve them.
#[test]
fn nccl_carries_sums_where_it_is_allowed_and_was_quicker() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    let two = devices().unwrap().len() > 1;
    let quicker = || {
        let from = r#""pull_from_bytes": null, "nccl_from_bytes": 4096"#;
        figures(&device.info().name, "nvlink", from)
    };
    let by = |nccl| {
        opened(
            [quicker(), quicker()],
            [0, usize::from(two)],
            |boot, device| {
                let config = CommConfig {
                    nccl,
                    ..CommConfig::new(ParallelMode::Tp)
                };
                let comm = Arc::clone(device).join(boot, &config)?;
                let before = algorithm(device, &comm);
                comm.reset(AMPLE)?;
                Ok([before, algorithm(device, &comm)])
            },
        )
    };
    for ranks in by(NcclUse::Never) {
        assert_eq!(ranks.unwrap(), [AllReduceAlgorithm::OneShotPush; 2]);
    }
    let nccl = AllReduceAlgorithm::Nccl;
    for (used, before) in [
        (NcclUse::Forced, AllReduceAlgorithm::OneShotPush),
        (NcclUse::Quicker, nccl),
    ] {
        for joined in by(used) {
            match joined {
                Ok(ranks) => assert_eq!(ranks, [before, AllReduceAlgorithm::OneShotPush]),
                Err(Error::Unsupported(why)) => {
                    let missing = why.code == "nccl-missing";
                    assert!(missing || (why.code == "nccl-shared" && !two), "{why}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}

/// Costs across machines of one rank each.
fn costs(gpu: &str, across_call_ns: u64) -> Entries {
    let text = format!(
        r#"{{"costs_version": 3, "gpu": "{gpu}", "links": "shared", "machines": 2, "ranks": 1, "inside_call_ns": 5000,
        "inside_bytes_per_us": 340000, "across_call_ns": {across_call_ns}, "across_bytes_per_us": 340000, "wire_latency_ns": 0,
        "wire_bytes_per_us": 4400, "add_bytes_per_us": 2000000, "copy_ns": 2000, "connections": 4, "crowded_percent": 100, "measured": {{"from_bytes": 1, "to_bytes": 2}},
        "versions": {{"driver": "13.0", "cuda": "13.0", "nccl": null}},
        "source": {{"command": "brigade-perf tune-hierarchical", "date": "2026-01-02", "commit": "0123456"}}}}"#
    );
    Entries::read(&text).unwrap()
}

/// Before anything of NCCL's is made.
#[test]
fn ranks_with_other_costs_form_no_hierarchy() {
    let Some((device, _, _alone)) = device() else {
        return;
    };
    let model = &device.info().name;
    let of = |call_ns| costs(model, call_ns);
    for each in [[of(1), Entries::default()], [of(1), of(2)]] {
        let joined = opened(each, [0, 0], |boot, device| {
            let config = HierarchyConfig::new(ParallelMode::Tp);
            let machines = Machines::cut(2, 2)?;
            Arc::clone(device)
                .join_machines(boot, machines, &config)
                .map(drop)
        });
        for joined in joined {
            match joined {
                Err(Error::Group { step, what }) => {
                    assert_eq!(step, "join: machines");
                    assert!(what.contains("the ranks do not agree"), "{what}");
                    assert!(what.contains("costs (entries and wire"), "{what}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
