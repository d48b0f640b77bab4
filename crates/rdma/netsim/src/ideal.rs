//! Ideal flow completion time (FCT): how long a flow takes alone in the network, in closed form. A flow's slowdown is
//! its completion time divided by this.

use sim::Span;

use crate::endpoint::{ETHERNET_BYTES_MIN, Flow, Framing, HostLatency};
use crate::rate::LinkRate;
use crate::topology::{HostId, NetworkNode, NextHops, Routes, Topology};

/// Computes ideal flow completion times in a network.
#[derive(Debug)]
pub struct IdealFct<'a> {
    topology: &'a Topology,
    routes: Routes,
    framing: Framing,
    latency: HostLatency,
    /// By host: its port.
    ports: Vec<u32>,
}

/// A link on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hop {
    rate: LinkRate,
    delay: Span,
}

impl<'a> IdealFct<'a> {
    /// Creates the computation for flows that a transport divides into packets in this way, between hosts without
    /// latency.
    pub fn new(topology: &'a Topology, framing: Framing) -> Self {
        let mut ports = vec![0; topology.hosts() as usize];
        for (index, link) in topology.links().iter().enumerate() {
            for (end, node) in link.ends.iter().enumerate() {
                if let NetworkNode::Host(host) = node {
                    ports[host.0 as usize] = (2 * index + end) as u32;
                }
            }
        }
        Self { topology, routes: Routes::new(topology), framing, latency: HostLatency::default(), ports }
    }

    /// Returns the computation for hosts with this latency.
    #[must_use]
    pub fn with_latency(self, latency: HostLatency) -> Self {
        Self { latency, ..self }
    }

    /// Returns one of the shortest paths.
    fn path(&self, from: HostId, to: HostId) -> Vec<Hop> {
        let mut port = self.ports[from.0 as usize];
        let mut hops = Vec::new();
        loop {
            let link = self.topology.links()[port as usize / 2];
            hops.push(Hop { rate: link.rate, delay: link.delay });
            let NetworkNode::Switch(switch) = link.ends[1 - port as usize % 2] else { return hops };
            port = match self.routes.next_hops(switch, to) {
                NextHops::One(port) => port,
                NextHops::Many(ports) => ports[0],
            };
        }
    }

    /// Returns the number of links between two hosts.
    pub fn links(&self, from: HostId, to: HostId) -> u32 {
        self.path(from, to).len() as u32
    }

    fn packet_bytes(&self, payload: u64) -> u64 {
        (payload + u64::from(self.framing.overhead_bytes)).max(ETHERNET_BYTES_MIN.into())
    }

    /// Returns the time from the first bit sent until the last packet has arrived, with store-and-forward switches.
    fn forward(&self, hops: &[Hop], bytes: u64) -> Span {
        let payload = u64::from(self.framing.payload_bytes);
        let packets = bytes.div_ceil(payload).max(1);
        let (full, last) = (self.packet_bytes(payload), self.packet_bytes(bytes - (packets - 1) * payload));
        // When the last full packet has left a link, and when the last packet has.
        let (mut full_left, mut last_left) = (Span::ZERO, Span::ZERO);
        let (mut before, mut slowest) = (Span::ZERO, Span::ZERO);
        for hop in hops {
            let span = hop.rate.transmission_time(full);
            slowest = slowest.max(span);
            before += span;
            full_left = if packets > 1 { before + slowest * (packets - 2) } else { Span::ZERO };
            last_left = full_left.max(last_left) + hop.rate.transmission_time(last);
            before += hop.delay;
            last_left += hop.delay;
        }
        debug_assert!(full_left <= last_left);
        last_left
    }

    /// Returns the ideal completion time: from the flow's start until its sender knows that everything has arrived.
    pub fn fct(&self, flow: &Flow) -> Span {
        let hops = self.path(flow.from, flow.to);
        let back: Span =
            hops.iter().map(|hop| hop.rate.transmission_time(self.framing.ack_bytes.into()) + hop.delay).sum();
        let HostLatency { before, first_byte_ps, after } = self.latency;
        let first_bytes = flow.bytes.min(self.framing.payload_bytes.into());
        before + Span::from_ps(first_byte_ps) * first_bytes + self.forward(&hops, flow.bytes) + back + after
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::TopologyPreset;
    use sim::Time;

    /// The same time, simulated packet by packet.
    fn stepwise(ideal: &IdealFct, flow: &Flow) -> Span {
        let hops = ideal.path(flow.from, flow.to);
        let payload = u64::from(ideal.framing.payload_bytes);
        let mut left = vec![Span::ZERO; hops.len()];
        let (mut rest, mut arrived) = (flow.bytes, Span::ZERO);
        while rest > 0 {
            let bytes = rest.min(payload);
            rest -= bytes;
            arrived = Span::ZERO;
            for (hop, left) in hops.iter().zip(&mut left) {
                *left = arrived.max(*left) + hop.rate.transmission_time(ideal.packet_bytes(bytes));
                arrived = *left + hop.delay;
            }
        }
        arrived
            + hops
                .iter()
                .map(|hop| hop.rate.transmission_time(ideal.framing.ack_bytes.into()) + hop.delay)
                .sum::<Span>()
    }

    #[test]
    fn the_closed_form_equals_a_simulation_packet_by_packet() {
        for preset in TopologyPreset::ALL {
            let topology = preset.topology();
            let framing = Framing { payload_bytes: 1000, overhead_bytes: 82, ack_bytes: 84 };
            let ideal = IdealFct::new(&topology, framing);
            for to in [1, 17, 40, topology.hosts() - 1] {
                for bytes in [1, 999, 1000, 1001, 1999, 2000, 7_300, 3_000_000] {
                    let flow = Flow::new(Time::ZERO, HostId(0), HostId(to), bytes);
                    assert_eq!(ideal.fct(&flow), stepwise(&ideal, &flow), "{} {to} {bytes}", preset.name());
                }
            }
        }
    }
}
