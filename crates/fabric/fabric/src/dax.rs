//! Links in memory that two machines map: a CXL or persistent-memory device, or a file that stands for one.
//!
//! The memory is `/dev/daxX.Y`, or a file on a DAX mount, on huge pages or in tmpfs. Whether the machines' caches
//! follow one another, the program cannot find out: who configures the link says so. Where they do ([`Region`]) it is
//! shared memory as any other; where they do not ([`DeviceMemory`]) every line is written back by its writer and
//! dropped by its reader.
//!
//! No interrupt comes with the memory: the doorbell is a count that sleepers look at ([`PolledDoorbell`]).
//!
//! A file must not shrink while it is mapped: the kernel answers an access behind its end by killing the program. No
//! seal forbids it here, so the file has to be its operator's and nobody else's; [`DaxMemory::check_length`] says
//! whether it still has its length.

use crate::device::DeviceMemory;
use crate::memory_link::{InitialContents, MemoryLink};
use crate::pair::{PAGE_BYTES, PairLayout};
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

/// One end of a link in such memory.
pub type DaxLink<M> = MemoryLink<PolledDoorbell<M>, M>;

/// Why memory could not be used.
#[derive(Debug)]
pub enum DaxError {
    /// The kernel refused.
    System {
        /// What was attempted.
        call: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// It is something else.
    NotDax {
        /// What was named.
        path: PathBuf,
        /// What it is.
        found: String,
    },
    /// Its length is not whole units of its mapping.
    Unaligned {
        /// What was named.
        path: PathBuf,
        /// Bytes found.
        len_bytes: u64,
        /// Bytes of a unit.
        align_bytes: u64,
    },
    /// It does not hold two windows of the size asked for.
    TooSmall {
        /// What was named.
        path: PathBuf,
        /// Bytes found.
        len_bytes: u64,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes of a window.
        window_bytes: usize,
    },
    /// It has become shorter.
    Shrunk {
        /// What was named.
        path: PathBuf,
        /// Bytes found.
        len_bytes: u64,
        /// Bytes that are mapped.
        mapped_bytes: usize,
    },
    /// The size of a window is not a positive multiple of the cache line.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// The memory is not laid out, or not by this version.
    Layout {
        /// What was named.
        path: PathBuf,
        /// First word found.
        found: u64,
        /// First word of this version.
        expected: u64,
    },
    /// The memory is laid out for windows of another size.
    LaidOutOtherwise {
        /// What was named.
        path: PathBuf,
        /// Bytes of a window there.
        found_bytes: u64,
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// This processor lets no program write lines back.
    NoInstruction {
        /// What was named.
        path: PathBuf,
    },
}

impl fmt::Display for DaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { call, path, error } => {
                write!(f, "dax '{}': {call}: {error}; name a device that is there and yours to use", path.display())
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
                "dax '{}': shrunk to {len_bytes} bytes of {mapped_bytes}; stop, and let nobody else write the file",
                path.display()
            ),
            Self::WindowSize { window_bytes } => {
                write!(f, "window of {window_bytes} bytes: use a positive multiple of {CACHE_LINE_BYTES}")
            }
            Self::Layout { path, found, expected } => write!(
                f,
                "dax '{}': begins with {found:#x}, not {expected:#x}; format it, if nobody else uses it",
                path.display()
            ),
            Self::LaidOutOtherwise { path, found_bytes, window_bytes } => write!(
                f,
                "dax '{}': laid out for windows of {found_bytes} bytes, not {window_bytes}; \
                 ask for these or format it again",
                path.display()
            ),
            Self::NoInstruction { path } => write!(
                f,
                "dax '{}': this processor cannot write cache lines back; use memory that is coherent",
                path.display()
            ),
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

/// Memory of a device or a file, mapped whole.
#[derive(Debug)]
pub struct DaxMemory {
    path: PathBuf,
    file: OwnedFd,
    region: Region,
}

impl DaxMemory {
    /// Maps all of the device or file.
    ///
    /// # Errors
    /// What is wrong with it, with the values found.
    pub fn open(path: &Path) -> Result<Self, DaxError> {
        Self::open_by(path, Path::new("/sys"))
    }

    /// With the kernel's description of devices at `sys`.
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

    /// The memory, where the machines' caches follow one another.
    pub fn coherent(&self) -> Region {
        self.region.clone()
    }

    /// The memory, where they do not.
    ///
    /// # Errors
    /// [`DaxError::NoInstruction`].
    pub fn non_coherent(&self) -> Result<DeviceMemory, DaxError> {
        DeviceMemory::non_coherent(self.region.clone())
            .ok_or_else(|| DaxError::NoInstruction { path: self.path.clone() })
    }

    /// Whether a file is as long as when it was mapped. A device does not shrink.
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

    /// Lays `memory`, which is this, out for a link with windows of `window_bytes`. Nobody may be using it.
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

    /// An end of the link that `memory`, which is this, is laid out for.
    ///
    /// # Errors
    /// What is wrong with the layout, with the values found.
    pub fn link<M: Memory>(&self, memory: &M, end: Endpoint, window_bytes: usize) -> Result<DaxLink<M>, DaxError> {
        let layout = self.layout(memory, window_bytes)?;
        self.check_header(memory, window_bytes)?;
        let [a, b] = layout.sides(memory);
        let [bell_a, bell_b] = [0, 1].map(|index| memory.part(BELLS + index * CACHE_LINE_BYTES, CACHE_LINE_BYTES));
        let (own, peer, bell) = match end {
            Endpoint::A => (a, b, PolledDoorbell::attach(bell_a, bell_b)),
            Endpoint::B => (b, a, PolledDoorbell::attach(bell_b, bell_a)),
        };
        Ok(MemoryLink::attach(own, peer, bell, InitialContents::Unknown))
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
            return Err(DaxError::Layout { path: self.path.clone(), found, expected: VERSION });
        }
        let found_bytes = memory.load_u64(HEADER + WINDOW_WORD, Ordering::Relaxed);
        if found_bytes != window_bytes as u64 {
            return Err(DaxError::LaidOutOtherwise { path: self.path.clone(), found_bytes, window_bytes });
        }
        Ok(())
    }
}

/// What laid-out memory begins with: "lane dax", of version 1.
const VERSION: u64 = u64::from_le_bytes(*b"lanedax\x01");

// In the page of the control blocks, behind them: what is in the memory, and a bell's count for either end.
const HEADER: usize = 1024;
const WINDOW_WORD: usize = 8;
const BELLS: usize = 2048;

fn failed(call: &'static str, path: &Path) -> impl Fn(Errno) -> DaxError {
    move |errno| DaxError::System { call, path: path.into(), error: errno.into() }
}

/// How much there is to map, and in which units.
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

/// Types of file systems, see statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

#[cfg(test)]
#[path = "dax_tests.rs"]
mod tests;
