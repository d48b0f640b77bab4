//! The rack directory: where listeners leave the names by which connecting ends find them.
//!
//! ```text
//!   RACK/v2/net-<inode of the network namespace>/127.0.0.1:6379   one AF_UNIX stream socket per lane listener
//!                                                [::]:80          takes IPv4 too
//!                                                [::]:443!6       IPv6 only
//!                                                0.0.0.0:80#3     one of several at this address (SO_REUSEPORT)
//!                                                127.77.0.2:80!far   another node's; this node's proxy listens
//!   RACK/v2/key                                                   the key of the names of lifelines ([`NameKey`])
//!   RACK/monitor.sock                                             where there are other nodes: this node's monitor
//!   RACK/v1/stat/<pid>                                            the ledger pages
//! ```
//!
//! Each directory must be a real one, owned by the effective user, with no rights for anybody else. The owner of a name
//! may have been killed, and the name is then stale: no socket stands behind it. That is found out by connecting with
//! the wrong socket type, which a live socket answers with `EPROTOTYPE`, unharmed, and a stale name with
//! `ECONNREFUSED`. Names are made and removed under a lock of the directory, so that nobody removes a name that has
//! just been made anew.

use std::ffi::{CString, OsString};
use std::fmt;
use std::io::Write as _;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RawDir, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::address::canonical;
use crate::descriptors::{HiddenFd, Need, close};
use crate::options::{SocketOption, get_raw};

pub(crate) mod key;

pub use key::NameKey;

/// The directory of a rack, by version: programs of another one find neither listeners nor a key there.
const VERSION: &str = "v2";
/// Listeners that can share one address.
pub const MEMBERS_MAX: u8 = 64;
/// Names of one directory that are looked at.
const ENTRIES_MAX: usize = 65_536;
/// Bytes of a path in an AF_UNIX address, its end included.
const SOCKET_PATH_BYTES_MAX: usize = 108;
/// How often the directory's lock is asked for, a millisecond apart, before doing without: its holder may be stopped.
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
    pub is_far: bool,
}

impl ListenerName {
    /// The name for a listener bound to `address`.
    pub fn new(address: SocketAddr, v6_only: bool, member: Option<u8>) -> Self {
        let address = canonical(address);
        Self { address, v6_only: v6_only && is_any_v6(address), member, is_far: false }
    }

    /// The name for a listener of another node, for which the proxy of this node stands in.
    pub fn far(address: SocketAddr) -> Self {
        Self { is_far: true, ..Self::new(address, false, None) }
    }

    /// The name in a directory entry; `None` for anything [`ListenerName`] would not have written.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, member) = match text.split_once('#') {
            Some((rest, number)) => (rest, Some(number.parse().ok().filter(|number| *number < MEMBERS_MAX)?)),
            None => (text, None),
        };
        let (rest, is_far) = rest.strip_suffix("!far").map_or((rest, false), |rest| (rest, true));
        let (rest, v6_only) = rest.strip_suffix("!6").map_or((rest, false), |rest| (rest, true));
        let name = Self { address: rest.parse().ok()?, v6_only, member, is_far };
        let again = if is_far { Self::far(name.address) } else { Self::new(name.address, v6_only, member) };
        (again == name && name.address.port() != 0 && again.to_string() == text).then_some(name)
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
    fn same_place(&self, other: &Self) -> bool {
        (self.address, self.v6_only, self.is_far) == (other.address, other.v6_only, other.is_far)
    }
}

fn is_any_v6(address: SocketAddr) -> bool {
    address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}

impl fmt::Display for ListenerName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.address)?;
        if self.v6_only {
            formatter.write_str("!6")?;
        }
        if self.is_far {
            formatter.write_str("!far")?;
        }
        match self.member {
            Some(member) => write!(formatter, "#{member}"),
            None => Ok(()),
        }
    }
}

/// Where racks may be, as the environment said when the library was loaded.
#[derive(Clone, Debug, Default)]
struct Places {
    rack: Option<OsString>,
    runtime: Option<OsString>,
}

static PLACES: OnceLock<Places> = OnceLock::new();

/// Remembers where the environment puts the rack. To be called while the library is loaded: later the program may
/// change its environment or its working directory under us.
pub fn remember_environment() {
    let absolute = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty())?;
        Some(std::path::absolute(&value).map_or(value, PathBuf::into_os_string))
    };
    PLACES.get_or_init(|| Places { rack: absolute("CROSSLANE_RACK"), runtime: absolute("XDG_RUNTIME_DIR") });
}

/// The rack directory of a user.
pub fn rack_dir(uid: u32) -> PathBuf {
    remember_environment();
    let places = PLACES.get().cloned().unwrap_or_default();
    ledger::rack_dir(
        |name| match name {
            "CROSSLANE_RACK" => places.rack.clone(),
            "XDG_RUNTIME_DIR" => places.runtime.clone(),
            _ => None,
        },
        uid,
    )
}

/// What an open rack was opened for; with any of it changed, another rack is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Circumstances {
    uid: u32,
    netns: u64,
}

impl Circumstances {
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
    circumstances: Circumstances,
    /// Read once: a process that has given up the rack's user since could not read it again.
    key: NameKey,
    /// The kernel's cookie of the network namespace, 0 while nobody has asked for it.
    netns_cookie: AtomicU64,
}

static CURRENT: Mutex<Option<Arc<Rack>>> = Mutex::new(None);

/// The rack that is kept open. Its lock is never waited for: in the child of a fork its holder may not exist. Without
/// it the rack is opened for this once.
fn kept() -> Option<Arc<Rack>> {
    CURRENT.try_lock().ok().and_then(|kept| kept.clone())
}

/// What tells the network namespace that a socket was made in from all others; 0 where the kernel is older than 5.14.
fn netns_cookie(socket: BorrowedFd<'_>) -> u64 {
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
        let now = Circumstances::now()?;
        if let Some(rack) = kept().filter(|rack| rack.circumstances == now && rack.is_intact()) {
            return Ok(rack);
        }
        let rack = Arc::new(Self::open_in(&rack_dir(now.uid), now)?);
        let old = CURRENT.try_lock().ok().and_then(|mut kept| kept.replace(Arc::clone(&rack)));
        drop(old);
        Ok(rack)
    }

    /// As [`Rack::current`], for a thread that has just made `socket`: the socket tells the thread's network namespace
    /// in a tenth of the time that /proc takes.
    ///
    /// # Errors
    /// As [`Rack::current`].
    pub fn current_for(socket: BorrowedFd<'_>) -> Result<Arc<Self>, Errno> {
        let cookie = netns_cookie(socket);
        let uid = rustix::process::geteuid().as_raw();
        let is_same = |rack: &Arc<Self>| {
            cookie != 0 && rack.netns_cookie.load(Ordering::Relaxed) == cookie && rack.circumstances.uid == uid
        };
        if let Some(rack) = kept().filter(|rack| is_same(rack) && rack.is_intact()) {
            return Ok(rack);
        }
        let rack = Self::current()?;
        // Both speak of the namespace that this thread is in.
        rack.netns_cookie.store(cookie, Ordering::Relaxed);
        Ok(rack)
    }

    /// Opens a rack, making its directories where they are missing.
    ///
    /// # Errors
    /// As [`Rack::current`].
    pub fn open(rack: &Path) -> Result<Self, Errno> {
        Self::open_in(rack, Circumstances::now()?)
    }

    fn open_in(rack: &Path, circumstances: Circumstances) -> Result<Self, Errno> {
        let mut path = rack.to_path_buf();
        let root = open_private(rustix::fs::CWD, rack.as_os_str().as_bytes(), circumstances.uid)?;
        let version = open_within(root, VERSION, &mut path, circumstances.uid)?;
        let key = NameKey::read_or_make(version.as_fd(), circumstances.uid);
        let net = format!("net-{}", circumstances.netns);
        let directory = open_within(version, &net, &mut path, circumstances.uid)?;
        let directory = HiddenFd::hide(directory, Need::Required)?;
        let stat = rustix::fs::fstat(directory.fd()?)?;
        let identity = (stat.st_dev, stat.st_ino);
        Ok(Self { directory, path, identity, circumstances, key: key?, netns_cookie: AtomicU64::new(0) })
    }

    /// Whether our descriptor still is the directory, and the directory still exists.
    fn is_intact(&self) -> bool {
        let stat = self.directory.fd().and_then(rustix::fs::fstat);
        stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity && stat.st_nlink > 0)
    }

    /// The user whose rack this is.
    pub fn uid(&self) -> u32 {
        self.circumstances.uid
    }

    /// The key of the abstract names that lifelines of this rack are bound to.
    pub fn key(&self) -> NameKey {
        self.key
    }

    /// The directory of listener names.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names in the directory that `wanted` picks, in no order.
    ///
    /// # Errors
    /// What openat and getdents answer.
    pub fn names(&self, wanted: impl Fn(&ListenerName) -> bool) -> Result<Vec<ListenerName>, Errno> {
        // A descriptor of its own, because the place in a directory is shared by all users of one.
        let listing = self.open_again()?;
        let mut buffer = [MaybeUninit::<u8>::uninit(); 8192];
        let mut entries = RawDir::new(&listing, &mut buffer);
        let mut names = Vec::new();
        let mut result = Ok(());
        for _ in 0..ENTRIES_MAX {
            let entry = match entries.next() {
                Some(Ok(entry)) => entry,
                Some(Err(error)) => {
                    result = Err(error);
                    break;
                }
                None => break,
            };
            let name = entry.file_name().to_str().ok().and_then(ListenerName::parse);
            names.extend(name.filter(&wanted));
        }
        close(listing);
        result.map(|()| names)
    }

    fn open_again(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(self.directory.fd()?, c".", flags, Mode::empty())
    }

    /// The address to bind or connect to for a name.
    ///
    /// # Errors
    /// `NAMETOOLONG` when even the short way to it is too long.
    pub fn address_of(&self, name: &ListenerName) -> Result<SocketAddrUnix, Errno> {
        let mut path = self.path.as_os_str().as_bytes().to_vec();
        let _ = write!(path, "/{name}"); // Writing to memory cannot fail.
        if path.len() >= SOCKET_PATH_BYTES_MAX {
            path.clear();
            let _ = write!(path, "/proc/self/fd/{}/{name}", self.directory.fd()?.as_raw_fd());
        }
        SocketAddrUnix::new(CString::new(path).map_err(|_| Errno::INVAL)?)
    }

    /// Takes the lock under which names are made and removed.
    ///
    /// # Errors
    /// `BUSY` when another process holds it for longer than any does unless it is stopped, and what open and flock
    /// answer.
    pub fn lock(&self) -> Result<RackLock<'_>, Errno> {
        self.lock_within(LOCK_TRIES_MAX)
    }

    fn lock_within(&self, tries: usize) -> Result<RackLock<'_>, Errno> {
        // A lock belongs to an open file, and a forked child shares ours: so each taker opens its own.
        let file = RackLock { rack: self, file: Some(self.open_again()?) };
        for left in (0..tries).rev() {
            match rustix::fs::flock(file.fd()?, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK) if left > 0 => {
                    let _ = rustix::thread::nanosleep(&LOCK_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(error) => return Err(error),
            }
        }
        Err(Errno::BUSY)
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
        self.lock()?.remove_if_stale(name)
    }

    /// As [`Rack::remove_if_stale`], for those who must not wait for the lock.
    ///
    /// # Errors
    /// As there; `BUSY` at once.
    pub fn remove_if_stale_unless_locked(&self, name: &ListenerName) -> Result<bool, Errno> {
        self.lock_within(1)?.remove_if_stale(name)
    }

    /// Whether a path in an AF_UNIX address leads into this directory.
    pub fn holds(&self, path: &[u8]) -> bool {
        let folder = path.rsplitn(2, |byte| *byte == b'/').nth(1).unwrap_or_default();
        folder == self.path.as_os_str().as_bytes() || folder.starts_with(b"/proc/self/fd/")
    }
}

/// The right to make and remove names, until dropped.
#[derive(Debug)]
pub struct RackLock<'a> {
    rack: &'a Rack,
    file: Option<OwnedFd>,
}

impl RackLock<'_> {
    fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.file.as_ref().map(AsFd::as_fd).ok_or(Errno::BADF)
    }

    /// As [`Rack::remove_if_stale`].
    ///
    /// # Errors
    /// What socket, connect and unlink answer.
    pub fn remove_if_stale(&self, name: &ListenerName) -> Result<bool, Errno> {
        match self.rack.is_live(name) {
            Ok(true) => Ok(false),
            // No such file may also be said of a link that leads nowhere.
            Ok(false) | Err(Errno::NOENT) => {
                match rustix::fs::unlinkat(self.fd()?, name.to_string(), AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => Ok(true),
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// A free name for a listener on this address, after stale ones have been removed.
    ///
    /// # Errors
    /// `ADDRINUSE` when a live listener does not share the address.
    pub fn free_name(&self, address: SocketAddr, v6_only: bool, shared: bool) -> Result<ListenerName, Errno> {
        let plain = ListenerName::new(address, v6_only, None);
        let mut taken = [false; MEMBERS_MAX as usize];
        for name in self.rack.names(|name| name.same_place(&plain))? {
            let gone = self.remove_if_stale(&name)?;
            match name.member {
                _ if gone => {}
                Some(member) if shared => taken[usize::from(member)] = true,
                _ => return Err(Errno::ADDRINUSE),
            }
        }
        if !shared {
            return Ok(plain);
        }
        let member = taken.iter().position(|taken| !taken).ok_or(Errno::ADDRINUSE)?;
        Ok(ListenerName::new(address, v6_only, Some(member as u8)))
    }

    /// Binds a socket to a free name. Only the directory's rights decide who may connect, whatever the program's umask
    /// is.
    ///
    /// # Errors
    /// What bind and chmod answer.
    pub fn bind(&self, socket: BorrowedFd<'_>, name: &ListenerName) -> Result<(), Errno> {
        rustix::net::bind(socket, &self.rack.address_of(name)?)?;
        rustix::fs::chmodat(self.fd()?, name.to_string(), Mode::RUSR | Mode::WUSR, AtFlags::empty())
    }
}

impl Drop for RackLock<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            close(file);
        }
    }
}

/// Opens `name` in `parent`, which is closed, and adds it to the path.
fn open_within(parent: OwnedFd, name: &str, path: &mut PathBuf, uid: u32) -> Result<OwnedFd, Errno> {
    let directory = open_private(parent.as_fd(), name.as_bytes(), uid);
    close(parent);
    path.push(name);
    directory
}

/// Opens a directory, made if missing, that is a real one, the user's own, and closed to everybody else.
fn open_private(parent: BorrowedFd<'_>, name: &[u8], uid: u32) -> Result<OwnedFd, Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        // The umask may have taken rights from the user itself.
        Ok(()) => rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty())?,
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::{UnixDatagram, UnixListener};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory that nobody else has, gone when dropped.
    pub(crate) struct Scratch(pub(crate) PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("crosslane-test-{}-{number}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Self(path)
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

    /// Leaves a name whose socket is closed, as a killed server does.
    fn leave_stale(rack: &Rack, text: &str) {
        drop(UnixListener::bind(rack.path().join(text)).unwrap());
    }

    #[test]
    fn directories_are_made_private() {
        let scratch = Scratch::new();
        let rack = scratch.rack();
        for path in [rack.path(), &scratch.0.join("rack"), &scratch.0.join("rack/v2")] {
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700, "{}", path.display());
        }
        let netns = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        assert_eq!(rack.path(), scratch.0.join(format!("rack/v2/net-{netns}")));
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
        let version = scratch.0.join("rack/v2");
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
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
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
        }
        let far = ListenerName::far(address("127.77.0.2:80"));
        assert_eq!(far.to_string(), "127.77.0.2:80!far");
        assert_eq!(ListenerName::parse("127.77.0.2:80!far"), Some(far));
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
    fn a_listing_holds_the_names_and_not_the_rubbish() {
        let scratch = Scratch::new();
        let rack = scratch.rack();
        for entry in ["127.0.0.1:80", "0.0.0.0:80#1", "[::]:81", "rubbish", "127.0.0.1:x"] {
            std::fs::write(rack.path().join(entry), "").unwrap();
        }
        let mut names: Vec<_> =
            rack.names(|name| name.address.port() == 80).unwrap().iter().map(ToString::to_string).collect();
        names.sort();
        assert_eq!(names, ["0.0.0.0:80#1", "127.0.0.1:80"]);
    }

    #[test]
    fn a_name_is_live_while_a_socket_stands_behind_it_and_a_probe_leaves_no_trace() {
        let _no_child = crate::forks::none();
        let scratch = Scratch::new();
        let rack = scratch.rack();
        let listener = UnixListener::bind(rack.path().join("127.0.0.1:80")).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(rack.is_live(&name("127.0.0.1:80")), Ok(true));
        assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80")), Ok(false));
        drop(listener);
        assert_eq!(rack.is_live(&name("127.0.0.1:80")), Ok(false));
        assert_eq!(rack.remove_if_stale(&name("127.0.0.1:80")), Ok(true));
        assert_eq!(rack.is_live(&name("127.0.0.1:80")), Err(Errno::NOENT));
        let _datagram = UnixDatagram::bind(rack.path().join("127.0.0.1:81")).unwrap();
        assert_eq!(rack.is_live(&name("127.0.0.1:81")), Ok(true));
    }

    #[test]
    fn stale_names_are_free_and_live_ones_only_for_those_who_share() {
        let _no_child = crate::forks::none();
        let scratch = Scratch::new();
        let rack = scratch.rack();
        let address: SocketAddr = "127.0.0.1:80".parse().unwrap();
        leave_stale(&rack, "127.0.0.1:80");
        leave_stale(&rack, "127.0.0.1:80#0");
        symlink("/no/such/target", rack.path().join("127.0.0.1:80#1")).unwrap();
        let free = |shared| rack.lock().unwrap().free_name(address, false, shared).map(|name| name.to_string());
        assert_eq!(free(false).unwrap(), "127.0.0.1:80");
        assert_eq!(free(true).unwrap(), "127.0.0.1:80#0");
        assert!(!rack.path().join("127.0.0.1:80#1").is_symlink());
        let _member = UnixListener::bind(rack.path().join("127.0.0.1:80#0")).unwrap();
        assert_eq!(free(true).unwrap(), "127.0.0.1:80#1");
        assert_eq!(free(false), Err(Errno::ADDRINUSE));
        let _plain = UnixListener::bind(rack.path().join("127.0.0.1:80")).unwrap();
        assert_eq!(free(true), Err(Errno::ADDRINUSE));
    }

    #[test]
    fn one_at_a_time_holds_the_lock_and_a_stopped_holder_is_not_waited_for_for_ever() {
        let _no_child = crate::forks::none();
        let scratch = Scratch::new();
        let rack = scratch.rack();
        let held = rack.lock().unwrap();
        assert_eq!(rack.lock().unwrap_err(), Errno::BUSY);
        drop(held);
        assert!(rack.lock().is_ok());
    }

    #[test]
    fn a_path_too_long_for_a_socket_address_is_reached_through_the_descriptor() {
        let scratch = Scratch::new();
        let long = scratch.0.join("x".repeat(120));
        let rack = Rack::open(&long).unwrap();
        let name = name("[2001:1db8:1111:2222:3333:4444:5555:6666]:65535#63");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rack.lock().unwrap().bind(socket.as_fd(), &name).unwrap();
        assert!(rack.path().join(name.to_string()).exists());
        assert_eq!(rack.is_live(&name), Ok(true));
    }
}
