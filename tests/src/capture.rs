//! Graphs: what was captured once runs again and again with the data of the day, in order with eager calls and other
//! graphs.

mod quantized;
mod send_recv;
mod stopped;
mod streams;

use crate::{
    all_reduce,
    backend::Rank,
    check::{assert_bits, assert_close, assert_sum_close, expect_unsupported},
    gather_linear::{self, config},
    layer::{FLOATS, LoraKind, Spec},
    linear_reduce_scatter as twin,
    matrix::Matrix,
    suite::{Suite, World},
    themes::{modes, scatters},
};
use brigade_device::{
    AllGatherLoraLinearParams, AllReduceAlgorithm, AllReduceParams, Buffer, Chunk, CommConfig,
    DataType, LoraLinearReduceScatterParams, Output, OverlapMode, ReduceOp, Replay,
};
use rand::{Rng, rngs::StdRng};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Data of so many days.
const DAYS: usize = 7;

/// Replays of every graph.
fn replays(size: usize) -> usize {
    if size <= 4 { 1000 } else { 150 }
}

/// A captured call: its inputs can be written anew, and its output read.
struct Captured {
    graph: Box<dyn Replay>,
    input: Buffer,
    output: Buffer,
}

impl Captured {
    fn new(
        rank: &Rank,
        input: Buffer,
        output: Buffer,
        mut call: impl FnMut(&Buffer, &mut Buffer),
    ) -> Self {
        let mut target = output.clone();
        let graph = rank
            .device
            .capture(&rank.stream, &mut || {
                call(&input, &mut target);
                Ok(())
            })
            .unwrap();
        // Making a graph may wait for the GPU, and so for a peer's replay where ranks share one.
        rank.meet();
        Self {
            graph,
            input,
            output,
        }
    }

    /// Runs with this input, and gives the output.
    fn replay(&mut self, rank: &Rank, input: &[u8]) -> Vec<u8> {
        let device = &rank.device;
        // In place, the input is the output.
        device
            .fill(&rank.stream, self.output.view_mut(), 0xFF)
            .unwrap();
        device
            .write(&rank.stream, self.input.view_mut(), input)
            .unwrap();
        let end = self.graph.launch(&rank.stream).unwrap();
        end.sync(crate::faults::AMPLE).unwrap();
        rank.raw(self.output.view())
    }
}

/// The same call with the data of several days.
trait Subject: Send + Sync {
    fn capture(&self, rank: &Rank) -> Captured;
    fn input(&self, rank: usize, day: usize) -> Vec<u8>;
    fn check(&self, rank: &Rank, day: usize, output: &[u8]);
    fn eager(&self, rank: &Rank, day: usize);
}

/// Cases that differ in their activations alone.
fn days<C>(
    rng: &mut StdRng,
    spec: &Spec,
    make: impl Fn(&mut StdRng, Spec, Option<&C>) -> C,
) -> Vec<C> {
    let mut cases: Vec<C> = vec![];
    for _ in 0..DAYS {
        let next = make(rng, spec.clone(), cases.first());
        cases.push(next);
    }
    cases
}

struct Gather {
    days: Vec<gather_linear::Case>,
    choice: Option<OverlapMode>,
}

impl Subject for Gather {
    fn capture(&self, rank: &Rank) -> Captured {
        let case = &self.days[0];
        let layer = case.layers[rank.rank].upload(rank);
        let x = rank.upload(&case.x[rank.rank]);
        let dims = [case.spec.total_rows(), case.spec.n[rank.rank]];
        let d = rank.poisoned(case.spec.output, &dims);
        Captured::new(rank, x, d, |x, d| {
            let chunk = Chunk::Copy(x.into());
            let mut lease = rank.lease();
            lease
                .all_gather_lora_linear(AllGatherLoraLinearParams {
                    transpose_weight: case.spec.transpose,
                    runs: &layer.runs(),
                    output: Output::Into(d.view_mut()),
                    choice: self.choice,
                    ..AllGatherLoraLinearParams::new(chunk, &case.spec.rows, &layer.weight)
                })
                .unwrap();
        })
    }
    fn input(&self, rank: usize, day: usize) -> Vec<u8> {
        self.days[day].x[rank].bytes()
    }
    fn check(&self, rank: &Rank, day: usize, output: &[u8]) {
        let case = &self.days[day];
        let dtype = case.spec.output;
        let got = crate::matrix::to_f64(dtype, output);
        assert_close(&got, &case.want[rank.rank], dtype, "a replay");
    }
    fn eager(&self, rank: &Rank, day: usize) {
        self.days[day].run_forced(rank, self.choice);
    }
}

struct Scatter {
    days: Vec<twin::Case>,
    choice: Option<OverlapMode>,
}

impl Subject for Scatter {
    fn capture(&self, rank: &Rank) -> Captured {
        let case = &self.days[0];
        let layer = case.layers[rank.rank].upload(rank);
        let x = rank.upload(&case.x[rank.rank]);
        let d = rank.poisoned(
            case.spec.output,
            &[case.spec.rows[rank.rank], case.spec.n[0]],
        );
        Captured::new(rank, x, d, |x, d| {
            rank.lease()
                .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                    transpose_weight: case.spec.transpose,
                    runs: &layer.runs(),
                    output: Output::Into(d.view_mut()),
                    choice: self.choice,
                    ..LoraLinearReduceScatterParams::new(x, &case.spec.rows, &layer.weight)
                })
                .unwrap();
        })
    }
    fn input(&self, rank: usize, day: usize) -> Vec<u8> {
        self.days[day].x[rank].bytes()
    }
    fn check(&self, rank: &Rank, day: usize, output: &[u8]) {
        let case = &self.days[day];
        let dtype = case.spec.output;
        let got = crate::matrix::to_f64(dtype, output);
        let me = rank.rank;
        assert_sum_close(&got, &case.want[me], dtype, case.parts[me], "a replay");
    }
    fn eager(&self, rank: &Rank, day: usize) {
        self.days[day].run(rank, self.choice);
    }
}

struct Sum {
    days: Vec<all_reduce::Case>,
    choice: Option<AllReduceAlgorithm>,
}

impl Subject for Sum {
    fn capture(&self, rank: &Rank) -> Captured {
        let case = &self.days[0];
        let (from, beside) = case.parts(rank);
        let in_place = beside.is_none();
        let to = beside.unwrap_or_else(|| from.clone());
        Captured::new(rank, from.part, to.part, |from, to| {
            rank.lease()
                .all_reduce(AllReduceParams {
                    data: to.view_mut(),
                    from: (!in_place).then(|| from.view()),
                    op: case.op,
                    choice: self.choice,
                })
                .unwrap();
        })
    }
    fn input(&self, rank: usize, day: usize) -> Vec<u8> {
        self.days[day].input(rank)
    }
    fn check(&self, _rank: &Rank, day: usize, output: &[u8]) {
        let case = &self.days[day];
        assert_bits(output, &case.want, case.output(), "a replay");
    }
    fn eager(&self, rank: &Rank, day: usize) {
        self.days[day].run(rank, self.choice);
    }
}

fn gather(rng: &mut StdRng, size: usize, choice: Option<OverlapMode>) -> Box<dyn Subject> {
    let spec = Spec::ragged(rng, size).with(|s| s.lora = LoraKind::Mixed);
    let spec = spec.taken_by(choice);
    let days = days(
        rng,
        &spec,
        |rng, spec, first: Option<&gather_linear::Case>| {
            gather_linear::Case::with_layers(rng, spec, first.map(|c| c.layers.clone()))
        },
    );
    Box::new(Gather { days, choice })
}

fn scatter(rng: &mut StdRng, size: usize, choice: Option<OverlapMode>) -> Box<dyn Subject> {
    let spec = Spec::ragged(rng, size).with(|s| s.lora = LoraKind::Mixed);
    let spec = spec.taken_by(choice);
    let days = days(rng, &spec, |rng, spec, first: Option<&twin::Case>| {
        twin::Case::with_layers(rng, spec, first.map(|c| c.layers.clone()))
    });
    Box::new(Scatter { days, choice })
}

/// Of any type, in place or beside, aligned or not.
fn sum(rng: &mut StdRng, size: usize, choice: Option<AllReduceAlgorithm>) -> Box<dyn Subject> {
    use all_reduce::Place::{Beside, OverInput, Widened};
    let len = rng.random_range(1..3000);
    let dtype = FLOATS[rng.random_range(0..FLOATS.len())];
    let place = [OverInput, Beside, Widened][rng.random_range(0..3)];
    let before = match rng.random_ratio(1, 2) {
        true => [0; 2],
        false => [0; 2].map(|_| rng.random_range(1..9)),
    };
    let kind = (dtype, ReduceOp::Sum, place);
    let days = (0..DAYS).map(|_| all_reduce::Case::random(rng, size, len, kind).amid(before));
    Box::new(Sum {
        days: days.collect(),
        choice,
    })
}

/// A graph replayed many times with changing inputs, eager calls in between.
fn replayed(world: &World, make: impl Fn(&mut StdRng, usize) -> Box<dyn Subject>) {
    replayed_with(world, &config(), replays(world.size), make);
}

/// The same in a communicator with this configuration, so many times.
fn replayed_with(
    world: &World,
    config: &CommConfig,
    times: usize,
    make: impl Fn(&mut StdRng, usize) -> Box<dyn Subject>,
) {
    let mut rng = world.rng();
    let subject = make(&mut rng, world.size);
    world.run(config, move |rank| {
        subject.eager(rank, 0);
        let mut captured = subject.capture(rank);
        for i in 0..times {
            let day = i % DAYS;
            let output = captured.replay(rank, &subject.input(rank.rank, day));
            subject.check(rank, day, &output);
            if i % 50 == 17 {
                subject.eager(rank, (i / 50) % DAYS);
            }
        }
    });
}

/// Sums that go in pieces, each of which takes the next buffer: what a replay leaves in them is what the next one finds.
fn sums_in_pieces(world: &World, choice: Option<AllReduceAlgorithm>) {
    let small = CommConfig {
        all_reduce_bytes: 2000,
        scratch_bytes: 4096,
        ..config()
    };
    let times = replays(world.size) / 15;
    replayed_with(world, &small, times, |rng, size| sum(rng, size, choice));
}

/// Graphs of all kinds in turn, in an order of this run, with eager calls in between.
fn interleaved(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let engines = world.backend.engines();
    let choices: Vec<_> = modes(engines).into_iter().flat_map(|(_, c)| c).collect();
    // Several of each algorithm: they share its buffers, and have lengths of their own.
    let mut subjects = vec![];
    for (_, choice) in all_reduce::algorithms(engines) {
        subjects.extend([choice, choice].map(|choice| sum(&mut rng, size, choice)));
    }
    for &choice in &choices {
        subjects.push(gather(&mut rng, size, choice));
        if scatters(choice) {
            subjects.push(scatter(&mut rng, size, choice));
        }
    }
    if size > 1 {
        subjects.push(send_recv::subject(&mut rng, size));
    }
    let order: Vec<_> = (0..replays(size))
        .map(|_| {
            (
                rng.random_range(0..subjects.len()),
                rng.random_range(0..DAYS),
                rng.random_ratio(1, 10),
            )
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut graphs: Vec<_> = subjects.iter().map(|s| s.capture(rank)).collect();
        for &(i, day, eager) in &order {
            if eager {
                subjects[i].eager(rank, day);
            } else {
                let output = graphs[i].replay(rank, &subjects[i].input(rank.rank, day));
                subjects[i].check(rank, day, &output);
            }
        }
    });
}

/// What answers to the caller cannot be captured, and says so; capturing runs nothing.
fn refusals(world: &World) {
    world.run(&config(), |rank| {
        let mut a = rank.upload(&Matrix {
            dtype: DataType::F32,
            dims: vec![4],
            values: vec![1.0, 2.0, 3.0, 4.0],
        });
        let b = rank.poisoned(DataType::F32, &[4]);
        let device = &rank.device;
        let read = device.capture(&rank.stream, &mut || {
            device.read(&rank.stream, b.view(), &mut [0; 16])
        });
        expect_unsupported(read, "a read");
        let nested = device.capture(&rank.stream, &mut || {
            device.capture(&rank.stream, &mut || Ok(())).map(drop)
        });
        expect_unsupported(nested, "a capture in a capture");
        assert!(!rank.stream.capturing());

        let mut target = b.clone();
        let graph = device
            .capture(&rank.stream, &mut || {
                assert!(rank.stream.capturing());
                device.copy(&rank.stream, target.view_mut(), a.view())
            })
            .unwrap();
        assert!(
            rank.values(b.view()).iter().all(|x| x.is_nan()),
            "ran while capturing"
        );
        device
            .write(&rank.stream, a.view_mut(), bytemuck::bytes_of(&[5f32; 4]))
            .unwrap();
        graph
            .launch(&rank.stream)
            .unwrap()
            .sync(crate::faults::AMPLE)
            .unwrap();
        assert_eq!(rank.values(b.view()), [5.0; 4]);
        rank.lease().barrier().unwrap();
    });
}

/// What is captured may fail or panic: the stream runs its work again, and captures.
fn failed_capture(world: &World) {
    world.run(&config(), |rank| {
        let device = &rank.device;
        let failed = device.capture(&rank.stream, &mut || {
            rank.lease().barrier()?;
            Err(brigade_device::Error::invalid("test", "a failure", "none"))
        });
        assert!(failed.is_err(), "a capture whose work fails");
        assert!(!rank.stream.capturing());
        rank.lease().barrier().unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let captured = device.capture(&rank.stream, &mut || {
                rank.lease().barrier()?;
                panic!("meant to happen, within a capture")
            });
            captured.map(drop)
        }));
        assert!(panicked.is_err(), "a capture whose work panics");
        assert!(!rank.stream.capturing());
        rank.lease().barrier().unwrap();
        let again = device.capture(&rank.stream, &mut || rank.lease().barrier());
        // Making a graph may wait for the GPU, and so for a peer's launch where ranks share one.
        rank.meet();
        let end = again.unwrap().launch(&rank.stream).unwrap();
        end.sync(crate::faults::AMPLE).unwrap();
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for (name, choices) in modes(suite.backend().engines()) {
        let choice = choices[choices.len() / 2];
        suite.add(&format!("capture/gather_linear/{name}"), move |world| {
            replayed(world, |rng, size| gather(rng, size, choice));
        });
        suite.add_from(
            2,
            &format!("capture/stopped/gather_linear/{name}"),
            move |world| {
                stopped::stopped(world, |rng, size| gather(rng, size, choice));
            },
        );
        if scatters(choice) {
            suite.add(
                &format!("capture/linear_reduce_scatter/{name}"),
                move |world| {
                    replayed(world, |rng, size| scatter(rng, size, choice));
                },
            );
            suite.add_from(
                2,
                &format!("capture/stopped/linear_reduce_scatter/{name}"),
                move |world| {
                    stopped::stopped(world, |rng, size| scatter(rng, size, choice));
                },
            );
        }
    }
    let engines = suite.backend().engines();
    suite.add("capture/gather_linear/int8", move |world| {
        replayed(world, |rng, size| quantized::subject(rng, size, engines));
    });
    suite.add_from(2, "capture/stopped/gather_linear/int8", move |world| {
        stopped::stopped(world, |rng, size| quantized::subject(rng, size, engines));
    });
    for (name, choice) in all_reduce::algorithms(suite.backend().engines()) {
        suite.add(&format!("capture/all_reduce/{name}"), move |world| {
            replayed(world, |rng, size| sum(rng, size, choice));
        });
        suite.add_from(
            2,
            &format!("capture/all_reduce/{name}/in_pieces"),
            move |world| sums_in_pieces(world, choice),
        );
        suite.add_from(
            2,
            &format!("capture/stopped/all_reduce/{name}"),
            move |world| {
                stopped::stopped(world, |rng, size| sum(rng, size, choice));
            },
        );
    }
    suite.add_from(2, "capture/send_recv", |world| {
        replayed(world, send_recv::subject)
    });
    suite.add("capture/interleaved", interleaved);
    suite.add("capture/two_streams", streams::two_streams);
    suite.add("capture/refusals", refusals);
    suite.add("capture/failed", failed_capture);
}
