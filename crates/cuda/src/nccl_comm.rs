//! NCCL's collectives, for what Brigade is compared with.

use crate::{CudaDevice, NCCL_WITH_CHANNELS, Version, find_nccl, memory::check_reach};
use brigade_device::{
    Bootstrap, Buffer, DataType, Error, Reason, ReduceOp, Result, Stream, View, ViewMut,
};
use brigade_group::{agree, messages};
use libloading::Library;
use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem::ManuallyDrop,
    sync::Arc,
    time::Duration,
};

pub(crate) type Status = c_int;
pub(crate) type Handle = *mut c_void;

/// What names a communicator before it is there.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([c_char; 128]);

impl UniqueId {
    /// Rank 0's, for all ranks of a group.
    pub(crate) fn of_group(
        functions: &Functions,
        boot: &dyn Bootstrap,
        within: Duration,
    ) -> Result<Self> {
        let mut id = Self([0; 128]);
        let made = match boot.rank() {
            // SAFETY: the pointer is to a live struct.
            0 => check("ncclGetUniqueId", unsafe {
                (functions.unique_id)(&raw mut id)
            }),
            _ => Ok(()),
        };
        agree(boot, "join: NCCL", made, within)?;
        let all = messages(boot, &id.0.map(|c| c as u8), within)?;
        for (to, &from) in id.0.iter_mut().zip(&all[0]) {
            *to = from as c_char;
        }
        Ok(id)
    }
}

/// What NCCL is told when a communicator is made: the beginning of its struct, of which it reads as much as it knows, and since 2.14 all up to
/// `blocking`.
#[repr(C)]
pub(crate) struct Settings {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    /// The name of one: a pointer.
    network: usize,
}

impl Settings {
    /// Calls return when they are done on the host. Kernels have so many channels, a block each, or as many as NCCL decides.
    pub(crate) fn blocking(channels: Option<u16>, nccl: Version) -> Result<Self> {
        if let (Some(channels), true) = (channels, nccl < NCCL_WITH_CHANNELS) {
            return Err(Reason::new(
                "nccl-channels",
                format!(
                    "connections are to have {channels} channels, and NCCL {nccl} decides alone"
                ),
                "install NCCL 2.17 or later, or leave channels to it (`HierarchyConfig::channels` of 0)",
            )
            .into());
        }
        // NCCL's number for what nobody says.
        let channels = channels.map_or(c_int::MIN, c_int::from);
        Ok(Self {
            size: size_of::<Self>(),
            magic: 0xCAFE_BEEF,
            version: 21_700,
            blocking: 1,
            cluster: c_int::MIN,
            least_blocks: channels,
            most_blocks: channels,
            // Null: whichever NCCL takes.
            network: 0,
        })
    }
}

/// A call that goes on.
pub(crate) const IN_PROGRESS: Status = 7;

/// From, to, elements, their type, an operation or a root, communicator, stream.
type Collective =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> Status;

pub(crate) type Initialize =
    unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *const Settings) -> Status;

/// The functions that are used.
pub(crate) struct Functions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> Status,
    pub(crate) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> Status,
    pub(crate) all_reduce: Collective,
    reduce_scatter: Collective,
    broadcast: Collective,
    pub(crate) send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Handle) -> Status,
    pub(crate) recv:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Handle) -> Status,
    pub(crate) group_start: unsafe extern "C" fn() -> Status,
    pub(crate) group_end: unsafe extern "C" fn() -> Status,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    pub(crate) abort: unsafe extern "C" fn(Handle) -> Status,
    pub(crate) async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    /// Since 2.14.
    pub(crate) init_config: Option<Initialize>,
    pub(crate) version: Version,
}

impl Functions {
    /// Those of the NCCL that is found.
    pub(crate) fn find() -> Result<Self> {
        let nccl = find_nccl(&[]).ok_or_else(|| missing("it is not installed"))?;
        // SAFETY: the initializers of NCCL ask nothing of the caller.
        let library = unsafe { Library::new(&nccl.path) }.map_err(|e| missing(&e.to_string()))?;
        // Never closed: NCCL's own threads may outlast its communicators.
        let library = ManuallyDrop::new(library);
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the function has this signature in every NCCL 2.
                // https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
                *unsafe { library.get($name) }.map_err(|e| missing(&e.to_string()))?
            };
        }
        Ok(Self {
            unique_id: function!(b"ncclGetUniqueId"),
            init: function!(b"ncclCommInitRank"),
            all_gather: function!(b"ncclAllGather"),
            all_reduce: function!(b"ncclAllReduce"),
            reduce_scatter: function!(b"ncclReduceScatter"),
            broadcast: function!(b"ncclBroadcast"),
            send: function!(b"ncclSend"),
            recv: function!(b"ncclRecv"),
            group_start: function!(b"ncclGroupStart"),
            group_end: function!(b"ncclGroupEnd"),
            destroy: function!(b"ncclCommDestroy"),
            abort: function!(b"ncclCommAbort"),
            async_error: function!(b"ncclCommGetAsyncError"),
            // SAFETY: as above.
            init_config: unsafe { library.get(b"ncclCommInitRankConfig") }
                .ok()
                .map(|f| *f),
            version: nccl.version,
        })
    }
}

pub(crate) fn missing(why: &str) -> Error {
    Reason::new(
        "nccl-missing",
        format!("NCCL cannot be used: {why}"),
        "install NCCL 2, or put its folder on LD_LIBRARY_PATH",
    )
    .into()
}

pub(crate) fn check(call: &'static str, status: Status) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(Error::Backend {
        call,
        code: status.into(),
        source: None,
    })
}

/// NCCL's number for a type, and how many of those an element is.
fn data_type(dtype: DataType) -> Result<c_int> {
    Ok(match dtype {
        DataType::I8 => 0,
        DataType::U8 | DataType::F8E4M3 | DataType::Bool => 1,
        DataType::F16 => 6,
        DataType::F32 => 7,
        DataType::BF16 => 9,
        other => return Err(Error::invalid("dtype", other, "a type that NCCL moves")),
    })
}

/// A type whose elements NCCL combines as what they are.
pub(crate) fn reduced_type(dtype: DataType) -> Result<c_int> {
    match dtype {
        DataType::F16 | DataType::BF16 | DataType::F32 => data_type(dtype),
        other => Err(Error::invalid("dtype", other, "f16, bf16 or f32")),
    }
}

/// NCCL's number for an operation.
pub(crate) const fn operation(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}

/// One rank's communicator of NCCL's. Its calls are enqueued on a stream and can be captured; NCCL alone decides how long they
/// wait.
pub struct NcclComm {
    functions: Functions,
    comm: Handle,
    size: usize,
    device: Arc<CudaDevice>,
}

// SAFETY: a communicator may be used by any thread, by one at a time.
unsafe impl Send for NcclComm {}

impl NcclComm {
    /// Joins a group of all ranks of `boot`. They find each other `within` the time; how long NCCL then takes is up to NCCL.
    ///
    /// # Errors
    /// [`Error::Unsupported`] (`nccl-missing`) without NCCL; [`Error::Backend`] with NCCL's code.
    pub fn join(device: &Arc<CudaDevice>, boot: &dyn Bootstrap, within: Duration) -> Result<Self> {
        let functions = Functions::find()?;
        let id = UniqueId::of_group(&functions, boot, within)?;
        device.card.bind()?;
        let mut comm = std::ptr::null_mut();
        let (size, rank) = (boot.size() as c_int, boot.rank() as c_int);
        // SAFETY: the pointer is to a live handle, and this thread's context is the device's.
        let status = unsafe { (functions.init)(&raw mut comm, size, id, rank) };
        check("ncclCommInitRank", status)?;
        Ok(Self {
            functions,
            comm,
            size: boot.size(),
            device: Arc::clone(device),
        })
    }

    fn enqueue(
        &self,
        on: &Stream,
        buffers: &[&Buffer],
        call: &'static str,
        work: impl FnOnce(Handle) -> Status,
    ) -> Result<()> {
        let lane = self.device.lane(on)?;
        lane.run(buffers, |stream| check(call, work(stream.cast())))
    }

    /// Checks that `all` is within reach and holds `times` as many elements as `one`, of the same type.
    fn check(
        &self,
        names: [&'static str; 2],
        one: &Buffer,
        times: usize,
        all: &Buffer,
    ) -> Result<()> {
        check_reach(&self.device.card, names[0], one)?;
        check_reach(&self.device.card, names[1], all)?;
        let want = one.shape().len() * times;
        if (all.dtype(), all.shape().len()) == (one.dtype(), want) {
            return Ok(());
        }
        let got = format!("{} of {}", all.shape(), all.dtype());
        let want = format!("{want} elements of {}", one.dtype());
        Err(Error::invalid(names[1], got, want))
    }

    fn check_rank(&self, field: &'static str, rank: usize) -> Result<()> {
        if rank < self.size {
            return Ok(());
        }
        let want = format!("a rank below {}", self.size);
        Err(Error::invalid(field, rank, want))
    }

    /// Every rank's elements, as many of each, in rank order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if sizes do not fit; [`Error::Backend`].
    pub fn all_gather(&self, on: &Stream, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        self.all_gathers(on, [(from, to)])
    }

    /// As [`all_gather`](Self::all_gather), of several buffers in one group of NCCL's calls: rows and their scales, for
    /// instance.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gathers<'a>(
        &self,
        on: &Stream,
        pairs: impl IntoIterator<Item = (View<'a>, ViewMut<'a>)>,
    ) -> Result<()> {
        let mut parts = Vec::new();
        for (from, to) in pairs {
            let (from, to) = (from.retain(), to.as_view().retain());
            self.check(["from", "to"], &from, self.size, &to)?;
            let kind = data_type(from.dtype())?;
            parts.push((from, to, kind));
        }
        let buffers: Vec<&Buffer> = parts.iter().flat_map(|(from, to, _)| [from, to]).collect();
        self.enqueue(on, &buffers, "ncclAllGather", |stream| {
            let f = &self.functions;
            let gather = |(from, to, kind): &(Buffer, Buffer, c_int)| {
                let (count, from, to) = (from.shape().len(), from.address(), to.address());
                // SAFETY: all buffers are kept until the work is done, within reach, and large enough.
                unsafe {
                    let (from, to) = (from as *const _, to as *mut _);
                    (f.all_gather)(from, to, count, *kind, self.comm, stream)
                }
            };
            // SAFETY: needs nothing. A group that was begun is always ended.
            let begun = unsafe { (f.group_start)() };
            let done = parts.iter().map(gather).find(|&s| s != 0).unwrap_or(0);
            // SAFETY: as above.
            let ended = unsafe { (f.group_end)() };
            [begun, done, ended]
                .into_iter()
                .find(|&s| s != 0)
                .unwrap_or(0)
        })
    }

    /// The reduction of every rank's elements, in an order of NCCL's own. The result may be the input.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); [`Error::Invalid`] for types that are not reduced.
    pub fn all_reduce(
        &self,
        on: &Stream,
        from: View<'_>,
        to: ViewMut<'_>,
        op: ReduceOp,
    ) -> Result<()> {
        let (from, to) = (from.retain(), to.as_view().retain());
        let (count, kind) = (from.shape().len(), reduced_type(from.dtype())?);
        self.check(["from", "to"], &from, 1, &to)?;
        self.enqueue(on, &[&from, &to], "ncclAllReduce", |stream| {
            let (op, f) = (operation(op), &self.functions);
            // SAFETY: as above.
            unsafe {
                let (from, to) = (from.address() as *const _, to.address() as *mut _);
                (f.all_reduce)(from, to, count, kind, op, self.comm, stream)
            }
        })
    }

    /// Own elements of the reduction over ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &self,
        on: &Stream,
        from: View<'_>,
        to: ViewMut<'_>,
        op: ReduceOp,
    ) -> Result<()> {
        let (from, to) = (from.retain(), to.as_view().retain());
        let (count, kind) = (to.shape().len(), reduced_type(from.dtype())?);
        self.check(["to", "from"], &to, self.size, &from)?;
        self.enqueue(on, &[&from, &to], "ncclReduceScatter", |stream| {
            let (op, f) = (operation(op), &self.functions);
            // SAFETY: as above.
            unsafe {
                let (from, to) = (from.address() as *const _, to.address() as *mut _);
                (f.reduce_scatter)(from, to, count, kind, op, self.comm, stream)
            }
        })
    }

    /// The root's elements, into the same place.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); [`Error::Invalid`] for a root that is no rank.
    pub fn broadcast(&self, on: &Stream, data: ViewMut<'_>, root: usize) -> Result<()> {
        let data = data.as_view().retain();
        let (count, kind) = (data.shape().len(), data_type(data.dtype())?);
        self.check(["data", "data"], &data, 1, &data)?;
        self.check_rank("root", root)?;
        self.enqueue(on, &[&data], "ncclBroadcast", |stream| {
            let (root, f) = (root as c_int, &self.functions);
            // SAFETY: as above.
            unsafe {
                let (from, to) = (data.address() as *const _, data.address() as *mut _);
                (f.broadcast)(from, to, count, kind, root, self.comm, stream)
            }
        })
    }

    /// Elements to one peer and from another.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn send_recv(
        &self,
        on: &Stream,
        from: (View<'_>, usize),
        to: (ViewMut<'_>, usize),
    ) -> Result<()> {
        self.exchange(on, &[from], &mut [to])
    }

    /// Elements to some peers and from some, all at once.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn exchange(
        &self,
        on: &Stream,
        from: &[(View<'_>, usize)],
        to: &mut [(ViewMut<'_>, usize)],
    ) -> Result<()> {
        let sources: Vec<_> = from.iter().map(|(v, peer)| (v.retain(), *peer)).collect();
        let to = to.iter().map(|(v, peer)| (v.as_view().retain(), *peer));
        let targets: Vec<_> = to.collect();
        let all: Vec<&Buffer> = sources.iter().chain(&targets).map(|(b, _)| b).collect();
        let Some(first) = all.first() else {
            return Ok(());
        };
        let kind = data_type(first.dtype())?;
        for (field, list) in [("from", &sources), ("to", &targets)] {
            for (buffer, peer) in list {
                self.check([field, field], buffer, 1, buffer)?;
                if buffer.dtype() != first.dtype() {
                    return Err(Error::invalid(field, buffer.dtype(), first.dtype()));
                }
                self.check_rank("peer", *peer)?;
            }
        }
        let f = &self.functions;
        self.enqueue(on, &all, "ncclSend and ncclRecv", |stream| {
            // SAFETY: as above.
            unsafe {
                let begun = (f.group_start)();
                let sent = sources.iter().map(|(b, peer)| {
                    let from = b.address() as *const _;
                    (f.send)(
                        from,
                        b.shape().len(),
                        kind,
                        *peer as c_int,
                        self.comm,
                        stream,
                    )
                });
                let sent = sent.fold(0, Status::max);
                let received = targets.iter().map(|(b, peer)| {
                    let to = b.address() as *mut _;
                    (f.recv)(to, b.shape().len(), kind, *peer as c_int, self.comm, stream)
                });
                let received = received.fold(0, Status::max);
                let all = [begun, sent, received, (f.group_end)()];
                all.into_iter().find(|&s| s != 0).unwrap_or(0)
            }
        })
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if self.device.card.bind().is_ok() {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { (self.functions.destroy)(self.comm) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_floats_that_nccl_can_add_are_reduced() {
        for dtype in [DataType::F16, DataType::BF16, DataType::F32] {
            assert_eq!(reduced_type(dtype).unwrap(), data_type(dtype).unwrap());
        }
        // NCCL moves these, some as plain bytes, whose sums would mean nothing.
        for dtype in [DataType::F8E4M3, DataType::Bool, DataType::I8] {
            assert!(data_type(dtype).is_ok());
            let refused = reduced_type(dtype);
            assert!(matches!(
                refused,
                Err(Error::Invalid { field: "dtype", .. })
            ));
        }
    }

    #[test]
    fn channels_are_for_versions_that_know_them() {
        let [before, since] = [Version::of(2, 16), Version::of(2, 17)];
        let settings = Settings::blocking(Some(4), since).unwrap();
        assert_eq!((settings.least_blocks, settings.most_blocks), (4, 4));
        assert_eq!(settings.size, 40);
        // What nobody asks for, every version decides.
        let settings = Settings::blocking(None, before).unwrap();
        let undefined = (i32::MIN, i32::MIN);
        assert_eq!((settings.least_blocks, settings.most_blocks), undefined);
        let refused = Settings::blocking(Some(4), before).map(|_| ());
        let Err(Error::Unsupported(reason)) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(reason.code, "nccl-channels");
    }

    #[test]
    fn operations_have_the_numbers_of_nccls_header() {
        let ops = [
            ReduceOp::Sum,
            ReduceOp::Prod,
            ReduceOp::Max,
            ReduceOp::Min,
            ReduceOp::Avg,
        ];
        assert_eq!(ops.map(operation), [0, 1, 2, 3, 4]);
    }
}
