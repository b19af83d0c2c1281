//! User buffers: regions that exist on every rank, written and read by peers (after TransformerEngine's userbuffers).

use crate::{Result, Turn, View, ViewMut};

/// A region registered on all ranks. A number and no more: it says neither which communicator has it, nor since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region(
    /// Its number, the same on every rank.
    pub u16,
);

/// What carries a copy between two ranks' parts of a region. The bytes and their order are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyBy {
    /// A copy engine, which takes no multiprocessor; on the host, the communication thread. A GPU's engine hears of no fault: where a put waited in
    /// vain for a release, it writes all the same.
    Engine,
    /// A kernel, which begins sooner, and does nothing once the group is stopped; on the host, the thread that calls.
    Kernel,
}

/// A copy between this rank's and a peer's part of a region.
#[derive(Clone, Copy, Debug)]
pub struct TransferParams {
    /// Which region.
    pub region: Region,
    /// The other rank.
    pub peer: usize,
    /// Byte in the part that is read.
    pub source_offset: usize,
    /// Byte in the part that is written.
    pub target_offset: usize,
    /// How many.
    pub bytes: usize,
    /// Forced carrier. Left to the device, it is on a GPU the engine from 1 MiB on and a kernel below, and on the host the thread that calls.
    pub choice: Option<CopyBy>,
}

/// The backend's side of registered regions. Offsets and sizes are checked against the region.
///
/// Per pair of ranks and region: a put after a signal waits until the peer has released what the signal announced.
pub trait UserBuffers: Send + Sync {
    /// A region of `bytes` on every rank, all zero. Collective.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when all regions are taken; as every call.
    fn register(&self, turn: &mut Turn, bytes: usize) -> Result<Region>;
    /// Gives a region back once every peer has let go of it. Collective. A graph that works in it keeps neither its memory nor its number:
    /// to launch one is [`Error::Invalid`](crate::Error::Invalid) from then on (field `region`), with nothing of it done, also when another
    /// region has the number. Launches come to an end before this call.
    ///
    /// # Errors
    /// As every call.
    fn deregister(&self, turn: &mut Turn, region: Region) -> Result<()>;
    /// Copies the caller's elements into this rank's part, from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if they do not fit.
    fn write(&self, turn: &mut Turn, region: Region, offset: usize, from: View<'_>) -> Result<()>;
    /// Copies from this rank's part, from byte `offset` on, to the caller.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if they do not fit.
    fn read(&self, turn: &mut Turn, region: Region, offset: usize, to: ViewMut<'_>) -> Result<()>;
    /// Own part to the peer's part.
    ///
    /// # Errors
    /// As every call.
    fn put(&self, turn: &mut Turn, p: TransferParams) -> Result<()>;
    /// The peer's part to own part. The caller knows from a signal that the data is there.
    ///
    /// # Errors
    /// As every call.
    fn get(&self, turn: &mut Turn, p: TransferParams) -> Result<()>;
    /// Tells the peer that what was put, or lies ready to get, is there.
    ///
    /// # Errors
    /// As every call.
    fn signal(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()>;
    /// Waits for the peer's next signal.
    ///
    /// # Errors
    /// As every call.
    fn wait(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()>;
    /// Tells the peer that what its signal announced has been used.
    ///
    /// # Errors
    /// As every call.
    fn release(&self, turn: &mut Turn, region: Region, peer: usize) -> Result<()>;
}

/// Registered regions under a lease. See [`UserBuffers`] for what each method does.
pub struct Windows<'l> {
    pub(crate) buffers: &'l dyn UserBuffers,
    pub(crate) turn: &'l mut Turn,
}

impl Windows<'_> {
    /// See [`UserBuffers::register`].
    ///
    /// # Errors
    /// As there.
    pub fn register(&mut self, bytes: usize) -> Result<Region> {
        self.buffers.register(self.turn, bytes)
    }

    /// See [`UserBuffers::deregister`].
    ///
    /// # Errors
    /// As there.
    pub fn deregister(&mut self, region: Region) -> Result<()> {
        self.buffers.deregister(self.turn, region)
    }

    /// See [`UserBuffers::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&mut self, region: Region, offset: usize, from: View<'_>) -> Result<()> {
        self.buffers.write(self.turn, region, offset, from)
    }

    /// See [`UserBuffers::read`].
    ///
    /// # Errors
    /// As there.
    pub fn read(&mut self, region: Region, offset: usize, to: ViewMut<'_>) -> Result<()> {
        to.check_writable()?;
        self.buffers.read(self.turn, region, offset, to)
    }

    /// See [`UserBuffers::put`].
    ///
    /// # Errors
    /// As there.
    pub fn put(&mut self, p: TransferParams) -> Result<()> {
        self.buffers.put(self.turn, p)
    }

    /// See [`UserBuffers::get`].
    ///
    /// # Errors
    /// As there.
    pub fn get(&mut self, p: TransferParams) -> Result<()> {
        self.buffers.get(self.turn, p)
    }

    /// See [`UserBuffers::signal`].
    ///
    /// # Errors
    /// As there.
    pub fn signal(&mut self, region: Region, peer: usize) -> Result<()> {
        self.buffers.signal(self.turn, region, peer)
    }

    /// See [`UserBuffers::wait`].
    ///
    /// # Errors
    /// As there.
    pub fn wait(&mut self, region: Region, peer: usize) -> Result<()> {
        self.buffers.wait(self.turn, region, peer)
    }

    /// See [`UserBuffers::release`].
    ///
    /// # Errors
    /// As there.
    pub fn release(&mut self, region: Region, peer: usize) -> Result<()> {
        self.buffers.release(self.turn, region, peer)
    }
}
