//! What a model is to the rest of the demo: a [`Config`], and a [`Source`] of named tensors.
//!
//! The architecture is llama's: RMS norm, rotary positions on interleaved pairs, grouped-query
//! attention, SwiGLU, and a head tied to the embedding. Linears are stored as GGUF stores them,
//! row-major `[out, in]`.

mod config;
mod file;
mod matrix;
mod metadata;
mod synthetic;
mod tensors;
mod weights;

use std::env;
use std::ops::Range;
use std::path::PathBuf;

pub use config::Config;
pub use file::ModelFile;
pub use matrix::Matrix;
pub use metadata::Metadata;
pub use synthetic::Synthetic;
pub use tensors::{Projection, TensorId};
pub use weights::{LayerWeights, Weights};

use crate::Result;
pub(crate) use matrix::check_range;

/// A model's weights, given out in f32 tensor by tensor and piece by piece.
///
/// No method holds more than one tensor at a time, so a rank that asks for its shard never has the
/// whole model in memory.
pub trait Source: Send + Sync {
    /// The model's dimensions and constants.
    fn config(&self) -> &Config;

    /// The rows `rows` of a tensor, `[rows.len(), columns]`.
    ///
    /// # Errors
    /// The tensor is not of this model, the rows are not all in it, or they cannot be read.
    fn rows(&self, id: TensorId, rows: Range<usize>) -> Result<Matrix>;

    /// A whole tensor, `[rows, columns]`; a vector is one row.
    ///
    /// # Errors
    /// The tensor is not of this model, or cannot be read.
    fn tensor(&self, id: TensorId) -> Result<Matrix> {
        let [rows, _] = id.shape(self.config())?;
        self.rows(id, 0..rows)
    }

    /// The columns `columns` of a tensor, `[rows, columns.len()]`, cut out strip by strip.
    ///
    /// # Errors
    /// The tensor is not of this model, the columns are not all in it, or they cannot be read.
    fn columns(&self, id: TensorId, columns: Range<usize>) -> Result<Matrix> {
        const STRIP_ROWS: usize = 64;
        let [rows, width] = id.shape(self.config())?;
        check_range(&format!("columns of {id}"), &columns, width)?;
        let mut data = Vec::with_capacity(rows * columns.len());
        for start in (0..rows).step_by(STRIP_ROWS) {
            let strip = self.rows(id, start..rows.min(start + STRIP_ROWS))?;
            for row in 0..strip.rows() {
                data.extend_from_slice(&strip.row(row)[columns.clone()]);
            }
        }
        Matrix::new(rows, columns.len(), data)
    }
}

/// The directory that holds fetched models: `$BRIGADE_CACHE`, else `$XDG_CACHE_HOME/brigade`, else
/// `~/.cache/brigade`.
///
/// # Errors
/// [`crate::Error::NoCacheDirectory`] when the environment names none of them.
pub fn cache_directory() -> Result<PathBuf> {
    let set = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("BRIGADE_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|path| path.join("brigade")))
        .or_else(|| {
            env::home_dir()
                .filter(|home| !home.as_os_str().is_empty())
                .map(|home| home.join(".cache/brigade"))
        })
        .ok_or(crate::Error::NoCacheDirectory)
}

/// Where the fetched SmolLM2 file lies, or would lie: [`crate::fetch::SMOLLM2`]'s name in the
/// [`cache_directory`].
///
/// # Errors
/// As [`cache_directory`].
pub fn cached_path() -> Result<PathBuf> {
    Ok(cache_directory()?.join(crate::fetch::SMOLLM2.file_name()))
}
