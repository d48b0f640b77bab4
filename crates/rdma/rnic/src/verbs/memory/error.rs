//! Errors of memory keys and protection domains.

use thiserror::Error;

use crate::verbs::access::AccessFlags;

/// Why a key cannot be used, or an operation on the table fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// The key is not registered, or not any more.
    #[error("key {0:#010x} names no memory of this NIC; use the key of the latest registration or bind")]
    UnknownKey(u32),
    /// The key names another kind of object.
    #[error("key {key:#010x} does not name a {wanted}; use the key of one")]
    WrongKind {
        /// The key.
        key: u32,
        /// The expected kind.
        wanted: &'static str,
    },
    /// The key belongs to another protection domain.
    #[error("key {key:#010x} is of protection domain {owner}, not {accessor}; register the memory in that one")]
    OtherDomain {
        /// The key.
        key: u32,
        /// The protection domain of the key.
        owner: u32,
        /// The protection domain of the access.
        accessor: u32,
    },
    /// The key is bound for another queue pair.
    #[error("key {key:#010x} is bound for queue pair {owner}, not {accessor}; bind a window for that one")]
    OtherQueuePair {
        /// The key.
        key: u32,
        /// The queue pair of the key.
        owner: u32,
        /// The queue pair of the access.
        accessor: u32,
    },
    /// The access is not within the bounds of the key.
    #[error("{bytes} bytes at {address:#x} exceed key {key:#010x} of {held} bytes at {first:#x}; stay within")]
    Bounds {
        /// The key.
        key: u32,
        /// The address of the access.
        address: u64,
        /// The length of the access.
        bytes: u64,
        /// The first address of the key.
        first: u64,
        /// The length of the key's memory.
        held: u64,
    },
    /// The key does not grant this access right.
    #[error("key {key:#010x} does not allow {missing}; register or bind with it")]
    Forbidden {
        /// The key.
        key: u32,
        /// The missing access rights.
        missing: AccessFlags,
    },
    /// A combination of access rights that cannot be granted.
    #[error("{access} cannot be given {wanted}; {remedy}")]
    Rights {
        /// The requested access rights.
        access: AccessFlags,
        /// To what, or on what, they were requested.
        wanted: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// An empty range, or one that wraps around the address space.
    #[error("{bytes} bytes at {address:#x} are not a memory range; give at least one byte, the last below 2^64")]
    NoMemory {
        /// The address.
        address: u64,
        /// The length.
        bytes: u64,
    },
    /// A window of type 2 is already bound.
    #[error("window {0:#010x} of type 2 is already bound; invalidate it first")]
    WindowBound(u32),
    /// The chosen key does not belong to the window.
    #[error("key {key:#010x} does not belong to window {window:#010x}; change only the lowest 8 bits")]
    KeyOfOther {
        /// The chosen key.
        key: u32,
        /// The current key of the window.
        window: u32,
    },
    /// Windows are still bound to the region.
    #[error("region {key:#010x} has {windows} bound windows; invalidate, unbind or deallocate them first")]
    WindowsLeft {
        /// The key of the region.
        key: u32,
        /// Number of bound windows.
        windows: u32,
    },
    /// The protection domain does not exist.
    #[error("there is no protection domain {0}; allocate one")]
    UnknownDomain(u32),
    /// The protection domain is in use.
    #[error("protection domain {domain} has {users} regions, windows, queues or queue pairs; destroy them first")]
    DomainBusy {
        /// The protection domain.
        domain: u32,
        /// Number of objects that use it.
        users: u32,
    },
    /// The table is full.
    #[error("the NIC holds its maximum of {0} regions and windows; deregister some")]
    Full(usize),
    /// All keys have been used.
    #[error("all keys of this NIC have been used; recreate the NIC")]
    KeysUsedUp,
}
