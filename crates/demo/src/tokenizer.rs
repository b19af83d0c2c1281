//! Text to token ids and back, and chats to prompts.

use std::collections::HashMap;

use minijinja::{Environment, context};
use serde::Serialize;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper};

use crate::model::Metadata;
use crate::{Error, Result};

/// One turn of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self {
            role: "user".into(),
            content: content.into(),
        }
    }
}

/// A model's tokenizer: byte-level BPE from a GGUF file's own fields, or plain bytes for a
/// synthetic model.
#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    end: u32,
}

#[derive(Debug)]
enum Kind {
    Bpe(Box<Bpe>),
    /// Ids 0, 1 and 2 are special as in SmolLM2 (1 opens a turn, 2 ends it); then come the 256
    /// bytes.
    Bytes,
}

#[derive(Debug)]
struct Bpe {
    tokenizer: tokenizers::Tokenizer,
    template: String,
    start_text: String,
    end_text: String,
}

const BYTES_START: u32 = 1;
const BYTES_END: u32 = 2;
const BYTES_FIRST: u32 = 3;

/// GGUF's `token_type` for tokens that stand for themselves in a text and are no text.
const CONTROL_TOKEN: usize = 3;

impl Tokenizer {
    /// The tokenizer that a GGUF file describes: GPT-2's byte-level BPE with the `smollm`
    /// pre-tokenizer, which takes digits one by one.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`] for fields that are absent, of another kind of
    /// tokenizer, or at odds with each other, [`Error::Tokenizer`] when the vocabulary and merges
    /// do not fit.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self> {
        for (field, want) in [
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ] {
            let got = metadata.text(field)?;
            if got != want {
                return Err(Error::field(field, got, want));
            }
        }
        let tokens = metadata.texts("tokenizer.ggml.tokens")?;
        let kinds = metadata.counts("tokenizer.ggml.token_type")?;
        if kinds.len() != tokens.len() {
            let want = format!("as long as the tokens, {}", tokens.len());
            return Err(Error::field(
                "length of tokenizer.ggml.token_type",
                kinds.len(),
                want,
            ));
        }
        let special = |field: &str| -> Result<(u32, String)> {
            let id = metadata.count(field)?;
            let text = tokens
                .get(id)
                .ok_or_else(|| Error::field(field, id, format!("below {}", tokens.len())))?;
            Ok((id as u32, (*text).to_owned()))
        };
        let (_, start_text) = special("tokenizer.ggml.bos_token_id")?;
        let (end, end_text) = special("tokenizer.ggml.eos_token_id")?;
        let template = metadata.text("tokenizer.chat_template")?.to_owned();
        let tokenizer = build(&tokens, &kinds, &metadata.texts("tokenizer.ggml.merges")?)?;
        Ok(Self {
            kind: Kind::Bpe(Box::new(Bpe {
                tokenizer,
                template,
                start_text,
                end_text,
            })),
            end,
        })
    }

    /// The tokenizer of a synthetic model: one token for each byte.
    ///
    /// # Errors
    /// [`Error::Field`] when the model's vocabulary is too small for it.
    pub fn bytes(vocabulary: usize) -> Result<Self> {
        let least = BYTES_FIRST as usize + 256;
        if vocabulary < least {
            return Err(Error::field(
                "vocabulary",
                vocabulary,
                format!("at least {least} for a byte tokenizer"),
            ));
        }
        Ok(Self {
            kind: Kind::Bytes,
            end: BYTES_END,
        })
    }

    /// The token that ends a turn.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// A text's tokens. Special tokens that the text spells out are taken as such.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bpe(bpe) => Ok(bpe
                .tokenizer
                .encode(text, false)
                .map_err(refused)?
                .get_ids()
                .to_vec()),
            Kind::Bytes => Ok(text
                .bytes()
                .map(|byte| BYTES_FIRST + u32::from(byte))
                .collect()),
        }
    }

    /// The text of some tokens, special tokens left out. A byte tokenizer shows the ids that are no
    /// bytes as `<id>`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Bpe(bpe) => bpe.tokenizer.decode(ids, true).map_err(refused),
            Kind::Bytes => {
                let mut bytes = Vec::with_capacity(ids.len());
                for &id in ids.iter().filter(|&&id| id >= BYTES_FIRST) {
                    match u8::try_from(id - BYTES_FIRST) {
                        Ok(byte) => bytes.push(byte),
                        Err(_) => bytes.extend_from_slice(format!("<{id}>").as_bytes()),
                    }
                }
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
        }
    }

    /// The prompt after which the model speaks as the assistant, written by the model's own
    /// template.
    ///
    /// # Errors
    /// [`Error::Template`] or [`Error::Tokenizer`].
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bpe(bpe) => self.encode(&bpe.render(messages)?),
            Kind::Bytes => {
                let mut ids = Vec::new();
                for message in messages {
                    ids.push(BYTES_START);
                    ids.extend(self.encode(&format!("{}\n{}", message.role, message.content))?);
                    ids.push(BYTES_END);
                }
                ids.push(BYTES_START);
                ids.extend(self.encode("assistant\n")?);
                Ok(ids)
            }
        }
    }
}

impl Bpe {
    fn render(&self, messages: &[Message]) -> Result<String> {
        let mut environment = Environment::new();
        // As Hugging Face's tokenizers set Jinja up for chat templates.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        let values = context! {
            messages,
            add_generation_prompt => true,
            bos_token => self.start_text,
            eos_token => self.end_text,
        };
        environment
            .render_str(&self.template, values)
            .map_err(|error| Error::Template(format!("{error:#}")))
    }
}

fn build(tokens: &[&str], kinds: &[usize], merges: &[&str]) -> Result<tokenizers::Tokenizer> {
    let vocabulary: HashMap<String, u32> = tokens
        .iter()
        .zip(0..)
        .map(|(token, id)| ((*token).to_owned(), id))
        .collect();
    if vocabulary.len() != tokens.len() {
        let want = format!("{}: each once", tokens.len());
        return Err(Error::field(
            "number of different tokens",
            vocabulary.len(),
            want,
        ));
    }
    let pair = |merge: &&str| {
        let (left, right) = merge.split_once(' ').ok_or_else(|| {
            Error::field(
                "tokenizer.ggml.merges entry",
                format!("{merge:?}"),
                "two tokens and a space",
            )
        })?;
        Ok((left.to_owned(), right.to_owned()))
    };
    let merges = merges.iter().map(pair).collect::<Result<Vec<_>>>()?;
    let bpe =
        BPE::builder().vocab_and_merges(vocabulary.into_iter().collect::<Vocabulary>(), merges);

    let byte_level = ByteLevel::new(false, true, true);
    let steps: Vec<PreTokenizerWrapper> = vec![Digits::new(true).into(), byte_level.into()];
    let mut tokenizer = tokenizers::Tokenizer::new(bpe.build().map_err(refused)?);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    tokenizer.with_decoder(Some(byte_level));
    let control = tokens
        .iter()
        .zip(kinds)
        .filter(|&(_, &kind)| kind == CONTROL_TOKEN);
    let control: Vec<_> = control
        .map(|(token, _)| AddedToken::from(*token, true))
        .collect();
    tokenizer.add_special_tokens(control).map_err(refused)?;
    Ok(tokenizer)
}

type Vocabulary = tokenizers::models::bpe::Vocab;

fn refused(error: tokenizers::Error) -> Error {
    Error::Tokenizer(error.to_string())
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;

    use super::*;
    use crate::ModelFile;
    use crate::testing::{Gguf, TempDir};

    fn from_gguf(gguf: &Gguf) -> Result<Tokenizer> {
        let directory = TempDir::new();
        let model = ModelFile::open(&directory.write("tiny.gguf", &gguf.bytes())).unwrap();
        Tokenizer::from_metadata(model.metadata())
    }

    #[test]
    fn merges_apply_within_words_and_digits_stand_alone() {
        let tokenizer = from_gguf(&Gguf::tiny()).unwrap();
        let pieces = |text: &str| -> Vec<String> {
            let ids = tokenizer.encode(text).unwrap();
            ids.iter()
                .map(|&id| tokenizer.decode(&[id]).unwrap())
                .collect()
        };
        assert_eq!(pieces("hi the"), ["hi", " the"]);
        assert_eq!(pieces("the hi"), ["the", " ", "hi"]);
        assert_eq!(pieces("h1i 23"), ["h", "1", "i", " ", "2", "3"]);
    }

    #[test]
    fn text_survives_the_round_trip() {
        let tokenizers = [
            from_gguf(&Gguf::tiny()).unwrap(),
            Tokenizer::bytes(512).unwrap(),
        ];
        for tokenizer in &tokenizers {
            for text in ["", " ", "hi the 12", "tête-à-tête\n\t東京 🦀", "it's"] {
                assert_eq!(
                    tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(),
                    text
                );
            }
        }
    }

    #[test]
    fn special_tokens_are_one_id_and_no_text() {
        let tokenizer = from_gguf(&Gguf::tiny()).unwrap();
        let ids = tokenizer.encode("<|im_start|>hi<|im_end|>").unwrap();
        assert_eq!([ids.len() as u32, ids[0], ids[2]], [3, 1, 2]);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "hi");
        assert_eq!(tokenizer.end(), 2);
    }

    #[test]
    fn the_template_writes_the_chat() {
        let tokenizer = from_gguf(&Gguf::tiny()).unwrap();
        let chat = tokenizer.chat(&[Message::user("hi")]).unwrap();
        assert_eq!(
            chat,
            tokenizer
                .encode("<|im_start|>user\nhi<|im_end|><|im_start|>")
                .unwrap()
        );

        let bytes = Tokenizer::bytes(512).unwrap();
        let chat = bytes.chat(&[Message::user("hi")]).unwrap();
        assert_eq!([chat[0], chat[8], chat[9]], [1, 2, 1]);
        assert_eq!(bytes.decode(&chat).unwrap(), "user\nhiassistant\n");
        assert_eq!(bytes.decode(&[258 + 3]).unwrap(), "<261>");
    }

    #[test]
    fn a_bad_vocabulary_or_template_is_an_error() {
        let check = |field: &str, value: Value, want: &str| {
            let mut gguf = Gguf::tiny();
            gguf.set(field, value);
            let got = from_gguf(&gguf).and_then(|tokenizer| tokenizer.chat(&[Message::user("hi")]));
            let got = got.unwrap_err().to_string();
            assert!(got.starts_with(want), "{got}");
        };
        let text = |text: &str| Value::String(text.into());
        check(
            "tokenizer.ggml.model",
            text("llama"),
            "tokenizer.ggml.model is llama, wanted gpt2",
        );
        check(
            "tokenizer.ggml.pre",
            text("qwen2"),
            "tokenizer.ggml.pre is qwen2, wanted smollm",
        );
        check(
            "tokenizer.ggml.merges",
            Value::Array(vec![text("hi")]),
            "tokenizer.ggml.merges entry is \"hi\", wanted two tokens and a space",
        );
        check(
            "tokenizer.ggml.merges",
            Value::Array(vec![text("zz yy")]),
            "tokenizer: ",
        );
        check(
            "tokenizer.ggml.eos_token_id",
            Value::U32(288),
            "tokenizer.ggml.eos_token_id is 288, wanted below 288",
        );
        check(
            "tokenizer.ggml.token_type",
            Value::Array(vec![Value::I32(1)]),
            "length of tokenizer.ggml.token_type is 1, wanted as long as the tokens, 288",
        );
        check(
            "tokenizer.ggml.tokens",
            Value::Array(vec![text("a"); 288]),
            "number of different tokens is 1, wanted 288: each once",
        );
        check(
            "tokenizer.chat_template",
            text("{% if %}"),
            "chat template: ",
        );
        assert!(Tokenizer::bytes(258).is_err());
    }
}
