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
    AllGatherLoraLinearParams, Chunk, Filled, GatherLinear, Lease, OverlapMode, Result,
};

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

/// A new generation knows no old tokens.
fn reset(world: &World) {
    with_cases(world, |rank, [first, second], choice| {
        let mut lease = rank.lease();
        let filled = fill(rank, first, &mut lease);
        drop(lease);
        rank.comm().reset(AMPLE).unwrap();
        let mut lease = rank.lease();
        let refused = call(rank, first, &mut lease, filled, choice);
        assert_eq!(expect_invalid(refused, "a token from before"), "chunk");
        let filled = fill(rank, second, &mut lease);
        assert_result(rank, second, call(rank, second, &mut lease, filled, choice));
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
}
