//! Every rank but rank 0: one connection, to rank 0.

use super::{
    LINGER, TcpConfig,
    address::Failure,
    handshake,
    link::{Link, Receiver, Threads},
    socket::Stream,
    words::Words,
};
use crate::{
    Deadline, Liveness, Loss,
    frame::{Body, Frame, Sender, message_limit},
    rounds::Away,
};
use brigade_device::Result;
use parking_lot::{Condvar, Mutex};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How long after its deadline a call waits for rank 0's word on it, so that all ranks get the same error.
const GRACE: Duration = Duration::from_millis(500);
/// First and longest pause between two tries to reach rank 0.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// Longest time for the whole handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct State {
    link: Option<Link>,
    /// The round that the current call is in, or the next one will be.
    round: u64,
    in_call: bool,
    verdict: Option<Result<Vec<Vec<u8>>, String>>,
    /// Why rank 0 does not come any more.
    root: Option<Away>,
    closing: bool,
}

pub(crate) struct Member {
    rank: usize,
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
    threads: Arc<Threads>,
    pub(crate) liveness: Liveness,
    pub(crate) words: Words,
}

impl Member {
    /// Reaches rank 0 and is taken in.
    pub(crate) fn connect(config: &TcpConfig, deadline: Deadline) -> Result<Arc<Self>> {
        let stream = reach(config, deadline)?;
        let member = Arc::new(Self {
            rank: config.rank,
            size: config.size,
            state: Mutex::default(),
            changed: Condvar::new(),
            threads: Arc::default(),
            liveness: Liveness::default(),
            words: Words::default(),
        });
        let link = Link::start(stream, 0, Sender::Root, config, &member.threads, &member);
        let link = link.map_err(|error| super::joining(error.to_string()))?;
        member.state.lock().link = Some(link);
        Ok(member)
    }

    pub(crate) fn all_gather(
        &self,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, String> {
        let mut state = self.state.lock();
        if state.in_call {
            return Err(format!("rank {} is in another call already", self.rank));
        }
        state.in_call = true;
        let body = if mine.len() > message_limit(self.size) {
            Body::TooLong(mine.len() as u64)
        } else {
            Body::Message(mine)
        };
        state.send(body);
        let mut end = deadline.end();
        let mut gave_up = false;
        let result = loop {
            if let Some(verdict) = state.verdict.take() {
                break verdict;
            }
            if let Some(away) = &state.root {
                break Err(away.told(0));
            }
            let wait = self.changed.wait_until(&mut state, end);
            // What came in the last moment counts.
            if wait.timed_out() && state.verdict.is_none() && state.root.is_none() {
                if gave_up {
                    let within = deadline.within();
                    break Err(format!(
                        "no answer from rank 0 after {within:?} and {GRACE:?}"
                    ));
                }
                gave_up = true;
                end = Instant::now() + GRACE;
                let waited = deadline.within().as_micros();
                state.send(Body::GiveUp(u64::try_from(waited).unwrap_or(u64::MAX)));
            }
        };
        state.in_call = false;
        state.round += 1;
        result
    }

    /// Tells all others.
    pub(crate) fn tell(&self, what: &[u8]) {
        let word = Frame::alone(Body::Word(self.rank as u32, what)).encode();
        self.state.lock().queue(word.into());
    }

    /// Says goodbye, and gives what was said before the time to arrive.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        let Some(link) = state.link.take() else {
            return;
        };
        drop(state);
        link.send(Frame::alone(Body::Bye).encode().into());
        let stream = link.stream();
        drop(link);
        self.threads.wait(LINGER);
        stream.close();
    }
}

impl State {
    fn send(&mut self, body: Body<'_>) {
        let round = self.round;
        self.queue(Frame { round, body }.encode().into());
    }

    fn queue(&mut self, frame: Arc<[u8]>) {
        if self.link.as_ref().is_some_and(|link| !link.send(frame))
            && let Some(link) = self.link.take()
        {
            // The reading thread tells the rest.
            link.close();
        }
    }
}

impl Receiver for Member {
    fn receive(&self, _: usize, frame: Frame<'_>) -> Result<bool, String> {
        let mut state = self.state.lock();
        let verdict = match frame.body {
            Body::Beat => return Ok(true),
            Body::Gathered(all) => Ok(all.into_iter().map(<[u8]>::to_vec).collect()),
            Body::Failed(why) => Err(why.to_owned()),
            Body::Word(rank, what) => {
                drop(state);
                return self.words.hear(rank as usize, what).map(|()| true);
            }
            Body::Lost(rank, why) => {
                drop(state);
                let (rank, why) = (rank as usize, why.to_owned());
                self.liveness.report(Loss { rank, why });
                return Ok(true);
            }
            Body::Bye => {
                state.root.get_or_insert(Away::Gone);
                self.changed.notify_all();
                return Ok(false);
            }
            other => return Err(format!("it sent a {:?} out of order", other.kind())),
        };
        let (at, number) = (state.round, frame.round);
        // That a round failed may be known before this rank comes to it.
        if number > at || (number == at && !state.in_call && verdict.is_ok()) {
            return Err(format!("it answers round {number}, this rank is in {at}"));
        }
        // The answer to a call that was given up comes too late.
        if number == at {
            state.verdict = Some(verdict);
            self.changed.notify_all();
        }
        Ok(true)
    }

    fn ended(&self, _: usize, why: String) {
        let mut state = self.state.lock();
        if state.closing || state.root.is_some() {
            return;
        }
        state.root = Some(Away::Lost(why.clone()));
        self.changed.notify_all();
        drop(state);
        self.liveness.report(Loss { rank: 0, why });
    }
}

/// A connection on which both sides have proved who they are.
fn reach(config: &TcpConfig, deadline: Deadline) -> Result<Stream> {
    let has_secret = config.secret.is_some();
    let (mut pause, longest) = PAUSES;
    loop {
        let joined = config
            .address
            .connect(has_secret, deadline)
            .and_then(|stream| {
                let limit = Deadline::after(deadline.left().min(HANDSHAKE));
                handshake::join(&stream, config, limit).map(|()| stream)
            });
        let last = match joined {
            Ok(stream) => return Ok(stream),
            Err(Failure::Ever(error)) => return Err(error),
            Err(Failure::Now(last)) => last,
        };
        let left = deadline.left();
        if left.is_zero() {
            return Err(handshake::unreached(config, deadline.within(), &last));
        }
        // tidy: sleeps because nothing tells when another process begins to listen
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(longest);
    }
}
