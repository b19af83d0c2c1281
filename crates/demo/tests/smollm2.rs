//! The real model: its tokenizer and the reference say exactly what SmolLM2-135M-Instruct says.

use brigade_demo::reference::Reference;
use brigade_demo::{Config, Message, ModelFile, Result, Source, Tokenizer, model};

const GRAVITY_PROMPT: [u32; 34] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520, 9531, 198,
];

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
    let want = [
        22007, 6463, 314, 253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282, 42548, 2952, 411,
        260, 4313, 282, 2389, 30, 657, 506, 253,
    ];
    assert_eq!(gravity, want, "{:?}", tokenizer.decode(&gravity));

    let prompt = tokenizer
        .chat(&[Message::user("What is the capital of France?")])
        .unwrap();
    let capital = model.generate(&prompt, 24, tokenizer.end()).unwrap();
    assert_eq!(capital, [504, 3575, 282, 4649, 314, 7042, 30]);
    assert_eq!(
        tokenizer.decode(&capital).unwrap(),
        "The capital of France is Paris."
    );
}
