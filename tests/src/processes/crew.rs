//! A crew: processes, one per rank of a group, that run one trial after the other.

use super::turn::Turn;
use brigade_device::Result;
use brigade_group::{Deadline, Launch, Ranks};
use libtest_mimic::Failed;
use std::{
    io::{self, BufRead, BufReader, PipeReader, Write},
    os::unix::process::ExitStatusExt,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

/// Longest that processes take to end once they have no more to do.
const ENDING: Duration = Duration::from_secs(60);

/// What became of a trial on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It passed.
    Passed,
    /// It failed; why is among what the rank printed.
    Failed,
    /// The rank's process ended.
    Ended,
    /// The rank has not said anything in time.
    Late,
}

/// The processes. Those that still run when it is dropped are killed.
pub(super) struct Crew {
    ranks: Ranks,
    size: usize,
    turns: u64,
    news: Receiver<News>,
    /// By rank, all that it has printed, and how much of it before the last trial.
    printed: Vec<Vec<u8>>,
    before: Vec<usize>,
}

/// A rank has printed a line, or nothing will come any more.
type News = (usize, Option<Vec<u8>>);

/// What is left of a crew: how every rank's process ended, or why that is not known.
pub(super) struct Remains {
    statuses: Result<Vec<ExitStatus>>,
    printed: Vec<Vec<u8>>,
    before: Vec<usize>,
}

impl Crew {
    /// Starts a process for each rank.
    ///
    /// # Errors
    /// Why one cannot be started.
    pub(super) fn start(size: usize, command: impl Fn() -> Command) -> Result<Self, Failed> {
        let (tell, news) = channel();
        let pipes: io::Result<Vec<_>> = (0..size).map(|_| io::pipe()).collect();
        let (readers, writers): (Vec<_>, Vec<_>) = pipes?.into_iter().unzip();
        let outputs = writers
            .into_iter()
            .map(|writer| Ok((writer.try_clone()?, writer)))
            .collect::<io::Result<Vec<_>>>()?;
        let mut outputs = outputs.into_iter();
        let ranks = Launch::new(size)?.start(|_| {
            let mut command = command();
            // One pipe for both, which keeps the order.
            if let Some((out, err)) = outputs.next() {
                command.stdout(out).stderr(err);
            }
            command.stdin(Stdio::piped());
            command
        })?;
        for (rank, reader) in readers.into_iter().enumerate() {
            let tell = tell.clone();
            thread::Builder::new()
                .name(format!("hear rank {rank}"))
                .spawn(move || hear(rank, reader, &tell))?;
        }
        Ok(Self {
            ranks,
            size,
            turns: 0,
            news,
            printed: vec![Vec::new(); size],
            before: vec![0; size],
        })
    }

    /// How many ranks it has.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Its processes, by rank.
    pub(super) fn ids(&mut self) -> Vec<u32> {
        let ranks = 0..self.size;
        ranks
            .map(|rank| self.ranks.child(rank).unwrap().id())
            .collect()
    }

    /// Runs a trial on all ranks, and says what became of it on each. Only where it passed on all may there be another.
    pub(super) fn run(&mut self, name: &str, within: Duration) -> Vec<Answer> {
        self.turns += 1;
        let turn = Turn {
            number: self.turns,
            name: name.to_owned(),
        };
        self.before = self.printed.iter().map(Vec::len).collect();
        for rank in 0..self.size {
            if let Some(stdin) = &mut self.ranks.child(rank).unwrap().stdin {
                // A rank that has ended cannot be told; the end of what it prints says so.
                let _ = stdin.write_all(format!("{}\n", turn.line()).as_bytes());
            }
        }
        let deadline = Deadline::after(within);
        let mut answers = vec![Answer::Late; self.size];
        while answers.contains(&Answer::Late) {
            let Ok((rank, line)) = self.news.recv_timeout(deadline.left()) else {
                break;
            };
            let Some(line) = line else {
                answers[rank] = Answer::Ended;
                continue;
            };
            match turn.answer(&line) {
                Some(true) => answers[rank] = Answer::Passed,
                Some(false) => answers[rank] = Answer::Failed,
                None => self.printed[rank].extend(line),
            }
        }
        answers
    }
    /// Tells the ranks that there will be no more trials: their processes end, all at the same time.
    pub(super) fn dismiss(&mut self) {
        for rank in 0..self.size {
            self.ranks.child(rank).unwrap().stdin = None;
        }
    }

    /// Ends the processes by force, but for those that have ended.
    pub(super) fn kill(&mut self, answers: &[Answer]) {
        let still = |&(_, &answer): &(usize, &Answer)| answer != Answer::Ended;
        for (rank, _) in answers.iter().enumerate().filter(still) {
            // What cannot be killed does not end in time either, and is told then.
            let _ = self.ranks.kill(rank);
        }
    }

    /// Waits until all processes have ended that were dismissed or killed. Those that do not in time are killed.
    pub(super) fn end(mut self) -> Remains {
        let deadline = Deadline::after(ENDING);
        let statuses = self.ranks.wait(deadline.left());
        // Until the last process has let go of what it printed to.
        while let Ok((rank, line)) = self.news.recv_timeout(deadline.left()) {
            self.printed[rank].extend(line.unwrap_or_default());
        }
        Remains {
            statuses,
            printed: self.printed,
            before: self.before,
        }
    }
}

impl Remains {
    /// What is wrong with how the processes ended after a trial with these answers. Some may have been killed for it: of a trial
    /// that is about that, and then one must be; or, if they were `forced`, by [`Crew::kill`].
    pub(super) fn wrong(&self, answers: &[Answer], deadly: bool, forced: bool) -> Vec<String> {
        let statuses = match &self.statuses {
            Ok(statuses) => statuses,
            Err(error) => return vec![error.to_string()],
        };
        let is_killed = |status: &ExitStatus| status.signal() == Some(9);
        let of = answers.len();
        let mut wrong = Vec::new();
        let mut deaths = 0;
        for (rank, (answer, status)) in answers.iter().zip(statuses).enumerate() {
            let what = match answer {
                Answer::Ended if deadly && is_killed(status) => {
                    deaths += 1;
                    continue;
                }
                Answer::Passed if forced || status.success() => continue,
                Answer::Passed => format!("its process ended with {status}"),
                Answer::Failed => "failed".into(),
                Answer::Ended => format!("ended in the trial, with {status}"),
                Answer::Late => "was not through with the trial in time".into(),
            };
            wrong.push(format!("rank {rank} of {of}: {what}"));
        }
        if deadly && deaths == 0 {
            wrong.push("no rank was killed".into());
        }
        wrong
    }

    /// What the ranks printed since the last trial began, or ever.
    pub(super) fn printed(&self, ever: bool) -> String {
        let ranks = self.printed.iter().zip(&self.before).enumerate();
        let texts = ranks.map(|(rank, (printed, &before))| {
            let from = if ever { 0 } else { before };
            let text = String::from_utf8_lossy(&printed[from..]);
            format!("---- rank {rank}\n{}\n", text.trim())
        });
        texts.collect()
    }
}

/// Passes on what a rank prints, line by line.
fn hear(rank: usize, from: PipeReader, tell: &Sender<News>) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        // What cannot be read is at its end.
        let read = from.read_until(b'\n', &mut line).unwrap_or(0);
        let news = (read > 0).then_some(line);
        let ends = news.is_none();
        if tell.send((rank, news)).is_err() || ends {
            return;
        }
    }
}
