//! The routes that a node announces (the Adj-RIB-Out of RFC 4271), as a log of changes.
//!
//! Each change has a number, and the log holds only the latest change of each destination. A peer that has received all
//! changes up to some number is sent the later ones at its own pace, and never an intermediate state. So no queue grows
//! for a peer that does not read.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use ipnet::IpNet;
use router::interner::{InternedId, Interner};

use super::message::{AnnouncedRoute, RouteChange};

/// The announcements of one node.
#[derive(Debug, Default)]
pub struct Announcements {
    /// MTU of each port; 0 for a port that is down.
    mtus_bytes: Vec<u16>,
    /// Number of changes of the MTUs.
    mtus_change: u64,
    table: BTreeMap<IpNet, Entry>,
    /// What is announced: many destinations have the same metric and next hops.
    routes: Interner<AnnouncedRoute>,
    /// The destination of each change; only the latest change of each destination.
    log: BTreeMap<u64, IpNet>,
    /// Numbers of the changes in the log that are withdrawals.
    withdrawn: BTreeSet<u64>,
    /// Number of the latest change.
    latest: u64,
    /// Number of the latest withdrawal that was pruned.
    pruned: u64,
    /// Number of destinations that are announced and not withdrawn.
    announced: usize,
}

#[derive(Debug)]
struct Entry {
    change_number: u64,
    /// `None` is a withdrawal that some peer may not have received.
    announced: Option<InternedId>,
}

impl Announcements {
    /// Sets the MTU of each port; 0 for a port that is down.
    pub fn set_mtus_bytes(&mut self, mtus_bytes: Vec<u16>) {
        if self.mtus_bytes != mtus_bytes {
            self.mtus_bytes = mtus_bytes;
            self.mtus_change += 1;
        }
    }

    /// Returns the MTUs and the number of times that they have changed.
    pub fn mtus_bytes(&self) -> (&[u16], u64) {
        (&self.mtus_bytes, self.mtus_change)
    }

    /// Announces a route to a destination. Returns whether that is a change.
    pub fn announce(&mut self, prefix: IpNet, announced: &AnnouncedRoute) -> bool {
        let (id, _) = self.routes.add(announced, |announced| Arc::new(announced.clone()));
        self.set(prefix, Some(id))
    }

    /// Withdraws a destination. Returns whether it was announced.
    pub fn withdraw(&mut self, prefix: &IpNet) -> bool {
        let is_announced = self.table.get(prefix).is_some_and(|entry| entry.announced.is_some());
        is_announced && self.set(*prefix, None)
    }

    fn set(&mut self, prefix: IpNet, announced: Option<InternedId>) -> bool {
        if let Some(former) = self.table.get(&prefix) {
            let (number, was_announced) = (former.change_number, former.announced);
            was_announced.into_iter().for_each(|id| _ = self.routes.release(id));
            if was_announced == announced {
                return false;
            }
            self.announced -= usize::from(was_announced.is_some());
            self.log.remove(&number);
            self.withdrawn.remove(&number);
        }
        self.announced += usize::from(announced.is_some());
        self.latest += 1;
        self.log.insert(self.latest, prefix);
        self.table.insert(prefix, Entry { change_number: self.latest, announced });
        if announced.is_none() {
            self.withdrawn.insert(self.latest);
        }
        true
    }

    /// Returns the number of the latest change; 0 before the first.
    pub fn latest(&self) -> u64 {
        self.latest
    }

    /// Returns the number of announced destinations.
    pub fn len(&self) -> usize {
        self.announced
    }

    /// Returns whether nothing is announced.
    pub fn is_empty(&self) -> bool {
        self.announced == 0
    }

    /// Returns at most `routes_max` changes after number `change`, oldest first, and the number up to which there are
    /// no others.
    pub fn changes_after(&self, change: u64, routes_max: usize) -> (Vec<RouteChange>, u64) {
        let mut newer = self.log.range((Bound::Excluded(change), Bound::Unbounded));
        let mut last = change;
        let changes = newer.by_ref().take(routes_max).map(|(number, prefix)| {
            last = *number;
            let announced = self.table[prefix].announced.map(|id| self.routes.get(id).clone());
            RouteChange { prefix: *prefix, announced }
        });
        let changes = changes.collect();
        // The latest changes may be withdrawals that were pruned.
        (changes, if newer.next().is_none() { self.latest } else { last })
    }

    /// Returns whether a peer that has received the changes up to this number needs only the later ones.
    pub fn continues_after(&self, change: u64) -> bool {
        (self.pruned..=self.latest).contains(&change)
    }

    /// Removes at most `changes_max` withdrawals up to number `received`, which all peers have received.
    pub fn prune_withdrawn(&mut self, received: u64, changes_max: usize) {
        for _ in 0..changes_max {
            let Some(number) = self.withdrawn.first().copied().filter(|number| *number <= received) else { return };
            self.withdrawn.remove(&number);
            if let Some(prefix) = self.log.remove(&number) {
                self.table.remove(&prefix);
            }
            self.pruned = number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::message::{AnnouncedHop, Origin, RouteKind};
    use proptest::prelude::*;

    fn via(port: u8) -> AnnouncedRoute {
        let hops = vec![AnnouncedHop { port, adjacency: 0 }];
        AnnouncedRoute { metric: 0, origin: Origin::Local, kind: RouteKind::Unicast, hops }
    }

    fn prefix(number: u8) -> IpNet {
        format!("10.{number}.0.0/16").parse().unwrap()
    }

    /// Applies changes to the routes that a peer knows.
    fn apply(known: &mut BTreeMap<IpNet, AnnouncedRoute>, changes: Vec<RouteChange>) {
        for change in changes {
            match change.announced {
                Some(announced) => known.insert(change.prefix, announced),
                None => known.remove(&change.prefix),
            };
        }
    }

    #[test]
    fn an_equal_announcement_is_not_a_change() {
        let mut announcements = Announcements::default();
        assert!(!announcements.withdraw(&prefix(1)));
        assert!(announcements.announce(prefix(1), &via(0)));
        assert!(!announcements.announce(prefix(1), &via(0)));
        assert!(announcements.announce(prefix(1), &via(1)));
        assert_eq!((announcements.latest(), announcements.len()), (2, 1));
        let (changes, last) = announcements.changes_after(0, 10);
        assert_eq!((changes.len(), last), (1, 2));
    }

    #[test]
    fn withdrawals_are_kept_until_all_peers_received_them() {
        let mut announcements = Announcements::default();
        announcements.announce(prefix(1), &via(0));
        announcements.announce(prefix(2), &via(0));
        announcements.withdraw(&prefix(1));
        announcements.prune_withdrawn(2, 10);
        assert_eq!(announcements.changes_after(2, 10).0, [RouteChange { prefix: prefix(1), announced: None }]);
        announcements.prune_withdrawn(3, 10);
        assert_eq!(announcements.changes_after(0, 10).0, [RouteChange { prefix: prefix(2), announced: Some(via(0)) }]);
        assert_eq!(announcements.table.len(), 1);
        // A peer that comes now has everything.
        assert_eq!(announcements.changes_after(0, 1).1, announcements.latest());
        assert!(announcements.continues_after(3) && !announcements.continues_after(2));
    }

    #[test]
    fn a_destination_that_comes_and_goes_takes_no_more_memory_while_no_peer_is_there() {
        let mut announcements = Announcements::default();
        for _ in 0..100 {
            announcements.announce(prefix(1), &via(0));
            announcements.withdraw(&prefix(1));
        }
        let sizes = [announcements.table.len(), announcements.log.len(), announcements.withdrawn.len()];
        assert_eq!((sizes, announcements.routes.iter().count()), ([1; 3], 0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Announce(u8, u8),
        Withdraw(u8),
        Send(bool, usize),
    }

    proptest! {
        /// Two peers that receive changes at their own pace end up with exactly the announced routes.
        #[test]
        fn a_peer_with_all_changes_knows_the_announced_routes(
            steps in prop::collection::vec(prop_oneof![
                (0..6u8, 0..3u8).prop_map(|(to, port)| Step::Announce(to, port)),
                (0..6u8).prop_map(Step::Withdraw),
                (any::<bool>(), 1..4usize).prop_map(|(peer, most)| Step::Send(peer, most)),
            ], 0..60)
        ) {
            let mut announcements = Announcements::default();
            let mut truth = BTreeMap::new();
            let mut received = [(0, BTreeMap::new()), (0, BTreeMap::new())];
            for step in steps {
                match step {
                    Step::Announce(to, port) => {
                        announcements.announce(prefix(to), &via(port));
                        truth.insert(prefix(to), via(port));
                    }
                    Step::Withdraw(to) => {
                        announcements.withdraw(&prefix(to));
                        truth.remove(&prefix(to));
                    }
                    Step::Send(peer, most) => {
                        let (up_to, known) = &mut received[usize::from(peer)];
                        let (changes, last) = announcements.changes_after(*up_to, most);
                        prop_assert!(changes.len() <= most);
                        *up_to = last;
                        apply(known, changes);
                        announcements.prune_withdrawn(received[0].0.min(received[1].0), 2);
                    }
                }
            }
            for (up_to, known) in &mut received {
                let (changes, last) = announcements.changes_after(*up_to, usize::MAX);
                prop_assert_eq!(last, announcements.latest());
                apply(known, changes);
                prop_assert_eq!(&*known, &truth);
            }
            prop_assert_eq!(announcements.len(), truth.len());
        }
    }
}
