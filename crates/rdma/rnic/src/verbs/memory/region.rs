//! Protection domains, registrations of regions, and binds of windows.

use crate::verbs::access::AccessFlags;
use crate::verbs::sge::LKey;
use crate::wire::{QpNumber, RKey};

/// Memory regions, windows and queue pairs of one program that may use each other. Its number is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProtectionDomain(pub(in crate::verbs) u32);

/// Memory of the host that is to have keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Who may use it.
    pub domain: ProtectionDomain,
    /// Where the host has it: an address of its own.
    pub host_address: u64,
    /// The address by which keys' users name its first byte: the same, or 0, or whatever (`ibv_reg_mr_iova`).
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// What may be done with it.
    pub access: AccessFlags,
}

/// The keys of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionKeys {
    /// For this NIC's own programs.
    pub local: LKey,
    /// For peers.
    pub remote: RKey,
}

/// How a window is bound and who may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowKind {
    /// By a verb of its own; with any queue pair of its protection domain. The NIC chooses a new key at each bind.
    Type1,
    /// By a work request; with the queue pair that bound it alone (type 2B). Its owner chooses the key's lowest 8 bits,
    /// it is bound only while it is invalid, and a peer's SEND with invalidate makes it so.
    Type2,
}

/// What a window is to show (`ibv_mw_bind_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindInfo {
    /// Of which region.
    pub region: LKey,
    /// From which address on, as users of the region's keys name it.
    pub address: u64,
    /// How much; nothing unbinds a window of type 1.
    pub bytes: u64,
    /// To do what: the remote rights alone.
    pub access: AccessFlags,
    /// Whether users of the window's key count from 0, rather than naming the region's addresses.
    pub is_zero_based: bool,
}

/// Who asks for remote memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectionContext {
    /// The protection domain of the queue pair that the request came to.
    pub domain: ProtectionDomain,
    /// That queue pair.
    pub qp: QpNumber,
}
