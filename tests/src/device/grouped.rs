//! Products in groups: every arrangement of groups, weights that lists choose, numbers that cannot be, and graphs.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, expect_invalid},
    faults::AMPLE,
    layer::FLOATS,
    matrix::{Matrix, round, to_f64},
    oracle,
    quantized::fp8,
    suite::Suite,
};
use brigade_device::{
    Buffer, DataType, DeviceExt, GroupedGemmParams, Groups, Operand, Output, QScheme, View,
};
use rand::{Rng, rngs::StdRng};
use std::ops::Range;

/// How groups are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// By where each begins.
    Offsets,
    /// With something between them.
    Counts,
    /// In places of their own.
    Places,
}

/// Rows in groups, and what they are multiplied by.
struct Case {
    x: Matrix,
    /// `[weights * n, k]`
    weights: Matrix,
    dims: [usize; 3],
    groups: Vec<Range<usize>>,
    which: Option<Vec<i32>>,
    told: Told,
}

impl Case {
    /// With so many rows in each group, and others between and behind them.
    fn new(
        rng: &mut StdRng,
        dtype: DataType,
        (counts, [n, k]): (&[usize], [usize; 2]),
        told: Told,
        weights: Option<usize>,
    ) -> Self {
        let places = counts.iter().max().copied().unwrap_or(0) + 2;
        let mut end = 0;
        let groups: Vec<_> = counts
            .iter()
            .map(|&count| {
                let group = end..end + count;
                end = match told {
                    Told::Offsets => group.end,
                    Told::Counts => group.end.next_multiple_of(4),
                    Told::Places => group.start + places,
                };
                group
            })
            .collect();
        let rows = match told {
            Told::Places => counts.len() * places,
            Told::Offsets | Told::Counts => end + 7,
        };
        // Some name no weight.
        let which = weights.map(|weights| {
            let mut one = |_| rng.random_range(-1..=weights as i32);
            (0..counts.len()).map(&mut one).collect()
        });
        let weights = weights.unwrap_or(counts.len());
        let scale = 2.0 / (k.max(1) as f64).sqrt();
        Self {
            x: Matrix::random(rng, dtype, &[rows, k], scale),
            weights: Matrix::random(rng, dtype, &[weights * n, k], 1.0),
            dims: [weights, n, k],
            groups,
            which,
            told,
        }
    }

    fn lists(&self, rank: &Rank) -> [Buffer; 3] {
        let upload = |values: Vec<i32>| {
            let dims = [values.len()];
            rank.device.upload(&rank.stream, &values, &dims).unwrap()
        };
        let end = self.groups.last().map_or(0, |g| g.end);
        let firsts = self.groups.iter().map(|g| g.start).chain([end]);
        [
            upload(firsts.map(|n| n as i32).collect()),
            upload(self.groups.iter().map(|g| g.len() as i32).collect()),
            upload(self.which.clone().unwrap_or_default()),
        ]
    }

    fn params<'a>(
        &self,
        x: Operand<'a>,
        weights: View<'a>,
        [offsets, counts, which]: &'a [Buffer; 3],
    ) -> GroupedGemmParams<'a> {
        let groups = match self.told {
            Told::Places => Groups::Places {
                counts: counts.view(),
            },
            told => Groups::Behind {
                offsets: offsets.view(),
                counts: (told == Told::Counts).then(|| counts.view()),
            },
        };
        GroupedGemmParams {
            which: self.which.as_ref().map(|_| which.view()),
            ..GroupedGemmParams::new(x, weights, groups)
        }
    }

    /// The weight of a group.
    fn weight(&self, group: usize) -> Option<Matrix> {
        let [weights, n, _] = self.dims;
        let which = match &self.which {
            Some(which) => usize::try_from(which[group]).ok()?,
            None => group,
        };
        (which < weights).then(|| self.weights.slice(which * n, n))
    }

    /// Checks the rows of groups, and that no other was written.
    fn check(&self, rank: &Rank, d: &Buffer, what: &str) {
        let [_, n, _] = self.dims;
        let (dtype, bytes) = (d.dtype(), rank.raw(d.view()));
        let row = n * dtype.bytes();
        let (mut got, mut want, mut written) = (vec![], vec![], vec![false; d.shape().rows()]);
        for (group, rows) in self.groups.iter().enumerate() {
            let Some(weight) = self.weight(group).filter(|_| !rows.is_empty()) else {
                continue;
            };
            let x = self.x.slice(rows.start, rows.len());
            want.extend(oracle::multiply(&x, false, &weight, true));
            got.extend(to_f64(dtype, &bytes[rows.start * row..rows.end * row]));
            written[rows.clone()].fill(true);
        }
        assert_close(&got, &want, dtype, what);
        for (i, _) in written.iter().enumerate().filter(|w| !w.1) {
            let left = bytes[i * row..(i + 1) * row].iter().all(|&b| b == 0xFF);
            assert!(left, "{what}: row {i}, of no group, was written");
        }
    }

    fn run(&self, rank: &Rank, output: DataType) {
        let (x, lists) = (rank.upload(&self.x), self.lists(rank));
        let weights = rank.upload(&self.weights).reshape(&self.dims).unwrap();
        let params = self.params((&x).into(), weights.view(), &lists);
        let mut d = rank.poisoned(output, &[self.x.rows(), self.dims[1]]);
        let none = multiply(rank, &params, Output::Into(d.view_mut()));
        assert!(none.is_none(), "D given and allocated");
        let dtype = self.x.dtype;
        let what = format!(
            "{dtype} to {output}, {:?}, {:?}, {:?} of {:?}",
            self.told, self.dims, self.which, self.groups
        );
        self.check(rank, &d, &what);
        let made = multiply(rank, &params, Output::Allocate(output)).unwrap();
        assert_eq!((made.shape(), made.dtype()), (d.shape(), output));
        for rows in &self.groups {
            if rows.is_empty() || self.which.is_some() {
                continue;
            }
            let part = |of: &Buffer| rank.raw(of.slice(rows.start, rows.len()).unwrap().view());
            assert_bits(&part(&made), &part(&d), output, &what);
        }
    }
}

fn multiply(rank: &Rank, p: &GroupedGemmParams<'_>, output: Output<'_>) -> Option<Buffer> {
    rank.device.grouped_gemm(&rank.stream, p, output).unwrap()
}

fn products(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for told in [Told::Offsets, Told::Counts, Told::Places] {
            // Not all begin where 16 bytes do; more rows than a tile has; columns that are odd, or end within a tile.
            for (counts, nk) in [
                (&[3, 0, 1, 17, 0][..], [40, 72]),
                (&[5, 2], [33, 37]),
                (&[0, 150, 40], [72, 24]),
                (&[1], [1, 1]),
                (&[2, 1], [136, 200]),
            ] {
                let weights = rng.random::<bool>().then(|| rng.random_range(1..4));
                let case = Case::new(rng, dtype, (counts, nk), told, weights);
                case.run(rank, [dtype, DataType::F32][rng.random_range(0..2)]);
            }
        }
        // So many that their tiles keep every multiprocessor busy twice, most with a row or two.
        let counts: Vec<usize> = (0..200)
            .map(|i| match i {
                77 => 131,
                199 => 20,
                _ => rng.random_range(0..3),
            })
            .collect();
        let case = Case::new(rng, dtype, (&counts, [136, 40]), Told::Counts, Some(5));
        case.run(rank, dtype);
    }
}

fn empty(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for (counts, nk) in [
            (&[][..], [3, 4]),
            (&[0, 0], [3, 4]),
            (&[2, 3], [0, 4]),
            // Sums of nothing are 0.
            (&[2, 3], [4, 0]),
        ] {
            for told in [Told::Offsets, Told::Counts] {
                Case::new(rng, dtype, (counts, nk), told, None).run(rank, dtype);
            }
        }
    }
    let none = Case::new(rng, DataType::F32, (&[], [3, 4]), Told::Places, None);
    none.run(rank, DataType::F32);
}

/// On a GPU a row's bits do not depend on what else is in its group, or on how many groups there are; on the host a library chooses by
/// the size.
fn bits(rank: &Rank, rng: &mut StdRng) {
    let on_gpu = rank.device.info().name != "host";
    for dtype in FLOATS {
        let (rows, n, k) = (70, 72, 136);
        let one = Case::new(rng, dtype, (&[rows], [n, k]), Told::Offsets, Some(1));
        let x = rank.upload(&one.x);
        let weights = rank.upload(&one.weights).reshape(&[1, n, k]).unwrap();
        let mut all: Vec<Vec<u8>> = vec![];
        // As one group; in threes; and among very many, which large tiles take.
        for (each, more) in [(rows, 0), (3, 0), (rows, 900), (1, 900)] {
            let mut groups: Vec<_> = (0..rows)
                .step_by(each)
                .map(|first| first..(first + each).min(rows))
                .collect();
            groups.extend((0..more).map(|_| rows..rows));
            let case = Case {
                which: Some(vec![0; groups.len()]),
                groups,
                x: one.x.clone(),
                weights: one.weights.clone(),
                ..one
            };
            let lists = case.lists(rank);
            let mut d = rank.poisoned(dtype, &[one.x.rows(), n]);
            let params = case.params((&x).into(), weights.view(), &lists);
            multiply(rank, &params, Output::Into(d.view_mut()));
            case.check(rank, &d, "groups of one weight");
            all.push(rank.raw(d.slice(0, rows).unwrap().view()));
        }
        for other in all.iter().filter(|_| on_gpu) {
            assert_bits(other, &all[0], dtype, "another grouping");
        }
    }
}

/// Rows that were quantized are what they mean, rounded to the type of the weights.
fn quantized(rank: &Rank, rng: &mut StdRng) {
    let some = (&[4, 0, 9][..], Told::Counts);
    let none = (&[][..], Told::Places);
    for (dtype, (counts, told)) in FLOATS.into_iter().flat_map(|d| [(d, some), (d, none)]) {
        let mut case = Case::new(rng, dtype, (counts, [24, 144]), told, None);
        let x = rank.upload(&case.x);
        let q = (rank.device)
            .quantize(&rank.stream, x.view(), QScheme::Fp8PerTokenBlock)
            .unwrap();
        let kernel = rank.raw(q.kernel().view());
        let scales = rank.values(q.scales().view());
        let (columns, blocks) = (case.x.columns(), case.x.columns().div_ceil(128));
        for (i, value) in case.x.values.iter_mut().enumerate() {
            let scale = scales[i / columns * blocks + i % columns / 128];
            let wide = (fp8(kernel[i]) * scale) as f32;
            *value = round(dtype, f64::from(wide));
        }
        let (lists, weights) = (case.lists(rank), rank.upload(&case.weights));
        let weights = weights.reshape(&case.dims).unwrap();
        let params = case.params(Operand::Quantized(q.view()), weights.view(), &lists);
        let mut d = rank.poisoned(dtype, &[case.x.rows(), 24]);
        multiply(rank, &params, Output::Into(d.view_mut()));
        case.check(rank, &d, "quantized rows");
    }
}

/// Numbers that cannot be, as a fault leaves them, reach no memory that is not the result's.
fn numbers(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        let told = Told::Counts;
        let mut case = Case::new(rng, dtype, (&[4, 4, 4], [16, 16]), told, None);
        let rows = case.x.rows();
        let (x, weights) = (rank.upload(&case.x), rank.upload(&case.weights));
        let weights = weights.reshape(&case.dims).unwrap();
        let upload = |values: &[i32]| {
            let dims = [values.len()];
            rank.device.upload(&rank.stream, values, &dims).unwrap()
        };
        for (offsets, counts, groups) in [
            ([-1; 4], [-1; 3], [0..0, 0..0, 0..0]),
            ([0, 8, 12, 12], [-5, 4, i32::MAX], [0..0, 8..12, 12..rows]),
            (
                [3, 99, i32::MAX, i32::MIN],
                [2, 4, 7],
                [3..5, rows..rows, rows..rows],
            ),
        ] {
            let lists = [upload(&offsets), upload(&counts), upload(&[])];
            // What is around the result must stay as it is, too.
            let around = rank.poisoned(dtype, &[rows + 40, 16]);
            let mut d = around.slice(20, rows).unwrap();
            let params = case.params((&x).into(), weights.view(), &lists);
            multiply(rank, &params, Output::Into(d.view_mut()));
            case.groups = groups.to_vec();
            case.check(rank, &d, "numbers that cannot be");
            for first in [0, 20 + rows] {
                let bytes = rank.raw(around.slice(first, 20).unwrap().view());
                assert!(bytes.iter().all(|&b| b == 0xFF), "beside the result");
            }
        }
    }
}

/// What was captured reads the numbers of the day.
fn replayed(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        let mut case = Case::new(rng, dtype, (&[30, 0, 10], [24, 40]), Told::Counts, None);
        let (x, mut lists) = (rank.upload(&case.x), case.lists(rank));
        let weights = rank.upload(&case.weights).reshape(&case.dims).unwrap();
        let d = rank.poisoned(dtype, &[case.x.rows(), 24]);
        let mut target = d.clone();
        let graph = {
            let params = case.params((&x).into(), weights.view(), &lists);
            let work = &mut || {
                multiply(rank, &params, Output::Into(target.view_mut()));
                Ok(())
            };
            rank.device.capture(&rank.stream, work).unwrap()
        };
        for _ in 0..5 {
            let cut = rng.random_range(0..=20);
            case.groups = vec![0..cut, cut..20, 20..20 + rng.random_range(0..=20)];
            let day = case.lists(rank);
            for (to, from) in lists.iter_mut().zip(&day).take(2) {
                let device = &rank.device;
                device
                    .copy(&rank.stream, to.view_mut(), from.view())
                    .unwrap();
            }
            let fill = d.clone();
            let device = &rank.device;
            device
                .fill(&rank.stream, { fill }.view_mut(), 0xFF)
                .unwrap();
            graph.launch(&rank.stream).unwrap().sync(AMPLE).unwrap();
            case.check(rank, &d, "a replay");
        }
    }
}

/// A refused product names the field, and nothing has been written.
fn refusals(rank: &Rank, _: &mut StdRng) {
    let (f32, i32) = (DataType::F32, DataType::I32);
    let new = |dtype, dims: &[usize]| rank.poisoned(dtype, dims);
    let (x, weights) = (new(f32, &[8, 5]), new(f32, &[2, 6, 5]));
    let (offsets, counts) = (new(i32, &[3]), new(i32, &[2]));
    let behind = |offsets| Groups::Behind {
        offsets,
        counts: None,
    };
    let good = GroupedGemmParams::new(&x, weights.view(), behind(offsets.view()));
    let refused = |params: GroupedGemmParams<'_>| {
        let output = Output::Allocate(f32);
        let result = rank.device.grouped_gemm(&rank.stream, &params, output);
        expect_invalid(result, "groups")
    };
    let others = [
        new(f32, &[8, 4]),
        new(DataType::F16, &[8, 5]),
        new(f32, &[7, 5]),
        new(f32, &[2, 4, 5]),
    ];
    let with_x = |x| GroupedGemmParams { x, ..good };
    assert_eq!(refused(with_x((&others[0]).into())), "weights.shape");
    assert_eq!(refused(with_x((&others[1]).into())), "x.dtype");
    assert_eq!(refused(with_x((&others[3]).into())), "x.shape");
    let with_weights = |weights| GroupedGemmParams { weights, ..good };
    assert_eq!(refused(with_weights(x.view())), "weights.shape");
    assert_eq!(refused(with_weights(offsets.view())), "weights.dtype");
    let three = new(f32, &[3, 6, 5]);
    assert_eq!(refused(with_weights(three.view())), "weights.shape");
    let with_groups = |groups| GroupedGemmParams { groups, ..good };
    let wide = new(DataType::I64, &[3]);
    assert_eq!(refused(with_groups(behind(wide.view()))), "groups.offsets");
    let counted = Groups::Behind {
        offsets: offsets.view(),
        counts: Some(offsets.view()),
    };
    assert_eq!(refused(with_groups(counted)), "groups.counts");
    let places = Groups::Places {
        counts: counts.view(),
    };
    let uneven = GroupedGemmParams {
        x: (&others[2]).into(),
        groups: places,
        ..good
    };
    assert_eq!(refused(uneven), "x.shape");
    let which = Some(offsets.view());
    assert_eq!(refused(GroupedGemmParams { which, ..good }), "which");

    let mut d = rank.upload_bytes(f32, &[8, 7], &[0; 8 * 28]);
    let into = |d: &mut Buffer, params: &GroupedGemmParams<'_>| {
        let output = Output::Into(d.view_mut());
        let result = rank.device.grouped_gemm(&rank.stream, params, output);
        expect_invalid(result, "D")
    };
    assert_eq!(into(&mut d, &good), "output.shape");
    assert_eq!(rank.values(d.view()), [0.0; 56]);
    let square = new(f32, &[2, 5, 5]);
    let over = GroupedGemmParams {
        weights: square.view(),
        ..good
    };
    assert_eq!(into(&mut x.clone(), &over), "output.memory");
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "grouped/products", products);
    alone(suite, "grouped/empty", empty);
    alone(suite, "grouped/bits", bits);
    alone(suite, "grouped/quantized", quantized);
    alone(suite, "grouped/numbers", numbers);
    alone(suite, "grouped/replayed", replayed);
    alone(suite, "grouped/refusals", refusals);
}
