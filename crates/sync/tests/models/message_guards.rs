//! Messages with one guard taken away each.

use crate::{
    guards::orders,
    loomed::Orders,
    message_calls as calls,
    messages::{HALF, LEAN, PLAIN, Shape},
    table::*,
};
use loom::sync::atomic::Ordering;

pub fn messages() -> Vec<Row> {
    use crate::messages::Without::*;
    let row = |what, mutation, by| Row::without("messages", what, mutation, by);
    let one_way = |shape: Shape, pieces: &'static [usize], without| {
        states(move || calls::one_way(shape, pieces, without))
    };
    let by = |without| one_way(PLAIN, &[1, 9], without);
    let mut rows = vec![
        row("a slot is filled with credit", "no credit", by(Credit)),
        row(
            "the credit is for the piece before in the slot",
            "for an earlier one",
            by(CreditOfItsSlot),
        ),
        row("what was taken is emptied", "it is not", by(Empties)),
        row(
            "emptying, then the credit",
            "the credit, then emptying",
            by(EmptyFirst),
        ),
        row(
            "every word of a packet is looked at",
            "one of them",
            by(AllWords),
        ),
        row(
            "a message's last piece is credited too",
            "it is not",
            one_way(PLAIN, &[1; 5], LastCredit),
        ),
        row(
            "its credit comes before those of the next message",
            "behind them",
            states(|| calls::both_send(&[1, 6, 3], CreditFirst)),
        ),
        row(
            "its credit comes in the next kernel",
            "in its own, before other blocks have taken their shares",
            one_way(HALF.blocks(1, 2), &[1, 4], NextKernel),
        ),
        row(
            "its credit comes in the next kernel",
            "in its own, with no order",
            states(|| calls::one_way(HALF, &[1, 4], NextKernel).weak(false)),
        ),
        row(
            "a slot is seen empty before its credit",
            "in any order",
            states(|| calls::one_way(HALF, &[4], Nothing).weak(true)),
        ),
        row(
            "three pieces find room where nothing is received",
            "four are sent",
            states_of(|| calls::all_orders([2, 2], &[1, 4], false, 4)),
        ),
        row(
            "who sends and receives does both at once",
            "one after the other",
            states(|| calls::swaps(&[1, 4], AtOnce)),
        ),
        row(
            "every block waits for credits",
            "the first one does",
            one_way(HALF.blocks(2, 1), &[4], EveryBlockWaits),
        ),
        row(
            "the last block out of a piece gives its credit",
            "the first one does",
            one_way(HALF.blocks(1, 2), &[4], LastGives),
        ),
        row(
            "the team that gives later credits of a half gives back the message before's",
            "the first one does",
            one_way(LEAN.blocks(1, 2).teams(false, true), &[1, 8], OwnHalf),
        ),
        row(
            "blocks are counted out of each slot",
            "of all slots together",
            one_way(HALF.blocks(1, 2), &[4], CountOfEach),
        ),
        row(
            "the flag of a piece is looked at",
            "its data alone",
            states(|| calls::disagreeing(Signed)),
        ),
        row(
            "who hears that a rank left looks once more",
            "it gives up",
            states(|| calls::leaving(3, OneMoreLook)),
        ),
    ];
    rows.extend(orders("messages", || {
        calls::one_way(HALF, &[1, 3], Nothing)
    }));
    rows
}

/// Blocks of a launch.
pub fn launches() -> Vec<Row> {
    use crate::message_launch::{Without::*, calls, counts, handing_back, stopped};
    let row = |what, mutation, by| Row::without("messages", what, mutation, by);
    let unordered = Orders {
        exchange: Ordering::Relaxed,
        ..Orders::RIGHT
    };
    vec![
        row(
            "kernels take two counts in turn",
            "one count",
            states(|| counts(2, 3, Turns)),
        ),
        row(
            "each block adds its share of a use",
            "the first one adds all of it",
            states(|| counts(2, 3, Shares)),
        ),
        row(
            "the last block that has read which call it is counts it",
            "the first one does",
            states(|| calls(2, 2, LastCounts)),
        ),
        row(
            "counting blocks out is a release and an acquire",
            "relaxed",
            executions(unordered, 2, handing_back),
        ),
        row(
            "who is stopped poisons when nobody writes",
            "at once",
            states(|| stopped(Patience)),
        ),
        row(
            "the stop is looked for with each piece",
            "with the first",
            states(|| stopped(EachPiece)),
        ),
        row(
            "who is stopped poisons all",
            "its own share",
            states(|| stopped(PoisonsAll)),
        ),
        row(
            "who is stopped says so",
            "it does not",
            states(|| stopped(Tells)),
        ),
    ]
}
