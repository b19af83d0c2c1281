//! Votes: before a collective changes state, all ranks go on, or all fail and know why.
//!
//! A ballot carries the name of its step, so that a rank in another step is noticed instead of being counted.

use crate::rounds::ranks;
use brigade_device::{Bootstrap, Error, Result};
use std::{fmt::Display, time::Duration};

/// Longest text of one rank in an error message, in characters.
const MOST_CHARS: usize = 600;

/// All ranks have the same bytes at this step, or all fail.
///
/// Text makes the error readable: what each rank had is shown as UTF-8 as far as it is that.
///
/// # Errors
/// [`Error::Group`] with what each rank had, or with the ranks that did not come.
pub fn vote(boot: &dyn Bootstrap, step: &'static str, mine: &[u8], within: Duration) -> Result<()> {
    let all = ballots(boot, step, mine, within)?;
    if all.iter().all(|b| b.as_deref() == Ok(mine)) {
        return Ok(());
    }
    let views = all.iter().map(|ballot| match ballot {
        Ok(bytes) => text(bytes),
        Err(other) => other.clone(),
    });
    Err(Error::Group {
        step,
        what: format!("the ranks do not agree: {}", together(views)),
    })
}

/// All ranks succeeded at this step, and each gets its own value; or all fail.
///
/// # Errors
/// [`Error::Group`] with the reason of every rank that failed, or with the ranks that did not come.
pub fn agree<T, E: Display>(
    boot: &dyn Bootstrap,
    step: &'static str,
    mine: Result<T, E>,
    within: Duration,
) -> Result<T> {
    let mut ballot = vec![u8::from(mine.is_err())];
    if let Err(why) = &mine {
        ballot.extend_from_slice(why.to_string().as_bytes());
    }
    let all = match ballots(boot, step, &ballot, within) {
        Ok(all) => all,
        // The own reason is the better half of the story.
        Err(Error::Group { what, .. }) => {
            let what = match mine {
                Ok(_) => what,
                Err(why) => {
                    let why = text(why.to_string().as_bytes());
                    format!("{what}; rank {}: failed with {why}", boot.rank())
                }
            };
            return Err(Error::Group { step, what });
        }
        Err(other) => return Err(other),
    };
    let views: Vec<_> = all
        .iter()
        .map(|ballot| match ballot {
            Ok(bytes) => match bytes.split_first() {
                Some((0, [])) => "ready".into(),
                Some((1, why)) => format!("failed with {}", text(why)),
                _ => "no ballot".into(),
            },
            Err(other) => other.clone(),
        })
        .collect();
    match mine {
        Ok(value) if views.iter().all(|v| v == "ready") => Ok(value),
        _ => Err(Error::Group {
            step,
            what: together(views),
        }),
    }
}

/// Every rank's bytes, or what it does instead of being at this step.
fn ballots(
    boot: &dyn Bootstrap,
    step: &'static str,
    mine: &[u8],
    within: Duration,
) -> Result<Vec<Result<Vec<u8>, String>>> {
    let mut message = step.as_bytes().to_vec();
    message.push(0);
    message.extend_from_slice(mine);
    let all = boot
        .all_gather(&message, within)
        .map_err(|error| match error {
            Error::Group { what, .. } => Error::Group { step, what },
            other => other,
        })?;
    let ballot = |message: &Vec<u8>| {
        let end = message.iter().position(|&b| b == 0);
        let (name, ballot) = end.map_or((&message[..], &[][..]), |i| {
            (&message[..i], &message[i + 1..])
        });
        if end.is_some() && name == step.as_bytes() {
            Ok(ballot.to_vec())
        } else {
            Err(format!("at another step, {}", text(name)))
        }
    };
    Ok(all.iter().map(ballot).collect())
}

fn text(bytes: &[u8]) -> String {
    let all = String::from_utf8_lossy(bytes);
    match all.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => format!("{:?}...", &all[..end]),
        None => format!("{all:?}"),
    }
}

/// Every rank's view; ranks with the same view share it.
fn together(views: impl IntoIterator<Item = String>) -> String {
    let mut seen: Vec<(String, Vec<usize>)> = Vec::new();
    for (rank, view) in views.into_iter().enumerate() {
        match seen.iter_mut().find(|(v, _)| *v == view) {
            Some((_, ranks)) => ranks.push(rank),
            None => seen.push((view, vec![rank])),
        }
    }
    let told: Vec<_> = seen
        .iter()
        .map(|(view, which)| format!("{}: {view}", ranks(which)))
        .collect();
    told.join("; ")
}
