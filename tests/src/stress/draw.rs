//! Calls of all kinds, with numbers of this draw and the results that they must have.

use crate::{
    all_reduce::{self, OPS, Place, algorithms},
    all_reduce_norm::{self, NORMED},
    all_to_all_rows,
    backend::Rank,
    copies::{ANY, Broadcast, Exchange, Gather, noise},
    experts,
    gather_linear::{self, assert_mode},
    layer::{FLOATS, Spec},
    linear_all_reduce, linear_reduce_scatter as twin, low_latency,
    quantized::{SCHEMES, gather as quantized},
    reduce_scatter,
    replays::linears::{Captured, kinds},
    send_recv,
    themes::{THEMES, modes},
    user_buffers,
};
use brigade_device::{DataType, OverlapMode, QScheme};
use brigade_plan::Engines;
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// A call that asserts its result.
pub type Call = Box<dyn Fn(&Rank) + Send + Sync>;

/// A kind of call: made of random numbers, for a group of a size, on a device with these engines.
type Draw = fn(&mut StdRng, usize, Engines) -> Call;

/// All kinds. A later operation is put under stress by an entry here.
const KINDS: [Draw; 17] = [
    |rng, size, engines| {
        let draw = low_latency::draw(rng, size);
        Box::new(move |rank| {
            if engines.dispatches {
                draw(rank);
            }
        })
    },
    |rng, size, engines| {
        let case = all_to_all_rows::draw(rng, size);
        Box::new(move |rank| {
            if engines.dispatches {
                case.run(rank);
            }
        })
    },
    |rng, size, engines| {
        let draw = experts::draw(rng, size);
        Box::new(move |rank| {
            if engines.dispatches {
                draw(rank);
            }
        })
    },
    |rng, size, engines| {
        let resident = rng.random_ratio(1, 3);
        let spec = spec(rng, size).with(|s| s.resident = resident);
        let case = gather_linear::Case::new(rng, spec);
        let (choice, pause) = (mode(rng, engines), rng.random_range(0..200));
        Box::new(move |rank| {
            let plan = case.run_slowly(rank, choice, pause);
            assert_mode(&plan, case.spec.choice(choice), rank.size);
        })
    },
    |rng, size, engines| {
        let spec = spec(rng, size);
        let case = twin::Case::new(rng, spec);
        let choice = mode(rng, engines).filter(|&mode| mode != OverlapMode::Pull);
        Box::new(move |rank| drop(case.run(rank, choice)))
    },
    |rng, size, engines| {
        let spec = spec(rng, size);
        let case = linear_all_reduce::Case::new(rng, spec);
        let choice = algorithms(engines).choose(rng).unwrap().1;
        Box::new(move |rank| case.run(rank, choice))
    },
    |rng, size, engines| {
        let places = [Place::OverInput, Place::Beside, Place::Widened];
        let kind = (
            one_of(rng, &FLOATS),
            one_of(rng, &OPS),
            one_of(rng, &places),
        );
        let len = length(rng);
        let case = all_reduce::Case::random(rng, size, len, kind);
        let choice = algorithms(engines).choose(rng).unwrap().1;
        Box::new(move |rank| {
            case.run(rank, choice);
        })
    },
    |rng, size, engines| {
        let kind = (one_of(rng, &FLOATS), one_of(rng, &NORMED));
        let dims = [rng.random_range(0..40), rng.random_range(1..200)];
        let case = all_reduce_norm::Case::random(rng, size, dims, kind);
        let choice = algorithms(engines).choose(rng).unwrap().1;
        Box::new(move |rank| {
            if engines.norms {
                case.run(rank, choice);
            }
        })
    },
    |rng, size, _| {
        let (dtype, op) = (one_of(rng, &FLOATS), one_of(rng, &OPS));
        let output = one_of(rng, &[dtype, DataType::F32]);
        let (rows, columns) = (counts(rng, size, 9), rng.random_range(0..20));
        let case = reduce_scatter::Case::new(rng, rows, columns, (dtype, output, op));
        Box::new(move |rank| case.run(rank))
    },
    |rng, size, _| {
        let (rows, tail) = (counts(rng, size, 200), [rng.random_range(0..60)]);
        let dtype = one_of(rng, &ANY);
        let case = Gather::new(rng, rows, &tail, dtype);
        Box::new(move |rank| case.run(rank))
    },
    |rng, size, _| {
        let (root, len, dtype) = (rng.random_range(0..size), length(rng), one_of(rng, &ANY));
        let case = Broadcast::new(rng, root, len, dtype);
        Box::new(move |rank| case.run(rank))
    },
    |rng, size, _| {
        let rows = (0..size).map(|_| counts(rng, size, 30)).collect();
        let (columns, dtype) = (rng.random_range(0..20), one_of(rng, &ANY));
        let case = Exchange::new(rng, rows, columns, dtype);
        Box::new(move |rank| case.run(rank))
    },
    |rng, size, _| {
        let len = length(rng);
        let data: Vec<_> = (0..size).map(|_| noise(rng, len)).collect();
        let around = rng.random_ratio(1, 2);
        Box::new(move |rank| match around {
            true => send_recv::swap_around(rank, &data),
            false => send_recv::swap_all(rank, &data),
        })
    },
    |rng, size, engines| {
        let overlapped = [QScheme::Int8PerToken, QScheme::Fp8PerTensor];
        let scheme = one_of(rng, &overlapped);
        let specs = quantized::specs(rng, size);
        let spec = one_of(rng, &specs);
        let case = quantized::Case::new(rng, spec, scheme, QScheme::None);
        let choice = mode(rng, engines);
        Box::new(move |rank| assert_mode(&case.run(rank, choice), choice, rank.size))
    },
    |rng, size, _| {
        let specs = quantized::specs(rng, size);
        let spec = one_of(rng, &specs);
        let scheme = one_of(rng, &SCHEMES);
        let case = quantized::Case::new(rng, spec, scheme, QScheme::None);
        Box::new(move |rank| drop(case.run(rank, Some(OverlapMode::Off))))
    },
    |rng, _, _| {
        let round = rng.random_range(0..100);
        Box::new(move |rank| user_buffers::come_and_go(rank, round))
    },
    |rng, _, engines| {
        let first = rng.random_range(0..1000);
        let kinds = kinds(engines, rng);
        let (_, kind) = one_of(rng, &kinds);
        Box::new(move |rank| {
            let mut captured = Captured::new(rank, kind);
            (first..first + 5).for_each(|day| captured.check(rank, day));
        })
    },
];

/// Draws a call.
pub fn call(rng: &mut StdRng, size: usize, engines: Engines) -> Call {
    one_of(rng, &KINDS)(rng, size, engines)
}

fn one_of<T: Clone>(rng: &mut StdRng, all: &[T]) -> T {
    all.choose(rng).unwrap().clone()
}

fn mode(rng: &mut StdRng, engines: Engines) -> Option<OverlapMode> {
    let all: Vec<_> = modes(engines).into_iter().flat_map(|m| m.1).collect();
    one_of(rng, &all)
}

fn spec(rng: &mut StdRng, size: usize) -> Spec {
    let specs = one_of(rng, &THEMES).1(rng, size);
    one_of(rng, &specs)
}

/// Rows of every rank, below `most`.
fn counts(rng: &mut StdRng, size: usize, most: usize) -> Vec<usize> {
    (0..size).map(|_| rng.random_range(0..most)).collect()
}

/// Mostly small; up to several times the scratch memory.
fn length(rng: &mut StdRng) -> usize {
    let most = one_of(rng, &[2, 100, 5000, 40_000]);
    rng.random_range(0..most)
}
