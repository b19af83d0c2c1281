//! Gather-linear and its twin, beside what they are made of.

use crate::{
    Common, check, data, meta,
    ranks::{self, PATIENCE, Rank},
    rounded,
    sample::{Times, Variant, measure},
    shape::{Mode, Shape, usual},
    trace::{self, Spans},
};
use anyhow::{Context as _, Result};
use brigade::{
    AllGatherLoraLinearParams, Allocate, Buffer, Chunk, Comm, CommConfig, DataType, GemmParams,
    Lease, Linear, Lora, LoraLinearReduceScatterParams, LoraRun, Output, OverlapMode, ParallelMode,
    Plan,
};
use clap::Args;
use half::bf16;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Gather,
    Scatter,
}

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Linears {
    #[command(flatten)]
    pub common: Common,
    /// Shapes m,k,n: rows of all ranks, inner dimension and columns of one rank [default: six of large models]
    #[arg(long, value_name = "M,K,N", num_args = 1..)]
    shapes: Vec<Shape>,
    /// Mode: auto, off, ring, pull, tiles, or chunked:2 for two pieces
    #[arg(long, default_value = "auto")]
    mode: Mode,
    /// Own rows lie in the user buffer already, where whoever made them has put them
    #[arg(long)]
    resident: bool,
    /// Multiprocessors that are kept from products [default: the device's choice]
    #[arg(long, value_name = "SMS")]
    sm_budget: Option<u16>,
    /// Write a trace of one call to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of the
    /// last shape
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Adapters of this rank, two of them over half of the rows each
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    lora: usize,
}

/// One shape on one rank.
struct Case<'a> {
    rank: &'a Rank,
    options: &'a Linears,
    shape: Shape,
    counts: Vec<usize>,
    /// Own rows `[m / ranks, k]` for gather-linear, all rows `[m, k]` for its twin.
    x: Buffer,
    /// `[n, k]`, as layers store it.
    weight: Buffer,
    adapters: Vec<[Buffer; 2]>,
    d: Buffer,
}

/// Seeds of what ranks have, so that every rank can make every rank's.
fn seed(rank: usize, of: u64) -> u64 {
    1000 * of + rank as u64
}

impl<'a> Case<'a> {
    fn new(rank: &'a Rank, options: &'a Linears, which: Which, shape: Shape) -> Result<Self> {
        let Shape { m, k, n } = shape;
        let (me, size) = (rank.number(), rank.size());
        let counts = brigade::plan::rows::split(m, size).to_vec();
        let own = counts[me];
        let (rows, out_rows) = match which {
            Which::Gather => (own, m),
            Which::Scatter => (m, own),
        };
        let upload = |of: u64, dims: [usize; 2]| {
            let values = data::numbers(seed(me, of), dims[0] * dims[1]);
            data::upload(&rank.device, &rank.on, &values, dims)
        };
        let adapters = (0..if options.lora > 0 { 2 } else { 0 })
            .map(|i| {
                Ok([
                    upload(10 + i, [k, options.lora])?,
                    upload(20 + i, [options.lora, n])?,
                ])
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            rank,
            options,
            shape,
            counts,
            x: upload(1, [rows, k])?,
            weight: upload(2, [n, k])?,
            adapters,
            d: data::poisoned(&rank.device, &rank.on, [out_rows, n])?,
        })
    }

    fn config(&self, which: Which) -> CommConfig {
        let Shape { m, k, n } = self.shape;
        let mut config = CommConfig::new(ParallelMode::Tp);
        config.sm_budget = self.options.sm_budget;
        let bytes = DataType::BF16.bytes();
        let padded = m.div_ceil(self.rank.size()) * self.rank.size();
        (config.gather_bytes, config.reduce_scatter_bytes) = match which {
            Which::Gather => (m * k * bytes, 0),
            Which::Scatter => (0, padded * n * bytes),
        };
        config
    }

    fn runs(&self) -> Vec<LoraRun<'_>> {
        let half = self.shape.m / 2;
        self.adapters
            .iter()
            .zip([half, self.shape.m - half])
            .map(|([a, b], rows)| LoraRun {
                rows,
                adapter: Some(Lora {
                    a: a.view(),
                    b: b.view(),
                    scale: 0.5,
                }),
            })
            .collect()
    }

    /// One gather-linear into `d`.
    fn gather(
        &self,
        lease: &mut Lease<'_>,
        weight: &Buffer,
        d: &mut Buffer,
        mode: Option<OverlapMode>,
    ) -> brigade::Result<Plan> {
        let chunk = if self.options.resident {
            let (rows, k) = (&self.counts, self.shape.k);
            // The rows were written there before: what is measured begins behind that.
            Chunk::Resident(lease.own_chunk(rows, k, DataType::BF16)?.filled())
        } else {
            Chunk::Copy((&self.x).into())
        };
        let runs = if weight.shape() == self.weight.shape() {
            self.runs()
        } else {
            Vec::new()
        };
        let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            transpose_weight: true,
            runs: &runs,
            output: Output::Into(d.view_mut()),
            choice: mode,
            ..AllGatherLoraLinearParams::new(chunk, &self.counts, weight)
        })?;
        Ok(result.plan)
    }

    /// One of the twin.
    fn scatter(
        &self,
        lease: &mut Lease<'_>,
        d: &mut Buffer,
        mode: Option<OverlapMode>,
    ) -> brigade::Result<Plan> {
        let runs = self.runs();
        let result = lease.lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
            transpose_weight: true,
            runs: &runs,
            output: Output::Into(d.view_mut()),
            choice: mode,
            ..LoraLinearReduceScatterParams::new(&self.x, &self.counts, &self.weight)
        })?;
        Ok(result.plan)
    }

    /// Own rows into the user buffer, both halves.
    fn fill(&self, comm: &Comm) -> brigade::Result<()> {
        for _ in 0..2 {
            let mut lease = comm.lease(&self.rank.on)?;
            let mut own = lease.own_chunk(&self.counts, self.shape.k, DataType::BF16)?;
            self.rank
                .device
                .copy(&self.rank.on, own.view_mut(), self.x.view())?;
            let filled = own.filled();
            let mut d = self.d.clone();
            lease.all_gather_lora_linear(AllGatherLoraLinearParams {
                transpose_weight: true,
                output: Output::Into(d.view_mut()),
                ..AllGatherLoraLinearParams::new(
                    Chunk::Resident(filled),
                    &self.counts,
                    &self.weight,
                )
            })?;
        }
        Ok(())
    }

    /// Compares some elements of D with sums in f64.
    fn check(&self, which: Which) -> Result<()> {
        let Shape { m, k, n } = self.shape;
        let (me, size) = (self.rank.number(), self.rank.size());
        let mut bytes = vec![0; self.d.bytes()];
        self.rank
            .device
            .read(&self.rank.on, self.d.view(), &mut bytes)?;
        let d: &[bf16] = bytemuck::cast_slice(&bytes);
        let offsets = brigade::plan::rows::offsets(&self.counts);
        let weights = |r| data::numbers(seed(r, 2), n * k);
        let dot = |x: &[bf16], w: &[bf16]| -> f64 {
            x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum()
        };
        let mut pairs = Vec::new();
        let columns: Vec<usize> = check::some(8, n).collect();
        match which {
            Which::Gather => {
                let w = weights(me);
                for (r, &rows) in self.counts.iter().enumerate() {
                    let x = data::numbers(seed(r, 1), rows * k);
                    for i in check::some(4, rows) {
                        for &j in &columns {
                            let want = dot(&x[i * k..][..k], &w[j * k..][..k]);
                            pairs.push((d[(offsets[r] + i) * n + j], want));
                        }
                    }
                }
            }
            Which::Scatter => {
                let picked: Vec<usize> = check::some(8, self.counts[me]).collect();
                let mut want = vec![0.0; picked.len() * columns.len()];
                for r in 0..size {
                    let (x, w) = (data::numbers(seed(r, 1), m * k), weights(r));
                    for (a, &i) in picked.iter().enumerate() {
                        let row = &x[(offsets[me] + i) * k..][..k];
                        for (b, &j) in columns.iter().enumerate() {
                            want[a * columns.len() + b] += dot(row, &w[j * k..][..k]);
                        }
                    }
                }
                for (a, &i) in picked.iter().enumerate() {
                    for (b, &j) in columns.iter().enumerate() {
                        pairs.push((d[i * n + j], want[a * columns.len() + b]));
                    }
                }
            }
        }
        check::close(&format!("rank {me}, {:?}", self.shape), &pairs)
    }

    /// Spans of one call, behind some that are not recorded.
    fn spans(&self, mut call: impl FnMut() -> brigade::Result<()>) -> Result<Spans> {
        let rank = self.rank;
        call()?;
        rank.on.sync(PATIENCE)?;
        rank.meet()?;
        // One call before the recorded one, so that the ranks' GPUs begin together.
        call()?;
        rank.device.record_spans()?;
        call()?;
        Ok(Spans {
            rank: rank.number(),
            list: rank.device.spans(PATIENCE)?,
        })
    }

    /// Times, and what was planned.
    fn run(&self, which: Which) -> Result<Measured> {
        let (rank, options) = (self.rank, self.options);
        let Shape { m, k, n } = self.shape;
        let comm = rank.join(&self.config(which))?;
        if options.resident && which == Which::Gather {
            self.fill(&comm)?;
        }
        let how = (options.common.calls, options.common.graph);
        let forced = options.mode.0;
        let mut d = self.d.clone();
        let plan = {
            let mut lease = comm.lease(&rank.on)?;
            match which {
                Which::Gather => self.gather(&mut lease, &self.weight, &mut d, forced)?,
                Which::Scatter => self.scatter(&mut lease, &mut d, forced)?,
            }
        };
        rank.on.sync(PATIENCE)?;
        if options.common.check && options.lora == 0 && !options.resident {
            self.check(which)?;
        }
        rank.meet()?;
        let call = |mode: Option<OverlapMode>| {
            let (comm, mut d) = (comm.clone(), self.d.clone());
            move || {
                let mut lease = comm.lease(&rank.on)?;
                match which {
                    Which::Gather => self.gather(&mut lease, &self.weight, &mut d, mode),
                    Which::Scatter => self.scatter(&mut lease, &mut d, mode),
                }
                .map(drop)
            }
        };
        let mut variants = vec![
            Variant::new(rank, "ours", how, call(forced))?,
            Variant::new(rank, "off", how, call(Some(OverlapMode::Off)))?,
        ];
        // What the operation cannot be faster than: the product alone, and the collective alone.
        let full = match which {
            Which::Gather => data::poisoned(&rank.device, &rank.on, [m, k])?,
            Which::Scatter => self.x.clone(),
        };
        let whole = data::poisoned(&rank.device, &rank.on, [m, n])?;
        if which == Which::Gather {
            let values = data::numbers(seed(rank.number(), 3), m * k);
            let mut full = full.clone();
            rank.device
                .write(&rank.on, full.view_mut(), bytemuck::cast_slice(&values))?;
        }
        let product = {
            let (full, mut whole) = (full.clone(), whole.clone());
            move || {
                let gemm = GemmParams {
                    transpose_b: true,
                    ..GemmParams::new(&full, &self.weight)
                };
                rank.device
                    .gemm(&rank.on, &gemm, Output::Into(whole.view_mut()))
                    .map(drop)
            }
        };
        variants.push(Variant::new(rank, "gemm", how, product.clone())?);
        let narrow = rank.device.allocate(
            &rank.on,
            brigade::MemoryType::Device,
            DataType::BF16,
            &[16, k],
        )?;
        if which == Which::Gather {
            let mut out = data::poisoned(&rank.device, &rank.on, [m, 16])?;
            let comm = comm.clone();
            let gather = move || {
                let mut lease = comm.lease(&rank.on)?;
                let mode = Some(OverlapMode::Pull).filter(|_| rank.size() > 1);
                self.gather(&mut lease, &narrow, &mut out, mode).map(drop)
            };
            variants.push(Variant::new(rank, "gather", how, gather)?);
        }
        if let Some(nccl) = &rank.nccl {
            let alone = {
                let (mut full, whole, mut d) = (full.clone(), whole.clone(), self.d.clone());
                move || match which {
                    Which::Gather => nccl.all_gather(&rank.on, self.x.view(), full.view_mut()),
                    Which::Scatter => nccl.reduce_scatter(&rank.on, whole.view(), d.view_mut()),
                }
            };
            variants.push(Variant::new(rank, "nccl", how, alone.clone())?);
            let (mut collective, mut product) = (alone, product);
            let both = move || match which {
                Which::Gather => collective().and_then(|()| product()),
                Which::Scatter => product().and_then(|()| collective()),
            };
            variants.push(Variant::new(rank, "nccl_and_gemm", how, both)?);
        }
        let times = measure(rank, &mut variants, options.common.rounds)?;
        let spans = self.spans(call(forced))?;
        comm.check()?;
        Ok(Measured {
            times,
            plan: plan.to_string(),
            spans,
        })
    }
}

/// What one rank has of a shape.
struct Measured {
    times: Vec<Times>,
    plan: String,
    spans: Spans,
}

/// Writes the trace and the picture.
fn draw(path: &Path, shape: Shape, plan: &str, spans: &[Spans]) -> Result<()> {
    let Shape { m, k, n } = shape;
    let write = |path: &Path, text: String| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    write(path, trace::chrome(spans).to_string())?;
    let title = format!("{m} x {k} x {n}, {} ranks, {plan}", spans.len());
    let mut picture = path.as_os_str().to_owned();
    picture.push(".svg");
    write(Path::new(&picture), trace::svg(&title, spans))
}

/// Measures all shapes; gives a table.
pub fn run(options: &Linears, which: Which) -> Result<String> {
    let ranks = ranks::count(options.common.ranks)?;
    let shapes = if options.shapes.is_empty() {
        usual(ranks)
    } else {
        options.shapes.clone()
    };
    let meta = meta::meta(ranks)?;
    let mut text = format!(
        "{:>6} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}  plan\n",
        "m",
        "k",
        "n",
        "ours us",
        "off us",
        "gemm us",
        "gather us",
        "nccl us",
        "nccl+gemm",
        "/floor",
        "/off",
        "/nccl"
    );
    let measured = ranks::run(ranks, options.common.with_nccl(), |rank| {
        shapes
            .iter()
            .map(|&shape| Case::new(rank, options, which, shape)?.run(which))
            .collect::<Result<Vec<_>>>()
    })?;
    let mut rows = Vec::new();
    let first = &measured[0];
    if let (Some(path), Some(shape), Some(last)) = (&options.trace, shapes.last(), first.last()) {
        let spans: Vec<Spans> = measured
            .iter()
            .filter_map(|rank| rank.last())
            .map(|m| Spans {
                rank: m.spans.rank,
                list: m.spans.list.clone(),
            })
            .collect();
        draw(path, *shape, &last.plan, &spans)?;
    }
    for (shape, Measured { times, plan, .. }) in shapes.iter().zip(first) {
        let of = |name: &str| times.iter().find(|t| t.name == name).map(|t| t.median);
        let (ours, gemm) = (
            of("ours").unwrap_or(f64::NAN),
            of("gemm").unwrap_or(f64::NAN),
        );
        let collective = [of("gather"), of("nccl")]
            .into_iter()
            .flatten()
            .fold(f64::INFINITY, f64::min);
        let floor = if collective.is_finite() {
            gemm.max(collective)
        } else {
            gemm
        };
        let ratio = |to: Option<f64>| to.map_or(f64::NAN, |t| ours / t);
        text += &format!(
            "{:>6} {:>6} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>7.3} {:>7.3} {:>7.3}  {plan}\n",
            shape.m,
            shape.k,
            shape.n,
            ours,
            of("off").unwrap_or(f64::NAN),
            gemm,
            of("gather").unwrap_or(f64::NAN),
            of("nccl").unwrap_or(f64::NAN),
            of("nccl_and_gemm").unwrap_or(f64::NAN),
            ours / floor,
            ratio(of("off")),
            ratio(of("nccl_and_gemm")),
        );
        rows.push(row(*shape, options, times, plan, ours / floor));
    }
    options.common.write(&meta, &rows)?;
    Ok(text)
}

fn row(shape: Shape, options: &Linears, times: &[Times], plan: &str, of_floor: f64) -> Value {
    let Shape { m, k, n } = shape;
    let mut row = json!({
        "m": m, "k": k, "n": n, "dtype": "bf16", "scheme": "none", "lora": options.lora,
        "graph": options.common.graph, "resident": options.resident, "plan": plan,
        "of_floor": (of_floor * 1000.0).round() / 1000.0,
    });
    for t in times {
        let name = match t.name {
            "ours" => "us".to_owned(),
            "nccl_and_gemm" => "nccl_then_gemm_us".to_owned(),
            other => format!("{other}_us"),
        };
        row[&name] = rounded(t.median);
        if t.name == "ours" {
            row["us_p99"] = rounded(t.p99);
        }
        row["samples"][t.name] = t.samples.iter().map(|&s| rounded(s)).collect();
    }
    row
}
