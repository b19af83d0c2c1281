//! What the times of all transports come to, and how they are shown.

use super::CANDIDATES;
use crate::fit;
use brigade::plan::transports::{Asked, Other};

/// Medians of one number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub tokens: usize,
    /// That may come to a rank.
    pub bytes: usize,
    /// That may come back.
    pub back_bytes: usize,
    /// In the order of [`CANDIDATES`]; nothing of what cannot be.
    pub us: [Option<f64>; CANDIDATES.len()],
    pub samples: [Vec<f64>; CANDIDATES.len()],
}

impl Point {
    pub fn new(tokens: usize, (bytes, back_bytes): (usize, usize)) -> Self {
        Self {
            tokens,
            bytes,
            back_bytes,
            us: [None; CANDIDATES.len()],
            samples: Default::default(),
        }
    }

    fn pushed(&self) -> Option<f64> {
        self.us[0]
    }

    fn one_sided(&self) -> Option<f64> {
        self.us[1]
    }

    fn pushed_back(&self) -> Option<f64> {
        self.us[5]
    }

    /// The quicker of those that go one-sided there.
    fn there_one_sided(&self) -> Option<f64> {
        quicker(self.one_sided(), self.pushed_back())
    }

    /// The quickest of those that plans take by themselves.
    fn planned(&self) -> Option<f64> {
        quicker(self.pushed(), self.there_one_sided())
    }
}

fn quicker(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    a.into_iter().chain(b).min_by(f64::total_cmp)
}

/// What the times come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub push_max_bytes: usize,
    pub push_back_max_bytes: usize,
    pub push_max_bytes_per_sm: Option<usize>,
    pub rows_at_a_time: Option<usize>,
    pub others: Vec<Other>,
}

/// Pushed against one-sided there, where both can be, by bytes for each of so many multiprocessors.
fn pushes(points: &[Point], sms: usize) -> Vec<fit::Point> {
    let both = points
        .iter()
        .filter(|p| p.pushed().is_some() && p.there_one_sided().is_some());
    both.map(|p| fit::Point {
        size: p.bytes / sms,
        small: p.pushed(),
        large: p.there_one_sided(),
    })
    .collect()
}

/// The last size at which what is small was quicker; where that was so at all of them, no less than usual.
fn up_to(points: &[fit::Point], usual_bytes: usize) -> usize {
    let from = fit::overtakes(points);
    let last = fit::last_before(points, from);
    match from {
        Some(_) => last,
        None => last.max(usual_bytes),
    }
}

impl Verdict {
    /// So many of `usual_bytes` are pushed there, and back, where nothing was measured, and where what was measured gives no reason against it.
    pub fn new(
        all: &[Point],
        budgets: &[(u16, Vec<Point>)],
        rows: &[(usize, f64)],
        (usual_bytes, usual_back_bytes): (usize, usize),
    ) -> Self {
        let back = |p: &Point| {
            (p.pushed_back().is_some() && p.one_sided().is_some()).then(|| fit::Point {
                size: p.back_bytes,
                small: p.pushed_back(),
                large: p.one_sided(),
            })
        };
        let back: Vec<_> = all.iter().filter_map(back).collect();
        // Of all budgets together, by bytes for each multiprocessor: where a step fits best.
        let per_sm: Vec<fit::Point> = budgets
            .iter()
            .flat_map(|(sms, points)| pushes(points, usize::from((*sms).max(1))))
            .collect();
        let other = |asked: Asked| {
            let at = CANDIDATES
                .iter()
                .position(|(choice, _)| choice.transport() == Some(asked.transport()))?;
            let both: Vec<fit::Point> = all
                .iter()
                .filter(|p| p.us[at].is_some() && p.planned().is_some())
                .map(|p| fit::Point {
                    size: p.bytes,
                    small: p.planned(),
                    large: p.us[at],
                })
                .collect();
            (!both.is_empty()).then(|| Other {
                transport: asked,
                from_bytes: fit::overtakes(&both),
            })
        };
        let quickest = rows.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        Self {
            push_max_bytes: up_to(&pushes(all, 1), usual_bytes),
            push_back_max_bytes: up_to(&back, usual_back_bytes),
            push_max_bytes_per_sm: (!per_sm.is_empty())
                .then(|| fit::last_before(&per_sm, fit::overtakes(&per_sm))),
            rows_at_a_time: quickest.map(|(rows, _)| *rows),
            others: Asked::ALL.into_iter().filter_map(other).collect(),
        }
    }

    /// In words.
    pub fn told(&self) -> String {
        let mut text = format!(
            "pushed up to {} bytes, back up to {}\n",
            self.push_max_bytes, self.push_back_max_bytes
        );
        text += &match self.push_max_bytes_per_sm {
            Some(bytes) => {
                format!("within a budget, up to {bytes} bytes for each multiprocessor\n")
            }
            None => "budgets were not measured\n".to_owned(),
        };
        text += &match self.rows_at_a_time {
            Some(rows) => format!("{rows} rows at a time\n"),
            None => "rows at a time were not measured\n".to_owned(),
        };
        for other in &self.others {
            let from = match other.from_bytes {
                Some(bytes) => format!("from {bytes} bytes on"),
                None => "at no size that was measured".to_owned(),
            };
            let transport = other.transport.transport();
            text += &format!("{transport:?} is quicker {from}\n");
        }
        text
    }
}

/// Every number of tokens by every candidate, and which one was quickest.
pub fn table(points: &[Point], sm_budget: Option<u16>) -> String {
    let mut text = match sm_budget {
        Some(sms) => format!("within {sms} multiprocessors\n"),
        None => String::new(),
    };
    text += &format!("{:>10} {:>10}", "tokens, us", "bytes");
    for (_, name) in CANDIDATES {
        text += &format!(" {name:>11}");
    }
    text += "  quickest\n";
    for point in points {
        text += &format!("{:>10} {:>10}", point.tokens, point.bytes);
        for us in point.us {
            text += &us.map_or_else(|| format!(" {:>11}", "-"), |us| format!(" {us:>11.1}"));
        }
        let timed = CANDIDATES.iter().zip(point.us);
        let timed = timed.filter_map(|((_, name), us)| Some((*name, us?)));
        let quickest = timed.min_by(|a, b| a.1.total_cmp(&b.1));
        text += &format!("  {}\n", quickest.map_or("-", |(name, _)| name));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(tokens: usize) -> usize {
        16 * (8 + tokens * 976)
    }

    fn points(all: &[(usize, [f64; 2])]) -> Vec<Point> {
        let point = |(tokens, [pushed, one_sided]): &(usize, [f64; 2])| {
            let mut point = Point::new(*tokens, (bytes(*tokens), 14336 * tokens));
            (point.us[0], point.us[1]) = (Some(*pushed), Some(*one_sided));
            point
        };
        all.iter().map(point).collect()
    }

    /// As measured on two H200s, docs/results/tune-experts.h200x2.json: it comes to the entry of brigade-plan's table.
    #[test]
    fn budgets_give_one_figure_for_each_multiprocessor() {
        let tokens = [1, 32, 128, 256, 512, 1024, 2048, 4096, 8192];
        // The other is one-sided there, and back or not.
        let measured = [
            (
                8,
                [15.1, 29.3, 73.2, 126.6, 236.9, 470.2, 912.0, 1807.4, 3614.9],
                [35.3, 47.2, 85.1, 122.3, 201.8, 326.1, 717.0, 1296.6, 2476.5],
            ),
            (
                24,
                [13.1, 20.1, 32.0, 49.0, 85.0, 157.1, 295.9, 564.9, 1112.2],
                [35.9, 41.0, 58.9, 81.0, 127.6, 200.9, 315.0, 564.9, 1090.6],
            ),
            (
                64,
                [13.2, 18.6, 26.5, 38.2, 63.5, 114.3, 210.6, 418.5, 824.9],
                [35.2, 42.3, 54.2, 70.9, 105.3, 162.4, 241.9, 448.0, 870.1],
            ),
        ];
        let budgets = measured.map(|(sms, pushed, one_sided): (u16, [f64; 9], [f64; 9])| {
            let each = tokens.into_iter().zip(pushed.into_iter().zip(one_sided));
            let each: Vec<_> = each.map(|(n, (a, b))| (n, [a, b])).collect();
            (sms, points(&each))
        });
        let verdict = Verdict::new(&[], &budgets, &[], (5, 6));
        assert_eq!(verdict.push_max_bytes_per_sm, Some(999_426));
        let file = brigade::plan::transports::File::embedded().unwrap();
        let two = file.entries().iter().find(|e| e.ranks == 2).unwrap();
        assert_eq!(two.push_max_bytes_per_sm, verdict.push_max_bytes_per_sm);
        assert_eq!(verdict.rows_at_a_time, None);
    }

    #[test]
    fn what_is_never_overtaken_is_pushed_as_far_as_is_usual() {
        let ahead = points(&[(1, [1.0, 2.0]), (8, [2.0, 3.0])]);
        let of =
            |points: &[Point], usual| Verdict::new(points, &[], &[], (usual, 1)).push_max_bytes;
        assert_eq!(of(&ahead, 1 << 20), 1 << 20);
        assert_eq!(of(&ahead, 1), bytes(8));
        let crossing = points(&[(1, [1.0, 2.0]), (8, [2.0, 3.0]), (32, [5.0, 4.0])]);
        assert_eq!(of(&crossing, 1 << 30), bytes(8));
        let behind = points(&[(1, [2.0, 1.0]), (8, [3.0, 2.0])]);
        assert_eq!(of(&behind, 1 << 30), 0);
        // What goes one-sided there may be pushed back.
        let mut back = ahead.clone();
        back[1].us[5] = Some(1.5);
        assert_eq!(of(&back, 1 << 30), bytes(1));
        // What cannot be pushed says nothing about what can.
        let mut more = ahead;
        let mut large = Point::new(4096, (bytes(4096), 14336 * 4096));
        large.us[1] = Some(500.0);
        more.push(large);
        assert_eq!(of(&more, 1 << 20), 1 << 20);
        assert_eq!(
            Verdict::new(&more, &[], &[], (1, 1)).push_max_bytes_per_sm,
            None
        );
    }

    #[test]
    fn what_goes_back_is_pushed_up_to_a_figure_of_its_own() {
        let back = |all: &[(usize, f64)], usual| {
            let one_sided: Vec<_> = all.iter().map(|&(n, _)| (n, [0.0, 10.0])).collect();
            let mut points = points(&one_sided);
            for (point, &(_, us)) in points.iter_mut().zip(all) {
                (point.us[0], point.us[5]) = (None, Some(us));
            }
            let verdict = Verdict::new(&points, &[], &[], (7, usual));
            assert_eq!(verdict.push_max_bytes, 7, "nothing was pushed there");
            verdict.push_back_max_bytes
        };
        assert_eq!(back(&[(1, 9.0), (8, 9.0)], 5), 8 * 14336);
        assert_eq!(back(&[(1, 9.0), (8, 9.0)], 1 << 30), 1 << 30);
        assert_eq!(back(&[(1, 9.0), (8, 9.0), (32, 11.0)], 1 << 30), 8 * 14336);
        assert_eq!(back(&[(1, 11.0), (8, 11.0)], 1 << 30), 0);
        assert_eq!(back(&[], 3), 3);
    }

    #[test]
    fn others_are_compared_with_the_quicker_of_the_plans() {
        let mut all = points(&[
            (128, [27.0, 73.0]),
            (1024, [119.0, 181.0]),
            (4096, [0.0, 510.0]),
        ]);
        all[2].us[0] = None;
        for (point, (in_place, gather)) in
            all.iter_mut()
                .zip([(54.3, 79.3), (139.1, 176.1), (412.8, 514.3)])
        {
            (point.us[2], point.us[3]) = (Some(in_place), Some(gather));
        }
        let verdict = Verdict::new(&all, &[], &[(256, 3.0), (512, 2.0), (1024, 2.5)], (1, 1));
        let other = |transport, from_bytes| Other {
            transport,
            from_bytes,
        };
        let wanted = [
            other(Asked::InPlace, Some(bytes(4096))),
            other(Asked::Gather, None),
        ];
        assert_eq!(verdict.others, wanted);
        assert_eq!(verdict.rows_at_a_time, Some(512));
        let told = verdict.told();
        assert!(
            told.contains("InPlace is quicker from 63963264 bytes on"),
            "{told}"
        );
        assert!(!told.contains("Fifo"));
        let table = table(&all, Some(24));
        assert!(table.starts_with("within 24 multiprocessors\n"));
        assert!(table.ends_with("in-place\n") && table.contains(" 412.8 "));
    }
}
