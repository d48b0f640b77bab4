//! The memory of a page: a locked file in the rack directory, or private memory where no file can be created.
//!
//! A store to a sparse tmpfs file kills the program with SIGBUS if the file system is full. No part of a page is
//! therefore used before the kernel has allocated its memory. A write beyond the file size limit would raise SIGXFSZ,
//! so that the limit is checked first.

use std::ffi::{CStr, c_void};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

use crate::file::{self, Fd, PageFile};
use crate::layout::{HEADER_BYTES, PAGE_BYTES, SLOT_BYTES, SLOTS};

/// Number of slots that are allocated at once while a page grows: 16 KiB.
pub(crate) const CHUNK_SLOTS: usize = 64;
/// Number of slots that are allocated initially: 24 KiB together with the header.
const FIRST_SLOTS: usize = 16;
/// Number of slots that are allocated initially where the kernel cannot populate memory later (before Linux 5.14).
const FIRST_SLOTS_UNGROWABLE: usize = 1024;
/// Alignment of a range whose memory is allocated.
const MEMORY_PAGE_BYTES: usize = 4096;
/// Name of a mapping of a process whose page is not a file, so that others can tell why there is none.
pub const UNPUBLISHED_NAME: &str = "crosslane-unpublished";
/// Type of an overlay file system in `statfs` (`OVERLAYFS_SUPER_MAGIC`, `linux/magic.h`), where no page can be a file:
/// a mapping does not keep the file's lock.
pub const OVERLAY_MAGIC: rustix::fs::FsWord = 0x794c_7630;
/// One in this number of processes, by its pid, removes the pages of killed ones.
const SWEEP_PIDS: u32 = 16;

/// Identity of a page file, by which that file and no other is removed.
#[derive(Clone, Copy)]
pub(crate) struct FileIdentity {
    pub(crate) pid: u32,
    pub(crate) suffix: u32,
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// A mapped page. It is zeroed, except for what its creator has stored.
pub(crate) struct Backing {
    pub(crate) base: NonNull<u8>,
    pub(crate) slots_committed: usize,
    pub(crate) file: Option<FileIdentity>,
}

/// Maps a page with at least `slots_min` usable slots: in the rack directory if possible, else in private memory.
pub(crate) fn map(rack: &CStr, pid: u32, slots_min: usize) -> Result<Backing, Errno> {
    map_file(rack, pid, slots_min).or_else(|_| {
        mark_unpublished();
        map_private()
    })
}

fn map_file(rack: &CStr, pid: u32, slots_min: usize) -> Result<Backing, Errno> {
    if rack.is_empty() {
        return Err(Errno::NOENT);
    }
    let size_limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if size_limit.is_some_and(|bytes_max| bytes_max < PAGE_BYTES as u64) {
        return Err(Errno::FBIG);
    }
    let folder = file::open_stat_folder(rack)?;
    if rustix::fs::fstatfs(&folder)?.f_type == OVERLAY_MAGIC {
        return Err(Errno::OPNOTSUPP);
    }
    if pid.is_multiple_of(SWEEP_PIDS) {
        file::sweep(folder.as_fd());
    }
    let page = file::create(folder.as_fd(), pid)?;
    let identity = FileIdentity { pid, suffix: page.suffix, device: page.stat.st_dev, inode: page.stat.st_ino };
    map_created(&page, identity, slots_min).inspect_err(|_| remove(rack, identity))
}

/// Maps a created file. The mapping alone keeps the file's lock; the descriptor is closed on return.
fn map_created(page: &PageFile, identity: FileIdentity, slots_min: usize) -> Result<Backing, Errno> {
    rustix::fs::ftruncate(&page.fd, PAGE_BYTES as u64)?;
    let slots_first = slots_min.max(FIRST_SLOTS).next_multiple_of(FIRST_SLOTS).min(SLOTS);
    allocate(page, slots_first)?;
    // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &page.fd,
            0,
        )?
    };
    let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)?;
    exclude_from_core_dumps(base, PAGE_BYTES);
    let mut slots_committed = slots_first;
    let growable = populate(base, 0, FIRST_SLOTS) != Err(Errno::INVAL);
    if !growable && slots_first < FIRST_SLOTS_UNGROWABLE && allocate(page, FIRST_SLOTS_UNGROWABLE).is_ok() {
        slots_committed = FIRST_SLOTS_UNGROWABLE;
    }
    Ok(Backing { base, slots_committed, file: Some(identity) })
}

/// Allocates the memory of the header and the first slots, by writing zeroes: on a file system on a disk, the first
/// store to a page that `fallocate` has allocated takes 0.1 ms or more, and milliseconds beside other work (ext4).
fn allocate(page: &PageFile, slots: usize) -> Result<(), Errno> {
    static ZEROES: [u8; 16_384] = [0; 16_384];
    let end = HEADER_BYTES + slots * SLOT_BYTES;
    let mut written = 0;
    while written < end {
        let part = &ZEROES[..ZEROES.len().min(end - written)];
        match rustix::io::pwrite(&page.fd, part, written as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(count) => written += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Maps inaccessible memory of [`UNPUBLISHED_NAME`], which `/proc/PID/maps` shows. Without effect where the kernel
/// refuses.
fn mark_unpublished() {
    static IS_MARKED: AtomicBool = AtomicBool::new(false);
    if IS_MARKED.swap(true, Ordering::Relaxed) {
        return;
    }
    let Ok(empty) = rustix::fs::memfd_create(UNPUBLISHED_NAME, MemfdFlags::CLOEXEC).map(Fd::new) else { return };
    // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory, and nothing accesses it.
    let _ = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 1, ProtFlags::empty(), MapFlags::SHARED, &empty, 0) };
}

fn map_private() -> Result<Backing, Errno> {
    Ok(Backing { base: map_zeroed(PAGE_BYTES)?, slots_committed: SLOTS, file: None })
}

/// Maps private zeroed memory, which is allocated page by page on first use.
pub(crate) fn map_zeroed(bytes: usize) -> Result<NonNull<u8>, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags)? };
    let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)?;
    exclude_from_core_dumps(base, bytes);
    Ok(base)
}

/// Leaves a mapping of `bytes` at `base` out of core dumps. Without effect where the kernel refuses.
fn exclude_from_core_dumps(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the advice changes no memory, only what a core dump has.
    let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast::<c_void>(), bytes, Advice::LinuxDontDump) };
}

/// Allocates the memory of slots `first..end`. Returns an error where a store would have killed the program.
pub(crate) fn populate(base: NonNull<u8>, first: usize, end: usize) -> Result<(), Errno> {
    let from = (HEADER_BYTES + first * SLOT_BYTES) & !(MEMORY_PAGE_BYTES - 1);
    let to = (HEADER_BYTES + end.min(SLOTS) * SLOT_BYTES).next_multiple_of(MEMORY_PAGE_BYTES).min(PAGE_BYTES);
    // SAFETY: the range is within the page's mapping of `PAGE_BYTES`, and populating does not change its contents.
    unsafe { rustix::mm::madvise(base.as_ptr().add(from).cast::<c_void>(), to - from, Advice::LinuxPopulateWrite) }
}

/// Moves the page mapped at `new` to the address `old`, so that addresses within `old` stay valid.
///
/// # Safety
/// Both must be mappings of `PAGE_BYTES` owned by the caller, and no other thread may use either of them during the
/// call.
pub(crate) unsafe fn replace(old: NonNull<u8>, new: NonNull<u8>) -> Result<(), Errno> {
    // SAFETY: by the contract of this function, both are whole mappings that the caller owns and no other thread uses.
    unsafe {
        rustix::mm::mremap_fixed(
            new.as_ptr().cast(),
            PAGE_BYTES,
            PAGE_BYTES,
            MremapFlags::MAYMOVE,
            old.as_ptr().cast(),
        )?;
    }
    Ok(())
}

/// Replaces the page mapped at `old` by private zeroed memory.
///
/// # Safety
/// `old` must be a mapping of `PAGE_BYTES` owned by the caller, and no other thread may use it during the call.
pub(crate) unsafe fn replace_with_zeroes(old: NonNull<u8>) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: by the contract of this function, `old` is a whole mapping that the caller owns and no other thread uses.
    unsafe { rustix::mm::mmap_anonymous(old.as_ptr().cast(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE, flags)? };
    exclude_from_core_dumps(old, PAGE_BYTES);
    Ok(())
}

/// Unmaps a page, which also releases the lock by which its writer is known to live.
///
/// # Safety
/// Nothing may use the mapping afterwards.
pub(crate) unsafe fn unmap(base: NonNull<u8>) {
    // SAFETY: `base` is a whole mapping of `PAGE_BYTES`, which by the contract of this function is no longer used.
    let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), PAGE_BYTES) };
}

/// Removes a page file if it still has the given identity.
pub(crate) fn remove(rack: &CStr, identity: FileIdentity) {
    let name = file::PageName::new(identity.pid, identity.suffix);
    if let Ok(folder) = file::open_stat_folder(rack) {
        let folder = folder.as_fd();
        let _ = file::remove_if_same(folder, name.as_c_str(), identity.device, identity.inode);
    }
}
