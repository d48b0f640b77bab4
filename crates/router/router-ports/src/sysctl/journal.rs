//! The file that remembers changed settings while a process has them changed, and after it was killed.
//!
//! It names the network namespace by the boot identifier of the machine and the namespace's cookie, which the kernel
//! does not use again, unlike inode numbers: the settings of another namespace, or of one that was made anew under the
//! same name, are not touched. A checksum covers the file: a damaged one is not used.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::setting::Setting;
use crate::namespace::cookie_of_thread;

/// First line of the file.
const MAGIC: &str = "crosslane-sysctls 1";

/// The result of restoring what a killed process has left changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// This number of settings was restored; the file is removed.
    Restored(usize),
    /// The file is not about the namespace of the calling thread, or it is damaged; it is not removed.
    OfAnotherNamespace,
}

/// A file for the settings of one network namespace.
#[derive(Debug)]
pub(super) struct Journal {
    file: PathBuf,
    /// Boot identifier and cookie of the namespace.
    identity: String,
    /// The path by which the namespace is found again.
    namespace: Option<PathBuf>,
}

impl Journal {
    /// Returns the journal of the calling thread's namespace. The file is created by [`Journal::write`].
    pub(super) fn new(file: &Path, namespace: Option<&Path>) -> io::Result<Journal> {
        let (file, namespace) = (file.to_owned(), namespace.map(Path::to_owned));
        Ok(Journal { file, identity: identity_of_thread()?, namespace })
    }

    /// Replaces the file.
    pub(super) fn write(&self, settings: &[Setting]) -> io::Result<()> {
        let namespace = self.namespace.as_deref().and_then(Path::to_str).unwrap_or_default();
        let mut text = format!("{MAGIC}\n{}\n{namespace}\n", self.identity);
        settings.iter().for_each(|setting| text += &setting.line());
        let sum = checksum(&text);
        let _ = writeln!(text, "{sum:016x}");
        let new = self.file.with_extension("sysctls-new");
        fs::write(&new, text)?;
        fs::rename(new, &self.file)
    }

    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.file);
    }

    /// Returns the settings in a file if it is about this namespace.
    pub(super) fn read_for_same_namespace(&self, file: &Path) -> Option<Vec<Setting>> {
        let Contents { identity, settings, .. } = Contents::read(file)?;
        (identity == self.identity).then_some(settings)
    }
}

/// The contents of a valid file.
struct Contents {
    identity: String,
    namespace: Option<PathBuf>,
    settings: Vec<Setting>,
}

impl Contents {
    /// Returns `None` if there is no valid file.
    fn read(file: &Path) -> Option<Contents> {
        let text = fs::read_to_string(file).ok()?;
        let (body, sum) = text.strip_suffix('\n')?.rsplit_once('\n')?;
        let body = format!("{body}\n");
        if sum != format!("{:016x}", checksum(&body)) {
            return None;
        }
        let mut lines = body.lines();
        if lines.next()? != MAGIC {
            return None;
        }
        let (identity, namespace) = (lines.next()?.to_owned(), lines.next()?);
        let namespace = Some(PathBuf::from(namespace)).filter(|path| !path.as_os_str().is_empty());
        let settings = lines.map(Setting::parse).collect::<Option<_>>()?;
        Some(Contents { identity, namespace, settings })
    }
}

/// Returns the path of the network namespace that a file is about; `None` if it has none, or if the file is damaged or
/// of an earlier boot of the machine.
pub(super) fn namespace_of(file: &Path) -> Option<PathBuf> {
    Contents::read(file).filter(|contents| contents.identity.starts_with(&boot_id().unwrap_or_default()))?.namespace
}

pub(super) fn is_damaged(file: &Path) -> bool {
    file.exists() && Contents::read(file).is_none()
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn identity_of_thread() -> io::Result<String> {
    Ok(format!("{} {}", boot_id()?, cookie_of_thread()?))
}

/// FNV-1a: detects damage, not intent. The folder of the file belongs to the user alone.
pub(super) fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
