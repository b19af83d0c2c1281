//! A rank's place in its group, and in the groups that come after it when ranks are lost.

use crate::{Error, Result};
use brigade::{
    Bootstrap,
    group::{Address, TcpConfig, TcpGroup, ThreadGroup},
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};

/// Where a rank sits.
pub trait Seat: Send {
    /// The present group.
    fn group(&self) -> &dyn Bootstrap;

    /// Takes a place in a new group, without those ranks of the present one: the others keep their order. All who are left call it with
    /// the same ranks.
    ///
    /// # Errors
    /// [`Error::Brigade`] if the others do not come.
    fn regroup(&mut self, lost: &[usize]) -> Result<()>;
}

/// A thread's.
pub(super) struct ThreadSeat {
    group: ThreadGroup,
    rounds: usize,
    later: Arc<Later>,
}

/// How many groups there were before, and who of the last of them is lost.
type Which = (usize, Vec<usize>);

/// The groups that come later. Who is first makes a group for all.
#[derive(Default)]
struct Later(Mutex<HashMap<Which, Vec<Option<ThreadGroup>>>>);

impl ThreadSeat {
    /// One for each of so many ranks.
    pub(super) fn all(ranks: usize) -> Vec<Self> {
        let later = Arc::<Later>::default();
        let seat = |group| Self {
            group,
            rounds: 0,
            later: Arc::clone(&later),
        };
        brigade::group::threads(ranks)
            .into_iter()
            .map(seat)
            .collect()
    }
}

impl Seat for ThreadSeat {
    fn group(&self) -> &dyn Bootstrap {
        &self.group
    }

    fn regroup(&mut self, lost: &[usize]) -> Result<()> {
        self.rounds += 1;
        let size = self.group.size().saturating_sub(lost.len());
        let before = lost.iter().filter(|&&rank| rank < self.group.rank());
        let rank = self.group.rank() - before.count();
        let mut later = self.later.0.lock();
        let seats = later
            .entry((self.rounds, lost.to_vec()))
            .or_insert_with(|| {
                brigade::group::threads(size)
                    .into_iter()
                    .map(Some)
                    .collect()
            });
        let group = seats.get_mut(rank).and_then(Option::take);
        self.group = group.ok_or_else(|| Error::field("lost", format!("{lost:?}"), "others"))?;
        Ok(())
    }
}

/// A process's.
pub struct TcpSeat {
    config: TcpConfig,
    group: TcpGroup,
    rounds: u16,
}

impl TcpSeat {
    /// Joins the group that the environment names.
    ///
    /// # Errors
    /// As [`TcpConfig::from_env`] and [`TcpGroup::join`].
    pub fn from_env() -> Result<Self> {
        let config = TcpConfig::from_env()?;
        let group = TcpGroup::join(&config)?;
        Ok(Self {
            config,
            group,
            rounds: 0,
        })
    }
}

impl Seat for TcpSeat {
    fn group(&self) -> &dyn Bootstrap {
        &self.group
    }

    fn regroup(&mut self, lost: &[usize]) -> Result<()> {
        self.rounds += 1;
        // Beside the address before, where nobody else listens.
        let address = match &self.config.address {
            Address::Unix(path) => {
                let mut name = path.as_os_str().to_owned();
                name.push("+");
                Address::Unix(name.into())
            }
            Address::Tcp { host, port } => Address::tcp(host, port.wrapping_add(self.rounds)),
        };
        self.config = self.config.without(lost, address)?;
        self.group = TcpGroup::join(&self.config)?;
        Ok(())
    }
}
