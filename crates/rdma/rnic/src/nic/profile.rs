//! What kind of NIC it is: policy, sizes, and what things cost.

use sim::Span;
use thiserror::Error;

use super::congestion::CongestionControl;
use super::context::Context;
use super::limits::{MTU_BYTES_MAX, MTU_BYTES_MIN, NO_QP, WINDOW_PACKETS_MAX};
use super::policy::{ContextStorage, LossRecovery, TransportPolicy};

/// Queue pairs of a NIC that pages contexts, at most: it numbers them by 24 bits.
const QPS_PAGED_MAX: u32 = NO_QP - 1;

/// What things cost. All zero where they take real time by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostModel {
    /// From a program's doorbell, or a command of the slow path's software, until the NIC knows.
    pub doorbell: Span,
    /// A read of the host's memory, until its first byte is there.
    pub dma_read: Span,
    /// A write to the host's memory, until the host can see it.
    pub dma_write: Span,
    /// What a byte adds to a read, in picoseconds.
    pub dma_byte_ps: u64,
    /// From a header in an empty control queue until the slow path's software looks at it.
    pub software_wake: Span,
    /// The slow path's software, for one header.
    pub software_header: Span,
    /// From a complaint about a gap until hardware sends again from there on: go-back-N alone.
    pub go_back: Span,
}

impl CostModel {
    /// Nothing costs anything: live.
    pub const ZERO: Self = Self {
        doorbell: Span::ZERO,
        dma_read: Span::ZERO,
        dma_write: Span::ZERO,
        dma_byte_ps: 0,
        software_wake: Span::ZERO,
        software_header: Span::ZERO,
        go_back: Span::ZERO,
    };

    /// *Modelled*: PCIe of about 126 Gb/s with a round trip of 1 us (srnic.md, "The design"), half of it for what is
    /// posted; a core that polls the control queue and takes 40 ns for a header whose bitmap it has in its cache; 16 us
    /// to go back, which makes the published 25 Gb/s of a commercial NIC at 1% of loss (srnic.md, section 2).
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
}

impl CostModel {
    /// How long the link to the host's memory carries so many bytes.
    pub(super) fn dma_bytes(&self, bytes: u32) -> Span {
        Span::from_ps(self.dma_byte_ps) * u64::from(bytes)
    }
}

/// How packets come to the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduling {
    /// Bytes that one queue pair gets before another has its turn; a packet that was begun is finished.
    pub quantum_bytes: u32,
    /// Bytes that are fetched ahead of the wire, at most (srnic.md: at least 25 KB at 100 Gb/s).
    pub ahead_bytes: u32,
    /// Work requests that one decision fetches, at most; what it does not use is dropped and fetched again.
    pub batch_wqes: u32,
    /// Decisions whose work requests are being fetched, at most.
    pub decisions: u32,
    /// Whether work requests are fetched for each decision, rather than known to the NIC beforehand.
    pub fetches_wqes: bool,
}

/// A cache of contexts on chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextCacheConfig {
    /// Contexts that it holds.
    pub contexts: u32,
    /// Contexts that are fetched at the same time, at most.
    pub fetches: u32,
    /// What a miss costs, where costs count at all: reads of the host's memory for context, work request, translation.
    pub miss: Span,
}

/// A pool of contexts on chip; all of them lie in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextPoolConfig {
    /// Contexts that it holds, at most: 2 to 65,535.
    pub contexts: u32,
    /// How many of the schedule queue's first have their contexts fetched and kept: half of the pool at most, so that
    /// those that wait for their turn never keep the first one's context out.
    pub ahead: u32,
    /// Contexts that are wanted at the same time, at most.
    pub fetches: u32,
    /// Reads of them under way at the same time, at most.
    pub reads: u32,
    /// Packets that wait for a context in the receive buffer, at most.
    pub parked_packets: u32,
    /// Bytes of them, at most.
    pub parked_bytes: u32,
    /// Bytes that a context's read takes of the link from the host's memory, headers included.
    pub read_bytes: u32,
    /// Bytes that its write takes of the link there.
    pub write_bytes: u32,
}

impl ContextPoolConfig {
    /// *Modelled*: as large as fits, with what is on chip of each of 100,000 queue pairs, into what SRNIC takes for
    /// 10,000. Half of the receive buffer holds 24 us of 100 Gb/s, and 64 reads at a round trip of 1 us bring 64 M
    /// contexts a second. Bytes on the link are those of PCIe of generation 3 (`pcie::model`): 24 around a write, and
    /// 20 around the answer to a read.
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
        let most = u32::from(u16::MAX);
        let half = self.contexts / 2;
        let ranges = [
            ("pool.contexts", self.contexts, 2, most, "choose 2 to 65535"),
            ("pool.ahead", self.ahead, 1, half, "choose at least 1, and half of the pool at most"),
            ("pool.fetches", self.fetches, 1, most, "choose 1 to 65535"),
            ("pool.reads", self.reads, 1, u32::MAX, "choose at least 1"),
            ("pool.parked_packets", self.parked_packets, 1, most, "choose 1 to 65535"),
            ("pool.parked_bytes", self.parked_bytes, 8192, u32::MAX, "leave room for a packet: 8192 at least"),
        ];
        let wrong = ranges.into_iter().find(|(_, value, least, most, _)| value < least || value > most);
        wrong
            .map_or(Ok(()), |(field, value, _, _, remedy)| Err(ProfileError { field, value: u64::from(value), remedy }))
    }
}

/// When a sender stops waiting for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetransmitTimeout {
    /// After the time that the queue pair's attribute says.
    Attribute,
    /// IRN: a short time while few packets are on their way, else a long one.
    LowHigh {
        /// The short time.
        low: Span,
        /// The long time.
        high: Span,
        /// Below how many packets the short one holds.
        packets: u32,
    },
    /// After two round trips as measured, and twice as long each time; the last packet is sent again to learn what
    /// arrived (a tail-loss probe, RFC 8985), and nothing else.
    Probe {
        /// The least time.
        least: Span,
        /// The time before a round trip was measured.
        first: Span,
    },
}

/// What kind of NIC it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicProfile {
    /// How it finds what is lost.
    pub policy: TransportPolicy,
    /// Bytes of payload of a packet, at most; queue pairs may ask for less.
    pub mtu_bytes: u32,
    /// Packets of one queue pair on their way, at most; 1 to [`WINDOW_PACKETS_MAX`].
    pub window_packets: u32,
    /// After how many packets a sender asks for an acknowledgement, at the latest.
    pub ack_packets: u32,
    /// How senders slow down.
    pub congestion: CongestionControl,
    /// What things cost.
    pub costs: CostModel,
    /// How packets come to the wire.
    pub scheduling: Scheduling,
    /// When a sender stops waiting.
    pub retransmit_timeout: RetransmitTimeout,
    /// Of [`TransportPolicy::ConnectionCache`].
    pub cache: Option<ContextCacheConfig>,
    /// Of [`TransportPolicy::SrnicPaged`].
    pub pool: Option<ContextPoolConfig>,
    /// Headers that the control queue holds; what comes beyond is lost, and sent again.
    pub control_queue: u32,
    /// Queue pairs, at most.
    pub qps: u32,
    /// Memory regions and windows, at most.
    pub memory_entries: u32,
}

/// A profile that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("profile: {field} is {value}; {remedy}")]
pub struct ProfileError {
    /// Which value.
    pub field: &'static str,
    /// What it is.
    pub value: u64,
    /// What it must be.
    pub remedy: &'static str,
}

impl NicProfile {
    /// A NIC with this policy that costs nothing: live, and where only the protocol matters. Congestion is not
    /// controlled, but IRN has no policy without a bound and begins with 512 packets.
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
        // *Modelled*: 8.8 M misses a second, so that all misses at one packet of 1 KiB a turn are the published 52 Gb/s
        // of 16,384 queue pairs; 256 contexts are where the published collapse begins.
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

    /// The same NIC at the end of a PCIe link: [`CostModel::modelled`].
    pub fn modelled(policy: TransportPolicy) -> Self {
        Self { costs: CostModel::modelled(), ..Self::new(policy) }
    }

    /// Whether receivers tell senders of marks in acknowledgements.
    pub(super) fn echoes_marks(&self) -> bool {
        matches!(self.congestion, CongestionControl::Dctcp { .. })
    }

    /// Whether it can be.
    ///
    /// # Errors
    /// Names the first value that cannot.
    pub fn check(&self) -> Result<(), ProfileError> {
        let fault = |field, value: u32, remedy| Err(ProfileError { field, value: u64::from(value), remedy });
        if !(MTU_BYTES_MIN..=MTU_BYTES_MAX).contains(&self.mtu_bytes) {
            return fault("mtu_bytes", self.mtu_bytes, "choose 256 to 4096");
        }
        if !(1..=WINDOW_PACKETS_MAX).contains(&self.window_packets) {
            return fault("window_packets", self.window_packets, "choose 1 to 512");
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
            None if storage == ContextStorage::Cache => fault("cache", 0, "give this policy a cache"),
            _ => match self.pool {
                None if storage == ContextStorage::Pool => fault("pool", 0, "give this policy a pool"),
                Some(_) if self.qps > QPS_PAGED_MAX => fault("qps", self.qps, "choose 16777214 at most"),
                Some(pool) => pool.check(),
                None => Ok(()),
            },
        }
    }
}
