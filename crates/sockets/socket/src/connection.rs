//! A connected stream over two lanes.
//!
//! * `transfer`: send and receive.
//! * `lifeline`: send and receive before there are lanes, and how a connection gets them.
//! * `ends`: of lanes in plain memory, over modelled links, and in memory that is no ordinary memory.
//! * `give_back`: memory of what was read.
//! * `cork`: what is held back for the rest of it.
//! * `confined`: under a system call filter of the program's own.
//! * `lock_direction`: a direction's lock, in signal handlers too.
//! * `presence`: who looks, who sleeps, and when the memory may go.
//! * `wait`: spinning, then sleeping on the lifeline.
//! * `peer`: what is known of the other end, and which errors follow from it.
//! * `ready`: readiness, for poll and epoll.
//! * `nowhere`: buffers at addresses that no program has.
//! * `splice`: between the stream and a pipe.
//! * `lock_across_processes`: several processes holding one end.
//! * `urgent`: urgent data.

mod attach;
mod bad_address;
mod close;
mod confined;
mod cork;
mod direction_lock;
mod lane_kinds;
mod lanes;
mod lifeline;
mod observer;
mod peer;
mod readiness;
mod receive;
mod reclaim;
mod send;
mod send_in_place;
mod sharing;
mod socket_options;
mod splice;
#[cfg(test)]
pub(crate) mod tests;
mod transfer;
mod urgent;
mod wait;
mod waiters;
mod yielding_copy;

pub(crate) use observer::observe_changes;
pub use peer::PeerState;
pub use readiness::Edges;
pub use sharing::{
    after_fork_in_child, after_fork_in_parent, before_fork, find_by_lifeline_inode, find_by_segment, for_each_open,
};
pub use splice::Pipe;
pub use transfer::{Flags, total_bytes};

use lanes::{Lanes, PlainLanes};
use lifeline::LifelineState;
use waiters::{BlockedCalls, Lifetime, Sleepers};

use crate::descriptor::hidden::{self, HiddenFd};
use crate::descriptor::table::{Kind, Tracked};
use crate::options::OptionRecord;
use crate::process::lock::Lock;
use crate::process::pool::Pool;
use crate::process::signals;
use crate::process::system;
use crate::rendezvous::address::Tuple;
use crate::rendezvous::local_page::MemoryFds;
use ::wait::AdaptiveSpin;
use segment::{BY_LANE_BOTH, BY_LANE_RECEIVE, BY_LANE_SEND, Segment, Side};
use stats_page::ConnectionSlot;
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Shut down for reading.
pub const SHUTDOWN_READ: u64 = 1;
/// Shut down for writing.
pub const SHUTDOWN_WRITE: u64 = 2;

/// How the bytes of a connection travel when it begins.
#[allow(clippy::large_enum_variant, reason = "each is moved once, into its connection")]
pub enum InitialPath {
    /// By the lifeline, until the connection gets lanes; which end of it this is.
    Lifeline(Side),
    /// Not at all: the handshake of a proxy, which brings the lanes, has not come.
    Handshake,
    /// By lanes, whose memory is at hand.
    Lanes(Segment, Option<MemoryFds<HiddenFd>>),
}

/// How a connection came to be.
pub struct ConnectionParams {
    /// The program's descriptor, which is the lifeline.
    pub fd: RawFd,
    /// Both addresses, as TCP would show them.
    pub tuple: Tuple,
    /// Options the program had set before.
    pub options: OptionRecord,
    /// Whether the descriptor is in non-blocking mode.
    pub nonblocking: bool,
    /// Where `crosslane stat` sees it.
    pub slot: Option<ConnectionSlot>,
}

/// A connected stream over two lanes.
///
/// Objects live for ever and are used again, so that a thread which still holds one while another closes it touches
/// valid memory.
#[derive(Default)]
pub struct Connection {
    send_lock: Lock,
    receive_lock: Lock,
    /// Written under both locks while there is no waiter; read under either lock, or by a waiter.
    lanes: UnsafeCell<Option<Lanes>>,
    /// Whether both directions go by lanes and both their ends are plain ones: written and read as those are.
    is_plain: AtomicBool,
    /// Directions that go by the lanes, as [`OwnState::ByLane`] has them. Written under both locks.
    by_lane: AtomicU64,
    /// What there is to know before they do.
    lifeline_state: LifelineState,
    /// A proxy's connection, whose handshake has not come.
    awaits_handshake: AtomicBool,
    /// Whether the object is a connection, and which; who looks at the lanes without a lock.
    lifetime: Lifetime<AtomicU32>,
    /// What signal handlers have left to the holder that they interrupted; see `lock_direction`.
    deferred: AtomicU32,
    is_nonblocking: AtomicBool,
    /// Options as in [`options::SHARED`], a bit each, before there are lanes: then [`OwnState::Options`] says them to all
    /// processes that hold the end.
    shared_options: AtomicU64,
    /// The process was forked before the handshake came: it is the parent's.
    is_orphan: AtomicBool,
    /// Times in a row that a lock between processes could not be had.
    lock_waits: AtomicU32,
    /// Children that the process had made when this became a connection.
    spawns_at_open: AtomicU32,
    /// Another process may hold this end without being a child: it came by `exec` or a message, or went by one.
    is_transferred: AtomicBool,
    /// It is ready for a system call filter: see `confined`.
    is_confined: AtomicBool,
    /// This process counts among the end's users.
    is_user: AtomicBool,
    /// A fork has waited for its handshake already.
    was_handshake_awaited: AtomicBool,
    /// Clock ticks at the last look for holders that are gone.
    holders_checked_ticks: AtomicU64,
    /// What its receives have learned of how soon the peer sends.
    spin_history: AdaptiveSpin,
    /// Threads and readiness sets that rely on the lifeline to wake them.
    sleepers: Sleepers<AtomicU32>,
    /// Calls for whose end a close waits.
    calls: BlockedCalls<AtomicU32>,
    /// One of the descriptors of the lifeline; [`HIDDEN_LIFELINE`] and less stand for the place of a hidden one.
    lifeline: AtomicI32,
    /// Sends since the last receive that brought data: a peer that answers is alive.
    unanswered_sends: AtomicU32,
    /// Clock ticks at the last look at the lifeline.
    lifeline_polled_ticks: AtomicU64,
    /// A send found no room and nobody has seen it come back yet.
    send_is_blocked: AtomicBool,
    /// Times that room came back, for edge-triggered readiness.
    room_returns: AtomicU64,
    send_timeout_ns: AtomicU64,
    receive_timeout_ns: AtomicU64,
    /// `SO_RCVLOWAT`: fewer unread bytes do not count as readable. 0 and 1 are the same.
    low_water_bytes: AtomicU32,
    /// `F_SETOWN` has named somebody who gets `SIGURG`.
    raises_signal: AtomicBool,
    /// What receives bring beside the bytes: [`RequestedControl`], as a number.
    requested_control: AtomicU32,
    /// The outgoing lane has memory beyond its small ring.
    has_grown: AtomicBool,
    /// Where the outgoing lane stood when it was last seen, for giving memory back, and when that was, in clock ticks.
    idle_position: AtomicU64,
    idle_since_ticks: AtomicU64,
    /// Written while nobody else knows the object, and under both locks.
    slot: UnsafeCell<Option<ConnectionSlot>>,
    details_lock: Lock,
    /// Under `details_lock`.
    details: UnsafeCell<Details>,
}

// SAFETY: no other type names these kinds, and the fields of the struct have an alignment of 8.
unsafe impl Tracked for Connection {
    const KINDS: &'static [Kind] = &[Kind::Connection, Kind::Confined];
}

/// What the fast path does not need.
#[derive(Default)]
struct Details {
    descriptors: Vec<RawFd>,
    tuple: Option<Tuple>,
    options: OptionRecord,
    memory: Option<MemoryFds<HiddenFd>>,
    /// `SO_LINGER` with a time of zero: closing resets the connection.
    resets_on_close: bool,
    /// `connect` has answered `EINPROGRESS`; the next call answers that it is done.
    reports_connect: bool,
    /// The lifeline, while a close waits for calls of other threads.
    retained_lifeline: Option<HiddenFd>,
}

/// Of hidden descriptors the number changes; their place does not.
const HIDDEN_LIFELINE: RawFd = -2;

// SAFETY: the cells are accessed as their comments say, everything else is atomic.
unsafe impl Sync for Connection {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Connection {}

static POOL: Pool<Connection> = Pool::new();

/// Whether this is a signal handler that has interrupted a thread which holds a direction of a connection.
pub(crate) fn is_inside_a_connection() -> bool {
    POOL.any(|it| it.send_lock.is_held_by_this_thread() || it.receive_lock.is_held_by_this_thread())
}

/// Has handlers put off until this thread lets go of the connections that it holds; `false`: there are none.
pub(crate) fn defer_handlers() -> bool {
    POOL.any(|it| {
        let deferred_of = |lock: &Lock, deferred| if lock.is_held_by_this_thread() { deferred } else { 0 };
        let deferred = deferred_of(&it.send_lock, direction_lock::DEFERRED_SEND_HANDLERS)
            | deferred_of(&it.receive_lock, direction_lock::DEFERRED_RECEIVE_HANDLERS);
        if deferred != 0 {
            it.defer_to_holder(deferred);
        }
        deferred != 0
    })
}

impl Connection {
    /// A connection. One that awaits a handshake has nothing to read and no room to write.
    pub fn open(origin: ConnectionParams, start: InitialPath) -> &'static Self {
        crate::accounting::memory_budget::init_limits();
        hidden::note_lifeline();
        let connection = POOL.take();
        let _send = connection.lock_direction(&connection.send_lock);
        let _receive = connection.lock_direction(&connection.receive_lock);
        connection.lifetime.begin_generation();
        connection.deferred.fetch_and(direction_lock::DEFERRED_HANDLERS, Ordering::Relaxed);
        let _ = connection.calls.forget();
        connection.lifeline.store(origin.fd, Ordering::Relaxed);
        connection.is_nonblocking.store(origin.nonblocking, Ordering::Relaxed);
        connection.shared_options.store(0, Ordering::Relaxed);
        connection.is_orphan.store(false, Ordering::Relaxed);
        connection.lock_waits.store(0, Ordering::Relaxed);
        connection.spawns_at_open.store(system::spawns(), Ordering::Relaxed);
        connection.is_transferred.store(false, Ordering::Relaxed);
        connection.is_confined.store(false, Ordering::Relaxed);
        connection.is_user.store(false, Ordering::Relaxed);
        connection.was_handshake_awaited.store(false, Ordering::Relaxed);
        connection.spin_history.reset();
        connection.unanswered_sends.store(0, Ordering::Relaxed);
        connection.send_is_blocked.store(false, Ordering::Relaxed);
        connection.send_timeout_ns.store(0, Ordering::Relaxed);
        connection.receive_timeout_ns.store(0, Ordering::Relaxed);
        connection.low_water_bytes.store(0, Ordering::Relaxed);
        connection.raises_signal.store(false, Ordering::Relaxed);
        connection.requested_control.store(0, Ordering::Relaxed);
        connection.with_details_unmasked(|details| {
            *details = Details {
                descriptors: vec![origin.fd],
                tuple: Some(origin.tuple),
                options: origin.options,
                memory: None,
                ..Details::default()
            };
        });
        // SAFETY: under both locks of an object that nobody else knows yet.
        unsafe { *connection.slot.get() = origin.slot };
        connection.by_lane.store(0, Ordering::Relaxed);
        connection.awaits_handshake.store(matches!(start, InitialPath::Handshake), Ordering::Relaxed);
        match start {
            InitialPath::Lifeline(side) => connection.lifeline_state.begin(side),
            InitialPath::Handshake => {}
            InitialPath::Lanes(segment, memory) => {
                connection.lifeline_state.begin(segment.side());
                let by_lane = if segment.is_adopted() {
                    connection.lifeline_state.note_inode(memory.as_ref());
                    0
                } else {
                    BY_LANE_BOTH
                };
                connection.attach_locked(segment, memory, by_lane);
            }
        }
        connection.lifetime.open();
        connection
    }

    #[inline]
    fn generation(&self) -> u32 {
        self.lifetime.generation()
    }

    /// Whether this process still has a descriptor of it.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.lifetime.is_open()
    }

    /// What waits for its bytes have learned.
    pub fn spin_history(&self) -> &AdaptiveSpin {
        &self.spin_history
    }

    /// A descriptor of the lifeline, for sleeping on and for waking the peer.
    #[inline]
    pub fn lifeline(&self) -> RawFd {
        match self.lifeline.load(Ordering::Relaxed) {
            hidden @ ..=HIDDEN_LIFELINE => hidden::number_at((HIDDEN_LIFELINE - hidden) as u16),
            number => number,
        }
    }

    /// Both addresses, as TCP would show them.
    pub fn tuple(&self) -> Option<Tuple> {
        self.with_details(|details| details.tuple)
    }

    /// Runs `access` on the record of the socket's options.
    pub fn with_options<R>(&self, access: impl FnOnce(&mut OptionRecord) -> R) -> R {
        self.with_details(|details| access(&mut details.options))
    }

    /// Another process may hold this end from now on: only the kernel knows when the last one is gone.
    pub fn note_shared(&self) {
        self.is_transferred.store(true, Ordering::Relaxed);
    }

    /// After a non-blocking `connect` has answered `EINPROGRESS`.
    pub fn report_connect_later(&self, later: bool) {
        self.with_details(|details| details.reports_connect = later);
    }

    /// Whether `connect` still owes its answer; it is given once.
    pub fn take_connect_report(&self) -> bool {
        self.with_details(|details| std::mem::take(&mut details.reports_connect))
    }

    /// Whether one of the program's descriptors of this connection is as `is_wanted` says.
    pub fn has_descriptor(&self, is_wanted: impl Fn(RawFd) -> bool) -> bool {
        self.with_details(|details| details.descriptors.iter().any(|&fd| is_wanted(fd)))
    }

    /// Notes that the program made another descriptor of this connection.
    pub fn add_descriptor(&self, fd: RawFd) {
        self.with_details(|details| details.descriptors.push(fd));
    }

    /// Runs `access` on the program's descriptors of this connection.
    pub fn with_descriptors<R>(&self, access: impl FnOnce(&[RawFd]) -> R) -> R {
        self.with_details(|details| access(&details.descriptors))
    }

    /// Notes that the program closes a descriptor, before the kernel does. With the last one, this process is done with
    /// the connection.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        let left = self.with_details(|details| {
            details.descriptors.retain(|&known| known != fd);
            details.descriptors.first().copied()
        });
        match left {
            Some(other) => {
                self.lifeline.store(other, Ordering::Relaxed);
                if let Some(slot) = self.slot() {
                    slot.set_fd(other);
                }
            }
            None => self.close(),
        }
    }

    /// Whether what is sent goes by a lane. Under the send lock, or as a glance.
    #[inline]
    pub fn sends_by_lane(&self) -> bool {
        self.by_lane.load(Ordering::Relaxed) & BY_LANE_SEND != 0
    }

    /// Whether what is received comes by a lane. Under the receive lock, or as a glance.
    #[inline]
    fn receives_by_lane(&self) -> bool {
        self.by_lane.load(Ordering::Relaxed) & BY_LANE_RECEIVE != 0
    }

    /// The lanes. The caller holds a lock of the connection, or is a waiter.
    #[inline]
    fn lanes(&self) -> Option<&Lanes> {
        // SAFETY: written only under both locks with no waiter, so not while the caller looks.
        unsafe { (*self.lanes.get()).as_ref() }
    }

    /// The lanes, if they are those of plain memory. As for [`Connection::lanes`].
    #[inline(always)] // Instead of the question whether there are any: then short messages pay nothing for the other.
    fn plain_lanes(&self) -> Option<PlainLanes<'_>> {
        // SAFETY: written only under both locks with no waiter; a plain load is part of the comparison.
        if !unsafe { self.is_plain.as_ptr().read() } {
            return None;
        }
        // SAFETY: as for `lanes`; while the flag is set there are some, and plain ones.
        Some(PlainLanes(unsafe { (*self.lanes.get()).as_ref().unwrap_unchecked() }))
    }

    /// Whether there may be plain lanes: a glance.
    #[inline]
    fn is_plain(&self) -> bool {
        self.is_plain.load(Ordering::Relaxed)
    }

    #[inline]
    fn slot(&self) -> Option<&ConnectionSlot> {
        // SAFETY: written only before the object is known and when its last descriptor is gone.
        unsafe { (*self.slot.get()).as_ref() }
    }

    fn with_details<R>(&self, access: impl FnOnce(&mut Details) -> R) -> R {
        // A handler that finds the lock held by its own thread would wait for ever.
        signals::without_handlers(|| self.with_details_unmasked(access))
    }

    /// As [`Connection::with_details`], for an object that no signal handler can reach: not known yet, or not any more.
    fn with_details_unmasked<R>(&self, access: impl FnOnce(&mut Details) -> R) -> R {
        let _guard = self.details_lock.lock();
        // SAFETY: under its lock.
        access(unsafe { &mut *self.details.get() })
    }
}
