//! What of a rack that has changed a running node can take on.

use crate::{NODES_MAX, Rack};

/// A rack that has changed, as a running node sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The rack with all that can change while its nodes run.
    pub rack: Rack,
    /// What has changed in it: keys as in a rack file.
    pub taken: Vec<String>,
    /// What else is new, and needs all nodes to be brought down and up.
    pub left: Vec<String>,
}

impl Rack {
    /// What changes from this rack, with which the node in slot `own` runs, to `new`.
    ///
    /// Access rules, time-outs and where a node serves metrics change as they are; nodes may join behind the last as
    /// far as the device has slots. How another node reaches the device is its own business.
    pub fn change_to(&self, new: &Self, own: usize) -> Change {
        let mut change = Change { rack: self.clone(), taken: Vec::new(), left: Vec::new() };
        let before = change.rack.clone();
        let rack = &mut change.rack;
        rack.timeouts = Clone::clone(&new.timeouts);
        // The lease has its time from when it was granted.
        rack.timeouts.lease_ns = before.timeouts.lease_ns;
        (rack.access_default, rack.access) = (new.access_default, new.access.clone());
        change.take_nodes(new, own);
        change.taken.extend(note("access_default", &before.access_default, &new.access_default));
        change.taken.extend(note("access", &before.access, &new.access));
        change.taken.extend(note("timeouts", &before.timeouts, &change.rack.timeouts));
        change.left.extend(note("timeouts.lease_ns", &before.timeouts.lease_ns, &new.timeouts.lease_ns));
        change.left.extend(note("name", &before.name, &new.name));
        change.left.extend(note("trust", &before.trust, &new.trust));
        change.left.extend(note("failover", &before.failover, &new.failover));
        change.left.extend(note("failover_port", &before.failover_port, &new.failover_port));
        change.left.extend(note("device", &before.device, &new.device));
        change.left.extend(note("link", &before.link, &new.link));
        change.left.extend(note("proxy", &before.proxy, &new.proxy));
        change.left.extend(note("partitions", &before.partitions, &new.partitions));
        change
    }
}

impl Change {
    fn take_nodes(&mut self, new: &Rack, own: usize) {
        let slots = self.rack.device.slots.map_or(self.rack.nodes.len(), usize::from).min(NODES_MAX);
        for (slot, node) in self.rack.nodes.iter_mut().enumerate() {
            let Some(now) = new.nodes.get(slot) else {
                self.left.push(format!("nodes[{slot}]"));
                continue;
            };
            let is_same = now.name == node.name && now.address == node.address;
            let is_ours_and_moved = slot == own && (now.device != node.device || now.backend != node.backend);
            if !is_same || is_ours_and_moved {
                self.left.push(format!("nodes[{slot}]"));
                continue;
            }
            if now.metrics != node.metrics && slot == own {
                self.taken.push(format!("nodes[{slot}].metrics"));
            }
            *node = now.clone();
        }
        for (slot, node) in new.nodes.iter().enumerate().skip(self.rack.nodes.len()) {
            // A node that stands behind one that cannot join has no place either.
            if slot < slots && slot == self.rack.nodes.len() && self.left.is_empty() {
                self.rack.nodes.push(node.clone());
                self.taken.push(format!("nodes[{slot}]"));
            } else {
                self.left.push(format!("nodes[{slot}]"));
            }
        }
    }
}

fn note<T: PartialEq>(key: &str, before: &T, new: &T) -> Option<String> {
    (before != new).then(|| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Backend, Timing, Trust};

    fn rack(nodes: usize) -> Rack {
        Rack::example(nodes, Backend::Shm, None, Trust::Proxy)
    }

    #[test]
    fn rules_and_time_outs_are_taken_and_what_windows_are_made_of_is_left() {
        let (running, mut new) = (rack(2), rack(2));
        assert_eq!(running.change_to(&new, 0), Change { rack: rack(2), taken: vec![], left: vec![] });
        new.access_default = Access::Deny;
        new.timeouts.query_ns = 5e8;
        new.device.window_bytes *= 2;
        new.link = Rack::example(2, Backend::Shm, Some(Timing::Ntb), Trust::Proxy).link;
        let change = running.change_to(&new, 0);
        assert_eq!(change.taken, ["access_default", "timeouts"]);
        assert_eq!(change.left, ["device", "link"]);
        assert_eq!(change.rack.access_default, Access::Deny);
        assert_eq!((change.rack.device.window_bytes, change.rack.link.clone()), (running.device.window_bytes, None));
        assert_eq!(change.rack.digest(), running.digest());
    }

    #[test]
    fn nodes_join_behind_the_last_as_far_as_the_device_has_slots() {
        let mut running = rack(2);
        assert_eq!(running.change_to(&rack(3), 0).left, ["nodes[2]"]);
        running.device.slots = Some(3);
        let mut new = rack(4);
        new.device.slots = Some(3);
        let change = running.change_to(&new, 0);
        assert_eq!((change.taken, change.left), (vec!["nodes[2]".to_owned()], vec!["nodes[3]".to_owned()]));
        assert_eq!(change.rack.nodes, rack(3).nodes);
    }

    #[test]
    fn a_node_that_leaves_or_is_another_stays_as_it_was_and_others_join_only_behind_it() {
        let (mut running, mut new) = (rack(3), rack(4));
        running.device.slots = Some(4);
        new.device.slots = Some(4);
        new.nodes[1].address = "127.77.9.9".parse().unwrap();
        let change = running.change_to(&new, 0);
        assert_eq!((change.rack.clone(), change.left), (running.clone(), vec!["nodes[1]".into(), "nodes[3]".into()]));
        new.nodes.truncate(2);
        new.nodes[1] = running.nodes[1].clone();
        assert_eq!(running.change_to(&new, 0).left, ["nodes[2]"]);
    }

    #[test]
    fn what_is_another_nodes_own_business_is_none_of_ours() {
        let (running, mut new) = (Rack::example(2, Backend::Dax, None, Trust::Proxy), rack(2));
        new.clone_from(&running);
        new.nodes[1].device = Some("/dev/dax7.0".to_owned());
        new.nodes[1].metrics = Some("127.0.0.1:9".parse().unwrap());
        let seen = |own| {
            let change = running.change_to(&new, own);
            (change.taken, change.left)
        };
        assert_eq!(seen(0), (vec![], vec![]));
        assert_eq!(seen(1), (vec![], vec!["nodes[1]".to_owned()]));
        new.nodes[1].device.clone_from(&running.nodes[1].device);
        let change = running.change_to(&new, 1);
        assert_eq!((change.taken, change.left), (vec!["nodes[1].metrics".to_owned()], vec![]));
    }
}
