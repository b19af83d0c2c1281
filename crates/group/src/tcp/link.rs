//! A connection of two ranks that have proved who they are: a thread that reads, a thread that writes.
//!
//! Invariant: nobody who calls the group ever waits for a socket. What is to be sent is queued, in a queue with a bound;
//! whoever does not read for so long that it overflows is lost.

use super::{
    TcpConfig,
    socket::{Limit, Stream},
};
use crate::Deadline;
use crate::frame::{Body, Frame, FrameError, HEADER_BYTES, Header, Sender};
use parking_lot::{Condvar, Mutex};
use std::{
    io,
    sync::{Arc, mpsc},
    time::Duration,
};

/// What is read at once of a long frame: a header that promises much gets memory only as it keeps the promise.
const PART_BYTES: usize = 1 << 16;

/// Words that may be under way. Whoever tells some often paces itself.
const WORDS: usize = 512;

/// What a group does with what comes.
pub(crate) trait Receiver: Send + Sync + 'static {
    /// A frame from this peer. False if it was the last. The text is what is wrong with it.
    fn receive(&self, peer: usize, frame: Frame<'_>) -> Result<bool, String>;

    /// The connection ended, and why. Called at least once if it ends without a last frame.
    fn ended(&self, peer: usize, why: String);
}

/// Counts the threads of a group's links.
#[derive(Default)]
pub(crate) struct Threads {
    running: Mutex<usize>,
    changed: Condvar,
}

impl Threads {
    fn spawn(self: &Arc<Self>, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        *self.running.lock() += 1;
        let running = Running(Arc::clone(self));
        // If it cannot be spawned, the closure is dropped and counts itself out.
        let spawned = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let _running = running;
                work();
            });
        spawned.map(drop)
    }

    /// Waits until all have ended, but not longer than this.
    pub(crate) fn wait(&self, within: Duration) {
        let end = Deadline::after(within).end();
        let mut running = self.running.lock();
        while *running > 0 && !self.changed.wait_until(&mut running, end).timed_out() {}
    }
}

struct Running(Arc<Threads>);

impl Drop for Running {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.changed.notify_all();
    }
}

#[derive(Clone, Copy)]
struct Rhythm {
    /// How often something is sent. `None` if the system tells of the other side's end.
    beat: Option<Duration>,
    silent_after: Duration,
}

/// The sending end. When it is dropped, what was queued is still sent.
pub(crate) struct Link {
    queue: mpsc::SyncSender<Arc<[u8]>>,
    stream: Arc<Stream>,
}

impl Link {
    /// Starts both threads. `from` is what the other side may send.
    pub(crate) fn start(
        stream: Stream,
        peer: usize,
        from: Sender,
        config: &TcpConfig,
        threads: &Arc<Threads>,
        receiver: &Arc<impl Receiver>,
    ) -> io::Result<Self> {
        let stream = Arc::new(stream);
        let rhythm = Rhythm {
            beat: stream.can_fall_silent().then_some(config.heartbeat),
            silent_after: config.silent_after,
        };
        // One answer to a call, and one notice for each rank, can be under way; twice that, and some words, is a peer that does not
        // read.
        let (queue, queued) = mpsc::sync_channel(2 * config.size + 16 + WORDS);
        let size = config.size;
        let started = || {
            let (at, to) = (Arc::clone(&stream), Arc::clone(receiver));
            threads.spawn("brigade-read", move || {
                if let Err(why) = read_all(&at, peer, from, size, rhythm, &*to) {
                    to.ended(peer, why);
                }
                at.close();
            })?;
            let (at, to) = (Arc::clone(&stream), Arc::clone(receiver));
            threads.spawn("brigade-write", move || {
                match write_all(&at, &queued, rhythm) {
                    Ok(()) => at.finish(),
                    Err(error) => {
                        let why = match error.kind() {
                            io::ErrorKind::TimedOut => "it does not read".into(),
                            _ => told(&error, rhythm),
                        };
                        to.ended(peer, why);
                        at.close();
                    }
                }
            })
        };
        if let Err(error) = started() {
            stream.close();
            return Err(error);
        }
        Ok(Self { queue, stream })
    }

    /// Queues a frame. False if the other side has not read for long.
    pub(crate) fn send(&self, frame: Arc<[u8]>) -> bool {
        // A writer that has ended has told so.
        !matches!(self.queue.try_send(frame), Err(mpsc::TrySendError::Full(_)))
    }

    /// To close it after the link itself was dropped.
    pub(crate) fn stream(&self) -> Arc<Stream> {
        Arc::clone(&self.stream)
    }

    /// Ends it at once.
    pub(crate) fn close(self) {
        self.stream.close();
    }
}

fn write_all(
    stream: &Stream,
    queued: &mpsc::Receiver<Arc<[u8]>>,
    rhythm: Rhythm,
) -> io::Result<()> {
    let beat: Arc<[u8]> = Frame::alone(Body::Beat).encode().into();
    loop {
        let next = match rhythm.beat {
            Some(every) => queued.recv_timeout(every),
            None => queued.recv().map_err(Into::into),
        };
        let frame = match next {
            Ok(frame) => frame,
            Err(mpsc::RecvTimeoutError::Timeout) => Arc::clone(&beat),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
        };
        stream.write_full(&frame, Limit::Each(rhythm.silent_after))?;
    }
}

fn read_all(
    stream: &Stream,
    peer: usize,
    from: Sender,
    size: usize,
    rhythm: Rhythm,
    to: &impl Receiver,
) -> Result<(), String> {
    let each = Limit::Each(rhythm.silent_after);
    let first = if rhythm.beat.is_some() {
        each
    } else {
        Limit::Closed
    };
    let io = |error: io::Error| told(&error, rhythm);
    let wrong = |error: FrameError| format!("it broke the protocol: {error}");
    loop {
        let mut head = [0; HEADER_BYTES];
        let got = stream.read_some(&mut head, first).map_err(io)?;
        if got == 0 {
            return Err(told(&io::ErrorKind::UnexpectedEof.into(), rhythm));
        }
        stream.read_full(&mut head[got..], each).map_err(io)?;
        let header = Header::parse(&head, from, size).map_err(wrong)?;
        let mut payload = Vec::new();
        while payload.len() < header.bytes {
            let start = payload.len();
            payload.resize((start + PART_BYTES).min(header.bytes), 0);
            stream.read_full(&mut payload[start..], each).map_err(io)?;
        }
        let frame = Frame::parse(&header, &payload, size).map_err(wrong)?;
        if !to.receive(peer, frame)? {
            return Ok(());
        }
    }
}

fn told(error: &io::Error, rhythm: Rhythm) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut => format!("silent for {:?}", rhythm.silent_after),
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => "its connection closed".into(),
        _ => error.to_string(),
    }
}
