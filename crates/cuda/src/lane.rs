//! Streams: what stands behind a [`Stream`], and what has to outlive the work in it.

use crate::{
    card::{Card, Task},
    driver::failed,
    mark::{self, CudaMark},
    memory::{DeviceMemory, Place},
};
use brigade_device::{Buffer, Error, Event, Hook, Mark, Queue, Reason, Result, Storage, Stream};
use brigade_group::Stoppable;
use cudarc::driver::{
    result::stream,
    sys::{
        self, CUstreamCaptureMode_enum as CaptureMode, CUstreamCaptureStatus_enum as CaptureStatus,
    },
};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    any::Any,
    collections::VecDeque,
    ffi::c_void,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::Sender,
    },
    time::Duration,
};

/// A stream of one GPU, its own or adopted, and the notes about it.
pub(crate) struct Lane {
    pub(crate) card: Arc<Card>,
    pub(crate) stream: sys::CUstream,
    /// Whether somebody else may have kernels here.
    shown: AtomicBool,
    /// Work so far.
    enqueued: AtomicU64,
    /// Keeps an adopted stream alive; `None` for one that was made here.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    notes: Mutex<Notes>,
}

/// What one piece of work uses.
type Kept = SmallVec<[Arc<dyn Storage>; 4]>;

#[derive(Default)]
struct Notes {
    /// The capture that runs here, if it is ours.
    capture: Option<Capture>,
    /// What graphs that others captured on this stream refer to: nobody says when they are gone.
    kept: Vec<Arc<dyn Storage>>,
    /// What must wait until no capture runs.
    later: Vec<Task>,
    /// Memory of somebody else's, until the work that uses it is done.
    in_use: VecDeque<(CudaMark, Kept)>,
    /// Communicators that work here: their faults are this stream's.
    groups: Vec<Weak<dyn Stoppable>>,
    /// Scratch memory of the library that multiplies: for work that runs at once, and for graphs of others.
    workspaces: [Option<u64>; 2],
}

/// What the graph that is being captured refers to.
#[derive(Default)]
struct Capture {
    kept: Vec<Arc<dyn Storage>>,
    /// As in [`Notes`], but the graph's own: it may run beside other work of the stream that it was captured on.
    workspace: Option<u64>,
    /// The stream's work before it, which may still run. None of a branch: what it branches off comes behind all work there.
    before: Option<Arc<CudaMark>>,
}

// SAFETY: a CUstream belongs to its context, not to a thread, and the driver locks what it changes.
unsafe impl Send for Lane {}
// SAFETY: as above.
unsafe impl Sync for Lane {}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lane({:?} of {:?})", self.stream, self.card)
    }
}

impl Lane {
    /// A new stream. Greater `priority` goes first, as far as the GPU knows priorities.
    pub(crate) fn new(card: &Arc<Card>, priority: i8) -> Result<Arc<Self>> {
        card.bind()?;
        let (least, greatest) =
            stream::get_priority_range().map_err(failed("cuCtxGetStreamPriorityRange"))?;
        // The driver counts the other way.
        let priority = i32::from(priority).saturating_neg().clamp(greatest, least);
        let stream = stream::create_with_priority(stream::StreamKind::NonBlocking, priority)
            .map_err(failed("cuStreamCreateWithPriority"))?;
        Ok(Arc::new(Self::around(card, stream, None)))
    }

    /// A stream of somebody else's.
    pub(crate) fn adopt(
        card: &Arc<Card>,
        stream: sys::CUstream,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self::around(card, stream, Some(owner)))
    }

    fn around(
        card: &Arc<Card>,
        stream: sys::CUstream,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        Self {
            card: Arc::clone(card),
            stream,
            shown: AtomicBool::new(owner.is_some()),
            owner,
            enqueued: AtomicU64::new(0),
            notes: Mutex::default(),
        }
    }

    /// The lane behind a stream of this backend, on this card.
    pub(crate) fn of<'a>(on: &'a Stream, card: &Card) -> Result<&'a Arc<Self>> {
        match on.as_any().downcast_ref::<CudaQueue>() {
            Some(queue) if queue.0.card.context == card.context => Ok(&queue.0),
            _ => Err(Error::invalid(
                "on",
                format!("{on:?}"),
                format!("a stream of {card:?}"),
            )),
        }
    }

    /// Others may have their own kernels here from now on.
    pub(crate) fn show(&self) {
        self.shown.store(true, Ordering::Release);
    }

    /// Whether only Brigade enqueues kernels here.
    pub(crate) fn is_ours(&self) -> bool {
        !self.shown.load(Ordering::Acquire)
    }

    /// How often Brigade has enqueued work here, or had the stream wait for something, that which it is at included.
    pub(crate) fn enqueued(&self) -> u64 {
        self.enqueued.load(Ordering::Acquire)
    }

    fn begin_work(&self) -> u64 {
        self.enqueued.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Whether work is being recorded into a graph, by us or by somebody else.
    pub(crate) fn capturing(&self) -> bool {
        self.card.bind().is_ok()
            // SAFETY: the stream lives as long as `self`.
            && unsafe { stream::is_capturing(self.stream) }
                .is_ok_and(|s| s != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// For what answers to the caller, which a graph cannot.
    pub(crate) fn refuse_capture(&self, what: &'static str) -> Result<()> {
        if self.capturing() {
            return Err(Reason::new(
                "not-capturable",
                format!("{what} cannot be captured in a graph"),
                "call it outside of capture",
            )
            .into());
        }
        Ok(())
    }

    /// Enqueues work that uses these buffers, and sees to it that they outlive it.
    pub(crate) fn run(
        self: &Arc<Self>,
        buffers: &[&Buffer],
        work: impl FnOnce(sys::CUstream) -> Result<()>,
    ) -> Result<()> {
        self.run_numbered(buffers, |stream, _| work(stream))
    }

    /// The same of work that is told which one it is here.
    pub(crate) fn run_numbered(
        self: &Arc<Self>,
        buffers: &[&Buffer],
        work: impl FnOnce(sys::CUstream, u64) -> Result<()>,
    ) -> Result<()> {
        self.card.bind()?;
        let capturing = self.capturing();
        if !capturing {
            self.tidy();
        }
        let _enqueuing = self.card.retired.enqueuing();
        let number = self.begin_work();
        for buffer in buffers {
            Place::of(buffer.storage())?.used_on(self);
        }
        if capturing {
            self.keep(buffers.iter().map(|b| Arc::clone(b.storage())));
        }
        let result = work(self.stream, number);
        // Who lends memory keeps it for as long as that takes.
        let adopted =
            |b: &&&Buffer| matches!(Place::of(b.storage()), Ok(Place::Adopted(a)) if !a.is_lent());
        let adopted = buffers.iter().filter(adopted).filter(|_| !capturing);
        let adopted: Kept = adopted.map(|b| Arc::clone(b.storage())).collect();
        if !adopted.is_empty() {
            let mark = CudaMark::record(&self.card, self.stream)?;
            self.notes.lock().in_use.push_back((mark, adopted));
        }
        result
    }

    /// From here on, a fault of this communicator is told to who waits for this stream.
    pub(crate) fn belongs_to(&self, group: Weak<dyn Stoppable>) {
        let mut notes = self.notes.lock();
        notes
            .groups
            .retain(|g| g.strong_count() > 0 && !g.ptr_eq(&group));
        notes.groups.push(group);
    }

    /// Work here is about to become part of what `of` captures, if that captures: what it uses is that graph's to keep.
    pub(crate) fn branch(&self, of: &Self) {
        if of.capturing() {
            self.notes.lock().capture = Some(Capture::default());
        }
    }

    /// The end of that.
    pub(crate) fn unbranch(&self, of: &Self) {
        let capture = self.notes.lock().capture.take();
        of.keep(capture.map_or_else(Vec::new, |c| c.kept));
    }

    /// What is captured here refers to this.
    fn keep(&self, storages: impl IntoIterator<Item = Arc<dyn Storage>>) {
        let notes = &mut *self.notes.lock();
        let own = notes.capture.as_mut().map(|c| &mut c.kept);
        own.unwrap_or(&mut notes.kept).extend(storages);
    }

    /// The fault of a communicator that worked here, if one was stopped.
    pub(crate) fn check_groups(&self) -> Result<()> {
        let groups = self.notes.lock().groups.clone();
        let mut alive = groups.iter().filter_map(Weak::upgrade);
        alive
            .find_map(|group| group.fault())
            .map_or(Ok(()), |fault| Err(Error::Fault(fault)))
    }

    /// Lets go of what is no longer in use, and does what a capture had put off.
    fn tidy(&self) {
        let (mut gone, mut later) = (SmallVec::<[_; 4]>::new(), Vec::new());
        {
            let mut notes = self.notes.lock();
            while let Some((mark, _)) = notes.in_use.front() {
                if !mark.is_over() {
                    break;
                }
                gone.extend(notes.in_use.pop_front());
            }
            if notes.capture.is_none() {
                later.append(&mut notes.later);
            }
        }
        drop(gone);
        later.into_iter().for_each(|task| task());
        self.card.retired.sweep();
    }

    /// A mark of the work so far. While a capture runs here, of that before it, and none where others capture: to look at a mark that was
    /// made in a capture ends that.
    pub(crate) fn mark(&self) -> Option<Arc<CudaMark>> {
        // No capture begins meanwhile.
        let notes = self.notes.lock();
        if self.capturing() {
            return notes.capture.as_ref()?.before.clone();
        }
        CudaMark::record(&self.card, self.stream).map(Arc::new).ok()
    }

    /// Lets work here wait for a mark. If that is of a capture, this stream joins it: not while another thread takes a mark of this
    /// stream, having found that no capture runs. The driver alone is called meanwhile, so whatever locks the caller has are in order.
    pub(crate) fn wait(&self, mark: &CudaMark) -> Result<()> {
        self.begin_work();
        let _nobody_marks = self.notes.lock();
        mark::wait(&self.card, self.stream, mark)
    }

    /// Lets `other` wait for the work here. While a capture runs here, `later` is put off to its end, and `false` returned.
    pub(crate) fn fence(
        &self,
        other: sys::CUstream,
        on: &Card,
        later: impl FnOnce() -> Task,
    ) -> bool {
        let mut notes = self.notes.lock();
        if self.capturing() {
            notes.later.push(later());
            return false;
        }
        let waited =
            CudaMark::record(&self.card, self.stream).and_then(|mark| mark::wait(on, other, &mark));
        if let Err(error) = waited {
            tracing::warn!(%error, "memory is freed without waiting");
        }
        true
    }

    /// Calls `hook` on the keeper's thread once the work so far is done; at the end of a capture, if one runs.
    pub(crate) fn after(self: &Arc<Self>, hook: Hook) -> Result<()> {
        let sender = self.card.keeper()?;
        let mut notes = self.notes.lock();
        if self.capturing() {
            let lane = Arc::clone(self);
            notes.later.push(Box::new(move || {
                let _ = lane.after(hook);
            }));
            return Ok(());
        }
        let pending = Box::into_raw(Box::new(Pending { sender, hook }));
        // SAFETY: `called_back` takes the box back, once: the driver calls it when the work before is done or has failed.
        let enqueued =
            unsafe { sys::cuStreamAddCallback(self.stream, Some(called_back), pending.cast(), 0) };
        enqueued.result().map_err(|e| {
            // SAFETY: the driver has refused the box, so nobody else takes it.
            drop(unsafe { Box::from_raw(pending) });
            failed("cuStreamAddCallback")(e)
        })
    }

    /// Scratch memory that work of this stream may use in turn.
    pub(crate) fn workspace(&self, bytes: usize) -> Result<u64> {
        let capturing = self.capturing();
        let mut notes = self.notes.lock();
        if let Some(capture) = &mut notes.capture {
            if let Some(address) = capture.workspace {
                return Ok(address);
            }
            let memory = DeviceMemory::outside_of_streams(&self.card, bytes)?;
            let address = *capture.workspace.insert(memory.address());
            capture.kept.push(Arc::new(memory));
            return Ok(address);
        }
        let kept = &mut notes.workspaces[usize::from(capturing)];
        if let Some(address) = *kept {
            return Ok(address);
        }
        Ok(*kept.insert(if capturing {
            self.card.take_now(bytes)?
        } else {
            self.card.take(bytes, self.stream)?
        }))
    }

    /// Frees memory that this stream alone used, behind its work; `false`, and nothing is done, while a capture runs here.
    pub(crate) fn give(&self, address: u64) -> Result<bool> {
        let _no_capture_begins = self.notes.lock();
        if self.capturing() {
            return Ok(false);
        }
        self.card.bind()?;
        self.card.give(address, self.stream)?;
        Ok(true)
    }

    /// From here on, work is recorded instead of run, and what it refers to is kept for the graph. Relaxed: other threads, and
    /// calls on other streams, go on as usual.
    pub(crate) fn begin_capture(&self) -> Result<()> {
        self.tidy();
        let mut notes = self.notes.lock();
        let before = CudaMark::record(&self.card, self.stream)?;
        let mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        unsafe { stream::begin_capture(self.stream, mode) }
            .map_err(failed("cuStreamBeginCapture"))?;
        notes.capture = Some(Capture {
            before: Some(Arc::new(before)),
            ..Capture::default()
        });
        Ok(())
    }

    /// What the graph refers to. Called when the driver has ended the capture.
    pub(crate) fn end_capture(&self) -> Vec<Arc<dyn Storage>> {
        let capture = self.notes.lock().capture.take();
        self.tidy();
        capture.map_or_else(Vec::new, |c| c.kept)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let notes = std::mem::take(self.notes.get_mut());
        if self.card.bind().is_err() {
            return;
        }
        for address in notes.workspaces.into_iter().flatten() {
            let _ = self.card.give(address, self.stream);
        }
        // Memory of others that is still in use is let go of by a thread that can wait for it.
        if let (Ok(keeper), false) = (self.card.keeper(), notes.in_use.is_empty()) {
            let _ = keeper.send(Box::new(move || {
                for (mark, storage) in notes.in_use {
                    let _ = mark.reached(LAST_USE);
                    drop(storage);
                }
            }));
        }
        if self.owner.is_none() {
            // SAFETY: made in `new`, destroyed once; the driver lets the work in it end first.
            let _ = unsafe { stream::destroy(self.stream) };
        }
    }
}

/// Longest that foreign memory is kept for work of a stream that is gone.
const LAST_USE: Duration = Duration::from_secs(600);

/// A hook on its way to the keeper's thread.
struct Pending {
    sender: Sender<Task>,
    hook: Hook,
}

/// Runs on a thread of the driver's, where nothing of the driver's may be called: hands the hook on.
unsafe extern "C" fn called_back(_: sys::CUstream, status: sys::CUresult, pending: *mut c_void) {
    // SAFETY: `Lane::after` made this box, and the driver calls once for each.
    let Pending { sender, hook } = *unsafe { Box::from_raw(pending.cast::<Pending>()) };
    let result = status
        .result()
        .map_err(failed("work before a completion hook"));
    let _ = sender.send(Box::new(move || hook(result)));
}

/// What a [`Stream`] of a CUDA device holds.
#[derive(Debug)]
pub(crate) struct CudaQueue(pub(crate) Arc<Lane>);

impl Drop for CudaQueue {
    fn drop(&mut self) {
        // Allocations know the lanes that used them: what a lane keeps would keep the lane.
        let kept = std::mem::take(&mut self.0.notes.lock().kept);
        drop(kept);
        self.0.tidy();
    }
}

impl Queue for CudaQueue {
    fn record(&self) -> Result<Event> {
        Ok(Event::new(Arc::new(CudaMark::of_lane(&self.0)?)))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.0.wait(CudaMark::of(event)?)
    }

    fn sync(&self, within: Duration) -> Result<()> {
        self.0.refuse_capture("sync")?;
        let mark = CudaMark::record(&self.0.card, self.0.stream)?;
        mark.sync(within)?;
        self.0.tidy();
        self.0.check_groups()
    }

    fn on_complete(&self, hook: Hook) -> Result<()> {
        self.0.refuse_capture("a completion hook")?;
        self.0.after(hook)
    }

    fn capturing(&self) -> bool {
        self.0.capturing()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
