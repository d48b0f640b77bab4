//! What a router needs of whatever it is plugged into.

pub mod memory;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use crate::{Packet, Pool};

/// Ethernet frames in and out, in order, without waiting.
pub trait Port {
    /// Appends frames that have come to `into`, at most `packets_max`; those that find no buffer stay where they are.
    /// Says how many. An error is the port's end: its device is gone.
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize>;

    /// Takes packets from the front of `from` and gives their buffers back, as many as there is room for now. Says how
    /// many.
    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize>;

    /// Becomes readable when there is something to receive; `None` for a port that is only ever looked at.
    fn wakes(&self) -> Option<BorrowedFd<'_>>;

    /// Before sleeping on [`Port::wakes`]: whether there is nothing to receive, looked at once more after the other
    /// side has been told to wake the sleeper.
    fn may_sleep(&mut self) -> bool;

    /// Whether a kernel stands behind the port: an interface with addresses of its own, whose kernel answers for them
    /// and has every frame that is for this node. What came through such a port is not given to the kernel again.
    fn has_kernel(&self) -> bool {
        false
    }

    /// What the port has lost since it was opened.
    fn losses(&self) -> PortLosses {
        PortLosses::default()
    }
}

/// Frames that a port lost, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortLosses {
    /// Came while the port's queue was full.
    pub receive_overflows: u64,
    /// Came, but cannot be handed on: longer than a buffer, or cut off.
    pub receive_unusable: u64,
    /// Were taken to be sent, and refused: the interface is down, its queue full, or the frame longer than its MTU.
    pub transmit_refused: u64,
}
