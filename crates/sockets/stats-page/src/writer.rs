//! The writer, which runs inside the programs.

use std::ffi::CStr;
use std::mem::size_of;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use rustix::io::Errno;

use crate::backing::{self, Backing, CHUNK_SLOTS, FileIdentity};
use crate::layout::{
    CLOSED_RECORDS, Direction, FLAG_INHERITED, FLAG_REPLACED, FLAG_REPORTED, HEADER_BYTES, Header, Identity, MAGIC,
    PROGRAM_BYTES, SLOT_BYTES, SLOTS, STATE_CLOSED, STATE_CLOSING, STATE_FREE, STATE_OPEN, Slot, VERSION,
};
use crate::terms::{DataPath, FallbackReason, Role};

/// Longest path of a rack directory in which a page is published.
const RACK_PATH_BYTES_MAX: usize = 512;
/// The page is a file of the rack, or cannot be one.
const PUBLISHED: u32 = 0;
/// The page is private memory, in a child of `fork` that has counted nothing.
const PRIVATE: u32 = 1;
/// A thread makes it a file.
const PUBLISHING: u32 = 2;
/// How often a thread yields at most to one that does so.
const YIELDS_MAX: u32 = 1000;
/// Index of a connection for which no slot was free.
const UNLISTED: u32 = u32::MAX;

/// What a page says about its process.
#[derive(Clone, Copy, Debug)]
pub struct PageConfig<'a> {
    /// The rack directory, which must exist.
    pub rack: &'a std::path::Path,
    /// The node's address, if the program was given one.
    pub node: Option<IpAddr>,
    /// The program's name; see [`own_program_name`].
    pub program: &'a [u8],
}

/// A connection to be counted.
#[derive(Clone, Copy, Debug)]
pub struct NewConnection {
    /// What carries it.
    pub path: DataPath,
    /// The side of it that this process is.
    pub role: Role,
    /// The program's descriptor.
    pub fd: i32,
    /// This side's address, as the program sees it.
    pub local: Option<SocketAddr>,
    /// The other side's address, as the program sees it.
    pub peer: Option<SocketAddr>,
    /// Why it uses kernel TCP, if it does.
    pub reason: Option<FallbackReason>,
}

/// The page of one process. Lives as long as the process: create it once, when a connection first tries to get a lane.
pub struct StatsPage {
    page: NonNull<u8>,
    rack: [u8; RACK_PATH_BYTES_MAX],
    node: Option<IpAddr>,
    program: [u8; PROGRAM_BYTES],
    /// Slots below this index have been allocated.
    slots_committed: AtomicU32,
    /// Slots below this index have been used.
    slots_used: AtomicU32,
    /// Top of the stack of closed slots: in the high half a tag against ABA, in the low half the index plus one.
    free_top: AtomicU64,
    /// This process's private copy of the slots' identities.
    known: &'static [PrivateSlot],
    /// Number of open connections, by `DataPath as usize`.
    open: [AtomicU64; DataPath::COUNT],
    published: AtomicBool,
    /// [`PUBLISHED`], [`PRIVATE`] or [`PUBLISHING`].
    publication: AtomicU32,
    file_pid: AtomicU32,
    file_suffix: AtomicU32,
    file_device: AtomicU64,
    file_inode: AtomicU64,
}

/// The private copy of a slot's identity. No other process can corrupt it, and a child of `fork` has it as it was at
/// the fork: when the child reads the parent's page, the parent may already have closed connections that the child
/// inherited.
#[repr(C)]
struct PrivateSlot {
    identity: Identity,
    /// While the slot is on the stack of closed ones: the index plus one of the next lower slot.
    free_below: AtomicU32,
}

// SAFETY: `page` points to memory that stays mapped as long as the process and is only accessed through atomics.
unsafe impl Send for StatsPage {}
// SAFETY: the memory behind `page` is only accessed through atomics, and all other fields are atomics or never change.
unsafe impl Sync for StatsPage {}

static EMERGENCY_PAGE: Header = Header::new();
/// Counts in static memory if not even private memory can be mapped.
static EMERGENCY: StatsPage = match NonNull::new((&raw const EMERGENCY_PAGE).cast_mut().cast()) {
    Some(page) => StatsPage::over(page, &[]),
    None => unreachable!(),
};

impl StatsPage {
    /// Creates the page of this process. Never fails: without a usable rack directory, the page is private.
    pub fn create(config: &PageConfig<'_>) -> &'static Self {
        let known_at = size_of::<Self>().next_multiple_of(align_of::<PrivateSlot>());
        let Ok(memory) = backing::map_zeroed(known_at + SLOTS * size_of::<PrivateSlot>()) else {
            return &EMERGENCY;
        };
        // SAFETY: the mapping is zeroed, private, never unmapped, and large and aligned enough for both parts; a zeroed
        // `PrivateSlot` is valid, as it consists of atomics.
        let known = unsafe { std::slice::from_raw_parts(memory.add(known_at).cast::<PrivateSlot>().as_ptr(), SLOTS) };
        let mut stats = Self::over(NonNull::dangling(), known);
        stats.describe(config);
        let pid = own_pid();
        let Ok(page) = backing::map(stats.rack(), pid, 0) else { return &EMERGENCY };
        stats.page = page.base;
        stats.adopt(&page);
        stats.write_header(page.base, pid);
        // SAFETY: the memory was just mapped for this value and is large and aligned enough; nothing else refers to it
        // yet.
        unsafe {
            memory.cast::<Self>().write(stats);
            memory.cast::<Self>().as_ref()
        }
    }

    const fn over(page: NonNull<u8>, known: &'static [PrivateSlot]) -> Self {
        Self {
            page,
            rack: [0; RACK_PATH_BYTES_MAX],
            node: None,
            program: [0; PROGRAM_BYTES],
            slots_committed: AtomicU32::new(0),
            slots_used: AtomicU32::new(0),
            free_top: AtomicU64::new(0),
            known,
            open: [const { AtomicU64::new(0) }; DataPath::COUNT],
            published: AtomicBool::new(false),
            publication: AtomicU32::new(PUBLISHED),
            file_pid: AtomicU32::new(0),
            file_suffix: AtomicU32::new(0),
            file_device: AtomicU64::new(0),
            file_inode: AtomicU64::new(0),
        }
    }

    fn describe(&mut self, config: &PageConfig<'_>) {
        let rack = config.rack.as_os_str().as_bytes();
        if rack.len() < RACK_PATH_BYTES_MAX {
            self.rack[..rack.len()].copy_from_slice(rack);
        }
        let program = &config.program[..config.program.len().min(PROGRAM_BYTES)];
        self.program[..program.len()].copy_from_slice(program);
        self.node = config.node;
    }

    fn rack(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.rack).unwrap_or(c"")
    }

    fn adopt(&self, page: &Backing) {
        self.slots_committed.store(page.slots_committed as u32, Relaxed);
        self.published.store(page.file.is_some(), Relaxed);
        if let Some(file) = page.file {
            self.file_pid.store(file.pid, Relaxed);
            self.file_suffix.store(file.suffix, Relaxed);
            self.file_device.store(file.device, Relaxed);
            self.file_inode.store(file.inode, Relaxed);
        }
    }

    /// Writes the header, with the magic last: a reader that finds it also finds the rest.
    fn write_header(&self, base: NonNull<u8>, pid: u32) {
        let header = header_at(base);
        header.version.store(VERSION, Relaxed);
        header.header_bytes.store(HEADER_BYTES as u32, Relaxed);
        header.slot_bytes.store(SLOT_BYTES as u32, Relaxed);
        header.slot_count.store(SLOTS as u32, Relaxed);
        header.pid.store(pid, Relaxed);
        store_address(self.node.map(|ip| SocketAddr::new(ip, 0)), &header.node_ip, &header.node_family);
        header.started_at_ns.store(unix_time_ns(), Relaxed);
        store_words(&header.program, &self.program);
        header.magic.store(MAGIC, Release);
    }

    fn header(&self) -> &'static Header {
        header_at(self.page)
    }

    /// Returns a slot that was taken from this page, so that it has memory.
    fn slot(&self, index: u32) -> &'static Slot {
        assert!(index < self.slots_committed.load(Relaxed));
        slot_at(self.page, index)
    }

    /// Returns whether `crosslane stat` can see this page.
    pub fn is_published(&self) -> bool {
        self.published.load(Relaxed)
    }

    /// Counts a connection that could have had a lane and uses kernel TCP.
    pub fn count_fallback(&self, reason: FallbackReason) {
        self.ensure_published();
        self.header().fallbacks[reason as usize].fetch_add(1, Relaxed);
    }

    /// Stores how many bytes the lanes of the process occupy beyond their small rings, and the bound on them.
    pub fn note_lane_memory(&self, bytes: u64, bytes_max: u64) {
        self.header().lane_memory_bytes.store(bytes, Relaxed);
        self.header().lane_memory_bytes_max.store(bytes_max, Relaxed);
    }

    /// Adds a connection. Takes no lock and allocates nothing; makes a system call only if the table grows.
    pub fn open_connection(&'static self, connection: &NewConnection) -> ConnectionSlot {
        self.ensure_published();
        let path = connection.path;
        let totals = &self.header().totals[path as usize];
        totals.connections_total.fetch_add(1, Relaxed);
        totals.connections_open.fetch_add(1, Relaxed);
        self.open[path as usize].fetch_add(1, Relaxed);
        let Some(index) = self.take_slot() else {
            self.header().connections_unlisted.fetch_add(1, Relaxed);
            let slot = &self.header().unlisted[path as usize];
            return ConnectionSlot { stats: self, slot, index: UNLISTED, path, single_writer: false };
        };
        let slot = self.slot(index);
        slot.sender.clear();
        slot.receiver.clear();
        let opened_at_ns = unix_time_ns();
        self.identities(index).for_each(|identity| identity.open(connection, opened_at_ns));
        // Kernel TCP has no lock of the library's, so that two threads may send at once.
        let single_writer = path != DataPath::Kernel;
        ConnectionSlot { stats: self, slot, index, path, single_writer }
    }

    /// Records a closed connection, in place of the one that was closed [`CLOSED_RECORDS`] connections ago.
    fn record_closed(&self, slot: &Slot) {
        let header = self.header();
        let number = header.closed_total.fetch_add(1, Relaxed);
        let record = &header.closed[number as usize % CLOSED_RECORDS];
        // A thread that is still writing a connection of the round before keeps the record.
        if record.identity.state.swap(STATE_CLOSING, Acquire) == STATE_CLOSING {
            return;
        }
        record.identity.copy(&slot.identity);
        record.sender.copy(&slot.sender);
        record.receiver.copy(&slot.receiver);
        record.closed_at_ns.store(unix_time_ns(), Relaxed);
        record.identity.state.store(STATE_CLOSED, Release);
    }

    /// Returns both copies of a slot's identity: the one for readers, and the private one.
    fn identities(&self, index: u32) -> impl Iterator<Item = &'static Identity> {
        [&self.slot(index).identity, &self.known[index as usize].identity].into_iter()
    }

    fn take_slot(&self) -> Option<u32> {
        self.pop_free().or_else(|| self.take_unused())
    }

    fn pop_free(&self) -> Option<u32> {
        let mut top = self.free_top.load(Acquire);
        loop {
            let index = (top as u32).checked_sub(1)?;
            let below = self.known[index as usize].free_below.load(Relaxed);
            let next = tagged(top, below);
            match self.free_top.compare_exchange_weak(top, next, Acquire, Acquire) {
                Ok(_) => return Some(index),
                Err(now) => top = now,
            }
        }
    }

    fn push_free(&self, index: u32) {
        let mut top = self.free_top.load(Relaxed);
        loop {
            self.known[index as usize].free_below.store(top as u32, Relaxed);
            match self.free_top.compare_exchange_weak(top, tagged(top, index + 1), Release, Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    fn take_unused(&self) -> Option<u32> {
        let mut used = self.slots_used.load(Relaxed);
        loop {
            if used as usize >= self.known.len() || !self.commit(used) {
                return None;
            }
            match self.slots_used.compare_exchange_weak(used, used + 1, Relaxed, Relaxed) {
                Ok(_) => break,
                Err(now) => used = now,
            }
        }
        self.header().slots_used_max.fetch_max(used + 1, Relaxed);
        Some(used)
    }

    /// Returns whether the slot at `index` has memory, after trying to allocate it.
    fn commit(&self, index: u32) -> bool {
        let committed = self.slots_committed.load(Relaxed);
        if index < committed {
            return true;
        }
        let end = (committed as usize + CHUNK_SLOTS).min(SLOTS);
        if backing::populate(self.page, committed as usize, end).is_err() {
            return false;
        }
        self.slots_committed.fetch_max(end as u32, Relaxed);
        (index as usize) < end
    }

    /// Gives a child its own page in place of its parent's, right after `fork`. To be called from a `pthread_atfork`
    /// child handler, which runs while the child has one thread. Connections of the parent stay open, marked as
    /// inherited, and count from zero; every [`ConnectionSlot`] stays valid. Safe after `fork` in a multi-threaded
    /// program: it neither allocates nor takes a lock.
    ///
    /// The page is private until the child counts a connection, a reason, or bytes by kernel TCP: most children end or
    /// run another program before that, and a file takes as long as the `fork` itself.
    pub fn forked_child(&'static self) {
        if self.known.is_empty() {
            // The emergency page is static memory, of which the child already has a copy.
            return reset_counters(self.header());
        }
        let used = self.slots_used.load(Relaxed);
        if self.become_private(own_pid(), used).is_ok() {
            self.publication.store(PRIVATE, Relaxed);
            return self.rebuild_free_stack(used);
        }
        // Even this fails in a child whose memory limit is below what it has mapped. Its counters then go to its
        // parent's page, but it reuses none of its parent's slots.
        self.publication.store(PUBLISHED, Relaxed);
        self.slots_used.store(SLOTS as u32, Relaxed);
        self.free_top.store(0, Relaxed);
    }

    /// Makes the page of a child a file of the rack, before the child counts something.
    #[inline]
    fn ensure_published(&self) {
        if self.publication.load(Relaxed) != PUBLISHED {
            self.publish();
        }
    }

    #[cold]
    fn publish(&self) {
        if self.publication.compare_exchange(PRIVATE, PUBLISHING, Acquire, Relaxed).is_err() {
            // Bounded: this may be a handler that has interrupted that thread. What it counts is lost then.
            for _ in 0..YIELDS_MAX {
                if self.publication.load(Acquire) == PUBLISHED {
                    return;
                }
                std::thread::yield_now();
            }
            return;
        }
        let used = self.slots_used.load(Relaxed);
        if let Ok(page) = backing::map(self.rack(), own_pid(), used as usize) {
            copy_page(self.page, page.base, used);
            // SAFETY: both are whole mappings of a page that this process owns. The kernel replaces one by the other at
            // once; what other threads count meanwhile goes to one of them.
            if unsafe { backing::replace(self.page, page.base) }.is_ok() {
                self.adopt(&page);
            } else {
                page.file.inspect(|file| backing::remove(self.rack(), *file));
                // SAFETY: `replace` failed, so that the mapping is still whole, and nothing refers to it.
                unsafe { backing::unmap(page.base) };
            }
        }
        self.publication.store(PUBLISHED, Release);
    }

    fn write_inherited(&self, base: NonNull<u8>, used: u32) {
        let header = header_at(base);
        for (totals, open) in header.totals.iter().zip(&self.open) {
            totals.connections_open.store(open.load(Relaxed), Relaxed);
        }
        header.slots_used_max.store(used, Relaxed);
        for (index, known) in (0..used).zip(self.known) {
            if known.identity.is_open() {
                slot_at(base, index).identity.inherit(&known.identity);
            }
        }
    }

    /// Slots that another thread was opening or closing during the fork have no owner in the child and become free.
    fn rebuild_free_stack(&self, used: u32) {
        self.free_top.store(0, Relaxed);
        for index in (0..used).rev() {
            if !self.known[index as usize].identity.is_open() {
                self.push_free(index);
            }
        }
    }

    /// Replaces the page by private memory, so that the child does not write into its parent's.
    fn become_private(&self, pid: u32, used: u32) -> Result<(), Errno> {
        self.published.store(false, Relaxed);
        // SAFETY: `self.page` is a whole mapping of a page that this process owns, and the child has only the calling
        // thread.
        unsafe { backing::replace_with_zeroes(self.page)? };
        self.slots_committed.store(SLOTS as u32, Relaxed);
        self.write_inherited(self.page, used);
        self.write_header(self.page, pid);
        Ok(())
    }

    /// Removes the page's file when the process ends in an orderly way. The page may still be written to.
    pub fn remove(&self) {
        if !self.published.swap(false, Relaxed) || self.file_pid.load(Relaxed) != own_pid() {
            return;
        }
        backing::remove(self.rack(), self.file_identity());
    }

    fn file_identity(&self) -> FileIdentity {
        FileIdentity {
            pid: self.file_pid.load(Relaxed),
            suffix: self.file_suffix.load(Relaxed),
            device: self.file_device.load(Relaxed),
            inode: self.file_inode.load(Relaxed),
        }
    }

    /// Unmaps the page as the death of the process would, leaving the file behind. For tests.
    ///
    /// # Safety
    /// Neither this page nor any slot of it may be used afterwards.
    #[doc(hidden)]
    pub unsafe fn vanish(&'static self) {
        // SAFETY: by the contract of this function, the page is no longer used.
        unsafe { backing::unmap(self.page) };
    }
}

/// Copies the header and the slots that were used, the beginning of the header last: a reader that finds the magic
/// there also finds the rest.
fn copy_page(from: NonNull<u8>, to: NonNull<u8>, used: u32) {
    let words = (HEADER_BYTES + used as usize * SLOT_BYTES) / size_of::<AtomicU64>();
    for index in (0..words).rev() {
        // SAFETY: both are pages with memory for this number of slots, aligned, and consist of atomics.
        let (from, to) =
            unsafe { (from.cast::<AtomicU64>().add(index).as_ref(), to.cast::<AtomicU64>().add(index).as_ref()) };
        to.store(from.load(Relaxed), Release);
    }
}

fn tagged(top: u64, index_plus_one: u32) -> u64 {
    ((top >> 32).wrapping_add(1) << 32) | u64::from(index_plus_one)
}

fn header_at(base: NonNull<u8>) -> &'static Header {
    // SAFETY: every base comes from `backing::map` or is the emergency page: mapped as long as the process,
    // page-aligned, with the header's memory allocated. A header consists of atomics, for which all bit patterns are
    // valid.
    unsafe { base.cast::<Header>().as_ref() }
}

/// Returns a slot, whose memory must be allocated: `index` is below a committed count, or the page was just created
/// with that many slots.
fn slot_at(base: NonNull<u8>, index: u32) -> &'static Slot {
    assert!((index as usize) < SLOTS);
    // SAFETY: within the mapping by the assertion; mapped as long as the process, aligned to 256 bytes, and made of
    // atomics.
    unsafe { base.add(HEADER_BYTES + index as usize * SLOT_BYTES).cast::<Slot>().as_ref() }
}

fn reset_counters(header: &Header) {
    for totals in &header.totals {
        totals.connections_total.store(0, Relaxed);
        totals.bytes_sent_closed.store(0, Relaxed);
        totals.bytes_received_closed.store(0, Relaxed);
    }
    header.fallbacks.iter().for_each(|counter| counter.store(0, Relaxed));
}

impl Identity {
    fn open(&self, connection: &NewConnection, opened_at_ns: u64) {
        self.fd.store(connection.fd, Relaxed);
        let reason = connection.reason.map_or(0, |reason| reason as u32 + 1);
        self.kind.store(connection.path as u32 | (connection.role as u32) << 8 | reason << 24, Relaxed);
        self.opened_at_ns.store(opened_at_ns, Relaxed);
        self.set_addresses(connection.local, connection.peer);
        self.generation.fetch_add(1, Relaxed);
        self.state.store(STATE_OPEN, Release);
    }

    fn is_open(&self) -> bool {
        self.state.load(Acquire) == STATE_OPEN
    }

    fn set_addresses(&self, local: Option<SocketAddr>, peer: Option<SocketAddr>) {
        store_address(local, &self.local_ip, &self.local_port);
        store_address(peer, &self.peer_ip, &self.peer_port);
    }

    fn inherit(&self, parents: &Self) {
        self.copy(parents);
        self.kind.fetch_or(FLAG_INHERITED, Relaxed);
        self.state.store(STATE_OPEN, Release);
    }

    /// Copies everything but the state.
    fn copy(&self, from: &Self) {
        self.fd.store(from.fd.load(Relaxed), Relaxed);
        copy_u32(&self.kind, &from.kind);
        copy_u32(&self.generation, &from.generation);
        copy_u64(&self.opened_at_ns, &from.opened_at_ns);
        self.local_ip.iter().zip(&from.local_ip).for_each(|(own, from)| copy_u64(own, from));
        self.peer_ip.iter().zip(&from.peer_ip).for_each(|(own, from)| copy_u64(own, from));
        copy_u32(&self.local_port, &from.local_port);
        copy_u32(&self.peer_port, &from.peer_port);
    }
}

impl Direction {
    fn clear(&self) {
        self.bytes.store(0, Relaxed);
        self.messages.store(0, Relaxed);
        self.wakes_or_sleeps.store(0, Relaxed);
        self.bytes_by_tcp.store(0, Relaxed);
        self.is_on_tcp.store(0, Relaxed);
    }

    fn copy(&self, from: &Self) {
        copy_u64(&self.bytes, &from.bytes);
        copy_u64(&self.messages, &from.messages);
        copy_u64(&self.wakes_or_sleeps, &from.wakes_or_sleeps);
        copy_u64(&self.bytes_by_tcp, &from.bytes_by_tcp);
        copy_u32(&self.is_on_tcp, &from.is_on_tcp);
    }

    #[inline]
    fn add(&self, bytes: u64, single_writer: bool) {
        if single_writer {
            self.bytes.store(self.bytes.load(Relaxed).wrapping_add(bytes), Relaxed);
            self.messages.store(self.messages.load(Relaxed).wrapping_add(1), Relaxed);
        } else {
            self.bytes.fetch_add(bytes, Relaxed);
            self.messages.fetch_add(1, Relaxed);
        }
    }
}

fn copy_u64(to: &AtomicU64, from: &AtomicU64) {
    to.store(from.load(Relaxed), Relaxed);
}

fn copy_u32(to: &AtomicU32, from: &AtomicU32) {
    to.store(from.load(Relaxed), Relaxed);
}

fn store_address(address: Option<SocketAddr>, ip: &[AtomicU64; 2], port: &AtomicU32) {
    let (family, octets) = match address.map(|address| address.ip()) {
        None => (0, [0; 16]),
        Some(IpAddr::V4(four)) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&four.octets());
            (4, octets)
        }
        Some(IpAddr::V6(six)) => (6, six.octets()),
    };
    store_words(ip, &octets);
    port.store(address.map_or(0, |address| u32::from(address.port())) | family << 16, Relaxed);
}

fn store_words(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks_exact(8)) {
        word.store(chunk.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)).to_le(), Relaxed);
    }
}

/// A connection's slot in the page. Dropping it closes the connection: its counters are added to the totals, and it is
/// recorded among the last closed ones.
///
/// On a lane, each direction must be counted by one thread at a time, as a lane requires anyway; the two directions may
/// be counted concurrently. On the kernel path, any number of threads may count.
pub struct ConnectionSlot {
    stats: &'static StatsPage,
    slot: &'static Slot,
    index: u32,
    path: DataPath,
    single_writer: bool,
}

impl ConnectionSlot {
    /// Counts one send of `bytes`.
    #[inline]
    pub fn add_sent(&self, bytes: u64) {
        self.slot.sender.add(bytes, self.single_writer);
    }

    /// Counts one receive of `bytes`.
    #[inline]
    pub fn add_received(&self, bytes: u64) {
        self.slot.receiver.add(bytes, self.single_writer);
    }

    /// Counts a transfer of a connection by kernel TCP, sent or received: that of 0 bytes was none. `is_only_thread`
    /// says that no other thread counts meanwhile.
    #[inline]
    pub fn add_by_kernel(&self, sent_bytes: u64, received_bytes: u64, is_only_thread: bool) {
        if sent_bytes > 0 || received_bytes > 0 {
            self.stats.ensure_published();
        }
        let single_writer = is_only_thread && self.index != UNLISTED;
        for (side, bytes) in [(&self.slot.sender, sent_bytes), (&self.slot.receiver, received_bytes)] {
            if bytes > 0 {
                side.add(bytes, single_writer);
            }
        }
    }

    /// Adds bytes that kernel TCP has carried for a connection with a lane; the bytes of the lane are counted by
    /// [`ConnectionSlot::add_sent`] and [`ConnectionSlot::add_received`].
    #[inline]
    pub fn add_by_tcp(&self, sent_bytes: u64, received_bytes: u64) {
        if sent_bytes > 0 || received_bytes > 0 {
            self.stats.ensure_published();
        }
        for (side, bytes) in [(&self.slot.sender, sent_bytes), (&self.slot.receiver, received_bytes)] {
            if bytes > 0 {
                side.bytes_by_tcp.fetch_add(bytes, Relaxed);
            }
        }
    }

    /// Notes that the other side has reported the reason for which the connection uses kernel TCP.
    pub fn note_reported(&self) {
        self.slot.identity.kind.fetch_or(FLAG_REPORTED, Relaxed);
    }

    /// Sets whether this side's sends use kernel TCP at present, although the connection has a lane.
    pub fn set_sends_on_tcp(&self, is_on_tcp: bool) {
        self.slot.sender.is_on_tcp.store(u32::from(is_on_tcp), Relaxed);
    }

    /// As [`ConnectionSlot::set_sends_on_tcp`], for receives.
    pub fn set_receives_on_tcp(&self, is_on_tcp: bool) {
        self.slot.receiver.is_on_tcp.store(u32::from(is_on_tcp), Relaxed);
    }

    /// Returns the bytes sent and received so far.
    pub fn carried_bytes(&self) -> (u64, u64) {
        (self.slot.sender.bytes.load(Relaxed), self.slot.receiver.bytes.load(Relaxed))
    }

    /// Notes that another slot counts the connection from now on: the end of this one is not recorded as its end.
    pub fn note_replaced(&self) {
        if self.index != UNLISTED {
            self.slot.identity.kind.fetch_or(FLAG_REPLACED, Relaxed);
        }
    }

    /// Forgets the bytes so far: those of a connection that has another slot from now on, which has counted them.
    pub fn forget_bytes(&self) {
        // The counters of those that are not listed are together.
        if self.index == UNLISTED {
            return;
        }
        for side in [&self.slot.sender, &self.slot.receiver] {
            side.bytes.store(0, Relaxed);
            side.bytes_by_tcp.store(0, Relaxed);
        }
    }

    /// Counts a sleep of this side.
    pub fn count_sleep(&self) {
        self.slot.receiver.wakes_or_sleeps.fetch_add(1, Relaxed);
    }

    /// Counts a wakeup sent to the other side.
    pub fn count_wake(&self) {
        self.slot.sender.wakes_or_sleeps.fetch_add(1, Relaxed);
    }

    /// Sets the descriptor of the connection after `dup` and `close`.
    pub fn set_fd(&self, fd: i32) {
        if self.index != UNLISTED {
            self.stats.identities(self.index).for_each(|identity| identity.fd.store(fd, Relaxed));
        }
    }

    /// Sets the addresses, once they are known.
    pub fn set_addresses(&self, local: Option<SocketAddr>, peer: Option<SocketAddr>) {
        if self.index != UNLISTED {
            self.stats.identities(self.index).for_each(|identity| identity.set_addresses(local, peer));
        }
    }

    /// Returns the path that carries the connection.
    pub fn path(&self) -> DataPath {
        self.path
    }

    /// Closes the connection, as dropping does.
    pub fn close(self) {}
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let totals = &self.stats.header().totals[self.path as usize];
        totals.connections_open.fetch_sub(1, Relaxed);
        self.stats.open[self.path as usize].fetch_sub(1, Relaxed);
        if self.index == UNLISTED {
            return;
        }
        self.slot.identity.state.store(STATE_CLOSING, Relaxed);
        totals.bytes_sent_closed.fetch_add(self.slot.sender.bytes.load(Relaxed), Relaxed);
        totals.bytes_received_closed.fetch_add(self.slot.receiver.bytes.load(Relaxed), Relaxed);
        let by_tcp = &self.stats.header().totals[DataPath::Kernel as usize];
        by_tcp.bytes_sent_closed.fetch_add(self.slot.sender.bytes_by_tcp.load(Relaxed), Relaxed);
        by_tcp.bytes_received_closed.fetch_add(self.slot.receiver.bytes_by_tcp.load(Relaxed), Relaxed);
        if self.slot.identity.kind.load(Relaxed) & FLAG_REPLACED == 0 {
            self.stats.record_closed(self.slot);
        }
        self.stats.identities(self.index).for_each(|identity| identity.state.store(STATE_FREE, Release));
        self.stats.push_free(self.index);
    }
}

/// Returns the name of the running program, as `ps` shows it, read by raw system calls.
pub fn own_program_name(buffer: &mut [u8; PROGRAM_BYTES]) -> &[u8] {
    if let Ok(length) = crate::file::read_start(c"/proc/self/comm", buffer).map(|read| read.trim_ascii_end().len()) {
        return &buffer[..length];
    }
    // A program that has changed its root directory: the name of its thread.
    let Ok(name) = rustix::thread::name() else { return b"?" };
    let bytes = name.to_bytes();
    let length = bytes.len().min(PROGRAM_BYTES);
    buffer[..length].copy_from_slice(&bytes[..length]);
    &buffer[..length]
}

fn own_pid() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

fn unix_time_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}
