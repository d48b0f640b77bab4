//! Protection domains, memory regions and memory windows as values.

use crate::verbs::access::AccessFlags;
use crate::verbs::sge::LKey;
use crate::wire::{QpNumber, RKey};

/// A protection domain: memory regions, windows and queue pairs that may be used together. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProtectionDomain(pub(in crate::verbs) u32);

/// Parameters of the registration of a memory region (`ibv_reg_mr_iova`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The protection domain.
    pub domain: ProtectionDomain,
    /// Address of the memory in the host.
    pub host_address: u64,
    /// The address with which users of the keys name the first byte: equal to the host address, 0, or any other.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Access rights.
    pub access: AccessFlags,
}

/// The keys of a memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionKeys {
    /// The key for local work requests.
    pub local: LKey,
    /// The key for peers.
    pub remote: RKey,
}

/// The type of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowKind {
    /// Type 1: bound by a verb and usable by every queue pair of its protection domain. The NIC chooses a new key at
    /// each bind.
    Type1,
    /// Type 2B: bound by a work request and usable only by the queue pair that bound it. The owner chooses the lowest 8
    /// bits of the key. It can be bound only while it is invalid; a SEND with invalidate from the peer invalidates it.
    Type2,
}

/// The memory and rights that a window is bound to (`ibv_mw_bind_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindInfo {
    /// The memory region.
    pub region: LKey,
    /// The first address, as users of the region's keys name it.
    pub address: u64,
    /// Length in bytes; 0 unbinds a window of type 1.
    pub bytes: u64,
    /// Access rights; only remote rights are allowed.
    pub access: AccessFlags,
    /// Whether addresses of the window start at 0 instead of the region's address.
    pub is_zero_based: bool,
}

/// The identity on whose behalf memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectionContext {
    /// The protection domain of the queue pair that received the request.
    pub domain: ProtectionDomain,
    /// The queue pair that received the request.
    pub qp: QpNumber,
}
