//! Listeners of this node's programs, as the kernel knows them.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use meeting::diag;

/// Maximum number of listeners whose end is reported to one peer.
const SUBSCRIPTIONS_MAX: usize = 4096;

/// The listeners that peers know.
#[derive(Debug)]
pub struct Registry {
    /// By slot of the peer: the listeners whose end is to be reported to it.
    subscriptions: Vec<BTreeSet<SocketAddr>>,
    /// Listeners of other users count too.
    serves_all_users: bool,
}

impl Registry {
    /// Returns a registry for a number of nodes.
    pub fn new(nodes: usize, serves_all_users: bool) -> Self {
        Self { subscriptions: vec![BTreeSet::new(); nodes], serves_all_users }
    }

    /// Returns whether a program of this node listens at an address. If so, `peer` is subscribed to the end of the
    /// listener.
    pub fn is_listening(&mut self, peer: usize, address: SocketAddr) -> bool {
        let is_there = self.is_live(address);
        let subscriptions = &mut self.subscriptions[peer];
        if is_there && subscriptions.len() < SUBSCRIPTIONS_MAX {
            subscriptions.insert(address);
        }
        is_there
    }

    /// Returns whether a program listens where the proxy could connect to it.
    fn is_live(&self, address: SocketAddr) -> bool {
        diag::look_up_listener(address).is_some_and(|listener| self.serves(listener.uid))
    }

    fn serves(&self, uid: u32) -> bool {
        self.serves_all_users || uid == rustix::process::geteuid().as_raw()
    }

    /// Returns the addresses at which programs listen and peers reach them by a node's address.
    pub fn listeners(&self, node: IpAddr) -> BTreeSet<SocketAddr> {
        let reached = |ip: IpAddr| ip.is_unspecified() || ip.to_canonical() == node;
        let served = diag::listeners().into_iter().filter(|(_, uid)| self.serves(*uid));
        served.map(|(address, _)| address).filter(|address| reached(address.ip())).collect()
    }

    /// Returns the ports of [`Registry::listeners`].
    pub fn ports(&self, node: IpAddr) -> BTreeSet<u16> {
        self.listeners(node).into_iter().map(|address| address.port()).collect()
    }

    /// Returns whether a peer does not know a listener yet, which it is subscribed to from now on.
    pub fn is_news(&mut self, peer: usize, address: SocketAddr) -> bool {
        !self.subscriptions[peer].contains(&address) && self.is_listening(peer, address)
    }

    /// Removes and returns listeners that are gone, each with a subscribed peer. Called periodically.
    pub fn vanished(&mut self) -> Vec<(usize, SocketAddr)> {
        let subscribed: BTreeSet<SocketAddr> = self.subscriptions.iter().flatten().copied().collect();
        let is_gone = |address: &SocketAddr| !self.is_live(*address);
        let gone: BTreeSet<SocketAddr> = subscribed.into_iter().filter(is_gone).collect();
        let mut vanished = Vec::new();
        for (peer, subscriptions) in self.subscriptions.iter_mut().enumerate() {
            vanished.extend(subscriptions.intersection(&gone).map(|address| (peer, *address)));
            subscriptions.retain(|address| !gone.contains(address));
        }
        vanished
    }

    /// Returns whether any peer is subscribed to a listener.
    pub fn has_subscriptions(&self) -> bool {
        self.subscriptions.iter().any(|subscriptions| !subscriptions.is_empty())
    }

    /// Removes and returns subscriptions that the access rules no longer allow, so that the peers can be informed.
    pub fn restrict(&mut self, is_allowed: impl Fn(usize, u16) -> bool) -> Vec<(usize, SocketAddr)> {
        let mut denied = Vec::new();
        for (peer, subscriptions) in self.subscriptions.iter_mut().enumerate() {
            subscriptions.retain(|address| {
                let stays = is_allowed(peer, address.port());
                if !stays {
                    denied.push((peer, *address));
                }
                stays
            });
        }
        denied
    }

    /// Sets the number of nodes.
    pub fn grow(&mut self, nodes: usize) {
        self.subscriptions.resize_with(nodes, BTreeSet::new);
    }

    /// Removes the subscriptions of a peer whose link is lost.
    pub fn forget(&mut self, peer: usize) {
        self.subscriptions[peer].clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[test]
    fn a_listener_is_found_while_it_exists_and_its_end_is_reported_once_to_each_peer() {
        let _no_child = test_support::spawn::forbid();
        let mut registry = Registry::new(3, false);
        let [(first, one), (_second, other)] = [(); 2].map(|()| listener());
        assert!(registry.ports(one.ip()).is_superset(&[one.port(), other.port()].into()));
        for address in [one, other] {
            assert!(registry.is_listening(0, address) && registry.is_listening(1, address));
        }
        assert!(!registry.is_news(0, one) && registry.is_news(2, one));
        assert_eq!(registry.vanished(), []);
        registry.forget(1);
        drop(first);
        assert_eq!(registry.vanished(), [(0, one), (2, one)]);
        assert_eq!(registry.vanished(), []);
        assert!(!registry.is_listening(0, one) && registry.has_subscriptions());
    }

    #[test]
    fn a_denied_subscription_is_reported_once_and_nodes_can_join() {
        let _no_child = test_support::spawn::forbid();
        let mut registry = Registry::new(3, false);
        let [(_first, one), (_second, other)] = [(); 2].map(|()| listener());
        registry.grow(4);
        for (peer, address) in [(0, one), (3, one), (3, other)] {
            assert!(registry.is_listening(peer, address));
        }
        let allowed = |peer, port| peer == 0 || port == other.port();
        assert_eq!(registry.restrict(allowed), [(3, one)]);
        assert_eq!(registry.restrict(allowed), []);
    }
}
