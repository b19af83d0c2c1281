//! Byte streams, over TCP or over Unix sockets, on which no read and no write waits without a bound.

use crate::Deadline;
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::Duration,
};
#[cfg(unix)]
use std::{
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
};

/// How long a read or a write may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    /// Until then, whatever comes.
    By(Deadline),
    /// So long for every part that comes.
    Each(Duration),
    /// Until the other side closes. Only where the system tells when it dies.
    Closed,
}

impl Limit {
    fn timeout(self) -> io::Result<Option<Duration>> {
        let left = match self {
            Self::By(deadline) => deadline.left(),
            Self::Each(time) => time,
            Self::Closed => return Ok(None),
        };
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Systems round to their clock's tick, and take 0 for no limit.
        Ok(Some(left.max(Duration::from_millis(1))))
    }
}

pub(crate) enum Stream {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// Calls the same method of whichever stream it is.
macro_rules! either {
    ($self:expr, $stream:ident => $call:expr) => {
        match $self {
            Stream::Tcp($stream) => $call,
            #[cfg(unix)]
            Stream::Unix($stream) => $call,
        }
    };
}

impl Stream {
    /// Whether the machine at the other end can vanish without a word.
    pub(crate) fn can_fall_silent(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            #[cfg(unix)]
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
        })
    }

    /// Fills `buffer`. [`io::ErrorKind::UnexpectedEof`] if the other side closes before.
    pub(crate) fn read_full(&self, mut buffer: &mut [u8], limit: Limit) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read_some(buffer, limit)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => buffer = &mut buffer[bytes..],
            }
        }
        Ok(())
    }

    /// Reads what is there, at least one byte; none only at the end.
    pub(crate) fn read_some(&self, buffer: &mut [u8], limit: Limit) -> io::Result<usize> {
        loop {
            let timeout = limit.timeout()?;
            either!(self, s => s.set_read_timeout(timeout))?;
            match either!(self, s => { let mut s = s; s.read(buffer) }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map_err(timed_out),
            }
        }
    }

    pub(crate) fn write_full(&self, mut bytes: &[u8], limit: Limit) -> io::Result<()> {
        while !bytes.is_empty() {
            let timeout = limit.timeout()?;
            either!(self, s => s.set_write_timeout(timeout))?;
            match either!(self, s => { let mut s = s; s.write(bytes) }) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(timed_out(error)),
            }
        }
        Ok(())
    }

    /// Nothing more will be written. Whoever reads there sees the end after what was written.
    pub(crate) fn finish(&self) {
        // An error says that the connection has ended already.
        let _ = either!(self, s => s.shutdown(Shutdown::Write));
    }

    /// Ends every read and write on it, in other threads too.
    pub(crate) fn close(&self) {
        let _ = either!(self, s => s.shutdown(Shutdown::Both));
    }

    /// Whether whoever is at the other end runs under this process's user. `None` where that cannot be known.
    pub(crate) fn is_same_user(&self) -> Option<bool> {
        match self {
            Self::Tcp(_) => None,
            #[cfg(unix)]
            Self::Unix(stream) => crate::fds::is_same_user(stream),
        }
    }

    /// For messages about it.
    pub(crate) fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => stream
                .peer_addr()
                .map_or_else(|_| "an unknown address".into(), |a| a.to_string()),
            #[cfg(unix)]
            Self::Unix(_) => "a Unix socket".into(),
        }
    }

    fn from_tcp(stream: TcpStream) -> io::Result<Self> {
        // Some systems hand the listener's mode on to what it accepts.
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub(crate) fn connect_tcp(to: std::net::SocketAddr, within: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, within.max(Duration::from_millis(1)))?;
        // With nobody listening, a system may connect a socket to itself when it picks the same port for both ends.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Self::from_tcp(stream)
    }
}

/// Systems have two names for it.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

/// Listens, and hands out connections without waiting. A Unix socket's file goes with it.
pub(crate) enum Listener {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(UnixListener, PathBuf),
}

impl Listener {
    pub(crate) fn tcp(addresses: &[std::net::SocketAddr]) -> io::Result<Self> {
        let listener = TcpListener::bind(addresses)?;
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(listener))
    }

    /// A file that was left by a process that died is replaced; one where somebody listens is not.
    #[cfg(unix)]
    pub(crate) fn unix(path: &std::path::Path) -> io::Result<Self> {
        use std::os::unix::fs::FileTypeExt;
        let is_left_over = || {
            let refused = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
            path.symlink_metadata()
                .is_ok_and(|m| m.file_type().is_socket())
                && UnixStream::connect(path).is_err_and(refused)
        };
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_over() => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        listener.set_nonblocking(true)?;
        Ok(Self::Unix(listener, path.to_owned()))
    }

    /// Whoever has connected, if anybody has.
    pub(crate) fn accept(&self) -> Option<Stream> {
        match self {
            Self::Tcp(listener) => Stream::from_tcp(listener.accept().ok()?.0).ok(),
            #[cfg(unix)]
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().ok()?;
                stream.set_nonblocking(false).ok()?;
                Some(Stream::Unix(stream))
            }
        }
    }
}

#[cfg(unix)]
impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // If it is gone already, that is what was wanted.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_read_and_a_write_end_at_their_limit() {
        let (here, there) = UnixStream::pair().unwrap();
        let (here, there) = (Stream::Unix(here), Stream::Unix(there));
        let short = || Limit::By(Deadline::after(Duration::from_millis(20)));
        let kind = |r: io::Result<()>| r.unwrap_err().kind();
        for limit in [short(), Limit::Each(Duration::from_millis(20))] {
            assert_eq!(
                kind(here.read_full(&mut [0; 4], limit)),
                io::ErrorKind::TimedOut
            );
            let more_than_fits = vec![0; 16 << 20];
            assert_eq!(
                kind(here.write_full(&more_than_fits, limit)),
                io::ErrorKind::TimedOut
            );
        }
        there.finish();
        let ended = here.read_full(&mut [0; 4], Limit::Closed);
        assert_eq!(kind(ended), io::ErrorKind::UnexpectedEof);
    }
}
