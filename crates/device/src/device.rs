//! One [`Device`] value is one rank's accelerator: three small traits by role, and one object-safe sum of them.

use crate::{
    Activation, Buffer, Comm, DataType, Element, Error, GemmParams, GroupedGemmParams, Hierarchy,
    HierarchyConfig, LoraLinearParams, Machines, MemoryType, Output, ParallelMode, QBuffer,
    QScheme, Reason, Replay, ResidualNormParams, Result, Shape, SiluMulParams, Stream, TopK,
    TopKParams, View, ViewMut, fallback,
};
use std::{sync::Arc, time::Duration};

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, as the vendor gives it.
    pub name: String,
    /// Its number on this machine.
    pub ordinal: u32,
    /// Streaming multiprocessors, or worker threads.
    pub sms: u16,
    /// All of its memory.
    pub memory_bytes: u64,
}

/// How much memory a device has, and how much of it Brigade holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStatus {
    /// All of it.
    pub total_bytes: u64,
    /// Not in use by anybody, as far as can be known.
    pub free_bytes: u64,
    /// Allocated through this device and not yet freed.
    pub held_bytes: u64,
}

/// Memory, and moving what lies in it.
pub trait Allocate {
    /// A new buffer, all zero.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an impossible shape; [`Error::Backend`] when memory is out.
    fn allocate(
        &self,
        on: &Stream,
        memory: MemoryType,
        dtype: DataType,
        shape: &[usize],
    ) -> Result<Buffer>;

    /// Copies elements of the same type and shape; between memories, and between devices of the same kind.
    ///
    /// # Errors
    /// [`Error::Invalid`] if types or shapes differ.
    fn copy(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()>;

    /// Copies bytes from the caller into `to`. The caller's bytes are free again at return.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the sizes differ.
    fn write(&self, on: &Stream, to: ViewMut<'_>, bytes: &[u8]) -> Result<()>;

    /// Copies `from` to the caller, and waits until it is there.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the sizes differ; the fault, if the work before ended in one.
    fn read(&self, on: &Stream, from: View<'_>, bytes: &mut [u8]) -> Result<()>;

    /// Sets every byte.
    ///
    /// # Errors
    /// Backend errors.
    fn fill(&self, on: &Stream, to: ViewMut<'_>, byte: u8) -> Result<()>;

    /// Converts between floating-point types and between integers and them; same shape. To a narrower float rounds to
    /// nearest, ties to even; to an integer truncates and saturates.
    ///
    /// # Errors
    /// [`Error::Invalid`] if shapes differ; [`Error::Unsupported`] for a pair of types that the device cannot convert.
    fn convert(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()>;

    /// Transposes a matrix: `to[j, i] = from[i, j]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the shapes are not each other's transposes.
    fn transpose(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()>;

    /// What memory there is.
    ///
    /// # Errors
    /// Backend errors.
    fn memory_status(&self) -> Result<MemoryStatus>;
}

/// Streams and graphs.
pub trait Queues {
    /// A new stream. Greater priority goes first where the device knows priorities.
    ///
    /// # Errors
    /// Backend errors.
    fn stream(&self, priority: i8) -> Result<Stream>;

    /// Records what `work` enqueues on `on` instead of running it. The graph keeps alive what it refers to.
    ///
    /// # Errors
    /// What `work` returns; [`Error::Unsupported`] for a call that cannot be captured.
    fn capture(&self, on: &Stream, work: &mut dyn FnMut() -> Result<()>)
    -> Result<Box<dyn Replay>>;
}

/// Matrix products. What is returned is `None` where the output went into the caller's buffer.
pub trait Linear: Allocate {
    /// `D = act(alpha * op(A) op(B) + beta * C)`
    ///
    /// # Errors
    /// As [`GemmParams::check`]; [`Error::Unsupported`] for what the device cannot multiply.
    fn gemm(&self, on: &Stream, p: &GemmParams<'_>, output: Output<'_>) -> Result<Option<Buffer>>;

    /// Quantizes the rows of a matrix.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a scheme that the device cannot produce.
    fn quantize(&self, on: &Stream, a: View<'_>, scheme: QScheme) -> Result<QBuffer>;

    /// `D = act(from + bias)`, with one rounding: the end of a linear whose sum was taken elsewhere.
    ///
    /// # Errors
    /// As [`check_bias_activation`](crate::check_bias_activation).
    fn bias_activation(
        &self,
        on: &Stream,
        from: View<'_>,
        bias: Option<View<'_>>,
        activation: Activation,
        output: Output<'_>,
    ) -> Result<Option<Buffer>>;

    /// Base product, plus adapters, then the activation.
    ///
    /// # Errors
    /// As [`LoraLinearParams::check`].
    fn lora_linear(
        &self,
        on: &Stream,
        p: &LoraLinearParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        fallback::lora_linear(self, on, p, output)
    }

    /// A linear whose result is gate and up side by side, and the gate behind it: as [`lora_linear`](Self::lora_linear) into D's type and then
    /// [`silu_mul`](Self::silu_mul), bit for bit; `[rows, n / 2]`.
    ///
    /// # Errors
    /// As those; [`Error::Invalid`] for a result that has no two dimensions, or an odd number of columns.
    fn lora_linear_silu_mul(
        &self,
        on: &Stream,
        p: &LoraLinearParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        fallback::lora_linear_silu_mul(self, on, p, output)
    }

    /// Products in groups of rows, each with a weight of its own.
    ///
    /// # Errors
    /// As [`GroupedGemmParams::check`].
    fn grouped_gemm(
        &self,
        on: &Stream,
        p: &GroupedGemmParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>>;

    /// The gate between two products: `silu` of one half of the columns, times the other.
    ///
    /// # Errors
    /// As [`SiluMulParams::check`].
    fn silu_mul(
        &self,
        on: &Stream,
        p: &SiluMulParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>>;

    /// Adds a residual, and normalizes rows by their root mean square.
    ///
    /// # Errors
    /// As [`ResidualNormParams::check`].
    fn residual_norm(&self, on: &Stream, p: &ResidualNormParams<'_>) -> Result<()>;

    /// The best experts of every token, and their weights.
    ///
    /// # Errors
    /// As [`TopKParams::check`].
    fn top_k(&self, on: &Stream, p: &TopKParams<'_>) -> Result<TopK>;
}

/// One rank's accelerator.
pub trait Device: Allocate + Queues + Linear + Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Device memory that [`join`](Self::join) with this configuration and group size will take, before it takes any.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that cannot be.
    fn memory_need(&self, config: &CommConfig, size: usize) -> Result<u64>;

    /// Joins the group. Every rank must call it with the same configuration.
    ///
    /// # Errors
    /// [`Error::Group`] if ranks are missing or disagree, with every rank's view.
    fn join(self: Arc<Self>, boot: &dyn Bootstrap, config: &CommConfig) -> Result<Comm>;

    /// Device memory that [`join_machines`](Self::join_machines) with this configuration will take, and at most the slices of calls after it:
    /// what a backend without it says.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that cannot be.
    fn machines_memory_need(&self, _machines: Machines, _config: &HierarchyConfig) -> Result<u64> {
        Err(no_machines().into())
    }

    /// Joins a group that spans machines: what a backend without it says. Every rank of all machines must call it with the same
    /// configuration.
    ///
    /// # Errors
    /// As [`join`](Self::join); [`Error::Invalid`] if the group has another size than the machines.
    fn join_machines(
        self: Arc<Self>,
        _boot: &dyn Bootstrap,
        _machines: Machines,
        _config: &HierarchyConfig,
    ) -> Result<Hierarchy> {
        Err(no_machines().into())
    }
}

fn no_machines() -> Reason {
    Reason::new(
        "no-engine",
        "this device has no collectives across machines",
        "join one group per machine",
    )
}

/// The only thing Brigade needs from whoever started the ranks: bring your own, or take one of `brigade-group`'s.
pub trait Bootstrap: Send + Sync {
    /// This rank's number.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// Gives every rank's message to every rank, in rank order.
    ///
    /// # Errors
    /// [`Error::Group`] naming the missing ranks if they are not all there `within` the time.
    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>>;
}

/// How a communicator is set up. Every rank passes the same values; they are voted on at [`Device::join`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommConfig {
    /// Which parallelism it serves.
    pub mode: ParallelMode,
    /// Capacity of one half of the gather region: the rows of all ranks in one gather-linear. 0 for none.
    pub gather_bytes: usize,
    /// Capacity of one half of the region for the scales of quantized rows. 0 for none.
    pub gather_scale_bytes: usize,
    /// Capacity of one half of the reduce-scatter region: the parts of all ranks for one rank's rows. 0 for none.
    pub reduce_scatter_bytes: usize,
    /// Capacity of each of the three buffers through which all-reduces push; what needs more goes in pieces. In one shot, an
    /// input needs as much for every other rank; in two shots, about twice as much in all. 0 for none: then they pull, through
    /// the scratch memory. On GPUs, copies and reduce-scatters push through them too, at once or in pieces.
    pub all_reduce_bytes: usize,
    /// Capacity of one half of the scratch memory; larger inputs of collectives pass through it in pieces.
    pub scratch_bytes: usize,
    /// Capacity of a slot of messages, over all senders, each of which has an equal part of it, in four slots; longer messages go in pieces. Slots
    /// and what tells of them take 4.25 times as much. How fast long messages are follows from how much of them is on its way at once.
    pub message_bytes: usize,
    /// Capacity of one half of the region that rows are dispatched through: what all ranks send to one at a time. More goes in pieces.
    /// 0 for none.
    pub dispatch_bytes: usize,
    /// The same for rows that are combined.
    pub combine_bytes: usize,
    /// Memory for queues: what all ranks send to one waits there, in an equal part for each. As many entries as find room, of as many
    /// rows as find room in them; what is sent may be any number of times as much. 0 for none.
    pub fifo_bytes: usize,
    /// Entries of a queue: a power of two, [`MOST_FIFO_DEPTH`](Self::MOST_FIFO_DEPTH) at most. `None` leaves it to the plan, up to four.
    pub fifo_depth: Option<u32>,
    /// Bytes of an entry, with the number of rows that it begins with: a multiple of [`FIFO_ENTRY_BYTES`](Self::FIFO_ENTRY_BYTES).
    /// `None` leaves it to the plan: an equal part of what the queues have, and no more than keeps receivers waiting for it.
    pub fifo_entry_bytes: Option<usize>,
    /// Capacity of one half of each of the two slots of the low-latency exchange: the places of all rows that can come to a rank.
    /// 0 for none. Words that tell of them take a sixteenth of it beside it: one for every
    /// [`LOW_LATENCY_WORD_BYTES`](Self::LOW_LATENCY_WORD_BYTES), of which narrow rows may need more than they need places.
    pub low_latency_bytes: usize,
    /// Regions that can be registered by users.
    pub regions: u16,
    /// Memory for all of them together, on devices that must take it when they join. The host device takes what each region
    /// needs when it is registered.
    pub region_bytes: usize,
    /// Every wait of a call ends this long after the call began, or, of what is pushed in pieces, after its piece did.
    pub deadline: Duration,
    /// The same for the first call and for joining, while ranks still load and warm up.
    pub first_deadline: Duration,
    /// Most streaming multiprocessors that communication may use; `None` leaves it to the plan.
    pub sm_budget: Option<u16>,
    /// What NCCL may carry. Where it is not nothing, joining makes a communicator of NCCL's too, and fails on a device or a host that has none.
    pub nccl: NcclUse,
}

/// What NCCL may carry in a communicator. Its sums have an order of their own ([`SumOrder::Foreign`](crate::SumOrder::Foreign)), so only the
/// caller can allow them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NcclUse {
    /// Nothing.
    #[default]
    Never,
    /// All-reduces that [`AllReduceAlgorithm::Nccl`](crate::AllReduceAlgorithm::Nccl) is forced for.
    Forced,
    /// Those, and all-reduces whose result has the type of their input, of sizes at which NCCL measured quicker on these GPUs: their bits are
    /// promised by nobody, and differ from those of other sizes. Behind a reset, which ends NCCL's communicator, plans go on without it.
    Quicker,
}

impl CommConfig {
    /// Most entries of a queue.
    pub const MOST_FIFO_DEPTH: u32 = 1 << 16;
    /// Most bytes of any memory: as much as processors of today address, and so little that a few of them can be added up.
    pub const MOST_BYTES: usize = 1 << 48;
    /// Bytes of a half of the low-latency exchange for each word that tells of what comes there.
    pub const LOW_LATENCY_WORD_BYTES: usize = 128;
    /// What entries of queues have a multiple of, in bytes.
    pub const FIFO_ENTRY_BYTES: usize = 64;

    /// Defaults: 8 MiB a half for gather and reduce-scatter, 8 MiB a buffer for all-reduces, 1 MiB scratch, 4 MiB a slot of messages, 16 regions of 8 MiB in all, 60 s (120 s at first);
    /// and, for expert parallelism alone, 8 MiB a half for dispatch and combine, and 32 MiB for queues.
    pub fn new(mode: ParallelMode) -> Self {
        let experts_bytes = match mode {
            ParallelMode::Ep | ParallelMode::Eplb => 8 << 20,
            _ => 0,
        };
        Self {
            mode,
            gather_bytes: 8 << 20,
            gather_scale_bytes: 64 << 10,
            reduce_scatter_bytes: 8 << 20,
            all_reduce_bytes: 8 << 20,
            scratch_bytes: 1 << 20,
            message_bytes: 4 << 20,
            dispatch_bytes: experts_bytes,
            combine_bytes: experts_bytes,
            fifo_bytes: 4 * experts_bytes,
            fifo_depth: None,
            fifo_entry_bytes: None,
            low_latency_bytes: 0,
            regions: 16,
            region_bytes: 8 << 20,
            deadline: Duration::from_secs(60),
            first_deadline: Duration::from_secs(120),
            sm_budget: None,
            nccl: NcclUse::Never,
        }
    }

    /// Sizes both regions for linears of up to `max_rows` rows in all, `columns` wide at most, in `dtype`, over `size`
    /// ranks. What no size counts is as much as can be counted, which [`check`](Self::check) refuses.
    #[must_use]
    pub fn for_linears(
        mut self,
        max_rows: usize,
        columns: usize,
        dtype: DataType,
        size: usize,
    ) -> Self {
        let bytes = |rows: usize| {
            let row = columns.saturating_mul(dtype.bytes());
            rows.saturating_mul(row)
        };
        self.gather_bytes = bytes(max_rows);
        // A rank gets one part of its rows from every rank: size * ceil(max_rows / size) rows.
        self.reduce_scatter_bytes = bytes(max_rows.div_ceil(size.max(1)).saturating_mul(size));
        self
    }

    /// Sizes the low-latency exchange for up to `max_tokens` of each of `size` ranks, of rows that are `hidden` wide in `dtype`, with `k`
    /// experts a token of `experts` (as many as there are slots, where some have several), with weights or without. What no size counts is as much as can be counted, which [`check`](Self::check) refuses.
    #[must_use]
    pub fn for_low_latency(
        mut self,
        (max_tokens, k): (usize, usize),
        experts: usize,
        hidden: usize,
        dtype: DataType,
        size: usize,
    ) -> Self {
        let row = hidden.saturating_mul(dtype.bytes());
        // A part has counts and up to four sections, rows, their scales, experts and weights, and is filled up to a line.
        let token = row.saturating_add(k.saturating_mul(8));
        let part = max_tokens.saturating_mul(token).saturating_add(5 * 64);
        let back = max_tokens.saturating_mul(k).saturating_mul(row);
        // Who sends so many tokens; of each token, that it comes and what it names; and how many rows each expert gets.
        let words = max_tokens.saturating_mul(k.saturating_add(1));
        let words = words.saturating_add(experts.div_ceil(size.max(1)));
        let words = size.saturating_mul(words.saturating_add(1));
        let told = words.saturating_mul(Self::LOW_LATENCY_WORD_BYTES);
        self.low_latency_bytes = size.saturating_mul(part).max(back).max(told);
        self
    }

    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        for (field, bytes) in [
            ("gather_bytes", self.gather_bytes),
            ("gather_scale_bytes", self.gather_scale_bytes),
            ("reduce_scatter_bytes", self.reduce_scatter_bytes),
            ("all_reduce_bytes", self.all_reduce_bytes),
            ("scratch_bytes", self.scratch_bytes),
            ("message_bytes", self.message_bytes),
            ("dispatch_bytes", self.dispatch_bytes),
            ("combine_bytes", self.combine_bytes),
            ("fifo_bytes", self.fifo_bytes),
            ("fifo_entry_bytes", self.fifo_entry_bytes.unwrap_or(0)),
            ("low_latency_bytes", self.low_latency_bytes),
            ("region_bytes", self.region_bytes),
        ] {
            at_most(field, bytes)?;
        }
        if self.sm_budget == Some(0) {
            return Err(Error::invalid("sm_budget", 0, "at least 1, or none"));
        }
        for (field, bytes) in [
            ("scratch_bytes", self.scratch_bytes),
            ("message_bytes", self.message_bytes),
        ] {
            if bytes < 4096 {
                return Err(Error::invalid(field, bytes, "at least 4096"));
            }
        }
        if let Some(depth) = self.fifo_depth
            && !(depth.is_power_of_two() && depth <= Self::MOST_FIFO_DEPTH)
        {
            let want = format!("a power of two up to {}", Self::MOST_FIFO_DEPTH);
            return Err(Error::invalid("fifo_depth", depth, want));
        }
        if let Some(bytes) = self.fifo_entry_bytes
            && (bytes == 0 || !bytes.is_multiple_of(Self::FIFO_ENTRY_BYTES))
        {
            let want = format!("a multiple of {}", Self::FIFO_ENTRY_BYTES);
            return Err(Error::invalid("fifo_entry_bytes", bytes, want));
        }
        for (field, d) in [
            ("deadline", self.deadline),
            ("first_deadline", self.first_deadline),
        ] {
            if d.is_zero() || d > Duration::from_secs(86_400) {
                return Err(Error::invalid(
                    field,
                    format!("{d:?}"),
                    "more than nothing and at most a day",
                ));
            }
        }
        Ok(())
    }
}

/// Checks a size of memory.
pub(crate) fn at_most(field: &'static str, bytes: usize) -> Result<()> {
    let most = CommConfig::MOST_BYTES;
    match bytes <= most {
        true => Ok(()),
        false => Err(Error::invalid(field, bytes, format!("at most {most}"))),
    }
}

/// Typed conveniences over any device's byte copies.
pub trait DeviceExt: Allocate {
    /// A new buffer in device memory with these values.
    ///
    /// # Errors
    /// As [`Allocate::allocate`] and [`Allocate::write`].
    fn upload<T: Element>(&self, on: &Stream, values: &[T], shape: &[usize]) -> Result<Buffer> {
        if Shape::new(shape)?.len() != values.len() {
            return Err(Error::invalid(
                "values",
                values.len(),
                format!("as many as {shape:?} has"),
            ));
        }
        let mut buffer = self.allocate(on, MemoryType::Device, T::DTYPE, shape)?;
        self.write(on, buffer.view_mut(), bytemuck::cast_slice(values))?;
        Ok(buffer)
    }

    /// The values of a buffer.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are not `T`; [`Error::Backend`] if there is no memory for them; as [`Allocate::read`].
    fn download<T: Element>(&self, on: &Stream, from: View<'_>) -> Result<Vec<T>> {
        from.expect_type::<T>("from.dtype")?;
        let mut values = bytemuck::allocation::try_zeroed_vec(from.shape().len())
            .map_err(|()| Error::no_memory(from.bytes()))?;
        self.read(on, from, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

impl<D: Allocate + ?Sized> DeviceExt for D {}
