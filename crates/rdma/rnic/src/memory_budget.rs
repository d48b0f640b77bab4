//! The memory budget: what each kind of NIC keeps on chip and in the host's memory, by number of queue pairs.
//!
//! Sizes are those of the engine's own structures, as the compiler lays them out. Structures that the engine does not
//! need because it is software (a receive buffer, caches of work requests) have the sizes published for such NICs. The
//! published figures are those of srnic.md's table of SRNIC ("SRNIC: A Scalable Architecture for RDMA NICs", NSDI
//! 2023).

use std::fmt;

use crate::nic::{ContextPoolConfig, LossRecovery, NicProfile, PacketBitmap, StructureSizes, TransportPolicy};
use crate::verbs::{CompletionQueue, MemoryTable};

/// Number of memory regions and windows with an entry on chip. A region is one range of the host's address space of any
/// length, because the IOMMU translates pages; the table is therefore as large as SRNIC's with far fewer entries.
const MTT_ENTRIES: u64 = 20_480;
/// Bytes of received data that wait for PCIe. *Published* for SRNIC.
const RX_BUFFER_BYTES: u64 = 600_000;
/// Number of completion queues: a program has one for each thread, not one for each queue pair.
const COMPLETION_QUEUES: u64 = 64;
/// Number of work requests that a NIC with a work request cache keeps for each queue pair: 8 for each direction.
/// *Published*.
const WQES_CACHED: u64 = 2 * 8;
/// Size of a cached work request. *Published*.
const WQE_BYTES: u64 = 64;
/// Number of bitmaps that selective repeat keeps for each queue pair. *Published*, with 500 bits; the engine's have
/// 512.
const BITMAPS: u64 = 5;

/// Where a structure is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// On the NIC.
    OnChip,
    /// In the memory of the host.
    Host,
}

/// The purpose of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StructureKind {
    /// Contexts of queue pairs.
    QpContext,
    /// The send scheduler: event mux, schedule queue and timers.
    SqScheduler,
    /// The directory of contexts that are not all on chip, and the other on-chip state of each queue pair.
    Directory,
    /// The memory translation table: keys, and where their memory is.
    Mtt,
    /// Received data that waits for PCIe.
    RxBuffer,
    /// Fetched data that waits for the wire.
    TxBuffer,
    /// Contexts of completion queues.
    CqContext,
    /// Fetched work requests that wait for the scheduler.
    WqeCache,
    /// Bitmaps of selective repeat.
    Bitmaps,
    /// Work queues.
    Requests,
    /// The state of the slow path's software, and its control queue.
    SlowPath,
}

impl StructureKind {
    /// Returns the name that tables print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::QpContext => "QP contexts",
            Self::SqScheduler => "SQ scheduler",
            Self::Directory => "context directory",
            Self::Mtt => "memory translation table",
            Self::RxBuffer => "receive buffer",
            Self::TxBuffer => "transmit buffer",
            Self::CqContext => "CQ contexts",
            Self::WqeCache => "WQE caches",
            Self::Bitmaps => "bitmaps",
            Self::Requests => "work queues",
            Self::SlowPath => "slow path",
        }
    }
}

/// Where the size of a structure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SizeOrigin {
    /// The size and the number of the engine's own structures.
    Measured,
    /// The size of the engine's own structure with an assumed number of them, or a capacity of the engine's profile.
    Modelled,
    /// Published for such a NIC.
    Published,
}

impl fmt::Display for SizeOrigin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Measured => "measured",
            Self::Modelled => "modelled",
            Self::Published => "published",
        })
    }
}

/// One structure of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetEntry {
    /// Its purpose.
    pub kind: StructureKind,
    /// Where it is stored.
    pub location: MemoryLocation,
    /// Where its size comes from.
    pub origin: SizeOrigin,
    /// Size of one unit, in bytes.
    pub unit_bytes: u64,
    /// Number of units.
    pub units: u64,
}

impl BudgetEntry {
    /// Returns the total size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.unit_bytes * self.units
    }
}

/// The structures of one NIC and their sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The transport policy of the NIC.
    pub policy: TransportPolicy,
    /// Number of queue pairs.
    pub qps: u64,
    /// Capacity of each queue pair in work requests, for each direction.
    pub depth: u64,
    /// All structures.
    pub entries: Vec<BudgetEntry>,
}

impl MemoryBudget {
    /// Computes the budget of a NIC with this policy, for `qps` queue pairs with `depth` work requests in each
    /// direction.
    pub fn new(policy: TransportPolicy, qps: u32, depth: u32) -> Self {
        let mut budget = Self { policy, qps: qps.into(), depth: depth.into(), entries: Vec::new() };
        let (profile, sizes) = (NicProfile::modelled(policy), StructureSizes::of_engine());
        budget.on_chip(&profile, &sizes);
        budget.in_host(&profile, &sizes);
        budget
    }

    fn add(
        &mut self,
        kind: StructureKind,
        location: MemoryLocation,
        origin: SizeOrigin,
        unit_bytes: usize,
        units: u64,
    ) {
        self.entries.push(BudgetEntry { kind, location, origin, unit_bytes: unit_bytes as u64, units });
    }

    fn on_chip(&mut self, profile: &NicProfile, sizes: &StructureSizes) {
        let chip = MemoryLocation::OnChip;
        // A cache or a pool holds a fixed number of contexts, for any number of queue pairs.
        let contexts = on_chip_contexts(profile).map_or(self.qps, |most| self.qps.min(most));
        let origin = if contexts < self.qps { SizeOrigin::Modelled } else { SizeOrigin::Measured };
        self.add(StructureKind::QpContext, chip, origin, sizes.context, contexts);
        match &profile.pool {
            Some(pool) => self.pool(pool, sizes, contexts),
            None => self.add(StructureKind::SqScheduler, chip, SizeOrigin::Measured, sizes.scheduler, contexts),
        }
        self.add(StructureKind::Mtt, chip, SizeOrigin::Modelled, MemoryTable::entry_bytes(), MTT_ENTRIES);
        self.add(StructureKind::RxBuffer, chip, SizeOrigin::Published, 1, RX_BUFFER_BYTES);
        self.add(StructureKind::TxBuffer, chip, SizeOrigin::Modelled, 1, profile.scheduling.ahead_bytes.into());
        self.add(StructureKind::CqContext, chip, SizeOrigin::Modelled, size_of::<CompletionQueue>(), COMPLETION_QUEUES);
        if !profile.scheduling.fetches_wqes {
            self.add(StructureKind::WqeCache, chip, SizeOrigin::Published, WQE_BYTES as usize, WQES_CACHED * contexts);
        }
        if profile.policy.loss_recovery() == LossRecovery::SelectiveOnChip {
            self.add(StructureKind::Bitmaps, chip, SizeOrigin::Modelled, size_of::<PacketBitmap>(), BITMAPS * self.qps);
        }
    }

    /// The schedule queue is linked through the directory, which also has coarse timers; exact timers belong to the
    /// pool.
    fn pool(&mut self, pool: &ContextPoolConfig, sizes: &StructureSizes, contexts: u64) {
        let chip = MemoryLocation::OnChip;
        self.add(StructureKind::Directory, chip, SizeOrigin::Measured, sizes.entry, self.qps);
        self.add(StructureKind::SqScheduler, chip, SizeOrigin::Modelled, sizes.slot, contexts);
        self.add(StructureKind::Directory, chip, SizeOrigin::Modelled, sizes.fetch, pool.fetches.into());
        self.add(StructureKind::RxBuffer, chip, SizeOrigin::Modelled, sizes.parked_link, pool.parked_packets.into());
    }

    fn in_host(&mut self, profile: &NicProfile, sizes: &StructureSizes) {
        let host = MemoryLocation::Host;
        self.add(StructureKind::Requests, host, SizeOrigin::Measured, sizes.host, self.qps);
        let requests = self.qps * self.depth;
        self.add(StructureKind::Requests, host, SizeOrigin::Measured, sizes.send + sizes.receive, requests);
        if on_chip_contexts(profile).is_some() {
            self.add(StructureKind::QpContext, host, SizeOrigin::Measured, sizes.context, self.qps);
        }
        if profile.policy.has_slow_path() {
            self.add(StructureKind::SlowPath, host, SizeOrigin::Measured, sizes.slow_path, self.qps);
            self.add(
                StructureKind::SlowPath,
                host,
                SizeOrigin::Measured,
                sizes.control_entry,
                profile.control_queue.into(),
            );
        }
    }

    /// Returns the bytes of one kind of structure in one location.
    pub fn bytes(&self, location: MemoryLocation, kind: StructureKind) -> u64 {
        let matching = self.entries.iter().filter(|entry| (entry.location, entry.kind) == (location, kind));
        matching.map(BudgetEntry::bytes).sum()
    }

    /// Returns the bytes of all structures in one location.
    pub fn total(&self, location: MemoryLocation) -> u64 {
        self.entries.iter().filter(|entry| entry.location == location).map(BudgetEntry::bytes).sum()
    }
}

/// Returns the number of contexts that fit on chip, if not all contexts do.
fn on_chip_contexts(profile: &NicProfile) -> Option<u64> {
    let cache = profile.cache.map(|cache| cache.contexts);
    cache.or(profile.pool.map(|pool| pool.contexts)).map(u64::from)
}

/// Number of queue pairs of SRNIC's published on-chip memory.
pub const PUBLISHED_QPS: u32 = 10_000;
/// *Published*: bytes on chip by kind of structure.
pub const PUBLISHED: [(StructureKind, u64); 4] = [
    (StructureKind::QpContext, 2_300_000),
    (StructureKind::SqScheduler, 300_000),
    (StructureKind::Mtt, 1_200_000),
    (StructureKind::RxBuffer, 600_000),
];
/// *Published*: bytes on chip in total.
pub const PUBLISHED_TOTAL_BYTES: u64 = 4_400_000;

#[cfg(test)]
mod tests {
    use super::*;

    const DEPTH: u32 = 64;

    fn chip(policy: TransportPolicy, qps: u32) -> u64 {
        MemoryBudget::new(policy, qps, DEPTH).total(MemoryLocation::OnChip)
    }

    #[test]
    fn srnic_needs_no_more_on_chip_memory_than_published() {
        let budget = MemoryBudget::new(TransportPolicy::Srnic, PUBLISHED_QPS, DEPTH);
        assert!(budget.total(MemoryLocation::OnChip) <= PUBLISHED_TOTAL_BYTES, "{budget:#?}");
        for (kind, published) in PUBLISHED {
            let bytes = budget.bytes(MemoryLocation::OnChip, kind);
            assert!(bytes > 0 && bytes <= published, "{kind:?} {bytes}");
        }
        assert_eq!(PUBLISHED.iter().map(|(_, bytes)| bytes).sum::<u64>(), PUBLISHED_TOTAL_BYTES);
    }

    #[test]
    fn srnic_has_neither_bitmaps_nor_a_work_request_cache_on_chip() {
        let srnic = MemoryBudget::new(TransportPolicy::Srnic, 10_000, DEPTH);
        assert_eq!(
            srnic.bytes(MemoryLocation::OnChip, StructureKind::WqeCache)
                + srnic.bytes(MemoryLocation::OnChip, StructureKind::Bitmaps),
            0
        );
        assert!(srnic.bytes(MemoryLocation::Host, StructureKind::SlowPath) > 0);
        let irn = MemoryBudget::new(TransportPolicy::Irn, 10_000, DEPTH);
        // Published: 9.8 MB of caches and 3.0 MB of bitmaps, in units of 2^20 bytes.
        assert_eq!(irn.bytes(MemoryLocation::OnChip, StructureKind::WqeCache), 10_240_000);
        assert_eq!(irn.bytes(MemoryLocation::OnChip, StructureKind::Bitmaps), 3_200_000);
        let (srnic, irn, go_back_n) = (
            chip(TransportPolicy::Srnic, 10_000),
            chip(TransportPolicy::Irn, 10_000),
            chip(TransportPolicy::GoBackN, 10_000),
        );
        assert!(srnic < go_back_n && go_back_n < irn, "{srnic} {go_back_n} {irn}");
    }

    #[test]
    fn a_pool_serves_ten_times_the_queue_pairs_in_the_memory_of_srnic() {
        let srnic = chip(TransportPolicy::Srnic, PUBLISHED_QPS);
        let paged = MemoryBudget::new(TransportPolicy::SrnicPaged, 10 * PUBLISHED_QPS, DEPTH);
        assert!(paged.total(MemoryLocation::OnChip) <= srnic, "{srnic}: {paged:#?}");
        assert!(paged.total(MemoryLocation::OnChip) <= PUBLISHED_TOTAL_BYTES, "{paged:#?}");
        assert_eq!(
            paged.bytes(MemoryLocation::OnChip, StructureKind::WqeCache)
                + paged.bytes(MemoryLocation::OnChip, StructureKind::Bitmaps),
            0
        );
        // Another queue pair needs an entry of the directory on chip, and a context in the host's memory.
        let more = MemoryBudget::new(TransportPolicy::SrnicPaged, 10 * PUBLISHED_QPS + 1, DEPTH);
        assert_eq!(more.total(MemoryLocation::OnChip) - paged.total(MemoryLocation::OnChip), 8);
        let contexts = paged.bytes(MemoryLocation::Host, StructureKind::QpContext);
        assert_eq!(contexts, 100_000 * size_of::<crate::nic::Context>() as u64);
    }

    #[test]
    fn only_a_cache_does_not_grow_with_the_number_of_queue_pairs() {
        assert_eq!(chip(TransportPolicy::ConnectionCache, 1000), chip(TransportPolicy::ConnectionCache, 100_000));
        for policy in [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN] {
            assert!(chip(policy, 2000) > chip(policy, 1000), "{policy:?}");
        }
        let host = |qps| {
            MemoryBudget::new(TransportPolicy::ConnectionCache, qps, DEPTH)
                .bytes(MemoryLocation::Host, StructureKind::QpContext)
        };
        assert_eq!(host(2000), 2 * host(1000));
    }
}
