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

mod bad_address;
mod confined;
mod cork;
mod direction_lock;
mod ends;
mod lifeline;
mod observer;
mod peer;
mod readiness;
mod reclaim;
mod sharing;
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

use ends::{LaneReceiver, LaneSender};
use lifeline::LifelineState;
use waiters::{BlockedCalls, Lifetime, Sleepers};

use crate::descriptor::hidden::{self, HiddenFd, Need};
use crate::descriptor::table::{Kind, Tracked};
use crate::options::control::RequestedControl;
use crate::options::{self, OptionRecord};
use crate::process::blocking;
use crate::process::clock::{TICKS_PER_MICROSECOND, note_ticks, ticks};
use crate::process::limit;
use crate::process::lock::Lock;
use crate::process::pool::Pool;
use crate::process::sandbox;
use crate::process::signals;
use crate::process::system;
use crate::process::system::inode_of;
use crate::process::system::is_inheritable;
use crate::process::threads;
use crate::rendezvous;
use crate::rendezvous::address::Tuple;
use crate::rendezvous::local_page::MemoryFds;
use ::wait::AdaptiveSpin;
use rustix::io::Errno;
use segment::{
    BY_LANE_BOTH, BY_LANE_RECEIVE, BY_LANE_SEND, OwnState, PeerStatus, Receiver, SHUT_BOTH_WAYS, Segment, Sender, Side,
};
use stats_page::ConnectionSlot;
use std::cell::UnsafeCell;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Shut down for reading.
pub const SHUTDOWN_READ: u64 = 1;
/// Shut down for writing.
pub const SHUTDOWN_WRITE: u64 = 2;

/// The lanes of a connection and the memory they are in.
struct Lanes {
    /// Under the send lock.
    sender: UnsafeCell<LaneSender>,
    /// Under the receive lock.
    receiver: UnsafeCell<LaneReceiver>,
    /// A second view of the incoming lane, for looking at it without a lock. Written, like the receiver, under both
    /// locks, and while the incoming lane is not in use.
    observer: UnsafeCell<LaneReceiver>,
    segment: Segment,
    /// Where the incoming lane lies, if not in `segment`: both ends have got lanes at the same time. Written under both
    /// locks.
    inbound: UnsafeCell<Option<Segment>>,
}

impl Lanes {
    /// The view of the incoming lane that needs no lock.
    #[inline(always)]
    fn observer(&self) -> &LaneReceiver {
        // SAFETY: written only while the incoming lane is not in use, and so nobody looks at it.
        unsafe { &*self.observer.get() }
    }

    /// Tells the peer, wherever it looks. Under a lock.
    fn publish_status(&self, word: PeerStatus, value: u64) {
        self.segment.publish(word, value);
        // SAFETY: under a lock, and written under both.
        if let Some(inbound) = unsafe { &*self.inbound.get() } {
            inbound.publish(word, value);
        }
    }

    /// Notes in [`OwnState::ByLane`] what the peer is to find there: [`IS_CONFINED`], [`RAISES_SIGNAL`]. Under both
    /// locks.
    fn note_by_lane(&self, note: u64) {
        self.segment.note_by_lane(note);
        // SAFETY: under both locks.
        if let Some(inbound) = unsafe { &*self.inbound.get() } {
            inbound.note_by_lane(note);
        }
    }

    fn are_plain(&self) -> bool {
        // SAFETY: nobody else has the lanes yet; and which kind an end is of never changes.
        unsafe {
            matches!((&*self.sender.get(), &*self.receiver.get()), (LaneSender::Plain(_), LaneReceiver::Plain(_)))
        }
    }
}

/// Lanes both whose ends are plain ones.
#[derive(Clone, Copy)]
struct PlainLanes<'a>(&'a Lanes);

impl PlainLanes<'_> {
    /// # Safety
    /// Under the send lock, and only one at a time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // The lock is what makes it unique.
    unsafe fn sender(&self) -> &mut Sender {
        // SAFETY: the caller's; and there are no others of this type.
        match unsafe { &mut *self.0.sender.get() } {
            LaneSender::Plain(sender) => sender,
            // SAFETY: as above.
            LaneSender::Timed(_) | LaneSender::LocalPage(_) => unsafe { std::hint::unreachable_unchecked() },
        }
    }

    /// # Safety
    /// Under the receive lock, and only one at a time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // As above.
    unsafe fn receiver(&self) -> &mut Receiver {
        // SAFETY: the caller's; and there are no others of this type.
        match unsafe { &mut *self.0.receiver.get() } {
            LaneReceiver::Plain(receiver) => receiver,
            // SAFETY: as above.
            LaneReceiver::Timed(_) | LaneReceiver::LocalPage(_) => unsafe { std::hint::unreachable_unchecked() },
        }
    }
}

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
    /// Options as in [`options::SHARED`], a bit each, before there are lanes: then [`OwnState::Options`] says them to
    /// all processes that hold the end.
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

/// How long a close gives a call of another thread to fall asleep, which takes it 50 microseconds of its own time.
const CALL_SETTLE_US_MAX: u64 = 5_000;
/// Of hidden descriptors the number changes; their place does not.
const HIDDEN_LIFELINE: RawFd = -2;

/// What the options of a socket ask of its connection.
struct RequestedOptions {
    send_timeout_ns: u64,
    receive_timeout_ns: u64,
    low_water_bytes: u32,
    control: RequestedControl,
    send_bytes: usize,
    receive_bytes: usize,
}

impl Details {
    fn requested_options(&mut self) -> RequestedOptions {
        self.resets_on_close = self.options.resets_on_close();
        RequestedOptions {
            send_timeout_ns: self.options.send_timeout_ns(),
            receive_timeout_ns: self.options.receive_timeout_ns(),
            low_water_bytes: self.options.low_water_bytes(),
            control: self.options.requested_control(),
            send_bytes: self.options.send_capacity_bytes(),
            receive_bytes: self.options.receive_capacity_bytes(),
        }
    }
}

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

    /// What receives are to bring beside the bytes, if anything.
    #[inline]
    pub fn requested_control(&self) -> Option<RequestedControl> {
        match self.requested_control.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(RequestedControl::from_bits(bits)),
        }
    }

    /// Notes the descriptor's blocking mode; the kernel's own flag on the lifeline is the caller's affair.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// `SO_SNDTIMEO` in nanoseconds; 0 waits for ever.
    pub fn set_send_timeout_ns(&self, timeout_ns: u64) {
        self.send_timeout_ns.store(timeout_ns, Ordering::Relaxed);
    }

    /// `SO_RCVTIMEO` in nanoseconds; 0 waits for ever.
    pub fn set_receive_timeout_ns(&self, timeout_ns: u64) {
        self.receive_timeout_ns.store(timeout_ns, Ordering::Relaxed);
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

    /// Lets the options that the program had set on the TCP socket take effect here.
    pub fn apply_recorded_options(&'static self) {
        let asked = self.with_details(Details::requested_options);
        self.apply(&asked);
    }

    /// As [`Connection::apply_recorded_options`] and [`Connection::report_connect_later`], for a connection that no
    /// descriptor leads to yet: no signal has to be kept off.
    pub fn begin(&'static self, reports_connect: bool) {
        let (asked, shared) = self.with_details_unmasked(|details| {
            details.reports_connect = reports_connect;
            (details.requested_options(), details.options.shared_bits())
        });
        self.apply(&asked);
        if shared != 0 {
            self.set_shared_options(shared, shared);
        }
    }

    fn apply(&'static self, asked: &RequestedOptions) {
        self.low_water_bytes.store(asked.low_water_bytes, Ordering::Relaxed);
        self.requested_control.store(asked.control.to_bits(), Ordering::Relaxed);
        self.set_send_timeout_ns(asked.send_timeout_ns);
        self.set_receive_timeout_ns(asked.receive_timeout_ns);
        if let Some(_both) = self.lock_both() {
            self.limit_lifeline(asked.send_bytes);
            self.offer_for_capacity(asked.receive_bytes);
            self.set_lane_capacities(asked.send_bytes, asked.receive_bytes);
        }
    }

    /// Options as in [`options::SHARED`], a bit each. Under a lock, or as a waiter.
    fn shared_options(&self) -> u64 {
        let in_memory = |lanes: &Lanes| lanes.segment.load(OwnState::Options);
        self.lanes().map_or_else(|| self.shared_options.load(Ordering::Relaxed), in_memory)
    }

    /// Whether one of [`options::SHARED`] is on, whichever process that holds the end has set it.
    pub fn has_shared_option(&'static self, bit: u64) -> bool {
        let _guard = self.lock_direction(&self.send_lock);
        self.shared_options() & bit != 0
    }

    /// Sets those of [`options::SHARED`] that `mask` names. A cork that is pulled shows what is held back.
    pub fn set_shared_options(&'static self, mask: u64, bits: u64) {
        {
            let _guard = self.lock_direction(&self.send_lock);
            let others = self.shared_options.load(Ordering::Relaxed) & !mask;
            self.shared_options.store(others | bits & mask, Ordering::Relaxed);
            if let Some(lanes) = self.lanes() {
                lanes.segment.set_bits(OwnState::Options, mask, bits);
                if mask & options::CORKED != 0 {
                    // SAFETY: under the send lock.
                    unsafe { (*lanes.sender.get()).ask_for_room_next() };
                }
            }
        }
        if mask & options::URGENT_INLINE != 0 {
            let is_inline = bits & options::URGENT_INLINE != 0;
            let _ = rustix::net::sockopt::set_socket_oobinline(self.borrow_lifeline(), is_inline);
        }
        if mask & !bits & options::CORKED != 0 {
            self.push();
        }
    }

    /// Of an end that came without memory: takes over what of [`options::SHARED`] its lifeline keeps, which is what
    /// decides about bytes.
    pub fn take_options_of_lifeline(&'static self) {
        if rustix::net::sockopt::socket_oobinline(self.borrow_lifeline()) == Ok(true) {
            self.set_shared_options(options::URGENT_INLINE, options::URGENT_INLINE);
        }
    }

    /// Before another program comes to hold the end by `exec`: what is set of [`options::SHARED`] goes along in the
    /// memory of lanes, which the end gets if it can. `is_left` tells descriptors that the program gets.
    pub fn keep_options_through_exec(&'static self, is_left: impl Fn(RawFd) -> bool) {
        let is_needed = {
            let _guard = self.lock_direction(&self.send_lock);
            self.lanes().is_none() && self.shared_options() != 0
        };
        if is_needed && self.has_descriptor(is_left) {
            self.settle_lifeline();
        }
    }

    /// Lets both lanes hold so much. Under both locks.
    fn set_lane_capacities(&self, send_bytes: usize, receive_bytes: usize) {
        let Some(lanes) = self.lanes() else { return };
        // SAFETY: under the send lock.
        unsafe { (*lanes.sender.get()).set_capacity(send_bytes) };
        // SAFETY: under the receive lock.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        receiver.set_capacity(receive_bytes);
        if receiver.take_wake_request() {
            self.ring();
        }
    }

    /// The numbers of its memory's descriptors in this process, for handing the connection to another; none when one of
    /// them had to make room for the program's own.
    pub fn memory(&'static self) -> Vec<RawFd> {
        let _send = self.lock_direction(&self.send_lock);
        self.record_lifeline_inode();
        let numbers = |memory: &MemoryFds<HiddenFd>| memory.iter().map(HiddenFd::raw).collect::<Vec<_>>();
        let numbers = self.with_details(|details| details.memory.as_ref().map(numbers)).unwrap_or_default();
        let are_all = self.has_memory_of_incoming_lane() && numbers.iter().all(|number| *number >= 0);
        if are_all { numbers } else { Vec::new() }
    }

    /// Whether there is a descriptor of the memory that the incoming lane lies in, where that is another one. Under a
    /// lock.
    fn has_memory_of_incoming_lane(&self) -> bool {
        // SAFETY: written under both locks, of which this thread holds one.
        let is_elsewhere = self.lanes().is_some_and(|lanes| unsafe { &*lanes.inbound.get() }.is_some());
        let is_at_hand = |details: &mut Details| details.memory.as_ref().is_some_and(|memory| memory.inbound.is_some());
        !is_elsewhere || self.with_details(is_at_hand)
    }

    /// Says whether the connection is to live through `exec`, as the program's descriptor does.
    pub fn set_inheritable(&'static self, inheritable: bool) {
        let _send = self.lock_direction(&self.send_lock);
        self.set_inheritable_locked(inheritable);
    }

    /// Under a lock.
    fn set_inheritable_locked(&self, inheritable: bool) {
        if inheritable {
            self.record_lifeline_inode();
            // A lifeline alone does not say that it was left for the library.
            let _ = hidden::ensure_marker();
        }
        let inheritable = inheritable && self.has_memory_of_incoming_lane();
        self.with_details(|details| details.memory.iter().for_each(|memory| memory.set_inheritable(inheritable)));
    }

    /// Writes into the memory which lifeline belongs to it: whoever gets both from this process finds out by that.
    /// Under a lock.
    fn record_lifeline_inode(&self) {
        let Some(lanes) = self.lanes() else { return };
        // SAFETY: written under both locks, of which this thread holds one.
        let inbound = unsafe { &*lanes.inbound.get() };
        for segment in std::iter::once(&lanes.segment).chain(inbound) {
            if segment.lifeline_inode() == 0 {
                segment.store(OwnState::LifelineInode, inode_of(self.lifeline()).unwrap_or(0));
            }
        }
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

    /// Shuts down one or both directions: [`SHUTDOWN_READ`], [`SHUTDOWN_WRITE`].
    ///
    /// # Errors
    /// `NOTCONN` if the connection is gone, or both endpoints have ended their streams.
    pub fn shutdown(&'static self, directions: u64) -> Result<(), Errno> {
        self.attach_if_pending()?;
        if self.is_on_lifeline() && blocking::poll_now(self.lifeline(), 0) & libc::POLLERR != 0 {
            // A reset, perhaps, that nobody has heard of.
            self.process_messages_for_all();
        }
        if self.is_known_to_be_closed() {
            return Err(Errno::NOTCONN);
        }
        let before = {
            let Some(_send) = self.lock_direction(&self.send_lock) else {
                self.defer_to_holder(directions as u32);
                return Ok(());
            };
            let Some(lanes) = self.lanes() else { return self.shutdown_lifeline(directions) };
            if self.peer_state(lanes) == PeerState::Reset {
                return Err(Errno::NOTCONN);
            }
            let _shared = self.lock_across_processes_blocking(lanes, OwnState::SendLock)?;
            let before = lanes.segment.load(OwnState::Shutdown);
            lanes.segment.store(OwnState::Shutdown, before | directions);
            if directions & SHUTDOWN_WRITE != 0 && !self.sends_by_lane() {
                self.shutdown_lifeline(SHUTDOWN_WRITE)?;
            } else if directions & SHUTDOWN_WRITE != 0 {
                // SAFETY: under the send lock.
                let sender = unsafe { &mut *lanes.sender.get() };
                sender.finish();
                if sender.take_wake_request() {
                    let _ = system::ring(self.lifeline());
                }
            }
            if (before | directions) == SHUTDOWN_READ | SHUTDOWN_WRITE && self.has_begun_on_lifeline() {
                lanes.publish_status(PeerStatus::Closed, SHUT_BOTH_WAYS);
            }
            before
        };
        if directions & !before & SHUTDOWN_READ != 0 {
            self.wake_by_shutdown();
        }
        Ok(())
    }

    /// Attaches a proxy's connection whose handshake came late. `Ok(false)`: it has not come yet.
    fn attach_if_pending(&'static self) -> Result<bool, Errno> {
        if !self.awaits_handshake.load(Ordering::Relaxed) {
            return if self.is_open() { Ok(true) } else { Err(Errno::BADF) };
        }
        let both = self.lock_both();
        if !self.is_open() {
            return Err(Errno::BADF);
        }
        if self.lanes().is_some() {
            return Ok(true);
        }
        if both.is_none() {
            return Ok(false);
        }
        if self.is_orphan.load(Ordering::Relaxed) {
            return Err(Errno::CONNRESET);
        }
        // SAFETY: the descriptor is the program's, and the call it is in uses it.
        let lifeline = unsafe { BorrowedFd::borrow_raw(self.lifeline()) };
        match limit::with_free_descriptor(lifeline, || rendezvous::receive_handshake(lifeline)) {
            Ok(Some((segment, memory))) => {
                let memory = memory.and_then(|memory| memory.hide().ok());
                self.attach_in_use(segment, memory, BY_LANE_BOTH);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(_) => Err(Errno::CONNRESET),
        }
    }

    /// Gives lanes to a connection that the program has already. Under both locks.
    fn attach_in_use(&self, segment: Segment, memory: Option<MemoryFds<HiddenFd>>, by_lane: u64) {
        // A signal handler looks without the lock that it has interrupted.
        signals::without_handlers(|| self.attach_locked(segment, memory, by_lane));
        let asked = self.with_details(Details::requested_options);
        self.set_lane_capacities(asked.send_bytes, asked.receive_bytes);
        self.set_inheritable_locked(self.has_descriptor(is_inheritable));
        self.announce_earlier_sleepers();
        self.publish_signal_owner();
    }

    /// Those who parked before there were lanes could not ask the peer to ring. Under both locks.
    fn announce_earlier_sleepers(&self) {
        if self.sleepers.is_any()
            && let Some(lanes) = self.lanes()
        {
            // SAFETY: under the receive lock.
            unsafe { (*lanes.receiver.get()).announce_sleep() };
            // SAFETY: under the send lock.
            unsafe { (*lanes.sender.get()).announce_sleep() };
        }
    }

    /// Under both locks, out of reach of signal handlers. `by_lane`: directions that go by the lanes at once, beside
    /// those that a process which held this end before has noted.
    fn attach_locked(&self, segment: Segment, memory: Option<MemoryFds<HiddenFd>>, by_lane: u64) {
        let lanes = Lanes {
            sender: UnsafeCell::new(LaneSender::of(&segment)),
            receiver: UnsafeCell::new(LaneReceiver::of(&segment)),
            observer: UnsafeCell::new(LaneReceiver::of(&segment)),
            segment,
            inbound: UnsafeCell::new(None),
        };
        // Stamps of a process that has never looked at the clock would be of a time that nobody can compare with.
        note_ticks(ticks());
        self.is_user.store(sharing::register_holder(&lanes.segment), Ordering::Relaxed);
        limit::add_mapping();
        if lanes.segment.side() == Side::Connector
            && let Some(tuple) = self.with_details_unmasked(|details| details.tuple)
        {
            lifeline::lane_peers::note(tuple.peer);
        }
        let noted = if lanes.segment.is_adopted() {
            self.shared_options.store(lanes.segment.load(OwnState::Options), Ordering::Relaxed);
            lanes.segment.load(OwnState::ByLane)
        } else {
            lanes.segment.store(OwnState::Options, self.shared_options.load(Ordering::Relaxed));
            0
        };
        // SAFETY: under both locks, and nobody waits on lanes that are not there.
        unsafe { *self.lanes.get() = Some(lanes) };
        self.awaits_handshake.store(false, Ordering::Relaxed);
        self.use_lanes_for(noted | by_lane);
        self.with_details_unmasked(|details| details.memory = memory);
    }

    /// From now on so many directions go by the lanes. Under the locks of those directions.
    fn use_lanes_for(&self, directions: u64) {
        let Some(lanes) = self.lanes() else { return };
        let directions = directions & BY_LANE_BOTH;
        let by_lane = self.by_lane.fetch_or(directions, Ordering::Relaxed) | directions;
        lanes.note_by_lane(directions);
        self.is_plain.store(by_lane == BY_LANE_BOTH && lanes.are_plain(), Ordering::Relaxed);
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

    /// The last descriptor of this process is about to go.
    fn close(&'static self) {
        if !self.defer_close_to_calls() {
            self.close_now();
        }
    }

    fn close_now(&'static self) {
        self.receive_last_handshake();
        self.process_final_messages();
        // The object may be another connection when this is done.
        let kept = self.with_details_unmasked(|details| details.retained_lifeline.take());
        self.finish_close();
        drop(kept);
    }

    /// Leaves a close to the last of the other threads' calls that sleep here, as the kernel does: they go on as if
    /// nothing had happened, with a descriptor that the program does not see. Without one, they end.
    fn defer_close_to_calls(&'static self) -> bool {
        let own = u32::from(wait::BlockingCall::is_of_this_thread(self));
        if threads::is_single() || sandbox::is_confined() || !self.has_sleeping_calls(own) {
            return false;
        }
        let Some(_both) = self.lock_both() else { return false };
        if self.retain_lifeline().is_err() {
            return false;
        }
        if own > 0 {
            self.end_call();
        }
        self.calls.defer_close()
    }

    /// Has the connection use a descriptor of the lifeline that the program does not see, before it loses those that it
    /// sees. Under both locks.
    fn retain_lifeline(&self) -> Result<(), Errno> {
        // SAFETY: the program's descriptor, in a call about it.
        let lifeline = unsafe { BorrowedFd::borrow_raw(self.lifeline()) };
        let kept = HiddenFd::hide(rustix::io::fcntl_dupfd_cloexec(lifeline, 0)?, Need::Required)?;
        self.lifeline.store(HIDDEN_LIFELINE - RawFd::from(kept.slot()), Ordering::Relaxed);
        self.with_details(|details| details.retained_lifeline = Some(kept));
        Ok(())
    }

    /// Ends the connection as `connect` with `AF_UNSPEC` does: the peer is reset, as are calls that sleep here.
    /// `replace` puts another socket in the place of its descriptors.
    ///
    /// # Errors
    /// `MFILE` where there is no descriptor left, `AGAIN` in a signal handler that has interrupted a call on the
    /// connection, and those of `replace`: then nothing has changed.
    pub fn disconnect(&'static self, replace: impl FnOnce(&[RawFd]) -> Result<(), Errno>) -> Result<(), Errno> {
        self.attach_if_pending()?;
        {
            let _both = self.lock_both().ok_or(Errno::AGAIN)?;
            self.retain_lifeline()?;
        }
        let descriptors = self.with_details(|details| details.descriptors.clone());
        if let Err(error) = replace(&descriptors) {
            let _both = self.lock_both();
            self.lifeline.store(descriptors.first().copied().unwrap_or(-1), Ordering::Relaxed);
            drop(self.with_details(|details| details.retained_lifeline.take()));
            return Err(error);
        }
        self.with_details(|details| {
            details.descriptors.clear();
            details.resets_on_close = true;
        });
        self.process_final_messages();
        self.reset_both();
        let own = u32::from(wait::BlockingCall::is_of_this_thread(self));
        if self.calls.count() <= own || !self.calls.defer_close() {
            self.close_now();
        }
        Ok(())
    }

    /// Resets both ends.
    fn reset_both(&'static self) {
        {
            let _both = self.lock_both();
            match self.lanes() {
                Some(lanes) => self.reset_lanes(lanes),
                None => self.lifeline_state.note_reset(),
            }
        }
        // Wakes those who sleep, at both ends.
        // SAFETY: the hidden descriptor, which is there until the connection is closed.
        let lifeline = unsafe { BorrowedFd::borrow_raw(self.lifeline()) };
        let _ = rustix::net::shutdown(lifeline, rustix::net::Shutdown::Both);
    }

    /// Whether there are more than `own` calls that sleep. Who looks at memory for a moment is about to, and is let.
    fn has_sleeping_calls(&self, own: u32) -> bool {
        let begun_ticks = ticks();
        let is_time_up = || ticks().wrapping_sub(begun_ticks) > CALL_SETTLE_US_MAX * TICKS_PER_MICROSECOND;
        while self.lifetime.has_waiters() && self.calls.count() <= own && !is_time_up() {
            rustix::thread::sched_yield();
        }
        self.calls.count() > own
    }

    /// A call that has slept ends.
    fn end_call(&'static self) {
        if self.calls.leave() {
            self.close_now();
        }
    }

    /// What is left of a close once the kernel may have closed the descriptor.
    fn finish_close(&'static self) {
        {
            let Some(_both) = self.lock_both() else { return self.defer_to_holder(direction_lock::DEFERRED_CLOSE) };
            if !self.lifetime.close() {
                return;
            }
            if let Some(lanes) = self.lanes() {
                self.announce_close(lanes);
            }
            self.lifeline_state.clear();
            // SAFETY: under both locks; the ledger's slot closes with it.
            unsafe { *self.slot.get() = None };
        }
        self.recycle_if_unused();
    }

    /// Before a close: a handshake that was left unread would reset the client. One that comes later is refused, so
    /// that the client finds the end of the stream instead.
    fn receive_last_handshake(&'static self) {
        let is_pending = {
            let _receive = self.lock_direction(&self.receive_lock);
            self.awaits_handshake.load(Ordering::Relaxed) && !self.is_orphan.load(Ordering::Relaxed)
        };
        if is_pending {
            // SAFETY: the program's descriptor, which it is closing.
            let lifeline = unsafe { BorrowedFd::borrow_raw(self.lifeline()) };
            let _ = rustix::net::shutdown(lifeline, rustix::net::Shutdown::Read);
            let _ = self.attach_if_pending();
        }
    }

    /// Says good-bye. Where no child can hold the connection the peer learns of it from memory, at once and exactly;
    /// where one might, only the kernel knows when the last descriptor goes, and the lifeline tells.
    fn announce_close(&self, lanes: &Lanes) {
        self.remove_holder_entry(&lanes.segment);
        let others = lanes.segment.add(OwnState::Holders, u64::MAX).saturating_sub(1);
        let (resets, is_last) = self
            .with_details_unmasked(|details| (details.resets_on_close, others == 0 && !self.may_have_other_holders()));
        if !is_last {
            return;
        }
        let has_unread = if self.receives_by_lane() {
            lanes.observer().unread_bytes().is_ok_and(|bytes| bytes > 0)
        } else {
            // Under a filter nobody can ask, and the kernel tells the peer.
            !crate::process::sandbox::is_confined() && self.has_program_bytes_in_lifeline()
        };
        // In windows, an end may be reset whose peer is there and was not: it is to see no good order either.
        let is_reset = self.peer_state(lanes) == PeerState::Reset;
        // SAFETY: under the send lock.
        let finish = || unsafe { (*lanes.sender.get()).finish() };
        if resets || has_unread || is_reset {
            lanes.publish_status(PeerStatus::Reset, 1);
            // First: who finds the end of the stream before this takes it for one in good order.
            lanes.publish_status(PeerStatus::Closed, 1);
            finish();
        } else {
            finish();
            lanes.publish_status(PeerStatus::Closed, 1);
        }
    }

    /// Gives the memory back once the connection is closed and no thread looks at it any more.
    fn recycle_if_unused(&'static self) {
        let dropped = {
            let Some(_both) = self.lock_both() else { return self.defer_to_holder(direction_lock::DEFERRED_RECYCLE) };
            if !self.lifetime.try_reclaim() {
                return;
            }
            let Details { memory, tuple, .. } = self.with_details_unmasked(std::mem::take);
            self.forget_growth();
            self.is_plain.store(false, Ordering::Relaxed);
            // SAFETY: under both locks, and there is no waiter.
            let lanes = unsafe { (*self.lanes.get()).take() };
            if let Some(lanes) = &lanes {
                limit::remove_mapping();
                let leads_to = tuple.filter(|_| lanes.segment.side() == Side::Connector);
                leads_to.into_iter().for_each(|tuple| lifeline::lane_peers::forget(tuple.peer));
            }
            (lanes, memory)
        };
        drop(dropped);
        POOL.release(self);
    }
}
