//! The contract of a group over sockets: it forms or fails for all in time, and every call ends alike on every rank.
//! Ranks are threads here; tests/processes.rs has processes.
#![allow(clippy::unwrap_used)]

mod common;

use brigade_device::Bootstrap;
use brigade_group::{Address, TcpConfig, TcpGroup, agree, vote};
use common::{LONG, SHORT, SLACK, addresses, at_once, config, group, refusals, secret, tcp};
use std::time::{Duration, Instant};

/// Long enough for those that come, on a busy machine.
const FORMING: Duration = Duration::from_millis(1200);

#[test]
fn every_rank_gets_every_message_in_rank_order() {
    for address in addresses() {
        for size in [1, 2, 3, 5, 8] {
            let ranks = group(size, &address);
            for all in at_once(&ranks, |b| {
                b.all_gather(&vec![b.rank() as u8; b.rank()], LONG).unwrap()
            }) {
                let want: Vec<_> = (0..size).map(|r| vec![r as u8; r]).collect();
                assert_eq!(all, want);
            }
            // One at a time, rank 0 last: goodbyes are no losses.
            let liveness: Vec<_> = ranks.iter().map(TcpGroup::liveness).collect();
            for rank in ranks.into_iter().rev() {
                drop(rank);
            }
            assert!(liveness.iter().all(|l| l.lost().is_none()));
        }
    }
}

#[test]
fn rounds_do_not_mix() {
    for address in addresses() {
        let ranks = group(4, &address);
        at_once(&ranks, |b| {
            for round in 0..300u32 {
                let all = b.all_gather(&round.to_le_bytes(), LONG).unwrap();
                assert!(all.iter().all(|m| *m == round.to_le_bytes()));
            }
        });
    }
}

/// Words come beside rounds, once each and in order, and are nobody else's; whoever waits for some can be woken.
#[test]
fn words_reach_all_others_in_order() {
    const WORDS: u8 = 9;
    for address in addresses() {
        let ranks = group(3, &address);
        let heard = at_once(&ranks, |b| {
            let mut heard = Vec::new();
            for n in 0..WORDS {
                b.tell(&[b.rank() as u8, n]).unwrap();
                b.all_gather(&[n], LONG).unwrap();
            }
            while heard.len() < 2 * usize::from(WORDS) {
                let more = b.heard(LONG);
                assert!(!more.is_empty(), "{heard:?}");
                heard.extend(more);
            }
            heard
        });
        for (me, heard) in heard.into_iter().enumerate() {
            for rank in (0..3).filter(|&rank| rank != me) {
                let of = heard.iter().filter(|(from, _)| *from == rank);
                let said: Vec<Vec<u8>> = of.map(|(_, what)| what.clone()).collect();
                let want: Vec<_> = (0..WORDS).map(|n| vec![rank as u8, n]).collect();
                assert_eq!(said, want, "rank {me} of rank {rank}");
            }
        }
        let start = Instant::now();
        for within in [LONG, Duration::MAX] {
            ranks[1].wake();
            assert_eq!(ranks[1].heard(within), []);
        }
        assert!(start.elapsed() < LONG);
        assert_eq!(ranks[1].heard(Duration::ZERO), []);
        let too_long = ranks[0].tell(&[0; 1 << 10]);
        assert!(matches!(
            too_long,
            Err(brigade_device::Error::Invalid { field: "what", .. })
        ));
    }
}

#[test]
fn messages_as_long_as_may_be_arrive_and_longer_ones_fail_for_all() {
    let ranks = group(3, &tcp());
    let limit = ranks[0].message_limit();
    let all = at_once(&ranks, |b| {
        b.all_gather(&vec![b.rank() as u8; limit], LONG).unwrap()
    });
    for (rank, message) in all[1].iter().enumerate() {
        assert!(message.len() == limit && message.iter().all(|&b| b == rank as u8));
    }
    for long in [0, 2] {
        let told = at_once(&ranks, |b| {
            let bytes = if b.rank() == long { limit + 1 } else { 1 };
            b.all_gather(&vec![0; bytes], LONG).unwrap_err().to_string()
        });
        let want = format!(
            "gathering messages: rank {long} has a message of 5592402 bytes; 5592401 is the limit in a group of 3"
        );
        assert_eq!(told, [want.as_str(); 3]);
    }
    at_once(&ranks, |b| b.all_gather(b"again", LONG).unwrap());
}

#[test]
fn a_round_that_was_given_up_stays_given_up_and_the_next_one_works() {
    for address in addresses() {
        let ranks = group(3, &address);
        for late in 0..3 {
            let early: Vec<_> = ranks.iter().filter(|b| b.rank() != late).collect();
            let start = Instant::now();
            let mut told = at_once(&early, |b| {
                b.all_gather(b"early", SHORT).unwrap_err().to_string()
            });
            assert!(start.elapsed() >= SHORT && start.elapsed() < SHORT + SLACK);
            told.push(
                ranks[late]
                    .all_gather(b"late", LONG)
                    .unwrap_err()
                    .to_string(),
            );
            // Who had come when the first of them gave up is up to the scheduler; that all tell the same is not.
            told.dedup();
            assert_eq!(told.len(), 1, "{told:?}");
            assert!(told[0].contains("missing after 150ms: rank"), "{}", told[0]);
            for all in at_once(&ranks, |b| b.all_gather(b"next", LONG).unwrap()) {
                assert_eq!(all, [b"next"; 3]);
            }
        }
    }
}

#[test]
fn votes_work_over_sockets() {
    let ranks = group(3, &tcp());
    let told = at_once(&ranks, |b| {
        vote(b, "scratch", b"1 MiB", LONG).unwrap();
        let mine = if b.rank() == 1 {
            Err("no memory")
        } else {
            Ok(())
        };
        agree(b, "segments", mine, LONG).unwrap_err().to_string()
    });
    let want = "segments: ranks 0, 2: ready; rank 1: failed with \"no memory\"";
    assert_eq!(told, [want; 3]);
}

#[test]
fn a_rank_that_says_goodbye_is_gone_and_not_lost() {
    let mut ranks = group(3, &tcp());
    drop(ranks.pop());
    let told = at_once(&ranks, |b| b.all_gather(b"", LONG).unwrap_err().to_string());
    assert_eq!(told, ["gathering messages: gone: rank 2"; 2]);
    drop(ranks.remove(0));
    let error = ranks[0].all_gather(b"", LONG).unwrap_err();
    assert_eq!(error.to_string(), "gathering messages: gone: rank 0");
    assert_eq!(ranks[0].lost(), None);
}

#[test]
fn a_rank_that_never_joins_is_named_to_all_in_time() {
    for address in addresses() {
        let mut configs: Vec<_> = [0, 2, 3].map(|r| config(r, 4, &address)).to_vec();
        configs[0].join_within = FORMING;
        let start = Instant::now();
        let told = refusals(&configs);
        assert!(start.elapsed() < FORMING + SLACK);
        assert_eq!(
            told,
            ["joining: missing after 1.2s: rank 1; there: ranks 0, 2, 3"; 3]
        );
    }
}

#[test]
fn without_rank_0_the_others_end_in_time() {
    for address in addresses() {
        let mut alone = config(1, 2, &address);
        alone.join_within = SHORT;
        let start = Instant::now();
        let told = refusals(&[alone]);
        assert!(start.elapsed() >= SHORT && start.elapsed() < SHORT + SLACK);
        let want = format!("joining: no rank 0 at {address} after 150ms: ");
        assert!(told[0].starts_with(&want), "{told:?}");
    }
}

#[test]
fn a_rank_that_comes_twice_fails_the_group_for_all() {
    for address in addresses() {
        let configs = [0, 1, 1].map(|r| config(r, 3, &address));
        let mut told = refusals(&configs);
        told[1..].sort();
        assert_eq!(
            told,
            [
                "joining: rank 1 came twice",
                "joining: rank 1 came twice",
                "joining: refused by rank 0: rank 1 came twice"
            ]
        );
    }
}

#[test]
fn ranks_of_groups_of_different_sizes_fail_for_all() {
    let address = tcp();
    let configs = [config(0, 2, &address), config(1, 3, &address)];
    let why = "rank 1 is of a group of 3, rank 0 of a group of 2";
    let want = [
        format!("joining: {why}"),
        format!("joining: refused by rank 0: {why}"),
    ];
    assert_eq!(refusals(&configs), want);
}

#[test]
fn a_second_group_at_the_same_address_fails_and_the_first_forms() {
    for address in addresses() {
        let configs = [0, 1].map(|r| config(r, 2, &address));
        let mut second = config(0, 2, &address);
        second.join_within = SHORT * 2;
        std::thread::scope(|s| {
            let first = s.spawn(|| TcpGroup::join(&configs[0]).unwrap());
            // Until the first listens, the second's turn would be first.
            let probe = common::raw::connect(&address);
            let told = refusals(&[second]);
            let want = format!("joining: rank 0 cannot listen at {address} after 300ms: ");
            assert!(told[0].starts_with(&want), "{told:?}");
            drop(probe);
            let other = TcpGroup::join(&configs[1]).unwrap();
            let first = first.join().unwrap();
            at_once(&[first, other], |b| b.all_gather(b"", LONG).unwrap());
        });
        // One group after the other is no conflict.
        group(2, &address);
    }
}

#[test]
fn ranks_with_different_secrets_do_not_meet() {
    let address = tcp();
    let told = |zero: &str, one: &str| {
        let some = |text: &str| if text.is_empty() { None } else { secret(text) };
        let mut configs = [0, 1].map(|r| config(r, 2, &address));
        configs[0].secret = some(zero);
        configs[1].secret = some(one);
        configs[0].join_within = FORMING;
        let mut told = refusals(&configs);
        let rank_0 = told.remove(0);
        let start = "joining: missing after 1.2s: rank 1; there: rank 0; refused: 127.0.0.1:";
        assert!(rank_0.starts_with(start), "{rank_0}");
        told.remove(0)
    };
    let refused = |why: &str| format!("joining: refused by rank 0: {why}");
    assert_eq!(
        told("a", "b"),
        refused("its proof is wrong: it has another secret")
    );
    assert_eq!(told("a", ""), refused("it has no secret, rank 0 has one"));
    assert_eq!(told("", "a"), refused("it has a secret, rank 0 has none"));
}

#[test]
fn ranks_with_one_secret_meet() {
    for address in addresses() {
        let mut configs = [0, 1, 2].map(|r| config(r, 3, &address));
        for config in &mut configs {
            config.secret = secret("a");
        }
        at_once(&configs, |c| TcpGroup::join(c).unwrap());
    }
}

#[test]
fn an_address_that_others_can_reach_is_refused_without_a_secret() {
    for rank in [0, 1] {
        let told = refusals(&[config(rank, 2, &Address::tcp("192.0.2.1", 29500))]);
        insta::assert_snapshot!("no_secret", told[0]);
    }
    let mut with = TcpConfig::new(0, 1, Address::tcp("192.0.2.1", 29500));
    with.secret = secret("a");
    assert!(
        TcpGroup::join(&with).is_ok(),
        "a group of one needs no address"
    );
}
