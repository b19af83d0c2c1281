//! What the ranks of a communicator agreed on when they joined.

use brigade_device::{AllReduceAlgorithm, CommConfig, Group, OverlapMode};

/// The group and everything voted on at `join`. Only `group.rank` differs between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Which ranks, as this one sees them.
    pub group: Group,
    /// The configuration that all ranks passed.
    pub config: CommConfig,
    /// What the backend can run.
    pub engines: Engines,
}

/// Which modes and algorithms a backend can run here; the default is none. Off needs no engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Engines {
    /// [`OverlapMode::Chunked`].
    pub chunked: bool,
    /// [`OverlapMode::Ring`].
    pub ring: bool,
    /// [`OverlapMode::Pull`].
    pub pull: bool,
    /// [`OverlapMode::Tiles`].
    pub tiles: bool,
    /// [`AllReduceAlgorithm::OneShotPush`].
    pub one_shot_push: bool,
    /// [`AllReduceAlgorithm::OneShotPull`].
    pub one_shot_pull: bool,
    /// [`AllReduceAlgorithm::TwoShot`].
    pub two_shot: bool,
    /// [`AllReduceAlgorithm::TwoShotPush`].
    pub two_shot_push: bool,
    /// [`AllReduceAlgorithm::Nccl`].
    pub nccl: bool,
    /// Whether a reduce-scatter writes parts to their owners, where they fit, instead of reading them from their makers.
    pub pushes_parts: bool,
    /// Whether an all-reduce can go on to add a residual and to normalize, with every algorithm but NCCL's.
    pub norms: bool,
    /// Whether rows can be dispatched to experts and combined again.
    pub dispatches: bool,
    /// [`Transport::Pushed`](brigade_device::Transport::Pushed).
    pub pushes_rows: bool,
    /// Whether rows of [`Transport::InPlace`](brigade_device::Transport::InPlace) are never copied. A device where they are gives the same.
    pub rows_in_place: bool,
    /// Whether an all-to-all is messages, which pass through slots of their own, instead of the scratch memory.
    pub sends_parts: bool,
    /// Workers that carry a message between two ranks: four, or fewer where ranks share what these run on.
    pub channels: u8,
    /// Most queues from one rank to another, up to [`MOST_CHANNELS`](crate::fifo::MOST_CHANNELS).
    pub queues: u8,
}

impl Engines {
    /// What the host device runs: every overlap mode, and all of Brigade's all-reduces, also with a norm.
    pub const fn host() -> Self {
        Self {
            chunked: true,
            ring: true,
            pull: true,
            tiles: false,
            one_shot_push: true,
            one_shot_pull: true,
            two_shot: true,
            two_shot_push: true,
            nccl: false,
            pushes_parts: false,
            norms: true,
            dispatches: true,
            pushes_rows: true,
            rows_in_place: false,
            sends_parts: false,
            channels: 4,
            queues: 4,
        }
    }

    /// What the CUDA device runs: the same, and parts are pushed; `tiles`, where every rank's GPU has a kernel
    /// for that; and all-reduces that push, where the group is not larger than its kernels are for.
    pub const fn cuda(tiles: bool, pushes: bool) -> Self {
        Self {
            tiles,
            one_shot_push: pushes,
            two_shot_push: pushes,
            pushes_parts: true,
            sends_parts: true,
            norms: pushes,
            pushes_rows: pushes,
            rows_in_place: true,
            ..Self::host()
        }
    }

    /// The same with NCCL's all-reduce, if `nccl`.
    #[must_use]
    pub const fn with_nccl(self, nccl: bool) -> Self {
        Self { nccl, ..self }
    }

    /// The same with so many workers for a message.
    #[must_use]
    pub const fn with_channels(self, channels: u8) -> Self {
        Self { channels, ..self }
    }

    /// The same with at most so many queues from one rank to another.
    #[must_use]
    pub const fn with_queues(self, queues: u8) -> Self {
        Self { queues, ..self }
    }

    /// Whether `mode` can run.
    pub const fn overlaps(self, mode: OverlapMode) -> bool {
        match mode {
            OverlapMode::Off => true,
            OverlapMode::Chunked { .. } => self.chunked,
            OverlapMode::Ring => self.ring,
            OverlapMode::Pull => self.pull,
            OverlapMode::Tiles => self.tiles,
        }
    }

    /// Whether `algorithm` can run.
    pub const fn reduces(self, algorithm: AllReduceAlgorithm) -> bool {
        match algorithm {
            AllReduceAlgorithm::OneShotPush => self.one_shot_push,
            AllReduceAlgorithm::OneShotPull => self.one_shot_pull,
            AllReduceAlgorithm::TwoShot => self.two_shot,
            AllReduceAlgorithm::TwoShotPush => self.two_shot_push,
            AllReduceAlgorithm::Nccl => self.nccl,
        }
    }

    /// One bit for each, and above them the numbers of workers and of queues, for the vote.
    pub fn bits(self) -> u32 {
        let has = [
            self.chunked,
            self.ring,
            self.pull,
            self.one_shot_push,
            self.one_shot_pull,
            self.two_shot,
            self.nccl,
            self.pushes_parts,
            self.tiles,
            self.two_shot_push,
            self.norms,
            self.dispatches,
            self.pushes_rows,
            self.rows_in_place,
            self.sends_parts,
        ];
        let numbers = u32::from(self.queues) << 8 | u32::from(self.channels);
        has.into_iter()
            .rev()
            .fold(numbers, |bits, has| bits << 1 | u32::from(has))
    }
}
