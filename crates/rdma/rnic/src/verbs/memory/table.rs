//! The table of memory keys.

use std::collections::{BTreeMap, VecDeque};

use super::error::MemoryError;
use super::region::{BindInfo, ProtectionContext, ProtectionDomain, RegionKeys, Registration, WindowKind};
use crate::verbs::access::AccessFlags;
use crate::verbs::sge::{LKey, Sge};
use crate::wire::{QpNumber, RKey};

/// Number of bits of a key that hold the generation of its slot.
const GENERATION_BITS: u32 = 8;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;
/// Maximum number of slots.
const SLOTS_MAX: usize = 1 << (u32::BITS - GENERATION_BITS);

/// A memory range, as users of a key and as the host address it.
#[derive(Clone, Copy, Debug)]
struct Extent {
    address: u64,
    host_address: u64,
    bytes: u64,
}

impl Extent {
    fn new(address: u64, host_address: u64, bytes: u64) -> Result<Self, MemoryError> {
        for first in [address, host_address] {
            if bytes == 0 || first.checked_add(bytes).is_none() {
                return Err(MemoryError::NoMemory { address: first, bytes });
            }
        }
        Ok(Self { address, host_address, bytes })
    }

    /// Returns the host address of a part of the range.
    fn host(&self, key: u32, address: u64, bytes: u64) -> Result<u64, MemoryError> {
        let offset = address.wrapping_sub(self.address);
        if offset > self.bytes || bytes > self.bytes - offset {
            return Err(MemoryError::Bounds { key, address, bytes, first: self.address, held: self.bytes });
        }
        Ok(self.host_address + offset)
    }
}

#[derive(Clone, Copy, Debug)]
struct Region {
    domain: ProtectionDomain,
    extent: Extent,
    access: AccessFlags,
    windows: u32,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    /// The slot of the region, which stays while windows are bound to it.
    region: u32,
    /// For type 2, the only queue pair that may use the window.
    qp: Option<QpNumber>,
    access: AccessFlags,
    extent: Extent,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    domain: ProtectionDomain,
    kind: WindowKind,
    bound: Option<Binding>,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Free,
    Region(Region),
    Window(Window),
}

#[derive(Clone, Copy, Debug)]
struct TableSlot {
    /// The lowest bits of the current key.
    generation: u8,
    /// The highest generation ever used; the next one is above it.
    generation_max: u8,
    entry: Entry,
}

/// The table of memory regions, windows and protection domains.
#[derive(Clone, Debug)]
pub struct MemoryTable {
    slots: Vec<TableSlot>,
    /// Free slots with unused generations; those that have been free longest come first.
    free: VecDeque<u32>,
    entries: usize,
    entries_max: usize,
    /// For each protection domain, the number of regions, windows, queues and queue pairs that use it.
    domains: BTreeMap<u32, u32>,
    domain_next: u32,
}

impl MemoryTable {
    /// Creates a table for up to `entries_max` regions and windows.
    pub fn new(entries_max: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: VecDeque::new(),
            entries: 0,
            entries_max: entries_max.min(SLOTS_MAX),
            domains: BTreeMap::new(),
            domain_next: 0,
        }
    }

    /// Returns the number of regions and windows.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Returns the bytes of host memory for each region or window.
    pub const fn entry_bytes() -> usize {
        size_of::<TableSlot>()
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// If all numbers have been used.
    pub fn allocate_domain(&mut self) -> Result<ProtectionDomain, MemoryError> {
        let number = self.domain_next;
        self.domain_next = number.checked_add(1).ok_or(MemoryError::KeysUsedUp)?;
        self.domains.insert(number, 0);
        Ok(ProtectionDomain(number))
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// If it does not exist or is in use.
    pub fn free_domain(&mut self, domain: ProtectionDomain) -> Result<(), MemoryError> {
        match *self.users(domain)? {
            0 => {
                self.domains.remove(&domain.0);
                Ok(())
            }
            users => Err(MemoryError::DomainBusy { domain: domain.0, users }),
        }
    }

    /// Adds a user, such as a queue pair or shared receive queue, to a protection domain.
    ///
    /// # Errors
    /// If the protection domain does not exist.
    pub fn hold_domain(&mut self, domain: ProtectionDomain) -> Result<(), MemoryError> {
        *self.users(domain)? += 1;
        Ok(())
    }

    /// Removes a user from a protection domain.
    ///
    /// # Panics
    /// If it has no users.
    pub fn release_domain(&mut self, domain: ProtectionDomain) {
        let users = self.domains.get_mut(&domain.0).filter(|users| **users > 0);
        *users.expect("each release_domain follows a hold_domain") -= 1;
    }

    fn users(&mut self, domain: ProtectionDomain) -> Result<&mut u32, MemoryError> {
        self.domains.get_mut(&domain.0).ok_or(MemoryError::UnknownDomain(domain.0))
    }

    /// Registers a memory region.
    ///
    /// # Errors
    /// If the range is empty or wraps around, a peer would get more rights than this NIC, or the table is full.
    pub fn register(&mut self, registration: &Registration) -> Result<RegionKeys, MemoryError> {
        let Registration { domain, host_address, address, bytes, access } = *registration;
        let extent = Extent::new(address, host_address, bytes)?;
        if access.intersects(AccessFlags::REMOTE_STORE) && !access.contains(AccessFlags::LOCAL_WRITE) {
            let (wanted, remedy) = ("on memory without local write", "add local write");
            return Err(MemoryError::Rights { access, wanted, remedy });
        }
        let key = self.insert(domain, Entry::Region(Region { domain, extent, access, windows: 0 }))?;
        Ok(RegionKeys { local: LKey(key), remote: RKey(key) })
    }

    /// Deregisters a memory region. Its keys never become valid again.
    ///
    /// # Errors
    /// If the region does not exist, or windows are bound to it.
    pub fn deregister(&mut self, key: LKey) -> Result<(), MemoryError> {
        let Region { domain, windows, .. } = *self.region(key.0)?;
        if windows > 0 {
            return Err(MemoryError::WindowsLeft { key: key.0, windows });
        }
        self.remove(key.0, domain);
        Ok(())
    }

    /// Allocates an unbound memory window. Its key identifies it and grants no access.
    ///
    /// # Errors
    /// If the protection domain does not exist or the table is full.
    pub fn allocate_window(&mut self, domain: ProtectionDomain, kind: WindowKind) -> Result<RKey, MemoryError> {
        self.insert(domain, Entry::Window(Window { domain, kind, bound: None })).map(RKey)
    }

    /// Frees a memory window, bound or not.
    ///
    /// # Errors
    /// If the window does not exist.
    pub fn free_window(&mut self, window: RKey) -> Result<(), MemoryError> {
        let Window { domain, .. } = *self.window(window.0)?;
        self.unbind(window.0);
        self.remove(window.0, domain);
        Ok(())
    }

    /// Binds a window of type 1 and returns its new key. A previous bind ends.
    ///
    /// # Errors
    /// If the region does not allow it, or the window is of type 2. The window is then unchanged.
    pub fn bind_type_1(
        &mut self,
        accessor: ProtectionContext,
        window: RKey,
        bind: &BindInfo,
    ) -> Result<RKey, MemoryError> {
        let Window { kind, domain, .. } = *self.window(window.0)?;
        if kind != WindowKind::Type1 {
            return Err(MemoryError::WrongKind { key: window.0, wanted: "window of type 1" });
        }
        check_domain(window.0, domain, accessor.domain)?;
        let binding = if bind.bytes == 0 { None } else { Some(self.binding(accessor, bind, None)?) };
        let key = self.renew(window.0)?;
        self.unbind(key);
        if let Some(binding) = binding {
            self.bind(key, binding);
        }
        Ok(RKey(key))
    }

    /// Binds a window of type 2 for the peer of one queue pair, with the key that its owner chose.
    ///
    /// # Errors
    /// If the region does not allow it, the window is bound or of type 1, or the key does not belong to the window.
    pub fn bind_type_2(
        &mut self,
        accessor: ProtectionContext,
        window: RKey,
        chosen: RKey,
        bind: &BindInfo,
    ) -> Result<(), MemoryError> {
        let Window { kind, domain, bound } = *self.window(window.0)?;
        if kind != WindowKind::Type2 {
            return Err(MemoryError::WrongKind { key: window.0, wanted: "window of type 2" });
        }
        check_domain(window.0, domain, accessor.domain)?;
        if bound.is_some() {
            return Err(MemoryError::WindowBound(window.0));
        }
        if chosen.0 >> GENERATION_BITS != window.0 >> GENERATION_BITS {
            return Err(MemoryError::KeyOfOther { key: chosen.0, window: window.0 });
        }
        let binding = self.binding(accessor, bind, Some(accessor.qp))?;
        let slot = &mut self.slots[index(window.0)];
        slot.generation = generation(chosen.0);
        slot.generation_max = slot.generation_max.max(slot.generation);
        self.bind(chosen.0, binding);
        Ok(())
    }

    /// Invalidates a window of type 2, for a local invalidate or a peer's SEND with invalidate. The window remains
    /// allocated.
    ///
    /// # Errors
    /// If the key does not name a bound window of type 2 of this queue pair.
    pub fn invalidate(&mut self, accessor: ProtectionContext, key: RKey) -> Result<(), MemoryError> {
        let Window { domain, kind, bound } = *self.window(key.0)?;
        check_domain(key.0, domain, accessor.domain)?;
        match (kind, bound) {
            (WindowKind::Type2, Some(binding)) => {
                check_queue_pair(key.0, binding.qp, accessor.qp)?;
                self.unbind(key.0);
                Ok(())
            }
            (WindowKind::Type2, None) => Err(MemoryError::UnknownKey(key.0)),
            (WindowKind::Type1, _) => Err(MemoryError::WrongKind { key: key.0, wanted: "window of type 2" }),
        }
    }

    /// Unbinds the windows of a queue pair that is destroyed or reset, because its number may be reused.
    pub fn unbind_queue_pair(&mut self, qp: QpNumber) {
        for index in 0..self.slots.len() {
            let TableSlot { entry: Entry::Window(Window { bound: Some(binding), .. }), generation, .. } =
                self.slots[index]
            else {
                continue;
            };
            if binding.qp == Some(qp) {
                self.unbind(key_of(index, generation));
            }
        }
    }

    /// Returns the host address of a piece of local memory. `access` is [`AccessFlags::LOCAL_WRITE`] to receive and
    /// empty to send.
    ///
    /// # Errors
    /// If key, bounds or access rights are wrong.
    pub fn check_local(&self, domain: ProtectionDomain, piece: &Sge, access: AccessFlags) -> Result<u64, MemoryError> {
        let region = self.region(piece.key.0)?;
        check_domain(piece.key.0, region.domain, domain)?;
        check_rights(piece.key.0, region.access, access)?;
        region.extent.host(piece.key.0, piece.address, u64::from(piece.bytes))
    }

    /// Returns the host address of memory that a peer names. An access of 0 bytes is not checked (IBA 9.4.3) and
    /// returns 0.
    ///
    /// # Errors
    /// If key, bounds or access rights are wrong.
    pub fn check_remote(
        &self,
        accessor: ProtectionContext,
        key: RKey,
        address: u64,
        bytes: u64,
        access: AccessFlags,
    ) -> Result<u64, MemoryError> {
        if bytes == 0 {
            return Ok(0);
        }
        let (domain, allowed, extent) = match &self.slot(key.0)?.entry {
            Entry::Region(region) => (region.domain, region.access, &region.extent),
            Entry::Window(Window { domain, bound: Some(binding), .. }) => {
                check_queue_pair(key.0, binding.qp, accessor.qp)?;
                (*domain, binding.access, &binding.extent)
            }
            Entry::Window(_) | Entry::Free => return Err(MemoryError::UnknownKey(key.0)),
        };
        check_domain(key.0, domain, accessor.domain)?;
        check_rights(key.0, allowed, access)?;
        extent.host(key.0, address, bytes)
    }

    fn slot(&self, key: u32) -> Result<&TableSlot, MemoryError> {
        let slot = self.slots.get(index(key)).filter(|slot| slot.generation == generation(key));
        match slot {
            Some(slot) if !matches!(slot.entry, Entry::Free) => Ok(slot),
            _ => Err(MemoryError::UnknownKey(key)),
        }
    }

    fn region(&self, key: u32) -> Result<&Region, MemoryError> {
        match &self.slot(key)?.entry {
            Entry::Region(region) => Ok(region),
            _ => Err(MemoryError::WrongKind { key, wanted: "memory region" }),
        }
    }

    fn window(&self, key: u32) -> Result<&Window, MemoryError> {
        match &self.slot(key)?.entry {
            Entry::Window(window) => Ok(window),
            _ => Err(MemoryError::WrongKind { key, wanted: "memory window" }),
        }
    }

    /// Checks a bind and returns the binding that it makes.
    fn binding(
        &self,
        accessor: ProtectionContext,
        bind: &BindInfo,
        qp: Option<QpNumber>,
    ) -> Result<Binding, MemoryError> {
        let BindInfo { region: LKey(key), address, bytes, access, is_zero_based } = *bind;
        let region = self.region(key)?;
        check_domain(key, region.domain, accessor.domain)?;
        check_rights(key, region.access, AccessFlags::WINDOW_BIND)?;
        if access.intersects(AccessFlags::LOCAL_WRITE | AccessFlags::WINDOW_BIND) {
            let (wanted, remedy) = ("to a window", "request only remote rights");
            return Err(MemoryError::Rights { access, wanted, remedy });
        }
        if access.intersects(AccessFlags::REMOTE_STORE) && !region.access.contains(AccessFlags::LOCAL_WRITE) {
            let (wanted, remedy) = ("by a region without local write", "register it with local write");
            return Err(MemoryError::Rights { access, wanted, remedy });
        }
        let host_address = region.extent.host(key, address, bytes)?;
        let extent = Extent::new(if is_zero_based { 0 } else { address }, host_address, bytes)?;
        Ok(Binding { region: key >> GENERATION_BITS, qp, access, extent })
    }

    fn bind(&mut self, key: u32, binding: Binding) {
        if let Entry::Region(region) = &mut self.slots[binding.region as usize].entry {
            region.windows += 1;
        }
        if let Entry::Window(window) = &mut self.slots[index(key)].entry {
            window.bound = Some(binding);
        }
    }

    fn unbind(&mut self, key: u32) {
        let Entry::Window(window) = &mut self.slots[index(key)].entry else { return };
        let Some(binding) = window.bound.take() else { return };
        if let Entry::Region(region) = &mut self.slots[binding.region as usize].entry {
            region.windows -= 1;
        }
    }

    /// Gives a window a new key, in the same slot or, if all generations of the slot are used, in another.
    fn renew(&mut self, key: u32) -> Result<u32, MemoryError> {
        let slot = &mut self.slots[index(key)];
        if let Some(next) = slot.generation_max.checked_add(1) {
            (slot.generation, slot.generation_max) = (next, next);
            return Ok(key_of(index(key), next));
        }
        let entry = slot.entry;
        let renewed = self.put(entry)?;
        self.slots[index(key)].entry = Entry::Free;
        Ok(renewed)
    }

    fn insert(&mut self, domain: ProtectionDomain, entry: Entry) -> Result<u32, MemoryError> {
        self.users(domain)?;
        if self.entries == self.entries_max {
            return Err(MemoryError::Full(self.entries_max));
        }
        let key = self.put(entry)?;
        self.entries += 1;
        self.hold_domain(domain)?;
        Ok(key)
    }

    /// Inserts an entry into a free slot, or else a new one.
    fn put(&mut self, entry: Entry) -> Result<u32, MemoryError> {
        if let Some(slot_index) = self.free.pop_front() {
            let slot = &mut self.slots[slot_index as usize];
            // Only slots with unused generations are on the free list.
            let generation = slot.generation_max + 1;
            *slot = TableSlot { generation, generation_max: generation, entry };
            return Ok(key_of(slot_index as usize, generation));
        }
        if self.slots.len() == SLOTS_MAX {
            return Err(MemoryError::KeysUsedUp);
        }
        // Key 0 stands for a key that was never set, and must not be valid.
        let generation = u8::from(self.slots.is_empty());
        self.slots.push(TableSlot { generation, generation_max: generation, entry });
        Ok(key_of(self.slots.len() - 1, generation))
    }

    fn remove(&mut self, key: u32, domain: ProtectionDomain) {
        let slot = &mut self.slots[index(key)];
        slot.entry = Entry::Free;
        if slot.generation_max < u8::MAX {
            self.free.push_back(key >> GENERATION_BITS);
        }
        self.entries -= 1;
        self.release_domain(domain);
    }
}

fn index(key: u32) -> usize {
    (key >> GENERATION_BITS) as usize
}

fn generation(key: u32) -> u8 {
    (key & GENERATION_MASK) as u8
}

fn key_of(index: usize, generation: u8) -> u32 {
    (index as u32) << GENERATION_BITS | u32::from(generation)
}

fn check_domain(key: u32, owner: ProtectionDomain, accessor: ProtectionDomain) -> Result<(), MemoryError> {
    if owner == accessor { Ok(()) } else { Err(MemoryError::OtherDomain { key, owner: owner.0, accessor: accessor.0 }) }
}

fn check_queue_pair(key: u32, owner: Option<QpNumber>, accessor: QpNumber) -> Result<(), MemoryError> {
    match owner {
        Some(owner) if owner != accessor => {
            Err(MemoryError::OtherQueuePair { key, owner: owner.0, accessor: accessor.0 })
        }
        _ => Ok(()),
    }
}

fn check_rights(key: u32, allowed: AccessFlags, wanted: AccessFlags) -> Result<(), MemoryError> {
    let missing = wanted.difference(allowed);
    if missing.is_empty() { Ok(()) } else { Err(MemoryError::Forbidden { key, missing }) }
}
