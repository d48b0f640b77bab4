//! Random histories of connections with a span while links and proxies come and go.

use super::*;
use crate::engine::Engine;
use crate::engine::EngineEvent;
use crate::engine::with_span::tests::{engine, lanes, links, open_payload};
use crate::frame::{HEADER_BYTES, LinkSide};
use crate::local::{Broken, Input};
use fabric::heap::HeapLink;
use fabric::{Inbound, Link, Outbound};
use lane::{Draft, Span};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

type Window = <HeapLink as Link>::Inbound;
type Peers = <HeapLink as Link>::Outbound;

/// A program: what is in its window, its TCP socket and its bell, which outlive links and proxies.
#[derive(Debug, Default, Clone)]
struct Program {
    is_dead: bool,
    /// What it has sent by TCP, and how much of that proxies have taken.
    sent: Vec<u8>,
    taken: usize,
    /// What proxies have given to it by TCP.
    given: Vec<u8>,
    /// Records that it has stored into the other program's window.
    stored: u64,
    /// The number of records of the other program that it had seen when it fell asleep.
    asleep_after: Option<u64>,
    is_woken: bool,
    /// It was told that the other program has closed.
    is_peer_closed: bool,
    is_reset: bool,
    /// Rings in the bell.
    rings: u64,
    /// The socket or the bell has an event that the proxy has not handled.
    has_event: bool,
}

/// The state of each connection at two nodes that survives the death of a proxy.
#[derive(Debug, Default)]
struct Memory {
    connections: Vec<[Program; 2]>,
    /// What the monitors retain: connections by number.
    retained: [BTreeMap<u32, usize>; 2],
    /// Connections of a proxy that died together with its monitor.
    lost: BTreeSet<usize>,
    /// Connections of which something was on its way when a link or a proxy was lost.
    on_the_way: BTreeSet<usize>,
    /// Proxies die without withdrawing anything from their monitor.
    is_killing: bool,
}

/// A proxy's endpoint of a connection.
struct EndpointStub {
    memory: Rc<RefCell<Memory>>,
    connection: usize,
    node: usize,
    has_span: bool,
    /// Bytes that were taken and not put into a frame.
    buffer: Vec<u8>,
    number: Option<ConnectionNumber>,
    has_rung: bool,
}

impl EndpointStub {
    fn new(memory: &Rc<RefCell<Memory>>, connection: usize, node: usize) -> Self {
        let memory = Rc::clone(memory);
        Self { memory, connection, node, has_span: true, buffer: Vec::new(), number: None, has_rung: false }
    }

    fn program<T>(&self, act: impl FnOnce(&mut Program) -> T) -> T {
        act(&mut self.memory.borrow_mut().connections[self.connection][self.node])
    }
}

impl Drop for EndpointStub {
    fn drop(&mut self) {
        let mut memory = self.memory.borrow_mut();
        if let Some(number) = self.number.filter(|_| !memory.is_killing) {
            memory.retained[self.node].remove(&number.0);
        }
    }
}

impl LocalEndpoint for EndpointStub {
    fn may_have_input(&mut self) -> bool {
        !self.buffer.is_empty() || self.program(|program| program.taken < program.sent.len() || program.is_dead)
    }

    /// Takes up to three bytes at once.
    fn input(&mut self) -> Input {
        if self.buffer.is_empty() {
            self.buffer = self.program(|program| {
                let end = program.sent.len().min(program.taken + 3);
                program.sent[std::mem::replace(&mut program.taken, end)..end].to_vec()
            });
        }
        match self.buffer.len() {
            0 if self.program(|program| program.is_dead) => Input::Closed,
            0 => Input::Nothing,
            bytes => Input::Bytes(bytes),
        }
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        draft.append(&self.buffer[..len_bytes]);
    }

    fn read_input(&mut self, _skip_bytes: usize, _destination: &mut [u8]) {
        panic!("only with failover");
    }

    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        self.buffer.drain(..len_bytes);
        Ok(())
    }

    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        let mut copy = vec![0; bytes.len_bytes()];
        bytes.read(&mut copy);
        self.write(&copy)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        // A program takes no more than this at once.
        let taken = &bytes[..bytes.len().min(2)];
        self.program(|program| program.given.extend(taken));
        Ok(taken.len())
    }

    fn has_room(&mut self) -> bool {
        true
    }

    fn close(self) {
        self.program(|program| (program.is_peer_closed, program.asleep_after) = (true, None));
    }

    fn reset(self) {
        self.program(|program| (program.is_reset, program.asleep_after) = (true, None));
    }

    fn note_events(&mut self) {
        self.has_rung |= self.program(|program| std::mem::take(&mut program.rings) > 0);
    }

    fn take_ring(&mut self) -> bool {
        std::mem::take(&mut self.has_rung)
    }

    fn begin_with_span(&mut self, number: ConnectionNumber) -> bool {
        self.number = Some(number);
        self.memory.borrow_mut().retained[self.node].insert(number.0, self.connection);
        self.has_span
    }

    fn may_outlive_link(&mut self) -> bool {
        self.has_span
    }

    fn carried(&mut self) -> Option<Carried> {
        let counts = |program: &mut Program| Carried { taken: program.taken as u64, given: program.given.len() as u64 };
        Some(self.program(counts)).filter(|_| !self.program(|program| program.is_reset))
    }

    fn span_index(&self) -> u32 {
        self.connection as u32
    }

    fn wake(&mut self) {
        self.program(|program| (program.asleep_after, program.is_woken) = (None, true));
    }
}

/// A node's proxy.
#[derive(Default)]
struct Proxy {
    engine: Option<Engine<Window, Peers, EndpointStub>>,
    keys: BTreeMap<usize, ConnectionKey>,
    suspended: Vec<SuspendedConnection<EndpointStub>>,
}

struct World {
    memory: Rc<RefCell<Memory>>,
    proxies: [Proxy; 2],
    now_ns: u64,
}

const CONNECTIONS_MAX: usize = 4;

#[derive(Debug, Clone, Copy)]
enum Act {
    Open { node: usize },
    Send { connection: usize, node: usize },
    Store { connection: usize, node: usize },
    Sleep { connection: usize, node: usize },
    Die { connection: usize, node: usize },
    Poll { node: usize },
    LinkDown,
    LinkUp,
    KillProxy { node: usize },
    KillProxyAndMonitor { node: usize },
}

fn any_act() -> impl Strategy<Value = Act> {
    let which = || (0..CONNECTIONS_MAX, 0..2_usize);
    prop_oneof![
        1 => (0..2_usize).prop_map(|node| Act::Open { node }),
        3 => which().prop_map(|(connection, node)| Act::Send { connection, node }),
        4 => which().prop_map(|(connection, node)| Act::Store { connection, node }),
        4 => which().prop_map(|(connection, node)| Act::Sleep { connection, node }),
        1 => which().prop_map(|(connection, node)| Act::Die { connection, node }),
        6 => (0..2_usize).prop_map(|node| Act::Poll { node }),
        1 => Just(Act::LinkDown),
        2 => Just(Act::LinkUp),
        2 => (0..2_usize).prop_map(|node| Act::KillProxy { node }),
        1 => (0..2_usize).prop_map(|node| Act::KillProxyAndMonitor { node }),
    ]
}

impl World {
    fn new() -> Self {
        let mut world = Self { memory: Rc::default(), proxies: Default::default(), now_ns: 1 };
        world.link_up();
        world
    }

    fn step(&mut self, act: Act) {
        self.now_ns += 1;
        match act {
            Act::Open { node } => self.open(node),
            Act::Send { connection, node } => self.send(connection, node),
            Act::Store { connection, node } => self.store(connection, node),
            Act::Sleep { connection, node } => self.sleep(connection, node),
            Act::Die { connection, node } => self.die(connection, node),
            Act::Poll { node } => self.poll(node),
            Act::LinkDown => (0..2).for_each(|node| self.lose_link(node)),
            Act::LinkUp => self.link_up(),
            Act::KillProxy { node } => self.kill_proxy(node),
            Act::KillProxyAndMonitor { node } => self.kill_proxy_and_monitor(node),
        }
    }

    /// A program of `node` connects to one of the other node.
    fn open(&mut self, node: usize) {
        let connection = self.memory.borrow().connections.len();
        if connection == CONNECTIONS_MAX || self.proxies.iter().any(|proxy| proxy.engine.is_none()) {
            return;
        }
        self.memory.borrow_mut().connections.push(Default::default());
        let client = EndpointStub::new(&self.memory, connection, node);
        let engine = self.proxies[node].engine.as_mut().expect("checked above");
        let key = engine.open(open_payload(), |_| client).expect("room");
        self.proxies[node].keys.insert(connection, key);
        self.settle();
        let engine = self.proxies[1 - node].engine.as_mut().expect("checked above");
        let Some(EngineEvent::Open { key, .. }) = engine.next_event() else { panic!("no connection came") };
        engine.answer(key, Ok(EndpointStub::new(&self.memory, connection, 1 - node)));
        self.proxies[1 - node].keys.insert(connection, key);
        self.settle();
    }

    fn with_living<T>(&self, connection: usize, node: usize, act: impl FnOnce(&mut [Program; 2]) -> T) -> Option<T> {
        let mut memory = self.memory.borrow_mut();
        let programs = memory.connections.get_mut(connection).filter(|programs| !programs[node].is_dead)?;
        Some(act(programs))
    }

    /// The program sends bytes, of which each has its place in the stream as its value.
    fn send(&self, connection: usize, node: usize) {
        self.with_living(connection, node, |programs| {
            let program = &mut programs[node];
            (0..5).for_each(|_| program.sent.push(program.sent.len() as u8));
            program.has_event = true;
        });
    }

    /// Notes which connections have something on its way between the programs, before it is lost.
    fn note_on_the_way(&self) {
        let memory = &mut *self.memory.borrow_mut();
        for (connection, programs) in memory.connections.iter().enumerate() {
            let has_bytes = |node: usize| programs[node].taken != programs[1 - node].given.len();
            let is_closing = |node: usize| {
                let is_known = |node: usize| memory.retained[node].values().any(|known| *known == connection);
                !is_known(node) && !programs[1 - node].is_peer_closed
            };
            if (0..2).any(|node| has_bytes(node) || is_closing(node)) {
                memory.on_the_way.insert(connection);
            }
        }
    }

    /// The program stores; the kernel reports a ring to the proxy if there is one.
    fn store(&self, connection: usize, node: usize) {
        self.with_living(connection, node, |programs| {
            programs[node].stored += 1;
            if programs[1 - node].asleep_after.is_some() {
                programs[node].rings += 1;
                programs[node].has_event = true;
            }
        });
    }

    fn sleep(&self, connection: usize, node: usize) {
        self.with_living(connection, node, |programs| {
            let has_ended = programs[node].is_peer_closed || programs[node].is_reset;
            programs[node].asleep_after = (!has_ended).then_some(programs[1 - node].stored);
        });
    }

    fn die(&self, connection: usize, node: usize) {
        let die = |programs: &mut [Program; 2]| {
            let program = &mut programs[node];
            (program.is_dead, program.has_event, program.asleep_after) = (true, true, None);
        };
        self.with_living(connection, node, die);
    }

    fn poll(&mut self, node: usize) {
        let proxy = &mut self.proxies[node];
        let Some(engine) = &mut proxy.engine else { return };
        for (connection, key) in &proxy.keys {
            let has_event = std::mem::take(&mut self.memory.borrow_mut().connections[*connection][node].has_event);
            if has_event {
                engine.endpoint_ready(*key);
            }
        }
        engine.poll(self.now_ns).expect("the link is intact");
    }

    fn settle(&mut self) {
        for _ in 0..12 {
            (0..2).for_each(|node| self.poll(node));
        }
    }

    fn lose_link(&mut self, node: usize) {
        self.note_on_the_way();
        let proxy = &mut self.proxies[node];
        proxy.keys.clear();
        if let Some(mut engine) = proxy.engine.take() {
            proxy.suspended.extend(engine.suspend(self.now_ns));
        }
    }

    fn kill_proxy(&mut self, node: usize) {
        self.note_on_the_way();
        self.memory.borrow_mut().is_killing = true;
        self.proxies[node] = Proxy::default();
        self.memory.borrow_mut().is_killing = false;
        // The other node's monitor takes the link down. The next proxy gets what this node's monitor retains.
        self.lose_link(1 - node);
        let stored: Vec<_> = self.memory.borrow().retained[node].clone().into_iter().collect();
        for (number, connection) in stored {
            let number = ConnectionNumber(number);
            let mut local = EndpointStub::new(&self.memory, connection, node);
            local.number = Some(number);
            self.proxies[node].suspended.push(SuspendedConnection { number, local, lost_ns: self.now_ns });
        }
    }

    /// The descriptors end too.
    fn kill_proxy_and_monitor(&mut self, node: usize) {
        let stored = std::mem::take(&mut self.memory.borrow_mut().retained[node]);
        for connection in stored.into_values() {
            let mut memory = self.memory.borrow_mut();
            let program = &mut memory.connections[connection][node];
            (program.is_reset, program.asleep_after) = (true, None);
            memory.lost.insert(connection);
        }
        self.kill_proxy(node);
    }

    fn link_up(&mut self) {
        if self.proxies.iter().any(|proxy| proxy.engine.is_some()) {
            return;
        }
        let (low, high) = links();
        for (node, (link, side)) in [(low, LinkSide::Lower), (high, LinkSide::Higher)].into_iter().enumerate() {
            let proxy = &mut self.proxies[node];
            let engine = proxy.engine.insert(engine(&link, side));
            for SuspendedConnection { number, local, lost_ns } in proxy.suspended.drain(..) {
                let connection = local.connection;
                // An edge-triggered epoll reports a pending event when a descriptor is added.
                local.program(|program| program.has_event = true);
                let key = engine.resume_suspended(number, lost_ns, |_| local).expect("room");
                proxy.keys.insert(connection, key);
            }
        }
    }

    #[track_caller]
    fn check_settled(&mut self) {
        self.link_up();
        self.settle();
        let memory = self.memory.borrow();
        for (connection, programs) in memory.connections.iter().enumerate() {
            let may_be_reset = memory.lost.contains(&connection) || memory.on_the_way.contains(&connection);
            for node in 0..2 {
                let (own, other) = (&programs[node], &programs[1 - node]);
                assert!(other.sent.starts_with(&own.given), "bytes were lost or repeated: {programs:?}");
                if own.is_dead {
                    continue;
                }
                assert!(may_be_reset || !own.is_reset, "a program was reset: {programs:?}");
                let has_ended = own.is_peer_closed || own.is_reset;
                assert!(has_ended || own.given == other.sent, "bytes are missing: {programs:?}");
                assert!(own.is_reset || !own.is_peer_closed || own.given == other.sent, "{programs:?}");
                assert!(if other.is_dead { has_ended } else { other.is_reset == own.is_reset }, "{programs:?}");
                let is_awake = own.asleep_after.is_none_or(|seen| seen == other.stored);
                assert!(has_ended || is_awake, "still asleep: {programs:?}");
            }
        }
        let is_open = |programs: &&[Program; 2]| programs.iter().all(|program| !program.is_dead && !program.is_reset);
        let open = memory.connections.iter().filter(is_open).count();
        drop(memory);
        for proxy in &mut self.proxies {
            let engine = proxy.engine.as_mut().expect("the link is up");
            assert_eq!((engine.connections(), engine.unresumed(), engine.counters().violations), (open, 0, 0));
        }
    }
}

#[test]
fn a_connection_opens_after_one_has_ended_during_a_resumption() {
    let mut world = World::new();
    [0, 1].into_iter().for_each(|node| world.open(node));
    let die = |node| Act::Die { connection: 1, node };
    let poll = |node| Act::Poll { node };
    let acts = [Act::LinkDown, Act::LinkUp, poll(1), die(1), poll(0), die(0), poll(1), Act::Open { node: 1 }];
    acts.into_iter().for_each(|act| world.step(act));
    world.check_settled();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_byte_is_lost_or_repeated_and_only_connections_with_bytes_on_their_way_are_reset(
        opens in prop::collection::vec(0..2_usize, 1..CONNECTIONS_MAX),
        acts in prop::collection::vec(any_act(), 0..80),
    ) {
        let mut world = World::new();
        opens.into_iter().for_each(|node| world.open(node));
        acts.into_iter().for_each(|act| world.step(act));
        world.check_settled();
    }

    /// A hostile proxy sends any frames for a suspended connection.
    #[test]
    fn unexpected_frames_for_a_suspended_connection_reset_only_it(
        frames in prop::collection::vec((0..2_u32, 2..=15_u8, 0..3_u32), 1..12)
    ) {
        let (a, b) = links();
        let mut engine = engine(&a, LinkSide::Lower);
        let memory = Rc::<RefCell<Memory>>::default();
        memory.borrow_mut().connections = vec![Default::default(); 2];
        for connection in 0..2 {
            let number = ConnectionNumber::new(connection as u32, LinkSide::Lower);
            engine.resume_suspended(number, 1, |_| EndpointStub::new(&memory, connection, 0)).expect("room");
        }
        let (mut to, mut from) = lanes(&b);
        let (mut may_be_woken, mut must_be_reset) = (false, false);
        for (index, (connection, kind, aux)) in frames.into_iter().enumerate() {
            let len_bytes = match kind {
                4 => 1,
                10 => 8,
                15 => Carried::BYTES,
                _ => 0,
            };
            let mut bytes = [0; HEADER_BYTES + Carried::BYTES];
            bytes[..4].copy_from_slice(&ConnectionNumber::new(connection, LinkSide::Lower).0.to_le_bytes());
            (bytes[4], bytes[8]) = (kind, len_bytes as u8);
            bytes[12..16].copy_from_slice(&aux.to_le_bytes());
            let is_of_first = connection == 0;
            may_be_woken |= is_of_first && kind == FrameKind::ResumeWithSpan as u8 && aux == 0 && !must_be_reset;
            must_be_reset |= is_of_first && !may_be_woken;
            prop_assert!(to.write(&bytes[..HEADER_BYTES + len_bytes]).is_ok(), "{index}");
            prop_assert!(engine.poll(1).is_ok());
            while from.peek().expect("the lane is intact").is_some_and(|chunk| from.consume(chunk.len_bytes).is_ok()) {}
        }
        let first = memory.borrow().connections[0][0].clone();
        prop_assert!(!must_be_reset || first.is_reset, "{first:?}");
        prop_assert!(may_be_woken || !first.is_woken, "{first:?}");
        prop_assert!(may_be_woken || must_be_reset || !first.is_reset, "{first:?}");
    }
}

#[test]
fn a_connection_that_a_proxy_has_lost_is_reset_at_the_other_end() {
    for node in 0..2 {
        let mut world = World::new();
        world.open(0);
        world.sleep(0, 1 - node);
        world.kill_proxy_and_monitor(node);
        world.link_up();
        world.settle();
        assert!(world.memory.borrow().connections[0][1 - node].is_reset);
        let connections = world.proxies.each_ref().map(|proxy| proxy.engine.as_ref().map(Engine::connections));
        assert_eq!(connections, [Some(0); 2]);
    }
}

#[test]
fn a_connection_that_waits_too_long_is_reset_and_a_late_peer_is_notified() {
    let mut world = World::new();
    world.open(0);
    world.now_ns = 100;
    world.lose_link(0);
    world.lose_link(1);
    // Two links over which node 1 sends nothing do not extend the time limit.
    for now_ns in [200, 300] {
        world.now_ns = now_ns;
        let suspended = std::mem::take(&mut world.proxies[1].suspended);
        world.link_up();
        world.poll(0);
        world.proxies[1].suspended = suspended;
        world.lose_link(0);
        world.proxies[1].engine = None;
        assert_eq!(world.proxies[0].suspended[0].lost_ns, 100);
    }
    world.link_up();
    world.poll(0);
    let engine = world.proxies[0].engine.as_mut().unwrap();
    assert_eq!((engine.reset_lost_before(100), engine.unresumed()), (0, 1));
    assert_eq!((engine.reset_lost_before(101), engine.unresumed()), (1, 0));
    world.settle();
    assert!(world.memory.borrow().connections[0].iter().all(|program| program.is_reset));
    assert!(world.proxies.iter().all(|proxy| proxy.engine.as_ref().unwrap().connections() == 0));
}

#[test]
fn endpoints_with_different_spans_are_reset() {
    let mut world = World::new();
    world.open(0);
    world.lose_link(0);
    world.lose_link(1);
    world.memory.borrow_mut().connections.push(Default::default());
    world.proxies[1].suspended[0].local.connection = 1;
    world.link_up();
    world.settle();
    let memory = world.memory.borrow();
    assert!(memory.connections[0][0].is_reset && memory.connections[1][1].is_reset);
}
