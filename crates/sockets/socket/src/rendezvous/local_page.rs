//! The local page of an endpoint whose connection is in the memory of a device: a page in a memfd.
//!
//! It records where the connection is. If that memory is not ordinary memory, the local page also holds the endpoint's
//! state.
//!
//! ```text
//!       0  endpoint
//!    1024  magic            "XLHOME", a zero and the version of this and of the segment's layout
//!    1032  flags            as in a handshake
//!    1040  inbound          offset of this endpoint's span in the memory
//!    1048  outbound         offset of the other endpoint's
//!    1056  file             device and inode number of the memory's descriptor
//! ```

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use fabric::shm;
use rustix::io::Errno;
use volmem::Region;
use volmem::sync::Ordering;

use crate::rendezvous::handshake::WindowSpans;
use segment::{LAYOUT_VERSION, Segment};

/// Length of a local page.
pub const LOCAL_PAGE_BYTES: usize = Segment::LOCAL_PAGE_BYTES;

const RECORD_OFFSET: usize = 1024;
const RECORD_WORDS: usize = 6;
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

/// The contents of a local page, for a process that gets the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPage {
    /// The spans of the connection.
    pub spans: WindowSpans,
    file: [u64; 2],
}

impl LocalPage {
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
