//! Why memory cannot be used.

use thiserror::Error;

use crate::verbs::access::AccessFlags;

/// A key that does not fit, or a table that cannot do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// Nothing has this key, or nothing any more.
    #[error("key {0:#010x} names no memory of this NIC; use the key of the latest registration or bind")]
    UnknownKey(u32),
    /// It names something else.
    #[error("key {key:#010x} does not name a {wanted}; use the key of one")]
    WrongKind {
        /// The key.
        key: u32,
        /// What was wanted.
        wanted: &'static str,
    },
    /// It belongs to another protection domain.
    #[error("key {key:#010x} is of protection domain {owner}, not {accessor}; register the memory in that one")]
    OtherDomain {
        /// The key.
        key: u32,
        /// Whose it is.
        owner: u32,
        /// Who asked.
        accessor: u32,
    },
    /// It belongs to another queue pair.
    #[error("key {key:#010x} is bound for queue pair {owner}, not {accessor}; bind a window for that one")]
    OtherQueuePair {
        /// The key.
        key: u32,
        /// Whose it is.
        owner: u32,
        /// Who asked.
        accessor: u32,
    },
    /// Not all of these bytes are in it.
    #[error("{bytes} bytes at {address:#x} are not within key {key:#010x}, {held} bytes at {first:#x}; ask for these")]
    Bounds {
        /// The key.
        key: u32,
        /// The first byte asked for.
        address: u64,
        /// How many.
        bytes: u64,
        /// The first byte there is.
        first: u64,
        /// How many there are.
        held: u64,
    },
    /// It does not give this right.
    #[error("key {key:#010x} does not allow {missing}; register or bind with it")]
    Forbidden {
        /// The key.
        key: u32,
        /// What is not allowed.
        missing: AccessFlags,
    },
    /// A peer may not have this right here.
    #[error("{access} cannot be given {wanted}; {remedy}")]
    Rights {
        /// The rights asked for.
        access: AccessFlags,
        /// To or on what.
        wanted: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// No bytes, or bytes beyond the last address.
    #[error("{bytes} bytes at {address:#x} are no memory; give at least one byte, the last below 2^64")]
    NoMemory {
        /// Where.
        address: u64,
        /// How many.
        bytes: u64,
    },
    /// A window that is to be bound already is.
    #[error("window {0:#010x} of type 2 is bound; invalidate it before")]
    WindowBound(u32),
    /// A key that is no key of this window.
    #[error("key {key:#010x} is no key for window {window:#010x}; choose the lowest 8 bits, and leave the others")]
    KeyOfOther {
        /// The key chosen.
        key: u32,
        /// The window's own.
        window: u32,
    },
    /// Memory that still shows through windows.
    #[error("region {key:#010x} has {windows} bound windows; invalidate, unbind or deallocate them before")]
    WindowsLeft {
        /// The region's key.
        key: u32,
        /// How many.
        windows: u32,
    },
    /// A protection domain that there is not.
    #[error("there is no protection domain {0}; allocate one")]
    UnknownDomain(u32),
    /// A protection domain in use.
    #[error("protection domain {domain} has {users} regions, windows, queues or queue pairs; destroy them before")]
    DomainBusy {
        /// Which.
        domain: u32,
        /// How many use it.
        users: u32,
    },
    /// As many as there may be.
    #[error("{0} regions and windows is all this NIC has room for; deregister some")]
    Full(usize),
    /// All keys were used.
    #[error("all keys of this NIC were used once; make it anew")]
    KeysUsedUp,
}
