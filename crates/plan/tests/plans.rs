//! Plans as text: what is chosen for which call, and for which reason not.

mod common;

use brigade_device::*;
use brigade_plan::{
    Engines, Table, Topology, plan, ring, rows,
    tuned::{ByType, Figures},
};
use common::*;
use std::fmt::Write;

#[test]
fn schedules_of_worlds_1_to_8() {
    let mut text = String::new();
    for size in 1..=8 {
        writeln!(text, "world {size}: gather | pull | scatter | ring sends").unwrap();
        for rank in 0..size {
            writeln!(
                text,
                "  {rank}: {:?} | {:?} | {:?} | {:?}",
                ring::gather_order(rank, size),
                ring::pull_order(rank, size),
                ring::scatter_order(rank, size),
                ring::ring_sends(rank, size),
            )
            .unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn rows_over_ranks_and_pieces() {
    let mut text = String::new();
    for size in 1..=8 {
        for total in [0, 1, 7, 64, 100] {
            let split = rows::split(total, size);
            let offsets = rows::offsets(&split);
            writeln!(text, "{total:>3} over {size}: {split:?} at {offsets:?}").unwrap();
        }
    }
    for (rows, pieces) in [(0, 3), (2, 3), (7, 3), (64, 16), (5, 1)] {
        let cut: Vec<_> = (0..pieces).map(|p| rows::piece(rows, pieces, p)).collect();
        writeln!(text, "{rows} rows in {pieces} pieces: {cut:?}").unwrap();
    }
    insta::assert_snapshot!(text);
}

#[test]
fn modes_of_worlds_1_to_8() {
    let mut text = String::new();
    for size in 1..=8 {
        // Ragged, and in worlds of more than two the middle rank has nothing.
        let rows: Vec<_> = (0..size)
            .map(|r| if size > 2 && r == size / 2 { 0 } else { 60 + r })
            .collect();
        writeln!(text, "world {size}, rows {rows:?}").unwrap();
        for choice in CHOICES {
            let call = LinearCall {
                choice,
                ..linear(&rows)
            };
            for (name, call) in both(&call) {
                let plan = plan(&call, &topology(size - 1, size), &Table::host());
                let choice = common::choice(choice);
                writeln!(text, "  {name} {choice:<10} -> {}", line(&plan)).unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

/// One wrong thing at a time, with no mode forced, with the ring forced, and with off forced.
#[test]
fn reasons_against_overlap() {
    type Change = fn(&mut LinearCall, &mut Topology, &mut Table);
    let cases: &[(&str, Change)] = &[
        ("nothing is wrong", |_, _, _| {}),
        ("one rank", |c, t, _| {
            t.group.size = 1;
            c.rows.truncate(1);
        }),
        ("a group that does not overlap", |_, t, _| {
            t.group.mode = ParallelMode::Ep;
        }),
        ("scheme with one int8 scale", |c, _, _| {
            c.scheme = QScheme::Int8PerTensor;
        }),
        ("scheme of the weight alone", |c, _, _| {
            c.scheme = QScheme::Int8WeightOnly;
        }),
        ("scheme with scales per block", |c, _, _| {
            c.scheme = QScheme::Fp8PerTokenBlock;
        }),
        ("transposed", |c, _, _| c.transpose_a = true),
        ("three dimensions", |c, _, _| c.inner = Some(2)),
        ("regions of 128 KiB", |_, t, _| {
            t.config.gather_bytes = 128 << 10;
            t.config.reduce_scatter_bytes = 128 << 10;
        }),
        ("no room for scales per token", |c, t, _| {
            c.scheme = QScheme::Int8PerToken;
            c.input = DataType::I8;
            t.config.gather_scale_bytes = 4 * 255;
        }),
        ("just enough room for scales per token", |c, t, _| {
            c.scheme = QScheme::Int8PerToken;
            c.input = DataType::I8;
            t.config.gather_scale_bytes = 4 * 256;
        }),
        ("no room for a scale per rank", |c, t, _| {
            c.scheme = QScheme::Fp8PerTensor;
            c.input = DataType::F8E4M3;
            t.config.gather_scale_bytes = 4 * 3;
        }),
        ("no rows", |c, _, _| c.rows = [0; 4].as_slice().into()),
        ("no columns", |c, _, _| (c.k, c.n) = (0, 0)),
        ("chunks that are too small", |c, _, _| {
            c.rows = [1; 4].as_slice().into();
        }),
        ("a table that prefers off", |_, _, t| {
            t.overlap = OverlapMode::Off;
        }),
        ("a table that prefers pull", |_, _, t| {
            t.overlap = OverlapMode::Pull;
        }),
        ("a table that prefers 40 pieces", |_, _, t| {
            t.overlap = OverlapMode::Chunked { pieces: 40 };
        }),
        ("a device without ring", |_, t, _| t.engines.ring = false),
        ("a device with no engine", |_, t, _| {
            t.engines = Engines::default();
        }),
        ("counts for another world", |c, _, _| {
            c.rows.push(1);
        }),
        ("counts that overflow", |c, _, _| {
            c.rows = [usize::MAX, 1, 1, 1].as_slice().into();
        }),
        ("sizes that overflow", |c, _, _| {
            (c.k, c.n) = (usize::MAX, usize::MAX);
        }),
    ];
    let (mut text, mut reasons) = (String::new(), Vec::<Reason>::new());
    for (name, change) in cases {
        writeln!(text, "{name}").unwrap();
        for forced in [None, Some(OverlapMode::Ring), Some(OverlapMode::Off)] {
            let (mut call, mut topology, mut table) =
                (linear(&[64; 4]), topology(0, 4), Table::host());
            change(&mut call, &mut topology, &mut table);
            call.choice = forced;
            for (operation, call) in both(&call) {
                let plan = plan(&call, &topology, &table);
                let why = match &plan {
                    Ok(Plan::GatherLinear(p) | Plan::LinearReduceScatter(p)) => {
                        p.instead_of.clone()
                    }
                    other => other.as_ref().err().cloned(),
                };
                let got = match &plan {
                    Ok(Plan::GatherLinear(p) | Plan::LinearReduceScatter(p)) => p.mode.to_string(),
                    _ => "error".into(),
                };
                let code = why.as_ref().map_or("", |r| r.code);
                let line = format!("  {operation} {:<5} -> {got} {code}", choice(forced));
                writeln!(text, "{}", line.trim_end()).unwrap();
                reasons.extend(why.filter(|r| !reasons.contains(r)));
            }
        }
    }
    insta::assert_snapshot!(text);
    insta::assert_snapshot!("texts_of_overlap_reasons", told(&reasons));
}

fn told(reasons: &[Reason]) -> String {
    reasons
        .iter()
        .map(|r| format!("{}: {r}\n", r.code))
        .collect()
}

#[test]
fn a_number_of_pieces_is_checked_even_for_one_rank() {
    let mut text = String::new();
    for (size, pieces) in [(1, 0), (1, 1), (4, 0), (4, 1), (4, 16), (4, 17)] {
        let call = LinearCall {
            choice: Some(OverlapMode::Chunked { pieces }),
            ..linear(&rows::split(256, size))
        };
        for (operation, call) in both(&call) {
            let plan = plan(&call, &topology(0, size), &Table::host());
            let line = line(&plan);
            writeln!(
                text,
                "world {size} {operation} {pieces:>2} pieces -> {line}"
            )
            .unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn all_reduce() {
    use AllReduceAlgorithm::*;
    let with_nccl = Engines {
        nccl: true,
        ..Engines::host()
    };
    let only_nccl = Engines {
        nccl: true,
        ..Engines::default()
    };
    let devices = [
        ("host", Engines::host(), Some(0), 8 << 20),
        (
            "where pushing pays, and with nccl",
            with_nccl,
            Some(1 << 20),
            8 << 20,
        ),
        ("where pushing would pay", Engines::host(), None, 16),
        ("cuda", Engines::cuda(true, true), None, 8 << 20),
        ("nccl alone", only_nccl, None, 8 << 20),
    ];
    let mut text = String::new();
    for (name, engines, pull_from_bytes, all_reduce_bytes) in devices {
        writeln!(text, "{name}, {all_reduce_bytes} bytes to push through").unwrap();
        let mut topology = Topology {
            engines,
            ..topology(0, 4)
        };
        topology.config.all_reduce_bytes = all_reduce_bytes;
        let mut table = Table::host();
        for figures in [&mut table.all_reduce.f32, &mut table.all_reduce.bf16] {
            figures.pull_from_bytes = pull_from_bytes;
        }
        let run = |elements, dtype, output, choice| {
            let call = Call::AllReduce {
                elements,
                dtype,
                output,
                op: ReduceOp::Sum,
                choice,
            };
            line(&plan(&call, &topology, &table))
        };
        for elements in [0, 1, 1 << 14, (1 << 14) + 1, 1 << 20] {
            let got = run(elements, DataType::F32, DataType::F32, None);
            writeln!(text, "  {elements:>7} f32 auto -> {got}").unwrap();
        }
        for choice in [OneShotPush, OneShotPull, TwoShotPush, TwoShot, Nccl] {
            let got = run(100, DataType::BF16, DataType::BF16, Some(choice));
            writeln!(text, "  100 bf16 {choice:?} -> {got}").unwrap();
        }
        for (input, output) in [
            (DataType::BF16, DataType::F32),
            (DataType::F16, DataType::BF16),
            (DataType::F64, DataType::F64),
            (DataType::I32, DataType::I32),
        ] {
            let got = run(100, input, output, None);
            writeln!(text, "  100 {input} to {output} auto -> {got}").unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

/// All-reduces with a norm: pieces are whole rows, and a row that no buffer holds is pulled, or a reason.
#[test]
fn norms() {
    use AllReduceAlgorithm::*;
    let mut text = String::new();
    let rooms = [
        ("ample room", 8 << 20, 1 << 20),
        ("small buffers", 10_000, 1 << 20),
        ("small buffers and scratch", 10_000, 4096),
    ];
    for (name, all_reduce_bytes, scratch_bytes) in rooms {
        writeln!(text, "{name}").unwrap();
        let mut topology = topology(0, 4);
        topology.config.all_reduce_bytes = all_reduce_bytes;
        topology.config.scratch_bytes = scratch_bytes;
        let mut table = Table::host();
        table.all_reduce = ByType::all(Figures {
            pull_from_bytes: None,
            max_blocks: 132,
            ..table.all_reduce.bf16.clone()
        });
        for (rows, hidden) in [(0, 100), (1, 100), (33, 100), (512, 1024)] {
            for choice in [
                None,
                Some(OneShotPush),
                Some(TwoShotPush),
                Some(TwoShot),
                Some(Nccl),
            ] {
                let call = Call::AllReduceNorm {
                    rows,
                    hidden,
                    dtype: DataType::BF16,
                    scheme: QScheme::None,
                    eps_bits: 0,
                    scale_bits: None,
                    choice,
                };
                let got = line(&plan(&call, &topology, &table));
                writeln!(text, "  {rows} x {hidden} {choice:?} -> {got}").unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

/// Everything whose plan is a size of pieces, with the default scratch of 1 MiB and with the least there may be.
#[test]
fn pieces_of_the_scratch_memory() {
    let mut text = String::new();
    let ragged = |size: usize| -> PerRank { (0..size).map(|r| 1000 * r).collect() };
    for scratch_bytes in [1 << 20, 4096] {
        for size in [1, 3, 8, 64, 1024] {
            writeln!(text, "scratch {scratch_bytes}, world {size}").unwrap();
            let mut topology = topology(0, size);
            topology.config.scratch_bytes = scratch_bytes;
            let (dtype, output) = (DataType::BF16, DataType::F32);
            let (rows, row_len, op) = (ragged(size), 100, ReduceOp::Sum);
            let calls = [
                Call::AllGather {
                    rows: rows.clone(),
                    row_len,
                    dtype,
                },
                Call::ReduceScatter {
                    rows,
                    row_len,
                    dtype,
                    output,
                    op,
                },
                Call::Broadcast {
                    elements: 1 << 20,
                    dtype,
                    root: size - 1,
                },
                Call::AllToAll { row_len, dtype },
                Call::AllReduce {
                    elements: 1 << 20,
                    dtype,
                    output,
                    op,
                    choice: None,
                },
            ];
            for call in calls {
                let got = line(&plan(&call, &topology, &Table::host()));
                writeln!(text, "  {} -> {got}", call.operation()).unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn texts_of_other_reasons() {
    let mut small = topology(0, 1024);
    small.config.scratch_bytes = 4096;
    let no_engine = Topology {
        engines: Engines::default(),
        ..topology(0, 4)
    };
    let reduce = |dtype, choice| Call::AllReduce {
        elements: 1,
        dtype,
        output: dtype,
        op: ReduceOp::Sum,
        choice,
    };
    let broadcast = Call::Broadcast {
        elements: 1,
        dtype: DataType::U8,
        root: 4,
    };
    let all_to_all = Call::AllToAll {
        row_len: 1,
        dtype: DataType::U8,
    };
    let pulled = LinearCall {
        choice: Some(OverlapMode::Pull),
        ..linear(&[64; 4])
    };
    let norm = Call::AllReduceNorm {
        rows: 1,
        hidden: 3000,
        dtype: DataType::F32,
        scheme: QScheme::None,
        eps_bits: 0,
        scale_bits: None,
        choice: None,
    };
    let mut short = topology(0, 4);
    short.config.scratch_bytes = 4096;
    short.config.all_reduce_bytes = 0;
    let cases = [
        (norm.clone(), no_engine.clone()),
        (norm, short),
        (broadcast, topology(0, 4)),
        (all_to_all, small),
        (reduce(DataType::F64, None), topology(0, 4)),
        (reduce(DataType::F32, None), no_engine),
        (
            reduce(DataType::F32, Some(AllReduceAlgorithm::Nccl)),
            topology(0, 4),
        ),
        (Call::LinearReduceScatter(pulled), topology(0, 4)),
    ];
    let reasons: Vec<_> = cases
        .iter()
        .map(|(call, topology)| plan(call, topology, &Table::host()).unwrap_err())
        .collect();
    insta::assert_snapshot!(told(&reasons));
}

#[test]
fn calls_without_data_have_nothing_to_cut() {
    for call in [
        Call::Barrier,
        Call::Register { bytes: 100 },
        Call::Deregister { region: 0 },
        Call::Close,
    ] {
        let plan = plan(&call, &topology(0, 4), &Table::host());
        assert_eq!(line(&plan), "0 pieces of 0", "{call:?}");
    }
}
