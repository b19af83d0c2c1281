//! On a host with a GPU: the list, the fill and the bounded wait are right. On any other: the explanation is.

use crate::common::ALONE;
use brigade_cuda::{Missing, Probe, WaitCase, devices};
use brigade_device::{DataType, Error, FaultKind};
use parking_lot::MutexGuard;
use std::time::{Duration, Instant};

/// The first GPU, and the right to use it; `None`, after checking the explanation, where there is none to use.
fn probe() -> Option<(Probe, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock();
    match Probe::open(0) {
        Ok(probe) => Some((probe, alone)),
        Err(missing) => {
            check_explanation(&missing);
            None
        }
    }
}

/// Nothing is missing where a GPU is demanded.
fn check_explanation(missing: &Missing) {
    let demanded = std::env::var_os("BRIGADE_TEST_DEVICE").is_some_and(|d| d == "cuda");
    assert!(!demanded, "a GPU is demanded: {missing}");
    assert!(missing.code().starts_with("cuda_"), "{missing:?}");
    assert!(missing.what().len() > 20, "{missing:?}");
    assert!(missing.remedy().len() > 20, "{missing:?}");
    match (Error::from(missing.clone()), missing) {
        (Error::Unsupported(reason), _) => {
            assert_eq!(reason.code, missing.code());
            assert_eq!(reason.remedy, missing.remedy());
        }
        (Error::Backend { call, .. }, Missing::Refused { call: refused, .. }) => {
            assert_eq!(call, *refused);
        }
        (other, _) => panic!("{other:?}"),
    }
}

#[test]
fn devices_are_listed_or_the_lack_is_explained() {
    match devices() {
        Ok(list) => {
            assert!(!list.is_empty());
            for (i, gpu) in list.iter().enumerate() {
                assert_eq!(gpu.ordinal, i);
                assert!(!gpu.name.is_empty());
                assert!(gpu.memory_bytes > 1 << 30, "{gpu:?}");
                assert!(gpu.multiprocessors > 0 && gpu.capability.0 > 0, "{gpu:?}");
            }
        }
        Err(missing) => {
            check_explanation(&missing);
            assert!(
                !matches!(missing, Missing::Kernels { .. }),
                "a list needs no kernels"
            );
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let Some((_, _alone)) = probe() else { return };
    let refused = Probe::open(1000).expect_err("no thousand GPUs");
    assert!(matches!(refused, Missing::Ordinal { ordinal: 1000, .. }));
}

#[test]
fn fill_poisons_the_range_and_nothing_else() {
    let Some((probe, _alone)) = probe() else {
        return;
    };
    let (before, bytes) = (0x11, 70_000);
    for dtype in [
        DataType::F32,
        DataType::BF16,
        DataType::F16,
        DataType::F64,
        DataType::F8E4M3,
        DataType::I32,
        DataType::U8,
    ] {
        let width = dtype.bytes();
        for offset in [0, 1, 3, 5] {
            for elements in [0, 1, 2, 3, 15, 16, 17, 1000, 8191] {
                let range = offset * width..(offset + elements) * width;
                let got = probe
                    .fill(bytes, before, range.clone(), dtype)
                    .expect("fill");
                let poison = dtype.poison().to_le_bytes();
                for (at, &byte) in got.iter().enumerate() {
                    let want = if range.contains(&at) {
                        poison[(at - range.start) % width]
                    } else {
                        before
                    };
                    assert_eq!(byte, want, "{dtype}, {range:?}, byte {at}");
                }
            }
        }
    }
}

#[test]
fn fill_takes_an_address_of_any_alignment() {
    let Some((probe, _alone)) = probe() else {
        return;
    };
    for start in 0..33 {
        for bytes in [0, 1, 7, 31, 32, 33, 100] {
            let got = probe
                .fill(256, 0x22, start..start + bytes, DataType::F32)
                .expect("fill");
            let poison = DataType::F32.poison().to_le_bytes();
            for (at, &byte) in got.iter().enumerate() {
                let inside = (start..start + bytes).contains(&at);
                let want = if inside {
                    poison[(at - start) % 4]
                } else {
                    0x22
                };
                assert_eq!(byte, want, "{start}+{bytes}, byte {at}");
            }
        }
    }
}

/// Generation 1, signature 0xabcdef.
fn flag(epoch: u32) -> u64 {
    0x01ab_cdef_0000_0000 | u64::from(epoch)
}

const SHORT: Duration = Duration::from_millis(50);

fn case(posted: Option<(u64, Duration)>) -> WaitCase {
    WaitCase {
        expected: flag(7),
        timeout: SHORT * 100,
        posted,
        abort: false,
    }
}

#[test]
fn a_wait_ends_when_its_flag_comes() {
    let Some((probe, _alone)) = probe() else {
        return;
    };
    let sight = probe
        .wait(case(Some((flag(7), Duration::from_millis(2)))))
        .expect("runs");
    assert_eq!(
        (sight.outcome, sight.abort_word, sight.record),
        (0, 0, None)
    );
}

#[test]
fn a_later_flag_than_the_one_waited_for_is_another_call() {
    let Some((probe, _alone)) = probe() else {
        return;
    };
    let sight = probe
        .wait(case(Some((flag(8), Duration::ZERO))))
        .expect("runs");
    let record = sight.record.expect("a record");
    assert_eq!((record.kind, record.seen), (FaultKind::Mismatch, flag(8)));
    assert_eq!(sight.abort_word, 1);
}

#[test]
fn a_wait_whose_flag_never_comes_gives_up_loudly_and_in_time() {
    let Some((probe, _alone)) = probe() else {
        return;
    };
    // Nothing at all, and an earlier epoch: neither will do.
    for posted in [None, Some((flag(6), Duration::ZERO))] {
        let started = Instant::now();
        let sight = probe
            .wait(WaitCase {
                timeout: SHORT,
                ..case(posted)
            })
            .expect("runs");
        let record = sight.record.expect("a record");
        assert_eq!(record.kind, FaultKind::Timeout);
        assert_eq!(
            (record.rank, record.peer, record.slot, record.call),
            (0, 1, 3, 1)
        );
        assert_eq!((record.generation, record.expected), (1, flag(7)));
        assert_eq!(record.seen, posted.map_or(0, |p| p.0));
        assert!(record.waited_ns >= SHORT.as_nanos() as u64, "{record:?}");
        assert_eq!(
            (sight.outcome, sight.abort_word),
            (FaultKind::Timeout as u32, 1)
        );
        assert!(started.elapsed() < SHORT + Duration::from_secs(1));
        // The context survives.
        assert_eq!(
            probe
                .wait(case(Some((flag(7), Duration::ZERO))))
                .expect("runs")
                .outcome,
            0
        );
    }
}

#[test]
fn a_wait_ends_at_once_for_an_abort_and_for_another_call() {
    let Some((probe, _alone)) = probe() else {
        return;
    };
    let aborted = probe
        .wait(WaitCase {
            abort: true,
            ..case(None)
        })
        .expect("runs");
    let record = aborted.record.expect("a record");
    assert_eq!(record.kind, FaultKind::Aborted);
    assert!(record.waited_ns < SHORT.as_nanos() as u64, "{record:?}");

    let other_call = flag(7) ^ 1 << 40;
    let mismatch = probe
        .wait(case(Some((other_call, Duration::ZERO))))
        .expect("runs");
    let record = mismatch.record.expect("a record");
    assert_eq!(
        (record.kind, record.seen),
        (FaultKind::Mismatch, other_call)
    );
}
