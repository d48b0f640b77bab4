//! Histories of two programs that store into windows themselves while links and proxies come and go.

use super::tests::{engine, lanes, links, open_payload};
use super::*;
use crate::engine::Engine;
use crate::engine::EngineEvent;
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

/// A program's end: what lies in its window, and its lifeline, which outlive links and proxies.
#[derive(Debug, Default, Clone)]
struct Program {
    is_dead: bool,
    /// Records that it has stored into the other's window.
    stored: u64,
    /// It sleeps, having seen so many of the other's.
    asleep_after: Option<u64>,
    is_called: bool,
    /// It was told that the other is gone.
    is_left: bool,
    is_reset: bool,
    /// Rings of its in the lifeline.
    rings: u64,
    /// The lifeline has news that the proxy has not been told of.
    has_news: bool,
}

/// What two nodes have of each connection that no death of a proxy takes away.
#[derive(Debug, Default)]
struct Memory {
    connections: Vec<[Program; 2]>,
    /// The monitors' stores: which connection has which number.
    stores: [BTreeMap<u32, usize>; 2],
    /// Connections that a proxy had which died together with its monitor.
    lost: BTreeSet<usize>,
    /// Proxies die without a word.
    is_killing: bool,
}

/// A proxy's end of a connection.
struct EndpointStub {
    memory: Rc<RefCell<Memory>>,
    connection: usize,
    node: usize,
    is_placed: bool,
    number: Option<ConnectionNumber>,
    has_rung: bool,
    is_hung_up: bool,
}

impl EndpointStub {
    fn new(memory: &Rc<RefCell<Memory>>, connection: usize, node: usize, is_placed: bool) -> Self {
        let memory = Rc::clone(memory);
        Self { memory, connection, node, is_placed, number: None, has_rung: false, is_hung_up: false }
    }

    fn program<T>(&self, act: impl FnOnce(&mut Program) -> T) -> T {
        act(&mut self.memory.borrow_mut().connections[self.connection][self.node])
    }
}

impl Drop for EndpointStub {
    fn drop(&mut self) {
        let mut memory = self.memory.borrow_mut();
        if let Some(number) = self.number.filter(|_| !memory.is_killing) {
            memory.stores[self.node].remove(&number.0);
        }
    }
}

impl LocalEndpoint for EndpointStub {
    fn may_have_input(&mut self) -> bool {
        false
    }

    fn input(&mut self) -> Input {
        match (self.is_hung_up, std::mem::take(&mut self.has_rung)) {
            (true, _) => Input::Closed,
            (false, true) => Input::Rang,
            (false, false) => Input::Nothing,
        }
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, _draft: &mut Draft<'_, O, I>, _len_bytes: usize) {
        panic!("a proxy carries bytes that lie in windows");
    }

    fn read_input(&mut self, _skip_bytes: usize, _destination: &mut [u8]) {}

    fn consume(&mut self, _len_bytes: usize) -> Result<(), Broken> {
        Err(Broken)
    }

    fn write_span<I: Inbound>(&mut self, _bytes: &Span<'_, I>) -> Result<usize, Broken> {
        Err(Broken)
    }

    fn write(&mut self, _bytes: &[u8]) -> Result<usize, Broken> {
        Err(Broken)
    }

    fn has_room(&mut self) -> bool {
        false
    }

    fn reset(self) {
        self.program(|program| (program.is_reset, program.asleep_after) = (true, None));
    }

    fn poll_lifeline(&mut self) {
        let (rings, is_dead) = self.program(|program| (std::mem::take(&mut program.rings), program.is_dead));
        self.has_rung |= rings > 0;
        self.is_hung_up |= is_dead;
    }

    fn is_direct(&self) -> bool {
        self.is_placed
    }

    fn move_to_span(&mut self, number: ConnectionNumber) -> bool {
        (self.is_placed, self.number) = (true, Some(number));
        self.memory.borrow_mut().stores[self.node].insert(number.0, self.connection);
        true
    }

    fn span_index(&self) -> u32 {
        self.connection as u32
    }

    fn wake(&mut self) {
        self.program(|program| (program.asleep_after, program.is_called) = (None, true));
    }

    fn peer_closed(&mut self) {
        self.program(|program| (program.is_left, program.asleep_after) = (true, None));
    }
}

/// A node's proxy.
#[derive(Default)]
struct Proxy {
    engine: Option<Engine<Window, Peers, EndpointStub>>,
    keys: BTreeMap<usize, ConnectionKey>,
    held: Vec<SuspendedConnection<EndpointStub>>,
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

    fn do_it(&mut self, act: Act) {
        self.now_ns += 1;
        match act {
            Act::Open { node } => self.open(node),
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

    /// A program of `node` connects to one of the other.
    fn open(&mut self, node: usize) {
        let connection = self.memory.borrow().connections.len();
        if connection == CONNECTIONS_MAX || self.proxies.iter().any(|proxy| proxy.engine.is_none()) {
            return;
        }
        self.memory.borrow_mut().connections.push(Default::default());
        let client = EndpointStub::new(&self.memory, connection, node, false);
        let engine = self.proxies[node].engine.as_mut().expect("looked");
        let key = engine.open(open_payload(), |_| client).expect("room");
        self.proxies[node].keys.insert(connection, key);
        self.settle();
        let engine = self.proxies[1 - node].engine.as_mut().expect("looked");
        let Some(EngineEvent::Open { key, .. }) = engine.next_event() else { panic!("no connection came") };
        engine.answer(key, Ok(EndpointStub::new(&self.memory, connection, 1 - node, true)));
        self.proxies[1 - node].keys.insert(connection, key);
        self.settle();
    }

    fn with_living<T>(&self, connection: usize, node: usize, act: impl FnOnce(&mut [Program; 2]) -> T) -> Option<T> {
        let mut memory = self.memory.borrow_mut();
        let programs = memory.connections.get_mut(connection).filter(|programs| !programs[node].is_dead)?;
        Some(act(programs))
    }

    /// What the kernel tells a proxy that is there.
    fn store(&self, connection: usize, node: usize) {
        self.with_living(connection, node, |programs| {
            programs[node].stored += 1;
            if programs[1 - node].asleep_after.is_some() {
                programs[node].rings += 1;
                programs[node].has_news = true;
            }
        });
    }

    fn sleep(&self, connection: usize, node: usize) {
        self.with_living(connection, node, |programs| {
            let has_ended = programs[node].is_left || programs[node].is_reset;
            programs[node].asleep_after = (!has_ended).then_some(programs[1 - node].stored);
        });
    }

    fn die(&self, connection: usize, node: usize) {
        let die = |programs: &mut [Program; 2]| {
            let program = &mut programs[node];
            (program.is_dead, program.has_news, program.asleep_after) = (true, true, None);
        };
        self.with_living(connection, node, die);
    }

    fn poll(&mut self, node: usize) {
        let proxy = &mut self.proxies[node];
        let Some(engine) = &mut proxy.engine else { return };
        for (connection, key) in &proxy.keys {
            let has_news = std::mem::take(&mut self.memory.borrow_mut().connections[*connection][node].has_news);
            if has_news {
                engine.lifeline_ready(*key);
            }
        }
        engine.poll(self.now_ns).expect("a sound link");
    }

    fn settle(&mut self) {
        for _ in 0..12 {
            (0..2).for_each(|node| self.poll(node));
        }
    }

    fn lose_link(&mut self, node: usize) {
        let proxy = &mut self.proxies[node];
        proxy.keys.clear();
        if let Some(mut engine) = proxy.engine.take() {
            proxy.held.extend(engine.suspend(self.now_ns));
        }
    }

    fn kill_proxy(&mut self, node: usize) {
        self.memory.borrow_mut().is_killing = true;
        self.proxies[node] = Proxy::default();
        self.memory.borrow_mut().is_killing = false;
        // The other's monitor takes the link down. Here, the next proxy gets what the monitor has.
        self.lose_link(1 - node);
        let stored: Vec<_> = self.memory.borrow().stores[node].clone().into_iter().collect();
        for (number, connection) in stored {
            let number = ConnectionNumber(number);
            let mut local = EndpointStub::new(&self.memory, connection, node, true);
            local.number = Some(number);
            self.proxies[node].held.push(SuspendedConnection { number, local, lost_ns: self.now_ns });
        }
    }

    /// The lifelines end too.
    fn kill_proxy_and_monitor(&mut self, node: usize) {
        let stored = std::mem::take(&mut self.memory.borrow_mut().stores[node]);
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
            for SuspendedConnection { number, local, lost_ns } in proxy.held.drain(..) {
                let connection = local.connection;
                // As an edge-triggered epoll tells of what is there when a descriptor is added.
                local.program(|program| program.has_news = program.is_dead || program.rings > 0);
                let key = engine.resume_direct(number, lost_ns, |_| local).expect("room");
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
            let is_lost = memory.lost.contains(&connection);
            for node in 0..2 {
                let (own, other) = (&programs[node], &programs[1 - node]);
                if own.is_dead {
                    continue;
                }
                assert!(is_lost || !own.is_reset, "a program was reset: {programs:?}");
                assert_eq!(own.is_left || own.is_reset, is_lost || other.is_dead, "{programs:?}");
                assert!(own.asleep_after.is_none_or(|seen| seen == other.stored), "sleeps on: {programs:?}");
            }
        }
        let is_left = |(connection, programs): &(usize, &[Program; 2])| {
            !memory.lost.contains(connection) && programs.iter().any(|program| !program.is_dead)
        };
        let left = memory.connections.iter().enumerate().filter(is_left).count();
        drop(memory);
        for proxy in &mut self.proxies {
            let engine = proxy.engine.as_mut().expect("the link is up");
            assert_eq!((engine.connections(), engine.unresumed(), engine.counters().violations), (left, 0, 0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn whatever_dies_programs_are_woken_and_told_and_only_those_are_reset_whose_lifeline_ended(
        opens in prop::collection::vec(0..2_usize, 1..CONNECTIONS_MAX),
        acts in prop::collection::vec(any_act(), 0..80),
    ) {
        let mut world = World::new();
        opens.into_iter().for_each(|node| world.open(node));
        acts.into_iter().for_each(|act| world.do_it(act));
        world.check_settled();
    }

    /// A hostile proxy says anything of a connection that was held.
    #[test]
    fn what_a_peer_says_of_what_is_held_costs_it_the_connection_and_nothing_else(
        frames in prop::collection::vec((0..2_u32, 2..=14_u8, 0..3_u32), 1..12)
    ) {
        let (a, b) = links();
        let mut engine = engine(&a, LinkSide::Lower);
        let memory = Rc::<RefCell<Memory>>::default();
        memory.borrow_mut().connections = vec![Default::default(); 2];
        for connection in 0..2 {
            let number = ConnectionNumber::new(connection as u32, LinkSide::Lower);
            engine.resume_direct(number, 1, |_| EndpointStub::new(&memory, connection, 0, true)).expect("room");
        }
        let (mut to, mut from) = lanes(&b);
        let (mut may_be_called, mut must_be_reset) = (false, false);
        for (index, (connection, kind, aux)) in frames.into_iter().enumerate() {
            let len_bytes = match kind {
                4 => 1,
                10 => 8,
                _ => 0,
            };
            let mut bytes = [0; HEADER_BYTES + 8];
            bytes[..4].copy_from_slice(&ConnectionNumber::new(connection, LinkSide::Lower).0.to_le_bytes());
            (bytes[4], bytes[8]) = (kind, len_bytes as u8);
            bytes[12..16].copy_from_slice(&aux.to_le_bytes());
            let is_of_first = connection == 0;
            may_be_called |= is_of_first && kind == FrameKind::ResumeDirect as u8 && aux == 0 && !must_be_reset;
            must_be_reset |= is_of_first && !may_be_called;
            prop_assert!(to.write(&bytes[..HEADER_BYTES + len_bytes]).is_ok(), "{index}");
            prop_assert!(engine.poll(1).is_ok());
            while from.peek().expect("a sound lane").is_some_and(|chunk| from.consume(chunk.len_bytes).is_ok()) {}
        }
        let first = memory.borrow().connections[0][0].clone();
        prop_assert!(!must_be_reset || first.is_reset, "{first:?}");
        prop_assert!(may_be_called || !first.is_called, "{first:?}");
        prop_assert!(may_be_called || must_be_reset || !first.is_reset, "{first:?}");
    }
}

#[test]
fn what_a_proxy_has_lost_for_good_is_reset_at_the_other_end() {
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
fn who_waits_for_too_long_is_reset_and_a_peer_that_comes_later_is_told() {
    let mut world = World::new();
    world.open(0);
    world.now_ns = 100;
    world.lose_link(0);
    world.lose_link(1);
    // Two links on which node 1 says nothing: they do not make the time longer.
    for now_ns in [200, 300] {
        world.now_ns = now_ns;
        let held = std::mem::take(&mut world.proxies[1].held);
        world.link_up();
        world.poll(0);
        world.proxies[1].held = held;
        world.lose_link(0);
        world.proxies[1].engine = None;
        assert_eq!(world.proxies[0].held[0].lost_ns, 100);
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
fn two_ends_that_mean_different_places_are_reset() {
    let mut world = World::new();
    world.open(0);
    world.lose_link(0);
    world.lose_link(1);
    world.memory.borrow_mut().connections.push(Default::default());
    world.proxies[1].held[0].local.connection = 1;
    world.link_up();
    world.settle();
    let memory = world.memory.borrow();
    assert!(memory.connections[0][0].is_reset && memory.connections[1][1].is_reset);
}
