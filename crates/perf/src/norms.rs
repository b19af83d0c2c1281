//! All-reduce with a residual and a norm, in bf16: in one call, and beside it an all-reduce with the norm as a call of its own behind
//! it, and all-reduces of the same bytes with nothing behind them, ours and NCCL's.

use crate::{
    Common,
    collectives::{self, Choice},
    data, meta,
    ranks::{PATIENCE, Rank, Ranks},
    sample::{Times, Variant, measure},
};
use anyhow::{Result, ensure};
use brigade::{
    AllReduceNormParams, AllReduceParams, Allocate, Buffer, Call, Comm, CommConfig, DataType,
    Linear, MemoryType, Normed, ParallelMode, Plan, QScheme, ReduceOp, ResidualNormParams,
};
use clap::{Args, ValueEnum};
use float8::F8E4M3;
use half::bf16;
use serde_json::{Value, json};

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Norms {
    #[command(flatten)]
    pub common: Common,
    /// Rows
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])]
    rows: Vec<usize>,
    /// Columns
    #[arg(long, default_value_t = 8192)]
    hidden: usize,
    /// What becomes of normalized rows; several are measured in turn
    #[arg(long, value_enum, value_name = "FORM", num_args = 1.., default_value = "plain")]
    form: Vec<Form>,
    /// How the sum is done, here and in the all-reduce beside it
    #[arg(short, long, value_enum, value_name = "NAME", default_value = "auto")]
    algorithm: Choice,
    /// Most multiprocessors that communication may use [default: the plan's choice]
    #[arg(long, value_name = "SMS")]
    sm_budget: Option<u16>,
}

/// What becomes of normalized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// They stay bf16
    Plain,
    /// int8, with a scale for each row
    Int8,
    /// fp8 e4m3, by a scale that is known before
    Fp8,
}

impl Form {
    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }

    const fn scheme(self) -> QScheme {
        match self {
            Self::Plain => QScheme::None,
            Self::Int8 => QScheme::Int8PerToken,
            Self::Fp8 => QScheme::Fp8PerTensor,
        }
    }

    /// Where normalized rows go.
    fn normed<'a>(self, values: &'a mut Buffer, scales: &'a mut Buffer) -> Normed<'a> {
        let values = values.view_mut();
        match self {
            Self::Plain => Normed::Plain(values),
            Self::Int8 => Normed::Int8PerToken {
                values,
                scales: scales.view_mut(),
            },
            Self::Fp8 => Normed::Fp8PerTensor {
                values,
                scale: SCALE,
            },
        }
    }

    /// Relative error that rounding to the type leaves, with room.
    const fn tolerance(self) -> f64 {
        match self {
            Self::Plain => 8e-3,
            Self::Int8 => 2e-2,
            Self::Fp8 => 5e-2,
        }
    }
}

/// Added to mean squares.
pub const EPS: f32 = 1e-5;

/// What fp8 values are multiplied by: normalized rows are of magnitudes around one.
const SCALE: f32 = 1.0 / 64.0;

/// The weight of every column.
const WEIGHT: f32 = 0.75;

/// Numbers of a rank's part; those of the residual are a rank more.
fn numbers(of: usize, [rows, hidden]: [usize; 2]) -> Vec<bf16> {
    data::numbers(1000 + of as u64, rows * hidden)
}

/// One shape on one rank.
struct Case<'a> {
    rank: &'a Rank,
    comm: &'a Comm,
    options: &'a Norms,
    form: Form,
    dims: [usize; 2],
    from: Buffer,
    residual: Buffer,
    weight: Buffer,
    /// The sum alone, where a norm of its own is behind it.
    reduced: Buffer,
    sum: Buffer,
    normed: Buffer,
    scales: Buffer,
}

/// What was measured of it.
struct Measured {
    form: Form,
    rows: usize,
    plan: Plan,
    ours: Times,
    then_norm: Times,
    all_reduce: Times,
    nccl: Option<Times>,
}

impl<'a> Case<'a> {
    fn new(
        rank: &'a Rank,
        comm: &'a Comm,
        options: &'a Norms,
        (form, rows): (Form, usize),
    ) -> Result<Self> {
        let dims = [rows, options.hidden];
        let (device, on) = (&rank.device, &rank.on);
        let upload = |of| data::upload(device, on, &numbers(of, dims), dims);
        let new = |dtype, dims: &[usize]| device.allocate(on, MemoryType::Device, dtype, dims);
        let dtype = form.scheme().kernel_type().unwrap_or(DataType::BF16);
        let weight = vec![bf16::from_f32(WEIGHT); options.hidden];
        Ok(Self {
            rank,
            comm,
            options,
            form,
            dims,
            from: upload(rank.number())?,
            residual: upload(rank.size())?,
            weight: data::upload(device, on, &weight, [1, options.hidden])?.index(0)?,
            reduced: data::poisoned(device, on, dims)?,
            sum: data::poisoned(device, on, dims)?,
            normed: new(dtype, &dims)?,
            scales: new(DataType::F32, &dims[..1])?,
        })
    }

    fn plan(&self) -> Result<Plan> {
        Ok(self.comm.explain(&Call::AllReduceNorm {
            rows: self.dims[0],
            hidden: self.dims[1],
            dtype: DataType::BF16,
            scheme: self.form.scheme(),
            eps_bits: EPS.to_bits(),
            scale_bits: (self.form == Form::Fp8).then_some(SCALE.to_bits()),
            choice: self.options.algorithm.algorithm,
        })?)
    }

    fn ours(&self) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let (rank, comm, form) = (self.rank, self.comm, self.form);
        let choice = self.options.algorithm.algorithm;
        let [from, residual, weight] =
            [&self.from, &self.residual, &self.weight].map(Buffer::clone);
        let [mut sum, mut normed, mut scales] =
            [&self.sum, &self.normed, &self.scales].map(Buffer::clone);
        move || {
            let params = AllReduceNormParams {
                from: from.view(),
                residual: residual.view(),
                weight: weight.view(),
                eps: EPS,
                sum: sum.view_mut(),
                normed: form.normed(&mut normed, &mut scales),
                choice,
            };
            comm.lease(&rank.on)?.all_reduce_norm(params).map(drop)
        }
    }

    /// The sum, and the norm as a call of its own.
    fn then_norm(&self) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let (rank, form) = (self.rank, self.form);
        let mut all_reduce = self.all_reduce(&self.reduced);
        let [reduced, residual, weight] =
            [&self.reduced, &self.residual, &self.weight].map(Buffer::clone);
        let [mut sum, mut normed, mut scales] =
            [&self.sum, &self.normed, &self.scales].map(Buffer::clone);
        move || {
            all_reduce()?;
            let params = ResidualNormParams {
                from: reduced.view(),
                residual: residual.view(),
                weight: weight.view(),
                eps: EPS,
                sum: sum.view_mut(),
                normed: form.normed(&mut normed, &mut scales),
            };
            rank.device.residual_norm(&rank.on, &params)
        }
    }

    /// The sum alone.
    fn all_reduce(&self, to: &Buffer) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let (rank, comm) = (self.rank, self.comm);
        let choice = self.options.algorithm.algorithm;
        let (from, mut sum) = (self.from.clone(), to.clone());
        move || {
            let params = AllReduceParams {
                data: sum.view_mut(),
                from: Some(from.view()),
                op: ReduceOp::Sum,
                choice,
            };
            comm.lease(&rank.on)?.all_reduce(params).map(drop)
        }
    }

    /// The new residual and the normalized rows against f64: of one call, and of two.
    fn check(&self) -> Result<()> {
        let calls: [Box<dyn FnMut() -> brigade::Result<()>>; 2] =
            [Box::new(self.ours()), Box::new(self.then_norm())];
        calls
            .into_iter()
            .try_for_each(|mut call| self.check_one(&mut *call))
    }

    fn check_one(&self, call: &mut dyn FnMut() -> brigade::Result<()>) -> Result<()> {
        let Self { rank, dims, .. } = *self;
        for buffer in [&self.sum, &self.normed, &self.scales] {
            rank.device
                .fill(&rank.on, buffer.clone().view_mut(), 0xFF)?;
        }
        call()?;
        rank.on.sync(PATIENCE)?;
        let read = |buffer: &Buffer| -> Result<Vec<u8>> {
            let mut bytes = vec![0; buffer.bytes()];
            rank.device.read(&rank.on, buffer.view(), &mut bytes)?;
            Ok(bytes)
        };
        let parts: Vec<_> = (0..=rank.size()).map(|of| numbers(of, dims)).collect();
        let len = dims[0] * dims[1];
        let exact = |i: usize| parts.iter().map(|p| p[i].to_f64()).sum::<f64>();
        let sums: Vec<f64> = (0..len).map(exact).collect();
        let mut want = Vec::with_capacity(len);
        for row in sums.chunks(dims[1]) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let factor = f64::from(WEIGHT) / (mean + f64::from(EPS)).sqrt();
            want.extend(row.iter().map(|x| x * factor));
        }
        let plain = |bytes: &[u8]| -> Vec<f64> {
            let (numbers, _) = bytes.as_chunks();
            let each = numbers.iter().map(|&b| bf16::from_ne_bytes(b).to_f64());
            each.collect()
        };
        let stored = read(&self.normed)?;
        let normed = match self.form {
            Form::Plain => plain(&stored),
            Form::Int8 => {
                let scales: Vec<f32> = bytemuck::pod_collect_to_vec(&read(&self.scales)?);
                let each = stored.iter().enumerate();
                each.map(|(i, b)| f64::from(b.cast_signed()) * f64::from(scales[i / dims[1]]))
                    .collect()
            }
            Form::Fp8 => {
                let each = stored.iter().map(|&b| F8E4M3::from_bits(b).to_f64());
                each.map(|x| x * f64::from(SCALE)).collect()
            }
        };
        let sum = plain(&read(&self.sum)?);
        rank.agree(
            near("sum", &sum, &sums, Form::Plain.tolerance())
                .and_then(|()| near("rows", &normed, &want, self.form.tolerance())),
        )
    }

    fn run(&self) -> Result<Measured> {
        let (rank, common) = (self.rank, &self.options.common);
        let plan = self.plan()?;
        if common.check {
            self.check()?;
        }
        let how = (common.calls, common.graph);
        let mut variants = vec![
            Variant::new(rank, "ours", how, self.ours())?,
            Variant::new(rank, "all_reduce_then_norm", how, self.then_norm())?,
            Variant::new(rank, "all_reduce", how, self.all_reduce(&self.sum))?,
        ];
        if let Some(nccl) = &rank.nccl {
            let (from, mut sum) = (self.from.clone(), self.sum.clone());
            let call =
                move || nccl.all_reduce(&rank.on, from.view(), sum.view_mut(), ReduceOp::Sum);
            variants.push(Variant::new(rank, "nccl", how, call)?);
        }
        let mut times = measure(rank, &mut variants, common.rounds)?.into_iter();
        rank.on.sync(PATIENCE)?;
        self.comm.check()?;
        let first = [times.next(), times.next(), times.next()];
        let [Some(ours), Some(then_norm), Some(all_reduce)] = first else {
            anyhow::bail!("nothing was measured");
        };
        Ok(Measured {
            form: self.form,
            rows: self.dims[0],
            plan,
            ours,
            then_norm,
            all_reduce,
            nccl: times.next(),
        })
    }
}

/// Whether values are as near as that, in relation to all of them.
fn near(what: &str, got: &[f64], want: &[f64], tolerance: f64) -> Result<()> {
    let norm = |all: &mut dyn Iterator<Item = f64>| all.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut got.iter().zip(want).map(|(g, w)| g - w));
    let size = norm(&mut want.iter().copied());
    ensure!(
        off <= tolerance * size,
        "{what}: relative error {:.1e} over {} elements",
        off / size,
        want.len()
    );
    Ok(())
}

/// Measures all shapes; gives a table.
pub fn run(options: &Norms, ranks: &Ranks) -> Result<String> {
    ensure!(ranks.size() > 1, "there must be two ranks");
    let most = options.rows.iter().max().copied().unwrap_or(0);
    ensure!(
        options.hidden > 0 && options.rows.iter().all(|&rows| rows > 0),
        "there must be rows and columns"
    );
    let mut config = CommConfig::new(ParallelMode::Tp);
    (config.gather_bytes, config.reduce_scatter_bytes) = (0, 0);
    config.all_reduce_bytes = (4 * most * options.hidden).clamp(8 << 20, 128 << 20);
    config.sm_budget = options.sm_budget;
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |rank| {
        let comm = rank.join(&config)?;
        let forms = options.form.iter();
        forms
            .flat_map(|&form| options.rows.iter().map(move |&rows| (form, rows)))
            .map(|kind| Case::new(rank, &comm, options, kind)?.run())
            .collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let rows: Vec<_> = measured.iter().map(|m| m.json(options)).collect();
    options.common.write(&meta, &rows)?;
    let heading = format!(
        "{:>6} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>4}  plan\n",
        "form", "rows", "hidden", "us", "p99 us", "apart us", "sum us", "nccl us", "sms"
    );
    let lines = measured.iter().map(|m| m.line(options.hidden));
    Ok(heading + &lines.collect::<String>())
}

impl Measured {
    fn line(&self, hidden: usize) -> String {
        let nccl = match &self.nccl {
            Some(nccl) => format!("{:.2}", nccl.median),
            None => "-".into(),
        };
        let sms = collectives::sms(&self.plan).map_or_else(|| "-".into(), |n| n.to_string());
        format!(
            "{:>6} {:>6} {hidden:>6} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {nccl:>9} {sms:>4}  {}\n",
            self.form.name(),
            self.rows,
            self.ours.median,
            self.ours.p99,
            self.then_norm.median,
            self.all_reduce.median,
            self.plan
        )
    }

    fn json(&self, options: &Norms) -> Value {
        let hundredths = |x: f64| json!((x * 100.0).round() / 100.0);
        let samples = |t: &Times| -> Value { t.samples.iter().map(|&us| hundredths(us)).collect() };
        let mut row = json!({
            "rows": self.rows, "hidden": options.hidden, "form": self.form.name(), "dtype": "bf16",
            "bytes": self.rows * options.hidden * 2, "graph": options.common.graph,
            "choice": options.algorithm.name, "plan": self.plan.to_string(),
            "sms": collectives::sms(&self.plan), "sm_budget": options.sm_budget,
            "us": hundredths(self.ours.median), "us_p99": hundredths(self.ours.p99),
            "all_reduce_then_norm_us": hundredths(self.then_norm.median),
            "all_reduce_us": hundredths(self.all_reduce.median),
            "samples": {
                "ours": samples(&self.ours), "all_reduce_then_norm": samples(&self.then_norm),
                "all_reduce": samples(&self.all_reduce),
            },
        });
        if let Some(nccl) = &self.nccl {
            row["nccl_us"] = hundredths(nccl.median);
            row["samples"]["nccl"] = samples(nccl);
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::{AllReduceAlgorithm, Launch, SumOrder};
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        norms: Norms,
    }

    #[test]
    fn rows_and_forms_are_lists() {
        let read = |line: &str| Line::try_parse_from(line.split(' ')).map(|line| line.norms);
        let usual = read("all-reduce-norm --graph").unwrap();
        assert_eq!((usual.rows.len(), usual.hidden), (12, 8192));
        assert_eq!(usual.form, [Form::Plain]);
        let line = "all-reduce-norm --rows 3,5 --form plain int8 fp8 -a two-shot-push --serial";
        let told = read(line).unwrap();
        assert_eq!((told.rows, told.common.serial), (vec![3, 5], true));
        assert_eq!(told.form, [Form::Plain, Form::Int8, Form::Fp8]);
        assert!(read("all-reduce-norm --form int4").is_err());
    }

    /// What the plan launches for a row of 8192 columns, and nothing where sums are pulled.
    #[test]
    fn rows_of_a_file_say_how_many_blocks_were_planned() {
        let line = "all-reduce-norm --rows 1 --sm-budget 24";
        let options = Line::try_parse_from(line.split(' ')).unwrap().norms;
        let row = |algorithm, blocks| {
            let times = || Times::new("ours", vec![1.0, 2.0, 4.0]);
            Measured {
                form: Form::Int8,
                rows: 1,
                plan: Plan::AllReduce {
                    algorithm,
                    order: SumOrder::Flat,
                    piece_elements: 8192,
                    launch: Launch {
                        blocks,
                        threads: 128,
                    },
                },
                ours: times(),
                then_norm: times(),
                all_reduce: times(),
                nccl: None,
            }
        };
        let pushed = row(AllReduceAlgorithm::OneShotPush, 8);
        assert_eq!(pushed.json(&options)["sms"], 8);
        assert_eq!(pushed.json(&options)["sm_budget"], 24);
        assert!(pushed.line(8192).contains("    8  OneShotPush"));
        let pulled = row(AllReduceAlgorithm::TwoShot, 0);
        assert!(pulled.json(&options)["sms"].is_null());
    }

    #[test]
    fn what_is_off_is_found() {
        let want = [1.0, -2.0, 3.0];
        near("rows", &want, &want, 0.0).unwrap();
        assert!(near("rows", &[1.0, 3.0, -2.0], &want, 5e-2).is_err());
    }
}
