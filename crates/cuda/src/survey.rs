//! All that matters for the CUDA device on this host: what is there, and what each missing thing means.

use crate::{
    DeviceInfo, Link, Missing, Nccl, Probe, Version,
    devices::devices,
    driver::{accept, driver_package, driver_version, needed_driver},
    find_nccl,
    handles::{HandleKind, try_handle},
    loading::is_eager,
    lt,
    nccl::{loaded_file, why_not},
    peers::link,
};
use brigade_device::{DataType, Reason};
use cudarc::{cublaslt::sys, driver::CudaContext};
use std::collections::BTreeMap;

/// One thing that was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its name, short.
    pub name: String,
    /// What is there; or what is missing, what that means, and what would help.
    pub found: Result<String, Reason>,
}

/// Looks for everything. On every GPU it takes a context, a little memory and runs one small kernel, so it is for people who
/// wait, and not for programs that serve.
pub fn survey() -> Vec<Finding> {
    Seen::look().findings()
}

/// Two GPUs, and how each reaches the other.
type Pair = ([usize; 2], Result<[Link; 2], Missing>);

/// What was seen.
struct Seen {
    driver: Result<Version, Missing>,
    /// Of NVIDIA's package: 580.95.05.
    package: Option<String>,
    gpus: Result<Vec<DeviceInfo>, Missing>,
    links: Vec<Pair>,
    kernels: Result<Vec<&'static str>, Missing>,
    /// Whether they run, on every GPU.
    runs: Vec<Result<(), Missing>>,
    cublas: Result<(Version, Option<String>), Missing>,
    handles: [Vec<Result<(), Missing>>; 3],
    nccl: Result<Nccl, String>,
    /// Whether kernels are loaded eagerly.
    eager: Result<bool, Missing>,
}

/// For what each kind of handle is needed, in the order of [`Seen::handles`].
const HANDLES: [(HandleKind, &str, &str, &str); 3] = [
    (
        HandleKind::Descriptor,
        "fd handles",
        "groups of GPUs share memory by them",
        "without them no group of GPUs can be joined: use a driver and a container that allow cuMemCreate with file descriptors",
    ),
    (
        HandleKind::Fabric,
        "fabric handles",
        "nothing in Brigade needs them yet",
        "nothing to do: they are for GPUs of several hosts in one NVLink domain (nvidia-imex)",
    ),
    (
        HandleKind::Ipc,
        "ipc handles",
        "for memory of other processes that came from cudaMalloc",
        "without them IpcMemory does not work, and groups do; in a container, --ipc=host may help",
    ),
];

impl Seen {
    fn look() -> Self {
        let gpus = devices();
        let count = gpus.as_ref().map_or(0, Vec::len);
        // Kept meanwhile, so that each is made once. Whether one can be made, every question finds out for itself.
        let _contexts: Vec<_> = (0..count).map(|gpu| CudaContext::new(gpu).ok()).collect();
        let every = |ask: &dyn Fn(usize) -> Result<(), Missing>| (0..count).map(ask).collect();
        let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| [a, b]));
        Self {
            driver: driver_version()
                .and_then(|driver| accept(driver, needed_driver()).map(|()| driver)),
            package: driver_package(),
            links: pairs
                .map(|[a, b]| ([a, b], both(link(a, b), link(b, a))))
                .collect(),
            kernels: kernels(),
            runs: every(&runs),
            cublas: cublas(),
            handles: HANDLES.map(|(kind, ..)| every(&|gpu| try_handle(gpu, kind))),
            nccl: find_nccl(&[])
                .ok_or_else(|| why_not().unwrap_or_else(|| "it tells no version".into())),
            eager: gpus.as_ref().map_err(Clone::clone).and_then(|_| is_eager()),
            gpus,
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let mut all = vec![finding("driver", self.driver())];
        match &self.gpus {
            Ok(gpus) => all.extend(gpus.iter().map(gpu)),
            Err(missing) => all.push(finding("gpus", Err(missing.clone().into()))),
        }
        all.push(finding("cuda kernels", self.kernels()));
        all.push(finding("cublas", self.cublas()));
        if self.gpus.is_ok() {
            all.push(finding("kernel loading", self.loading()));
            all.push(finding("links", self.links()));
            for ((_, name, purpose, remedy), tried) in HANDLES.iter().zip(&self.handles) {
                all.push(finding(name, handle(tried, purpose, remedy)));
            }
        }
        all.push(finding("nccl", self.nccl()));
        all
    }

    fn driver(&self) -> Result<String, Reason> {
        let driver = self.driver.clone()?;
        let package = match &self.package {
            Some(package) => format!("{package}, "),
            None => String::new(),
        };
        let needed = needed_driver();
        Ok(format!(
            "{package}CUDA {driver} (this build needs {needed})"
        ))
    }

    fn kernels(&self) -> Result<String, Reason> {
        let names = self.kernels.clone()?.join(", ");
        let nvcc = brigade_kernels::compiler().map_or(String::new(), |(major, minor)| {
            format!(" (nvcc {major}.{minor})")
        });
        let ran = match on_every_gpu(&self.runs)? {
            0 => String::new(),
            count => format!("; they run on {}", gpus(count)),
        };
        Ok(format!("{names}{nvcc}{ran}"))
    }

    fn cublas(&self) -> Result<String, Reason> {
        let (version, file) = self.cublas.clone()?;
        Ok(match file {
            Some(file) => format!("cuBLASLt {version} ({file})"),
            None => format!("cuBLASLt {version}"),
        })
    }

    fn loading(&self) -> Result<String, Reason> {
        Ok(match self.eager.clone()? {
            false => "lazy".into(),
            true => "eager: no ranks of one process on several GPUs".into(),
        })
    }

    /// Pairs by the kind of their link. Every pair is named where they are not all alike.
    fn links(&self) -> Result<String, Reason> {
        let mut kinds: BTreeMap<Kind, Vec<String>> = BTreeMap::new();
        for ([a, b], links) in &self.links {
            let [there, back] = links.clone()?;
            let pair = format!("{a}-{b}");
            kinds.entry(kind(there, back)).or_default().push(pair);
        }
        let all = self.links.len();
        let told = |(kind, pairs): (&Kind, &Vec<String>)| {
            let which = match pairs.len() {
                count if count < all => format!("GPUs {}", pairs.join(", ")),
                1 => "both GPUs".to_owned(),
                count => format!("all {count} pairs"),
            };
            format!("{}: {which}", kind.told())
        };
        let text: Vec<_> = kinds.iter().map(told).collect();
        if kinds.contains_key(&Kind::None) {
            return Err(Reason::new(
                "cuda_no_peer_access",
                text.join("\n"),
                "groups need GPUs that reach each other's memory: look at nvidia-smi topo -p2p r, and at the IOMMU",
            ));
        }
        Ok(match all {
            0 => "one GPU: a group of GPUs needs two".to_owned(),
            _ => text.join("\n"),
        })
    }

    fn nccl(&self) -> Result<String, Reason> {
        let nccl = self.nccl.as_ref().map_err(|why| {
            Reason::new(
                "nccl-missing",
                format!("NCCL does not load: {why}"),
                "nothing to do for Brigade's own operations; to compare with NCCL install it (pip: nvidia-nccl-cu13; \
                 Debian: libnccl2), and put its folder into LD_LIBRARY_PATH",
            )
        })?;
        let file = nccl.file.as_ref().unwrap_or(&nccl.path);
        Ok(format!("{} ({})", nccl.version, file.display()))
    }
}

fn finding(name: &str, found: Result<String, Reason>) -> Finding {
    Finding {
        name: name.to_owned(),
        found,
    }
}

fn gpu(gpu: &DeviceInfo) -> Finding {
    let (major, minor) = gpu.capability;
    let text = format!(
        "{}, capability {major}.{minor}, {} MiB, {} multiprocessors",
        gpu.name,
        gpu.memory_bytes >> 20,
        gpu.multiprocessors
    );
    let why = if !gpu.is_supported() {
        Some((
            "cuda_gpu_too_old",
            "too old",
            "use a GPU of compute capability 8.0 or later",
        ))
    } else if !gpu.virtual_memory {
        Some((
            "cuda_virtual_memory",
            "no memory mapped by address range",
            "groups need cuMemCreate: use a driver, or a kind of virtual machine, that offers it",
        ))
    } else {
        None
    };
    let found = match why {
        None => Ok(text),
        Some((code, what, remedy)) => Err(Reason::new(code, format!("{text}: {what}"), remedy)),
    };
    finding(&format!("gpu {}", gpu.ordinal), found)
}

/// How many GPUs there are, if all said yes; else what the first one said that did not.
fn on_every_gpu(tried: &[Result<(), Missing>]) -> Result<usize, Reason> {
    match tried.iter().position(Result::is_err) {
        None => Ok(tried.len()),
        Some(first) => {
            let bad: Vec<_> = (0..tried.len()).filter(|&i| tried[i].is_err()).collect();
            let on: Vec<_> = bad.iter().map(ToString::to_string).collect();
            let why: Reason = match &tried[first] {
                Err(missing) => missing.clone().into(),
                Ok(()) => return Ok(tried.len()),
            };
            let plural = if on.len() > 1 { "s" } else { "" };
            let what = format!("not on GPU{plural} {}: {}", on.join(", "), why.what);
            Err(Reason::new(why.code, what, why.remedy))
        }
    }
}

fn gpus(count: usize) -> String {
    match count {
        1 => "the GPU".to_owned(),
        count => format!("all {count} GPUs"),
    }
}

fn handle(
    tried: &[Result<(), Missing>],
    purpose: &str,
    remedy: &'static str,
) -> Result<String, Reason> {
    match on_every_gpu(tried) {
        Ok(count) => Ok(format!("work on {}; {purpose}", gpus(count))),
        Err(why) => Err(Reason::new(why.code, why.what, remedy)),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    NvLink,
    Pcie,
    None,
}

impl Kind {
    fn told(self) -> &'static str {
        match self {
            Self::NvLink => "NVLink, peer access both ways",
            Self::Pcie => "PCIe, peer access both ways",
            Self::None => "no peer access",
        }
    }
}

/// Atomics on the other's memory are the link's own over NVLink, and not over PCIe.
fn kind(there: Link, back: Link) -> Kind {
    if !(there.access && back.access) {
        Kind::None
    } else if there.native_atomics && back.native_atomics {
        Kind::NvLink
    } else {
        Kind::Pcie
    }
}

fn both(there: Result<Link, Missing>, back: Result<Link, Missing>) -> Result<[Link; 2], Missing> {
    Ok([there?, back?])
}

fn kernels() -> Result<Vec<&'static str>, Missing> {
    brigade_kernels::fatbin("fill")?;
    Ok(brigade_kernels::kernels().iter().map(|k| k.name).collect())
}

/// Whether a small kernel runs.
fn runs(gpu: usize) -> Result<(), Missing> {
    Probe::open(gpu)?
        .fill(64, 0, 0..64, DataType::BF16)
        .map(drop)
}

fn cublas() -> Result<(Version, Option<String>), Missing> {
    if !lt::is_there() {
        return Err(Missing::Cublas);
    }
    // SAFETY: the library is there, and the call needs nothing.
    let code = unsafe { sys::cublasLtGetVersion() } as u32;
    let file = loaded_file("libcublasLt.so").map(|file| file.display().to_string());
    Ok((library_version(code), file))
}

/// 130101 is 13.1; before 10.2 the thousands counted.
const fn library_version(code: u32) -> Version {
    match code {
        100_000.. => Version::of(code / 10_000, code / 100 % 100),
        _ => Version::of(code / 1000, code / 100 % 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NVLINK: Link = Link {
        access: true,
        native_atomics: true,
        performance_rank: 0,
    };

    fn host(gpus: usize, link: impl Fn(usize, usize) -> Link) -> Seen {
        let gpu = |ordinal| DeviceInfo {
            ordinal,
            name: "NVIDIA H200".into(),
            uuid: [ordinal as u8; 16],
            capability: (9, 0),
            memory_bytes: 143_771 << 20,
            multiprocessors: 132,
            virtual_memory: true,
            cooperative_launch: true,
        };
        let pairs = (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| [a, b]));
        let fine = || vec![Ok(()); gpus];
        Seen {
            driver: Ok(Version::from_code(13000)),
            package: Some("580.95.05".into()),
            gpus: Ok((0..gpus).map(gpu).collect()),
            links: pairs
                .map(|[a, b]| ([a, b], Ok([link(a, b), link(b, a)])))
                .collect(),
            kernels: Ok(vec!["fill", "probe"]),
            runs: fine(),
            cublas: Ok((
                library_version(130_101),
                Some("/lib/libcublasLt.so.13".into()),
            )),
            handles: [fine(), fine(), fine()],
            nccl: Err("libnccl.so.2: cannot open".into()),
            eager: Ok(false),
        }
    }

    fn found(seen: &Seen, name: &str) -> Result<String, Reason> {
        let mut all = seen.findings().into_iter();
        all.find(|f| f.name == name).expect(name).found
    }

    #[test]
    fn links_are_told_by_kind_and_every_pair_is_named() {
        let text = |seen: Seen| found(&seen, "links");
        let nvlink = |_, _| NVLINK;
        assert_eq!(
            text(host(4, nvlink)).unwrap(),
            "NVLink, peer access both ways: all 6 pairs"
        );
        assert_eq!(
            text(host(2, nvlink)).unwrap(),
            "NVLink, peer access both ways: both GPUs"
        );
        assert!(text(host(1, nvlink)).unwrap().starts_with("one GPU"));
        let mixed = |a: usize, b: usize| Link {
            native_atomics: a / 2 == b / 2,
            ..NVLINK
        };
        assert_eq!(
            text(host(4, mixed)).unwrap(),
            "NVLink, peer access both ways: GPUs 0-1, 2-3\nPCIe, peer access both ways: GPUs 0-2, 0-3, 1-2, 1-3"
        );
        // One way is none.
        let one_way = |a: usize, b: usize| Link {
            access: a < b,
            ..NVLINK
        };
        let why = text(host(2, one_way)).unwrap_err();
        assert_eq!(
            (why.code, &*why.what),
            ("cuda_no_peer_access", "no peer access: both GPUs")
        );
    }

    #[test]
    fn what_does_not_work_names_its_gpus_and_what_it_means() {
        let mut seen = host(3, |_, _| NVLINK);
        let refused = Missing::Refused {
            call: "cuMemCreate",
            code: 800,
        };
        seen.handles[1] = vec![Err(refused.clone()); 3];
        seen.handles[2] = vec![Ok(()), Err(refused.clone()), Err(refused)];
        let fabric = found(&seen, "fabric handles").unwrap_err();
        assert_eq!(fabric.code, "cuda_call_refused");
        assert_eq!(
            fabric.what,
            "not on GPUs 0, 1, 2: the NVIDIA driver refused cuMemCreate with code 800"
        );
        assert!(fabric.remedy.starts_with("nothing to do"));
        let ipc = found(&seen, "ipc handles").unwrap_err();
        assert!(ipc.what.starts_with("not on GPUs 1, 2: "), "{ipc:?}");
        assert_eq!(
            found(&seen, "fd handles").unwrap(),
            "work on all 3 GPUs; groups of GPUs share memory by them"
        );
        assert!(
            found(&seen, "cuda kernels")
                .unwrap()
                .ends_with("they run on all 3 GPUs")
        );
        assert!(
            found(&seen, "driver")
                .unwrap()
                .starts_with("580.95.05, CUDA 13.0")
        );
        assert_eq!(
            found(&seen, "cublas").unwrap(),
            "cuBLASLt 13.1 (/lib/libcublasLt.so.13)"
        );
        let nccl = found(&seen, "nccl").unwrap_err();
        assert_eq!(
            (nccl.code, &*nccl.what),
            (
                "nccl-missing",
                "NCCL does not load: libnccl.so.2: cannot open"
            )
        );
        seen.nccl = Ok(Nccl {
            path: "libnccl.so.2".into(),
            file: Some("/usr/lib/libnccl.so.2.28.9".into()),
            version: Version {
                major: 2,
                minor: 28,
                patch: 9,
            },
        });
        assert_eq!(
            found(&seen, "nccl").unwrap(),
            "2.28.9 (/usr/lib/libnccl.so.2.28.9)"
        );
    }

    #[test]
    fn old_gpus_are_found_and_refused() {
        let mut seen = host(2, |_, _| NVLINK);
        if let Ok(gpus) = &mut seen.gpus {
            gpus[0].capability = (7, 0);
            gpus[1].virtual_memory = false;
        }
        assert_eq!(found(&seen, "gpu 0").unwrap_err().code, "cuda_gpu_too_old");
        assert_eq!(
            found(&seen, "gpu 1").unwrap_err().code,
            "cuda_virtual_memory"
        );
    }

    #[test]
    fn a_host_without_a_gpu_is_told_what_it_lacks() {
        let mut seen = host(0, |_, _| NVLINK);
        let missing = Missing::Driver { gpu_seen: false };
        (seen.driver, seen.gpus) = (Err(missing.clone()), Err(missing));
        seen.cublas = Err(Missing::Cublas);
        let names: Vec<_> = seen.findings().into_iter().map(|f| f.name).collect();
        assert_eq!(names, ["driver", "gpus", "cuda kernels", "cublas", "nccl"]);
        for name in ["driver", "gpus", "cublas"] {
            assert!(!found(&seen, name).unwrap_err().remedy.is_empty());
        }
        assert!(found(&seen, "cuda kernels").is_ok());
    }

    /// Whatever this host is.
    #[test]
    fn a_survey_always_answers() {
        let all = survey();
        assert!(all.len() >= 5, "{all:?}");
        for finding in all {
            match finding.found {
                Ok(text) => assert!(!text.is_empty()),
                Err(why) => assert!(!why.what.is_empty() && !why.remedy.is_empty(), "{why:?}"),
            }
        }
    }
}
