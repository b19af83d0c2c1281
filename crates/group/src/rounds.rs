//! The book that is kept on a group's exchanges, by the threads of one process together or by rank 0 for all.
//!
//! Invariant: every call of a rank takes one round, whether it ends well or not. A round that was given up stays given
//! up: whoever comes late to it gets the same error as those who waited, and all are in the same round again after it.

use std::{collections::BTreeMap, time::Duration};

/// One exchange of messages.
struct Round {
    messages: Vec<Option<Vec<u8>>>,
    /// Why nobody will get an answer any more.
    failed: Option<String>,
}

/// Why a rank does not come any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Away {
    /// It said so.
    Gone,
    /// It died, or broke the rules; and how that was noticed.
    Lost(String),
}

impl Away {
    /// For messages: what is the matter with this rank.
    pub(crate) fn told(&self, rank: usize) -> String {
        match self {
            Self::Gone => format!("gone: rank {rank}"),
            Self::Lost(why) => format!("lost: rank {rank} ({why})"),
        }
    }
}

enum Place {
    /// The round that the rank's next call belongs to.
    At(u64),
    Away(Away),
}

/// How a round ended.
pub(crate) enum Verdict<'a> {
    /// Every message is there; in rank order.
    All(Vec<&'a [u8]>),
    Failed(&'a str),
}

impl Verdict<'_> {
    /// Copies what a caller keeps.
    pub(crate) fn to_owned(&self) -> Result<Vec<Vec<u8>>, String> {
        match self {
            Self::All(all) => Ok(all.iter().map(|m| m.to_vec()).collect()),
            Self::Failed(why) => Err((*why).to_owned()),
        }
    }
}

pub(crate) struct Rounds {
    rounds: BTreeMap<u64, Round>,
    places: Vec<Place>,
}

impl Rounds {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            rounds: BTreeMap::new(),
            places: (0..size).map(|_| Place::At(0)).collect(),
        }
    }

    /// The round that this rank's next call belongs to.
    pub(crate) fn at(&self, rank: usize) -> Result<u64, &Away> {
        match &self.places[rank] {
            Place::At(number) => Ok(*number),
            Place::Away(away) => Err(away),
        }
    }

    /// The round that rank `rank` is in, with this message of its in it.
    pub(crate) fn enter(&mut self, rank: usize, mine: Vec<u8>) -> Result<u64, String> {
        let number = self.at(rank).map_err(|away| away.told(rank))?;
        let size = self.places.len();
        let round = self.rounds.entry(number).or_insert_with(|| Round {
            messages: vec![None; size],
            failed: None,
        });
        if round.messages[rank].is_some() {
            return Err(format!("rank {rank} is in another call already"));
        }
        // What will not be given to anybody is not kept.
        let failed = round.failed.is_some();
        round.messages[rank] = Some(if failed { Vec::new() } else { mine });
        Ok(number)
    }

    /// As [`enter`](Self::enter), with nothing that could be given to the others: the round fails.
    pub(crate) fn refuse(&mut self, rank: usize, why: String) -> Result<u64, String> {
        let number = self.enter(rank, Vec::new())?;
        if let Some(round) = self.rounds.get_mut(&number)
            && round.failed.is_none()
        {
            round.fail(why);
        }
        Ok(number)
    }

    /// The round in which this rank waits for a verdict.
    pub(crate) fn waits_in(&self, rank: usize) -> Option<u64> {
        let number = self.at(rank).ok()?;
        let round = self.rounds.get(&number)?;
        round.messages[rank].is_some().then_some(number)
    }

    /// How round `number` ended, as soon as it has.
    pub(crate) fn verdict(&mut self, number: u64) -> Option<Verdict<'_>> {
        let round = self.rounds.get_mut(&number)?;
        if round.failed.is_none() {
            let missing = |r: &usize| round.messages[*r].is_none();
            let missing: Vec<_> = (0..self.places.len()).filter(missing).collect();
            if missing.is_empty() {
                let all = round.messages.iter().flatten();
                return Some(Verdict::All(all.map(Vec::as_slice).collect()));
            }
            let why = told(&self.places, &missing)?;
            round.fail(why);
        }
        round.failed.as_deref().map(Verdict::Failed)
    }

    /// Who is in round `number` and who is not, for when it has taken too long.
    pub(crate) fn missing(&self, number: u64, within: Duration) -> String {
        let here = |r: &usize| {
            let round = self.rounds.get(&number);
            round.is_some_and(|round| round.messages[*r].is_some())
        };
        let (here, missing): (Vec<_>, Vec<_>) = (0..self.places.len()).partition(here);
        format!(
            "missing after {within:?}: {}; there: {}",
            ranks(&missing),
            ranks(&here)
        )
    }

    /// Ends round `number` for all ranks, unless it has ended.
    pub(crate) fn fail(&mut self, number: u64, why: String) {
        if self.verdict(number).is_none()
            && let Some(round) = self.rounds.get_mut(&number)
        {
            round.fail(why);
        }
    }

    /// Rank `rank` has what it gets from its round, and is on its way to the next.
    pub(crate) fn next(&mut self, rank: usize) {
        if let Place::At(number) = &mut self.places[rank] {
            *number += 1;
        }
        self.forget();
    }

    /// Rank `rank` will not come any more. False if that was known.
    pub(crate) fn leave(&mut self, rank: usize, away: Away) -> bool {
        if self.at(rank).is_err() {
            return false;
        }
        self.places[rank] = Place::Away(away);
        self.forget();
        true
    }

    /// Forgets the rounds that nobody is in any more.
    fn forget(&mut self) {
        let first = (0..self.places.len()).filter_map(|r| self.at(r).ok()).min();
        self.rounds.retain(|&n, _| first.is_some_and(|f| n >= f));
    }

    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.rounds.len()
    }
}

impl Round {
    fn fail(&mut self, why: String) {
        self.failed = Some(why);
        for message in self.messages.iter_mut().flatten() {
            *message = Vec::new();
        }
    }
}

/// Which of the missing will never come; `None` if all of them still may.
fn told(places: &[Place], missing: &[usize]) -> Option<String> {
    let mut gone = Vec::new();
    let mut parts = Vec::new();
    for &rank in missing {
        match &places[rank] {
            Place::At(_) => {}
            Place::Away(Away::Gone) => gone.push(rank),
            Place::Away(away) => parts.push(away.told(rank)),
        }
    }
    if !gone.is_empty() {
        parts.push(format!("gone: {}", ranks(&gone)));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// `rank 1`, `ranks 0, 2`, `no rank`.
pub(crate) fn ranks(which: &[usize]) -> String {
    let listed: Vec<_> = which.iter().map(usize::to_string).collect();
    match listed.len() {
        0 => "no rank".into(),
        1 => format!("rank {}", listed[0]),
        _ => format!("ranks {}", listed.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(rounds: &mut Rounds, number: u64) -> String {
        rounds.verdict(number).unwrap().to_owned().unwrap_err()
    }

    #[test]
    fn a_lost_rank_is_told_with_the_reason_and_before_the_gone() {
        let mut rounds = Rounds::new(4);
        rounds.enter(0, b"a".to_vec()).unwrap();
        assert!(rounds.verdict(0).is_none());
        assert!(rounds.leave(1, Away::Gone));
        assert!(rounds.leave(2, Away::Lost("it closed".into())));
        assert!(!rounds.leave(2, Away::Gone));
        let want = "lost: rank 2 (it closed); gone: rank 1";
        assert_eq!(failed(&mut rounds, 0), want);
        // Rank 3 comes late, and its message is not kept.
        assert_eq!(rounds.enter(3, vec![1; 100]), Ok(0));
        assert_eq!(failed(&mut rounds, 0), want);
        assert!(rounds.rounds[&0].messages[3].as_ref().unwrap().is_empty());
        assert_eq!(
            rounds.enter(2, Vec::new()),
            Err("lost: rank 2 (it closed)".into())
        );
    }

    #[test]
    fn what_was_complete_stays_complete() {
        let mut rounds = Rounds::new(2);
        rounds.enter(0, b"a".to_vec()).unwrap();
        rounds.enter(1, b"b".to_vec()).unwrap();
        rounds.leave(1, Away::Lost("it closed".into()));
        rounds.fail(0, "too late".into());
        let all = rounds.verdict(0).unwrap().to_owned();
        assert_eq!(all, Ok(vec![b"a".to_vec(), b"b".to_vec()]));
        assert_eq!(rounds.waits_in(0), Some(0));
        rounds.next(0);
        assert_eq!((rounds.kept(), rounds.waits_in(0)), (0, None));
    }

    #[test]
    fn names_of_ranks() {
        assert_eq!(ranks(&[]), "no rank");
        assert_eq!(ranks(&[1]), "rank 1");
        assert_eq!(ranks(&[0, 2]), "ranks 0, 2");
    }
}
