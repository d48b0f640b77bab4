//! The transport engine: queue pairs from RESET to ERR, and every packet between posting and completion.
//!
//! [`Nic`] has no I/O. A driver, live or simulated, posts work, hands in packets that passed their checks on the wire,
//! asks for packets whenever the wire is free, and calls [`Nic::advance`] no later than [`Nic::deadline`]. It may call
//! anything at any time, with times that never go back. Nothing is allocated for a packet that comes in order.
//!
//! What hardware of a real NIC would hold is in [`Context`], at most 230 bytes a queue pair; what lies in the host's
//! memory, and the software of the slow path, is kept apart from it and reached with the delays of [`CostModel`]:
//!
//! | module | what |
//! |---|---|
//! | `profile`, `memory` | what is handed in: the kind of NIC, the host's memory |
//! | `congestion`, `counters` | how senders slow down; what is counted |
//! | `control` | the verbs that make, change and destroy; posting and polling |
//! | `context` | what a queue pair has on chip, and in the host's memory |
//! | `schedule` | which queue pair is next: doorbells, the schedule queue, fetching of requests and data |
//! | `emit` | what was scheduled becomes headers and payload |
//! | `requester`, `answers` | acknowledgements, answers with content, completions in order, retries |
//! | `responder` | requests of the peer, in order or placed before those that are missing |
//! | `hand_over`, `software`, `scoreboard`, `bits` | the slow path: who has a queue pair, what software decides |
//! | `sizes` | how large all this is |
//! | `timers`, `cache` | what is due; contexts on chip and their misses |
//! | `pool`, `paging` | contexts in the host's memory, fetched before they are needed |

mod cache;
mod congestion;
mod context;
mod control;
mod counters;
mod emit;
pub mod handover;
mod memory;
mod packet_bitmap;
mod paging;
mod pool;
mod profile;
mod read_response;
mod requester;
mod responder;
mod schedule;
mod scoreboard;
mod sizes;
mod slow_path;
#[cfg(test)]
mod tests;
mod timers;

use std::collections::VecDeque;
use std::sync::Arc;

use sim::Time;
use thiserror::Error;

pub use congestion::{CongestionControl, Dcqcn};
pub use context::{CONTEXT_BYTES_MAX, Context};
pub use control::{QpInit, QpStatus};
pub use counters::NicCounters;
pub use memory::{ByteMemory, HostMemory, MemoryFault, NoMemory};
pub use packet_bitmap::PacketBitmap;
pub use profile::{
    ContextCacheConfig, ContextPoolConfig, CostModel, MTU_BYTES_MAX, MTU_BYTES_MIN, NicProfile, ProfileError,
    RetransmitTimeout, Scheduling, TransportPolicy, WINDOW_PACKETS_MAX,
};
pub use sizes::StructureSizes;

use crate::verbs::{
    Completion, CompletionQueue, CompletionQueueError, MemoryError, MemoryTable, NicAddress, SharedReceiveQueue,
    SharedReceiveQueueError, StateError, TransitionError,
};
use crate::wire::{Header, Operation, QpNumber, Service};
use context::HostQp;

/// READs and atomic operations of one queue pair at a time, in each direction.
pub const READS_MAX: u8 = 16;
/// Requests of one queue, at most.
pub const QUEUE_REQUESTS_MAX: u32 = 1 << 16;
/// What verbs put before a datagram in its receive request: room for a global routing header.
pub const DATAGRAM_OFFSET_BYTES: u32 = 40;
/// Numbers 0 and 1 are those of a port's management.
const QP_NUMBER_FIRST: u32 = 2;

/// A completion queue's number at its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CqNumber(pub u32);

/// A shared receive queue's number at its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SrqNumber(pub u32);

/// A verb that cannot be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NicError {
    /// Keys, regions, windows, protection domains.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The state does not allow it.
    #[error(transparent)]
    State(#[from] StateError),
    /// No such way between states.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// Completion queues.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
    /// Shared receive queues.
    #[error(transparent)]
    SharedReceiveQueue(#[from] SharedReceiveQueueError),
    /// There is no such thing.
    #[error("there is no {what} {number}; create one")]
    Unknown {
        /// What was named.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// Something still needs it.
    #[error("{what} {number} has {users} queue pairs; destroy them before")]
    Busy {
        /// What was to go.
        what: &'static str,
        /// Its number.
        number: u32,
        /// How many need it.
        users: u32,
    },
    /// A queue is full.
    #[error(
        "queue pair {qp}: its {queue} queue holds its {requests} requests; wait for completions, or make it larger"
    )]
    Full {
        /// Its number.
        qp: u32,
        /// Which queue.
        queue: &'static str,
        /// How many there is room for.
        requests: u32,
    },
    /// A request that this kind of queue pair cannot have.
    #[error("queue pair {qp}: {what}; {remedy}")]
    Request {
        /// Its number.
        qp: u32,
        /// What is wrong.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A size that cannot be.
    #[error("{what} cannot be {value}; choose {least} to {most}")]
    Size {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: u32,
        /// The least.
        least: u32,
        /// The most.
        most: u32,
    },
}

/// What a program may want to know without asking for it each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicEvent {
    /// A completion queue that was armed has news; it is armed no more.
    Completion(CqNumber),
    /// A completion queue overflowed, and its queue pairs went to the error state.
    CompletionQueueError(CqNumber),
    /// A queue pair went to the error state by what its peer did or by a local fault.
    QpError(QpNumber),
    /// What a queue pair had begun before it was drained is done.
    Drained(QpNumber),
    /// A shared receive queue has fewer requests than its limit.
    SharedReceiveLimit(SrqNumber),
}

/// A packet for the wire; its payload was put where the caller of [`Nic::transmit`] said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutgoingPacket {
    /// To whom.
    pub to: NicAddress,
    /// What it says; `payload_bytes` of payload go with it.
    pub header: Header,
}

/// A NIC and the memory of its host.
#[derive(Debug)]
pub struct Nic<M> {
    profile: Arc<NicProfile>,
    memory: M,
    table: MemoryTable,
    cqs: Vec<Option<CompletionQueue>>,
    srqs: Vec<Option<SharedReceiveQueue>>,
    contexts: paging::ContextTable,
    host_qps: Vec<HostQp>,
    free_qps: VecDeque<u32>,
    counters: NicCounters,
    events: VecDeque<NicEvent>,
    /// Packets without payload that wait for nothing: acknowledgements.
    control_packets: VecDeque<(NicAddress, Header)>,
    pipeline: schedule::Pipeline,
    timers: timers::Timers,
    /// Completions on their way to the host's memory.
    pending_completions: VecDeque<(Time, CqNumber, Completion)>,
    slow_path: slow_path::SlowPath,
    cache: Option<cache::ContextCache>,
    /// Where contexts come and go.
    pool: Option<pool::ContextPool>,
}

impl<M: HostMemory> Nic<M> {
    /// A NIC without queues. `profile`: a thousand NICs of a kind can have one. `seed`: of what it draws by chance
    /// (which context a cache gives up).
    ///
    /// # Errors
    /// When there can be no such NIC.
    pub fn new(profile: impl Into<Arc<NicProfile>>, memory: M, seed: u64) -> Result<Self, ProfileError> {
        let profile = profile.into();
        profile.check()?;
        Ok(Self {
            memory,
            table: MemoryTable::new(profile.memory_entries as usize),
            cqs: Vec::new(),
            srqs: Vec::new(),
            contexts: paging::ContextTable::default(),
            host_qps: Vec::new(),
            free_qps: VecDeque::new(),
            counters: NicCounters::default(),
            events: VecDeque::new(),
            control_packets: VecDeque::new(),
            pipeline: schedule::Pipeline::default(),
            timers: timers::Timers::default(),
            pending_completions: VecDeque::new(),
            slow_path: slow_path::SlowPath::default(),
            cache: profile.cache.map(|cache| cache::ContextCache::new(&cache, seed)),
            pool: profile.pool.map(|pool| pool::ContextPool::new(&pool)),
            profile,
        })
    }

    /// What kind of NIC it is.
    pub fn profile(&self) -> &NicProfile {
        &self.profile
    }

    /// The host's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The host's memory, to be changed by its programs.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// What was counted.
    pub fn counters(&self) -> &NicCounters {
        &self.counters
    }

    /// The oldest event that nobody took.
    pub fn poll_event(&mut self) -> Option<NicEvent> {
        self.events.pop_front()
    }

    /// Takes in a packet. `source` says who sent it as the driver knows it, `marked` whether a switch marked it
    /// (ECN-CE); `payload` has [`Header::payload_bytes`]. What makes no sense is dropped and counted.
    pub fn receive(&mut self, now: Time, source: NicAddress, header: &Header, marked: bool, payload: &M::Payload) {
        self.counters.received_packets += 1;
        if !self.is_parked(now, source, header, marked, Some(payload)) {
            self.process(now, source, header, marked, payload);
        }
        self.run_due(now);
    }

    fn process(&mut self, now: Time, source: NicAddress, header: &Header, marked: bool, payload: &M::Payload) {
        if let Some(i) = self.destination_qp(source, header) {
            self.dispatch(now, i, source, header, marked, payload);
        }
    }

    /// Takes in what a switch left of a packet whose payload it cut off for want of room (packet trimming). That counts
    /// as a mark; on a reliable connection the sender of a request is told at once, and an answer to a READ is asked
    /// for again at once.
    pub fn receive_trimmed(&mut self, now: Time, source: NicAddress, header: &Header) {
        self.counters.received_packets += 1;
        self.counters.trimmed_packets += 1;
        if !self.is_parked(now, source, header, true, None) {
            self.process_trimmed(now, source, header);
        }
        self.run_due(now);
    }

    fn process_trimmed(&mut self, now: Time, source: NicAddress, header: &Header) {
        if let Some(i) = self.destination_qp(source, header) {
            self.mark_context_used(i);
            // Marked or not, there was no room for it.
            self.ecn_marked(now, i, header);
            match header.operation {
                Operation::ReadResponseFirst
                | Operation::ReadResponseMiddle
                | Operation::ReadResponseLast
                | Operation::ReadResponseOnly => self.trimmed_response(now, i, header),
                _ => self.request_trimmed(i, header),
            }
        }
    }

    /// The next packet for the wire, if there is one now; the caller has the wire to itself. Its payload is put into
    /// `payload`, which must have room for an MTU.
    pub fn transmit(&mut self, now: Time, payload: &mut M::Payload) -> Option<OutgoingPacket> {
        loop {
            if let Some((to, header)) = self.control_packets.pop_front() {
                self.counters.sent_packets += 1;
                return Some(OutgoingPacket { to, header });
            }
            let Some(staged) = self.next_staged(now) else {
                if self.admit_fetched(now) {
                    continue;
                }
                return None;
            };
            let outgoing = self.emit(now, &staged, payload);
            self.unpin(now, staged.qp as usize);
            if let Some(outgoing) = outgoing {
                self.counters.sent_packets += 1;
                self.counters.sent_bytes += u64::from(outgoing.header.payload_bytes);
                return Some(outgoing);
            }
        }
    }

    /// When [`Self::advance`] is to be called at the latest, and [`Self::transmit`] after it when the wire is free;
    /// nothing when nothing waits for time to pass.
    pub fn deadline(&self) -> Option<Time> {
        let pending_completions = self.pending_completions.front().map_or(Time::MAX, |(at, ..)| *at);
        let contexts = self.pool.as_ref().map_or(Time::MAX, pool::ContextPool::deadline);
        let by_hardware = pending_completions.min(self.pipeline.deadline()).min(contexts);
        let at = by_hardware.min(self.slow_path.deadline()).min(self.timers.deadline());
        (at < Time::MAX).then_some(at)
    }

    /// Does what is due.
    pub fn advance(&mut self, now: Time) {
        while let Some((_, cq, completion)) = pop_front_if(&mut self.pending_completions, |(at, ..)| *at <= now) {
            self.deliver(now, cq, completion);
        }
        self.doorbells_due(now);
        while let Some(i) = self.timers.next_due(now) {
            self.timer_due(now, i);
        }
        self.run_due(now);
    }

    /// What follows at once from what happened.
    fn run_due(&mut self, now: Time) {
        self.pipeline.polled_at = now;
        self.run_slow_path(now);
        self.admit_fetched(now);
        self.fetched_due(now);
        if self.has_costs() {
            self.schedule(now);
        }
    }

    /// Whether fetching takes time, and so begins before the wire asks.
    fn has_costs(&self) -> bool {
        self.profile.costs != CostModel::ZERO
    }

    /// The queue pair that a packet is for.
    fn destination_qp(&mut self, source: NicAddress, header: &Header) -> Option<usize> {
        let Some(i) = self.index(header.destination) else {
            self.counters.drop_unknown_qp += 1;
            return None;
        };
        let context = &self.contexts[i];
        if !context.state.receives() {
            self.counters.drop_state += 1;
        } else if context.service != header.service {
            self.counters.drop_service += 1;
        } else if context.service != Service::Ud && context.peer != source {
            self.counters.drop_source += 1;
        } else if header.payload_bytes > context.mtu() {
            self.counters.drop_malformed += 1;
        } else {
            return Some(i);
        }
        None
    }

    fn dispatch(
        &mut self,
        now: Time,
        i: usize,
        source: NicAddress,
        header: &Header,
        marked: bool,
        payload: &M::Payload,
    ) {
        self.mark_context_used(i);
        self.payload_written(now, header.payload_bytes);
        if let Some(cache) = &mut self.cache {
            // The context is needed to take the packet in: a miss keeps the port from fetching for others.
            cache.touch(now, i as u32, &self.profile, &mut self.counters);
        }
        if marked {
            self.ecn_marked(now, i, header);
        }
        if header.congestion_echo {
            let constants = &self.profile.congestion;
            self.contexts[i].congestion.on_cnp(constants, now);
        }
        match header.operation {
            Operation::CongestionNotification => {}
            Operation::Acknowledge
            | Operation::AtomicAcknowledge
            | Operation::ReadResponseFirst
            | Operation::ReadResponseMiddle
            | Operation::ReadResponseLast
            | Operation::ReadResponseOnly => self.response(now, i, header, payload),
            _ => self.request(now, i, source, header, payload),
        }
    }
}

/// Takes the first thing of a queue if it is wanted.
fn pop_front_if<T>(queue: &mut VecDeque<T>, is_wanted: impl FnOnce(&T) -> bool) -> Option<T> {
    if is_wanted(queue.front()?) { queue.pop_front() } else { None }
}
