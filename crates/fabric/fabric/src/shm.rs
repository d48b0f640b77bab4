//! Links between processes under one kernel: windows in a sealed memfd, doorbells of eventfds.
//!
//! A memfd has no name that a stranger could guess, and its seals prevent truncation under a mapping. The receiver of a
//! memfd trusts only what it can check itself: the kind of file, the seals and the size. A peer can still store
//! anything in the memory, or punch holes into it, which read as zeros.
//!
//! System calls are made without libc symbols, so that the module works inside a library that replaces them.

mod read_only;

pub use read_only::{OwnMemory, create_own, open_readable};

use crate::memory_link::{InitialContents, MemoryLink, Side};
use crate::pair_layout::{PAGE_BYTES, PairLayout};
use crate::wait::wait_for_ring;
use crate::{Doorbell, WaitOutcome, eventfd};
use rustix::event::PollFlags;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::fs::{fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use volmem::{CACHE_LINE_BYTES, Mapping, Region};

const SEALS_REQUIRED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// With one of these seals the memory could not be written.
const SEALS_REFUSED: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);

/// File system type of memfds with ordinary pages. Memfds of huge pages are refused, because huge pages may run out at
/// the first access, which kills the process.
pub const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Name of the memfds in the kernel's lists. No path leads to it.
const MEMFD_NAME: &str = "crosslane";

/// Why shared memory could not be made or was not accepted.
#[derive(Debug)]
pub enum ShmError {
    /// The length is not possible for a segment.
    Length {
        /// Bytes asked for.
        len_bytes: usize,
    },
    /// The size of a window is not a positive multiple of the cache line.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// A system call failed.
    System {
        /// The system call.
        call: &'static str,
        /// Bytes of the segment; 0 for a doorbell.
        len_bytes: usize,
        /// The kernel's error.
        error: io::Error,
    },
    /// The descriptor is not a memfd.
    NotMemfd {
        /// Number of the descriptor in this process.
        descriptor: i32,
        /// The error of `F_GET_SEALS`.
        error: io::Error,
    },
    /// The descriptor is a memory file of another kind, for example of huge pages.
    FileSystem {
        /// `f_type` found, see statfs(2).
        found: u64,
    },
    /// Seals are missing, or forbid writing.
    Seals {
        /// `F_SEAL_*` bits found.
        found: u32,
        /// Bits that are required.
        required: u32,
        /// Bits that are refused.
        refused: u32,
    },
    /// The segment has another size than agreed.
    Size {
        /// Bytes found.
        found_bytes: u64,
        /// Bytes agreed.
        expected_bytes: usize,
    },
    /// The segment has a size that is not possible for what it is used for.
    UnknownSize {
        /// Bytes found.
        found_bytes: u64,
    },
    /// The descriptor is not an eventfd.
    NotEventfd {
        /// The kernel's name of the descriptor.
        found: String,
    },
}

impl fmt::Display for ShmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { len_bytes } => {
                write!(f, "shared segment of {len_bytes} bytes: use 1 to {} bytes", isize::MAX)
            }
            Self::WindowSize { window_bytes } => {
                write!(f, "window of {window_bytes} bytes: use a positive multiple of {CACHE_LINE_BYTES}")
            }
            Self::System { call, len_bytes: 0, error } => write!(f, "{call}: {error}"),
            Self::System { call, len_bytes, error } => {
                write!(f, "{call} for a shared segment of {len_bytes} bytes: {error}")
            }
            Self::NotMemfd { descriptor, error } => {
                write!(f, "descriptor {descriptor} from the peer is not a memfd ({error}): refused")
            }
            Self::FileSystem { found } => {
                write!(f, "segment from the peer on file system {found:#x}: only memfds of ordinary pages are accepted")
            }
            Self::Seals { found, required, refused } => write!(
                f,
                "segment from the peer has seals {found:#x}: needs all of {required:#x} and none of {refused:#x}"
            ),
            Self::Size { found_bytes, expected_bytes } => {
                write!(f, "segment from the peer has {found_bytes} bytes: {expected_bytes} were agreed")
            }
            Self::UnknownSize { found_bytes } => {
                write!(f, "segment from the peer has {found_bytes} bytes: no lane has this size")
            }
            Self::NotEventfd { found } => {
                write!(f, "doorbell from the peer is '{found}': only an eventfd is accepted")
            }
        }
    }
}

impl std::error::Error for ShmError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { error, .. } | Self::NotMemfd { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// Makes a zeroed segment of `len_bytes` that can neither shrink nor grow, and maps it. The descriptor is for the peer,
/// which [`open`]s it; the mapping does not need it. Memory is allocated on the first access.
///
/// # Errors
/// [`ShmError::Length`], or [`ShmError::System`] with the kernel's error.
pub fn create(len_bytes: usize) -> Result<(OwnedFd, Mapping), ShmError> {
    let memfd = new_file(len_bytes)?;
    let failed = |errno: Errno| ShmError::System { call: "fcntl F_ADD_SEALS", len_bytes, error: errno.into() };
    fcntl_add_seals(&memfd, SEALS_REQUIRED).map_err(failed)?;
    let mapping = map(memfd.as_fd(), len_bytes)?;
    Ok((memfd, mapping))
}

/// Makes a memfd of `len_bytes` without seals.
fn new_file(len_bytes: usize) -> Result<OwnedFd, ShmError> {
    check_length(len_bytes)?;
    // The kernel kills a process with SIGXFSZ if it makes a file larger than its limit.
    let limit_bytes = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit_bytes.is_some_and(|limit_bytes| limit_bytes < len_bytes as u64) {
        return Err(ShmError::System { call: "ftruncate", len_bytes, error: Errno::FBIG.into() });
    }
    let failed = |call| move |errno: Errno| ShmError::System { call, len_bytes, error: errno.into() };
    let memfd = new_memfd().map_err(failed("memfd_create"))?;
    ftruncate(&memfd, len_bytes as u64).map_err(failed("ftruncate"))?;
    Ok(memfd)
}

/// Maps a segment that a peer has made: exactly `len_bytes`, in a memfd that is sealed against a change of size.
///
/// # Errors
/// The descriptor is not acceptable. The error has the values found.
pub fn open(memfd: impl AsFd, len_bytes: usize) -> Result<Mapping, ShmError> {
    check_length(len_bytes)?;
    let memfd = memfd.as_fd();
    check_seals(memfd)?;
    // Checked after the seals: without them the size could change at any time.
    let stat = fstat(memfd).map_err(|errno| ShmError::System { call: "fstat", len_bytes, error: errno.into() })?;
    check_file_system(memfd, stat.st_blksize as u64, len_bytes)?;
    check_size(stat.st_size as u64, len_bytes)?;
    map(memfd, len_bytes)
}

fn check_length(len_bytes: usize) -> Result<(), ShmError> {
    let is_possible = len_bytes != 0 && isize::try_from(len_bytes).is_ok();
    if is_possible { Ok(()) } else { Err(ShmError::Length { len_bytes }) }
}

/// Makes a memfd. Kernels before 6.3 do not support `MFD_NOEXEC_SEAL`.
fn new_memfd() -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create(MEMFD_NAME, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(MEMFD_NAME, flags),
        answer => answer,
    }
}

/// Whether a descriptor is a memfd that can be written, and can neither shrink nor grow.
pub fn is_sealed(memfd: impl AsFd) -> bool {
    check_seals(memfd.as_fd()).is_ok()
}

fn check_seals(memfd: BorrowedFd<'_>) -> Result<(), ShmError> {
    let found = fcntl_get_seals(memfd)
        .map_err(|errno| ShmError::NotMemfd { descriptor: memfd.as_raw_fd(), error: errno.into() })?;
    if found.contains(SEALS_REQUIRED) && !found.intersects(SEALS_REFUSED) {
        return Ok(());
    }
    let (required, refused) = (SEALS_REQUIRED.bits(), SEALS_REFUSED.bits());
    Err(ShmError::Seals { found: found.bits(), required, refused })
}

/// Only files on tmpfs and hugetlbfs have seals, and the block size of hugetlbfs is the huge page. With small blocks no
/// further check is needed.
fn check_file_system(memfd: BorrowedFd<'_>, block_bytes: u64, len_bytes: usize) -> Result<(), ShmError> {
    if block_bytes == PAGE_BYTES as u64 {
        return Ok(());
    }
    let stat = fstatfs(memfd).map_err(|errno| ShmError::System { call: "fstatfs", len_bytes, error: errno.into() })?;
    let found = stat.f_type as u64;
    if found == TMPFS_MAGIC { Ok(()) } else { Err(ShmError::FileSystem { found }) }
}

fn check_size(found_bytes: u64, expected_bytes: usize) -> Result<(), ShmError> {
    if found_bytes == expected_bytes as u64 { Ok(()) } else { Err(ShmError::Size { found_bytes, expected_bytes }) }
}

fn map(memfd: BorrowedFd<'_>, len_bytes: usize) -> Result<Mapping, ShmError> {
    Mapping::sparse(memfd, len_bytes).map_err(|error| ShmError::System { call: "mmap", len_bytes, error })
}

/// One endpoint of a link between processes.
pub type ShmLink = MemoryLink<EventfdDoorbell>;

/// The descriptors that the creator of a link passes to the peer, over a socket or across `fork`.
#[derive(Debug)]
pub struct ShmDescriptors {
    /// The segment.
    pub memfd: OwnedFd,
    /// The eventfd that wakes the creator.
    pub doorbell_creator: OwnedFd,
    /// The eventfd that wakes the peer.
    pub doorbell_peer: OwnedFd,
}

fn layout_of(window_bytes: usize) -> Result<PairLayout, ShmError> {
    PairLayout::new(window_bytes).ok_or(ShmError::WindowSize { window_bytes })
}

/// The creator's side, then the peer's.
fn sides(layout: &PairLayout, mapping: Mapping) -> [Side; 2] {
    layout.sides(&Region::of_mapping(Arc::new(mapping)))
}

/// Makes memory of `len_bytes` for two endpoints that lay out their windows in it themselves. Returns its mapping, the
/// creator's doorbell, and what the peer needs for [`open_memory`].
///
/// # Errors
/// [`ShmError::Length`], or [`ShmError::System`] with the kernel's error.
pub fn create_memory(len_bytes: usize) -> Result<(Mapping, EventfdDoorbell, ShmDescriptors), ShmError> {
    let (memfd, mapping) = create(len_bytes)?;
    let (doorbell_creator, doorbell_peer) = (new_eventfd()?, new_eventfd()?);
    let doorbell = EventfdDoorbell::new(duplicate(&doorbell_creator)?, duplicate(&doorbell_peer)?);
    Ok((mapping, doorbell, ShmDescriptors { memfd, doorbell_creator, doorbell_peer }))
}

/// Opens the peer's endpoint of memory that its creator made with `len_bytes`.
///
/// # Errors
/// What is wrong with the parts, with the values found.
pub fn open_memory(descriptors: ShmDescriptors, len_bytes: usize) -> Result<(Mapping, EventfdDoorbell), ShmError> {
    let mapping = open(&descriptors.memfd, len_bytes)?;
    check_eventfd(&descriptors.doorbell_creator)?;
    check_eventfd(&descriptors.doorbell_peer)?;
    Ok((mapping, EventfdDoorbell::new(descriptors.doorbell_peer, descriptors.doorbell_creator)))
}

/// Makes a link with a window of `window_bytes` each way. Returns the creator's endpoint, and what the peer needs to
/// [`open_link`] the other.
///
/// # Errors
/// [`ShmError::WindowSize`], or [`ShmError::System`] with the kernel's error.
pub fn create_link(window_bytes: usize) -> Result<(ShmLink, ShmDescriptors), ShmError> {
    let layout = layout_of(window_bytes)?;
    let (mapping, doorbell, descriptors) = create_memory(layout.span_bytes())?;
    let [own, peer] = sides(&layout, mapping);
    Ok((MemoryLink::attach(own, peer, doorbell, InitialContents::Zeroed), descriptors))
}

/// Opens the peer's endpoint of a link that its creator made with windows of `window_bytes`.
///
/// # Errors
/// What is wrong with the parts, with the values found.
pub fn open_link(descriptors: ShmDescriptors, window_bytes: usize) -> Result<ShmLink, ShmError> {
    let layout = layout_of(window_bytes)?;
    let (mapping, doorbell) = open_memory(descriptors, layout.span_bytes())?;
    let [peer, own] = sides(&layout, mapping);
    Ok(MemoryLink::attach(own, peer, doorbell, InitialContents::Zeroed))
}

fn doorbell_failed(call: &'static str) -> impl Fn(Errno) -> ShmError {
    move |errno| ShmError::System { call, len_bytes: 0, error: errno.into() }
}

fn new_eventfd() -> Result<OwnedFd, ShmError> {
    eventfd::create().map_err(doorbell_failed("eventfd"))
}

fn duplicate(descriptor: &OwnedFd) -> Result<OwnedFd, ShmError> {
    fcntl_dupfd_cloexec(descriptor, 0).map_err(doorbell_failed("fcntl F_DUPFD_CLOEXEC"))
}

fn check_eventfd(descriptor: &OwnedFd) -> Result<(), ShmError> {
    let name = eventfd::kernel_name(descriptor).map_err(doorbell_failed("readlink of /proc/self/fd"))?;
    if eventfd::is_name_of_eventfd(&name) {
        return Ok(());
    }
    Err(ShmError::NotEventfd { found: name.to_string_lossy().into_owned() })
}

/// A doorbell of two eventfds, one for each direction.
///
/// The peer holds the same eventfds: it can ring this endpoint's, take its own rings, fill the counter and make the
/// eventfds blocking. None of this makes a wait longer, and a full counter is a pending ring. Only ringing can be
/// delayed: a peer that makes its eventfd blocking, and fills it between the check and the ring, blocks the thread that
/// rings.
#[derive(Debug, Clone)]
pub struct EventfdDoorbell {
    own: Arc<OwnedFd>,
    peer: Arc<OwnedFd>,
}

impl EventfdDoorbell {
    fn new(own: OwnedFd, peer: OwnedFd) -> Self {
        Self { own: Arc::new(own), peer: Arc::new(peer) }
    }
}

impl Doorbell for EventfdDoorbell {
    fn ring(&self) {
        eventfd::ring(&self.peer);
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        // Readable, timed out or interrupted by a signal: the next poll finds out.
        let block = |remaining| _ = eventfd::poll_for(&self.own, PollFlags::IN, remaining);
        wait_for_ring(timeout, || eventfd::take(&self.own), block)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.own.as_fd())
    }
}

#[cfg(test)]
mod tests;
