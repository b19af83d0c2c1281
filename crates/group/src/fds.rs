//! Passing file descriptors between the ranks of one machine.
//!
//! Rank 0 listens on a Unix socket in a fresh folder that only its user may enter; the path goes through the group's
//! [`Bootstrap`]. Every rank hands its descriptor to rank 0 (`SCM_RIGHTS`) and gets everybody's. The folder is gone as soon
//! as all have come.

use crate::{Deadline, agree, folder::Folder, messages, rounds::ranks};
use brigade_device::{Bootstrap, Error, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    ffi::OsStr,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

const STEP: &str = "passing file descriptors";
/// The socket's name in its folder.
const SOCKET: &str = "fds";
/// What ranks have, after the deadline, to tell each other that it passed.
const GRACE: Duration = Duration::from_millis(500);

/// Gives every rank a duplicate of every rank's descriptor, in rank order. All ranks succeed, or all fail.
///
/// All ranks must be on one machine and run under one user, which is checked where the system can tell (Linux).
///
/// # Errors
/// [`Error::Group`] with the reason of every rank that failed, or with the ranks that did not come.
pub fn exchange_fds(boot: &dyn Bootstrap, fd: impl AsFd, within: Duration) -> Result<Vec<OwnedFd>> {
    let deadline = Deadline::after(within);
    let place = (boot.rank() == 0).then(Place::new);
    let path = match &place {
        Some(Ok(place)) => place.path(),
        _ => PathBuf::new(),
    };
    let paths = messages(boot, path.as_os_str().as_bytes(), deadline.left())
        .map_err(|error| failed(what(error)))?;
    let passed = match (place, paths.first()) {
        (Some(place), _) => {
            place.and_then(|place| hand_out(place, boot.size(), fd.as_fd(), deadline))
        }
        (None, Some(path)) if !path.is_empty() => hand_in(
            Path::new(OsStr::from_bytes(path)),
            boot,
            fd.as_fd(),
            deadline,
        ),
        _ => Err(failed("rank 0 could not listen".into())),
    };
    agree(boot, STEP, passed.map_err(what), deadline.left() + GRACE)
}

/// The listener, and the folder that it is in.
struct Place {
    folder: Folder,
    listener: UnixListener,
}

impl Place {
    fn new() -> Result<Self> {
        let place = || {
            let folder = Folder::new()?;
            let listener = UnixListener::bind(folder.path().join(SOCKET))?;
            listener.set_nonblocking(true)?;
            Ok(Self { folder, listener })
        };
        place().map_err(|error: std::io::Error| failed(error.to_string()))
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// The next that comes. `None` if nobody does in time.
    fn accept(&self, deadline: Deadline) -> Result<Option<UnixStream>> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(io("accept"))?;
                    return Ok(Some(stream));
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(io("accept")(error)),
            }
            let left = deadline.left();
            if left.is_zero() {
                return Ok(None);
            }
            let left = Timespec::try_from(left).map_err(|e| failed(e.to_string()))?;
            match poll(
                &mut [PollFd::new(&self.listener, PollFlags::IN)],
                Some(&left),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(io("poll")(errno.into())),
            }
        }
    }
}

/// Rank 0: takes everybody's descriptor, and gives everybody all of them.
fn hand_out(
    place: Place,
    size: usize,
    mine: BorrowedFd<'_>,
    deadline: Deadline,
) -> Result<Vec<OwnedFd>> {
    let mut fds: Vec<Option<OwnedFd>> = (0..size).map(|_| None).collect();
    fds[0] = Some(mine.try_clone_to_owned().map_err(io("dup"))?);
    let mut streams = Vec::with_capacity(size);
    while streams.len() + 1 < size {
        let Some(stream) = place.accept(deadline)? else {
            let missing: Vec<_> = (0..size).filter(|&r| fds[r].is_none()).collect();
            return Err(failed(format!("missing: {}", ranks(&missing))));
        };
        // Nobody but this user, and the system's administrator, can have come here; neither sends what does not belong.
        check_user(&stream)?;
        let (rank, fd) = receive(&stream, deadline)?;
        match fds.get_mut(rank) {
            Some(place @ None) => *place = Some(fd),
            _ => return Err(failed(format!("a descriptor too many, of rank {rank}"))),
        }
        streams.push(stream);
    }
    drop(place);
    let fds: Vec<_> = fds.into_iter().flatten().collect();
    for stream in &streams {
        for (rank, fd) in fds.iter().enumerate() {
            send(stream, rank, fd.as_fd(), deadline)?;
        }
    }
    Ok(fds)
}

/// The other ranks.
fn hand_in(
    path: &Path,
    boot: &dyn Bootstrap,
    mine: BorrowedFd<'_>,
    deadline: Deadline,
) -> Result<Vec<OwnedFd>> {
    let stream = UnixStream::connect(path).map_err(|e| {
        failed(format!(
            "{}: {e}; are all ranks on one machine?",
            path.display()
        ))
    })?;
    check_user(&stream)?;
    send(&stream, boot.rank(), mine, deadline)?;
    (0..boot.size())
        .map(|rank| match receive(&stream, deadline)? {
            (of, fd) if of == rank => Ok(fd),
            (of, _) => Err(failed(format!(
                "rank {of}'s descriptor instead of rank {rank}'s"
            ))),
        })
        .collect()
}

fn send(stream: &UnixStream, rank: usize, fd: BorrowedFd<'_>, deadline: Deadline) -> Result<()> {
    stream
        .set_write_timeout(Some(left(deadline)?))
        .map_err(io("setsockopt"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = (rank as u32).to_le_bytes();
    match sendmsg(
        stream,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::empty(),
    ) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(sent) => Err(failed(format!("{sent} of {} bytes sent", bytes.len()))),
        Err(errno) => Err(io("sendmsg")(errno.into())),
    }
}

/// A rank and its descriptor.
fn receive(stream: &UnixStream, deadline: Deadline) -> Result<(usize, OwnedFd)> {
    stream
        .set_read_timeout(Some(left(deadline)?))
        .map_err(io("setsockopt"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4];
    #[cfg(target_os = "linux")]
    let flags = RecvFlags::CMSG_CLOEXEC;
    #[cfg(not(target_os = "linux"))]
    let flags = RecvFlags::empty();
    let got = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    )
    .map_err(|errno| io("recvmsg")(errno.into()))?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    if got.bytes == 0 {
        return Err(failed("the other side closed the connection".into()));
    }
    match fds.pop() {
        Some(fd)
            if fds.is_empty()
                && got.bytes == bytes.len()
                && !got.flags.contains(ReturnFlags::CTRUNC) =>
        {
            #[cfg(not(target_os = "linux"))]
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
                .map_err(|errno| io("fcntl")(errno.into()))?;
            Ok((u32::from_le_bytes(bytes) as usize, fd))
        }
        _ => Err(failed("not one number and one descriptor".into())),
    }
}

fn left(deadline: Deadline) -> Result<Duration> {
    match deadline.left() {
        Duration::ZERO => Err(failed(format!("not done after {:?}", deadline.within()))),
        left => Ok(left.max(Duration::from_millis(1))),
    }
}

fn check_user(stream: &UnixStream) -> Result<()> {
    match is_same_user(stream) {
        Some(false) => Err(failed("another user's process is at the other end".into())),
        _ => Ok(()),
    }
}

/// Whether the process at the other end runs under this one's user. `None` where the system does not tell.
#[cfg(target_os = "linux")]
pub(crate) fn is_same_user(stream: &UnixStream) -> Option<bool> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok();
    Some(peer.is_some_and(|peer| peer.uid == rustix::process::geteuid()))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn is_same_user(_: &UnixStream) -> Option<bool> {
    None
}

fn failed(what: String) -> Error {
    Error::Group { step: STEP, what }
}

/// Without the step, for errors that get one.
fn what(error: Error) -> String {
    match error {
        Error::Group { what, .. } => what,
        other => other.to_string(),
    }
}

fn io(call: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| match error.kind() {
        std::io::ErrorKind::WouldBlock => failed(format!("{call}: no answer in time")),
        _ => failed(format!("{call}: {error}")),
    }
}
