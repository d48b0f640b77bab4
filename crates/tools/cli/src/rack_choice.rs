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

/// A rack, and where its sockets, logs and directories lie.
#[derive(Clone, Debug)]
pub struct LoadedRack {
    /// What the file says, or etcd.
    pub file: RackFile,
    /// Where everything lies.
    pub places: RunDir,
    /// Where in etcd it is, unless it is a file.
    pub etcd: Option<EtcdRack>,
}

/// A rack's place in etcd.
#[derive(Clone, Debug)]
pub struct EtcdRack {
    store: RackStore,
    /// What was found there; nothing where etcd does not answer, and the rack is what its nodes last went by.
    pub found: Option<FoundRack>,
}

/// What was found in etcd beside the rack.
#[derive(Clone, Debug)]
pub struct FoundRack {
    /// Who runs which node.
    pub leases: BTreeMap<String, LeaseValue>,
    revision: Revision,
}

/// What `--rack` names.
#[derive(Debug)]
pub enum Chosen {
    /// The directory in which programs meet.
    Directory(PathBuf),
    /// A rack file, or a rack in etcd.
    File(Box<LoadedRack>),
}

impl Chosen {
    /// What was given, or what the environment says: that is a directory always. One that is named must be there.
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

    /// The directories in which programs meet: one for each node of a rack file.
    pub fn directories(&self) -> Vec<PathBuf> {
        match self {
            Self::Directory(directory) => vec![directory.clone()],
            Self::File(rack) => {
                let names = rack.file.rack.nodes.iter().map(|node| &node.name);
                names.map(|name| rack.places.node(name).directory).collect()
            }
        }
    }
}

impl Chosen {
    /// What people call the node that has this address: by the rack file, if there is one.
    pub fn node_name(&self, address: IpAddr) -> String {
        let named = match self {
            Self::Directory(_) => None,
            Self::File(rack) => rack.file.rack.nodes.iter().find(|node| node.address == address),
        };
        named.map_or_else(|| stats_page::node_name(address), |node| node.name.clone())
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(directory) => directory.display().fmt(formatter),
            Self::File(rack) => rack.shown().fmt(formatter),
        }
    }
}

/// A name that ends like a rack file's is never made into a directory.
fn is_rack_file(path: &Path) -> bool {
    path.is_file() || (!path.is_dir() && path.extension().is_some_and(|extension| extension == "toml"))
}

/// What a name is that is meant as an address.
pub fn address(path: &Path) -> Result<Option<EtcdAddress>> {
    let text = path.to_string_lossy();
    let Some((scheme, rest)) = text.split_once("://") else { return Ok(None) };
    // A password is shown to nobody.
    let shown = if rest.contains('@') { format!("{scheme}://...") } else { text.to_string() };
    if !EtcdAddress::has_scheme(&text) {
        bail!(WrongUse::of(format!("{shown}: racks are files, or lie in etcd: write etcd://HOST:PORT/PREFIX")));
    }
    text.parse().map(Some).map_err(|what: String| WrongUse::of(format!("{shown}: {what}")).into())
}

/// The absolute path of a file without links; of one that is gone, by its folder.
fn canonical(file: &Path) -> Option<PathBuf> {
    let by_folder = || {
        let absolute = std::path::absolute(file).ok()?;
        Some(std::fs::canonicalize(absolute.parent()?).ok()?.join(absolute.file_name()?))
    };
    std::fs::canonicalize(file).ok().or_else(by_folder)
}

/// What lies in etcd is input as a file is, and so are files for TLS; all else that goes wrong there is no wrong use.
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
        let base = RunDir::base(&rack_dir::chosen(None));
        let places = RunDir::new(&base, &file.rack, &canonical);
        Ok(Self { file, places, etcd: None })
    }

    /// Makes a directory of the rack, where no other user can meddle with it.
    pub fn prepare(&self, directory: &Path) -> Result<()> {
        let base = RunDir::base(&rack_dir::chosen(None));
        rack_dir::prepare_below(&base, directory)
    }

    fn read_etcd(address: EtcdAddress) -> Result<Self, EtcdError> {
        let store = RackStore::new(address);
        let StoredRack { file, leases, revision } = store.load()?;
        let base = RunDir::base(&rack_dir::chosen(None));
        let places = RunDir::new(&base, &file.rack, file.shown().as_ref());
        let etcd = Some(EtcdRack { store, found: Some(FoundRack { leases, revision }) });
        Ok(Self { file, places, etcd })
    }

    /// The same for commands about nodes that may run: by what they went by last, if etcd is away or holds nonsense, or
    /// if the file is another one by now.
    pub fn read_running(path: &Path) -> Result<Self> {
        let Some(address) = address(path)? else { return Self::read_running_file(path) };
        let error = match Self::read_etcd(address.clone()) {
            Ok(rack) => return Ok(rack),
            Err(error) => error,
        };
        let Some(copy) = Self::copies(&address)?.into_iter().next() else { return Err(etcd_error(error)) };
        eprintln!("crosslane: {error} (shown is what the nodes of this machine go by)");
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
        eprintln!("crosslane: {what} (shown is what the nodes of this machine go by)");
        Ok(running)
    }

    /// What was started on this machine: whatever etcd or the file says by now, as its nodes go by it.
    pub fn read_started(path: &Path) -> Result<Vec<Self>> {
        let copies = match address(path)? {
            Some(address) => Self::copies(&address)?,
            None => Self::file_copies(path),
        };
        if copies.is_empty() { Self::read(path).map(|rack| vec![rack]) } else { Ok(copies) }
    }

    /// Racks of this machine that were brought up from a file, as it was then.
    pub fn file_copies(path: &Path) -> Vec<Self> {
        let base = RunDir::base(&rack_dir::chosen(None));
        let copy = |places: RunDir| {
            let file = RackFile::read(&places.copy()).ok()?.shown_as(path.display().to_string());
            Some(Self { file, places, etcd: None })
        };
        let canonical = canonical(path);
        canonical.map_or_else(Vec::new, |file| RunDir::with_copy(&base, &file).into_iter().filter_map(copy).collect())
    }

    /// The same rack as nodes of this machine go by it that run; `None` also for one in etcd, whose monitors follow it.
    pub fn running(&self) -> Option<Self> {
        let is_file = self.etcd.is_none();
        is_file.then(|| Self::file_copies(Path::new(self.shown()))).into_iter().flatten().find(Self::runs)
    }

    /// Leaves what the nodes of this machine go by: the file may change. That of a rack in etcd its monitors see to.
    pub fn write_copy(&self) -> Result<()> {
        if self.etcd.is_some() {
            return Ok(());
        }
        let copy = self.places.copy();
        std::fs::write(&copy, self.file.rack.to_string()).with_context(|| format!("writing '{}'", copy.display()))
    }

    /// Whether a monitor of it runs on this machine, or a proxy that waits for the next.
    pub fn runs(&self) -> bool {
        self.file.rack.nodes.iter().map(|node| self.places.node(&node.name)).any(|node| {
            let heir = || Process::behind(&node.successor_socket(), SocketType::SEQPACKET);
            Process::holding(&node.monitor_pid()).or_else(heir).is_some()
        })
    }

    /// Racks of this machine that have come from an address in etcd, from their nodes' copies.
    fn copies(address: &EtcdAddress) -> Result<Vec<Self>> {
        let shown = address.to_string();
        let base = RunDir::base(&rack_dir::chosen(None));
        let copies = RunDir::with_copy(&base, shown.as_ref()).into_iter().map(|places| {
            let file = RackFile::read(&places.copy()).map_err(WrongUse::of)?.shown_as(shown.clone());
            let etcd = Some(EtcdRack { store: RackStore::new(address.clone()), found: None });
            Ok(Self { file, places, etcd })
        });
        copies.collect()
    }

    /// What another command is to be given to read the same.
    pub fn argument(&self) -> Result<OsString> {
        match &self.etcd {
            Some(_) => Ok(self.shown().into()),
            None => Ok(std::fs::canonicalize(self.shown()).with_context(|| self.shown().to_owned())?.into()),
        }
    }

    /// What a monitor has to know of etcd.
    pub fn in_etcd(&self) -> Option<EtcdSource> {
        let EtcdRack { store, found } = self.etcd.as_ref()?;
        Some(EtcdSource { store: store.clone(), revision: found.as_ref()?.revision })
    }

    /// The file's path as it was given, or the address in etcd.
    pub fn shown(&self) -> &str {
        self.file.shown()
    }

    /// That the monitor of a node answers: without it the node's programs meet only each other.
    pub fn check_up(&self, node: &str) -> Result<()> {
        let socket = self.places.node(node).monitor_socket();
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

    /// That programs started here and a node that runs have one clock, where a modelled link goes by it: times of the
    /// one would be far in the past or the future of the other, and what is sent be there at once or never.
    pub fn check_clock(&self, node: &str) -> Result<()> {
        if self.file.rack.link.is_none() {
            return Ok(());
        }
        let Some(status) = rack_control::status(&self.places.node(node))? else { return Ok(()) };
        let clock = |process: &str| std::fs::read_link(format!("/proc/{process}")).ok();
        // What a program has that this command becomes or starts.
        let own = clock("self/ns/time_for_children");
        let nodes = clock(&format!("{}/ns/time", status.pid));
        if nodes.is_none() || own == nodes {
            return Ok(());
        }
        let remedy = "start it in the time namespace of 'crosslane up', or remove [link]";
        let what = format!("the clock here is not that of node '{node}', and modelled links go by it; {remedy}");
        bail!(WrongUse::of(self.file.error_at("link.timing", what)))
    }

    /// The slot of the node of that name.
    pub fn slot(&self, name: &str) -> Result<usize> {
        if let Some((slot, _)) = self.file.rack.node(name) {
            return Ok(slot);
        }
        let names: Vec<&str> = self.file.rack.nodes.iter().map(|node| node.name.as_str()).collect();
        let names = names.join(", ");
        bail!(WrongUse::of(format!("node '{name}' is not in {}; choose one of {names} with --node", self.shown())))
    }
}
