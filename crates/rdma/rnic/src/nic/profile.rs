//! The parameters of a NIC: transport policy, sizes and costs.

use sim::Span;
use thiserror::Error;

use super::congestion::CongestionControl;
use super::context::Context;
use super::limits::{MTU_BYTES_MAX, MTU_BYTES_MIN, NO_QP, PACKETS_MAX, WINDOW_PACKETS_MAX};
use super::policy::{ContextStorage, LossRecovery, TransportPolicy};

/// Maximum number of queue pairs of a NIC that pages contexts, which numbers them with 24 bits.
const QPS_PAGED_MAX: u32 = NO_QP - 1;

/// The latencies of a NIC and its host. All are zero where the operations take real time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostModel {
    /// From a program's doorbell, or a command of the slow path's software, until it takes effect in the NIC.
    pub doorbell: Span,
    /// Latency of a DMA read, until the first byte has arrived.
    pub dma_read: Span,
    /// Latency of a DMA write, until the host can see it.
    pub dma_write: Span,
    /// Time for each byte of a DMA read, in picoseconds.
    pub dma_byte_ps: u64,
    /// From a header entering an empty control queue until the slow path's software polls it.
    pub software_wake: Span,
    /// Time that the slow path's software takes for one header.
    pub software_header: Span,
    /// From a NAK for a missing packet until hardware retransmits; only for go-back-N.
    pub go_back: Span,
}

impl CostModel {
    /// No latencies, for a live NIC.
    pub const ZERO: Self = Self {
        doorbell: Span::ZERO,
        dma_read: Span::ZERO,
        dma_write: Span::ZERO,
        dma_byte_ps: 0,
        software_wake: Span::ZERO,
        software_header: Span::ZERO,
        go_back: Span::ZERO,
    };

    /// *Modelled*: PCIe of about 126 Gb/s with a round trip of 1 us (srnic.md, "The design"), half of it for posted
    /// writes; a core that polls the control queue and takes 40 ns for a header whose bitmap is in its cache; 16 us to
    /// go back, which reproduces the published 25 Gb/s of a commercial NIC at 1% loss (srnic.md, section 2).
    pub fn modelled() -> Self {
        Self {
            doorbell: Span::from_ns(300.0),
            dma_read: Span::from_ns(1000.0),
            dma_write: Span::from_ns(400.0),
            dma_byte_ps: 64,
            software_wake: Span::from_ns(200.0),
            software_header: Span::from_ns(40.0),
            go_back: Span::from_ns(16_000.0),
        }
    }

    /// Returns how long the link to the host's memory is busy with this many bytes.
    pub(super) fn dma_bytes(&self, bytes: u32) -> Span {
        Span::from_ps(self.dma_byte_ps) * u64::from(bytes)
    }
}

/// Parameters of the send scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduling {
    /// Bytes that a queue pair may send before the next one is served (the quantum of a round robin); a packet is never
    /// split.
    pub quantum_bytes: u32,
    /// Maximum number of bytes that are fetched ahead of the wire (srnic.md: at least 25 KB at 100 Gb/s).
    pub ahead_bytes: u32,
    /// Maximum number of work requests that one scheduling decision fetches; unused ones are discarded and fetched
    /// again.
    pub batch_wqes: u32,
    /// Maximum number of scheduling decisions whose work requests are being fetched.
    pub decisions: u32,
    /// Whether each decision fetches work requests from the host; otherwise the NIC caches them.
    pub fetches_wqes: bool,
}

/// Parameters of a cache of contexts on chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextCacheConfig {
    /// Capacity in contexts.
    pub contexts: u32,
    /// Maximum number of contexts that are fetched at the same time.
    pub fetches: u32,
    /// Latency of a miss, if the cost model has latencies: DMA reads of context, work request and translation.
    pub miss: Span,
}

/// Parameters of a pool of contexts on chip; all contexts are in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextPoolConfig {
    /// Capacity in contexts: 2 to 65,535.
    pub contexts: u32,
    /// Number of queue pairs at the head of the schedule queue whose contexts are prefetched and pinned: at most half
    /// of the pool, so that waiting queue pairs never keep the context of the first one out.
    pub ahead: u32,
    /// Maximum number of contexts that are requested at the same time.
    pub fetches: u32,
    /// Maximum number of DMA reads of contexts in flight.
    pub reads: u32,
    /// Maximum number of packets in the receive buffer that wait for a context.
    pub parked_packets: u32,
    /// Maximum number of bytes of these packets.
    pub parked_bytes: u32,
    /// Bytes that a context's DMA read takes on the link from the host's memory, including headers.
    pub read_bytes: u32,
    /// Bytes that a context's DMA write takes on the link to the host's memory, including headers.
    pub write_bytes: u32,
}

impl ContextPoolConfig {
    /// *Modelled*: the largest pool that fits, together with the directory of 100,000 queue pairs, into the memory that
    /// SRNIC needs for 10,000. Half of the receive buffer holds 24 us of traffic at 100 Gb/s, and 64 DMA reads with a
    /// round trip of 1 us fetch 64 M contexts a second. Bytes on the link are those of PCIe generation 3
    /// (`pcie::model`): an overhead of 24 for a write and of 20 for a read completion.
    pub const fn modelled() -> Self {
        let context_bytes = size_of::<Context>() as u32;
        Self {
            contexts: 6144,
            ahead: 64,
            fetches: 1024,
            reads: 64,
            parked_packets: 4096,
            parked_bytes: 300_000,
            read_bytes: context_bytes + 20,
            write_bytes: context_bytes + 24,
        }
    }

    fn check(&self) -> Result<(), ProfileError> {
        let max = u32::from(u16::MAX);
        let half = self.contexts / 2;
        let ranges = [
            ("pool.contexts", self.contexts, 2, max, "choose 2 to 65535"),
            ("pool.ahead", self.ahead, 1, half, "choose 1 to half of pool.contexts"),
            ("pool.fetches", self.fetches, 1, max, "choose 1 to 65535"),
            ("pool.reads", self.reads, 1, u32::MAX, "choose at least 1"),
            ("pool.parked_packets", self.parked_packets, 1, max, "choose 1 to 65535"),
            (
                "pool.parked_bytes",
                self.parked_bytes,
                8192,
                u32::MAX,
                "choose at least 8192, which is enough for a packet",
            ),
        ];
        let out_of_range = ranges.into_iter().find(|(_, value, min, max, _)| value < min || value > max);
        out_of_range
            .map_or(Ok(()), |(field, value, _, _, remedy)| Err(ProfileError { field, value: u64::from(value), remedy }))
    }
}

/// How long a sender waits for a response before it retransmits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetransmitTimeout {
    /// As long as the queue pair's ACK timer attribute.
    Attribute,
    /// IRN: a short timeout while few packets are in flight, else a long one.
    LowHigh {
        /// The short timeout.
        low: Span,
        /// The long timeout.
        high: Span,
        /// The short timeout applies below this number of packets.
        packets: u32,
    },
    /// Two measured round trips, doubled with each timeout. A timeout sends only the last packet again, as a tail loss
    /// probe (RFC 8985), to learn what has arrived.
    Probe {
        /// The minimum timeout.
        least: Span,
        /// The timeout before a round trip was measured.
        first: Span,
    },
}

/// The parameters of a NIC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NicProfile {
    /// The transport policy.
    pub policy: TransportPolicy,
    /// Maximum payload of a packet in bytes; queue pairs may use a smaller MTU.
    pub mtu_bytes: u32,
    /// Maximum number of packets of a queue pair in flight, 1 to [`Self::window_packets_max`].
    pub window_packets: u32,
    /// Maximum number of packets between two packets that request an acknowledgement.
    pub ack_packets: u32,
    /// Congestion control.
    pub congestion: CongestionControl,
    /// Latencies.
    pub costs: CostModel,
    /// Parameters of the send scheduler.
    pub scheduling: Scheduling,
    /// How long a sender waits for a response.
    pub retransmit_timeout: RetransmitTimeout,
    /// The context cache, where the policy has one.
    pub cache: Option<ContextCacheConfig>,
    /// The context pool, where the policy has one.
    pub pool: Option<ContextPoolConfig>,
    /// Capacity of the control queue in headers; further headers are dropped and retransmitted.
    pub control_queue: u32,
    /// Maximum number of queue pairs.
    pub qps: u32,
    /// Maximum number of memory regions and windows.
    pub memory_entries: u32,
}

/// A value of a profile that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("profile: {field} is {value}; {remedy}")]
pub struct ProfileError {
    /// The name of the value.
    pub field: &'static str,
    /// The value.
    pub value: u64,
    /// The allowed values.
    pub remedy: &'static str,
}

impl NicProfile {
    /// Creates the profile of a NIC with this policy and without latencies, for live NICs and where only the protocol
    /// matters. There is no congestion control; IRN, which has no policy without a bound, starts with 512 packets.
    pub fn new(policy: TransportPolicy) -> Self {
        let retransmit_timeout = match policy.loss_recovery() {
            LossRecovery::GoBackN => RetransmitTimeout::Attribute,
            LossRecovery::SelectiveOnChip => {
                RetransmitTimeout::LowHigh { low: Span::from_ns(100_000.0), high: Span::from_ns(320_000.0), packets: 3 }
            }
            LossRecovery::SelectiveInSoftware => {
                RetransmitTimeout::Probe { least: Span::from_ns(5_000.0), first: Span::from_ns(100_000.0) }
            }
        };
        // *Modelled*: 8.8 M misses a second, so that misses at one packet of 1 KiB a quantum give the published 52 Gb/s
        // of 16,384 queue pairs. The published collapse begins at 256 contexts.
        let cache = ContextCacheConfig { contexts: 256, fetches: 11, miss: Span::from_ns(1250.0) };
        let storage = policy.context_storage();
        let quantum_bytes = if storage == ContextStorage::Cache { 1 } else { 16_384 };
        Self {
            policy,
            mtu_bytes: 1024,
            window_packets: WINDOW_PACKETS_MAX,
            ack_packets: 16,
            congestion: CongestionControl::None,
            costs: CostModel::ZERO,
            scheduling: Scheduling {
                quantum_bytes,
                ahead_bytes: 65_536,
                batch_wqes: 16,
                decisions: 64,
                fetches_wqes: policy.has_slow_path(),
            },
            retransmit_timeout,
            cache: (storage == ContextStorage::Cache).then_some(cache),
            pool: (storage == ContextStorage::Pool).then_some(ContextPoolConfig::modelled()),
            control_queue: 16_384,
            qps: 65_536,
            memory_entries: 65_536,
        }
    }

    /// Creates the profile of the same NIC behind a PCIe link: [`CostModel::modelled`].
    pub fn modelled(policy: TransportPolicy) -> Self {
        Self { costs: CostModel::modelled(), ..Self::new(policy) }
    }

    /// Returns the maximum of `window_packets`: the bitmaps of selective repeat bound it, otherwise the PSN space.
    pub fn window_packets_max(policy: TransportPolicy) -> u32 {
        if policy.is_selective() { WINDOW_PACKETS_MAX } else { PACKETS_MAX }
    }

    /// Returns whether receivers echo congestion marks in acknowledgements.
    pub(super) fn echoes_marks(&self) -> bool {
        matches!(self.congestion, CongestionControl::Dctcp(_))
    }

    /// Checks all values.
    ///
    /// # Errors
    /// Names the first value that is out of range.
    pub fn check(&self) -> Result<(), ProfileError> {
        let fault = |field, value: u32, remedy| Err(ProfileError { field, value: u64::from(value), remedy });
        if !(MTU_BYTES_MIN..=MTU_BYTES_MAX).contains(&self.mtu_bytes) {
            return fault("mtu_bytes", self.mtu_bytes, "choose 256 to 4096");
        }
        if !(1..=Self::window_packets_max(self.policy)).contains(&self.window_packets) {
            return fault(
                "window_packets",
                self.window_packets,
                "choose 1 to 512, or to 4194304 without selective repeat",
            );
        }
        let Scheduling { quantum_bytes, ahead_bytes, batch_wqes, decisions, .. } = self.scheduling;
        let counts = [
            ("ack_packets", self.ack_packets),
            ("scheduling.quantum_bytes", quantum_bytes),
            ("scheduling.ahead_bytes", ahead_bytes),
            ("scheduling.batch_wqes", batch_wqes),
            ("scheduling.decisions", decisions),
            ("control_queue", self.control_queue),
            ("qps", self.qps),
        ];
        if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return fault(field, 0, "choose at least 1");
        }
        let storage = self.policy.context_storage();
        match self.cache {
            Some(ContextCacheConfig { contexts: 0, .. }) => fault("cache.contexts", 0, "choose at least 1"),
            Some(ContextCacheConfig { fetches: 0, .. }) => fault("cache.fetches", 0, "choose at least 1"),
            None if storage == ContextStorage::Cache => fault("cache", 0, "this policy needs a cache; set one"),
            _ => match self.pool {
                None if storage == ContextStorage::Pool => fault("pool", 0, "this policy needs a pool; set one"),
                Some(_) if self.qps > QPS_PAGED_MAX => fault("qps", self.qps, "choose at most 16777214"),
                Some(pool) => pool.check(),
                None => Ok(()),
            },
        }
    }
}
