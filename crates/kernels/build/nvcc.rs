//! Finding nvcc and running it. Two callers include this file: the build script beside it, and `cargo xtask kernels`.

use std::{
    collections::BTreeSet,
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Older compilers lack what the sources use.
pub const OLDEST: (u32, u32) = (12, 4);

/// A kernel file, compiled.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// `fill` for `kernels/fill.cu`.
    pub name: String,
    pub fatbin: PathBuf,
    /// What ptxas said about registers and memory.
    pub said: String,
}

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

    /// Compiles the `.cu` files of a folder to fatbins in another, but those that lie there already, compiled from the same text by
    /// the same compiler: so several builds under one target folder share them. `header` is what `params.cuh` says; `done` hears of
    /// every file that is there. Sorted by name.
    pub fn compile(
        &self,
        folder: &Path,
        header: &str,
        into: &Path,
        done: &(dyn Fn(&str) + Sync),
    ) -> Result<Vec<Compiled>, String> {
        let failed = |what: &Path, e: io::Error| format!("{}: {e}", what.display());
        fs::create_dir_all(into).map_err(|e| failed(into, e))?;
        // A folder of this text's own, as another build may want another text at the same time.
        let include = into.join(format!("include-{:016x}", hash(header)));
        fs::create_dir_all(&include).map_err(|e| failed(&include, e))?;
        put(&include.join("params.cuh"), header.as_bytes()).map_err(|e| failed(&include, e))?;
        let mut sources = sources(folder).map_err(|e| failed(folder, e))?;
        // The longest first, so that none of them is left alone at the end.
        sources.sort_by_key(|source| fs::metadata(source).map_or(0, |m| u64::MAX - m.len()));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let workers = cores.min(sources.len()).max(1);
        let (next, all) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let one = self.compile_one(source, &include, into, cores / workers);
                        if one.is_err() {
                            // Nobody begins another.
                            next.store(sources.len(), Ordering::Relaxed);
                        }
                        done(&name_of(source));
                        all.lock().unwrap_or_else(PoisonError::into_inner).push(one);
                    }
                });
            }
        });
        let all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut all = all.into_iter().collect::<Result<Vec<Compiled>, _>>()?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn compile_one(
        &self,
        source: &Path,
        include: &Path,
        into: &Path,
        threads: usize,
    ) -> Result<Compiled, String> {
        let name = name_of(source);
        let failed = |e: io::Error| format!("{}: {e}", source.display());
        let text = text_of(source, include).map_err(failed)?;
        let key = hash(&(text, self.version, self.targets()));
        let fatbin = into.join(format!("{name}-{key:016x}.fatbin"));
        let log = fatbin.with_extension("txt");
        // The log is written last.
        if let (true, Ok(said)) = (fatbin.is_file(), fs::read_to_string(&log)) {
            return Ok(Compiled { name, fatbin, said });
        }
        let new = into.join(format!("{name}-{key:016x}.{}", process::id()));
        let said = self.run(source, include, &new, threads)?;
        fs::rename(&new, &fatbin).map_err(failed)?;
        put(&log, said.as_bytes()).map_err(failed)?;
        Ok(Compiled { name, fatbin, said })
    }

    /// Runs the compiler for one file. Returns what ptxas said.
    fn run(
        &self,
        source: &Path,
        include: &Path,
        fatbin: &Path,
        threads: usize,
    ) -> Result<String, String> {
        let mut command = Command::new(&self.path);
        command.args(["-std=c++17", "-O3", "--fatbin", "-Xptxas", "-v"]);
        command.args(["-t", &threads.max(1).to_string()]);
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

/// A file whole or not at all, whoever else writes it.
fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension(format!("new{}", process::id()));
    fs::write(&new, bytes)?;
    fs::rename(&new, path)
}

fn hash(of: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// A source and all that it includes of ours, from beside it or from `include`.
fn text_of(source: &Path, include: &Path) -> io::Result<Vec<String>> {
    let beside = source.parent().unwrap_or(include);
    let (mut seen, mut left) = (BTreeSet::new(), vec![source.to_owned()]);
    let mut texts = Vec::new();
    while let Some(path) = left.pop() {
        if !seen.insert(path.clone()) {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        for line in text.lines() {
            let rest = line.trim_start().strip_prefix("#include \"");
            let Some((name, _)) = rest.and_then(|rest| rest.split_once('"')) else {
                continue;
            };
            let places = [beside.join(name), include.join(name)];
            left.extend(places.into_iter().find(|place| place.is_file()));
        }
        texts.push(text);
    }
    Ok(texts)
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
