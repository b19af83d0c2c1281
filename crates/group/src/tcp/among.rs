//! A group of sockets among ranks that know each other already.

use super::{Address, TcpConfig, TcpGroup};
use crate::{Deadline, Secret, agree, machine, messages, proof};
use brigade_device::{Bootstrap, Error, Reason, Result};
use std::{
    net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket},
    time::Duration,
};

const STEP: &str = "connecting ranks";

/// Bytes of the secret that rank 0 draws.
const SECRET_BYTES: usize = 32;

/// Where rank 0 will listen, and what keeps that place.
struct Place {
    address: Address,
    #[cfg(unix)]
    _folder: Option<crate::folder::Folder>,
}

impl TcpGroup {
    /// The ranks of any group, connected for as long as they keep this: on one machine by a Unix socket in a folder that only this
    /// process's user may enter; else at a free port of rank 0's machine, with a secret that goes through `boot`. `at` is where the others
    /// reach that machine; without it, it is the address from which this machine reaches others (its route says so).
    ///
    /// ```
    /// use brigade_device::Bootstrap;
    /// use std::time::Duration;
    ///
    /// let within = Duration::from_secs(10);
    /// std::thread::scope(|s| {
    ///     for boot in brigade_group::threads(3) {
    ///         s.spawn(move || {
    ///             let group = brigade_group::TcpGroup::among(&boot, None, within).unwrap();
    ///             group.tell(&[boot.rank() as u8]).unwrap();
    ///             let mut heard = Vec::new();
    ///             while heard.len() < 2 {
    ///                 heard.extend(group.heard(within));
    ///             }
    ///             assert!(heard.iter().all(|(rank, what)| *what == [*rank as u8]));
    ///             group.all_gather(&[], within).unwrap();
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] (`no-address`) if rank 0 knows none; otherwise as [`join`](Self::join).
    pub fn among(boot: &dyn Bootstrap, at: Option<IpAddr>, within: Duration) -> Result<Self> {
        let deadline = Deadline::after(within);
        // A machine that has no name may be any.
        let own = machine::identity().unwrap_or_default();
        let names = messages(boot, &own, deadline.left())?;
        let together = !names[0].is_empty() && names.iter().all(|name| *name == names[0]);
        let drawn = match boot.rank() {
            0 => proof::random::<SECRET_BYTES>().and_then(|secret| {
                let place = Place::find(together, at)?;
                Ok(Some((secret, place)))
            }),
            _ => Ok(None),
        };
        let own = drawn.as_ref().err().cloned();
        let drawn = agree(boot, STEP, drawn, deadline.left()).map_err(|all| own.unwrap_or(all))?;
        let message = drawn.as_ref().map_or_else(Vec::new, |(secret, place)| {
            [&secret[..], place.address.to_string().as_bytes()].concat()
        });
        let all = messages(boot, &message, deadline.left())?;
        let (secret, address) = all[0]
            .split_at_checked(SECRET_BYTES)
            .ok_or_else(|| Error::invalid("message", all[0].len(), "a secret and an address"))?;
        let address: Address = String::from_utf8_lossy(address).parse()?;
        let config = TcpConfig {
            secret: Some(Secret::new(secret)?),
            join_within: deadline.left(),
            ..TcpConfig::new(boot.rank(), boot.size(), address)
        };
        agree(boot, STEP, Self::join(&config), deadline.left())
    }
}

impl Place {
    #[cfg(unix)]
    fn find(together: bool, at: Option<IpAddr>) -> Result<Self> {
        if !together {
            return Ok(Self {
                address: free_port(at.map_or_else(route, Ok)?)?,
                _folder: None,
            });
        }
        let folder = crate::folder::Folder::new().map_err(refused("make a folder for a socket"))?;
        Ok(Self {
            address: Address::Unix(folder.path().join("ranks")),
            _folder: Some(folder),
        })
    }

    #[cfg(not(unix))]
    fn find(together: bool, at: Option<IpAddr>) -> Result<Self> {
        let at = match at {
            Some(at) => at,
            None if together => Ipv4Addr::LOCALHOST.into(),
            None => route()?,
        };
        Ok(Self {
            address: free_port(at)?,
        })
    }
}

/// A port that nobody has. Another process may take it before rank 0 listens there, which then says so.
fn free_port(at: IpAddr) -> Result<Address> {
    let found = TcpListener::bind((at, 0)).and_then(|listener| listener.local_addr());
    let found = found.map_err(refused("find a free port"))?;
    Ok(Address::tcp(&at.to_string(), found.port()))
}

/// The address of this machine that its packets to others bear. Nothing is sent to find it: the other end is of a block of addresses
/// that is kept for documentation (RFC 5737), and stands for all that are not this machine's.
fn route() -> Result<IpAddr> {
    let bound = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
    let found = bound.and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    match found {
        Ok(address) if !address.ip().is_loopback() && !address.ip().is_unspecified() => {
            Ok(address.ip())
        }
        _ => Err(Reason::new(
            "no-address",
            "this machine has no route to others, so none of its addresses is theirs to reach it at",
            "say which address it is",
        )
        .into()),
    }
}

fn refused(call: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::Backend {
        call,
        code: error.raw_os_error().unwrap_or(0).into(),
        source: Some(std::sync::Arc::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    const LONG: Duration = Duration::from_secs(20);

    /// A rank of a machine of its own, as far as others are told.
    struct Elsewhere<B> {
        boot: B,
        told: Mutex<bool>,
    }

    impl<B: Bootstrap> Bootstrap for Elsewhere<B> {
        fn rank(&self) -> usize {
            self.boot.rank()
        }
        fn size(&self) -> usize {
            self.boot.size()
        }
        fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
            // The first message is the machine's name.
            if std::mem::replace(&mut self.told.lock(), true) {
                return self.boot.all_gather(mine, within);
            }
            let other = format!("machine {}", self.rank());
            self.boot.all_gather(other.as_bytes(), within)
        }
    }

    #[test]
    fn ranks_of_several_machines_meet_at_a_port_with_a_secret() {
        std::thread::scope(|scope| {
            for boot in crate::threads(3) {
                scope.spawn(move || {
                    let boot = Elsewhere {
                        boot,
                        told: Mutex::new(false),
                    };
                    let at = Some(Ipv4Addr::LOCALHOST.into());
                    let group = TcpGroup::among(&boot, at, LONG).unwrap();
                    assert_eq!((group.rank(), group.size()), (boot.rank(), 3));
                    let all = group.all_gather(&[boot.rank() as u8], LONG).unwrap();
                    assert_eq!(all, [[0], [1], [2]]);
                });
            }
        });
    }

    #[test]
    fn places_are_where_others_can_reach_them() {
        let elsewhere = Place::find(false, Some(Ipv4Addr::LOCALHOST.into())).unwrap();
        let tcp = |address: &Address| match address {
            Address::Tcp { host, port } => Some((host.clone(), *port > 0)),
            Address::Unix(_) => None,
        };
        assert_eq!(tcp(&elsewhere.address), Some(("127.0.0.1".into(), true)));
        #[cfg(unix)]
        assert_eq!(tcp(&Place::find(true, None).unwrap().address), None);
        // Where this machine has a route, it is no loopback.
        match Place::find(false, None) {
            Ok(place) => assert!(tcp(&place.address).is_some_and(|(host, _)| host != "127.0.0.1")),
            Err(Error::Unsupported(reason)) => assert_eq!(reason.code, "no-address"),
            Err(other) => panic!("{other}"),
        }
    }
}
