//! All-reduce: every rank gets the reduction in rank order, bit for bit, whatever the algorithm.

mod foreign;
mod integers;
mod pushed;
mod values;

pub(crate) use values::SPECIAL;

use crate::{
    backend::Rank,
    check::{assert_bits, expect_invalid, expect_unsupported},
    gather_linear::config,
    layer::FLOATS,
    matrix::{to_bytes, to_f32},
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceParams, Buffer, Call, CommConfig, DataType, Plan, ReduceOp,
    Result, SumOrder,
};
use brigade_plan::{Engines, reason};
use rand::{Rng, rngs::StdRng};

/// All reductions.
pub const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];

/// The algorithms that a device has and whose sums are Brigade's, with names; `None` leaves it to the plan.
pub fn algorithms(engines: Engines) -> Vec<(&'static str, Option<AllReduceAlgorithm>)> {
    [
        ("one_shot_push", Some(AllReduceAlgorithm::OneShotPush)),
        ("one_shot_pull", Some(AllReduceAlgorithm::OneShotPull)),
        ("two_shot", Some(AllReduceAlgorithm::TwoShot)),
        ("two_shot_push", Some(AllReduceAlgorithm::TwoShotPush)),
        ("auto", None),
    ]
    .into_iter()
    .filter(|(_, a)| a.is_none_or(|a| engines.reduces(a)))
    .collect()
}

/// Those of them that push.
pub fn pushing(engines: Engines) -> Vec<(&'static str, AllReduceAlgorithm)> {
    use AllReduceAlgorithm::{OneShotPush, TwoShotPush};
    let pushes = |a: &AllReduceAlgorithm| matches!(a, OneShotPush | TwoShotPush);
    algorithms(engines)
        .into_iter()
        .filter_map(|(name, a)| Some((name, a.filter(pushes)?)))
        .collect()
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Over the input.
    OverInput,
    /// Into a buffer of the input's type.
    Beside,
    /// Into a buffer of f32.
    Widened,
}

/// Some elements of a buffer, which is poisoned all over.
#[derive(Clone)]
pub struct Part {
    whole: Buffer,
    /// Those elements.
    pub part: Buffer,
    before: usize,
}

impl Part {
    /// So many elements, and others before them; and some behind, if there are any before.
    fn poisoned(rank: &Rank, dtype: DataType, len: usize, before: usize) -> Self {
        let behind = before.min(3);
        let whole = rank.poisoned(dtype, &[before + len + behind]);
        let part = whole.slice(before, len).unwrap();
        Self {
            whole,
            part,
            before,
        }
    }

    /// Nothing was written around them.
    fn assert_alone(&self, rank: &Rank, what: &str) {
        if self.before == 0 {
            return;
        }
        let all = rank.raw(self.whole.view());
        let start = self.before * self.whole.dtype().bytes();
        let (before, from) = all.split_at(start);
        let mut around = before.iter().chain(&from[self.part.bytes()..]);
        assert!(
            around.all(|&b| b == 0xFF),
            "{what}: written around the view"
        );
    }
}

/// Inputs of all ranks, and what every rank must get.
pub struct Case {
    /// Type of the inputs.
    pub dtype: DataType,
    /// How they are combined.
    pub op: ReduceOp,
    place: Place,
    /// Elements before the input and before the result in their buffers.
    before: [usize; 2],
    /// Every rank's input, as it is stored.
    inputs: Vec<Vec<u8>>,
    /// What every rank must get.
    pub want: Vec<u8>,
}

impl Case {
    /// A case with these values, rounded to the type.
    pub fn new(dtype: DataType, op: ReduceOp, place: Place, inputs: Vec<Vec<f32>>) -> Self {
        let stored = |values: Vec<f32>| {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            to_bytes(dtype, &values)
        };
        Self::stored(dtype, op, place, inputs.into_iter().map(stored).collect())
    }

    /// A case with these bits.
    pub fn stored(dtype: DataType, op: ReduceOp, place: Place, inputs: Vec<Vec<u8>>) -> Self {
        let values: Vec<_> = inputs.iter().map(|x| to_f32(dtype, x)).collect();
        let mut case = Self {
            dtype,
            op,
            place,
            before: [0; 2],
            want: vec![],
            inputs,
        };
        case.want = oracle::reduce(op, &values, case.output());
        case
    }

    /// A case with random values whose sums depend on their order.
    pub fn random(
        rng: &mut StdRng,
        size: usize,
        len: usize,
        kind: (DataType, ReduceOp, Place),
    ) -> Self {
        let values = |_| (0..len).map(|_| uneven(rng)).collect();
        let inputs = (0..size).map(values).collect();
        Self::new(kind.0, kind.1, kind.2, inputs)
    }

    /// The same of views that begin so many elements behind the beginning of their buffers.
    pub fn amid(self, before: [usize; 2]) -> Self {
        Self { before, ..self }
    }

    /// A rank's input, as it is stored.
    pub fn input(&self, rank: usize) -> Vec<u8> {
        self.inputs[rank].clone()
    }

    /// Type of the result.
    pub fn output(&self) -> DataType {
        match self.place {
            Place::Widened => DataType::F32,
            _ => self.dtype,
        }
    }

    /// The input of a rank, and where its result goes, if that is not over it.
    pub fn parts(&self, rank: &Rank) -> (Part, Option<Part>) {
        let mine = &self.inputs[rank.rank];
        let len = mine.len() / self.dtype.bytes();
        let mut from = Part::poisoned(rank, self.dtype, len, self.before[0]);
        let write = rank.device.write(&rank.stream, from.part.view_mut(), mine);
        write.unwrap();
        let beside = self.place != Place::OverInput;
        let to = beside.then(|| Part::poisoned(rank, self.output(), len, self.before[1]));
        (from, to)
    }

    /// Makes the call. Gives its input and its output, too.
    fn call(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) -> (Result<Plan>, Part, Part) {
        let (from, beside) = self.parts(rank);
        let mut out = beside.unwrap_or_else(|| from.clone());
        let lease = rank.comm().lease(&rank.stream);
        let plan = lease.and_then(|mut lease| {
            lease.all_reduce(AllReduceParams {
                data: out.part.view_mut(),
                from: (self.place != Place::OverInput).then(|| from.part.view()),
                op: self.op,
                choice,
            })
        });
        (plan, from, out)
    }

    /// Makes the call, whatever comes of it.
    ///
    /// # Errors
    /// As the call, and as waiting for it.
    pub fn try_run(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) -> Result<()> {
        let (plan, ..) = self.call(rank, choice);
        rank.settle(plan.map(drop))
    }

    /// Makes the call, and asserts its bits. Gives the algorithm that ran.
    pub fn run(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) -> AllReduceAlgorithm {
        let what = format!(
            "{choice:?} {:?} of {} x {}, {:?} behind {:?}",
            self.op,
            self.inputs[0].len() / self.dtype.bytes(),
            self.dtype,
            self.place,
            self.before
        );
        let mine = self.input(rank.rank);
        let (plan, from, out) = self.call(rank, choice);
        let plan = plan.unwrap();
        let call = Call::AllReduce {
            elements: from.part.shape().len(),
            dtype: self.dtype,
            output: self.output(),
            op: self.op,
            choice,
        };
        assert_eq!(plan, rank.comm().explain(&call).unwrap(), "{what}");
        // A fault rather than what it poisons.
        rank.settle(Ok(())).unwrap();
        assert_bits(&rank.raw(out.part.view()), &self.want, self.output(), &what);
        if self.place != Place::OverInput {
            assert_bits(&rank.raw(from.part.view()), &mine, self.dtype, "input kept");
        }
        for part in [from, out] {
            part.assert_alone(rank, &what);
        }
        let Plan::AllReduce {
            algorithm, order, ..
        } = plan
        else {
            panic!("{what}: {plan:?}");
        };
        assert_eq!(order, SumOrder::Flat, "{what}");
        assert!(
            choice.is_none_or(|c| c == algorithm),
            "{what}: {algorithm:?} ran"
        );
        algorithm
    }
}

/// A value of a magnitude between 1/64 and 64: sums of such lose bits.
pub fn uneven(rng: &mut StdRng) -> f32 {
    let magnitude = rng.random_range(0.5f32..1.0) * 2f32.powi(rng.random_range(-5..=6));
    if rng.random() { magnitude } else { -magnitude }
}

const LENGTHS: [usize; 6] = [0, 1, 7, 1023, 4096, 100_003];

/// Sums of all types at every length. The other operations differ from them in one instruction: each length is of one type,
/// and over lengths, operations and group sizes all types meet all lengths.
fn lengths(world: &World, op: ReduceOp, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for (t, dtype) in FLOATS.into_iter().enumerate() {
        for (l, len) in LENGTHS.into_iter().enumerate() {
            let turn = t + l + op as usize + world.size;
            if op != ReduceOp::Sum && !turn.is_multiple_of(FLOATS.len()) {
                continue;
            }
            cases.push(Case::random(
                &mut rng,
                world.size,
                len,
                (dtype, op, Place::OverInput),
            ));
            if len < 5000 {
                cases.push(Case::random(
                    &mut rng,
                    world.size,
                    len,
                    (dtype, op, Place::Beside),
                ));
                cases.push(Case::random(
                    &mut rng,
                    world.size,
                    len,
                    (dtype, op, Place::Widened),
                ));
            }
        }
    }
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}

/// The same bits on all ranks, from all algorithms, in every repeat.
fn same_bits(world: &World) {
    const REPEATS: usize = 1000;
    let mut rng = world.rng();
    let choices = algorithms(world.backend.engines());
    let cases: Vec<_> = (0..5)
        .map(|i| {
            let len = rng.random_range(1..600);
            let kind = (FLOATS[i % 3], ReduceOp::Sum, Place::Beside);
            Case::random(&mut rng, world.size, len, kind)
        })
        .collect();
    world.run(&config(), move |rank| {
        for repeat in 0..REPEATS {
            for (_, choice) in &choices {
                cases[repeat % cases.len()].run(rank, *choice);
            }
        }
        rank.assert_shared(&cases[0].want, "all-reduce");
    });
}

/// Views that begin anywhere in their buffers, short ones and such as go in pieces, of which input and result begin elsewhere within a
/// granule.
fn odd_offsets(world: &World, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for dtype in FLOATS {
        for place in [Place::OverInput, Place::Beside, Place::Widened] {
            for len in [1, 37, 3000] {
                let before = [0; 2].map(|_| rng.random_range(1..9));
                let kind = (dtype, ReduceOp::Sum, place);
                cases.push(Case::random(&mut rng, world.size, len, kind).amid(before));
            }
        }
    }
    let small = CommConfig {
        all_reduce_bytes: 4000,
        scratch_bytes: 4096,
        ..config()
    };
    world.run(&small, move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}

/// What cannot be reduced is refused with the field or the reason, and the communicator goes on.
fn refusals(world: &World) {
    let engines = world.backend.engines();
    let mut rng = world.rng();
    let kind = (DataType::F32, ReduceOp::Sum, Place::Beside);
    let case = Case::random(&mut rng, world.size, 33, kind);
    world.run(&config(), move |rank| {
        let call = |dtype, from_dtype, from_len, choice| {
            let mut data = rank.poisoned(dtype, &[8]);
            let from = rank.poisoned(from_dtype, &[from_len]);
            rank.lease().all_reduce(AllReduceParams {
                data: data.view_mut(),
                from: Some(from.view()),
                op: ReduceOp::Sum,
                choice,
            })
        };
        let f32 = DataType::F32;
        let invalid = expect_invalid(call(f32, f32, 9, None), "lengths");
        assert_eq!(invalid, "from.shape");
        expect_invalid(call(DataType::I32, DataType::I32, 8, None), "integers");
        expect_invalid(call(DataType::F16, f32, 8, None), "narrowed");
        for algorithm in [AllReduceAlgorithm::OneShotPush, AllReduceAlgorithm::Nccl] {
            if !engines.reduces(algorithm) {
                let code = expect_unsupported(call(f32, f32, 8, Some(algorithm)), "no engine");
                assert_eq!(code, reason::NO_ENGINE);
            }
        }
        case.run(rank, None);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for (name, choice) in algorithms(suite.backend().engines()) {
        for op in OPS {
            let trial = format!("all_reduce/{name}/{op:?}").to_lowercase();
            suite.add(&trial, move |world| lengths(world, op, choice));
        }
        suite.add(&format!("all_reduce/{name}/odd_offsets"), move |world| {
            odd_offsets(world, choice);
        });
        suite.add(&format!("all_reduce/{name}/exact_integers"), move |world| {
            integers::exact(world, choice);
        });
        if suite.backend().reduces_millions() {
            suite.add(&format!("all_reduce/{name}/long_integers"), move |world| {
                integers::long(world, choice);
            });
        }
        suite.add(&format!("all_reduce/{name}/special_values"), move |world| {
            values::special_values(world, choice);
        });
    }
    if suite.backend().reduces_millions() {
        suite.add("all_reduce/pushed/blocks", integers::blocks);
    }
    foreign::add(suite);
    pushed::add(suite);
    suite.add("all_reduce/same_bits", same_bits);
    suite.add("all_reduce/refusals", refusals);
}
