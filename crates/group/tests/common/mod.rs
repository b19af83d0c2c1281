//! What the tests of groups share.
#![allow(clippy::unwrap_used, dead_code)]

use brigade_group::{Address, Secret, TcpConfig, TcpGroup};
use std::{
    net::TcpListener,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

pub const LONG: Duration = Duration::from_secs(20);
pub const SHORT: Duration = Duration::from_millis(150);
/// How much later than its deadline a wait may end.
pub const SLACK: Duration = Duration::from_secs(1);

static NEXT: AtomicUsize = AtomicUsize::new(0);

/// A port where nobody listens, outside of those that systems give to whoever connects.
pub fn free_port() -> u16 {
    for _ in 0..1000 {
        let next = std::process::id() as usize * 131 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + (next % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}

pub fn tcp() -> Address {
    Address::tcp("127.0.0.1", free_port())
}

pub fn unix() -> Address {
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("brigade-test-{}-{next}", std::process::id());
    Address::Unix(std::env::temp_dir().join(name))
}

/// One address of each kind that this system has.
pub fn addresses() -> Vec<Address> {
    if cfg!(unix) {
        vec![tcp(), unix()]
    } else {
        vec![tcp()]
    }
}

pub fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.repeat(16)).unwrap())
}

pub fn config(rank: usize, size: usize, address: &Address) -> TcpConfig {
    let mut config = TcpConfig::new(rank, size, address.clone());
    config.join_within = LONG;
    config
}

/// Runs `f` for every one of `all` at once; results in their order.
pub fn at_once<A: Sync, T: Send>(all: &[A], f: impl Fn(&A) -> T + Sync) -> Vec<T> {
    std::thread::scope(|s| {
        let threads: Vec<_> = all.iter().map(|a| s.spawn(|| f(a))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A whole group, in rank order.
pub fn group(size: usize, address: &Address) -> Vec<TcpGroup> {
    let configs: Vec<_> = (0..size).map(|r| config(r, size, address)).collect();
    at_once(&configs, |c| TcpGroup::join(c).unwrap())
}

/// What is wrong, for every configuration; all at once.
pub fn refusals(configs: &[TcpConfig]) -> Vec<String> {
    at_once(configs, |c| match TcpGroup::join(c) {
        Ok(group) => format!("{group:?} joined"),
        Err(error) => error.to_string(),
    })
}

/// Whoever speaks to a group without being a rank.
pub mod raw {
    use super::*;
    use brigade_group::frame::{Body, Frame, HEADER_BYTES, Header, Hello, Sender};
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    pub trait Both: Read + Write + Send {}
    impl<T: Read + Write + Send> Both for T {}

    /// Connects as soon as somebody listens.
    pub fn connect(address: &Address) -> Box<dyn Both> {
        let start = std::time::Instant::now();
        while start.elapsed() < LONG {
            match address {
                Address::Tcp { host, port } => {
                    if let Ok(stream) = TcpStream::connect((host.as_str(), *port))
                        && stream.local_addr().unwrap() != stream.peer_addr().unwrap()
                    {
                        stream.set_read_timeout(Some(LONG)).unwrap();
                        return Box::new(stream);
                    }
                }
                #[cfg(unix)]
                Address::Unix(path) => {
                    if let Ok(stream) = std::os::unix::net::UnixStream::connect(path) {
                        stream.set_read_timeout(Some(LONG)).unwrap();
                        return Box::new(stream);
                    }
                }
                #[cfg(not(unix))]
                Address::Unix(_) => panic!("no Unix sockets here"),
            }
            std::thread::yield_now();
        }
        panic!("nobody listens at {address}");
    }

    pub fn hello(rank: u32, size: u32, has_secret: bool) -> Vec<u8> {
        let nonce = [7; 32];
        Frame::alone(Body::Hello(Hello {
            rank,
            size,
            has_secret,
            nonce,
        }))
        .encode()
    }

    /// The bytes of the next frame.
    pub fn next(stream: &mut dyn Both, from: Sender) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        stream.read_exact(&mut bytes).unwrap();
        let header = Header::parse(bytes.as_slice().try_into().unwrap(), from, 8).unwrap();
        bytes.resize(HEADER_BYTES + header.bytes, 0);
        stream.read_exact(&mut bytes[HEADER_BYTES..]).unwrap();
        bytes
    }
}
