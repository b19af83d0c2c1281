//! A backend that does nothing, and writes down what it was asked for.

use super::common::{buffer, group};
use brigade_device::*;
use parking_lot::Mutex;
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// What streams and communicators were asked for, in order.
pub type Log = Arc<Mutex<Vec<String>>>;

#[derive(Debug)]
pub struct LogQueue {
    name: &'static str,
    log: Log,
    marks: AtomicU64,
    pub refuses_to_wait: AtomicBool,
    pub captures: AtomicBool,
}

#[derive(Debug)]
struct LogMark(String);

impl LogQueue {
    pub fn stream(name: &'static str, log: &Log) -> Stream {
        Stream::new(Arc::new(Self {
            name,
            log: Arc::clone(log),
            marks: AtomicU64::new(0),
            refuses_to_wait: AtomicBool::new(false),
            captures: AtomicBool::new(false),
        }))
    }

    pub fn of(stream: &Stream) -> &Self {
        stream.as_any().downcast_ref().unwrap()
    }
}

impl Queue for LogQueue {
    fn record(&self) -> Result<Event> {
        let mark = self.marks.fetch_add(1, Ordering::Relaxed) + 1;
        let mark = format!("{}{mark}", self.name);
        self.log.lock().push(format!("record {mark}"));
        Ok(Event::new(Arc::new(LogMark(mark))))
    }
    fn wait(&self, event: &Event) -> Result<()> {
        let LogMark(mark) = event.as_any().downcast_ref().unwrap();
        if self.refuses_to_wait.load(Ordering::Relaxed) {
            return Err(refused("wait"));
        }
        self.log
            .lock()
            .push(format!("{} waits for {mark}", self.name));
        Ok(())
    }
    fn sync(&self, _within: Duration) -> Result<()> {
        Ok(())
    }
    fn on_complete(&self, hook: Hook) -> Result<()> {
        hook(Ok(()));
        Ok(())
    }
    fn capturing(&self) -> bool {
        self.captures.load(Ordering::Relaxed)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Mark for LogMark {
    fn done(&self) -> Result<bool> {
        Ok(true)
    }
    fn sync(&self, _within: Duration) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub fn refused(call: &'static str) -> Error {
    Error::Backend {
        call,
        code: -1,
        source: None,
    }
}

pub struct LogComm {
    group: Group,
    log: Log,
    pub fault: Mutex<Option<FaultRecord>>,
    pub refuses_to_close: AtomicBool,
}

impl LogComm {
    pub fn new(log: &Log) -> Arc<Self> {
        Arc::new(Self {
            group: group(1, 2),
            log: Arc::clone(log),
            fault: Mutex::new(None),
            refuses_to_close: AtomicBool::new(false),
        })
    }

    fn told<T>(&self, turn: &Turn, call: &str) -> Result<T> {
        let on = LogQueue::of(turn.stream()).name;
        let number = turn.number();
        self.log
            .lock()
            .push(format!("{call} on {on}, turn {number}"));
        Err(refused("anything but a barrier"))
    }
}

impl Communicator for LogComm {
    fn group(&self) -> &Group {
        &self.group
    }
    fn device(&self) -> &dyn Device {
        unreachable!("this backend has no device")
    }
    fn own_stream(&self) -> Result<Stream> {
        Ok(LogQueue::stream("own", &self.log))
    }
    fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        Err(Reason::new(
            "no-plan",
            format!("there is no plan for {}", call.operation()),
            "take a real backend",
        ))
    }
    fn fault(&self) -> Option<FaultRecord> {
        *self.fault.lock()
    }
    fn abort(&self) {
        *self.fault.lock() =
            FaultRecord::from_words([FaultKind::Aborted as u64, 0, 0, 0, 0, 0, 0, 0]);
    }
    fn reset(&self, _within: Duration) -> Result<()> {
        self.fault.lock().take();
        self.log.lock().push("reset".into());
        Ok(())
    }
    fn close(&self, _within: Duration) -> Result<()> {
        if self.refuses_to_close.load(Ordering::Relaxed) {
            return Err(refused("close"));
        }
        self.log.lock().push("close".into());
        Ok(())
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    fn barrier(&self, turn: &mut Turn) -> Result<()> {
        self.told::<()>(turn, "barrier").or(Ok(()))
    }
    fn all_reduce(&self, turn: &mut Turn, _p: AllReduceParams<'_>) -> Result<Plan> {
        self.told(turn, "all_reduce")
    }
    fn all_gather(&self, turn: &mut Turn, _p: AllGatherParams<'_>) -> Result<Plan> {
        self.told(turn, "all_gather")
    }
    fn reduce_scatter(&self, turn: &mut Turn, _p: ReduceScatterParams<'_>) -> Result<Plan> {
        self.told(turn, "reduce_scatter")
    }
    fn broadcast(&self, turn: &mut Turn, _p: BroadcastParams<'_>) -> Result<Plan> {
        self.told(turn, "broadcast")
    }
    fn all_to_all(&self, turn: &mut Turn, _p: AllToAllParams<'_>) -> Result<Plan> {
        self.told(turn, "all_to_all")
    }
    fn send(&self, turn: &mut Turn, _p: SendParams<'_>) -> Result<()> {
        self.told(turn, "send")
    }
    fn recv(&self, turn: &mut Turn, _p: RecvParams<'_>) -> Result<()> {
        self.told(turn, "recv")
    }
    fn send_recv(&self, turn: &mut Turn, _: SendParams<'_>, _: RecvParams<'_>) -> Result<()> {
        self.told(turn, "send_recv")
    }
    fn own_chunk(
        &self,
        turn: &mut Turn,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<(Buffer, Filled)> {
        let rows = rows_per_rank[self.group.rank];
        let filled = Filled::new(turn, (Origin::default(), 7), rows, columns, dtype);
        Ok((buffer(dtype, &[rows, columns]), filled))
    }
    fn gather_chunk(
        &self,
        turn: &mut Turn,
        _call: &LinearCall,
        _chunk: Chunk<'_>,
    ) -> Result<GatheredParts> {
        self.told(turn, "gather_chunk")
    }
    fn reduce_scatter_parts(
        &self,
        turn: &mut Turn,
        _call: &LinearCall,
        _p: ReduceScatterParams<'_>,
    ) -> Result<Plan> {
        self.told(turn, "reduce_scatter_parts")
    }
}
