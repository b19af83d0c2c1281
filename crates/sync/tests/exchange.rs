//! Queues, packets and sentinels between real threads, and beside each the guard taken away in a schedule that must then go
//! wrong.

use brigade_sync::*;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

const GENERATION: u8 = 7;
const SIGNATURE: u32 = 0x00AB_CDEF;

fn flag(epoch: u32) -> Flag {
    Flag::new(GENERATION, SIGNATURE, epoch)
}

fn memory(ranks: usize, words: usize) -> Words<Vec<AtomicU64>> {
    let zeroed = || (0..words + BELL_WORDS).map(|_| AtomicU64::new(0)).collect();
    Words::new((0..ranks).map(|_| zeroed()).collect())
}

fn long() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn holds(memory: &impl Memory, w: Wait) -> Verdict {
    w.want.verdict(memory.load(w.word))
}

fn peers(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |i| (rank + i) % size)
}

/// Runs one thread per rank.
fn ranks(size: usize, body: impl Fn(usize) + Sync) {
    thread::scope(|s| {
        for rank in 0..size {
            let body = &body;
            s.spawn(move || body(rank));
        }
    });
}

fn fifo(depth: u32) -> Fifo {
    Fifo {
        from: 0,
        to: 1,
        size: 2,
        depth,
        base: 0,
    }
}

#[test]
fn items_come_in_order_and_counts_wrap() {
    const ITEMS: u32 = 5000;
    for depth in [1, 2, Fifo::DEPTH] {
        let memory = memory(2, Fifo::words(2));
        let queue: Vec<AtomicU64> = (0..depth).map(|_| AtomicU64::new(0)).collect();
        let start = u32::MAX - ITEMS / 2;
        ranks(2, |rank| {
            if rank == 0 {
                let mut sender = fifo(depth).sender_from(GENERATION, start);
                for n in 0..ITEMS {
                    if let Some(room) = sender.room() {
                        wait(&memory, room, &mut long(), || false).unwrap();
                    }
                    queue[sender.entry()].store(n.into(), Ordering::Relaxed);
                    post(&memory, sender.put(SIGNATURE));
                }
            } else {
                let mut receiver = fifo(depth).receiver_from(GENERATION, start);
                for n in 0..ITEMS {
                    wait(&memory, receiver.arrival(), &mut long(), || false).unwrap();
                    let got = queue[receiver.entry()].load(Ordering::Relaxed);
                    assert_eq!(got, n.into());
                    post(&memory, receiver.taken(SIGNATURE));
                }
            }
        });
    }
}

#[test]
fn a_full_queue_has_no_room() {
    let memory = memory(2, Fifo::words(2));
    let (mut sender, mut receiver) = (fifo(2).sender(GENERATION), fifo(2).receiver(GENERATION));
    assert_eq!(holds(&memory, receiver.arrival()), Verdict::NotYet);
    for _ in 0..2 {
        assert_eq!(sender.room(), None);
        post(&memory, sender.put(SIGNATURE));
    }
    let room = sender.room().unwrap();
    assert_eq!(holds(&memory, room), Verdict::NotYet);
    assert_eq!(
        sender.entry(),
        receiver.entry(),
        "the next item would land on the first"
    );
    post(&memory, receiver.taken(SIGNATURE));
    assert_eq!(holds(&memory, room), Verdict::Ready);

    // Counts that begin anew in the next call: there seems to be an item, and to be room.
    let again = fifo(2).receiver(GENERATION);
    assert_eq!(holds(&memory, again.arrival()), Verdict::Ready);
    // In another generation they do not count.
    let reset = fifo(2).receiver(GENERATION + 1);
    assert_eq!(holds(&memory, reset.arrival()), Verdict::NotYet);
}

#[test]
#[should_panic(expected = "a queue of 3 entries")]
fn entries_must_follow_each_other_where_counts_wrap() {
    fifo(3).sender(GENERATION);
}

fn packets(rank: usize, size: usize) -> Packets {
    Packets {
        rank,
        size,
        capacity: 25,
        base: 3,
    }
}

fn bytes(epoch: u32, from: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (epoch as usize * 7 + from * 31 + i) as u8)
        .collect()
}

/// Every rank sends to every peer: lengths with all tails, none at all now and then, tags that wrap on the way.
#[test]
fn bytes_come_whole() {
    for size in [2, 3, 5] {
        let memory = memory(size, 3 + Packets::words(size, 25));
        ranks(size, |rank| {
            let mine = packets(rank, size);
            for n in 0..400u32 {
                let epoch = ((1 << 24) - 200) + n;
                let len = n as usize * 13 % 101;
                for to in peers(rank, size) {
                    mine.send(&memory, to, flag(epoch), &bytes(epoch, rank, len));
                }
                for from in peers(rank, size) {
                    let mut got = vec![0; len];
                    mine.receive(&memory, from, flag(epoch), &mut got, &mut long(), || false)
                        .unwrap();
                    assert_eq!(got, bytes(epoch, from, len));
                }
            }
        });
    }
}

#[test]
fn packets_of_another_call_are_a_mismatch() {
    let memory = memory(2, 3 + Packets::words(2, 25));
    let mut got = [0; 8];
    let mut receive = |flag, within| {
        let mut deadline = Deadline::after(within);
        packets(1, 2).receive(&memory, 0, flag, &mut got, &mut deadline, || false)
    };
    let short = Duration::from_millis(5);
    assert!(matches!(receive(flag(1), short), Err(Stop::Timeout { .. })));
    // Another call, with less data: the signature ends the wait for what is missing.
    let other = Flag::new(GENERATION, SIGNATURE + 1, 1);
    packets(0, 2).send(&memory, 1, other, &[1, 2, 3]);
    let long = Duration::from_secs(60);
    assert!(matches!(receive(flag(1), long), Err(Stop::Mismatch { .. })));
}

/// The sender is two uses ahead of a reader that has not looked yet: a second set is not enough, if the reader need not have
/// sent in between.
#[test]
fn the_tag_keeps_a_late_reader_from_taking_another_use() {
    let memory = memory(2, 3 + Packets::words(2, 25));
    let slot = |epoch| packets(1, 2).slot(1, 0, epoch, 0);
    let tag = |epoch| Packets::tag(flag(epoch));
    for epoch in 1..=2 {
        packets(0, 2).send(&memory, 1, flag(epoch), &bytes(epoch, 0, 4));
    }
    let read = |epoch| Packets::unpack(tag(epoch), memory.load(slot(epoch)));
    assert_eq!(read(1).unwrap()[..], bytes(1, 0, 4));
    packets(0, 2).send(&memory, 1, flag(3), &bytes(3, 0, 4));
    assert_eq!(read(1), None);
    // Without the tag, the data of use 3 would pass for those of use 1.
    assert_eq!(memory.load(slot(1)) as u32, memory.load(slot(3)) as u32);
}

/// Bytes of a buffer's slots that these tests fill at most.
const MOST_BYTES: usize = 136;

fn sentinel(rank: usize, size: usize) -> Sentinel {
    Sentinel {
        rank,
        size,
        base: 1,
        buffers: 1 + Sentinel::signatures(size),
        capacity: 2 * (size - 1) * Sentinel::filled(MOST_BYTES),
    }
}

fn buffers(size: usize) -> Words<Vec<AtomicU64>> {
    let sentinel = sentinel(0, size);
    memory(size, sentinel.buffers + BUFFERS * sentinel.capacity)
}

/// Values of a use, the sentinel itself among them, as they are pushed and as they come.
fn values(n: u32, from: usize, len: usize) -> [Vec<u8>; 2] {
    let specials = [0x8000_0000, 0x7F80_0000, u32::MAX, u32::MAX - 1, 1, 0];
    let lane = |i: usize| match i % 7 {
        3 => specials[i / 7 % specials.len()],
        _ => n << 16 | (from as u32) << 8 | i as u32,
    };
    [u32::MAX, NAN].map(|nan| {
        let come = |lane| if lane == u32::MAX { nan } else { lane };
        (0..len).flat_map(|i| come(lane(i)).to_ne_bytes()).collect()
    })
}

const NAN: u32 = 0x7FC0_0000;

/// Pushes to a peer, and signs.
fn push(
    memory: &impl Memory,
    from: Sentinel,
    to: usize,
    (turn, shot): (Turnover, Shot),
    flag: Flag,
    bytes: &[u8],
) {
    from.push(memory, to, turn, shot, NAN, bytes);
    post(memory, from.signed(to, turn, shot, flag));
}

/// In one shot and in two, with lengths of all tails, none at all now and then.
#[test]
fn values_come_exactly_in_three_buffers() {
    for size in [2, 3, 5] {
        let memory = buffers(size);
        ranks(size, |rank| {
            let mine = sentinel(rank, size);
            let mut rotation = Rotation::default();
            for n in 0..400u32 {
                let len = n as usize * 11 % (MOST_BYTES / 4);
                let shot = Shot::first(Sentinel::filled(len * 4));
                let mut shots = vec![shot];
                if n % 2 == 1 {
                    shots.push(shot.then(size, shot.words));
                }
                let turn = rotation.begin(shots[shots.len() - 1].end(size));
                // Epochs that wrap on the way, which 3 does not divide.
                let flag = flag((u32::MAX - 200).wrapping_add(turn.epoch));
                for shot in shots {
                    let day = 2 * n + shot.index as u32;
                    for to in peers(rank, size) {
                        let [pushed, _] = values(day, rank, len);
                        push(&memory, mine, to, (turn, shot), flag, &pushed);
                    }
                    if shot.index == 0 {
                        mine.clear(&memory, turn);
                    }
                    for from in peers(rank, size) {
                        let mut got = vec![0; len * 4];
                        let mut budget = long();
                        mine.take(
                            &memory,
                            from,
                            turn,
                            shot,
                            flag,
                            &mut got,
                            &mut budget,
                            || false,
                        )
                        .unwrap();
                        let [_, want] = values(day, from, len);
                        assert_eq!(got, want);
                    }
                }
            }
        });
    }
}

/// Three uses later, what was not cleared passes for new.
#[test]
fn without_the_clear_old_values_pass_for_new_ones() {
    let memory = buffers(2);
    let mine = sentinel(1, 2);
    let mut rotation = Rotation::default();
    let shot = Shot::first(1);
    let turns: Vec<Turnover> = (0..4).map(|_| rotation.begin(1)).collect();
    assert_eq!(turns[0].buffer, turns[3].buffer);
    let place = mine.place(1, turns[3].buffer, shot, 0, 0);
    push(
        &memory,
        sentinel(0, 2),
        1,
        (turns[0], shot),
        flag(1),
        &[1; 8],
    );
    assert_eq!(Sentinel::unpack(memory.load(place)), Some([1; 8]));
    // Uses 1 and 2 go by: use 1 clears what use 0 left.
    mine.clear(&memory, turns[2]);
    assert!(
        Sentinel::unpack(memory.load(place)).is_some(),
        "not yet cleared"
    );
    mine.clear(&memory, turns[1]);
    assert_eq!(Sentinel::unpack(memory.load(place)), None);
}

/// A new generation begins with empty buffers, whatever the old one left in them.
#[test]
fn a_reset_empties_all_own_buffers() {
    let memory = buffers(3);
    let shot = Shot::first(17);
    let mut rotation = Rotation::default();
    let turns: Vec<Turnover> = (0..3).map(|_| rotation.begin(34)).collect();
    let places: Vec<Word> = [1, 2]
        .into_iter()
        .flat_map(|owner| [0, 1, 2].map(|buffer| (owner, buffer)))
        .map(|(owner, buffer)| sentinel(0, 3).place(owner, buffer, shot, 0, 16))
        .collect();
    for (to, &turn) in [1, 2]
        .into_iter()
        .flat_map(|to| turns.iter().map(move |t| (to, t)))
    {
        push(
            &memory,
            sentinel(0, 3),
            to,
            (turn, shot),
            flag(turn.epoch),
            &[1; 136],
        );
    }
    sentinel(1, 3).empty(&memory);
    let left = places.iter().filter(|&&at| memory.load(at) != 0);
    assert!(left.eq(&places[3..]), "all of rank 1's, none of rank 2's");
}

/// Memory in which the group is stopped just when a rank has looked, and is about to rest.
struct Unlucky<'a> {
    words: &'a Words<Vec<AtomicU64>>,
    stop: Word,
}

impl Memory for Unlucky<'_> {
    fn load(&self, at: Word) -> u64 {
        self.words.load(at)
    }
    fn store(&self, at: Word, value: u64) {
        self.words.store(at, value);
    }
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        self.words.compare_exchange(at, current, new)
    }
    fn events(&self, owner: usize) -> u32 {
        self.words.events(owner)
    }
    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.words.store(self.stop, 1);
        self.words.rest(owner, events, until);
    }
}

/// A budget under which one rest may take all the time there is.
struct Once(Deadline);

impl Budget for Once {
    fn spent(&mut self) -> bool {
        self.0.spent()
    }
    fn until(&self) -> Option<Instant> {
        Instant::now().checked_add(self.0.left())
    }
    fn spins(&self) -> u32 {
        0
    }
}

#[test]
fn who_is_about_to_rest_hears_of_an_abort() {
    let words = memory(1, 2);
    let stop = Word { owner: 0, index: 1 };
    let unlucky = Unlucky {
        words: &words,
        stop,
    };
    let w = Wait {
        word: Word { owner: 0, index: 0 },
        want: Want::Exactly(flag(1)),
        peer: 0,
    };
    let start = Instant::now();
    let heard = wait(&unlucky, w, &mut Once(long()), || words.load(stop) == 1);
    assert_eq!(heard, Err(Stop::Interrupted));
    assert!(start.elapsed() < Duration::from_secs(10));
}
