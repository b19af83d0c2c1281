//! What the times of all candidates come to, and how they are shown.

use super::super::{case::Measured, names::Choice};
use crate::{
    fit::{self, Point},
    float::Float,
};
use anyhow::{Result, anyhow};
use brigade::plan::tuned::Threads;
use serde_json::{Value, json};

/// What the times come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub one_shot_max_bytes: usize,
    pub pull_from_bytes: Option<usize>,
    pub nccl_from_bytes: Option<usize>,
    pub max_blocks: u16,
    /// Where a number of threads is quicker than that which plans take by themselves.
    pub threads: Vec<Threads>,
}

/// What was swept: numbers of blocks, or of threads, each with the times of all sizes.
#[derive(Clone, Debug, Default)]
pub struct Swept {
    pub sizes: Vec<usize>,
    pub times: Vec<(u16, Vec<f64>)>,
}

/// Medians of one size, in the order of [`Choice::OWN`], and NCCL's.
#[derive(Clone, Copy, Debug)]
pub struct Medians {
    bytes: usize,
    own: [Option<f64>; 4],
    nccl: Option<f64>,
}

/// The shorter of two times.
fn quicker(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Medians {
    pub fn of(measured: &Measured, dtype: Float) -> Self {
        let own = |choice: Choice| {
            let ours = measured.ours.iter().find(|ours| ours.choice == choice);
            ours?.times.as_ref().map(|t| t.median)
        };
        Self {
            bytes: measured.extent.all * dtype.bytes(),
            own: Choice::OWN.map(own),
            nccl: measured.nccl.as_ref().map(|t| t.median),
        }
    }

    fn one_shot(&self) -> Option<f64> {
        self.own[0]
    }

    fn two_shot(&self) -> Option<f64> {
        self.own[1]
    }

    pub fn push(&self) -> Option<f64> {
        quicker(self.own[0], self.own[1])
    }

    fn pull(&self) -> Option<f64> {
        quicker(self.own[2], self.own[3])
    }

    fn ours(&self) -> Option<f64> {
        quicker(self.push(), self.pull())
    }

    /// Whether a choice took so many times as long as the quickest of Brigade's.
    pub fn is_behind(&self, choice: Choice, times: f64) -> bool {
        let mut all = Choice::OWN.iter().zip(self.own);
        let took = all.find_map(|(&own, us)| us.filter(|_| own == choice));
        let quickest = self.ours();
        took.zip(quickest)
            .is_some_and(|(us, least)| us > times * least)
    }

    /// The name of the quickest of Brigade's.
    fn winner(&self) -> &'static str {
        let all = Choice::OWN.iter().zip(self.own);
        let measured = all.filter_map(|(choice, us)| Some((choice.name, us?)));
        let quickest = measured.min_by(|a, b| a.1.total_cmp(&b.1));
        quickest.map_or("-", |(name, _)| name)
    }
}

impl Verdict {
    /// Of all sizes; `usual` is what plans take by themselves at the sizes at which threads were swept.
    pub fn new(
        medians: &[Medians],
        blocks: &Swept,
        (usual, threads): (&[f64], &Swept),
    ) -> Result<Self> {
        let points = |small: fn(&Medians) -> Option<f64>, large: fn(&Medians) -> Option<f64>| {
            let point = |m: &Medians| Point {
                size: m.bytes,
                small: small(m),
                large: large(m),
            };
            medians.iter().map(point).collect::<Vec<_>>()
        };
        let shots = points(Medians::one_shot, Medians::two_shot);
        let with_nccl = medians.iter().any(|m| m.nccl.is_some());
        let nccl = points(Medians::ours, |m| m.nccl);
        Ok(Self {
            one_shot_max_bytes: fit::last_before(&shots, fit::overtakes(&shots)),
            pull_from_bytes: fit::overtakes(&points(Medians::push, Medians::pull)),
            nccl_from_bytes: fit::overtakes(&nccl).filter(|_| with_nccl),
            max_blocks: blocks.fewest()?,
            threads: fit::favourites(&threads.sizes, usual, &threads.times)
                .into_iter()
                .map(|(max_bytes, threads)| Threads { max_bytes, threads })
                .collect(),
        })
    }

    /// In words; with NCCL, if it was there.
    pub fn told(&self, with_nccl: bool) -> String {
        let from = |bytes: Option<usize>| match bytes {
            Some(bytes) => format!("from {bytes} bytes on"),
            None => "at no size that was measured".to_owned(),
        };
        let mut text = format!("one shot up to {} bytes\n", self.one_shot_max_bytes);
        text += &format!("pulling is quicker {}\n", from(self.pull_from_bytes));
        text += &match with_nccl {
            true => format!("NCCL is quicker {}\n", from(self.nccl_from_bytes)),
            false => "there is no NCCL to compare with\n".to_owned(),
        };
        text += &format!("at most {} blocks\n", self.max_blocks);
        let of = |t: &Threads| format!("{} threads up to {} bytes, ", t.threads, t.max_bytes);
        let own: String = self.threads.iter().map(of).collect();
        text + &format!(
            "{own}as many as plans take by themselves at all {}sizes\n",
            match own.is_empty() {
                true => "",
                false => "larger ",
            }
        )
    }
}

impl Swept {
    /// The fewest that are quick enough at all sizes.
    pub fn fewest(&self) -> Result<u16> {
        fit::fewest(&self.times).ok_or_else(|| anyhow!("--blocks names none"))
    }

    /// As files have it beside the rows, which have a size each.
    pub fn json(&self, name: &str) -> Value {
        let one = |(number, us): &(u16, Vec<f64>)| json!({ name: number, "us": us });
        let swept: Vec<_> = self.times.iter().map(one).collect();
        json!({ "bytes": self.sizes, "swept": swept })
    }

    /// Every size by every number.
    pub fn table(&self, name: &str) -> String {
        let mut text = format!("{:>11}", format!("{name}, us"));
        for bytes in &self.sizes {
            text += &format!(" {bytes:>13}");
        }
        text += "\n";
        for (number, times) in &self.times {
            text += &format!("{number:>11}");
            for us in times {
                text += &format!(" {}", cell(Some(*us)));
            }
            text += "\n";
        }
        text
    }
}

fn cell(us: Option<f64>) -> String {
    us.map_or_else(|| format!("{:>13}", "-"), |us| format!("{us:>13.2}"))
}

/// Every size by every candidate, and which one was quickest.
pub fn table(medians: &[Medians]) -> String {
    let mut text = format!("{:>10}", "bytes, us");
    for choice in Choice::OWN {
        text += &format!(" {:>13}", choice.name);
    }
    text += &format!(" {:>13}  quickest\n", "nccl");
    for m in medians {
        text += &format!("{:>10}", m.bytes);
        for us in m.own.into_iter().chain([m.nccl]) {
            text += &format!(" {}", cell(us));
        }
        text += &format!("  {}\n", m.winner());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medians(all: &[(usize, [f64; 4], f64)]) -> Vec<Medians> {
        let one = |&(bytes, own, nccl): &(usize, [f64; 4], f64)| Medians {
            bytes,
            own: own.map(Some),
            nccl: Some(nccl),
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn candidates_are_all_of_brigades_and_pushes_come_first() {
        let names = Choice::OWN.map(|c| c.name);
        assert_eq!(
            names,
            [
                "one-shot-push",
                "two-shot-push",
                "one-shot-pull",
                "two-shot"
            ]
        );
    }

    #[test]
    fn a_verdict_is_made_of_the_crossings() {
        let measured = medians(&[
            (2, [1.0, 2.0, 3.0, 4.0], 9.0),
            (4, [2.0, 2.1, 3.0, 4.0], 9.0),
            (8, [4.0, 3.0, 4.0, 4.0], 9.0),
            (16, [9.0, 7.0, 8.0, 6.0], 5.0),
        ]);
        let swept = |sizes: &[usize], times: &[(u16, &[f64])]| Swept {
            sizes: sizes.to_vec(),
            times: times.iter().map(|(n, us)| (*n, us.to_vec())).collect(),
        };
        let blocks = swept(&[8], &[(16, &[5.0]), (32, &[4.0]), (64, &[4.05])]);
        let threads = swept(
            &[2, 4, 8],
            &[(64, &[0.9, 0.9, 3.0]), (128, &[1.0, 2.0, 3.0])],
        );
        let usual = [1.0, 2.0, 3.0];
        let verdict = Verdict::new(&measured, &blocks, (&usual, &threads)).unwrap();
        let wanted = Verdict {
            one_shot_max_bytes: 4,
            pull_from_bytes: Some(16),
            nccl_from_bytes: Some(16),
            max_blocks: 32,
            threads: vec![Threads {
                max_bytes: 4,
                threads: 64,
            }],
        };
        assert_eq!(verdict, wanted);
        assert_eq!(
            verdict.told(true),
            "one shot up to 4 bytes\npulling is quicker from 16 bytes on\nNCCL is quicker from 16 bytes on\nat most 32 blocks\n64 threads up to 4 bytes, as many as plans take by themselves at all larger sizes\n"
        );
        assert_eq!(measured[3].winner(), "two-shot");
        let none = Swept::default();
        assert!(Verdict::new(&measured, &none, (&[], &none)).is_err());
        let verdict = Verdict::new(&measured, &blocks, (&[], &none)).unwrap();
        assert!(
            verdict
                .told(true)
                .ends_with("take by themselves at all sizes\n")
        );
    }

    #[test]
    fn who_was_not_measured_wins_nowhere() {
        let mut measured = medians(&[(2, [1.0; 4], 9.0), (4, [1.0; 4], 9.0)]);
        for m in &mut measured {
            (m.nccl, m.own[2], m.own[3]) = (None, None, None);
        }
        let blocks = Swept {
            sizes: vec![4],
            times: vec![(16, vec![1.0])],
        };
        let verdict = Verdict::new(&measured, &blocks, (&[], &Swept::default())).unwrap();
        assert_eq!(
            (verdict.pull_from_bytes, verdict.nccl_from_bytes),
            (None, None)
        );
        assert!(
            verdict
                .told(false)
                .contains("there is no NCCL to compare with")
        );
        // One shot where it is as quick, and up to where it was measured.
        assert_eq!(verdict.one_shot_max_bytes, 4);
        assert!(
            table(&measured)
                .lines()
                .nth(1)
                .unwrap()
                .ends_with("-  one-shot-push")
        );
    }

    #[test]
    fn a_choice_is_behind_the_quickest_that_was_measured() {
        let mut measured = medians(&[(2048, [1.0, 2.0, 4.1, 4.0], 0.1)])[0];
        let behind = |m: &Medians| Choice::OWN.map(|choice| m.is_behind(choice, 4.0));
        assert_eq!(behind(&measured), [false, false, true, false]);
        measured.own[0] = None;
        assert_eq!(behind(&measured), [false; 4]);
        measured.own = [None; 4];
        assert_eq!(behind(&measured), [false; 4]);
    }

    #[test]
    fn a_choice_that_was_left_behind_crosses_nothing() {
        let mut measured = medians(&[
            (1 << 20, [6.0, 7.0, 36.0, 50.0], 15.0),
            (2 << 20, [11.0, 10.0, 66.0, 94.0], 29.0),
        ]);
        let verdict = |measured: &[Medians]| {
            let blocks = Swept {
                sizes: vec![2 << 20],
                times: vec![(64, vec![10.0])],
            };
            Verdict::new(measured, &blocks, (&[], &Swept::default())).unwrap()
        };
        let all = verdict(&measured);
        measured[1].own[2..].fill(None);
        assert_eq!(verdict(&measured), all);
    }

    #[test]
    fn all_lines_of_the_table_are_as_wide() {
        let measured = medians(&[(2048, [1.0; 4], 9.0), (64 << 20, [1.0; 4], 900.0)]);
        let widths = |text: &str, until: &str| -> Vec<_> {
            text.lines()
                .map(|l| l.rfind(until).unwrap_or(l.len()))
                .collect()
        };
        let all = widths(&table(&measured), "  ");
        assert!(all.iter().all(|w| *w == all[0]), "{all:?}");
        let swept = Swept {
            sizes: vec![4096, 64 << 20],
            times: vec![(16, vec![1.0, 2.0])],
        };
        let swept = swept.table("threads");
        let all = widths(&swept, "\n");
        assert!(all.iter().all(|w| *w == all[0]), "{swept}");
    }
}
