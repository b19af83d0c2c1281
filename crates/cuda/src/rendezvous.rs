//! How ranks find each other's GPU memory.

use crate::{CudaDevice, Missing, Pages, Symmetric, devices, link};
use brigade_device::{Bootstrap, CommConfig, Device, Error, Result};
use brigade_group::{Sharing, agree, messages, vote};
use brigade_plan::{
    Entries, Table,
    crossover::{Gpus, Links},
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// All ranks want the same.
pub(crate) fn vote_on(boot: &dyn Bootstrap, config: &CommConfig) -> Result<()> {
    let voted = format!("{config:?}");
    let within = config.first_deadline;
    vote(boot, "join: configuration", voted.as_bytes(), within)
}

/// What the GPUs of all ranks are, as all ranks know it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hardware {
    pub(crate) gpus: Gpus,
    /// How many GPUs the ranks have.
    pub(crate) distinct: usize,
    /// Most ranks that have the same GPU.
    pub(crate) sharing: usize,
    /// Whether every GPU has the kernels for [`OverlapMode::Tiles`](brigade_device::OverlapMode::Tiles), and no rank a hook, which
    /// tiles do not ask.
    pub(crate) tiles: bool,
}

impl Hardware {
    /// Every rank shows its GPU, and then how it reaches the others'.
    pub(crate) fn of(boot: &dyn Bootstrap, device: &CudaDevice, within: Duration) -> Result<Self> {
        const STEP: &str = "join: GPUs";
        let own = device.info().ordinal as usize;
        let here = agree(boot, STEP, devices(), within)?;
        let uuid = here.get(own).map_or([0; 16], |gpu| gpu.uuid);
        let tiles = device.opened.kernels.tiles.is_some() && device.inject.is_none();
        let shown = [&uuid[..], &[tiles.into()]].concat();
        let uuids = messages(boot, &shown, within)?;
        let there = uuids
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != boot.rank())
            .map(|(_, uuid)| here.iter().position(|gpu| uuid.starts_with(&gpu.uuid)));
        let links = agree(boot, STEP, links(own, there), within)?;
        let views = messages(boot, view(&device.info().name, links).as_bytes(), within)?;
        let mut each: BTreeMap<_, usize> = BTreeMap::new();
        for uuid in &uuids {
            *each.entry(uuid).or_default() += 1;
        }
        Ok(Self {
            gpus: together(&views, &device.info().name, links),
            distinct: each.len(),
            sharing: each.values().copied().max().unwrap_or(1),
            tiles: uuids.iter().all(|uuid| uuid.last() == Some(&1)),
        })
    }

    /// Whether some ranks have the same GPU.
    pub(crate) fn shares(&self) -> bool {
        self.sharing > 1
    }

    /// The numbers that decide on plans, the same on all ranks: those that the user gave this one, else those of this build.
    pub(crate) fn table(
        &self,
        boot: &dyn Bootstrap,
        own: &Entries,
        within: Duration,
    ) -> Result<Table> {
        const STEP: &str = "join: tables";
        let table = agree(boot, STEP, Table::cuda(&self.gpus, own), within)?;
        let voted = format!("tables {:016x} for {:?}", table.digest(), self.gpus);
        vote(boot, STEP, voted.as_bytes(), within).map_err(|error| match error {
            Error::Group { step, what } => Error::Group {
                step,
                what: format!(
                    "{what}; all ranks need the same build, and the same CudaConfig::entries"
                ),
            },
            other => other,
        })?;
        Ok(table)
    }
}

/// How GPU `own` reaches those of the other ranks: their numbers here, as far as this process sees them.
fn links(own: usize, others: impl Iterator<Item = Option<usize>>) -> Result<Links, Missing> {
    let mut all = Links::Nvlink;
    for other in others {
        match other {
            Some(other) if other == own => return Ok(Links::Shared),
            Some(other) => {
                let link = link(own, other)?;
                if !(link.access && link.native_atomics) && all == Links::Nvlink {
                    all = Links::Pcie;
                }
            }
            None => all = Links::Unknown,
        }
    }
    Ok(all)
}

/// What a rank shows of its GPU.
fn view(model: &str, links: Links) -> String {
    format!("{model} by {links}")
}

/// What all ranks have in common, of which this one has this GPU: nothing but their number, where they differ.
fn together(views: &[Vec<u8>], model: &str, links: Links) -> Gpus {
    let mine = view(model, links);
    let alike = views.iter().all(|view| view == mine.as_bytes());
    Gpus {
        model: alike.then(|| model.to_owned()),
        links: if alike { links } else { Links::Unknown },
        ranks: views.len(),
    }
}

const STEP: &str = "join: device memory";

/// Makes this rank's part of `bytes` bytes, and maps everybody's. All ranks succeed, or all fail.
pub(crate) fn exchange(
    boot: &dyn Bootstrap,
    device: &CudaDevice,
    sharing: &Sharing,
    bytes: usize,
    within: Duration,
) -> Result<Arc<Symmetric>> {
    let made = Pages::new(device, bytes);
    let own = agree(boot, STEP, made, within)?;
    let parts = all_parts(boot, device, sharing, &own, within);
    let mapped = parts.and_then(|parts| {
        let all = Symmetric::map(&parts, &[device])?;
        let own = all.base() + (boot.rank() * all.stride()) as u64;
        device.card.zero_now(own, all.stride())?;
        Ok(all)
    });
    // Nobody writes flags before everybody's memory is zero.
    agree(boot, STEP, mapped, within)
}

/// Every rank's pages, by descriptors: their numbers where all ranks are threads of one process, else the descriptors
/// themselves, through a socket.
#[cfg(unix)]
fn all_parts(
    boot: &dyn Bootstrap,
    device: &CudaDevice,
    sharing: &Sharing,
    own: &Arc<Pages>,
    within: Duration,
) -> Result<Vec<Arc<Pages>>> {
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
    let descriptor = agree(boot, STEP, own.export(), within)?;
    let import = |rank: usize, fd: BorrowedFd<'_>| {
        if rank == boot.rank() {
            Ok(Arc::clone(own))
        } else {
            Pages::import(device, fd, own.bytes())
        }
    };
    if !sharing.one_process() {
        let all = brigade_group::exchange_fds(boot, descriptor.as_fd(), within)?;
        return all
            .iter()
            .enumerate()
            .map(|(rank, fd)| import(rank, fd.as_fd()))
            .collect();
    }
    let number = descriptor.as_raw_fd().to_le_bytes();
    let numbers = messages(boot, &number, within)?;
    let taken = numbers.iter().enumerate().map(|(rank, number)| {
        let number = number.as_slice().try_into().map_err(|_| Error::Group {
            step: STEP,
            what: format!("rank {rank} sent {} bytes instead of 4", number.len()),
        })?;
        // SAFETY: a descriptor of this process, which its owner keeps open until all ranks have agreed below.
        import(rank, unsafe {
            BorrowedFd::borrow_raw(i32::from_le_bytes(number))
        })
    });
    let taken: Result<Vec<_>> = taken.collect();
    agree(boot, STEP, taken, within)
}

#[cfg(not(unix))]
fn all_parts(
    _: &dyn Bootstrap,
    _: &CudaDevice,
    _: &Sharing,
    own: &Arc<Pages>,
    _: Duration,
) -> Result<Vec<Arc<Pages>>> {
    Ok(vec![Arc::clone(own)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_plan::crossover::Least;

    #[test]
    fn ranks_that_see_different_gpus_know_their_number_alone() {
        let views = |all: &[(&str, Links)]| -> Vec<Vec<u8>> {
            let bytes = |(model, links): &(&str, Links)| view(model, *links).into_bytes();
            all.iter().map(bytes).collect()
        };
        let (a, b) = (("A", Links::Nvlink), ("B", Links::Nvlink));
        let gpus = |views: &[_], mine: (&str, Links)| together(views, mine.0, mine.1);
        let alike = gpus(&views(&[a, a]), a);
        assert_eq!(alike.model.as_deref(), Some("A"));
        assert_eq!((alike.links, alike.ranks), (Links::Nvlink, 2));
        for (other, mine) in [(b, a), (a, b), (("A", Links::Pcie), a)] {
            let views = views(&[mine, other, mine]);
            let (here, there) = (gpus(&views, mine), gpus(&views, other));
            assert_eq!(here, there);
            assert_eq!(
                (here.model, here.links, here.ranks),
                (None, Links::Unknown, 3)
            );
        }
    }

    /// The tables of two ranks, each with these entries of the user's.
    fn tables(each: [&str; 2]) -> Vec<Result<Table>> {
        let within = Duration::from_secs(30);
        let hardware = Hardware {
            gpus: Gpus {
                model: Some("A".to_owned()),
                links: Links::Nvlink,
                ranks: 2,
            },
            distinct: 2,
            sharing: 1,
            tiles: true,
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = brigade_group::threads(2)
                .into_iter()
                .zip(each)
                .map(|(boot, text)| {
                    let hardware = &hardware;
                    let own = Entries::read(text).unwrap();
                    scope.spawn(move || hardware.table(&boot, &own, within))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_join_with_the_same_entries_alone() {
        let entry = |outputs: usize| {
            format!(
                r#"{{"gpu": "A", "links": "nvlink", "ranks": 2, "operation": "gather-linear", "dtype": "int8",
                "least": {{"outputs": {outputs}}}, "source": {{"command": "c", "date": "2026-01-02", "commit": "0123456"}}}}"#
            )
        };
        for table in tables([&entry(77), &entry(77)]) {
            let int8 = table.unwrap().gather.int8;
            assert_eq!(int8.least, Some(Least::Outputs(77)));
            assert!(
                int8.source.ends_with("in the user's table"),
                "{}",
                int8.source
            );
        }
        for (one, other) in [(entry(77), entry(78)), (entry(77), "[]".to_owned())] {
            for refused in tables([&one, &other]) {
                match refused.unwrap_err() {
                    Error::Group { step, what } => {
                        assert_eq!(step, "join: tables");
                        assert!(what.starts_with("the ranks do not agree: "), "{what}");
                        assert!(what.contains("the same CudaConfig::entries"), "{what}");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_gpu_that_is_shared_or_hidden_is_no_link() {
        let of = |others: &[Option<usize>]| links(1, others.iter().copied()).unwrap();
        assert_eq!(of(&[]), Links::Nvlink);
        assert_eq!(of(&[None]), Links::Unknown);
        assert_eq!(of(&[None, Some(1)]), Links::Shared);
    }
}
