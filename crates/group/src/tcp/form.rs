//! How a group forms at rank 0: it listens, checks whoever comes, several at once, and takes in those who prove to be ranks.
//!
//! Invariant: nothing that a stranger does makes the group fail, or holds up the others.

use super::{
    TcpConfig,
    address::Failure,
    handshake::{Door, Proven, part},
    hub::Hub,
    socket::{Listener, Stream},
};
use crate::{Deadline, proof};
use brigade_device::Result;
use std::{
    collections::VecDeque,
    sync::{Arc, mpsc},
    time::Duration,
};

/// How often rank 0 looks who has come.
const LOOK: Duration = Duration::from_millis(5);
/// Longest time for one stranger to prove who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// So many more than the ranks may be in their handshake at once; then the one that has been longest has to go.
const SPARE: usize = 64;
/// Most refusals that are told.
const MOST_NOTES: usize = 8;

/// Lets the ranks in, until all are there, the round of joining has failed, or it is too late. Gives what rank 0's user
/// should know if it does not work out.
pub(crate) fn form(hub: &Arc<Hub>, config: &TcpConfig, deadline: Deadline) -> Result<String> {
    let door = Door {
        secret: config.secret.clone(),
        session: proof::random()?,
    };
    let listener = listen(config, deadline)?;
    let (tell, told) = mpsc::channel();
    let mut guests = Guests {
        inside: VecDeque::new(),
        next: 0,
        most: config.size + SPARE,
    };
    let mut notes = Vec::new();
    while !hub.has_ended(0) && !deadline.passed() {
        for stream in std::iter::from_fn(|| listener.accept()).take(guests.most) {
            guests.check(stream, &door, deadline, &tell);
        }
        let first = told.recv_timeout(LOOK).ok();
        for (guest, result) in first.into_iter().chain(told.try_iter()) {
            match result {
                Checked::Proven(proven) if guests.leave(guest) => hub.admit(*proven),
                // It had to go before anybody heard that it is one of ours: it will come again.
                Checked::Proven(_) => {}
                Checked::Note(note) if notes.len() < MOST_NOTES => notes.push(note),
                Checked::Note(_) => {}
                Checked::Left => {
                    guests.leave(guest);
                }
            }
        }
    }
    for (_, stream) in guests.inside {
        stream.close();
    }
    Ok(match notes.len() {
        0 => String::new(),
        _ => format!("; refused: {}", notes.join(", ")),
    })
}

/// What a guest turned out to be.
enum Checked {
    Proven(Box<Proven>),
    /// Somebody who is not taken; for rank 0's user.
    Note(String),
    /// And it has left.
    Left,
}

/// Those who have connected and proved nothing yet.
struct Guests {
    inside: VecDeque<(u64, Stream)>,
    next: u64,
    most: usize,
}

impl Guests {
    /// Whether it was still inside: who was not has lost its connection.
    fn leave(&mut self, guest: u64) -> bool {
        let place = self.inside.iter().position(|(number, _)| *number == guest);
        place.and_then(|i| self.inside.remove(i)).is_some()
    }

    fn check(
        &mut self,
        stream: Stream,
        door: &Door,
        deadline: Deadline,
        tell: &mpsc::Sender<(u64, Checked)>,
    ) {
        if self.inside.len() >= self.most
            && let Some((_, oldest)) = self.inside.pop_front()
        {
            oldest.close();
        }
        // A system that has no handle or thread left for a guest has none: the guest will try again.
        let Ok(handle) = stream.try_clone() else {
            return;
        };
        let guest = self.next;
        self.next += 1;
        let (door, tell) = (door.clone(), tell.clone());
        let deadline = Deadline::after(deadline.left().min(HANDSHAKE));
        let checking = std::thread::Builder::new()
            .name("brigade-handshake".into())
            .spawn(move || {
                // Nobody listens any more once the group has formed.
                let tell = |what| drop(tell.send((guest, what)));
                match door.check(stream, deadline) {
                    Ok(proven) => tell(Checked::Proven(Box::new(proven))),
                    Err(turned) => {
                        if let Some(note) = turned.note {
                            tell(Checked::Note(note));
                        }
                        if let Some((stream, why)) = turned.parting {
                            part(&stream, &why);
                        }
                        tell(Checked::Left);
                    }
                }
            });
        if checking.is_ok() {
            self.inside.push_back((guest, handle));
        }
    }
}

/// Listens as soon as the address is free.
fn listen(config: &TcpConfig, deadline: Deadline) -> Result<Listener> {
    loop {
        let last = match config.address.listen(config.secret.is_some(), deadline) {
            Ok(listener) => return Ok(listener),
            Err(Failure::Ever(error)) => return Err(error),
            Err(Failure::Now(last)) => last,
        };
        let left = deadline.left();
        if left.is_zero() {
            let (address, within) = (&config.address, deadline.within());
            return Err(super::joining(format!(
                "rank 0 cannot listen at {address} after {within:?}: {last}"
            )));
        }
        // tidy: sleeps because nothing tells when another group has left the address
        std::thread::sleep(Duration::from_millis(20).min(left));
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::tcp::{Address, handshake};
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_rank_that_strangers_crowd_out_is_not_admitted_and_comes_again() {
        let config = TcpConfig::new(1, 2, Address::Unix("/not/looked/at".into()));
        let door = Door {
            secret: None,
            session: proof::random().unwrap(),
        };
        let (tell, told) = mpsc::channel();
        let mut guests = Guests {
            inside: VecDeque::new(),
            next: 0,
            most: 3,
        };
        let enter = |guests: &mut Guests| {
            let (here, there) = UnixStream::pair().unwrap();
            let deadline = Deadline::after(LONG);
            guests.check(Stream::Unix(here), &door, deadline, &tell);
            Stream::Unix(there)
        };
        let rank = enter(&mut guests);
        std::thread::scope(|s| {
            let joined = s.spawn(|| handshake::join(&rank, &config, Deadline::after(LONG)));
            let (guest, checked) = told.recv_timeout(LONG).unwrap();
            assert!(matches!(checked, Checked::Proven(_)));
            let _strangers = [(); 3].map(|()| enter(&mut guests));
            assert!(matches!(joined.join().unwrap(), Err(Failure::Now(_))));
            assert!(!guests.leave(guest), "its connection is closed");
            assert!(guests.leave(guest + 1), "this one came after it");
            assert!(!guests.leave(guest + 1), "and has left");
        });
    }
}
