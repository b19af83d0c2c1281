//! Shapes and modes, as the command line names them.

use anyhow::{Result as Outcome, ensure};
use brigade::OverlapMode;
use clap::ValueEnum;
use std::str::FromStr;

/// M rows in all, K and N, of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let numbers: Result<Vec<usize>, _> = s.split(',').map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[m, k, n]) if m.min(k).min(n) > 0 => Ok(Self { m, k, n }),
            _ => Err(format!("{s}: wanted m,k,n")),
        }
    }
}

/// K and N of one rank: a shape without its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    pub k: usize,
    pub n: usize,
}

impl FromStr for Layer {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match format!("1,{s}").parse() {
            Ok(Shape { k, n, .. }) => Ok(Self { k, n }),
            Err(_) => Err(format!("{s}: wanted k,n")),
        }
    }
}

/// The shapes that are always measured: layers of large models under tensor parallelism.
pub fn usual(ranks: usize) -> Vec<Shape> {
    let (wide, narrow) = (28_672 / ranks, 10_240 / ranks);
    [
        (512, 24_576 / ranks),
        (2048, wide),
        (4096, wide),
        (8192, wide),
        (8192, narrow),
        (16_384, wide),
    ]
    .map(|(m, n)| Shape { m, k: 8192, n })
    .to_vec()
}

/// Layers that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// Six shapes of large models, each with rows of its own
    Six,
    /// The layers of Llama-3-70B
    #[value(name = "llama-3-70b")]
    Llama3_70b,
    /// The attention's layers of Qwen3-235B-A22B; its experts go by `moe`
    #[value(name = "qwen3-235b")]
    Qwen3_235b,
}

/// Rows of all ranks for a model's layers, if none are named.
const MODEL_ROWS: [usize; 3] = [512, 2048, 8192];

impl Model {
    /// K and N of the layers that gather their rows, and of those that scatter sums, over all ranks.
    ///
    /// Of Llama-3-70B hidden 8192, 64 heads and 8 of keys and values of 128 columns each, feed-forward 28672, gate and up in one; of
    /// Qwen3-235B-A22B hidden 4096, 64 heads and 4 of keys and values of 128 columns each (their models' `config.json`).
    fn layers(self) -> (Vec<Layer>, Vec<Layer>) {
        let layer = |k, n| Layer { k, n };
        match self {
            Self::Six => (vec![], vec![]),
            Self::Llama3_70b => (
                vec![layer(8192, 10_240), layer(8192, 57_344)],
                vec![layer(8192, 8192), layer(28_672, 8192)],
            ),
            Self::Qwen3_235b => (vec![layer(4096, 9216)], vec![layer(8192, 4096)]),
        }
    }

    /// The shapes of one of `ranks` ranks: who gathers rows has a part of the columns, and who scatters sums a part of the inner
    /// dimension.
    pub fn shapes(self, scatters: bool, ranks: usize) -> Vec<Shape> {
        if self == Self::Six {
            return usual(ranks);
        }
        let (gathering, scattering) = self.layers();
        let layers: Vec<Layer> = match scatters {
            true => scattering
                .iter()
                .map(|l| Layer {
                    k: l.k / ranks,
                    ..*l
                })
                .collect(),
            false => gathering
                .iter()
                .map(|l| Layer {
                    n: l.n / ranks,
                    ..*l
                })
                .collect(),
        };
        let rows = |l: Layer| MODEL_ROWS.map(|m| Shape { m, k: l.k, n: l.n });
        layers.into_iter().flat_map(rows).collect()
    }
}

/// Every layer of these shapes with each of these numbers of rows.
pub fn swept(shapes: &[Shape], rows: &[usize]) -> Outcome<Vec<Shape>> {
    ensure!(!rows.contains(&0), "there must be rows");
    let mut layers: Vec<Layer> = Vec::new();
    for &Shape { k, n, .. } in shapes {
        if !layers.contains(&Layer { k, n }) {
            layers.push(Layer { k, n });
        }
    }
    let with_rows = |l: Layer| rows.iter().map(move |&m| Shape { m, k: l.k, n: l.n });
    Ok(layers.into_iter().flat_map(with_rows).collect())
}

/// A mode to force; `None` leaves it to the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub Option<OverlapMode>);

impl FromStr for Mode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mode = match s.split_once(':') {
            Some(("chunked", pieces)) => OverlapMode::Chunked {
                pieces: pieces
                    .parse()
                    .map_err(|_| format!("{pieces}: wanted a number"))?,
            },
            _ => match s {
                "auto" => return Ok(Self(None)),
                "off" => OverlapMode::Off,
                "ring" => OverlapMode::Ring,
                "pull" => OverlapMode::Pull,
                "tiles" => OverlapMode::Tiles,
                _ => {
                    return Err(format!(
                        "{s}: wanted auto, off, ring, pull, tiles or chunked:<pieces>"
                    ));
                }
            },
        };
        Ok(Self(Some(mode)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_modes_are_read() {
        assert_eq!("2,3,4".parse(), Ok(Shape { m: 2, k: 3, n: 4 }));
        assert!("2,3".parse::<Shape>().is_err() && "0,3,4".parse::<Shape>().is_err());
        let chunked = OverlapMode::Chunked { pieces: 2 };
        assert_eq!("chunked:2".parse(), Ok(Mode(Some(chunked))));
        assert_eq!("auto".parse(), Ok(Mode(None)));
        assert!("sideways".parse::<Mode>().is_err());
    }

    #[test]
    fn layers_are_read() {
        assert_eq!("3,4".parse(), Ok(Layer { k: 3, n: 4 }));
        for wrong in ["3", "3,4,5", "0,4", ""] {
            assert!(wrong.parse::<Layer>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn layers_of_models_are_cut_as_linears_are() {
        let kn = |shapes: Vec<Shape>| shapes.iter().map(|s| (s.m, s.k, s.n)).collect::<Vec<_>>();
        let gather = kn(Model::Llama3_70b.shapes(false, 4));
        assert_eq!(gather.len(), 6);
        assert_eq!(
            (gather[0], gather[5]),
            ((512, 8192, 2560), (8192, 8192, 14_336))
        );
        let scatter = kn(Model::Llama3_70b.shapes(true, 4));
        assert_eq!(
            (scatter[0], scatter[5]),
            ((512, 2048, 8192), (8192, 7168, 8192))
        );
        assert_eq!(kn(Model::Qwen3_235b.shapes(true, 2))[1], (2048, 4096, 4096));
        assert_eq!(Model::Six.shapes(true, 4), usual(4));
    }

    #[test]
    fn a_sweep_has_every_layer_once() {
        let swept = swept(&usual(4), &[16, 32]).unwrap();
        let got: Vec<_> = swept.iter().map(|s| (s.m, s.n)).collect();
        let wanted = [
            (16, 6144),
            (32, 6144),
            (16, 7168),
            (32, 7168),
            (16, 2560),
            (32, 2560),
        ];
        assert_eq!(got, wanted);
        assert!(super::swept(&usual(4), &[0]).is_err());
    }

    #[test]
    fn the_usual_shapes_are_cut_over_ranks() {
        let four = usual(4);
        assert_eq!((four.len(), four[1].n, four[4].n), (6, 7168, 2560));
        assert_eq!(four[0].n, 6144);
    }
}
