use std::path::{Path, PathBuf};

/// A result whose error is the demo's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong on the model side: what it was about, what was found there, and what was wanted
/// instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not a GGUF file, or is cut short or damaged.
    #[error("{} is not a readable GGUF file: {what}", path.display())]
    Container {
        /// The file.
        path: PathBuf,
        /// Where reading stopped.
        what: String,
    },
    /// A metadata field that the model needs is not in the file.
    #[error("metadata field `{field}` is missing, wanted {want}")]
    MissingField {
        /// The field's name.
        field: String,
        /// The type it should have.
        want: &'static str,
    },
    /// A tensor that the model needs is not in the file.
    #[error("tensor `{tensor}` is missing, wanted shape {want:?}")]
    MissingTensor {
        /// The tensor's name.
        tensor: String,
        /// The shape it should have, `[rows, columns]`.
        want: [usize; 2],
    },
    /// A field, parameter or range has a value that does not fit.
    #[error("{field} is {got}, wanted {want}")]
    Field {
        /// The field, with its owner where it has one.
        field: String,
        /// What it is.
        got: String,
        /// What it should be.
        want: String,
    },
    /// The tokenizer could not be built or refused its input.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template could not be parsed or rendered.
    #[error("chat template: {0}")]
    Template(String),
    /// The model could not be fetched. The message ends with what to do instead.
    #[error("{what}\n{remedy}")]
    Fetch {
        /// What failed.
        what: String,
        /// What to do, with and without a network.
        remedy: String,
    },
    /// A device or a communicator refused, or a group stopped.
    #[error(transparent)]
    Brigade(#[from] brigade::Error),
    /// This rank went away in the middle, as it was told to.
    #[error("rank {rank} left in the middle, as it was told to")]
    Left {
        /// This rank.
        rank: usize,
    },
    /// A step of decoding could not be captured on all ranks.
    #[error("{0}")]
    NotCaptured(String),
    /// candle refused.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// A layer is further from its evaluation in f64 than roundings explain.
    #[error(
        "the layer differs by {diff:.1e} from its evaluation in f64, a token by {worst:.1e}, wanted at most {bound:.1e}"
    )]
    Inexact {
        /// Over all tokens.
        diff: f64,
        /// Of the worst token.
        worst: f64,
        /// What it may be.
        bound: f64,
    },
    /// A repeat gave other bits than the first pass.
    #[error("repeat {repeat} gave other bits on rank {rank} than the first pass")]
    OtherBits {
        /// Where.
        rank: usize,
        /// Which, from 1 on.
        repeat: usize,
    },
    /// There is neither a cache directory variable nor a home directory in the environment.
    #[error("no cache directory: set BRIGADE_CACHE, XDG_CACHE_HOME or HOME")]
    NoCacheDirectory,
}

impl From<candle_core::Error> for Error {
    /// Brigade's error, where candle's carries it.
    fn from(error: candle_core::Error) -> Self {
        match brigade_candle::brigade_error(&error) {
            Some(ours) => Self::Brigade(ours.clone()),
            None => Self::Candle(error),
        }
    }
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn field(
        field: impl Into<String>,
        got: impl ToString,
        want: impl Into<String>,
    ) -> Self {
        Self::Field {
            field: field.into(),
            got: got.to_string(),
            want: want.into(),
        }
    }
}
