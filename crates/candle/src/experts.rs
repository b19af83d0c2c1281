//! A mixture of experts, each of which lives on one rank.

use crate::{
    Parallel,
    error::{OrCandle, invalid},
    memory,
};
use brigade::{
    Arrangement, Buffer, CombineParams, CombineSum, DataType, DeviceExt, DispatchParams,
    Dispatched, GroupedGemmParams, Groups, Output, Placement, ReceivedIds, Route, Routing,
    SiluMulParams, Transport, View,
};
use candle_core::{DType, Result, Tensor};
use std::ops::Range;

/// Tokens go to the ranks of their experts, and what those make of them comes back and is added up (GShard, Lepikhin et al. 2020).
///
/// Experts are spread over ranks as features are, the first ranks have one more. A router, the caller's own, says which experts each of this
/// rank's tokens goes to, and with which weights; ranks have their own tokens, as many as they like, also none.
#[derive(Clone, Debug)]
pub struct ExpertParallel {
    parallel: Parallel,
    experts: usize,
    max_tokens: usize,
    sum: CombineSum,
    choice: Option<Transport>,
    max_recv: Option<usize>,
}

/// This rank's experts, each a gated feed-forward network, `down(silu(gate(x)) * up(x))`, with their weights one behind the other.
#[derive(Clone, Debug)]
pub struct GatedExperts {
    /// `[experts, 2 * inner, width]`
    gate_up: Tensor,
    /// `[experts, width, inner]`
    down: Tensor,
    /// Columns of a row, which `width` fills up to what rows have that travel.
    hidden: usize,
}

impl GatedExperts {
    /// From `gate_up [experts, 2 * inner, hidden]`, in which the rows of up come behind those of gate, and `down [experts, hidden, inner]`:
    /// those of [`ExpertParallel::own`], in their order. f32, f16 or bf16. Where rows are no multiple of 16 bytes, the weights are copied.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] if they do not fit each other.
    pub fn new(gate_up: &Tensor, down: &Tensor) -> Result<Self> {
        let fits = match (gate_up.dims(), down.dims()) {
            (&[experts, both, hidden], &[e, h, inner]) => {
                (experts, hidden, Some(both)) == (e, h, inner.checked_mul(2))
            }
            _ => false,
        };
        if !fits || gate_up.dtype() != down.dtype() {
            let of = |t: &Tensor| format!("{:?} of {:?}", t.dims(), t.dtype());
            let got = format!("gate_up {}, down {}", of(gate_up), of(down));
            let want = "[experts, 2 inner, hidden] and [experts, hidden, inner] of one type";
            return Err(invalid("experts", got, want));
        }
        Ok(Self {
            gate_up: padded(gate_up, 2)?,
            down: padded(down, 1)?,
            hidden: gate_up.dims()[2],
        })
    }
}

/// With as many zeros along a dimension of `hidden` columns as make rows a multiple of 16 bytes.
fn padded(tensor: &Tensor, dim: usize) -> Result<Tensor> {
    let mut dims = tensor.dims().to_vec();
    let hidden = dims[dim];
    let step = (DispatchParams::ROW_BYTES / tensor.dtype().size_in_bytes().max(1)).max(1);
    match hidden.next_multiple_of(step) - hidden {
        0 => tensor.contiguous(),
        // candle would have a GPU write no zeros.
        more if tensor.elem_count() == 0 => {
            dims[dim] += more;
            tensor.contiguous()?.reshape(dims)
        }
        more => tensor.pad_with_zeros(dim, 0, more)?.contiguous(),
    }
}

impl ExpertParallel {
    /// For so many experts in all, and at most `max_tokens` tokens of a rank in one call: the same on every rank. The group must have
    /// been joined for expert parallelism ([`ParallelMode::Ep`](brigade::ParallelMode::Ep)), which gives it memory for rows on their
    /// way.
    pub fn new(parallel: &Parallel, experts: usize, max_tokens: usize) -> Self {
        Self {
            parallel: parallel.clone(),
            experts,
            max_tokens,
            sum: CombineSum::Expert,
            choice: None,
            max_recv: None,
        }
    }

    /// Room for so many rows at a rank, one for each expert of a token that lies there, the same on every rank; more of them are a fault of
    /// [`Overflow`](brigade::FaultKind::Overflow). Then [`forward_grouped`](Self::forward_grouped) reads nothing on the host. Without it
    /// rows take as much memory as they need, which the host waits to hear.
    #[must_use]
    pub fn with_max_recv(mut self, rows: usize) -> Self {
        self.max_recv = Some(rows);
        self
    }

    /// Each rank adds what its own experts made of a token before it goes back: fewer bytes travel, and sums are rounded once more. The
    /// same on every rank.
    #[must_use]
    pub fn with_sums_by_rank(mut self) -> Self {
        self.sum = CombineSum::ExpertByRank;
        self
    }

    /// Forces a way for rows to travel, for who measures. The same on every rank.
    #[must_use]
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.choice = Some(transport);
        self
    }

    /// Which experts this rank has.
    ///
    /// # Errors
    /// None in practice.
    pub fn own(&self) -> Result<Range<usize>> {
        crate::cut::share(self.experts, 1, self.parallel.size(), self.parallel.rank())
    }

    /// `y = sum over a token's experts of weight * expert(x)`, f32 inside and rounded once.
    ///
    /// `x` is `[tokens, hidden]`, f32, f16 or bf16; `ids` `[tokens, k]`, u32, i32 or i64, names experts from 0 (a number that names
    /// none, as -1, is none); `weights` `[tokens, k]` of any float. `expert` is called for each own expert that rows have come for,
    /// with its number and those rows, `[rows, hidden]`, and gives as many of the same type. A rank whose `expert` fails, or gives
    /// something else, stops the group, so that nobody waits for it.
    ///
    /// # Errors
    /// What `expert` returns; [`brigade::Error::Invalid`] naming what does not fit; [`brigade::Error::Fault`] if a rank does not come.
    pub fn forward(
        &self,
        x: &Tensor,
        ids: &Tensor,
        weights: &Tensor,
        mut expert: impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let hidden = hidden_of(x)?;
        // Who calls an expert must know its rows on the host anyway.
        self.there_and_back(x, ids, weights, None, |there| {
            self.made(there, hidden, &mut expert)
        })
    }

    /// The same with gated experts, all of which multiply in one product in groups: `x` of the weights' type. With
    /// [`with_max_recv`](Self::with_max_recv) the host reads nothing on the way, and on a GPU the call can be captured in a graph.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_grouped(
        &self,
        x: &Tensor,
        ids: &Tensor,
        weights: &Tensor,
        experts: &GatedExperts,
    ) -> Result<Tensor> {
        let hidden = hidden_of(x)?;
        let own = self.own()?.len();
        let got = (experts.gate_up.dims()[0], experts.hidden);
        if got != (own, hidden) {
            let got = format!("{} of {}", got.0, got.1);
            let want = format!("{own} of {hidden}, as this rank has, and as x");
            return Err(invalid("experts", got, want));
        }
        if x.dtype() != experts.gate_up.dtype() {
            let want = format!("{:?}, as the experts", experts.gate_up.dtype());
            return Err(invalid("x.dtype", format!("{:?}", x.dtype()), want));
        }
        // A rank whose weights lie elsewhere should say so before the others wait for it.
        self.parallel.check_place(&experts.gate_up)?;
        self.parallel.check_place(&experts.down)?;
        self.there_and_back(x, ids, weights, self.max_recv, |there| {
            self.made_grouped(there, experts)
        })
    }

    /// Rows to their experts, what `made` makes of them, and its sums back.
    fn there_and_back(
        &self,
        x: &Tensor,
        ids: &Tensor,
        weights: &Tensor,
        max_recv: Option<usize>,
        made: impl FnOnce(&Dispatched) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (tokens, hidden) = x.dims2()?;
        // What comes back is added up. A rank should say so before the others wait for it.
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            let got = format!("{:?}", x.dtype());
            return Err(invalid("x.dtype", got, "f32, f16 or bf16"));
        }
        self.parallel.refuse_capture()?;
        let padded = padded(x, 1)?;
        let weights = self.parallel.cast(weights, DType::F32)?.contiguous()?;
        // The handle of a dispatch keeps a view of them, for the combine.
        let weights = self.parallel.lend(&weights)?;
        let there = self.dispatch(&padded, ids, weights.view(), max_recv)?;
        // The others wait for this rank's rows in the combine, which must begin for that.
        let back = made(&there).and_then(|back| self.combine(&there, &back, tokens));
        let out = back.inspect_err(|_| self.parallel.abort())?;
        out.narrow(1, 0, hidden)?.contiguous()
    }

    fn dispatch(
        &self,
        x: &Tensor,
        ids: &Tensor,
        weights: View<'_>,
        max_recv: Option<usize>,
    ) -> Result<Dispatched> {
        let parallel = &self.parallel;
        let ids = match ids.dtype() {
            DType::I32 | DType::I64 => ids.contiguous()?,
            _ => parallel.cast(ids, DType::I64)?.contiguous()?,
        };
        let (x, ids) = (parallel.lend(x)?, parallel.lend(&ids)?);
        let placement = Placement::Even {
            experts: self.experts,
        };
        let params = DispatchParams {
            rows: x.view(),
            beside: &[],
            route: Route::Experts {
                routing: Routing {
                    ids: ids.view(),
                    placement,
                },
                weights: Some(weights),
            },
            arrangement: Arrangement::ByExpert { alignment: 1 },
            max_tokens: self.max_tokens,
            max_recv,
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: None,
            choice: self.choice,
        };
        parallel
            .lease()
            .and_then(|mut lease| lease.dispatch(params))
            .or_candle()
    }

    /// What own experts make of the rows that came, as these lie.
    fn made(
        &self,
        there: &Dispatched,
        hidden: usize,
        expert: &mut impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (device, on) = (self.parallel.device(), self.parallel.stream());
        let offsets: Vec<i32> = device.download(on, there.handle.offsets()).or_candle()?;
        let rows = self.parallel.tensor(there.rows.view())?;
        let width = rows.dim(1)?;
        let first = self.own()?.start;
        let mut parts = Vec::new();
        for (slot, bounds) in offsets.windows(2).enumerate() {
            let (from, to) = (bounds[0].max(0) as usize, bounds[1].max(0) as usize);
            if from >= to {
                continue;
            }
            let count = to - from;
            let own = rows.narrow(0, from, count)?.narrow(1, 0, hidden)?;
            let made = expert(first + slot, &own.contiguous()?)?;
            if made.dims() != [count, hidden] {
                let got = format!("{:?} of expert {}", made.dims(), first + slot);
                return Err(invalid("expert", got, format!("[{count}, {hidden}]")));
            }
            // A rank that no rows come to knows no other type, and all ranks must combine the same.
            if made.dtype() != rows.dtype() {
                let got = format!("{:?} of expert {}", made.dtype(), first + slot);
                let want = format!("{:?}, as its rows", rows.dtype());
                return Err(invalid("expert.dtype", got, want));
            }
            parts.push(made.pad_with_zeros(1, 0, width - hidden)?);
        }
        match parts.is_empty() {
            true => Ok(rows),
            false => Tensor::cat(&parts, 0)?.contiguous(),
        }
    }

    /// What own experts make of the rows that came, by what their numbers on the device say.
    fn made_grouped(&self, there: &Dispatched, experts: &GatedExperts) -> Result<Tensor> {
        let parallel = &self.parallel;
        let (device, on) = (parallel.device(), parallel.stream());
        let (gate_up, down) = (
            parallel.lend(&experts.gate_up)?,
            parallel.lend(&experts.down)?,
        );
        let offsets = there.handle.offsets();
        let groups = Groups::Behind {
            offsets,
            counts: Some(there.counts.view()),
        };
        let (rows, dtype) = (there.rows.shape(), there.rows.dtype());
        let gated = || -> brigade::Result<Buffer> {
            let params = GroupedGemmParams::new(&there.rows, gate_up.view(), groups);
            let both = device.grouped_gemm(on, &params, Output::Allocate(DataType::F32))?;
            let both = given(both)?;
            let gate = SiluMulParams {
                from: both.view(),
                rows: Some(offsets.slice(there.counts.shape().len(), 1)?),
            };
            given(device.silu_mul(on, &gate, Output::Allocate(dtype))?)
        };
        let gated = gated().or_candle()?;
        parallel.make(memory::dtype_of(dtype)?, rows.dims(), |to| {
            let params = GroupedGemmParams::new(&gated, down.view(), groups);
            device.grouped_gemm(on, &params, Output::Into(to))?;
            Ok(())
        })
    }

    fn combine(&self, there: &Dispatched, rows: &Tensor, tokens: usize) -> Result<Tensor> {
        let parallel = &self.parallel;
        memory::data_type(rows.dtype())?;
        let lent = parallel.lend(rows)?;
        parallel.make(rows.dtype(), (tokens, rows.dim(1)?), |to| {
            let params = CombineParams {
                rows: lent.view(),
                handle: &there.handle,
                sum: self.sum,
                weights: None,
                biases: &[],
                output: Output::Into(to),
                waits: None,
                choice: self.choice,
            };
            parallel.call(|lease| Ok(lease.combine(params)?.plan))
        })
    }
}

/// Columns of `[tokens, hidden]`.
fn hidden_of(x: &Tensor) -> Result<usize> {
    match x.dims() {
        &[_, hidden] => Ok(hidden),
        dims => Err(invalid("x.shape", format!("{dims:?}"), "[tokens, hidden]")),
    }
}

/// What was to be allocated.
fn given(made: Option<Buffer>) -> brigade::Result<Buffer> {
    made.ok_or_else(|| brigade::Error::invalid("output", "none", "a new buffer"))
}
