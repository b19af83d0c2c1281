//! Shapes and modes, as the command line names them.

use brigade::OverlapMode;
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
            Ok(&[m, k, n]) if m * k * n > 0 => Ok(Self { m, k, n }),
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
    fn the_usual_shapes_are_cut_over_ranks() {
        let four = usual(4);
        assert_eq!((four.len(), four[1].n, four[4].n), (6, 7168, 2560));
        assert_eq!(four[0].n, 6144);
    }
}
