//! Real models on Brigade: the model side.
//!
//! A [`Source`] gives out the weights of a llama-architecture model tensor by tensor, so that each rank of a
//! tensor-parallel run loads only its own [`Shard`]. There are two sources: [`ModelFile`], a GGUF file (SmolLM2-135M-Instruct
//! can be [fetched](fetch) from a package registry), and [`Synthetic`], a small random model for where there is no file.
//! The [`Tokenizer`] goes with either.
//!
//! [`reference`] evaluates the same architecture on one rank in plain loops, with no matrix library and nothing of Brigade:
//! it is what a tensor-parallel run is compared with.

pub mod adapter;
pub mod fetch;
pub mod model;
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
