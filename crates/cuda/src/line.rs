//! What the hosts of a rail tell each other, beside what goes along it: which calls they have made, what stopped one, who leaves.
//!
//! NCCL knows none of this. A call is not held up by it: each host says how many calls it has made, and a digest of all of them, and
//! whoever hears of another digest of as many calls has found ranks that do not agree. Whoever has said fewer is who is waited for.

use brigade_device::{Bootstrap, FaultRecord, Result};
use brigade_group::{Loss, TcpGroup, Watch};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

/// Digests of own calls that are kept, to compare what slower ranks say with.
const KEPT: usize = 4096;

/// Least time between two words about calls, which are made more often than anybody needs to hear of.
const PACE: Duration = Duration::from_millis(5);

/// What a word is about: its first byte.
const CALLS: u8 = 1;
const FAULT: u8 = 2;
const LEAVES: u8 = 3;

/// How many calls of a generation a rank has made, and which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Calls {
    generation: u32,
    count: u64,
    digest: u64,
}

impl Calls {
    /// One more (FNV-1a).
    fn and(self, signature: u32) -> Self {
        let digest = signature
            .to_le_bytes()
            .into_iter()
            .fold(self.digest ^ 0xcbf2_9ce4_8422_2325, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
            });
        Self {
            count: self.count + 1,
            digest,
            ..self
        }
    }

    fn word(self) -> Vec<u8> {
        let mut word = vec![CALLS];
        word.extend(self.generation.to_le_bytes());
        word.extend(self.count.to_le_bytes());
        word.extend(self.digest.to_le_bytes());
        word
    }
}

/// What is known of another rank.
#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    calls: Calls,
    gone: Option<Gone>,
}

/// How a rank has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// Before it made a call that this rank has made: nobody will.
    Behind,
    /// Its connection ended. What it sent before may have arrived.
    Lost,
    /// It said so, behind everything that it made.
    Left,
}

/// What one rank has said and heard. No I/O.
#[derive(Debug)]
struct Book {
    me: usize,
    own: Calls,
    /// Digests of the last own calls, the last one last.
    digests: VecDeque<u64>,
    /// What was last told, and when.
    told: (Calls, Option<Instant>),
    peers: Vec<Peer>,
    fault: Option<(u32, FaultRecord)>,
}

impl Book {
    fn new(me: usize, size: usize) -> Self {
        let own = Calls {
            generation: 1,
            ..Calls::default()
        };
        Self {
            me,
            own,
            digests: VecDeque::new(),
            told: (own, None),
            peers: vec![Peer::default(); size],
            fault: None,
        }
    }

    fn call(&mut self, signature: u32) {
        self.own = self.own.and(signature);
        self.digests.push_back(self.own.digest);
        if self.digests.len() > KEPT {
            self.digests.pop_front();
        }
    }

    /// What there is to tell by `now`, if there is anything new. What is in between is never told.
    fn news(&mut self, now: Instant) -> Option<Vec<u8>> {
        let (told, at) = self.told;
        let is_early = at.is_some_and(|at| now.saturating_duration_since(at) < PACE);
        if told == self.own || is_early {
            return None;
        }
        self.told = (self.own, Some(now));
        Some(self.own.word())
    }

    /// Others, the next one first.
    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let size = self.peers.len();
        let others = (1..size).map(move |i| (self.me + i) % size);
        others.map(|rank| (rank, &self.peers[rank]))
    }

    fn hear(&mut self, rank: usize, word: &[u8]) {
        let Some((kind, rest)) = word.split_first() else {
            return;
        };
        let Some(peer) = self.peers.get_mut(rank) else {
            return;
        };
        let generation = rest.first_chunk().map(|b| u32::from_le_bytes(*b));
        let words: Vec<u64> = rest
            .get(4..)
            .unwrap_or_default()
            .chunks_exact(8)
            .filter_map(|b| b.first_chunk().map(|b| u64::from_le_bytes(*b)))
            .collect();
        match (*kind, generation, &words[..]) {
            (CALLS, Some(generation), &[count, digest]) => {
                peer.calls = Calls {
                    generation,
                    count,
                    digest,
                };
            }
            (FAULT, Some(generation), words) => {
                let record: Option<[u64; 8]> = words.try_into().ok();
                let record = record.and_then(FaultRecord::from_words);
                // The first of a generation counts.
                if let Some(record) = record
                    && self.fault.is_none_or(|(of, _)| of < generation)
                {
                    self.fault = Some((generation, record));
                }
            }
            (LEAVES, ..) => peer.gone = Some(Gone::Left),
            _ => {}
        }
    }

    fn fault(&self) -> Option<FaultRecord> {
        let of_now = self.fault.filter(|(of, _)| *of == self.own.generation);
        of_now.map(|(_, record)| record)
    }

    /// A rank that made another call than this one, as one of as many.
    fn differs(&self) -> Option<usize> {
        let differs = |peer: &Peer| {
            let Calls {
                generation,
                count,
                digest,
            } = peer.calls;
            let back = self.own.count.checked_sub(count);
            let at = back.and_then(|back| self.digests.len().checked_sub(1 + back as usize));
            let own = at.and_then(|at| self.digests.get(at));
            generation == self.own.generation && count > 0 && own.is_some_and(|&own| own != digest)
        };
        let mut others = self.others();
        others.find(|(_, peer)| differs(peer)).map(|(rank, _)| rank)
    }

    /// Calls of this generation that a rank is known to have made.
    fn made(&self, peer: &Peer) -> u64 {
        let calls = peer.calls;
        if calls.generation == self.own.generation {
            calls.count
        } else {
            0
        }
    }

    /// A rank that has not made as many calls as this one.
    fn behind(&self) -> Option<usize> {
        let mut others = self.others();
        let found = others.find(|(_, peer)| self.made(peer) < self.own.count);
        found.map(|(rank, _)| rank)
    }

    /// A rank that is gone, and how: first one that has not made as many calls as this one.
    fn gone(&self) -> Option<(usize, Gone)> {
        let how = |peer: &Peer| match peer.gone? {
            _ if self.made(peer) < self.own.count => Some(Gone::Behind),
            how => Some(how),
        };
        let gone = self
            .others()
            .filter_map(|(rank, peer)| Some((rank, how(peer)?)));
        gone.min_by_key(|(_, how)| *how as u8)
    }

    /// A new generation, in which nobody has made a call.
    fn renew(&mut self, generation: u32) {
        self.own = Calls {
            generation,
            ..Calls::default()
        };
        self.told.0 = self.own;
        self.digests.clear();
    }
}

/// One rank's end.
pub(crate) struct Line {
    group: TcpGroup,
    book: Arc<Mutex<Book>>,
    _losses: Watch,
}

impl Line {
    /// Connects the ranks of a rail.
    pub(crate) fn join(
        rail: &dyn Bootstrap,
        at: Option<IpAddr>,
        within: Duration,
    ) -> Result<Arc<Self>> {
        let group = TcpGroup::among(rail, at, within)?;
        let book = Arc::new(Mutex::new(Book::new(rail.rank(), rail.size())));
        let heard = Arc::clone(&book);
        let losses = group.on_loss(move |loss: &Loss| {
            if let Some(peer) = heard.lock().peers.get_mut(loss.rank) {
                peer.gone.get_or_insert(Gone::Lost);
            }
        });
        Ok(Arc::new(Self {
            group,
            book,
            _losses: losses,
        }))
    }

    /// For what all ranks of the rail do together on their hosts.
    pub(crate) fn group(&self) -> &TcpGroup {
        &self.group
    }

    /// This rank has made a call. It is told by whoever [hears](Self::hear).
    pub(crate) fn call(&self, signature: u32) {
        self.book.lock().call(signature);
        self.group.wake();
    }

    /// Ends the wait of whoever hears.
    pub(crate) fn wake(&self) {
        self.group.wake();
    }

    /// Hears what others say, for so long at most if they say nothing, and says what there is to say.
    pub(crate) fn hear(&self, within: Duration) {
        let words = self.group.heard(within);
        let mut book = self.book.lock();
        for (rank, word) in words {
            book.hear(rank, &word);
        }
        let news = book.news(Instant::now());
        drop(book);
        if let Some(news) = news {
            self.tell(&news);
        }
    }

    /// Tells what stopped this rank.
    pub(crate) fn tell_fault(&self, record: FaultRecord) {
        let mut word = vec![FAULT];
        word.extend(self.book.lock().own.generation.to_le_bytes());
        word.extend(record.to_words().into_iter().flat_map(u64::to_le_bytes));
        self.tell(&word);
    }

    /// Tells that this rank is through with everything.
    pub(crate) fn leave(&self) {
        let calls = self.book.lock().own.word();
        self.tell(&calls);
        self.tell(&[LEAVES]);
    }

    fn tell(&self, word: &[u8]) {
        if let Err(error) = self.group.tell(word) {
            tracing::warn!(%error, "a word along a rail");
        }
    }

    /// What another rank was stopped by, in this generation.
    pub(crate) fn fault(&self) -> Option<FaultRecord> {
        self.book.lock().fault()
    }

    /// A rank that made another call than this one.
    pub(crate) fn differs(&self) -> Option<usize> {
        self.book.lock().differs()
    }

    /// Who is waited for: a rank that has not made as many calls as this one, or else the next one.
    pub(crate) fn awaited(&self) -> usize {
        let book = self.book.lock();
        let next = (book.me + 1) % book.peers.len();
        book.behind().unwrap_or(next)
    }

    /// A rank that is gone, and how.
    pub(crate) fn gone(&self) -> Option<(usize, Gone)> {
        self.book.lock().gone()
    }

    /// Starts a generation.
    pub(crate) fn renew(&self, generation: u32) {
        self.book.lock().renew(generation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(from: &mut Book, to: &mut Book) {
        let rank = from.me;
        // Not too early for another.
        from.told.1 = None;
        if let Some(word) = from.news(Instant::now()) {
            to.hear(rank, &word);
        }
    }

    #[test]
    fn many_calls_are_few_words() {
        let mut book = Book::new(0, 2);
        let start = Instant::now();
        assert_eq!(book.news(start), None);
        book.call(1);
        assert!(book.news(start).is_some(), "the first at once");
        book.call(2);
        book.call(3);
        assert_eq!(book.news(start + PACE / 2), None);
        let word = book.news(start + PACE).unwrap();
        assert_eq!(word, book.own.word());
        assert_eq!(book.news(start + 3 * PACE), None);
    }

    #[test]
    fn other_calls_are_found_by_whoever_has_made_as_many() {
        let [mut a, mut b] = [0, 1].map(|me| Book::new(me, 2));
        for signature in [7, 8, 9] {
            a.call(signature);
        }
        // Only the last of them is told.
        say(&mut a, &mut b);
        b.call(7);
        assert_eq!((b.differs(), b.behind()), (None, None));
        say(&mut b, &mut a);
        assert_eq!((a.differs(), a.behind()), (None, Some(1)));
        b.call(8);
        b.call(5);
        assert_eq!(b.differs(), Some(0));
        say(&mut b, &mut a);
        assert_eq!((a.differs(), a.behind()), (Some(1), None));
        // The order of calls counts.
        assert_ne!(
            Calls::default().and(1).and(2),
            Calls::default().and(2).and(1)
        );
    }

    #[test]
    fn an_old_generation_is_forgotten_and_a_new_one_is_kept() {
        let [mut a, mut b] = [0, 2].map(|me| Book::new(me, 3));
        a.call(1);
        b.call(2);
        say(&mut b, &mut a);
        assert_eq!((a.differs(), a.behind()), (Some(2), Some(1)));
        // b is through with the reset first.
        b.renew(2);
        b.call(3);
        say(&mut b, &mut a);
        assert_eq!((a.differs(), a.fault()), (None, None));
        a.renew(2);
        assert_eq!(a.behind(), None);
        a.call(4);
        assert_eq!(a.differs(), Some(2));
    }

    #[test]
    fn faults_belong_to_their_generation_and_the_first_counts() {
        let record = |rank| {
            let mut words = [0; 8];
            (words[0], words[1]) = (3, rank);
            words
        };
        let word = |generation: u32, rank| {
            let mut word = vec![FAULT];
            word.extend(generation.to_le_bytes());
            word.extend(record(rank).into_iter().flat_map(u64::to_le_bytes));
            word
        };
        let mut book = Book::new(0, 2);
        book.hear(1, &word(2, 5));
        assert_eq!(book.fault(), None, "not yet");
        book.renew(2);
        book.hear(1, &word(2, 6));
        book.hear(1, &word(1, 7));
        assert_eq!(book.fault(), FaultRecord::from_words(record(5)));
        book.renew(3);
        assert_eq!(book.fault(), None);
        // What cannot be understood says nothing, and neither does who is not there.
        for word in [&[][..], &[9], &[FAULT, 3, 0, 0, 0, 1], &[CALLS]] {
            book.hear(1, word);
        }
        book.hear(2, &[LEAVES]);
        assert_eq!((book.fault(), book.gone()), (None, None));
        book.hear(1, &[LEAVES]);
        assert_eq!(book.gone(), Some((1, Gone::Left)));
        // It will not make this one.
        book.call(1);
        assert_eq!(book.gone(), Some((1, Gone::Behind)));
    }

    #[test]
    fn hosts_hear_each_other() {
        let within = Duration::from_secs(20);
        std::thread::scope(|scope| {
            for boot in brigade_group::threads(3) {
                scope.spawn(move || {
                    let line = Line::join(&boot, None, within).unwrap();
                    let me = boot.rank();
                    line.call([1, 2, 1][me]);
                    let end = Instant::now() + within;
                    while line.differs().is_none() && Instant::now() < end {
                        line.hear(Duration::from_millis(5));
                    }
                    let other = line.differs().unwrap();
                    assert!(me == 1 || other == 1, "{me} of {other}");
                    line.group().all_gather(&[], within).unwrap();
                    if me != 2 {
                        line.leave();
                    } else {
                        while line.gone().is_none() && Instant::now() < end {
                            line.hear(Duration::from_millis(5));
                        }
                        assert!(line.gone().is_some());
                    }
                    line.group().all_gather(&[], within).unwrap();
                });
            }
        });
    }
}
