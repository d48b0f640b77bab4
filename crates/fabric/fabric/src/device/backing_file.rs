//! Files that hold the memory of a device: opening and checking them.

use super::error::DeviceProblem;
use rustix::fs::{FileType, Stat, fcntl_get_seals, fstat, major, minor};
use rustix::fs::{OFlags, SealFlags};
use rustix::process::geteuid;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use volmem::Alignment;

/// Permission bits that let users other than the owner write.
pub(super) const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Default alignment of mappings of a DAX device: a huge page.
const DAX_ALIGN_BYTES: u64 = 2 << 20;

/// Opens a file for mapping. Does not block on a FIFO or a terminal.
pub(super) fn open(path: &Path) -> Result<OwnedFd, DeviceProblem> {
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options().read(true).write(true).custom_flags(flags.bits() as i32).open(path);
    file.map(OwnedFd::from).map_err(|error| open_failed(path, error))
}

fn open_failed(path: &Path, error: io::Error) -> DeviceProblem {
    let remedy = match error.kind() {
        ErrorKind::NotFound => "give the path of an existing file",
        ErrorKind::PermissionDenied => "run as root, or as the user that owns it",
        ErrorKind::ResourceBusy => "another program has it open: stop that program first",
        _ => return DeviceProblem::system(format!("open {}", path.display()))(error),
    };
    DeviceProblem::unsuitable(format!("open {}: {error}", path.display()), remedy)
}

/// Checks that only root and this process's user can write the file: another user could truncate it.
pub(super) fn check_owner(owner: u32, forbidden: u32, mode: u32) -> Result<(), DeviceProblem> {
    let is_trusted = owner == 0 || owner == geteuid().as_raw();
    if is_trusted && forbidden == 0 { Ok(()) } else { Err(DeviceProblem::Owner { owner, mode }) }
}

/// Returns the size of a DAX device, which sysfs has under the device number.
pub(super) fn character_device_bytes(stat: &Stat) -> Result<u64, DeviceProblem> {
    let path = attribute_path(stat, "size");
    number_in(&path).ok_or_else(|| {
        let found = format!("a character device without a size in {}", path.display());
        DeviceProblem::unsuitable(found, "give a DAX device (/dev/dax0.0) or a file")
    })
}

/// Path of an attribute of a character device in sysfs.
fn attribute_path(stat: &Stat, name: &str) -> PathBuf {
    format!("/sys/dev/char/{}:{}/{name}", major(stat.st_rdev), minor(stat.st_rdev)).into()
}

fn number_in(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the alignment of mappings of a part of the memory; `None`: a page. Kernels before 5.10 do not report the
/// alignment of a DAX device, so the default is returned. If the device was created with another one, mapping a part
/// fails.
pub(super) fn alignment(descriptor: &OwnedFd) -> Option<Alignment> {
    let stat = fstat(descriptor).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return None;
    }
    Alignment::new(number_in(&attribute_path(&stat, "align")).unwrap_or(DAX_ALIGN_BYTES))
}

/// Checks that a memory file is sealed against shrinking.
pub(super) fn check_seals(descriptor: impl AsFd) -> Result<(), DeviceProblem> {
    match fcntl_get_seals(descriptor) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => Ok(()),
        _ => Err(DeviceProblem::Shrinkable),
    }
}

/// Checks that a file is not smaller than its mapping.
pub(super) fn check_size(descriptor: &OwnedFd, mapped_bytes: u64) -> Result<(), DeviceProblem> {
    let stat = fstat(descriptor).map_err(DeviceProblem::system("fstat"))?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let found_bytes = stat.st_size as u64;
    if is_file && found_bytes < mapped_bytes {
        Err(DeviceProblem::Shrunk { found_bytes, mapped_bytes })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn the_alignment_is_none_for_a_file_and_the_default_for_a_device_that_reports_none() {
        let of = |file: File| alignment(&file.into()).map(Alignment::bytes);
        assert_eq!(of(tempfile::tempfile().unwrap()), None);
        assert_eq!(of(File::open("/dev/null").unwrap()), Some(DAX_ALIGN_BYTES));
    }

    #[test]
    fn an_open_error_names_the_path_and_the_remedy() {
        for (errno, words) in [
            (Errno::NOENT, "give the path of an existing file"),
            (Errno::ACCESS, "run as root"),
            (Errno::BUSY, "another program has it open"),
            (Errno::ISDIR, "Is a directory"),
        ] {
            let problem = open_failed(Path::new("/dev/vfio/7"), errno.into()).to_string();
            assert!(problem.starts_with("open /dev/vfio/7: ") && problem.contains(words), "{problem}");
        }
    }
}
