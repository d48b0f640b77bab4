//! A simulated network: the event loop, the hosts' endpoints, and the ports and switches between them.

mod event;
mod forward;
mod report;
mod tap;

use sim::{EventQueue, Random, Span, Time};

use crate::endpoint::{Endpoint, EndpointCounters, Flow, FlowId, InboundPacket, OutboundPacket};
use crate::impairment::{ImpairmentState, Impairments};
use crate::packet::{Fifo, Frame, FrameExtra, PACKET_BYTES_MAX, PacketArena, PacketFlag, PacketId};
use crate::rate::LinkRate;
use crate::switch::{Pfc, Switch, SwitchConfig};
use crate::topology::{HostId, NetworkLink, NetworkNode, Routes, Topology};

use event::{Event, PORTS_MAX, PackedEvent};
pub use report::{FinishedFlow, LinkDirection, NetworkCounters};
pub use tap::{PacketTap, TapDirection, TappedPacket};

/// One end of a link: the state that every packet sent by it touches, in one cache line. The port at the other end has
/// the number that differs in the last bit.
#[derive(Debug)]
#[repr(align(64))]
struct Port {
    rate: LinkRate,
    delay: Span,
    /// End of the current or last transmission.
    free_at: Time,
    control: Fifo,
    data: Fifo,
    queued_max: u32,
    /// Whether an [`Event::TxDone`] is scheduled for this port.
    has_tx_done_event: bool,
    /// Whether the neighbor has paused this port's data.
    is_paused: bool,
    /// Control packets sent since the last data packet, while data was waiting.
    controls_since_data: u8,
    /// Whether the link has impairments in this direction.
    is_impaired: bool,
}

/// The state of a port that only networks with impairments or PFC need.
#[derive(Debug, Default)]
struct PortExtra {
    /// The link's impairments in this direction.
    impairment: Option<ImpairmentState>,
    /// With PFC: bytes of the switch's shared buffer that came by this port.
    shared_used: u64,
    /// With PFC: the threshold factor of `shared_used`.
    pause_alpha: f64,
    /// Whether this port has paused its neighbor.
    is_pausing: bool,
    headroom: u64,
    headroom_used: u64,
    /// Number of pauses sent to the neighbor.
    pauses: u64,
}

/// Settings of a network.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Hosts, switches and links.
    pub topology: Topology,
    /// Settings of the switches.
    pub switches: SwitchConfig,
    /// Impairments: the link's index, the end (0 or 1) that sends in the impaired direction, and what is impaired.
    pub impairments: Vec<(usize, usize, Impairments)>,
    /// Seed of everything random in the network.
    pub seed: u64,
}

impl NetworkConfig {
    /// Returns the settings of a network of default switches without impairments.
    pub fn new(topology: Topology, seed: u64) -> Self {
        Self { topology, switches: SwitchConfig::default(), impairments: Vec::new(), seed }
    }
}

/// A running network: the hosts' endpoints and everything between them.
pub struct Network<E: Endpoint> {
    queue: EventQueue<PackedEvent>,
    now: Time,
    /// When the last event was handled. The clock may go on to the end of a run without events.
    last_event: Time,
    arena: PacketArena<E::Header>,
    ports: Vec<Port>,
    /// By port: the node that it belongs to.
    owners: Vec<NetworkNode>,
    extras: Vec<PortExtra>,
    switches: Vec<Switch>,
    config: SwitchConfig,
    routes: Routes,
    endpoints: Vec<E>,
    /// By host: its port.
    host_ports: Vec<u32>,
    /// By host: the time of the earliest [`Event::Wake`] scheduled for it.
    wakes: Vec<Time>,
    flows: Vec<Flow>,
    /// Number of flows that have started.
    started: usize,
    finished: Vec<FinishedFlow>,
    /// Flows that an endpoint has just reported as finished.
    done: Vec<FlowId>,
    counters: NetworkCounters,
    tap: Option<Box<dyn PacketTap<E::Header>>>,
}

impl<E: Endpoint> Network<E> {
    /// Creates a network with one endpoint per host and these flows, ordered by start time.
    ///
    /// # Panics
    /// If there is not one endpoint per host, a flow's host does not exist, a flow goes to its own host, or the flows
    /// are not ordered.
    pub fn new(config: &NetworkConfig, endpoints: Vec<E>, flows: Vec<Flow>) -> Self {
        let topology = &config.topology;
        assert_eq!(endpoints.len(), topology.hosts() as usize, "one endpoint per host");
        assert!(flows.is_sorted_by_key(|flow| flow.start), "flows ordered by start time");
        let is_possible = |flow: &Flow| flow.from != flow.to && flow.from.0.max(flow.to.0) < topology.hosts();
        assert!(flows.iter().all(is_possible), "flows between two existing hosts");
        let owners: Vec<NetworkNode> = topology.links().iter().flat_map(|link| link.ends).collect();
        let extras = extras(config);
        assert!(owners.len() <= PORTS_MAX, "{} ports; at most {PORTS_MAX}", owners.len());
        let mut host_ports = vec![0; endpoints.len()];
        for (number, owner) in owners.iter().enumerate() {
            if let NetworkNode::Host(host) = owner {
                host_ports[host.0 as usize] = number as u32;
            }
        }
        let mut queue = EventQueue::new();
        if let Some(first) = flows.first() {
            queue.schedule(first.start, Event::StartFlow.into());
        }
        Self {
            queue,
            now: Time::ZERO,
            last_event: Time::ZERO,
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
            finished: Vec::new(),
            done: Vec::new(),
            counters: NetworkCounters::default(),
            tap: None,
        }
    }

    /// Sets the tap that observes what hosts send and receive.
    pub fn set_tap(&mut self, tap: Box<dyn PacketTap<E::Header>>) {
        self.tap = Some(tap);
    }

    /// Runs until the time `end`, or until no event is left. Returns whether events are left.
    pub fn run_until(&mut self, end: Time) -> bool {
        self.run(end, |_| false);
        !self.queue.is_empty()
    }

    /// Runs until all flows have finished, or until the time `end`. Returns whether all flows have finished.
    pub fn run_flows(&mut self, end: Time) -> bool {
        self.run(end, |network| network.finished.len() >= network.flows.len())
    }

    /// Handles events until `is_done`. Returns false if the time `end` or the last event comes before.
    fn run(&mut self, end: Time, is_done: impl Fn(&Self) -> bool) -> bool {
        self.queue.schedule(end, Event::Stop.into());
        while !is_done(self) {
            let Some((now, event)) = self.queue.next_event() else { return false };
            self.now = now;
            match event.into() {
                Event::Stop if now >= end => return false,
                Event::Stop => {} // left over from a run that was done before its end
                event => {
                    self.counters.events += 1;
                    self.handle(event);
                }
            }
        }
        true
    }

    /// Runs until `flows` flows have finished, repeated ones counted each time. Returns false if no event is left
    /// before.
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
        self.last_event = self.now;
        match event {
            Event::Arrive { port, packet } => self.arrive(port, packet),
            Event::TxDone { port } => self.tx_done(port),
            Event::Wake { host } => self.wake(host),
            Event::StartFlow => self.start_due_flows(),
            Event::Pause { port, is_on } => self.pause(port, is_on),
            Event::Stop => {}
        }
    }

    /// Returns the virtual time of the last event.
    pub fn last_event(&self) -> Time {
        self.last_event
    }

    /// Returns the virtual time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Returns the endpoints, by host.
    pub fn endpoints(&self) -> &[E] {
        &self.endpoints
    }

    /// Returns all flows, started or not.
    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// Returns the finished flows in the order in which they finished.
    pub fn finished_flows(&self) -> &[FinishedFlow] {
        &self.finished
    }

    /// Returns the counters of the network.
    pub fn counters(&self) -> NetworkCounters {
        let used = self.switches.iter().map(|switch| switch.used_max).max().unwrap_or(0);
        let queue = self.ports.iter().map(|port| port.queued_max).max().unwrap_or(0).into();
        NetworkCounters { buffer_max_bytes: used, queue_max_bytes: queue, ..self.counters }
    }

    /// Returns the sum of all endpoints' counters.
    pub fn endpoint_counters(&self) -> EndpointCounters {
        self.endpoints.iter().fold(EndpointCounters::default(), |sum, endpoint| sum.plus(endpoint.counters()))
    }

    /// Returns the number of packets in flight, queued or on a link.
    pub fn packets_in_flight(&self) -> usize {
        self.arena.in_use()
    }

    /// Returns an estimate of the memory held by the network and its endpoints, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let ports = self.ports.capacity() * (size_of::<Port>() + size_of::<NetworkNode>() + size_of::<PortExtra>());
        let flows = self.flows.capacity() * size_of::<Flow>() + self.finished.capacity() * size_of::<FinishedFlow>();
        let endpoints: usize = self.endpoints.iter().map(Endpoint::memory_bytes).sum();
        self.arena.memory_bytes() + self.queue.memory_bytes() + self.routes.memory_bytes() + ports + flows + endpoints
    }

    fn start_due_flows(&mut self) {
        while let Some(flow) = self.flows.get(self.started).copied() {
            if flow.start > self.now {
                self.queue.schedule(flow.start, Event::StartFlow.into());
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
            return; // replaced by an earlier event
        }
        self.wakes[host as usize] = Time::MAX;
        self.endpoints[host as usize].advance(self.now);
        self.service_host(host);
    }

    /// Hands a packet to its host's endpoint.
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
            let incoming = InboundPacket { from, header, is_marked, is_trimmed: frame.has(PacketFlag::Trimmed) };
            self.counters.delivered_packets += 1;
            self.endpoints[host as usize].receive(self.now, &incoming);
        }
        self.arena.remove(packet);
        self.service_host(host);
    }

    /// Services an endpoint after every call: collects finished flows, lets it send, and schedules its deadline.
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
            E::start(&mut self.endpoints, self.now, id, &flow);
        } else {
            self.finished.push(FinishedFlow { id, at: self.now });
        }
    }

    /// Lets a host send its next packet if its link is idle.
    fn send(&mut self, host: u32) {
        let number = self.host_ports[host as usize];
        let port = &self.ports[number as usize];
        if port.has_tx_done_event || port.is_paused {
            return;
        }
        let Some(outgoing) = self.endpoints[host as usize].transmit(self.now) else { return };
        let OutboundPacket { to, bytes, trimmed_bytes, label, class, header } = outgoing;
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
    let host_rate = config.topology.fastest_host();
    let pause_alpha = |link: &NetworkLink| config.switches.pfc.map_or(0.0, |pfc| pfc.alpha_of(link.rate, host_rate));
    let extra = |link: &NetworkLink| {
        let (headroom, pause_alpha) = (headroom(link), pause_alpha(link));
        [0, 1].map(|_| PortExtra { headroom, pause_alpha, ..PortExtra::default() })
    };
    let mut extras: Vec<PortExtra> = config.topology.links().iter().flat_map(extra).collect();
    for (link, end, impairments) in config.impairments.iter().filter(|(.., impairments)| !impairments.is_none()) {
        // The text selects the random stream: changing it changes results.
        let random = Random::new(config.seed, &format!("line {link} from end {end}"));
        extras[2 * link + end].impairment = Some(ImpairmentState::new(impairments.clone(), random));
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
        is_impaired: extra.impairment.is_some(),
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

const _: () = assert!(size_of::<Port>() == 64, "a port exceeds a cache line");
