//! Replays that a fault ends: nobody takes what they leave for a result, and after a reset the graph works again.

use super::Subject;
use crate::{
    check::{assert_kind, expect_fault, is_poisoned},
    faults::{AMPLE, impatient},
    suite::World,
};
use brigade_device::FaultKind;
use rand::{Rng, rngs::StdRng};

/// A rank does not launch its graph.
pub(super) fn stopped(world: &World, make: impl Fn(&mut StdRng, usize) -> Box<dyn Subject>) {
    let mut rng = world.rng();
    let subject = make(&mut rng, world.size);
    let culprit = rng.random_range(0..world.size);
    world.run(&impatient(), move |rank| {
        let mut captured = subject.capture(rank);
        let output = captured.replay(rank, &subject.input(rank.rank, 0));
        subject.check(rank, 0, &output);
        rank.meet();
        if rank.rank != culprit {
            rank.device
                .fill(&rank.stream, captured.output.view_mut(), 0x11)
                .unwrap();
            let launched = captured.graph.launch(&rank.stream);
            let ended = rank.settle(launched.and_then(|end| end.sync(AMPLE)));
            let record = expect_fault(ended, "a replay that a rank misses");
            assert_kind(&record, FaultKind::Timeout, "a replay");
            assert_eq!(record.peer as usize, culprit, "{record}");
            let output = rank.raw(captured.output.view());
            let left = crate::matrix::to_f64(captured.output.dtype(), &output);
            assert!(
                is_poisoned(captured.output.dtype(), &output),
                "not poisoned: {left:?}"
            );
        }
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        for day in [1, 2, 0] {
            let output = captured.replay(rank, &subject.input(rank.rank, day));
            subject.check(rank, day, &output);
        }
    });
}
