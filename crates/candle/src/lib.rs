//! Tensor- and expert-parallel layers for [candle](candle_core), on [Brigade](brigade).
//!
//! A rank is a thread or a process with a [`Parallel`]: its communicator, and the device and stream of its tensors. Layers hold it
//! and this rank's part of a weight; they are used by `&self`, implement [`candle_core::Module`], take any number of features over any
//! number of ranks, and give candle's errors, with Brigade's inside ([`brigade_error`]).
//!
//! | to | there is |
//! |---|---|
//! | add, gather or scatter tensors | [`AllReduce`], [`AllGather`], [`ReduceScatter`], and methods of [`Parallel`] |
//! | add a residual to a sum, and normalize it | [`Parallel::all_reduce_norm`], [`RowParallelLinear::forward_norm`]; [`Parallel::residual_norm`] for rows that are spread |
//! | gate what a feed-forward network has inside | [`Parallel::silu_mul`] |
//! | spread a linear over ranks | [`ColumnParallelLinear`], [`RowParallelLinear`] |
//! | the same where rows are spread too, with communication and products at the same time | [`GatherLinear`], [`LinearReduceScatter`] |
//! | spread a vocabulary | [`VocabParallelEmbedding`], [`VocabParallelHead`] |
//! | spread experts | [`ExpertParallel`] |
//! | adapt rows each in their own way | [`Adapter`], [`Runs`] |
//! | cut weights | [`cut`] |
//! | anything else of Brigade's | [`Parallel::lend`], [`Parallel::make`] |
//!
//! Tensors lie in the host's memory, or on a GPU with the feature `cuda`. Neither inputs nor results are copied: inputs are lent to
//! Brigade while a call runs, and results are written where candle's tensor then has them. (Tensors that are not contiguous are made
//! so first, as candle does.)
//!
//! ```
//! use brigade_candle::{ColumnParallelLinear, Parallel, RowParallelLinear, brigade};
//! use brigade::{Activation, CommConfig, ParallelMode};
//! use candle_core::{Device, Module, Result, Tensor};
//!
//! # fn main() -> Result<()> {
//! let block = |boot: brigade::group::ThreadGroup| -> Result<Tensor> {
//!     let parallel = Parallel::join(&Device::Cpu, &boot, &CommConfig::new(ParallelMode::Tp))?;
//!     // Seven features over two ranks: four and three.
//!     let up = ColumnParallelLinear::new(&parallel, &weight(7, 3)?, None)?;
//!     let up = up.with_activation(Activation::Silu);
//!     let down = RowParallelLinear::new(&parallel, &weight(3, 7)?, None)?;
//!     let x = Tensor::ones((2, 3), candle_core::DType::F32, &Device::Cpu)?;
//!     down.forward(&up.forward(&x)?)
//! };
//! # fn weight(n: usize, k: usize) -> Result<Tensor> {
//! #     Tensor::arange(0f32, (n * k) as f32, &Device::Cpu)?.reshape((n, k))
//! # }
//! let both = std::thread::scope(|s| {
//!     let ranks = brigade::group::threads(2).into_iter();
//!     let ranks: Vec<_> = ranks.map(|boot| s.spawn(|| block(boot))).collect();
//!     ranks.into_iter().map(|r| r.join().unwrap()).collect::<Result<Vec<_>>>()
//! })?;
//! assert_eq!(both[0].to_vec2::<f32>()?, both[1].to_vec2::<f32>()?);
//! # Ok(())
//! # }
//! ```

mod adapter;
mod all_gather;
mod all_reduce;
mod all_reduce_norm;
mod column_parallel;
#[cfg(feature = "cuda")]
mod cuda;
pub mod cut;
mod error;
mod experts;
mod gather_linear;
mod into;
mod linear;
mod linear_reduce_scatter;
mod memory;
mod parallel;
mod reduce_scatter;
mod residual_norm;
mod row_parallel;
mod silu_mul;
mod vocab;

pub use adapter::{Adapter, Runs};
pub use all_gather::AllGather;
pub use all_reduce::AllReduce;
pub use brigade;
pub use column_parallel::ColumnParallelLinear;
pub use error::{brigade_error, to_candle};
pub use experts::{ExpertParallel, GatedExperts};
pub use gather_linear::GatherLinear;
pub use linear_reduce_scatter::LinearReduceScatter;
pub use memory::{Lent, data_type, dtype_of};
pub use parallel::Parallel;
pub use reduce_scatter::ReduceScatter;
pub use residual_norm::{Residual, ResidualNorm};
pub use row_parallel::RowParallelLinear;
pub use vocab::{VocabParallelEmbedding, VocabParallelHead};
