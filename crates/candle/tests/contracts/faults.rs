use super::{
    Hold, PATIENCE, Theme, World, config,
    oracle::{bits, close, product, put, random, values},
};
use brigade_candle::{
    ColumnParallelLinear, GatherLinear, Parallel, RowParallelLinear,
    brigade::{CommConfig, Error, FaultKind, FaultRecord, ParallelMode, group},
    brigade_error, cut,
};
use candle_core::{DType, Module, Result, Tensor};
use std::{
    sync::{Barrier, Mutex},
    time::{Duration, Instant},
};

pub const THEMES: &[Theme] = &[
    Theme {
        name: "faults",
        sizes: 2..=4,
        hold: Hold::Everywhere,
        contracts: contracts![
            a_rank_that_is_lost_is_everybodys_typed_error_within_the_deadline,
            those_who_are_left_make_a_group_cut_weights_anew_and_go_on,
            without_the_loss_nothing_is_told,
            a_rank_that_is_late_is_a_timeout_and_after_a_reset_all_goes_on,
            ranks_that_make_different_calls_find_out,
            abort_ends_every_wait,
        ],
    },
    Theme {
        name: "faults",
        sizes: 2..=4,
        hold: Hold::OnOwnDevices,
        contracts: contracts![rows_that_differ_without_being_told_are_a_mismatch],
    },
    Theme {
        name: "faults",
        sizes: 2..=2,
        hold: Hold::Everywhere,
        contracts: contracts![two_groups_share_a_device],
    },
];

/// How a call ended, also where it ends after it has returned.
fn ended(p: &Parallel, made: Result<Tensor>) -> Result<Tensor> {
    let made = made?;
    p.sync(PATIENCE)?;
    Ok(made)
}

fn record(p: &Parallel, made: Result<Tensor>) -> FaultRecord {
    let error = ended(p, made).expect_err("a fault");
    *brigade_error(&error).and_then(Error::fault).unwrap()
}

/// Calls each of the operations that ranks make together.
fn calls() -> [fn(&Parallel, &Tensor) -> Result<Tensor>; 5] {
    [
        |p, x| p.all_reduce(x),
        |p, x| p.all_gather(x, 0, None),
        |p, x| p.reduce_scatter(x, None),
        |p, x| RowParallelLinear::new(p, x, None)?.forward(&cut::tensor(p, x, 1)?),
        |p, x| GatherLinear::new(p, x, None)?.forward(x),
    ]
}

fn a_rank_that_is_lost_is_everybodys_typed_error_within_the_deadline(world: &World) {
    let lost = world.size / 2;
    for (number, call) in calls().into_iter().enumerate() {
        let x = random(&[12, 12], DType::F32);
        // So that nobody is still in the first call when somebody is lost in the second.
        let first = Barrier::new(world.size);
        let config = config(ParallelMode::Tp);
        let records = world.ranks_of(&config, |p| {
            let x = put(p, &x).unwrap();
            ended(p, call(p, &x)).unwrap();
            first.wait();
            if p.rank() == lost {
                return None;
            }
            let began = Instant::now();
            let told = record(p, call(p, &x));
            assert!(began.elapsed() < config.deadline, "call {number}");
            Some(told)
        });
        let told: Vec<_> = records.into_iter().flatten().collect();
        assert_eq!(told.len(), world.size - 1);
        for record in &told {
            assert_eq!(
                (record.kind, record.peer),
                (FaultKind::PeerLost, lost as u32)
            );
            assert_eq!(record, &told[0], "all ranks have the same record");
        }
    }
}

/// As a server does it: the error in time, a vote on who is left, a group of these, shards of the same weights, and the step once more.
fn those_who_are_left_make_a_group_cut_weights_anew_and_go_on(world: &World) {
    let size = world.size;
    let (up, down) = (random(&[24, 7], DType::F32), random(&[5, 24], DType::F32));
    let x = random(&[3, 7], DType::F32);
    let config = config(ParallelMode::Tp);
    let step = |p: &Parallel| -> Result<Tensor> {
        let up = ColumnParallelLinear::new(p, &put(p, &up)?, None)?;
        let down = RowParallelLinear::new(p, &put(p, &down)?, None)?;
        let y = down.forward(&up.forward(&put(p, &x)?)?);
        ended(p, y)
    };
    let inner = Tensor::from_vec(product(&x, &up).values, (3, 24), x.device()).unwrap();
    let want = product(&inner, &down);
    for lost in [0, size - 1] {
        let later: Vec<_> = group::threads(size - 1)
            .into_iter()
            .map(|boot| Mutex::new(Some(boot)))
            .collect();
        let first = Barrier::new(size);
        let made = world.ranks_of(&config, |p| {
            let before = step(p).unwrap();
            first.wait();
            if p.rank() == lost {
                return None;
            }
            let began = Instant::now();
            let told = record(p, step(p));
            assert_eq!((told.kind, told.peer), (FaultKind::PeerLost, lost as u32));
            let absent = p.comm().shrink(2 * config.deadline).unwrap();
            assert_eq!(absent.ranks().collect::<Vec<_>>(), [lost]);
            assert!(began.elapsed() < config.deadline + Duration::from_secs(1));
            let rank = p.rank() - usize::from(lost < p.rank());
            let boot = later[rank].lock().unwrap().take().unwrap();
            let left = Parallel::join(p.place(), &boot, &config).unwrap();
            assert_eq!((left.rank(), left.size()), (rank, size - 1));
            Some([before, step(&left).unwrap()])
        });
        assert_eq!(made.iter().flatten().count(), size - 1);
        for [before, after] in made.iter().flatten() {
            close(before, &want, 2e-5, "all of them");
            close(after, &want, 2e-5, "those who are left");
        }
        let mut after = made.iter().flatten().map(|[_, after]| bits(after));
        let one = after.next().unwrap();
        assert!(after.all(|other| other == one));
    }
}

fn without_the_loss_nothing_is_told(world: &World) {
    let x = random(&[12, 12], DType::F32);
    for call in calls() {
        world.ranks_of(&config(ParallelMode::Tp), |p| {
            let x = put(p, &x).unwrap();
            call(p, &x).unwrap();
            ended(p, call(p, &x)).unwrap();
            p.close(PATIENCE).unwrap();
        });
    }
}

fn a_rank_that_is_late_is_a_timeout_and_after_a_reset_all_goes_on(world: &World) {
    let config = CommConfig {
        deadline: Duration::from_secs(1),
        ..config(ParallelMode::Tp)
    };
    let x = random(&[5], DType::F32);
    let size = world.size;
    let (first, given_up) = (Barrier::new(size), Barrier::new(size));
    let sums = world.ranks_of(&config, |p| {
        let x = put(p, &x).unwrap();
        ended(p, p.all_reduce(&x)).unwrap();
        first.wait();
        if p.rank() != 1 {
            let told = record(p, p.all_reduce(&x));
            assert_eq!((told.kind, told.peer), (FaultKind::Timeout, 1));
            assert!(p.check().is_err() && p.sync(PATIENCE).is_err());
        }
        given_up.wait();
        p.reset(PATIENCE).unwrap();
        p.check().unwrap();
        ended(p, p.all_reduce(&x)).unwrap()
    });
    let times = |&v: &f64| f64::from((1..size).fold(v as f32, |sum, _| sum + v as f32));
    let want: Vec<_> = values(&x).iter().map(times).collect();
    for sum in sums {
        assert_eq!(values(&sum), want);
    }
}

fn ranks_that_make_different_calls_find_out(world: &World) {
    let x = random(&[6, 6], DType::F32);
    let kinds = world.ranks_of(&config(ParallelMode::Tp), |p| {
        let x = put(p, &x).unwrap();
        let made = match p.rank() {
            0 => p.all_reduce(&x),
            _ => p.all_gather(&x, 0, None),
        };
        record(p, made).kind
    });
    assert_eq!(kinds, vec![FaultKind::Mismatch; world.size]);
}

fn rows_that_differ_without_being_told_are_a_mismatch(world: &World) {
    let weight = random(&[4, 6], DType::F32);
    let kinds = world.ranks_of(&config(ParallelMode::Tp), |p| {
        let x = put(p, &random(&[2 + p.rank(), 6], DType::F32)).unwrap();
        let linear = GatherLinear::new(p, &put(p, &weight).unwrap(), None).unwrap();
        record(p, linear.forward(&x)).kind
    });
    assert_eq!(kinds, vec![FaultKind::Mismatch; world.size]);
}

fn abort_ends_every_wait(world: &World) {
    let x = random(&[6, 6], DType::F32);
    let kinds = world.ranks_of(&config(ParallelMode::Tp), |p| {
        let x = put(p, &x).unwrap();
        if p.rank() == 1 {
            p.abort();
        }
        record(p, p.all_reduce(&x)).kind
    });
    assert_eq!(kinds, vec![FaultKind::Aborted; world.size]);
}

fn two_groups_share_a_device(world: &World) {
    let again = group::threads(world.size).into_iter();
    let again: Vec<_> = again.map(|boot| Mutex::new(Some(boot))).collect();
    let x = random(&[3, 4], DType::F32);
    let twice: Vec<_> = values(&x).iter().map(|v| 2.0 * v).collect();
    world.ranks(|attention| {
        let x = put(attention, &x)?;
        let other = again[attention.rank()].lock().unwrap().take().unwrap();
        let feed_forward = attention.and(&other, &config(ParallelMode::FfnTp))?;
        for p in [attention, &feed_forward] {
            assert_eq!(values(&ended(p, p.all_reduce(&x))?), twice);
        }
        assert_eq!(feed_forward.group().mode, ParallelMode::FfnTp);
        Ok(())
    });
}
