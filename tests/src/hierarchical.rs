//! Collectives across machines: the bits of a reduction inside each machine and one across them, whatever the path and the slices.

mod calls;
mod costs;
pub mod experts;
mod faults;
#[cfg(target_os = "linux")]
mod killed;
mod lengths;
mod life;
mod rails;

#[cfg(target_os = "linux")]
pub use killed::add as add_killed;

use crate::{
    all_reduce::{OPS, uneven},
    backend::Rank,
    check::{assert_bits, expect_invalid},
    faults::AMPLE,
    layer::FLOATS,
    matrix::{to_bytes, to_f32},
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherParams, Buffer, ByPath, CommConfig, DataType, HierarchicalAllReduceParams,
    HierarchicalPath, HierarchicalPlan, Hierarchy, HierarchyConfig, ParallelMode, Phase, ReduceOp,
    ReduceScatterParams, Result, SumOrder,
};
use brigade_plan::reason;
use calls::{Made, What, make};
use rand::{Rng, rngs::StdRng};
use std::borrow::Cow;

/// Machines, and ranks of each.
pub const SHAPES: [(usize, usize); 9] = [
    (1, 1),
    (2, 1),
    (1, 4),
    (2, 2),
    (4, 1),
    (3, 2),
    (2, 4),
    (4, 2),
    (4, 4),
];

/// What a hierarchy is tried with: little scratch memory, so that slices go through it in pieces.
pub fn config() -> HierarchyConfig {
    let mut config = HierarchyConfig::new(ParallelMode::Tp);
    config.comm.scratch_bytes = 16 << 10;
    config.staging_bytes = 4 << 20;
    config
}

/// The group of all ranks, of which hierarchies are made.
fn all_ranks() -> CommConfig {
    config().comm
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    OverInput,
    Beside,
    Widened,
}

/// Inputs of all ranks, and what every rank must get.
#[derive(Clone)]
pub struct Case {
    dtype: DataType,
    op: ReduceOp,
    place: Place,
    /// What each rank's input is, over and over where it is shorter.
    inputs: Vec<Vec<u8>>,
    /// Elements of an input.
    len: usize,
    want: Vec<u8>,
}

impl Case {
    /// Values whose reduction depends on its order.
    fn random(
        rng: &mut StdRng,
        (machines, ranks): (usize, usize),
        len: usize,
        (dtype, op, place): (DataType, ReduceOp, Place),
    ) -> Self {
        let stored = |_| -> Vec<u8> {
            let values: Vec<f64> = (0..len).map(|_| f64::from(uneven(rng))).collect();
            to_bytes(dtype, &values)
        };
        let inputs: Vec<Vec<u8>> = (0..machines * ranks).map(stored).collect();
        let values: Vec<_> = inputs.iter().map(|x| to_f32(dtype, x)).collect();
        let mut case = Self {
            dtype,
            op,
            place,
            want: Vec::new(),
            inputs,
            len,
        };
        case.want = oracle::reduce_by_machine(op, &values, ranks, case.output());
        case
    }

    /// The same over and over, to this length, which takes no more numbers and no more sums.
    fn repeated(mut self, len: usize) -> Self {
        self.want = over_and_over(&self.want, len * self.output().bytes()).into_owned();
        self.len = len;
        self
    }

    /// A rank's input.
    fn input(&self, rank: usize) -> Cow<'_, [u8]> {
        over_and_over(&self.inputs[rank], self.len * self.dtype.bytes())
    }

    /// A sum of floats, into memory of its own.
    pub fn sum(rng: &mut StdRng, shape: (usize, usize), len: usize) -> Self {
        Self::random(
            rng,
            shape,
            len,
            (DataType::F32, ReduceOp::Sum, Place::Beside),
        )
    }

    fn output(&self) -> DataType {
        match self.place {
            Place::Widened => DataType::F32,
            _ => self.dtype,
        }
    }

    /// The same in other bits: what a flat order would give.
    fn flat(&self) -> Vec<u8> {
        let values: Vec<_> = self.inputs.iter().map(|x| to_f32(self.dtype, x)).collect();
        oracle::reduce(self.op, &values, self.output())
    }

    /// Makes the call. Gives its input and output, too.
    pub fn call(
        &self,
        rank: &Rank,
        over: &Hierarchy,
        choice: Option<HierarchicalPath>,
    ) -> (Result<HierarchicalPlan>, Buffer, Buffer) {
        let dims = [self.len];
        let from = rank.upload_bytes(self.dtype, &dims, &self.input(rank.rank));
        let beside = (self.place != Place::OverInput).then(|| rank.poisoned(self.output(), &dims));
        let mut out = beside.unwrap_or_else(|| from.clone());
        let made = Made {
            what: What::AllReduce,
            op: self.op,
            choice,
            rows: &[],
        };
        let input = (self.place != Place::OverInput).then_some(&from);
        let plan = make(rank, over, made, (input, &mut out));
        (settled(rank, over, plan), from, out)
    }

    /// Makes the call, and asserts its bits.
    pub fn run(
        &self,
        rank: &Rank,
        over: &Hierarchy,
        choice: Option<HierarchicalPath>,
    ) -> HierarchicalPlan {
        let (plan, from, out) = self.call(rank, over, choice);
        let what = format!(
            "{} {:?} of {} x {}, {:?}, {choice:?}: {plan:?}",
            over.machines(),
            self.op,
            from.shape().len(),
            self.dtype,
            self.place,
        );
        let plan = plan.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_bits(&rank.raw(out.view()), &self.want, self.output(), &what);
        if self.place != Place::OverInput {
            let mine = self.input(rank.rank);
            assert_bits(&rank.raw(from.view()), &mine, self.dtype, "input kept");
        }
        let ranks = over.machines().ranks() as u16;
        let order = match over.machines().count() {
            1 => SumOrder::Flat,
            _ => SumOrder::ByMachine { ranks },
        };
        assert_eq!(plan.order(), Some(order), "{what}");
        assert_taken(&plan, choice);
        plan
    }
}

fn over_and_over(bytes: &[u8], len: usize) -> Cow<'_, [u8]> {
    if len == bytes.len() {
        return Cow::Borrowed(bytes);
    }
    let mut all = bytes.repeat(len.div_ceil(bytes.len()));
    all.truncate(len);
    Cow::Owned(all)
}

const LENGTHS: [usize; 5] = [0, 1, 7, 1023, 20_011];

/// Ways to go, all of which give the same bits.
const CHOICES: [Option<HierarchicalPath>; 6] = [
    None,
    Some(HierarchicalPath::Whole),
    Some(HierarchicalPath::Slices { count: 1 }),
    Some(HierarchicalPath::Slices { count: 9 }),
    Some(HierarchicalPath::OneShot { count: 1 }),
    Some(HierarchicalPath::OneShot { count: 7 }),
];

/// A path that was forced was taken; where there is one machine, the plan says that there is none.
fn assert_taken(plan: &HierarchicalPlan, choice: Option<HierarchicalPath>) {
    let as_asked = match (plan, choice) {
        (HierarchicalPlan::Inside { instead_of, .. }, _) => {
            let why = instead_of.as_ref().map(|reason| reason.code);
            why == choice.map(|_| reason::ONE_MACHINE)
        }
        (_, None) => true,
        (HierarchicalPlan::Whole { .. }, Some(path)) => path == HierarchicalPath::Whole,
        (HierarchicalPlan::Slices(p), Some(path)) => {
            let has = |phase| p.phases.contains(&phase);
            // Of other operations, what has one shot is the same as slices.
            let is_all_reduce = has(Phase::Diffuse) && has(Phase::Add);
            match path {
                HierarchicalPath::Whole => false,
                HierarchicalPath::Slices { .. } => !is_all_reduce || has(Phase::Collect),
                HierarchicalPath::OneShot { .. } => !is_all_reduce || !has(Phase::Collect),
            }
        }
    };
    assert!(as_asked, "{plan} for {choice:?}");
}

/// Every operation, of every type, at every length; ways and places in turn.
fn sums(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let places = [Place::OverInput, Place::Beside, Place::Widened];
    let mut cases = Vec::new();
    for op in OPS {
        for dtype in FLOATS {
            for len in LENGTHS {
                let place = places[cases.len() % places.len()];
                let choice = CHOICES[rng.random_range(0..CHOICES.len())];
                let case = Case::random(&mut rng, shape, len, (dtype, op, place));
                cases.push((case, choice));
            }
        }
    }
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        for (case, choice) in &cases {
            case.run(rank, &over, *choice);
        }
    });
}

/// The same bits on all ranks, on all paths, in every number of slices and slots, in every repeat; and other bits than those of a flat
/// order, which the data would show.
fn same_bits(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let kind = (DataType::BF16, ReduceOp::Sum, Place::Beside);
    let case = Case::random(&mut rng, shape, 5001, kind);
    assert!(shape.0 == 1 || shape.1 == 1 || case.flat() != case.want);
    world.run(&all_ranks(), move |rank| {
        for parallelism in [None, Some(1), Some(2), Some(3)] {
            let config = HierarchyConfig {
                parallelism,
                ..config()
            };
            let over = rank.join_machines(shape.0, &config);
            let counts = [1, 2, 3, 5, 8, 64].into_iter();
            let slices = counts
                .clone()
                .map(|count| (count, HierarchicalPath::Slices { count }));
            let one_shot = counts.map(|count| (count, HierarchicalPath::OneShot { count }));
            for (count, path) in slices.chain(one_shot) {
                let choice = Some(path);
                let plan = case.run(rank, &over, choice);
                if let HierarchicalPlan::Slices(p) = plan {
                    // Of so few elements not every number of slices can be made.
                    let made = p.slices == count as usize;
                    assert!(made || count == 64 && p.slices > 32, "{p:?}");
                    assert!(parallelism.is_none_or(|n| p.slots <= n.into()), "{p:?}");
                    assert!(p.slots > 1 || count == 1 || parallelism == Some(1), "{p:?}");
                }
            }
            for choice in [None, Some(HierarchicalPath::Whole), None] {
                case.run(rank, &over, choice);
            }
        }
        rank.assert_shared(&case.want, "sums across machines");
    });
}

/// Ragged rows, none on some ranks: every rank gets its own of the reduction.
fn reduce_scatters(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = Vec::new();
    for op in OPS {
        for dtype in FLOATS {
            for place in [Place::Beside, Place::Widened] {
                let rows: Vec<usize> = (0..size).map(|_| rng.random_range(0..9)).collect();
                let columns = rng.random_range(1..300);
                let len = rows.iter().sum::<usize>() * columns;
                let case = Case::random(&mut rng, shape, len, (dtype, op, place));
                let choice = CHOICES[rng.random_range(0..CHOICES.len())];
                cases.push((case, rows, columns, choice));
            }
        }
    }
    world.run(&all_ranks(), move |rank| {
        let run = |over: &Hierarchy, which: usize| {
            let of_it = |i: usize| (i + i / 2) % 2 == which;
            let cases = cases.iter().enumerate().filter(|(i, _)| of_it(*i));
            for (_, (case, rows, columns, choice)) in cases {
                let (me, choice) = (rank.rank, *choice);
                let dims = [rows.iter().sum(), *columns];
                let from = rank.upload_bytes(case.dtype, &dims, &case.input(me));
                let mut to = rank.poisoned(case.output(), &[rows[me], *columns]);
                let plan = over
                    .lease(&rank.stream)
                    .unwrap()
                    .reduce_scatter(ByPath {
                        params: ReduceScatterParams {
                            from: from.view(),
                            rows_per_rank: rows,
                            to: to.view_mut(),
                            op: case.op,
                        },
                        choice,
                    })
                    .unwrap();
                assert_taken(&plan, choice);
                let row = columns * case.output().bytes();
                let first = rows[..me].iter().sum::<usize>() * row;
                let want = &case.want[first..first + rows[me] * row];
                let what = format!(
                    "{:?} of {rows:?} x {columns} {}: {plan}",
                    case.op, case.dtype
                );
                assert_bits(&rank.raw(to.view()), want, case.output(), &what);
                let input = case.input(me);
                assert_bits(&rank.raw(from.view()), &input, case.dtype, "input kept");
            }
        };
        // One after the other: where many ranks share a GPU, there is no room for both.
        for (which, slice_bytes) in [None, Some(1000)].into_iter().enumerate() {
            let config = HierarchyConfig {
                slice_bytes,
                ..config()
            };
            run(&rank.join_machines(shape.0, &config), which);
        }
    });
}

/// Ragged rows of any type: every rank gets all.
fn all_gathers(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let mut cases = Vec::new();
    for dtype in [DataType::I8, DataType::BF16, DataType::F32, DataType::I64] {
        for most in [1, 9, 400] {
            let rows: Vec<usize> = (0..world.size)
                .map(|_| rng.random_range(0..=most))
                .collect();
            let columns = rng.random_range(1..20);
            let row = columns * dtype.bytes();
            let draw = |&n: &usize| (0..n * row).map(|_| rng.random()).collect::<Vec<u8>>();
            let parts: Vec<Vec<u8>> = rows.iter().map(draw).collect();
            let choice = CHOICES[cases.len() % CHOICES.len()];
            cases.push((dtype, rows, columns, parts, choice));
        }
    }
    world.run(&all_ranks(), move |rank| {
        let small = HierarchyConfig {
            slice_bytes: Some(2000),
            ..config()
        };
        for config in [config(), small] {
            let over = rank.join_machines(shape.0, &config);
            for (dtype, rows, columns, parts, choice) in &cases {
                let choice = *choice;
                let mine = &parts[rank.rank];
                let from = rank.upload_bytes(*dtype, &[rows[rank.rank], *columns], mine);
                let mut to = rank.poisoned(*dtype, &[rows.iter().sum(), *columns]);
                let mut lease = over.lease(&rank.stream).unwrap();
                let plan = lease.all_gather(ByPath {
                    params: AllGatherParams {
                        from: from.view(),
                        rows_per_rank: rows,
                        to: to.view_mut(),
                    },
                    choice,
                });
                let what = format!("{rows:?} x {columns} {dtype}, {choice:?}: {plan:?}");
                let plan = plan.unwrap();
                assert_taken(&plan, choice);
                assert_eq!(plan.order(), None, "{what}");
                assert_bits(&rank.raw(to.view()), &parts.concat(), *dtype, &what);
            }
        }
    });
}

/// What cannot be is refused with the field, and the hierarchy goes on.
fn refusals(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 100);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        let call = |dtype, len, choice| {
            let mut data = rank.poisoned(dtype, &[8]);
            let from = rank.poisoned(DataType::F32, &[len]);
            over.lease(&rank.stream)?
                .all_reduce(HierarchicalAllReduceParams {
                    data: data.view_mut(),
                    from: Some(from.view()),
                    op: ReduceOp::Sum,
                    choice,
                })
        };
        assert_eq!(
            expect_invalid(call(DataType::F32, 9, None), "length"),
            "from.shape"
        );
        assert_eq!(
            expect_invalid(call(DataType::F16, 8, None), "narrowed"),
            "data"
        );
        let none = Some(HierarchicalPath::Slices { count: 0 });
        assert_eq!(
            expect_invalid(call(DataType::F32, 8, none), "no slices"),
            "choice"
        );
        let rows = vec![2; rank.size];
        let all = rank.poisoned(DataType::F32, &[2 * rank.size]);
        let own = || rank.poisoned(DataType::F32, &[2]);
        let mut lease = over.lease(&rank.stream).unwrap();
        let scattered = lease.reduce_scatter(ByPath {
            params: ReduceScatterParams {
                from: all.view(),
                rows_per_rank: &rows,
                to: own().view_mut(),
                op: ReduceOp::Sum,
            },
            choice: none,
        });
        assert_eq!(expect_invalid(scattered, "scattered in none"), "choice");
        let gathered = lease.all_gather(ByPath {
            params: AllGatherParams {
                from: own().view(),
                rows_per_rank: &rows,
                to: all.clone().view_mut(),
            },
            choice: none,
        });
        assert_eq!(expect_invalid(gathered, "gathered in none"), "choice");
        drop(lease);
        case.run(rank, &over, None);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    type Contract = fn(&World, (usize, usize));
    let contracts: [(&str, Contract); 5] = [
        ("sums", sums),
        ("same_bits", same_bits),
        ("reduce_scatters", reduce_scatters),
        ("all_gathers", all_gathers),
        ("refusals", refusals),
    ];
    for shape in SHAPES {
        for (name, contract) in contracts {
            at(suite, shape, name, contract);
        }
    }
    experts::add(suite);
    faults::add(suite);
    lengths::add(suite);
    life::add(suite);
    if suite.backend().slows_rails() {
        costs::add(suite);
        rails::add(suite);
    }
}

/// A contract for these machines.
fn at(
    suite: &mut Suite,
    shape: (usize, usize),
    name: &str,
    contract: impl Fn(&World, (usize, usize)) + Send + 'static,
) {
    let (machines, ranks) = shape;
    let name = format!("hierarchical/{machines}x{ranks}/{name}");
    suite.add_across(shape, &name, move |world| contract(world, shape));
}

/// How a call ended, on devices that work later too.
fn settled<R>(rank: &Rank, over: &Hierarchy, result: Result<R>) -> Result<R> {
    let done = result?;
    rank.stream.sync(AMPLE)?;
    over.check()?;
    Ok(done)
}
