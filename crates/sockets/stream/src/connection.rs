//! A TCP connection that has met its other end, or tries to.
//!
//! The halves `sender` and `receiver` each own their direction: its path and its lane. `meet` is how the two ends find
//! each other. Each of the three is behind a lock of its own, and has methods that need only itself.
//!
//! * `lanes`: the lanes of the two directions, in memory that one end writes and the other reads.
//! * `leftover`: what a peer that is gone has left in a lane, for several processes.
//! * `send`, `receive`: the calls of the program; `short` is their path for messages of one record.
//! * `wait`: spins, then sleeps until the kernel or the peer reports something.
//! * `relay`: an end in a process that relays bytes, without the program's descriptors.
//! * `reclaim`: returns the memory of lanes that are idle.
//! * `calls`: what a close means for calls of other threads that sleep.

mod calls;
mod counts;
mod lanes;
mod leftover;
mod lifetime;
mod meet;
mod processes;
mod readiness;
mod receive;
mod receiver;
mod reclaim;
mod relay;
mod send;
mod sender;
mod settle;
mod sharing;
mod short;
mod splice;
mod wait;

use crate::epoll::EpollSet;
use crate::guarded::Guarded;
use crate::kernel::Tcp;
use crate::young::{Transfer, Young};
use ::wait::AdaptiveSpin;
use calls::Calls;
use meet::Meeting;
use meeting::Role;
use meeting::proof::Stream;
use receiver::Receiver;
use rustix::io::Errno;
use sender::Sender;
use socket::descriptor::hidden;
use socket::process::lock::Lock;
use socket::process::pool::Pool;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, Ordering};

pub use processes::{after_fork_in_child, after_fork_in_parent, before_exit, before_fork, defers_handlers};
pub use readiness::{Edges, LaneReport, Parked};
pub use receive::Received;
pub use relay::{Broken, Relay, RelayInput, WindowOffer};
pub use send::Sent;
pub use sharing::after_failed_fork;

/// A TCP connection that has met its other end, or tries to.
///
/// Objects live as long as the process and are reused, so that a thread that still uses one while another thread closes
/// it accesses valid memory.
#[derive(Default)]
pub struct Connection {
    sender: Guarded<Sender>,
    receiver: Guarded<Receiver>,
    meeting: Guarded<Meeting>,
    /// Incremented when the object becomes a connection and when that is closed: odd while it is one.
    generation: AtomicU32,
    /// Which end this is: [`Role`] as a number.
    role: AtomicU8,
    is_nonblocking: AtomicBool,
    /// The ends compare bytes that TCP carries, to prove that they are the two ends.
    is_proving: AtomicBool,
    /// The slot of the bell's hidden descriptor; -1 while there is none.
    bell_slot: AtomicI32,
    /// Threads that sleep until the bell rings.
    sleepers: AtomicU32,
    /// The program has received by the lane since it last sent: the peer waits for what it sends next.
    is_answering: AtomicBool,
    /// The kernel has reported an end of the connection or of the peer's stream, which it reports from then on.
    has_ended: AtomicBool,
    /// This end has had the peer's socket answer with a reset, which a receive behind the end of the stream does not
    /// report by itself.
    has_drawn_reset: AtomicBool,
    calls: Calls,
    /// How soon the peer has sent after previous waits.
    spin_history: AdaptiveSpin,
    /// The epoll sets that hold the connection.
    watchers: Guarded<Vec<&'static EpollSet>>,
    /// The descriptors of the program that refer to the connection.
    descriptors: Guarded<Vec<RawFd>>,
}

static POOL: Pool<Connection> = Pool::new();

/// A connection in one of its uses, by a number of the program. A call that finds another generation later works for a
/// descriptor that was closed.
#[derive(Clone, Copy)]
pub struct Use {
    connection: &'static Connection,
    generation: u32,
    fd: RawFd,
}

/// [`Use::generation`] of a call that the kernel makes for the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generation(u32);

/// What the close of a descriptor leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Other descriptors of the connection.
    Descriptors,
    /// Calls of other threads, during which the socket stays open.
    Calls,
    /// Nothing.
    Nothing,
}

impl Connection {
    /// Makes an object the connection of `fd`, which has counted `young` so far.
    pub fn open(fd: RawFd, young: Young, is_nonblocking: bool) -> &'static Self {
        let connection = POOL.take();
        connection.role.store(young.role() as u8, Ordering::Relaxed);
        connection.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
        connection.bell_slot.store(-1, Ordering::Relaxed);
        connection.has_ended.store(false, Ordering::Relaxed);
        connection.is_proving.store(false, Ordering::Relaxed);
        connection.has_drawn_reset.store(false, Ordering::Relaxed);
        connection.spin_history.reset();
        connection.calls.begin_connection();
        if let Some(mut meeting) = connection.meeting.lock() {
            *meeting = Meeting::new(young);
        }
        if let Some(mut descriptors) = connection.descriptors.lock() {
            *descriptors = vec![fd];
        }
        connection.generation.fetch_add(1, Ordering::Release);
        connection
    }

    /// Takes over the calls that were counted in the kernel before there was an object.
    pub fn adopt_calls(&self, young: Young) {
        let (number, sends, receives) = (young.number(), young.calls(Transfer::Sent), young.calls(Transfer::Received));
        if let Some(mut sender) = self.sender.lock() {
            sender.adopt_calls(number, sends);
        }
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.adopt_calls(number, receives);
        }
    }

    /// Notes that one of these calls has returned, and has sent or taken this number of bytes.
    pub fn note_young_call(&'static self, fd: RawFd, number: u32, transfer: Transfer, bytes: usize) {
        let is_known = match transfer {
            Transfer::Sent => self.sender.lock().is_some_and(|mut sender| sender.leave_young(number, bytes)),
            Transfer::Received => self.receiver.lock().is_some_and(|mut receiver| receiver.leave_young(number, bytes)),
        };
        if is_known && bytes > 0 {
            self.keep_unseen(transfer);
            self.count(Tcp(fd), transfer);
        }
    }

    /// Notes that TCP has carried bytes which nobody has kept for a proof.
    fn keep_unseen(&self, transfer: Transfer) {
        if self.is_proving.load(Ordering::Relaxed) {
            let stream = if transfer == Transfer::Sent { Stream::Sent } else { Stream::Received };
            // SAFETY: there are no spans.
            unsafe { self.keep(stream, &[], 0) };
        }
    }

    /// Returns which end of the connection this is.
    #[inline]
    pub fn role(&self) -> Role {
        if self.role.load(Ordering::Relaxed) == Role::Connected as u8 { Role::Connected } else { Role::Accepted }
    }

    /// Returns the connection in the use that it had when a call began.
    #[inline]
    pub fn use_of(&'static self, fd: RawFd, Generation(generation): Generation) -> Use {
        Use { connection: self, generation, fd }
    }

    /// Returns the connection in its present use, for a call on a number of the program.
    #[inline(always)]
    pub fn current_use(&'static self, fd: RawFd) -> Use {
        Use { connection: self, generation: self.generation.load(Ordering::Acquire), fd }
    }

    /// Returns whether a call may block.
    #[inline]
    fn may_block(&self, dont_wait: bool) -> bool {
        !dont_wait && !self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Notes a change of the descriptor's mode.
    pub fn set_nonblocking(&self, is_nonblocking: bool) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    /// Returns the number of the bell, or -1.
    pub fn bell(&self) -> RawFd {
        u16::try_from(self.bell_slot.load(Ordering::Acquire)).map_or(-1, hidden::number_at)
    }

    /// Wakes the peer, which sleeps.
    fn ring(&self) {
        let bell = self.bell();
        if bell >= 0 {
            let _ = meeting::bell::ring(Tcp(bell).borrow());
        }
    }

    /// Adds a descriptor that is a duplicate of another one of the connection.
    pub fn add_descriptor(&self, fd: RawFd) {
        if let Some(mut descriptors) = self.descriptors.lock()
            && !descriptors.contains(&fd)
        {
            descriptors.push(fd);
        }
    }

    /// Notes that `fd` is about to be closed or replaced. The last one ends the connection, or leaves that to calls of
    /// other threads.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        let left = match () {
            () if self.has_several_descriptors() => Left::Descriptors,
            () if self.retain(fd) => Left::Calls,
            () => Left::Nothing,
        };
        self.for_each_watcher(|set| set.forget_descriptor(self, fd, left));
        let is_last = self.descriptors.lock().is_some_and(|mut descriptors| {
            let before = descriptors.len();
            descriptors.retain(|known| *known != fd);
            descriptors.is_empty() && before > 0
        });
        match left {
            Left::Calls => self.close_retained(),
            _ if is_last => self.end(Tcp(fd)),
            _ => {}
        }
    }

    /// Ends the connection, whose last descriptor is about to be closed.
    fn end(&'static self, tcp: Tcp) {
        // In the order of a meeting, which holds its lock when it gives the halves their lanes.
        let Some(mut meeting) = self.meeting.lock() else { return };
        let (Some(mut sender), Some(mut receiver)) = (self.sender.lock(), self.receiver.lock()) else { return };
        // The peer may have begun to send by the lane since the last receive. A violation does not matter any more.
        let _ = receiver.prepare(tcp);
        let _ = receiver.confirm_input(tcp);
        if receiver.lane_in_use().is_some_and(|lane| lane.unread_bytes().is_ok_and(|bytes| bytes > 0)) {
            // As TCP does for bytes that nobody has received.
            let _ = rustix::net::sockopt::set_socket_linger(tcp.borrow(), Some(std::time::Duration::ZERO));
        }
        if let Some(lane) = sender.lane() {
            lane.note_closed();
        }
        // What the peer has left in the lane follows on TCP; what it has not, it reads there.
        sender.finish_stream(tcp, self.role());
        // A call of another thread goes on after the close, and may write or take bytes.
        if !sender.is_busy() && !receiver.is_busy() {
            meeting.release_hold();
        }
        // A connection that outlived its descriptors was closed before.
        if !self.generation.load(Ordering::Relaxed).is_multiple_of(2) {
            self.generation.fetch_add(1, Ordering::Release);
        }
        if let Some(mut watchers) = self.watchers.lock() {
            watchers.clear();
        }
        *sender = Sender::default();
        *receiver = Receiver::default();
        *meeting = Meeting::default();
        self.bell_slot.store(-1, Ordering::Release);
        drop((sender, receiver, meeting));
        POOL.release(self);
    }

    /// Resets the connection, whose peer has violated a protocol; returns the error of the call.
    #[cold]
    fn reset(&self, tcp: Tcp) -> Errno {
        // The peer's lane cannot be used any more, and TCP has only a part of the stream.
        let _ = rustix::net::sockopt::set_socket_linger(tcp.borrow(), Some(std::time::Duration::ZERO));
        let _ = rustix::net::shutdown(tcp.borrow(), rustix::net::Shutdown::Both);
        Errno::CONNRESET
    }
}

impl Use {
    fn generation(self) -> Generation {
        Generation(self.generation)
    }

    /// Returns the connection.
    pub fn connection(self) -> &'static Connection {
        self.connection
    }

    /// Returns the program's number.
    pub fn fd(self) -> RawFd {
        self.fd
    }

    /// Returns access to the sending half, and the socket.
    ///
    /// # Errors
    /// `BADF` if the connection was closed since, `AGAIN` in a handler that has interrupted the holder of the lock.
    #[inline(always)]
    fn sender(self) -> Result<(crate::guarded::Access<'static, Sender>, Tcp), Errno> {
        let sender = self.connection.sender.lock().ok_or(Errno::AGAIN)?;
        Ok((sender, self.tcp()?))
    }

    /// Returns access to the receiving half, and the socket; as [`Use::sender`].
    #[inline(always)]
    fn receiver(self) -> Result<(crate::guarded::Access<'static, Receiver>, Tcp), Errno> {
        let receiver = self.connection.receiver.lock().ok_or(Errno::AGAIN)?;
        Ok((receiver, self.tcp()?))
    }
}

/// Serializes meetings, which are rare.
static MEETINGS: Lock = Lock::new();
