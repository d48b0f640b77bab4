//! The difference of two racks: what a running node can apply, and what needs a restart.

use crate::{NODES_MAX, Rack};

/// The effect of a changed rack on a running node.
#[derive(Clone, Debug, PartialEq)]
pub struct RackChange {
    /// The running rack with all changes that can be applied while its nodes run.
    pub rack: Rack,
    /// Keys whose changes are applied, as paths in a rack file.
    pub applied: Vec<String>,
    /// Keys whose changes need all nodes to be brought down and up.
    pub restart_needed: Vec<String>,
}

impl Rack {
    /// Returns the change from this rack, with which the node in slot `own_slot` runs, to `new`.
    ///
    /// Access rules, timeouts and the address of metrics can change at run time. Nodes can join after the last one
    /// while the device has free slots. How another node reaches the device does not concern this node.
    pub fn change_to(&self, new: &Self, own_slot: usize) -> RackChange {
        let mut change = RackChange { rack: self.clone(), applied: Vec::new(), restart_needed: Vec::new() };
        let before = change.rack.clone();
        let rack = &mut change.rack;
        rack.timeouts = Clone::clone(&new.timeouts);
        // The duration of the lease is fixed when it is granted.
        rack.timeouts.lease_ns = before.timeouts.lease_ns;
        (rack.access_default, rack.access) = (new.access_default, new.access.clone());
        change.apply_nodes(new, own_slot);
        change.applied.extend(changed_key("access_default", &before.access_default, &new.access_default));
        change.applied.extend(changed_key("access", &before.access, &new.access));
        change.applied.extend(changed_key("timeouts", &before.timeouts, &change.rack.timeouts));
        change.restart_needed.extend(changed_key(
            "timeouts.lease_ns",
            &before.timeouts.lease_ns,
            &new.timeouts.lease_ns,
        ));
        change.restart_needed.extend(changed_key("name", &before.name, &new.name));
        change.restart_needed.extend(changed_key("trust", &before.trust, &new.trust));
        change.restart_needed.extend(changed_key("failover", &before.failover, &new.failover));
        change.restart_needed.extend(changed_key("failover_port", &before.failover_port, &new.failover_port));
        change.restart_needed.extend(changed_key("publish", &before.publish, &new.publish));
        change.restart_needed.extend(changed_key("device", &before.device, &new.device));
        change.restart_needed.extend(changed_key("link", &before.link, &new.link));
        change.restart_needed.extend(changed_key("proxy", &before.proxy, &new.proxy));
        change.restart_needed.extend(changed_key("partitions", &before.partitions, &new.partitions));
        change
    }
}

impl RackChange {
    fn apply_nodes(&mut self, new: &Rack, own_slot: usize) {
        let slots = self.rack.device.slots.map_or(self.rack.nodes.len(), usize::from).min(NODES_MAX);
        for (slot, node) in self.rack.nodes.iter_mut().enumerate() {
            let Some(now) = new.nodes.get(slot) else {
                self.restart_needed.push(format!("nodes[{slot}]"));
                continue;
            };
            let is_same = now.name == node.name && now.address == node.address;
            let is_moved = now.device != node.device || now.backend != node.backend;
            let is_ours_and_moved = slot == own_slot && (is_moved || now.publish != node.publish);
            if !is_same || is_ours_and_moved {
                self.restart_needed.push(format!("nodes[{slot}]"));
                continue;
            }
            if now.metrics != node.metrics && slot == own_slot {
                self.applied.push(format!("nodes[{slot}].metrics"));
            }
            *node = now.clone();
        }
        for (slot, node) in new.nodes.iter().enumerate().skip(self.rack.nodes.len()) {
            // A node after one that cannot join has no slot either.
            if slot < slots && slot == self.rack.nodes.len() && self.restart_needed.is_empty() {
                self.rack.nodes.push(node.clone());
                self.applied.push(format!("nodes[{slot}]"));
            } else {
                self.restart_needed.push(format!("nodes[{slot}]"));
            }
        }
    }
}

fn changed_key<T: PartialEq>(key: &str, before: &T, new: &T) -> Option<String> {
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
    fn rules_and_timeouts_are_applied_and_window_settings_need_a_restart() {
        let (running, mut new) = (rack(2), rack(2));
        assert_eq!(running.change_to(&new, 0), RackChange { rack: rack(2), applied: vec![], restart_needed: vec![] });
        new.access_default = Access::Deny;
        new.timeouts.query_ns = 5e8;
        new.device.window_bytes *= 2;
        new.link = Rack::example(2, Backend::Shm, Some(Timing::Ntb), Trust::Proxy).link;
        let change = running.change_to(&new, 0);
        assert_eq!(change.applied, ["access_default", "timeouts"]);
        assert_eq!(change.restart_needed, ["device", "link"]);
        assert_eq!(change.rack.access_default, Access::Deny);
        assert_eq!((change.rack.device.window_bytes, change.rack.link.clone()), (running.device.window_bytes, None));
        assert_eq!(change.rack.digest(), running.digest());
    }

    #[test]
    fn nodes_join_after_the_last_one_while_the_device_has_slots() {
        let mut running = rack(2);
        assert_eq!(running.change_to(&rack(3), 0).restart_needed, ["nodes[2]"]);
        running.device.slots = Some(3);
        let mut new = rack(4);
        new.device.slots = Some(3);
        let change = running.change_to(&new, 0);
        assert_eq!((change.applied, change.restart_needed), (vec!["nodes[2]".to_owned()], vec!["nodes[3]".to_owned()]));
        assert_eq!(change.rack.nodes, rack(3).nodes);
    }

    #[test]
    fn a_removed_or_replaced_node_stays_and_no_node_joins_after_it() {
        let (mut running, mut new) = (rack(3), rack(4));
        running.device.slots = Some(4);
        new.device.slots = Some(4);
        new.nodes[1].address = "127.77.9.9".parse().unwrap();
        let change = running.change_to(&new, 0);
        assert_eq!(
            (change.rack.clone(), change.restart_needed),
            (running.clone(), vec!["nodes[1]".into(), "nodes[3]".into()])
        );
        new.nodes.truncate(2);
        new.nodes[1] = running.nodes[1].clone();
        assert_eq!(running.change_to(&new, 0).restart_needed, ["nodes[2]"]);
    }

    #[test]
    fn settings_of_another_node_alone_need_no_change_here() {
        let (running, mut new) = (Rack::example(2, Backend::Dax, None, Trust::Proxy), rack(2));
        new.clone_from(&running);
        new.nodes[1].device = Some("/dev/dax7.0".to_owned());
        new.nodes[1].metrics = Some("127.0.0.1:9".parse().unwrap());
        let seen = |own_slot| {
            let change = running.change_to(&new, own_slot);
            (change.applied, change.restart_needed)
        };
        assert_eq!(seen(0), (vec![], vec![]));
        assert_eq!(seen(1), (vec![], vec!["nodes[1]".to_owned()]));
        new.nodes[1].device.clone_from(&running.nodes[1].device);
        let change = running.change_to(&new, 1);
        assert_eq!((change.applied, change.restart_needed), (vec!["nodes[1].metrics".to_owned()], vec![]));
    }
}
