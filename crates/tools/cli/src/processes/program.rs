//! One program as `/proc` shows it.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use procfs::process::{FDTarget, LimitValue, MMapPath, Process};
use procfs::{Current, ProcResult};
use socket::descriptor::hidden;
use socket::process::settings::Settings;
use stats_page::FallbackReason;
use stats_page::reader::{self, Connection, PageError};

use crate::elf::{self, Kind};
use crate::rack_dir;
use crate::rack_dir::shared::{self, SharedView};

/// The name of the library's file.
const LIBRARY: &str = "libcrosslane.so";
/// The release of this command.
const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// What the kernel appends to the path of a mapped file that was removed.
const DELETED: &str = " (deleted)";
/// `AT_SECURE` of the auxiliary vector: the loader ignores LD_PRELOAD (getauxval(3)).
const AT_SECURE: u64 = 23;
/// `O_ASYNC` of `asm-generic/fcntl.h`.
const O_ASYNC: u32 = 0o20000;
/// The controller whose cgroup is named, where there is no cgroup of version 2.
const CONTROLLER: &str = "memory";

/// A running program.
#[derive(Debug)]
pub struct Program {
    /// Its process number in the namespace of this command.
    pub pid: i32,
    /// The name that it publishes, or else that of its file or of the kernel.
    pub name: String,
    /// Its effective user.
    pub uid: u32,
    /// The inode of its network namespace.
    pub namespace: u64,
    /// Its control group.
    pub cgroup: Option<String>,
    /// The inodes of its sockets, by descriptor.
    pub sockets: BTreeMap<i32, u64>,
    /// Crosslane's library, if it is loaded.
    pub library: Option<Library>,
    environment: HashMap<OsString, OsString>,
    page: Option<MappedPage>,
    is_unpublished: bool,
    /// What the page says about the sockets, by inode: descriptors may have been duplicated.
    recorded: HashMap<u64, Connection>,
    obstacle: OnceCell<Option<Obstacle>>,
    location: OnceCell<Option<Location>>,
}

/// Where a program meets others, as it sees the file system.
#[derive(Clone, Debug)]
struct Location {
    rack: PathBuf,
    /// Several users share the rack.
    is_shared: bool,
}

/// The library as a program has loaded it.
#[derive(Clone, Debug)]
pub struct Library {
    /// Its path as the program sees it.
    pub path: PathBuf,
    /// Its release; `None` if the file was replaced or removed, or cannot be read.
    pub release: Option<String>,
}

/// A statistics page that a program has mapped.
#[derive(Debug)]
struct MappedPage {
    rack: PathBuf,
    contents: Result<reader::Process, PageError>,
}

/// Why a program has no lanes at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Statically linked.
    Static,
    /// Built by the Go compiler.
    Go,
    /// Linked against another C library.
    OtherCLibrary,
    /// For another processor or word size.
    OtherArchitecture,
    /// The kernel runs it with more privileges than its user has.
    Privileged,
    /// LD_PRELOAD names the library, and the loader did not load it.
    LibraryMissing,
    /// Nothing names the library.
    NotLoaded,
    /// `CROSSLANE_OFF`.
    OffByVariable,
}

impl Program {
    /// Reads the state of a process.
    ///
    /// # Errors
    /// Those of `/proc`: the process may have ended, or belong to another user.
    pub fn read(process: &Process) -> ProcResult<Self> {
        let status = process.status()?;
        let mut sockets = BTreeMap::new();
        for descriptor in process.fd()?.flatten() {
            if let FDTarget::Socket(inode) = descriptor.target {
                sockets.insert(descriptor.fd, inode);
            }
        }
        let root = root_of(process.pid());
        let maps = process.maps()?;
        let environment = process.environ()?;
        let given = environment.get(OsStr::new("CROSSLANE_RACK")).map(Path::new);
        let mapped = || {
            maps.iter().filter_map(|map| match &map.pathname {
                MMapPath::Path(path) => Some(path.as_path()),
                _ => None,
            })
        };
        let library = mapped().find(|path| is_library(path)).map(|path| Library {
            path: without_mark(path),
            release: if is_deleted(path) { None } else { elf::release(&within(&root, path)) },
        });
        let page = mapped().find_map(|path| MappedPage::new(path, &root, given));
        let is_unpublished = page.is_none() && mapped().any(is_mark_of_unpublished);
        let contents = page.as_ref().and_then(|page| page.contents.as_ref().ok());
        let entries = contents.into_iter().flat_map(|page| &page.connections);
        let recorded: HashMap<u64, Connection> =
            entries.filter_map(|entry| Some((*sockets.get(&entry.fd)?, entry.clone()))).collect();
        leave_out_hidden(&mut sockets, &recorded, process);
        let published = contents.map(|page| page.program.clone());
        Ok(Self {
            pid: process.pid(),
            name: published.unwrap_or_else(|| printable(&name(process, &status.name))),
            uid: status.euid,
            namespace: network_namespace(process)?,
            cgroup: cgroup(process),
            sockets,
            library,
            environment,
            page,
            is_unpublished,
            recorded,
            obstacle: OnceCell::new(),
            location: OnceCell::new(),
        })
    }

    /// Returns why the program has no lanes at all. `None` if the library is loaded and active.
    pub fn obstacle(&self) -> Option<Obstacle> {
        *self.obstacle.get_or_init(|| self.find_obstacle())
    }

    fn find_obstacle(&self) -> Option<Obstacle> {
        let kind = elf::inspect(Path::new(&format!("/proc/{}/exe", self.pid)));
        if matches!(kind, Ok(Kind::Go)) {
            return Some(Obstacle::Go);
        }
        if self.library.is_some() {
            let off = self.variable("CROSSLANE_OFF").and_then(|value| stats_page::switch(value.as_bytes()));
            return (off == Some(true)).then_some(Obstacle::OffByVariable);
        }
        Some(match kind {
            Ok(Kind::Static) => Obstacle::Static,
            Ok(Kind::OtherLoader(_)) => Obstacle::OtherCLibrary,
            Ok(Kind::OtherMachine) => Obstacle::OtherArchitecture,
            _ if self.is_secure() => Obstacle::Privileged,
            _ if self.variable("LD_PRELOAD").is_some_and(names_library) => Obstacle::LibraryMissing,
            _ => Obstacle::NotLoaded,
        })
    }

    fn is_secure(&self) -> bool {
        let vector = Process::new(self.pid).and_then(|process| process.auxv());
        vector.is_ok_and(|vector| vector.get(&AT_SECURE).is_some_and(|value| *value != 0))
    }

    /// Returns an environment variable that the program was started with, unless it is empty.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// Returns for how long the program has run; zero if it has ended.
    pub fn running_time(&self) -> Duration {
        let started = Process::new(self.pid).and_then(|process| process.stat()).map(|stat| stat.starttime);
        let since_boot = procfs::Uptime::current().map(|uptime| uptime.uptime_duration());
        let (Ok(started), Ok(since_boot)) = (started, since_boot) else { return Duration::ZERO };
        since_boot.saturating_sub(Duration::from_millis(started.saturating_mul(1000) / procfs::ticks_per_second()))
    }

    /// Returns what the program publishes about its connections.
    pub fn page(&self) -> Option<&reader::Process> {
        self.page.as_ref().and_then(|page| page.contents.as_ref().ok())
    }

    /// Returns whether the program has a page, readable or not.
    pub fn has_page(&self) -> bool {
        self.page.is_some()
    }

    /// Returns whether the program's library is active, but could not create a page in a rack directory that it uses.
    pub fn is_unpublished(&self) -> bool {
        let is_usable = |rack: PathBuf| rack_dir::is_usable(&self.seen_from_here(&rack), self.uid);
        self.is_unpublished && self.rack().is_some_and(is_usable)
    }

    /// Returns whether the program's library is of another release, so that what it does is not known.
    pub fn is_of_other_release(&self) -> bool {
        match &self.page {
            Some(page) => matches!(page.contents, Err(PageError::Version { .. } | PageError::Layout)),
            None => {
                self.library.as_ref().and_then(|library| library.release.as_deref()).is_some_and(|it| it != RELEASE)
            }
        }
    }

    /// Returns the settings of the program's library, which it has read from the environment.
    pub fn settings(&self) -> Settings {
        Settings::from_variables(|name| self.variable(name).map(OsStr::to_owned))
    }

    /// Returns whether the program has written something else over its variables, such as its title in the list of
    /// processes (Redis, nginx, PostgreSQL): what it was given is unknown then.
    pub fn has_overwritten_environment(&self) -> bool {
        ["LD_PRELOAD", "PATH", "HOME"].iter().all(|name| !self.environment.contains_key(OsStr::new(name)))
    }

    /// Returns whether the program has an active library and no page.
    pub fn has_idle_library(&self) -> bool {
        self.library.is_some() && self.page.is_none() && self.obstacle().is_none()
    }

    /// Returns whether the program was given a rack directory, so that the library does not create it.
    pub fn names_rack(&self) -> bool {
        self.variable("CROSSLANE_RACK").is_some()
    }

    /// Returns whether a descriptor raises signals (`O_ASYNC`), as `proc_pid_fdinfo(5)` shows.
    pub fn raises_signals(&self, fd: i32) -> bool {
        let text = std::fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", self.pid)).unwrap_or_default();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        flags.is_some_and(|flags| flags & O_ASYNC != 0)
    }

    /// Returns what the program publishes about the socket with an inode.
    pub fn recorded(&self, inode: u64) -> Option<&Connection> {
        self.recorded.get(&inode)
    }

    /// Returns the rack directory of the program, as it sees the file system, if its library is active.
    pub fn rack(&self) -> Option<PathBuf> {
        self.location().map(|location| location.rack.clone())
    }

    /// Returns its rack if several users share that.
    pub fn shared_rack(&self) -> Option<SharedView> {
        let location = self.location().filter(|location| location.is_shared)?;
        SharedView::of(&self.seen_from_here(&location.rack)).ok().flatten()
    }

    fn location(&self) -> Option<&Location> {
        self.location.get_or_init(|| self.find_location()).as_ref()
    }

    fn find_location(&self) -> Option<Location> {
        let is_shared = |rack: &Path| matches!(SharedView::of(&self.seen_from_here(rack)), Ok(Some(_)));
        if let Some(page) = self.page.as_ref().filter(|_| self.variable("CROSSLANE_STATS").is_none()) {
            // In a shared rack, the page is in the directory of the user.
            let of_user = page.rack.file_name().and_then(OsStr::to_str).and_then(shared::number);
            let above = of_user.and_then(|_| page.rack.parent()).filter(|above| is_shared(above));
            let rack = above.unwrap_or(&page.rack).to_owned();
            return Some(Location { rack, is_shared: above.is_some() });
        }
        let variable = |name: &str| self.variable(name).map(OsStr::to_owned);
        self.library.as_ref().filter(|_| self.obstacle().is_none() && !self.has_overwritten_environment())?;
        let rack = stats_page::rack_dir(variable, self.uid);
        Some(Location { is_shared: is_shared(&rack), rack })
    }

    /// Returns the device and inode of its rack directory.
    pub fn rack_identity(&self) -> Option<(u64, u64)> {
        folder_identity(&self.seen_from_here(&self.rack()?))
    }

    /// Returns the path by which this command reaches a file that the program sees at `path`.
    pub fn seen_from_here(&self, path: &Path) -> PathBuf {
        within(&root_of(self.pid), path)
    }

    /// Returns whether the descriptor is a TCP socket. The kernel's list lacks sockets that are not bound.
    pub fn is_tcp(&self, fd: i32) -> bool {
        let mut name = [0u8; 16];
        let path = format!("/proc/{}/fd/{fd}", self.pid);
        let length = rustix::fs::getxattr(path, c"system.sockprotoname", &mut name).unwrap_or(0);
        let name = name[..length.min(16)].split(|byte| *byte == 0).next().unwrap_or_default();
        [&b"TCP"[..], b"TCPv6", b"MPTCP", b"MPTCPv6"].contains(&name)
    }
}

impl MappedPage {
    /// Reads the page if the path of a mapping is that of one. `given` is the rack directory that the program was
    /// given.
    fn new(path: &Path, root: &Path, given: Option<&Path>) -> Option<Self> {
        let folder = path.parent().filter(|folder| folder.ends_with(stats_page::STAT_FOLDER))?;
        let mut rack = folder.ancestors().nth(Path::new(stats_page::STAT_FOLDER).components().count())?.to_owned();
        // A program that has changed its root directory reaches a shared rack by a mount of its own, below which the
        // kernel shows its paths.
        if let Some(given) = given.filter(|_| rack.parent() == Some(Path::new("/"))) {
            rack = given.join(rack.strip_prefix("/").unwrap_or(&rack));
        }
        let page = rack.join(stats_page::STAT_FOLDER).join(path.file_name()?);
        Some(Self { rack, contents: reader::read_file(&within(root, &page)) })
    }
}

/// Removes the library's own descriptors of connections that the program has duplicated: those with high numbers. The
/// program's first descriptor of a connection stays, whatever its number.
fn leave_out_hidden(sockets: &mut BTreeMap<i32, u64>, recorded: &HashMap<u64, Connection>, process: &Process) {
    let Ok(limits) = process.limits() else { return };
    let first_hidden = hidden::first_number_under(match limits.max_open_files.soft_limit {
        LimitValue::Value(limit) => limit,
        LimitValue::Unlimited => u64::MAX,
    });
    let mut seen = HashSet::new();
    sockets.retain(|fd, inode| {
        let is_first = seen.insert(*inode);
        is_first || (*fd as u64) < first_hidden || !recorded.contains_key(inode)
    });
}

/// Returns why settings keep a connection on kernel TCP by the port of its server, if they do.
pub fn exclusion(settings: &Settings, port: Option<u16>) -> Option<FallbackReason> {
    if settings.honours_filters {
        return Some(FallbackReason::PacketFilters);
    }
    port.is_some_and(|port| !settings.applies_to(port)).then_some(FallbackReason::PortRule)
}

/// Returns the inode of a process's network namespace.
pub fn network_namespace(process: &Process) -> ProcResult<u64> {
    let namespaces = process.namespaces()?;
    let found = namespaces.0.get(OsStr::new("net")).map(|namespace| namespace.identifier);
    found.ok_or(procfs::ProcError::NotFound(None))
}

/// Returns the device and inode of a directory.
pub fn folder_identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().filter(Metadata::is_dir).map(|found| (found.dev(), found.ino()))
}

/// Returns the name of a user, or its number if it has no name.
pub fn user_name(uid: u32) -> String {
    let user = nix::unistd::User::from_uid(uid.into()).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

fn cgroup(process: &Process) -> Option<String> {
    let groups = process.cgroups().ok()?;
    let unified = groups.0.iter().find(|group| group.hierarchy == 0);
    let of_controller = || groups.0.iter().find(|group| group.controllers.iter().any(|name| name == CONTROLLER));
    unified
        .filter(|group| group.pathname != "/")
        .or_else(of_controller)
        .or(unified)
        .map(|group| printable(&group.pathname))
}

/// Returns the name of a process: that of its file, if the kernel's name is a part of it.
fn name(process: &Process, of_kernel: &str) -> String {
    let file =
        process.exe().ok().and_then(|path| Some(without_mark(&path).file_name()?.to_string_lossy().into_owned()));
    file.filter(|file| file.starts_with(of_kernel)).unwrap_or_else(|| of_kernel.to_owned())
}

/// Replaces control characters, which could manipulate a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { '\u{fffd}' } else { character }).collect()
}

fn is_mark_of_unpublished(path: &Path) -> bool {
    let name = without_mark(path);
    name.to_str().and_then(|name| name.strip_prefix("/memfd:")) == Some(stats_page::UNPUBLISHED_NAME)
}

fn is_library(path: &Path) -> bool {
    without_mark(path).file_name().is_some_and(|name| name == LIBRARY)
}

fn names_library(list: &OsStr) -> bool {
    list.as_bytes()
        .split(|byte| matches!(byte, b':' | b' '))
        .any(|entry| is_library(Path::new(OsStr::from_bytes(entry))))
}

fn is_deleted(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(DELETED.as_bytes())
}

fn without_mark(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(DELETED.as_bytes()).unwrap_or(bytes)))
}

/// Returns the path by which this command reaches the root of a process's mount namespace: the process itself may have
/// changed its root directory since it has read paths.
fn root_of(pid: i32) -> PathBuf {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let changed = std::fs::read_link(&root).unwrap_or_default();
    changed.components().filter(|component| matches!(component, Component::Normal(_))).fold(root, |it, _| it.join(".."))
}

/// Returns an absolute path below another root.
fn within(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_a_program_without_the_library() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let program = Program::read(&Process::myself().unwrap()).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&listener);
        assert!(program.sockets.contains_key(&fd) && program.is_tcp(fd));
        assert_eq!(program.obstacle(), Some(Obstacle::NotLoaded));
        assert!(program.library.is_none() && program.page().is_none() && program.rack().is_none());
        assert_eq!(program.uid, rustix::process::geteuid().as_raw());
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let stream = std::os::fd::AsRawFd::as_raw_fd(&stream);
        assert!(!program.is_tcp(stream), "a UNIX socket");
    }

    #[test]
    fn the_library_is_found_in_lists_and_in_maps() {
        assert!(names_library(OsStr::new("/a.so:/usr/$LIB/../libcrosslane.so")));
        assert!(names_library(OsStr::new("libcrosslane.so /b.so")));
        assert!(!names_library(OsStr::new("/a.so:/crosslane.so")));
        assert!(is_library(Path::new("/usr/lib/libcrosslane.so (deleted)")));
        assert!(is_deleted(Path::new("/x (deleted)")) && !is_deleted(Path::new("/x")));
        assert_eq!(within(Path::new("/proc/7/root"), Path::new("/a/b")), Path::new("/proc/7/root/a/b"));
    }
}
