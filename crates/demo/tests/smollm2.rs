//! The real model: its tokenizer, the reference, and any number of ranks say exactly what SmolLM2-135M-Instruct says.
#![allow(clippy::unwrap_used)]

mod common;

use brigade::OverlapMode;
use brigade_demo::parallel::{Options, generate};
use brigade_demo::reference::Reference;
use brigade_demo::{Config, Message, ModelFile, Result, Source, Tokenizer, model, shard};
use common::{CHUNKED, options};

const GRAVITY_PROMPT: [u32; 34] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520, 9531, 198,
];

const GRAVITY: [u32; 24] = [
    22007, 6463, 314, 253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282, 42548, 2952, 411,
    260, 4313, 282, 2389, 30, 657, 506, 253,
];

const CAPITAL: [u32; 7] = [504, 3575, 282, 4649, 314, 7042, 30];

fn open() -> Result<ModelFile> {
    let path = model::cached_path()?;
    assert!(
        path.exists(),
        "{} is absent: run `cargo xtask model` (or `cargo xtask demo`) once to fetch it",
        path.display()
    );
    ModelFile::open(&path)
}

#[test]
fn the_config_is_smollm2s() {
    let config = Config {
        layers: 30,
        hidden: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        feed_forward: 1536,
        vocabulary: 49152,
        rope_base: 100_000.0,
        rms_epsilon: 1e-5,
        context: 8192,
    };
    assert_eq!(open().unwrap().config(), &config);
    assert_eq!(config.parameters(), 134_515_008);
}

#[test]
fn the_chat_prompt_is_smollm2s() {
    let tokenizer = Tokenizer::from_metadata(open().unwrap().metadata()).unwrap();
    assert_eq!(
        tokenizer
            .chat(&[Message::user("What is gravity?")])
            .unwrap(),
        GRAVITY_PROMPT
    );
    assert_eq!(tokenizer.end(), 2);
}

#[test]
fn the_reference_answers_as_smollm2_does() {
    let file = open().unwrap();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let mut model = Reference::new(&file).unwrap();

    let gravity = model
        .generate(&GRAVITY_PROMPT, 24, tokenizer.end())
        .unwrap();
    assert_eq!(gravity, GRAVITY, "{:?}", tokenizer.decode(&gravity));

    let prompt = tokenizer
        .chat(&[Message::user("What is the capital of France?")])
        .unwrap();
    let capital = model.generate(&prompt, 24, tokenizer.end()).unwrap();
    assert_eq!(capital, CAPITAL);
    assert_eq!(
        tokenizer.decode(&capital).unwrap(),
        "The capital of France is Paris."
    );
}

#[test]
fn any_number_of_ranks_answers_as_smollm2_does() {
    let file = open().unwrap();
    let modes = [
        None,
        Some(OverlapMode::Off),
        Some(OverlapMode::Ring),
        CHUNKED(2),
    ];
    for ranks in 1..=4 {
        for mode in modes {
            // As far as a sentence begins where the mode is forced, which makes every token the same way.
            let tokens = if mode.is_none() { GRAVITY.len() } else { 8 };
            let options = options(ranks, tokens, mode);
            let got = generate(
                &file,
                &[GRAVITY_PROMPT.to_vec()],
                2,
                &options,
                &mut |_, _| {},
            );
            let want = &GRAVITY[..tokens];
            assert_eq!(got.unwrap().tokens, [want], "{ranks} ranks, {mode:?}");
        }
    }
}

/// Those who are left read their new shards from the file, and go on where they were.
#[test]
fn a_rank_that_is_lost_is_done_without() {
    const TOKENS: usize = 5;
    let file = open().unwrap();
    let options = Options {
        regroup: true,
        leave: Some((1, 2)),
        ..options(3, TOKENS, None)
    };
    let prompt = [GRAVITY_PROMPT.to_vec()];
    let got = generate(&file, &prompt, 2, &options, &mut |_, _| {}).unwrap();
    assert_eq!(got.tokens, [&GRAVITY[..TOKENS]]);
    let [regrouped] = &got.regrouped[..] else {
        panic!("{:?}", got.regrouped);
    };
    assert_eq!(regrouped.lost, [1]);
    let shards = shard::plan(file.config(), 2).unwrap();
    let want: Vec<u64> = shards
        .iter()
        .map(|s| 4 * s.parameters(file.config()))
        .collect();
    assert_eq!(got.weight_bytes, want);
}

/// One answer ends while the others go on.
#[test]
fn prompts_side_by_side_are_answered_as_alone() {
    const TOKENS: usize = 12;
    let file = open().unwrap();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let prompts = [
        "Name three colours.",
        "What is the capital of France?",
        "Write one sentence about a wooden boat that lost its way in the fog.",
    ]
    .map(|text| tokenizer.chat(&[Message::user(text)]).unwrap());
    let [colours, capital, boat] = &prompts;
    let others = [colours.clone(), boat.clone()];
    let told = common::answers(&file, &others, tokenizer.end(), TOKENS, None);
    assert_ne!(told[0], told[1]);
    let want = [
        told[0].clone(),
        [&CAPITAL[..], &[tokenizer.end()]].concat(),
        told[1].clone(),
    ];
    for (ranks, mode) in [
        (1, None),
        (2, Some(OverlapMode::Ring)),
        (3, CHUNKED(2)),
        (4, Some(OverlapMode::Off)),
    ] {
        let options = options(ranks, TOKENS, mode);
        let got = generate(&file, &prompts, tokenizer.end(), &options, &mut |_, _| {}).unwrap();
        assert_eq!(got.tokens, want, "{ranks} ranks, {mode:?}");
    }
    let got = generate(
        &file,
        std::slice::from_ref(capital),
        2,
        &options(2, 24, None),
        &mut |_, _| {},
    );
    assert_eq!(got.unwrap().tokens, want[1..2]);
}

/// Each rank's share is within a tenth of an even one.
#[test]
fn ranks_hold_their_shares_of_the_weights() {
    let file = open().unwrap();
    let config = file.config();
    for ranks in 1..=4 {
        let options = options(ranks, 0, None);
        let got = generate(&file, &[vec![1]], 2, &options, &mut |_, _| {}).unwrap();
        let shards = shard::plan(config, ranks).unwrap();
        assert_eq!(got.weight_bytes.len(), ranks);
        for (shard, &bytes) in shards.iter().zip(&got.weight_bytes) {
            assert_eq!(bytes, 4 * shard.parameters(config));
            let even = 4.0 * config.parameters() as f64 / ranks as f64;
            let off = (bytes as f64 / even - 1.0).abs();
            assert!(off < 0.1, "rank {} of {ranks} is {off} off", shard.rank);
        }
    }
}
