//! One end of a connection in a process that relays its bytes, such as a proxy between nodes.
//!
//! A relay owns its socket, belongs to one thread, and never blocks: it needs no descriptor table, no locks and no
//! epoll set. Otherwise it is an end like any other: it meets its peer, and each direction moves to a lane.
//!
//! * `meet`: how it meets its peer; `input`: what the peer sends; `output`: what is sent to the peer; `growth`: memory
//!   that is returned.

mod growth;
mod input;
mod meet;
mod output;

use super::receiver::Receiver;
use super::sender::Sender;
use crate::kernel::Tcp;
use growth::Growth;
use lane::Chunk;
use meet::{Given, State, Windows};
use meeting::bell::{self, Drained};
use meeting::{Descriptor, Endpoint, Key, Role};
use rustix::net::{Shutdown, shutdown, sockopt};
use socket::process::blocking;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

pub use input::RelayInput;
pub use meet::WindowOffer;

/// Events after which the kernel has nothing more to report than the end.
const ENDED: i16 = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
/// The most unread bytes of the peer that an orderly close reads, so that the kernel does not answer them by a reset
/// that overtakes what was sent.
const DRAIN_BYTES_MAX: usize = 1 << 20;

/// The connection must be reset: the peer has reset it, or has violated a protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

/// Whether the stream to the peer has been ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutputEnd {
    Open,
    /// As soon as TCP has what the peer has left in the lane.
    Due,
    Done,
}

/// One end of a connection whose bytes its process relays. Dropped without [`Relay::close`], also by the death of its
/// process, it resets the connection.
pub struct Relay {
    socket: OwnedFd,
    role: Role,
    key: Key,
    state: State,
    /// What does not change of the socket, once it was examined.
    endpoint: Option<Endpoint>,
    /// Occasions on which this end might have proposed to meet its peer.
    occasions: u32,
    bell: Option<Descriptor>,
    windows: Windows,
    /// The peer was to be woken before the ends had met.
    is_ring_due: bool,
    sender: Sender,
    receiver: Receiver,
    /// The kernel may have bytes.
    is_readable: bool,
    /// What the kernel has reported of the end.
    ended: i16,
    /// The stream of the peer has ended.
    has_input_end: bool,
    /// When the end was first seen, while it is not known whether the peer has died.
    end_seen_ns: Option<u64>,
    is_broken: bool,
    output_end: OutputEnd,
    /// Bytes that were received by TCP are between `begin` and `end`. The memory is kept until the relay is parked.
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    /// Memory for bytes of a window on their way to TCP, kept as long.
    outgoing: Vec<u8>,
    chunk: Option<Chunk>,
    /// The words of the peer's sender when the input was last examined.
    seen: [u64; 4],
    has_written: bool,
    has_consumed: bool,
    growth: Growth,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Relay").field("socket", &self.socket).field("role", &self.role).finish_non_exhaustive()
    }
}

impl Relay {
    /// Takes over a connected, non-blocking socket. An accepting end announces itself at once; a connecting end
    /// proposes to meet its peer when [`Relay::meet`] is called.
    pub fn new(socket: OwnedFd, role: Role, key: Key) -> Self {
        let mut relay = Self { state: State::Alone, ..Self::on_tcp(socket, role, key) };
        if role == Role::Accepted {
            relay.meet(false);
        }
        relay
    }

    /// As [`Relay::new`], for a peer that does not load the library.
    pub fn on_tcp(socket: OwnedFd, role: Role, key: Key) -> Self {
        let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let _ = sockopt::set_socket_oobinline(&socket, true);
        Self {
            socket,
            role,
            key,
            state: State::Stays,
            endpoint: None,
            occasions: 0,
            bell: None,
            windows: Windows::Unused,
            is_ring_due: false,
            sender: Sender::default(),
            receiver: Receiver::default(),
            is_readable: true,
            ended: 0,
            has_input_end: false,
            end_seen_ns: None,
            is_broken: false,
            output_end: OutputEnd::Open,
            buffer: Vec::new(),
            begin: 0,
            end: 0,
            outgoing: Vec::new(),
            chunk: None,
            seen: [0; 4],
            has_written: false,
            has_consumed: false,
            growth: Growth::default(),
        }
    }

    /// Continues the end of an earlier process whose peer has been given windows: from its socket and its bell.
    pub fn resume(socket: OwnedFd, bell: OwnedFd, role: Role, key: Key) -> Self {
        let windows = Windows::Given(Given { is_attached: true, ..Given::default() });
        Self { state: State::Met, bell: Some(Descriptor::from(bell)), windows, ..Self::on_tcp(socket, role, key) }
    }

    /// Returns duplicates of what [`Relay::resume`] needs; `None` unless the peer uses windows that it was given, or
    /// without descriptors.
    pub fn duplicate(&mut self) -> Option<(OwnedFd, OwnedFd)> {
        let bell =
            self.bell.as_ref().filter(|_| matches!(&self.windows, Windows::Given(given) if given.is_attached))?;
        Some((self.socket.try_clone().ok()?, bell.as_fd().try_clone_to_owned().ok()?))
    }

    /// Returns how many bytes the peer has sent that this process has taken from the kernel, and how many it has given
    /// to the kernel for the peer. `None` once the kernel has ended the connection.
    pub fn carried(&self) -> Option<(u64, u64)> {
        let counts = meeting::counts::read(self.socket.as_fd(), self.role).ok()?;
        Some((counts.consumed, counts.written))
    }

    /// Returns the socket, to be watched by edges for input, room and its end.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn tcp(&self) -> Tcp {
        Tcp(self.socket.as_raw_fd())
    }

    /// Notes that one of the watched descriptors has reported something: takes rings from the bell, does what they ask
    /// for, and proceeds with the meeting.
    pub fn note_events(&mut self) {
        let tcp = self.tcp();
        let events = blocking::poll_now(tcp.0, libc::POLLIN | libc::POLLRDHUP);
        self.is_readable |= events & libc::POLLIN != 0;
        self.ended |= events & ENDED;
        self.take_rings();
        self.resend();
        let had_met = self.has_met();
        self.meet(events & libc::POLLIN != 0);
        if !had_met && self.has_met() {
            // A ring that came with the peer's answer is not reported again.
            self.take_rings();
        }
    }

    /// Takes the rings from the bell, and notes its end.
    fn take_rings(&mut self) {
        if let Some((drained, has_rung)) = self.bell.as_ref().map(|bell| bell::take_rings(bell.as_fd())) {
            if let Some(given) = self.windows.given() {
                given.is_attached |= has_rung;
                given.has_rung |= has_rung;
            }
            if drained != Drained::Empty {
                self.note_peer_left();
            }
        }
    }

    /// Notes that no process holds the peer's bell any more.
    fn note_peer_left(&mut self) {
        let (tcp, role) = (self.tcp(), self.role);
        self.sender.go_back(tcp, role);
        self.receiver.note_hang_up();
        if let Some(bell) = self.bell.take() {
            bell::hang_up(bell);
        }
        self.state = State::Stays;
        let has_ended = self.has_input_end;
        if let Some(given) = self.windows.given() {
            given.has_left = true;
            given.is_closed |= has_ended && tcp.is_peer_closed(role);
        }
        // The receiver looks once more.
        self.is_readable = true;
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            let _ = bell::ring(bell.as_fd());
        }
    }

    /// Wakes the peer if it sleeps for what was written or consumed since the last call. Returns whether it was woken.
    pub fn wake_peer(&mut self) -> bool {
        let mut wakes = false;
        if std::mem::take(&mut self.has_written) {
            wakes |= self.sender.lane().is_some_and(|lane| lane.take_wake_request());
        }
        if std::mem::take(&mut self.has_consumed) {
            wakes |= self.receiver.lane().is_some_and(|lane| lane.take_wake_request());
        }
        if wakes {
            self.ring();
        }
        wakes
    }

    /// Asks the peer to ring when it sends, or also when it has received. Check for input and room once more
    /// afterwards.
    pub fn park(&mut self, for_room: bool) {
        if let Some(lane) = self.receiver.lane() {
            lane.announce_sleep();
        }
        if for_room && let Some(lane) = self.sender.lane() {
            lane.announce_sleep();
        }
        if self.begin == self.end {
            (self.buffer, self.outgoing) = (Vec::new(), Vec::new());
        }
    }

    /// Ends [`Relay::park`].
    pub fn unpark(&mut self) {
        if let Some(lane) = self.receiver.lane() {
            lane.cancel_sleep();
        }
        if let Some(lane) = self.sender.lane() {
            lane.cancel_sleep();
        }
    }

    /// Tells the peer that no bytes follow.
    pub fn finish(&mut self) {
        if self.output_end == OutputEnd::Open {
            self.sender.stay_on_tcp();
            let (tcp, role) = (self.tcp(), self.role);
            self.sender.go_back(tcp, role);
            self.output_end = OutputEnd::Due;
        }
        self.resend();
    }

    /// Ends the stream if that is due, now that TCP has all that the peer has left in the lane. What TCP has no room
    /// for, the peer reads in the lane, unless it has frozen it.
    fn finish_if_due(&mut self, has_resent: bool) {
        let is_frozen = self.sender.lane().is_some_and(|lane| lane.was_frozen());
        if self.output_end == OutputEnd::Due && (has_resent || !is_frozen) {
            let _ = shutdown(&self.socket, Shutdown::Write);
            self.output_end = OutputEnd::Done;
            self.ring();
        }
    }

    /// Closes the connection in good order.
    pub fn close(mut self) {
        if self.windows.given().is_some() {
            return self.close_given();
        }
        if let Some(lane) = self.sender.lane() {
            lane.note_closed();
        }
        self.finish();
        if self.output_end == OutputEnd::Due {
            // The peer has frozen the lane, and TCP has no room.
            std::thread::spawn(move || {
                let (tcp, role) = (self.tcp(), self.role);
                self.sender.finish(tcp, role);
                self.close_socket();
            });
            return;
        }
        self.close_socket();
    }

    /// Closes the connection of a peer that has been given windows. Its bell hangs up first: a peer that has left bytes
    /// in its lane then writes them to TCP, and they, unread here, draw a reset, as if the other program had not
    /// received them. Another process may hold duplicates of the descriptors, so that this process does what closing
    /// the last one would do.
    fn close_given(mut self) {
        self.hang_up();
        let has_unsent = meeting::counts::unacknowledged(self.socket.as_fd()) != Some(0);
        if has_unsent {
            // The reset would overtake these.
            self.tcp().drop_bytes(DRAIN_BYTES_MAX as u64);
        }
        if rustix::io::ioctl_fionread(&self.socket).is_ok_and(|unread_bytes| unread_bytes > 0) {
            return self.reset();
        }
        let _ = sockopt::set_socket_linger(&self.socket, None);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Resets the connection, also if another process holds duplicates of the descriptors.
    pub fn reset(mut self) {
        if self.windows.given().is_some() {
            let _ = rustix::net::connect_unspec(&self.socket);
            self.hang_up();
        }
    }

    fn close_socket(self) {
        self.tcp().drop_bytes(DRAIN_BYTES_MAX as u64);
        let _ = sockopt::set_socket_linger(&self.socket, None);
        drop(self.socket);
        if let Some(bell) = self.bell {
            bell::hang_up(bell);
        }
    }

    /// Returns whether the peer has reset the connection or violated a protocol.
    pub fn is_broken(&self) -> bool {
        self.is_broken || self.ended & libc::POLLERR != 0
    }

    /// Returns whether both streams have ended, or the peer of this end has closed its socket.
    pub fn is_over(&self) -> bool {
        let is_closed = matches!(&self.windows, Windows::Given(given) if given.is_closed);
        self.has_input_end && (self.output_end == OutputEnd::Done || is_closed)
    }
}
