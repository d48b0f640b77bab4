//! Listeners of this node's programs, found by their names in the rack directory, or by asking the kernel.

use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use meeting::diag;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use socket::rendezvous::directory::{ListenerName, Rack};

/// Maximum number of listeners whose end is reported to one peer.
const SUBSCRIPTIONS_MAX: usize = 4096;

/// The rack directory of this node, and the listeners that peers know.
#[derive(Debug)]
pub struct Registry {
    rack: Rack,
    watch: OwnedFd,
    /// By slot of the peer: the listeners whose end is to be reported to it.
    subscriptions: Vec<BTreeSet<SocketAddr>>,
    /// Listeners of other users count too.
    serves_all_users: bool,
}

impl Registry {
    /// Opens the directory, and creates it if it is missing.
    ///
    /// # Errors
    /// The error of mkdir, open or inotify.
    pub fn open(rack_directory: &Path, nodes: usize, serves_all_users: bool) -> Result<Self, Errno> {
        let rack = Rack::open(rack_directory)?;
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, rack.path(), WatchFlags::DELETE | WatchFlags::MOVED_FROM)?;
        Ok(Self { rack, watch, subscriptions: vec![BTreeSet::new(); nodes], serves_all_users })
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

    fn is_live(&self, address: SocketAddr) -> bool {
        let names = self.rack.names_for(address).unwrap_or_default();
        names.iter().any(|name| !name.is_remote && self.rack.is_live(name).unwrap_or(false))
            || self.has_kernel_listener(address)
    }

    /// Returns whether a program listens by kernel TCP where the proxy could connect to it.
    fn has_kernel_listener(&self, address: SocketAddr) -> bool {
        let own_uid = rustix::process::geteuid().as_raw();
        let listener = diag::look_up_listener(address);
        listener.is_some_and(|listener| self.serves_all_users || listener.uid == own_uid)
    }

    /// Returns the ports at which programs listen where peers reach them by a node's address: by the names in the rack
    /// directory, and by kernel TCP.
    pub fn ports(&self, node: IpAddr) -> BTreeSet<u16> {
        let own_uid = rustix::process::geteuid().as_raw();
        let reached = |ip: IpAddr| ip.is_unspecified() || ip.to_canonical() == node;
        let by_tcp = diag::listeners().into_iter();
        let by_tcp = by_tcp.filter(|(_, uid)| self.serves_all_users || *uid == own_uid).map(|(address, _)| address);
        let by_name = self.listeners(SUBSCRIPTIONS_MAX).into_iter();
        by_tcp.chain(by_name).filter(|address| reached(address.ip())).map(|address| address.port()).collect()
    }

    /// Returns whether a peer does not know a listener yet, which it is subscribed to from now on.
    pub fn is_news(&mut self, peer: usize, address: SocketAddr) -> bool {
        !self.subscriptions[peer].contains(&address) && self.is_listening(peer, address)
    }

    /// Removes and returns listeners that are gone, each with a subscribed peer. A killed program leaves its name
    /// behind, so this must also be called periodically, in addition to when [`Registry::descriptor`] is readable.
    pub fn vanished(&mut self) -> Vec<(usize, SocketAddr)> {
        self.drain_events();
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

    /// Returns the addresses at which programs of this node listen, at most `count_max`.
    pub fn listeners(&self, count_max: usize) -> Vec<SocketAddr> {
        let names = self.rack.names().unwrap_or_default();
        let is_live = |name: &&ListenerName| !name.is_remote && self.rack.is_live(name).unwrap_or(false);
        let live = names.iter().filter(is_live).map(|name| name.address);
        live.take(count_max).collect()
    }

    /// Returns a descriptor that polls readable when the directory of an address was removed with its last name.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    fn drain_events(&self) {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.watch, &mut buffer);
        // The contents of events are not needed, and an overflow has the same meaning.
        while reader.next().is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::sync::Arc;

    fn registry(folder: &Path) -> Registry {
        Registry::open(&folder.join("rack"), 3, false).unwrap()
    }

    fn listen(registry: &Registry, name: &str) -> UnixListener {
        let path = path_of(registry, name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        UnixListener::bind(path).unwrap()
    }

    fn path_of(registry: &Registry, name: &str) -> PathBuf {
        registry.rack.path_of(&ListenerName::parse(name).unwrap())
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_listener_is_found_by_its_address_and_remote_listeners_are_ignored() {
        let _no_child = test_support::spawn::forbid();
        let folder = tempfile::tempdir().unwrap();
        let mut registry = registry(folder.path());
        let _held = ["127.77.0.1:80", "0.0.0.0:90", "127.77.0.2:70!far"].map(|name| listen(&registry, name));
        drop(listen(&registry, "127.77.0.1:60"));
        let found = ["127.77.0.1:80", "127.77.0.1:90", "127.77.0.1:91", "127.77.0.2:70", "127.77.0.1:60"]
            .map(|address| registry.is_listening(2, at(address)));
        assert_eq!(found, [true, true, false, false, false]);
        let mut listeners = registry.listeners(10);
        listeners.sort();
        assert_eq!(listeners, [at("0.0.0.0:90"), at("127.77.0.1:80")]);
    }

    #[test]
    fn a_denied_subscription_is_reported_once_and_nodes_can_join() {
        let folder = tempfile::tempdir().unwrap();
        let mut registry = registry(folder.path());
        let _held = ["127.77.0.1:80", "127.77.0.1:81"].map(|name| listen(&registry, name));
        registry.grow(4);
        for (peer, port) in [(0, 80), (3, 80), (3, 81)] {
            assert!(registry.is_listening(peer, SocketAddr::from(([127, 77, 0, 1], port))));
        }
        let allowed = |peer, port| peer == 0 || port == 81;
        assert_eq!(registry.restrict(allowed), [(3, at("127.77.0.1:80"))]);
        assert_eq!(registry.restrict(allowed), []);
    }

    #[test]
    fn the_descriptor_is_readable_when_a_listener_was_closed() {
        let _no_child = test_support::spawn::forbid();
        let folder = tempfile::tempdir().unwrap();
        let mut registry = registry(folder.path());
        let is_readable = |registry: &Registry| {
            let mut polled = [PollFd::from_borrowed_fd(registry.descriptor(), PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).unwrap() == 1
        };
        let rack = Arc::new(Rack::open(&folder.path().join("rack")).unwrap());
        let listen = |bound| socket::rendezvous::listen_in(&rack, at(bound), false, false, 1).unwrap();
        let (closed, _stays) = (listen("127.77.0.1:80"), listen("127.77.0.1:81"));
        assert!(registry.is_listening(0, at("127.77.0.1:80")) && !is_readable(&registry));
        drop(closed);
        assert!(is_readable(&registry));
        assert_eq!(registry.vanished(), [(0, at("127.77.0.1:80"))]);
        assert!(!is_readable(&registry));
    }

    #[test]
    fn the_end_of_a_listener_is_reported_once_even_if_its_name_remains() {
        let _no_child = test_support::spawn::forbid();
        let folder = tempfile::tempdir().unwrap();
        let mut registry = registry(folder.path());
        let removed = listen(&registry, "127.77.0.1:80");
        let killed = listen(&registry, "127.77.0.1:81");
        for address in [at("127.77.0.1:80"), at("127.77.0.1:81")] {
            assert!(registry.is_listening(0, address) && registry.is_listening(1, address));
        }
        assert_eq!(registry.vanished(), []);
        drop(removed);
        std::fs::remove_file(path_of(&registry, "127.77.0.1:80")).unwrap();
        assert_eq!(registry.vanished(), [(0, at("127.77.0.1:80")), (1, at("127.77.0.1:80"))]);
        registry.forget(1);
        drop(killed);
        assert_eq!(registry.vanished(), [(0, at("127.77.0.1:81"))]);
        assert_eq!(registry.vanished(), []);
        assert!(!registry.has_subscriptions());
    }
}
