//! The non-overlapped versions, as free functions: an override can call them, which it could not do with a default
//! method's body.

use crate::*;

/// Base product, then adapters run by run, in f32; one rounding at the end.
///
/// # Errors
/// As [`LoraLinearParams::check`].
pub fn lora_linear<D: Linear + ?Sized>(
    device: &D,
    on: &Stream,
    p: &LoraLinearParams<'_>,
    output: Output<'_>,
) -> Result<Option<Buffer>> {
    let shape = p.check()?;
    if p.runs.iter().all(|r| r.adapter.is_none()) {
        return device.gemm(on, &p.gemm, output);
    }
    output.check(shape.d.dims())?;
    let x = p.gemm.a.plain("a")?;
    let base = GemmParams {
        activation: Activation::None,
        ..p.gemm
    };
    let memory = x.memory();
    let mut sum = device.allocate(on, memory, DataType::F32, &[shape.m, shape.n])?;
    device.gemm(on, &base, Output::Into(sum.view_mut()))?;
    let mut first = 0;
    for run in p.runs {
        let rows = first..first + run.rows;
        first = rows.end;
        let Some(lora) = run.adapter.filter(|_| run.rows > 0) else {
            continue;
        };
        let rows_of_x = if p.gemm.transpose_a {
            let mut t = device.allocate(on, memory, x.dtype(), &[shape.m, shape.k])?;
            device.transpose(on, t.view_mut(), x)?;
            t.slice(rows.start, rows.len())?
        } else {
            x.rows(rows.clone())?.retain()
        };
        let low = GemmParams {
            batch_invariant: p.gemm.batch_invariant,
            ..GemmParams::new(&rows_of_x, lora.a)
        };
        let low = device.gemm(on, &low, Output::Allocate(DataType::F32))?;
        let low = produced(low)?;
        let before = sum.slice(rows.start, rows.len())?;
        let high = GemmParams {
            c: Some(before.view()),
            alpha: lora.scale,
            batch_invariant: p.gemm.batch_invariant,
            ..GemmParams::new(&low, lora.b)
        };
        let mut after = before.clone();
        device.gemm(on, &high, Output::Into(after.view_mut()))?;
    }
    device.bias_activation(on, sum.view(), None, p.gemm.activation, output)
}

/// A buffer that `Output::Allocate` must have given.
fn produced(d: Option<Buffer>) -> Result<Buffer> {
    d.ok_or(Error::Invalid {
        field: "output",
        got: "nothing".into(),
        want: "the buffer that Output::Allocate asks for".into(),
    })
}

/// Gather, then linear.
///
/// # Errors
/// As every call on a communicator.
pub fn all_gather_lora_linear<C: Communicator + ?Sized>(
    comm: &C,
    turn: &mut Turn,
    p: AllGatherLoraLinearParams<'_>,
) -> Result<GatherLinearParts> {
    let call = p.check(comm.group())?;
    let plan = comm.plan(&Call::GatherLinear(call.clone()))?;
    let AllGatherLoraLinearParams {
        chunk,
        weight,
        transpose_weight,
        transpose_a,
        bias,
        activation,
        runs,
        mut output,
        batch_invariant,
        ..
    } = p;
    let a = comm.gather_chunk(turn, &call, chunk)?;
    let shape = a.kernel.shape();
    let gathered = GatheredParts {
        kernel: a.kernel.reshape(&flat(&shape))?,
        scales: a.scales.clone(),
        rows: a.rows.clone(),
    };
    if a.scaled_by_rank() {
        let layer = Layer {
            weight,
            transpose_weight,
            bias,
            activation,
            runs,
            batch_invariant,
        };
        let d = rank_by_rank(comm.device(), turn.stream(), &gathered, &layer, output)?;
        return Ok(GatherLinearParts { d, a, plan });
    }
    let gemm = GemmParams {
        c: bias,
        activation,
        transpose_a,
        transpose_b: transpose_weight,
        batch_invariant,
        ..GemmParams::new(gathered.operand()?, weight)
    };
    let linear = LoraLinearParams { gemm, runs };
    let d = in_rows(&shape, &mut output, linear.check()?.n, |output| {
        comm.device().lora_linear(turn.stream(), &linear, output)
    })?;
    Ok(GatherLinearParts { d, a, plan })
}

/// What is applied to every chunk of gathered rows.
struct Layer<'a> {
    weight: Operand<'a>,
    transpose_weight: bool,
    bias: Option<View<'a>>,
    activation: Activation,
    runs: &'a [LoraRun<'a>],
    batch_invariant: bool,
}

/// A product for the rows of each rank, where ranks quantized by scales of their own.
fn rank_by_rank(
    device: &dyn Device,
    on: &Stream,
    gathered: &GatheredParts,
    layer: &Layer<'_>,
    output: Output<'_>,
) -> Result<Option<Buffer>> {
    let s = layer.weight.shape();
    let n = if layer.transpose_weight {
        s.rows()
    } else {
        s.columns()
    };
    let total: usize = gathered.rows.iter().sum();
    output.check(&[total, n])?;
    let (mut d, new) = match output {
        Output::Into(v) => (v.as_view().retain(), false),
        Output::Allocate(dtype) => {
            let memory = gathered.kernel.memory();
            (device.allocate(on, memory, dtype, &[total, n])?, true)
        }
    };
    let mut first = 0;
    for (rank, &rows) in gathered.rows.iter().enumerate() {
        let runs = clip_runs(layer.runs, first, rows);
        let gemm = GemmParams {
            c: cut_bias(layer.bias, n, first, rows)?,
            activation: layer.activation,
            transpose_b: layer.transpose_weight,
            batch_invariant: layer.batch_invariant,
            ..GemmParams::new(gathered.chunk(rank)?, layer.weight)
        };
        let linear = LoraLinearParams { gemm, runs: &runs };
        let mut to = d.view_mut();
        device.lora_linear(on, &linear, Output::Into(to.rows(first..first + rows)?))?;
        first += rows;
    }
    Ok(new.then_some(d))
}

/// The runs of `rows` rows from row `first` on.
pub fn clip_runs<'a>(runs: &[LoraRun<'a>], first: usize, rows: usize) -> Vec<LoraRun<'a>> {
    let mut start = 0;
    runs.iter()
        .filter_map(|run| {
            let end = start + run.rows;
            let (from, to) = (start.max(first), end.min(first + rows));
            start = end;
            (from < to).then(|| LoraRun {
                rows: to - from,
                adapter: run.adapter,
            })
        })
        .collect()
}

/// All dimensions but the last in one.
fn flat(shape: &Shape) -> [usize; 2] {
    let (columns, outer) = shape.dims().split_last().unwrap_or((&1, &[]));
    [outer.iter().product(), *columns]
}

/// Runs a linear over rows flattened from `shape`, and gives D the outer dimensions back.
fn in_rows(
    shape: &Shape,
    output: &mut Output<'_>,
    n: usize,
    linear: impl FnOnce(Output<'_>) -> Result<Option<Buffer>>,
) -> Result<Option<Buffer>> {
    let outer = &shape.dims()[..shape.dims().len() - 1];
    match output {
        Output::Into(v) if outer.len() > 1 => {
            linear(Output::Into(v.reshape(&[outer.iter().product(), n])?))
        }
        Output::Into(v) => linear(Output::Into(v.reborrow())),
        Output::Allocate(t) => linear(Output::Allocate(*t))?
            .map(|d| match outer {
                [rows, inner] => d.reshape(&[*rows, *inner, n]),
                _ => Ok(d),
            })
            .transpose(),
    }
}

/// Linear, then reduce-scatter. Parts are rounded to D's type, summed in rank order in f32, and then meet C and the
/// activation before the one rounding.
///
/// # Errors
/// As every call on a communicator.
pub fn lora_linear_reduce_scatter<C: Communicator + ?Sized>(
    comm: &C,
    turn: &mut Turn,
    p: LoraLinearReduceScatterParams<'_>,
) -> Result<Reduced> {
    let group = *comm.group();
    let call = p.check(&group)?;
    let plan = comm.plan(&Call::LinearReduceScatter(call.clone()))?;
    let device = comm.device();
    let on = turn.stream().clone();
    let shape = p.x.shape();
    let inner = call.inner.unwrap_or(1);
    let x = match p.x {
        Operand::Plain(v) => Operand::Plain(v.reshape(&flat(&shape))?),
        quantized => quantized,
    };
    let gemm = GemmParams {
        transpose_a: p.transpose_a,
        transpose_b: p.transpose_weight,
        batch_invariant: p.batch_invariant,
        ..GemmParams::new(x, p.weight)
    };
    let linear = LoraLinearParams { gemm, runs: p.runs };
    let part = produced(device.lora_linear(&on, &linear, Output::Allocate(call.output))?)?;
    let rows: PerRank = call.rows.iter().map(|r| r * inner).collect();
    let first: usize = rows[..group.rank].iter().sum();
    let own = rows[group.rank];
    let mut sum = device.allocate(&on, part.memory(), DataType::F32, &[own, call.n])?;
    comm.reduce_scatter_parts(
        turn,
        &call,
        ReduceScatterParams {
            from: part.view(),
            rows_per_rank: &rows,
            to: sum.view_mut(),
            op: ReduceOp::Sum,
        },
    )?;
    let bias = cut_bias(p.bias, call.n, first, own)?;
    let mut output = p.output;
    let d_shape = match call.inner {
        Some(inner) => Shape::new(&[call.rows[group.rank], inner, call.k])?,
        None => Shape::new(&[own, call.k])?,
    };
    let d = in_rows(&d_shape, &mut output, call.n, |output| {
        device.bias_activation(&on, sum.view(), bias, p.activation, output)
    })?;
    Ok(Reduced {
        d,
        plan,
        sent: false,
    })
}

/// A full C is cut with its rows; a row that is added to every row is not.
///
/// # Errors
/// [`Error::Invalid`] if a full C has too few rows.
pub fn cut_bias(
    bias: Option<View<'_>>,
    n: usize,
    first_row: usize,
    rows: usize,
) -> Result<Option<View<'_>>> {
    bias.map(|c| {
        if c.shape().dims() == [n] || c.shape().dims() == [1, n] {
            Ok(c)
        } else {
            let all = c.shape().len().checked_div(n).unwrap_or(first_row + rows);
            c.reshape(&[all, n])?.slice(first_row, rows)
        }
    })
    .transpose()
}

/// Linear, then all-reduce. Parts are rounded to D's type, summed in rank order in f32, and then meet C and the
/// activation before the one rounding. Where there is neither, the all-reduce rounds, and gives D itself: the same bits.
///
/// # Errors
/// As every call on a communicator.
pub fn lora_linear_with_all_reduce<C: Communicator + ?Sized>(
    comm: &C,
    turn: &mut Turn,
    p: LoraLinearAllReduceParams<'_>,
) -> Result<Reduced> {
    let shape = p.linear.check()?;
    p.output.check(shape.d.dims())?;
    let gemm = p.linear.gemm;
    let c = gemm.c.filter(|_| gemm.beta != 0.0);
    if let Some(c) = c.filter(|_| gemm.beta != 1.0) {
        return Err(Error::invalid(
            "linear.gemm.beta",
            format!("{} with a C of {}", gemm.beta, c.shape()),
            "0 or 1 where a sum over ranks follows",
        ));
    }
    let device = comm.device();
    let on = turn.stream().clone();
    let mut part = p.linear;
    part.gemm.c = None;
    part.gemm.activation = Activation::None;
    let dtype = p.output.dtype();
    let part = produced(device.lora_linear(&on, &part, Output::Allocate(dtype))?)?;
    let mut reduce = |data| {
        let params = AllReduceParams {
            data,
            from: Some(part.view()),
            op: ReduceOp::Sum,
            choice: p.choice,
        };
        comm.all_reduce(turn, params)
    };
    let new = |dtype| device.allocate(&on, part.memory(), dtype, shape.d.dims());
    if c.is_some() || gemm.activation != Activation::None {
        let mut sum = new(DataType::F32)?;
        let plan = reduce(sum.view_mut())?;
        let d = device.bias_activation(&on, sum.view(), c, gemm.activation, p.output)?;
        return Ok(Reduced {
            d,
            plan,
            sent: false,
        });
    }
    let (d, plan) = match p.output {
        Output::Into(d) => (None, reduce(d)?),
        Output::Allocate(dtype) => {
            let mut d = new(dtype)?;
            let plan = reduce(d.view_mut())?;
            (Some(d), plan)
        }
    };
    Ok(Reduced {
        d,
        plan,
        sent: false,
    })
}

/// Linear, then all-reduce with a norm.
///
/// # Errors
/// As every call on a communicator.
pub fn lora_linear_with_all_reduce_norm<C: Communicator + ?Sized>(
    comm: &C,
    turn: &mut Turn,
    p: LoraLinearAllReduceNormParams<'_>,
) -> Result<LinearAllReduceNorm> {
    p.check()?;
    let on = turn.stream().clone();
    let output = Output::Allocate(p.residual.dtype());
    let part = produced(comm.device().lora_linear(&on, &p.linear, output)?)?;
    let plan = comm.all_reduce_norm(turn, p.behind(part.view()))?;
    Ok(LinearAllReduceNorm { plan, sent: false })
}

/// The shape of what comes of a linear whose result is gate and up side by side.
///
/// # Errors
/// [`Error::Invalid`] for one that is not.
pub fn gated_shape(p: &LoraLinearParams<'_>) -> Result<[usize; 2]> {
    match p.check()?.d.dims() {
        &[rows, both] if both % 2 == 0 => Ok([rows, both / 2]),
        other => {
            let (got, want) = (format!("a result of {other:?}"), "one of [rows, 2 n]");
            Err(Error::invalid("gemm.b.shape", got, want))
        }
    }
}

/// Linear, then the gate.
///
/// # Errors
/// As [`gated_shape`] and [`SiluMulParams::check`].
pub fn lora_linear_silu_mul<D: Linear + ?Sized>(
    device: &D,
    on: &Stream,
    p: &LoraLinearParams<'_>,
    output: Output<'_>,
) -> Result<Option<Buffer>> {
    output.check(&gated_shape(p)?)?;
    let dtype = output.dtype();
    let both = produced(device.lora_linear(on, p, Output::Allocate(dtype))?)?;
    device.silu_mul(on, &SiluMulParams::new(both.view()), output)
}
