//! From what calls took to what calls and links cost: the costs by which plans expect those times.

use anyhow::{Context, Result, ensure};
use brigade::{
    HierarchicalCall, HierarchicalOperation, HierarchicalPath, HierarchicalPlan, HierarchyConfig,
    Reason,
    plan::hierarchical::{Costs, Entry, Link, Wire, plan},
};
use std::array;

/// What a call took.
#[derive(Clone, Debug)]
pub struct Sample {
    pub call: HierarchicalCall,
    pub ns: f64,
}

/// What plans count with, where nothing is under way beside it: nanoseconds of a call inside, of a byte there, of a call across, of the way
/// of a byte, of a byte across, of a byte that is added, and of a copy.
const PARTS: usize = 7;

/// The largest rate that costs have, in bytes of a microsecond: that of what takes no time.
const MOST_RATE: f64 = 1e9;

/// More are wrong by less than half, or no costs are behind it.
const MOST_OFF: f64 = 2.0;

/// Costs by which calls are off by so little more, in the root of the mean square, are as good by chance.
const CHANCE: f64 = 0.002;

/// By how many nanoseconds more a call costs while others are under way, as tried: a thread or a stream has to be told then that it is its turn.
const IN_FLIGHT: [f64; 9] = [0.0, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5];

/// What a byte may take while several connections carry some, in percent of what it takes alone, as tried.
const CROWDED: [u64; 5] = [100, 125, 160, 200, 300];

/// By how much better plans must choose for that to be believed, as `regret` counts.
const BETTER: f64 = 0.03;

/// In so many steps a byte's time is shared out between the wire, which one call has at a time, and the calls, of which one goes on at once by each connection.
const SHARES: u32 = 16;

/// What was found.
#[derive(Clone, Debug)]
pub struct Fitted {
    pub costs: Costs,
    /// For each sample, what these costs expect over what it took.
    pub off: Vec<f64>,
}

impl Fitted {
    /// Of half of the samples, the factor by which they are off at most, above or below; and of all.
    pub fn off(&self) -> (f64, f64) {
        let mut off: Vec<f64> = self.off.iter().map(|&x| x.max(1.0 / x)).collect();
        off.sort_by(f64::total_cmp);
        let at = |i: usize| off.get(i).copied().unwrap_or(f64::NAN);
        (at(off.len() / 2), at(off.len().saturating_sub(1)))
    }
}

/// What a call takes by these costs. Where nothing is sent, nothing is on its way.
pub fn expected_ns(
    call: &HierarchicalCall,
    config: &HierarchyConfig,
    costs: &Costs,
) -> Result<f64, Reason> {
    if call.machines.count() == 1 {
        return Ok(costs.inside_ns(call) as f64);
    }
    let wire = Wire {
        latency_ns: 0,
        ..costs.wire
    };
    let nothing = costs.with_wire(wire);
    let costs = if is_empty(call) { &nothing } else { costs };
    let expected = match plan(call, config, costs)? {
        HierarchicalPlan::Whole { expected, .. } => expected,
        HierarchicalPlan::Slices(plan) => plan.expected,
        HierarchicalPlan::Inside { .. } => return Ok(costs.inside_ns(call) as f64),
    };
    Ok(expected.as_nanos() as f64)
}

fn is_empty(call: &HierarchicalCall) -> bool {
    match call.operation {
        HierarchicalOperation::AllReduce { elements, .. } => elements == 0,
        _ => call.elements_of_ranks().iter().all(|&n| n == 0),
    }
}

/// Whether its phases go one after the other, so that what it takes is a sum.
pub(super) fn is_plain(call: &HierarchicalCall) -> bool {
    match call.choice {
        Some(HierarchicalPath::Slices { count } | HierarchicalPath::OneShot { count }) => {
            count == 1
        }
        _ => true,
    }
}

/// For each part, costs of one nanosecond of it, and of nothing else: what plans expect by them is how often a call has it.
fn units() -> [Costs; PARTS] {
    let nothing = Link {
        call_ns: 0,
        bytes_per_us: u64::MAX,
    };
    let call = Link {
        call_ns: 1,
        ..nothing
    };
    let byte = Link {
        bytes_per_us: 1000,
        ..nothing
    };
    let free = Costs {
        inside: nothing,
        across: nothing,
        wire: Wire::NONE,
        add_bytes_per_us: u64::MAX,
        enqueue_ns: 0,
        connections: 2,
        crowded_percent: 100,
        channels: None,
        in_place: false,
        copy_ns: 0,
        measured: None,
    };
    let on_the_way = Wire {
        latency_ns: 1,
        ..Wire::NONE
    };
    let inside = |inside| Costs { inside, ..free };
    let across = |across| Costs { across, ..free };
    let add = Costs {
        add_bytes_per_us: 1000,
        ..free
    };
    let copy = Costs { copy_ns: 1, ..free };
    [
        inside(call),
        inside(byte),
        across(call),
        free.with_wire(on_the_way),
        across(byte),
        add,
        copy,
    ]
}

/// The weights, none of them negative, with which rows come nearest to 1: least squares, one weight after the other. `None` for what no row
/// has.
fn weights(rows: &[[f64; PARTS]]) -> [Option<f64>; PARTS] {
    const SWEEPS: usize = 100_000;
    let dot = |i: usize, j: usize| rows.iter().map(|row| row[i] * row[j]).sum::<f64>();
    let gram: [[f64; PARTS]; PARTS] = array::from_fn(|i| array::from_fn(|j| dot(i, j)));
    let target: [f64; PARTS] = array::from_fn(|i| rows.iter().map(|row| row[i]).sum());
    let mut found = [0.0f64; PARTS];
    for _ in 0..SWEEPS {
        let mut moved = 0.0f64;
        for i in (0..PARTS).filter(|&i| gram[i][i] > 0.0) {
            let others: f64 = (0..PARTS)
                .filter(|&j| j != i)
                .map(|j| gram[i][j] * found[j])
                .sum();
            let next = ((target[i] - others) / gram[i][i]).max(0.0);
            // In what it changes of the rows.
            moved = moved.max((next - found[i]).abs() * gram[i][i].sqrt());
            found[i] = next;
        }
        if moved < 1e-12 {
            break;
        }
    }
    array::from_fn(|i| (gram[i][i] > 0.0).then_some(found[i]))
}

/// Costs of these parts, or as they were guessed.
fn costs_of(
    parts: &[Option<f64>; PARTS],
    (wire, in_flight, crowded_percent): (f64, f64, u64),
    guess: &Costs,
) -> Costs {
    let ns = |part: usize, more: f64, guess: u64| {
        let most = Entry::MOST_NS as f64;
        parts[part].map_or(guess, |ns| (ns + more).round().min(most) as u64)
    };
    let rate = |part: usize, share: f64, guess: u64| {
        let of = |ns: f64| (1000.0 / (ns * share)).clamp(1.0, MOST_RATE).round() as u64;
        parts[part].map_or(guess, of)
    };
    let [inside_call, inside_byte, call, latency, byte, add, copy] = array::from_fn(|i| i);
    Costs {
        inside: Link {
            call_ns: ns(inside_call, in_flight, guess.inside.call_ns),
            bytes_per_us: rate(inside_byte, 1.0, guess.inside.bytes_per_us),
        },
        across: Link {
            call_ns: ns(call, in_flight, guess.across.call_ns),
            bytes_per_us: rate(byte, 1.0 - wire, guess.across.bytes_per_us),
        },
        wire: Wire {
            latency_ns: ns(latency, 0.0, guess.wire.latency_ns),
            bytes_per_us: rate(byte, wire, guess.wire.bytes_per_us),
        },
        add_bytes_per_us: rate(add, 1.0, guess.add_bytes_per_us),
        enqueue_ns: guess.enqueue_ns,
        connections: guess.connections,
        channels: guess.channels,
        crowded_percent,
        in_place: guess.in_place,
        copy_ns: ns(copy, 0.0, guess.copy_ns),
        measured: None,
    }
}

/// What it costs to go by what was expected: of calls that went several ways, how much longer the way takes that should be the quickest than the one that
/// was, in the mean of logarithms.
fn regret(samples: &[Sample], off: &[f64]) -> f64 {
    let mut by_call: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut calls: Vec<HierarchicalCall> = Vec::new();
    for (sample, off) in samples.iter().zip(off) {
        let call = HierarchicalCall {
            choice: None,
            ..sample.call.clone()
        };
        let at = calls.iter().position(|other| *other == call);
        let at = at.unwrap_or_else(|| {
            calls.push(call);
            by_call.push(Vec::new());
            calls.len() - 1
        });
        by_call[at].push((off * sample.ns, sample.ns));
    }
    let several = by_call.iter().filter(|ways| ways.len() > 1);
    let (sum, n) = several.fold((0.0, 0u32), |(sum, n), ways| {
        let expected = ways.iter().min_by(|a, b| a.0.total_cmp(&b.0));
        let quickest = ways.iter().map(|way| way.1).fold(f64::INFINITY, f64::min);
        (
            sum + expected.map_or(0.0, |way| (way.1 / quickest).ln()),
            n + 1,
        )
    });
    sum / f64::from(n.max(1))
}

/// The costs by which plans come nearest to what calls took.
///
/// What calls took of which nothing is under way beside something else is a sum of parts, and these are found by least squares, of how far off each
/// call is in proportion. What is left is what only slices in flight show, and is tried: how much of a byte's time is the wire's, and how much
/// more calls cost then. What no call has stays as it was guessed.
///
/// # Errors
/// If half of the calls took something else by more than a factor of two.
pub fn fit(samples: &[Sample], config: &HierarchyConfig, guess: &Costs) -> Result<Fitted> {
    let units = units();
    let row = |sample: &Sample| -> Result<[f64; PARTS]> {
        let mut row = [0.0; PARTS];
        for (cell, unit) in row.iter_mut().zip(&units) {
            *cell = expected_ns(&sample.call, config, unit)? / sample.ns;
        }
        Ok(row)
    };
    ensure!(
        samples.iter().all(|s| s.ns.is_finite() && s.ns > 0.0),
        "a call took no time"
    );
    let plain = samples.iter().filter(|sample| is_plain(&sample.call));
    let parts = weights(&plain.map(row).collect::<Result<Vec<_>>>()?);
    let off = |costs: &Costs| -> Result<Vec<f64>> {
        let one = |s: &Sample| Ok(expected_ns(&s.call, config, costs)?.max(1.0) / s.ns);
        samples.iter().map(one).collect()
    };
    // With how far off it is, and how much longer what plans choose by it takes.
    let best = |crowded_percent: u64, chooses: f64| -> Result<(f64, f64, Fitted)> {
        let mut tried: Vec<(f64, f64, Fitted)> = Vec::new();
        for share in (0..=SHARES).rev() {
            for in_flight in IN_FLIGHT {
                let wire = f64::from(share) / f64::from(SHARES);
                let costs = costs_of(&parts, (wire, in_flight, crowded_percent), guess);
                let off = off(&costs)?;
                let squares = |plain: bool| {
                    let those = samples.iter().zip(&off);
                    let those = those.filter(|(s, _)| is_plain(&s.call) == plain);
                    let (sum, n) =
                        those.fold((0.0, 0), |(sum, n), (_, x)| (sum + x.ln().powi(2), n + 1));
                    sum / f64::from(n.max(1))
                };
                // Slices in flight count as much as all else, though they are fewer: it is by them that this is found out.
                let mean = (squares(true) + squares(false)).sqrt();
                let regret = regret(samples, &off);
                tried.push((mean, regret, Fitted { costs, off }));
            }
        }
        let count = |(mean, regret, _): &(f64, f64, Fitted)| mean + chooses * regret;
        let least = tried.iter().map(count).fold(f64::INFINITY, f64::min);
        let mut as_good = tried.into_iter().filter(|t| count(t) <= least + CHANCE);
        // Where slices say nothing of it, all is the wire's, and calls cost what they cost alone.
        as_good.next().context("nothing was measured")
    };
    let [alone, crowded @ ..] = CROWDED;
    let (mean, regret, mut fitted) = best(alone, 0.0)?;
    // That connections crowd each other is believed where plans choose better by it, and expect better.
    let (mut most, chosen) = (mean + regret - BETTER, regret - BETTER);
    for percent in crowded {
        let (mean, regret, other) = best(percent, 1.0)?;
        if mean + regret < most && regret < chosen {
            (fitted, most) = (other, mean + regret);
        }
    }
    let (half, _) = fitted.off();
    ensure!(
        half <= MOST_OFF,
        "by the costs that come nearest, plans expect half of the calls to take {half:.1} times what they took, or as much less: what was \
         measured follows no costs; is the machine busy with something else?"
    );
    Ok(fitted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hierarchical::tune::place::calls;
    use brigade::{DataType, Machines, ParallelMode};

    const SIZES: [usize; 5] = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20];

    fn config() -> HierarchyConfig {
        HierarchyConfig {
            staging_bytes: 1 << 30,
            ..HierarchyConfig::new(ParallelMode::Tp)
        }
    }

    /// What calls take where these are the costs.
    fn samples((count, ranks): (usize, usize), costs: &Costs) -> Vec<Sample> {
        let machines = Machines::cut(count * ranks, count).unwrap();
        let calls = calls(machines, DataType::F32, &SIZES).unwrap();
        let took = |call: HierarchicalCall| Sample {
            ns: expected_ns(&call, &config(), costs).unwrap(),
            call,
        };
        calls.into_iter().map(took).collect()
    }

    /// Costs of all kinds: a network's, a slow one's, and one where ranks themselves take a quarter of a byte's time.
    fn known() -> [Costs; 3] {
        let costs = |inside: (u64, u64), across: (u64, u64), wire: (u64, u64), rest: (u64, u64)| {
            let link = |(call_ns, bytes_per_us)| Link {
                call_ns,
                bytes_per_us,
            };
            Costs {
                inside: link(inside),
                across: link(across),
                wire: Wire {
                    latency_ns: wire.0,
                    bytes_per_us: wire.1,
                },
                add_bytes_per_us: rest.0,
                copy_ns: rest.1,
                measured: None,
                ..Costs::host()
            }
        };
        [
            costs(
                (8_000, 300_000),
                (20_000, 400_000),
                (15_000, 40_000),
                (900_000, 2_500),
            ),
            costs(
                (60_000, 700),
                (90_000, 1_500),
                (5_000_000, 25),
                (3_000, 30_000),
            ),
            costs(
                (20_000, 600_000),
                (4_000, 90_000),
                (3_000, 30_000),
                (900_000, 9_000),
            ),
        ]
    }

    fn near(what: &str, got: u64, want: u64, by: f64) {
        let times = got as f64 / want as f64;
        assert!((1.0 / by..by).contains(&times), "{what}: {got} for {want}");
    }

    /// Each figure is found again, from what plans expect by it.
    #[test]
    fn costs_that_are_behind_it_are_found() {
        for shape in [(2, 2), (3, 4)] {
            for want in known() {
                let got = fit(&samples(shape, &want), &config(), &Costs::host()).unwrap();
                let (half, worst) = got.off();
                assert!(half < 1.02 && worst < 1.2, "{half} {worst}");
                let got = got.costs;
                near(
                    "inside, call",
                    got.inside.call_ns,
                    want.inside.call_ns,
                    1.05,
                );
                let rates = (got.inside.bytes_per_us, want.inside.bytes_per_us);
                near("inside, rate", rates.0, rates.1, 1.05);
                near(
                    "across, call",
                    got.across.call_ns,
                    want.across.call_ns,
                    1.05,
                );
                near("latency", got.wire.latency_ns, want.wire.latency_ns, 1.05);
                near("add", got.add_bytes_per_us, want.add_bytes_per_us, 1.1);
                near("copy", got.copy_ns, want.copy_ns, 1.1);
                // A byte's time is shared out in steps, and the wire has more of it where that is as good.
                let rates = (got.wire.bytes_per_us, want.wire.bytes_per_us);
                near("wire", rates.0, rates.1, 1.2);
                // And both together are known.
                let both = |c: &Costs| {
                    1e6 / (1e3 / c.across.bytes_per_us as f64 + 1e3 / c.wire.bytes_per_us as f64)
                };
                near("both", both(&got) as u64, both(&want) as u64, 1.05);
            }
        }
    }

    /// Machines of one rank have nothing inside, and no copies: that stays as it was.
    #[test]
    fn what_no_call_has_stays_as_it_was_guessed() {
        let guess = Costs::cuda();
        for want in known() {
            let got = fit(&samples((2, 1), &want), &config(), &guess)
                .unwrap()
                .costs;
            assert_eq!((got.inside, got.copy_ns), (guess.inside, guess.copy_ns));
            near("latency", got.wire.latency_ns, want.wire.latency_ns, 1.05);
            near(
                "across, call",
                got.across.call_ns,
                want.across.call_ns,
                1.05,
            );
        }
    }

    /// Some calls that something else kept waiting change little.
    #[test]
    fn a_few_calls_that_took_long_move_it_little() {
        let want = &known()[0];
        let mut samples = samples((2, 2), want);
        for sample in samples.iter_mut().step_by(7) {
            sample.ns *= 1.5;
        }
        let got = fit(&samples, &config(), &Costs::host()).unwrap().costs;
        near("wire", got.wire.bytes_per_us, want.wire.bytes_per_us, 1.3);
        near(
            "inside, rate",
            got.inside.bytes_per_us,
            want.inside.bytes_per_us,
            1.3,
        );
        let call = |c: &Costs| c.across.call_ns + c.wire.latency_ns;
        near("a call there", call(&got), call(want), 1.3);
    }

    /// What calls cost more in flight than alone counts in part: plans have one figure for both.
    #[test]
    fn calls_that_cost_more_in_flight_are_dearer() {
        let want = known()[0];
        let mut dearer = want;
        dearer.inside.call_ns += 50_000;
        dearer.across.call_ns += 50_000;
        let mut samples = samples((2, 2), &want);
        for sample in samples.iter_mut().filter(|s| !is_plain(&s.call)) {
            sample.ns = expected_ns(&sample.call, &config(), &dearer).unwrap();
        }
        let got = fit(&samples, &config(), &Costs::host()).unwrap().costs;
        let more = |of: fn(&Costs) -> u64| of(&got) as f64 - of(&want) as f64;
        let more = [more(|c| c.inside.call_ns), more(|c| c.across.call_ns)];
        let in_part = |ns: &f64| (9e3..=51e3).contains(ns);
        assert!(more.iter().all(in_part), "{more:?}");
    }

    /// Times of other calls are no times of these.
    #[test]
    fn what_follows_no_costs_is_refused() {
        let mut samples = samples((2, 2), &known()[0]);
        let times: Vec<f64> = samples.iter().map(|s| s.ns).collect();
        for (sample, ns) in samples.iter_mut().zip(times.iter().rev()) {
            sample.ns = *ns;
        }
        let refused = fit(&samples, &config(), &Costs::host()).unwrap_err();
        assert!(
            refused.to_string().contains("follows no costs"),
            "{refused}"
        );
        samples[0].ns = 0.0;
        assert!(fit(&samples, &config(), &Costs::host()).is_err());
    }
}
