//! Exchanges of a slot of the low-latency exchange, as they are issued: each is sent, and received later or never.

use crate::Half;
use brigade_device::{Error, Result};

/// The exchanges of one slot. Each takes the next of the two halves of the slot's [`Area`](crate::Area), whose
/// [`CreditRing`](crate::CreditRing) tells of what was sent and of what was taken.
///
/// Whoever sends again before it has received gives the exchange between up, and tells its peers that it has taken what they sent for
/// it: nobody reads that, and a peer writes there again behind what it wrote itself.
///
/// ```
/// use brigade_sync::Exchanges;
/// let mut exchanges = Exchanges::default();
/// let first = exchanges.begin();
/// assert_eq!(exchanges.receive(first.ticket)?, first.half);
/// let second = exchanges.begin();
/// assert_ne!(second.half, first.half);
/// let third = exchanges.begin();
/// assert_eq!(third.given_up, Some(second.half));
/// assert!(exchanges.receive(second.ticket).is_err());
/// # Ok::<_, brigade_device::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Exchanges {
    last: u64,
    open: bool,
}

/// An exchange that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Its number.
    pub ticket: u64,
    /// Where its rows go.
    pub half: Half,
    /// The half of the one before, if that is given up.
    pub given_up: Option<Half>,
}

impl Exchanges {
    fn half(ticket: u64) -> Half {
        Half::of(ticket as u32)
    }

    /// Begins the next one.
    pub fn begin(&mut self) -> Begun {
        let given_up = self.open.then(|| Self::half(self.last));
        self.last += 1;
        self.open = true;
        Begun {
            ticket: self.last,
            half: Self::half(self.last),
            given_up,
        }
    }

    /// Receives one, and says where its rows are.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was received before, or given up.
    pub fn receive(&mut self, ticket: u64) -> Result<Half> {
        if ticket != self.last || !std::mem::take(&mut self.open) {
            let want = "the last one of its slot, to be received once";
            return Err(Error::invalid("slot", "an exchange that is over", want));
        }
        Ok(Self::half(ticket))
    }
}
