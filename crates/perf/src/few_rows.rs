//! Products of few bf16 rows, which each rank makes by itself: by weights that may be read ahead, by others, and by the library; and with adapters.

use crate::{
    Common, data, meta,
    ranks::{PATIENCE, Rank, Ranks},
    sample::{Times, Variant, measure},
    shape::Layer,
    sizes,
};
use anyhow::{Result, bail, ensure};
use brigade::{
    Allocate, Buffer, DataType, GemmParams, Linear, Lora, LoraLinearParams, LoraRun, MemoryType,
    Output,
};
use clap::Args;
use half::bf16;
use serde_json::{Value, json};
use std::ops::Range;

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
    /// With adapters of this rank over all rows, too
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    lora: usize,
    /// How many adapters there are, each over as many rows
    #[arg(long, value_name = "N", default_value_t = 2, requires = "lora", value_parser = sizes::at_least_one)]
    adapters: usize,
}

impl FewRows {
    fn ways(&self) -> &'static [(&'static str, Way)] {
        match self.lora {
            0 => &WAYS[..BARE],
            _ => &WAYS,
        }
    }

    /// Rows of each adapter, of so many.
    fn parts(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.adapters;
        (0..count).map(move |i| rows * i / count..rows * (i + 1) / count)
    }
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

/// What adapters are multiplied by.
const SCALE: f32 = 0.5;

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
    /// Both factors, and where rows times the first ones go.
    adapters: Vec<[Buffer; 2]>,
    low: Buffer,
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
    /// Its weight may be read ahead, and it has adapters.
    Adapters,
    /// The library's, and two more of it for each adapter.
    AdaptersLibrary,
}

/// All of them, by the names that files of results have.
const WAYS: [(&str, Way); 5] = [
    ("settled", Way::Settled),
    ("plain", Way::Plain),
    ("library", Way::Library),
    ("adapters", Way::Adapters),
    ("adapters_library", Way::AdaptersLibrary),
];

/// How many of them have no adapters.
const BARE: usize = 3;

/// A matrix as a batch of one, which the library multiplies.
fn batch(v: &Buffer) -> brigade::Result<Buffer> {
    let dims = v.shape();
    v.reshape(&[1, dims.rows(), dims.columns()])
}

impl<'a> Case<'a> {
    fn new(
        rank: &'a Rank,
        options: &'a FewRows,
        weights: &'a [Buffer],
        rows: usize,
    ) -> Result<Self> {
        let (device, on) = (&rank.device, &rank.on);
        let (n, k) = (weights[0].shape().rows(), weights[0].shape().columns());
        let upload = |seed, dims: [usize; 2]| {
            data::upload(device, on, &data::numbers(seed, dims[0] * dims[1]), dims)
        };
        let lora = options.lora;
        let count = options.adapters.min(options.adapters * lora);
        let adapters = (0..count as u64)
            .map(|i| {
                Ok([
                    upload(10 + 2 * i, [k, lora])?,
                    upload(11 + 2 * i, [lora, n])?,
                ])
            })
            .collect::<Result<_>>()?;
        let case = Self {
            rank,
            x: upload(8, [rows, k])?,
            d: data::poisoned(device, on, [rows, n])?,
            weights,
            adapters,
            low: data::poisoned(device, on, [rows, lora.max(1)])?,
            options,
        };
        on.sync(PATIENCE)?;
        Ok(case)
    }

    fn call(&self, way: Way) -> impl FnMut() -> brigade::Result<()> + use<'_, 'a> {
        let mut next = 0;
        move || {
            let b = &self.weights[next % self.weights.len()];
            next += 1;
            match way {
                Way::Settled => self.product(b, true, &[]),
                Way::Plain => self.product(b, false, &[]),
                Way::Adapters => self.product(b, true, &self.runs()),
                Way::Library => self.by_library(b),
                Way::AdaptersLibrary => {
                    self.by_library(b)?;
                    self.add_by_library()
                }
            }
        }
    }

    fn params<'p>(&self, x: &'p Buffer, b: &'p Buffer) -> GemmParams<'p> {
        GemmParams {
            sm_cap: self.options.sm_cap,
            ..GemmParams::new(x, b)
        }
    }

    fn multiply(
        &self,
        gemm: GemmParams<'_>,
        runs: &[LoraRun<'_>],
        d: &Buffer,
    ) -> brigade::Result<()> {
        let params = LoraLinearParams { gemm, runs };
        let mut d = d.clone();
        self.rank
            .device
            .lora_linear(&self.rank.on, &params, Output::Into(d.view_mut()))
            .map(drop)
    }

    fn product(&self, b: &Buffer, settled_b: bool, runs: &[LoraRun<'_>]) -> brigade::Result<()> {
        let gemm = GemmParams {
            transpose_b: true,
            settled_b,
            ..self.params(&self.x, b)
        };
        self.multiply(gemm, runs, &self.d)
    }

    fn runs(&self) -> Vec<LoraRun<'_>> {
        let parts = self.options.parts(self.x.shape().rows());
        let mut runs = Vec::new();
        for ([a, b], rows) in self.adapters.iter().zip(parts) {
            let (a, b) = (a.view(), b.view());
            runs.push(LoraRun {
                rows: rows.len(),
                adapter: Some(Lora { a, b, scale: SCALE }),
            });
        }
        runs
    }

    fn by_library(&self, b: &Buffer) -> brigade::Result<()> {
        let (x, b) = (batch(&self.x)?, batch(b)?);
        let gemm = GemmParams {
            transpose_b: true,
            ..self.params(&x, &b)
        };
        self.multiply(gemm, &[], &batch(&self.d)?)
    }

    /// What adapters add, onto the product.
    fn add_by_library(&self) -> brigade::Result<()> {
        let parts = self.options.parts(self.x.shape().rows());
        for ([a, b], rows) in self.adapters.iter().zip(parts) {
            if rows.is_empty() {
                continue;
            }
            let part = |v: &Buffer| batch(&v.slice(rows.start, rows.len())?);
            let [x, low, d] = [part(&self.x)?, part(&self.low)?, part(&self.d)?];
            let (a, b) = (batch(a)?, batch(b)?);
            self.multiply(self.params(&x, &a), &[], &low)?;
            let gemm = GemmParams {
                alpha: SCALE,
                c: Some(d.view()),
                ..self.params(&low, &b)
            };
            self.multiply(gemm, &[], &d)?;
        }
        Ok(())
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
        let mut pairs = vec![(Way::Settled, Way::Library), (Way::Plain, Way::Library)];
        if self.options.lora > 0 {
            pairs.push((Way::Adapters, Way::AdaptersLibrary));
        }
        for (way, library) in pairs {
            let (mine, library) = (result(way)?, result(library)?);
            let most = library.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
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
        let ways = self.options.ways().iter();
        let variants = ways.map(|&(name, way)| Variant::new(self.rank, name, how, self.call(way)));
        let mut variants = variants.collect::<Result<Vec<_>>>()?;
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
    if options.lora > 0 {
        table.pop();
        table += &format!(" {:>11} {:>11}\n", "adapters us", "library us");
    }
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
        let mut line = format!(
            "{k:>6} {n:>6} {:>5} {settled:>10.2} {plain:>10.2} {library:>10.2} {ratio:>7.3} {rate:>7.0}",
            self.rows
        );
        for with in &self.times[BARE..] {
            line += &format!(" {:>11.2}", with.median);
        }
        line + "\n"
    }

    fn json(&self, options: &FewRows) -> Value {
        let hundredths = |us: f64| (us * 100.0).round() / 100.0;
        let mut row = json!({
            "k": self.layer.k, "n": self.layer.n, "rows": self.rows, "dtype": "bf16",
            "graph": options.common.graph, "sm_cap": options.sm_cap, "lora": options.lora,
            "adapters": if options.lora > 0 { options.adapters } else { 0 }, "samples": {},
        });
        for ((name, _), times) in WAYS.iter().zip(&self.times) {
            row[format!("{name}_us")] = json!(hundredths(times.median));
            let samples: Vec<_> = times.samples.iter().map(|&us| hundredths(us)).collect();
            row["samples"][name] = json!(samples);
        }
        row
    }
}
