//! Rank 0: everybody's messages come here, and from here everybody gets all of them.

use super::{
    LINGER, TcpConfig,
    handshake::{Proven, part},
    link::{Link, Receiver, Threads},
    too_long,
    words::Words,
};
use crate::{
    Deadline, Liveness, Loss,
    frame::{Body, Frame, Sender, message_limit},
    rounds::{Away, Rounds, Verdict},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{sync::Arc, time::Duration};

struct State {
    rounds: Rounds,
    /// By rank; none for rank 0 itself, for those that have not come yet, and for those that are away.
    links: Vec<Option<Link>>,
    /// Not yet told to this process.
    losses: Vec<Loss>,
}

pub(crate) struct Hub {
    config: TcpConfig,
    state: Mutex<State>,
    /// A round that rank 0 may be in has ended.
    changed: Condvar,
    threads: Arc<Threads>,
    pub(crate) liveness: Liveness,
    pub(crate) words: Words,
}

impl Hub {
    pub(crate) fn new(config: &TcpConfig) -> Arc<Self> {
        Arc::new(Self {
            config: config.clone(),
            state: Mutex::new(State {
                rounds: Rounds::new(config.size),
                links: (0..config.size).map(|_| None).collect(),
                losses: Vec::new(),
            }),
            changed: Condvar::new(),
            threads: Arc::default(),
            liveness: Liveness::default(),
            words: Words::default(),
        })
    }

    /// A proven rank comes in. If it cannot be one of this group, the group does not form: somebody was started wrongly.
    pub(crate) fn admit(self: &Arc<Self>, proven: Proven) {
        let (stream, rank) = (proven.stream, proven.hello.rank as usize);
        let mut state = self.state.lock();
        if let Some(why) = state.misfit(rank, proven.hello.size as usize) {
            state.rounds.fail(0, why.clone());
            self.settle(state);
            part(&stream, &why);
            return;
        }
        let link = Link::start(
            stream,
            rank,
            Sender::Member,
            &self.config,
            &self.threads,
            self,
        );
        match link {
            Ok(link) => {
                link.send(Frame::alone(Body::Welcome(proven.welcome)).encode().into());
                state.links[rank] = Some(link);
            }
            Err(error) => state.lose(rank, error.to_string()),
        }
        self.settle(state);
    }

    /// Rank 0's own call begins.
    pub(crate) fn begin(&self, mine: &[u8]) -> Result<u64, String> {
        let mut state = self.state.lock();
        let limit = message_limit(self.config.size);
        let number = if mine.len() > limit {
            let why = too_long(0, mine.len() as u64, self.config.size);
            state.rounds.refuse(0, why)
        } else {
            state.rounds.enter(0, mine.to_vec())
        }?;
        self.settle(state);
        Ok(number)
    }

    /// Whether round `number` has ended, while rank 0 is in it.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        self.state.lock().rounds.verdict(number).is_some()
    }

    /// Waits for the end of rank 0's own call. `note` is for the error if it comes to none.
    pub(crate) fn end(
        &self,
        number: u64,
        deadline: Deadline,
        note: &str,
    ) -> Result<Vec<Vec<u8>>, String> {
        let mut state = self.state.lock();
        let result = loop {
            if let Some(verdict) = state.rounds.verdict(number) {
                break verdict.to_owned();
            }
            let wait = self.changed.wait_until(&mut state, deadline.end());
            if wait.timed_out() && state.rounds.verdict(number).is_none() {
                let why = state.rounds.missing(number, deadline.within());
                state.rounds.fail(number, format!("{why}{note}"));
            }
        };
        state.rounds.next(0);
        self.settle(state);
        result
    }

    /// Tells all others.
    pub(crate) fn tell(&self, what: &[u8]) {
        let mut state = self.state.lock();
        state.tell_others(0, what);
        self.settle(state);
    }

    /// Says goodbye, and gives what was said before the time to arrive.
    pub(crate) fn close(&self) {
        let bye: Arc<[u8]> = Frame::alone(Body::Bye).encode().into();
        let mut state = self.state.lock();
        state.rounds.leave(0, Away::Gone);
        state.deliver();
        state.foretell();
        let links: Vec<_> = state.links.iter_mut().filter_map(Option::take).collect();
        drop(state);
        let end = |link: Link| {
            link.send(Arc::clone(&bye));
            link.stream()
        };
        let streams: Vec<_> = links.into_iter().map(end).collect();
        self.threads.wait(LINGER);
        for stream in streams {
            stream.close();
        }
    }

    /// After every change: tells those who wait, here and elsewhere.
    fn settle(&self, mut state: MutexGuard<'_, State>) {
        state.deliver();
        self.changed.notify_all();
        let losses = std::mem::take(&mut state.losses);
        drop(state);
        for loss in losses {
            self.liveness.report(loss);
        }
    }

    fn take(&self, state: &mut State, peer: usize, frame: &Frame<'_>) -> Result<(), String> {
        let rounds = &mut state.rounds;
        let at = rounds.at(peer).map_err(|away| away.told(peer))?;
        match frame.body {
            // Its round ended while this was on its way.
            Body::GiveUp(_) if frame.round < at => Ok(()),
            _ if frame.round != at => {
                let number = frame.round;
                Err(format!("it is in round {number}, and should be in {at}"))
            }
            Body::Message(message) => rounds.enter(peer, message.to_vec()).map(drop),
            Body::TooLong(bytes) => {
                let why = too_long(peer, bytes, self.config.size);
                rounds.refuse(peer, why).map(drop)
            }
            Body::GiveUp(us) if rounds.waits_in(peer) == Some(at) => {
                let why = rounds.missing(at, Duration::from_micros(us));
                rounds.fail(at, why);
                Ok(())
            }
            _ => Err(format!("it sent a {:?} out of order", frame.body.kind())),
        }
    }
}

impl Receiver for Hub {
    fn receive(&self, peer: usize, frame: Frame<'_>) -> Result<bool, String> {
        if frame.body == Body::Beat {
            return Ok(true);
        }
        let mut state = self.state.lock();
        if let Body::Word(rank, what) = frame.body {
            if rank as usize != peer {
                return Err(format!("it speaks for rank {rank}"));
            }
            self.words.hear(peer, what)?;
            state.tell_others(peer, what);
            self.settle(state);
            return Ok(true);
        }
        let goes_on = frame.body != Body::Bye;
        if goes_on {
            self.take(&mut state, peer, &frame)?;
        } else {
            state.rounds.leave(peer, Away::Gone);
            state.links[peer] = None;
        }
        self.settle(state);
        Ok(goes_on)
    }

    fn ended(&self, peer: usize, why: String) {
        let mut state = self.state.lock();
        // After the goodbye, connections end.
        if state.rounds.at(0).is_ok() {
            state.lose(peer, why);
        }
        self.settle(state);
    }
}

impl State {
    /// Why a proven rank cannot be one of this group's.
    fn misfit(&self, rank: usize, size: usize) -> Option<String> {
        let mine = self.links.len();
        if size != mine {
            Some(format!(
                "rank {rank} is of a group of {size}, rank 0 of a group of {mine}"
            ))
        } else if rank >= mine {
            Some(format!("there is no rank {rank} in a group of {mine}"))
        } else if rank == 0 || self.links[rank].is_some() || self.rounds.at(rank).is_err() {
            Some(format!("rank {rank} came twice"))
        } else {
            None
        }
    }

    /// Gives every rank that waits for a round the round's end, if it has one.
    fn deliver(&mut self) {
        let mut made: Option<(u64, Arc<[u8]>)> = None;
        for rank in 1..self.links.len() {
            let Some(number) = self.rounds.waits_in(rank) else {
                continue;
            };
            let frame = match &made {
                Some((of, frame)) if *of == number => Arc::clone(frame),
                _ => {
                    let Some(verdict) = self.rounds.verdict(number) else {
                        continue;
                    };
                    encoded(number, verdict)
                }
            };
            made = Some((number, Arc::clone(&frame)));
            self.rounds.next(rank);
            if self.links[rank]
                .as_ref()
                .is_some_and(|link| !link.send(frame))
            {
                self.lose(rank, "it does not read".into());
                // What ranks before it wait for may have ended by that. The depth is bounded: a rank is lost once.
                return self.deliver();
            }
        }
    }

    /// Ranks that have yet to come to a round that failed cannot ask for the reason later.
    fn foretell(&mut self) {
        for rank in 1..self.links.len() {
            if let Ok(number) = self.rounds.at(rank)
                && let Some(Verdict::Failed(why)) = self.rounds.verdict(number)
                && let Some(link) = &self.links[rank]
            {
                link.send(encoded(number, Verdict::Failed(why)));
            }
        }
    }

    /// Hands a rank's word to all others.
    fn tell_others(&mut self, from: usize, what: &[u8]) {
        let body = Body::Word(from as u32, what);
        let word: Arc<[u8]> = Frame::alone(body).encode().into();
        let does_not_read = |(_, link): &(usize, &Option<Link>)| {
            link.as_ref()
                .is_some_and(|link| !link.send(Arc::clone(&word)))
        };
        let others = self
            .links
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != from);
        let lost: Vec<usize> = others.filter(does_not_read).map(|(rank, _)| rank).collect();
        for rank in lost {
            self.lose(rank, "it does not read".into());
        }
    }

    /// A rank is lost: its connection ends, and everybody is told.
    fn lose(&mut self, rank: usize, why: String) {
        let mut more = vec![(rank, why)];
        while let Some((rank, why)) = more.pop() {
            if !self.rounds.leave(rank, Away::Lost(why.clone())) {
                continue;
            }
            if let Some(link) = self.links[rank].take() {
                link.close();
            }
            let notice: Arc<[u8]> = Frame::alone(Body::Lost(rank as u32, &why)).encode().into();
            for (other, link) in self.links.iter().enumerate() {
                if link
                    .as_ref()
                    .is_some_and(|link| !link.send(Arc::clone(&notice)))
                {
                    more.push((other, "it does not read".into()));
                }
            }
            self.losses.push(Loss { rank, why });
        }
    }
}

fn encoded(round: u64, verdict: Verdict<'_>) -> Arc<[u8]> {
    let body = match verdict {
        Verdict::All(all) => Body::Gathered(all),
        Verdict::Failed(why) => Body::Failed(why),
    };
    Frame { round, body }.encode().into()
}
