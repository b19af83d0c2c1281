//! A folder for sockets, that only this process's user may enter.

use crate::proof;
use std::{
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

/// It goes when this is dropped, with all that is in it.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> io::Result<Self> {
        let name = proof::random().map_err(io::Error::other)?;
        let name = format!("brigade-{:032x}", u128::from_le_bytes(name));
        let folder = std::env::temp_dir().join(name);
        // Not recursive: a folder that is there already is an error.
        let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", folder.display())))?;
        Ok(Self(folder))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Nothing depends on it any more, and nobody could be told.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
