//! The memory of a page: a locked file in the rack, or private memory where no file can be had.
//!
//! A store to a sparse tmpfs page kills the program with SIGBUS when the file system is full, so no part of a page is
//! used before the kernel has said that its memory is there. A file's size limit would kill it with SIGXFSZ, so that
//! is asked for first.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

use crate::file::{self, PageFile};
use crate::layout::{HEADER_BYTES, PAGE_BYTES, SLOT_BYTES, SLOTS};

/// Slots whose memory is asked for at once while a page grows: 16 KiB.
pub(crate) const CHUNK_SLOTS: usize = 64;
/// Slots whose memory is there from the start: with the header 8 KiB.
const FIRST_SLOTS: usize = 16;
/// Slots from the start where the kernel cannot populate later (before Linux 5.14).
const FIRST_SLOTS_UNGROWABLE: usize = 1024;
/// One process in so many, by its number, removes what killed ones left.
const SWEEP_PIDS: u32 = 16;

/// Identity of a page file, to remove that file and no other.
#[derive(Clone, Copy)]
pub(crate) struct FileIdentity {
    pub(crate) pid: u32,
    pub(crate) suffix: u32,
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// A mapped page, zeroed but for what a caller stored.
pub(crate) struct Backing {
    pub(crate) base: NonNull<u8>,
    pub(crate) slots_committed: usize,
    pub(crate) file: Option<FileIdentity>,
}

/// Maps a page with at least `slots_min` usable slots: in the rack where that works, else in private memory.
pub(crate) fn map(rack: &CStr, pid: u32, slots_min: usize) -> Result<Backing, Errno> {
    map_file(rack, pid, slots_min).or_else(|_| map_private())
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
    if pid.is_multiple_of(SWEEP_PIDS) {
        file::sweep(rustix::fd::AsFd::as_fd(&folder));
    }
    let page = file::create(rustix::fd::AsFd::as_fd(&folder), pid)?;
    let identity = FileIdentity { pid, suffix: page.suffix, device: page.stat.st_dev, inode: page.stat.st_ino };
    map_created(&page, identity, slots_min).inspect_err(|_| remove(rack, identity))
}

/// The descriptor goes away on return; the mapping alone keeps the file's lock.
fn map_created(page: &PageFile, identity: FileIdentity, slots_min: usize) -> Result<Backing, Errno> {
    rustix::fs::ftruncate(&page.fd, PAGE_BYTES as u64)?;
    let slots_first = slots_min.max(FIRST_SLOTS).next_multiple_of(FIRST_SLOTS).min(SLOTS);
    allocate(page, slots_first)?;
    // SAFETY: a new mapping at an address the kernel chooses; nothing existing is touched.
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
    let mut slots_committed = slots_first;
    let growable = populate(base, 0, FIRST_SLOTS) != Err(Errno::INVAL);
    if !growable && slots_first < FIRST_SLOTS_UNGROWABLE && allocate(page, FIRST_SLOTS_UNGROWABLE).is_ok() {
        slots_committed = FIRST_SLOTS_UNGROWABLE;
    }
    Ok(Backing { base, slots_committed, file: Some(identity) })
}

fn allocate(page: &PageFile, slots: usize) -> Result<(), Errno> {
    rustix::fs::fallocate(&page.fd, FallocateFlags::empty(), 0, (HEADER_BYTES + slots * SLOT_BYTES) as u64)
}

fn map_private() -> Result<Backing, Errno> {
    Ok(Backing { base: map_zeroed(PAGE_BYTES)?, slots_committed: SLOTS, file: None })
}

/// Private zeroed memory, of which only what is touched is taken.
pub(crate) fn map_zeroed(bytes: usize) -> Result<NonNull<u8>, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address the kernel chooses; nothing existing is touched.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags)? };
    NonNull::new(base.cast()).ok_or(Errno::NOMEM)
}

/// Makes the memory of slots `first..end` sure to be there, or says why it is not, where a store would have been fatal.
pub(crate) fn populate(base: NonNull<u8>, first: usize, end: usize) -> Result<(), Errno> {
    let from = (HEADER_BYTES + first * SLOT_BYTES) & !(HEADER_BYTES - 1);
    let to = (HEADER_BYTES + end.min(SLOTS) * SLOT_BYTES).next_multiple_of(HEADER_BYTES).min(PAGE_BYTES);
    // SAFETY: the range lies within the page's mapping of PAGE_BYTES; populating changes no contents.
    unsafe { rustix::mm::madvise(base.as_ptr().add(from).cast::<c_void>(), to - from, Advice::LinuxPopulateWrite) }
}

/// Puts the page mapped at `new` in the place of the page mapped at `old`, so that addresses within `old` stay good.
///
/// # Safety
/// Both must be mappings of PAGE_BYTES owned by the caller, and no other thread may use either while this runs.
pub(crate) unsafe fn replace(old: NonNull<u8>, new: NonNull<u8>) -> Result<(), Errno> {
    // SAFETY: both ranges are whole mappings that the caller owns; `old` is given up for `new`.
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

/// Puts private zeroes in the place of the page mapped at `old`.
///
/// # Safety
/// As [`replace`].
pub(crate) unsafe fn replace_with_zeroes(old: NonNull<u8>) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range is a whole mapping that the caller owns and gives up.
    unsafe { rustix::mm::mmap_anonymous(old.as_ptr().cast(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE, flags)? };
    Ok(())
}

/// Ends a mapping, and with it the lock that says its writer lives.
///
/// # Safety
/// Nothing may use the mapping afterwards.
pub(crate) unsafe fn unmap(base: NonNull<u8>) {
    // SAFETY: a whole mapping of PAGE_BYTES which the caller says nobody uses any more.
    let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), PAGE_BYTES) };
}

/// Removes a page file if it still is the one with that identity.
pub(crate) fn remove(rack: &CStr, identity: FileIdentity) {
    let name = file::PageName::new(identity.pid, identity.suffix);
    if let Ok(folder) = file::open_stat_folder(rack) {
        let folder = rustix::fd::AsFd::as_fd(&folder);
        let _ = file::remove_if_same(folder, name.as_c_str(), identity.device, identity.inode);
    }
}
