//! Prints how all-reduces of a few sizes go across machines, and what that rests on: `cargo run -p brigade-plan --example
//! explain_machines -- 2 4 gpus` for two machines of four ranks each, on GPUs of any model, or of one, as the driver calls it; `host` is the
//! other device. Two numbers more say what is between machines: its latency in nanoseconds, and the bytes that a rank's link carries in a
//! microsecond. Behind that come files of entries that `brigade-perf tune-hierarchical` wrote:
//! `cargo run -p brigade-plan --example explain_machines -- 2 4 "NVIDIA H200" entry.json`.
#![allow(clippy::print_stdout)]

use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation, HierarchyConfig, Machines, ParallelMode,
    ReduceOp,
};
use brigade_plan::{
    Entries,
    hierarchical::{Costs, Wire, plan},
};
use std::{error::Error, fs};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Err(why) = explain(&words) {
        println!("{why}");
    }
}

fn explain(words: &[String]) -> Result<(), Box<dyn Error>> {
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok());
    let (count, ranks) = (number(0).unwrap_or(2), number(1).unwrap_or(4));
    let machines = Machines::cut(count * ranks, count)?;
    let model = words.get(2).map_or("gpus", String::as_str);
    let guess = match model {
        "host" => Costs::host(),
        _ => Costs::cuda(),
    };
    let wire = number(3).zip(number(4));
    let files = words.get(if wire.is_some() { 5 } else { 3 }..);
    let mut own = Entries::default();
    for file in files.unwrap_or_default() {
        own = own.and(Entries::read(&fs::read_to_string(file)?)?);
    }
    let measured = own.costs(model, machines);
    let mut costs = measured.unwrap_or(guess);
    if let Some((latency_ns, bytes_per_us)) = wire {
        let wire = Wire {
            latency_ns: latency_ns as u64,
            bytes_per_us: bytes_per_us.max(1) as u64,
        };
        costs = match (measured, model) {
            (None, "host") | (Some(_), _) => costs.with_wire(wire),
            (None, _) => Costs::cuda_over(wire),
        };
    }
    println!("{}", costs.told(machines));
    let config = HierarchyConfig::new(ParallelMode::Tp);
    for elements in [1 << 9, 1 << 14, 1 << 19, 1 << 22, 1 << 25] {
        let call = HierarchicalCall {
            machines,
            operation: HierarchicalOperation::AllReduce {
                elements,
                op: ReduceOp::Sum,
            },
            dtype: DataType::BF16,
            output: DataType::BF16,
            choice: None,
        };
        let answer = plan(&call, &config, &costs)?;
        println!("{:>9} bytes of bf16: {answer}", 2 * elements);
    }
    Ok(())
}
