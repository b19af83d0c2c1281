//! Own rows written straight into the user buffer: the token that proves it is spent once, and only the last one counts.

use super::{Case, config};
use crate::{
    backend::Rank,
    check::{assert_close, expect_invalid},
    faults::AMPLE,
    layer::Spec,
    suite::{Suite, World},
    themes::modes,
};
use brigade_device::{
    AllGatherLoraLinearParams, Chunk, CommConfig, DataType, Filled, GatherLinear, Lease,
    OverlapMode, ParallelMode, Result,
};
use rand::Rng;

fn fill(rank: &Rank, case: &Case, lease: &mut Lease<'_>) -> Filled {
    let x = rank.upload(&case.x[rank.rank]);
    let mut space = lease
        .own_chunk(&case.spec.rows, case.spec.k[0], case.spec.dtype)
        .unwrap();
    rank.device
        .copy(&rank.stream, space.view_mut(), x.view())
        .unwrap();
    space.filled()
}

fn call<'l>(
    rank: &Rank,
    case: &Case,
    lease: &'l mut Lease<'_>,
    filled: Filled,
    choice: Option<OverlapMode>,
) -> Result<GatherLinear<'l>> {
    let layer = case.layers[rank.rank].upload(rank);
    lease.all_gather_lora_linear(AllGatherLoraLinearParams {
        choice: case.spec.choice(choice),
        ..AllGatherLoraLinearParams::new(Chunk::Resident(filled), &case.spec.rows, &layer.weight)
    })
}

fn assert_result(rank: &Rank, case: &Case, result: Result<GatherLinear<'_>>) {
    let d = result.unwrap().d.unwrap();
    let (got, want) = (rank.values(d.view()), &case.want[rank.rank]);
    assert_close(&got, want, case.spec.dtype, "resident rows");
}

fn with_cases(
    world: &World,
    body: impl Fn(&Rank, &[Case; 2], Option<OverlapMode>) + Send + Sync + 'static,
) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let cases = [spec.clone(), spec].map(|s| Case::new(&mut rng, s));
    let choices: Vec<_> = modes(world.backend.engines())
        .into_iter()
        .flat_map(|(_, choices)| choices)
        .collect();
    world.run(&config(), move |rank| {
        choices
            .iter()
            .for_each(|&choice| body(rank, &cases, choice));
    });
}

/// Handed out anew, the space has a new token; the old one is refused, and the new one works.
fn stale(world: &World) {
    with_cases(world, |rank, [first, second], choice| {
        let mut lease = rank.lease();
        let old = fill(rank, first, &mut lease);
        let new = fill(rank, second, &mut lease);
        let refused = call(rank, first, &mut lease, old, choice);
        assert_eq!(expect_invalid(refused, "a stale token"), "chunk");
        assert_result(rank, second, call(rank, second, &mut lease, new, choice));
    });
}

/// Rows that were copied in spend the space that was handed out before.
fn spent(world: &World) {
    with_cases(world, |rank, [first, second], choice| {
        let mut lease = rank.lease();
        let filled = fill(rank, first, &mut lease);
        drop(lease);
        second.run(rank, choice);
        let mut lease = rank.lease();
        let refused = call(rank, first, &mut lease, filled, choice);
        assert_eq!(expect_invalid(refused, "a spent token"), "chunk");
        drop(lease);
        first.run(rank, choice);
    });
}

/// Space that was handed out and never used does no harm.
fn dropped(world: &World) {
    with_cases(world, |rank, [first, second], choice| {
        for case in [first, second, first] {
            let mut lease = rank.lease();
            drop(lease.own_chunk(&case.spec.rows, case.spec.k[0], case.spec.dtype));
            drop(lease);
            case.run(rank, choice);
        }
    });
}

/// Other calls between filling the space and using it.
fn calls_between(world: &World) {
    let probe = crate::faults::Probe::new(&mut world.rng(), world.size);
    with_cases(world, move |rank, [first, _], choice| {
        let mut lease = rank.lease();
        let filled = fill(rank, first, &mut lease);
        drop(lease);
        probe.sum(rank);
        let mut lease = rank.lease();
        assert_result(rank, first, call(rank, first, &mut lease, filled, choice));
    });
}

/// A token of another shape than the call's.
fn other_shape(world: &World) {
    with_cases(world, |rank, [first, _], choice| {
        let mut lease = rank.lease();
        let filled = fill(rank, first, &mut lease);
        let layer = first.layers[rank.rank].upload(rank);
        let mut rows = first.spec.rows.clone();
        rows[rank.rank] += 1;
        let chunk = Chunk::Resident(filled);
        let refused = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            choice: first.spec.choice(choice),
            ..AllGatherLoraLinearParams::new(chunk, &rows, &layer.weight)
        });
        assert_eq!(expect_invalid(refused, "another shape"), "chunk.shape");
        drop(lease);
        first.run(rank, choice);
    });
}

/// Own rows lie behind those of the ranks before: with other counts they would be looked for elsewhere.
fn other_counts(world: &World) {
    with_cases(world, |rank, [first, _], choice| {
        let mut lease = rank.lease();
        let filled = fill(rank, first, &mut lease);
        let layer = first.layers[rank.rank].upload(rank);
        let mut rows = first.spec.rows.clone();
        rows[(rank.rank + 1) % rank.size] += 1;
        let chunk = Chunk::Resident(filled);
        let refused = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            choice: first.spec.choice(choice),
            ..AllGatherLoraLinearParams::new(chunk, &rows, &layer.weight)
        });
        assert_eq!(expect_invalid(refused, "other counts"), "chunk");
        drop(lease);
        first.run(rank, choice);
    });
}

/// A new generation knows no old tokens, whether it has handed out as many itself or none.
fn reset(world: &World) {
    with_cases(world, |rank, [first, second], choice| {
        for anew in [false, true] {
            rank.comm().reset(AMPLE).unwrap();
            let old = fill(rank, first, &mut rank.lease());
            rank.comm().reset(AMPLE).unwrap();
            let mut lease = rank.lease();
            let before = anew.then(|| fill(rank, second, &mut lease));
            let refused = call(rank, first, &mut lease, old, choice);
            assert_eq!(expect_invalid(refused, "a token from before"), "chunk");
            let new = before.unwrap_or_else(|| fill(rank, second, &mut lease));
            assert_result(rank, second, call(rank, second, &mut lease, new, choice));
        }
    });
}

/// A token of another communicator of the same ranks, which has handed out as much: refused to the one rank that has taken it for
/// its own, before anybody hears of a call.
fn other_communicator(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let cases = [spec.clone(), spec].map(|s| Case::new(&mut rng, s));
    let mistaken = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        let [first, second] = &cases;
        let other = rank.join_another(&CommConfig {
            mode: ParallelMode::FfnTp,
            ..config()
        });
        for choice in [None, Some(OverlapMode::Off)] {
            let mut ours = rank.lease();
            let mut theirs = other.lease(&rank.stream).unwrap();
            let filled = fill(rank, first, &mut ours);
            let foreign = fill(rank, second, &mut theirs);
            if rank.rank == mistaken {
                let refused = call(rank, first, &mut ours, foreign, choice);
                assert_eq!(expect_invalid(refused, "another's token"), "chunk");
            }
            assert_result(rank, first, call(rank, first, &mut ours, filled, choice));
            let filled = fill(rank, second, &mut theirs);
            assert_result(
                rank,
                second,
                call(rank, second, &mut theirs, filled, choice),
            );
        }
    });
}

/// A token of one that holds more: rows as wide have no place here.
fn larger_communicator(world: &World) {
    const COLUMNS: usize = 2048;
    world.run(&config(), |rank| {
        let small = CommConfig {
            mode: ParallelMode::FfnTp,
            gather_bytes: 4096,
            ..config()
        };
        let small = rank.join_another(&small);
        let (mut ours, mut theirs) = (rank.lease(), small.lease(&rank.stream).unwrap());
        let rows = vec![2; rank.size];
        let wide = ours.own_chunk(&rows, COLUMNS, DataType::F32).unwrap();
        let foreign = wide.filled();
        // As many have been handed out there.
        drop(theirs.own_chunk(&rows, 4, DataType::F32).unwrap());
        let weight = rank.poisoned(DataType::F32, &[COLUMNS, 3]);
        let chunk = Chunk::Resident(foreign);
        let call = AllGatherLoraLinearParams::new(chunk, &rows, &weight);
        let refused = theirs.all_gather_lora_linear(call);
        assert_eq!(expect_invalid(refused, "a larger one's token"), "chunk");
        theirs.barrier().unwrap();
        ours.barrier().unwrap();
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("gather_linear/tokens/stale", stale);
    suite.add("gather_linear/tokens/spent", spent);
    suite.add("gather_linear/tokens/dropped", dropped);
    suite.add("gather_linear/tokens/calls_between", calls_between);
    suite.add("gather_linear/tokens/other_shape", other_shape);
    suite.add_from(2, "gather_linear/tokens/other_counts", other_counts);
    suite.add("gather_linear/tokens/reset", reset);
    suite.add(
        "gather_linear/tokens/other_communicator",
        other_communicator,
    );
    suite.add(
        "gather_linear/tokens/larger_communicator",
        larger_communicator,
    );
}
