//! Rows to experts on other machines and back, made of calls inside a machine and exchanges along a rail.
//!
//! Two hops, after DeepEP's internode kernels (DeepSeek, 2025): a token goes once along the rail to each machine that has experts for it, to
//! the rank with the sender's local number there; that rank passes it on, once to each rank that has some. Back, the rank on the rail adds up
//! what the ranks of its machine have made of a row, and one row goes back, to be added to those of the other machines.
//!
//! Both hops are dispatches and combines of the machine's communicator. Rows for machines are those of a dispatch to oneself, whose places
//! are machines; rows inside go to places that are numbered by rank and by the machine that they are from, so they lie in the order of all
//! ranks at once. A place's weight is 1, so a combine of them is a sum in the order of places.

mod combine;
mod dispatch;
mod weights;

use crate::{
    rail_ways::{Outward, Owners, RowWords},
    *,
};
use std::time::Duration;

/// Which ways rows went across machines: part of a [`Handle`].
#[derive(Clone, Debug)]
pub struct MachineWays {
    /// Own rows to their machines: a dispatch to oneself.
    out: Handle,
    /// Rows of the rail to their ranks. None where a machine has one rank, and room is for what comes.
    inside: Option<Handle>,
    /// Rows of each machine for each along this rail, row by row.
    rows: PerRank,
    /// First slot of every rank, and their number at the end.
    first: Vec<usize>,
    /// Words of the rows that went along the rail, and of those that came.
    sent_words: Vec<i32>,
    came_words: Vec<i32>,
    received: Buffer,
}

impl MachineWays {
    /// Tokens of this rank that go to each machine, i32 `[machines]`: each once, however many of its experts are there.
    pub fn sent(&self) -> View<'_> {
        self.out.parts().counts.view()
    }

    /// Rows that came to this rank from each machine, i32 `[machines]`.
    pub fn received(&self) -> View<'_> {
        self.received.view()
    }
}

/// Where this rank's rows would go.
#[derive(Clone, Debug)]
pub struct MachineLayout {
    /// To which ranks of all machines.
    pub ranks: ExpertLayout,
    /// To how many machines: this rank's tokens that go to each, i32 `[machines]`.
    pub rows_per_machine: Buffer,
}

/// What calls with experts across machines are made of, for backends.
pub trait ExpertParts {
    /// All ranks, as this one sees them.
    fn group(&self) -> Group;
    /// Which of them share a machine.
    fn machines(&self) -> Machines;
    /// What it gives out now is from here.
    fn origin(&self) -> Origin;
    /// Inside this rank's machine.
    fn inside(&self) -> &dyn Communicator;
    /// To the other machines. Not asked for where there is one.
    ///
    /// # Errors
    /// Why there is none.
    fn rail(&self) -> Result<&dyn Rail>;
    /// The longest that an exchange along the rail may wait.
    fn within(&self) -> Duration;
    /// The layout of a rank's tokens over all ranks, and the first slot of every rank, with their number at the end.
    ///
    /// # Errors
    /// As [`HierarchyLease::expert_layout`].
    fn layout(&self, on: &Stream, routing: Routing<'_>) -> Result<(ExpertLayout, Vec<usize>)>;
    /// Slots of this rank.
    fn own_slots(&self, placement: PlacementCall) -> usize;
    /// Whether work of this device reaches a parameter's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    fn reaches(&self, field: &'static str, view: View<'_>) -> Result<()>;
    /// Whether calls can be made.
    ///
    /// # Errors
    /// As every call.
    fn usable(&self) -> Result<()>;
    /// Whether what the host has just read is what ranks sent: a group that was stopped may have left anything there.
    ///
    /// # Errors
    /// The fault that stopped one.
    fn heard(&self) -> Result<()>;
    /// Behind the last exchange that fills a buffer: nobody is to take what is there for a result if a group was stopped.
    ///
    /// # Errors
    /// Those of enqueuing.
    fn poison_if_stopped(&self, on: &Stream, out: &Buffer) -> Result<()>;
    /// A call across machines is made now. Not asked for where there is one.
    ///
    /// # Errors
    /// As every call; [`Error::Unsupported`] while the stream captures.
    fn begin(&self, on: &Stream, call: &Call) -> Result<()>;
    /// Stops all groups after an error; gives what the call that it ended returns.
    fn give_up(&self, error: Error) -> Error;
}

/// See [`HierarchyLease::expert_layout`]; for backends, as all here.
///
/// # Errors
/// As there.
pub fn expert_layout_across(
    parts: &dyn ExpertParts,
    on: &Stream,
    routing: Routing<'_>,
) -> Result<MachineLayout> {
    parts.usable()?;
    let (k, _) = routing.check()?;
    let over = Over::new(parts);
    let (ranks, first) = parts.layout(on, routing)?;
    let row = RowWords { k, weights: false };
    let out = over.outward(on, (&ranks, &first), row, None)?;
    let counts = [over.machines.count()];
    Ok(MachineLayout {
        ranks,
        rows_per_machine: over.device().upload(on, &out.counts, &counts)?,
    })
}

/// See [`HierarchyLease::dispatch`].
///
/// # Errors
/// As there.
pub fn dispatch_across(
    parts: &dyn ExpertParts,
    turn: &mut Turn,
    p: DispatchParams<'_>,
) -> Result<Dispatched> {
    parts.usable()?;
    let over = Over::new(parts);
    if over.machines.count() == 1 {
        let done = parts.inside().experts()?.dispatch(turn, p);
        return done.map_err(|error| inside_only(parts, error));
    }
    let call = over.check_dispatch(&p)?;
    parts.begin(turn.stream(), &Call::Dispatch(call.clone()))?;
    let done = over.dispatch(turn, p, &call);
    done.map_err(|error| parts.give_up(error))
}

/// See [`HierarchyLease::combine`].
///
/// # Errors
/// As there.
pub fn combine_across(
    parts: &dyn ExpertParts,
    turn: &mut Turn,
    p: CombineParams<'_>,
) -> Result<Combined> {
    parts.usable()?;
    let over = Over::new(parts);
    if over.machines.count() == 1 {
        let done = parts.inside().experts()?.combine(turn, p);
        return done.map_err(|error| inside_only(parts, error));
    }
    let call = over.check_combine(&p)?;
    parts.begin(turn.stream(), &Call::Combine(call.clone()))?;
    let done = over.combine(turn, p, &call);
    done.map_err(|error| parts.give_up(error))
}

/// After the one call that a call is made of: what is wrong with its parameters stops nobody.
fn inside_only(parts: &dyn ExpertParts, error: Error) -> Error {
    match error {
        Error::Fault(_) => parts.give_up(error),
        other => other,
    }
}

/// A hierarchy's parts, with what is asked often.
struct Over<'a> {
    parts: &'a dyn ExpertParts,
    inside: &'a dyn Communicator,
    group: Group,
    machines: Machines,
}

const ONE_BY_ONE: Arrangement = Arrangement::ByExpert { alignment: 1 };

impl<'a> Over<'a> {
    fn new(parts: &'a dyn ExpertParts) -> Self {
        Self {
            parts,
            inside: parts.inside(),
            group: parts.group(),
            machines: parts.machines(),
        }
    }

    /// Places of all ranks of a machine: one for each machine, on each of them.
    fn places(&self) -> usize {
        self.machines.size()
    }

    /// Machines that a token goes to at most, and ranks of one.
    fn most(&self, k: usize) -> (usize, usize) {
        (k.min(self.machines.count()), k.min(self.machines.ranks()))
    }

    fn device(&self) -> &dyn Device {
        self.inside.device()
    }

    /// What came, as ranks sent it.
    fn read<T: Element>(&self, on: &Stream, from: View<'_>) -> Result<Vec<T>> {
        let got = self.device().download(on, from)?;
        self.parts.heard()?;
        Ok(got)
    }

    fn reach(&self, views: &[(&'static str, Option<View<'_>>)]) -> Result<()> {
        let mut given = views
            .iter()
            .filter_map(|&(field, view)| Some((field, view?)));
        given.try_for_each(|(field, view)| self.parts.reaches(field, view))
    }

    fn owners<'f>(&self, first: &'f [usize]) -> Owners<'f> {
        Owners {
            machines: self.machines,
            first,
        }
    }

    fn outward(
        &self,
        on: &Stream,
        (layout, first): (&ExpertLayout, &[usize]),
        row: RowWords,
        weights: Option<View<'_>>,
    ) -> Result<Outward> {
        let device = self.device();
        let slots = device.download::<i32>(on, layout.slots.view())?;
        let weights = match weights {
            Some(weights) => device.download::<f32>(on, weights)?,
            None => Vec::new(),
        };
        let rank = self.group.rank;
        let owners = self.owners(first);
        Ok(Outward::new(owners, rank, row, &slots, &weights))
    }
}

/// Rows along the rail.
struct Along<'a> {
    over: &'a Over<'a>,
    on: &'a Stream,
    signed: &'a Call,
    /// Of each machine for each.
    rows: &'a [usize],
}

impl Along<'_> {
    /// This machine's rows for the others, which lie by machine; gives those of the others for this one.
    fn go(&self, from: &Buffer) -> Result<Buffer> {
        let over = self.over;
        let count = over.machines.count();
        let me = over.machines.machine_of(over.group.rank);
        let row_len = from.shape().row_len();
        let pieces: PerRank = self.rows.iter().map(|rows| rows * row_len).collect();
        let mut dims = from.shape().dims().to_vec();
        dims[0] = (0..count).map(|m| self.rows[m * count + me]).sum();
        let device = over.device();
        let mut to = device.allocate(self.on, MemoryType::Device, from.dtype(), &dims)?;
        let p = RailParams {
            call: self.signed,
            pieces: &pieces,
            from: from.view(),
            to: to.view_mut(),
            within: over.parts.within(),
        };
        over.parts.rail()?.exchange(self.on, p)?;
        Ok(to)
    }
}

fn row_words(call: &DispatchCall) -> RowWords {
    RowWords {
        k: call.k,
        weights: call.weights,
    }
}

fn ways_of(handle: &Handle) -> Result<&MachineWays> {
    let ways = handle.parts().machines.as_deref();
    ways.ok_or_else(|| Error::invalid("handle", "one of one group", "one of this hierarchy"))
}

fn only_inside(what: String, remedy: &'static str) -> Reason {
    let what = format!("{what} do not go across machines");
    Reason::new("across-machines", what, remedy)
}

/// Most of these waits are along the rail, and for other calls' rows.
fn no_waits(asked: bool) -> Result<(), Reason> {
    if !asked {
        return Ok(());
    }
    let what = "times that ranks are waited for".to_string();
    Err(only_inside(what, "measure the whole call"))
}
