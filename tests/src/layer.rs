//! Random linear layers: what the linears with a collective are tried with.

use crate::{backend::Rank, matrix::Matrix};
use brigade_device::{Activation, Buffer, DataType, Lora, LoraRun, OverlapMode};
use rand::{Rng, rngs::StdRng};

/// One rank's layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// `[K, N]`, or `[N, K]` if transposed.
    pub weight: Matrix,
    /// How the weight is stored.
    pub transpose: bool,
    /// C.
    pub bias: Option<Matrix>,
    /// Applied last.
    pub activation: Activation,
    /// Adapters.
    pub runs: Vec<Run>,
}

/// Rows with one adapter or none.
#[derive(Clone, Debug)]
pub struct Run {
    /// How many.
    pub rows: usize,
    /// Which one.
    pub adapter: Option<Adapter>,
}

/// A low-rank adapter.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// `[K, r]`
    pub a: Matrix,
    /// `[r, N]`
    pub b: Matrix,
    /// Factor.
    pub scale: f32,
}

/// Which C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiasKind {
    /// No C.
    None,
    /// `[N]`
    Row,
    /// `[1, N]`
    OneRow,
    /// `[M, N]`
    Full,
}

/// Which adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraKind {
    /// No runs.
    None,
    /// One adapter for all rows.
    One,
    /// Adapters of several ranks, some rows without, an empty run, and no respect for the borders of chunks.
    Mixed,
    /// Runs without any adapter.
    Bare,
}

/// A case of a linear with a collective, before its numbers are drawn.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Rows of every rank.
    pub rows: Vec<usize>,
    /// K of every rank.
    pub k: Vec<usize>,
    /// N of every rank.
    pub n: Vec<usize>,
    /// Type of activations and weights.
    pub dtype: DataType,
    /// Type of C.
    pub bias_type: DataType,
    /// Type of the result.
    pub output: DataType,
    /// Which C.
    pub bias: BiasKind,
    /// Applied last.
    pub activation: Activation,
    /// Which adapters.
    pub lora: LoraKind,
    /// Whether the weight is stored as `[N, K]`.
    pub transpose: bool,
    /// Whether D is given.
    pub into: bool,
    /// Whether own rows are written straight into the user buffer.
    pub resident: bool,
}

/// The types that linears take.
pub const FLOATS: [DataType; 3] = [DataType::F32, DataType::F16, DataType::BF16];

impl Spec {
    /// A plain case with sizes of this draw: the same K, N and rows on every rank.
    pub fn even(rng: &mut StdRng, size: usize) -> Self {
        let dtype = FLOATS[rng.random_range(0..3)];
        Self {
            rows: vec![rng.random_range(1..=18); size],
            k: vec![rng.random_range(8..=40); size],
            n: vec![rng.random_range(4..=36); size],
            dtype,
            bias_type: dtype,
            output: dtype,
            bias: BiasKind::None,
            activation: Activation::None,
            lora: LoraKind::None,
            transpose: false,
            into: rng.random(),
            resident: false,
        }
    }

    /// A case with another number of rows on every rank.
    pub fn ragged(rng: &mut StdRng, size: usize) -> Self {
        let mut spec = Self::even(rng, size);
        spec.rows = (0..size).map(|_| rng.random_range(0..=17)).collect();
        spec.rows[rng.random_range(0..size)] += 1;
        spec
    }

    /// With other values in some fields.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Sizes and types that a mode takes.
    #[must_use]
    pub fn taken_by(self, choice: Option<OverlapMode>) -> Self {
        if choice != Some(OverlapMode::Tiles) {
            return self;
        }
        self.with(|s| {
            s.k.iter_mut()
                .for_each(|k| *k = k.next_multiple_of(8).max(8));
            // No columns stay none.
            s.n.iter_mut().for_each(|n| *n = n.next_multiple_of(8));
            if s.dtype == DataType::F32 {
                s.dtype = DataType::BF16;
            }
            // Of f16 they do not take all scales of adapters.
            if s.lora == LoraKind::Mixed {
                s.dtype = DataType::BF16;
            }
            (s.output, s.transpose) = (s.dtype, true);
        })
    }

    /// A mode of gather-linear or its twin, or what comes closest to it where it does not take this case.
    pub fn choice(&self, choice: Option<OverlapMode>) -> Option<OverlapMode> {
        let whole = |n: &usize| n.is_multiple_of(8);
        let taken = self.dtype != DataType::F32
            && self.output == self.dtype
            && self.transpose
            && self.k[0] > 0
            && self.k.iter().chain(&self.n).all(whole)
            && !(self.dtype == DataType::F16 && self.lora == LoraKind::Mixed);
        match choice {
            Some(OverlapMode::Tiles) if !taken => Some(OverlapMode::Chunked { pieces: 1 }),
            choice => choice,
        }
    }

    /// Rows of all ranks.
    pub fn total_rows(&self) -> usize {
        self.rows.iter().sum()
    }

    /// First row of a rank.
    pub fn first_row(&self, rank: usize) -> usize {
        self.rows[..rank].iter().sum()
    }

    /// Lengths of runs, with the ranks and scales of their adapters: the same for every rank of the group.
    fn runs(&self, rng: &mut StdRng) -> Vec<(usize, Option<(usize, f32)>)> {
        let m = self.total_rows();
        match self.lora {
            LoraKind::None => vec![],
            LoraKind::One => vec![(m, Some((4, 0.75)))],
            LoraKind::Bare => vec![(m / 2, None), (m - m / 2, None)],
            LoraKind::Mixed => {
                let mut cuts: Vec<_> = (0..3).map(|_| rng.random_range(0..=m)).collect();
                cuts.sort_unstable();
                vec![
                    (cuts[0], Some((1, 1.5))),
                    (0, Some((2, 1.0))),
                    (cuts[1] - cuts[0], Some((7, -0.5))),
                    (cuts[2] - cuts[1], None),
                    (m - cuts[2], Some((3, 0.25))),
                ]
            }
        }
    }

    /// Draws every rank's layer. `bias_rows` is M; `shared_bias` says whether C is the same on every rank.
    pub fn layers(&self, rng: &mut StdRng, shared_bias: bool) -> Vec<Layer> {
        let runs = self.runs(rng);
        let mut layers: Vec<Layer> = (0..self.rows.len())
            .map(|rank| self.layer(rng, &runs, self.k[rank], self.n[rank]))
            .collect();
        if shared_bias {
            let bias = layers[0].bias.clone();
            layers.iter_mut().for_each(|l| l.bias.clone_from(&bias));
        }
        layers
    }

    fn layer(
        &self,
        rng: &mut StdRng,
        runs: &[(usize, Option<(usize, f32)>)],
        k: usize,
        n: usize,
    ) -> Layer {
        let scale = 2.0 / (k.max(1) as f64).sqrt();
        let dims = if self.transpose { [n, k] } else { [k, n] };
        let m = self.total_rows();
        let bias_dims = match self.bias {
            BiasKind::None => None,
            BiasKind::Row => Some(vec![n]),
            BiasKind::OneRow => Some(vec![1, n]),
            BiasKind::Full => Some(vec![m, n]),
        };
        Layer {
            weight: Matrix::random(rng, self.dtype, &dims, scale),
            transpose: self.transpose,
            bias: bias_dims.map(|dims| Matrix::random(rng, self.bias_type, &dims, 1.0)),
            activation: self.activation,
            runs: runs
                .iter()
                .map(|&(rows, adapter)| Run {
                    rows,
                    adapter: adapter.map(|(r, factor)| Adapter {
                        a: Matrix::random(rng, self.dtype, &[k, r], scale),
                        b: Matrix::random(rng, self.dtype, &[r, n], 1.0),
                        scale: factor,
                    }),
                })
                .collect(),
        }
    }
}

impl Layer {
    /// Columns of the result.
    pub fn n(&self) -> usize {
        self.weight.dims[usize::from(!self.transpose)]
    }

    /// In the device's memory.
    pub fn upload(&self, rank: &Rank) -> Uploaded {
        Uploaded {
            weight: rank.upload(&self.weight),
            bias: self.bias.as_ref().map(|b| rank.upload(b)),
            runs: self
                .runs
                .iter()
                .map(|run| {
                    let adapter = run.adapter.as_ref();
                    let adapter = adapter.map(|l| (rank.upload(&l.a), rank.upload(&l.b), l.scale));
                    (run.rows, adapter)
                })
                .collect(),
        }
    }
}

/// A layer in the device's memory.
pub struct Uploaded {
    /// The weight.
    pub weight: Buffer,
    /// C.
    pub bias: Option<Buffer>,
    runs: Vec<(usize, Option<UploadedAdapter>)>,
}

/// A, B and the scale.
type UploadedAdapter = (Buffer, Buffer, f32);

impl Uploaded {
    /// Adapters as parameters take them.
    pub fn runs(&self) -> Vec<LoraRun<'_>> {
        self.runs
            .iter()
            .map(|(rows, adapter)| LoraRun {
                rows: *rows,
                adapter: adapter.as_ref().map(|(a, b, scale)| Lora {
                    a: a.view(),
                    b: b.view(),
                    scale: *scale,
                }),
            })
            .collect()
    }
}
