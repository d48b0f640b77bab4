//! What `--rack` names: a rack file, a rack in etcd, or the directory in which programs meet.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ::monitor::EtcdSource;
use anyhow::{Context, Result, bail};
use etcd::{EtcdAddress, EtcdError, LeaseValue, RackStore, Revision, StoredRack};
use rack::{RackFile, RunDir};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::rack_control::{self, Process};
use crate::rack_dir;
use crate::wrong_use::WrongUse;

/// A rack, and the paths of its sockets, logs and directories.
#[derive(Clone, Debug)]
pub struct LoadedRack {
    /// The description, from a file or from etcd.
    pub file: RackFile,
    /// The directory of its sockets, logs and node directories.
    pub run_dir: RunDir,
    /// Its location in etcd; `None` for a rack from a file.
    pub etcd: Option<EtcdRack>,
}

/// The location of a rack in etcd.
#[derive(Clone, Debug)]
pub struct EtcdRack {
    store: RackStore,
    /// What was found there; `None` if etcd does not answer and the description is the one its nodes used last.
    pub found: Option<FoundRack>,
}

/// What etcd stores in addition to the description.
#[derive(Clone, Debug)]
pub struct FoundRack {
    /// Lease of each node that runs, by node name.
    pub leases: BTreeMap<String, LeaseValue>,
    revision: Revision,
}

/// What `--rack` names.
#[derive(Debug)]
pub enum RackChoice {
    /// The directory in which programs meet.
    Directory(PathBuf),
    /// A rack file, or a rack in etcd.
    File(Box<LoadedRack>),
}

impl RackChoice {
    /// Resolves the argument, or the environment if none is given, which always names a directory. A named directory
    /// must exist.
    pub fn new(given: Option<&Path>) -> Result<Self> {
        match given {
            Some(path) if is_rack_file(path) || address(path)?.is_some() => {
                LoadedRack::read_running(path).map(|rack| Self::File(Box::new(rack)))
            }
            _ => {
                rack_dir::check_named(given)?;
                Ok(Self::Directory(rack_dir::chosen(given)))
            }
        }
    }

    /// Returns the directories in which programs meet: one for each node of a rack file.
    pub fn directories(&self) -> Vec<PathBuf> {
        match self {
            Self::Directory(directory) => vec![directory.clone()],
            Self::File(rack) => {
                let names = rack.file.rack.nodes.iter().map(|node| &node.name);
                names.map(|name| rack.run_dir.node(name).directory).collect()
            }
        }
    }

    /// Returns the name of the node with this address, from the rack file if there is one.
    pub fn node_name(&self, address: IpAddr) -> String {
        let named = match self {
            Self::Directory(_) => None,
            Self::File(rack) => rack.file.rack.nodes.iter().find(|node| node.address == address),
        };
        named.map_or_else(|| stats_page::node_name(address), |node| node.name.clone())
    }
}

impl fmt::Display for RackChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(directory) => directory.display().fmt(formatter),
            Self::File(rack) => rack.shown().fmt(formatter),
        }
    }
}

/// Returns whether a path means a rack file. A path that ends in `.toml` and does not exist is not made a directory.
fn is_rack_file(path: &Path) -> bool {
    path.is_file() || (!path.is_dir() && path.extension().is_some_and(|extension| extension == "toml"))
}

/// Parses a URL of a rack in etcd. Returns `None` if `path` is not a URL.
pub fn address(path: &Path) -> Result<Option<EtcdAddress>> {
    let text = path.to_string_lossy();
    let Some((scheme, rest)) = text.split_once("://") else { return Ok(None) };
    // A URL with credentials is not printed.
    let shown = if rest.contains('@') { format!("{scheme}://...") } else { text.to_string() };
    if !EtcdAddress::has_scheme(&text) {
        bail!(WrongUse::of(format!("{shown}: a rack is a file or an address in etcd; write etcd://HOST:PORT/PREFIX")));
    }
    text.parse().map(Some).map_err(|what: String| WrongUse::of(format!("{shown}: {what}")).into())
}

/// Returns the absolute path of a file with symbolic links resolved; for a file that is gone, those of its folder.
fn canonical(file: &Path) -> Option<PathBuf> {
    let by_folder = || {
        let absolute = std::path::absolute(file).ok()?;
        Some(std::fs::canonicalize(absolute.parent()?).ok()?.join(absolute.file_name()?))
    };
    std::fs::canonicalize(file).ok().or_else(by_folder)
}

/// Classifies an error of etcd: an invalid rack and unusable TLS files are wrong use, as an invalid rack file is; all
/// others are failures.
pub fn etcd_error(error: EtcdError) -> anyhow::Error {
    match error {
        EtcdError::Rack(error) => WrongUse::of(error).into(),
        EtcdError::Tls { .. } => WrongUse::of(error).into(),
        other => other.into(),
    }
}

impl LoadedRack {
    /// Reads a rack file, or a rack in etcd.
    pub fn read(path: &Path) -> Result<Self> {
        if let Some(address) = address(path)? {
            return Self::read_etcd(address).map_err(etcd_error);
        }
        let file = RackFile::read(path).map_err(WrongUse::of)?;
        let canonical = std::fs::canonicalize(path).map_err(|error| {
            let path = path.display();
            WrongUse::of(format!("{path}: {error}; check --rack"))
        })?;
        let run_dir = RunDir::new(&rack_dir::base(), &file.rack, &canonical);
        Ok(Self { file, run_dir, etcd: None })
    }

    /// Creates a directory of the rack so that no other user can change or replace it.
    pub fn prepare(&self, directory: &Path) -> Result<()> {
        rack_dir::prepare_below(&rack_dir::base(), directory)
    }

    fn read_etcd(address: EtcdAddress) -> Result<Self, EtcdError> {
        let store = RackStore::new(address);
        let StoredRack { file, leases, revision } = store.load()?;
        let run_dir = RunDir::new(&rack_dir::base(), &file.rack, file.shown().as_ref());
        let etcd = Some(EtcdRack { store, found: Some(FoundRack { leases, revision }) });
        Ok(Self { file, run_dir, etcd })
    }

    /// Reads the rack for commands about running nodes. Returns the description that the nodes use if etcd does not
    /// answer or holds an invalid rack, or if the file has changed since.
    pub fn read_running(path: &Path) -> Result<Self> {
        let Some(address) = address(path)? else { return Self::read_running_file(path) };
        let error = match Self::read_etcd(address.clone()) {
            Ok(rack) => return Ok(rack),
            Err(error) => error,
        };
        let Some(copy) = Self::copies(&address)?.into_iter().next() else { return Err(etcd_error(error)) };
        eprintln!("crosslane: {error} (showing what the nodes of this machine use)");
        Ok(copy)
    }

    fn read_running_file(path: &Path) -> Result<Self> {
        let read = Self::read(path);
        let Some(running) = Self::file_copies(path).into_iter().find(Self::runs) else { return read };
        let what = match read {
            Ok(rack) if rack.file.rack == running.file.rack => return Ok(rack),
            Ok(rack) => format!("{} has changed since its nodes were brought up", rack.shown()),
            Err(error) => format!("{error:#}"),
        };
        eprintln!("crosslane: {what} (showing what the nodes of this machine use)");
        Ok(running)
    }

    /// Returns the racks that were brought up on this machine, as their nodes use them, whatever etcd or the file holds
    /// now. Reads the rack itself if none was brought up.
    pub fn read_started(path: &Path) -> Result<Vec<Self>> {
        let copies = match address(path)? {
            Some(address) => Self::copies(&address)?,
            None => Self::file_copies(path),
        };
        if copies.is_empty() { Self::read(path).map(|rack| vec![rack]) } else { Ok(copies) }
    }

    /// Returns the racks that were brought up from a file on this machine, as the file was then.
    pub fn file_copies(path: &Path) -> Vec<Self> {
        let copy = |run_dir: RunDir| {
            let file = RackFile::read(&run_dir.copy()).ok()?.shown_as(path.display().to_string());
            Some(Self { file, run_dir, etcd: None })
        };
        let canonical = canonical(path);
        canonical.map_or_else(Vec::new, |file| {
            RunDir::with_copy(&rack_dir::base(), &file).into_iter().filter_map(copy).collect()
        })
    }

    /// Returns this rack as the running nodes of this machine use it. `None` if none runs, and for a rack in etcd,
    /// whose monitors follow changes.
    pub fn running(&self) -> Option<Self> {
        let is_file = self.etcd.is_none();
        is_file.then(|| Self::file_copies(Path::new(self.shown()))).into_iter().flatten().find(Self::runs)
    }

    /// Writes a copy of the description that the nodes of this machine use, since the file may change. For a rack in
    /// etcd, the monitors write it.
    pub fn write_copy(&self) -> Result<()> {
        if self.etcd.is_some() {
            return Ok(());
        }
        let copy = self.run_dir.copy();
        std::fs::write(&copy, self.file.rack.to_string()).with_context(|| format!("writing '{}'", copy.display()))
    }

    /// Returns whether a monitor of the rack runs on this machine, or a proxy that waits for its next monitor.
    pub fn runs(&self) -> bool {
        self.file.rack.nodes.iter().map(|node| self.run_dir.node(&node.name)).any(|node| {
            let successor = || Process::listening_at(&node.successor_socket(), SocketType::SEQPACKET);
            Process::holding_lock(&node.monitor_pid()).or_else(successor).is_some()
        })
    }

    /// Reads the racks that were brought up from an address in etcd on this machine, from the copies of their nodes.
    fn copies(address: &EtcdAddress) -> Result<Vec<Self>> {
        let shown = address.to_string();
        let copies = RunDir::with_copy(&rack_dir::base(), shown.as_ref()).into_iter().map(|run_dir| {
            let file = RackFile::read(&run_dir.copy()).map_err(WrongUse::of)?.shown_as(shown.clone());
            let etcd = Some(EtcdRack { store: RackStore::new(address.clone()), found: None });
            Ok(Self { file, run_dir, etcd })
        });
        copies.collect()
    }

    /// Returns the `--rack` argument with which another process reads the same rack.
    pub fn argument(&self) -> Result<OsString> {
        match &self.etcd {
            Some(_) => Ok(self.shown().into()),
            None => Ok(std::fs::canonicalize(self.shown()).with_context(|| self.shown().to_owned())?.into()),
        }
    }

    /// Returns the store and revision that a monitor watches; `None` for a rack from a file.
    pub fn in_etcd(&self) -> Option<EtcdSource> {
        let EtcdRack { store, found } = self.etcd.as_ref()?;
        Some(EtcdSource { store: store.clone(), revision: found.as_ref()?.revision })
    }

    /// Returns the path of the file as it was given, or the address in etcd.
    pub fn shown(&self) -> &str {
        self.file.shown()
    }

    /// Checks that the monitor of a node runs: without it, programs of the node reach only each other.
    pub fn check_up(&self, node: &str) -> Result<()> {
        let socket = self.run_dir.node(node).monitor_socket();
        let file = self.shown();
        let asked = SocketAddrUnix::new(&socket).and_then(|address| {
            let probe = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            connect(&probe, &address)
        });
        match asked {
            Ok(()) => Ok(()),
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                bail!("node '{node}' of {file} is not up; start it with 'crosslane up --rack {file}'")
            }
            Err(error) => bail!("monitor of node '{node}' at {}: {error}; see 'crosslane status'", socket.display()),
        }
    }

    /// Checks that programs started here and a running node are in one time namespace if the rack models link timing.
    /// With different clocks, messages would become visible at once or never.
    pub fn check_clock(&self, node: &str) -> Result<()> {
        if self.file.rack.link.is_none() {
            return Ok(());
        }
        let Some(status) = rack_control::status(&self.run_dir.node(node))? else { return Ok(()) };
        let clock = |process: &str| std::fs::read_link(format!("/proc/{process}")).ok();
        // The namespace of the programs that this command executes or starts.
        let own = clock("self/ns/time_for_children");
        let nodes = clock(&format!("{}/ns/time", status.pid));
        if nodes.is_none() || own == nodes {
            return Ok(());
        }
        let remedy = "start it in the time namespace of 'crosslane up', or remove [link]";
        let what = format!("the clock here is not that of node '{node}', which modelled links need; {remedy}");
        bail!(WrongUse::of(self.file.error_at("link.timing", what)))
    }

    /// Returns the slot of the node with that name.
    pub fn slot(&self, name: &str) -> Result<usize> {
        if let Some((slot, _)) = self.file.rack.node(name) {
            return Ok(slot);
        }
        let names: Vec<&str> = self.file.rack.nodes.iter().map(|node| node.name.as_str()).collect();
        let names = names.join(", ");
        bail!(WrongUse::of(format!("node '{name}' is not in {}; choose one of {names} with --node", self.shown())))
    }
}
