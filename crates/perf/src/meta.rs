//! Where and when a file of results was made.

#[path = "../../../xtask/src/doctor/today.rs"]
mod today;

use crate::ranks::Ranks;
use anyhow::Result;
use brigade::cuda::{devices, driver_package, driver_version, find_nccl, link};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{ffi::OsString, fs};
use today::today;

/// The `meta` of a file of results.
pub fn meta(ranks: &Ranks) -> Result<Value> {
    let size = ranks.size();
    let gpus = devices().map_err(brigade::Error::from)?;
    // Ranks that share GPUs have no more links than there are GPUs.
    let peers = (1..size.min(gpus.len()))
        .map(|to| link(0, to).map_err(brigade::Error::from))
        .collect::<Result<Vec<_>, _>>()?;
    let mut meta = any(ranks)?;
    meta["gpu"] = json!(gpus.first().map(|g| g.name.clone()));
    meta["link"] = match peers.iter().all(|l| l.access && l.native_atomics) {
        _ if size > gpus.len() => "shared",
        true => "nvlink",
        false => "pcie",
    }
    .into();
    meta["driver"] = driver()?.into();
    meta["cuda"] = brigade::cuda::needed_driver().to_string().into();
    meta["nccl"] = json!(find_nccl(&[]).map(|n| n.version.to_string()));
    Ok(meta)
}

/// The version of the driver's package, 580.95.05, or of the CUDA that it offers, where the system does not tell.
fn driver() -> Result<String> {
    let offers = driver_version().map_err(brigade::Error::from)?;
    Ok(driver_package().unwrap_or_else(|| format!("CUDA {offers}")))
}

/// The `meta` of what was found on this host by a command, whatever the host has.
pub fn here(command: &str) -> Result<Value> {
    let mut meta = made(command)?;
    let gpus = devices().unwrap_or_default();
    meta["gpu"] = json!(gpus.first().map(|g| g.name.clone()));
    meta["gpus"] = gpus.len().into();
    meta["driver"] = json!(driver().ok());
    meta["cuda"] = brigade::cuda::needed_driver().to_string().into();
    meta["nccl"] = json!(find_nccl(&[]).map(|n| n.version.to_string()));
    Ok(meta)
}

/// The same of ranks that are threads or processes of this host, without a GPU: they share its memory.
pub fn host(ranks: &Ranks) -> Result<Value> {
    let mut meta = any(ranks)?;
    meta["gpu"] = "host".into();
    meta["link"] = "shared".into();
    for name in ["driver", "cuda"] {
        meta[name] = "none".into();
    }
    meta["cores"] = std::thread::available_parallelism()?.get().into();
    Ok(meta)
}

/// What is the same for all devices.
fn any(ranks: &Ranks) -> Result<Value> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut meta = made(&format!("brigade-perf {}", words.join(" ")))?;
    meta["ranks"] = ranks.size().into();
    meta["processes"] = ranks.are_processes().into();
    Ok(meta)
}

/// When, by what and from which sources.
fn made(command: &str) -> Result<Value> {
    let binary = fs::read(std::env::current_exe()?)?;
    let hash: String = Sha256::digest(&binary)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Ok(json!({
        "date": today(),
        "commit": option_env!("BRIGADE_COMMIT").unwrap_or("unknown"),
        "command": command,
        "binary": hash,
    }))
}

/// What the environment tells NCCL.
pub fn nccl_environment(variables: impl Iterator<Item = (OsString, OsString)>) -> String {
    let mut of_nccl: Vec<String> = variables
        .map(|(name, value)| format!("{}={}", name.to_string_lossy(), value.to_string_lossy()))
        .filter(|variable| variable.starts_with("NCCL_"))
        .collect();
    of_nccl.sort();
    match &of_nccl[..] {
        [] => "NCCL as it is".to_owned(),
        set => set.join(" "),
    }
}
