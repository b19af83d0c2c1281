//! What ranks vote on before they plan: equal for equal tables and engines, different for different ones.

use brigade_device::OverlapMode;
use brigade_plan::{Engines, Table};

#[test]
fn what_is_voted_on_tells_tables_and_engines_apart() {
    let table = Table::host;
    let tables = [
        table(),
        Table {
            one_shot_max_bytes: 1,
            ..table()
        },
        Table {
            gather_min_chunk_bytes: 1,
            ..table()
        },
        Table {
            scatter_min_chunk_bytes: 1,
            ..table()
        },
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
    // Stable over builds: a rank of yesterday's build may vote with one of today's.
    insta::assert_snapshot!(format!(
        "{:#018x} {:#b}",
        table().digest(),
        Engines::host().bits()
    ));
}
