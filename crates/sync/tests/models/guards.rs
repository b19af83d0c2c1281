//! With one guard taken away each.

use crate::{
    abort, barrier, bell, fifo, in_place, in_turn,
    loomed::Orders,
    low_latency::{self, AHEAD, ONE},
    message_guards, packet, relay, reset,
    ring::{self, Mode},
    roll, sentinel,
    shared::*,
    table::*,
};

/// The memory orders of a machine's flags.
pub fn orders(machine: &'static str, scenario: fn() -> Scenario) -> [Row; 2] {
    [
        Row::without(
            machine,
            "posting is a release",
            "a relaxed store",
            executions(Orders::RELAXED_STORE, 2, scenario),
        ),
        Row::without(
            machine,
            "looking is an acquire",
            "a relaxed load",
            executions(Orders::RELAXED_LOAD, 2, scenario),
        ),
    ]
}

fn barrier() -> Vec<Row> {
    use barrier::Without::*;
    let by = |without| states(move || barrier::scenario(3, 3, false, without));
    let row = |what, mutation, by| Row::without("barrier", what, mutation, by);
    let mut rows = vec![
        row("two sets of flags", "one set", by(SecondSet)),
        row("all peers are waited for", "all but one", by(LastPeer)),
        row("data, then flags", "flags, then data", by(DataFirst)),
        row(
            "flags are signed",
            "one signature for all calls",
            states(|| must_mismatch(barrier::scenario(3, 1, true, Signature))),
        ),
        row(
            "two sets of flags, also without a meeting",
            "one set",
            states(|| barrier::unmet(3, 2, false, SecondSet)),
        ),
        row(
            "without a meeting, who gets nothing waits to be told so",
            "it does not",
            states(|| barrier::unmet(3, 3, false, Nobodies)),
        ),
    ];
    rows.extend(orders("barrier", || {
        barrier::scenario(2, 4, false, Nothing)
    }));
    rows
}

fn ring() -> Vec<Row> {
    use ring::Without::*;
    let by = |without| states(move || ring::scenario(3, 5, Mode::Push, without));
    let row = |what, mutation, by| Row::without("ring", what, mutation, by);
    let mut rows = vec![
        row("a half is written with credit", "no credit", by(Credit)),
        row(
            "the credit is for the last use of the half",
            "off by one",
            by(CreditOfTheUseBefore),
        ),
        row(
            "every reader gives a credit",
            "all but one",
            states(|| ring::scenario(4, 3, Mode::Broadcast, CreditOfTheLastPeer)),
        ),
        row(
            "the first use waits for no credit",
            "it waits",
            by(FreshStart),
        ),
        row("data, then its flag", "the flag, then data", by(DataFirst)),
        row(
            "reading, then the credit",
            "the credit, then reading",
            by(ReadFirst),
        ),
        row(
            "uses of a half are counted",
            "one epoch for all",
            by(Epochs),
        ),
        row(
            "a flag is visible after its data",
            "in any order",
            states(|| ring::scenario(2, 3, Mode::Push, Nothing).weak(true)),
        ),
    ];
    rows.extend(orders("ring", || ring::scenario(2, 4, Mode::Push, Nothing)));
    rows
}

fn fifo() -> Vec<Row> {
    use fifo::Without::*;
    let by = |without| states(move || fifo::scenario(3, 2, 2, 3, without));
    let row = |what, mutation, by| Row::without("fifo", what, mutation, by);
    let mut rows = vec![
        row("the sender waits for room", "it does not", by(Room)),
        row("at most depth items wait", "depth + 1", by(ExactDepth)),
        row(
            "data, then the count",
            "the count, then data",
            by(DataFirst),
        ),
        row(
            "reading, then the credit",
            "the credit, then reading",
            by(ReadFirst),
        ),
        row(
            "counts go on over calls",
            "they begin anew",
            by(Persistence),
        ),
        row(
            "counts are compared by signed difference",
            "as plain numbers",
            by(WrapSafety),
        ),
    ];
    rows.extend([
        row(
            "who can take does not wait to put",
            "all is put, then taken",
            states(|| fifo::both_ways(1, 3, false, OneLoop)),
        ),
        row(
            "a call ends when all of it is taken",
            "when all is put",
            states(|| fifo::both_ways(2, 2, false, Drained)),
        ),
        row(
            "items are signed",
            "no signature is looked at",
            states(|| must_mismatch(fifo::both_ways(1, 1, true, Signed))),
        ),
    ]);
    rows.extend(orders("fifo", || fifo::scenario(2, 2, 2, 2, Nothing)));
    rows
}

fn low_latency() -> Vec<Row> {
    use low_latency::Without::*;
    let by = |without| states(move || low_latency::scenario(2, &AHEAD, false, without));
    let row = |what, mutation, by| Row::without("low latency", what, mutation, by);
    let mut rows = vec![
        row("a half is written with credit", "no credit", by(Credit)),
        row(
            "who gives a use up gives its credit",
            "only who received it",
            by(CreditOfGivenUp),
        ),
        row("data, then its flag", "the flag, then data", by(DataFirst)),
        row(
            "reading, then the credit",
            "the credit, then reading",
            by(ReadFirst),
        ),
        row(
            "flags are signed",
            "one signature for all calls",
            states(|| must_mismatch(low_latency::scenario(2, &ONE[2..], true, Signature))),
        ),
        row(
            "a flag is visible after its data",
            "in any order",
            states(|| low_latency::scenario(2, &ONE, false, Nothing).weak(true)),
        ),
    ];
    rows.extend(orders("low latency", || {
        low_latency::scenario(2, &AHEAD, false, Nothing)
    }));
    rows
}

fn in_turn() -> Vec<Row> {
    use in_turn::Without::*;
    let by = |without| states(move || in_turn::scenario(in_turn::AHEAD, without));
    let row = |what, mutation, by| Row::without("in turn", what, mutation, by);
    let mut rows = vec![
        row(
            "credits are given before anybody waits",
            "behind the wait for those of peers",
            states(|| in_turn::scenario(in_turn::REPLAYED, CreditsFirst)),
        ),
        row(
            "flags are posted once there are credits",
            "before",
            by(FlagsLater),
        ),
        row(
            "the last block out counts the use",
            "the first one does",
            by(LastCounts),
        ),
        row(
            "every block waits for credits",
            "the first one does",
            by(EveryBlockWaits),
        ),
        row(
            "what is taken was told of",
            "the first of it was",
            by(EveryRowLooks),
        ),
        row(
            "what was written is told of",
            "what will be",
            by(WritesFirst),
        ),
        row(
            "a send says which use has begun",
            "its counter does",
            by(Begun),
        ),
        row(
            "it says so before the receive may begin",
            "behind that",
            by(BegunFirst),
        ),
        row(
            "a receive is counted out behind its send",
            "whenever it is done",
            states(|| in_turn::overlapping(SendFirst)),
        ),
        row(
            "the last block out posts the flag of all",
            "the first one does",
            states(|| in_turn::counted(LastPosts)),
        ),
        row(
            "a block writes, then it is counted out",
            "it is counted out, then it writes",
            states(|| in_turn::counted(WritesFirst)),
        ),
        row(
            "the last block out poisons what all gave",
            "each block poisons its own",
            states(|| in_turn::stopped(LastPoisons)),
        ),
    ];
    rows.extend(orders("in turn", in_turn::one_way));
    rows
}

fn packets() -> Vec<Row> {
    use packet::Without::*;
    let by = |without| states(move || packet::scenario(2, &USES, false, without));
    let row = |what, mutation, by| Row::without("packets", what, mutation, by);
    vec![
        row("two sets of slots", "one set", by(SecondSet)),
        row("a tag for each use", "one tag for all of a set", by(Tag)),
        row(
            "an empty use is signed too",
            "it is left out",
            by(SignatureWhenEmpty),
        ),
        row(
            "slots left out are swept",
            "they are not",
            states(|| packet::scenario(2, &FAR, false, Sweeps)),
        ),
        row(
            "uses are signed",
            "one signature for all calls",
            states(|| must_mismatch(packet::scenario(3, &[(1, 1)], true, Signature))),
        ),
        row(
            "data and tag are one word",
            "two words",
            states(|| packet::scenario(2, &USES[..2], false, OneWord).weak(false)),
        ),
        row(
            "data and tag are one word",
            "two words",
            executions(Orders::RIGHT, 2, || {
                packet::scenario(2, &USES, false, OneWord)
            }),
        ),
    ]
}

fn sentinel() -> Vec<Row> {
    use sentinel::Without::*;
    let by = |without| states(move || sentinel::scenario(2, &LENGTHS, without));
    let row = |what, mutation, by| Row::without("sentinel", what, mutation, by);
    let mut rows = vec![
        row("what was read is cleared", "it is not", by(Clear)),
        row("three buffers", "two", by(ThirdBuffer)),
        row("the buffer read last is cleared", "the next one", by(Stale)),
        row(
            "cleared as far as its last use filled it",
            "as far as this use fills",
            by(Extent),
        ),
        row(
            "the sentinel is made a NaN",
            "it goes as it is",
            by(Canonical),
        ),
        row(
            "an empty use is signed too",
            "it is left out",
            by(SignatureWhenEmpty),
        ),
        row(
            "a generation begins with empty buffers",
            "as the last one left them",
            states(|| sentinel::again(2, &[1, 1], Empty)),
        ),
        row(
            "a clear is visible before the next signature",
            "in any order",
            states(|| sentinel::scenario(2, &[1, 1, 1, 1, 1], Nothing).weak(true)),
        ),
    ];
    rows.extend(orders("sentinel", || {
        sentinel::scenario(2, &[1, 2, 1, 1], Nothing)
    }));
    rows
}

fn two_shots() -> Vec<Row> {
    use sentinel::Without::*;
    let by = |without| states(move || sentinel::twice(2, &SHARES, without));
    let row = |what, mutation, by| Row::without("two shots", what, mutation, by);
    let mut rows = vec![
        row("what was read is cleared", "it is not", by(Clear)),
        row("three buffers", "two", by(ThirdBuffer)),
        row("the buffer read last is cleared", "the next one", by(Stale)),
        row(
            "cleared as far as its last use filled it",
            "as far as this use fills",
            by(Extent),
        ),
        row(
            "the sentinel is made a NaN",
            "it goes as it is",
            by(Canonical),
        ),
        row(
            "an empty use is signed too",
            "it is left out",
            by(SignatureWhenEmpty),
        ),
    ];
    rows.extend(orders("two shots", || {
        sentinel::twice(2, &[1, 4, 1, 1], Nothing)
    }));
    rows
}

fn copies() -> Vec<Row> {
    use sentinel::Without::*;
    let by = |without| states(move || sentinel::copies(2, &LENGTHS, without));
    let row = |what, mutation, by| Row::without("copies", what, mutation, by);
    let mut rows = vec![
        row("what was read is cleared", "it is not", by(Clear)),
        row("three buffers", "two", by(ThirdBuffer)),
        row("the buffer read last is cleared", "the next one", by(Stale)),
        row(
            "cleared as far as its last use filled it",
            "as far as this use fills",
            by(Extent),
        ),
        row(
            "the sentinel travels as another value",
            "it goes as it is",
            by(Canonical),
        ),
        row("a bit says which value it is", "no bit is read", by(Bits)),
        row(
            "what stands for the sentinel is told of where it is itself",
            "only where the sentinel was",
            by(Alone),
        ),
        row(
            "who has nothing signs too",
            "it is left out",
            by(SignatureWhenEmpty),
        ),
    ];
    rows.extend(orders("copies", || {
        sentinel::copies(2, &[1, 2, 1, 1], Nothing)
    }));
    rows
}

fn relay() -> Vec<Row> {
    use relay::Without::*;
    let by = |without| states(move || relay::scenario(3, &RELAYS[..4], without));
    let row = |what, mutation, by| Row::without("relay", what, mutation, by);
    vec![
        row("what was read is cleared", "it is not", by(Clear)),
        row(
            "a use ends behind the arrivals of all",
            "behind what it brings",
            states(|| relay::scenario(3, &[(0, 1); 4], Arrivals)),
        ),
        row(
            "what is passed on goes as it came",
            "the sentinel as itself",
            by(AsItCame),
        ),
        row("all others get it", "all but one", by(LastPeer)),
        row("the root does not get it back", "it does", by(NotTheRoot)),
    ]
}

fn abort() -> Vec<Row> {
    use abort::Without::*;
    let by = |without| states(move || abort::scenario(2, None, without));
    let row = |what, mutation, by| Row::without("abort", what, mutation, by);
    let mut rows = vec![
        row("one cell decides", "each rank's own", by(Arbiter)),
        row("a place for each record", "one for all", by(Place)),
        row("the record is named to all", "to rank 0 only", by(Naming)),
        row(
            "the record, then the decision",
            "the claim, then the record",
            by(RecordFirst),
        ),
    ];
    rows.extend(orders("abort", || abort::raising(2)));
    rows
}

fn reset() -> Vec<Row> {
    use reset::Without::*;
    let by = |without| states(move || reset::scenario(3, 3, without));
    let row = |what, mutation, by| Row::without("reset", what, mutation, by);
    let mut rows = vec![
        row("all ranks are waited for", "none", by(Gate)),
        row("all ranks are waited for", "all but one", by(Target)),
        row("let go, then arrive", "arrive, then let go", by(LetGoFirst)),
        row("flags carry a generation", "they do not", by(Generation)),
        row("resets are counted", "all are the first", by(Count)),
    ];
    let wiping = |without| states(move || reset::wiping(3, 1, without));
    rows.extend([
        row("flags are wiped", "they stay", wiping(Wipe)),
        row(
            "let go, then wiped",
            "no gate before",
            wiping(GateBeforeWipe),
        ),
        row("wiped, then begun", "no gate after", wiping(GateAfterWipe)),
    ]);
    rows.extend(orders("reset", || reset::scenario(2, 2, Nothing)));
    rows
}

fn roll() -> Vec<Row> {
    use roll::Without::*;
    let row = |what, mutation, by| Row::without("roll", what, mutation, by);
    let late = |without| states(move || roll::agreeing(2, None, without));
    let renewing = |without| states(move || roll::renewing(2, without));
    let mut rows = vec![
        row("one word decides", "each rank's own", late(Arbiter)),
        row("who comes late is left out", "it comes in", late(Closing)),
        row(
            "let go, then answer",
            "answer, then let go",
            renewing(LetGoFirst),
        ),
        row("flags are wiped", "they stay", renewing(Wipe)),
        row(
            "let go, then wiped",
            "no roll before",
            renewing(RollBeforeWipe),
        ),
        row(
            "wiped, then begun",
            "no roll after",
            renewing(RollAfterWipe),
        ),
    ];
    rows.push(row(
        "what a roll said stays until the next but one",
        "until the next",
        states(|| roll::following(2, 3, TwoWords)),
    ));
    rows.extend(orders("roll", || roll::renewing(2, Nothing)));
    rows
}

fn waits() -> Vec<Row> {
    let row = |what, mutation, by| Row::without("waits", what, mutation, by);
    let unbounded = || {
        let dying = barrier::scenario(3, 2, false, barrier::Without::Nothing).with_death(2);
        with(dying, |s| s.timeouts = Timeouts::Unbounded)
    };
    vec![
        row("every wait is bounded", "no bound", states(unbounded)),
        row(
            "events are counted, then looked for",
            "looked for, then counted",
            states(|| abort::resting(2, Rests::Sleeps)),
        ),
        row(
            "events are counted, then looked for",
            "the bell's, the other way round",
            resting(1, bell::Without::CountFirst),
        ),
        row(
            "the store, then the bell",
            "the bell, then the store",
            resting(1, bell::Without::RingLast),
        ),
        row(
            "who rests says so",
            "not in the bell",
            resting(1, bell::Without::Sleeper),
        ),
        row(
            "who goes to sleep looks once more",
            "at nothing",
            resting(1, bell::Without::Recheck),
        ),
    ]
}

pub fn guards() -> Vec<Row> {
    let machines = [
        barrier,
        ring,
        fifo,
        low_latency,
        in_turn,
        in_place::guards,
        message_guards::messages,
        message_guards::launches,
        packets,
        sentinel,
        two_shots,
        copies,
        relay,
        abort,
        reset,
        roll,
        waits,
    ];
    machines.into_iter().flat_map(|m| m()).collect()
}
