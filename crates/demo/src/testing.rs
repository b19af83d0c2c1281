//! What the unit tests share: the real model's dimensions, a scratch directory, and a GGUF file
//! small enough to break.

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use crate::Config;
use crate::model::TensorId;

/// SmolLM2-135M-Instruct's dimensions.
pub(crate) fn smollm2_config() -> Config {
    Config {
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
    }
}

/// A directory that is gone when the test is.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "brigade-demo-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A GGUF file in the making.
pub(crate) struct Gguf {
    fields: Vec<(String, Value)>,
    tensors: Vec<(String, QTensor)>,
}

impl Gguf {
    /// A sound model: 2 layers, hidden 32, 4 heads and 2 KV heads of 8, feed-forward 64, and a
    /// byte-level BPE vocabulary with the merges for `hi` and `_the`.
    pub(crate) fn tiny() -> Self {
        let config = Config {
            layers: 2,
            hidden: 32,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            feed_forward: 64,
            vocabulary: 288,
            ..smollm2_config()
        };
        let mut gguf = Self {
            fields: Vec::new(),
            tensors: Vec::new(),
        };
        let count = |number: usize| Value::U32(number as u32);
        gguf.set("general.architecture", Value::String("llama".into()));
        gguf.set("llama.block_count", count(config.layers));
        gguf.set("llama.context_length", count(config.context));
        gguf.set("llama.embedding_length", count(config.hidden));
        gguf.set("llama.feed_forward_length", count(config.feed_forward));
        gguf.set("llama.attention.head_count", count(config.heads));
        gguf.set("llama.attention.head_count_kv", count(config.kv_heads));
        gguf.set("llama.rope.freq_base", Value::F32(config.rope_base));
        gguf.set(
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(config.rms_epsilon),
        );
        gguf.set("llama.vocab_size", count(config.vocabulary));
        gguf.set("llama.rope.dimension_count", count(config.head_dim));
        gguf.set_vocabulary(config.vocabulary);
        for id in TensorId::all(&config) {
            let dtype = if matches!(id, TensorId::Linear(..)) {
                GgmlDType::Q4_1
            } else {
                GgmlDType::F32
            };
            match id.shape(&config).unwrap() {
                [1, columns] => gguf.add_tensor(&id.to_string(), &[columns], dtype),
                shape => gguf.add_tensor(&id.to_string(), &shape, dtype),
            }
        }
        gguf
    }

    fn set_vocabulary(&mut self, size: usize) {
        let merges = ["h i", "t h", "th e", "Ġ the"];
        let mut tokens: Vec<String> = ["<|end|>", "<|im_start|>", "<|im_end|>"]
            .map(Into::into)
            .to_vec();
        let specials = tokens.len();
        let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
            .into_iter()
            .collect();
        alphabet.sort_unstable();
        tokens.extend(alphabet.iter().map(ToString::to_string));
        tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
        tokens.extend((tokens.len()..size).map(|id| format!("unused{id}")));
        let kind = |id: usize| Value::I32(if id < specials { 3 } else { 1 });
        self.set("tokenizer.ggml.model", Value::String("gpt2".into()));
        self.set("tokenizer.ggml.pre", Value::String("smollm".into()));
        self.set(
            "tokenizer.ggml.token_type",
            Value::Array((0..tokens.len()).map(kind).collect()),
        );
        self.set(
            "tokenizer.ggml.tokens",
            Value::Array(tokens.into_iter().map(Value::String).collect()),
        );
        self.set(
            "tokenizer.ggml.merges",
            Value::Array(merges.map(|merge| Value::String(merge.into())).to_vec()),
        );
        self.set("tokenizer.ggml.bos_token_id", Value::U32(1));
        self.set("tokenizer.ggml.eos_token_id", Value::U32(2));
        let template = "{% for m in messages %}\
                        {{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}\
                        {% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}";
        self.set("tokenizer.chat_template", Value::String(template.into()));
    }

    pub(crate) fn set(&mut self, field: &str, value: Value) {
        self.remove(field);
        self.fields.push((field.to_owned(), value));
    }

    pub(crate) fn remove(&mut self, field: &str) {
        self.fields.retain(|(name, _)| name != field);
    }

    pub(crate) fn add_tensor(&mut self, name: &str, shape: &[usize], dtype: GgmlDType) {
        self.drop_tensor(name);
        let size = shape.iter().product::<usize>();
        let values: Vec<f32> = (0..size)
            .map(|i| ((i * 37 + name.len()) % 101) as f32 / 50.0 - 1.0)
            .collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        self.tensors
            .push((name.to_owned(), QTensor::quantize(&tensor, dtype).unwrap()));
    }

    pub(crate) fn drop_tensor(&mut self, name: &str) {
        self.tensors.retain(|(other, _)| other != name);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = Cursor::new(Vec::new());
        let fields: Vec<_> = self
            .fields
            .iter()
            .map(|(name, value)| (name.as_str(), value))
            .collect();
        let tensors: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect();
        gguf_file::write(&mut file, &fields, &tensors).unwrap();
        file.into_inner()
    }
}
