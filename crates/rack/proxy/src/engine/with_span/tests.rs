//! Facts about connections with a span between two engines.

use super::*;
use crate::connection::OpenPayload;
use crate::engine::Engine;
use crate::engine::{EngineEvent, EngineSettings, PartitionLanes};
use crate::frame::{Carried, ConnectionNumber, FrameKind, HEADER_BYTES, LinkSide, Resumption};
use crate::local::{Broken, Input};
use fabric::heap::{self, HeapLink};
use fabric::{Link, train_both};
use lane::{Consumer, Draft, Layout, Producer, Span};
use proptest::prelude::*;
use std::cell::RefCell;
use std::rc::Rc;

type Window = <HeapLink as Link>::Inbound;
type Peers = <HeapLink as Link>::Outbound;

/// The calls that an endpoint has received, and its next input.
#[derive(Default)]
struct CallLog {
    calls: Vec<&'static str>,
    input: Option<Input>,
    has_rung: bool,
    has_left: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Forwarded,
    Proposing,
    WithSpan,
}

struct EndpointStub {
    path: Path,
    log: Rc<RefCell<CallLog>>,
}

impl EndpointStub {
    fn new(path: Path) -> (Self, Rc<RefCell<CallLog>>) {
        let log = Rc::<RefCell<CallLog>>::default();
        (Self { path, log: Rc::clone(&log) }, log)
    }

    fn record(&self, what: &'static str) {
        self.log.borrow_mut().calls.push(what);
    }
}

impl LocalEndpoint for EndpointStub {
    fn may_have_input(&mut self) -> bool {
        false
    }

    fn input(&mut self) -> Input {
        self.log.borrow_mut().input.take().unwrap_or(Input::Nothing)
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, _draft: &mut Draft<'_, O, I>, _len_bytes: usize) {}

    fn read_input(&mut self, _skip_bytes: usize, _destination: &mut [u8]) {}

    fn consume(&mut self, _len_bytes: usize) -> Result<(), Broken> {
        Ok(())
    }

    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        Ok(bytes.len_bytes())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        Ok(bytes.len())
    }

    fn has_room(&mut self) -> bool {
        true
    }

    fn close(self) {
        self.record("closed");
    }

    fn reset(self) {
        self.record("reset");
    }

    fn opened(&mut self) {
        self.record("opened");
    }

    fn begin_with_span(&mut self, _number: ConnectionNumber) -> bool {
        if self.path == Path::Proposing {
            self.record("span accepted");
            self.path = Path::WithSpan;
        }
        self.path == Path::WithSpan
    }

    fn take_ring(&mut self) -> bool {
        std::mem::take(&mut self.log.borrow_mut().has_rung)
    }

    fn take_left(&mut self) -> bool {
        std::mem::take(&mut self.log.borrow_mut().has_left)
    }

    fn peer_left(&mut self) {
        self.record("peer left");
    }

    fn wake(&mut self) {
        self.record("woken");
    }
}

const LAYOUT: Layout = Layout::packed(1024, 0);
const SECRET: u64 = 77;

pub(in crate::engine) fn lanes(link: &HeapLink) -> (Producer<Peers, Window>, Consumer<Window, Peers>) {
    let to = Producer::new(link.outbound(), link.inbound(), LAYOUT, SECRET);
    (to, Consumer::new(link.inbound(), link.outbound(), LAYOUT, SECRET))
}

pub(in crate::engine) fn engine<L: LocalEndpoint>(link: &HeapLink, side: LinkSide) -> Engine<Window, Peers, L> {
    let (to, from) = lanes(link);
    Engine::new(EngineSettings::new(side), vec![PartitionLanes::new(to, from)])
}

pub(in crate::engine) fn links() -> (HeapLink, HeapLink) {
    let (mut one, mut other) = heap::pair(LAYOUT.window_bytes());
    assert!(train_both(&mut one, &mut other));
    (one, other)
}

pub(in crate::engine) fn open_payload() -> OpenPayload {
    OpenPayload::new(b"to whom").expect("short")
}

/// Two engines, and a program at the first one that has connected to a program at the second one.
struct World {
    engines: [Engine<Window, Peers, EndpointStub>; 2],
    keys: [ConnectionKey; 2],
    log: [Rc<RefCell<CallLog>>; 2],
}

impl World {
    fn open(paths: [Path; 2]) -> Self {
        let (a, b) = links();
        let mut engines = [engine(&a, LinkSide::Lower), engine(&b, LinkSide::Higher)];
        let [(client, client_log), (server, server_log)] = paths.map(EndpointStub::new);
        let opened = engines[0].open(open_payload(), |_| client).expect("room");
        engines.iter_mut().for_each(|engine| _ = engine.poll(1).expect("the link is intact"));
        let Some(EngineEvent::Open { key, .. }) = engines[1].next_event() else { panic!("no connection came") };
        engines[1].answer(key, Ok(server));
        let mut world = Self { engines, keys: [opened, key], log: [client_log, server_log] };
        world.settle();
        world
    }

    fn settle(&mut self) {
        for _ in 0..8 {
            self.engines.iter_mut().for_each(|engine| _ = engine.poll(1).expect("the link is intact"));
        }
    }

    fn deliver(&mut self, end: usize, input: Input) {
        self.log[end].borrow_mut().input = Some(input);
        self.engines[end].endpoint_ready(self.keys[end]);
        self.settle();
    }

    fn ring(&mut self, end: usize) {
        self.log[end].borrow_mut().has_rung = true;
        self.engines[end].endpoint_ready(self.keys[end]);
        self.settle();
    }

    fn calls(&self, end: usize) -> Vec<&'static str> {
        std::mem::take(&mut self.log[end].borrow_mut().calls)
    }

    fn connections(&self) -> [usize; 2] {
        [0, 1].map(|end| self.engines[end].connections())
    }
}

#[test]
fn a_connection_with_a_span_forwards_bells_and_ends_like_one_that_is_forwarded() {
    for first in [0, 1] {
        let mut world = World::open([Path::Proposing, Path::WithSpan]);
        assert_eq!((world.calls(0), world.calls(1)), (vec!["span accepted", "opened"], vec![]));
        for end in [1, 0, 0] {
            world.ring(end);
            assert_eq!((world.calls(1 - end), world.calls(end)), (vec!["woken"], vec![]));
        }
        world.log[first].borrow_mut().has_left = true;
        world.ring(first);
        assert_eq!((world.calls(1 - first), world.calls(first)), (vec!["peer left", "woken"], vec![]));
        world.deliver(first, Input::Closed);
        assert_eq!((world.calls(1 - first), world.calls(first)), (vec!["closed"], vec![]));
        assert_eq!(world.connections(), [0, 0]);
        assert_eq!(world.engines[0].counters().violations + world.engines[1].counters().violations, 0);
    }
}

#[test]
fn if_the_span_is_not_accepted_the_proxies_forward_the_bytes() {
    let mut world = World::open([Path::Proposing, Path::Forwarded]);
    assert_eq!(world.calls(0), ["opened"]);
    world.deliver(1, Input::Closed);
    assert_eq!((world.calls(0), world.connections()), (vec!["closed"], [0, 0]));
}

#[test]
fn a_lost_link_resets_a_connection_that_cannot_be_resumed() {
    let mut world = World::open([Path::Proposing, Path::WithSpan]);
    assert!(world.engines.iter_mut().all(|engine| engine.suspend(1).is_empty()));
    assert_eq!((world.calls(0), world.calls(1)), (vec!["span accepted", "opened", "reset"], vec!["reset"]));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    /// A hostile proxy sends any frames for two connections of a program, one with a span and one without.
    #[test]
    fn unexpected_frames_of_a_peer_reset_only_their_connection(
        frames in prop::collection::vec((0..2_u32, 2..=15_u8, 0..3_u32), 1..20)
    ) {
        let (a, b) = links();
        let mut engine = engine(&a, LinkSide::Lower);
        let (mut to, mut from) = lanes(&b);
        let ends = [Path::Proposing, Path::Forwarded].map(EndpointStub::new);
        let log = ends.map(|(end, log)| {
            engine.open(open_payload(), |_| end).expect("room");
            log
        });
        for (connection, kind, aux) in frames {
            let len_bytes = match kind {
                10 => Resumption::BYTES,
                15 => Carried::BYTES,
                kind => usize::from(kind == FrameKind::Data as u8),
            };
            let mut bytes = [0; HEADER_BYTES + Carried::BYTES];
            bytes[..4].copy_from_slice(&ConnectionNumber::new(connection, LinkSide::Lower).0.to_le_bytes());
            (bytes[4], bytes[8]) = (kind, len_bytes as u8);
            bytes[12..16].copy_from_slice(&aux.to_le_bytes());
            prop_assert!(to.write(&bytes[..HEADER_BYTES + len_bytes]).is_ok());
            prop_assert!(engine.poll(1).is_ok());
            while from.peek().expect("the lane is intact").is_some_and(|chunk| from.consume(chunk.len_bytes).is_ok()) {}
        }
        let calls = log.map(|log| log.borrow().calls.clone());
        for answer in ["span accepted", "opened"] {
            prop_assert!(calls[0].iter().filter(|call| **call == answer).count() <= 1, "{calls:?}");
        }
        // A refused connection receives no call.
        for calls in &calls {
            let ends = calls.iter().filter(|calls| ["reset", "closed"].contains(calls)).count();
            let is_last = ["reset", "closed"].contains(calls.last().unwrap_or(&""));
            prop_assert!(ends <= 1 && (ends == 0 || is_last), "{calls:?}");
        }
        prop_assert!(!calls[1].contains(&"woken") && !calls[1].contains(&"peer left"), "{calls:?}");
        prop_assert!(!calls[0].contains(&"woken") || calls[0].contains(&"span accepted"), "{calls:?}");
    }
}
