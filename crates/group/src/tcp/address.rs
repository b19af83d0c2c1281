//! Where rank 0 is found.

use super::socket::{Listener, Stream};
use crate::Deadline;
use brigade_device::{Error, Reason, Result};
use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    path::PathBuf,
    str::FromStr,
    sync::mpsc,
    time::Duration,
};

/// Longest try to reach one address, so that the next one has its turn.
const TRY: Duration = Duration::from_secs(2);

/// Where rank 0 listens: `host:port`, or `unix:/path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A name or number of a machine, and a port.
    Tcp {
        /// As in MASTER_ADDR.
        host: String,
        /// As in MASTER_PORT.
        port: u16,
    },
    /// A Unix socket, for ranks of one machine. Where the system can tell, only processes of one user get in; elsewhere
    /// put it into a folder that only that user may enter.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        match port.parse() {
            Ok(port) if !host.is_empty() => Ok(Self::tcp(host, port)),
            _ => Err(Error::invalid(
                "address",
                format!("{text:?}"),
                "host:port or unix:/path",
            )),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// A machine's port. An IPv6 number may stand in brackets.
    pub fn tcp(host: &str, port: u16) -> Self {
        let number = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = number.unwrap_or(host).to_owned();
        Self::Tcp { host, port }
    }

    /// # Errors
    /// [`Error::Invalid`] for one that nobody can listen at, whatever happens.
    pub(crate) fn check_form(&self) -> Result<()> {
        let wrong = |want: String| Err(Error::invalid("address", self, want));
        match self {
            Self::Tcp { host, port } if host.is_empty() || *port == 0 => {
                wrong("a host and a port, 1 to 65535".into())
            }
            Self::Unix(path) if path.as_os_str().is_empty() => wrong("a path".into()),
            #[cfg(unix)]
            Self::Unix(path) => match std::os::unix::net::SocketAddr::from_pathname(path) {
                Ok(_) => Ok(()),
                Err(error) => wrong(error.to_string()),
            },
            _ => Ok(()),
        }
    }

    /// What listening failed with; for good, if the place for the socket is missing or not this user's.
    #[cfg(unix)]
    fn cannot_listen(&self, error: io::Error) -> Failure {
        use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem};
        match error.kind() {
            NotFound | NotADirectory | PermissionDenied | ReadOnlyFilesystem => {
                let want = format!("a folder that a socket can be made in: {error}");
                Failure::Ever(Error::invalid("address", self, want))
            }
            _ => error.into(),
        }
    }

    /// Starts to listen.
    pub(crate) fn listen(&self, has_secret: bool, deadline: Deadline) -> Result<Listener, Failure> {
        match self {
            Self::Tcp { host, port } => {
                let found = resolve(host, *port, deadline)?;
                self.check(&found, has_secret)?;
                Ok(Listener::tcp(&found)?)
            }
            #[cfg(unix)]
            Self::Unix(path) => Listener::unix(path).map_err(|error| self.cannot_listen(error)),
            #[cfg(not(unix))]
            Self::Unix(_) => Err(no_unix()),
        }
    }

    /// Reaches whoever listens there.
    pub(crate) fn connect(&self, has_secret: bool, deadline: Deadline) -> Result<Stream, Failure> {
        match self {
            Self::Tcp { host, port } => {
                let found = resolve(host, *port, deadline)?;
                self.check(&found, has_secret)?;
                let mut last = Failure::Now("the name has no address".into());
                for address in found {
                    match Stream::connect_tcp(address, deadline.left().min(TRY)) {
                        Ok(stream) => return Ok(stream),
                        Err(error) => last = error.into(),
                    }
                }
                Err(last)
            }
            #[cfg(unix)]
            Self::Unix(path) => Ok(Stream::Unix(std::os::unix::net::UnixStream::connect(path)?)),
            #[cfg(not(unix))]
            Self::Unix(_) => Err(no_unix()),
        }
    }

    fn check(&self, found: &[SocketAddr], has_secret: bool) -> Result<(), Failure> {
        let open = |a: &&SocketAddr| !a.ip().to_canonical().is_loopback();
        match found.iter().find(open) {
            Some(open) if !has_secret => Err(Failure::Ever(
                Reason::new(
                    "no-secret",
                    format!("{self} ({}) can be reached from other machines, and there is no secret", open.ip()),
                    "give all ranks the same BRIGADE_SECRET or BRIGADE_SECRET_FILE, or take a loopback address or a Unix socket",
                )
                .into(),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(not(unix))]
fn no_unix() -> Failure {
    Failure::Ever(
        Reason::new(
            "no-unix-socket",
            "this system has no Unix sockets",
            "take a loopback address",
        )
        .into(),
    )
}

/// Why rank 0 could not be reached, or could not listen.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It may work a moment later.
    Now(String),
    /// It will not.
    Ever(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Now(error.to_string())
    }
}

/// The addresses of a name. The system's resolver knows no deadline, so it runs in a thread that may outlive this call.
fn resolve(host: &str, port: u16, deadline: Deadline) -> Result<Vec<SocketAddr>, Failure> {
    if let Ok(number) = host.parse::<IpAddr>() {
        return Ok(vec![(number, port).into()]);
    }
    let (tell, told) = mpsc::channel();
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("brigade-resolve".into())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs();
            // Nobody listens any more if it took too long.
            let _ = tell.send(found.map(|all| all.collect()));
        })?;
    match told.recv_timeout(deadline.left()) {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(Failure::Now(format!("{host} has no address: {error}"))),
        Err(_) => Err(Failure::Now(format!("no answer for the name {host}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, want) in [
            ("localhost:29500", Address::tcp("localhost", 29500)),
            ("10.0.0.1:1", Address::tcp("10.0.0.1", 1)),
            ("[::1]:29500", Address::tcp("::1", 29500)),
            ("unix:/run/x", Address::Unix("/run/x".into())),
        ] {
            let read: Address = text.parse().unwrap();
            assert_eq!(read, want);
            assert_eq!(read.to_string(), text);
        }
        for wrong in ["", "host", ":1", "host:", "host:65536", "host:-1", "unix:"] {
            let error = wrong.parse::<Address>().unwrap_err();
            assert!(
                error
                    .to_string()
                    .ends_with("wanted host:port or unix:/path")
            );
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_address_that_can_never_be_is_told_at_once() {
        let long = "y".repeat(300);
        for path in ["", "/tmp/a\0b", &long] {
            let refused = Address::Unix(path.into()).check_form();
            let named = matches!(
                refused,
                Err(Error::Invalid {
                    field: "address",
                    ..
                })
            );
            assert!(named, "{path:?}: {refused:?}");
        }
        let soon = Deadline::after(Duration::from_secs(5));
        let nowhere = Address::Unix("/no/such/folder/socket".into());
        nowhere.check_form().unwrap();
        let listened = nowhere.listen(false, soon).err();
        assert!(matches!(listened, Some(Failure::Ever(_))), "{listened:?}");
        // Rank 0 may make the folder yet.
        let reached = nowhere.connect(false, soon).err();
        assert!(matches!(reached, Some(Failure::Now(_))), "{reached:?}");
    }

    #[test]
    fn an_address_that_others_can_reach_needs_a_secret() {
        let soon = Deadline::after(Duration::from_secs(5));
        for host in [
            "0.0.0.0",
            "::",
            "192.0.2.1",
            "2001:db8::1",
            "::ffff:192.0.2.1",
        ] {
            let address = Address::tcp(host, 1);
            let tries = [
                address.listen(false, soon).err(),
                address.connect(false, soon).err(),
            ];
            for failure in tries {
                let Some(Failure::Ever(Error::Unsupported(reason))) = failure else {
                    panic!("{host}: {failure:?}");
                };
                assert_eq!(reason.code, "no-secret");
            }
        }
        for host in [
            "127.0.0.1",
            "127.8.9.1",
            "::1",
            "::ffff:127.0.0.1",
            "localhost",
        ] {
            let failure = Address::tcp(host, 1).connect(false, soon).err();
            assert!(
                matches!(failure, Some(Failure::Now(_))),
                "{host}: {failure:?}"
            );
        }
    }
}
