//! Fault records and signatures: what travels between ranks as numbers.
#![allow(clippy::unwrap_used)]

use brigade_device::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const KINDS: [FaultKind; 5] = [
    FaultKind::Timeout,
    FaultKind::Mismatch,
    FaultKind::Aborted,
    FaultKind::PeerLost,
    FaultKind::Overflow,
];

fn record(kind: FaultKind) -> FaultRecord {
    FaultRecord {
        kind,
        operation: Operation::GatherLinear as u32,
        rank: 1,
        peer: 3,
        slot: 2,
        generation: 4,
        expected: 0x0400_0001_0000_0007,
        seen: 0x0400_0001_0000_0006,
        waited_ns: 60_000_123_456,
        call: 12,
        claimed: 1,
        across: 0,
    }
}

proptest! {
    #[test]
    fn a_record_survives_its_words(
        kind in prop::sample::select(KINDS.to_vec()),
        small in any::<[u32; 7]>(),
        large in any::<[u64; 4]>(),
    ) {
        let [operation, rank, peer, slot, generation, claimed, across] = small;
        let [expected, seen, waited_ns, call] = large;
        let record = FaultRecord {
            kind, operation, rank, peer, slot, generation, expected, seen, waited_ns, call, claimed, across,
        };
        prop_assert_eq!(FaultRecord::from_words(record.to_words()), Some(record));
    }

    #[test]
    fn words_survive_their_record(words in any::<[u64; 8]>()) {
        match FaultRecord::from_words(words) {
            Some(record) => prop_assert_eq!(record.to_words(), words),
            None => prop_assert!(!(1..=5).contains(&(words[0] as u32))),
        }
    }
}

/// Kernels write the record as a struct: its words are its bytes.
#[test]
fn words_lie_as_the_struct_does() {
    let words = record(FaultKind::Overflow).to_words();
    let low = |i: usize| words[i] as u32;
    let high = |i: usize| (words[i] >> 32) as u32;
    assert_eq!((low(0), high(0)), (5, 8), "kind, operation");
    assert_eq!((low(1), high(1)), (1, 3), "rank, peer");
    assert_eq!((low(2), high(2)), (2, 4), "slot, generation");
    assert_eq!(words[3], 0x0400_0001_0000_0007, "expected");
    assert_eq!((low(7), high(7)), (1, 0), "claimed, across");
    assert_eq!(std::mem::offset_of!(FaultRecord, expected), 24);
    assert_eq!(std::mem::offset_of!(FaultRecord, claimed), 56);
    assert_eq!(size_of::<FaultRecord>(), 64);
}

#[test]
fn codes_and_names_are_each_others_inverse() {
    for kind in KINDS {
        assert_eq!(FaultKind::from_code(kind as u32), Some(kind));
    }
    let operations: Vec<_> = (0..100).filter_map(Operation::from_code).collect();
    let codes: Vec<_> = operations.iter().map(|&o| o as u32).collect();
    assert_eq!(codes, (1..=21).collect::<Vec<_>>());
    let mut names: Vec<_> = operations.iter().map(|o| o.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), operations.len());
    for code in [0, 6, u32::MAX] {
        assert_eq!(FaultKind::from_code(code), None);
    }
}

#[test]
fn texts_of_faults() {
    let mut text: String = KINDS
        .map(|k| format!("{}\n", Error::Fault(record(k))))
        .concat();
    let unknown = FaultRecord {
        operation: 77,
        ..record(FaultKind::Timeout)
    };
    text += &unknown.to_string();
    insta::assert_snapshot!(text);
}

#[test]
fn errors_are_small_and_can_be_passed_around() {
    fn free<T: Clone + Send + Sync + 'static>() {}
    free::<Error>();
    // Every result of every call carries room for one; clippy draws its line at 128.
    assert!(size_of::<Error>() < 128, "{}", size_of::<Error>());
}

type Changes<T> = [(&'static str, fn(&mut T))];

/// Signatures of `base` and of it after each change.
fn variants<T: Clone>(
    name: &str,
    base: &T,
    changes: &Changes<T>,
    call: impl Fn(T) -> Call,
) -> Vec<(String, u32)> {
    let mut all = vec![(name.to_string(), call(base.clone()).signature())];
    for (field, change) in changes {
        let mut changed = base.clone();
        change(&mut changed);
        all.push((format!("{name}.{field}"), call(changed).signature()));
    }
    all
}

fn per_rank(rows: &[usize]) -> PerRank {
    rows.into()
}

fn linears() -> Vec<(String, u32)> {
    let base = LinearCall {
        rows: per_rank(&[4, 4]),
        k: 16,
        n: 8,
        input: DataType::BF16,
        output: DataType::BF16,
        scheme: QScheme::None,
        lora: false,
        transpose_a: false,
        inner: None,
        choice: None,
    };
    let changes: &Changes<LinearCall> = &[
        ("rows", |c| c.rows = per_rank(&[5, 3])),
        ("rows, longer", |c| c.rows.push(0)),
        ("k", |c| c.k = 17),
        ("n", |c| c.n = 16),
        ("k and n", |c| (c.k, c.n) = (8, 16)),
        ("input", |c| c.input = DataType::F16),
        ("output", |c| c.output = DataType::F16),
        ("scheme", |c| c.scheme = QScheme::Int8PerToken),
        ("lora", |c| c.lora = true),
        ("transpose_a", |c| c.transpose_a = true),
        ("inner", |c| c.inner = Some(2)),
        ("another inner", |c| c.inner = Some(3)),
        ("choice off", |c| c.choice = Some(OverlapMode::Off)),
        ("choice ring", |c| c.choice = Some(OverlapMode::Ring)),
        ("choice 2 pieces", |c| {
            c.choice = Some(OverlapMode::Chunked { pieces: 2 });
        }),
        ("choice 3 pieces", |c| {
            c.choice = Some(OverlapMode::Chunked { pieces: 3 });
        }),
    ];
    let mut all = variants("gather_linear", &base, changes, Call::GatherLinear);
    all.extend(variants(
        "linear_reduce_scatter",
        &base,
        changes,
        Call::LinearReduceScatter,
    ));
    all
}

fn collectives() -> Vec<(String, u32)> {
    let sum = ReduceOp::Sum;
    let (f32, bf16) = (DataType::F32, DataType::BF16);
    let reduce = |elements, dtype, output, op, choice| Call::AllReduce {
        elements,
        dtype,
        output,
        op,
        choice,
    };
    let gather = |rows: &[usize], row_len, dtype| Call::AllGather {
        rows: per_rank(rows),
        row_len,
        dtype,
    };
    let scatter = |rows: &[usize], row_len, dtype, output, op| Call::ReduceScatter {
        rows: per_rank(rows),
        row_len,
        dtype,
        output,
        op,
    };
    let broadcast = |elements, dtype, root| Call::Broadcast {
        elements,
        dtype,
        root,
    };
    let two_shot = Some(AllReduceAlgorithm::TwoShot);
    let norm = |rows, hidden, dtype, scheme, (eps_bits, scale_bits), choice| Call::AllReduceNorm {
        rows,
        hidden,
        dtype,
        scheme,
        eps_bits,
        scale_bits,
        choice,
    };
    let (none, fp8) = (QScheme::None, QScheme::Fp8PerTensor);
    [
        norm(8, 64, bf16, none, (1, None), None),
        norm(9, 64, bf16, none, (1, None), None),
        norm(8, 65, bf16, none, (1, None), None),
        norm(8, 64, f32, none, (1, None), None),
        norm(8, 64, bf16, QScheme::Int8PerToken, (1, None), None),
        norm(8, 64, bf16, none, (2, None), None),
        norm(8, 64, bf16, fp8, (1, Some(1)), None),
        norm(8, 64, bf16, fp8, (1, Some(2)), None),
        norm(8, 64, bf16, none, (1, None), two_shot),
        Call::Barrier,
        Call::Close,
        Call::Register { bytes: 64 },
        Call::Register { bytes: 65 },
        Call::Deregister { region: 0 },
        Call::Deregister { region: 1 },
        reduce(64, bf16, bf16, sum, None),
        reduce(65, bf16, bf16, sum, None),
        reduce(64, f32, bf16, sum, None),
        reduce(64, bf16, f32, sum, None),
        reduce(64, bf16, bf16, ReduceOp::Avg, None),
        reduce(64, bf16, bf16, sum, two_shot),
        gather(&[4, 4], 8, bf16),
        gather(&[3, 5], 8, bf16),
        gather(&[4, 4], 9, bf16),
        gather(&[4, 4], 8, f32),
        scatter(&[4, 4], 8, bf16, bf16, sum),
        scatter(&[5, 3], 8, bf16, bf16, sum),
        scatter(&[4, 4], 7, bf16, bf16, sum),
        scatter(&[4, 4], 8, f32, bf16, sum),
        scatter(&[4, 4], 8, bf16, f32, sum),
        scatter(&[4, 4], 8, bf16, bf16, ReduceOp::Max),
        broadcast(64, bf16, 0),
        broadcast(65, bf16, 0),
        broadcast(64, f32, 0),
        broadcast(64, bf16, 1),
        Call::AllToAll {
            row_len: 8,
            dtype: bf16,
        },
        Call::AllToAll {
            row_len: 9,
            dtype: bf16,
        },
        Call::AllToAll {
            row_len: 8,
            dtype: f32,
        },
    ]
    .into_iter()
    .map(|c| (format!("{c:?}"), c.signature()))
    .collect()
}

#[test]
fn every_field_of_a_call_is_signed() {
    let mut seen = BTreeMap::new();
    for (name, signature) in linears().into_iter().chain(collectives()) {
        assert!((1..1 << 24).contains(&signature), "{name}: {signature:#x}");
        if let Some(other) = seen.insert(signature, name.clone()) {
            panic!("{name} and {other} have the same signature");
        }
    }
    assert_eq!(seen.len(), 2 * 17 + 38);
}

#[test]
fn equal_calls_have_equal_signatures() {
    // A list that lies on the heap, and one that lies inline.
    let mut heap = PerRank::with_capacity(100);
    heap.extend([1, 2]);
    let call = |rows| Call::AllGather {
        rows,
        row_len: 8,
        dtype: DataType::F32,
    };
    let (a, b) = (call(heap), call(per_rank(&[1, 2])));
    assert_eq!((a.signature(), &a), (b.signature(), &b));
}
