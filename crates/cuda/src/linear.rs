//! Linear layers: base product, adapters, C, activation, one rounding.
//!
//! Adapters go inside the product where tiles take them and are quicker (`tiles/alone.rs`). Else, where nothing comes between the product and its rounding
//! but C, the library writes the result itself. Otherwise it leaves sums in f32 (or exact integers), adapters are added to them, and one kernel does the rest.

use crate::{
    CudaDevice,
    batch_invariant::is_exact,
    factors::Factors,
    few_rows::{FewRows, RowAdapters},
    finish::{End, Sums, same_elements},
    lane::Lane,
    lora::{Given, Run},
    lt::Product,
    matrix::Matrix,
    memory::{check_reach, overlap},
};
use brigade_device::{
    Activation, Buffer, DataType, GemmParams, GemmShape, GroupedGemmParams, Linear,
    LoraLinearParams, LoraRun, Operand, Output, QBuffer, QScheme, QView, Reason,
    ResidualNormParams, Result, SiluMulParams, Stream, TopK, TopKParams, View,
};
use std::sync::Arc;

impl Linear for CudaDevice {
    fn gemm(&self, on: &Stream, p: &GemmParams<'_>, output: Output<'_>) -> Result<Option<Buffer>> {
        let linear = LoraLinearParams {
            gemm: *p,
            runs: &[],
        };
        self.lora_linear(on, &linear, output)
    }

    fn quantize(&self, on: &Stream, a: View<'_>, scheme: QScheme) -> Result<QBuffer> {
        self.run_quantize(on, a, scheme)
    }

    fn bias_activation(
        &self,
        on: &Stream,
        from: View<'_>,
        bias: Option<View<'_>>,
        activation: Activation,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        self.run_bias_activation(on, from, bias, activation, output)
    }

    fn lora_linear(
        &self,
        on: &Stream,
        p: &LoraLinearParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let shape = p.check()?;
        let lane = self.lane(on)?;
        let inputs = self.inputs(p, &shape)?;
        let c = p.gemm.c.map(|c| c.retain());
        if let Some(c) = &c {
            check_reach(&self.card, "c.memory", c)?;
        }
        let (d, new) = self.place(lane, output, shape.d.dims())?;
        if !d.shape().is_empty() {
            // C is read element by element, right before the same element of D is written.
            let apart = inputs.iter().all(|input| !overlap(input, &d))
                && c.as_ref()
                    .is_none_or(|c| !overlap(c, &d) || same_elements(c, &d));
            let job = Job {
                device: self,
                lane,
                p,
                shape,
            };
            self.beside(lane, &d, apart, |d| job.run(d))?;
        }
        Ok(new.then_some(d))
    }

    fn lora_linear_silu_mul(
        &self,
        on: &Stream,
        p: &LoraLinearParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        self.run_linear_silu_mul(on, p, output)
    }

    fn grouped_gemm(
        &self,
        on: &Stream,
        p: &GroupedGemmParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        self.run_grouped_gemm(on, p, output)
    }

    fn silu_mul(
        &self,
        on: &Stream,
        p: &SiluMulParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        self.run_silu_mul(on, p, output)
    }

    fn residual_norm(&self, on: &Stream, p: &ResidualNormParams<'_>) -> Result<()> {
        self.run_residual_norm(on, p)
    }

    fn top_k(&self, on: &Stream, p: &TopKParams<'_>) -> Result<TopK> {
        self.run_top_k(on, p)
    }
}

impl CudaDevice {
    /// All that a linear reads but C, checked to be within reach and of a kind that is multiplied.
    pub(crate) fn inputs(
        &self,
        p: &LoraLinearParams<'_>,
        shape: &GemmShape,
    ) -> Result<Vec<Buffer>> {
        let gemm = &p.gemm;
        if shape.d.dims().len() == 3 {
            gemm.a.plain("a")?;
            gemm.b.plain("b")?;
        }
        let mut inputs = Vec::new();
        for (field, operand) in [("a.memory", &gemm.a), ("b.memory", &gemm.b)] {
            inputs.push((field, operand.kernel().retain()));
            let Operand::Quantized(q) = operand else {
                continue;
            };
            no_zero_points(q)?;
            inputs.push((field, q.scales().retain()));
        }
        for lora in p.runs.iter().filter_map(|r| r.adapter) {
            inputs.extend([lora.a, lora.b].map(|v| ("runs.adapter", v.retain())));
        }
        for (field, buffer) in &inputs {
            check_reach(&self.card, field, buffer)?;
        }
        Ok(inputs.into_iter().map(|(_, buffer)| buffer).collect())
    }
}

/// A linear whose parameters have been checked.
struct Job<'a> {
    device: &'a CudaDevice,
    lane: &'a Arc<Lane>,
    p: &'a LoraLinearParams<'a>,
    shape: GemmShape,
}

impl Job<'_> {
    /// Writes `d`, which overlaps nothing that is read, except that it may be C.
    fn run(&self, d: &Buffer) -> Result<()> {
        let Self {
            device,
            lane,
            p,
            shape,
        } = self;
        let gemm = &p.gemm;
        let bias = gemm.c.filter(|_| gemm.beta != 0.0).map(|c| c.retain());
        let end = End {
            bias: bias.as_ref(),
            beta: gemm.beta,
            activation: gemm.activation,
        };
        let Some(mut sums) = self.sums(end, d)? else {
            return Ok(());
        };
        if self.has_adapters() {
            sums = self.add_adapters(sums)?;
        }
        device.finish(lane, &sums, end, d, shape.n)
    }

    /// The base product; `None` where it went into `d`, and nothing is left to do.
    fn sums(&self, end: End<'_>, d: &Buffer) -> Result<Option<Sums>> {
        let Self {
            device,
            lane,
            p,
            shape,
        } = self;
        let (gemm, bias) = (&p.gemm, end.bias);
        let plain_end = gemm.activation == Activation::None && !self.has_adapters();
        if shape.k == 0 || gemm.alpha == 0.0 {
            let rows = shape.batch * shape.m;
            let values = device.scratch(lane, DataType::F32, &[rows, shape.n])?;
            device.fill_bytes(lane, &values, 0)?;
            let stride = shape.n;
            return Ok(Some(Sums::Float { values, stride }));
        }
        if gemm.batch_invariant && !is_exact(gemm, p.runs) {
            device.run_batch_invariant(lane, p, shape, d)?;
            return Ok(None);
        }
        if self.has_adapters() && device.adapters_by_tiles(lane, p, shape, d)? {
            return Ok(None);
        }
        let adapters = self
            .has_adapters()
            .then(|| RowAdapters::of(self.runs(), gemm.a.dtype()));
        match device.factors(lane, gemm, shape)? {
            Factors::Int8(x, w) => device.integer_sums(lane, (&x, &w), gemm, shape).map(Some),
            Factors::Float(a, b, scales) => {
                let scales = scales.as_ref().map(|s| s.each_ref());
                let taken = !matches!(adapters, Some(None));
                let adapters = adapters.as_ref().and_then(Option::as_ref);
                if scales.is_none() && taken && self.few_rows([&a, &b], adapters, end, d)? {
                    return Ok(None);
                }
                if plain_end && self.direct((&a, &b, scales), bias, d)? {
                    return Ok(None);
                }
                if bias.is_none() && scales.is_none() && self.on_adapters(&a, &b, d)? {
                    return Ok(None);
                }
                if let Some(sums) = self.float_sums(&a, &b, scales)? {
                    return Ok(Some(sums));
                }
                let [a, b] = device.in_f32(lane, gemm)?;
                self.float_sums(&a, &b, None)?
                    .map(Some)
                    .ok_or_else(|| no_algorithm(shape).into())
            }
        }
    }

    /// The whole linear, with these of its adapters, by the kernel for few rows, if it takes it; `false`, and nothing is done, otherwise. A batch, also of
    /// one, is the library's.
    fn few_rows(
        &self,
        factors: [&Matrix; 2],
        adapters: Option<&RowAdapters>,
        end: End<'_>,
        d: &Buffer,
    ) -> Result<bool> {
        let gemm = &self.p.gemm;
        let few = FewRows {
            factors,
            alpha: gemm.alpha,
            end,
            sm_cap: gemm.sm_cap,
            settled: gemm.settled_b,
            adapters,
        };
        Ok(self.shape.d.dims().len() == 2 && self.device.few_rows(self.lane, &few, d)?)
    }

    fn product<'m>(
        &self,
        (a, b, scales): (&'m Matrix, &'m Matrix, Option<[&'m Matrix; 2]>),
        d: &'m Matrix,
    ) -> Product<'m> {
        let gemm = &self.p.gemm;
        Product {
            batch: self.shape.batch,
            alpha: gemm.alpha,
            scales,
            sm_cap: gemm.sm_cap,
            ..Product::new(a, b, d)
        }
    }

    /// The whole linear by the library, if it rounds once and takes C as it is; `false`, and nothing is done, otherwise.
    fn direct(
        &self,
        factors: (&Matrix, &Matrix, Option<[&Matrix; 2]>),
        c: Option<&Buffer>,
        d: &Buffer,
    ) -> Result<bool> {
        let (a, b, scales) = factors;
        let GemmShape { m, n, .. } = self.shape;
        let fits = if scales.is_some() {
            c.is_none() && b.columns() == n
        } else {
            d.dtype() == a.dtype() || d.dtype() == DataType::F32
        };
        if !fits || c.is_some_and(|c| c.dtype() != d.dtype()) {
            return Ok(false);
        }
        let out = Matrix::shaped(d, m, n);
        let mut product = self.product(factors, &out);
        let (full, row);
        match c {
            None => {}
            Some(c) if c.shape() == d.shape() => {
                full = Matrix::shaped(c, m, n);
                product.c = Some(&full);
                product.beta = self.p.gemm.beta;
            }
            Some(c) if self.p.gemm.beta == 1.0 && c.address().is_multiple_of(16) => {
                row = Matrix::shaped(c, 1, n);
                product.bias = Some(&row);
            }
            Some(_) => return Ok(false),
        }
        self.device.opened.lt.run(self.lane, &product)
    }

    /// Adapters into `d` first, and the base product on top of them, by the library: far fewer bytes than sums in f32. Two more
    /// roundings, of x A and of the adapters' part, to the type of all factors. `false` where that is not to be had; `d` then
    /// holds nothing that counts.
    fn on_adapters(&self, a: &Matrix, b: &Matrix, d: &Buffer) -> Result<bool> {
        let Self {
            device,
            lane,
            p,
            shape,
        } = self;
        let (dtype, gemm) = (d.dtype(), &p.gemm);
        let same = |v: View<'_>| v.dtype() == dtype;
        let adapters = || p.runs.iter().filter_map(|run| run.adapter);
        let fits = self.has_adapters()
            && shape.batch == 1
            && gemm.activation == Activation::None
            && matches!(dtype, DataType::F16 | DataType::BF16)
            && [a.dtype(), b.dtype()] == [dtype; 2]
            && adapters().all(|lora| same(lora.a) && same(lora.b));
        if !fits {
            return Ok(false);
        }
        let d = &d.reshape(&[shape.m, shape.n])?;
        let out = Matrix::of(d, false);
        let (short, rest) = Run::short(self.runs(), shape);
        for (rows, lora) in rest {
            let Some(lora) = lora else {
                device.fill_bytes(lane, &d.slice(rows.start, rows.len())?, 0)?;
                continue;
            };
            let (down, up) = (lora.a.retain(), lora.b.retain());
            let (down, up) = (Matrix::of(&down, false), Matrix::of(&up, false));
            let low = device.scratch(lane, dtype, &[rows.len(), down.columns()])?;
            let low = Matrix::of(&low, false);
            let x = a.slice(rows.start, rows.len());
            let part = out.slice(rows.start, rows.len());
            let steps = [
                Product {
                    sm_cap: gemm.sm_cap,
                    ..Product::new(&x, &down, &low)
                },
                Product {
                    alpha: lora.scale,
                    sm_cap: gemm.sm_cap,
                    ..Product::new(&low, &up, &part)
                },
            ];
            for step in &steps {
                if !device.opened.lt.run(lane, step)? {
                    return Ok(false);
                }
            }
        }
        device.lora_runs(lane, &short, [a, &out], gemm.sm_cap)?;
        let end = End {
            bias: Some(d),
            beta: 1.0,
            activation: Activation::None,
        };
        if self.few_rows([a, b], None, end, d)? {
            return Ok(true);
        }
        let base = Product {
            c: Some(&out),
            beta: 1.0,
            ..self.product((a, b, None), &out)
        };
        device.opened.lt.run(lane, &base)
    }

    /// Sums in f32; `None` where the library has no algorithm for these factors.
    fn float_sums(
        &self,
        a: &Matrix,
        b: &Matrix,
        scales: Option<[&Matrix; 2]>,
    ) -> Result<Option<Sums>> {
        let GemmShape { batch, m, .. } = self.shape;
        let (device, stride) = (self.device, b.columns());
        let values = device.scratch(self.lane, DataType::F32, &[batch * m, stride])?;
        let d = Matrix::shaped(&values, m, stride);
        let done = device
            .opened
            .lt
            .run(self.lane, &self.product((a, b, scales), &d))?;
        Ok(done.then_some(Sums::Float { values, stride }))
    }

    fn multiply(&self, product: &Product<'_>) -> Result<()> {
        if self.device.opened.lt.run(self.lane, product)? {
            return Ok(());
        }
        Err(no_algorithm(&self.shape).into())
    }

    fn has_adapters(&self) -> bool {
        self.shape.k > 0 && self.p.runs.iter().any(adds_something)
    }

    /// Adds `scale * x A B` for each run of rows.
    fn add_adapters(&self, sums: Sums) -> Result<Sums> {
        let Self {
            device,
            lane,
            p,
            shape,
        } = self;
        let (m, n, sm_cap) = (shape.m, shape.n, p.gemm.sm_cap);
        let values = match sums {
            Sums::Float { values, stride } if stride == n => values,
            sums => {
                let values = device.scratch(lane, DataType::F32, &[m, n])?;
                device.finish(lane, &sums, End::PLAIN, &values, n)?;
                values
            }
        };
        let d = Matrix::of(&values, false);
        let all = device.floats(lane, &p.gemm.a)?;
        let all = Matrix::of(&all, p.gemm.transpose_a);
        let adapted = self.runs().filter(|(_, lora)| lora.is_some());
        let (short, rest) = Run::short(adapted, shape);
        for (rows, lora) in rest {
            let Some(lora) = lora else { continue };
            let (a, b) = (lora.a.retain(), lora.b.retain());
            let common = if a.dtype() == all.dtype() {
                a.dtype()
            } else {
                DataType::F32
            };
            let x = device.as_type(lane, all.buffer(), common)?;
            let x = Matrix::of(&x, p.gemm.transpose_a).slice(rows.start, rows.len());
            let a = Matrix::of(&device.as_type(lane, &a, common)?, false);
            let b = Matrix::of(&device.as_type(lane, &b, DataType::F32)?, false);
            let low = device.scratch(lane, DataType::F32, &[rows.len(), a.columns()])?;
            let low = Matrix::of(&low, false);
            self.multiply(&Product {
                sm_cap,
                ..Product::new(&x, &a, &low)
            })?;
            let part = d.slice(rows.start, rows.len());
            self.multiply(&Product {
                c: Some(&part),
                alpha: lora.scale,
                beta: 1.0,
                sm_cap,
                ..Product::new(&low, &b, &part)
            })?;
        }
        device.lora_runs(lane, &short, [&all, &d], sm_cap)?;
        Ok(Sums::Float { values, stride: n })
    }

    /// Runs that have rows, with the adapter of those that change them.
    fn runs(&self) -> impl Iterator<Item = Given<'_>> {
        let mut first = 0;
        let all = self.p.runs.iter().map(move |run| {
            let rows = first..first + run.rows;
            first = rows.end;
            (rows, run.adapter.as_ref().filter(|_| adds_something(run)))
        });
        all.filter(|(rows, _)| !rows.is_empty())
    }
}

/// Floats of one type, which every version of the library should multiply.
fn no_algorithm(shape: &GemmShape) -> Reason {
    Reason::new(
        "gemm-algorithm",
        format!("cuBLASLt has no algorithm for {shape:?}"),
        "align the matrices to 16 bytes, or update cuBLAS",
    )
}

/// Zero points are refused.
pub(crate) fn no_zero_points(q: &QView<'_>) -> Result<(), Reason> {
    if q.zeros().is_none() {
        return Ok(());
    }
    Err(Reason::new(
        "zero-points",
        "the CUDA device multiplies no zero points",
        "quantize symmetrically",
    ))
}

/// Whether a run changes its rows.
pub(crate) fn adds_something(run: &LoraRun<'_>) -> bool {
    run.rows > 0
        && run
            .adapter
            .is_some_and(|lora| lora.scale != 0.0 && lora.a.shape().columns() > 0)
}
