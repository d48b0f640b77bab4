//! A network at work: the loop over events.

mod forward;
mod report;
mod tap;

use sim::{EventQueue, Random, Span, Time};

use crate::endpoint::{Endpoint, EndpointCounters, Flow, FlowId, IncomingPacket, OutgoingPacket};
use crate::impairment::{ImpairmentState, Impairments};
use crate::packet::{Fifo, Frame, FrameExtra, PACKET_BYTES_MAX, PacketArena, PacketFlag, PacketId};
use crate::rate::LinkRate;
use crate::switch::{Pfc, Switch, SwitchConfig};
use crate::topology::{HostId, NetworkLink, NetworkNode, Routes, Topology};

pub use report::{FinishedFlow, NetworkCounters};
pub use tap::{PacketTap, TapDirection, TappedPacket};

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A packet arrives at a port.
    Arrive { port: u32, packet: PacketId },
    /// A port has sent its packet.
    TxDone { port: u32 },
    /// A host's deadline.
    Wake { host: u32 },
    /// The next flow of the list begins.
    Start,
    /// A neighbour asks a port to pause, or to go on.
    Pause { port: u32, is_on: bool },
    /// The run is over.
    Stop,
}

/// An event in 8 bytes, for a hundred thousand of them wait: its kind in the highest bits, then port or host, then the
/// packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedEvent(u32, u32);

/// Bits of a port's or a host's number.
const NUMBER_BITS: u32 = 29;
const NUMBERS_MAX: usize = 1 << NUMBER_BITS;

impl From<Event> for PackedEvent {
    fn from(event: Event) -> Self {
        let (kind, number, packet) = match event {
            Event::Arrive { port, packet } => (0, port, packet.0),
            Event::TxDone { port } => (1, port, 0),
            Event::Wake { host } => (2, host, 0),
            Event::Start => (3, 0, 0),
            Event::Pause { port, is_on } => (4, port, is_on.into()),
            Event::Stop => (5, 0, 0),
        };
        Self(kind << NUMBER_BITS | number, packet)
    }
}

impl From<PackedEvent> for Event {
    fn from(PackedEvent(kind_and_number, packet): PackedEvent) -> Self {
        let number = kind_and_number % NUMBERS_MAX as u32;
        match kind_and_number >> NUMBER_BITS {
            0 => Self::Arrive { port: number, packet: PacketId(packet) },
            1 => Self::TxDone { port: number },
            2 => Self::Wake { host: number },
            3 => Self::Start,
            4 => Self::Pause { port: number, is_on: packet != 0 },
            _ => Self::Stop,
        }
    }
}

/// One end of a line: what every packet that leaves by it touches, in one cache line. Its other end has the number that
/// differs in the last bit.
#[derive(Debug)]
#[repr(align(64))]
struct Port {
    rate: LinkRate,
    delay: Span,
    /// When the packet that is being sent has left.
    free_at: Time,
    control: Fifo,
    data: Fifo,
    queued_max: u32,
    /// Whether an event says when the line is free.
    has_tx_done_event: bool,
    /// Whether the neighbour has asked not to be sent data.
    is_paused: bool,
    /// Packets of control since the last one of data that waited meanwhile.
    controls_since_data: u8,
    /// Whether the line is not perfect, this way.
    is_impaired: bool,
}

/// What only some networks need of a port.
#[derive(Debug, Default)]
struct PortExtra {
    /// What is wrong with the line, this way.
    impaired: Option<ImpairmentState>,
    /// With pauses: bytes of the shared part that came by this port.
    held: u64,
    /// Whether this port has asked its neighbour to pause.
    is_pausing: bool,
    headroom: u64,
    headroom_used: u64,
}

/// What a network is made of.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Who is joined to whom.
    pub topology: Topology,
    /// How switches work.
    pub switches: SwitchConfig,
    /// What is wrong with lines: by the line's number, and from which of its ends.
    pub impairments: Vec<(usize, usize, Impairments)>,
    /// Of everything random in the network.
    pub seed: u64,
}

/// Hosts' endpoints and all that is between them.
pub struct Network<E: Endpoint> {
    queue: EventQueue<PackedEvent>,
    now: Time,
    arena: PacketArena<E::Header>,
    ports: Vec<Port>,
    /// By port.
    owners: Vec<NetworkNode>,
    extras: Vec<PortExtra>,
    switches: Vec<Switch>,
    config: SwitchConfig,
    routes: Routes,
    endpoints: Vec<E>,
    /// By host.
    host_ports: Vec<u32>,
    /// By host: the earliest event that wakes it.
    wakes: Vec<Time>,
    flows: Vec<Flow>,
    /// Flows that have started.
    started: usize,
    /// When repeated flows begin no more.
    repeat_until: Time,
    finished: Vec<FinishedFlow>,
    /// Flows that have just ended, before they are looked at.
    done: Vec<FlowId>,
    counters: NetworkCounters,
    tap: Option<Box<dyn PacketTap<E::Header>>>,
}

impl<E: Endpoint> Network<E> {
    /// A network with these endpoints, one a host, and these flows, in order of their start.
    ///
    /// # Panics
    /// If there is not an endpoint for each host, a flow's host does not exist, a flow goes to its own host, or flows
    /// are not in order.
    pub fn new(config: &NetworkConfig, endpoints: Vec<E>, flows: Vec<Flow>) -> Self {
        let topology = &config.topology;
        assert_eq!(endpoints.len(), topology.hosts() as usize, "an endpoint for each host");
        assert!(flows.is_sorted_by_key(|flow| flow.start), "flows in order of their start");
        let is_possible = |flow: &Flow| flow.from != flow.to && flow.from.0.max(flow.to.0) < topology.hosts();
        assert!(flows.iter().all(is_possible), "flows between two hosts that there are");
        let (owners, extras) = (topology.links().iter().flat_map(|link| link.ends).collect::<Vec<_>>(), extras(config));
        assert!(owners.len() <= NUMBERS_MAX, "{} ports; at most {NUMBERS_MAX}", owners.len());
        let mut host_ports = vec![0; endpoints.len()];
        for (number, owner) in owners.iter().enumerate() {
            if let NetworkNode::Host(host) = owner {
                host_ports[host.0 as usize] = number as u32;
            }
        }
        let mut queue = EventQueue::new();
        if let Some(first) = flows.first() {
            queue.schedule(first.start, Event::Start.into());
        }
        Self {
            queue,
            now: Time::ZERO,
            arena: PacketArena::new(config.switches.pfc.is_some() || config.switches.trimming),
            switches: switches(config, &owners, &extras),
            ports: ports(topology, &extras),
            owners,
            extras,
            config: config.switches.clone(),
            routes: Routes::new(topology),
            wakes: vec![Time::MAX; endpoints.len()],
            endpoints,
            host_ports,
            flows,
            started: 0,
            repeat_until: Time::MAX,
            finished: Vec::new(),
            done: Vec::new(),
            counters: NetworkCounters::default(),
            tap: None,
        }
    }

    /// Lets somebody see what hosts send and get.
    pub fn set_tap(&mut self, tap: Box<dyn PacketTap<E::Header>>) {
        self.tap = Some(tap);
    }

    /// Repeated flows begin no more after this.
    pub fn set_repeat_until(&mut self, until: Time) {
        self.repeat_until = until;
    }

    /// Runs until this time; stops earlier when nothing is left to happen. Returns whether something is.
    pub fn run_until(&mut self, end: Time) -> bool {
        self.queue.schedule(end, Event::Stop.into());
        while let Some((now, event)) = self.queue.next_event() {
            self.now = now;
            let event = Event::from(event);
            if event == Event::Stop {
                if now >= end {
                    break;
                }
                continue; // of a run that ended before its time
            }
            self.counters.events += 1;
            self.handle(event);
        }
        !self.queue.is_empty()
    }

    /// Runs until all flows have ended, or this time has come. Returns whether they have.
    pub fn run_flows(&mut self, end: Time) -> bool {
        self.queue.schedule(end, Event::Stop.into());
        while self.finished.len() < self.flows.len() {
            let Some((now, event)) = self.queue.next_event() else { return false };
            self.now = now;
            let event = Event::from(event);
            if event == Event::Stop {
                if now >= end {
                    return false;
                }
                continue; // of a run that ended before its time
            }
            self.counters.events += 1;
            self.handle(event);
        }
        true
    }

    /// Runs until so many flows have ended, repeated ones counted each time; returns whether they have, or nothing is
    /// left to happen.
    pub fn run_until_finished(&mut self, flows: u64) -> bool {
        while self.counters.flows_ended < flows {
            let Some((now, event)) = self.queue.next_event() else { return false };
            self.now = now;
            self.counters.events += 1;
            self.handle(event.into());
        }
        true
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { port, packet } => self.arrive(port, packet),
            Event::TxDone { port } => self.tx_done(port),
            Event::Wake { host } => self.wake(host),
            Event::Start => self.start_due_flows(),
            Event::Pause { port, is_on } => self.pause(port, is_on),
            Event::Stop => {}
        }
    }

    /// The time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The endpoints, by host.
    pub fn endpoints(&self) -> &[E] {
        &self.endpoints
    }

    /// The flows that have started or will.
    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// The flows that have ended, in that order.
    pub fn finished_flows(&self) -> &[FinishedFlow] {
        &self.finished
    }

    /// What the network has counted.
    pub fn counters(&self) -> NetworkCounters {
        let used = self.switches.iter().map(|switch| switch.used_max).max().unwrap_or(0);
        let queue = self.ports.iter().map(|port| port.queued_max).max().unwrap_or(0).into();
        NetworkCounters { buffer_max_bytes: used, queue_max_bytes: queue, ..self.counters }
    }

    /// What all endpoints have counted together.
    pub fn endpoint_counters(&self) -> EndpointCounters {
        self.endpoints.iter().fold(EndpointCounters::default(), |sum, endpoint| sum.plus(endpoint.counters()))
    }

    /// Packets under way now, queued or on a line.
    pub fn packets_under_way(&self) -> usize {
        self.arena.in_use()
    }

    /// Bytes of memory that the network and its endpoints hold, as far as they can tell.
    pub fn memory_bytes(&self) -> usize {
        let ports = self.ports.capacity() * (size_of::<Port>() + size_of::<NetworkNode>() + size_of::<PortExtra>());
        let flows = self.flows.capacity() * size_of::<Flow>() + self.finished.capacity() * size_of::<FinishedFlow>();
        let endpoints: usize = self.endpoints.iter().map(Endpoint::memory_bytes).sum();
        self.arena.memory_bytes() + self.queue.memory_bytes() + self.routes.memory_bytes() + ports + flows + endpoints
    }

    fn start_due_flows(&mut self) {
        while let Some(flow) = self.flows.get(self.started).copied() {
            if flow.start > self.now {
                self.queue.schedule(flow.start, Event::Start.into());
                return;
            }
            self.start_flow(FlowId(self.started as u32), &flow);
            self.started += 1;
        }
    }

    fn start_flow(&mut self, id: FlowId, flow: &Flow) {
        E::start(&mut self.endpoints, self.now, id, flow);
        self.service_host(flow.to.0);
        self.service_host(flow.from.0);
    }

    fn wake(&mut self, host: u32) {
        if self.wakes[host as usize] != self.now {
            return; // an earlier event has taken its place
        }
        self.wakes[host as usize] = Time::MAX;
        self.endpoints[host as usize].advance(self.now);
        self.service_host(host);
    }

    /// A packet has come to a host.
    fn deliver(&mut self, host: u32, packet: PacketId) {
        let frame = *self.arena.frame(packet);
        if frame.has(PacketFlag::Corrupt) {
            self.counters.corrupt_packets += 1;
        } else {
            let (header, from, is_marked) = (self.arena.header(packet), frame.from(), frame.has(PacketFlag::EcnMarked));
            if let Some(tap) = &mut self.tap {
                let (at, direction, to, label) = (self.now, TapDirection::Received, frame.to(), frame.label);
                tap.observe(&TappedPacket { at, direction, from, to, label, is_marked, header });
            }
            let incoming = IncomingPacket { from, header, is_marked, is_trimmed: frame.has(PacketFlag::Trimmed) };
            self.counters.delivered_packets += 1;
            self.endpoints[host as usize].receive(self.now, &incoming);
        }
        self.arena.remove(packet);
        self.service_host(host);
    }

    /// After anything happened to an endpoint: what has ended, what it sends, when it wants to be woken.
    fn service_host(&mut self, host: u32) {
        self.endpoints[host as usize].finished(self.now, &mut self.done);
        while let Some(id) = self.done.pop() {
            self.finish_flow(id);
        }
        self.send(host);
        let deadline = self.endpoints[host as usize].deadline().unwrap_or(Time::MAX);
        if deadline < self.wakes[host as usize] {
            let at = deadline.max(self.now);
            self.wakes[host as usize] = at;
            self.queue.schedule(at, Event::Wake { host }.into());
        }
    }

    fn finish_flow(&mut self, id: FlowId) {
        let flow = self.flows[id.0 as usize];
        self.counters.flows_ended += 1;
        if flow.repeats {
            self.counters.repeated_bytes += flow.bytes;
            if self.now < self.repeat_until {
                E::start(&mut self.endpoints, self.now, id, &flow);
            }
            return;
        }
        self.finished.push(FinishedFlow { id, at: self.now });
    }

    /// Lets a host send, if its line is free.
    fn send(&mut self, host: u32) {
        let number = self.host_ports[host as usize];
        let port = &self.ports[number as usize];
        if port.has_tx_done_event || port.is_paused {
            return;
        }
        let Some(outgoing) = self.endpoints[host as usize].transmit(self.now) else { return };
        let OutgoingPacket { to, bytes, trimmed_bytes, label, class, header } = outgoing;
        assert!(bytes <= PACKET_BYTES_MAX, "a packet of {bytes} B exceeds the maximum of {PACKET_BYTES_MAX} B");
        let frame = Frame::new(bytes as u16, HostId(host), to, label, class);
        if let Some(tap) = &mut self.tap {
            let (at, direction, from) = (self.now, TapDirection::Sent, HostId(host));
            tap.observe(&TappedPacket { at, direction, from, to, label, is_marked: false, header: &header });
        }
        let packet = self.arena.add(frame, FrameExtra { ingress: 0, trimmed_bytes }, header);
        self.put_on_link(number, packet);
        self.schedule_tx_done(number);
    }
}

fn extras(config: &NetworkConfig) -> Vec<PortExtra> {
    let headroom = |link: &NetworkLink| {
        let packet = PACKET_BYTES_MAX.into();
        config.switches.pfc.map_or(0, |_| Pfc::headroom_bytes(link.rate, link.delay, packet))
    };
    let extra = |link| [0, 1].map(|_| PortExtra { headroom: headroom(link), ..PortExtra::default() });
    let mut extras: Vec<PortExtra> = config.topology.links().iter().flat_map(extra).collect();
    for (link, end, impairments) in config.impairments.iter().filter(|(.., impairments)| !impairments.is_none()) {
        let random = Random::new(config.seed, &format!("line {link} from end {end}"));
        extras[2 * link + end].impaired = Some(ImpairmentState::new(impairments.clone(), random));
    }
    extras
}

fn ports(topology: &Topology, extras: &[PortExtra]) -> Vec<Port> {
    let port = |(number, extra): (usize, &PortExtra)| Port {
        rate: topology.links()[number / 2].rate,
        delay: topology.links()[number / 2].delay,
        free_at: Time::ZERO,
        control: Fifo::EMPTY,
        data: Fifo::EMPTY,
        queued_max: 0,
        has_tx_done_event: false,
        is_paused: false,
        controls_since_data: 0,
        is_impaired: extra.impaired.is_some(),
    };
    extras.iter().enumerate().map(port).collect()
}

fn switches(config: &NetworkConfig, owners: &[NetworkNode], extras: &[PortExtra]) -> Vec<Switch> {
    let mut headroom = vec![0; config.topology.switches() as usize];
    for (owner, extra) in owners.iter().zip(extras) {
        if let NetworkNode::Switch(switch) = owner {
            headroom[switch.0 as usize] += extra.headroom;
        }
    }
    let switch = |(number, headroom): (usize, u64)| {
        Switch::new(&config.switches, headroom, Random::new(config.seed, &format!("switch {number}")))
    };
    headroom.into_iter().enumerate().map(switch).collect()
}

const _: () = assert!(size_of::<Port>() == 64, "a port is more than a cache line");
const _: () = assert!(size_of::<PackedEvent>() == 8, "an event and its time are more than a quarter of a cache line");
