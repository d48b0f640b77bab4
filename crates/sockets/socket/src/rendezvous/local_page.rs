//! The local page of an endpoint whose connection is in the memory of a device: a page in a memfd, which the processes
//! that hold the endpoint share.
//!
//! It records where the connection is, for processes that get the endpoint by `exec` or `SCM_RIGHTS`: the descriptor of
//! a device cannot, unlike that of a memfd ([`lease`](crate::rendezvous::span_lease)). If that memory is not ordinary
//! memory, the local page also holds the endpoint's state.
//!
//! ```text
//!       0  endpoint
//!    1024  magic            "XLHOME", a zero and the version of this and of the segment's layout
//!    1032  flags            as in a handshake
//!    1040  inbound          offset of this endpoint's span in the memory
//!    1048  outbound         offset of the other endpoint's
//!    1056  file             device and inode number of the memory's descriptor
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fabric::shm;
use rustix::io::Errno;
use volmem::Region;
use volmem::sync::Ordering;

use crate::descriptor::hidden::{HiddenFd, Need};
use crate::rendezvous::handshake::WindowSpans;
use segment::{LAYOUT_VERSION, Segment};

/// Length of a local page.
pub const LOCAL_PAGE_BYTES: usize = Segment::LOCAL_PAGE_BYTES;

const RECORD_OFFSET: usize = 1024;
const RECORD_WORDS: usize = 6;
const RECORD_BYTES: usize = RECORD_WORDS * size_of::<u64>();
const MAGIC: u64 = u64::from_le_bytes(*b"XLHOME\0\0");

/// The descriptors by which a connection is transferred to another process.
#[derive(Debug)]
pub struct MemoryFds<F = OwnedFd> {
    /// The descriptor that identifies it: its memfd, a lease, or a local page.
    pub memfd: F,
    /// The memory of a device, if `memfd` is a local page.
    pub device: Option<F>,
    /// The memory of the incoming lane, if it is not in the first: both endpoints have switched to lanes at the same
    /// moment.
    pub inbound: Option<F>,
}

impl<F> MemoryFds<F> {
    /// Returns the descriptors of a connection whose memory needs only one.
    pub fn of_memfd(memfd: F) -> Self {
        Self { memfd, device: None, inbound: None }
    }

    /// Returns all of them, in the order in which they are transferred.
    pub fn iter(&self) -> impl Iterator<Item = &F> {
        std::iter::once(&self.memfd).chain(&self.device).chain(&self.inbound)
    }

    /// Returns all of them.
    pub fn into_all(self) -> impl Iterator<Item = F> {
        std::iter::once(self.memfd).chain(self.device).chain(self.inbound)
    }
}

impl MemoryFds {
    /// Hides the descriptors from the program.
    ///
    /// # Errors
    /// `MFILE` when there are no numbers for them; they are closed then.
    pub(crate) fn hide(self) -> Result<MemoryFds<HiddenFd>, Errno> {
        self.map(|fd| HiddenFd::hide(fd, Need::Optional))
    }

    /// Hides descriptors that were inherited or received, as [`MemoryFds::hide`] does; they keep their numbers if
    /// possible.
    ///
    /// # Errors
    /// Those of [`MemoryFds::hide`].
    pub(crate) fn adopt(self) -> Result<MemoryFds<HiddenFd>, Errno> {
        self.map(|fd| HiddenFd::adopt(fd, Need::Optional))
    }

    fn map<F>(self, take: impl Fn(OwnedFd) -> Result<F, Errno>) -> Result<MemoryFds<F>, Errno> {
        let (device, inbound) = (self.device.map(&take).transpose()?, self.inbound.map(&take).transpose()?);
        Ok(MemoryFds { memfd: take(self.memfd)?, device, inbound })
    }
}

impl MemoryFds<HiddenFd> {
    /// Sets whether the descriptors stay open through `exec`: all of them, or none if one was closed to make room for
    /// the program's, because the rest alone would not make a connection.
    pub(crate) fn set_inheritable(&self, inheritable: bool) {
        let set = |inheritable| self.iter().filter(|fd| fd.set_inheritable(inheritable).is_err()).count();
        if set(inheritable) > 0 {
            set(false);
        }
    }
}

/// The contents of a local page, for a process that gets the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPage {
    /// The spans of the connection.
    pub spans: WindowSpans,
    file: [u64; 2],
}

impl LocalPage {
    /// Reads a local page; `None` if the descriptor is not one.
    pub fn read(memfd: BorrowedFd<'_>) -> Option<Self> {
        let size = rustix::fs::fstat(memfd).ok()?.st_size;
        if size != LOCAL_PAGE_BYTES as i64 || !shm::is_sealed(memfd) {
            return None;
        }
        let mut bytes = [0; RECORD_BYTES];
        let found = rustix::io::pread(memfd, &mut bytes, RECORD_OFFSET as u64).ok()?;
        let (words, _) = bytes.as_chunks();
        let words: [u64; RECORD_WORDS] = std::array::from_fn(|index| u64::from_le_bytes(words[index]));
        let [magic, flags, inbound_offset, outbound_offset, file @ ..] = words;
        let flags = u32::try_from(flags).ok()?;
        let (alignment, caching) = (WindowSpans::alignment_in(flags), WindowSpans::caching_in(flags));
        let spans = WindowSpans { alignment, caching, ..WindowSpans::new(inbound_offset, outbound_offset) };
        let page = Self { spans, file };
        (found == RECORD_BYTES && magic == version_magic() && page.words() == words).then_some(page)
    }

    /// Returns whether a descriptor is one of the memory that this page describes.
    pub fn describes(&self, memory: BorrowedFd<'_>) -> bool {
        file_of(memory) == Ok(self.file)
    }

    fn words(&self) -> [u64; RECORD_WORDS] {
        let WindowSpans { inbound_offset, outbound_offset, .. } = self.spans;
        let flags = u64::from(WindowSpans::flags(Some(self.spans)));
        [version_magic(), flags, inbound_offset, outbound_offset, self.file[0], self.file[1]]
    }
}

fn version_magic() -> u64 {
    MAGIC | u64::from(LAYOUT_VERSION as u8) << 56
}

fn file_of(memory: BorrowedFd<'_>) -> Result<[u64; 2], Errno> {
    rustix::fs::fstat(memory).map(|stat| [stat.st_dev, stat.st_ino])
}

/// Creates a local page for the endpoint of a connection with these spans of a memory.
///
/// # Errors
/// Those of fstat, memfd_create and mmap.
pub fn create(spans: WindowSpans, memory: BorrowedFd<'_>) -> Result<(OwnedFd, Region), Errno> {
    let page = LocalPage { spans, file: file_of(memory)? };
    let (memfd, mapping) = shm::create(LOCAL_PAGE_BYTES).map_err(|_| Errno::NOMEM)?;
    let region = Region::of_mapping(Arc::new(mapping));
    for (index, word) in page.words().into_iter().enumerate() {
        region.store_u64(RECORD_OFFSET + index * size_of::<u64>(), word.to_le(), Ordering::Relaxed);
    }
    Ok((memfd, region))
}

/// Maps a local page that another process has created.
///
/// # Errors
/// Those of mmap.
pub fn map(memfd: &OwnedFd) -> Result<Region, Errno> {
    let mapping = shm::open(memfd.as_fd(), LOCAL_PAGE_BYTES).map_err(|_| Errno::INVAL)?;
    Ok(Region::of_mapping(Arc::new(mapping)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric::device::Caching;
    use rustix::io::FdFlags;
    use volmem::Alignment;

    #[test]
    fn either_all_descriptors_of_a_connection_stay_open_through_exec_or_none() {
        let _no_child = test_support::spawn::forbid();
        let hidden = || {
            let (memory, _mapping) = shm::create(4096).unwrap();
            let (memfd, _region) = create(WindowSpans::new(0, 4096), memory.as_fd()).unwrap();
            MemoryFds { device: Some(memory), ..MemoryFds::of_memfd(memfd) }.hide().unwrap()
        };
        let is_inheritable =
            |fd: &HiddenFd| !rustix::io::fcntl_getfd(fd.fd().unwrap()).unwrap().contains(FdFlags::CLOEXEC);
        let whole = hidden();
        for inheritable in [true, false] {
            whole.set_inheritable(inheritable);
            assert!(whole.iter().all(|fd| is_inheritable(fd) == inheritable));
        }
        for (released, left) in [(0, 1), (1, 0)] {
            let memory = hidden();
            let all: Vec<&HiddenFd> = memory.iter().collect();
            all[released].release();
            memory.set_inheritable(true);
            assert!(!is_inheritable(all[left]), "{released} made room");
        }
    }

    #[test]
    fn a_local_page_describes_its_connection_and_other_files_are_not_local_pages() {
        let (memory, _mapping) = shm::create(1 << 20).unwrap();
        let (other, _mapping) = shm::create(1 << 20).unwrap();
        let alignment = Alignment::new(2 << 20);
        for caching in [Caching::Cached, Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent] {
            let spans = WindowSpans { alignment, caching, ..WindowSpans::new(4096, 8192) };
            let (memfd, region) = create(spans, memory.as_fd()).unwrap();
            let page = LocalPage::read(memfd.as_fd()).unwrap();
            assert_eq!(
                (page.spans, page.describes(memory.as_fd()), page.describes(other.as_fd())),
                (spans, true, false)
            );
            for offset in [RECORD_OFFSET, RECORD_OFFSET + 8] {
                let word = region.load_u64(offset, Ordering::Relaxed);
                region.store_u64(offset, word ^ 1 << 63, Ordering::Relaxed);
                assert_eq!(LocalPage::read(memfd.as_fd()), None, "a changed word at {offset}");
                region.store_u64(offset, word, Ordering::Relaxed);
            }
        }
        let (page, _mapping) = shm::create(LOCAL_PAGE_BYTES).unwrap();
        assert_eq!(LocalPage::read(page.as_fd()), None);
        assert_eq!(LocalPage::read(memory.as_fd()), None);
    }
}
