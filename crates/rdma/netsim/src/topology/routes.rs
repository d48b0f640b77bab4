//! Shortest paths: which ports of a switch lead nearer to a host.

use std::collections::VecDeque;

use super::graph::{HostId, NetworkNode, SwitchId, Topology};

/// A port, numbered over the whole network: line i has the ports 2i and 2i + 1, at its first and second end.
pub(crate) type PortNumber = u32;

/// By switch and by the switch that the destination hangs on: the ports on shortest paths.
#[derive(Debug)]
pub(crate) struct Routes {
    switches: usize,
    /// By host: its switch and the port there; `None` where two hosts share a cable.
    edge: Vec<Option<(SwitchId, PortNumber)>>,
    /// By switch and edge switch: where in `ports` its choices lie.
    choices: Vec<(u32, u32)>,
    ports: Vec<PortNumber>,
}

impl Routes {
    pub fn new(topology: &Topology) -> Self {
        let switches = topology.switches() as usize;
        let mut edge = vec![None; topology.hosts() as usize];
        // By switch: its ports to other switches, and which.
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
        let mut routes = Self { switches, edge, choices: vec![(0, 0); switches * switches], ports: Vec::new() };
        let mut is_edge = vec![false; switches];
        routes.edge.iter().flatten().for_each(|(switch, _)| is_edge[switch.0 as usize] = true);
        (0..switches).filter(|target| is_edge[*target]).for_each(|target| routes.add(target, &trunks));
        routes
    }

    /// Adds the choices of all switches towards one.
    fn add(&mut self, target: usize, trunks: &[Vec<(PortNumber, usize)>]) {
        let mut hops = vec![u32::MAX; self.switches];
        hops[target] = 0;
        let mut open = VecDeque::from([target]);
        while let Some(switch) = open.pop_front() {
            for &(_, next) in &trunks[switch] {
                if hops[next] == u32::MAX {
                    hops[next] = hops[switch] + 1;
                    open.push_back(next);
                }
            }
        }
        for switch in (0..self.switches).filter(|switch| *switch != target) {
            let begin = self.ports.len() as u32;
            let nearer = trunks[switch].iter().filter(|(_, next)| hops[*next] < hops[switch]);
            self.ports.extend(nearer.map(|(port, _)| *port));
            self.choices[switch * self.switches + target] = (begin, self.ports.len() as u32 - begin);
        }
    }

    /// The ports of a switch towards a host: at least one, for every host is reached.
    pub fn next_hops(&self, switch: SwitchId, host: HostId) -> NextHops<'_> {
        let Some((edge, port)) = self.edge[host.0 as usize] else { return NextHops::Many(&[]) };
        if edge == switch {
            return NextHops::One(port);
        }
        let (begin, count) = self.choices[switch.0 as usize * self.switches + edge.0 as usize];
        NextHops::Many(&self.ports[begin as usize..(begin + count) as usize])
    }

    pub fn memory_bytes(&self) -> usize {
        self.choices.capacity() * size_of::<(u32, u32)>() + self.ports.capacity() * size_of::<PortNumber>()
    }
}

/// Where a packet may go next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextHops<'a> {
    /// To its host.
    One(PortNumber),
    /// To any of these.
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
    fn all_shortest_paths_are_offered_and_no_others() {
        let routes = Routes::new(&TopologyPreset::ThreeTier1024.topology());
        assert_eq!(count(&routes, 0, 0), 0, "a leaf to its own host");
        assert_eq!(count(&routes, 0, 16), 4, "a leaf to a host of its pod: by any of the pod's spines");
        assert_eq!(count(&routes, 0, 1023), 4, "a leaf to another pod");
        assert_eq!(count(&routes, 64, 16), 1, "a spine down to a leaf of its pod");
        assert_eq!(count(&routes, 64, 1023), 4, "a spine up to its cores");
        assert_eq!(count(&routes, 128, 1023), 1, "a core down to a pod");
    }

    #[test]
    fn a_step_leads_to_a_switch_that_is_nearer() {
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
