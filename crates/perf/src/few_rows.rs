//! Products of few bf16 rows, which each rank makes by itself: by weights that may be read ahead, by others, and by the library.

use crate::{
    Common, data, meta,
    ranks::{PATIENCE, Rank, Ranks},
    sample::{Times, Variant, measure},
    shape::Layer,
    sizes,
};
use anyhow::{Result, bail, ensure};
use brigade::{Allocate, Buffer, DataType, GemmParams, Linear, MemoryType, Output};
use clap::Args;
use half::bf16;
use serde_json::{Value, json};

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct FewRows {
    #[command(flatten)]
    pub common: Common,
    /// Rows
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 8, 16], value_parser = sizes::at_least_one)]
    rows: Vec<usize>,
    /// K and N of a rank's weight; several are measured in turn [default: layers of Llama-3-70B over 2 ranks and over 4]
    #[arg(long, num_args = 1.., value_name = "K,N")]
    layer: Vec<Layer>,
    /// Most multiprocessors of a product [default: all]
    #[arg(long, value_name = "SMS")]
    sm_cap: Option<u16>,
}

/// Bytes of weights that are multiplied in turn: more than a GPU's cache holds.
const BYTES: usize = 1 << 30;

/// Bytes that no cache keeps from one replay to the next.
const CACHED: usize = 60_000_000;

/// Layers of Llama-3-70B over two ranks, and over four.
const LAYERS: [[usize; 2]; 8] = [
    [8192, 5120],
    [4096, 8192],
    [8192, 28_672],
    [14_336, 8192],
    [8192, 2560],
    [2048, 8192],
    [8192, 14_336],
    [7168, 8192],
];

/// As many weights of a layer as make [`BYTES`].
fn weights(rank: &Rank, Layer { k, n }: Layer) -> Result<Vec<Buffer>> {
    let (device, on) = (&rank.device, &rank.on);
    let first = data::upload(device, on, &data::numbers(7, k * n), [n, k])?;
    let count = (BYTES / first.bytes()).clamp(2, 4096);
    let mut all = vec![first];
    while all.len() < count {
        let mut next = device.allocate(on, MemoryType::Device, DataType::BF16, &[n, k])?;
        device.copy(on, next.view_mut(), all[0].view())?;
        all.push(next);
    }
    // They are there, as products say.
    on.sync(PATIENCE)?;
    Ok(all)
}

/// So many rows by a layer's weights, one after the other.
struct Case<'a> {
    rank: &'a Rank,
    x: Buffer,
    d: Buffer,
    weights: &'a [Buffer],
    options: &'a FewRows,
}

/// How a product is called.
#[derive(Clone, Copy)]
enum Way {
    /// Its weight may be read ahead.
    Settled,
    /// Its weight may come from the kernel in front.
    Plain,
    /// As a batch of one, which the library makes.
    Library,
}

/// All of them, by the names that files of results have.
const WAYS: [(&str, Way); 3] = [
    ("settled", Way::Settled),
    ("plain", Way::Plain),
    ("library", Way::Library),
];

impl<'a> Case<'a> {
    fn new(
        rank: &'a Rank,
        options: &'a FewRows,
        weights: &'a [Buffer],
        rows: usize,
    ) -> Result<Self> {
        let (device, on) = (&rank.device, &rank.on);
        let (n, k) = (weights[0].shape().rows(), weights[0].shape().columns());
        Ok(Self {
            rank,
            x: data::upload(device, on, &data::numbers(8, rows * k), [rows, k])?,
            d: data::poisoned(device, on, [rows, n])?,
            weights,
            options,
        })
    }

    fn call(&self, way: Way) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let (rank, sm_cap) = (self.rank, self.options.sm_cap);
        let (x, d, weights) = (self.x.clone(), self.d.clone(), self.weights);
        let mut next = 0;
        move || {
            let b = &weights[next % weights.len()];
            next += 1;
            let batch = |v: &Buffer| {
                let dims = v.shape();
                v.reshape(&[1, dims.rows(), dims.columns()])
            };
            let [x, b, mut d] = match way {
                Way::Library => [batch(&x)?, batch(b)?, batch(&d)?],
                _ => [x.clone(), b.clone(), d.slice(0, d.shape().rows())?],
            };
            let params = GemmParams {
                transpose_b: true,
                settled_b: matches!(way, Way::Settled),
                sm_cap,
                ..GemmParams::new(&x, &b)
            };
            rank.device
                .gemm(&rank.on, &params, Output::Into(d.view_mut()))
                .map(drop)
        }
    }

    /// Each way's result against the library's, within what an order of additions can change.
    fn check(&self) -> Result<()> {
        let result = |way| -> Result<Vec<f64>> {
            let device = &self.rank.device;
            device.fill(&self.rank.on, self.d.clone().view_mut(), 0xFF)?;
            self.call(way)()?;
            let mut bytes = vec![0; self.d.bytes()];
            device.read(&self.rank.on, self.d.view(), &mut bytes)?;
            let (numbers, _) = bytes.as_chunks();
            Ok(numbers
                .iter()
                .map(|&b| bf16::from_ne_bytes(b).to_f64())
                .collect())
        };
        let library = result(Way::Library)?;
        let most = library.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        for way in [Way::Settled, Way::Plain] {
            let mine = result(way)?;
            let far = mine
                .iter()
                .zip(&library)
                .position(|(a, b)| a.is_nan() || (a - b).abs() > 8e-3 * most);
            if let Some(i) = far {
                bail!(
                    "element {i}: {}, and by the library {}",
                    mine[i],
                    library[i]
                );
            }
        }
        Ok(())
    }

    fn run(&self) -> Result<Vec<Times>> {
        let common = &self.options.common;
        if common.check {
            self.rank.agree(self.check())?;
        }
        let how = (common.calls, common.graph);
        let variants = WAYS.map(|(name, way)| Variant::new(self.rank, name, how, self.call(way)));
        let mut variants = variants.into_iter().collect::<Result<Vec<_>>>()?;
        let times = measure(self.rank, &mut variants, common.rounds)?;
        self.rank.on.sync(PATIENCE)?;
        Ok(times)
    }
}

/// Measures all rows; gives a table.
pub fn run(options: &FewRows, ranks: &Ranks) -> Result<String> {
    let layers: Vec<Layer> = match options.layer.as_slice() {
        [] => LAYERS.iter().map(|&[k, n]| Layer { k, n }).collect(),
        given => given.to_vec(),
    };
    let largest = layers.iter().map(|l| l.k.saturating_mul(l.n)).max();
    ensure!(
        largest.is_some_and(|most| most <= BYTES),
        "--layer: at most {BYTES} elements of a weight"
    );
    let calls = options.common.calls;
    let least = layers.iter().map(|l| 2 * l.k * l.n * calls).min();
    ensure!(
        !options.common.graph || least.is_some_and(|bytes| bytes >= CACHED),
        "--calls: a graph of {calls} reads so few bytes of a small layer that they stay in a cache"
    );
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |rank| {
        let mut measured = Vec::new();
        for &layer in &layers {
            let weights = weights(rank, layer)?;
            for &rows in &options.rows {
                let times = Case::new(rank, options, &weights, rows)?.run()?;
                measured.push(Measured { layer, rows, times });
            }
        }
        Ok(measured)
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let mut table = format!(
        "{:>6} {:>6} {:>5} {:>10} {:>10} {:>10} {:>7} {:>7}\n",
        "k", "n", "rows", "settled us", "plain us", "library us", "ratio", "GB/s"
    );
    table += &measured.iter().map(Measured::line).collect::<String>();
    let rows: Vec<_> = measured.iter().map(|m| m.json(options)).collect();
    options.common.write(&meta, &rows)?;
    Ok(table)
}

/// What was measured of some rows by a layer.
struct Measured {
    layer: Layer,
    rows: usize,
    /// As [`WAYS`].
    times: Vec<Times>,
}

impl Measured {
    fn line(&self) -> String {
        let Layer { k, n } = self.layer;
        let [settled, plain, library] = [0, 1, 2].map(|i| self.times[i].median);
        let rate = (2 * k * n) as f64 / settled / 1e3;
        let ratio = self.times[2].over(&self.times[0]);
        format!(
            "{k:>6} {n:>6} {:>5} {settled:>10.2} {plain:>10.2} {library:>10.2} {ratio:>7.3} {rate:>7.0}\n",
            self.rows
        )
    }

    fn json(&self, options: &FewRows) -> Value {
        let hundredths = |us: f64| (us * 100.0).round() / 100.0;
        let mut row = json!({
            "k": self.layer.k, "n": self.layer.n, "rows": self.rows, "dtype": "bf16",
            "graph": options.common.graph, "sm_cap": options.sm_cap, "samples": {},
        });
        for ((name, _), times) in WAYS.iter().zip(&self.times) {
            row[format!("{name}_us")] = json!(hundredths(times.median));
            let samples: Vec<_> = times.samples.iter().map(|&us| hundredths(us)).collect();
            row["samples"][name] = json!(samples);
        }
        row
    }
}
