//! Finding nvcc and running it. Two callers include this file: the build script beside it, and `cargo xtask kernels`.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Older compilers lack what the sources use.
pub const OLDEST: (u32, u32) = (12, 4);

/// An nvcc that answered.
#[derive(Clone, Debug)]
pub struct Nvcc {
    pub path: PathBuf,
    /// Major and minor.
    pub version: (u32, u32),
}

/// Looks in NVCC, CUDA_HOME, CUDA_PATH, the given toolchain folders, PATH and /usr/local/cuda, in this order.
/// `Err` says what stood in the way.
pub fn find(toolchains: &[PathBuf]) -> Result<Nvcc, String> {
    if let Some(named) = env::var_os("NVCC") {
        if named == "none" {
            return Err("NVCC=none asks for a build without kernels".into());
        }
        return Nvcc::at(Path::new(&named));
    }
    let program = format!("nvcc{}", env::consts::EXE_SUFFIX);
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os)
        .map(|home| PathBuf::from(home).join("bin"));
    let search = env::var_os("PATH").unwrap_or_default();
    let candidates = homes
        .chain(
            toolchains
                .iter()
                .filter_map(|dir| home_in(dir))
                .map(|h| h.join("bin")),
        )
        .chain(env::split_paths(&search))
        .chain([PathBuf::from("/usr/local/cuda/bin")])
        .map(|dir| dir.join(&program));
    let mut refused = None;
    for candidate in candidates.filter(|c| c.is_file()) {
        match Nvcc::at(&candidate) {
            Ok(nvcc) => return Ok(nvcc),
            Err(why) => refused = refused.or(Some(why)),
        }
    }
    Err(refused.unwrap_or_else(|| "no nvcc was found".into()))
}

/// The CUDA home inside a toolchain folder (a Python virtual environment), if it is there.
pub fn home_in(toolchain: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(toolchain.join("lib"))
        .ok()?
        .filter_map(Result::ok)
        .map(|entry| entry.path().join("site-packages/nvidia/cu13"))
        .filter(|home| home.join("bin/nvcc").is_file())
        .collect();
    found.sort();
    found.pop()
}

impl Nvcc {
    /// Asks the compiler at `path` for its version.
    pub fn at(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let output = Command::new(path)
            .arg("--version")
            .output()
            .map_err(|e| format!("{shown} does not run: {e}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = parse_version(&text).ok_or_else(|| format!("{shown} names no version"))?;
        if version < OLDEST {
            return Err(format!(
                "{shown} is {}.{}, and {}.{} is the oldest that will do",
                version.0, version.1, OLDEST.0, OLDEST.1
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            version,
        })
    }

    /// One machine code per generation of GPUs, and PTX of the newest for those to come.
    pub fn targets(&self) -> Vec<&'static str> {
        let mut targets = vec!["arch=compute_80,code=sm_80"];
        if self.version >= (12, 8) {
            targets.push("arch=compute_90a,code=sm_90a");
            targets.push("arch=compute_100,code=[sm_100,compute_100]");
        } else {
            targets.push("arch=compute_90a,code=sm_90a");
            targets.push("arch=compute_90,code=compute_90");
        }
        targets
    }

    /// Compiles one file to a fatbin; `include` holds `params.cuh`. Returns what ptxas said about registers and memory.
    pub fn compile(&self, source: &Path, include: &Path, fatbin: &Path) -> Result<String, String> {
        let mut command = Command::new(&self.path);
        command.args(["-std=c++17", "-O3", "-t", "0", "--fatbin", "-Xptxas", "-v"]);
        command.args(["-Werror", "all-warnings"]);
        // Kernels of one file have much in common: a tenth of the usual size. Drivers of CUDA 12.4 and later read it.
        if self.version >= (12, 8) {
            command.arg("--compress-mode=size");
        }
        for target in self.targets() {
            command.args(["-gencode", target]);
        }
        command
            .arg("-I")
            .arg(include)
            .arg("-o")
            .arg(fatbin)
            .arg(source);
        let output = command
            .output()
            .map_err(|e| format!("{} does not run: {e}", self.path.display()))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            Ok(said)
        } else {
            Err(format!("nvcc refused {}:\n{said}", source.display()))
        }
    }
}

/// `13.0` out of `Cuda compilation tools, release 13.0, V13.0.88`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let release = text.split("release ").nth(1)?.split(',').next()?;
    let (major, minor) = release.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The `.cu` files of a folder, sorted.
pub fn sources(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<io::Result<_>>()?;
    files.retain(|f| f.extension().is_some_and(|e| e == "cu"));
    files.sort();
    Ok(files)
}

/// `fill` for `kernels/fill.cu`.
pub fn name_of(source: &Path) -> String {
    source
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}
