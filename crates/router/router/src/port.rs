//! The interface of ports to the router.

pub mod memory;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use crate::{Packet, Pool};

/// Receives and transmits Ethernet frames in order, without blocking.
pub trait Port {
    /// Appends at most `packets_max` received frames to `into`, and returns their number. Frames that find no free
    /// buffer stay in the port. An error is permanent: the device is gone.
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize>;

    /// Transmits packets from the front of `from` as far as there is room, frees their buffers, and returns their
    /// number. None is a large packet unless [`Port::takes_large`].
    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize>;

    /// Returns the descriptor that becomes readable when frames arrive; `None` for a port that must be polled.
    fn wakes(&self) -> Option<BorrowedFd<'_>>;

    /// Prepares for sleeping on [`Port::wakes`]: requests a wake-up from the other side, then polls once more. Returns
    /// whether there is nothing to receive.
    fn may_sleep(&mut self) -> bool;

    /// Returns whether the port is an interface whose kernel also receives its frames and answers for its addresses.
    /// Packets from such a port are not delivered to the kernel again.
    fn has_kernel(&self) -> bool {
        false
    }

    /// Returns whether large packets are transmitted as they are, see [`Pool::set_large`].
    fn takes_large(&self) -> bool {
        false
    }

    /// Returns the frames lost since the port was opened.
    fn losses(&self) -> PortLosses {
        PortLosses::default()
    }
}

/// Number of frames lost by a port, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortLosses {
    /// Arrived while the receive queue was full.
    pub receive_overflows: u64,
    /// Received, but longer than a buffer or truncated.
    pub receive_unusable: u64,
    /// Accepted for transmission, but rejected: the interface is down, its queue is full, or the frame exceeds its MTU.
    pub transmit_refused: u64,
}
