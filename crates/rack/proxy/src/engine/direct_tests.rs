use super::*;
use crate::connection::OpenPayload;
use crate::engine::Engine;
use crate::engine::{EngineEvent, EngineSettings, PartitionLanes};
use crate::frame::{ConnectionNumber, HEADER_BYTES, LinkSide, Resumption};
use crate::local::{Broken, Input};
use fabric::heap::{self, HeapLink};
use fabric::{Link, train_both};
use lane::{Consumer, Draft, Layout, Producer, Span};
use proptest::prelude::*;
use std::cell::RefCell;
use std::rc::Rc;

type Window = <HeapLink as Link>::Inbound;
type Peers = <HeapLink as Link>::Outbound;

/// What a program's end has been told, and what it has to say.
#[derive(Default)]
struct Said {
    told: Vec<&'static str>,
    input: Option<Input>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Carried,
    Proposing,
    Direct,
}

struct EndpointStub {
    way: Way,
    said: Rc<RefCell<Said>>,
}

impl EndpointStub {
    fn new(way: Way) -> (Self, Rc<RefCell<Said>>) {
        let said = Rc::<RefCell<Said>>::default();
        (Self { way, said: Rc::clone(&said) }, said)
    }

    fn tell(&self, what: &'static str) {
        self.said.borrow_mut().told.push(what);
    }
}

impl LocalEndpoint for EndpointStub {
    fn may_have_input(&mut self) -> bool {
        false
    }

    fn input(&mut self) -> Input {
        self.said.borrow_mut().input.take().unwrap_or(Input::Nothing)
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
        self.tell("closed");
    }

    fn reset(self) {
        self.tell("reset");
    }

    fn opened(&mut self) {
        self.tell("opened");
    }

    fn is_direct(&self) -> bool {
        self.way == Way::Direct
    }

    fn move_to_span(&mut self, _number: ConnectionNumber) -> bool {
        if self.way == Way::Direct {
            return true;
        }
        let is_proposed = std::mem::replace(&mut self.way, Way::Direct) == Way::Proposing;
        self.tell("placed");
        is_proposed
    }

    fn wake(&mut self) {
        self.tell("called");
    }

    fn peer_closed(&mut self) {
        self.tell("left");
    }
}

const LAYOUT: Layout = Layout::packed(1024, 0);
const SECRET: u64 = 77;

pub(super) fn lanes(link: &HeapLink) -> (Producer<Peers, Window>, Consumer<Window, Peers>) {
    let to = Producer::new(link.outbound(), link.inbound(), LAYOUT, SECRET);
    (to, Consumer::new(link.inbound(), link.outbound(), LAYOUT, SECRET))
}

pub(super) fn engine<L: LocalEndpoint>(link: &HeapLink, side: LinkSide) -> Engine<Window, Peers, L> {
    let (to, from) = lanes(link);
    Engine::new(EngineSettings::new(side), vec![PartitionLanes::new(to, from)])
}

pub(super) fn links() -> (HeapLink, HeapLink) {
    let (mut one, mut other) = heap::pair(LAYOUT.window_bytes());
    assert!(train_both(&mut one, &mut other));
    (one, other)
}

pub(super) fn open_payload() -> OpenPayload {
    OpenPayload::new(b"to whom").expect("short")
}

/// Two engines, and a program at the first that has connected to one at the second.
struct World {
    engines: [Engine<Window, Peers, EndpointStub>; 2],
    keys: [ConnectionKey; 2],
    said: [Rc<RefCell<Said>>; 2],
}

impl World {
    fn open(ways: [Way; 2]) -> Self {
        let (a, b) = links();
        let mut engines = [engine(&a, LinkSide::Lower), engine(&b, LinkSide::Higher)];
        let [(client, client_said), (server, server_said)] = ways.map(EndpointStub::new);
        let opened = engines[0].open(open_payload(), |_| client).expect("room");
        engines.iter_mut().for_each(|engine| _ = engine.poll(1).expect("a sound link"));
        let Some(EngineEvent::Open { key, .. }) = engines[1].next_event() else { panic!("no connection came") };
        engines[1].answer(key, Ok(server));
        let mut world = Self { engines, keys: [opened, key], said: [client_said, server_said] };
        world.settle();
        world
    }

    fn settle(&mut self) {
        for _ in 0..8 {
            self.engines.iter_mut().for_each(|engine| _ = engine.poll(1).expect("a sound link"));
        }
    }

    fn hear(&mut self, end: usize, input: Input) {
        self.said[end].borrow_mut().input = Some(input);
        self.engines[end].lifeline_ready(self.keys[end]);
        self.settle();
    }

    fn told(&self, end: usize) -> Vec<&'static str> {
        std::mem::take(&mut self.said[end].borrow_mut().told)
    }

    fn connections(&self) -> [usize; 2] {
        [0, 1].map(|end| self.engines[end].connections())
    }
}

#[test]
fn a_connection_that_is_placed_is_rung_for_and_is_over_when_both_ends_have_closed() {
    for first in [0, 1] {
        let mut world = World::open([Way::Proposing, Way::Direct]);
        assert_eq!((world.told(0), world.told(1)), (vec!["placed"], vec![]));
        for end in [1, 0, 0] {
            world.hear(end, Input::Rang);
            assert_eq!((world.told(1 - end), world.told(end)), (vec!["called"], vec![]));
        }
        world.hear(first, Input::Closed);
        assert_eq!((world.told(1 - first), world.told(first)), (vec!["left"], vec![]));
        assert_eq!(world.connections(), [1, 1], "its place is nobody else's yet");
        world.hear(1 - first, Input::Rang);
        world.hear(first, Input::Closed);
        assert_eq!((world.told(0), world.told(1)), (vec![], vec![]), "nobody is there to hear a ring");
        world.hear(1 - first, Input::Closed);
        assert_eq!(world.connections(), [0, 0]);
        assert_eq!(world.engines[0].counters().violations + world.engines[1].counters().violations, 0);
    }
}

#[test]
fn a_place_that_is_not_taken_leaves_the_bytes_to_the_proxies() {
    let mut world = World::open([Way::Proposing, Way::Carried]);
    assert_eq!(world.told(0), ["opened"]);
    world.hear(1, Input::Closed);
    assert_eq!((world.told(0), world.connections()), (vec!["closed"], [0, 0]));
}

#[test]
fn a_server_that_never_came_and_a_link_that_goes_reset() {
    let mut world = World::open([Way::Proposing, Way::Direct]);
    world.hear(1, Input::Broken);
    assert_eq!((world.told(0), world.told(1)), (vec!["placed", "reset"], vec!["reset"]));
    assert_eq!(world.connections(), [0, 0]);
    let mut world = World::open([Way::Proposing, Way::Direct]);
    world.engines.iter_mut().for_each(Engine::take_down);
    assert_eq!((world.told(0), world.told(1)), (vec!["placed", "reset"], vec!["reset"]));
}

#[test]
fn a_client_that_is_gone_before_the_answer_is_told_of_to_the_server() {
    let (a, b) = links();
    let mut engines = [engine(&a, LinkSide::Lower), engine(&b, LinkSide::Higher)];
    let ((client, client_said), (server, server_said)) =
        (EndpointStub::new(Way::Proposing), EndpointStub::new(Way::Direct));
    let opened = engines[0].open(open_payload(), |_| client).expect("room");
    client_said.borrow_mut().input = Some(Input::Closed);
    engines[0].lifeline_ready(opened);
    for _ in 0..4 {
        engines.iter_mut().for_each(|engine| _ = engine.poll(1).expect("a sound link"));
    }
    let Some(EngineEvent::Open { key, .. }) = engines[1].next_event() else { panic!("no connection came") };
    engines[1].answer(key, Ok(server));
    assert_eq!(server_said.borrow().told, ["left"]);
    assert_eq!((engines[0].connections(), engines[1].connections()), (0, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    /// A hostile proxy says anything of two connections of a program's, one in the windows and one that is carried.
    #[test]
    fn what_a_peer_says_out_of_turn_costs_it_the_connection_and_nothing_else(
        frames in prop::collection::vec((0..2_u32, 2..=14_u8, 0..3_u32), 1..20)
    ) {
        let (a, b) = links();
        let mut engine = engine(&a, LinkSide::Lower);
        let (mut to, mut from) = lanes(&b);
        let ends = [Way::Proposing, Way::Carried].map(EndpointStub::new);
        let said = ends.map(|(end, said)| {
            engine.open(open_payload(), |_| end).expect("room");
            said
        });
        for (connection, kind, aux) in frames {
            let len_bytes = match kind {
                10 => Resumption::BYTES,
                kind => usize::from(kind == FrameKind::Data as u8),
            };
            let mut bytes = [0; HEADER_BYTES + Resumption::BYTES];
            bytes[..4].copy_from_slice(&ConnectionNumber::new(connection, LinkSide::Lower).0.to_le_bytes());
            (bytes[4], bytes[8]) = (kind, len_bytes as u8);
            bytes[12..16].copy_from_slice(&aux.to_le_bytes());
            prop_assert!(to.write(&bytes[..HEADER_BYTES + len_bytes]).is_ok());
            prop_assert!(engine.poll(1).is_ok());
            while from.peek().expect("a sound lane").is_some_and(|chunk| from.consume(chunk.len_bytes).is_ok()) {}
        }
        let told = said.map(|said| said.borrow().told.clone());
        prop_assert!(told[0].iter().filter(|told| ["placed", "opened"].contains(told)).count() <= 1, "{told:?}");
        // What was refused has an end that was told nothing more.
        for told in &told {
            let ends = told.iter().filter(|told| ["reset", "closed"].contains(told)).count();
            let is_last = ["reset", "closed"].contains(told.last().unwrap_or(&""));
            prop_assert!(ends <= 1 && (ends == 0 || is_last), "{told:?}");
        }
        prop_assert!(!told[1].contains(&"called") && !told[1].contains(&"left"), "{told:?}");
        prop_assert!(!told[0].contains(&"called") || told[0].contains(&"placed"), "{told:?}");
    }
}
