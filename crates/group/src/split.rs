//! One group as several: so that machines, and rails between them, make their own groups out of that of all ranks.

use crate::{messages, rounds::ranks};
use brigade_device::{Bootstrap, Error, Result};
use std::time::Duration;

const STEP: &str = "splitting the group";

/// What a rank's message says: it exchanges in its part, it is through, or it failed.
const EXCHANGES: u8 = 0;
const READY: u8 = 1;
const FAILED: u8 = 2;

/// Runs `work` with the part of the group that has the same `colour` as this rank. Ranks of a part keep their order. Parts need not make
/// equally many exchanges: whoever is through waits for the others. All ranks of all parts succeed, or all fail. Each exchange may
/// take `within`.
///
/// (MPI has the same as `MPI_Comm_split`, for good; a part here ends with its work, and needs nothing but the exchanges of the whole.)
///
/// ```
/// use brigade_device::Bootstrap;
/// use std::time::Duration;
///
/// let all = brigade_group::threads(4);
/// std::thread::scope(|s| {
///     for boot in &all {
///         s.spawn(move || {
///             let within = Duration::from_secs(10);
///             let even = brigade_group::split(boot, boot.rank() % 2, within, |part| {
///                 part.all_gather(&[boot.rank() as u8], within)
///             });
///             assert_eq!(even.unwrap(), [[boot.rank() as u8 % 2], [boot.rank() as u8 % 2 + 2]]);
///         });
///     }
/// });
/// ```
///
/// # Errors
/// What `work` returned, if it failed on this rank; otherwise [`Error::Group`] with the reason of each rank that failed, or with those that
/// did not come.
pub fn split<T>(
    boot: &dyn Bootstrap,
    colour: usize,
    within: Duration,
    work: impl FnOnce(&dyn Bootstrap) -> Result<T>,
) -> Result<T> {
    let colours = messages(boot, &(colour as u64).to_le_bytes(), within)?;
    let mine = &colours[boot.rank()];
    let is_here = |rank: &usize| &colours[*rank] == mine;
    let part = Part {
        boot,
        members: (0..boot.size()).filter(is_here).collect(),
    };
    let result = work(&part);
    let last = match &result {
        Ok(_) => vec![READY],
        Err(why) => [&[FAILED], why.to_string().as_bytes()].concat(),
    };
    // Others may still be at work: all ranks are in the same exchange, and in it they find out that it is the last.
    let all = loop {
        let all = match messages(boot, &last, within) {
            Ok(all) => all,
            Err(error) => return result.and(Err(error)),
        };
        if all.iter().all(|m| m.first() != Some(&EXCHANGES)) {
            break all;
        }
    };
    let failed = reasons(all.iter().enumerate());
    match result {
        Ok(_) if !failed.is_empty() => Err(group(failed)),
        own => own,
    }
}

/// Why ranks failed, of those that did.
fn reasons<'m>(messages: impl Iterator<Item = (usize, &'m Vec<u8>)>) -> String {
    let failed = messages.filter_map(|(rank, message)| match message.split_first() {
        Some((&FAILED, why)) => {
            let why = String::from_utf8_lossy(why);
            let why: String = why.chars().take(600).collect();
            Some(format!("rank {rank}: {why}"))
        }
        Some((&(EXCHANGES | READY), _)) => None,
        _ => Some(format!("rank {rank} is somewhere else")),
    });
    failed.collect::<Vec<_>>().join("; ")
}

fn group(what: String) -> Error {
    Error::Group { step: STEP, what }
}

/// Some ranks of a group, as a group.
struct Part<'b> {
    boot: &'b dyn Bootstrap,
    /// In order, by their numbers in the whole.
    members: Vec<usize>,
}

impl Bootstrap for Part<'_> {
    fn rank(&self) -> usize {
        let own = self.boot.rank();
        self.members.partition_point(|&member| member < own)
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        let all = messages(self.boot, &[&[EXCHANGES], mine].concat(), within)?;
        let here = || self.members.iter().map(|&rank| (rank, &all[rank]));
        let failed = reasons(here());
        if !failed.is_empty() {
            return Err(group(failed));
        }
        let away = |m: &Vec<u8>| m.first() != Some(&EXCHANGES);
        let ended: Vec<_> = here().filter(|(_, m)| away(m)).map(|(r, _)| r).collect();
        if !ended.is_empty() {
            return Err(group(format!("{} ended before", ranks(&ended))));
        }
        Ok(here().map(|(_, m)| m[1..].to_vec()).collect())
    }
}
