//! Two nodes, their engines, and the programs that talk through them; and what those must see.

use crate::program::ProgramStub;
use fabric::heap::{self, HeapLink};
use fabric::{Inbound, Link, Outbound, Slice, train_both};
use lane::{Consumer, Layout, Producer};
use proxy::frame::LinkSide;
use proxy::{Class, Engine, EngineEvent, EngineSettings, LinkFault, OpenPayload, PartitionLanes, Placement};

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
    /// Connections at a time.
    pub connections_max: u8,
    /// Whether connections outlive their link.
    pub is_failover: bool,
    /// Whether there are fewer processors than parties.
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

    fn engine<L: Link>(&self, side: LinkSide, link: &L) -> Engine<L::Inbound, L::Outbound, ProgramStub> {
        let mut engine = Engine::new(self.settings(side), self.partition_lanes(link));
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

    /// The partitions of one end, over these windows.
    pub fn partition_lanes<L: Link>(&self, link: &L) -> Vec<PartitionLanes<L::Inbound, L::Outbound>> {
        (0..self.partitions())
            .map(|index| {
                let (inbound, outbound) = self.slices(link, index);
                let to = Producer::new(outbound.clone(), inbound.clone(), self.layout(), SECRET);
                PartitionLanes::new(to, Consumer::new(inbound, outbound, self.layout(), SECRET))
            })
            .collect()
    }

    pub fn slices<L: Link>(&self, link: &L, index: usize) -> (L::Inbound, L::Outbound) {
        let bytes = self.partition_bytes();
        (link.inbound().slice(index * bytes, bytes), link.outbound().slice(index * bytes, bytes))
    }
}

/// What somebody does.
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
    /// A proxy's thread takes a turn.
    Poll { node: bool },
    /// A proxy's thread would sleep.
    Sleep { node: bool },
    /// Time passes.
    Wait { ns: u16 },
    /// A node loses the link. It goes on over another one as soon as the other node has lost it too.
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
pub struct Talk {
    pub opener: usize,
    /// Of node 0 and of node 1; the server's is there once it has been asked for.
    pub ends: [Option<ProgramStub>; 2],
    /// By the node that sends.
    pub streams: [Stream; 2],
    pub is_refused: bool,
    /// Whether the program of each node reads at the end.
    pub reads: [bool; 2],
    input_bytes_max: usize,
}

impl Talk {
    /// The byte at a position, which no other stream has in the same place.
    pub fn byte(&self, index: usize, sender: usize, position: u64) -> u8 {
        let mixed = (index as u64) << 40 ^ (sender as u64) << 39 ^ position;
        (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
    }

    /// The program that opened it was gone before it could know that there is a server.
    fn is_never_made(&self) -> bool {
        self.ends[self.opener].as_ref().is_some_and(|end| {
            let end = end.lock();
            (end.is_closed || end.is_killed) && !end.is_opened
        })
    }

    /// Nothing resets but a program that is killed.
    fn check_no_reset(&self, index: usize) {
        let was = |what: fn(&crate::program::Shared) -> bool| self.ends.iter().flatten().any(|end| what(&end.lock()));
        assert!(was(|end| end.is_killed) || !was(|end| end.input_is_reset), "talk {index} was reset: {self:?}");
    }

    /// Whether bytes of this direction may be lost.
    fn may_lose(&self, sender: usize) -> bool {
        let gone = |node: usize| {
            self.ends[node].as_ref().is_none_or(|end| {
                let end = end.lock();
                end.is_killed || end.input_is_reset
            })
        };
        let reader_is_closed = self.ends[1 - sender].as_ref().is_none_or(|end| end.lock().is_closed);
        self.is_refused || gone(0) || gone(1) || reader_is_closed
    }
}

/// A node: its engine, and whether its thread sleeps.
pub struct Node<L: Link> {
    pub engine: Engine<L::Inbound, L::Outbound, ProgramStub>,
    pub is_asleep: bool,
    pub is_rung: bool,
    pub fault: Option<LinkFault>,
    /// Links that it has lost.
    pub losses: usize,
}

/// Everything.
pub struct World<L: Link> {
    pub nodes: [Node<L>; 2],
    pub talks: Vec<Talk>,
    pub now_ns: u64,
    /// What else happens when time passes: windows that are late.
    pub on_time: Box<dyn Fn(u64)>,
    /// The fence of a node before it looks for sleepers, which pushes out what still gathers.
    pub on_fence: Box<dyn Fn(usize)>,
    /// How long the flush of a node that is about to sleep takes: what was on its way to the node then is there.
    pub flush_ns: u64,
    /// Connections that a hostile peer has spoken of.
    pub spoiled: Vec<bool>,
    pub violations: usize,
    shape: Shape,
    make_links: fn(Shape) -> [L; 2],
    /// Those that replace a lost link.
    links: Option<[L; 2]>,
}

/// Connections that are opened at most.
const TALKS_MAX: usize = 60;

/// A world over memory.
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
    /// A world over a link; `make_links` makes those that replace it once it is lost.
    pub fn new(shape: Shape, a: &L, b: &L, make_links: fn(Shape) -> [L; 2]) -> Self {
        let node = |side, link: &L| Node {
            engine: shape.engine(side, link),
            is_asleep: false,
            is_rung: false,
            fault: None,
            losses: 0,
        };
        Self {
            nodes: [node(LinkSide::Lower, a), node(LinkSide::Higher, b)],
            talks: Vec::new(),
            now_ns: 0,
            on_time: Box::new(|_| {}),
            on_fence: Box::new(|_| {}),
            flush_ns: 0,
            spoiled: Vec::new(),
            violations: 0,
            shape,
            make_links,
            links: None,
        }
    }

    pub fn act(&mut self, act: Act) {
        match act {
            Act::Open { node, input_bytes_max, is_refused, server_reads } => {
                self.open(usize::from(node), input_bytes_max, is_refused, server_reads);
            }
            Act::Send { connection, node, bytes } => self.send(connection, node, bytes),
            Act::Read { connection, node, bytes } => {
                if let Some(index) = self.talk_of(connection) {
                    self.read(index, usize::from(node), usize::from(bytes));
                }
            }
            Act::Finish { connection, node } => self.change(connection, node, |end| end.is_finished = true),
            Act::Close { connection, node } => self.change(connection, node, |end| {
                // Who closes with bytes unread resets.
                if end.input.is_empty() { end.is_closed = true } else { end.is_killed = true }
            }),
            Act::Kill { connection, node } => self.change(connection, node, |end| end.is_killed = true),
            Act::Poll { node } => self.poll(usize::from(node)),
            Act::Sleep { node } => self.sleep(usize::from(node)),
            Act::Wait { ns } => self.wait(u64::from(ns)),
            Act::Lose { node } => self.lose(usize::from(node)),
        }
    }

    /// The link of a node that has lost its first one.
    pub fn link(&self, node: usize) -> Option<&L> {
        self.links.as_ref().map(|links| &links[node])
    }

    /// Whether a node waits for the other one to lose the link too.
    fn waits(&self, node: usize) -> bool {
        self.nodes[node].losses > self.nodes[1 - node].losses
    }

    fn lose(&mut self, node: usize) {
        if !self.shape.is_failover || self.waits(node) || self.nodes[node].fault.is_some() {
            return;
        }
        if !self.waits(1 - node) {
            self.links = Some((self.make_links)(self.shape));
        }
        let link = self.link(node).expect("just made");
        let side = if node == 0 { LinkSide::Lower } else { LinkSide::Higher };
        let [unused, partition_lanes] = [(); 2].map(|()| self.shape.partition_lanes(link));
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

    fn talk_of(&self, number: u8) -> Option<usize> {
        (!self.talks.is_empty()).then(|| usize::from(number) % self.talks.len())
    }

    pub fn open(&mut self, node: usize, input_bytes_max: u16, is_refused: bool, server_reads: bool) {
        if self.talks.len() >= TALKS_MAX || self.nodes[node].fault.is_some() {
            return;
        }
        let input_bytes_max = usize::from(input_bytes_max).max(16);
        let end = ProgramStub::new(input_bytes_max);
        let open_payload = OpenPayload::new(&[self.talks.len() as u8, node as u8]).expect("a short open_payload");
        let opened = self.nodes[node].engine.open(open_payload, |key| {
            end.lock().key = Some(key);
            end.clone()
        });
        if opened.is_none() {
            return;
        }
        self.rouse(node);
        let mut ends = [None, None];
        ends[node] = Some(end);
        let mut reads = [true; 2];
        reads[1 - node] = server_reads;
        let streams = [Stream::default(), Stream::default()];
        self.talks.push(Talk { opener: node, ends, streams, is_refused, reads, input_bytes_max });
        self.spoiled.push(false);
    }

    fn send(&mut self, connection: u8, node: bool, bytes: u16) {
        let node = usize::from(node);
        let Some(index) = self.talk_of(connection) else { return };
        let talk = &self.talks[index];
        let Some(end) = talk.ends[node].clone() else { return };
        {
            let end = end.lock();
            if end.is_finished || end.is_closed || end.is_killed || end.input_is_reset || end.input_is_closed {
                return;
            }
        }
        let from = talk.streams[node].sent;
        end.send((0..u64::from(bytes)).map(|at| talk.byte(index, node, from + at)));
        self.talks[index].streams[node].sent += u64::from(bytes);
        self.hear(index, node);
    }

    fn read(&mut self, index: usize, node: usize, bytes: usize) -> usize {
        let talk = &self.talks[index];
        let Some(end) = talk.ends[node].clone() else { return 0 };
        if end.lock().is_closed || end.lock().is_killed {
            return 0;
        }
        let read = end.read(bytes);
        let from = talk.streams[1 - node].read;
        for (byte, at) in read.iter().zip(0..) {
            let is_right = *byte == talk.byte(index, 1 - node, from + at);
            assert!(is_right || self.spoiled[index], "talk {index}: wrong byte {} for node {node}", from + at);
        }
        self.talks[index].streams[1 - node].read += read.len() as u64;
        self.hear(index, node);
        read.len()
    }

    fn change(&mut self, connection: u8, node: bool, change: impl FnOnce(&mut crate::program::Shared)) {
        let node = usize::from(node);
        let Some(index) = self.talk_of(connection) else { return };
        let Some(end) = self.talks[index].ends[node].clone() else { return };
        if !end.lock().is_closed && !end.lock().is_killed {
            end.change(change);
        }
        self.hear(index, node);
    }

    /// A ring on a lifeline reaches the proxy at once.
    pub fn hear(&mut self, index: usize, node: usize) {
        let Some(end) = self.talks[index].ends[node].clone() else { return };
        let key = {
            let mut end = end.lock();
            if std::mem::take(&mut end.is_rung) { end.key } else { None }
        };
        if let Some(key) = key {
            self.rouse(node);
            self.nodes[node].engine.lifeline_ready(key);
        }
    }

    fn rouse(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        if std::mem::take(&mut node.is_asleep) {
            node.engine.end_sleep();
        }
    }

    pub fn poll(&mut self, node: usize) {
        if self.nodes[node].fault.is_some() || self.waits(node) {
            return;
        }
        if self.nodes[node].is_asleep {
            if !self.nodes[node].is_rung {
                return;
            }
            self.rouse(node);
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
        let talk = self.talks.get_mut(index).filter(|talk| talk.opener != node && talk.ends[node].is_none());
        let Some(talk) = talk.filter(|talk| !talk.is_refused) else {
            return self.nodes[node].engine.answer(key, Err(111));
        };
        let end = ProgramStub::new(talk.input_bytes_max);
        end.lock().key = Some(key);
        talk.ends[node] = Some(end.clone());
        self.nodes[node].engine.answer(key, Ok(end));
    }

    pub fn sleep(&mut self, node: usize) {
        if self.nodes[node].is_asleep || self.nodes[node].fault.is_some() || self.waits(node) {
            return;
        }
        if self.now_ns.is_multiple_of(3) {
            // A thread that cannot afford to look on.
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

    /// Lets everything happen that still can, with proxies that sleep whenever they may.
    pub fn settle(&mut self) {
        const ROUNDS_MAX: usize = 200_000;
        for node in [0, 1] {
            if self.waits(node) {
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
            for index in 0..self.talks.len() {
                for node in 0..2 {
                    if self.talks[index].reads[node] {
                        read_bytes += self.read(index, node, usize::MAX);
                    }
                }
            }
            let is_still = |index: usize| {
                let node = &self.nodes[index];
                // One that waits for a node with a fault waits for ever.
                node.fault.is_some() || self.waits(index) || (node.is_asleep && !node.is_rung)
            };
            if read_bytes == 0 && (0..2).all(is_still) {
                return;
            }
        }
        panic!("the nodes never come to rest: {:?}", self.nodes.each_ref().map(|node| *node.engine.counters()));
    }

    /// What must be true once nothing can happen any more.
    pub fn check_settled(&self) {
        let has_fault = self.nodes.iter().any(|node| node.fault.is_some());
        for (index, talk) in self.talks.iter().enumerate() {
            if has_fault || self.spoiled[index] {
                continue;
            }
            for sender in 0..2 {
                self.check_direction(index, talk, sender);
            }
        }
    }

    /// What is over is forgotten at both ends.
    pub fn check_forgotten(&self) {
        (0..2).for_each(|node| self.check_forgotten_by(node));
    }

    fn check_forgotten_by(&self, node: usize) {
        let is_live = |end: &ProgramStub| {
            let end = end.lock();
            // One that closed with more to say than anybody takes goes on.
            let is_closed = end.is_closed && end.output.is_empty();
            !(is_closed || end.is_killed || end.input_is_closed || end.input_is_reset)
        };
        let live = self.talks.iter().filter(|talk| talk.ends[node].as_ref().is_some_and(is_live)).count();
        let known = self.nodes[node].engine.connections();
        assert!(known <= live, "node {node} knows {known} connections, of which {live} live: {:?}", self.talks);
    }

    fn check_direction(&self, index: usize, talk: &Talk, sender: usize) {
        let reader = 1 - sender;
        if talk.is_refused {
            assert_eq!(talk.streams[sender].read, 0);
            return;
        }
        let (Some(from), Some(to)) = (&talk.ends[sender], &talk.ends[reader]) else { return };
        let killed = from.lock().is_killed;
        let (from, to) = (from.lock(), to.lock());
        if killed && !to.is_closed && !to.is_killed {
            assert!(to.input_is_reset || to.input_is_closed, "talk {index}: nobody told node {reader} of the kill");
        }
        drop((from, to));
        if self.nodes[0].losses > 0 && talk.is_never_made() {
            return;
        }
        talk.check_no_reset(index);
        if talk.may_lose(sender) || !talk.reads[reader] {
            return;
        }
        let stream = &talk.streams[sender];
        assert_eq!(stream.read, stream.sent, "talk {index}: bytes to node {reader} are stuck: {talk:?}");
        let (from, to) =
            (talk.ends[sender].as_ref().expect("there").lock(), talk.ends[reader].as_ref().expect("there").lock());
        assert_eq!(from.is_closed, to.input_is_closed, "talk {index}: {talk:?}");
        assert_eq!(from.is_finished || from.is_closed, to.input_is_finished || to.input_is_closed, "talk {index}");
    }
}
