//! Products on one rank and one thread, against the least that they can take.

use super::{Rounds, ratio, rounded};
use anyhow::Result;
use brigade::DataType;
use brigade_benches::{Pairs, Product, Shape, time_us};
use serde_json::{Value, json};

const SHAPES: [(usize, usize, usize); 7] = [
    (1, 576, 1536),
    (4, 576, 1536),
    (34, 576, 1536),
    (128, 576, 1536),
    (512, 576, 1536),
    (128, 1024, 1024),
    (512, 1024, 1024),
];

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let mut rows = Vec::new();
    for (m, k, n) in SHAPES {
        for dtype in [DataType::F32, DataType::F16, DataType::BF16] {
            let mut product = Product::new(Shape { m, k, n }, dtype)?;
            let once = time_us(3, || product.run())?;
            let calls = rounds.calls(once);
            let pairs = Pairs::take(rounds.pairs, |which| match which {
                0 => time_us(calls, || product.run()),
                _ => time_us(calls, || product.floor()),
            })?;
            let [_, median, _] = pairs.ratio();
            rows.push(json!({
                "m": m,
                "k": k,
                "n": n,
                "dtype": dtype.to_string(),
                "us": rounded(pairs.median_us(0)),
                "floor_us": rounded(pairs.median_us(1)),
                "ratio": ratio(median),
            }));
        }
    }
    Ok(rows)
}
