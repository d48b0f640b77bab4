//! The rack directory: where listeners leave the names by which connecting ends find them.
//!
//! ```text
//!   RACK/v4/net-<inode of the network namespace>/127.0.0.1:6379/lane   one AF_UNIX stream socket per lane listener
//!                                                [::]:80/lane          takes IPv4 too
//!                                                [::]:443/lane!6       IPv6 only
//!                                                0.0.0.0:80/lane#3     one of several at this address (SO_REUSEPORT)
//!                                                127.77.0.2:80/lane!far   another node's; this node's proxy listens
//!                                                sweep                 where the next sweep begins
//!   RACK/v4/key                                                        the key of the names of lifelines ([`NameKey`])
//!   RACK/lanes-off                                                     there while no new lanes are to be made
//!   RACK/monitor.sock                                                  this node's monitor, where there are other ones
//!   RACK/v1/stat/<pid>                                                 the ledger pages
//! ```
//!
//! Each directory must be a real one, owned by the effective user, with no rights for anybody else. The owner of a name
//! may have been killed, and the name is then stale: no socket stands behind it. That is found out by connecting with
//! the wrong socket type, which a live socket answers with `EPROTOTYPE`, unharmed, and a stale name with
//! `ECONNREFUSED`.
//!
//! Each address has a directory, so `listen` and `connect` read only those of the addresses that they are about: what
//! they cost does not depend on other listeners, alive or dead. Names are made and removed under the lock of that
//! directory, so that nobody removes a name that has just been made anew. The holder of the lock removes the directory
//! too if it is empty; whoever has opened it meanwhile finds that out once it has the lock, and begins again. Stale
//! names at addresses that nobody uses any more are removed by sweeps: each `listen` checks the next few addresses of
//! the rack, so the number of stale names stays in proportion to that of live ones.

use std::ffi::{CString, OsStr, OsString};
use std::fmt;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RawDir, SeekFrom, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::descriptor::hidden::{HiddenFd, Need, close};
use crate::process::socket_option::{SocketOption, get_raw};
use crate::process::system::check_file_bytes;
use crate::rendezvous::address::canonical;
use crate::rendezvous::name_key::NameKey;

/// The directory of a rack, by version: programs of another one find neither listeners nor a key there.
const VERSION: &str = "v4";
/// Listeners that can share one address.
pub const MEMBERS_MAX: u8 = 64;
/// Names at one address that are read: all that can be there, and some rubbish.
const NAMES_MAX: usize = 4 * MEMBERS_MAX as usize;
/// Addresses of a rack that are read for a list of all names.
const ADDRESSES_MAX: usize = 65_536;
/// What the name of a listener begins with in the directory of its address.
const ENTRY_PREFIX: &str = "lane";
/// The file that says where in the directory the next sweep begins.
const SWEEP_FILE: &str = "sweep";
/// Addresses that one sweep checks. Each `listen` adds one at most, so two suffice to find stale ones faster than they
/// can be left behind.
const SWEEP_ADDRESSES_MAX: usize = 2;
/// Entries that one sweep reads to find them.
const SWEEP_ENTRIES_MAX: usize = 8;
/// Names at each address that one sweep checks.
const SWEEP_NAMES_MAX: usize = 8;
/// Of a directory's entries that are read at once.
const LISTING_BYTES: usize = 2048;
/// How often a directory may have been removed just before its lock was taken.
const REMOVALS_MAX: usize = 16;
/// Versions or network namespaces of a rack that are searched for the reason of a missing lane.
const SIBLINGS_MAX: usize = 64;
/// Bytes of a path in an AF_UNIX address, its end included.
const SOCKET_PATH_BYTES_MAX: usize = 108;
/// How often an address's lock is asked for, a millisecond apart, before doing without: its holder may be stopped.
const LOCK_TRIES_MAX: usize = 200;
const LOCK_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// The name of a lane listener in the rack: the address it is bound to, and what else a connecting end must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerName {
    /// Canonical.
    pub address: SocketAddr,
    /// `[::]` without IPv4.
    pub v6_only: bool,
    /// Which of several on this address.
    pub member: Option<u8>,
    /// The listener is another node's, and the proxy of this node stands in for it.
    pub is_remote: bool,
}

impl ListenerName {
    /// The name for a listener bound to `address`.
    pub fn new(address: SocketAddr, v6_only: bool, member: Option<u8>) -> Self {
        let address = canonical(address);
        Self { address, v6_only: v6_only && is_any_v6(address), member, is_remote: false }
    }

    /// The name for a listener of another node, for which the proxy of this node stands in.
    pub fn remote(address: SocketAddr) -> Self {
        Self { is_remote: true, ..Self::new(address, false, None) }
    }

    /// The name in a directory entry; `None` for anything [`ListenerName`] would not have written.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, member) = match text.split_once('#') {
            Some((rest, number)) => (rest, Some(number.parse().ok().filter(|number| *number < MEMBERS_MAX)?)),
            None => (text, None),
        };
        let (rest, is_remote) = rest.strip_suffix("!far").map_or((rest, false), |rest| (rest, true));
        let (rest, v6_only) = rest.strip_suffix("!6").map_or((rest, false), |rest| (rest, true));
        let name = Self { address: rest.parse().ok()?, v6_only, member, is_remote };
        let again = if is_remote { Self::remote(name.address) } else { Self::new(name.address, v6_only, member) };
        (again == name && name.address.port() != 0 && again.to_string() == text).then_some(name)
    }

    /// The name of a socket in a rack, from its path.
    pub fn from_path(path: &[u8]) -> Option<Self> {
        let mut components = path.rsplit(|byte| *byte == b'/');
        let (entry, directory) = (components.next()?, components.next()?);
        Self::from_entry(std::str::from_utf8(directory).ok()?, std::str::from_utf8(entry).ok()?)
    }

    /// The name in the directory of an address.
    fn from_entry(directory: &str, entry: &str) -> Option<Self> {
        Self::parse(&format!("{directory}{}", entry.strip_prefix(ENTRY_PREFIX)?))
    }

    /// Its directory's name in the rack.
    fn directory(&self) -> String {
        self.address.to_string()
    }

    /// Its name in that directory.
    fn entry(&self) -> String {
        format!("{ENTRY_PREFIX}{}", Suffix(self))
    }

    /// How well a listener of this name answers for a destination, lower being better; `None` when it does not.
    pub fn rank_for(&self, destination: SocketAddr) -> Option<u8> {
        if self.address.port() != destination.port() {
            return None;
        }
        match (self.address.ip(), destination.ip()) {
            (ours, _) if self.address == destination && !ours.is_unspecified() => Some(0),
            (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(_)) => Some(1),
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(_)) => Some(1),
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(_)) if !self.v6_only => Some(2),
            _ => None,
        }
    }

    /// Whether both stand for the same address, as far as two listeners may not share it.
    fn has_same_address(&self, other: &Self) -> bool {
        (self.address, self.v6_only, self.is_remote) == (other.address, other.v6_only, other.is_remote)
    }
}

fn is_any_v6(address: SocketAddr) -> bool {
    address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}

/// The addresses at which a listener may answer for a destination, the best first.
fn addresses_for(destination: SocketAddr) -> impl Iterator<Item = SocketAddr> {
    let any = |ip: IpAddr| SocketAddr::new(ip, destination.port());
    let exact = Some(destination).filter(|address| !address.ip().is_unspecified());
    let any_v4 = destination.is_ipv4().then(|| any(Ipv4Addr::UNSPECIFIED.into()));
    exact.into_iter().chain(any_v4).chain([any(Ipv6Addr::UNSPECIFIED.into())])
}

impl fmt::Display for ListenerName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.address, Suffix(self))
    }
}

/// What a name says beside the address.
struct Suffix<'a>(&'a ListenerName);

impl fmt::Display for Suffix<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.v6_only {
            formatter.write_str("!6")?;
        }
        if self.0.is_remote {
            formatter.write_str("!far")?;
        }
        match self.0.member {
            Some(member) => write!(formatter, "#{member}"),
            None => Ok(()),
        }
    }
}

/// Where racks may be, as the environment said when the library was loaded.
#[derive(Clone, Debug, Default)]
struct Environment {
    rack: Option<OsString>,
    runtime: Option<OsString>,
    /// Whom the program ran as then.
    uid: u32,
}

static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();

/// Remembers where the environment puts the rack. To be called while the library is loaded: later the program may
/// change its environment or its working directory under us.
pub fn remember_environment() {
    let absolute = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty())?;
        Some(std::path::absolute(&value).map_or(value, PathBuf::into_os_string))
    };
    ENVIRONMENT.get_or_init(|| Environment {
        rack: absolute("CROSSLANE_RACK"),
        runtime: absolute("XDG_RUNTIME_DIR"),
        uid: rustix::process::geteuid().as_raw(),
    });
}

fn environment() -> Environment {
    remember_environment();
    ENVIRONMENT.get().cloned().unwrap_or_default()
}

/// A line about the directory that the environment names, if there is none.
pub fn missing_configured_directory() -> Option<String> {
    let named = PathBuf::from(environment().rack?);
    let shown = named.display();
    match rustix::fs::stat(&named) {
        Err(Errno::NOENT | Errno::NOTDIR) => {
            Some(format!("rack '{shown}' is not there; correct CROSSLANE_RACK, or mkdir -m 700 '{shown}'"))
        }
        _ => None,
    }
}

/// Whether the rack directory is not of the user that the calling thread runs as. One that cannot be asked is of the
/// user before, if the program has changed its user.
pub fn is_owned_by_other_user() -> bool {
    let uid = rustix::process::geteuid().as_raw();
    match rustix::fs::lstat(rack_dir(uid)) {
        Ok(stat) => stat.st_uid != uid,
        Err(_) => environment().uid != uid,
    }
}

/// As [`rack_dir`]. The directory is made if it is missing and the default one: the name of any other may be mistyped.
pub fn ensure_rack_dir(uid: u32) -> PathBuf {
    let rack = rack_dir(uid);
    if environment().rack.is_none() {
        // Where that fails, opening it fails too.
        let _ = make_private(rustix::fs::CWD, rack.as_os_str().as_bytes());
    }
    rack
}

/// The rack directory of a user.
pub fn rack_dir(uid: u32) -> PathBuf {
    let environment = environment();
    stats_page::rack_dir(
        |name| match name {
            "CROSSLANE_RACK" => environment.rack.clone(),
            "XDG_RUNTIME_DIR" => environment.runtime.clone(),
            _ => None,
        },
        uid,
    )
}

/// What an open rack was opened for; with any of it changed, another rack is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RackScope {
    uid: u32,
    netns: u64,
}

impl RackScope {
    fn now() -> Result<Self, Errno> {
        let netns = rustix::fs::stat(c"/proc/thread-self/ns/net")?.st_ino;
        Ok(Self { uid: rustix::process::geteuid().as_raw(), netns })
    }
}

/// The open directory of listener names of one user in one network namespace.
#[derive(Debug)]
pub struct Rack {
    directory: HiddenFd,
    path: PathBuf,
    identity: (u64, u64),
    scope: RackScope,
    /// Read once: a process that has given up the rack's user since could not read it again.
    key: NameKey,
    /// The kernel's cookie of the network namespace, 0 while nobody has asked for it.
    netns_cookie: AtomicU64,
}

static CURRENT: Mutex<Option<Arc<Rack>>> = Mutex::new(None);

/// The rack that is kept open. Its lock is never waited for: in the child of a fork its holder may not exist. Without
/// it the rack is opened for this once.
fn cached() -> Option<Arc<Rack>> {
    CURRENT.try_lock().ok().and_then(|cached| cached.clone())
}

/// What tells the network namespace that a socket was made in from all others; 0 where the kernel is older than 5.14.
pub(crate) fn netns_cookie(socket: BorrowedFd<'_>) -> u64 {
    let mut cookie = [0_u8; 8];
    let option = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_NETNS_COOKIE };
    get_raw(socket, option, &mut cookie).map_or(0, |_| u64::from_ne_bytes(cookie))
}

impl Rack {
    /// The rack for the caller's effective user and network namespace. It is kept open, and opened again when the user,
    /// the namespace or the directory has changed.
    ///
    /// # Errors
    /// `PERM` when a directory or the key is not the user's own, `INVAL` when the key has another length than one, and
    /// what mkdir and open answer.
    pub fn current() -> Result<Arc<Self>, Errno> {
        Self::cached_or_open().map(|(rack, _)| rack)
    }

    /// The rack, and whether lanes are switched off in it.
    fn cached_or_open() -> Result<(Arc<Self>, bool), Errno> {
        let now = RackScope::now()?;
        if let Some(rack) = cached().filter(|rack| rack.scope == now && rack.is_intact()) {
            return Ok((rack, false));
        }
        let root = ensure_rack_dir(now.uid);
        let rack = Arc::new(Self::open_in(&root, now)?);
        // Last: whoever switches lanes off leaves the hint in the directories of listeners that there are then. A rack
        // whose lanes are off is not kept, because a directory that is new has no hint.
        let is_off = rustix::fs::stat(root.join(stats_page::OFF_FILE)).is_ok();
        if !is_off {
            let old = CURRENT.try_lock().ok().and_then(|mut cached| cached.replace(Arc::clone(&rack)));
            drop(old);
        }
        Ok((rack, is_off))
    }

    /// As [`Rack::current`], for a thread that has just made `socket` for a connection: the socket tells the thread's
    /// network namespace in a tenth of the time that /proc takes.
    ///
    /// # Errors
    /// As [`Rack::current`], and `CANCELED` while lanes are switched off in the rack.
    pub fn current_for(socket: BorrowedFd<'_>) -> Result<Arc<Self>, Errno> {
        let cookie = netns_cookie(socket);
        let uid = rustix::process::geteuid().as_raw();
        let is_same = |rack: &Arc<Self>| {
            cookie != 0 && rack.netns_cookie.load(Ordering::Relaxed) == cookie && rack.scope.uid == uid
        };
        if let Some(rack) = cached().filter(|rack| is_same(rack) && rack.is_intact()) {
            return Ok(rack);
        }
        let (rack, is_off) = Self::cached_or_open()?;
        if is_off {
            return Err(Errno::CANCELED);
        }
        // Both speak of the namespace that this thread is in.
        rack.netns_cookie.store(cookie, Ordering::Relaxed);
        Ok(rack)
    }

    /// Opens a rack, making its directories where they are missing.
    ///
    /// # Errors
    /// As [`Rack::current`].
    pub fn open(rack: &Path) -> Result<Self, Errno> {
        make_private(rustix::fs::CWD, rack.as_os_str().as_bytes())?;
        Self::open_in(rack, RackScope::now()?)
    }

    fn open_in(rack: &Path, scope: RackScope) -> Result<Self, Errno> {
        let mut path = rack.to_path_buf();
        let root = open_private(rustix::fs::CWD, rack.as_os_str().as_bytes(), scope.uid)?;
        let version = open_within(root, VERSION, &mut path, scope.uid)?;
        let key = NameKey::read_or_make(version.as_fd(), scope.uid);
        let net = format!("net-{}", scope.netns);
        let directory = open_within(version, &net, &mut path, scope.uid)?;
        let directory = HiddenFd::hide(directory, Need::Required)?;
        let stat = rustix::fs::fstat(directory.fd()?)?;
        let identity = (stat.st_dev, stat.st_ino);
        Ok(Self { directory, path, identity, scope, key: key?, netns_cookie: AtomicU64::new(0) })
    }

    /// Whether our descriptor still is the directory, the directory still exists, and has no hint that lanes may have
    /// been switched off.
    fn is_intact(&self) -> bool {
        let stat = self.directory.fd().and_then(rustix::fs::fstat);
        let is_same = |stat: &rustix::fs::Stat| (stat.st_dev, stat.st_ino) == self.identity && stat.st_nlink > 0;
        stat.is_ok_and(|stat| is_same(&stat) && stat.st_mode & stats_page::OFF_HINT == 0)
    }

    /// The user whose rack this is.
    pub fn uid(&self) -> u32 {
        self.scope.uid
    }

    /// The key of the abstract names that lifelines of this rack are bound to.
    pub fn key(&self) -> NameKey {
        self.key
    }

    /// The directory of listener names.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All names in the rack, in no order. Reads the directories of all addresses.
    ///
    /// # Errors
    /// What openat and getdents answer.
    pub fn names(&self) -> Result<Vec<ListenerName>, Errno> {
        let mut addresses = Vec::new();
        let listing = self.reopen()?;
        let outcome = visit_entries(listing.as_fd(), ADDRESSES_MAX, |entry, _| {
            addresses.extend(entry.parse::<SocketAddr>().ok());
            ControlFlow::Continue(())
        });
        close(listing);
        outcome?;
        let mut names = Vec::new();
        for address in addresses {
            match self.names_at(address) {
                Err(Errno::NOTDIR | Errno::LOOP) => {} // Put there by hand.
                at_address => names.extend(at_address?),
            }
        }
        Ok(names)
    }

    /// The names of listeners that answer for a destination, in no order.
    ///
    /// # Errors
    /// What openat and getdents answer.
    pub fn names_for(&self, destination: SocketAddr) -> Result<Vec<ListenerName>, Errno> {
        let mut names = Vec::new();
        for address in addresses_for(destination) {
            names.extend(self.names_at(address)?);
        }
        names.retain(|name| name.rank_for(destination).is_some());
        Ok(names)
    }

    fn names_at(&self, address: SocketAddr) -> Result<Vec<ListenerName>, Errno> {
        let listing = match self.open_directory(&address.to_string()) {
            Err(Errno::NOENT) => return Ok(Vec::new()),
            listing => listing?,
        };
        let names = read_names(listing.as_fd(), address, NAMES_MAX);
        close(listing);
        names
    }

    /// Whether a version of the library that has a directory of its own in the rack has a listener for a destination.
    pub fn has_other_version_at(&self, destination: SocketAddr) -> bool {
        let (Some(version), Some(net)) = (self.path.parent(), self.path.file_name()) else { return false };
        let is_version = |name: &[u8]| matches!(name, [b'v', number @ ..] if !number.is_empty());
        siblings(version, is_version).any(|other| has_listener_for(&other.join(net), destination))
    }

    /// Whether a program in another network namespace has a listener for a destination in the rack.
    pub fn has_other_namespace_at(&self, destination: SocketAddr) -> bool {
        siblings(&self.path, |name| name.starts_with(b"net-")).any(|other| has_listener_for(&other, destination))
    }

    /// A descriptor of its own, because the place in a directory is shared by all users of one.
    fn reopen(&self) -> Result<OwnedFd, Errno> {
        self.open_directory(".")
    }

    fn open_directory(&self, name: &str) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.directory.fd()?, name, flags, Mode::empty())
    }

    /// The path of a name.
    pub fn path_of(&self, name: &ListenerName) -> PathBuf {
        self.path.join(name.directory()).join(name.entry())
    }

    /// The address to bind or connect to for a name.
    ///
    /// # Errors
    /// `NAMETOOLONG` when even the short way to it is too long.
    pub fn address_of(&self, name: &ListenerName) -> Result<SocketAddrUnix, Errno> {
        let mut path = self.path_of(name).into_os_string().into_vec();
        if path.len() >= SOCKET_PATH_BYTES_MAX {
            let directory = self.directory.fd()?.as_raw_fd();
            path = format!("/proc/self/fd/{directory}/{}/{}", name.directory(), name.entry()).into_bytes();
        }
        SocketAddrUnix::new(CString::new(path).map_err(|_| Errno::INVAL)?)
    }

    /// Takes the lock under which names at an address are made and removed.
    ///
    /// # Errors
    /// `BUSY` when another process holds it for longer than any does unless it is stopped, and what mkdir, open and
    /// flock answer.
    pub fn lock(&self, address: SocketAddr) -> Result<RackLock<'_>, Errno> {
        let name = address.to_string();
        for _ in 0..REMOVALS_MAX {
            self.make_directory(&name)?;
            match self.lock_existing(address, LOCK_TRIES_MAX) {
                Err(Errno::NOENT) => {}
                outcome => return outcome,
            }
        }
        Err(Errno::BUSY)
    }

    /// As [`Rack::lock`], for an address that has names.
    ///
    /// # Errors
    /// As there, and `NOENT` for one that has none.
    fn lock_existing(&self, address: SocketAddr, tries: usize) -> Result<RackLock<'_>, Errno> {
        for _ in 0..REMOVALS_MAX {
            // A lock belongs to an open file, and a forked child shares ours: so each taker opens its own.
            let directory = self.open_directory(&address.to_string())?;
            let mut lock = RackLock { rack: self, address, directory: Some(directory), is_held: false };
            lock.acquire(tries)?;
            if lock.is_held {
                return Ok(lock);
            }
        }
        Err(Errno::BUSY)
    }

    fn make_directory(&self, name: &str) -> Result<(), Errno> {
        let parent = self.directory.fd()?;
        match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            // The umask may have taken rights from the user itself. The directory may have been removed already.
            Ok(()) => match rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty()) {
                Err(Errno::NOENT) => Ok(()),
                changed => changed,
            },
            Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Removes stale names at the next few addresses of the rack, beginning where the last sweep ended.
    ///
    /// # Errors
    /// What openat, lseek, getdents, read and write answer.
    pub fn sweep(&self) -> Result<(), Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let cursor = rustix::fs::openat(self.directory.fd()?, SWEEP_FILE, flags, Mode::RUSR | Mode::WUSR)?;
        let swept = self.reopen().and_then(|listing| {
            let swept = self.sweep_from(cursor.as_fd(), listing.as_fd());
            close(listing);
            swept
        });
        close(cursor);
        swept
    }

    /// Sweeps that run at once may check the same addresses, or begin where another one began: neither does harm.
    fn sweep_from(&self, cursor: BorrowedFd<'_>, listing: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut bytes = [0_u8; 8];
        check_file_bytes(bytes.len())?;
        let length = rustix::io::pread(cursor, &mut bytes, 0)?;
        let from = if length == bytes.len() { u64::from_ne_bytes(bytes) } else { 0 };
        // What no position is, or is one no more, counts as the end.
        let _ = rustix::fs::seek(listing, SeekFrom::Start(from));
        let (mut addresses, mut next) = (Vec::new(), 0);
        let _ = visit_entries(listing, SWEEP_ENTRIES_MAX, |entry, position| {
            addresses.extend(entry.parse::<SocketAddr>().ok());
            next = position;
            if addresses.len() < SWEEP_ADDRESSES_MAX { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        rustix::io::pwrite(cursor, &next.to_ne_bytes(), 0)?;
        addresses.into_iter().for_each(|address| self.sweep_address(address));
        Ok(())
    }

    /// Asks without the lock: names of live listeners need none.
    fn sweep_address(&self, address: SocketAddr) {
        let Ok(listing) = self.open_directory(&address.to_string()) else { return };
        let names = read_names(listing.as_fd(), address, SWEEP_NAMES_MAX).unwrap_or_default();
        close(listing);
        let is_dead = |name: &&ListenerName| matches!(self.is_live(name), Ok(false) | Err(Errno::NOENT));
        let dead: Vec<ListenerName> = names.iter().filter(is_dead).copied().collect();
        if (names.is_empty() || !dead.is_empty())
            && let Ok(lock) = self.lock_existing(address, 1)
        {
            for name in &dead {
                let _ = lock.remove_if_stale(name);
            }
        }
    }

    /// Whether a socket stands behind the name.
    ///
    /// # Errors
    /// `NOENT` when there is no such name, and what socket and connect answer.
    pub fn is_live(&self, name: &ListenerName) -> Result<bool, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let answer = self.address_of(name).and_then(|address| rustix::net::connect(&probe, &address));
        close(probe);
        match answer {
            // A datagram socket put there by hand: not stale, and no listener of ours.
            Err(Errno::PROTOTYPE) | Ok(()) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the name if no socket stands behind it. Returns whether the name is free now.
    ///
    /// # Errors
    /// As [`Rack::lock`] and [`Rack::is_live`].
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        self.remove_if_stale_within(name, LOCK_TRIES_MAX)
    }

    /// As [`Rack::remove_if_stale`], for those who must not wait for the lock.
    ///
    /// # Errors
    /// As there; `BUSY` at once.
    pub fn try_remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        self.remove_if_stale_within(name, 1)
    }

    fn remove_if_stale_within(&self, name: &ListenerName, tries: usize) -> Result<bool, Errno> {
        match self.lock_existing(name.address, tries) {
            Ok(lock) => lock.remove_if_stale(name),
            Err(Errno::NOENT) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Whether a path in an AF_UNIX address leads to a name of this rack.
    pub fn contains_path(&self, path: &[u8]) -> bool {
        let top = path.rsplitn(3, |byte| *byte == b'/').nth(2).unwrap_or_default();
        top == self.path.as_os_str().as_bytes() || top.starts_with(b"/proc/self/fd/")
    }
}

/// The other entries beside `path` whose name is one of those, [`SIBLINGS_MAX`] at most.
fn siblings(path: &Path, is_one: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = PathBuf> {
    let parent = path.parent().map(Path::to_owned).unwrap_or_default();
    let others = std::fs::read_dir(&parent).into_iter().flatten().flatten().take(SIBLINGS_MAX);
    let own = path.file_name().map(OsStr::to_owned);
    let names = others.map(|entry| entry.file_name()).filter(move |name| Some(name) != own.as_ref());
    names.filter(move |name| is_one(name.as_bytes())).map(move |name| parent.join(name))
}

/// Whether a listener that answers for a destination lives in a directory of names.
fn has_listener_for(net: &Path, destination: SocketAddr) -> bool {
    let mut folders = addresses_for(destination).map(|address| net.join(address.to_string()));
    folders.any(|folder| has_listener(&folder))
}

/// Whether a path in an AF_UNIX address is that of a listener in a rack of any user and any version so far.
pub fn is_in_any_rack(path: &[u8]) -> bool {
    let is_net = |component: &[u8]| {
        let inode = component.strip_prefix(b"net-").unwrap_or_default();
        !inode.is_empty() && inode.iter().all(u8::is_ascii_digit)
    };
    let is_version = |component: &[u8]| matches!(component, [b'v', version @ ..] if !version.is_empty());
    let above: Vec<&[u8]> = path.rsplit(|byte| *byte == b'/').skip(1).take(3).collect();
    // In the first version the names of all addresses lay in one directory.
    let is_below_net = above.windows(2).any(|pair| is_net(pair[0]) && is_version(pair[1]));
    is_below_net || path.starts_with(b"/proc/self/fd/") && ListenerName::from_path(path).is_some()
}

/// Calls `visit` with the names in an open directory, from its position on, and the position after each, until it
/// breaks; `entries_max` of them at most.
fn visit_entries(
    directory: BorrowedFd<'_>,
    entries_max: usize,
    mut visit: impl FnMut(&str, u64) -> ControlFlow<()>,
) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING_BYTES];
    let mut entries = RawDir::new(directory, &mut buffer);
    for _ in 0..entries_max {
        let Some(entry) = entries.next() else { break };
        let entry = entry?;
        // What is no text is no name of ours.
        if visit(entry.file_name().to_str().unwrap_or_default(), entry.next_entry_cookie()).is_break() {
            break;
        }
    }
    Ok(())
}

/// The names in the open directory of an address, from its position on.
fn read_names(directory: BorrowedFd<'_>, address: SocketAddr, names_max: usize) -> Result<Vec<ListenerName>, Errno> {
    let (text, mut names) = (address.to_string(), Vec::new());
    visit_entries(directory, NAMES_MAX, |entry, _| {
        names.extend(ListenerName::from_entry(&text, entry));
        if names.len() < names_max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(names)
}

/// The right to make and remove names at an address, until dropped.
#[derive(Debug)]
pub struct RackLock<'a> {
    rack: &'a Rack,
    address: SocketAddr,
    directory: Option<OwnedFd>,
    /// Whether this is the lock of the address, and not of a directory that it had before.
    is_held: bool,
}

impl RackLock<'_> {
    fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.directory.as_ref().map(AsFd::as_fd).ok_or(Errno::BADF)
    }

    fn acquire(&mut self, tries: usize) -> Result<(), Errno> {
        for left in (0..tries).rev() {
            match rustix::fs::flock(self.fd()?, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    self.is_held = self.is_current()?;
                    return Ok(());
                }
                Err(Errno::WOULDBLOCK) if left > 0 => {
                    let _ = rustix::thread::nanosleep(&LOCK_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(error) => return Err(error),
            }
        }
        Err(Errno::BUSY)
    }

    /// Whether the directory is still the address's: the holder before may have removed it.
    fn is_current(&self) -> Result<bool, Errno> {
        let ours = rustix::fs::fstat(self.fd()?)?;
        let name = self.address.to_string();
        match rustix::fs::statat(self.rack.directory.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(current) => Ok((current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// As [`Rack::remove_if_stale`].
    ///
    /// # Errors
    /// What socket, connect and unlink answer.
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        match self.rack.is_live(name) {
            Ok(true) => Ok(false),
            // No such file may also be said of a link that leads nowhere.
            Ok(false) | Err(Errno::NOENT) => match rustix::fs::unlinkat(self.fd()?, name.entry(), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(true),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// A free name for a listener on the address, after stale ones have been removed.
    ///
    /// # Errors
    /// `ADDRINUSE` when a live listener does not share the address.
    pub fn free_name(&self, v6_only: bool, shared: bool) -> Result<ListenerName, Errno> {
        let taken = self.taken_names(v6_only)?;
        match shared {
            _ if taken.is_exclusive => Err(Errno::ADDRINUSE),
            true => taken.free_member(self.address, v6_only),
            false if taken.members.contains(&true) => Err(Errno::ADDRINUSE),
            false => Ok(ListenerName::new(self.address, v6_only, None)),
        }
    }

    /// A free name beside those of all others on the address: one that had it alone is a member from now on.
    ///
    /// # Errors
    /// `ADDRINUSE` when there are too many, and what rename answers.
    pub fn free_name_on_shared_socket(&self, v6_only: bool) -> Result<ListenerName, Errno> {
        let mut taken = self.taken_names(v6_only)?;
        if taken.is_exclusive {
            let exclusive = ListenerName::new(self.address, v6_only, None);
            let member = taken.free_member(self.address, v6_only)?;
            rustix::fs::renameat(self.fd()?, exclusive.entry(), self.fd()?, member.entry())?;
            member.member.into_iter().for_each(|member| taken.members[usize::from(member)] = true);
        }
        taken.free_member(self.address, v6_only)
    }

    /// The names that are taken, after stale ones have been removed.
    fn taken_names(&self, v6_only: bool) -> Result<TakenNames, Errno> {
        let plain = ListenerName::new(self.address, v6_only, None);
        let mut taken = TakenNames { is_exclusive: false, members: [false; MEMBERS_MAX as usize] };
        rustix::fs::seek(self.fd()?, SeekFrom::Start(0))?;
        let names = read_names(self.fd()?, self.address, NAMES_MAX)?;
        for name in names.iter().filter(|name| name.has_same_address(&plain)) {
            let gone = self.remove_if_stale(name)?;
            match name.member {
                _ if gone => {}
                Some(member) => taken.members[usize::from(member)] = true,
                None => taken.is_exclusive = true,
            }
        }
        Ok(taken)
    }

    /// Binds a socket to a free name. Only the directory's rights decide who may connect, whatever the program's umask
    /// is.
    ///
    /// # Errors
    /// What bind and chmod answer.
    pub fn bind(&self, socket: BorrowedFd<'_>, name: &ListenerName) -> Result<(), Errno> {
        rustix::net::bind(socket, &self.rack.address_of(name)?)?;
        rustix::fs::chmodat(self.fd()?, name.entry(), Mode::RUSR | Mode::WUSR, AtFlags::empty())
    }
}

impl Drop for RackLock<'_> {
    /// Removes the directory too if there are no names in it.
    fn drop(&mut self) {
        if self.is_held
            && let Ok(parent) = self.rack.directory.fd()
        {
            let _ = rustix::fs::unlinkat(parent, self.address.to_string(), AtFlags::REMOVEDIR);
        }
        if let Some(directory) = self.directory.take() {
            close(directory);
        }
    }
}

/// Which names of an address have live listeners.
struct TakenNames {
    /// The one of a listener that has the address alone.
    is_exclusive: bool,
    members: [bool; MEMBERS_MAX as usize],
}

impl TakenNames {
    fn free_member(&self, address: SocketAddr, v6_only: bool) -> Result<ListenerName, Errno> {
        let member = self.members.iter().position(|taken| !taken).ok_or(Errno::ADDRINUSE)?;
        Ok(ListenerName::new(address, v6_only, Some(member as u8)))
    }
}

/// Opens `name` in `parent`, made if missing; `parent` is closed, and `name` added to the path.
fn open_within(parent: OwnedFd, name: &str, path: &mut PathBuf, uid: u32) -> Result<OwnedFd, Errno> {
    let made = make_private(parent.as_fd(), name.as_bytes());
    let directory = made.and_then(|()| open_private(parent.as_fd(), name.as_bytes(), uid));
    close(parent);
    path.push(name);
    directory
}

/// Makes a directory if it is missing.
fn make_private(parent: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        // The umask may have taken rights from the user itself.
        Ok(()) => rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty()),
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens a directory that is a real one, the user's own, and closed to everybody else.
fn open_private(parent: BorrowedFd<'_>, name: &[u8], uid: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&directory);
    match stat {
        Ok(stat) if stat.st_uid == uid && stat.st_mode & 0o077 == 0 => Ok(directory),
        other => {
            close(directory);
            Err(other.err().unwrap_or(Errno::PERM))
        }
    }
}

/// Returns whether a listener's socket is alive at `folder`, which is either the socket or a directory of several.
fn has_listener(folder: &Path) -> bool {
    let sockets = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    sockets.chain([folder.to_owned()]).any(|path| is_socket_live(&path))
}

/// Probes with a socket of another type, which the listener does not notice.
fn is_socket_live(path: &Path) -> bool {
    let address = SocketAddrUnix::new(OsStr::as_bytes(path.as_os_str()));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(probe) = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None) else { return false };
    let answer = address.and_then(|address| rustix::net::connect(&probe, &address));
    close(probe);
    answer == Err(Errno::PROTOTYPE)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::{UnixDatagram, UnixListener};
    use std::sync::atomic::{AtomicU32, Ordering};

    const LEFT_BEHIND_MAX: usize = 1000;

    /// A directory that nobody else has, gone when dropped.
    pub(crate) struct Scratch(pub(crate) PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            // A run that was killed may have left some, and its process may have had the same number.
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

    /// The path of a name, in a directory that is there.
    fn path_for(rack: &Rack, text: &str) -> PathBuf {
        let path = rack.path_of(&name(text));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    /// Leaves a name whose socket is closed, as a killed server does.
    fn leave_stale(rack: &Rack, text: &str) {
        drop(UnixListener::bind(path_for(rack, text)).unwrap());
    }

    fn listen(rack: &Rack, text: &str) -> UnixListener {
        UnixListener::bind(path_for(rack, text)).unwrap()
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// The addresses that have a directory.
    fn directories(rack: &Rack) -> Vec<String> {
        let entries = std::fs::read_dir(rack.path()).unwrap().map(|entry| entry.unwrap());
        let directories = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        let mut names: Vec<_> = directories.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn directories_are_made_private() {
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
    fn directories_others_could_write_or_lead_elsewhere_are_refused() {
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
    fn names_say_what_the_listener_takes() {
        for (bound, v6_only, member, text) in [
            ("127.0.0.1:6379", false, None, "127.0.0.1:6379"),
            ("0.0.0.0:80", false, Some(3), "0.0.0.0:80#3"),
            ("[::]:80", false, None, "[::]:80"),
            ("[::]:80", true, None, "[::]:80!6"),
            ("[::]:80", true, Some(63), "[::]:80!6#63"),
            ("[::1]:80", true, None, "[::1]:80"),
            ("[::ffff:127.0.0.1]:80", false, None, "127.0.0.1:80"),
            ("[fe80::1%2]:80", false, None, "[fe80::1%2]:80"),
        ] {
            let made = ListenerName::new(address(bound), v6_only, member);
            assert_eq!(made.to_string(), text);
            assert_eq!(ListenerName::parse(text), Some(made));
            assert_eq!(
                ListenerName::from_path(format!("/x/{}/{}", made.directory(), made.entry()).as_bytes()),
                Some(made)
            );
        }
        let remote = ListenerName::remote(address("127.77.0.2:80"));
        assert_eq!(remote.to_string(), "127.77.0.2:80!far");
        assert_eq!(ListenerName::parse("127.77.0.2:80!far"), Some(remote));
        for text in [
            "",
            ".",
            "..",
            "127.0.0.1",
            "127.0.0.1:0",
            "127.0.0.1:080",
            "127.0.0.1:80!6",
            "127.0.0.1:80#64",
            "127.0.0.1:80#+1",
            "127.0.0.1:80#01",
            "[::ffff:1.2.3.4]:80",
            "[0::1]:80",
            "junk:80",
            "[::]:80#1!6",
            "[::]:80!6!far",
            "127.0.0.1:80!far#1",
            "127.0.0.1:80!far!far",
        ] {
            assert_eq!(ListenerName::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn entries_anybody_made_are_names_of_ours_or_nothing(text in "[0-9a-f:.#!r%\\[\\]]{0,40}") {
            if let Some(name) = ListenerName::parse(&text) {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }

    #[test]
    fn exact_names_come_before_the_unspecified_address() {
        let rank = |listener: &str, destination: &str| name(listener).rank_for(destination.parse().unwrap());
        for (listener, destination, expected) in [
            ("127.0.0.1:80", "127.0.0.1:80", Some(0)),
            ("127.0.0.1:80#5", "127.0.0.1:80", Some(0)),
            ("127.0.0.1:80", "127.0.0.1:81", None),
            ("127.0.0.1:80", "127.0.0.2:80", None),
            ("0.0.0.0:80", "127.0.0.2:80", Some(1)),
            ("0.0.0.0:80", "[::1]:80", None),
            ("[::]:80", "[::1]:80", Some(1)),
            ("[::]:80!6", "[::1]:80", Some(1)),
            ("[::]:80", "127.0.0.1:80", Some(2)),
            ("[::]:80!6", "127.0.0.1:80", None),
            ("[::1]:80", "127.0.0.1:80", None),
        ] {
            assert_eq!(rank(listener, destination), expected, "{listener} for {destination}");
        }
    }

    #[test]
    fn paths_say_which_listener_it_is_and_other_paths_say_nothing() {
        let from_path = |path: &str| ListenerName::from_path(path.as_bytes()).map(|name| name.to_string());
        assert_eq!(from_path("/proc/self/fd/9/[::]:80/lane!6#3").as_deref(), Some("[::]:80!6#3"));
        assert_eq!(from_path("127.77.0.2:80/lane!far").as_deref(), Some("127.77.0.2:80!far"));
        for path in
            ["", "/", "lane", "/lane", "127.0.0.1:80", "127.0.0.1:80/", "127.0.0.1:80/lan", "127.0.0.1:80/lanes"]
        {
            assert_eq!(from_path(path), None, "{path}");
        }
    }

    #[test]
    fn racks_of_other_users_and_versions_are_known_by_their_paths() {
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
    fn a_listing_holds_the_names_and_not_the_rubbish() {
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
    fn nothing_but_the_addresses_that_are_asked_about_is_read() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = scratch.rack();
        let _listener = listen(&rack, "127.0.0.1:80");
        // What cannot be read as a directory would fail.
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
    fn a_name_is_live_while_a_socket_stands_behind_it_and_a_probe_leaves_no_trace() {
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
    fn stale_names_are_free_and_live_ones_only_for_those_who_share() {
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
        assert_eq!(rack.is_live(&name("127.0.0.1:80#1")), Ok(true), "who had the address alone is a member");
        assert_eq!(free(true).unwrap(), "127.0.0.1:80#2");
    }

    #[test]
    fn one_at_a_time_holds_an_addresss_lock_and_a_stopped_holder_is_not_waited_for_for_ever() {
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
    fn an_addresss_directory_goes_with_its_last_name() {
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
        assert_eq!(directories(&rack), [""; 0], "one that was made for nothing goes too");
    }

    #[test]
    fn a_directory_that_was_removed_before_its_lock_was_taken_is_made_anew() {
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
        assert_eq!(directories(&rack), ["127.0.0.1:80"], "what is another's now is left alone");
        drop(current);
    }

    #[test]
    fn names_made_and_removed_by_several_at_once_are_never_lost() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = scratch.rack();
        let at = address("127.0.0.1:80");
        let come_and_go = || {
            for _ in 0..100 {
                let lock = loop {
                    match rack.lock(at) {
                        Err(Errno::BUSY) => {} // On a machine that does other things.
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
    fn sweeps_remove_what_the_dead_left_and_nothing_else() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = scratch.rack();
        let _live: Vec<_> = (0..20).map(|index| listen(&rack, &format!("127.0.0.1:{}", 1000 + index))).collect();
        (0..100).for_each(|index| leave_stale(&rack, &format!("127.0.0.2:{}", 1000 + index)));
        (0..3).for_each(|index| leave_stale(&rack, &format!("127.0.0.1:1000#{index}")));
        std::fs::create_dir(rack.path().join("127.0.0.3:80")).unwrap();
        let kept = listen(&rack, "127.0.0.4:80#1");
        leave_stale(&rack, "127.0.0.4:80#0");
        // Each checks two addresses; the end of the directory, and the entries in it that are none, take a few more.
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
    fn stale_names_stay_in_proportion_to_live_ones_however_many_are_left_behind() {
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
}
