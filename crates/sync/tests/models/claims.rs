//! With all guards in their places.

use crate::{
    abort, barrier, bell, fifo, in_place,
    in_turn::{self, AHEAD as AHEAD_OF_ALL, BY_TURNS, ONCE as ONCE_EACH, REPLAYED, REPLAYED_AHEAD},
    loomed::Orders,
    low_latency::{self, AHEAD, BOTH, ONE},
    message_calls, message_launch,
    messages::{self, HALF, LEAN, PLAIN},
    packet, relay, reset,
    ring::{self, Mode},
    roll, sentinel,
    shared::*,
    table::*,
};

pub fn claims() -> Vec<Row> {
    const B: barrier::Without = barrier::Without::Nothing;
    const R: ring::Without = ring::Without::Nothing;
    const F: fifo::Without = fifo::Without::Nothing;
    const L: low_latency::Without = low_latency::Without::Nothing;
    const M: messages::Without = messages::Without::Nothing;
    const LAUNCH: message_launch::Without = message_launch::Without::Nothing;
    const I: in_turn::Without = in_turn::Without::Nothing;
    const P: packet::Without = packet::Without::Nothing;
    const S: sentinel::Without = sentinel::Without::Nothing;
    const RELAY: relay::Without = relay::Without::Nothing;
    const A: abort::Without = abort::Without::Nothing;
    const G: reset::Without = reset::Without::Nothing;
    const ROLL: roll::Without = roll::Without::Nothing;
    let ordered = |scenario: fn() -> Scenario| executions(Orders::RIGHT, deep(2, 3), scenario);
    let holds = Row::holds;
    let (barrier, ring, fifo, packets) = ("barrier", "ring", "fifo", "packets");
    let low_latency = "low latency";
    let in_turn = "in turn";
    let messages = "messages";
    let (sentinel, two_shots, copies) = ("sentinel", "two shots", "copies");
    let relay = "relay";
    let (abort, reset, roll, waits) = ("abort", "reset", "roll", "waits");
    vec![
        holds(
            barrier,
            "4 ranks meet, and see each other's data",
            states(|| barrier::scenario(4, deep(3, 6), false, B)),
        ),
        holds(
            barrier,
            "4 ranks, one in another call: a mismatch on all",
            states(|| must_mismatch(barrier::scenario(4, 1, true, B))),
        ),
        holds(
            barrier,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| barrier::scenario(3, deep(2, 4), false, B).with_death(2)),
        ),
        holds(
            barrier,
            "one of 3 ranks dies, and waits time out at any time",
            states(|| {
                with(barrier::scenario(3, 2, false, B).with_death(2), |s| {
                    s.timeouts = Timeouts::Any;
                })
            }),
        ),
        holds(
            barrier,
            "memory order of 2 ranks",
            ordered(|| barrier::scenario(2, 4, false, B)),
        ),
        holds(
            barrier,
            "3 ranks in calls that end with data of all peers, without a meeting: nobody takes another for one of another call",
            states(|| barrier::unmet(3, deep(2, 3), false, B)),
        ),
        holds(
            barrier,
            "2 ranks in many such calls",
            states(|| barrier::unmet(2, deep(4, 6), false, B)),
        ),
        holds(
            barrier,
            "the same, and stores become visible late",
            states(|| barrier::unmet(2, 3, false, B).weak(false)),
        ),
        holds(
            barrier,
            "3 ranks, one in another of such calls: a mismatch on all",
            states(|| must_mismatch(barrier::unmet(3, 1, true, B))),
        ),
        holds(
            ring,
            "4 ranks push to the next one",
            states(|| ring::scenario(4, deep(3, 7), Mode::Push, R)),
        ),
        holds(
            ring,
            "3 ranks pull from each other",
            states(|| ring::scenario(3, deep(4, 8), Mode::Pull, R)),
        ),
        holds(
            ring,
            "4 ranks, one of them writes, the others pull",
            states(|| ring::scenario(4, deep(3, 7), Mode::Broadcast, R)),
        ),
        holds(
            ring,
            "3 ranks, one half: the second is for speed only",
            states(|| ring::scenario(3, 4, Mode::Push, ring::Without::SecondHalf)),
        ),
        holds(
            ring,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| ring::scenario(3, deep(3, 5), Mode::Push, R).with_death(1)),
        ),
        holds(
            ring,
            "stores become visible late, 2 ranks",
            states(|| ring::scenario(2, deep(3, 5), Mode::Push, R).weak(false)),
        ),
        holds(
            ring,
            "memory order of 2 ranks",
            ordered(|| ring::scenario(2, 4, Mode::Push, R)),
        ),
        holds(
            fifo,
            "a chain of 4 ranks, 2 calls, counts that wrap",
            states(|| fifo::scenario(4, 2, 2, deep(3, 4), F)),
        ),
        holds(
            fifo,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| fifo::scenario(3, 2, 2, 2, F).with_death(1)),
        ),
        holds(
            fifo,
            "2 ranks send each other more than fits, in calls that cut the memory anew",
            states(|| fifo::both_ways(deep(2, 3), 3, false, F)),
        ),
        holds(
            fifo,
            "the same, one of them dies at any point, the other ends with a record",
            states(|| fifo::both_ways(2, 2, false, F).with_death(1)),
        ),
        holds(
            fifo,
            "2 ranks in different calls: a mismatch on both",
            states(|| must_mismatch(fifo::both_ways(1, 1, true, F))),
        ),
        holds(
            fifo,
            "memory order of both ways",
            ordered(|| fifo::both_ways(1, 2, false, F)),
        ),
        holds(
            fifo,
            "memory order of 2 ranks",
            ordered(|| fifo::scenario(2, 2, 2, 2, F)),
        ),
        holds(
            low_latency,
            "3 ranks use one slot over and over",
            states(|| low_latency::scenario(3, &ONE, false, L)),
        ),
        holds(
            low_latency,
            "one of 2 ranks is ahead, and gives up what it sent before",
            states(|| low_latency::scenario(2, &AHEAD, false, L)),
        ),
        holds(
            low_latency,
            "2 ranks use both slots at once, one gives up a use",
            states(|| low_latency::scenario(2, &BOTH, false, L)),
        ),
        holds(
            low_latency,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| low_latency::scenario(3, &ONE[1..], false, L).with_death(1)),
        ),
        holds(
            low_latency,
            "2 ranks in different calls: a mismatch on both",
            states(|| must_mismatch(low_latency::scenario(2, &ONE[2..], true, L))),
        ),
        holds(
            low_latency,
            "stores become visible late, 2 ranks",
            states(|| low_latency::scenario(2, &ONE, false, L).weak(false)),
        ),
        holds(
            low_latency,
            "memory order of 2 ranks, one ahead",
            ordered(|| low_latency::scenario(2, &AHEAD, false, L)),
        ),
        holds(
            in_turn,
            "launches of 2 blocks on 2 ranks, by turns",
            states(|| in_turn::scenario(deep(ONCE_EACH, BY_TURNS), I)),
        ),
        holds(
            in_turn,
            "the same where one half is used over and over, as a graph is launched",
            states(|| in_turn::scenario(REPLAYED, I)),
        ),
        holds(
            in_turn,
            "one of 2 ranks is ahead, and gives up what it sent before",
            states(|| in_turn::scenario(deep(REPLAYED_AHEAD, AHEAD_OF_ALL), I)),
        ),
        holds(
            in_turn,
            "stores become visible late",
            states(|| in_turn::one_way().weak(false)),
        ),
        holds(
            in_turn,
            "a send and a receive beside it are counted out by one word",
            states(|| in_turn::overlapping(I)),
        ),
        holds(
            in_turn,
            "one flag for what all blocks wrote",
            states(|| in_turn::counted(I)),
        ),
        holds(
            in_turn,
            "memory order of that flag",
            ordered(|| in_turn::counted(I)),
        ),
        holds(
            in_turn,
            "a launch that is stopped halfway gives poison, or all that it should",
            states(|| in_turn::stopped(I)),
        ),
        holds(
            in_turn,
            "memory order of a send's blocks and who receives",
            ordered(in_turn::one_way),
        ),
        holds(
            in_turn,
            "memory order of a launch that is stopped",
            ordered(|| in_turn::stopped(I)),
        ),
        holds(
            messages,
            "messages of 1 to 6 pieces, one after the other, in four slots",
            states_of(|| message_calls::all_lengths(deep(2, 3), 6)),
        ),
        holds(
            messages,
            "2 ranks, all orders of sends and receives for which room for three pieces is enough",
            states_of(|| message_calls::all_orders([2, 2], deep(&[1, 4], &[1, 3, 6]), false, 3)),
        ),
        holds(
            messages,
            "the same, where a rank may also do both at once",
            states_of(|| message_calls::all_orders([deep(1, 2), 1], &[1, deep(5, 4)], true, 3)),
        ),
        holds(
            messages,
            "2 ranks do both at once with more than finds room, again and again",
            states(|| message_calls::swaps(&[1, 4], M)),
        ),
        holds(
            messages,
            "2 ranks each send three pieces before they receive, behind longer messages",
            states(|| message_calls::both_send(&[1, 6, 3], M)),
        ),
        holds(
            messages,
            "launches of 2 blocks on 2 ranks, slots used again",
            states(|| message_calls::one_way(deep(HALF, LEAN).blocks(2, 2), &[1, 4], M)),
        ),
        holds(
            messages,
            "two teams of blocks on either side or both, which take pieces in turn",
            states_of(|| {
                let teams = [(true, true), (true, false), (false, true)];
                let of = |(sender, receiver)| {
                    let shape = HALF.blocks(2, 2).teams(sender, receiver);
                    message_calls::one_way(shape, &[1, 4, deep(2, 3)], M)
                };
                teams.into_iter().map(of).collect()
            }),
        ),
        holds(
            messages,
            "blocks of a launch find the same count of pieces",
            states(|| message_launch::counts(deep(2, 3), 4, LAUNCH)),
        ),
        holds(
            messages,
            "blocks of a launch find the same call of all ranks",
            states(|| message_launch::calls(deep(2, 3), 4, LAUNCH)),
        ),
        holds(
            messages,
            "who leaves behind a message is received from",
            states(|| message_calls::leaving(3, M)),
        ),
        holds(
            messages,
            "one of 3 ranks in a chain dies at any point, the others end with one record",
            states_of(|| {
                let dying = |rank| message_calls::chain(3, &[1, 5]).with_death(rank);
                (0..3).map(dying).collect()
            }),
        ),
        holds(
            messages,
            "the same, and waits time out at any time",
            states_of(|| {
                let dying = |rank| {
                    with(message_calls::chain(3, &[1, 5]).with_death(rank), |s| {
                        s.timeouts = Timeouts::Any;
                    })
                };
                (0..3).map(dying).collect()
            }),
        ),
        holds(
            messages,
            "2 ranks disagree about what they send each other: a mismatch on both",
            states(|| message_calls::disagreeing(M)),
        ),
        holds(
            messages,
            "a message that comes while the group is stopped is there as a whole, or is poison and known to be",
            states(|| message_launch::stopped(LAUNCH)),
        ),
        holds(
            messages,
            "stores become visible late, 2 ranks",
            states(|| message_calls::one_way(deep(HALF, PLAIN), &[1, deep(4, 5)], M).weak(false)),
        ),
        holds(
            messages,
            "the same, where 2 blocks receive",
            states(|| message_calls::one_way(HALF.blocks(1, 2), &[1, 3], M).weak(false)),
        ),
        holds(
            messages,
            "stores become visible in any order, messages of one piece: only ends of kernels are relied on",
            states(|| message_calls::one_way(HALF, &[1; 5], M).weak(true)),
        ),
        holds(
            messages,
            "memory order of 2 ranks",
            ordered(|| message_calls::one_way(HALF, &[1, 3], M)),
        ),
        holds(
            messages,
            "memory order of a credit that 2 blocks give",
            ordered(message_launch::handing_back),
        ),
        holds(
            packets,
            "3 ranks, full, short and empty uses",
            states(|| packet::scenario(3, &USES, false, P)),
        ),
        holds(
            packets,
            "2 ranks, tags that come again",
            states(|| packet::scenario(2, &FAR, false, P)),
        ),
        holds(
            packets,
            "3 ranks, one in another call: a mismatch on all",
            states(|| must_mismatch(packet::scenario(3, &[(1, 1)], true, P))),
        ),
        holds(
            packets,
            "stores become visible in any order, 2 ranks: no order is relied on",
            states(|| packet::scenario(2, &ALIKE[..deep(3, 5)], false, P).weak(true)),
        ),
        holds(
            packets,
            "memory order of 2 ranks, all of it relaxed: no order is relied on",
            executions(Orders::RELAXED, 2, || {
                packet::scenario(2, &ALIKE[..3], false, P)
            }),
        ),
        holds(
            "in place",
            "a receiver, and a sender of two blocks, one in every other use, 5 uses",
            states(|| in_place::scenario(5, in_place::Without::Nothing)),
        ),
        holds(
            "in place",
            "stores become visible in any order, 3 uses: fences stand before words, and at ends of kernels",
            states(|| in_place::scenario(3, in_place::Without::Nothing).weak(true)),
        ),
        holds(
            sentinel,
            "2 ranks, long, short and empty uses, the sentinel itself",
            states(|| sentinel::scenario(2, &LENGTHS, S)),
        ),
        holds(
            sentinel,
            "3 ranks, every buffer used again",
            states(|| sentinel::scenario(3, &[1; 7][..deep(4, 7)], S)),
        ),
        holds(
            sentinel,
            "stores become visible late, 2 ranks",
            states(|| sentinel::scenario(2, &[1, 1, 1, 1], S).weak(false)),
        ),
        holds(
            sentinel,
            "memory order of 2 ranks",
            ordered(|| sentinel::scenario(2, &[1, 2, 1, 1], S)),
        ),
        holds(
            sentinel,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| sentinel::scenario(3, &[1, 1], S).with_death(1)),
        ),
        holds(
            sentinel,
            "2 ranks, after a reset that found values nobody had taken",
            states(|| sentinel::again(2, &[1, 1, 1, 1], S)),
        ),
        holds(
            two_shots,
            "2 ranks, shares of both, of one and of none",
            states(|| sentinel::twice(2, &SHARES, S)),
        ),
        holds(
            two_shots,
            "3 ranks, every buffer used again",
            states(|| sentinel::twice(3, &[1; 5][..deep(4, 5)], S)),
        ),
        holds(
            two_shots,
            "4 ranks, one use after the other",
            states(|| sentinel::twice(4, &[1; 2], S)),
        ),
        holds(
            two_shots,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| sentinel::twice(3, &[1; 2][..deep(1, 2)], S).with_death(0)),
        ),
        holds(
            two_shots,
            "stores become visible late, 2 ranks",
            states(|| sentinel::twice(2, &[1, 4, 1, 1][..deep(3, 4)], S).weak(false)),
        ),
        holds(
            two_shots,
            "memory order of 2 ranks",
            executions(Orders::RIGHT, 2, || sentinel::twice(2, &[1; 4], S)),
        ),
        holds(
            copies,
            "2 ranks, long, short and empty uses, one with half as much, the sentinel itself",
            states(|| sentinel::copies(2, &LENGTHS, S)),
        ),
        holds(
            copies,
            "3 ranks, copies and sums in turn, one rank without any to copy",
            states(|| sentinel::in_turn(3, &[1; 5][..deep(3, 5)], S)),
        ),
        holds(
            copies,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| sentinel::copies(3, &[1], S).with_death(1)),
        ),
        holds(
            copies,
            "stores become visible late, 2 ranks",
            states(|| sentinel::in_turn(2, &[1; 4][..deep(3, 4)], S).weak(false)),
        ),
        holds(
            copies,
            "memory order of 2 ranks",
            executions(Orders::RIGHT, 2, || sentinel::in_turn(2, &[1; 4], S)),
        ),
        holds(
            relay,
            "3 ranks, every root, the sentinel itself, every buffer used again",
            states(|| relay::scenario(3, &RELAYS[..deep(4, 5)], RELAY)),
        ),
        holds(
            relay,
            "3 ranks, one root again and again",
            states(|| relay::scenario(3, &[(0, 1); 5][..deep(4, 5)], RELAY)),
        ),
        holds(
            relay,
            "4 ranks, one use",
            states(|| relay::scenario(4, &[(1, 1)], RELAY)),
        ),
        holds(
            relay,
            "one of 3 ranks dies at any point, the others end with one record",
            states(|| relay::scenario(3, &RELAYS[1..2], RELAY).with_death(2)),
        ),
        holds(
            abort,
            "2 ranks give up at any time, with one record",
            states(|| abort::scenario(2, None, A)),
        ),
        holds(
            abort,
            "2 ranks give up, one dies at any point of it",
            states(|| abort::scenario(2, Some(0), A)),
        ),
        holds(
            abort,
            "2 ranks give up at any time, a third one hears of it",
            states(|| abort::hearing(3)),
        ),
        holds(
            abort,
            "memory order of 2 ranks",
            ordered(|| abort::raising(2)),
        ),
        holds(
            reset,
            "4 ranks, two generations",
            states(|| reset::scenario(4, deep(2, 4), G)),
        ),
        holds(
            reset,
            "3 ranks give up, generations come again, flags are wiped in between",
            states(|| reset::wiping(3, deep(1, 2), G)),
        ),
        holds(
            reset,
            "memory order of 2 ranks, flags wiped in between",
            ordered(|| reset::wiping(2, 1, G)),
        ),
        holds(
            reset,
            "memory order of 2 ranks",
            ordered(|| reset::scenario(2, 2, G)),
        ),
        holds(
            roll,
            "2 ranks start anew, flags wiped between two rolls",
            states(|| roll::renewing(2, ROLL)),
        ),
        holds(
            roll,
            "2 ranks, too late at any time: at most one group goes on",
            states(|| roll::agreeing(2, None, ROLL)),
        ),
        holds(
            roll,
            "2 ranks, too late at any time, and one dies at any point",
            states(|| roll::agreeing(2, Some(0), ROLL)),
        ),
        holds(
            roll,
            "2 ranks, three rolls: who is there is in all of them",
            states(|| roll::following(2, 3, ROLL)),
        ),
        holds(
            roll,
            "3 ranks, one roll: who is there is in it",
            states(|| roll::following(3, deep(1, 2), ROLL)),
        ),
        holds(
            roll,
            "3 ranks, too late for a roll at any time: one outcome",
            states(|| roll::deciding(3, ROLL)),
        ),
        holds(
            roll,
            "memory order of 2 ranks",
            ordered(|| roll::renewing(2, ROLL)),
        ),
        holds(
            waits,
            "the bell wakes 2 that wait for one store",
            resting(2, bell::Without::Nothing),
        ),
        holds(
            waits,
            "2 ranks rest, and hear of an abort",
            states(|| abort::resting(2, Rests::Counts)),
        ),
    ]
}
