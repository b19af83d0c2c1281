//! What slots get: added up over many calls, and of all ranks at once.

use super::{
    arrangements,
    case::{By, Case},
    config,
    own::{Own, check},
};
use crate::{backend::Rank, check::expect_invalid, suite::World};
use brigade_device::{AllGatherParams, Arrangement, Buffer, DataType, Route};

/// Where what a rank's slots get is added up, and what must be there: more than an i32 holds.
struct Totals {
    buffer: Buffer,
    want: Vec<i64>,
}

impl Totals {
    fn new(rank: &Rank, slots: usize) -> Self {
        let want: Vec<i64> = (0..slots as i64).map(|slot| (1 << 40) + slot).collect();
        let bytes = bytemuck::cast_slice(&want);
        Self {
            buffer: rank.upload_bytes(DataType::I64, &[slots], bytes),
            want,
        }
    }

    /// After so many dispatches more.
    fn check(&mut self, rank: &Rank, case: &Case, times: i64) {
        let got: Vec<i64> = bytemuck::pod_collect_to_vec(&rank.raw(self.buffer.view()));
        let more = case.counts(rank.rank);
        let all = self.want.iter_mut().zip(more);
        all.for_each(|(want, count)| *want += times * count);
        assert_eq!(got, self.want, "after {times} more of {case:?}");
    }
}

/// Call by call, the same ways again, and replay by replay.
pub fn totals(world: &World, by: By) {
    const REPLAYS: i64 = 3;
    let mut rng = world.rng();
    let cases: Vec<Case> = arrangements(by)
        .map(|arrangement| {
            let mut case = Case::random(&mut rng, world.size, (12, 16, 3, 7));
            case.arrangement = arrangement;
            // A graph needs it.
            let known = 12 * 3 * world.size + 7 * 16;
            case.room = (arrangement != Arrangement::BySource).then_some(known);
            case.by(by)
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut totals = Totals::new(rank, cases[0].slots()[rank.rank]);
        for case in &cases {
            let mut own = Own::of(rank, case);
            own.totals = Some(totals.buffer.clone());
            let there = own.dispatch(&mut lease, case).unwrap();
            check(rank, case, &there);
            totals.check(rank, case, 1);
            let route = Route::Again(&there.handle);
            own.dispatch_by(&mut lease, case, route).unwrap();
            totals.check(rank, case, 1);
            drop(lease);
            let graph = rank.device.capture(&rank.stream, &mut || {
                let mut lease = rank.lease();
                let there = own.dispatch(&mut lease, case)?;
                let route = Route::Again(&there.handle);
                own.dispatch_by(&mut lease, case, route).map(drop)
            });
            let graph = graph.unwrap();
            for _ in 0..REPLAYS {
                graph.launch(&rank.stream).unwrap();
            }
            totals.check(rank, case, 2 * REPLAYS);
            lease = rank.lease();
            // Who has nothing to count gets nothing added.
            own.totals = None;
            own.dispatch(&mut lease, case).unwrap();
            totals.check(rank, case, 0);
        }
        // What cannot be added to is named before anything is sent.
        let case = &cases[0];
        let slots = case.slots()[rank.rank];
        let mut own = Own::of(rank, case);
        for (field, wrong) in [
            ("totals.dtype", rank.poisoned(DataType::I32, &[slots])),
            ("totals.shape", rank.poisoned(DataType::I64, &[slots + 1])),
        ] {
            own.totals = Some(wrong);
            let result = own.dispatch(&mut lease, case);
            assert_eq!(expect_invalid(result, field), field);
        }
        totals.check(rank, case, 0);
        lease.barrier().unwrap();
    });
}

/// How often each rank's tokens name each slot, as all ranks get it from their layouts, in a graph too: what a balancer of experts wants.
pub fn of_all_ranks(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<Case> = [(20, 16, 3, 7), (9, 16, 8, 40), (0, 16, 2, 5)]
        .map(|dims| Case::random(&mut rng, world.size, dims))
        .into();
    world.run(&config(), move |rank| {
        for case in &cases {
            let slots: usize = case.slots().iter().sum();
            let named = |from: usize| {
                let mut named = vec![0i32; slots];
                for entry in 0..case.ids[from].len() {
                    if let Some(slot) = case.slot(from, entry / case.k, entry % case.k) {
                        named[slot] += 1;
                    }
                }
                named
            };
            let want: Vec<i32> = (0..rank.size).flat_map(named).collect();
            let own = Own::of(rank, case);
            let mut all = rank.poisoned(DataType::I32, &[rank.size * slots]);
            let mut gather = || {
                let mut lease = rank.lease();
                let layout = lease.expert_layout(own.routing(case))?;
                let params = AllGatherParams {
                    from: layout.rows_per_slot.view(),
                    rows_per_rank: &vec![slots; rank.size],
                    to: all.view_mut(),
                };
                lease.all_gather(params).map(drop)
            };
            gather().unwrap();
            let graph = rank.device.capture(&rank.stream, &mut gather).unwrap();
            let got = || -> Vec<i32> { bytemuck::pod_collect_to_vec(&rank.raw(all.view())) };
            assert_eq!(got(), want, "{case:?}");
            drop(graph.launch(&rank.stream).unwrap());
            assert_eq!(got(), want, "in a graph: {case:?}");
            rank.meet();
        }
    });
}
