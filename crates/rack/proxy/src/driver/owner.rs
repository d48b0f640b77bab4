//! A thread, its loop, and when it sleeps.
//!
//! While there is something to do it takes turns, and asks the kernel now and then. When there is nothing it looks on
//! for a while, giving way to others; then the engines ask everybody to ring, and it sleeps until somebody does. Where
//! a device has no bells it naps, and looks once after each nap; naps grow with the time for which nothing has come.

use super::Shared;
use super::direct::{ProgramEnd, Proposal};
use super::doors;
use super::end::SegmentEnd;
use super::held::{HeldEnd, HeldEnds};
use super::links::{LinkEngine, Standing};
use super::relay::{Relays, Which};
use super::turn_clock::TurnClock;
use crate::{ConnectionKey, EngineCounters, EngineEvent, LinkFault, OpenPayload, PollOutcome};
use control::proxy::{FromProxy, LinkLossPolicy, PeerReport, RetainedConnection};
use fabric::device::{Device, Vector, VectorDoorbell};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use segment::Segment;
use socket::process::clock::{now_ns, ticks};
use socket::rendezvous::{Accepted, LaneListener};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use wait::{Action, AdaptiveSpin, Spin, Yielder};

/// Turns with something to do between two looks at what only the kernel knows.
const TURNS_PER_LOOK: u32 = 64;
/// Events that are taken from the kernel at once.
pub(super) const EVENTS_MAX: usize = 256;
/// Programs that are accepted at one listener before others have their turn.
const ACCEPTS_MAX: usize = 64;
/// Sleep where nothing rings for the peers: an eighth of the time for which there has been nothing to do, within these
/// bounds. So a message comes by an eighth of the pause before it late, and 4 ms at most; in the first 32 ms of a pause
/// there are some forty looks, and 250 in each second after.
const NAP_NS: RangeInclusive<u64> = 50_000..=4_000_000;
/// The same while a peer has not greeted back.
const GREETING_NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
const IDLE_TIMES_NAP: u64 = 8;
/// How often a sleeper that is rung for everything looks whether its peers are still there.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Engines of a thread at most: their number takes eight bits of a token.
const ENGINES_MAX: usize = 255;

/// What is heard of a lifeline.
const LIFELINE_EVENTS: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

/// Offences of peers that a thread writes to its log.
const OFFENCES_SAID_MAX: u32 = 100;

/// What a look at everything brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Looked {
    Found,
    Nothing,
    /// Nothing, and it is not worth being awake any more.
    IsTired,
}

/// An order to a thread.
pub(super) enum Command {
    Device(Device),
    LinkUp {
        peer: u8,
        epoch: u32,
    },
    LinkDown {
        peer: u8,
        policy: LinkLossPolicy,
        done: mpsc::Sender<()>,
    },
    /// Monitor and proxy of a peer have died.
    Gone {
        peer: u8,
    },
    /// Connections of an earlier proxy.
    Hold(Vec<HeldEnd>),
    /// The monitor is gone for good: touch no window any more.
    Part {
        done: mpsc::Sender<()>,
    },
    /// As [`Command::Part`], and end.
    Leave {
        done: mpsc::Sender<Vec<(RetainedConnection, OwnedFd)>>,
    },
    Mirror {
        peer: u8,
        address: SocketAddr,
        listener: Arc<LaneListener>,
    },
    Unmirror {
        address: SocketAddr,
        done: mpsc::Sender<()>,
    },
    Report {
        done: mpsc::Sender<Vec<(u8, PeerReport)>>,
    },
    Stop,
}

/// What a descriptor in the epoll set is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// Orders have come.
    Orders,
    /// A peer rings.
    Bell,
    /// Somebody connects.
    Door(u32),
    /// Somebody has connected and owes the handshake.
    Newcomer(u32),
    /// The proxy of another node connects, after a lost link.
    Callers,
    /// Somebody has connected there and owes the handshake.
    Stranger(u32),
    /// The TCP connection that an engine has instead of a link.
    Relay(u32),
    /// A connection's lifeline.
    Lifeline { engine: usize, key: ConnectionKey },
}

/// Where an engine's number lies in a token: above the index of a connection, of which there are less than 2^24.
const ENGINE_SHIFT: u32 = 24;
const ENGINE_MASK: u64 = 0xFF << ENGINE_SHIFT;
/// The number of no engine: the token is one of the others.
const NO_ENGINE: u64 = 0xFF;

impl Token {
    fn encode(self) -> u64 {
        let other = |kind: u64, value: u32| u64::from(value) << 32 | NO_ENGINE << ENGINE_SHIFT | kind;
        match self {
            Self::Orders => other(0, 0),
            Self::Bell => other(1, 0),
            Self::Door(number) => other(2, number),
            Self::Newcomer(number) => other(3, number),
            Self::Callers => other(4, 0),
            Self::Stranger(number) => other(5, number),
            Self::Relay(index) => other(6, index),
            Self::Lifeline { engine, key } => {
                debug_assert!(key.to_word() & ENGINE_MASK == 0);
                key.to_word() | (engine as u64) << ENGINE_SHIFT
            }
        }
    }

    fn decode(word: u64) -> Self {
        let engine = (word & ENGINE_MASK) >> ENGINE_SHIFT;
        let value = (word >> 32) as u32;
        match (engine, word & ((1 << ENGINE_SHIFT) - 1)) {
            (NO_ENGINE, 0) => Self::Orders,
            (NO_ENGINE, 1) => Self::Bell,
            (NO_ENGINE, 2) => Self::Door(value),
            (NO_ENGINE, 3) => Self::Newcomer(value),
            (NO_ENGINE, 4) => Self::Callers,
            (NO_ENGINE, 5) => Self::Stranger(value),
            (NO_ENGINE, _) => Self::Relay(value),
            _ => Self::Lifeline { engine: engine as usize, key: ConnectionKey::from_word(word & !ENGINE_MASK) },
        }
    }
}

/// A listener that stands in for another node's.
struct Door {
    peer: u8,
    address: SocketAddr,
    listener: Arc<LaneListener>,
}

/// A program whose handshake has not come.
struct Newcomer {
    peer: u8,
    accepted: Accepted,
}

/// A program whose handshake has come, and that is to have a connection.
struct Caller {
    peer: u8,
    accepted: Accepted,
    segment: Segment,
    since_ns: u64,
}

/// How long a program waits for both ends of a link that is up to begin: longer than a proxy takes to start, and less
/// than a program waits for its reply.
const GREETING_WAIT_NS: u64 = 2_000_000_000;

/// A thread and all it owns.
pub(super) struct Owner {
    shared: Arc<Shared>,
    places: Vec<usize>,
    vector: Vector,
    orders: mpsc::Receiver<Command>,
    orders_bell: Arc<OwnedFd>,
    epoll: OwnedFd,
    device: Option<(Device, VectorDoorbell)>,
    engines: Vec<Option<LinkEngine>>,
    /// Those that have lost their link, by the same numbers.
    relays: Relays,
    /// Those that wait for a link.
    held: HeldEnds,
    doors: HashMap<u32, Door>,
    newcomers: HashMap<u32, Newcomer>,
    /// Those that came while the engines of their link had not begun.
    early: Vec<Caller>,
    numbers: u32,
    /// Which of several engines of a link takes the next connection.
    turns: usize,
    /// What engines have counted that are gone, by peer.
    past: HashMap<u8, EngineCounters>,
    offences_said: u32,
    /// What its waits have taught.
    spin_history: &'static AdaptiveSpin,
    /// What giving way has brought.
    yielder: Yielder,
    clock: TurnClock,
    /// Since when it has slept and found nothing after it.
    idle_since_ns: Option<u64>,
    is_over: bool,
}

impl Owner {
    pub(super) fn new(
        shared: Arc<Shared>,
        index: usize,
        places: Vec<usize>,
        orders: mpsc::Receiver<Command>,
        orders_bell: Arc<OwnedFd>,
    ) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let relays = Relays::new(shared.setup.own_slot, shared.rescue_address(index));
        let owner = Self {
            shared,
            places,
            vector: Vector(u8::try_from(index + 1).map_err(|_| Errno::INVAL)?),
            orders,
            orders_bell,
            epoll,
            device: None,
            engines: Vec::new(),
            relays,
            held: HeldEnds::default(),
            doors: HashMap::new(),
            newcomers: HashMap::new(),
            early: Vec::new(),
            numbers: 0,
            turns: 0,
            past: HashMap::new(),
            offences_said: 0,
            // One a thread, for as long as the process.
            spin_history: Box::leak(Box::new(AdaptiveSpin::for_server())),
            yielder: Yielder::new(),
            clock: TurnClock::default(),
            idle_since_ns: None,
            is_over: false,
        };
        owner.watch(owner.orders_bell.as_fd(), Token::Orders, EventFlags::IN)?;
        owner.relays.listener().map_or(Ok(()), |listener| owner.watch(listener, Token::Callers, EventFlags::IN))?;
        Ok(owner)
    }

    /// Until the proxy ends.
    pub(super) fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        while !self.is_over {
            if self.work(&mut events) {
                self.idle_since_ns = None;
            }
            // After a nap that brought nothing, one look is enough.
            if self.idle_since_ns.is_none() && self.look_on(&mut events) {
                continue;
            }
            if self.engines_sleep() {
                let idle_since_ns = *self.idle_since_ns.get_or_insert_with(now_ns);
                self.sleep(&self.sleep_limit(now_ns() - idle_since_ns));
                if self.look_after_sleep(&mut events) {
                    self.idle_since_ns = None;
                }
            } else {
                self.idle_since_ns = None;
            }
        }
        self.close_all();
    }

    /// What a sleep is followed by; whether somebody had something to say.
    pub(super) fn look_after_sleep(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        let had_any = self.look_at_kernel(events);
        self.engines_wake();
        self.check_peers();
        had_any
    }

    /// Turns, as long as there is something to do; whether there was.
    fn work(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        for turn in 1_u32.. {
            if !self.work_once(turn, events) {
                return turn > 1;
            }
        }
        true
    }

    /// One of the turns of a thread that has something to do, by its number among them; whether it came to something.
    pub(super) fn work_once(&mut self, turn: u32, events: &mut Vec<epoll::Event>) -> bool {
        if turn.is_multiple_of(TURNS_PER_LOOK) {
            self.look_at_kernel(events);
            self.check_peers();
        }
        self.turn_with_manners(ticks()) && !self.is_over
    }

    /// A turn, and others run if it is to give way. Says whether it came to something. `ticks` is where the processor's
    /// counter is.
    fn turn_with_manners(&mut self, ticks: u64) -> bool {
        let now_ns = self.clock.now_ns(ticks);
        let outcome = self.poll(now_ns);
        if outcome.should_yield {
            self.yielder.yield_if_useful();
        }
        outcome.progressed
    }

    /// Looks for something to do, for as long as being awake is worth it; `false`: it is not any more.
    fn look_on(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        let mut spin = self.begin_to_look();
        if spin.blocks_immediately() {
            // Others need the processor, and those who hold it back are served last: sleepers come first.
            self.engines.iter_mut().flatten().for_each(LinkEngine::park_all);
            self.relays.park_all();
            return false;
        }
        spin.note_poll();
        loop {
            match self.look_once(&mut spin, events) {
                Looked::Found => return true,
                Looked::Nothing => {}
                Looked::IsTired => return false,
            }
        }
    }

    /// A wait of a thread that has nothing to do.
    pub(super) fn begin_to_look(&self) -> Spin {
        Spin::with(self.spin_history)
    }

    /// One of the looks of such a wait.
    pub(super) fn look_once(&mut self, spin: &mut Spin, events: &mut Vec<epoll::Event>) -> Looked {
        // An idle turn looks at a handful of words of each engine.
        let looks = (4 * self.engines.iter().flatten().count() as u32).max(1);
        match spin.iterate_by(looks) {
            Action::Poll => {}
            Action::PollKernel => {
                if self.look_at_kernel(events) {
                    return Looked::Found;
                }
            }
            Action::Block => return Looked::IsTired,
        }
        let now = spin.note_poll();
        if self.turn_with_manners(now) { Looked::Found } else { Looked::Nothing }
    }

    /// One turn of every engine, and what they came to together. Who sleeps has been rung for.
    fn poll(&mut self, now_ns: u64) -> PollOutcome {
        let is_oversubscribed = self.spin_history.is_core_shared();
        let (mut progressed, mut should_yield) = (false, false);
        for index in 0..self.engines.len() {
            let Some(link) = &mut self.engines[index] else { continue };
            match link.poll(now_ns, is_oversubscribed) {
                Ok(outcome) => {
                    should_yield |= outcome.should_yield;
                    // Events come with frames alone.
                    if outcome.progressed {
                        progressed = true;
                        self.handle_events(index);
                    }
                }
                Err(fault) => self.give_up(index, &fault),
            }
            if !self.held.is_empty() {
                self.adopt_held(index);
            }
        }
        if !self.early.is_empty() {
            self.serve_early();
        }
        if !self.relays.is_empty() {
            progressed |= self.relays.poll(now_ns);
            for index in self.relays.indexes() {
                progressed |= self.handle_events(index);
            }
        }
        PollOutcome { progressed, should_yield, ring_peer: false }
    }

    fn engines_sleep(&mut self) -> bool {
        let mut all_sleep = true;
        for index in 0..self.engines.len() {
            let Some(link) = &mut self.engines[index] else { continue };
            match link.prepare_sleep() {
                Ok(sleeps) => all_sleep &= sleeps,
                Err(fault) => self.give_up(index, &fault),
            }
            if !all_sleep {
                self.engines_wake();
                return false;
            }
        }
        if !self.relays.sleep() {
            self.engines_wake();
            return false;
        }
        true
    }

    fn engines_wake(&mut self) {
        self.engines.iter_mut().flatten().for_each(LinkEngine::end_sleep);
        self.relays.end_sleep();
    }

    /// How long to sleep, after nothing has come for so long.
    fn sleep_limit(&self, idle_ns: u64) -> Timespec {
        let has_bell = self.device.as_ref().is_some_and(|(_, bell)| bell.descriptor().is_some());
        let has_links = self.engines.iter().any(Option::is_some);
        let greets = self.engines.iter().flatten().any(LinkEngine::is_greeting);
        match () {
            () if greets => GREETING_NAP,
            () if has_links && !has_bell => nap(idle_ns),
            () => LOOK,
        }
    }

    /// Until somebody has something to say. An epoll's own limit would be of whole milliseconds.
    fn sleep(&self, limit: &Timespec) {
        let _ = poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(limit));
    }

    /// Asks the kernel who has something to say; whether anybody had.
    fn look_at_kernel(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        events.clear();
        let _ = epoll::wait(&self.epoll, spare_capacity(events), Some(&Timespec::default()));
        let mut has_orders = false;
        for event in events.iter() {
            match Token::decode(event.data.u64()) {
                Token::Orders => has_orders = true,
                Token::Bell => self.device.as_ref().map(|(_, bell)| bell.take()).map_or((), drop),
                Token::Door(number) => self.open_door(number),
                Token::Newcomer(number) => self.hear_newcomer(number),
                Token::Lifeline { engine, key } => match self.engines.get_mut(engine) {
                    Some(Some(link)) => link.lifeline_ready(key),
                    _ => self.relays.lifeline_ready(engine, key),
                },
                Token::Callers => self.receive_callers(),
                Token::Stranger(number) => self.hear_stranger(number),
                Token::Relay(index) => self.relays.rouse(index as usize),
            }
        }
        // Last: a link that goes takes the connections with it that the other events are about.
        if has_orders {
            self.obey();
        }
        !events.is_empty()
    }

    fn obey(&mut self) {
        let _ = rustix::io::read(&self.orders_bell, &mut [0_u8; 8]);
        while let Ok(command) = self.orders.try_recv() {
            match command {
                Command::Device(device) => self.take_device(device),
                Command::LinkUp { peer, epoch } => self.begin(peer, epoch),
                Command::LinkDown { peer, policy, done } => {
                    self.link_down(peer, policy);
                    let _ = done.send(());
                }
                Command::Gone { peer } => self.link_down(peer, LinkLossPolicy::Reset),
                Command::Hold(ends) => self.held.extend(ends),
                Command::Part { done } => {
                    (0..self.engines.len()).for_each(|index| self.drop_engine(index));
                    let _ = done.send(());
                }
                Command::Leave { done } => _ = done.send(self.leave_all()),
                Command::Mirror { peer, address, listener } => self.add_door(peer, address, listener),
                Command::Unmirror { address, done } => {
                    self.remove_door(address);
                    let _ = done.send(());
                }
                Command::Report { done } => _ = done.send(self.report()),
                Command::Stop => self.is_over = true,
            }
        }
    }

    /// The first, or, from another monitor, the same with other bells.
    fn take_device(&mut self, device: Device) {
        if let Some(descriptor) = self.device.as_ref().and_then(|(_, bell)| bell.descriptor()) {
            let _ = epoll::delete(&self.epoll, descriptor);
        }
        self.engines.iter_mut().flatten().for_each(|link| link.renew(&device, self.vector));
        let bell = device.vector_doorbell(self.vector);
        if let Some(descriptor) = bell.descriptor() {
            let _ = self.watch(descriptor, Token::Bell, EventFlags::IN);
        }
        self.device = Some((device, bell));
    }

    fn link_down(&mut self, peer: u8, policy: LinkLossPolicy) {
        let now_ns = now_ns();
        for index in 0..self.engines.len() {
            let link = self.engines[index].as_mut().filter(|link| link.peer == peer);
            if link.is_some_and(|link| policy != LinkLossPolicy::RetainAll || !link.drift(now_ns)) {
                self.drop_engine(index);
            }
        }
        self.held.reset(|end| end.peer == peer && policy == LinkLossPolicy::Reset);
    }

    fn begin(&mut self, peer: u8, epoch: u32) {
        let back = self.come_back(peer, epoch);
        for index in 0..self.engines.len() {
            if self.engines[index].as_ref().is_some_and(|link| link.peer == peer && !back.contains(&link.place)) {
                self.drop_engine(index);
            }
        }
        let Some((device, _)) = &self.device else { return };
        for &place in self.places.iter().filter(|place| !back.contains(place)) {
            let rescue = if self.shared.setup.is_failover { self.relays.new_rescue() } else { None };
            let engine = LinkEngine::new(&self.shared, device, (peer, epoch), place, self.vector, rescue);
            if self.engines.len() >= ENGINES_MAX
                && self.free_index().is_none()
                && let Some(oldest) = self.relays.oldest()
            {
                self.relays.drop_relay(oldest);
            }
            match self.free_index() {
                Some(free) => self.engines[free] = Some(engine),
                None if self.engines.len() < ENGINES_MAX => self.engines.push(Some(engine)),
                None => {}
            }
        }
    }

    /// Engines that go on over the next link: their places.
    fn come_back(&mut self, peer: u8, epoch: u32) -> Vec<usize> {
        let (now_ns, return_ns) = (now_ns(), self.shared.setup.return_ns);
        let mut places = Vec::new();
        for link in self.engines.iter_mut().flatten().filter(|link| link.peer == peer) {
            if link.drift(now_ns) && link.standing(now_ns, return_ns) == Standing::Good {
                link.come_back(epoch);
                places.push(link.place);
            }
        }
        places
    }

    /// A number that neither an engine nor its connections after a lost link have.
    fn free_index(&self) -> Option<usize> {
        (0..self.engines.len()).find(|&index| self.engines[index].is_none() && !self.relays.has(index))
    }

    /// Whatever becomes of its connections.
    fn end(&mut self, peer: u8) {
        for index in 0..self.engines.len() {
            if self.engines[index].as_ref().is_some_and(|link| link.peer == peer) {
                self.drop_engine(index);
            }
        }
    }

    fn drop_engine(&mut self, index: usize) {
        let Some(mut link) = self.engines[index].take() else { return };
        let (peer, place) = (link.peer, link.place);
        *self.past.entry(peer).or_default() += link.counters();
        if self.is_over {
            return link.take_down();
        }
        for held in link.suspend(now_ns()) {
            let _ = epoll::delete(&self.epoll, held.local.lifeline());
            self.held.extend([HeldEnd { peer, place, held }]);
        }
        if let (Some(lost), Some(address)) = (link.detach(), self.shared.address(peer)) {
            self.relays.begin(index, lost, address, &self.epoll);
        }
    }

    /// What waited for this link goes on over it, before anything is taken from it: once the peer is there.
    fn adopt_held(&mut self, index: usize) {
        let Some(link) = self.engines[index].as_mut().filter(|link| !link.is_greeting()) else { return };
        let (peer, place, epoll) = (link.peer, link.place, &self.epoll);
        for HeldEnd { held, .. } in self.held.take(|end| (end.peer, end.place) == (peer, place)) {
            link.resume_direct(held, |key, end| {
                // What has come since the link was lost is told at once.
                let _ = watch(epoll, end.lifeline(), Token::Lifeline { engine: index, key }, LIFELINE_EVENTS);
            });
        }
    }

    /// Those who have waited for too long are reset.
    fn reset_late(&mut self) {
        let lost_ns = now_ns().saturating_sub(self.shared.setup.return_ns);
        self.held.reset(|end| end.held.lost_ns < lost_ns);
        self.engines.iter_mut().flatten().for_each(|link| link.reset_lost_before(lost_ns));
    }

    /// All that lies in the windows, for the next monitor. The rest is reset.
    fn leave_all(&mut self) -> Vec<(RetainedConnection, OwnedFd)> {
        (0..self.engines.len()).for_each(|index| self.drop_engine(index));
        self.is_over = true;
        self.held.take(|_| true).into_iter().filter_map(HeldEnd::into_kept).collect()
    }

    fn receive_callers(&mut self) {
        let (relays, numbers) = (&mut self.relays, &mut self.numbers);
        let new_number = || {
            *numbers = numbers.wrapping_add(1);
            *numbers
        };
        relays.accept(new_number, &self.epoll);
    }

    /// Somebody who may be the proxy of another node says something.
    fn hear_stranger(&mut self, number: u32) {
        let engines = &self.engines;
        let live = |which: Which| {
            let link = engines.iter().flatten().find(|link| link.which() == which);
            link.and_then(LinkEngine::token)
        };
        self.relays.hear_stranger(number, live, &self.epoll);
    }

    /// The peer has spoiled the link.
    fn give_up(&mut self, index: usize, fault: &LinkFault) {
        let Some(link) = &self.engines[index] else { return };
        let (peer, epoch) = (link.peer, link.epoch);
        self.end(peer);
        self.held.reset(|end| end.peer == peer);
        self.shared.tell(&FromProxy::Broken { peer, epoch, what: format!("wrote nonsense: {fault}") });
    }

    /// Links whose peer has left the epoch are not used any more, whatever the monitor knows by now, unless it may be
    /// the same peer that comes back.
    fn check_peers(&mut self) {
        let now_ns = now_ns();
        for index in 0..self.engines.len() {
            let Some(link) = self.engines[index].as_mut() else { continue };
            let (peer, epoch) = (link.peer, link.epoch);
            match link.standing(now_ns, self.shared.setup.return_ns) {
                Standing::Good => {}
                Standing::Left => {
                    link.drift(now_ns);
                    self.shared.tell(&FromProxy::PeerLeft { peer, epoch });
                }
                Standing::Lost(what) => {
                    // Nothing goes over it any more, though the peer may be back before the monitor looks.
                    self.drop_engine(index);
                    self.shared.tell(&FromProxy::Broken { peer, epoch, what: what.to_owned() });
                }
            }
        }
        self.relays.tick();
        self.reset_late();
    }

    fn report(&mut self) -> Vec<(u8, PeerReport)> {
        let now = self.engines.iter_mut().flatten().map(|link| {
            let (connections_open, direct_held) = (link.connections() as u64, link.unresumed() as u64);
            (link.peer, PeerReport { connections_open, direct_held, ..report_of(&link.counters()) })
        });
        let one_held = PeerReport { connections_open: 1, direct_held: 1, ..PeerReport::default() };
        let held = self.held.peers().map(|peer| (peer, one_held));
        let past = self.past.iter().map(|(peer, counters)| (*peer, report_of(counters)));
        let by_tcp = self.relays.report().into_iter().map(|(peer, report)| (peer, report.told()));
        now.chain(held).chain(past).chain(by_tcp).collect()
    }

    fn close_all(&mut self) {
        (0..self.engines.len()).for_each(|index| self.drop_engine(index));
        self.held.reset(|_| true);
        self.relays.clear();
        self.doors.clear();
        self.newcomers.clear();
        self.early.clear();
    }

    fn watch(&self, descriptor: BorrowedFd<'_>, token: Token, flags: EventFlags) -> Result<(), Errno> {
        watch(&self.epoll, descriptor, token, flags)
    }

    fn new_number(&mut self) -> u32 {
        self.numbers = self.numbers.wrapping_add(1);
        self.numbers
    }
}

/// Connections that come and go.
impl Owner {
    /// What an engine cannot do by itself; whether there was anything.
    fn handle_events(&mut self, index: usize) -> bool {
        let mut had_any = false;
        while let Some((peer, event)) = self.next_event(index) {
            had_any = true;
            match event {
                EngineEvent::Open { key, open_payload } => self.connect(index, peer, key, &open_payload),
                EngineEvent::Refused { local, errno } => self.refuse(local, errno),
                EngineEvent::Violation { number, what } => {
                    self.note_offence(peer, &format!("connection {:#x} is reset: {what}", number.0));
                }
            }
        }
        had_any
    }

    fn next_event(&mut self, index: usize) -> Option<(u8, EngineEvent<ProgramEnd>)> {
        match self.engines.get_mut(index) {
            Some(Some(link)) => link.next_event().map(|event| (link.peer, event)),
            _ => self.relays.next_event(index),
        }
    }

    fn connect(&mut self, engine: usize, peer: u8, key: ConnectionKey, tuple: &OpenPayload) {
        let Some((device, _)) = &self.device else { return };
        let device = device.clone();
        let is_admitted = doors::is_admitted(&self.shared.access(), peer, tuple);
        if !is_admitted {
            self.note_offence(peer, "opened without asking, what the access rules do not allow");
        }
        let admitted =
            if is_admitted { doors::connect(&self.shared, &device, peer, tuple) } else { Err(Errno::ACCESS) };
        let end = admitted.and_then(|end| {
            self.watch(end.lifeline(), Token::Lifeline { engine, key }, LIFELINE_EVENTS)?;
            Ok(end)
        });
        let answer = end.map_err(|errno| errno.raw_os_error() as u32);
        match self.engines.get_mut(engine) {
            Some(Some(link)) => link.answer(key, answer),
            _ => self.relays.answer(engine, key, answer),
        }
    }

    /// The other node has no server. Without a listener there, there is none here either.
    fn refuse(&mut self, local: ProgramEnd, errno: u32) {
        let ProgramEnd::Carried(local) = local else { return };
        let errno = i32::try_from(errno).ok().filter(|errno| (1..4096).contains(errno));
        let errno = errno.map_or(Errno::CONNREFUSED, Errno::from_raw_os_error);
        let address = local.destination();
        local.refuse(errno);
        if errno == Errno::CONNREFUSED
            && let Some(address) = address
        {
            self.shared.note_refused(address);
        }
    }

    /// Says what a hostile peer did, as long as it is worth reading.
    fn note_offence(&mut self, peer: u8, what: &str) {
        self.offences_said = self.offences_said.saturating_add(1);
        if self.offences_said <= OFFENCES_SAID_MAX {
            eprintln!("crosslane proxy: node {peer}: {what}");
        }
    }

    fn add_door(&mut self, peer: u8, address: SocketAddr, listener: Arc<LaneListener>) {
        self.remove_door(address);
        let number = self.new_number();
        if let Some(descriptor) = listener.descriptor()
            && self.watch(descriptor, Token::Door(number), EventFlags::IN | EventFlags::EXCLUSIVE).is_ok()
        {
            self.doors.insert(number, Door { peer, address, listener });
        }
    }

    fn remove_door(&mut self, address: SocketAddr) {
        let found = self.doors.iter().find(|(_, door)| door.address == address).map(|(number, _)| *number);
        if let Some(door) = found.and_then(|number| self.doors.remove(&number))
            && let Some(descriptor) = door.listener.descriptor()
        {
            let _ = epoll::delete(&self.epoll, descriptor);
        }
    }

    fn open_door(&mut self, number: u32) {
        for _ in 0..ACCEPTS_MAX {
            let Some(door) = self.doors.get(&number) else { return };
            let peer = door.peer;
            let Ok(accepted) = doors::accept(&door.listener) else { return };
            self.admit(Newcomer { peer, accepted });
        }
    }

    fn hear_newcomer(&mut self, number: u32) {
        if let Some(newcomer) = self.newcomers.remove(&number) {
            let _ = epoll::delete(&self.epoll, newcomer.accepted.lifeline.as_fd());
            self.admit(newcomer);
        }
    }

    /// Opens a connection for a program whose handshake has come; waits for the handshake of any other.
    fn admit(&mut self, newcomer: Newcomer) {
        let segment = match doors::hear_handshake(&newcomer.accepted) {
            Ok(Some(segment)) => segment,
            Ok(None) => {
                let number = self.new_number();
                let lifeline = newcomer.accepted.lifeline.as_fd();
                if self.watch(lifeline, Token::Newcomer(number), EventFlags::IN).is_ok() {
                    self.newcomers.insert(number, newcomer);
                }
                return;
            }
            Err(_) => return,
        };
        self.serve(Caller { peer: newcomer.peer, accepted: newcomer.accepted, segment, since_ns: now_ns() });
    }

    /// Those that were early, as far as their links have begun by now.
    fn serve_early(&mut self) {
        std::mem::take(&mut self.early).into_iter().for_each(|caller| self.serve(caller));
    }

    /// Opens a connection, once the link has begun.
    fn serve(&mut self, caller: Caller) {
        let engine = self.next_engine(caller.peer);
        let greets = engine.and_then(|index| self.engines[index].as_ref()).is_some_and(LinkEngine::is_greeting);
        if greets && now_ns().saturating_sub(caller.since_ns) < GREETING_WAIT_NS {
            return self.early.push(caller);
        }
        let Caller { peer, accepted, segment, .. } = caller;
        // Seen from the program that connects.
        let tuple = accepted.tuple.reversed();
        let secrets = segment.secrets();
        let end = SegmentEnd::new(segment, accepted.lifeline, true).to(tuple.peer);
        let Some(engine) = engine else { return end.refuse(Errno::NETUNREACH) };
        let proposal = self.propose(peer);
        let offer = proposal.as_ref().map(|proposal| doors::Offer { index: proposal.index(), secrets });
        let nodes = [self.shared.setup.own_slot, peer].map(|slot| self.shared.address(slot));
        let Some(tuple) = doors::encode(&tuple, nodes, offer) else { return end.refuse(Errno::AFNOSUPPORT) };
        let Some(link) = &mut self.engines[engine] else { return };
        let epoll = &self.epoll;
        let mut end = Some(end.proposing(proposal));
        link.open(tuple, |key| {
            let end = end.take().expect("called once");
            let data = EventData::new_u64(Token::Lifeline { engine, key }.encode());
            let _ = epoll::add(epoll, end.lifeline(), data, LIFELINE_EVENTS);
            ProgramEnd::Carried(Box::new(end))
        });
        let errno = if link.is_greeting() { Errno::NETUNREACH } else { Errno::NOBUFS };
        if let Some(end) = end {
            end.refuse(errno);
        }
    }

    /// A place in the windows for a program's connection to a peer, where there is one.
    fn propose(&self, peer: u8) -> Option<Proposal> {
        let (device, _) = self.device.as_ref()?;
        self.shared.span_pool(peer)?.propose(device)
    }

    /// An engine of the link with a peer; those of one link in turn, and those that have begun before the others.
    fn next_engine(&mut self, peer: u8) -> Option<usize> {
        let link = |index: usize| self.engines[index].as_ref().filter(|link| link.peer == peer);
        let all: Vec<usize> = (0..self.engines.len()).filter(|&index| link(index).is_some()).collect();
        let has_begun = |index: &usize| link(*index).is_some_and(|link| !link.is_greeting());
        let begun: Vec<usize> = all.iter().copied().filter(has_begun).collect();
        let engines = if begun.is_empty() { all } else { begun };
        self.turns = self.turns.wrapping_add(1);
        engines.get(self.turns % engines.len().max(1)).copied()
    }
}

/// After nothing has come for so long.
fn nap(idle_ns: u64) -> Timespec {
    let nap_ns = (idle_ns / IDLE_TIMES_NAP).clamp(*NAP_NS.start(), *NAP_NS.end());
    Timespec { tv_sec: 0, tv_nsec: nap_ns.cast_signed() }
}

fn report_of(counters: &EngineCounters) -> PeerReport {
    PeerReport {
        connections_open: 0,
        connections_total: counters.connections_opened,
        bytes_sent: counters.bytes_sent,
        bytes_received: counters.bytes_received,
        moves: counters.moves,
        bytes_copied: counters.bytes_sent + counters.bytes_received + counters.bytes_buffered,
        frames_sent: counters.frames_sent,
        publishes: counters.publishes,
        flushes: counters.flushes,
        frames_received: counters.frames_received,
        stalls: counters.stalls,
        partitions_full: counters.partitions_full,
        rings_peer: counters.rings_peer,
        rings_local: counters.rings_local,
        wakes: counters.wakes,
        ..PeerReport::default()
    }
}

/// Adds a descriptor to those that a thread waits for.
pub(super) fn watch(epoll: &OwnedFd, descriptor: BorrowedFd<'_>, token: Token, flags: EventFlags) -> Result<(), Errno> {
    epoll::add(epoll, descriptor, EventData::new_u64(token.encode()), flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_grow_with_the_time_for_which_nothing_has_come() {
        let naps_us = |idle_us: u64| nap(idle_us * 1000).tv_nsec / 1000;
        assert_eq!([0, 400, 800, 8_000, 32_000, 1_000_000].map(naps_us), [50, 50, 100, 1000, 4000, 4000]);
    }

    #[test]
    fn tokens_survive_the_way() {
        let lifeline = |engine, word| Token::Lifeline { engine, key: ConnectionKey::from_word(word) };
        for token in [
            Token::Orders,
            Token::Bell,
            Token::Door(7),
            Token::Newcomer(u32::MAX),
            Token::Callers,
            Token::Stranger(8),
            Token::Relay(254),
            lifeline(0, 0),
            lifeline(254, 5 << 32 | 0xFF_FFFF),
        ] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
