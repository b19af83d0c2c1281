//! One all-reduce with a norm: its inputs, what every rank must get, and the call.

use super::naive::{self, stored};
use crate::{
    all_reduce::uneven,
    backend::Rank,
    check::{assert_bits, assert_sum_close, compare, is_poisoned, tolerance},
    matrix::{to_f32, to_f64},
    quantized::fp8,
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceNormParams, AllReduceParams, Buffer, Call, DataType,
    LoraLinearAllReduceNormParams, LoraLinearParams, Normed, Plan, QScheme, ReduceOp,
    ResidualNormParams, Result, SumOrder,
};
use rand::{Rng, rngs::StdRng};

/// Inputs of all ranks, and what every rank must get.
#[derive(Clone)]
pub struct Case {
    pub(crate) dtype: DataType,
    pub(crate) scheme: QScheme,
    /// `[rows, hidden]`
    pub(crate) dims: [usize; 2],
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) residual: Vec<u8>,
    pub(crate) weight: Vec<u8>,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
    /// Whether the new residual goes over the old one.
    pub(crate) in_place: bool,
    pub(crate) want: [Vec<u8>; 3],
}

/// The arguments of a call in a device's memory.
pub(crate) struct Arguments {
    pub(crate) from: Buffer,
    pub(crate) residual: Buffer,
    pub(crate) weight: Buffer,
    pub(crate) sum: Buffer,
    pub(crate) values: Buffer,
    pub(crate) scales: Buffer,
    pub(crate) scheme: QScheme,
    pub(crate) scale: f32,
    pub(crate) eps: f32,
    pub(crate) choice: Option<AllReduceAlgorithm>,
}

/// Where normalized rows go.
pub(crate) fn normed<'a>(
    scheme: QScheme,
    values: &'a mut Buffer,
    scales: &'a mut Buffer,
    scale: f32,
) -> Normed<'a> {
    let values = values.view_mut();
    match scheme {
        QScheme::Int8PerToken => Normed::Int8PerToken {
            values,
            scales: scales.view_mut(),
        },
        QScheme::Fp8PerTensor => Normed::Fp8PerTensor { values, scale },
        _ => Normed::Plain(values),
    }
}

impl Arguments {
    pub(crate) fn call(&mut self, rank: &Rank) -> Result<Plan> {
        // Another rank may have stopped the group before this one asks.
        let mut lease = rank.comm().lease(&rank.stream)?;
        lease.all_reduce_norm(AllReduceNormParams {
            from: self.from.view(),
            residual: self.residual.view(),
            weight: self.weight.view(),
            eps: self.eps,
            sum: self.sum.view_mut(),
            normed: normed(self.scheme, &mut self.values, &mut self.scales, self.scale),
            choice: self.choice,
        })
    }

    /// What follows a linear in one call with it.
    pub(crate) fn of_a_linear<'a>(
        &'a mut self,
        linear: LoraLinearParams<'a>,
    ) -> LoraLinearAllReduceNormParams<'a> {
        LoraLinearAllReduceNormParams {
            linear,
            residual: self.residual.view(),
            weight: self.weight.view(),
            eps: self.eps,
            sum: self.sum.view_mut(),
            normed: normed(self.scheme, &mut self.values, &mut self.scales, self.scale),
            choice: self.choice,
        }
    }

    /// The same behind a sum that is there already.
    pub(crate) fn call_alone(&mut self, rank: &Rank) -> Result<()> {
        let params = ResidualNormParams {
            from: self.from.view(),
            residual: self.residual.view(),
            weight: self.weight.view(),
            eps: self.eps,
            sum: self.sum.view_mut(),
            normed: normed(self.scheme, &mut self.values, &mut self.scales, self.scale),
        };
        rank.device.residual_norm(&rank.stream, &params)
    }

    /// The new residual, the normalized values, and their scales if each row has one.
    pub(crate) fn outputs(&self, rank: &Rank) -> [Vec<u8>; 3] {
        let scales = match self.scheme {
            QScheme::Int8PerToken => rank.raw(self.scales.view()),
            _ => vec![],
        };
        [
            rank.raw(self.sum.view()),
            rank.raw(self.values.view()),
            scales,
        ]
    }
}

impl Case {
    /// A case with these values, rounded to the type: every rank's, the residual's, the weight's.
    pub fn new(
        (dtype, scheme): (DataType, QScheme),
        dims: [usize; 2],
        inputs: Vec<Vec<f32>>,
        [residual, weight]: [Vec<f32>; 2],
        eps: f32,
    ) -> Self {
        let mut case = Self {
            dtype,
            scheme,
            dims,
            inputs: inputs.iter().map(|x| stored(dtype, x)).collect(),
            residual: stored(dtype, &residual),
            weight: stored(dtype, &weight),
            eps,
            scale: 1.0 / 64.0,
            in_place: false,
            want: [vec![], vec![], vec![]],
        };
        case.want = case.after(&case.reduced());
        case
    }

    /// A case with random values whose sums depend on their order.
    pub fn random(
        rng: &mut StdRng,
        size: usize,
        dims: [usize; 2],
        (dtype, scheme): (DataType, QScheme),
    ) -> Self {
        let mut values = |len: usize| (0..len).map(|_| uneven(rng)).collect::<Vec<_>>();
        let len = dims[0] * dims[1];
        let inputs = (0..size).map(|_| values(len)).collect();
        let others = [values(len), values(dims[1])];
        let mut case = Self::new((dtype, scheme), dims, inputs, others, 1e-5);
        case.in_place = rng.random();
        case
    }

    /// What an all-reduce gives.
    pub(crate) fn reduced(&self) -> Vec<u8> {
        let parts: Vec<_> = self.inputs.iter().map(|x| to_f32(self.dtype, x)).collect();
        crate::oracle::reduce(ReduceOp::Sum, &parts, self.dtype)
    }

    /// What follows from an all-reduce.
    pub(crate) fn after(&self, reduced: &[u8]) -> [Vec<u8>; 3] {
        let sum = naive::add(self.dtype, reduced, &self.residual);
        let y = naive::norm(self.dtype, &sum, &self.weight, self.eps);
        let (values, scales) = match self.scheme {
            QScheme::Int8PerToken => {
                let q = naive::per_token(self.dtype, &y, self.dims);
                (q.kernel, bytemuck::cast_slice(&q.scales).to_vec())
            }
            QScheme::Fp8PerTensor => (naive::per_tensor(self.dtype, &y, self.scale), vec![]),
            _ => (y, vec![]),
        };
        [sum, values, scales]
    }

    fn values_type(&self) -> DataType {
        self.scheme.kernel_type().unwrap_or(self.dtype)
    }

    pub(crate) fn upload(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) -> Arguments {
        let (dtype, dims) = (self.dtype, self.dims);
        let residual = rank.upload_bytes(dtype, &dims, &self.residual);
        Arguments {
            from: rank.upload_bytes(dtype, &dims, &self.inputs[rank.rank]),
            weight: rank.upload_bytes(dtype, &dims[1..], &self.weight),
            sum: match self.in_place {
                true => residual.clone(),
                false => rank.poisoned(dtype, &dims),
            },
            residual,
            values: rank.poisoned(self.values_type(), &dims),
            scales: rank.poisoned(DataType::F32, &dims[..1]),
            scheme: self.scheme,
            scale: self.scale,
            eps: self.eps,
            choice,
        }
    }

    /// The signed call.
    pub fn explained(&self, choice: Option<AllReduceAlgorithm>) -> Call {
        let fp8 = self.scheme == QScheme::Fp8PerTensor;
        Call::AllReduceNorm {
            rows: self.dims[0],
            hidden: self.dims[1],
            dtype: self.dtype,
            scheme: self.scheme,
            eps_bits: self.eps.to_bits(),
            scale_bits: fp8.then_some(self.scale.to_bits()),
            choice,
        }
    }

    pub(crate) fn assert_want(&self, got: &[Vec<u8>; 3], what: &str) {
        let types = [self.dtype, self.values_type(), DataType::F32];
        let names = ["sum", "normed", "scales"];
        for (((got, want), dtype), name) in got.iter().zip(&self.want).zip(types).zip(names) {
            assert_bits(got, want, dtype, &format!("{what}, {name}"));
        }
    }

    /// What a call leaves that failed: nothing that could be taken for a result, and of a call that was refused a residual that is still there.
    pub(crate) fn assert_poisoned(&self, got: &[Vec<u8>; 3], what: &str) {
        let types = [self.dtype, self.values_type(), DataType::F32];
        for (i, (got, dtype)) in got.iter().zip(types).enumerate() {
            let is_kept = i == 0 && self.in_place && *got == self.residual;
            assert!(is_kept || is_poisoned(dtype, got), "{what}, output {i}");
        }
    }

    /// Makes the call, and asserts its bits.
    pub fn run(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) {
        let what = format!(
            "{choice:?} of {:?} {} as {:?}{}",
            self.dims,
            self.dtype,
            self.scheme,
            if self.in_place { " in place" } else { "" }
        );
        let mut arguments = self.upload(rank, choice);
        let plan = arguments.call(rank).unwrap();
        let call = self.explained(choice);
        assert_eq!(plan, rank.comm().explain(&call).unwrap(), "{what}");
        let Plan::AllReduce {
            algorithm,
            order,
            piece_elements,
            ..
        } = plan
        else {
            panic!("{what}: {plan:?}");
        };
        assert_eq!(order, SumOrder::Flat, "{what}");
        assert!(
            choice.is_none_or(|c| c == algorithm),
            "{what}: {algorithm:?}"
        );
        assert_eq!(piece_elements % self.dims[1], 0, "{what}: whole rows");
        self.assert_want(&arguments.outputs(rank), &what);
        let from = rank.raw(arguments.from.view());
        assert_bits(&from, &self.inputs[rank.rank], self.dtype, "input kept");
        if !self.in_place {
            let residual = rank.raw(arguments.residual.view());
            assert_bits(&residual, &self.residual, self.dtype, "residual kept");
        }
    }

    /// What calls one after the other give: an all-reduce of the device's, the steps written down here, and for int8 the
    /// device's own quantizing.
    pub(super) fn assert_composed(&self, rank: &Rank) {
        let from = rank.upload_bytes(self.dtype, &self.dims, &self.inputs[rank.rank]);
        let mut reduced = rank.poisoned(self.dtype, &self.dims);
        let params = AllReduceParams {
            data: reduced.view_mut(),
            from: Some(from.view()),
            op: ReduceOp::Sum,
            choice: None,
        };
        rank.lease().all_reduce(params).unwrap();
        let got = self.after(&rank.raw(reduced.view()));
        self.assert_want(&got, "composed");
        if self.scheme == QScheme::Int8PerToken {
            let y = naive::norm(self.dtype, &got[0], &self.weight, self.eps);
            let y = rank.upload_bytes(self.dtype, &self.dims, &y);
            let (on, device) = (&rank.stream, &rank.device);
            let q = device.quantize(on, y.view(), self.scheme).unwrap();
            let [kernel, scales] = [q.kernel(), q.scales()].map(|part| rank.raw(part.view()));
            self.assert_want(&[got[0].clone(), kernel, scales], "quantized");
        }
    }

    /// That the promised bits are about what f64 gives.
    pub(crate) fn assert_near(&self) {
        let wide = |x: &Vec<u8>| to_f64(self.dtype, x);
        let mut parts: Vec<_> = self.inputs.iter().map(wide).collect();
        parts.push(wide(&self.residual));
        let exact = naive::exact(&parts, &wide(&self.weight), self.eps);
        let [sum, values, scales] = &self.want;
        let what = format!("{:?} {} as {:?}", self.dims, self.dtype, self.scheme);
        let got = to_f64(self.dtype, sum);
        assert_sum_close(&got, &exact.sum, self.dtype, exact.parts[0], &what);
        if self.scheme == QScheme::None {
            let got = to_f64(self.dtype, values);
            // The sum, the residual's and the result are rounded.
            let allowed = 3.0 * tolerance(self.dtype);
            if let Err(why) = compare(&got, &exact.normed, allowed, exact.parts[1]) {
                panic!("{what}: {why}");
            }
            return;
        }
        let slack = 16.0 * tolerance(self.dtype);
        let size = exact.parts[1] / (exact.normed.len().max(1) as f64).sqrt();
        let scales: Vec<f32> = bytemuck::pod_collect_to_vec(scales);
        let most = match self.scheme {
            QScheme::Fp8PerTensor => 448.0 * f64::from(self.scale),
            _ => f64::INFINITY,
        };
        for (i, (&bits, &want)) in values.iter().zip(&exact.normed).enumerate() {
            let want = want.clamp(-most, most);
            let (got, half_step) = match self.scheme {
                QScheme::Int8PerToken => {
                    let scale = f64::from(scales[i / self.dims[1]]);
                    (f64::from(bits.cast_signed()) * scale, scale / 2.0)
                }
                _ => {
                    let scale = f64::from(self.scale);
                    (fp8(bits) * scale, scale / 1024.0 + want.abs() / 16.0)
                }
            };
            let off = (got - want).abs();
            let allowed = half_step * 1.01 + slack * size.max(want.abs());
            assert!(off <= allowed, "{what}: {got} instead of {want}");
        }
    }
}
