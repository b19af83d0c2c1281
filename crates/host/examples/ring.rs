//! Ranks as threads on the host device: a gather-linear in ring mode, what was planned, and what travelled.
//! `cargo run -p brigade-host --example ring`.
#![allow(clippy::print_stdout)]

use brigade_device::{
    AllGatherLoraLinearParams, Bootstrap, Chunk, CommConfig, Device, DeviceExt, Error, OverlapMode,
    ParallelMode, Plan, Queues, Result, Traffic,
};
use brigade_group::ThreadGroup;
use brigade_host::HostDevice;
use brigade_plan::moved;

const K: usize = 64;
const N: usize = 32;
/// Rows need not be even, and a rank may have none.
const ROWS: [usize; 4] = [5, 0, 7, 4];

fn rank(boot: &ThreadGroup) -> Result<(Plan, Traffic)> {
    let rank = boot.rank();
    let device = HostDevice::new()?;
    let on = device.stream(0)?;
    let config = CommConfig::new(ParallelMode::Tp);
    let comm = device.clone().join(boot, &config)?;

    // Every element of a row is the number of its rank, and the weight is all ones.
    let x = device.upload(&on, &vec![rank as f32; ROWS[rank] * K], &[ROWS[rank], K])?;
    let weight = device.upload(&on, &[1.0f32; K * N], &[K, N])?;
    let result = comm
        .lease(&on)?
        .all_gather_lora_linear(AllGatherLoraLinearParams {
            choice: Some(OverlapMode::Ring),
            ..AllGatherLoraLinearParams::new(Chunk::Copy((&x).into()), &ROWS, &weight)
        })
        .map(|g| (g.d, g.plan))?;
    let (Some(d), plan) = result else {
        return Err(Error::invalid("output", "nothing", "a new buffer"));
    };

    let want = ROWS.iter().enumerate().flat_map(|(rank, &rows)| {
        let sum = (rank * K) as f32;
        std::iter::repeat_n(sum, rows * N)
    });
    let got: Vec<f32> = device.download(&on, d.view())?;
    assert!(got.into_iter().eq(want), "rank {rank} has another product");
    let traffic = comm.traffic();
    comm.close(config.deadline)?;
    Ok((plan, traffic))
}

fn main() -> Result<()> {
    let ranks: Vec<_> = brigade_group::threads(ROWS.len())
        .into_iter()
        .map(|boot| std::thread::spawn(move || rank(&boot)))
        .collect();
    let chunk_bytes = ROWS.map(|rows| rows * K * size_of::<f32>());
    for (rank, handle) in ranks.into_iter().enumerate() {
        let (plan, traffic) = handle
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        if let Plan::GatherLinear(steps) = &plan {
            println!(
                "rank {rank}: {plan}, multiplies chunks {:?}, moved {} bytes",
                steps.order, traffic.moved_bytes
            );
        }
        assert_eq!(
            traffic.moved_bytes,
            moved::ring_gather(rank, &chunk_bytes),
            "what the plan's formula says"
        );
    }
    Ok(())
}
