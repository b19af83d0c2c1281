//! A rank that is lost in the middle of an answer: the others hear of it in time, deal the model anew, and give the same answer.
#![allow(clippy::unwrap_used)]

mod common;

use brigade::DataType;
use brigade_demo::{
    AdapterSpec, Error, Source, Synthetic, divergence,
    parallel::{Generated, Options, generate},
};
use common::{answers, options, program};
use serde_json::Value;
use std::time::Duration;

const NEVER: u32 = u32::MAX;

const DEADLINE: Duration = Duration::from_secs(20);

fn model() -> Synthetic {
    Synthetic::new(Synthetic::small_config(), 5).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    vec![
        vec![5, 309],
        vec![3, 77, 500, 12, 12, 0, 511],
        (0..18).map(|i| i * i + 100).collect(),
    ]
}

fn without(ranks: usize, lost: usize, after: usize, lora: Option<AdapterSpec>) -> Options {
    Options {
        regroup: true,
        leave: Some((lost, after)),
        deadline: DEADLINE,
        lora,
        ..options(ranks, 8, None)
    }
}

fn run(options: &Options, told: &mut Vec<(usize, u32)>) -> Result<Generated, Error> {
    let mut tell = |sequence, token| told.push((sequence, token));
    generate(&model(), &prompts(), NEVER, options, &mut tell)
}

#[test]
fn those_who_are_left_give_the_same_answer() {
    let lora = AdapterSpec::new(9, 4, 0.5);
    for lora in [None, Some(lora)] {
        let want = answers(&model(), &prompts(), NEVER, 8, lora.as_ref());
        // Before the first token, in the middle, before the last, and behind it; the first rank, which speaks, too.
        for (ranks, lost, after) in [
            (2, 0, 3),
            (3, 2, 0),
            (3, 1, 7),
            (3, 1, 8),
            (4, 0, 1),
            (6, 5, 4),
        ] {
            let mut told = Vec::new();
            let got = run(&without(ranks, lost, after, lora.clone()), &mut told).unwrap();
            let about = format!("rank {lost} of {ranks} after {after}");
            assert_eq!(got.tokens, want, "{about}");
            assert_eq!(got.weight_bytes.len(), ranks - 1, "{about}");
            let [regrouped] = &got.regrouped[..] else {
                panic!("{about}: {:?}", got.regrouped);
            };
            assert_eq!(regrouped.lost, [lost], "{about}");
            assert!(regrouped.noticed < DEADLINE + Duration::from_secs(1));
            // Every token is told once, in order, whoever said it first.
            for (sequence, want) in want.iter().enumerate() {
                let of: Vec<u32> = told
                    .iter()
                    .filter(|t| t.0 == sequence)
                    .map(|t| t.1)
                    .collect();
                assert_eq!(&of, want, "{about}");
            }
        }
    }
}

/// A rank that hangs has not gone: the others wait for it until the deadline, and then it is left out. On a machine that is busy others may be
/// late as well, which those who are left take in the same way.
#[test]
fn a_rank_that_hangs_is_left_out() {
    let want = answers(&model(), &prompts(), NEVER, 8, None);
    let options = Options {
        leave: None,
        stall: Some((0, 3)),
        deadline: Duration::from_millis(200),
        ..without(3, 0, 3, None)
    };
    let got = run(&options, &mut Vec::new()).unwrap();
    assert_eq!(got.tokens, want);
    let found = got.regrouped.iter().find(|r| r.lost.contains(&0));
    let Some(regrouped) = found else {
        panic!("{:?}", got.regrouped);
    };
    assert!(regrouped.error.contains("timed out"), "{regrouped:?}");
}

/// Ranks that capture a step meet, and one may be gone by then: before the step that comes first, where they capture, and behind.
#[test]
fn a_rank_may_be_lost_where_others_capture_a_step() {
    let want = answers(&model(), &prompts(), NEVER, 8, None);
    for after in [1, 2, 3] {
        let options = Options {
            graph: true,
            ..without(3, 1, after, None)
        };
        let got = run(&options, &mut Vec::new()).unwrap();
        assert_eq!(got.tokens, want, "after {after}");
        let lost = |r: &brigade_demo::parallel::Regrouped| r.lost.contains(&1);
        assert!(got.regrouped.iter().any(lost), "{:?}", got.regrouped);
        assert!(got.graphs.unwrap().refused.is_some(), "after {after}");
    }
}

/// Who does not want to go on is told who was waited for.
#[test]
fn a_rank_that_hangs_ends_a_run_that_does_not_go_on() {
    let options = Options {
        leave: None,
        stall: Some((1, 2)),
        deadline: Duration::from_millis(100),
        regroup: false,
        ..without(2, 1, 2, None)
    };
    match run(&options, &mut Vec::new()).unwrap_err() {
        Error::Brigade(brigade::Error::Fault(record)) => {
            assert_eq!(record.kind, brigade::FaultKind::Timeout, "{record}");
        }
        other => panic!("{other}"),
    }
}

/// Shards of fewer ranks are larger: the weights were dealt anew, and not only addressed anew.
#[test]
fn the_weights_of_the_lost_rank_are_dealt_to_the_others() {
    let sum = |got: &Generated| got.weight_bytes.iter().sum::<u64>();
    let lost = run(&without(3, 1, 2, None), &mut Vec::new()).unwrap();
    let two = run(&options(2, 8, None), &mut Vec::new()).unwrap();
    let three = run(&options(3, 8, None), &mut Vec::new()).unwrap();
    assert_eq!(lost.weight_bytes, two.weight_bytes);
    assert_ne!(three.weight_bytes.len(), two.weight_bytes.len());
    let whole = model().config().parameters() * 4;
    assert!(sum(&lost) >= whole && sum(&three) >= whole);
}

#[test]
fn who_does_not_want_to_go_on_is_told_who_left() {
    let options = Options {
        regroup: false,
        ..without(3, 1, 2, None)
    };
    // The cause comes first; what the others saw is a rank that is gone.
    match run(&options, &mut Vec::new()).unwrap_err() {
        Error::Left { rank: 1 } => {}
        other => panic!("{other}"),
    }
}

/// With nobody left there is nobody to go on.
#[test]
fn the_last_rank_cannot_be_done_without() {
    let got = run(&without(1, 0, 2, None), &mut Vec::new());
    assert!(matches!(got.unwrap_err(), Error::Left { rank: 0 }));
}

/// In a type with few digits a token may be another one, and the reference says by how little.
#[test]
fn halves_say_where_they_leave_the_reference() {
    for dtype in [DataType::BF16, DataType::F16] {
        for ranks in [1, 3] {
            let options = Options {
                dtype,
                ..options(ranks, 8, None)
            };
            let got = run(&options, &mut Vec::new()).unwrap();
            let all = divergence::of(&model(), &prompts(), &got.tokens, None).unwrap();
            for found in all.into_iter().flatten() {
                assert!(
                    (0.0..0.5).contains(&found.lead),
                    "{dtype:?} {ranks}: {found}"
                );
            }
        }
    }
    // A token that is not the model's is found.
    let mut tokens = answers(&model(), &prompts(), NEVER, 8, None);
    assert_eq!(
        divergence::of(&model(), &prompts(), &tokens, None).unwrap(),
        [None, None, None]
    );
    let want = tokens[1][5];
    tokens[1][5] = (want + 1) % 512;
    let all = divergence::of(&model(), &prompts(), &tokens, None).unwrap();
    let found = all[1].as_ref().unwrap();
    assert_eq!((found.at, found.want), (5, want));
    assert!(all[0].is_none() && all[2].is_none());
}

/// A process that aborts takes nothing of the others with it. The fault is known at once.
#[cfg(unix)]
#[test]
fn processes_go_on_without_one_that_died() {
    for lost in ["0@3", "2@5"] {
        let out = program::run(&[
            "--processes",
            "--ranks",
            "3",
            "--regroup",
            "--lose",
            lost,
            "--check",
            "--json",
            "--max-tokens",
            "8",
            "--prompt",
            "Hi",
            "--deadline",
            "20",
        ]);
        let got: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        assert_eq!(got["divergences"], serde_json::json!([null]), "{got}");
        assert_eq!(got["token_ids"].as_array().unwrap().len(), 8);
        let rank: u64 = lost[..1].parse().unwrap();
        assert_eq!(got["regrouped"][0]["lost"], serde_json::json!([rank]));
        let error = got["regrouped"][0]["error"].as_str().unwrap();
        assert!(error.contains(&format!("rank {rank}")), "{error}");
        assert!(got["regrouped"][0]["noticed_ms"].as_f64().unwrap() < 21e3);
        assert_eq!(got["weight_bytes_per_rank"].as_array().unwrap().len(), 2);
    }
}

/// The fault that the others see is that of a rank which is gone, not one of time.
#[test]
fn a_rank_that_is_gone_is_known_at_once() {
    let got = run(&without(3, 1, 2, None), &mut Vec::new()).unwrap();
    let regrouped = &got.regrouped[0];
    assert!(regrouped.noticed < DEADLINE / 2, "{regrouped:?}");
    assert!(regrouped.error.contains("rank 1"), "{regrouped:?}");
    assert!(!regrouped.error.contains("timed out"), "{regrouped:?}");
}
