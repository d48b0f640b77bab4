//! The four rings of an AF_XDP socket: one side puts, the other takes, and one of the two is the kernel.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::xdp::XdpRingOffset;

use crate::mapping::Mapping;

/// `XDP_RING_NEED_WAKEUP`.
const NEEDS_WAKEUP: u32 = 1;

/// A ring of `T`, which are plain numbers.
pub struct Ring<T> {
    memory: Mapping,
    offsets: XdpRingOffset,
    entries: u32,
    /// Our own place: how many were put or taken so far.
    ours: u32,
    /// The other side's place, when it was last looked at.
    theirs: u32,
    entry: std::marker::PhantomData<T>,
}

impl<T: Copy> Ring<T> {
    /// The ring that a socket has at `page`.
    pub fn open(socket: impl AsFd, page: u64, offsets: XdpRingOffset, entries: u32) -> io::Result<Ring<T>> {
        assert!(entries.is_power_of_two(), "a ring of {entries}");
        let bytes = offsets.desc as usize + entries as usize * size_of::<T>();
        let memory = Mapping::of_socket(socket, page, bytes)?;
        Ok(Ring { memory, offsets, entries, ours: 0, theirs: 0, entry: std::marker::PhantomData })
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: `at` checks that the word lies in the mapping; the kernel aligns its words, and both sides use them
        // as atomics.
        unsafe { AtomicU32::from_ptr(self.memory.at(offset as usize, 4).cast()) }
    }

    fn entry(&self, index: u32) -> *mut T {
        let offset = self.offsets.desc as usize + (index & (self.entries - 1)) as usize * size_of::<T>();
        self.memory.at(offset, size_of::<T>()).cast()
    }

    /// Whether the kernel is to be called before it goes on.
    pub fn needs_wakeup(&self) -> bool {
        self.offsets.flags.is_some_and(|flags| self.word(flags).load(Ordering::Relaxed) & NEEDS_WAKEUP != 0)
    }

    /// Of a ring that we put into: how many more fit.
    pub fn room(&mut self) -> u32 {
        self.theirs = self.word(self.offsets.consumer).load(Ordering::Acquire);
        self.entries - self.ours.wrapping_sub(self.theirs)
    }

    /// Of a ring that we put into: how many the kernel has not taken.
    pub fn pending(&mut self) -> u32 {
        self.entries - self.room()
    }

    /// Puts an entry, for which there was [`Ring::room`]; the kernel sees it after [`Ring::publish`].
    pub fn put(&mut self, entry: T) {
        assert!(self.ours.wrapping_sub(self.theirs) < self.entries, "a ring of {} is full", self.entries);
        // SAFETY: the entry is in the mapping, aligned as the kernel aligns it, and ours: the kernel has taken it, and
        // does not look at it before it is published.
        unsafe { self.entry(self.ours).write(entry) };
        self.ours = self.ours.wrapping_add(1);
    }

    /// What was put is the kernel's.
    pub fn publish(&self) {
        self.word(self.offsets.producer).store(self.ours, Ordering::Release);
    }

    /// Of a ring that we take from: the oldest entry that was not taken.
    pub fn peek(&mut self) -> Option<T> {
        if self.ours == self.theirs {
            self.theirs = self.word(self.offsets.producer).load(Ordering::Acquire);
        }
        if self.ours == self.theirs {
            return None;
        }
        // SAFETY: in the mapping and aligned; the kernel has published it, and does not touch it before it is given
        // back. Every pattern of bits is an entry.
        Some(unsafe { self.entry(self.ours).read() })
    }

    /// The entry of [`Ring::peek`] is done with; the kernel knows after [`Ring::give_back`].
    pub fn take(&mut self) {
        self.ours = self.ours.wrapping_add(1);
    }

    /// What was taken is the kernel's again.
    pub fn give_back(&self) {
        self.word(self.offsets.consumer).store(self.ours, Ordering::Release);
    }
}
