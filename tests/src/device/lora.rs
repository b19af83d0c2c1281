//! Linears with many adapters: so many runs that a device takes several at once, of all widths and lengths.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_bits, assert_close},
    faults::AMPLE,
    layer::{Adapter, FLOATS, Layer, Run},
    matrix::Matrix,
    oracle,
    suite::Suite,
};
use brigade_device::{
    Activation, Buffer, DataType, GemmParams, Lora, LoraLinearParams, LoraRun, Output,
};
use rand::{Rng, rngs::StdRng};

/// A linear, drawn.
struct Case {
    x: Matrix,
    transpose_x: bool,
    layer: Layer,
    output: DataType,
    /// Whether some factors begin where no 16 bytes do.
    shifted: bool,
    way: Way,
}

/// How it is asked for.
#[derive(Clone, Copy)]
struct Way {
    alpha: f32,
    sm_cap: Option<u16>,
    settled: bool,
}

impl Way {
    const PLAIN: Self = Self {
        alpha: 1.0,
        sm_cap: None,
        settled: false,
    };

    fn drawn(rng: &mut StdRng) -> Self {
        Self {
            alpha: [1.0, -0.5][rng.random_range(0..2)],
            sm_cap: [None, Some(5), Some(8), Some(19)][rng.random_range(0..4)],
            settled: rng.random(),
        }
    }
}

/// A linear in the device's memory.
struct Uploaded {
    x: Buffer,
    weight: Buffer,
    bias: Option<Buffer>,
    adapters: Vec<Option<[Buffer; 2]>>,
}

/// A matrix one element behind the start of an allocation.
fn shifted(rank: &Rank, m: &Matrix) -> Buffer {
    let mut bytes = vec![0; m.dtype.bytes()];
    bytes.extend(m.bytes());
    let all = rank.upload_bytes(m.dtype, &[m.values.len() + 1], &bytes);
    let part = all.slice(1, m.values.len()).unwrap();
    part.reshape(&m.dims).unwrap()
}

impl Case {
    /// Without C, activation or transposes, all of one type. Runs have so many rows, and a width if they have an adapter.
    fn new(
        rng: &mut StdRng,
        dtype: DataType,
        runs: &[(usize, Option<usize>)],
        [k, n]: [usize; 2],
    ) -> Self {
        let m = runs.iter().map(|run| run.0).sum();
        let scale = 2.0 / (k as f64).sqrt();
        let mut adapter = |width: usize| Adapter {
            a: Matrix::random(rng, dtype, &[k, width], scale),
            b: Matrix::random(rng, dtype, &[width, n], 2.0 / (width.max(1) as f64).sqrt()),
            scale: [1.0, -0.5, 0.25, 2.0][rng.random_range(0..4)],
        };
        let runs = runs.iter().map(|&(rows, width)| Run {
            rows,
            adapter: width.map(&mut adapter),
        });
        let runs = runs.collect();
        let layer = Layer {
            weight: Matrix::random(rng, dtype, &[k, n], scale),
            transpose: false,
            bias: None,
            activation: Activation::None,
            runs,
        };
        Self {
            x: Matrix::random(rng, dtype, &[m, k], 1.0),
            transpose_x: false,
            layer,
            output: dtype,
            shifted: rng.random(),
            way: Way::PLAIN,
        }
    }

    fn upload(&self, rank: &Rank) -> Uploaded {
        let adapters = self.layer.runs.iter().enumerate().map(|(i, run)| {
            let part = |m| match self.shifted && i % 3 == 0 {
                true => shifted(rank, m),
                false => rank.upload(m),
            };
            run.adapter.as_ref().map(|l| [part(&l.a), part(&l.b)])
        });
        Uploaded {
            x: rank.upload(&self.x),
            weight: rank.upload(&self.layer.weight),
            bias: self.layer.bias.as_ref().map(|c| rank.upload(c)),
            adapters: adapters.collect(),
        }
    }

    fn multiply(&self, rank: &Rank, with: &Uploaded, output: Output<'_>) -> Option<Buffer> {
        let runs = self.layer.runs.iter().zip(&with.adapters);
        let runs: Vec<_> = runs
            .map(|(run, parts)| LoraRun {
                rows: run.rows,
                adapter: parts
                    .as_ref()
                    .zip(run.adapter.as_ref())
                    .map(|([a, b], l)| Lora {
                        a: a.view(),
                        b: b.view(),
                        scale: l.scale,
                    }),
            })
            .collect();
        let params = LoraLinearParams {
            gemm: GemmParams {
                c: with.bias.as_ref().map(|c| c.view()),
                transpose_a: self.transpose_x,
                transpose_b: self.layer.transpose,
                activation: self.layer.activation,
                alpha: self.way.alpha,
                sm_cap: self.way.sm_cap,
                settled_b: self.way.settled,
                ..GemmParams::new(&with.x, &with.weight)
            },
            runs: &runs,
        };
        let (device, on) = (&rank.device, &rank.stream);
        device.lora_linear(on, &params, output).unwrap()
    }

    /// The weight by rows, as products that take adapters along want it, and an end as it comes.
    fn by_rows(&mut self, rng: &mut StdRng) {
        let (dtype, rows, columns) = (self.x.dtype, self.x.rows(), self.layer.weight.dims[1]);
        self.layer.transpose = true;
        self.layer.weight = self.layer.weight.transposed();
        self.layer.bias = match rng.random_range(0..3) {
            0 => None,
            1 => Some(Matrix::random(rng, dtype, &[columns], 1.0)),
            _ => Some(Matrix::random(rng, dtype, &[rows, columns], 1.0)),
        };
        if rng.random() {
            self.layer.activation = Activation::Relu;
        }
    }

    /// Gives one run's adapter the first factor of another one's that is as wide, and tells which to which; none where no two are.
    fn share_first(&mut self) -> Option<(usize, usize)> {
        let runs = &mut self.layer.runs;
        let width = |run: &Run| run.adapter.as_ref().map(|l| l.a.dims[1]);
        let pairs = (0..runs.len()).flat_map(|i| (0..i).map(move |j| (j, i)));
        let alike =
            |&(i, j): &(usize, usize)| width(&runs[i]).is_some_and(|w| width(&runs[j]) == Some(w));
        let (from, to) = pairs.into_iter().find(alike)?;
        let first = runs[from].adapter.clone()?.a;
        runs[to].adapter.as_mut()?.a = first;
        Some((from, to))
    }

    fn check(&self, rank: &Rank, d: &Buffer, what: &str) {
        let mut layer = self.layer.clone();
        for value in &mut layer.weight.values {
            *value *= f64::from(self.way.alpha);
        }
        let want = oracle::linear(&self.x, self.transpose_x, &layer);
        let what = format!(
            "{what}: {} runs of {} by {:?} to {}",
            self.layer.runs.len(),
            self.x.dtype,
            self.layer.weight.dims,
            self.output
        );
        assert_close(&rank.values(d.view()), &want, self.output, &what);
    }

    fn run(&self, rank: &Rank, what: &str) {
        let with = self.upload(rank);
        let d = self.multiply(rank, &with, Output::Allocate(self.output));
        self.check(rank, &d.unwrap(), what);
    }
}

/// So many runs, most of a row or two: some with none, some without an adapter, and widths of 1 to 64.
fn drawn(rng: &mut StdRng, count: usize) -> Vec<(usize, Option<usize>)> {
    let run = |i| {
        let rows = match i % 7 {
            0 => 0,
            1 => rng.random_range(3..40),
            _ => rng.random_range(1..3),
        };
        let width = match i % 5 {
            0 => None,
            1 => Some([8, 16, 32, 64][rng.random_range(0..4)]),
            _ => Some(rng.random_range(1..=64)),
        };
        (rows, width)
    };
    (0..count).map(run).collect()
}

fn many(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        // Inner dimensions that are not summed at once, that are odd, and columns that end within a tile or in the middle of 16 bytes.
        for (count, kn) in [
            (32, [72, 520]),
            (32, [2056, 64]),
            (32, [1501, 33]),
            (100, [40, 136]),
            (250, [24, 7]),
        ] {
            let runs = drawn(rng, count);
            Case::new(rng, dtype, &runs, kn).run(rank, "alike");
        }
    }
}

/// Runs that a device may have another way for, beside others: long ones, and wide ones.
fn lengths_and_widths(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        let runs = [
            (3, Some(16)),
            (700, Some(8)),
            (1, Some(0)),
            (530, None),
            (2, Some(300)),
            (512, Some(256)),
            (0, Some(5)),
            (33, Some(70)),
            (1, None),
        ];
        Case::new(rng, dtype, &runs, [136, 72]).run(rank, "lengths and widths");
        let none = [(600, None), (4, None), (0, Some(3))];
        Case::new(rng, dtype, &none, [16, 24]).run(rank, "no adapters");
    }
}

/// With C, activations, transposes, and results and adapters of other types.
fn ends(rank: &Rank, rng: &mut StdRng) {
    let activations = [Activation::None, Activation::Relu, Activation::Silu];
    for (dtype, output) in FLOATS.into_iter().flat_map(|d| FLOATS.map(|o| (d, o))) {
        for activation in activations {
            let runs = drawn(rng, 40);
            let [k, n] = [rng.random_range(1..90), rng.random_range(1..140)];
            let mut case = Case::new(rng, dtype, &runs, [k, n]);
            (case.output, case.layer.activation) = (output, activation);
            if rng.random() {
                case.layer.bias = Some(Matrix::random(rng, output, &[n], 1.0));
            }
            if rng.random() {
                (case.layer.transpose, case.layer.weight) = (true, case.layer.weight.transposed());
            }
            if rng.random() {
                (case.transpose_x, case.x) = (true, case.x.transposed());
            }
            for run in case.layer.runs.iter_mut().step_by(2) {
                let (a, b) = (
                    FLOATS[rng.random_range(0..3)],
                    FLOATS[rng.random_range(0..3)],
                );
                if let Some(l) = &mut run.adapter {
                    l.a = Matrix::random(rng, a, &l.a.dims, 0.2);
                    l.b = Matrix::random(rng, b, &l.b.dims, 0.2);
                }
            }
            case.run(rank, "ends");
        }
    }
}

/// On a GPU what an adapter adds to a row has bits that do not depend on how many short runs there are, from three on; on the host a library chooses by the
/// size. The base product is zero: that is a library's everywhere.
fn bits(rank: &Rank, rng: &mut StdRng) {
    let on_gpu = rank.device.info().name != "host";
    for (dtype, output) in FLOATS
        .into_iter()
        .flat_map(|d| [(d, d), (d, DataType::F32)])
    {
        let (rows, width) = (70, 100);
        let mut one = Case::new(rng, dtype, &[(rows, Some(width))], [3000, 72]);
        one.layer.weight.values.fill(0.0);
        one.output = output;
        let mut all: Vec<Vec<u8>> = vec![];
        // As three runs, the fewest that go together; in threes; each by itself, and then among so many that sums need no splitting.
        for (each, more) in [(24, 0), (3, 0), (1, 0), (1, 200)] {
            let mut runs: Vec<_> = (0..rows)
                .step_by(each)
                .map(|first| Run {
                    rows: each.min(rows - first),
                    ..one.layer.runs[0].clone()
                })
                .collect();
            let other = Case::new(rng, dtype, &[(1, Some(width)); 1], [3000, 72]);
            runs.extend((0..more).map(|_| other.layer.runs[0].clone()));
            let beside = Matrix::random(rng, dtype, &[more, 3000], 1.0);
            let case = Case {
                x: Matrix::stack(&[one.x.clone(), beside]),
                layer: Layer {
                    runs,
                    ..one.layer.clone()
                },
                ..one
            };
            let with = case.upload(rank);
            let d = case
                .multiply(rank, &with, Output::Allocate(output))
                .unwrap();
            case.check(rank, &d, "bits");
            all.push(rank.raw(d.slice(0, rows).unwrap().view()));
        }
        for other in all.iter().filter(|_| on_gpu) {
            assert_bits(other, &all[0], output, "another batch");
        }
    }
}

/// What was captured takes the rows and the adapters of the day.
fn replayed(rank: &Rank, rng: &mut StdRng) {
    let (device, on) = (&rank.device, &rank.stream);
    for dtype in FLOATS {
        let runs = drawn(rng, 110);
        let dims = [48, 40];
        let first = Case::new(rng, dtype, &runs, dims);
        let mut with = first.upload(rank);
        let mut d = rank.poisoned(dtype, &[first.x.rows(), dims[1]]);
        let graph = device.capture(on, &mut || {
            first.multiply(rank, &with, Output::Into(d.view_mut()));
            Ok(())
        });
        let graph = graph.unwrap();
        for _ in 0..3 {
            let mut day = Case::new(rng, dtype, &runs, dims);
            day.layer.weight = first.layer.weight.clone();
            for (run, old) in day.layer.runs.iter_mut().zip(&first.layer.runs) {
                // Which the graph has by itself.
                if let (Some(l), Some(old)) = (&mut run.adapter, &old.adapter) {
                    l.scale = old.scale;
                }
            }
            let new = day.layer.runs.iter().map(|run| run.adapter.as_ref());
            for (parts, new) in with.adapters.iter_mut().zip(new) {
                let (Some([a, b]), Some(new)) = (parts, new) else {
                    continue;
                };
                device.write(on, a.view_mut(), &new.a.bytes()).unwrap();
                device.write(on, b.view_mut(), &new.b.bytes()).unwrap();
            }
            device.write(on, with.x.view_mut(), &day.x.bytes()).unwrap();
            device.fill(on, d.view_mut(), 0xFF).unwrap();
            graph.launch(on).unwrap().sync(AMPLE).unwrap();
            day.check(rank, &d, "a replay");
        }
    }
}

/// Few adapters, which a device may multiply inside the base product: weights by rows, sizes of whole 16 bytes, and rows from a few to several bands.
fn inside(rank: &Rank, rng: &mut StdRng) {
    let several = vec![
        (64, Some(8)),
        (65, Some(13)),
        (0, Some(7)),
        (130, None),
        (31, Some(32)),
    ];
    let many = vec![(9, Some(4)); 16];
    let all = [vec![(17, Some(16))], vec![(300, Some(64))], several, many];
    for dtype in FLOATS {
        for runs in &all {
            let kn = [(); 2].map(|()| 8 * rng.random_range(1..80));
            let mut case = Case::new(rng, dtype, runs, kn);
            case.by_rows(rng);
            let with = case.upload(rank);
            // One element behind the start of an allocation, or where it likes.
            if rng.random() {
                let dims = [case.x.rows(), kn[1]];
                let all = rank.poisoned(dtype, &[dims[0] * dims[1] + 1]);
                let part = all.slice(1, dims[0] * dims[1]).unwrap();
                let mut d = part.reshape(&dims).unwrap();
                case.multiply(rank, &with, Output::Into(d.view_mut()));
                case.check(rank, &d, "inside, in between");
            } else {
                let d = case.multiply(rank, &with, Output::Allocate(dtype));
                case.check(rank, &d.unwrap(), "inside");
            }
        }
    }
}

/// Few rows, as of sequences that get a token each: one adapter, several, some with one first factor; rows without; widths and lengths at which ways change; columns as
/// they come, in several passes of few blocks; C where D is; and the same bits every time.
fn few(rank: &Rank, rng: &mut StdRng) {
    let width = |rng: &mut StdRng| Some(rng.random_range(1..65));
    let several = vec![(3, Some(8)), (0, Some(4)), (2, None), (3, Some(32))];
    let four = vec![(4, Some(16)), (3, Some(8)), (5, Some(16)), (4, Some(16))];
    let five = vec![(1, Some(16)); 5];
    let odd = vec![(3, width(rng)), (2, None), (3, width(rng))];
    let own = (0..16).map(|_| (1, width(rng))).collect();
    let all = [
        vec![(1, Some(16))],
        vec![(8, Some(32))],
        vec![(2, Some(16)), (1, None), (2, Some(16)), (2, Some(32))],
        vec![(9, Some(64))],
        vec![(16, Some(64))],
        vec![(4, Some(65)), (2, Some(8))],
        vec![(17, Some(8))],
        several,
        four,
        five,
        odd,
        own,
    ];
    for (dtype, runs) in FLOATS
        .into_iter()
        .flat_map(|d| all.each_ref().map(|r| (d, r)))
    {
        let kn = match rng.random() {
            true => [8 * rng.random_range(1..460), rng.random_range(1..400)],
            false => [8 * rng.random_range(1..130), rng.random_range(400..1400)],
        };
        let mut case = Case::new(rng, dtype, runs, kn);
        case.by_rows(rng);
        case.way = Way::drawn(rng);
        let shared = rng.random::<bool>().then(|| case.share_first()).flatten();
        let mut with = case.upload(rank);
        if let Some((from, to)) = shared {
            let first = with.adapters[from].as_ref().unwrap()[0].clone();
            with.adapters[to].as_mut().unwrap()[0] = first;
        }
        let dims = [case.x.rows(), kn[1]];
        rank.stream.sync(AMPLE).unwrap();
        let mut all: Vec<_> = (0..8).map(|_| rank.poisoned(dtype, &dims)).collect();
        for d in &mut all {
            case.multiply(rank, &with, Output::Into(d.view_mut()));
        }
        case.check(rank, &all[0], "few");
        let first = rank.raw(all[0].view());
        for d in &all[1..] {
            assert_bits(&rank.raw(d.view()), &first, dtype, "the same once more");
        }
        if let Some(c) = with.bias.clone().filter(|c| c.shape().dims() == dims) {
            let mut d = c.slice(0, dims[0]).unwrap();
            case.multiply(rank, &with, Output::Into(d.view_mut()));
            assert_bits(&rank.raw(c.view()), &first, dtype, "D is C");
        }
    }
}

/// What is not finite in an adapter shows in its own rows, and in no others.
fn apart(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let kn = [(); 2].map(|()| 8 * rng.random_range(8..40));
            let runs = [(70, Some(16)), (90, Some(24)), (40, None), (50, Some(8))];
            let mut case = Case::new(rng, dtype, &runs, kn);
            case.layer.transpose = true;
            case.layer.weight = case.layer.weight.transposed();
            let product = |case: &Case| {
                let with = case.upload(rank);
                case.multiply(rank, &with, Output::Allocate(dtype)).unwrap()
            };
            let healthy = product(&case);
            case.check(rank, &healthy, "all are finite");
            for second in [true, false] {
                let mut broken = Case {
                    layer: case.layer.clone(),
                    x: case.x.clone(),
                    ..case
                };
                let adapter = broken.layer.runs[1].adapter.as_mut().unwrap();
                let factor = match second {
                    true => &mut adapter.b,
                    false => &mut adapter.a,
                };
                let at = rng.random_range(0..factor.values.len());
                factor.values[at] = odd;
                let column = second.then_some(at % kn[1]);
                let d = product(&broken);
                for (first, rows) in [(0, 70), (160, 90)] {
                    let of = |d: &Buffer| rank.raw(d.slice(first, rows).unwrap().view());
                    assert_bits(&of(&d), &of(&healthy), dtype, "another adapter's rows");
                }
                let own = rank.values(d.slice(70, 90).unwrap().view());
                let shown = |row: &[f64]| match column {
                    Some(column) => !row[column].is_finite(),
                    None => row.iter().all(|v| !v.is_finite()),
                };
                assert!(own.chunks(kn[1]).all(shown), "{odd} of {dtype}");
            }
        }
    }
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "lora_linear/inside", inside);
    alone(suite, "lora_linear/few", few);
    alone(suite, "lora_linear/apart", apart);
    alone(suite, "lora_linear/many", many);
    alone(suite, "lora_linear/lengths_and_widths", lengths_and_widths);
    alone(suite, "lora_linear/ends", ends);
    alone(suite, "lora_linear/bits", bits);
    alone(suite, "lora_linear/replayed", replayed);
}
