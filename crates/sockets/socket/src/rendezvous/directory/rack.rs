//! The open rack directory of one user in one network namespace.

use std::ffi::{CString, OsStr};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::known_addresses::{ADDRESSES_KNOWN_MAX, KnownAddresses};
use super::listener_name::{ListenerName, MEMBERS_MAX, addresses_for};
use super::location::ensure_rack_dir;
use super::private::{make_private, open_private, open_within};
use crate::descriptor::hidden::{HiddenFd, Need, close};
use crate::process::socket_option::{SocketOption, get_raw};
use crate::rendezvous::local::spread_u32;
use crate::rendezvous::name_key::NameKey;

/// The directory of this version in a rack: programs of another version find neither listeners nor a key there.
pub const VERSION: &str = "v4";
/// Maximum number of names that are read at one address: all that can be there, and some foreign entries.
pub(super) const NAMES_MAX: usize = 4 * MEMBERS_MAX as usize;
/// Maximum number of addresses of a rack that are read for a list of all names.
const ADDRESSES_MAX: usize = 65_536;
/// Bytes of directory entries that are read at once, on the stack. One with the longest name has 280.
const LISTING_BYTES: usize = 512;
/// Maximum number of versions or network namespaces of a rack that are searched for the reason of a missing lane.
const SIBLINGS_MAX: usize = 64;
/// Maximum length of a path in an AF_UNIX address, including the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 108;

/// The user and the network namespace that a rack was opened for; if either changes, another rack applies.
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
    pub(super) directory: HiddenFd,
    path: PathBuf,
    identity: (u64, u64),
    scope: RackScope,
    /// Read once: a process that has changed its user since could not read it again.
    key: NameKey,
    /// The kernel's cookie of the network namespace; 0 until it is first needed.
    netns_cookie: AtomicU64,
    known_addresses: KnownAddresses,
}

static CURRENT: Mutex<Option<Arc<Rack>>> = Mutex::new(None);

/// Returns the rack that is kept open. Never waits for its lock, whose holder may not exist in the child of a fork;
/// without it the rack is opened for one use.
fn cached() -> Option<Arc<Rack>> {
    CURRENT.try_lock().ok().and_then(|cached| cached.clone())
}

/// Returns the cookie of the network namespace that a socket was created in, which no other namespace has; 0 on kernels
/// older than 5.14.
pub(crate) fn netns_cookie(socket: BorrowedFd<'_>) -> u64 {
    let mut cookie = [0_u8; 8];
    let option = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_NETNS_COOKIE };
    get_raw(socket, option, &mut cookie).map_or(0, |_| u64::from_ne_bytes(cookie))
}

impl Rack {
    /// Returns the rack for the caller's effective user and network namespace. It is kept open, and opened again when
    /// the user, the namespace or the directory has changed.
    ///
    /// # Errors
    /// `PERM` when a directory or the key is not owned by the user, `INVAL` when the key has a wrong length, and the
    /// errors of mkdir and open.
    pub fn current() -> Result<Arc<Self>, Errno> {
        Self::cached_or_open().map(|(rack, _)| rack)
    }

    /// Returns the rack, and whether lanes are switched off in it.
    fn cached_or_open() -> Result<(Arc<Self>, bool), Errno> {
        let now = RackScope::now()?;
        if let Some(rack) = cached().filter(|rack| rack.scope == now && rack.is_intact()) {
            return Ok((rack, false));
        }
        let root = ensure_rack_dir(now.uid);
        let rack = Arc::new(Self::open_in(&root, now)?);
        // Checked last: `crosslane lanes off` leaves the hint in the directories of listeners that exist then. A rack
        // whose lanes are off is not kept open, because a new directory has no hint.
        let is_off = rustix::fs::stat(root.join(stats_page::OFF_FILE)).is_ok();
        if !is_off {
            let old = CURRENT.try_lock().ok().and_then(|mut cached| cached.replace(Arc::clone(&rack)));
            drop(old);
        }
        Ok((rack, is_off))
    }

    /// Returns the current rack, as [`Rack::current`] does, for a thread that has just created `socket` for a
    /// connection: the socket identifies the thread's network namespace in a tenth of the time that /proc takes.
    ///
    /// # Errors
    /// Those of [`Rack::current`], and `CANCELED` while lanes are switched off in the rack.
    pub fn current_for(socket: BorrowedFd<'_>) -> Result<Arc<Self>, Errno> {
        let cookie = netns_cookie(socket);
        if let Some(rack) = Self::kept_open(cookie).filter(|rack| rack.is_intact()) {
            return Ok(rack);
        }
        let (rack, is_off) = Self::cached_or_open()?;
        if is_off {
            return Err(Errno::CANCELED);
        }
        // The cookie and the scope are of the same namespace, which this thread is in.
        rack.netns_cookie.store(cookie, Ordering::Relaxed);
        Ok(rack)
    }

    /// Returns the rack for the caller's effective user and the network namespace with this cookie, if it is kept open.
    pub(crate) fn kept_open(netns_cookie: u64) -> Option<Arc<Self>> {
        let is_same = |rack: &Arc<Self>| {
            let uid = || rustix::process::geteuid().as_raw();
            netns_cookie != 0 && rack.netns_cookie.load(Ordering::Relaxed) == netns_cookie && rack.scope.uid == uid()
        };
        cached().filter(is_same)
    }

    /// Opens a rack and creates its directories where they are missing.
    ///
    /// # Errors
    /// Those of [`Rack::current`].
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
        Self::over(HiddenFd::hide(directory, Need::Required)?, path, scope, key?)
    }

    /// Returns the rack of an open directory of a network namespace.
    fn over(directory: HiddenFd, path: PathBuf, scope: RackScope, key: NameKey) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(directory.fd()?)?;
        Ok(Self {
            directory,
            path,
            identity: (stat.st_dev, stat.st_ino),
            scope,
            key,
            netns_cookie: AtomicU64::new(0),
            known_addresses: KnownAddresses::default(),
        })
    }

    /// Opens the directory of another network namespace of the same rack.
    ///
    /// # Errors
    /// As [`Rack::current`].
    fn open_beside(&self, path: PathBuf) -> Result<Self, Errno> {
        let directory = open_private(rustix::fs::CWD, path.as_os_str().as_bytes(), self.scope.uid)?;
        Self::over(HiddenFd::hide(directory, Need::Required)?, path, self.scope, self.key)
    }

    /// Returns the rack's directories of some other network namespaces, at most `count`.
    pub(super) fn other_namespaces(&self, count: usize) -> impl Iterator<Item = Self> {
        let mut others: Vec<PathBuf> = siblings(&self.path, |name| name.starts_with(b"net-")).collect();
        let turns = spread_u32() as usize % others.len().max(1);
        others.rotate_left(turns);
        others.into_iter().take(count).filter_map(|path| self.open_beside(path).ok())
    }

    /// Returns whether the descriptor still refers to the directory, the directory still exists, and it has no hint
    /// that lanes may have been switched off.
    pub(super) fn is_intact(&self) -> bool {
        self.intact_status().is_some()
    }

    /// Returns the status of the directory if it is intact.
    fn intact_status(&self) -> Option<Stat> {
        let is_same = |stat: &Stat| (stat.st_dev, stat.st_ino) == self.identity && stat.st_nlink > 0;
        let stat = self.directory.fd().and_then(rustix::fs::fstat).ok()?;
        (is_same(&stat) && stat.st_mode & stats_page::OFF_HINT == 0).then_some(stat)
    }

    /// Returns the user whose rack this is.
    pub fn uid(&self) -> u32 {
        self.scope.uid
    }

    /// Returns the key of the abstract names that lifelines of this rack are bound to.
    pub fn key(&self) -> NameKey {
        self.key
    }

    /// Returns the path of the directory of listener names.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all names in the rack, in no particular order. Reads the directories of all addresses.
    ///
    /// # Errors
    /// The errors of openat and getdents.
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
                Err(Errno::NOTDIR | Errno::LOOP) => {} // Not created by the library.
                at_address => names.extend(at_address?),
            }
        }
        Ok(names)
    }

    /// Returns the names of listeners that match a destination, in no particular order.
    ///
    /// # Errors
    /// The errors of openat and getdents.
    pub fn names_for(&self, destination: SocketAddr) -> Result<Vec<ListenerName>, Errno> {
        let mut names = Vec::new();
        for address in addresses_for(destination) {
            names.extend(self.names_at(address)?);
        }
        names.retain(|name| name.rank_for(destination).is_some());
        Ok(names)
    }

    /// Returns whether no listener in the rack for the caller's effective user and the network namespace with this
    /// cookie can match a destination. False if that rack is not kept open.
    pub fn is_known_to_be_without(destination: SocketAddr, netns_cookie: u64) -> bool {
        let Some(rack) = Self::kept_open(netns_cookie) else { return false };
        let Ok(directory) = rack.directory.fd() else { return false };
        let Some(status) = rack.intact_status() else { return false };
        let is_absent = |address: SocketAddr| {
            rustix::fs::statat(directory, address.to_string(), AtFlags::SYMLINK_NOFOLLOW).err() == Some(Errno::NOENT)
        };
        let known = rack.known_addresses.has_none(&status, addresses_for(destination), || rack.addresses());
        known.unwrap_or_else(|| addresses_for(destination).all(is_absent))
    }

    /// Returns the addresses in the directory; `None` if there are too many to remember, or it cannot be read.
    fn addresses(&self) -> Option<Vec<SocketAddr>> {
        let listing = self.reopen().ok()?;
        let (mut addresses, mut entries) = (Vec::new(), 0);
        let outcome = visit_entries(listing.as_fd(), ADDRESSES_KNOWN_MAX + 1, |entry, _| {
            entries += 1;
            addresses.extend(entry.parse::<SocketAddr>().ok());
            ControlFlow::Continue(())
        });
        close(listing);
        (outcome.is_ok() && entries <= ADDRESSES_KNOWN_MAX).then_some(addresses)
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

    /// Returns whether a program in another network namespace has a listener for a destination in the rack.
    pub fn has_other_namespace_at(&self, destination: SocketAddr) -> bool {
        siblings(&self.path, |name| name.starts_with(b"net-")).any(|other| has_listener_for(&other, destination))
    }

    /// Opens the directory again, because all users of one descriptor share its position.
    pub(super) fn reopen(&self) -> Result<OwnedFd, Errno> {
        self.open_directory(".")
    }

    pub(super) fn open_directory(&self, name: &str) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.directory.fd()?, name, flags, Mode::empty())
    }

    /// Returns the path of a name.
    pub fn path_of(&self, name: &ListenerName) -> PathBuf {
        self.path.join(name.directory()).join(name.entry())
    }

    /// Returns the address to bind or connect to for a name.
    ///
    /// # Errors
    /// `NAMETOOLONG` when even the path through the descriptor is too long.
    pub fn address_of(&self, name: &ListenerName) -> Result<SocketAddrUnix, Errno> {
        let mut path = self.path_of(name).into_os_string().into_vec();
        if path.len() >= SOCKET_PATH_BYTES_MAX {
            let directory = self.directory.fd()?.as_raw_fd();
            path = format!("/proc/self/fd/{directory}/{}/{}", name.directory(), name.entry()).into_bytes();
        }
        SocketAddrUnix::new(CString::new(path).map_err(|_| Errno::INVAL)?)
    }

    /// Returns whether a socket is behind the name.
    ///
    /// # Errors
    /// `NOENT` when there is no such name, and the errors of socket and connect.
    pub fn is_live(&self, name: &ListenerName) -> Result<bool, Errno> {
        match probe(&self.address_of(name)?) {
            // A datagram socket, which the library did not create, is neither stale nor a lane listener.
            Err(Errno::PROTOTYPE) | Ok(()) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a path in an AF_UNIX address leads to a name of this rack.
    pub fn contains_path(&self, path: &[u8]) -> bool {
        let top = path.rsplitn(3, |byte| *byte == b'/').nth(2).unwrap_or_default();
        top == self.path.as_os_str().as_bytes() || top.starts_with(b"/proc/self/fd/")
    }
}

/// Returns whether another version of the library, with a directory of its own in the rack, has a listener for a
/// destination. `names` is the directory of names of this version.
pub fn has_other_version_at(names: &Path, destination: SocketAddr) -> bool {
    let (Some(version), Some(net)) = (names.parent(), names.file_name()) else { return false };
    let is_version = |name: &[u8]| matches!(name, [b'v', number @ ..] if !number.is_empty());
    siblings(version, is_version).any(|other| has_listener_for(&other.join(net), destination))
}

/// Returns the other entries in the directory of `path` whose name fulfils `is_one`, at most [`SIBLINGS_MAX`].
fn siblings(path: &Path, is_one: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = PathBuf> {
    let parent = path.parent().map(Path::to_owned).unwrap_or_default();
    let others = std::fs::read_dir(&parent).into_iter().flatten().flatten().take(SIBLINGS_MAX);
    let own = path.file_name().map(OsStr::to_owned);
    let names = others.map(|entry| entry.file_name()).filter(move |name| Some(name) != own.as_ref());
    names.filter(move |name| is_one(name.as_bytes())).map(move |name| parent.join(name))
}

/// Returns whether a live listener in a directory of names matches a destination.
fn has_listener_for(net: &Path, destination: SocketAddr) -> bool {
    let mut folders = addresses_for(destination).map(|address| net.join(address.to_string()));
    folders.any(|folder| has_listener(&folder))
}

/// Returns whether a path in an AF_UNIX address is that of a listener in a rack, of any user and any version so far.
pub fn is_in_any_rack(path: &[u8]) -> bool {
    let is_net = |component: &[u8]| {
        let inode = component.strip_prefix(b"net-").unwrap_or_default();
        !inode.is_empty() && inode.iter().all(u8::is_ascii_digit)
    };
    let is_version = |component: &[u8]| matches!(component, [b'v', version @ ..] if !version.is_empty());
    let above: Vec<&[u8]> = path.rsplit(|byte| *byte == b'/').skip(1).take(3).collect();
    // In the first version, the names of all addresses were in one directory.
    let is_below_net = above.windows(2).any(|pair| is_net(pair[0]) && is_version(pair[1]));
    is_below_net || path.starts_with(b"/proc/self/fd/") && ListenerName::from_path(path).is_some()
}

/// Calls `visit` with each name in an open directory, from its position on, and the position after it, until `visit`
/// breaks; at most `entries_max` times.
pub(super) fn visit_entries(
    directory: BorrowedFd<'_>,
    entries_max: usize,
    mut visit: impl FnMut(&str, u64) -> ControlFlow<()>,
) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING_BYTES];
    let mut entries = RawDir::new(directory, &mut buffer);
    for _ in 0..entries_max {
        let Some(entry) = entries.next() else { break };
        let entry = entry?;
        // A name that is not UTF-8 is not one of the library's.
        if visit(entry.file_name().to_str().unwrap_or_default(), entry.next_entry_cookie()).is_break() {
            break;
        }
    }
    Ok(())
}

/// Reads the names in the open directory of an address, from its position on.
pub(super) fn read_names(
    directory: BorrowedFd<'_>,
    address: SocketAddr,
    names_max: usize,
) -> Result<Vec<ListenerName>, Errno> {
    let (text, mut names) = (address.to_string(), Vec::new());
    visit_entries(directory, NAMES_MAX, |entry, _| {
        names.extend(ListenerName::from_entry(&text, entry));
        if names.len() < names_max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(names)
}

/// Returns whether a listener's socket is alive at `folder`, which is either the socket or a directory of several.
fn has_listener(folder: &Path) -> bool {
    let sockets = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    sockets.chain([folder.to_owned()]).any(|path| is_socket_live(&path))
}

fn is_socket_live(path: &Path) -> bool {
    let address = SocketAddrUnix::new(OsStr::as_bytes(path.as_os_str()));
    address.and_then(|address| probe(&address)) == Err(Errno::PROTOTYPE)
}

/// Connects a socket of another type, which a listener at the address does not notice: `PROTOTYPE` if there is one.
fn probe(address: &SocketAddrUnix) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let result = rustix::net::connect(&socket, address);
    close(socket);
    result
}
