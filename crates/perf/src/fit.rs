//! From which size on one way of doing things overtakes another.

/// A way that is ahead by less, in all sizes together, may be so by chance.
const CHANCE: f64 = 0.02;

/// The most that one size counts, where a way is not possible at it.
const IMPOSSIBLE: f64 = 1000.0;

/// How long two ways took at a size, in the same unit; nothing if it cannot be done that way there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// In whatever the choice goes by.
    pub size: usize,
    /// The way that small inputs go.
    pub small: Option<f64>,
    /// The one that may overtake it.
    pub large: Option<f64>,
}

impl Point {
    /// Logarithm of how many times as quick the second way is: so twice as quick and half as quick cancel, and a microsecond of
    /// a small input counts more than one of a large.
    fn gain(&self) -> f64 {
        let times = match (self.small, self.large) {
            (Some(small), Some(large)) => small / large,
            (None, Some(_)) => IMPOSSIBLE,
            (Some(_), None) => 1.0 / IMPOSSIBLE,
            (None, None) => 1.0,
        };
        times.clamp(1.0 / IMPOSSIBLE, IMPOSSIBLE).ln()
    }
}

/// A step that fits the times best: from this size on the second way is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub from: usize,
    /// What that gains over the first way at all sizes, as a sum of logarithms.
    pub gain: f64,
}

impl Step {
    /// Whether it gains more than another by more than chance.
    pub fn is_ahead_of(&self, other: &Self) -> bool {
        self.gain > other.gain + CHANCE
    }
}

/// The size from which on the second way is taken, so that over all sizes together the least time is lost.
/// A lucky size among the small moves it no more than an unlucky one among the large. `None` if the second way
/// gains nothing anywhere that is more than chance. Points of one size go one way.
pub fn step(points: &[Point]) -> Option<Step> {
    let mut points = points.to_vec();
    points.sort_by_key(|p| std::cmp::Reverse(p.size));
    let (mut sum, mut best): (f64, Option<Step>) = (0.0, None);
    for of_size in points.chunk_by(|a, b| a.size == b.size) {
        sum += of_size.iter().map(Point::gain).sum::<f64>();
        let from = of_size.first().map(|p| p.size);
        if let Some(from) = from.filter(|_| sum > best.map_or(CHANCE, |b| b.gain)) {
            best = Some(Step { from, gain: sum });
        }
    }
    best
}

/// Where that step is.
pub fn overtakes(points: &[Point]) -> Option<usize> {
    step(points).map(|step| step.from)
}

/// The largest size that goes the first way: the one before the second takes over. 0 if there is none.
pub fn last_before(points: &[Point], from: Option<usize>) -> usize {
    let before = points
        .iter()
        .map(|p| p.size)
        .filter(|&size| from.is_none_or(|from| size < from));
    before.max().unwrap_or(0)
}

/// The fewest blocks with which every size takes no longer than with the best number for it, but for chance. Each number of
/// blocks comes with the times of all sizes.
pub fn fewest(swept: &[(u16, Vec<f64>)]) -> Option<u16> {
    let best = |size: usize| {
        let times = swept.iter().filter_map(|(_, times)| times.get(size));
        times.copied().fold(f64::INFINITY, f64::min)
    };
    let enough = |times: &[f64]| {
        let mut each = times.iter().enumerate();
        each.all(|(size, us)| *us <= best(size) * (1.0 + CHANCE))
    };
    let good = swept.iter().filter(|(_, times)| enough(times));
    // None is good for all sizes if each has a favourite of its own: then as many as there may be.
    let fewest = good.map(|(blocks, _)| *blocks).min();
    fewest.or_else(|| swept.iter().map(|(blocks, _)| *blocks).max())
}

/// Which number each size takes, as far as that says anything: the largest size of every number, ascending, up to the last size at which one
/// is ahead of the usual way by more than chance. A size takes the number of the one before unless another is ahead of that by more.
/// `usual` and every number have the times of all sizes.
pub fn favourites(sizes: &[usize], usual: &[f64], swept: &[(u16, Vec<f64>)]) -> Vec<(usize, u16)> {
    let best = |size: usize| {
        let each = swept.iter();
        let times = each.filter_map(|(number, times)| Some((*number, *times.get(size)?)));
        times.min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let ahead = |size: &usize| {
        let usual = usual.get(*size).copied().unwrap_or(f64::INFINITY);
        best(*size).is_some_and(|(_, us)| us * (1.0 + CHANCE) < usual)
    };
    let end = (0..sizes.len())
        .rev()
        .find(ahead)
        .map_or(0, |last| last + 1);
    let mut all: Vec<(usize, u16)> = Vec::new();
    for (i, &bytes) in sizes[..end].iter().enumerate() {
        let Some((quickest, least)) = best(i) else {
            continue;
        };
        let as_quick = |number: u16| {
            let mut each = swept.iter().filter(|(n, _)| *n == number);
            each.any(|(_, times)| times[i] <= least * (1.0 + CHANCE))
        };
        match all.last_mut() {
            Some((until, number)) if as_quick(*number) => *until = bytes,
            _ => all.push((bytes, quickest)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(all: &[(usize, f64, f64)]) -> Vec<Point> {
        let point = |&(size, small, large)| Point {
            size,
            small: Some(small),
            large: Some(large),
        };
        all.iter().map(point).collect()
    }

    fn ratios(all: &[f64]) -> Vec<Point> {
        let each = all.iter().enumerate();
        points(&each.map(|(i, r)| (1 << i, 1.0, *r)).collect::<Vec<_>>())
    }

    /// One shot, two shots and NCCL as measured on two H200s.
    #[test]
    fn a_clean_crossing_is_found_where_it_is() {
        let measured = [
            (2 << 10, 2.8, 3.6, 6.2),
            (16 << 10, 3.1, 3.9, 7.0),
            (128 << 10, 3.6, 4.4, 7.4),
            (512 << 10, 4.8, 5.1, 10.1),
            (1 << 20, 6.7, 6.2, 13.8),
            (4 << 20, 17.3, 15.7, 32.1),
            (16 << 20, 69.6, 54.2, 77.1),
        ];
        let shots = points(&measured.map(|(bytes, one, two, _)| (bytes, one, two)));
        assert_eq!(overtakes(&shots), Some(1 << 20));
        assert_eq!(last_before(&shots, Some(1 << 20)), 512 << 10);
        let nccl =
            points(&measured.map(|(bytes, one, two, nccl)| (bytes, f64::min(one, two), nccl)));
        assert_eq!(overtakes(&nccl), None);
        assert_eq!(last_before(&nccl, None), 16 << 20);
        let (none, mut backwards) = (&shots[..0], shots.clone());
        backwards.reverse();
        assert_eq!(overtakes(&backwards), Some(1 << 20));
        assert_eq!((overtakes(none), last_before(none, None)), (None, 0));
    }

    #[test]
    fn points_of_one_size_go_one_way() {
        let of = |all: &[(usize, f64, f64)]| overtakes(&points(all));
        // By itself the second would do better alone; so far apart they stay together.
        assert_eq!(of(&[(8, 1.0, 0.5), (8, 1.0, 1.9), (4, 1.0, 1.1)]), Some(8));
        assert_eq!(
            of(&[(8, 1.0, 0.5), (8, 1.0, 2.1), (16, 1.0, 0.9)]),
            Some(16)
        );
        assert_eq!(
            of(&[(8, 1.0, 2.1), (16, 1.0, 0.9), (8, 1.0, 0.5)]),
            Some(16)
        );
    }

    #[test]
    fn a_number_is_a_favourite_where_it_is_ahead_by_more_than_chance() {
        let sizes = [2, 4, 8, 16, 32];
        let usual = [3.0, 3.0, 4.0, 5.0, 9.0];
        let swept = |of: [[f64; 5]; 3]| {
            let numbers = [64, 128, 256].into_iter().zip(of);
            numbers.map(|(n, us)| (n, us.to_vec())).collect::<Vec<_>>()
        };
        let same = swept([usual, usual.map(|us| us * 0.99), usual.map(|us| us * 1.1)]);
        assert_eq!(favourites(&sizes, &usual, &same), []);
        assert_eq!(favourites(&sizes, &usual, &[]), []);
        assert_eq!(favourites(&[], &[], &same), []);
        // 64 keeps the second size, where 128 is ahead by chance, and 256 the third, where it is no quicker than usual; behind the fourth it
        // is as usual.
        let ahead = swept([
            [2.0, 2.5, 4.4, 5.0, 9.0],
            [2.9, 2.46, 4.2, 5.0, 9.0],
            [3.0, 3.0, 4.0, 4.0, 8.9],
        ]);
        assert_eq!(favourites(&sizes, &usual, &ahead), [(4, 64), (16, 256)]);
        let none = swept([[f64::INFINITY; 5]; 3]);
        assert_eq!(favourites(&sizes, &[f64::INFINITY; 5], &none), []);
    }

    #[test]
    fn neither_a_lucky_nor_an_unlucky_size_moves_the_crossing() {
        assert_eq!(overtakes(&ratios(&[1.3, 1.2, 0.9, 0.8, 0.7])), Some(4));
        // Ahead by luck among the small.
        assert_eq!(
            overtakes(&ratios(&[1.3, 0.95, 1.2, 0.9, 0.8, 0.7])),
            Some(8)
        );
        // Behind by chance among the large, even at the largest.
        assert_eq!(
            overtakes(&ratios(&[1.3, 1.2, 0.9, 1.03, 0.8, 0.7])),
            Some(4)
        );
        assert_eq!(overtakes(&ratios(&[1.3, 1.2, 0.9, 0.8, 1.01])), Some(4));
    }

    #[test]
    fn who_is_always_ahead_takes_all_and_who_is_so_by_chance_nothing() {
        assert_eq!(overtakes(&ratios(&[0.9, 0.8])), Some(1));
        assert_eq!(last_before(&ratios(&[0.9, 0.8]), Some(1)), 0);
        assert_eq!(overtakes(&ratios(&[1.0, 1.0])), None);
        assert_eq!(overtakes(&ratios(&[1.1, 0.99])), None);
        assert_eq!(overtakes(&ratios(&[1.1, 0.97])), Some(2));
    }

    #[test]
    fn what_cannot_be_done_is_never_chosen() {
        let mut points = ratios(&[1.2, 1.2, 1.2, 0.5]);
        points[3].large = None;
        assert_eq!(overtakes(&points), None);
        // The first way ends at 2, whatever it took before.
        let mut points = ratios(&[1.2, 1.2, 1.2, 1.2]);
        (points[2].small, points[3].small) = (None, None);
        assert_eq!(overtakes(&points), Some(4));
        points[3].large = None;
        assert_eq!(overtakes(&points), Some(4));
        // A clock that stood still proves nothing beyond its own size.
        assert!(ratios(&[0.0])[0].gain().is_finite());
    }

    #[test]
    fn as_few_blocks_as_cost_no_size_anything() {
        let swept = |rows: &[(u16, &[f64])]| {
            fewest(
                &rows
                    .iter()
                    .map(|(b, t)| (*b, t.to_vec()))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(
            swept(&[(16, &[5.0, 90.0]), (32, &[5.0, 60.5]), (132, &[5.1, 60.0])]),
            Some(32)
        );
        assert_eq!(swept(&[(16, &[5.0, 60.0]), (132, &[5.0, 60.0])]), Some(16));
        // Each size has a favourite.
        assert_eq!(swept(&[(16, &[5.0, 90.0]), (132, &[9.0, 60.0])]), Some(132));
        assert_eq!(swept(&[]), None);
    }
}
