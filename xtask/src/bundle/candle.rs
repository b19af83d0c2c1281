//! What candle's programs need to be built: a CUDA home, where candle finds libraries to link that this machine need not have.
//!
//! candle has cudarc link CUDA's libraries. Which functions they have, cudarc's bindings say: that is all that a linker wants to know of
//! them, so libraries of that name with empty functions take their place here, and the real ones are loaded over there. The runtime, which
//! candle's own kernels use, goes into the programs.

use crate::{nvcc::Nvcc, toolchain, workspace::Workspace};
use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::CargoOpt;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A library that is linked, and loaded over there.
struct Library {
    name: &'static str,
    /// What the name ends with there, if it is not the major number of CUDA's version.
    number: Option<u32>,
    /// The folder of its bindings in cudarc, and what its functions' names begin with.
    bindings: &'static str,
    prefix: &'static str,
}

const LIBRARIES: [Library; 5] = [
    Library {
        name: "cuda",
        number: Some(1),
        bindings: "driver",
        prefix: "cu",
    },
    Library {
        name: "cublas",
        number: None,
        bindings: "cublas",
        prefix: "cublas",
    },
    Library {
        name: "cublasLt",
        number: None,
        bindings: "cublaslt",
        prefix: "cublasLt",
    },
    Library {
        name: "curand",
        number: Some(10),
        bindings: "curand",
        prefix: "curand",
    },
    Library {
        name: "nvrtc",
        number: None,
        bindings: "nvrtc",
        prefix: "nvrtc",
    },
];

impl Library {
    /// Its name over there.
    fn soname(&self, cuda_major: u32) -> String {
        format!("lib{}.so.{}", self.name, self.number.unwrap_or(cuda_major))
    }
}

/// Packages and what of theirs is packed; features of all of them, so that they are built once.
pub(super) const PACKAGES: [&str; 3] = ["brigade-candle", "brigade-demo", "brigade-perf"];
pub(super) const FEATURES: &str = "brigade-candle/cuda,brigade-demo/cuda,brigade-perf/candle";
pub(super) const BINARIES: [&str; 2] = ["brigade-demo", "brigade-perf"];
/// The program of brigade-candle's tests on GPUs, and what it is called in the bundle, where `gpu` is another one.
pub(super) const TEST: (&str, &str) = ("gpu", "candle-gpu");

/// 13 of 13000, 12 of 12060.
fn major(version: &str) -> Result<u32> {
    let number: Option<u32> = version.parse().ok();
    let major = number.map(|n| n / 1000);
    major
        .filter(|major| (12..=99).contains(major))
        .with_context(|| {
            format!("--cuda is {version}: a version as cudarc writes them, 12060 or 13000")
        })
}

/// Lays out a CUDA home for programs of this version of CUDA. Gives its folder.
pub(super) fn home(workspace: &Workspace, nvcc: &Nvcc, version: &str) -> Result<PathBuf> {
    let major = major(version)?;
    ensure!(
        nvcc.version.0 >= major,
        "nvcc {}.{} is older than CUDA {major}: name another in NVCC or CUDA_HOME",
        nvcc.version.0,
        nvcc.version.1
    );
    let home = workspace.target.join(format!("candle/cuda{major}"));
    let libraries = home.join("lib64");
    if home.exists() {
        fs::remove_dir_all(&home).with_context(|| format!("removing {}", home.display()))?;
    }
    fs::create_dir_all(&libraries).with_context(|| libraries.display().to_string())?;
    let real = toolchain::home(nvcc)?;
    for part in ["bin", "include", "nvvm"] {
        link(&real.join(part), &home.join(part))?;
    }
    let runtime = ["lib64", "lib", "targets/x86_64-linux/lib"]
        .map(|lib| real.join(lib).join("libcudart_static.a"));
    let Some(runtime) = runtime.iter().find(|path| path.is_file()) else {
        bail!("{} has no libcudart_static.a", real.display());
    };
    link(runtime, &libraries.join("libcudart.a"))?;
    let bindings = bindings(workspace)?;
    for library in &LIBRARIES {
        let path = bindings.join(library.bindings).join("sys/mod.rs");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        stand_in(
            library,
            &functions(&text, library.prefix),
            major,
            &libraries,
        )?;
    }
    Ok(home)
}

/// Where cudarc has its bindings.
fn bindings(workspace: &Workspace) -> Result<PathBuf> {
    let mut metadata = cargo_metadata::MetadataCommand::new();
    metadata
        .current_dir(&workspace.root)
        .features(CargoOpt::AllFeatures);
    let metadata = metadata.exec()?;
    let mut packages = metadata.packages.iter();
    let cudarc = packages.find(|package| package.name.as_str() == "cudarc");
    let manifest = cudarc
        .context("the workspace has no cudarc")?
        .manifest_path
        .as_std_path();
    Ok(manifest.with_file_name("src"))
}

/// The functions that bindings name, of those that begin so.
fn functions<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let named = text.split("fn ").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        let (name, rest) = rest.split_at(end);
        (rest.starts_with('(') && name.starts_with(prefix)).then_some(name)
    });
    named.collect()
}

/// Makes a library that has these functions, and does nothing.
fn stand_in(library: &Library, functions: &BTreeSet<&str>, major: u32, into: &Path) -> Result<()> {
    ensure!(
        !functions.is_empty(),
        "cudarc names no functions of {}",
        library.name
    );
    let source = into.join(format!("{}.c", library.name));
    let text: String = functions
        .iter()
        .map(|name| format!("void {name}(void) {{}}\n"))
        .collect();
    fs::write(&source, text).with_context(|| source.display().to_string())?;
    let soname = format!("-Wl,-soname,{}", library.soname(major));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-w", &soname, "-o"]);
    cc.arg(into.join(format!("lib{}.so", library.name)))
        .arg(&source);
    let output = cc
        .output()
        .context("cc does not start: install a C compiler")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "cc failed on {}: {}",
        source.display(),
        said.trim()
    );
    Ok(())
}

#[cfg(unix)]
fn link(to: &Path, at: &Path) -> Result<()> {
    std::os::unix::fs::symlink(to, at).with_context(|| at.display().to_string())
}

#[cfg(not(unix))]
fn link(_: &Path, at: &Path) -> Result<()> {
    bail!("{}: bundles with candle are made on Unix", at.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_loaded_by_the_names_of_their_cuda() {
        let of = |version| {
            let major = major(version).unwrap();
            LIBRARIES.map(|library| library.soname(major)).join(" ")
        };
        assert_eq!(
            of("12060"),
            "libcuda.so.1 libcublas.so.12 libcublasLt.so.12 libcurand.so.10 libnvrtc.so.12"
        );
        assert_eq!(
            of("13000"),
            "libcuda.so.1 libcublas.so.13 libcublasLt.so.13 libcurand.so.10 libnvrtc.so.13"
        );
        for wrong in ["", "13", "13.0", "11080"] {
            let said = major(wrong).unwrap_err().to_string();
            assert!(said.starts_with(&format!("--cuda is {wrong}:")), "{said}");
        }
    }

    #[test]
    fn functions_are_those_that_bindings_name() {
        let text = "pub fn cuInit(Flags: u32) -> CUresult;\npub unsafe fn cuGraph_v2(x: fn (u8)) {}\n\
                    pub type F = Option<unsafe extern \"C\" fn(cuX: u8)>; fn other(cuNot: u8); fn cuDrop<T>(t: T)";
        let found: Vec<_> = functions(text, "cu").into_iter().collect();
        assert_eq!(found, ["cuGraph_v2", "cuInit"]);
    }

    #[cfg(unix)]
    #[test]
    fn programs_link_with_what_stands_in() {
        let shell = xshell::Shell::new().unwrap();
        let folder = shell.create_temp_dir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let library = &LIBRARIES[1];
        stand_in(
            library,
            &BTreeSet::from(["cublasCreate_v2"]),
            12,
            folder.path(),
        )
        .unwrap();
        let links = |function: &str| {
            let text = format!("void {function}(void);\nint main(void) {{ {function}(); }}\n");
            fs::write(at("main.c"), text).unwrap();
            let mut cc = Command::new("cc");
            cc.arg(at("main.c")).arg("-L").arg(folder.path());
            cc.arg("-lcublas").arg("-o").arg(at("main"));
            cc.output().unwrap().status.success()
        };
        assert!(links("cublasCreate_v2"));
        assert!(!links("cublasDestroy_v2"));
        assert!(links("cublasCreate_v2"));
        let program = fs::read(at("main")).unwrap();
        let soname = b"libcublas.so.12\0";
        assert!(program.windows(soname.len()).any(|part| part == soname));
        assert!(stand_in(library, &BTreeSet::new(), 12, folder.path()).is_err());
    }
}
