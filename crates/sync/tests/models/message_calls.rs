//! Calls by which the messages of `messages.rs` are made: lengths, orders, ranks that die, leave or disagree.

use crate::{
    messages::{
        Call, Calls, LEAN, Message, PLAIN, Shape, Without, both, message, receives, scenario, sends,
    },
    shared::*,
};

/// One rank sends messages to another.
fn sent(shape: Shape, messages: &[Message], leaves: bool, without: Without) -> Scenario {
    let of = |call: fn(Message) -> Call, peer| {
        let to = |&m: &Message| call(Message { peer, ..m });
        messages.iter().map(to).collect()
    };
    scenario(shape, &[of(sends, 1), of(receives, 0)], leaves, without)
}

/// One rank sends messages of so many pieces to another.
pub fn one_way(shape: Shape, pieces: &[usize], without: Without) -> Scenario {
    let messages: Vec<_> = pieces.iter().map(|&n| message(1, n)).collect();
    sent(shape, &messages, false, without)
}

/// One message, and who is through says that it leaves. The other may hear so between two looks.
pub fn leaving(pieces: usize, without: Without) -> Scenario {
    let scenario = sent(PLAIN, &[message(1, pieces)], true, without);
    Scenario {
        rests: Rests::Counts,
        ..scenario
    }
}

/// Messages that go through all ranks, one after another.
pub fn chain(size: usize, pieces: &[usize]) -> Scenario {
    let calls = |rank: usize| {
        let came = (rank > 0).then(|| rank - 1);
        let goes = (rank + 1 < size).then_some(rank + 1);
        let both = move |&n: &usize| {
            let came = came.map(|peer| receives(message(peer, n)));
            came.into_iter()
                .chain(goes.map(|peer| sends(message(peer, n))))
        };
        pieces.iter().flat_map(both).collect()
    };
    let calls: Vec<Calls> = (0..size).map(calls).collect();
    scenario(PLAIN, &calls, false, Without::Nothing)
}

/// Two ranks that send and receive as many pieces at once, again and again.
pub fn swaps(pieces: &[usize], without: Without) -> Scenario {
    let calls = |peer| {
        let swap = |&n: &usize| both(message(peer, n), message(peer, n));
        pieces.iter().map(swap).collect()
    };
    scenario(LEAN, &[calls(1), calls(0)], false, without)
}

/// Two ranks, of which one sends and then the other; at last each sends before it receives.
pub fn both_send(pieces: &[usize], without: Without) -> Scenario {
    let calls = |rank: usize| {
        let both = |(i, &n): (usize, &usize)| {
            let message = message(1 - rank, n);
            match rank == 0 || i + 1 == pieces.len() {
                true => [sends(message), receives(message)],
                false => [receives(message), sends(message)],
            }
        };
        pieces.iter().enumerate().flat_map(both).collect()
    };
    scenario(LEAN, &[calls(0), calls(1)], false, without)
}

/// Two ranks disagree about a message, behind one that they agree about.
pub fn disagreeing(without: Without) -> Scenario {
    let calls = |rank: usize| {
        let strange = Message {
            signature: 0xA11 + rank as u32,
            ..message(1 - rank, 1 + rank)
        };
        let known = message(1 - rank, 1);
        let each_way = |m| [sends(m), receives(m)];
        [known, strange].into_iter().flat_map(each_way).collect()
    };
    let scenario = scenario(PLAIN, &[calls(0), calls(1)], false, without);
    Scenario {
        expect: Expect::Mismatch,
        ..scenario.with_abort()
    }
}

/// All orders in which a rank can send some messages and receive others, also at once.
fn orders(sent: &[Message], received: &[Message], at_once: bool) -> Vec<Calls> {
    let mut all = Vec::new();
    let mut begins = |call: Call| {
        let sent = &sent[usize::from(call.sends.is_some())..];
        let received = &received[usize::from(call.receives.is_some())..];
        let rest = orders(sent, received, at_once);
        all.extend(rest.into_iter().map(|rest| [vec![call], rest].concat()));
    };
    let (s, r) = (sent.first().copied(), received.first().copied());
    let alone = [s.map(sends), r.map(receives)];
    let together = s.zip(r).filter(|_| at_once).map(|(s, r)| both(s, r));
    for call in alone.into_iter().chain([together]).flatten() {
        begins(call);
    }
    if s.is_none() && r.is_none() {
        all.push(vec![]);
    }
    all
}

/// Whether two ranks get through their calls where so many pieces find room at whoever receives nothing just now.
fn fits(calls: [&Calls; 2], room: usize) -> bool {
    let (mut at, mut sent, mut taken) = ([0; 2], [0; 2], [0; 2]);
    // Pieces sent, and taken, when a rank's calls up to this one are over.
    let due = |rank: usize, at: usize| {
        let calls = &calls[rank][..at];
        let all = |of: fn(&Call) -> Option<Message>| {
            calls.iter().filter_map(of).map(|m| m.pieces).sum::<usize>()
        };
        (all(|c| c.sends), all(|c| c.receives))
    };
    loop {
        let before = (at, sent, taken);
        for rank in 0..2 {
            if at[rank] == calls[rank].len() {
                continue;
            }
            let (sends, takes) = due(rank, at[rank] + 1);
            sent[rank] = sends.min(taken[1 - rank] + room).max(sent[rank]);
            taken[rank] = takes.min(sent[1 - rank]).max(taken[rank]);
            at[rank] += usize::from((sent[rank], taken[rank]) == (sends, takes));
        }
        if before == (at, sent, taken) {
            return at == [calls[0].len(), calls[1].len()];
        }
    }
}

/// All lists of so many lengths out of these.
fn lists(messages: usize, lengths: &[usize]) -> Vec<Vec<usize>> {
    let of = |list: &Vec<usize>| {
        let longer = |&n| [&list[..], &[n]].concat();
        lengths.iter().map(longer).collect::<Vec<_>>()
    };
    (0..messages).fold(vec![vec![]], |all, _| all.iter().flat_map(of).collect())
}

/// All messages of at most so many pieces, so many of them, one way.
pub fn all_lengths(messages: usize, most: usize) -> Vec<Scenario> {
    let lengths: Vec<_> = (1..=most).collect();
    let lists = lists(messages, &lengths);
    let one_way = |list: &Vec<usize>| one_way(PLAIN, list, Without::Nothing);
    lists.iter().map(one_way).collect()
}

/// Two ranks that send each other messages of these lengths, so many each way, in all orders for which room for so many pieces is enough.
pub fn all_orders(
    ways: [usize; 2],
    lengths: &[usize],
    at_once: bool,
    room: usize,
) -> Vec<Scenario> {
    let [there, back] = ways.map(|messages| lists(messages, lengths));
    let with = |peer, list: &[usize]| list.iter().map(|&n| message(peer, n)).collect::<Vec<_>>();
    let mut all = Vec::new();
    for (there, back) in pairs(&there, &back) {
        let first = orders(&with(1, there), &with(1, back), at_once);
        let second = orders(&with(0, back), &with(0, there), at_once);
        let fitting = pairs(&first, &second).filter(|&(a, b)| fits([a, b], room));
        let scenario = |(a, b): (&Calls, &Calls)| {
            scenario(LEAN, &[a.clone(), b.clone()], false, Without::Nothing)
        };
        all.extend(fitting.map(scenario));
    }
    all
}

fn pairs<'a, T>(first: &'a [T], second: &'a [T]) -> impl Iterator<Item = (&'a T, &'a T)> {
    first
        .iter()
        .flat_map(move |a| second.iter().map(move |b| (a, b)))
}
