//! The program's array of events during a wait.

use libc::epoll_event;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of the next wait of this process.
static NEXT_WAIT: AtomicU64 = AtomicU64::new(1);

/// The program's array of events, of which the first ones are filled.
pub(super) struct Buffer {
    events: *mut epoll_event,
    len: usize,
    max: usize,
    /// The number of the wait.
    wait: u64,
    /// The array has events of the kernel, which would report again those that do not end with a report.
    pub has_kernel_events: bool,
    /// The kernel may have other events of members that were reported from memory, or events from before those.
    pub asks_kernel: bool,
}

/// Where a member was last reported: a second report by the same wait is added to the first.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Place {
    wait: u64,
    at: usize,
}

impl Buffer {
    /// Returns an empty buffer for a wait.
    ///
    /// # Safety
    /// `events` is writable for `max` events as long as the buffer lives.
    pub unsafe fn new(events: *mut epoll_event, max: usize) -> Self {
        let wait = NEXT_WAIT.fetch_add(1, Ordering::Relaxed);
        Self { events, len: 0, max, wait, has_kernel_events: false, asks_kernel: false }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_full(&self) -> bool {
        self.len == self.max
    }

    /// Returns the free part of the array.
    pub fn rest(&self) -> (*mut epoll_event, i32) {
        (self.events.wrapping_add(self.len), i32::try_from(self.max - self.len).unwrap_or(i32::MAX))
    }

    /// Puts the events from the one at `begin` on in front of the others.
    pub fn bring_forward(&mut self, begin: usize) {
        if begin == 0 || begin == self.len {
            return;
        }
        // SAFETY: the first `len` elements of the array are filled; `epoll_event` is packed, which aligns it to a byte.
        unsafe { std::slice::from_raw_parts_mut(self.events, self.len) }.rotate_left(begin);
        // The places of this wait hold no more.
        self.wait = NEXT_WAIT.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the event at `offset` behind the filled ones, which the kernel has stored there.
    pub fn of_kernel(&self, begin: usize, offset: usize) -> epoll_event {
        assert!(begin + offset < self.max, "the kernel stores no more events than there is room");
        // SAFETY: the array has `max` elements, by the contract of `new`; the kernel has filled this one.
        unsafe { self.events.add(begin + offset).read_unaligned() }
    }

    /// Adds an event. Returns `false` if there is no room.
    pub fn push(&mut self, events: u32, data: u64) -> bool {
        if self.is_full() {
            return false;
        }
        // SAFETY: the array has `max` elements, by the contract of `new`, and `len` is less.
        unsafe { self.events.add(self.len).write_unaligned(epoll_event { events, u64: data }) };
        self.len += 1;
        true
    }

    /// Adds an event of a member, or adds to the one that this wait has reported at `place`.
    pub fn push_at(&mut self, place: &mut Place, events: u32, data: u64) -> bool {
        if place.wait == self.wait && place.at < self.len {
            // SAFETY: the first `len` elements of the array are filled.
            unsafe {
                let mut event = self.events.add(place.at).read_unaligned();
                event.events |= events;
                self.events.add(place.at).write_unaligned(event);
            }
            return true;
        }
        let next = Place { wait: self.wait, at: self.len };
        let is_pushed = self.push(events, data);
        if is_pushed {
            *place = next;
        }
        is_pushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_events_come_forward_in_their_order() {
        for begin in 0..=5 {
            let mut events = [epoll_event { events: 0, u64: 0 }; 8];
            // SAFETY: the array is a local of this length.
            let mut buffer = unsafe { Buffer::new(events.as_mut_ptr(), events.len()) };
            (0..5).for_each(|number| assert!(buffer.push(1, number)));
            buffer.bring_forward(begin);
            let data: Vec<u64> = (0..5).map(|index| buffer.of_kernel(0, index).u64).collect();
            let expected: Vec<u64> = (begin as u64..5).chain(0..begin as u64).collect();
            assert_eq!(data, expected, "from {begin} on");
        }
    }
}
