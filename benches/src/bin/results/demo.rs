//! SmolLM2 on one rank and on two.

use super::{Rounds, rounded};
use anyhow::{Context, Result, ensure};
use brigade::DeviceChoice;
use brigade_benches::median;
use brigade_demo::{
    Message, ModelFile, Tokenizer, model,
    parallel::{Options, generate},
};
use serde_json::{Value, json};

const PROMPT: &str = "What is gravity?";

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let path = model::cached_path()?;
    let file = ModelFile::open(&path)
        .with_context(|| "run `cargo xtask model` once, which fetches the model")?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let prompts = [tokenizer.chat(&[Message::user(PROMPT)])?];
    let mut rows = Vec::new();
    let mut told = None;
    for ranks in [1, 2] {
        let options = Options {
            ranks,
            max_tokens: rounds.tokens,
            device: DeviceChoice::Host,
            ..Options::default()
        };
        let (mut prefill_ms, mut tokens_per_s) = (Vec::new(), Vec::new());
        for _ in 0..rounds.runs {
            let got = generate(&file, &prompts, tokenizer.end(), &options, &mut |_, _| {})?;
            let told = told.get_or_insert_with(|| got.tokens.clone());
            ensure!(*told == got.tokens, "{ranks} ranks say {:?}", got.tokens);
            prefill_ms.push(got.prefill.as_secs_f64() * 1e3);
            tokens_per_s.push(got.decoded_tokens as f64 / got.decode.as_secs_f64());
        }
        rows.push(json!({
            "model": path.file_stem().map(|name| name.to_string_lossy().into_owned()),
            "ranks": ranks,
            "prompt_tokens": prompts[0].len(),
            "tokens": rounds.tokens,
            "runs": rounds.runs,
            "prefill_ms": rounded(median(&prefill_ms)),
            "decode_tokens_per_s": rounded(median(&tokens_per_s)),
        }));
    }
    Ok(rows)
}
