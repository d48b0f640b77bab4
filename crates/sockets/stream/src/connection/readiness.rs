//! What the lanes of a connection add to the kernel's readiness of its socket.

use super::Connection;
use crate::kernel::Tcp;
use path::{ReceiveBy, SendBy};
use socket::process::{system, threads};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// A wait that relies on the bell of a connection. Ends when it is dropped.
pub struct Parked(&'static Connection);

impl Drop for Parked {
    fn drop(&mut self) {
        threads::add(&self.0.sleepers, u32::MAX);
    }
}

impl Connection {
    /// Returns which of `wanted` the lanes have. The kernel reports what goes by TCP.
    pub fn lane_events(&'static self, fd: RawFd, wanted: i16) -> i16 {
        let mut ready = 0;
        if wanted & INPUT != 0
            && let Some(mut receiver) = self.receiver.lock()
        {
            // A violation counts as readable: the receive reports it.
            let by_lane = receiver.prepare(Tcp(fd)).map_or(true, |by| by == ReceiveBy::Lane);
            let has_data = receiver.lane_in_use().is_none_or(|lane| lane.may_have_data());
            ready |= if by_lane && has_data { INPUT } else { 0 };
        }
        if wanted & OUTPUT != 0
            && let Some(mut sender) = self.sender.lock()
            && sender.is_by_lane()
        {
            let by = sender.prepare(Tcp(fd), self.role());
            let has_room = sender.lane().is_none_or(|lane| lane.is_writable());
            ready |= if by != SendBy::Lane || has_room { OUTPUT } else { 0 };
        }
        ready & wanted
    }

    /// Returns whether sends go by a lane, so that the kernel's room does not matter.
    pub fn sends_by_lane(&'static self) -> bool {
        self.sender.lock().is_some_and(|sender| sender.is_by_lane())
    }

    /// Asks the peer to ring when one of `wanted` becomes true. Check [`Connection::lane_events`] once more before
    /// sleeping.
    pub fn park(&'static self, wanted: i16) -> Parked {
        threads::add(&self.sleepers, 1);
        if wanted & INPUT != 0
            && let Some(mut receiver) = self.receiver.lock()
            && let Some(lane) = receiver.lane()
        {
            lane.announce_sleep();
        }
        if wanted & OUTPUT != 0
            && let Some(mut sender) = self.sender.lock()
            && let Some(lane) = sender.lane()
        {
            lane.announce_sleep();
        }
        Parked(self)
    }

    /// Handles a ring of the bell, or its end.
    pub fn answer_bell(&'static self, fd: RawFd) {
        // Another thread may rely on the ring.
        if self.sleepers.load(Ordering::SeqCst) <= 1 && system::drain(self.bell()) != Ok(true) {
            self.note_peer_left(Tcp(fd));
        }
        self.answer(Tcp(fd));
    }

    /// Notes that the kernel has reported an event of the socket.
    pub fn note_kernel_event(&'static self) {
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.note_kernel_event();
        }
    }

    /// Returns the unread bytes in the lane.
    pub fn unread_bytes(&'static self) -> i32 {
        let Some(mut receiver) = self.receiver.lock() else { return 0 };
        let unread = receiver.lane().and_then(|lane| lane.unread_bytes().ok()).unwrap_or(0);
        i32::try_from(unread).unwrap_or(i32::MAX)
    }

    /// Returns the bytes in the lane that the peer has not read, if it has no room.
    pub fn unsent_bytes(&'static self) -> i32 {
        let Some(mut sender) = self.sender.lock() else { return 0 };
        let unsent = sender.lane().map_or(0, |lane| lane.unsent_bytes());
        i32::try_from(unsent).unwrap_or(i32::MAX)
    }
}
