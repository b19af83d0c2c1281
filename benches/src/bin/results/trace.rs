//! A picture of the pipeline: one all-reduce across virtual machines, and when each phase of each slice ran.

// Shared with brigade-perf, so that hosts and GPUs are drawn alike.
#[path = "../../../../crates/perf/src/trace/picture.rs"]
mod picture;

use super::{
    hierarchical::on_ranks,
    phases::{PhaseSpan, listen},
};
use anyhow::{Context, Result, ensure};
use brigade::{HierarchicalPath, Machines, Phase, host::RailModel};
use picture::{Bar, Spans};
use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

/// What is drawn. A slice's bytes keep the link for about the latency: so what is collected and what is diffused do not end at the same
/// time, and an add or gather, behind the end of one, comes in the middle of the other.
const DRAWN: Case = Case {
    machines: (2, 2),
    latency: Duration::from_millis(5),
    bytes_per_us: 100,
    elements: 1 << 22,
    slices: 8,
};

/// As many slices must be seen to overlap.
const AT_LEAST: usize = 4;

/// One all-reduce of f32.
#[derive(Clone, Copy)]
struct Case {
    /// Machines, each of so many ranks.
    machines: (usize, usize),
    latency: Duration,
    bytes_per_us: u64,
    elements: usize,
    slices: u32,
}

impl Case {
    fn machines(self) -> Result<Machines> {
        let (count, ranks) = self.machines;
        Ok(Machines::cut(count * ranks, count)?)
    }

    /// Spans of one call, behind one that takes memory: of each rank, in the order in which they began.
    fn spans(self) -> Result<Vec<Vec<PhaseSpan>>> {
        let machines = self.machines()?;
        let rail = RailModel {
            latency: self.latency,
            bytes_per_us: self.bytes_per_us,
        };
        let choice = Some(HierarchicalPath::Slices { count: self.slices });
        let (done, found) = listen(|| {
            on_ranks(machines, Some(rail), |rank| {
                let mut data = rank.data(self.elements)?;
                rank.time(&mut data, choice)?;
                rank.time(&mut data, choice)
            })
        });
        done?;
        let mut last = BTreeMap::new();
        for span in found {
            last.insert((span.rank, span.slice, span.phase.clone()), span);
        }
        let mut ranks = vec![Vec::new(); machines.size()];
        for span in last.into_values() {
            ranks.get_mut(span.rank).context("no such rank")?.push(span);
        }
        for spans in &mut ranks {
            spans.sort_by_key(|span| span.start);
        }
        Ok(ranks)
    }
}

/// How many slices of a rank overlap: so many of its phases, at least, ran while another phase had another slice.
fn overlapping(spans: &[PhaseSpan], least: usize) -> usize {
    let beside = |a: &PhaseSpan| {
        spans
            .iter()
            .any(|b| b.slice != a.slice && b.phase != a.phase && b.start < a.end && a.start < b.end)
    };
    let mut phases: BTreeMap<usize, usize> = BTreeMap::new();
    for span in spans.iter().filter(|span| beside(span)) {
        *phases.entry(span.slice).or_default() += 1;
    }
    phases.values().filter(|&&n| n >= least).count()
}

/// Writes the trace of one call to this file, and the picture beside it: of the first rank of each machine.
///
/// # Errors
/// Also if too few slices overlapped.
pub fn draw(path: &Path) -> Result<()> {
    let case = DRAWN;
    let machines = case.machines()?;
    let all = case.spans()?;
    let first = all.iter().flatten().map(|span| span.start).min();
    let first = first.context("no span")?;
    let mut ranks = Vec::new();
    for rank in (0..machines.count()).map(|machine| machine * machines.ranks()) {
        let spans = &all[rank];
        let slices = overlapping(spans, Phase::ALL.len());
        ensure!(
            slices >= AT_LEAST,
            "rank {rank}: of {} slices only {slices} overlapped: is the machine busy?",
            case.slices
        );
        let us = |at: Instant| (at - first).as_secs_f64() * 1e6;
        let bar = |span: &PhaseSpan| Bar {
            stream: span.phase.clone(),
            name: format!("{} {}", span.phase, span.slice),
            start: us(span.start),
            end: us(span.end),
        };
        let list = spans.iter().map(bar).collect();
        ranks.push(Spans { rank, list });
        eprintln!(
            "rank {rank}: of {} slices {slices} overlap in all phases",
            case.slices
        );
    }
    let title = format!(
        "all-reduce of {} MiB, f32, {machines}, {} slices; rails of {} ms and {} MB/s",
        case.elements >> 18,
        case.slices,
        case.latency.as_secs_f64() * 1e3,
        case.bytes_per_us,
    );
    picture::draw(path, &title, &ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slice is on its way along the rail for 42 ms, twice, whatever else the machine does: so two of its phases overlap others by far more
    /// than a busy machine takes away. Phases that take microseconds are not counted on: they may fall between two others.
    const SLOW: Case = Case {
        machines: (2, 2),
        latency: Duration::from_millis(20),
        bytes_per_us: 1,
        elements: 1 << 18,
        slices: 12,
    };

    fn told(ranks: &[Vec<PhaseSpan>]) -> String {
        let spans = ranks.iter().flatten();
        let line = |s: &PhaseSpan| format!("{} {} {}: {:.0}\n", s.rank, s.phase, s.slice, s.us());
        spans.map(line).collect()
    }

    #[test]
    fn phases_of_several_slices_overlap() {
        let ranks = SLOW.spans().unwrap();
        let (count, steps) = (SLOW.slices as usize, Phase::ALL.len());
        for spans in &ranks {
            assert_eq!(spans.len(), count * steps, "{}", told(&ranks));
            assert!(overlapping(spans, 2) >= AT_LEAST, "{}", told(&ranks));
        }
    }

    #[test]
    fn one_slice_overlaps_nothing() {
        let ranks = Case { slices: 1, ..SLOW }.spans().unwrap();
        for spans in &ranks {
            let phases: Vec<_> = spans.iter().map(|span| span.phase.as_str()).collect();
            assert_eq!(phases, Phase::ALL.map(Phase::name));
            assert_eq!(overlapping(spans, 1), 0);
        }
    }

    /// Spans in milliseconds, of phases and slices.
    fn made(of: impl Fn(usize, usize) -> [u64; 2], slices: usize) -> Vec<PhaseSpan> {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut spans = Vec::new();
        for slice in 0..slices {
            for (i, phase) in Phase::ALL.iter().enumerate() {
                let [start, end] = of(i, slice);
                spans.push(PhaseSpan {
                    rank: 0,
                    phase: phase.name().to_owned(),
                    slice,
                    start: at(start),
                    end: at(end),
                });
            }
        }
        spans
    }

    #[test]
    fn slices_overlap_whose_phases_do() {
        let pipeline = |phase, slice| {
            let start = (phase + slice) as u64 * 10;
            [start, start + 10]
        };
        // The first slice's first phase and the last one's last are alone.
        assert_eq!(overlapping(&made(pipeline, 6), 5), 4);
        let behind = |phase, slice| {
            let start = (phase + slice * 5) as u64 * 10;
            [start, start + 10]
        };
        assert_eq!(overlapping(&made(behind, 6), 1), 0);
        let at_once = |phase, _| [phase as u64 * 10, phase as u64 * 10 + 10];
        assert_eq!(overlapping(&made(at_once, 6), 1), 0);
        // As the pipeline, but adds find everybody else at rest.
        let adds_alone = |phase: usize, slice: usize| {
            let start = (phase + slice) as u64 * 10;
            match phase {
                2 => [start + 9, start + 10],
                _ => [start, start + 9],
            }
        };
        assert_eq!(overlapping(&made(adds_alone, 6), 5), 0);
        assert_eq!(overlapping(&made(adds_alone, 6), 4), 4);
    }
}
