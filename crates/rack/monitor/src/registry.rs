//! Listeners of this node's own programs, as their names in the rack directory tell.

use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use socket::rendezvous::directory::{ListenerName, Rack};

/// Addresses that one peer is told about when they vanish, at most.
const INTERESTS_MAX: usize = 4096;

/// The rack directory of this node, and what peers want to know of it.
#[derive(Debug)]
pub struct Registry {
    rack: Rack,
    watch: OwnedFd,
    /// By slot of the peer: what it was told is there.
    interests: Vec<BTreeSet<SocketAddr>>,
}

impl Registry {
    /// Opens the directory, which is made where it is missing.
    ///
    /// # Errors
    /// What mkdir, open and inotify answer.
    pub fn open(rack_directory: &Path, nodes: usize) -> Result<Self, Errno> {
        let rack = Rack::open(rack_directory)?;
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, rack.path(), WatchFlags::DELETE | WatchFlags::MOVED_FROM)?;
        Ok(Self { rack, watch, interests: vec![BTreeSet::new(); nodes] })
    }

    /// Whether a program of this node listens at an address of it; `peer` is told when that ends.
    pub fn is_listening(&mut self, peer: usize, address: SocketAddr) -> bool {
        let is_there = self.has(address);
        let interests = &mut self.interests[peer];
        if is_there && interests.len() < INTERESTS_MAX {
            interests.insert(address);
        }
        is_there
    }

    fn has(&self, address: SocketAddr) -> bool {
        let names = self.rack.names_for(address).unwrap_or_default();
        names.iter().any(|name| !name.is_remote && self.rack.is_live(name).unwrap_or(false))
    }

    /// What was there and is gone, with the peer that was told. A killed program leaves its name behind, so this is to
    /// be called now and then, whatever [`Registry::descriptor`] says.
    pub fn vanished(&mut self) -> Vec<(usize, SocketAddr)> {
        self.take_news();
        let told: BTreeSet<SocketAddr> = self.interests.iter().flatten().copied().collect();
        let is_gone = |address: &SocketAddr| !self.has(*address);
        let gone: BTreeSet<SocketAddr> = told.into_iter().filter(is_gone).collect();
        let mut vanished = Vec::new();
        for (peer, interests) in self.interests.iter_mut().enumerate() {
            vanished.extend(interests.intersection(&gone).map(|address| (peer, *address)));
            interests.retain(|address| !gone.contains(address));
        }
        vanished
    }

    /// Whether any peer was told of a listener.
    pub fn has_interests(&self) -> bool {
        self.interests.iter().any(|interests| !interests.is_empty())
    }

    /// What peers were told is there and may not use any more: they are to be told that it is gone.
    pub fn restrict(&mut self, is_allowed: impl Fn(usize, u16) -> bool) -> Vec<(usize, SocketAddr)> {
        let mut denied = Vec::new();
        for (peer, interests) in self.interests.iter_mut().enumerate() {
            interests.retain(|address| {
                let stays = is_allowed(peer, address.port());
                if !stays {
                    denied.push((peer, *address));
                }
                stays
            });
        }
        denied
    }

    /// There are so many nodes from now on.
    pub fn grow(&mut self, nodes: usize) {
        self.interests.resize_with(nodes, BTreeSet::new);
    }

    /// A peer whose link is lost forgets what it was told.
    pub fn forget(&mut self, peer: usize) {
        self.interests[peer].clear();
    }

    /// Where programs of this node listen, `count_max` of them at most.
    pub fn listeners(&self, count_max: usize) -> Vec<SocketAddr> {
        let names = self.rack.names().unwrap_or_default();
        let is_live = |name: &&ListenerName| !name.is_remote && self.rack.is_live(name).unwrap_or(false);
        let live = names.iter().filter(is_live).map(|name| name.address);
        live.take(count_max).collect()
    }

    /// Polls readable when the last name at an address was removed, and its directory with it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    fn take_news(&self) {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.watch, &mut buffer);
        // Each event only says: look. An overflow says the same.
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
        Registry::open(&folder.join("rack"), 3).unwrap()
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
    fn a_listener_is_found_by_what_it_is_bound_to_and_mirrors_are_none() {
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
    fn a_peer_that_may_not_use_a_listener_any_more_is_told_once_and_nodes_may_join() {
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
    fn the_descriptor_says_that_a_listener_was_closed() {
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
    fn a_peer_is_told_once_that_a_listener_is_gone_whether_its_name_was_removed_or_not() {
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
        assert!(!registry.has_interests());
    }
}
