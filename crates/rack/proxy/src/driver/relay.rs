//! Connections that outlive their link: over kernel TCP, to the proxy that has their other ends.
//!
//! ```text
//!   link lost ──► Waiting or Calling ──both proxies have recognised each other──► Running ──last one over──► gone
//!                        │                                                            │
//!                        └── no route, a stranger, too late ──► Alone ◄── TCP breaks ─┘   resets, and hands over
//! ```
//!
//! As long as a link is up, the two proxies tell each other through its windows where they listen and by which token
//! they will know each other ([`Rescue`]). When it is lost, the node with the higher slot connects to the one with the
//! lower; each engine has a TCP connection of its own, with the frames that it had in its partitions. What goes by it
//! is neither encrypted nor signed: like any TCP of a program that asks for neither. Who is to be called knocks at the
//! other one's door meanwhile, without a word: where that cannot be reached, or is shut, nobody will come from there.
//!
//! * `handshake`: how they recognise each other.
//! * `stream`: frames in a byte stream.
//! * `pump`: between an engine and a socket.

mod handshake;
mod pump;
mod stream;

use super::direct::ProgramEnd;
use super::owner::{self, Token as Watched};
use crate::{ConnectionKey, DetachedEngine, Engine, EngineCounters, EngineEvent, LinkFault};
use control::proxy::PeerReport;
use fabric::{Inbound, Outbound};
use handshake::{Deadline, HANDSHAKE_BYTES, Handshake};
pub(super) use handshake::{Token, Which};
use pump::{HeapInbound, HeapOutbound, Pump};
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use stream::StreamError;
use thiserror::Error;
use volmem::sync::Ordering;

/// How long after a lost link connections may take to be resumed. Then they are reset.
const RESUME_NS_MAX: u64 = 5_000_000_000;
/// How long somebody who connects may take to say who it is, and how many may.
const HANDSHAKE_NS_MAX: u64 = 2_000_000_000;
const STRANGERS_MAX: usize = 64;
/// A peer that is silent so long is gone.
const SILENCE_MAX: Duration = Duration::from_secs(10);
const PROBES_MAX: u32 = 5;

/// Why connections of a lost link were not resumed, or not for long.
#[derive(Debug, Error)]
enum RelayError {
    #[error("no TCP connection to {0}: {1}")]
    Route(SocketAddr, Errno),
    #[error("this node's proxy listens nowhere; see the beginning of this log")]
    Deaf,
    #[error("its proxy listens nowhere; see that node's proxy.log")]
    PeerDeaf,
    #[error("the TCP connection ended")]
    Ended,
    #[error("the TCP connection failed: {0}")]
    Failed(#[from] Errno),
    #[error("a stranger answered")]
    Stranger,
    #[error("the other node did not come within {} s", RESUME_NS_MAX / 1_000_000_000)]
    Late,
    #[error("the other node sent nonsense: {0}")]
    Stream(#[from] StreamError),
    #[error("the other node broke the protocol: {0}")]
    LinkFault(#[from] LinkFault),
}

/// What an end of a link tells the other one for the time after it: words in the line with which its engine greets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rescue {
    /// Where its proxy listens; 0 where it does not.
    pub(super) port: u16,
    pub(super) token: Token,
}

impl Rescue {
    /// Where the words lie, behind the secret.
    const OFFSETS: [usize; 3] = [8, 16, 24];

    /// Stored before the secret, with which the other end finds it.
    pub(super) fn store<O: Outbound>(&self, window: &O) {
        let words = [u64::from(self.port), self.token.0[0], self.token.0[1]];
        for (offset, word) in Self::OFFSETS.into_iter().zip(words) {
            window.store_u64(offset, word, Ordering::Relaxed);
        }
        window.fence();
    }

    /// As the other end wrote it: hostile. `None` where it has nothing to say.
    pub(super) fn load<I: Inbound>(window: &I) -> Option<Self> {
        let [port, first, second] = Self::OFFSETS.map(|offset| window.load_u64(offset, Ordering::Relaxed));
        let port = u16::try_from(port).ok()?;
        (first != 0).then_some(Self { port, token: Token([first, second]) })
    }
}

/// An engine that has lost its link, and what both ends know for that case.
pub(super) struct Lost {
    pub(super) which: Which,
    pub(super) own: Rescue,
    pub(super) theirs: Rescue,
    pub(super) detached: DetachedEngine<ProgramEnd>,
}

type HeapEngine = Box<Engine<HeapInbound, HeapOutbound, ProgramEnd>>;

enum State {
    /// Until the peer connects.
    Waiting(DetachedEngine<ProgramEnd>),
    /// Until the peer answers.
    Calling { detached: DetachedEngine<ProgramEnd>, caller: Caller, address: SocketAddr, has_spoken: bool },
    /// Over TCP.
    Running(HeapEngine, Pump),
    /// Without the peer: what came is handed to programs.
    Alone(HeapEngine),
}

/// An engine after its link.
struct Relay {
    which: Which,
    own: Rescue,
    theirs: Rescue,
    state: State,
    /// Of one that waits: a call that only asks whether the peer can be reached.
    knock: Option<Knock>,
    deadline: Deadline,
    is_overdue: bool,
}

struct Knock {
    socket: OwnedFd,
    address: SocketAddr,
}

/// A TCP connection on which nobody is recognised yet.
struct Caller {
    socket: OwnedFd,
    heard: Vec<u8>,
}

/// Somebody who has connected, and until when it has time.
struct Stranger {
    caller: Caller,
    deadline: Deadline,
    /// It is recognised, and this end still has to lose the link.
    which: Option<Which>,
}

/// What relays of a thread have come to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RelayReport {
    /// Connections now.
    pub(super) connections_open: u64,
    /// Connections that moved to TCP.
    pub(super) connections_total: u64,
    /// Connections that were reset, for want of TCP or because it broke.
    pub(super) resets: u64,
    /// What went by TCP.
    pub(super) counters: EngineCounters,
}

/// The relays of a thread, by the number that their engine had.
pub(super) struct Relays {
    own_slot: u8,
    listener: Option<OwnedFd>,
    port: u16,
    relays: BTreeMap<usize, Relay>,
    strangers: HashMap<u32, Stranger>,
    past: HashMap<u8, RelayReport>,
}

impl Relays {
    /// Of a node that listens at an address for the proxies of others; or that does not.
    pub(super) fn new(own_slot: u8, address: Option<SocketAddr>) -> Self {
        let listener = address.and_then(|address| {
            let failed = |errno: Errno| {
                let remedy = match errno {
                    Errno::ADDRINUSE => "choose another failover_port",
                    _ => "give the node an address of this machine",
                };
                eprintln!("crosslane proxy: no failover by {address}: {errno}; {remedy}");
            };
            listen(address).map_err(failed).ok()
        });
        let port = listener.as_ref().map_or(0, |(_, port)| *port);
        let listener = listener.map(|(socket, _)| socket);
        Self { own_slot, listener, port, relays: BTreeMap::new(), strangers: HashMap::new(), past: HashMap::new() }
    }

    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(AsFd::as_fd)
    }

    /// What an engine tells the other end of its link.
    pub(super) fn new_rescue(&self) -> Option<Rescue> {
        Token::new().map(|token| Rescue { port: self.port, token })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.relays.is_empty()
    }

    pub(super) fn has(&self, index: usize) -> bool {
        self.relays.contains_key(&index)
    }

    /// The number of the one that has been there longest.
    pub(super) fn oldest(&self) -> Option<usize> {
        self.relays.iter().min_by_key(|(_, relay)| relay.deadline).map(|(index, _)| *index)
    }

    /// Resets the connections of a relay, which is no more.
    pub(super) fn drop_relay(&mut self, index: usize) {
        if let Some(relay) = self.relays.remove(&index) {
            self.past.entry(relay.which.peer).or_default().add(&relay.report());
        }
    }

    pub(super) fn clear(&mut self) {
        self.relays.clear();
        self.strangers.clear();
    }

    /// An engine has lost its link: its connections are to go on by TCP, to a peer at this address.
    pub(super) fn begin(&mut self, index: usize, lost: Lost, peer: IpAddr, epoll: &OwnedFd) {
        let Lost { which, own, theirs, detached } = lost;
        self.past.entry(which.peer).or_default().connections_total += detached.connections() as u64;
        let deadline = Deadline::after(RESUME_NS_MAX);
        let relay = |state| Relay { which, own, theirs, state, knock: None, deadline, is_overdue: false };
        let calls = self.own_slot > which.peer;
        if !calls || theirs.port == 0 {
            self.relays.insert(index, relay(State::Waiting(detached)));
            return match self.port {
                _ if calls => self.leave_alone(index, &RelayError::PeerDeaf),
                // Nobody can come, so nobody is waited for.
                0 => self.leave_alone(index, &RelayError::Deaf),
                _ => {
                    self.receive_early(index, epoll);
                    self.knock(index, SocketAddr::new(peer, theirs.port), epoll);
                }
            };
        }
        let address = SocketAddr::new(peer, theirs.port);
        match call(address, index, epoll) {
            Ok(socket) => {
                let caller = Caller::new(socket);
                self.relays.insert(index, relay(State::Calling { detached, caller, address, has_spoken: false }));
            }
            Err(errno) => {
                self.relays.insert(index, relay(State::Waiting(detached)));
                self.leave_alone(index, &RelayError::Route(address, errno));
            }
        }
    }

    /// Finds out whether the peer, which is waited for, can come at all.
    fn knock(&mut self, index: usize, address: SocketAddr, epoll: &OwnedFd) {
        let Some(relay) = self.relays.get_mut(&index) else { return };
        if address.port() == 0 || !matches!(relay.state, State::Waiting(_)) {
            return;
        }
        match call(address, index, epoll) {
            Ok(socket) => relay.knock = Some(Knock { socket, address }),
            Err(errno) if says_that_nobody_comes(errno) => self.leave_alone(index, &RelayError::Route(address, errno)),
            Err(_) => {}
        }
    }

    /// One of those who came before this end had lost the link, if there is one that is meant.
    fn receive_early(&mut self, index: usize, epoll: &OwnedFd) {
        let Some(which) = self.relays.get(&index).map(|relay| relay.which) else { return };
        let early = self.strangers.iter().find(|(_, stranger)| stranger.which == Some(which));
        if let Some(stranger) = early.map(|(number, _)| *number).and_then(|number| self.strangers.remove(&number)) {
            self.welcome(index, stranger.caller.socket, epoll);
        }
    }

    /// Takes who connects.
    pub(super) fn accept(&mut self, mut new_number: impl FnMut() -> u32, epoll: &OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Some(Ok(socket)) = self.listener.as_ref().map(|listener| rustix::net::accept_with(listener, flags)) {
            let number = new_number();
            let is_watched = owner::watch(epoll, socket.as_fd(), Watched::Stranger(number), EventFlags::IN).is_ok();
            if is_watched && self.strangers.len() < STRANGERS_MAX {
                let deadline = Deadline::after(HANDSHAKE_NS_MAX);
                self.strangers.insert(number, Stranger { caller: Caller::new(socket), deadline, which: None });
            }
        }
    }

    /// Somebody who connected says something. `live`: the token that an engine's link is known by, while it is up.
    pub(super) fn hear_stranger(&mut self, number: u32, live: impl Fn(Which) -> Option<Token>, epoll: &OwnedFd) {
        let Some(mut stranger) = self.strangers.remove(&number) else { return };
        let handshake = match stranger.caller.hear() {
            // A proxy that was recognised and gives up, or says more than it may.
            _ if stranger.which.is_some() => return,
            Ok(None) => return drop(self.strangers.insert(number, stranger)),
            Ok(Some(handshake)) => handshake,
            Err(_) => return,
        };
        let is_meant = |relay: &Relay| relay.which == handshake.which && matches!(relay.state, State::Waiting(_));
        match self.relays.iter().find(|(_, relay)| is_meant(relay)) {
            Some((&index, relay)) if handshake.token.is(&relay.own.token) => {
                self.welcome(index, stranger.caller.socket, epoll);
            }
            Some(_) => {}
            None if live(handshake.which).is_some_and(|token| handshake.token.is(&token)) => {
                (stranger.which, stranger.deadline) = (Some(handshake.which), Deadline::after(RESUME_NS_MAX));
                self.strangers.insert(number, stranger);
            }
            None => {}
        }
    }

    /// The peer has come.
    fn welcome(&mut self, index: usize, socket: OwnedFd, epoll: &OwnedFd) {
        let Some(relay) = self.relays.get(&index) else { return };
        let watched = watch_relay(epoll, &socket, index).map_err(RelayError::from);
        match say(&socket, &relay.handshake(self.own_slot)).and(watched) {
            Ok(()) => self.run(index, Some(socket)),
            Err(error) => self.leave_alone(index, &error),
        }
    }

    /// Goes on over a connection whose other end is recognised: this one, or the one that was called.
    fn run(&mut self, index: usize, socket: Option<OwnedFd>) {
        let Some(Relay { which, own, theirs, state, deadline, is_overdue, .. }) = self.relays.remove(&index) else {
            return;
        };
        let state = match state {
            State::Waiting(detached) => running(which, detached, socket),
            State::Calling { detached, caller, .. } => running(which, detached, Some(caller.socket)),
            other => other,
        };
        self.relays.insert(index, Relay { which, own, theirs, state, knock: None, deadline, is_overdue });
    }

    /// The kernel says something of a relay's socket.
    pub(super) fn rouse(&mut self, index: usize) {
        let Some(relay) = self.relays.get_mut(&index) else { return };
        match &mut relay.state {
            State::Running(_, pump) => pump.rouse(),
            State::Calling { .. } => match relay.is_answered(self.own_slot) {
                Ok(true) => self.run(index, None),
                Ok(false) => {}
                Err(error) => self.leave_alone(index, &error),
            },
            State::Waiting(_) => {
                if let Some(error) = relay.hear_knock() {
                    self.leave_alone(index, &error);
                }
            }
            State::Alone(_) => {}
        }
    }

    /// A turn of all; whether any had something to do.
    pub(super) fn poll(&mut self, now_ns: u64) -> bool {
        let mut progressed = false;
        for index in self.indexes() {
            let Some(relay) = self.relays.get_mut(&index) else { continue };
            match relay.poll(now_ns) {
                Ok(did) => progressed |= did,
                Err(error) => self.leave_alone(index, &error),
            }
        }
        progressed
    }

    /// The numbers of all.
    pub(super) fn indexes(&self) -> Vec<usize> {
        self.relays.keys().copied().collect()
    }

    /// What is due by now.
    pub(super) fn tick(&mut self) {
        self.strangers.retain(|_, stranger| !stranger.deadline.is_over());
        for index in self.indexes() {
            let Some(relay) = self.relays.get_mut(&index) else { continue };
            if relay.deadline.is_over() && !std::mem::replace(&mut relay.is_overdue, true) {
                match &mut relay.state {
                    State::Running(engine, _) => {
                        self.past.entry(relay.which.peer).or_default().resets += engine.reset_unresumed() as u64;
                    }
                    State::Alone(_) => {}
                    State::Waiting(_) | State::Calling { .. } => self.leave_alone(index, &RelayError::Late),
                }
            }
            if self.relays.get(&index).is_some_and(Relay::is_done) {
                self.drop_relay(index);
            }
        }
    }

    /// The peer cannot be reached, or not any more.
    fn leave_alone(&mut self, index: usize, error: &RelayError) {
        let Some(mut relay) = self.relays.remove(&index) else { return };
        let peer = relay.which.peer;
        let mut engine = match relay.state {
            State::Waiting(detached) | State::Calling { detached, .. } => {
                Box::new(detached.attach(vec![Pump::new(None).1]))
            }
            State::Running(engine, _) | State::Alone(engine) => engine,
        };
        let resets = engine.lose_peer() as u64;
        self.past.entry(peer).or_default().resets += resets;
        if resets > 0 {
            eprintln!("crosslane proxy: node {peer}: {resets} connections of a lost link are reset: {error}");
        }
        (relay.state, relay.knock) = (State::Alone(engine), None);
        self.relays.insert(index, relay);
    }

    pub(super) fn lifeline_ready(&mut self, index: usize, key: ConnectionKey) {
        match self.relays.get_mut(&index).map(|relay| &mut relay.state) {
            Some(State::Waiting(detached) | State::Calling { detached, .. }) => detached.poll_lifeline(key),
            Some(State::Running(engine, _) | State::Alone(engine)) => engine.lifeline_ready(key),
            None => {}
        }
    }

    pub(super) fn next_event(&mut self, index: usize) -> Option<(u8, EngineEvent<ProgramEnd>)> {
        let relay = self.relays.get_mut(&index)?;
        let peer = relay.which.peer;
        relay.engine().and_then(|engine| engine.next_event()).map(|event| (peer, event))
    }

    pub(super) fn answer(&mut self, index: usize, key: ConnectionKey, answer: Result<ProgramEnd, u32>) {
        if let Some(engine) = self.relays.get_mut(&index).and_then(Relay::engine) {
            engine.answer(key, answer);
        }
    }

    pub(super) fn park_all(&mut self) {
        self.relays.values_mut().filter_map(Relay::engine).for_each(|engine| engine.park_all());
    }

    pub(super) fn end_sleep(&mut self) {
        self.relays.values_mut().filter_map(Relay::engine).for_each(|engine| engine.end_sleep());
    }

    /// As [`Engine::prepare_sleep`], of all.
    pub(super) fn sleep(&mut self) -> bool {
        let mut all_sleep = true;
        for relay in self.relays.values_mut() {
            all_sleep &= match &mut relay.state {
                State::Waiting(_) | State::Calling { .. } => true,
                // What is wrong is found again in the next turn.
                State::Running(engine, pump) => engine.prepare_sleep() == Ok(true) && pump.may_sleep(),
                State::Alone(engine) => engine.prepare_sleep() == Ok(true),
            };
        }
        all_sleep
    }

    /// What has been done, by peer.
    pub(super) fn report(&self) -> HashMap<u8, RelayReport> {
        let mut all = self.past.clone();
        for relay in self.relays.values() {
            all.entry(relay.which.peer).or_default().add(&relay.report());
        }
        all
    }
}

impl Relay {
    fn engine(&mut self) -> Option<&mut HeapEngine> {
        match &mut self.state {
            State::Running(engine, _) | State::Alone(engine) => Some(engine),
            State::Waiting(_) | State::Calling { .. } => None,
        }
    }

    /// What this end says on TCP.
    fn handshake(&self, own_slot: u8) -> Handshake {
        Handshake { which: Which { peer: own_slot, ..self.which }, token: self.theirs.token }
    }

    /// Why nobody will come, if the knock has said so. One that is answered is over.
    fn hear_knock(&mut self) -> Option<RelayError> {
        let Knock { socket, address } = self.knock.take()?;
        let outcome = sockopt::socket_error(&socket).and_then(|outcome| outcome);
        if outcome.is_ok() && rustix::net::getpeername(&socket).is_err() {
            self.knock = Some(Knock { socket, address }); // Not yet.
            return None;
        }
        outcome.err().filter(|errno| says_that_nobody_comes(*errno)).map(|errno| RelayError::Route(address, errno))
    }

    /// The TCP connection is there, or has failed, or brings the answer: whether that is the peer's.
    fn is_answered(&mut self, own_slot: u8) -> Result<bool, RelayError> {
        let own = self.handshake(own_slot);
        let State::Calling { caller, address, has_spoken, .. } = &mut self.state else { return Ok(false) };
        if !*has_spoken {
            let error = sockopt::socket_error(&caller.socket)?;
            error.map_err(|errno| RelayError::Route(*address, errno))?;
            match say(&caller.socket, &own) {
                Ok(()) => *has_spoken = true,
                // Not connected yet.
                Err(RelayError::Failed(Errno::AGAIN | Errno::NOTCONN)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let Some(handshake) = caller.hear()? else { return Ok(false) };
        let is_peer = handshake.which == self.which && handshake.token.is(&self.own.token);
        if is_peer { Ok(true) } else { Err(RelayError::Stranger) }
    }

    fn poll(&mut self, now_ns: u64) -> Result<bool, RelayError> {
        match &mut self.state {
            State::Waiting(_) | State::Calling { .. } => Ok(false),
            State::Alone(engine) => Ok(engine.poll(now_ns)?.progressed),
            State::Running(engine, pump) => {
                let moved = pump.poll()?;
                let progressed = engine.poll(now_ns)?.progressed | pump.poll()? | moved;
                if pump.is_over() && !progressed { Err(RelayError::Ended) } else { Ok(progressed) }
            }
        }
    }

    /// Whether nothing is left to do. The peer may have more to resume as long as it has time to.
    fn is_done(&self) -> bool {
        match &self.state {
            State::Waiting(_) | State::Calling { .. } => false,
            State::Running(engine, pump) => self.is_overdue && engine.connections() == 0 && pump.is_flushed(),
            State::Alone(engine) => engine.connections() == 0,
        }
    }

    fn report(&self) -> RelayReport {
        let (connections, counters) = match &self.state {
            State::Waiting(detached) | State::Calling { detached, .. } => {
                (detached.connections(), EngineCounters::default())
            }
            State::Running(engine, _) | State::Alone(engine) => (engine.connections(), *engine.counters()),
        };
        RelayReport { connections_open: connections as u64, counters, ..RelayReport::default() }
    }
}

impl RelayReport {
    /// As the monitor is told.
    pub(super) fn told(&self) -> PeerReport {
        PeerReport {
            connections_total: self.counters.connections_opened,
            failover_open: self.connections_open,
            failover_total: self.connections_total,
            failover_resets: self.resets,
            failover_bytes_sent: self.counters.bytes_sent,
            failover_bytes_received: self.counters.bytes_received,
            ..PeerReport::default()
        }
    }

    fn add(&mut self, more: &Self) {
        self.connections_open += more.connections_open;
        self.connections_total += more.connections_total;
        self.resets += more.resets;
        self.counters += more.counters;
    }
}

impl Caller {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, heard: Vec::new() }
    }

    /// What it says first, once that is there.
    fn hear(&mut self) -> Result<Option<Handshake>, RelayError> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        let room = &mut bytes[self.heard.len()..];
        match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(RelayError::Ended),
            Ok((received, _)) => self.heard.extend(&bytes[self.heard.len()..][..received]),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(_) => return Err(RelayError::Ended),
        }
        match <&[u8; HANDSHAKE_BYTES]>::try_from(&self.heard[..]) {
            Ok(heard) => Handshake::decode(heard).map(Some).ok_or(RelayError::Stranger),
            Err(_) => Ok(None),
        }
    }
}

/// A handshake fits into a socket that nothing was sent by.
fn say(socket: &OwnedFd, handshake: &Handshake) -> Result<(), RelayError> {
    let sent = rustix::net::send(socket, &handshake.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    if sent == HANDSHAKE_BYTES { Ok(()) } else { Err(RelayError::Ended) }
}

/// Connections that go on over TCP.
fn running(which: Which, detached: DetachedEngine<ProgramEnd>, socket: Option<OwnedFd>) -> State {
    let (pump, port) = Pump::new(socket);
    let (peer, epoch, count) = (which.peer, which.epoch, detached.connections());
    if count > 0 {
        eprintln!("crosslane proxy: node {peer}: {count} connections of epoch {epoch} go on over kernel TCP");
    }
    State::Running(Box::new(detached.attach(vec![port])), pump)
}

/// Whether a call that failed so says that its peer cannot come either: there is no way, or nobody there. All else may
/// be silence, or this machine's own affair.
fn says_that_nobody_comes(errno: Errno) -> bool {
    matches!(errno, Errno::CONNREFUSED | Errno::NETUNREACH | Errno::HOSTUNREACH)
}

/// A socket on its way to a peer.
fn call(address: SocketAddr, index: usize, epoll: &OwnedFd) -> Result<OwnedFd, Errno> {
    let socket = new_socket(address)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(errno),
    }
    watch_relay(epoll, &socket, index)?;
    Ok(socket)
}

fn watch_relay(epoll: &OwnedFd, socket: &OwnedFd, index: usize) -> Result<(), Errno> {
    // A stranger's was watched before.
    let _ = epoll::delete(epoll, socket);
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    owner::watch(epoll, socket.as_fd(), Watched::Relay(index as u32), flags)
}

fn new_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Those who are accepted inherit all of it.
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, SILENCE_MAX / 2)?;
    sockopt::set_tcp_keepintvl(&socket, SILENCE_MAX / 2 / PROBES_MAX)?;
    sockopt::set_tcp_keepcnt(&socket, PROBES_MAX)?;
    sockopt::set_tcp_user_timeout(&socket, SILENCE_MAX.as_millis() as u32)?;
    Ok(socket)
}

fn listen(address: SocketAddr) -> Result<(OwnedFd, u16), Errno> {
    let socket = new_socket(address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, STRANGERS_MAX as i32)?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?).map_err(|_| Errno::AFNOSUPPORT)?;
    Ok((socket, bound.port()))
}
