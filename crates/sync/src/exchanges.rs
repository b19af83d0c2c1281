//! Exchanges of a slot of the low-latency exchange, as they are issued: each is sent, and received later or never.

use crate::Half;
use brigade_device::{Error, Result};

/// The exchanges of one slot. Each takes the next of the two halves of the slot's [`Area`](crate::Area), whose
/// [`CreditRing`](crate::CreditRing) tells of what was sent and of what was taken.
///
/// Credits are given when the slot is used again: by then what came has been packed, or was given up by sending again instead of receiving.
/// Nobody reads that, and a peer writes there again behind what it wrote itself.
///
/// ```
/// use brigade_sync::Exchanges;
/// let mut exchanges = Exchanges::default();
/// let (first, half) = exchanges.begin();
/// assert_eq!(exchanges.receive(first)?, half);
/// let (second, other) = exchanges.begin();
/// assert_ne!(other, half);
/// let third = exchanges.begin();
/// assert_eq!(third.1, half);
/// assert!(exchanges.receive(second).is_err(), "it was given up");
/// # Ok::<_, brigade_device::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Exchanges {
    last: u64,
    open: bool,
}

impl Exchanges {
    fn half(ticket: u64) -> Half {
        Half::of(ticket as u32)
    }

    /// Begins the next one: its number, and where its rows go. The one before is over.
    pub fn begin(&mut self) -> (u64, Half) {
        self.last += 1;
        self.open = true;
        (self.last, Self::half(self.last))
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
