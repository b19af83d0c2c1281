//! As `messages`, for what needs a group.
#![allow(clippy::unwrap_used)]

mod common;

use brigade_device::*;
use common::*;

fn host(dims: &[usize]) -> Buffer {
    buffer_in(MemoryType::Host, DataType::BF16, dims)
}

fn typed(dtype: DataType, dims: &[usize]) -> Buffer {
    buffer(dtype, dims)
}

#[test]
fn reductions() {
    let mut told = Told::default();
    let all_reduce = |mut data: Buffer, from: Option<Buffer>| {
        let (data, from) = (data.view_mut(), from.as_ref().map(Buffer::view));
        let (op, choice) = (ReduceOp::Sum, None);
        AllReduceParams {
            data,
            from,
            op,
            choice,
        }
        .check()
    };
    let f32 = || typed(DataType::F32, &[4]);
    assert!(all_reduce(plain(&[4]), None).is_ok());
    assert!(all_reduce(f32(), Some(plain(&[4]))).is_ok());
    told.wrong("data of i32", all_reduce(typed(DataType::I32, &[4]), None));
    told.wrong("from f32 to bf16", all_reduce(plain(&[4]), Some(f32())));
    told.wrong("other shape", all_reduce(plain(&[4]), Some(plain(&[2, 2]))));
    told.wrong("data elsewhere", all_reduce(host(&[4]), Some(plain(&[4]))));

    let scatter = |from: Buffer, rows: &[usize], mut to: Buffer| {
        let (from, to, op) = (from.view(), to.view_mut(), ReduceOp::Sum);
        ReduceScatterParams {
            from,
            rows_per_rank: rows,
            to,
            op,
        }
        .check(1, 2)
    };
    let rows = &[3, 1];
    assert!(scatter(plain(&[4, 8]), rows, plain(&[1, 8])).is_ok());
    told.wrong("counts", scatter(plain(&[4, 8]), &[4], plain(&[1, 8])));
    told.wrong(
        "sum of counts",
        scatter(plain(&[4, 8]), &[usize::MAX, 2], plain(&[1, 8])),
    );
    told.wrong(
        "from of u8",
        scatter(typed(DataType::U8, &[4, 8]), rows, plain(&[1, 8])),
    );
    told.wrong(
        "to of f16",
        scatter(plain(&[4, 8]), rows, typed(DataType::F16, &[1, 8])),
    );
    told.wrong(
        "rows of from",
        scatter(plain(&[5, 8]), rows, plain(&[1, 8])),
    );
    told.wrong("rows of to", scatter(plain(&[4, 8]), rows, plain(&[3, 8])));
    told.wrong("row of to", scatter(plain(&[4, 8]), rows, plain(&[1, 7])));
    told.wrong("scalar", scatter(plain(&[4]), rows, plain(&[])));
    told.wrong("to elsewhere", scatter(plain(&[4, 8]), rows, host(&[1, 8])));
    insta::assert_snapshot!(told.0);
}

/// In a place of its own.
fn at(place: usize, dtype: DataType, dims: &[usize]) -> Buffer {
    let shape = Shape::new(dims).unwrap();
    Buffer::at(storage(1 << 16), place << 12, dtype, shape).unwrap()
}

#[test]
fn norms() {
    let mut told = Told::default();
    let normed = |change: &dyn Fn(&mut [Buffer; 6], &mut [f32; 2]), scheme| {
        let kernel = |s: QScheme| s.kernel_type().unwrap_or(DataType::BF16);
        let bf16 = DataType::BF16;
        let mut parts = [
            at(0, bf16, &[4, 8]),
            at(1, bf16, &[4, 8]),
            at(2, bf16, &[8]),
            at(3, bf16, &[4, 8]),
            at(4, kernel(scheme), &[4, 8]),
            at(5, DataType::F32, &[4]),
        ];
        let mut numbers = [1e-5, 0.5];
        change(&mut parts, &mut numbers);
        let [from, residual, weight, sum, values, scales] = &mut parts;
        let (values, scales) = (values.view_mut(), scales.view_mut());
        AllReduceNormParams {
            from: from.view(),
            residual: residual.view(),
            weight: weight.view(),
            eps: numbers[0],
            sum: sum.view_mut(),
            normed: match scheme {
                QScheme::Int8PerToken => Normed::Int8PerToken { values, scales },
                QScheme::Fp8PerTensor => Normed::Fp8PerTensor {
                    values,
                    scale: numbers[1],
                },
                _ => Normed::Plain(values),
            },
            choice: None,
        }
        .check()
    };
    let (none, int8, fp8) = (QScheme::None, QScheme::Int8PerToken, QScheme::Fp8PerTensor);
    for scheme in [none, int8, fp8] {
        assert!(normed(&|_, _| (), scheme).is_ok());
    }
    assert!(normed(&|p, _| p[3] = p[1].clone(), none).is_ok());
    let mut wrong = |what: &str, scheme, change: &dyn Fn(&mut [Buffer; 6], &mut [f32; 2])| {
        told.wrong(what, normed(change, scheme));
    };
    wrong("from of u8", none, &|p, _| {
        p[0] = typed(DataType::U8, &[4, 8])
    });
    wrong("from of one dimension", none, &|p, _| p[0] = plain(&[32]));
    wrong("no columns", none, &|p, _| p[0] = plain(&[4, 0]));
    wrong("residual", none, &|p, _| p[1] = plain(&[3, 8]));
    wrong("weight", none, &|p, _| p[2] = plain(&[4]));
    wrong("sum of f32", none, &|p, _| {
        p[3] = typed(DataType::F32, &[4, 8])
    });
    wrong("sum elsewhere", none, &|p, _| p[3] = host(&[4, 8]));
    wrong("normed", none, &|p, _| p[4] = plain(&[8, 4]));
    wrong("int8 in bf16", int8, &|p, _| p[4] = plain(&[4, 8]));
    wrong("scales", int8, &|p, _| p[5] = typed(DataType::F32, &[8]));
    wrong("eps", none, &|_, n| n[0] = -1.0);
    wrong("scale", fp8, &|_, n| n[1] = 0.0);
    wrong("sum over from", none, &|p, _| p[3] = p[0].clone());
    wrong("normed over sum", none, &|p, _| p[4] = p[3].clone());
    insta::assert_snapshot!(told.0);
}

#[test]
fn copies() {
    let mut told = Told::default();
    let gather = |from: Buffer, rows: &[usize], mut to: Buffer| {
        let (from, to) = (from.view(), to.view_mut());
        AllGatherParams {
            from,
            rows_per_rank: rows,
            to,
        }
        .check(1, 2)
    };
    let rows = &[3, 1];
    assert!(gather(plain(&[1, 8]), rows, plain(&[4, 8])).is_ok());
    told.wrong("counts", gather(plain(&[1, 8]), &[3, 1, 0], plain(&[4, 8])));
    told.wrong(
        "from of f32",
        gather(typed(DataType::F32, &[1, 8]), rows, plain(&[4, 8])),
    );
    told.wrong("rows of from", gather(plain(&[3, 8]), rows, plain(&[4, 8])));
    told.wrong("row of from", gather(plain(&[1, 9]), rows, plain(&[4, 8])));
    told.wrong("rows of to", gather(plain(&[1, 8]), rows, plain(&[5, 8])));
    told.wrong("to elsewhere", gather(plain(&[1, 8]), rows, host(&[4, 8])));

    let mut data = plain(&[4]);
    let data = data.view_mut();
    told.wrong("root", BroadcastParams { data, root: 2 }.check(0, 2));

    let to_all = |from: Buffer, send: &[usize], mut to: Buffer, recv: &[usize]| {
        let (from, to) = (from.view(), to.view_mut());
        AllToAllParams {
            from,
            send_rows: send,
            to,
            recv_rows: recv,
        }
        .check(1, 2)
    };
    let (from, to) = (|| plain(&[3, 8]), || plain(&[4, 8]));
    assert!(to_all(from(), &[1, 2], to(), &[2, 2]).is_ok());
    told.wrong("send counts", to_all(from(), &[3], to(), &[2, 2]));
    told.wrong("receive counts", to_all(from(), &[1, 2], to(), &[4]));
    told.wrong("rows to send", to_all(from(), &[2, 2], to(), &[2, 2]));
    told.wrong("rows to receive", to_all(from(), &[1, 2], to(), &[3, 2]));
    told.wrong(
        "row of to",
        to_all(from(), &[1, 2], plain(&[4, 9]), &[2, 2]),
    );
    told.wrong(
        "other type",
        to_all(from(), &[1, 2], typed(DataType::F32, &[4, 8]), &[2, 2]),
    );
    told.wrong("own rows", to_all(from(), &[1, 2], to(), &[3, 1]));
    told.wrong(
        "to elsewhere",
        to_all(from(), &[1, 2], host(&[4, 8]), &[2, 2]),
    );

    assert!(check_peer(0, 1, 2).is_ok());
    told.wrong("peer itself", check_peer(1, 1, 2));
    told.wrong("no such peer", check_peer(2, 1, 2));
    insta::assert_snapshot!(told.0);
}

/// Checks `$base` after a change, as rank 1 of 2.
macro_rules! changed {
    ($told:ident, $base:expr, $($name:literal: |$p:ident| $change:expr;)*) => {$({
        let mut $p = $base;
        $change;
        $told.wrong($name, $p.check(&group(1, 2)));
    })*};
}

/// Rows of two ranks; K = 8, N = 6.
#[test]
fn gather_linear() {
    let mut told = Told::default();
    let (x, w, rows) = (plain(&[1, 8]), plain(&[8, 6]), [3, 1]);
    let copy = |b| Chunk::Copy(Operand::from(b));
    let base = || AllGatherLoraLinearParams::new(copy(&x), &rows, &w);
    let call = base().check(&group(1, 2)).unwrap();
    assert_eq!((&call.rows[..], call.k, call.n), (&rows[..], 8, 12));
    let (three, i8, wide) = (
        plain(&[1, 2, 8]),
        typed(DataType::I8, &[1, 8]),
        plain(&[1, 9]),
    );
    let (line, long, own) = (plain(&[8]), plain(&[7]), plain(&[1, 6]));
    let (int, most, mut d) = (typed(DataType::I32, &[6]), plain(&[3, 6]), plain(&[3, 6]));
    let runs = [LoraRun {
        rows: 3,
        adapter: None,
    }];
    changed! { told, base(),
        "counts": |p| p.rows_per_rank = &[4];
        "rows of the chunk": |p| p.chunk = copy(&most);
        "chunk of one dimension": |p| p.chunk = copy(&line);
        "chunk of i8": |p| p.chunk = copy(&i8);
        "inner dimension": |p| p.chunk = copy(&wide);
        "weight of one dimension": |p| p.weight = Operand::from(&line);
        "transposed weight": |p| p.transpose_weight = true;
        "transposed a": |p| p.transpose_a = true;
        "transposed with three dimensions": |p| (p.transpose_a, p.chunk) = (true, copy(&three));
        "n over all ranks": |p| p.total_n = Some(5);
        "bias of i32": |p| p.bias = Some(int.view());
        "bias that is too long": |p| p.bias = Some(long.view());
        "bias of too few rows": |p| p.bias = Some(most.view());
        "runs": |p| p.runs = &runs;
        "output of i64": |p| p.output = Output::Allocate(DataType::I64);
        "output of own rows": |p| p.output = Output::Into(d.view_mut());
    }
    let mut p = base();
    p.bias = Some(own.view());
    assert!(p.check(&group(1, 2)).is_ok(), "a row is for all rows");
    insta::assert_snapshot!(told.0);
}

/// Rows of two ranks; K = 8, N = 6.
#[test]
fn linear_reduce_scatter() {
    let mut told = Told::default();
    let (x, w, rows) = (plain(&[4, 8]), plain(&[8, 6]), [3, 1]);
    let base = || LoraLinearReduceScatterParams::new(&x, &rows, &w);
    let call = base().check(&group(1, 2)).unwrap();
    assert_eq!((&call.rows[..], call.k, call.n), (&rows[..], 16, 6));
    let (three, i8, wide) = (
        plain(&[4, 2, 8]),
        typed(DataType::I8, &[4, 8]),
        plain(&[4, 9]),
    );
    let (line, long, fewer) = (plain(&[8]), plain(&[7]), plain(&[3, 8]));
    let (int, most, mut d) = (typed(DataType::I32, &[6]), plain(&[3, 6]), plain(&[3, 6]));
    let runs = [LoraRun {
        rows: 3,
        adapter: None,
    }];
    changed! { told, base(),
        "counts": |p| p.rows_per_rank = &[4];
        "rows of x": |p| p.x = Operand::from(&fewer);
        "x of one dimension": |p| p.x = Operand::from(&line);
        "x of i8": |p| p.x = Operand::from(&i8);
        "inner dimension": |p| p.x = Operand::from(&wide);
        "weight of one dimension": |p| p.weight = Operand::from(&line);
        "transposed weight": |p| p.transpose_weight = true;
        "transposed a": |p| p.transpose_a = true;
        "transposed with three dimensions": |p| (p.transpose_a, p.x) = (true, Operand::from(&three));
        "k over all ranks": |p| p.total_k = Some(7);
        "bias of i32": |p| p.bias = Some(int.view());
        "bias that is too long": |p| p.bias = Some(long.view());
        "bias of own rows": |p| p.bias = Some(most.view());
        "runs": |p| p.runs = &runs;
        "output of i64": |p| p.output = Output::Allocate(DataType::I64);
        "output of rank 0": |p| p.output = Output::Into(d.view_mut());
    }
    insta::assert_snapshot!(told.0);
}

/// What a call is signed with where the operands are special.
#[test]
fn signed_calls_of_special_operands() {
    let (w, rows) = (plain(&[8, 6]), [3, 1]);
    let three = plain(&[1, 2, 8]);
    let chunk = Chunk::Copy(Operand::from(&three));
    let p = AllGatherLoraLinearParams::new(chunk, &rows, &w);
    let call = p.check(&group(1, 2)).unwrap();
    assert!(
        call.inner == Some(2) && call.k == 16,
        "a row is 2 x 8 wide: {call:?}"
    );

    // op(A) is the transpose of what is gathered: K = 4 rows of all ranks, M = 8.
    let (x, w) = (plain(&[1, 8]), plain(&[4, 6]));
    let mut p = AllGatherLoraLinearParams::new(Chunk::Copy(Operand::from(&x)), &rows, &w);
    p.transpose_a = true;
    let call = p.check(&group(1, 2)).unwrap();
    assert!(call.transpose_a && call.k == 8 && call.n == 12, "{call:?}");

    let (kernel, scales) = (typed(DataType::I8, &[1, 8]), typed(DataType::F32, &[1]));
    let q = QView::new(kernel.view(), scales.view(), None, QScheme::Int8PerToken).unwrap();
    let w = plain(&[6, 8]);
    let mut p = AllGatherLoraLinearParams::new(Chunk::Copy(Operand::Quantized(q)), &rows, &w);
    (p.transpose_weight, p.total_n) = (true, Some(7));
    let call = p.check(&group(1, 2)).unwrap();
    let types = (call.input, call.output, call.scheme);
    assert_eq!(types, (DataType::I8, DataType::BF16, QScheme::Int8PerToken));
    assert_eq!(call.n, 7, "ranks with N of their own say the sum");
}
