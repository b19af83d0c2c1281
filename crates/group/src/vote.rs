//! Votes: before a collective changes state, all ranks go on, or all fail and know why.
//!
//! A ballot carries the name of its step, so that a rank in another step is noticed instead of being counted.

use crate::rounds::ranks;
use brigade_device::{Bootstrap, Error, Result};
use std::{fmt::Display, time::Duration};

/// Longest text of one rank in an error message, in characters.
const MOST_CHARS: usize = 600;

/// Every rank's message, in rank order: what a [`Bootstrap`] gives, which may be anybody's, once it was seen to be of this group.
///
/// # Errors
/// As [`Bootstrap::all_gather`]; [`Error::Group`] if it names a rank that is not in the group, or gives more messages than
/// there are ranks, or fewer.
pub fn messages(boot: &dyn Bootstrap, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
    let (rank, size) = (boot.rank(), boot.size());
    let wrong = |what| Error::Group {
        step: "bootstrap",
        what,
    };
    if rank >= size {
        return Err(wrong(format!("it calls this rank {rank} of {size}")));
    }
    let all = boot.all_gather(mine, within)?;
    match all.len() == size {
        true => Ok(all),
        false => Err(wrong(format!("{} messages of {size} ranks", all.len()))),
    }
}

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
    let all = messages(boot, &message, within).map_err(|error| match error {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sharing, machine, split};

    /// A bootstrap that calls this rank `.0` of `.1`, and gives `.2` messages.
    struct Own(usize, usize, usize);

    impl Bootstrap for Own {
        fn rank(&self) -> usize {
            self.0
        }

        fn size(&self) -> usize {
            self.1
        }

        fn all_gather(&self, mine: &[u8], _: Duration) -> Result<Vec<Vec<u8>>> {
            Ok(vec![mine.to_vec(); self.2])
        }
    }

    /// What everything that takes a bootstrap's answer says of it.
    fn told(boot: &Own) -> Vec<String> {
        let within = Duration::from_secs(5);
        let results = [
            messages(boot, b"", within).map(drop),
            vote(boot, "vote", b"same", within),
            agree(boot, "agree", Ok::<_, Error>(()), within),
            split(boot, 0, within, |_| Ok(())),
            Sharing::between(boot, within).map(drop),
            machine::machines(boot, b"one", within).map(drop),
        ];
        let what = results.into_iter().map(|result| match result {
            Err(Error::Group { what, .. }) => what,
            other => panic!("{other:?} instead of an error of the group"),
        });
        what.collect()
    }

    #[test]
    fn an_answer_has_a_message_from_each_rank() {
        for messages in [0, 1, 3, 5] {
            let want = format!("{messages} messages of 2 ranks");
            for what in told(&Own(0, 2, messages)) {
                assert_eq!(what, want);
            }
        }
        assert_eq!(
            messages(&Own(0, 2, 2), b"x", Duration::ZERO).unwrap(),
            [b"x", b"x"]
        );
    }

    #[test]
    fn a_bootstrap_names_a_rank_of_the_group() {
        for (rank, size) in [(2, 2), (5, 2), (0, 0)] {
            for what in told(&Own(rank, size, size)) {
                assert_eq!(what, format!("it calls this rank {rank} of {size}"));
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn descriptors_take_no_wrong_answer_either() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let taken = crate::exchange_fds(&Own(1, 2, 1), &file, Duration::from_secs(5));
        let told = taken.unwrap_err().to_string();
        assert!(told.contains("1 messages of 2 ranks"), "{told}");
    }
}
