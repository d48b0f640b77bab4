//! Addresses of peers.

use crate::wire::QpNumber;

/// A peer NIC as the driver numbers it: a host of a simulation, or an entry in a table of UDP addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NicAddress(pub u32);

/// The destination of a datagram (address handle, queue pair and queue key of `ibv_send_wr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramDestination {
    /// The destination NIC.
    pub to: NicAddress,
    /// The destination queue pair.
    pub qp: QpNumber,
    /// The queue key of the destination (Q_Key).
    pub queue_key: u32,
}
