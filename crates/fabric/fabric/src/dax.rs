//! Links in memory that two machines map: a CXL or persistent-memory device, or a file in place of one.
//!
//! The memory is `/dev/daxX.Y`, or a file on a DAX mount, on huge pages or in tmpfs. A program cannot find out whether
//! the machines' caches are coherent, so the configuration of the link states it. Coherent memory ([`Region`]) is used
//! like any shared memory. In non-coherent memory ([`DeviceMemory`]) each line is written back by its writer and
//! invalidated by its reader.
//!
//! The memory has no interrupts: the doorbell is a counter that waiters poll ([`PolledDoorbell`]).
//!
//! A file must not shrink while it is mapped: the kernel kills a process that accesses a mapping behind the end of its
//! file. No seal prevents that here, so only the file's operator may have access to it. [`DaxMemory::check_length`]
//! checks that it still has its length.

use crate::device::DeviceMemory;
use crate::memory_link::{InitialContents, MemoryLink};
use crate::pair_layout::{PAGE_BYTES, PairLayout};
use crate::shm::TMPFS_MAGIC;
use crate::{Endpoint, Memory, PolledDoorbell};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxAttributes, StatxFlags};
use rustix::fs::{fstat, fstatfs, major, minor, open, statx};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Mapping, Region};

/// One endpoint of a link in such memory.
pub type DaxLink<M> = MemoryLink<PolledDoorbell<M>, M>;

/// Why the memory could not be used.
#[derive(Debug)]
pub enum DaxError {
    /// A system call failed.
    System {
        /// The system call.
        call: &'static str,
        /// The device or file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The path is not DAX memory.
    NotDax {
        /// The device or file.
        path: PathBuf,
        /// What the path is.
        found: String,
    },
    /// The length is not a positive multiple of the mapping's alignment.
    Unaligned {
        /// The device or file.
        path: PathBuf,
        /// Bytes found.
        len_bytes: u64,
        /// Bytes of the alignment.
        align_bytes: u64,
    },
    /// The memory is too small for two windows.
    TooSmall {
        /// The device or file.
        path: PathBuf,
        /// Bytes found.
        len_bytes: u64,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes of a window.
        window_bytes: usize,
    },
    /// The file has become shorter.
    Shrunk {
        /// The device or file.
        path: PathBuf,
        /// Bytes found.
        len_bytes: u64,
        /// Bytes mapped.
        mapped_bytes: usize,
    },
    /// The size of a window is not a positive multiple of the cache line.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// The memory is not formatted, or by another version.
    UnknownLayout {
        /// The device or file.
        path: PathBuf,
        /// First word found.
        found: u64,
        /// First word of this version.
        expected: u64,
    },
    /// The memory is formatted for windows of another size.
    OtherWindowSize {
        /// The device or file.
        path: PathBuf,
        /// Bytes of a window there.
        found_bytes: u64,
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// This processor has no instructions that write back cache lines.
    NoWriteBack {
        /// The device or file.
        path: PathBuf,
    },
}

impl fmt::Display for DaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { call, path, error } => {
                write!(f, "dax '{}': {call}: {error}; give a device that exists and that you may use", path.display())
            }
            Self::NotDax { path, found } => write!(
                f,
                "dax '{}': {found}; use /dev/daxX.Y or a file on a DAX mount, huge pages or tmpfs",
                path.display()
            ),
            Self::Unaligned { path, len_bytes, align_bytes } => write!(
                f,
                "dax '{}': {len_bytes} bytes; make it a positive multiple of {align_bytes} bytes",
                path.display()
            ),
            Self::TooSmall { path, len_bytes, needed_bytes, window_bytes } => write!(
                f,
                "dax '{}': {len_bytes} bytes, but two windows of {window_bytes} bytes need {needed_bytes}; \
                 make it larger or the windows smaller",
                path.display()
            ),
            Self::Shrunk { path, len_bytes, mapped_bytes } => write!(
                f,
                "dax '{}': shrunk to {len_bytes} bytes of {mapped_bytes}; stop, and let no other user write the file",
                path.display()
            ),
            Self::WindowSize { window_bytes } => {
                write!(f, "window of {window_bytes} bytes: use a positive multiple of {CACHE_LINE_BYTES}")
            }
            Self::UnknownLayout { path, found, expected } => write!(
                f,
                "dax '{}': begins with {found:#x}, not {expected:#x}; format it, if it is not in use",
                path.display()
            ),
            Self::OtherWindowSize { path, found_bytes, window_bytes } => write!(
                f,
                "dax '{}': formatted for windows of {found_bytes} bytes, not {window_bytes}; \
                 ask for that size or format it again",
                path.display()
            ),
            Self::NoWriteBack { path } => {
                write!(f, "dax '{}': this processor cannot write cache lines back; use coherent memory", path.display())
            }
        }
    }
}

impl std::error::Error for DaxError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// A device or file that is mapped as a whole.
#[derive(Debug)]
pub struct DaxMemory {
    path: PathBuf,
    file: OwnedFd,
    region: Region,
}

impl DaxMemory {
    /// Maps the whole device or file.
    ///
    /// # Errors
    /// The path is not usable. The error has the values found.
    pub fn open(path: &Path) -> Result<Self, DaxError> {
        Self::open_by(path, Path::new("/sys"))
    }

    /// Opens the memory with sysfs at `sys`.
    fn open_by(path: &Path, sys: &Path) -> Result<Self, DaxError> {
        let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(failed("open", path))?;
        let extent = Extent::of(&file, path, sys)?;
        let is_whole = extent.len_bytes != 0 && extent.len_bytes.is_multiple_of(extent.align_bytes);
        let len_bytes = isize::try_from(extent.len_bytes).ok().filter(|_| is_whole).ok_or(DaxError::Unaligned {
            path: path.into(),
            len_bytes: extent.len_bytes,
            align_bytes: extent.align_bytes,
        })?;
        let mapping = Mapping::new(file.as_fd(), len_bytes.unsigned_abs()).map_err(|error| DaxError::System {
            call: "mmap",
            path: path.into(),
            error,
        })?;
        Ok(Self { path: path.into(), file, region: Region::of_mapping(Arc::new(mapping)) })
    }

    /// Returns the memory, for machines whose caches are coherent.
    pub fn coherent(&self) -> Region {
        self.region.clone()
    }

    /// Returns the memory, for machines whose caches are not coherent.
    ///
    /// # Errors
    /// [`DaxError::NoWriteBack`].
    pub fn non_coherent(&self) -> Result<DeviceMemory, DaxError> {
        DeviceMemory::non_coherent(self.region.clone()).ok_or_else(|| DaxError::NoWriteBack { path: self.path.clone() })
    }

    /// Checks that a file has not become shorter than its mapping. A device does not shrink.
    ///
    /// # Errors
    /// [`DaxError::Shrunk`].
    pub fn check_length(&self) -> Result<(), DaxError> {
        let stat = fstat(&self.file).map_err(failed("fstat", &self.path))?;
        let (len_bytes, mapped_bytes) = (stat.st_size as u64, self.region.len_bytes());
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || len_bytes >= mapped_bytes as u64 {
            return Ok(());
        }
        Err(DaxError::Shrunk { path: self.path.clone(), len_bytes, mapped_bytes })
    }

    /// Formats `memory`, which is this memory, for a link with windows of `window_bytes`. It must not be in use.
    ///
    /// # Errors
    /// [`DaxError::WindowSize`] and [`DaxError::TooSmall`].
    pub fn format<M: Memory>(&self, memory: &M, window_bytes: usize) -> Result<(), DaxError> {
        self.layout(memory, window_bytes)?;
        for offset in (0..PAGE_BYTES).step_by(size_of::<u64>()) {
            memory.store_u64(offset, 0, Ordering::Relaxed);
        }
        memory.store_u64(HEADER + WINDOW_WORD, window_bytes as u64, Ordering::Relaxed);
        memory.store_u64(HEADER, VERSION, Ordering::Release);
        memory.write_back(0, PAGE_BYTES);
        memory.barrier();
        Ok(())
    }

    /// Opens an endpoint of the link that `memory`, which is this memory, is formatted for.
    ///
    /// # Errors
    /// The layout does not fit. The error has the values found.
    pub fn link<M: Memory>(&self, memory: &M, endpoint: Endpoint, window_bytes: usize) -> Result<DaxLink<M>, DaxError> {
        let layout = self.layout(memory, window_bytes)?;
        self.check_header(memory, window_bytes)?;
        let [a, b] = layout.sides(memory);
        let [doorbell_a, doorbell_b] =
            [0, 1].map(|index| memory.part(DOORBELLS + index * CACHE_LINE_BYTES, CACHE_LINE_BYTES));
        let (own, peer, doorbell) = match endpoint {
            Endpoint::A => (a, b, PolledDoorbell::attach(doorbell_a, doorbell_b)),
            Endpoint::B => (b, a, PolledDoorbell::attach(doorbell_b, doorbell_a)),
        };
        Ok(MemoryLink::attach(own, peer, doorbell, InitialContents::Unknown))
    }

    fn layout(&self, memory: &impl Memory, window_bytes: usize) -> Result<PairLayout, DaxError> {
        let layout = PairLayout::new(window_bytes).ok_or(DaxError::WindowSize { window_bytes })?;
        let (len_bytes, needed_bytes) = (memory.len_bytes() as u64, layout.span_bytes() as u64);
        if needed_bytes <= len_bytes {
            return Ok(layout);
        }
        Err(DaxError::TooSmall { path: self.path.clone(), len_bytes, needed_bytes, window_bytes })
    }

    fn check_header(&self, memory: &impl Memory, window_bytes: usize) -> Result<(), DaxError> {
        memory.invalidate_lines(HEADER, CACHE_LINE_BYTES);
        let found = memory.load_u64(HEADER, Ordering::Acquire);
        if found != VERSION {
            return Err(DaxError::UnknownLayout { path: self.path.clone(), found, expected: VERSION });
        }
        let found_bytes = memory.load_u64(HEADER + WINDOW_WORD, Ordering::Relaxed);
        if found_bytes != window_bytes as u64 {
            return Err(DaxError::OtherWindowSize { path: self.path.clone(), found_bytes, window_bytes });
        }
        Ok(())
    }
}

/// First word of formatted memory: "lanedax", version 1.
const VERSION: u64 = u64::from_le_bytes(*b"lanedax\x01");

// Offsets in the page of the control blocks, behind them: the header, and the counter of each endpoint's doorbell.
const HEADER: usize = 1024;
const WINDOW_WORD: usize = 8;
const DOORBELLS: usize = 2048;

fn failed(call: &'static str, path: &Path) -> impl Fn(Errno) -> DaxError {
    move |errno| DaxError::System { call, path: path.into(), error: errno.into() }
}

/// Size of the memory, and alignment of its mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    len_bytes: u64,
    align_bytes: u64,
}

impl Extent {
    fn of(file: &OwnedFd, path: &Path, sys: &Path) -> Result<Self, DaxError> {
        let stat = fstat(file).map_err(failed("fstat", path))?;
        let not_dax = |found: &str| DaxError::NotDax { path: path.into(), found: found.into() };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => Self::of_device(&stat, path, sys),
            FileType::RegularFile => Self::of_file(file, &stat, path),
            FileType::BlockDevice => Err(not_dax("a block device")),
            _ => Err(not_dax("neither a device nor a file")),
        }
    }

    fn of_device(stat: &Stat, path: &Path, sys: &Path) -> Result<Self, DaxError> {
        let device = sys.join(format!("dev/char/{}:{}", major(stat.st_rdev), minor(stat.st_rdev)));
        let subsystem = fs::read_link(device.join("subsystem")).unwrap_or_default();
        if subsystem.file_name() != Some(OsStr::new("dax")) {
            let found = format!("a device of '{}', not of 'dax'", subsystem.display());
            return Err(DaxError::NotDax { path: path.into(), found });
        }
        let number = |name: &str| {
            let failed = |error| DaxError::System { call: "sysfs size or align", path: path.into(), error };
            let text = fs::read_to_string(device.join(name)).map_err(failed)?;
            text.trim().parse().map_err(|_| failed(io::ErrorKind::InvalidData.into()))
        };
        let (len_bytes, align_bytes): (u64, u64) = (number("size")?, number("align")?);
        Ok(Self { len_bytes, align_bytes: align_bytes.max(PAGE_BYTES as u64) })
    }

    fn of_file(file: &OwnedFd, stat: &Stat, path: &Path) -> Result<Self, DaxError> {
        let file_system = fstatfs(file).map_err(failed("fstatfs", path))?.f_type as u64;
        let is_dax = || {
            let answer = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
            answer.is_ok_and(|statx| statx.stx_attributes.contains(StatxAttributes::DAX))
        };
        if !matches!(file_system, TMPFS_MAGIC | HUGETLBFS_MAGIC) && !is_dax() {
            let found = format!("a file in the page cache of file system {file_system:#x}");
            return Err(DaxError::NotDax { path: path.into(), found });
        }
        let align_bytes = (stat.st_blksize as u64).max(PAGE_BYTES as u64);
        Ok(Self { len_bytes: stat.st_size as u64, align_bytes })
    }
}

/// File system type, see statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

#[cfg(test)]
mod tests;
