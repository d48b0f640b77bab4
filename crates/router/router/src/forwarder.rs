//! A node's forwarder: what it knows, what it is told, and the ways in.

mod arp;
mod claim;
mod claims;
mod deliver;
mod discovery;
mod fragment;
mod icmp_error;
mod mld_listener;
mod mld_state;
mod neighbour_actions;
mod options;
mod receive;
mod redirect;
mod send;
mod slow;
mod stages;
mod vector;

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::MacAddress;
use packet::{ipv4, vlan};
use sim::Random;

use crate::config::{Config, PortConfig};
use crate::counters::{Counters, DropReason};
use crate::local_addresses::LocalAddresses;
use crate::neighbour::{Neighbour, NeighbourUpdate, Neighbours, PortL2};
use crate::output::{Event, Output, RoutedPacket};
use crate::rate::TokenBucket;
use crate::routes::Tables;
use crate::trace::{Filter, Step, TracedStep, flow_of};
use crate::{AdjacencyId, NODES_MAX, NodeId, PORTS_MAX, Packet, Pool, PortId, Time};

use claim::Claim;
pub use claim::ClaimState;
use mld_state::ListenerState;
use vector::Vectors;
pub use vector::{Stage, StageProbe, VECTOR_PACKETS_MAX};

/// What is wrong with a port's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// No such number.
    #[error("port {0}: a node has ports 0 to {last}", last = PORTS_MAX - 1)]
    Number(u8),
    /// Shorter than what every link must carry.
    #[error("port {port}: an MTU of {mtu_bytes} B; IPv4 needs {min} B at least", min = ipv4::MTU_MIN)]
    Mtu {
        /// Which port.
        port: u8,
        /// What it should have.
        mtu_bytes: u16,
    },
    /// A hardware address of a group.
    #[error("port {port}: {mac} is the address of a group; a port's own has an even first byte")]
    Mac {
        /// Which port.
        port: u8,
        /// What it should have.
        mac: MacAddress,
    },
    /// A VLAN that cannot be, or that another port has.
    #[error("port {port}: VLAN {id} of port {parent}: take 1 to {}, each once, of a port without a VLAN", vlan::ID_MAX)]
    Vlan {
        /// Which port.
        port: u8,
        /// Of which port.
        parent: u8,
        /// The VLAN.
        id: u16,
    },
}

/// The table of neighbours is full of those that routes name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("port {port}: no room for neighbour {address}; raise neighbours_max", port = port.0)]
pub struct NeighboursFull {
    /// On whose network it is.
    pub port: PortId,
    /// Who found no room.
    pub address: IpAddr,
}

/// A port, as the stages see it.
struct PortState {
    config: Option<PortConfig>,
    /// The hardware address as the first six bytes of a frame, read as a little-endian number.
    mac_word: u64,
    /// VLANs of this one, and their ports that are up.
    vlans: Vec<(u16, PortId)>,
    /// Own addresses that are used, in the order that they were given.
    addresses: Vec<IpNet>,
    /// All that were given, and where they stand.
    claims: Vec<Claim>,
    /// What is told of the groups of those of IPv6 that are looked for.
    listener: ListenerState,
}

/// Where a packet that is forwarded came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// One of the node's ports.
    Port(PortId),
    /// The node's own kernel.
    Kernel,
    /// Another node.
    Node,
    /// It was made here.
    Router,
}

/// What most steps of the slow path need.
struct Context<'a> {
    now: Time,
    pool: &'a mut Pool,
    output: &'a mut Output,
}

/// Forwards the packets of one node. Time is handed in and never goes back.
pub struct Forwarder {
    config: Config,
    ports: Vec<PortState>,
    /// What each hop takes, by node and port; 0 where nothing leaves: down, not there, or no real port. All numbers
    /// that a [`PortId`] can have are there, so that one look decides.
    mtus: Box<[[u16; 256]; NODES_MAX as usize]>,
    /// What nodes said of their ports, kept while they are down.
    remote_mtus: Box<[[u16; PORTS_MAX as usize]; NODES_MAX as usize]>,
    nodes_up: [bool; NODES_MAX as usize],
    tables: Tables,
    neighbours: Neighbours,
    local: LocalAddresses,
    /// When something is to be done for an own address.
    claims_due: Option<Time>,
    /// Decides when own addresses are looked for.
    random: Random,
    counters: Counters,
    solicitations: TokenBucket,
    icmp_errors: TokenBucket,
    redirects: TokenBucket,
    replies: TokenBucket,
    trace: Option<Filter>,
    vectors: Option<Box<Vectors>>,
    /// What distinguishes IPv4 packets that are made here.
    identification: u16,
}

impl Forwarder {
    /// A node without ports, with these tables.
    pub fn new(config: Config, tables: Tables) -> Forwarder {
        Forwarder { vectors: Some(Box::new(Vectors::new())), ..Forwarder::blank(config, tables) }
    }

    /// Without room for packets under way.
    fn blank(config: Config, tables: Tables) -> Forwarder {
        assert!(config.node.0 < NODES_MAX, "node {} of {NODES_MAX}", config.node.0);
        let limits = config.limits;
        let no_port = || PortState {
            config: None,
            mac_word: 0,
            vlans: Vec::new(),
            addresses: Vec::new(),
            claims: Vec::new(),
            listener: ListenerState::default(),
        };
        Forwarder {
            config,
            ports: (0..PORTS_MAX).map(|_| no_port()).collect(),
            mtus: Box::new([[0; 256]; NODES_MAX as usize]),
            remote_mtus: Box::new([[0; PORTS_MAX as usize]; NODES_MAX as usize]),
            nodes_up: [true; NODES_MAX as usize],
            tables,
            neighbours: Neighbours::new(limits, config.seed),
            local: LocalAddresses::new(),
            claims_due: None,
            random: Random::new(config.seed, "claims"),
            counters: Counters::default(),
            solicitations: TokenBucket::new(limits.solicitations, Time::ZERO),
            icmp_errors: TokenBucket::new(limits.icmp_errors, Time::ZERO),
            redirects: TokenBucket::new(limits.redirects, Time::ZERO),
            replies: TokenBucket::new(limits.replies, Time::ZERO),
            trace: None,
            vectors: None,
            identification: config.seed as u16,
        }
    }

    /// Forgets everything, as if it were new, but keeps the memory that takes longest to get. Nothing may wait in it:
    /// ports go by [`Forwarder::remove_port`] before.
    pub fn reset(&mut self) {
        let vectors = self.vectors.take();
        *self = Forwarder { vectors, ..Forwarder::blank(self.config, self.tables.clone()) };
    }

    /// Says what a port is, or what it has become. Where it goes down, or its hardware address changes, its neighbours
    /// are forgotten, and packets that wait for them are given up.
    pub fn set_port(
        &mut self,
        now: Time,
        port: PortId,
        config: PortConfig,
        pool: &mut Pool,
        output: &mut Output,
    ) -> Result<(), PortError> {
        self.check_port(port, &config)?;
        let former = self.ports[usize::from(port.0)].config.take();
        let is_other = former.as_ref().is_some_and(|former| {
            (former.mac, former.vlan) != (config.mac, config.vlan) || (former.is_up && !config.is_up)
        });
        let state = &mut self.ports[usize::from(port.0)];
        state.mac_word = mac_word(config.mac);
        let former = if is_other { Vec::new() } else { std::mem::take(&mut state.claims) };
        state.claims = claim::new_claims(now, &config, &former, &mut self.random);
        let listener = std::mem::take(&mut state.listener);
        state.listener =
            if config.probes { ListenerState::for_port(listener, &state.claims) } else { ListenerState::default() };
        let addresses = claim::assigned(&state.claims);
        let networks_change = state.addresses != addresses;
        state.addresses = addresses;
        state.config = Some(config);
        self.link_ports();
        if networks_change {
            self.republish_neighbours(port, output);
        }
        self.ports_changed(now, port, is_other, pool, output);
        Ok(())
    }

    /// The port's networks are others, and so are the neighbours that routes lead to.
    fn republish_neighbours(&self, port: PortId, output: &mut Output) {
        for neighbour in self.neighbours.iter().filter(|neighbour| neighbour.port == port && neighbour.mac.is_some()) {
            let Neighbour { address, adjacency, .. } = neighbour;
            output.push_event(if self.is_on_network(port, address) {
                Event::NeighbourUp { port, address, adjacency }
            } else {
                Event::NeighbourDown { port, address, adjacency }
            });
        }
    }

    /// The port is there no longer.
    pub fn remove_port(&mut self, now: Time, port: PortId, pool: &mut Pool, output: &mut Output) {
        let Some(state) = self.ports.get_mut(usize::from(port.0)) else { return };
        state.config = None;
        state.addresses.clear();
        state.claims.clear();
        state.listener = ListenerState::default();
        self.link_ports();
        self.ports_changed(now, port, true, pool, output);
    }

    /// What ports take, and whose VLANs they are: a VLAN's port is up when its parent is, too.
    fn link_ports(&mut self) {
        let is_up = |port: &PortState| port.config.as_ref().is_some_and(|config| config.is_up);
        let parents_up: Vec<bool> = self.ports.iter().map(is_up).collect();
        self.ports.iter_mut().for_each(|port| port.vlans.clear());
        for number in 0..self.ports.len() {
            let Some(config) = &self.ports[number].config else {
                self.mtus[usize::from(self.config.node.0)][number] = 0;
                continue;
            };
            let has_parent = config.vlan.is_none_or(|vlan| parents_up[usize::from(vlan.parent.0)]);
            let is_up = config.is_up && has_parent;
            self.mtus[usize::from(self.config.node.0)][number] = if is_up { config.mtu_bytes } else { 0 };
            if let Some(vlan) = config.vlan.filter(|_| is_up) {
                self.ports[usize::from(vlan.parent.0)].vlans.push((vlan.id, PortId(number as u8)));
            }
        }
    }

    fn ports_changed(&mut self, now: Time, port: PortId, forgets: bool, pool: &mut Pool, output: &mut Output) {
        self.set_local();
        self.set_claims_due();
        if forgets {
            self.neighbours.flush_port(now, port);
            self.run_neighbour_actions(&mut Context { now, pool, output });
        }
    }

    fn set_local(&mut self) {
        self.local.set(self.ports.iter().flat_map(|port| port.addresses.iter().copied()));
    }

    fn check_port(&self, port: PortId, config: &PortConfig) -> Result<(), PortError> {
        if !port.is_real() {
            return Err(PortError::Number(port.0));
        }
        if usize::from(config.mtu_bytes) < ipv4::MTU_MIN {
            return Err(PortError::Mtu { port: port.0, mtu_bytes: config.mtu_bytes });
        }
        if !config.mac.is_unicast() {
            return Err(PortError::Mac { port: port.0, mac: config.mac });
        }
        let Some(of) = config.vlan else { return Ok(()) };
        let parent = self.ports.get(usize::from(of.parent.0)).and_then(|parent| parent.config.as_ref());
        let is_same = |(number, sibling): (usize, &PortState)| {
            number != usize::from(port.0) && sibling.config.as_ref().is_some_and(|sibling| sibling.vlan == Some(of))
        };
        let is_taken = |parent: &PortConfig| parent.vlan.is_some() || self.ports.iter().enumerate().any(is_same);
        if of.parent == port || !(1..=vlan::ID_MAX).contains(&of.id) || parent.is_none_or(is_taken) {
            return Err(PortError::Vlan { port: port.0, parent: of.parent.0, id: of.id });
        }
        Ok(())
    }

    /// What another node said of its port; an MTU of 0: the port is down.
    pub fn set_remote_mtu(&mut self, node: NodeId, port: PortId, mtu_bytes: u16) {
        if node == self.config.node || node.0 >= NODES_MAX || !port.is_real() {
            return;
        }
        self.remote_mtus[usize::from(node.0)][usize::from(port.0)] = mtu_bytes;
        if self.nodes_up[usize::from(node.0)] {
            self.mtus[usize::from(node.0)][usize::from(port.0)] = mtu_bytes;
        }
    }

    /// Whether another node can be reached. Packets for one that cannot are answered, and dropped.
    pub fn set_node_up(&mut self, node: NodeId, is_up: bool) {
        if node == self.config.node || node.0 >= NODES_MAX {
            return;
        }
        let index = usize::from(node.0);
        self.nodes_up[index] = is_up;
        let said = self.remote_mtus[index];
        for (mtu, said) in self.mtus[index].iter_mut().zip(said) {
            *mtu = if is_up { said } else { 0 };
        }
    }

    /// The number of a neighbour that a route names, to be told to other nodes in [`crate::Hop`]s. It stays until
    /// [`Forwarder::unpin_adjacency`], whether the neighbour answers or not.
    pub fn pin_adjacency(
        &mut self,
        now: Time,
        port: PortId,
        address: IpAddr,
        pool: &mut Pool,
        output: &mut Output,
    ) -> Result<AdjacencyId, NeighboursFull> {
        let pinned = self.neighbours.pin(now, port, address);
        self.run_neighbour_actions(&mut Context { now, pool, output });
        pinned.ok_or(NeighboursFull { port, address })
    }

    /// A route that named the neighbour is gone.
    pub fn unpin_adjacency(&mut self, now: Time, adjacency: AdjacencyId, pool: &mut Pool, output: &mut Output) {
        self.neighbours.unpin(now, adjacency);
        self.run_neighbour_actions(&mut Context { now, pool, output });
    }

    /// Somebody else, such as the node's kernel, knows this neighbour: believed until it is used.
    pub fn learn_neighbour(
        &mut self,
        now: Time,
        port: PortId,
        address: IpAddr,
        mac: MacAddress,
        pool: &mut Pool,
        output: &mut Output,
    ) {
        let Some(l2) = self.l2(port).filter(|_| mac.is_unicast() && !self.local.has(address)) else { return };
        let update = NeighbourUpdate { port, address, mac, is_solicited: false, overrides: true, creates: true };
        self.neighbours.update(now, &update, &l2);
        self.run_neighbour_actions(&mut Context { now, pool, output });
    }

    /// How frames of a port that is there begin.
    fn l2(&self, port: PortId) -> Option<PortL2> {
        let config = self.port_config(port)?;
        let queue = config.vlan.map_or(port, |vlan| vlan.parent);
        Some(PortL2 { mac: config.mac, queue, vlan: config.vlan.map(|vlan| vlan.id) })
    }

    fn port_config(&self, port: PortId) -> Option<&PortConfig> {
        self.ports.get(usize::from(port.0))?.config.as_ref()
    }

    /// Own addresses of a port.
    fn addresses(&self, port: PortId) -> &[IpNet] {
        self.ports.get(usize::from(port.0)).map_or(&[], |port| &port.addresses)
    }

    /// All neighbours.
    pub fn neighbours(&self) -> impl Iterator<Item = Neighbour> + '_ {
        self.neighbours.iter()
    }

    /// What was counted since the beginning.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether hosts are told of a nearer way, from now on.
    pub fn set_redirects(&mut self, are_sent: bool) {
        self.config.redirects = are_sent;
    }

    /// Follows the packets that a filter matches, or none any more.
    pub fn trace(&mut self, filter: Option<Filter>) {
        self.trace = filter;
    }

    /// IP packets that the node's own kernel sends by the router. No hop is taken from them: kernel and router are one.
    pub fn from_kernel(&mut self, now: Time, packets: &mut Vec<Packet>, pool: &mut Pool, output: &mut Output) {
        let mut ctx = Context { now, pool, output };
        for packet in packets.drain(..) {
            self.counters.from_kernel.add(packet.len());
            self.trace_step(&mut ctx, &packet, Step::FromKernel);
            self.receive_ip(&mut ctx, packet, Origin::Kernel);
        }
        self.run_neighbour_actions(&mut ctx);
    }

    /// Packets that other nodes looked up: this node sends them.
    pub fn egress(&mut self, now: Time, parcels: &mut Vec<RoutedPacket>, pool: &mut Pool, output: &mut Output) {
        let mut ctx = Context { now, pool, output };
        for parcel in parcels.drain(..) {
            self.counters.from_nodes.add(parcel.packet.len());
            self.egress_one(&mut ctx, parcel);
        }
        self.run_neighbour_actions(&mut ctx);
    }

    /// Does what is due without a packet: neighbours are asked again, or given up, and own addresses looked for.
    pub fn poll(&mut self, now: Time, pool: &mut Pool, output: &mut Output) {
        self.neighbours.poll(now);
        let mut ctx = Context { now, pool, output };
        self.run_neighbour_actions(&mut ctx);
        if self.claims_due.is_some_and(|due| due <= now) {
            self.run_claims(&mut ctx);
        }
    }

    /// When [`Forwarder::poll`] has something to do.
    pub fn next_timer(&self) -> Option<Time> {
        self.neighbours.next_timer().into_iter().chain(self.claims_due).min()
    }

    /// The packet goes no further.
    fn discard(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin, reason: DropReason) {
        self.trace_step(ctx, &packet, Step::Dropped(reason));
        let drops = match origin {
            Origin::Port(port) => &mut self.counters.ports[usize::from(port.0)].drops,
            Origin::Kernel | Origin::Node | Origin::Router => &mut self.counters.drops,
        };
        drops.add(reason);
        ctx.pool.free(packet);
    }

    /// Tells a step of an IP packet, when it is followed.
    fn trace_step(&mut self, ctx: &mut Context<'_>, packet: &Packet, step: Step) {
        if self.trace.is_some() {
            self.record_step(ctx, packet, step);
        }
    }

    fn record_step(&mut self, ctx: &mut Context<'_>, packet: &Packet, step: Step) {
        let Some(filter) = self.trace.as_mut() else { return };
        let Some(flow) = flow_of(ctx.pool.bytes(packet)).filter(|flow| filter.matches(flow)) else { return };
        if matches!(step, Step::Received(_) | Step::FromKernel | Step::FromNode | Step::Generated) {
            if filter.packets_max == 0 {
                self.trace = None;
                return;
            }
            filter.packets_max -= 1;
        }
        ctx.output.trace(TracedStep { time: ctx.now, flow, step });
    }
}

/// An own hardware address as the first six bytes of a frame to it, read as a little-endian number.
fn mac_word(mac: MacAddress) -> u64 {
    let [a, b, c, d, e, f] = mac.0;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}
