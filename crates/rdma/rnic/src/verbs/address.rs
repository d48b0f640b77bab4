//! Addresses of peers.

use crate::wire::QpNumber;

/// Another NIC, as the driver knows it: a host of a simulation, an entry in a table of UDP addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NicAddress(pub u32);

/// To whom a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramDestination {
    /// Which NIC.
    pub to: NicAddress,
    /// Which queue pair there.
    pub qp: QpNumber,
    /// Its queue key.
    pub queue_key: u32,
}
