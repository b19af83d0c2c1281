//! All-to-all of rows that lists name. The lists are read when the call runs, and again at every replay.

use crate::{
    comm::HostComm,
    fifo::{self, Rows},
    job::{Active, Job},
    memory::{mark, reading, shares, writing},
    queue::HostQueue,
    routing::integers,
};
use brigade_device::{
    AllToAllRowsCall, AllToAllRowsParams, Buffer, Call, FaultKind, Plan, Result, Turn,
};
use brigade_plan::fifo::Queues;
use std::ops::Range;

/// The arguments, kept for as long as the call is in flight or captured.
struct Arguments {
    call: AllToAllRowsCall,
    queues: Queues,
    from: Vec<Buffer>,
    to: Vec<Buffer>,
    /// Offsets and rows of what is sent, and of what is received.
    lists: [Buffer; 4],
}

impl HostComm {
    pub(crate) fn run_all_to_all_rows(
        &self,
        turn: &Turn,
        p: AllToAllRowsParams<'_>,
    ) -> Result<Plan> {
        let group = *self.core.control.group();
        let call = p.check(group.size)?;
        let signed = Call::AllToAllRows(call.clone());
        let plan = self.core.plan(&signed)?;
        let each: Vec<usize> = call.row_bytes().collect();
        let lists = [p.send_offsets, p.send_rows, p.recv_offsets, p.recv_rows];
        let arguments = Arguments {
            call,
            queues: Queues::of(&self.core.topology, &each)?,
            from: p.payloads.iter().map(|p| p.from.retain()).collect(),
            to: p.payloads.iter().map(|p| p.to.as_view().retain()).collect(),
            lists: lists.map(|list| list.retain()),
        };
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&signed, |active| all_to_all_rows(active, &arguments))
                .inspect_err(|_| arguments.to.iter().for_each(mark))
        })?;
        Ok(plan)
    }
}

fn all_to_all_rows(active: &mut Active<'_>, a: &Arguments) -> Result<()> {
    let lists: Vec<&Buffer> = a.lists.iter().collect();
    let [send, recv] = reading(&lists, |lists| {
        let list = |i: usize| integers::<i32>(lists[i]);
        Ok([
            List::new(&active.job, list(0), list(1))?,
            List::new(&active.job, list(2), list(3))?,
        ])
    })?;
    let inputs: Vec<&Buffer> = a.from.iter().collect();
    let apart = |from: &&Buffer| !a.to.iter().any(|to| shares(from, to));
    if inputs.iter().all(apart) {
        return reading(&inputs, |from| exchange(active, a, (&send, &recv), from));
    }
    // What is written would be read, or not be let go of.
    let copies = reading(&inputs, |from| {
        Ok(from.iter().map(|f| f.to_vec()).collect::<Vec<_>>())
    })?;
    let from: Vec<&[u8]> = copies.iter().map(Vec::as_slice).collect();
    exchange(active, a, (&send, &recv), &from)
}

fn exchange(
    active: &mut Active<'_>,
    a: &Arguments,
    (send, recv): (&List, &List),
    from: &[&[u8]],
) -> Result<()> {
    let mut rows = Lists {
        each: a.call.row_bytes().collect(),
        queues: &a.queues,
        from,
        to: &a.to,
        send,
        recv,
    };
    fifo::exchange(active, &a.queues, &mut rows)
}

/// Which rows go to each rank, or come from it.
struct List {
    offsets: Vec<usize>,
    rows: Vec<i32>,
}

impl List {
    /// Offsets that decrease or leave the list stop the group.
    fn new(job: &Job, offsets: Vec<i32>, rows: Vec<i32>) -> Result<Self> {
        let mut least = 0;
        let offsets = offsets.into_iter().enumerate().map(|(i, offset)| {
            match usize::try_from(offset)
                .ok()
                .filter(|o| (least..=rows.len()).contains(o))
            {
                Some(offset) => {
                    least = offset;
                    Ok(offset)
                }
                None => {
                    let (have, seen) = (rows.len() as u64, offset as u32);
                    Err(job.fail(FaultKind::Overflow, job.rank(), i, have, seen.into()))
                }
            }
        });
        let offsets = offsets.collect::<Result<_>>()?;
        Ok(Self { offsets, rows })
    }

    fn of(&self, rank: usize) -> &[i32] {
        &self.rows[self.offsets[rank]..self.offsets[rank + 1]]
    }
}

struct Lists<'a> {
    each: Vec<usize>,
    queues: &'a Queues,
    from: &'a [&'a [u8]],
    to: &'a [Buffer],
    send: &'a List,
    recv: &'a List,
}

/// The bytes of a row, if there is such a row.
fn row(row: i32, each: usize, bytes: usize) -> Option<Range<usize>> {
    let start = usize::try_from(row).ok()?.checked_mul(each)?;
    let end = start.checked_add(each)?;
    (end <= bytes).then_some(start..end)
}

impl Rows for Lists<'_> {
    fn count(&self, to: usize) -> usize {
        self.send.of(to).len()
    }

    fn write(&self, to: usize, rows: Range<usize>, entry: &mut [u8]) {
        for (s, (&each, from)) in self.each.iter().zip(self.from).enumerate() {
            let section = &mut entry[self.queues.sections.at(s, rows.len())];
            if each == 0 {
                continue;
            }
            let list = &self.send.of(to)[rows.clone()];
            for (out, &i) in section.chunks_exact_mut(each).zip(list) {
                match row(i, each, from.len()) {
                    Some(range) => out.copy_from_slice(&from[range]),
                    None => out.fill(0),
                }
            }
        }
    }

    fn announced(&mut self, from: usize, _rows: usize) -> usize {
        self.recv.of(from).len()
    }

    fn take(&mut self, from: usize, rows: Range<usize>, entry: &[u8]) -> Result<()> {
        for (s, (&each, to)) in self.each.iter().zip(self.to).enumerate() {
            let section = &entry[self.queues.sections.at(s, rows.len())];
            if each == 0 || rows.is_empty() {
                continue;
            }
            let list = &self.recv.of(from)[rows.clone()];
            writing(to, &[], |out, _| {
                for (bytes, &i) in section.chunks_exact(each).zip(list) {
                    if let Some(range) = row(i, each, out.len()) {
                        out[range].copy_from_slice(bytes);
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}
