//! Devices in files that all nodes can map.

use super::backing_file;
use super::error::DeviceProblem;
use super::interrupts::Interrupts;
use super::memory::Caching;
use super::opened::OpenedMemory;
use rustix::fs::{FileType, fstat};
use std::path::Path;

pub(super) fn open(path: &Path, caching: Caching) -> Result<OpenedMemory, DeviceProblem> {
    let file = backing_file::open(path)?;
    let stat = fstat(&file).map_err(DeviceProblem::system("fstat"))?;
    let len_bytes = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            backing_file::check_owner(
                stat.st_uid,
                stat.st_mode & 0o777 & backing_file::WRITABLE_BY_OTHERS,
                stat.st_mode & 0o777,
            )?;
            stat.st_size as u64
        }
        FileType::CharacterDevice => {
            backing_file::check_owner(stat.st_uid, 0, 0)?;
            backing_file::character_device_bytes(&stat)?
        }
        _ => {
            return Err(DeviceProblem::unsuitable("neither a file nor a character device", "give the path of one"));
        }
    };
    Ok(OpenedMemory {
        name: path.display().to_string(),
        caching,
        descriptor: file,
        offset_bytes: 0,
        len_bytes,
        lease_obstacle: None,
        interrupts: Interrupts::default(),
        registers: None,
        server: None,
        kept_open: Vec::new(),
    })
}
