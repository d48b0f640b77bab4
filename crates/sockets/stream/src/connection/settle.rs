//! Leaving a connection to the kernel alone.

use super::sender::Resent;
use super::{Connection, Use};
use crate::kernel::Tcp;
use path::{ReceiveBy, SendBy};
use socket::process::clock::now_ns;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long to wait for a peer that goes back to TCP at the same time, or that makes no room.
const WAIT_NS: u64 = 1_000_000_000;
/// Time between checks.
const NAP: Duration = Duration::from_micros(100);

impl Connection {
    /// Sends the connection back to TCP for good. Returns whether the program's own calls then suffice: nothing is left
    /// in a lane that this end would have to read or to write to TCP.
    pub fn settle(&'static self, fd: RawFd) -> bool {
        self.stay_on_tcp(Tcp(fd));
        self.forbid_moves();
        let deadline_ns = now_ns().saturating_add(WAIT_NS);
        loop {
            let has_sent = self.sends_by_tcp_now(self.current_use(fd));
            let has_read = self.receiver.lock().is_some_and(|mut receiver| {
                if receiver.prepare(Tcp(fd)) == Ok(ReceiveBy::Lane)
                    && receiver.lane_in_use().is_some_and(|lane| !lane.may_have_data())
                {
                    let _ = receiver.note_empty(Tcp(fd)).and_then(|_| receiver.prepare_last(Tcp(fd)));
                }
                receiver.prepare(Tcp(fd)) == Ok(ReceiveBy::Kernel)
            });
            if has_sent && has_read {
                return true;
            }
            if now_ns() >= deadline_ns {
                return false;
            }
            std::thread::sleep(NAP);
        }
    }

    /// Hangs up the bell of a connection that has [settled](Connection::settle), to make room for a descriptor of the
    /// program.
    pub fn hang_up(&'static self) {
        if let Some(mut meeting) = self.meeting.lock() {
            meeting.hang_up();
            self.bell_slot.store(-1, Ordering::Release);
        }
    }

    /// Returns whether sends use TCP, after writing to TCP what the peer has left in the lane.
    pub(super) fn sends_by_tcp_now(&'static self, this: Use) -> bool {
        this.sender().is_ok_and(|(mut sender, tcp)| match sender.prepare(tcp, self.role()) {
            SendBy::Tcp => true,
            SendBy::Lane => false,
            SendBy::Resend => sender.resend(tcp) == Ok(Resent::All),
        })
    }
}
