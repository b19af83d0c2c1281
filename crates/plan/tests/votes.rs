//! What ranks vote on before they plan: equal for equal tables and engines, different for different ones.

use brigade_device::OverlapMode;
use brigade_plan::{
    Engines, Table,
    crossover::Least,
    transports::{Asked, Other},
    tuned::Threads,
};

fn threads(max_bytes: usize, threads: u16) -> Threads {
    Threads { max_bytes, threads }
}

#[test]
fn what_is_voted_on_tells_tables_and_engines_apart() {
    let table = Table::host;
    let with = |change: fn(&mut Table)| {
        let mut table = table();
        change(&mut table);
        table
    };
    let tables = [
        table(),
        with(|t| t.all_reduce.f32.one_shot_max_bytes = 1),
        with(|t| t.all_reduce.f16.one_shot_max_bytes = 1),
        with(|t| t.all_reduce.bf16.one_shot_max_bytes = 1),
        with(|t| t.all_reduce.bf16.pull_from_bytes = Some(1)),
        with(|t| t.all_reduce.bf16.pull_from_bytes = None),
        with(|t| t.all_reduce.bf16.max_blocks = 2),
        with(|t| t.all_reduce.bf16.threads = vec![threads(1, 32)]),
        with(|t| t.all_reduce.bf16.threads = vec![threads(1, 64)]),
        with(|t| t.all_reduce.bf16.threads = vec![threads(1, 32), threads(2, 64)]),
        with(|t| t.copies.push_max_bytes = Some(1)),
        with(|t| t.experts.plain.push_max_bytes = Some(1)),
        with(|t| t.experts.plain.push_back_max_bytes = Some(1)),
        with(|t| t.experts.plain.push_max_bytes_per_sm = 1),
        with(|t| t.experts.plain.rows_at_a_time = Some(1)),
        with(|t| t.experts.fp8.push_max_bytes = Some(1)),
        with(|t| t.experts.fp8.rows_at_a_time = Some(1)),
        with(|t| t.gather.bf16.least = Some(Least::Outputs(1))),
        with(|t| t.gather.int8.least = Some(Least::Outputs(1))),
        with(|t| t.gather.fp8.least = Some(Least::Outputs(1))),
        with(|t| t.gather.fp8.least = Some(Least::Multiplications(1))),
        with(|t| t.gather.fp8.least = None),
        with(|t| t.scatter.bf16.least = Some(Least::Outputs(1))),
        with(|t| t.scatter.int8.least = None),
        Table {
            overlap: OverlapMode::Pull,
            ..table()
        },
        Table {
            overlap: OverlapMode::Off,
            ..table()
        },
        Table {
            overlap: OverlapMode::Chunked { pieces: 1 },
            ..table()
        },
        Table {
            overlap: OverlapMode::Chunked { pieces: 2 },
            ..table()
        },
    ];
    for (i, a) in tables.iter().enumerate() {
        for (j, b) in tables.iter().enumerate() {
            assert_eq!(a.digest() == b.digest(), i == j, "{a:?} and {b:?}");
        }
    }
    // Where a figure comes from decides nothing.
    let told = with(|t| {
        t.gather.bf16.source = "elsewhere".into();
        t.all_reduce.f16.source = "elsewhere".into();
        t.copies.source = "elsewhere".into();
        t.experts.fp8.source = "elsewhere".into();
        t.experts.plain.others = vec![Other {
            transport: Asked::InPlace,
            from_bytes: Some(1),
        }];
    });
    assert_eq!(told.digest(), table().digest());
    // Stable over builds: a rank of yesterday's build may vote with one of today's.
    insta::assert_snapshot!(format!(
        "{:#018x} {:#b}",
        table().digest(),
        Engines::host().bits()
    ));
}
