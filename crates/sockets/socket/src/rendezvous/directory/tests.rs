//! Tests of the rack directory.

use super::sweep::{SWEEP_ADDRESSES_MAX, SWEEP_FILE};
use super::*;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

const LEFT_BEHIND_MAX: usize = 1000;

/// A temporary directory, which is removed when it is dropped.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // A run that was killed may have left some, and its process may have had the same PID.
        for _ in 0..LEFT_BEHIND_MAX {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("crosslane-test-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => return made.map(|()| Self(path)).unwrap(),
            }
        }
        panic!("{LEFT_BEHIND_MAX} directories of other runs in a row");
    }

    pub(crate) fn rack(&self) -> Rack {
        Rack::open(&self.0.join("rack")).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn name(text: &str) -> ListenerName {
    ListenerName::parse(text).unwrap_or_else(|| panic!("{text}"))
}

/// Returns the path of a name and creates its directory.
fn path_for(rack: &Rack, text: &str) -> PathBuf {
    let path = rack.path_of(&name(text));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    path
}

/// Leaves a stale name, as a killed server does.
fn leave_stale(rack: &Rack, text: &str) {
    drop(UnixListener::bind(path_for(rack, text)).unwrap());
}

fn listen(rack: &Rack, text: &str) -> UnixListener {
    UnixListener::bind(path_for(rack, text)).unwrap()
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Returns the addresses that have a directory.
fn directories(rack: &Rack) -> Vec<String> {
    let entries = std::fs::read_dir(rack.path()).unwrap().map(|entry| entry.unwrap());
    let directories = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    let mut names: Vec<_> = directories.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn directories_are_created_private() {
    let scratch = Scratch::new();
    let rack = scratch.rack();
    for path in [rack.path(), &scratch.0.join("rack"), &scratch.0.join("rack/v4")] {
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700, "{}", path.display());
    }
    let netns = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
    assert_eq!(rack.path(), scratch.0.join(format!("rack/v4/net-{netns}")));
    assert!(Rack::open(&scratch.0.join("rack")).is_ok(), "a second program finds the same directories");
}

#[test]
fn directories_that_others_could_write_and_symbolic_links_are_refused() {
    let scratch = Scratch::new();
    let open = |name: &str| Rack::open(&scratch.0.join(name)).unwrap_err();
    for (mode, directory) in [(0o710, "group"), (0o701, "other"), (0o777, "all")] {
        let path = scratch.0.join(directory);
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(open(directory), Errno::PERM);
    }
    scratch.rack();
    symlink(scratch.0.join("rack"), scratch.0.join("link")).unwrap();
    assert!(matches!(open("link"), Errno::LOOP | Errno::NOTDIR));
    std::fs::write(scratch.0.join("file"), "").unwrap();
    assert_eq!(open("file"), Errno::NOTDIR);
    assert_eq!(open("missing/rack"), Errno::NOENT);
}

#[test]
fn a_rack_within_is_refused_like_the_rack_itself() {
    let scratch = Scratch::new();
    scratch.rack();
    let version = scratch.0.join("rack/v4");
    std::fs::set_permissions(&version, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(Rack::open(&scratch.0.join("rack")).unwrap_err(), Errno::PERM);
    std::fs::set_permissions(&version, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::set_permissions(version.join("key"), std::fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(Rack::open(&scratch.0.join("rack")).unwrap_err(), Errno::PERM);
}

#[test]
fn a_directory_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return; // Only root can give a directory away.
    }
    let scratch = Scratch::new();
    scratch.rack();
    std::os::unix::fs::chown(scratch.0.join("rack"), Some(12_345), None).unwrap();
    assert_eq!(Rack::open(&scratch.0.join("rack")).unwrap_err(), Errno::PERM);
}

#[test]
fn a_removed_directory_is_noticed() {
    let scratch = Scratch::new();
    let rack = scratch.rack();
    assert!(rack.is_intact());
    std::fs::remove_dir_all(scratch.0.join("rack")).unwrap();
    assert!(!rack.is_intact());
}

#[test]
fn racks_of_other_users_and_versions_are_recognized_by_their_paths() {
    for (path, expected) in [
        ("/run/user/1/crosslane/v1/net-4026531840/127.0.0.1:80", true),
        ("/run/user/1/crosslane/v4/net-4026531840/127.0.0.1:80/lane", true),
        ("/proc/self/fd/9/127.0.0.1:80/lane#1", true),
        ("/proc/self/fd/9/socket", false),
        ("/tmp/127.0.0.1:80/lane", false),
        ("/tmp/net-1/socket", false),
        ("/tmp/v1/net-x/socket", false),
        ("/tmp/v1/net-/socket", false),
        ("/tmp/v1/net-1/1/2/socket", false),
        ("/v1/net-1", false),
        ("socket", false),
    ] {
        assert_eq!(is_in_any_rack(path.as_bytes()), expected, "{path}");
    }
}

#[test]
fn a_listing_holds_the_names_and_no_foreign_entries() {
    let scratch = Scratch::new();
    let rack = scratch.rack();
    for entry in ["127.0.0.1:80", "0.0.0.0:80#1", "127.0.0.1:80!far", "[::]:81", "[::]:80!6"] {
        std::fs::write(path_for(&rack, entry), "").unwrap();
    }
    for rubbish in ["rubbish", "127.0.0.1:80/rubbish", "127.0.0.1:80/lane#x", "127.0.0.1:80/lane!6"] {
        std::fs::write(rack.path().join(rubbish), "").unwrap();
    }
    std::fs::create_dir(rack.path().join("127.0.0.1:x")).unwrap();
    let texts = |names: Vec<ListenerName>| {
        let mut texts: Vec<_> = names.iter().map(ToString::to_string).collect();
        texts.sort();
        texts
    };
    let all = ["0.0.0.0:80#1", "127.0.0.1:80", "127.0.0.1:80!far", "[::]:80!6", "[::]:81"];
    assert_eq!(texts(rack.names().unwrap()), all);
    let names_for = |destination: &str| texts(rack.names_for(address(destination)).unwrap());
    assert_eq!(names_for("127.0.0.1:80"), ["0.0.0.0:80#1", "127.0.0.1:80", "127.0.0.1:80!far"]);
    assert_eq!(names_for("127.0.0.2:80"), ["0.0.0.0:80#1"]);
    assert_eq!(names_for("[::1]:80"), ["[::]:80!6"]);
    assert_eq!(names_for("127.0.0.2:81"), ["[::]:81"]);
    assert_eq!(names_for("127.0.0.2:82"), [""; 0]);
}

#[test]
fn only_the_addresses_in_question_are_read() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let _listener = listen(&rack, "127.0.0.1:80");
    // Reading a file as a directory would fail.
    std::fs::write(rack.path().join("127.0.0.2:80"), "").unwrap();
    std::fs::write(rack.path().join("127.0.0.1:81"), "").unwrap();
    assert_eq!(rack.names_for(address("127.0.0.1:81")), Err(Errno::NOTDIR));
    assert_eq!(rack.names().unwrap(), [name("127.0.0.1:80")], "but a list of all skips it");
    assert_eq!(rack.names_for(address("127.0.0.1:80")).unwrap(), [name("127.0.0.1:80")]);
    let free = |bound| rack.lock(address(bound)).and_then(|lock| lock.free_name(false, false));
    assert_eq!(free("127.0.0.1:80"), Err(Errno::ADDRINUSE));
    assert_eq!(free("127.0.0.3:80"), Ok(name("127.0.0.3:80")));
    assert_eq!(free("127.0.0.2:80"), Err(Errno::NOTDIR));
}

#[test]
fn a_name_is_live_while_a_socket_is_behind_it_and_a_probe_leaves_no_trace() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let listener = listen(&rack, "127.0.0.1:80");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(rack.is_live(&name("127.0.0.1:80")), Ok(true));
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80")), Ok(false));
    drop(listener);
    assert_eq!(rack.is_live(&name("127.0.0.1:80")), Ok(false));
    assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80")), Ok(true));
    assert_eq!(rack.is_live(&name("127.0.0.1:80")), Err(Errno::NOENT));
    assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80")), Ok(true));
    let _datagram = UnixDatagram::bind(path_for(&rack, "127.0.0.1:81")).unwrap();
    assert_eq!(rack.is_live(&name("127.0.0.1:81")), Ok(true));
}

#[test]
fn stale_names_are_free_and_live_ones_only_for_sharing_listeners() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    leave_stale(&rack, "127.0.0.1:80");
    leave_stale(&rack, "127.0.0.1:80#0");
    symlink("/no/such/target", path_for(&rack, "127.0.0.1:80#1")).unwrap();
    let free = |shared| {
        let lock = rack.lock(address("127.0.0.1:80")).unwrap();
        lock.free_name(false, shared).map(|name| name.to_string())
    };
    assert_eq!(free(false).unwrap(), "127.0.0.1:80");
    assert_eq!(free(true).unwrap(), "127.0.0.1:80#0");
    assert!(!rack.path_of(&name("127.0.0.1:80#1")).is_symlink());
    let _member = listen(&rack, "127.0.0.1:80#0");
    assert_eq!(free(true).unwrap(), "127.0.0.1:80#1");
    assert_eq!(free(false), Err(Errno::ADDRINUSE));
    let _plain = listen(&rack, "127.0.0.1:80");
    assert_eq!(free(true), Err(Errno::ADDRINUSE));
    let beside = rack.lock(address("127.0.0.1:80")).unwrap().free_name_on_shared_socket(false).unwrap();
    assert_eq!(beside, name("127.0.0.1:80#2"));
    assert_eq!(rack.is_live(&name("127.0.0.1:80#1")), Ok(true), "the listener that had the address alone is a member");
    assert_eq!(free(true).unwrap(), "127.0.0.1:80#2");
}

#[test]
fn the_lock_of_an_address_has_one_holder_and_the_wait_for_it_is_bounded() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let at = address("127.0.0.1:80");
    let held = rack.lock(at).unwrap();
    assert_eq!(rack.lock(at).unwrap_err(), Errno::BUSY);
    assert!(rack.lock(address("127.0.0.1:81")).is_ok(), "other addresses have other locks");
    drop(held);
    assert!(rack.lock(at).is_ok());
}

#[test]
fn the_directory_of_an_address_is_removed_with_its_last_name() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    for text in ["127.0.0.1:80#0", "127.0.0.1:80#1"] {
        leave_stale(&rack, text);
    }
    assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80#0")), Ok(true));
    assert_eq!(directories(&rack), ["127.0.0.1:80"]);
    assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80#1")), Ok(true));
    assert_eq!(directories(&rack), [""; 0]);
    drop(rack.lock(address("127.0.0.1:80")).unwrap());
    assert_eq!(directories(&rack), [""; 0], "a directory that was created for nothing is removed too");
}

#[test]
fn a_directory_that_was_removed_before_it_was_locked_is_created_again() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let at = address("127.0.0.1:80");
    let held = rack.lock(at).unwrap();
    let late = RackLock {
        rack: &rack,
        address: at,
        directory: Some(rack.open_directory("127.0.0.1:80").unwrap()),
        is_held: false,
    };
    drop(held);
    let mut late = late;
    late.acquire(1).unwrap();
    assert!(!late.is_held);
    let current = rack.lock(at).unwrap();
    drop(late);
    assert_eq!(directories(&rack), ["127.0.0.1:80"], "the directory of another holder is not removed");
    drop(current);
}

#[test]
fn names_that_are_created_and_removed_concurrently_are_never_lost() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let at = address("127.0.0.1:80");
    let come_and_go = || {
        for _ in 0..100 {
            let lock = loop {
                match rack.lock(at) {
                    Err(Errno::BUSY) => {} // On a busy machine.
                    lock => break lock.unwrap(),
                }
            };
            let name = lock.free_name(false, true).unwrap();
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
            lock.bind(socket.as_fd(), &name).unwrap();
            drop(lock);
            assert_eq!(rack.is_live(&name), Ok(true));
            drop(socket);
            while rack.remove_if_stale(&name) == Err(Errno::BUSY) {}
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(come_and_go))));
    assert_eq!(directories(&rack), [""; 0]);
}

#[test]
fn sweeps_remove_stale_names_and_nothing_else() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let _live: Vec<_> = (0..20).map(|index| listen(&rack, &format!("127.0.0.1:{}", 1000 + index))).collect();
    (0..100).for_each(|index| leave_stale(&rack, &format!("127.0.0.2:{}", 1000 + index)));
    (0..3).for_each(|index| leave_stale(&rack, &format!("127.0.0.1:1000#{index}")));
    std::fs::create_dir(rack.path().join("127.0.0.3:80")).unwrap();
    let kept = listen(&rack, "127.0.0.4:80#1");
    leave_stale(&rack, "127.0.0.4:80#0");
    // Each sweep checks two addresses; the end of the directory, and the entries that are not addresses, take a few
    // more.
    (0..2 * 122 / SWEEP_ADDRESSES_MAX).for_each(|_| rack.sweep().unwrap());
    let mut names: Vec<_> = rack.names().unwrap().iter().map(ToString::to_string).collect();
    names.sort();
    let mut expected: Vec<_> = (0..20).map(|index| format!("127.0.0.1:{}", 1000 + index)).collect();
    expected.push("127.0.0.4:80#1".to_owned());
    assert_eq!(names, expected);
    assert_eq!(directories(&rack).len(), 21);
    drop(kept);
}

#[test]
fn stale_names_stay_in_proportion_to_live_ones() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let live = 30;
    let _live: Vec<_> = (0..live).map(|index| listen(&rack, &format!("127.0.0.1:{}", 1000 + index))).collect();
    for index in 0..1000 {
        leave_stale(&rack, &format!("127.0.0.2:{}", 1000 + index));
        rack.sweep().unwrap();
        let stale = directories(&rack).len() - live;
        assert!(stale <= live + 2, "{stale} after {index}");
    }
}

#[test]
fn a_damaged_cursor_does_not_stop_sweeps() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    for content in [&[0xff; 8][..], &[0x7f; 8], &[1], &[1, 0, 0, 0, 0, 0, 0, 0, 9]] {
        std::fs::write(rack.path().join(SWEEP_FILE), content).unwrap();
        leave_stale(&rack, "127.0.0.1:80");
        (0..4).for_each(|_| rack.sweep().unwrap());
        assert_eq!(directories(&rack), [""; 0], "{content:?}");
    }
}

#[test]
fn a_path_too_long_for_a_socket_address_is_reached_through_the_descriptor() {
    let scratch = Scratch::new();
    let long = scratch.0.join("x".repeat(120));
    let rack = Rack::open(&long).unwrap();
    let name = name("[febf:1db8:1111:2222:3333:4444:5555:6666%4294967295]:65535#63");
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rack.lock(name.address).unwrap().bind(socket.as_fd(), &name).unwrap();
    assert!(rack.path_of(&name).exists());
    assert_eq!(rack.is_live(&name), Ok(true));
}

#[test]
fn what_an_ended_network_namespace_has_left_is_removed() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = scratch.rack();
    let beside = |name: &str| {
        let path = rack.path().with_file_name(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        path
    };
    let (ended, in_use, recent) = (beside("net-1"), beside("net-2"), beside("net-3"));
    let listen_in = |net: &std::path::Path| {
        let name = name("127.0.0.1:80");
        let folder = net.join(name.directory());
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
        UnixListener::bind(folder.join(name.entry())).unwrap()
    };
    drop(listen_in(&ended));
    let live = listen_in(&in_use);
    let age = |path: &std::path::Path| {
        let long_ago = std::time::SystemTime::now() - 2 * super::sweep::NAMESPACE_UNUSED_FOR;
        std::fs::File::open(path).unwrap().set_modified(long_ago).unwrap();
    };
    // Each process sweeps some; the first sweep removes the names, and the directory is removed later.
    for _ in 0..3 {
        rack.sweep_other_namespaces();
        [&ended, &in_use].into_iter().filter(|path| path.exists()).for_each(|path| age(path));
    }
    assert!(!ended.exists());
    assert!(in_use.join("127.0.0.1:80").exists() && recent.exists());
    drop(live);
}
