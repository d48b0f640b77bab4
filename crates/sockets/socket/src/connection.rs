//! A connected stream over two lanes.
//!
//! * `transfer`: what `send` and `receive` share, and their `MSG_` flags.
//! * `send`, `receive`: the calls that move bytes between buffers and lanes.
//! * `send_in_place`: sends that another system call fills, such as `sendfile`.
//! * `splice`: transfers between the stream and a pipe.
//! * `urgent`: urgent data (`MSG_OOB`).
//! * `bad_address`: buffers at addresses that no program maps.
//! * `yielding_copy`: long copies that yield the processor between chunks.
//! * `lanes`, `lane_kinds`: the two lanes, in the three kinds of memory.
//! * `lifeline`: the path of the bytes before there are lanes, and the upgrade to lanes.
//! * `attach`: attaches the memory of lanes, and keeps its descriptors.
//! * `close`: shutdown, close, and reuse of the object.
//! * `reclaim`: returns the memory of drained rings.
//! * `cork`: `TCP_CORK` and `MSG_MORE`.
//! * `socket_options`: socket options that the connection itself implements.
//! * `confined`: connections of a process under a system call filter of its own.
//! * `direction_lock`: the lock of a direction, which signal handlers may find held.
//! * `waiters`: the protocols of threads that poll without a lock or sleep on the lifeline.
//! * `wait`: spins, then sleeps on the lifeline.
//! * `peer`: the state of the peer, and the errors that follow from it.
//! * `readiness`: readiness for `poll` and `epoll`.
//! * `observer`: notifies epoll sets of changes.
//! * `sharing`: an endpoint that several processes hold.

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
pub use readiness::EdgeCounters;
pub use sharing::{
    after_fork_in_child, after_fork_in_parent, before_fork, find_by_lifeline_inode, find_by_segment, for_each_open,
};
pub use splice::Pipe;
pub use transfer::{MessageFlags, total_bytes};

use lanes::{Lanes, PlainLanes};
use lifeline::LifelinePath;
use waiters::{BlockedCalls, Lifetime, Sleepers};

use crate::descriptor::hidden::{self, HiddenFd};
use crate::descriptor::table::{Kind, Tracked};
use crate::options::OptionRecord;
use crate::process::lock::Lock;
use crate::process::locked::Locked;
use crate::process::pool::Pool;
use crate::process::{sandbox, signals, system};
use crate::rendezvous::address::Tuple;
use crate::rendezvous::local_page::MemoryFds;
use ::wait::AdaptiveSpin;
use segment::{BY_LANE_BOTH, BY_LANE_RECEIVE, BY_LANE_SEND, Segment, Side};
use stats_page::ConnectionSlot;
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Shutdown of the receive direction.
pub const SHUTDOWN_READ: u64 = 1;
/// Shutdown of the send direction.
pub const SHUTDOWN_WRITE: u64 = 2;

/// The path that the bytes of a connection use when it is opened.
#[allow(clippy::large_enum_variant, reason = "each is moved once, into its connection")]
pub enum InitialPath {
    /// The lifeline, until the connection gets lanes; with the side of this endpoint.
    Lifeline(Side),
    /// None yet: a proxy's handshake, which brings the lanes, has not arrived.
    Handshake,
    /// Lanes, in memory that is at hand, with its descriptors.
    Lanes(Segment, Option<MemoryFds<HiddenFd>>),
}

/// The parameters of a new connection.
pub struct ConnectionParams {
    /// The program's descriptor, which is the lifeline.
    pub fd: RawFd,
    /// Both addresses, as TCP would report them.
    pub tuple: Tuple,
    /// Options that the program has set before.
    pub options: OptionRecord,
    /// Whether the descriptor is in non-blocking mode.
    pub nonblocking: bool,
    /// The connection's counters on the stats page.
    pub slot: Option<ConnectionSlot>,
}

/// A connected stream over two lanes.
///
/// Objects live as long as the process and are reused, so that a thread that still uses one while another thread closes
/// it accesses valid memory.
#[derive(Default)]
pub struct Connection {
    send_lock: Lock,
    receive_lock: Lock,
    /// Written under both locks while there is no waiter; read under either lock, or by a waiter.
    lanes: UnsafeCell<Option<Lanes>>,
    /// Whether both directions use lanes and both are in ordinary memory. Written under both locks.
    is_plain: AtomicBool,
    /// The directions that use lanes, as in [`OwnState::ByLane`]. Written under both locks.
    by_lane: AtomicU64,
    /// The state of the lifeline while it carries bytes.
    lifeline_path: LifelinePath,
    /// A proxy's connection whose handshake has not arrived.
    awaits_handshake: AtomicBool,
    /// Whether the object is a connection, of which generation, and whether threads poll its lanes without a lock.
    lifetime: Lifetime<AtomicU32>,
    /// Work that signal handlers have deferred to the lock holder that they interrupted; see `direction_lock`.
    deferred: AtomicU32,
    is_nonblocking: AtomicBool,
    /// The options of [`options::SHARED`], a bit each, before there are lanes. With lanes, [`OwnState::Options`] has
    /// them, for all processes that hold the endpoint.
    shared_options: AtomicU64,
    /// The process was forked before the handshake arrived, which belongs to the parent.
    is_orphan: AtomicBool,
    /// Consecutive failed attempts to take a lock between processes.
    lock_waits: AtomicU32,
    /// Number of children that the process had spawned when this object became a connection.
    spawns_at_open: AtomicU32,
    /// Another process may hold this endpoint without being a child: the descriptor was inherited by `exec`, or was
    /// sent or received with `SCM_RIGHTS`.
    is_transferred: AtomicBool,
    /// The connection is prepared for a system call filter; see `confined`.
    is_confined: AtomicBool,
    /// This process is counted among the users of the endpoint.
    is_user: AtomicBool,
    /// A fork has already waited for the handshake.
    was_handshake_awaited: AtomicBool,
    /// Clock ticks at the last check for dead holders.
    holders_checked_ticks: AtomicU64,
    /// How soon the peer has sent after previous waits.
    spin_history: AdaptiveSpin,
    /// Threads and readiness sets that rely on the lifeline to wake them.
    sleepers: Sleepers<AtomicU32>,
    /// Blocked calls, whose return a close waits for.
    calls: BlockedCalls<AtomicU32>,
    /// A descriptor of the lifeline. [`HIDDEN_LIFELINE`] and lower values encode the slot of a hidden descriptor.
    lifeline: AtomicI32,
    /// Number of sends since the last receive that brought data: a peer that responds is alive.
    unanswered_sends: AtomicU32,
    /// Clock ticks when the lifeline was last polled.
    lifeline_polled_ticks: AtomicU64,
    /// A send found no room, and nothing has found room since.
    send_is_blocked: AtomicBool,
    /// Number of events for edge-triggered watchers that the lanes do not show: room that was found after a blocked
    /// send, and receives that ended before all that is unread was considered.
    other_events: AtomicU64,
    send_timeout_ns: AtomicU64,
    receive_timeout_ns: AtomicU64,
    /// `SO_RCVLOWAT`: the connection is not readable while fewer bytes are unread. 0 and 1 are equivalent.
    low_water_bytes: AtomicU32,
    /// `F_SETOWN` has named a recipient of `SIGURG`.
    raises_signal: AtomicBool,
    /// The ancillary data that receives return: [`RequestedControl`] as a number; 0 for none.
    requested_control: AtomicU32,
    /// The outgoing lane has memory beyond its small ring.
    has_grown: AtomicBool,
    /// The position of the outgoing lane at the last sweep that found a change, and the clock ticks of that sweep; see
    /// `reclaim`.
    idle_position: AtomicU64,
    idle_since_ticks: AtomicU64,
    /// Written under both locks while no other thread knows the object.
    slot: UnsafeCell<Option<ConnectionSlot>>,
    details: Locked<Details>,
}

// SAFETY: no other type has these kinds, and the struct is aligned to 8 bytes because it has fields of that alignment.
unsafe impl Tracked for Connection {
    const KINDS: &'static [Kind] = &[Kind::Connection, Kind::Confined];
}

/// State that the fast path does not need.
#[derive(Default)]
struct Details {
    descriptors: Vec<RawFd>,
    tuple: Option<Tuple>,
    options: OptionRecord,
    memory: Option<MemoryFds<HiddenFd>>,
    /// `SO_LINGER` with a timeout of 0: closing resets the connection.
    resets_on_close: bool,
    /// `connect` has returned `EINPROGRESS`; the next call reports success.
    reports_connect: bool,
    /// The lifeline, while a close waits for blocked calls of other threads.
    retained_lifeline: Option<HiddenFd>,
}

/// The first value of [`Connection::lifeline`]'s field that encodes the slot of a hidden descriptor: a hidden
/// descriptor's number changes, its slot does not.
const HIDDEN_LIFELINE: RawFd = -2;

// SAFETY: each cell is accessed only under the lock that its comment names, and all other fields are atomic.
unsafe impl Sync for Connection {}
// SAFETY: no field is bound to a thread.
unsafe impl Send for Connection {}

static POOL: Pool<Connection> = Pool::new();

/// Returns whether the calling signal handler has interrupted a thread that holds the lock of a connection's direction.
pub(crate) fn is_inside_a_connection() -> bool {
    POOL.any(|it| it.send_lock.is_held_by_this_thread() || it.receive_lock.is_held_by_this_thread())
}

/// Defers signal handlers until this thread has released the directions that it holds. Returns `false` if it holds
/// none.
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
    /// Opens a connection. One that awaits a handshake has nothing to read and no room to write.
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn open(params: ConnectionParams, path: InitialPath) -> &'static Self {
        crate::accounting::memory_budget::init_limits();
        hidden::note_inheritable();
        let connection = POOL.take();
        let _send = connection.lock_direction(&connection.send_lock);
        let _receive = connection.lock_direction(&connection.receive_lock);
        connection.reset(params.fd, params.nonblocking);
        connection.with_details_unmasked(|details| {
            *details = Details {
                descriptors: vec![params.fd],
                tuple: Some(params.tuple),
                options: params.options,
                memory: None,
                ..Details::default()
            };
        });
        // SAFETY: both locks are held, and no other thread knows the object yet.
        unsafe { *connection.slot.get() = params.slot };
        connection.awaits_handshake.store(matches!(path, InitialPath::Handshake), Ordering::Relaxed);
        match path {
            InitialPath::Lifeline(side) => connection.lifeline_path.begin(side),
            InitialPath::Handshake => {}
            InitialPath::Lanes(segment, memory) => {
                connection.lifeline_path.begin(segment.side());
                let by_lane = if segment.is_adopted() {
                    connection.lifeline_path.note_inode(memory.as_ref());
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

    /// Resets what the object's previous use has left. The pattern names every field, so that none is forgotten. The
    /// caller holds both locks.
    fn reset(&self, fd: RawFd, nonblocking: bool) {
        #[rustfmt::skip] // Grouped by kind.
        let Self {
            lifetime, deferred, calls, spin_history, lifeline, is_nonblocking, spawns_at_open,
            is_orphan, is_transferred, is_confined, is_user, was_handshake_awaited, send_is_blocked, raises_signal,
            shared_options, by_lane, send_timeout_ns, receive_timeout_ns,
            lock_waits, unanswered_sends, low_water_bytes, requested_control,
            // Set by `open`.
            lanes: _, is_plain: _, lifeline_path: _, awaits_handshake: _, slot: _, details: _,
            // Kept: counters that only grow, times, and what a close has reset.
            send_lock: _, receive_lock: _, sleepers: _, holders_checked_ticks: _,
            lifeline_polled_ticks: _, other_events: _, has_grown: _, idle_position: _, idle_since_ticks: _,
        } = self;
        lifetime.begin_generation();
        deferred.fetch_and(direction_lock::DEFERRED_HANDLERS, Ordering::Relaxed);
        let _ = calls.forget();
        spin_history.reset();
        lifeline.store(fd, Ordering::Relaxed);
        is_nonblocking.store(nonblocking, Ordering::Relaxed);
        spawns_at_open.store(system::spawns(), Ordering::Relaxed);
        let flags =
            [is_orphan, is_transferred, is_confined, is_user, was_handshake_awaited, send_is_blocked, raises_signal];
        flags.into_iter().for_each(|flag| flag.store(false, Ordering::Relaxed));
        let words = [shared_options, by_lane, send_timeout_ns, receive_timeout_ns];
        words.into_iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let counts = [lock_waits, unanswered_sends, low_water_bytes, requested_control];
        counts.into_iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// Returns the number of the object's present use.
    #[inline]
    fn generation(&self) -> u32 {
        self.lifetime.generation()
    }

    /// Returns whether this process still has a descriptor of the connection.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.lifetime.is_open()
    }

    /// Returns how soon the peer has sent after previous waits.
    pub fn spin_history(&self) -> &AdaptiveSpin {
        &self.spin_history
    }

    /// Returns a descriptor of the lifeline, to sleep on and to wake the peer.
    #[inline]
    pub fn lifeline(&self) -> RawFd {
        match self.lifeline.load(Ordering::Relaxed) {
            hidden @ ..=HIDDEN_LIFELINE => hidden::number_at((HIDDEN_LIFELINE - hidden) as u16),
            number => number,
        }
    }

    /// Returns both addresses, as TCP would report them.
    pub fn tuple(&self) -> Option<Tuple> {
        self.with_details(|details| details.tuple)
    }

    /// Runs `access` on the record of the socket's options.
    pub fn with_options<R>(&self, access: impl FnOnce(&mut OptionRecord) -> R) -> R {
        self.with_details(|details| access(&mut details.options))
    }

    /// Notes that another process may hold this endpoint from now on: only the kernel knows when the last descriptor is
    /// closed.
    pub fn note_shared(&self) {
        self.is_transferred.store(true, Ordering::Relaxed);
    }

    /// Sets whether the next `connect` reports success, after a non-blocking one has returned `EINPROGRESS`.
    pub fn report_connect_later(&self, later: bool) {
        self.with_details(|details| details.reports_connect = later);
    }

    /// Returns whether `connect` has still to report success, and clears that.
    pub fn take_connect_report(&self) -> bool {
        self.with_details(|details| std::mem::take(&mut details.reports_connect))
    }

    /// Returns whether one of the program's descriptors of this connection satisfies `is_wanted`.
    pub fn has_descriptor(&self, is_wanted: impl Fn(RawFd) -> bool) -> bool {
        self.with_details(|details| details.descriptors.iter().any(|&fd| is_wanted(fd)))
    }

    /// Notes that the program has made another descriptor of this connection.
    ///
    /// From now on the program may close either descriptor during a call on the other one, and its number may belong to
    /// another file when that call uses the lifeline. So the connection uses a descriptor of its own, if the process
    /// can have one more.
    pub fn add_descriptor(&'static self, fd: RawFd) {
        self.with_details(|details| details.descriptors.push(fd));
        if !sandbox::is_confined()
            && let Some(_both) = self.lock_both()
        {
            let _ = self.retain_lifeline();
        }
    }

    /// Runs `access` on the program's descriptors of this connection.
    pub fn with_descriptors<R>(&self, access: impl FnOnce(&[RawFd]) -> R) -> R {
        self.with_details(|details| access(&details.descriptors))
    }

    /// Notes that the program closes a descriptor, before the kernel closes it. With the last one, this process closes
    /// the connection.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        let left = self.with_details(|details| {
            details.descriptors.retain(|&known| known != fd);
            details.descriptors.first().copied()
        });
        match left {
            Some(other) => self.rename_lifeline(other),
            None => self.close(),
        }
    }

    /// Uses another of the program's descriptors, unless the connection has one of its own. It takes both locks, under
    /// which bytes are moved, so that no thread uses the previous number any more when the program closes it.
    fn rename_lifeline(&'static self, fd: RawFd) {
        if self.lifeline.load(Ordering::Relaxed) > HIDDEN_LIFELINE {
            let _both = self.lock_both();
            self.lifeline.store(fd, Ordering::Relaxed);
        }
        if let Some(slot) = self.slot() {
            slot.set_fd(fd);
        }
    }

    /// Returns whether sends use a lane. Without the send lock the result may be outdated.
    #[inline]
    pub fn sends_by_lane(&self) -> bool {
        self.by_lane.load(Ordering::Relaxed) & BY_LANE_SEND != 0
    }

    /// Returns whether receives use a lane. Without the receive lock the result may be outdated.
    #[inline]
    fn receives_by_lane(&self) -> bool {
        self.by_lane.load(Ordering::Relaxed) & BY_LANE_RECEIVE != 0
    }

    /// Returns the lanes. The caller holds a lock of the connection, or is a waiter.
    #[inline]
    fn lanes(&self) -> Option<&Lanes> {
        // SAFETY: the cell is written only under both locks and without a waiter; the caller holds a lock or is a
        // waiter.
        unsafe { (*self.lanes.get()).as_ref() }
    }

    /// Returns the lanes if both are in ordinary memory. The caller holds a lock of the connection, or is a waiter.
    #[inline(always)] // Replaces the check for lanes, so that short messages do not pay for other kinds of memory.
    fn plain_lanes(&self) -> Option<PlainLanes<'_>> {
        // SAFETY: the flag is written only under both locks and without a waiter, so no store races with this plain
        // load, which the compiler can fold into the comparison.
        if !unsafe { self.is_plain.as_ptr().read() } {
            return None;
        }
        // SAFETY: the cell is written only under both locks and without a waiter; while the flag is set it contains
        // lanes of ordinary memory.
        Some(PlainLanes(unsafe { (*self.lanes.get()).as_ref().unwrap_unchecked() }))
    }

    /// Returns whether there are lanes of ordinary memory. Without a lock the result may be outdated.
    #[inline]
    fn is_plain(&self) -> bool {
        self.is_plain.load(Ordering::Relaxed)
    }

    /// Returns the slot of the stats page, if there is one.
    #[inline]
    fn slot(&self) -> Option<&ConnectionSlot> {
        // SAFETY: the cell is written only before other threads know the object and after its last descriptor was
        // closed.
        unsafe { (*self.slot.get()).as_ref() }
    }

    /// Runs `access` on the details, while no signal handler can run.
    fn with_details<R>(&self, access: impl FnOnce(&mut Details) -> R) -> R {
        // A signal handler that finds the lock held by its own thread would wait forever.
        signals::without_handlers(|| self.with_details_unmasked(access))
    }

    /// Like [`Connection::with_details`], for an object that no signal handler can reach, because it is not known yet
    /// or not any more.
    fn with_details_unmasked<R>(&self, access: impl FnOnce(&mut Details) -> R) -> R {
        self.details.with(access)
    }
}
