//! The program's array of events, as `epoll_wait` fills it.

use super::kernel;
use super::registration::Registration;
use crate::process::memory;
use libc::epoll_event;
use rustix::io::Errno;

/// The largest number of events that the kernel accepts for one call.
const EVENTS_MAX: usize = i32::MAX as usize / size_of::<epoll_event>();

/// The filled part of the program's array.
pub(super) struct EventBuffer {
    pub(super) events: *mut epoll_event,
    max: usize,
    pub(super) len: usize,
}

impl EventBuffer {
    pub fn new(events: *mut epoll_event, max: i32) -> Result<Self, Errno> {
        match usize::try_from(max) {
            Ok(max) if max > 0 && max <= EVENTS_MAX => {
                // Programs may pass a larger number than their array has, as the kernel writes no more than it reports.
                memory::check_writable(events)?;
                Ok(Self { events, max, len: 0 })
            }
            _ => Err(Errno::INVAL),
        }
    }

    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == self.max
    }

    /// Returns how many more events fit.
    #[inline]
    pub fn room(&self) -> usize {
        self.max - self.len
    }

    /// Appends an event. Returns `false` for a listener that is in the array already, because the kernel reported its
    /// TCP side.
    #[inline]
    pub fn push(&mut self, registration: &Registration, ready: i16) -> bool {
        if registration.is_pending && (0..self.len).any(|index| self.data_at(index) == registration.data) {
            return false;
        }
        let event = epoll_event { events: u32::from(ready as u16), u64: registration.data };
        // SAFETY: the program's array has room for `max` events, and `len` is below `max`: scans stop when it is full.
        unsafe { self.events.add(self.len).write_unaligned(event) };
        self.len += 1;
        true
    }

    fn data_at(&self, index: usize) -> u64 {
        // SAFETY: `index` is below `len`, or below the number of events that the kernel has appended.
        unsafe { self.events.add(index).read_unaligned() }.u64
    }

    /// Accepts `count` events that the kernel has appended: removes the internal ones and passes them to `on_internal`.
    pub fn append(&mut self, count: usize, mut on_internal: impl FnMut(kernel::InternalFd)) {
        let (first, end) = (self.len, self.len + count);
        for place in first..end {
            match kernel::internal_fd_of(self.data_at(place)) {
                Some(internal) => on_internal(internal),
                None => {
                    if place != self.len {
                        // SAFETY: both indexes are below the number of events that the kernel has filled.
                        unsafe { std::ptr::copy(self.events.add(place), self.events.add(self.len), 1) };
                    }
                    self.len += 1;
                }
            }
        }
    }
}
