//! The drop-in file of a service: written as a whole, and recognized by its first line.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::name::ServiceName;
use super::unit::{ADMINISTRATOR_FOLDER, UnitFiles};

/// The name of the file.
pub const FILE_NAME: &str = "50-crosslane.conf";
/// How the file begins.
const MARK: &str = "# Written by 'crosslane enable'";
const FILE_MODE: u32 = 0o644;

/// The drop-in of a service.
pub struct DropIn {
    /// As it is called below the root directory.
    path: PathBuf,
    file: PathBuf,
}

/// What is at the place of the file.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Nothing,
    /// A file that this command has written.
    Own(String),
    /// Another one.
    Foreign,
}

impl DropIn {
    pub fn of(service: &ServiceName, files: &UnitFiles) -> Self {
        let path = Path::new(ADMINISTRATOR_FOLDER).join(service.drop_in_folder()).join(FILE_NAME);
        Self { file: files.path(&path), path }
    }

    /// Returns its path below the root directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text of a file with these settings of `[Service]`.
    pub fn text(service: &ServiceName, lines: &[String]) -> String {
        format!("{MARK}; to remove it: crosslane disable {}\n[Service]\n{}\n", service.short(), lines.join("\n"))
    }

    pub fn found(&self) -> Result<Found> {
        let shown = self.path.display();
        let found = match fs::symlink_metadata(&self.file) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(Found::Nothing);
            }
            found => found.with_context(|| format!("drop-in '{shown}' cannot be read; check it"))?,
        };
        if !found.is_file() {
            return Ok(Found::Foreign);
        }
        let bytes = fs::read(&self.file).with_context(|| format!("drop-in '{shown}' cannot be read; check it"))?;
        let text = String::from_utf8(bytes).unwrap_or_default();
        Ok(if text.starts_with(MARK) { Found::Own(text) } else { Found::Foreign })
    }

    /// Writes the file.
    pub fn write(&self, text: &str) -> Result<()> {
        let write = || -> std::io::Result<()> {
            let folder = self.file.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(folder)?;
            // systemd reads only names that end with '.conf'.
            let mut file = tempfile::Builder::new().prefix(".crosslane-").tempfile_in(folder)?;
            file.write_all(text.as_bytes())?;
            file.as_file().set_permissions(fs::Permissions::from_mode(FILE_MODE))?;
            file.as_file().sync_all()?;
            file.persist(&self.file)?;
            Ok(())
        };
        let shown = self.path.display();
        write().with_context(|| format!("drop-in '{shown}' cannot be written; free space there, and repeat this"))
    }

    /// Removes the file, and its folder if that is empty.
    pub fn remove(&self) -> Result<()> {
        let shown = self.path.display();
        fs::remove_file(&self.file).with_context(|| format!("drop-in '{shown}' cannot be removed; rm it"))?;
        // The folder stays if there are other drop-ins in it.
        let _ = self.file.parent().map(fs::remove_dir);
        Ok(())
    }
}
