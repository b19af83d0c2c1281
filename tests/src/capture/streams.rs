//! One communicator on two streams, by leases and by launches of a graph: each comes behind what was enqueued before it, wherever that was.

use crate::{backend::Rank, faults::AMPLE, suite::World};
use brigade_device::{AllReduceParams, Buffer, DataType, ReduceOp, Stream};
use rand::Rng;

/// Whole numbers of a rank, whose sums are exact.
fn own(rank: usize, elements: usize, salt: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7 + rank * 13 + salt * 29) % 97 + 1) as f32;
    (0..elements).map(value).collect()
}

fn sums(size: usize, elements: usize, salt: usize) -> Vec<f64> {
    let mut sum = vec![0.0; elements];
    for rank in 0..size {
        let own = own(rank, elements, salt);
        sum.iter_mut()
            .zip(own)
            .for_each(|(s, v)| *s += f64::from(v));
    }
    sum
}

fn reduce(rank: &Rank, on: &Stream, from: &Buffer, to: &mut Buffer) {
    let mut lease = rank.comm().lease(on).unwrap();
    let params = AllReduceParams {
        data: to.view_mut(),
        from: Some(from.view()),
        op: ReduceOp::Sum,
        choice: None,
    };
    lease.all_reduce(params).unwrap();
}

/// What comes next: a launch or a lease, and on which stream.
type Next = (bool, usize);

pub(super) fn two_streams(world: &World) {
    let mut rng = world.rng();
    let elements = rng.random_range(2000..6000);
    let rounds: Vec<(Vec<Next>, usize)> = (0..20)
        .map(|_| {
            let next = |_| (rng.random(), rng.random_range(0..2));
            let all = (0..6).map(next).collect();
            (all, rng.random_range(1..9000))
        })
        .collect();
    world.run(&super::config(), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let streams = [rank.stream.clone(), rank.device.stream(0).unwrap()];
        let x = rank.upload_f32(&own(me, elements, 0));
        let mut d = rank.poisoned(DataType::F32, &[elements]);
        rank.settle(Ok(())).unwrap();
        // The last lease is on the other stream when the capture begins, and the next one when it has ended.
        let mut beside = d.clone();
        reduce(rank, &streams[1], &x, &mut beside);
        let graph = rank.device.capture(&streams[0], &mut || {
            reduce(rank, &streams[0], &x, &mut d);
            Ok(())
        });
        let graph = graph.unwrap();
        rank.meet();
        reduce(rank, &streams[1], &x, &mut beside);
        for (round, (all, others)) in rounds.iter().enumerate() {
            let y = rank.upload_f32(&own(me, *others, round + 1));
            let mut out: Vec<_> = all
                .iter()
                .map(|_| rank.poisoned(DataType::F32, &[*others]))
                .collect();
            rank.settle(Ok(())).unwrap();
            for (&(launches, on), out) in all.iter().zip(&mut out) {
                match launches {
                    true => drop(graph.launch(&streams[on]).unwrap()),
                    false => reduce(rank, &streams[on], &y, out),
                }
            }
            for on in &streams {
                on.sync(AMPLE).unwrap();
            }
            let want = sums(size, *others, round + 1);
            for (&(launches, _), out) in all.iter().zip(&out) {
                assert!(
                    launches || rank.values(out.view()) == want,
                    "{round}: {all:?}"
                );
            }
            assert_eq!(
                rank.values(d.view()),
                sums(size, elements, 0),
                "{round}: {all:?}"
            );
        }
    });
}
