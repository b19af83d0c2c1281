//! Groups as several groups.

#![allow(clippy::unwrap_used, reason = "tests")]

use brigade_device::{Bootstrap, Error, Result};
use brigade_group::{machine, split, threads, vote};
use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    thread,
    time::Duration,
};

const LONG: Duration = Duration::from_secs(30);

/// What every rank of a group of threads makes of `body`, in rank order.
fn on_all<T: Send + 'static>(
    size: usize,
    body: impl Fn(&dyn Bootstrap) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let body = Arc::new(body);
    let ranks: Vec<_> = threads(size)
        .into_iter()
        .map(|boot| {
            let body = Arc::clone(&body);
            thread::spawn(move || body(&boot))
        })
        .collect();
    ranks.into_iter().map(|r| r.join().unwrap()).collect()
}

#[test]
fn parts_exchange_among_themselves_and_make_any_number_of_exchanges() {
    let salt = RandomState::new().build_hasher().finish() as u8;
    let all = on_all(6, move |boot| {
        let colour = boot.rank() / 2;
        split(boot, colour, LONG, |part| {
            assert_eq!((part.size(), part.rank()), (2, boot.rank() % 2));
            // Later parts make more of them.
            let mut seen = Vec::new();
            for round in 0..=3 * colour {
                let mine = [boot.rank() as u8 ^ salt, round as u8];
                seen = part.all_gather(&mine, LONG)?;
            }
            vote(part, "a step", &[colour as u8], LONG)?;
            Ok(seen)
        })
        .unwrap()
    });
    for (rank, seen) in all.iter().enumerate() {
        let (first, round) = (rank / 2 * 2, (3 * (rank / 2)) as u8);
        let want = [first, first + 1].map(|r| vec![r as u8 ^ salt, round]);
        assert_eq!(seen[..], want, "rank {rank}");
    }
}

#[test]
fn parts_split_again() {
    let all = on_all(8, |boot| {
        let last = |part: &dyn Bootstrap| part.all_gather(&[boot.rank() as u8], LONG);
        split(boot, boot.rank() % 2, LONG, |part| {
            split(part, part.rank() / 2, LONG, last)
        })
        .unwrap()
    });
    assert_eq!(all[5], [[5], [7]]);
    assert_eq!(all[2], [[0], [2]]);
}

#[test]
fn one_rank_that_fails_fails_all_and_nobody_waits() {
    for at in 0..2 {
        let all = on_all(4, move |boot| -> Result<()> {
            split(boot, boot.rank() / 2, LONG, |part| {
                part.all_gather(b"first", LONG)?;
                if boot.rank() == 3 && at == 0 {
                    return Err(Error::Closed);
                }
                // Rank 2 is in this exchange when rank 3 is not.
                part.all_gather(b"second", LONG)?;
                if boot.rank() == 3 {
                    return Err(Error::Closed);
                }
                Ok(())
            })
        });
        for (rank, result) in all.iter().enumerate() {
            let text = result.as_ref().unwrap_err().to_string();
            match rank {
                3 => assert_eq!(text, "communicator closed"),
                _ => assert!(text.contains("rank 3: communicator closed"), "{text}"),
            }
        }
    }
}

#[test]
fn whoever_makes_fewer_exchanges_than_its_part_is_named() {
    let all = on_all(2, |boot| {
        split(boot, 0, LONG, |part| {
            (0..=boot.rank()).try_for_each(|_| part.all_gather(b"x", LONG).map(drop))
        })
    });
    let text = all[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("rank 0 ended before"), "{text}");
    let text = all[1].as_ref().unwrap_err().to_string();
    assert!(text.contains("rank 0 ended before"), "{text}");
}

#[test]
fn machines_are_what_ranks_call_them() {
    let of = |names: &'static [&'static [u8]]| {
        on_all(names.len(), |boot| {
            machine::machines(boot, names[boot.rank()], LONG).map_err(|e| match e {
                Error::Unsupported(reason) => reason.code,
                other => panic!("{other}"),
            })
        })
    };
    let two = of(&[b"a", b"a", b"b", b"b"]);
    assert!(
        two.iter()
            .all(|m| m.is_ok_and(|m| (m.count(), m.ranks()) == (2, 2)))
    );
    assert_eq!(of(&[b"a", b"b", b"a", b"b"]), [Err("machine-order"); 4]);
    assert_eq!(of(&[b"a", b"a", b"b"]), [Err("unequal-machines"); 3]);
    let own = on_all(3, |boot| {
        machine::machines(boot, &machine::identity().unwrap(), LONG).unwrap()
    });
    assert!(own.iter().all(|m| (m.count(), m.ranks()) == (1, 3)));
    // With no names at all, strangers would be of one machine.
    for nameless in [&[1][..], &[0, 1, 2]] {
        let refused = on_all(3, |boot| {
            let name: &[u8] = match nameless.contains(&boot.rank()) {
                true => b"",
                false => b"a",
            };
            machine::machines(boot, name, LONG)
        });
        for result in refused {
            assert!(
                matches!(&result, Err(Error::Invalid { field: "name", got, .. })
                    if got.contains(&nameless[0].to_string())),
                "{result:?}"
            );
        }
    }
}
