//! Prints how all-reduces of a few sizes go across machines, and what that rests on: `cargo run -p brigade-plan --example
//! explain_machines -- 2 4 gpus` for two machines of four ranks each, on GPUs; `host` is the other device. Two numbers more say what is
//! between machines: its latency in nanoseconds, and the bytes that a rank's link carries in a microsecond.
#![allow(clippy::print_stdout)]

use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation, HierarchyConfig, Machines, ParallelMode,
    Reason, ReduceOp,
};
use brigade_plan::hierarchical::{Costs, Wire, plan};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Err(why) = explain(&words) {
        println!("{why}");
    }
}

fn explain(words: &[String]) -> Result<(), Reason> {
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok());
    let (count, ranks) = (number(0).unwrap_or(2), number(1).unwrap_or(4));
    let machines = Machines::cut(count * ranks, count)?;
    let mut costs = match words.get(2).map(String::as_str) {
        Some("host") => Costs::host(),
        _ => Costs::cuda(),
    };
    if let (Some(latency_ns), Some(bytes_per_us)) = (number(3), number(4)) {
        costs = costs.with_wire(Wire {
            latency_ns: latency_ns as u64,
            bytes_per_us: bytes_per_us.max(1) as u64,
        });
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
