//! A router with a full table, and the traffic that it forwards in a benchmark.

use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use ::router::port::memory::{Destinations, Generator};
use ::router::{
    AdjacencyId, Config, DropReason, Forwarder, Hop, NodeId, Output, Packet, Pool, Port, PortConfig, PortId, Rib,
    RouteError, Time, VECTOR_PACKETS_MAX,
};
use ipnet::IpNet;
use packet::ethernet::{EtherType, HEADER_BYTES, MacAddress, Repr};
use sim::Random;
use thiserror::Error;

use super::{FCS_BYTES, PortProbe};
use crate::table::Table;

/// The reason why a measurement failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The kernel has no memory for the tables.
    #[error("no memory for tables: {0}")]
    Memory(#[from] io::Error),
    /// The tables have no room for a route.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// Not every packet was forwarded.
    #[error("{packets_in} packets went in and {packets_out} came out: {drops}")]
    Lost {
        /// Packets that were received.
        packets_in: u64,
        /// Packets that were sent.
        packets_out: u64,
        /// The drop counters that grew, with their reasons.
        drops: String,
    },
    /// No route leads to an address that packets can be sent to.
    #[error("no IPv{0} route covers an address that a router forwards to; use other routes")]
    Nowhere(u8),
    /// Instructions were not counted.
    #[error("instructions: {0}")]
    Instructions(String),
}

const NODE: NodeId = NodeId(0);

/// The port that receives packets.
const INGRESS: PortId = PortId(0);

/// The number of ports that transmit packets and the number of neighbours on each, as for a router at an Internet
/// exchange.
const EGRESS_PORTS: u8 = 4;
const NEIGHBOURS_OF_PORT: u16 = 64;

const MTU_BYTES: u16 = 1500;

/// Twice the largest number of packets in flight: one vector is received while another is transmitted.
const BUFFERS: u32 = 2 * VECTOR_PACKETS_MAX as u32;
const BUFFER_BYTES: u16 = 2048;
const HEADROOM_BYTES: u16 = 64 + 50;

/// The constant time of the benchmark: all neighbours are known and nothing expires.
const NOW: Time = Time::from_ns(1_000_000_000);

/// A node with routes to the whole Internet through known neighbours.
pub struct Router {
    forwarder: Forwarder,
    routes: Routes,
    pool: Pool,
    output: Output,
    vector: Vec<Packet>,
}

/// The writer of the tables, which can move to a separate thread.
pub(super) struct Routes {
    rib: Rib,
    table: Table,
    hops: Vec<Hop>,
}

impl Routes {
    /// Announces every route, with the hop that its next hop maps to, or with a random one.
    fn announce(&mut self, random: &mut Random) -> Result<(), Error> {
        let Routes { rib, table, hops } = self;
        for (prefix, next_hop) in table.routes() {
            let hop = next_hop.unwrap_or_else(|| random.below(hops.len() as u64) as usize) % hops.len();
            rib.announce(NODE, prefix, 0, &[hops[hop]])?;
        }
        Ok(())
    }

    /// Changes a random IPv4 route to a random hop.
    pub(super) fn change(&mut self, random: &mut Random) -> Result<(), Error> {
        let prefix = self.table.v4[random.below(self.table.v4.len() as u64) as usize];
        let hop = self.hops[random.below(self.hops.len() as u64) as usize];
        Ok(self.rib.announce(NODE, IpNet::V4(prefix), 0, &[hop])?)
    }
}

impl Router {
    /// Creates a router with this many generated routes.
    ///
    /// # Errors
    /// Fails if there is no memory or the tables have no room.
    pub fn new(seed: u64, routes_v4: usize, routes_v6: usize) -> Result<Router, Error> {
        Router::with_table(seed, Table::generated(seed, routes_v4, routes_v6))
    }

    /// Creates a router with the routes of a table.
    ///
    /// # Errors
    /// Fails if there is no memory or the tables have no room.
    pub fn with_table(seed: u64, table: Table) -> Result<Router, Error> {
        let (rib, tables) = Rib::new()?;
        let mut router = Router {
            forwarder: Forwarder::new(Config::new(NODE), tables),
            routes: Routes { rib, table, hops: Vec::new() },
            // The Ethernet and IPv4 headers end at the end of a cache line, so that both lie in one line.
            pool: Pool::new(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES),
            output: Output::new(VECTOR_PACKETS_MAX),
            vector: Vec::with_capacity(VECTOR_PACKETS_MAX),
        };
        router.routes.hops = router.ports();
        router.routes.announce(&mut Random::new(seed, "next hops"))?;
        Ok(router)
    }

    /// Configures the ports, and returns the hops to the neighbours of all ports but the first.
    fn ports(&mut self) -> Vec<Hop> {
        let Router { forwarder, pool, output, .. } = self;
        let mut hops = Vec::new();
        for port in 0..=EGRESS_PORTS {
            let config = PortConfig::new(mac(port), MTU_BYTES);
            forwarder.set_port(NOW, PortId(port), config, pool, output).expect("a valid port");
        }
        for number in 0..NEIGHBOURS_OF_PORT {
            for port in (1..=EGRESS_PORTS).map(PortId) {
                let [high, low] = number.to_be_bytes();
                let address = IpAddr::V4(Ipv4Addr::new(192, 0, high, low));
                let neighbour = MacAddress([2, 1, 0, port.0, high, low]);
                forwarder.learn_neighbour(NOW, port, address, neighbour, pool, output);
                let pinned = forwarder.pin_adjacency(NOW, port, address, pool, output);
                let adjacency: AdjacencyId = pinned.expect("room for a few neighbours");
                hops.push(Hop { node: NODE, port, adjacency });
            }
        }
        hops
    }

    /// Returns the numbers of IPv4 and of IPv6 routes.
    pub fn routes(&self) -> (usize, usize) {
        self.routes.rib.routes()
    }

    /// Returns random addresses of random routes, except those that no router forwards to. A table may cover such
    /// addresses with its default route or by mistake.
    pub fn destinations_v4(&self, seed: u64, count: usize) -> Destinations {
        let mut addresses = ::fib::generate::addresses_v4(seed, &self.routes.table.v4, count);
        let is_link_local = |address: &u32| address >> 16 == 0xa9fe;
        addresses.retain(|address| matches!(address >> 24, 1..=126 | 128..=223) && !is_link_local(address));
        Destinations::V4(addresses)
    }

    /// The counterpart of [`Router::destinations_v4`] for IPv6: global and unique local addresses.
    pub fn destinations_v6(&self, seed: u64, count: usize) -> Destinations {
        let mut addresses = ::fib::generate::addresses_v6(seed, &self.routes.table.v6, count);
        addresses.retain(|address| (1..0xfe00).contains(&(address >> 112)));
        Destinations::V6(addresses)
    }

    /// Returns for IPv4 and IPv6 whether the table has routes of that family.
    pub(super) fn has_routes(&self) -> [bool; 2] {
        [!self.routes.table.v4.is_empty(), !self.routes.table.v6.is_empty()]
    }

    /// Returns frames of these sizes to these destinations, both used round robin, and the writer of the routes.
    pub(super) fn traffic_and_routes(
        &mut self,
        sizes: &[usize],
        destinations: Destinations,
    ) -> (Traffic<'_>, &mut Routes) {
        let ethertype = if matches!(destinations, Destinations::V4(_)) { EtherType::IPV4 } else { EtherType::IPV6 };
        let mut ethernet = [0; HEADER_BYTES];
        Repr { destination: mac(INGRESS.0), source: MacAddress([2, 1, 0, 0, 0, 1]), ethertype }.emit(&mut ethernet);
        let sizes: Vec<usize> = sizes.iter().map(|size| size - FCS_BYTES).collect();
        let generator = Generator::new(ethernet, &sizes, destinations);
        let Router { forwarder, routes, pool, output, vector } = self;
        (Traffic { forwarder, pool, output, vector, generator }, routes)
    }

    /// Returns only the frames of [`Router::traffic_and_routes`].
    pub(super) fn traffic(&mut self, sizes: &[usize], destinations: Destinations) -> Traffic<'_> {
        self.traffic_and_routes(sizes, destinations).0
    }
}

fn mac(port: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, port])
}

/// A router and the traffic that its first port receives. The other ports discard what is sent.
pub(super) struct Traffic<'a> {
    forwarder: &'a mut Forwarder,
    pool: &'a mut Pool,
    output: &'a mut Output,
    vector: &'a mut Vec<Packet>,
    pub(super) generator: Generator,
}

impl Traffic<'_> {
    fn drops(&self) -> Vec<(DropReason, u64)> {
        let counters = self.forwarder.counters();
        DropReason::ALL.iter().map(|reason| (*reason, counters.dropped(*reason))).collect()
    }

    /// Returns the same traffic with a receive ring of `frames_max` frames, into which frames must be offered.
    pub(super) fn with_ring(self, frames_max: u64) -> Self {
        Traffic { generator: self.generator.with_ring(frames_max), ..self }
    }

    /// Forwards `packets` packets, all of which must be transmitted.
    pub(super) fn forward(&mut self, packets: usize, probe: &mut impl PortProbe) -> Result<(), Error> {
        let (before, drops_before) = (self.generator.transmitted().packets, self.drops());
        let mut left = packets;
        while left > 0 {
            left -= self.poll_once(left.min(VECTOR_PACKETS_MAX), probe);
        }
        let (packets_in, packets_out) = (packets as u64, self.generator.transmitted().packets - before);
        if packets_in == packets_out {
            return Ok(());
        }
        let mut drops = String::new();
        for ((reason, now), (_, before)) in self.drops().into_iter().zip(drops_before) {
            if now > before {
                let comma = if drops.is_empty() { "" } else { ", " };
                let _ = write!(drops, "{comma}{reason} {}", now - before);
            }
        }
        Err(Error::Lost { packets_in, packets_out, drops })
    }

    /// Runs one iteration of a node's loop, which transmits what was received, and returns the number of received
    /// packets.
    pub(super) fn poll_once(&mut self, packets_max: usize, probe: &mut impl PortProbe) -> usize {
        let Traffic { forwarder, pool, output, vector, generator } = self;
        let count = generator.receive(pool, vector, packets_max).expect("memory does not fail");
        probe.received();
        forwarder.ingress_probed(NOW, INGRESS, vector, pool, output, probe);
        for port in 0..=EGRESS_PORTS {
            generator.transmit(pool, output.to_port(PortId(port))).expect("memory does not fail");
        }
        probe.transmitted();
        count
    }
}
