//! Starting ranks as processes of this machine.

use crate::{Deadline, folder::Folder, frame::MOST_RANKS};
use brigade_device::{Error, Result};
use rustix::{
    io::Errno,
    process::{Pid, WaitId, WaitIdOptions, waitid},
};
use std::{
    ffi::OsString,
    io,
    process::{Child, Command, ExitStatus},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

/// A group that is about to be started: a rendezvous at a Unix socket that only this user's processes can reach.
///
/// ```no_run
/// use brigade_group::Launch;
/// use std::{process::Command, time::Duration};
///
/// # fn main() -> brigade_device::Result<()> {
/// let ranks = Launch::new(4)?.start(|_| Command::new("./server"))?;
/// for (rank, status) in ranks.wait(Duration::from_secs(60))?.iter().enumerate() {
///     println!("rank {rank}: {status}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Launch {
    folder: Folder,
    size: usize,
}

/// Time for a process to end once it was killed: the system takes its memory back, and drivers what it had of theirs.
const DYING: Duration = Duration::from_secs(10);

/// Processes of a group, one per rank. Those that still run when it is dropped are killed, and waited for: ten seconds at most, since the
/// system may hold one in a call that nothing ends. Such a one may go on to be listed when it has ended (a zombie), while this process lives.
#[derive(Debug)]
pub struct Ranks {
    children: Vec<Child>,
    ended: Receiver<usize>,
    statuses: Vec<Option<ExitStatus>>,
    _folder: Folder,
}

impl Launch {
    /// A group of `size` ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no ranks or too many; [`Error::Backend`] if no folder for the socket can be made.
    pub fn new(size: usize) -> Result<Self> {
        if !(1..=MOST_RANKS).contains(&size) {
            return Err(Error::invalid("size", size, format!("1 to {MOST_RANKS}")));
        }
        let folder = Folder::new().map_err(failed("make a folder for the rendezvous"))?;
        Ok(Self { folder, size })
    }

    /// What a rank finds in its environment, as torchrun would set it: see
    /// [`TcpConfig::from_env`](crate::TcpConfig::from_env).
    pub fn variables(&self, rank: usize) -> [(&'static str, OsString); 4] {
        let mut address = OsString::from("unix:");
        address.push(self.folder.path().join("rank0"));
        [
            ("RANK", rank.to_string().into()),
            ("LOCAL_RANK", rank.to_string().into()),
            ("WORLD_SIZE", self.size.to_string().into()),
            ("MASTER_ADDR", address),
        ]
    }

    /// Starts every rank's command, with its variables.
    ///
    /// # Errors
    /// [`Error::Backend`] if one cannot be started; the others are killed.
    pub fn start(self, mut command: impl FnMut(usize) -> Command) -> Result<Ranks> {
        let (end, ended) = channel();
        let variables: Vec<_> = (0..self.size).map(|rank| self.variables(rank)).collect();
        let mut ranks = Ranks {
            children: Vec::with_capacity(self.size),
            ended,
            statuses: vec![None; self.size],
            _folder: self.folder,
        };
        for (rank, variables) in variables.into_iter().enumerate() {
            let child = command(rank).envs(variables).spawn();
            let child = child.map_err(failed("start a rank's process"))?;
            let id = child.id();
            ranks.children.push(child);
            watch(rank, id, end.clone())?;
        }
        Ok(ranks)
    }
}

/// Sends the number of the rank when its process has ended. The process stays to be reaped: so long its number is not
/// given to another.
fn watch(rank: usize, id: u32, end: Sender<usize>) -> Result<()> {
    let watch = move || {
        if let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw) {
            let how = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(Errno::INTR) = waitid(WaitId::Pid(pid), how) {}
        }
        // Whoever dropped the ranks wants no news.
        let _ = end.send(rank);
    };
    let spawned = thread::Builder::new()
        .name(format!("watch rank {rank}"))
        .spawn(watch);
    spawned.map(drop).map_err(failed("start a thread"))
}

impl Ranks {
    /// A rank's process, to talk to. To be killed by [`kill`](Self::kill), and to be waited for by [`next`](Self::next).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank that is not in the group.
    pub fn child(&mut self, rank: usize) -> Result<&mut Child> {
        let size = self.children.len();
        let none = || Error::invalid("rank", rank, format!("a rank below {size}"));
        self.children.get_mut(rank).ok_or_else(none)
    }

    /// Ends a rank's process at once (SIGKILL). Nothing happens if it has ended.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank that is not in the group; [`Error::Backend`] if the system refuses.
    pub fn kill(&mut self, rank: usize) -> Result<()> {
        let killed = self.child(rank)?.kill();
        killed.map_err(failed("kill a rank's process"))
    }

    /// Waits for the next rank that ends. `None` if none is left, or none ends in time.
    ///
    /// # Errors
    /// [`Error::Backend`] if the system does not tell how it ended.
    pub fn next(&mut self, within: Duration) -> Result<Option<(usize, ExitStatus)>> {
        if self.statuses.iter().all(Option::is_some) {
            return Ok(None);
        }
        match self.ended.recv_timeout(within) {
            Ok(rank) => {
                let status = self.children[rank].wait();
                let status = status.map_err(failed("wait for a rank's process"))?;
                self.statuses[rank] = Some(status);
                Ok(Some((rank, status)))
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    /// Waits for all ranks, and says how each ended.
    ///
    /// # Errors
    /// [`Error::Group`] naming the ranks that have not ended `within` the time; they are killed, as when [`Ranks`] are dropped.
    pub fn wait(mut self, within: Duration) -> Result<Vec<ExitStatus>> {
        let deadline = Deadline::after(within);
        while self.next(deadline.left())?.is_some() {}
        let missing = |r: &usize| self.statuses[*r].is_none();
        let missing: Vec<_> = (0..self.statuses.len()).filter(missing).collect();
        if missing.is_empty() {
            return Ok(self.statuses.iter().flatten().copied().collect());
        }
        Err(Error::Group {
            step: "waiting for processes",
            what: format!(
                "not ended after {within:?}: {}",
                crate::rounds::ranks(&missing)
            ),
        })
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        let children = self.children.iter_mut().zip(&self.statuses);
        let running = children.filter(|(_, status)| status.is_none());
        // A process of this one that has not been waited for can be killed.
        let killed = running.map(|(child, _)| drop(child.kill())).count();
        let deadline = Deadline::after(DYING);
        for _ in 0..killed {
            if let Ok(None) = self.next(deadline.left()) {
                break;
            }
        }
        // One that nobody watches, for want of a thread, has ended by now as well.
        for child in &mut self.children {
            let _ = child.try_wait();
        }
    }
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::Backend {
        call,
        code: error.raw_os_error().unwrap_or(0).into(),
        source: Some(Arc::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &'static str) -> impl Fn(usize) -> Command {
        move |_| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        }
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn every_rank_has_its_variables_and_its_status() {
        let script = r#"case "$MASTER_ADDR" in unix:/*) exit $((WORLD_SIZE * 10 + RANK));; esac"#;
        let ranks = Launch::new(3).unwrap().start(shell(script)).unwrap();
        let codes = ranks.wait(LONG).unwrap().into_iter().map(|s| s.code());
        assert_eq!(codes.collect::<Vec<_>>(), [Some(30), Some(31), Some(32)]);
    }

    #[test]
    fn ranks_that_do_not_end_are_named_and_killed() {
        let script = r#"if [ "$RANK" = 1 ]; then exit 0; fi; exec cat /dev/zero >/dev/null"#;
        let mut ranks = Launch::new(3).unwrap().start(shell(script)).unwrap();
        let ended = ranks.next(LONG).unwrap();
        assert_eq!(
            ended.map(|(rank, status)| (rank, status.code())),
            Some((1, Some(0)))
        );
        for none in [3, 7, usize::MAX] {
            let field = |error| matches!(error, Error::Invalid { field: "rank", .. });
            assert!(ranks.kill(none).is_err_and(field) && ranks.child(none).is_err_and(field));
        }
        ranks.kill(0).unwrap();
        let (rank, status) = ranks.next(LONG).unwrap().unwrap();
        assert_eq!((rank, status.code()), (0, None));
        let last = ranks.child(2).unwrap().id();
        let error = ranks.wait(Duration::from_millis(1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "waiting for processes: not ended after 1ms: rank 2"
        );
        let last = Pid::from_raw(last.try_into().unwrap()).unwrap();
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let left = waitid(WaitId::Pid(last), how);
        assert_eq!(left.unwrap_err(), Errno::CHILD, "nothing is left of it");
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let error = Launch::new(2)
            .unwrap()
            .start(|_| Command::new("/no/such/program"))
            .unwrap_err();
        let text = error.to_string();
        assert_eq!(text, "start a rank's process: code 2");
    }
}
