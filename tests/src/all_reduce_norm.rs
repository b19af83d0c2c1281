//! All-reduce with a norm: bit for bit what an all-reduce, an addition and a norm one after the other give, whatever the
//! algorithm, and close to what f64 gives.

mod naive;
mod special;

use crate::{
    all_reduce::{algorithms, uneven},
    backend::Rank,
    check::{assert_bits, assert_sum_close, expect_invalid, expect_unsupported},
    gather_linear::config,
    layer::FLOATS,
    matrix::{to_f32, to_f64},
    quantized::fp8,
    suite::{Suite, World},
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceNormParams, AllReduceParams, Buffer, Call, CommConfig, DataType,
    Normed, Plan, QScheme, ReduceOp, Result, SumOrder,
};
use brigade_plan::reason;
use naive::stored;
use rand::{Rng, rngs::StdRng};

/// What becomes of normalized rows: as they are, int8 by rows, fp8 by the scale of [`Case`].
pub const NORMED: [QScheme; 3] = [QScheme::None, QScheme::Int8PerToken, QScheme::Fp8PerTensor];

/// A communicator whose buffers hold a row of 8192 of f32 from each of 8 ranks.
fn roomy() -> CommConfig {
    CommConfig {
        all_reduce_bytes: 1 << 20,
        ..config()
    }
}

/// Inputs of all ranks, and what every rank must get.
#[derive(Clone)]
pub struct Case {
    dtype: DataType,
    scheme: QScheme,
    /// `[rows, hidden]`
    dims: [usize; 2],
    inputs: Vec<Vec<u8>>,
    residual: Vec<u8>,
    weight: Vec<u8>,
    eps: f32,
    scale: f32,
    /// Whether the new residual goes over the old one.
    in_place: bool,
    want: [Vec<u8>; 3],
}

/// The arguments of a call in a device's memory.
struct Arguments {
    from: Buffer,
    residual: Buffer,
    weight: Buffer,
    sum: Buffer,
    values: Buffer,
    scales: Buffer,
    scheme: QScheme,
    scale: f32,
    eps: f32,
    choice: Option<AllReduceAlgorithm>,
}

impl Arguments {
    fn call(&mut self, rank: &Rank) -> Result<Plan> {
        let values = self.values.view_mut();
        rank.lease().all_reduce_norm(AllReduceNormParams {
            from: self.from.view(),
            residual: self.residual.view(),
            weight: self.weight.view(),
            eps: self.eps,
            sum: self.sum.view_mut(),
            normed: match self.scheme {
                QScheme::Int8PerToken => Normed::Int8PerToken {
                    values,
                    scales: self.scales.view_mut(),
                },
                QScheme::Fp8PerTensor => Normed::Fp8PerTensor {
                    values,
                    scale: self.scale,
                },
                _ => Normed::Plain(values),
            },
            choice: self.choice,
        })
    }

    /// The new residual, the normalized values, and their scales if each row has one.
    fn outputs(&self, rank: &Rank) -> [Vec<u8>; 3] {
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
    fn reduced(&self) -> Vec<u8> {
        let parts: Vec<_> = self.inputs.iter().map(|x| to_f32(self.dtype, x)).collect();
        crate::oracle::reduce(ReduceOp::Sum, &parts, self.dtype)
    }

    /// What follows from an all-reduce.
    fn after(&self, reduced: &[u8]) -> [Vec<u8>; 3] {
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

    fn upload(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) -> Arguments {
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

    fn assert_want(&self, got: &[Vec<u8>; 3], what: &str) {
        let types = [self.dtype, self.values_type(), DataType::F32];
        let names = ["sum", "normed", "scales"];
        for (((got, want), dtype), name) in got.iter().zip(&self.want).zip(types).zip(names) {
            assert_bits(got, want, dtype, &format!("{what}, {name}"));
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
    fn assert_composed(&self, rank: &Rank) {
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
    fn assert_near(&self) {
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
            assert_sum_close(&got, &exact.normed, self.dtype, exact.parts[1], &what);
            return;
        }
        let slack = 16.0 * crate::check::tolerance(self.dtype);
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

/// Shapes of all kinds: none, one and several rows for every rank; less than a granule, no whole number of them, and many.
const SHAPES: [[usize; 2]; 14] = [
    [0, 100],
    [1, 1],
    [3, 1],
    [1, 8],
    [3, 8],
    [33, 8],
    [1, 100],
    [16, 100],
    [33, 100],
    [3, 288],
    [16, 288],
    [1, 2048],
    [16, 2048],
    [3, 8192],
];

/// Every shape with one type: over the three schemes with each, in every group and with every algorithm.
fn shapes(world: &World, scheme: QScheme, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let first = world.size + NORMED.iter().position(|&s| s == scheme).unwrap();
    let cases: Vec<_> = (first..)
        .zip(SHAPES)
        .map(|(i, dims)| {
            let kind = (FLOATS[i % FLOATS.len()], scheme);
            Case::random(&mut rng, world.size, dims, kind)
        })
        .collect();
    cases.iter().for_each(Case::assert_near);
    world.run(&roomy(), move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
        cases
            .iter()
            .step_by(4)
            .for_each(|c| c.assert_composed(rank));
    });
}

/// Inputs longer than what passes at a time: pieces are whole rows, few and many.
fn in_pieces(world: &World, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let cases: Vec<_> = [[33, 100], [1, 1000], [7, 999], [500, 8]]
        .map(|dims| {
            let kind = (FLOATS[dims[0] % 3], NORMED[dims[1] % 3]);
            Case::random(&mut rng, world.size, dims, kind)
        })
        .into();
    let small = CommConfig {
        all_reduce_bytes: 4000 * 2 * world.size,
        scratch_bytes: 8192,
        ..config()
    };
    world.run(&small, move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}

/// The same bits on all ranks, from all algorithms, in every repeat.
fn same_bits(world: &World) {
    const REPEATS: usize = 50;
    let mut rng = world.rng();
    let choices = algorithms(world.backend.engines());
    let cases: Vec<_> = (0..9)
        .map(|i| {
            let dims = [rng.random_range(1..20), rng.random_range(1..300)];
            Case::random(&mut rng, world.size, dims, (FLOATS[i % 3], NORMED[i / 3]))
        })
        .collect();
    world.run(&config(), move |rank| {
        for repeat in 0..REPEATS {
            for (_, choice) in &choices {
                cases[repeat % cases.len()].run(rank, *choice);
            }
        }
        rank.assert_shared(&cases[0].want.concat(), "all-reduce with a norm");
    });
}

/// Ranks may add residuals of their own: each gets its own result.
fn own_residuals(world: &World) {
    let mut rng = world.rng();
    let choices = algorithms(world.backend.engines());
    let kind = (DataType::BF16, QScheme::None);
    let first = Case::random(&mut rng, world.size, [9, 72], kind);
    let cases: Vec<_> = (0..world.size)
        .map(|_| {
            let residual = Case::random(&mut rng, world.size, [9, 72], kind).residual;
            let mut case = Case {
                residual,
                ..first.clone()
            };
            case.want = case.after(&case.reduced());
            case
        })
        .collect();
    world.run(&config(), move |rank| {
        for (_, choice) in &choices {
            cases[rank.rank].run(rank, *choice);
        }
    });
}

/// A row that is too long for the buffers is not pushed: forced it is refused with a reason, and the plan pulls.
fn long_rows(world: &World) {
    let mut rng = world.rng();
    let choices = crate::all_reduce::pushing(world.backend.engines());
    let kind = (DataType::F32, QScheme::None);
    let case = Case::random(&mut rng, world.size, [3, 1000], kind);
    let small = CommConfig {
        all_reduce_bytes: 3999,
        ..config()
    };
    world.run(&small, move |rank| {
        for (name, choice) in &choices {
            let refused = case.upload(rank, Some(*choice)).call(rank);
            assert_eq!(expect_unsupported(refused, name), reason::SCRATCH);
        }
        case.run(rank, None);
    });
}

/// A captured call gives the results of what its inputs hold at each replay.
fn captured(world: &World, choice: Option<AllReduceAlgorithm>) {
    const REPLAYS: usize = 60;
    let mut rng = world.rng();
    let days: Vec<Vec<_>> = NORMED
        .map(|scheme| {
            let kind = (FLOATS[rng.random_range(0..3)], scheme);
            let first = Case::random(&mut rng, world.size, [5, 100], kind);
            let mut day = |_| Case {
                in_place: false,
                weight: first.weight.clone(),
                ..Case::random(&mut rng, world.size, [5, 100], kind)
            };
            (0..5).map(&mut day).collect()
        })
        .into_iter()
        .map(|days: Vec<Case>| {
            let with_want = |mut case: Case| {
                case.want = case.after(&case.reduced());
                case
            };
            days.into_iter().map(with_want).collect()
        })
        .collect();
    world.run(&config(), move |rank| {
        let (on, device) = (&rank.stream, &rank.device);
        for days in &days {
            days[0].run(rank, choice);
            let mut held = days[0].upload(rank, choice);
            let work = &mut || held.call(rank).map(drop);
            let graph = device.capture(on, work).unwrap();
            rank.meet();
            for day in days.iter().cycle().take(REPLAYS) {
                let inputs = [
                    (&mut held.from, &day.inputs[rank.rank]),
                    (&mut held.residual, &day.residual),
                ];
                for (buffer, bytes) in inputs {
                    device.write(on, buffer.view_mut(), bytes).unwrap();
                }
                for out in [&mut held.sum, &mut held.values, &mut held.scales] {
                    device.fill(on, out.view_mut(), 0xFF).unwrap();
                }
                graph
                    .launch(on)
                    .unwrap()
                    .sync(crate::faults::AMPLE)
                    .unwrap();
                day.assert_want(&held.outputs(rank), "a replay");
            }
        }
    });
}

/// What is wrong is refused with its field, and the communicator goes on.
fn refusals(world: &World) {
    let mut rng = world.rng();
    let [plain, int8, fp8] = NORMED.map(|scheme| {
        let kind = (DataType::BF16, scheme);
        Case {
            in_place: false,
            ..Case::random(&mut rng, world.size, [4, 16], kind)
        }
    });
    world.run(&config(), move |rank| {
        let make = |dtype, dims: &[usize]| rank.poisoned(dtype, dims);
        type Change<'a> = &'a dyn Fn(&mut Arguments);
        let refused = |case: &Case, field: &str, change: Change<'_>| {
            let mut arguments = case.upload(rank, None);
            change(&mut arguments);
            assert_eq!(expect_invalid(arguments.call(rank), field), field);
        };
        let (bf16, f32) = (DataType::BF16, DataType::F32);
        refused(&plain, "from.dtype", &|a| {
            a.from = make(DataType::I32, &[4, 16])
        });
        refused(&plain, "from.shape", &|a| a.from = make(bf16, &[64]));
        refused(&plain, "from.shape", &|a| a.from = make(bf16, &[4, 0]));
        refused(&plain, "residual", &|a| a.residual = make(f32, &[4, 16]));
        refused(&plain, "residual", &|a| a.residual = make(bf16, &[5, 16]));
        refused(&plain, "weight", &|a| a.weight = make(f32, &[16]));
        refused(&plain, "weight", &|a| a.weight = make(bf16, &[1, 16]));
        refused(&plain, "sum", &|a| a.sum = make(f32, &[4, 16]));
        refused(&plain, "sum", &|a| a.sum = make(bf16, &[16, 4]));
        refused(&plain, "normed", &|a| a.values = make(f32, &[4, 16]));
        refused(&plain, "normed", &|a| a.values = make(bf16, &[4, 15]));
        refused(&int8, "normed", &|a| {
            a.values = make(DataType::U8, &[4, 16])
        });
        refused(&int8, "normed.scales", &|a| a.scales = make(bf16, &[4]));
        refused(&int8, "normed.scales", &|a| a.scales = make(f32, &[4, 1]));
        refused(&fp8, "normed", &|a| a.values = make(DataType::I8, &[4, 16]));
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            refused(&fp8, "normed.scale", &|a| a.scale = scale);
        }
        for eps in [-1e-9, f32::NAN, f32::INFINITY] {
            refused(&plain, "eps", &|a| a.eps = eps);
        }
        // Rows that overlap: those of the residual by a part, and all others at all.
        let (upper, lower) = (|b: &Buffer| b.slice(0, 4), |b: &Buffer| b.slice(1, 4));
        let five = || make(bf16, &[5, 16]);
        refused(&plain, "sum", &|a| {
            let all = five();
            (a.residual, a.sum) = (upper(&all).unwrap(), lower(&all).unwrap());
        });
        refused(&plain, "sum", &|a| a.sum = a.from.clone());
        refused(&plain, "normed", &|a| a.values = a.from.clone());
        refused(&plain, "normed", &|a| a.values = a.residual.clone());
        refused(&plain, "normed", &|a| a.values = a.sum.clone());
        refused(&plain, "normed", &|a| {
            let all = five();
            a.values = upper(&all).unwrap();
            a.weight = all.index(3).unwrap();
        });
        // An order of sums that is somebody else's is never promised.
        let mut forced = plain.upload(rank, Some(AllReduceAlgorithm::Nccl));
        let code = expect_unsupported(forced.call(rank), "Nccl");
        assert_eq!(code, reason::NO_ENGINE);
        plain.run(rank, None);
        int8.run(rank, None);
        fp8.run(rank, None);
    });
}

/// Adds the contracts, where the device has the operation.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().norms {
        return;
    }
    for (name, choice) in algorithms(suite.backend().engines()) {
        for scheme in NORMED {
            let trial = format!("all_reduce_norm/{name}/{scheme:?}").to_lowercase();
            suite.add(&trial, move |world| shapes(world, scheme, choice));
        }
        suite.add(&format!("all_reduce_norm/{name}/in_pieces"), move |world| {
            in_pieces(world, choice);
        });
        suite.add(&format!("all_reduce_norm/{name}/captured"), move |world| {
            captured(world, choice);
        });
        let trial = format!("all_reduce_norm/{name}/special_values");
        suite.add(&trial, move |world| special::values(world, choice));
    }
    suite.add("all_reduce_norm/same_bits", same_bits);
    suite.add("all_reduce_norm/own_residuals", own_residuals);
    suite.add("all_reduce_norm/refusals", refusals);
    suite.add_from(2, "all_reduce_norm/long_rows", long_rows);
}
