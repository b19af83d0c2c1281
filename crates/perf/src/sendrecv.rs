//! Send to the next rank, and receive from the one before: both at once, by a put into a region, and by NCCL.

use crate::{
    Common, data, meta,
    ranks::{PATIENCE, Rank, Ranks},
    rounded,
    sample::{Times, Variant, measure},
    sizes,
};
use anyhow::{Result, bail, ensure};
use brigade::{
    Allocate, Buffer, CommConfig, CopyBy, ParallelMode, RecvParams, SendParams, TransferParams,
};
use clap::{Args, ValueEnum};
use serde_json::json;

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct SendRecv {
    #[command(flatten)]
    pub common: Common,
    /// Bytes to begin with; K, M and G count in powers of 1024
    #[arg(short, long, value_parser = sizes::bytes, default_value = "4K")]
    begin: usize,
    /// Bytes to end with
    #[arg(short, long, value_parser = sizes::bytes, default_value = "64M")]
    end: usize,
    /// From one size to the next
    #[arg(short, long, default_value_t = 4)]
    factor: usize,
    /// What carries the put [default: the device's choice, by size]
    #[arg(long, value_enum)]
    by: Option<By>,
}

/// What carries a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    Engine,
    Kernel,
}

impl By {
    const fn choice(self) -> CopyBy {
        match self {
            Self::Engine => CopyBy::Engine,
            Self::Kernel => CopyBy::Kernel,
        }
    }

    /// As files name it.
    const fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Kernel => "kernel",
        }
    }
}

/// Longest region: both what is sent and what comes in lie in it.
fn one_size(rank: &Rank, options: &SendRecv, bytes: usize) -> Result<Vec<Times>> {
    let mut config = CommConfig::new(ParallelMode::Tp);
    (config.gather_bytes, config.reduce_scatter_bytes) = (0, 0);
    config.region_bytes = 2 * bytes + 4096;
    let comm = rank.join(&config)?;
    let (me, size) = (rank.number(), rank.size());
    let (next, prev) = ((me + 1) % size, (me + size - 1) % size);
    let elements = bytes / 2;
    let x = data::upload(
        &rank.device,
        &rank.on,
        &data::numbers(me as u64, elements),
        [1, elements],
    )?;
    let y = data::poisoned(&rank.device, &rank.on, [1, elements])?;
    let how = (options.common.calls, options.common.graph);
    let region = comm.lease(&rank.on)?.windows()?.register(2 * bytes)?;
    {
        let mut lease = comm.lease(&rank.on)?;
        let mut w = lease.windows()?;
        w.write(region, 0, x.view())?;
        w.write(region, bytes, y.view())?;
    }
    rank.on.sync(PATIENCE)?;
    // Nobody puts into what is still being poisoned.
    rank.meet()?;
    let choice = options.by.map(By::choice);
    let put = {
        let comm = comm.clone();
        move || {
            let mut lease = comm.lease(&rank.on)?;
            let mut w = lease.windows()?;
            w.put(TransferParams {
                region,
                peer: next,
                source_offset: 0,
                target_offset: bytes,
                bytes,
                choice,
            })?;
            w.signal(region, next)?;
            w.wait(region, prev)?;
            w.release(region, prev)
        }
    };
    if options.common.check {
        put()?;
        let mut came = data::poisoned(&rank.device, &rank.on, [1, elements])?;
        let mut lease = comm.lease(&rank.on)?;
        lease.windows()?.read(region, bytes, came.view_mut())?;
        drop(lease);
        rank.agree(sent_by(rank, prev, &came, "put"))?;
    }
    let both = {
        let (comm, x, mut y) = (comm.clone(), x.clone(), y.clone());
        move || {
            comm.lease(&rank.on)?.send_recv(
                SendParams {
                    from: x.view(),
                    peer: next,
                },
                RecvParams {
                    to: y.view_mut(),
                    peer: prev,
                },
            )
        }
    };
    if options.common.check {
        let mut both = both.clone();
        both()?;
        rank.agree(sent_by(rank, prev, &y, "send_recv"))?;
    }
    let mut variants = vec![
        Variant::new(rank, "send_recv", how, both)?,
        Variant::new(rank, "put", how, put)?,
    ];
    if let Some(nccl) = &rank.nccl {
        let mut exchange = {
            let (x, mut y) = (x.clone(), y.clone());
            move || nccl.send_recv(&rank.on, (x.view(), next), (y.view_mut(), prev))
        };
        if options.common.check {
            exchange()?;
            rank.agree(sent_by(rank, prev, &y, "nccl"))?;
        }
        variants.push(Variant::new(rank, "nccl", how, exchange)?);
    }
    let times = measure(rank, &mut variants, options.common.rounds)?;
    rank.on.sync(PATIENCE)?;
    comm.check()?;
    Ok(times)
}

/// Whether these are the numbers of another rank.
fn sent_by(rank: &Rank, peer: usize, got: &Buffer, what: &str) -> Result<()> {
    let mut bytes = vec![0; got.bytes()];
    rank.device.read(&rank.on, got.view(), &mut bytes)?;
    let want = data::numbers(peer as u64, got.shape().len());
    let want: &[u8] = bytemuck::cast_slice(&want);
    let wrong = bytes.iter().zip(want).position(|(got, want)| got != want);
    match wrong {
        None => Ok(()),
        Some(at) => bail!("{what}: byte {at} of {} is not rank {peer}'s", bytes.len()),
    }
}

/// Measures all sizes; gives a table.
pub fn run(options: &SendRecv, ranks: &Ranks) -> Result<String> {
    ensure!(ranks.size() > 1, "there must be two ranks");
    let sizes = sizes::steps(options.begin, options.end, options.factor)?;
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |rank| {
        sizes
            .iter()
            .map(|&bytes| one_size(rank, options, bytes))
            .collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let mut text = format!(
        "{:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
        "bytes", "us", "GB/s", "put us", "GB/s", "nccl us", "GB/s"
    );
    let mut rows = Vec::new();
    for (&bytes, times) in sizes.iter().zip(&measured) {
        let of = |name: &str| {
            let found = times.iter().find(|t| t.name == name);
            found.map_or(f64::NAN, |t| t.median)
        };
        let rate = |us: f64| bytes as f64 / us / 1e3;
        let (both, put, nccl) = (of("send_recv"), of("put"), of("nccl"));
        text += &format!(
            "{bytes:>10} {both:>9.1} {:>9.1} {put:>9.1} {:>9.1} {nccl:>9.1} {:>9.1}\n",
            rate(both),
            rate(put),
            rate(nccl)
        );
        let samples: serde_json::Map<_, _> = times
            .iter()
            .map(|t| {
                (
                    t.name.to_owned(),
                    t.samples.iter().map(|&s| rounded(s)).collect(),
                )
            })
            .collect();
        rows.push(json!({
            "choice": options.by.map(By::name), "bytes": bytes, "graph": options.common.graph, "us": rounded(both),
            "gb_per_s": rounded(rate(both)), "put_us": rounded(put), "nccl_us": rounded(nccl), "samples": samples,
        }));
    }
    options.common.write(&meta, &rows)?;
    Ok(text)
}
