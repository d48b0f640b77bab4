//! Files that all nodes can map.

use super::bell::Kicks;
use super::{Caching, Found, Problem};
use rustix::fs::{FileType, Stat, fcntl_get_seals, fstat, major, minor};
use rustix::fs::{OFlags, SealFlags};
use rustix::process::geteuid;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use volmem::Alignment;

/// Bits of a mode that let others than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// What the kernel aligns mappings of DAX devices to by default: a huge page.
const DAX_ALIGN_BYTES: u64 = 2 << 20;

pub(super) fn open(path: &Path, caching: Caching) -> Result<Found, Problem> {
    let file = open_file(path)?;
    let stat = fstat(&file).map_err(Problem::system("fstat"))?;
    let len_bytes = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            check_owner(stat.st_uid, stat.st_mode & 0o777 & WRITABLE_BY_OTHERS, stat.st_mode & 0o777)?;
            stat.st_size as u64
        }
        FileType::CharacterDevice => {
            check_owner(stat.st_uid, 0, 0)?;
            character_device_bytes(&stat)?
        }
        _ => return Err(Problem::unfit("neither a file nor a character device", "name one that can be mapped")),
    };
    Ok(Found {
        name: path.display().to_string(),
        caching,
        descriptor: file,
        offset_bytes: 0,
        len_bytes,
        lending_obstacle: None,
        kicks: Kicks::default(),
        registers: None,
        server: None,
        keepers: Vec::new(),
    })
}

/// Opens a file for mapping, without waiting for whoever may be at its other end.
pub(super) fn open_file(path: &Path) -> Result<OwnedFd, Problem> {
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options().read(true).write(true).custom_flags(flags.bits() as i32).open(path);
    file.map(OwnedFd::from).map_err(|error| open_failed(path, error))
}

fn open_failed(path: &Path, error: io::Error) -> Problem {
    let remedy = match error.kind() {
        ErrorKind::NotFound => "name one that is there",
        ErrorKind::PermissionDenied => "run this as root, or as the user that owns it",
        ErrorKind::ResourceBusy => "another program has it: stop that one first",
        _ => return Problem::system(format!("open {}", path.display()))(error),
    };
    Problem::unfit(format!("open {}: {error}", path.display()), remedy)
}

/// A device that another user owns is another user's device, and a file that others write is one they can truncate.
pub(super) fn check_owner(owner: u32, forbidden: u32, mode: u32) -> Result<(), Problem> {
    let is_trusted = owner == 0 || owner == geteuid().as_raw();
    if is_trusted && forbidden == 0 { Ok(()) } else { Err(Problem::Owner { owner, mode }) }
}

/// The kernel says how large a DAX device is beside its number, not in its node.
fn character_device_bytes(stat: &Stat) -> Result<u64, Problem> {
    let path = attribute_path(stat, "size");
    number_in(&path).ok_or_else(|| {
        let found = format!("a character device without a size in {}", path.display());
        Problem::unfit(found, "name a DAX device (/dev/dax0.0) or a file")
    })
}

/// Where the kernel describes a character device.
fn attribute_path(stat: &Stat, name: &str) -> PathBuf {
    format!("/sys/dev/char/{}:{}/{name}", major(stat.st_rdev), minor(stat.st_rdev)).into()
}

fn number_in(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// What parts of the memory that are mapped by themselves begin and end at; `None`: at any page. A kernel that does not
/// say it of a DAX device (before 5.10) has made that with its default, unless somebody asked for another: then a part
/// cannot be mapped, and who tries finds out.
pub(super) fn alignment(descriptor: &OwnedFd) -> Option<Alignment> {
    let stat = fstat(descriptor).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return None;
    }
    Alignment::new(number_in(&attribute_path(&stat, "align")).unwrap_or(DAX_ALIGN_BYTES))
}

/// Whether a memory file can never shrink.
pub(super) fn check_seals(descriptor: impl AsFd) -> Result<(), Problem> {
    match fcntl_get_seals(descriptor) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => Ok(()),
        _ => Err(Problem::Shrinkable),
    }
}

/// Whether a file still has the bytes that are mapped.
pub(super) fn check_size(descriptor: &OwnedFd, mapped_bytes: u64) -> Result<(), Problem> {
    let stat = fstat(descriptor).map_err(Problem::system("fstat"))?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let found_bytes = stat.st_size as u64;
    if is_file && found_bytes < mapped_bytes { Err(Problem::Shrunk { found_bytes, mapped_bytes }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn parts_of_a_file_are_mapped_by_pages_and_those_of_a_device_that_says_nothing_by_huge_ones() {
        let of = |file: File| alignment(&file.into()).map(Alignment::bytes);
        assert_eq!(of(tempfile::tempfile().unwrap()), None);
        assert_eq!(of(File::open("/dev/null").unwrap()), Some(DAX_ALIGN_BYTES));
    }

    #[test]
    fn what_cannot_be_opened_is_named_with_the_remedy() {
        for (errno, words) in [
            (Errno::NOENT, "name one that is there"),
            (Errno::ACCESS, "run this as root"),
            (Errno::BUSY, "another program has it"),
            (Errno::ISDIR, "Is a directory"),
        ] {
            let problem = open_failed(Path::new("/dev/vfio/7"), errno.into()).to_string();
            assert!(problem.starts_with("open /dev/vfio/7: ") && problem.contains(words), "{problem}");
        }
    }
}
