//! However many ranks share a model, and however they overlap, it says what the reference says.
#![allow(clippy::unwrap_used)]

mod common;

use brigade::OverlapMode;
use brigade_demo::{
    AdapterSpec, Error, Source, Synthetic,
    parallel::{Generated, Options, generate},
    reference::Reference,
};
use common::{CHUNKED, answers, modes, options};

/// No token of the vocabulary, so that nothing ends early.
const NEVER: u32 = u32::MAX;

const RANKS: std::ops::RangeInclusive<usize> = 1..=6;

/// Least lead of the best logit over the second: far more than sums in f32 in another order can be off by.
const CLEAR: f32 = 1e-3;

fn model() -> Synthetic {
    Synthetic::new(Synthetic::small_config(), 5).unwrap()
}

fn lora() -> AdapterSpec {
    AdapterSpec::new(9, 4, 0.5)
}

/// Side by side: one shorter than the ranks, one that ranks do not divide, and one that spans several ranks.
fn prompts() -> Vec<Vec<u32>> {
    vec![
        vec![5, 309],
        vec![3, 77, 500, 12, 12, 0, 511],
        (0..18).map(|i| i * i + 100).collect(),
    ]
}

fn run(prompts: &[Vec<u32>], end: u32, options: &Options) -> Result<Generated, Error> {
    generate(&model(), prompts, end, options, &mut |_, _| {})
}

/// Runs on every number of ranks in every mode, and compares.
fn check(prompts: &[Vec<u32>], end: u32, max_tokens: usize, lora: Option<AdapterSpec>) {
    let want = answers(&model(), prompts, end, max_tokens, lora.as_ref());
    for ranks in RANKS {
        for mode in modes() {
            let options = Options {
                lora: lora.clone(),
                ..options(ranks, max_tokens, mode)
            };
            let got = run(prompts, end, &options).unwrap();
            assert_eq!(got.tokens, want, "{ranks} ranks, {mode:?}");
        }
    }
}

fn varied(tokens: &[u32]) -> bool {
    tokens.iter().any(|&t| t != tokens[0])
}

/// Where the reference nearly tossed a coin, another order of sums may choose otherwise, and equal tokens prove little
/// where all are the same: whether neither is so with what the model says to a prompt.
fn is_clear_and_varied(model: &mut Reference, prompt: &[u32], max_tokens: usize) -> bool {
    let tokens = model.generate(prompt, max_tokens, NEVER).unwrap();
    let all = [prompt, &tokens[..]].concat();
    model.reset();
    let logits = model.forward_all(&all).unwrap();
    let gap = |row| {
        let mut sorted = logits.row(row).to_vec();
        sorted.sort_by(f32::total_cmp);
        sorted[sorted.len() - 1] - sorted[sorted.len() - 2]
    };
    varied(&tokens) && (prompt.len() - 1..all.len() - 1).all(|row| gap(row) > CLEAR)
}

#[test]
fn the_prompts_have_clear_and_varied_answers() {
    let mut model = Reference::new(&model()).unwrap();
    for (sequence, prompt) in prompts().iter().enumerate() {
        for adapted in [false, true] {
            let spec = AdapterSpec {
                seed: lora().seed + sequence as u64,
                scale: if adapted { lora().scale } else { 0.0 },
                ..lora()
            };
            model.set_adapters(&spec).unwrap();
            let clear = is_clear_and_varied(&mut model, prompt, 8);
            assert!(clear, "{sequence} {adapted}");
        }
    }
}

#[test]
fn prompts_side_by_side_are_answered_as_by_the_reference() {
    check(&prompts(), NEVER, 8, None);
}

#[test]
fn each_sequence_has_its_own_adapters() {
    check(&prompts(), NEVER, 8, Some(lora()));
    let plain = answers(&model(), &prompts(), NEVER, 8, None);
    let adapted = answers(&model(), &prompts(), NEVER, 8, Some(&lora()));
    assert!(plain.iter().zip(&adapted).all(|(p, a)| p != a));
    // Nor does a sequence answer with its neighbour's.
    let next = AdapterSpec {
        seed: lora().seed + 1,
        ..lora()
    };
    let shifted = answers(&model(), &prompts(), NEVER, 8, Some(&next));
    assert!(adapted.iter().zip(&shifted).all(|(a, s)| a != s));
}

#[test]
fn adapters_on_some_linears_leave_the_others_alone() {
    use brigade_demo::Projection::{Down, Key, Up};
    for targets in [vec![Key], vec![Up, Down]] {
        let spec = AdapterSpec { targets, ..lora() };
        let want = answers(&model(), &prompts(), NEVER, 8, Some(&spec));
        for ranks in [1, 3, 4] {
            let options = Options {
                lora: Some(spec.clone()),
                ..options(ranks, 8, Some(OverlapMode::Ring))
            };
            let got = run(&prompts(), NEVER, &options).unwrap();
            assert_eq!(got.tokens, want, "{ranks} ranks, {:?}", spec.targets);
        }
    }
}

/// Ranks without a row take part all the same.
#[test]
fn a_prompt_may_be_shorter_than_the_ranks() {
    for prompt in [vec![7], vec![5, 309], vec![3, 77, 500]] {
        for lora in [None, Some(lora())] {
            check(std::slice::from_ref(&prompt), NEVER, 4, lora);
        }
    }
}

#[test]
fn no_tokens_and_one_token_can_be_asked_for() {
    check(&prompts(), NEVER, 0, None);
    check(&prompts(), NEVER, 1, None);
    for ranks in [1, 3] {
        let none = run(&prompts(), NEVER, &options(ranks, 0, None)).unwrap();
        assert_eq!(none.tokens, [[0u32; 0]; 3]);
        assert_eq!((none.layers.len(), none.decoded_tokens), (0, 0));
        let one = run(&prompts(), NEVER, &options(ranks, 1, None)).unwrap();
        assert_eq!(one.tokens.concat().len(), 3);
        assert_eq!(one.decoded_tokens, 0);
    }
}

/// The first, the second and the last sequence end early in turn, the others go on.
#[test]
fn a_sequence_that_ends_leaves_the_others_going() {
    let free = answers(&model(), &prompts(), NEVER, 8, None);
    let mut ended_alone = 0;
    for (sequence, tokens) in free.iter().enumerate() {
        // The end is a token that this sequence comes to on its way, and the others never.
        let others = || (0..free.len()).filter(|&s| s != sequence);
        let end = (1..7)
            .map(|i| tokens[i])
            .find(|t| others().all(|s| !free[s].contains(t)));
        let Some(end) = end else { continue };
        ended_alone += 1;
        let want = answers(&model(), &prompts(), end, 8, None);
        assert!(want[sequence].len() < 8);
        assert_eq!(want[sequence].last(), Some(&end));
        assert!(others().all(|s| want[s] == free[s]));
        check(&prompts(), end, 8, None);
    }
    assert!(ended_alone >= 2, "{free:?}");
}

/// Steps look at twice as many places once those that they look at are full.
#[test]
fn long_answers_are_those_of_the_reference() {
    const TOKENS: usize = 16;
    let long = |len: u32| (0..len).map(|i| (3 * i * i + 31 * i + 3) % 512).collect();
    let prompts = [long(57), long(120), vec![5, 309]];
    let mut reference = Reference::new(&model()).unwrap();
    for prompt in &prompts[..2] {
        assert!(is_clear_and_varied(&mut reference, prompt, TOKENS));
    }
    let want = answers(&model(), &prompts, NEVER, TOKENS, None);
    for ranks in [1, 3] {
        let got = run(&prompts, NEVER, &options(ranks, TOKENS, None)).unwrap();
        assert_eq!(got.tokens, want, "{ranks} ranks");
    }
}

/// The host's calls are refused in a capture, on all ranks: then all read again what was said, and go on without.
#[test]
fn where_steps_cannot_be_captured_they_run_call_by_call_and_say_why() {
    let want = answers(&model(), &prompts(), NEVER, 8, None);
    for ranks in [1, 2, 5] {
        let options = Options {
            graph: true,
            ..options(ranks, 8, None)
        };
        let mut told = vec![Vec::new(); 3];
        let got = generate(&model(), &prompts(), NEVER, &options, &mut |s, t| {
            told[s].push(t);
        });
        let got = got.unwrap();
        assert_eq!((&got.tokens, &told), (&want, &want), "{ranks} ranks");
        let graphs = got.graphs.unwrap();
        assert_eq!((graphs.captured, graphs.launched), (0, 0));
        let reason = graphs.refused.unwrap();
        assert!(reason.contains("cannot be captured"), "{reason}");
        assert!(got.regrouped.is_empty());
        // The second step of a kind would have been captured.
        let short = Options {
            max_tokens: 2,
            ..options
        };
        let got = run(&prompts(), NEVER, &short).unwrap();
        assert_eq!(got.graphs.unwrap().refused, None);
    }
    let got = run(&prompts(), NEVER, &options(2, 8, None)).unwrap();
    assert!(got.graphs.is_none());
}

/// The end token as the very first one leaves nothing to decode.
#[test]
fn a_sequence_may_end_at_once() {
    let prompt = [prompts().swap_remove(1)];
    let end = answers(&model(), &prompt, NEVER, 1, None)[0][0];
    for ranks in RANKS {
        let got = run(&prompt, end, &options(ranks, 8, None)).unwrap();
        assert_eq!(got.tokens, [[end]]);
        assert_eq!(got.decoded_tokens, 0);
    }
}

#[test]
fn tokens_are_told_as_they_come() {
    let end = answers(&model(), &prompts(), NEVER, 4, None)[0][3];
    for ranks in [1, 2, 5] {
        let mut told = Vec::new();
        let options = options(ranks, 8, Some(OverlapMode::Ring));
        let got = generate(&model(), &prompts(), end, &options, &mut |s, t| {
            told.push((s, t));
        })
        .unwrap();
        // Step by step, in each step the sequences that still go on.
        let want: Vec<(usize, u32)> = (0..8)
            .flat_map(|step| {
                let tokens = got.tokens.iter().enumerate();
                tokens.filter_map(move |(s, t)| Some((s, *t.get(step)?)))
            })
            .collect();
        assert_eq!(told, want);
        assert_eq!(got.decoded_tokens, told.len() - 3);
    }
}

/// The twin has no pull: every rank is told why, and none is left waiting.
#[test]
fn a_forced_pull_is_refused_with_its_reason() {
    for ranks in RANKS {
        let options = options(ranks, 4, Some(OverlapMode::Pull));
        let got = run(&prompts(), NEVER, &options);
        if ranks == 1 {
            // With nothing to overlap, there is nothing to refuse.
            let want = answers(&model(), &prompts(), NEVER, 4, None);
            assert_eq!(got.unwrap().tokens, want);
            continue;
        }
        match got.unwrap_err() {
            Error::Brigade(brigade::Error::Unsupported(reason)) => {
                assert_eq!(reason.code, brigade::plan::reason::PULL_TWIN);
            }
            other => panic!("{ranks} ranks: {other}"),
        }
    }
}

#[test]
fn what_cannot_be_is_refused_before_a_rank_starts() {
    let prompts = prompts();
    let check = |prompts: &[Vec<u32>], options: &Options, want: &str| {
        let got = run(prompts, NEVER, options).unwrap_err();
        assert!(matches!(got, Error::Field { .. }), "{got:?}");
        assert_eq!(got.to_string(), want);
    };
    check(
        &[],
        &options(2, 4, None),
        "prompts is 0, wanted at least one",
    );
    check(
        &[vec![1], vec![]],
        &options(2, 4, None),
        "prompt is empty, wanted at least one token",
    );
    check(
        &[vec![1, 512]],
        &options(2, 4, None),
        "prompt token is 512, wanted below 512",
    );
    check(
        &prompts,
        &options(2, 2031, None),
        "prompt and max_tokens is 18 + 2031, wanted at most the context of 2048",
    );
    for ranks in [0, 7] {
        check(
            &prompts,
            &options(ranks, 4, None),
            &format!("ranks is {ranks}, wanted 1 to 6, so that every rank has a query head"),
        );
    }
}

/// What a plan refuses, it refuses on every rank, whatever they do meanwhile.
#[test]
fn a_mode_with_too_many_pieces_is_refused() {
    let got = run(&prompts(), NEVER, &options(3, 4, CHUNKED(17)));
    match got.unwrap_err() {
        Error::Brigade(brigade::Error::Unsupported(reason)) => {
            assert_eq!(reason.code, brigade::plan::reason::PIECES);
        }
        other => panic!("{other}"),
    }
}

/// A model whose weights cannot all be read.
struct Damaged(Synthetic);

impl Source for Damaged {
    fn config(&self) -> &brigade_demo::Config {
        self.0.config()
    }
    fn rows(
        &self,
        id: brigade_demo::TensorId,
        rows: std::ops::Range<usize>,
    ) -> Result<brigade_demo::Matrix, Error> {
        // Only the last of three ranks wants these rows.
        if id == brigade_demo::TensorId::Embedding && rows.start > 300 {
            return Err(Error::MissingTensor {
                tensor: id.to_string(),
                want: [512, 96],
            });
        }
        self.0.rows(id, rows)
    }
}

/// One rank that cannot load does not leave the others waiting until the deadline, and its own error comes out.
#[test]
fn a_rank_that_fails_ends_the_run() {
    let start = std::time::Instant::now();
    let options = options(3, 4, None);
    let got = generate(
        &Damaged(model()),
        &prompts(),
        NEVER,
        &options,
        &mut |_, _| {},
    );
    let error = got.unwrap_err();
    assert!(
        matches!(error, Error::MissingTensor { .. }),
        "the cause, not what followed from it: {error}"
    );
    assert!(start.elapsed() < options.deadline / 2);
}
