use crate::common::{config, random, ranks_of, values};
use brigade_candle::{
    GatherLinear, Parallel, RowParallelLinear,
    brigade::{CommConfig, Error, FaultKind, FaultRecord, ParallelMode},
    brigade_error, cut,
};
use candle_core::{DType, Device, Module, Result, Tensor};
use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

fn record(result: Result<Tensor>) -> FaultRecord {
    let error = result.expect_err("a fault");
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

#[test]
fn a_rank_that_is_lost_is_everybodys_typed_error_within_the_deadline() {
    for (number, call) in calls().into_iter().enumerate() {
        let x = random(&[12, 12], DType::F32);
        let began = Instant::now();
        // So that nobody is still in the first call when somebody is lost in the second.
        let first = Barrier::new(4);
        let records = ranks_of(4, &config(ParallelMode::Tp), |p| {
            call(p, &x).unwrap();
            first.wait();
            if p.rank() == 2 {
                return None;
            }
            Some(record(call(p, &x)))
        });
        assert!(began.elapsed() < Duration::from_secs(20), "call {number}");
        let told: Vec<_> = records.into_iter().flatten().collect();
        assert_eq!(told.len(), 3);
        for record in &told {
            assert_eq!((record.kind, record.peer), (FaultKind::PeerLost, 2));
            assert_eq!(record, &told[0], "all ranks have the same record");
        }
    }
}

#[test]
fn without_the_loss_nothing_is_told() {
    for call in calls() {
        let x = random(&[12, 12], DType::F32);
        ranks_of(4, &config(ParallelMode::Tp), |p| {
            call(p, &x).unwrap();
            call(p, &x).unwrap();
            p.check().unwrap();
            p.close(Duration::from_secs(20)).unwrap();
        });
    }
}

#[test]
fn a_rank_that_is_late_is_a_timeout_and_after_a_reset_all_goes_on() {
    let config = CommConfig {
        deadline: Duration::from_millis(100),
        ..config(ParallelMode::Tp)
    };
    let x = random(&[5], DType::F32);
    let patience = Duration::from_secs(20);
    let (first, given_up) = (Barrier::new(3), Barrier::new(3));
    let sums = ranks_of(3, &config, |p| {
        p.all_reduce(&x).unwrap();
        first.wait();
        if p.rank() != 1 {
            let told = record(p.all_reduce(&x));
            assert_eq!((told.kind, told.peer), (FaultKind::Timeout, 1));
            assert!(p.check().is_err() && p.sync(patience).is_err());
        }
        given_up.wait();
        p.reset(patience).unwrap();
        p.check().unwrap();
        p.all_reduce(&x).unwrap()
    });
    for sum in sums {
        let want: Vec<_> = values(&x)
            .iter()
            .map(|&v| f64::from(v as f32 + v as f32 + v as f32))
            .collect();
        assert_eq!(values(&sum), want);
    }
}

#[test]
fn ranks_that_make_different_calls_find_out() {
    let x = random(&[6, 6], DType::F32);
    let kinds = ranks_of(2, &config(ParallelMode::Tp), |p| {
        let made = match p.rank() {
            0 => p.all_reduce(&x),
            _ => p.all_gather(&x, 0, None),
        };
        record(made).kind
    });
    assert_eq!(kinds, [FaultKind::Mismatch; 2]);
}

#[test]
fn rows_that_differ_without_being_told_are_a_mismatch() {
    let weight = random(&[4, 6], DType::F32);
    let kinds = ranks_of(2, &config(ParallelMode::Tp), |p| {
        let x = random(&[2 + p.rank(), 6], DType::F32);
        record(GatherLinear::new(p, &weight, None).unwrap().forward(&x)).kind
    });
    assert_eq!(kinds, [FaultKind::Mismatch; 2]);
}

#[test]
fn abort_ends_every_wait() {
    let x = random(&[6, 6], DType::F32);
    let kinds = ranks_of(3, &config(ParallelMode::Tp), |p| {
        if p.rank() == 1 {
            p.abort();
        }
        record(p.all_reduce(&x)).kind
    });
    assert_eq!(kinds, [FaultKind::Aborted; 3]);
}

#[test]
fn two_groups_share_a_device() {
    let both = brigade_candle::brigade::group::threads(2);
    let again = brigade_candle::brigade::group::threads(2);
    let x = random(&[3, 4], DType::F32);
    std::thread::scope(|s| {
        for (boot, other) in both.into_iter().zip(again) {
            let x = &x;
            s.spawn(move || {
                let attention =
                    Parallel::join(&Device::Cpu, &boot, &config(ParallelMode::Tp)).unwrap();
                let feed_forward = attention.and(&other, &config(ParallelMode::FfnTp)).unwrap();
                let sums = [&attention, &feed_forward].map(|p| p.all_reduce(x).unwrap());
                let twice: Vec<_> = values(x).iter().map(|v| 2.0 * v).collect();
                for sum in sums {
                    assert_eq!(values(&sum), twice);
                }
                assert_eq!(feed_forward.group().mode, ParallelMode::FfnTp);
            });
        }
    });
}
