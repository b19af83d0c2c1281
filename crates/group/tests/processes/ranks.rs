//! Processes that are ranks, as the trials see them.

use super::common::LONG;
use brigade_group::Address;
use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

/// A line of a rank, and when it came.
struct Line {
    rank: usize,
    text: String,
    at: Instant,
}

pub struct Ranks {
    size: usize,
    address: Address,
    variables: Vec<(&'static str, String)>,
    children: Vec<Option<Child>>,
    tell: mpsc::Sender<Line>,
    told: mpsc::Receiver<Line>,
    /// What each has said and nobody has asked for yet.
    said: Vec<VecDeque<(String, Instant)>>,
}

impl Ranks {
    /// None of them is started yet.
    pub fn new(size: usize, address: &Address) -> Self {
        let (tell, told) = mpsc::channel();
        Self {
            size,
            address: address.clone(),
            variables: Vec::new(),
            children: (0..size).map(|_| None).collect(),
            tell,
            told,
            said: (0..size).map(|_| VecDeque::new()).collect(),
        }
    }

    /// All of them, joined.
    pub fn joined(size: usize, address: &Address) -> Self {
        let mut ranks = Self::new(size, address);
        ranks.start(0..size);
        ranks.expect(0..size, "started");
        ranks.expect(0..size, "joined");
        ranks
    }

    /// For those that are started after this.
    pub fn set(&mut self, name: &'static str, value: impl ToString) {
        self.variables.push((name, value.to_string()));
    }

    pub fn start(&mut self, which: impl IntoIterator<Item = usize>) {
        for rank in which {
            let (host, port) = match &self.address {
                Address::Tcp { host, port } => (host.clone(), port.to_string()),
                unix => (unix.to_string(), String::new()),
            };
            let mut child = Command::new(std::env::current_exe().unwrap())
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", self.size.to_string())
                .env("MASTER_ADDR", host)
                .env("MASTER_PORT", port)
                .envs(self.variables.iter().map(|(name, value)| (name, value)))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let (out, tell) = (child.stdout.take().unwrap(), self.tell.clone());
            std::thread::spawn(move || {
                for text in BufReader::new(out).lines().map_while(Result::ok) {
                    let at = Instant::now();
                    // The trial may have failed already.
                    let _ = tell.send(Line { rank, text, at });
                }
            });
            self.children[rank] = Some(child);
        }
    }

    pub fn order(&mut self, which: impl IntoIterator<Item = usize>, what: &str) {
        for rank in which {
            let child = self.children[rank].as_mut().unwrap();
            writeln!(child.stdin.as_mut().unwrap(), "{what}").unwrap();
        }
    }

    /// The next line of each of these, in their order.
    pub fn lines(&mut self, which: impl IntoIterator<Item = usize>) -> Vec<String> {
        let timed = self.timed(which);
        timed.into_iter().map(|(text, _)| text).collect()
    }

    /// As [`lines`](Self::lines), with when they came.
    pub fn timed(&mut self, which: impl IntoIterator<Item = usize>) -> Vec<(String, Instant)> {
        which.into_iter().map(|rank| self.next(rank)).collect()
    }

    fn next(&mut self, rank: usize) -> (String, Instant) {
        while self.said[rank].is_empty() {
            let line = self.told.recv_timeout(LONG).expect("a rank says nothing");
            self.said[line.rank].push_back((line.text, line.at));
        }
        self.said[rank].pop_front().unwrap()
    }

    /// Each of these says this next.
    pub fn expect(&mut self, which: impl IntoIterator<Item = usize> + Clone, text: &str) {
        let lines = self.lines(which.clone());
        for (rank, line) in which.into_iter().zip(lines) {
            assert_eq!(line, text, "rank {rank}");
        }
    }

    /// Ends a rank's process without a word of its own, and gives when.
    pub fn kill(&mut self, rank: usize) -> Instant {
        let mut child = self.children[rank].take().unwrap();
        let at = Instant::now();
        child.kill().unwrap();
        child.wait().unwrap();
        at
    }

    /// Stops a rank's process: it lives, and does nothing.
    pub fn stop(&self, rank: usize) -> Instant {
        let child = self.children[rank].as_ref().unwrap();
        let id = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(id, rustix::process::Signal::STOP).unwrap();
        Instant::now()
    }

    /// All that are left say goodbye, at once, and end well.
    pub fn finish(mut self) {
        let left: Vec<_> = (0..self.size)
            .filter(|r| self.children[*r].is_some())
            .collect();
        self.order(left.clone(), "end .");
        // The next, and not something else before.
        self.expect(left.clone(), "bye");
        for rank in left {
            let status = self.children[rank].take().unwrap().wait().unwrap();
            assert!(status.success(), "rank {rank}: {status}");
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Fails the trial if it took longer.
pub fn assert_within(from: Instant, to: Instant, limit: Duration) {
    let took = to.saturating_duration_since(from);
    assert!(took < limit, "it took {took:?}, {limit:?} is the limit");
}
