//! The rings of an AF_XDP socket, each with one producer and one consumer, one of which is the kernel.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::xdp::XdpRingOffset;

use crate::mapping::Mapping;

/// `XDP_RING_NEED_WAKEUP`.
const NEEDS_WAKEUP: u32 = 1;

/// A ring of entries `T`, which consist of integers.
pub struct Ring<T> {
    memory: Mapping,
    offsets: XdpRingOffset,
    entries: u32,
    /// The index of this side: entries produced or consumed so far.
    own_index: u32,
    /// The index of the kernel, when it was last read.
    kernel_index: u32,
    entry: std::marker::PhantomData<T>,
}

impl<T: Copy> Ring<T> {
    /// Maps the ring of a socket at `page`.
    pub fn open(socket: impl AsFd, page: u64, offsets: XdpRingOffset, entries: u32) -> io::Result<Ring<T>> {
        assert!(entries.is_power_of_two(), "a ring of {entries}");
        let bytes = offsets.desc as usize + entries as usize * size_of::<T>();
        let memory = Mapping::of_socket(socket, page, bytes)?;
        Ok(Ring { memory, offsets, entries, own_index: 0, kernel_index: 0, entry: std::marker::PhantomData })
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: `at` checks that the word lies in the mapping; the kernel aligns its indices, and both sides access
        // them atomically.
        unsafe { AtomicU32::from_ptr(self.memory.at(offset as usize, 4).cast()) }
    }

    fn entry(&self, index: u32) -> *mut T {
        let offset = self.offsets.desc as usize + (index & (self.entries - 1)) as usize * size_of::<T>();
        self.memory.at(offset, size_of::<T>()).cast()
    }

    /// Returns whether the kernel must be called to process the ring.
    pub fn needs_wakeup(&self) -> bool {
        self.offsets.flags.is_some_and(|flags| self.word(flags).load(Ordering::Relaxed) & NEEDS_WAKEUP != 0)
    }

    /// For a producer: returns the number of free entries.
    pub fn free_entries(&mut self) -> u32 {
        self.kernel_index = self.word(self.offsets.consumer).load(Ordering::Acquire);
        self.entries - self.own_index.wrapping_sub(self.kernel_index)
    }

    /// For a producer: returns the number of entries that the kernel has not consumed.
    pub fn pending(&mut self) -> u32 {
        self.entries - self.free_entries()
    }

    /// Adds an entry, for which [`Ring::free_entries`] was not 0; the kernel sees it after [`Ring::publish`].
    pub fn push(&mut self, entry: T) {
        assert!(self.own_index.wrapping_sub(self.kernel_index) < self.entries, "a ring of {} is full", self.entries);
        // SAFETY: the pointer lies in the mapping and is aligned as the kernel aligns entries. The assertion above
        // shows that the kernel has consumed the previous entry, and it does not read the new one before it is
        // published.
        unsafe { self.entry(self.own_index).write(entry) };
        self.own_index = self.own_index.wrapping_add(1);
    }

    /// Makes the added entries visible to the kernel.
    pub fn publish(&self) {
        self.word(self.offsets.producer).store(self.own_index, Ordering::Release);
    }

    /// For a consumer: returns the oldest entry that was not consumed.
    pub fn peek(&mut self) -> Option<T> {
        if self.own_index == self.kernel_index {
            self.kernel_index = self.word(self.offsets.producer).load(Ordering::Acquire);
        }
        if self.own_index == self.kernel_index {
            return None;
        }
        // SAFETY: the pointer lies in the mapping and is aligned. The kernel has published the entry, and does not
        // overwrite it before [`Ring::release`]; every bit pattern is a valid entry.
        Some(unsafe { self.entry(self.own_index).read() })
    }

    /// Consumes the entry of [`Ring::peek`]; the kernel learns of it with [`Ring::release`].
    pub fn consume(&mut self) {
        self.own_index = self.own_index.wrapping_add(1);
    }

    /// Returns the consumed entries to the kernel.
    pub fn release(&self) {
        self.word(self.offsets.consumer).store(self.own_index, Ordering::Release);
    }
}
