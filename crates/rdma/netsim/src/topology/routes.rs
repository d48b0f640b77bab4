//! Shortest-path routing: the equal-cost next hops of every switch towards every host.

use std::collections::VecDeque;

use super::graph::{HostId, NetworkNode, SwitchId, Topology};

/// A port's number in the network: link i has the ports 2i and 2i + 1, at its first and second end.
pub(crate) type PortNumber = u32;

/// The ports on shortest paths, by switch and by the switch to which the destination is attached.
#[derive(Debug)]
pub(crate) struct Routes {
    switches: usize,
    /// By host: its switch and the port there; `None` where two hosts are connected directly.
    edge: Vec<Option<(SwitchId, PortNumber)>>,
    /// By switch and edge switch: first index and number of its next hops in `ports`.
    ranges: Vec<(u32, u32)>,
    ports: Vec<PortNumber>,
}

impl Routes {
    pub fn new(topology: &Topology) -> Self {
        let switches = topology.switches() as usize;
        let mut edge = vec![None; topology.hosts() as usize];
        // By switch: its ports to other switches, with those switches.
        let mut trunks = vec![Vec::new(); switches];
        for (index, link) in topology.links().iter().enumerate() {
            let first = 2 * index as PortNumber;
            match link.ends {
                [NetworkNode::Host(host), NetworkNode::Switch(switch)] => {
                    edge[host.0 as usize] = Some((switch, first + 1))
                }
                [NetworkNode::Switch(switch), NetworkNode::Host(host)] => edge[host.0 as usize] = Some((switch, first)),
                [NetworkNode::Switch(a), NetworkNode::Switch(b)] => {
                    trunks[a.0 as usize].push((first, b.0 as usize));
                    trunks[b.0 as usize].push((first + 1, a.0 as usize));
                }
                [NetworkNode::Host(_), NetworkNode::Host(_)] => {}
            }
        }
        let mut routes = Self { switches, edge, ranges: vec![(0, 0); switches * switches], ports: Vec::new() };
        let mut is_edge = vec![false; switches];
        routes.edge.iter().flatten().for_each(|(switch, _)| is_edge[switch.0 as usize] = true);
        (0..switches).filter(|target| is_edge[*target]).for_each(|target| routes.add(target, &trunks));
        routes
    }

    /// Adds the next hops of all switches towards the switch `target`, by a breadth-first search.
    fn add(&mut self, target: usize, trunks: &[Vec<(PortNumber, usize)>]) {
        let mut hops = vec![u32::MAX; self.switches];
        hops[target] = 0;
        let mut to_visit = VecDeque::from([target]);
        while let Some(switch) = to_visit.pop_front() {
            for &(_, next) in &trunks[switch] {
                if hops[next] == u32::MAX {
                    hops[next] = hops[switch] + 1;
                    to_visit.push_back(next);
                }
            }
        }
        for switch in (0..self.switches).filter(|switch| *switch != target) {
            let first = self.ports.len() as u32;
            let nearer = trunks[switch].iter().filter(|(_, next)| hops[*next] < hops[switch]);
            self.ports.extend(nearer.map(|(port, _)| *port));
            self.ranges[switch * self.switches + target] = (first, self.ports.len() as u32 - first);
        }
    }

    /// Returns the ports of `switch` on shortest paths to `host`: at least one, because every host is reachable.
    pub fn next_hops(&self, switch: SwitchId, host: HostId) -> NextHops<'_> {
        let Some((edge, port)) = self.edge[host.0 as usize] else { return NextHops::Many(&[]) };
        if edge == switch {
            return NextHops::One(port);
        }
        let (first, count) = self.ranges[switch.0 as usize * self.switches + edge.0 as usize];
        NextHops::Many(&self.ports[first as usize..(first + count) as usize])
    }

    pub fn memory_bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<(u32, u32)>() + self.ports.capacity() * size_of::<PortNumber>()
    }
}

/// The ports by which a packet may leave a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextHops<'a> {
    /// The port of the destination host.
    One(PortNumber),
    /// Equal-cost ports to other switches.
    Many(&'a [PortNumber]),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::TopologyPreset;

    fn count(routes: &Routes, switch: u32, host: u32) -> usize {
        match routes.next_hops(SwitchId(switch), HostId(host)) {
            NextHops::One(_) => 0,
            NextHops::Many(ports) => ports.len(),
        }
    }

    #[test]
    fn next_hops_are_those_on_shortest_paths() {
        let routes = Routes::new(&TopologyPreset::ThreeTier1024.topology());
        assert_eq!(count(&routes, 0, 0), 0, "a leaf to its own host");
        assert_eq!(count(&routes, 0, 16), 4, "a leaf to a host of its pod: by any of the pod's spines");
        assert_eq!(count(&routes, 0, 1023), 4, "a leaf to another pod");
        assert_eq!(count(&routes, 64, 16), 1, "a spine down to a leaf of its pod");
        assert_eq!(count(&routes, 64, 1023), 4, "a spine up to its cores");
        assert_eq!(count(&routes, 128, 1023), 1, "a core down to a pod");
    }

    #[test]
    fn a_leafs_next_hops_are_spines() {
        let topology = TopologyPreset::LeafSpine256.topology();
        let routes = Routes::new(&topology);
        let NextHops::Many(ports) = routes.next_hops(SwitchId(0), HostId(255)) else { panic!("not its own host") };
        for port in ports {
            let link = topology.links()[*port as usize / 2];
            assert_eq!(link.ends[*port as usize % 2], NetworkNode::Switch(SwitchId(0)));
            let NetworkNode::Switch(spine) = link.ends[1 - *port as usize % 2] else { panic!("a trunk") };
            assert!((8..16).contains(&spine.0));
        }
    }
}
