//! Lists the GPUs, the driver, the kernels of this build and NCCL; says what is missing and what would help.
//! `cargo run -p brigade-cuda --example devices`, with `-- --json` for programs.
#![allow(clippy::print_stdout)]

use brigade_cuda::{Missing, devices, driver_version, find_nccl, needed_driver};
use serde_json::{Value, json};

fn main() {
    let report = report();
    if std::env::args().any(|argument| argument == "--json") {
        println!("{report:#}");
        return;
    }
    for (name, row) in report.as_object().into_iter().flatten() {
        match row.get("missing") {
            Some(missing) => println!(
                "{name:<8} missing: {}; {}",
                text(&missing["what"]),
                text(&missing["remedy"])
            ),
            None => println!("{name:<8} {row}"),
        }
    }
}

fn report() -> Value {
    let driver = match driver_version() {
        Ok(version) => {
            json!({ "cuda": version.to_string(), "needed": needed_driver().to_string() })
        }
        Err(missing) => explained(&missing),
    };
    let gpus = match devices() {
        Ok(list) => list.iter().map(gpu).collect(),
        Err(missing) => explained(&missing),
    };
    let kernels = match brigade_kernels::fatbin("fill") {
        Ok(_) => {
            let names: Vec<_> = brigade_kernels::kernels().iter().map(|k| k.name).collect();
            let compiler =
                brigade_kernels::compiler().map(|(major, minor)| format!("{major}.{minor}"));
            json!({ "nvcc": compiler, "files": names })
        }
        Err(missing) => explained(&missing.into()),
    };
    let nccl = match find_nccl(&[]) {
        Some(nccl) => json!({ "version": nccl.version.to_string(), "path": nccl.path }),
        None => json!({ "missing": {
            "code": "nccl_missing",
            "what": "libnccl.so.2 does not load",
            "remedy": "install NCCL, or put its folder into LD_LIBRARY_PATH; one machine needs none",
        } }),
    };
    json!({ "driver": driver, "gpus": gpus, "kernels": kernels, "nccl": nccl })
}

fn gpu(gpu: &brigade_cuda::DeviceInfo) -> Value {
    json!({
        "ordinal": gpu.ordinal,
        "name": gpu.name,
        "capability": format!("{}.{}", gpu.capability.0, gpu.capability.1),
        "memory_mib": gpu.memory_bytes >> 20,
        "multiprocessors": gpu.multiprocessors,
        "virtual_memory": gpu.virtual_memory,
        "supported": gpu.is_supported(),
    })
}

fn explained(missing: &Missing) -> Value {
    json!({ "missing": { "code": missing.code(), "what": missing.what(), "remedy": missing.remedy() } })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
