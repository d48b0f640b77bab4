//! Two nodes, their engines, the programs that communicate through them, and an oracle of what those must see.

use crate::program::ProgramStub;
use fabric::heap::{self, HeapLink};
use fabric::{Inbound, Link, Outbound, Slice, train_both};
use lane::{Consumer, Layout, Producer};
use proxy::frame::LinkSide;
use proxy::{Class, Engine, EngineEvent, EngineSettings, LinkFault, OpenPayload, PartitionLanes, Placement};
use volmem::Region;

pub const SECRET: u64 = 0x0A11_C0DE;

/// How the nodes are set up.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub struct Shape {
    /// Whether streams have a partition of their own.
    pub has_classes: bool,
    /// Slots of a partition's ring: 8 shifted by 0 to 7.
    pub ring_shift: u8,
    /// Bytes of a slice; 0 for no slicing.
    pub slice_bytes: u16,
    /// Bound on simultaneous connections.
    pub connections_max: u8,
    /// Whether connections outlive their link.
    pub is_failover: bool,
    /// Whether processors are oversubscribed.
    pub is_oversubscribed: bool,
}

impl Shape {
    pub fn layout(&self) -> Layout {
        Layout::packed(8 << (self.ring_shift % 8), 0)
    }

    fn settings(&self, side: LinkSide) -> EngineSettings {
        EngineSettings {
            connections_max: usize::from(self.connections_max).clamp(1, 40),
            slice_bytes: if self.slice_bytes == 0 { usize::MAX } else { usize::from(self.slice_bytes) },
            backlog_bytes: 2048,
            credit_bytes: 20_000,
            poll_ns: 1000,
            is_failover: self.is_failover,
            placement: Some(Placement { burst_bytes: 3000, interval_bytes: 4000, interval_ns: 500, calm_intervals: 2 }),
            secret: 7,
            ..EngineSettings::new(side)
        }
    }

    fn engine<L: Link>(
        &self,
        side: LinkSide,
        link: &L,
        states: &[Region],
    ) -> Engine<L::Inbound, L::Outbound, ProgramStub> {
        let mut engine = Engine::new(self.settings(side), self.partition_lanes(link, states));
        engine.set_oversubscribed(self.is_oversubscribed);
        engine
    }

    fn partitions(&self) -> usize {
        if self.has_classes { Class::ALL.len() } else { 1 }
    }

    pub fn window_bytes(&self) -> usize {
        self.partitions() * self.partition_bytes()
    }

    fn partition_bytes(&self) -> usize {
        self.layout().window_bytes().next_multiple_of(64)
    }

    /// Returns the states of new senders of both nodes, one for each partition.
    fn sender_states(&self) -> [Vec<Region>; 2] {
        let states = || (0..self.partitions()).map(|_| Region::heap(Layout::PRODUCER_STATE_BYTES)).collect();
        [states(), states()]
    }

    /// Returns the lanes of one end of the partitions, over these windows and with these states of the senders.
    fn partition_lanes<L: Link>(&self, link: &L, states: &[Region]) -> Vec<PartitionLanes<L::Inbound, L::Outbound>> {
        (0..self.partitions())
            .map(|index| {
                let (inbound, outbound) = self.slices(link, index);
                let (state, layout) = (states[index].clone(), self.layout());
                let to = Producer::with_state(outbound.clone(), inbound.clone(), state, layout, SECRET);
                PartitionLanes::new(to, Consumer::new(inbound, outbound, self.layout(), SECRET))
            })
            .collect()
    }

    pub fn slices<L: Link>(&self, link: &L, index: usize) -> (L::Inbound, L::Outbound) {
        let bytes = self.partition_bytes();
        (link.inbound().slice(index * bytes, bytes), link.outbound().slice(index * bytes, bytes))
    }
}

/// One step of a history.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub enum Act {
    /// A program of a node connects.
    Open { node: bool, input_bytes_max: u16, is_refused: bool, server_reads: bool },
    /// A program sends.
    Send { connection: u8, node: bool, bytes: u16 },
    /// A program reads.
    Read { connection: u8, node: bool, bytes: u16 },
    /// A program shuts its sending direction down.
    Finish { connection: u8, node: bool },
    /// A program closes.
    Close { connection: u8, node: bool },
    /// A program is killed with bytes unread.
    Kill { connection: u8, node: bool },
    /// A proxy's thread polls.
    Poll { node: bool },
    /// A proxy's thread prepares for sleep.
    Sleep { node: bool },
    /// Time passes.
    Wait { ns: u16 },
    /// A node loses the link. It continues over another one as soon as the other node has lost it too.
    Lose { node: bool },
}

/// One direction of a connection, as the oracle knows it.
#[derive(Debug, Default, Clone)]
pub struct Stream {
    pub sent: u64,
    pub read: u64,
}

/// A connection, as the oracle knows it.
#[derive(Debug)]
pub struct Conversation {
    pub opener: usize,
    /// The endpoints at node 0 and node 1; the server's exists once the connection was answered.
    pub endpoints: [Option<ProgramStub>; 2],
    /// The directions, by the sending node.
    pub streams: [Stream; 2],
    pub is_refused: bool,
    /// Whether the program of each node reads in the end.
    pub reads: [bool; 2],
    input_bytes_max: usize,
}

impl Conversation {
    /// Returns the byte at a position, which differs between streams.
    pub fn byte(&self, index: usize, sender: usize, position: u64) -> u8 {
        let mixed = (index as u64) << 40 ^ (sender as u64) << 39 ^ position;
        (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
    }

    /// Returns whether the program that opened it was gone before it could learn of a server.
    fn is_never_made(&self) -> bool {
        self.endpoints[self.opener].as_ref().is_some_and(|end| {
            let end = end.lock();
            (end.is_closed || end.is_killed) && !end.is_opened
        })
    }

    /// Checks that nothing but the kill of a program resets a connection.
    fn check_no_reset(&self, index: usize) {
        let was =
            |what: fn(&crate::program::Shared) -> bool| self.endpoints.iter().flatten().any(|end| what(&end.lock()));
        assert!(was(|end| end.is_killed) || !was(|end| end.input_is_reset), "conversation {index} was reset: {self:?}");
    }

    /// Returns whether bytes of this direction may be lost.
    fn may_lose(&self, sender: usize) -> bool {
        let gone = |node: usize| {
            self.endpoints[node].as_ref().is_none_or(|end| {
                let end = end.lock();
                end.is_killed || end.input_is_reset
            })
        };
        let reader_is_closed = self.endpoints[1 - sender].as_ref().is_none_or(|end| end.lock().is_closed);
        self.is_refused || gone(0) || gone(1) || reader_is_closed
    }
}

/// A node: its engine, and whether its thread sleeps.
pub struct Node<L: Link> {
    pub engine: Engine<L::Inbound, L::Outbound, ProgramStub>,
    pub is_asleep: bool,
    pub is_rung: bool,
    pub fault: Option<LinkFault>,
    /// Number of links that it has lost.
    pub losses: usize,
}

/// Two nodes, and everything between them.
pub struct World<L: Link> {
    pub nodes: [Node<L>; 2],
    pub conversations: Vec<Conversation>,
    pub now_ns: u64,
    /// Called when time passes: delivers late stores.
    pub on_time: Box<dyn Fn(u64)>,
    /// The fence of a node before it checks for sleepers, which flushes write-combined stores.
    pub on_fence: Box<dyn Fn(usize)>,
    /// How long the flush of a node that is about to sleep takes: stores in flight to the node have arrived afterwards.
    pub flush_ns: u64,
    /// Connections that a hostile peer has named.
    pub attacked: Vec<bool>,
    pub violations: usize,
    shape: Shape,
    make_links: fn(Shape) -> [L; 2],
    /// The links that replace a lost one.
    links: Option<[L; 2]>,
    /// The states of the senders of both nodes on the newest links.
    pub sender_states: [Vec<Region>; 2],
}

/// Bound on the connections of a history.
const CONVERSATIONS_MAX: usize = 60;

/// Creates a world over memory.
pub fn heap_world(shape: Shape) -> (World<HeapLink>, [HeapLink; 2]) {
    let links = heap_links(shape);
    (World::new(shape, &links[0], &links[1], heap_links), links)
}

fn heap_links(shape: Shape) -> [HeapLink; 2] {
    let (mut a, mut b) = heap::pair(shape.window_bytes());
    assert!(train_both(&mut a, &mut b));
    [a, b]
}

impl<L: Link> World<L>
where
    L::Inbound: Inbound,
    L::Outbound: Outbound,
{
    /// Creates a world over a link; `make_links` makes the links that replace it once it is lost.
    pub fn new(shape: Shape, a: &L, b: &L, make_links: fn(Shape) -> [L; 2]) -> Self {
        let sender_states = shape.sender_states();
        let node = |side, link: &L, states: &[Region]| Node {
            engine: shape.engine(side, link, states),
            is_asleep: false,
            is_rung: false,
            fault: None,
            losses: 0,
        };
        Self {
            nodes: [node(LinkSide::Lower, a, &sender_states[0]), node(LinkSide::Higher, b, &sender_states[1])],
            conversations: Vec::new(),
            now_ns: 0,
            on_time: Box::new(|_| {}),
            on_fence: Box::new(|_| {}),
            flush_ns: 0,
            attacked: Vec::new(),
            violations: 0,
            shape,
            make_links,
            links: None,
            sender_states,
        }
    }

    pub fn act(&mut self, act: Act) {
        match act {
            Act::Open { node, input_bytes_max, is_refused, server_reads } => {
                self.open(usize::from(node), input_bytes_max, is_refused, server_reads);
            }
            Act::Send { connection, node, bytes } => self.send(connection, node, bytes),
            Act::Read { connection, node, bytes } => {
                if let Some(index) = self.conversation_of(connection) {
                    self.read(index, usize::from(node), usize::from(bytes));
                }
            }
            Act::Finish { connection, node } => self.change(connection, node, |end| end.is_finished = true),
            Act::Close { connection, node } => self.change(connection, node, |end| {
                // A program that closes with bytes unread resets the connection.
                if end.input.is_empty() { end.is_closed = true } else { end.is_killed = true }
            }),
            Act::Kill { connection, node } => self.change(connection, node, |end| end.is_killed = true),
            Act::Poll { node } => self.poll(usize::from(node)),
            Act::Sleep { node } => self.sleep(usize::from(node)),
            Act::Wait { ns } => self.wait(u64::from(ns)),
            Act::Lose { node } => self.lose(usize::from(node)),
        }
    }

    /// Returns the link of a node that has lost its first one.
    pub fn link(&self, node: usize) -> Option<&L> {
        self.links.as_ref().map(|links| &links[node])
    }

    /// Returns whether a node waits for the other one to lose the link too.
    fn waits_for_peer(&self, node: usize) -> bool {
        self.nodes[node].losses > self.nodes[1 - node].losses
    }

    fn lose(&mut self, node: usize) {
        if !self.shape.is_failover || self.waits_for_peer(node) || self.nodes[node].fault.is_some() {
            return;
        }
        if !self.waits_for_peer(1 - node) {
            self.links = Some((self.make_links)(self.shape));
            self.sender_states = self.shape.sender_states();
        }
        let link = self.link(node).expect("made above");
        let side = if node == 0 { LinkSide::Lower } else { LinkSide::Higher };
        let states = &self.sender_states[node];
        let [unused, partition_lanes] = [(); 2].map(|()| self.shape.partition_lanes(link, states));
        let unused = Engine::new(self.shape.settings(side), unused);
        let state = &mut self.nodes[node];
        state.engine = std::mem::replace(&mut state.engine, unused).detach().attach(partition_lanes);
        state.losses += 1;
        (state.is_asleep, state.is_rung) = (false, false);
    }

    pub fn wait(&mut self, ns: u64) {
        self.now_ns += ns;
        (self.on_time)(self.now_ns);
    }

    fn conversation_of(&self, number: u8) -> Option<usize> {
        (!self.conversations.is_empty()).then(|| usize::from(number) % self.conversations.len())
    }

    pub fn open(&mut self, node: usize, input_bytes_max: u16, is_refused: bool, server_reads: bool) {
        if self.conversations.len() >= CONVERSATIONS_MAX || self.nodes[node].fault.is_some() {
            return;
        }
        let input_bytes_max = usize::from(input_bytes_max).max(16);
        let end = ProgramStub::new(input_bytes_max);
        let open_payload = OpenPayload::new(&[self.conversations.len() as u8, node as u8]).expect("a short payload");
        let opened = self.nodes[node].engine.open(open_payload, |key| {
            end.lock().key = Some(key);
            end.clone()
        });
        if opened.is_none() {
            return;
        }
        self.wake_node(node);
        let mut endpoints = [None, None];
        endpoints[node] = Some(end);
        let mut reads = [true; 2];
        reads[1 - node] = server_reads;
        let streams = [Stream::default(), Stream::default()];
        self.conversations.push(Conversation { opener: node, endpoints, streams, is_refused, reads, input_bytes_max });
        self.attacked.push(false);
    }

    fn send(&mut self, connection: u8, node: bool, bytes: u16) {
        let node = usize::from(node);
        let Some(index) = self.conversation_of(connection) else { return };
        let conversation = &self.conversations[index];
        let Some(end) = conversation.endpoints[node].clone() else { return };
        {
            let end = end.lock();
            if end.is_finished || end.is_closed || end.is_killed || end.input_is_reset || end.input_is_closed {
                return;
            }
        }
        let from = conversation.streams[node].sent;
        end.send((0..u64::from(bytes)).map(|at| conversation.byte(index, node, from + at)));
        self.conversations[index].streams[node].sent += u64::from(bytes);
        self.deliver_ring(index, node);
    }

    fn read(&mut self, index: usize, node: usize, bytes: usize) -> usize {
        let conversation = &self.conversations[index];
        let Some(end) = conversation.endpoints[node].clone() else { return 0 };
        if end.lock().is_closed || end.lock().is_killed {
            return 0;
        }
        let read = end.read(bytes);
        let from = conversation.streams[1 - node].read;
        for (byte, at) in read.iter().zip(0..) {
            let is_right = *byte == conversation.byte(index, 1 - node, from + at);
            assert!(is_right || self.attacked[index], "conversation {index}: wrong byte {} for node {node}", from + at);
        }
        self.conversations[index].streams[1 - node].read += read.len() as u64;
        self.deliver_ring(index, node);
        read.len()
    }

    fn change(&mut self, connection: u8, node: bool, change: impl FnOnce(&mut crate::program::Shared)) {
        let node = usize::from(node);
        let Some(index) = self.conversation_of(connection) else { return };
        let Some(end) = self.conversations[index].endpoints[node].clone() else { return };
        if !end.lock().is_closed && !end.lock().is_killed {
            end.change(change);
        }
        self.deliver_ring(index, node);
    }

    /// Delivers the rings of a program to the proxy.
    pub fn deliver_ring(&mut self, index: usize, node: usize) {
        let Some(end) = self.conversations[index].endpoints[node].clone() else { return };
        let key = {
            let mut end = end.lock();
            if std::mem::take(&mut end.is_rung) { end.key } else { None }
        };
        if let Some(key) = key {
            self.wake_node(node);
            self.nodes[node].engine.endpoint_ready(key);
        }
    }

    fn wake_node(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        if std::mem::take(&mut node.is_asleep) {
            node.engine.end_sleep();
        }
    }

    pub fn poll(&mut self, node: usize) {
        if self.nodes[node].fault.is_some() || self.waits_for_peer(node) {
            return;
        }
        if self.nodes[node].is_asleep {
            if !self.nodes[node].is_rung {
                return;
            }
            self.wake_node(node);
        }
        self.nodes[node].is_rung = false;
        match self.nodes[node].engine.poll(self.now_ns) {
            Ok(outcome) => self.nodes[1 - node].is_rung |= outcome.ring_peer,
            Err(fault) => {
                self.nodes[node].engine.take_down();
                self.nodes[node].fault = Some(fault);
            }
        }
        (self.on_fence)(node);
        self.answer(node);
    }

    fn answer(&mut self, node: usize) {
        while let Some(event) = self.nodes[node].engine.next_event() {
            match event {
                EngineEvent::Open { key, open_payload } => self.answer_one(node, key, &open_payload),
                EngineEvent::Refused { local, .. } => local.lock().input_is_reset = true,
                EngineEvent::Violation { .. } => self.violations += 1,
            }
        }
    }

    fn answer_one(&mut self, node: usize, key: proxy::ConnectionKey, open_payload: &OpenPayload) {
        let index = usize::from(open_payload.bytes()[0]);
        let conversation = self
            .conversations
            .get_mut(index)
            .filter(|conversation| conversation.opener != node && conversation.endpoints[node].is_none());
        let Some(conversation) = conversation.filter(|conversation| !conversation.is_refused) else {
            return self.nodes[node].engine.answer(key, Err(111));
        };
        let end = ProgramStub::new(conversation.input_bytes_max);
        end.lock().key = Some(key);
        conversation.endpoints[node] = Some(end.clone());
        self.nodes[node].engine.answer(key, Ok(end));
    }

    pub fn sleep(&mut self, node: usize) {
        if self.nodes[node].is_asleep || self.nodes[node].fault.is_some() || self.waits_for_peer(node) {
            return;
        }
        if self.now_ns.is_multiple_of(3) {
            // As a thread that does not spin.
            self.nodes[node].engine.park_all();
        }
        self.wait(self.flush_ns);
        match self.nodes[node].engine.prepare_sleep() {
            Ok(sleeps) => self.nodes[node].is_asleep = sleeps,
            Err(fault) => {
                self.nodes[node].engine.take_down();
                self.nodes[node].fault = Some(fault);
            }
        }
    }

    /// Continues until nothing can happen any more, with proxies that sleep whenever they may.
    pub fn settle(&mut self) {
        const ROUNDS_MAX: usize = 200_000;
        for node in [0, 1] {
            if self.waits_for_peer(node) {
                self.lose(1 - node);
            }
        }
        for _ in 0..ROUNDS_MAX {
            self.wait(300);
            for node in 0..2 {
                self.poll(node);
                self.sleep(node);
            }
            let mut read_bytes = 0;
            for index in 0..self.conversations.len() {
                for node in 0..2 {
                    if self.conversations[index].reads[node] {
                        read_bytes += self.read(index, node, usize::MAX);
                    }
                }
            }
            let is_settled = |index: usize| {
                let node = &self.nodes[index];
                // A node that waits for one with a fault waits forever.
                node.fault.is_some() || self.waits_for_peer(index) || (node.is_asleep && !node.is_rung)
            };
            if read_bytes == 0 && (0..2).all(is_settled) {
                return;
            }
        }
        panic!("the nodes never settle: {:?}", self.nodes.each_ref().map(|node| *node.engine.counters()));
    }

    /// Checks what must be true once nothing can happen any more.
    pub fn check_settled(&self) {
        let has_fault = self.nodes.iter().any(|node| node.fault.is_some());
        for (index, conversation) in self.conversations.iter().enumerate() {
            if has_fault || self.attacked[index] {
                continue;
            }
            for sender in 0..2 {
                self.check_direction(index, conversation, sender);
            }
        }
    }

    /// Checks that both nodes have forgotten the connections that are over.
    pub fn check_forgotten(&self) {
        (0..2).for_each(|node| self.check_forgotten_by(node));
    }

    fn check_forgotten_by(&self, node: usize) {
        let is_live = |end: &ProgramStub| {
            let end = end.lock();
            // A program that closed with more bytes than are read stays.
            let is_closed = end.is_closed && end.output.is_empty();
            !(is_closed || end.is_killed || end.input_is_closed || end.input_is_reset)
        };
        let live = self
            .conversations
            .iter()
            .filter(|conversation| conversation.endpoints[node].as_ref().is_some_and(is_live))
            .count();
        let known = self.nodes[node].engine.connections();
        assert!(known <= live, "node {node} knows {known} connections, of which {live} live: {:?}", self.conversations);
    }

    fn check_direction(&self, index: usize, conversation: &Conversation, sender: usize) {
        let reader = 1 - sender;
        if conversation.is_refused {
            assert_eq!(conversation.streams[sender].read, 0);
            return;
        }
        let (Some(from), Some(to)) = (&conversation.endpoints[sender], &conversation.endpoints[reader]) else { return };
        let killed = from.lock().is_killed;
        let (from, to) = (from.lock(), to.lock());
        if killed && !to.is_closed && !to.is_killed {
            assert!(
                to.input_is_reset || to.input_is_closed,
                "conversation {index}: node {reader} does not know of the kill"
            );
        }
        drop((from, to));
        if self.nodes[0].losses > 0 && conversation.is_never_made() {
            return;
        }
        conversation.check_no_reset(index);
        if conversation.may_lose(sender) || !conversation.reads[reader] {
            return;
        }
        let stream = &conversation.streams[sender];
        assert_eq!(
            stream.read, stream.sent,
            "conversation {index}: bytes to node {reader} are stuck: {conversation:?}"
        );
        let (from, to) = (
            conversation.endpoints[sender].as_ref().expect("there").lock(),
            conversation.endpoints[reader].as_ref().expect("there").lock(),
        );
        assert_eq!(from.is_closed, to.input_is_closed, "conversation {index}: {conversation:?}");
        assert_eq!(
            from.is_finished || from.is_closed,
            to.input_is_finished || to.input_is_closed,
            "conversation {index}"
        );
    }
}
