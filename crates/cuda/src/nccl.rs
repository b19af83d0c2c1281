//! Finding NCCL. It is loaded at run time, and never a second time: where the process has one already, that one is taken.

use crate::Version;
use libloading::Library;
use std::{
    error::Error as _,
    path::{Path, PathBuf},
};

/// An NCCL that loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nccl {
    /// What was loaded: a path, or a name that the loader found.
    pub path: PathBuf,
    /// The file that the loader took for it, where the system tells.
    pub file: Option<PathBuf>,
    /// Its version: 2.28.3.
    pub version: Version,
}

/// The first version whose communicators have as many channels as they are to.
pub const NCCL_WITH_CHANNELS: Version = Version::of(2, 17);

const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];

/// The NCCL that this process has, or that it can load: from the given folders first, then by the loader's own search.
pub fn find_nccl(folders: &[PathBuf]) -> Option<Nccl> {
    let mut candidates: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| NAMES.iter().map(|name| folder.join(name)))
        .collect();
    candidates.extend(NAMES.iter().map(PathBuf::from));
    NAMES
        .iter()
        .find_map(|name| already_loaded(Path::new(name)))
        .or_else(|| candidates.iter().find_map(|path| load(path)))
}

/// What the loader says if there is none.
pub(crate) fn why_not() -> Option<String> {
    // SAFETY: as in `load`.
    let error = unsafe { Library::new(NAMES[0]) }.err()?;
    // The loader's own words are the cause.
    Some(
        error
            .source()
            .map_or_else(|| error.to_string(), ToString::to_string),
    )
}

#[cfg(unix)]
fn already_loaded(name: &Path) -> Option<Nccl> {
    use libloading::os::unix;
    // RTLD_NOLOAD of Linux: succeeds only for what the process has.
    const NO_LOAD: std::ffi::c_int = 4;
    if !cfg!(target_os = "linux") {
        return None;
    }
    // SAFETY: nothing is loaded, so no initializer runs.
    let library = unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | NO_LOAD) }.ok()?;
    ask(name, &library.into())
}

#[cfg(not(unix))]
fn already_loaded(_: &Path) -> Option<Nccl> {
    None
}

fn load(path: &Path) -> Option<Nccl> {
    // SAFETY: the initializers of NCCL ask nothing of the caller.
    let library = unsafe { Library::new(path) }.ok()?;
    ask(path, &library)
}

fn ask(path: &Path, library: &Library) -> Option<Nccl> {
    // SAFETY: ncclGetVersion has this signature in every NCCL 2.
    // https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclgetversion
    let get_version: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> =
        unsafe { library.get(b"ncclGetVersion") }.ok()?;
    let mut code = 0;
    // SAFETY: the pointer is to a live i32.
    if unsafe { get_version(&mut code) } != 0 {
        return None;
    }
    Some(Nccl {
        path: path.to_owned(),
        file: loaded_file("libnccl.so"),
        version: version_of(code.unsigned_abs()),
    })
}

/// The file of a library that this process has, by the beginning of its name; as Linux tells.
pub(crate) fn loaded_file(begins: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    named(&maps, begins)
}

fn named(maps: &str, begins: &str) -> Option<PathBuf> {
    let files = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut files = files.map(Path::new);
    let file = files.find(|f| {
        f.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with(begins))
    })?;
    Some(file.to_owned())
}

/// 22803 is 2.28.3; before 2.9 the thousands counted: 2804 is 2.8.4.
const fn version_of(code: u32) -> Version {
    let thousands = if code >= 10_000 { 10_000 } else { 1000 };
    Version {
        major: code / thousands,
        minor: code % thousands / 100,
        patch: code % 100,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_counting_versions_are_read() {
        for (code, version) in [(22803, "2.28.3"), (22809, "2.28.9"), (2804, "2.8.4")] {
            assert_eq!(version_of(code).to_string(), version);
        }
        assert!(version_of(22803) < version_of(22809) && version_of(22809) < version_of(22901));
    }

    #[test]
    fn a_loaded_library_is_found_by_its_name() {
        let maps = "7f00-7f10 r-xp 00000000 08:01 42    /usr/lib/libnccl_net.so\n\
                    7f10-7f20 rw-p 00000000 00:00 0     [heap]\n\
                    7f20-7f30 r-xp 00000000 08:01 43    /opt/with space/libnccl.so.2.28.3\n";
        let found = named(maps, "libnccl.so");
        assert_eq!(found, Some("/opt/with space/libnccl.so.2.28.3".into()));
        assert_eq!(named(maps, "libcublasLt.so"), None);
    }

    #[test]
    fn a_folder_without_nccl_is_passed_over() {
        let nowhere = PathBuf::from("/nonexistent");
        let with = find_nccl(std::slice::from_ref(&nowhere));
        assert_eq!(with, find_nccl(&[]));
        assert!(with.is_none_or(|nccl| !nccl.path.starts_with(&nowhere)));
    }
}
