//! Connections in a wait that have not met their other end. The wait does not know the bell of one that meets it
//! meanwhile, by a call of another thread, so that its receiving direction must not move until the wait is over.

use crate::lifecycle::{self, Begun, Call};
use crate::short_list::ShortList;
use crate::table::{self, Entry};
use crate::young::Transfer;
use libc::pollfd;
use socket::process::threads;
use std::os::fd::RawFd;

/// Connections that are kept on the stack.
const SHORT_HELD: usize = 4;

/// Connections whose receiving direction does not move until this is dropped.
pub(super) struct HeldYoung(ShortList<Option<(RawFd, Call)>, SHORT_HELD>);

impl HeldYoung {
    /// Holds those of the entries for as long as the wait lasts, if another thread could let them meet.
    pub(super) fn hold(entries: &[pollfd]) -> Self {
        let mut held = Self(ShortList::new(None));
        if threads::is_single() {
            return held;
        }
        for entry in entries.iter().filter(|entry| entry.events & super::INPUT != 0) {
            if let Entry::Young(young) = table::get(entry.fd)
                && let Begun::Counted(call) = lifecycle::begin(entry.fd, young, Transfer::Received)
            {
                held.0.push(Some((entry.fd, call)));
            }
        }
        held
    }
}

impl Drop for HeldYoung {
    fn drop(&mut self) {
        for (fd, call) in self.0.as_slice().iter().flatten() {
            lifecycle::end(*fd, call, 0);
        }
    }
}
