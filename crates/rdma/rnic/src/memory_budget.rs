//! The memory ledger: what each kind of NIC keeps on chip and in the host's memory, by number of queue pairs.
//!
//! Sizes are those of the structures that the engine runs with, as the compiler lays them out; where the engine needs
//! none because it is software (a receive buffer, caches of work requests), they are what was published of such NICs.
//! The published figures: srnic.md's table of SRNIC ("SRNIC: A Scalable Architecture for RDMA NICs", NSDI 2023).

use std::fmt;

use crate::nic::{ContextPoolConfig, LossRecovery, NicProfile, PacketBitmap, StructureSizes, TransportPolicy};
use crate::verbs::{CompletionQueue, MemoryTable};

/// Regions and windows that a NIC has room for on chip. A region is one piece of the host's address space, however
/// long: pages are the IOMMU's, so the table is as large as SRNIC's for far fewer entries.
const MTT_ENTRIES: u64 = 20_480;
/// Received bytes that wait for PCIe. *Published* for SRNIC.
const RX_BUFFER_BYTES: u64 = 600_000;
/// A program has a completion queue for each of its threads, not for each queue pair.
const COMPLETION_QUEUES: u64 = 64;
/// Work requests of a queue pair that a NIC which caches them keeps: 8 for each direction. *Published*.
const WQES_CACHED: u64 = 2 * 8;
/// A work request in such a cache. *Published*.
const WQE_BYTES: u64 = 64;
/// Bitmaps of selective repeat a queue pair. *Published*, of 500 bits; the engine's have 512.
const BITMAPS: u64 = 5;

/// Where something lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// In the NIC.
    OnChip,
    /// In the host's memory.
    Host,
}

/// What something is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StructureKind {
    /// Contexts of queue pairs.
    QpContext,
    /// Which queue pair sends next: event mux, schedule queue, timers.
    SqScheduler,
    /// Where the contexts lie that are not all on chip, and what else is there of each queue pair.
    Directory,
    /// Keys of memory, and where it lies.
    Mtt,
    /// Received bytes that wait for PCIe.
    RxBuffer,
    /// Bytes that were fetched and wait for the wire.
    TxBuffer,
    /// Contexts of completion queues.
    CqContext,
    /// Work requests that were fetched and wait for their turn.
    WqeCache,
    /// What selective repeat knows.
    Bitmaps,
    /// Work queues.
    Requests,
    /// What the slow path's software knows, and the control queue to it.
    SlowPath,
}

impl StructureKind {
    /// Its name in tables.
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

/// Where a size comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SizeOrigin {
    /// The engine's own structure, as many as there are.
    Measured,
    /// The engine's own structure, as many as this ledger supposes; or a capacity of the engine's profile.
    Modelled,
    /// What was said of such a NIC.
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

/// One structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetEntry {
    /// What it is for.
    pub kind: StructureKind,
    /// Where it lies.
    pub location: MemoryLocation,
    /// Where its size comes from.
    pub origin: SizeOrigin,
    /// Bytes of one.
    pub unit_bytes: u64,
    /// How many there are.
    pub units: u64,
}

impl BudgetEntry {
    /// Bytes of all.
    pub const fn bytes(&self) -> u64 {
        self.unit_bytes * self.units
    }
}

/// What is kept where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Of which kind of NIC.
    pub policy: TransportPolicy,
    /// For how many queue pairs.
    pub qps: u64,
    /// Work requests in each direction that a queue pair has room for.
    pub depth: u64,
    /// All structures.
    pub entries: Vec<BudgetEntry>,
}

impl MemoryBudget {
    /// What this kind of NIC keeps for so many queue pairs with `depth` work requests in each direction.
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
        // A cache or a pool holds a part of the contexts, whatever their number.
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

    /// The schedule queue goes through the directory, which has coarse timers too; exact ones are those of the pool.
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

    /// Bytes of one role in one place.
    pub fn bytes(&self, location: MemoryLocation, kind: StructureKind) -> u64 {
        let own = self.entries.iter().filter(|entry| (entry.location, entry.kind) == (location, kind));
        own.map(BudgetEntry::bytes).sum()
    }

    /// Bytes of one place.
    pub fn total(&self, location: MemoryLocation) -> u64 {
        self.entries.iter().filter(|entry| entry.location == location).map(BudgetEntry::bytes).sum()
    }
}

/// Contexts that there is room for on chip, where there is not room for all.
fn on_chip_contexts(profile: &NicProfile) -> Option<u64> {
    let cache = profile.cache.map(|cache| cache.contexts);
    cache.or(profile.pool.map(|pool| pool.contexts)).map(u64::from)
}

/// What was published of SRNIC at 10,000 queue pairs, on chip, in bytes; and its total.
pub const PUBLISHED_QPS: u32 = 10_000;
/// *Published*: by role.
pub const PUBLISHED: [(StructureKind, u64); 4] = [
    (StructureKind::QpContext, 2_300_000),
    (StructureKind::SqScheduler, 300_000),
    (StructureKind::Mtt, 1_200_000),
    (StructureKind::RxBuffer, 600_000),
];
/// *Published*: all of it.
pub const PUBLISHED_TOTAL_BYTES: u64 = 4_400_000;

#[cfg(test)]
mod tests {
    use super::*;

    const DEPTH: u32 = 64;

    fn chip(policy: TransportPolicy, qps: u32) -> u64 {
        MemoryBudget::new(policy, qps, DEPTH).total(MemoryLocation::OnChip)
    }

    #[test]
    fn srnic_needs_no_more_on_chip_than_was_published() {
        let budget = MemoryBudget::new(TransportPolicy::Srnic, PUBLISHED_QPS, DEPTH);
        assert!(budget.total(MemoryLocation::OnChip) <= PUBLISHED_TOTAL_BYTES, "{budget:#?}");
        for (kind, published) in PUBLISHED {
            let bytes = budget.bytes(MemoryLocation::OnChip, kind);
            assert!(bytes > 0 && bytes <= published, "{kind:?} {bytes}");
        }
        assert_eq!(PUBLISHED.iter().map(|(_, bytes)| bytes).sum::<u64>(), PUBLISHED_TOTAL_BYTES);
    }

    #[test]
    fn what_srnic_leaves_out_is_what_the_others_have() {
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
    fn a_pool_has_ten_times_the_queue_pairs_in_the_memory_that_srnic_needs() {
        let srnic = chip(TransportPolicy::Srnic, PUBLISHED_QPS);
        let paged = MemoryBudget::new(TransportPolicy::SrnicPaged, 10 * PUBLISHED_QPS, DEPTH);
        assert!(paged.total(MemoryLocation::OnChip) <= srnic, "{srnic}: {paged:#?}");
        assert!(paged.total(MemoryLocation::OnChip) <= PUBLISHED_TOTAL_BYTES, "{paged:#?}");
        assert_eq!(
            paged.bytes(MemoryLocation::OnChip, StructureKind::WqeCache)
                + paged.bytes(MemoryLocation::OnChip, StructureKind::Bitmaps),
            0
        );
        // A queue pair more is an entry of the directory on chip, and its context is in the host's memory.
        let more = MemoryBudget::new(TransportPolicy::SrnicPaged, 10 * PUBLISHED_QPS + 1, DEPTH);
        assert_eq!(more.total(MemoryLocation::OnChip) - paged.total(MemoryLocation::OnChip), 8);
        let contexts = paged.bytes(MemoryLocation::Host, StructureKind::QpContext);
        assert_eq!(contexts, 100_000 * size_of::<crate::nic::Context>() as u64);
    }

    #[test]
    fn only_a_cache_stays_as_it_is_when_queue_pairs_become_more() {
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
