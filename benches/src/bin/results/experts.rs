//! Rows to experts of other virtual machines and back, over rails as slow as a network's: against what the rails alone take for a row a
//! machine, and against all ranks getting all rows and adding up what became of them.

use super::{
    Rounds,
    hierarchical::{CASES, Rank, on_ranks_of},
    ratio, rounded,
};
use anyhow::{Context, Result, ensure};
use brigade::{
    AllGatherParams, Arrangement, Buffer, CombineParams, CombineSum, DataType, DispatchParams,
    Dispatched, HierarchyConfig, Machines, Output, ParallelMode, Placement, ReceivedIds, ReduceOp,
    ReduceScatterParams, Route, Routing, View, host::RailModel,
};
use brigade_benches::Pairs;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Tokens of each rank: few, and many.
const TOKENS: [usize; 2] = [64, 512];

/// Elements of a row, in f32.
const HIDDEN: usize = 1024;

/// Experts of each rank, and of a token.
const EXPERTS: usize = 4;
const K: usize = 4;

/// One rank's tokens, all of whose experts are on one machine, as models have it that limit machines: half of the tokens stay at home.
struct Own<'r, 'b> {
    rank: &'r Rank<'b>,
    rows: Buffer,
    ids: Buffer,
    /// Room for the rows of all.
    all: Buffer,
    /// And for own ones.
    back: Buffer,
    tokens: usize,
}

/// The experts of a rank's tokens.
fn ids_of(machines: Machines, rank: usize, tokens: usize) -> Vec<i32> {
    let of_machine = machines.ranks() * EXPERTS;
    let ids = |token: usize| {
        let machine = (machines.machine_of(rank) + token) % machines.count();
        // Different ones: a step that goes around all of them.
        (0..K).map(move |i| (machine * of_machine + (token / 2 + i) % of_machine) as i32)
    };
    (0..tokens).flat_map(ids).collect()
}

impl<'r, 'b> Own<'r, 'b> {
    fn new(rank: &'r Rank<'b>, tokens: usize) -> Result<Self> {
        let machines = rank.over.machines();
        let (size, me) = (machines.size(), rank.boot.rank());
        let values: Vec<f32> = (0..tokens * HIDDEN)
            .map(|i| ((me + i / HIDDEN) % 64) as f32)
            .collect();
        let zeros = vec![0f32; size * tokens * HIDDEN];
        let up = |values: &[f32]| rank.upload(values, &[values.len() / HIDDEN, HIDDEN]);
        Ok(Self {
            rows: up(&values)?,
            ids: rank.upload(&ids_of(machines, me, tokens), &[tokens, K])?,
            all: up(&zeros)?,
            back: up(&values)?,
            rank,
            tokens,
        })
    }

    fn dispatch(&self) -> Result<Dispatched> {
        let size = self.rank.boot.size();
        let mut lease = self.rank.over.lease(&self.rank.on)?;
        Ok(lease.dispatch(DispatchParams {
            rows: self.rows.view(),
            beside: &[],
            route: Route::Experts {
                routing: Routing {
                    ids: self.ids.view(),
                    placement: Placement::Even {
                        experts: size * EXPERTS,
                    },
                },
                weights: None,
            },
            arrangement: Arrangement::Dense,
            max_tokens: self.tokens,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: None,
            choice: None,
        })?)
    }

    /// Rows there and back, as experts that leave them as they are would have them. Gives the sums.
    fn dispatched(&self) -> Result<Buffer> {
        let there = self.dispatch()?;
        let mut lease = self.rank.over.lease(&self.rank.on)?;
        let back = lease.combine(CombineParams {
            rows: there.rows.view(),
            handle: &there.handle,
            sum: CombineSum::Rank,
            weights: None,
            biases: &[],
            output: Output::Allocate(DataType::F32),
            waits: None,
            choice: None,
        })?;
        back.d.context("no sums")
    }

    /// All rows to all ranks, and sums of what all made of all.
    fn gathered(&mut self) -> Result<()> {
        let rows = vec![self.tokens; self.rank.boot.size()];
        let mut lease = self.rank.over.lease(&self.rank.on)?;
        lease.all_gather(AllGatherParams {
            from: self.rows.view(),
            rows_per_rank: &rows,
            to: self.all.view_mut(),
        })?;
        lease.reduce_scatter(ReduceScatterParams {
            from: self.all.view(),
            rows_per_rank: &rows,
            to: self.back.view_mut(),
            op: ReduceOp::Sum,
        })?;
        Ok(())
    }

    /// Both ways once, and what came back: a row once for each rank that had some of its experts; and once for each rank.
    fn check(&mut self) -> Result<()> {
        let machines = self.rank.over.machines();
        let ids = ids_of(machines, self.rank.boot.rank(), self.tokens);
        let mine: Vec<f32> = self.read(self.rows.view())?;
        let sums = self.read(self.dispatched()?.view())?;
        for (token, ids) in ids.chunks(K).enumerate() {
            let mut ranks: Vec<_> = ids.iter().map(|id| *id as usize / EXPERTS).collect();
            ranks.dedup();
            ranks.sort_unstable();
            ranks.dedup();
            let (got, row) = (&sums[token * HIDDEN..][..HIDDEN], &mine[token * HIDDEN..]);
            let of = ranks.len() as f32;
            ensure!(
                got.iter().zip(row).all(|(got, x)| *got == x * of),
                "token {token}: not its row from {of} ranks"
            );
        }
        self.gathered()?;
        let size = self.rank.boot.size() as f32;
        let back = self.read(self.back.view())?;
        let is_sum = |(got, x): (&f32, &f32)| *got == x * size;
        ensure!(back.iter().zip(&mine).all(is_sum), "not a sum of all");
        Ok(())
    }

    fn read(&self, view: View<'_>) -> Result<Vec<f32>> {
        self.rank.download(view)
    }

    /// Rows that go to other machines.
    fn along(&self) -> Result<usize> {
        let there = self.dispatch()?;
        let ways = there.handle.machines().context("no machines")?;
        let sent: Vec<i32> = self.rank.download(ways.sent())?;
        let own = self.rank.over.machines().machine_of(self.rank.boot.rank());
        let others = sent.iter().enumerate().filter(|(m, _)| *m != own);
        Ok(others.map(|(_, rows)| *rows as usize).sum())
    }

    fn pairs(&mut self, rounds: Rounds) -> Result<Pairs> {
        Pairs::take(rounds.pairs, |which| {
            self.rank.meet()?;
            let start = Instant::now();
            match which {
                0 => drop(self.dispatched()?),
                _ => self.gathered()?,
            }
            Ok(start.elapsed().as_secs_f64() * 1e6)
        })
    }
}

/// Room for what comes to a rank of a machine.
fn config(machines: Machines, tokens: usize) -> HierarchyConfig {
    let mut config = HierarchyConfig::new(ParallelMode::Ep);
    let bytes = machines.size() * (tokens * (4 * HIDDEN + 256) + 8192);
    (config.comm.dispatch_bytes, config.comm.combine_bytes) = (bytes, bytes);
    config.comm.scratch_bytes = 8 << 20;
    config
}

/// The slowest rank of every time; and the most rows that one sends along its rail.
fn slowest(
    machines: Machines,
    rail: Option<RailModel>,
    tokens: usize,
    rounds: Rounds,
) -> Result<(Pairs, usize)> {
    let found = on_ranks_of(&config(machines, tokens), machines, rail, |rank| {
        let mut own = Own::new(rank, tokens)?;
        own.check()?;
        Ok((own.pairs(rounds)?, own.along()?))
    })?;
    let (pairs, rows): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let most = rows.into_iter().max().context("no rank")?;
    Ok((Pairs::slowest(&pairs), most))
}

fn row(
    (count, ranks, latency_us, bytes_per_us): (usize, usize, u64, u64),
    tokens: usize,
    rounds: Rounds,
) -> Result<Value> {
    let machines = Machines::cut(count * ranks, count)?;
    let model = RailModel {
        latency: Duration::from_micros(latency_us),
        bytes_per_us,
    };
    let (pairs, rows) = slowest(machines, Some(model), tokens, rounds)?;
    let (host, _) = slowest(machines, None, tokens, rounds)?;
    // A row there and a row back, and a latency each way; ids and counts are not counted.
    let rail_bytes = rows * HIDDEN * 4;
    let bound_us = 2.0 * (latency_us as f64 + rail_bytes as f64 / bytes_per_us as f64);
    let us = pairs.median_us(0);
    let latency_ms = latency_us as f64 / 1e3;
    Ok(json!({
        "machines": count,
        "ranks": ranks,
        "tokens": tokens,
        "hidden": HIDDEN,
        "k": K,
        "experts": machines.size() * EXPERTS,
        "dtype": "f32",
        "rail": format!("{machines}, {latency_ms} ms, {bytes_per_us} MB/s"),
        "rail_bytes": rail_bytes,
        "total_us": rounded(us),
        "bound_us": rounded(bound_us),
        "ratio_to_bound": ratio(us / bound_us),
        "gathered_us": rounded(pairs.median_us(1)),
        "host_alone_us": rounded(host.median_us(0)),
    }))
}

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let cases = CASES.into_iter().flat_map(|case| TOKENS.map(|n| (case, n)));
    cases
        .map(|(case, tokens)| row(case, tokens, rounds))
        .collect()
}
