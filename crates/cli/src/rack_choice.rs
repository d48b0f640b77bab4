//! What `--rack` names: a rack file, or the directory in which programs meet.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use rack::{Places, RackFile};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::rack_dir;
use crate::wrong_use::WrongUse;

/// A rack file, and where its sockets, logs and directories lie.
#[derive(Clone, Debug)]
pub struct LoadedRack {
    /// What the file says.
    pub file: RackFile,
    /// Where everything lies.
    pub places: Places,
}

/// What `--rack` names.
#[derive(Debug)]
pub enum Chosen {
    /// The directory in which programs meet.
    Directory(PathBuf),
    /// A rack file.
    File(Box<LoadedRack>),
}

impl Chosen {
    /// What was given, or what the environment says: that is a directory always.
    pub fn new(given: Option<&Path>) -> Result<Self> {
        match given {
            Some(path) if path.to_string_lossy().contains("://") => {
                let shown = path.display();
                bail!(WrongUse::of(format!("--rack {shown}: racks are read from files only; give the path of one")))
            }
            Some(path) if is_rack_file(path) => LoadedRack::read(path).map(|rack| Self::File(Box::new(rack))),
            _ => Ok(Self::Directory(rack_dir::chosen(given))),
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

impl LoadedRack {
    /// Reads a rack file.
    pub fn read(path: &Path) -> Result<Self> {
        let file = RackFile::read(path).map_err(WrongUse::of)?;
        let canonical = std::fs::canonicalize(path).map_err(|error| {
            let path = path.display();
            WrongUse::of(format!("{path}: {error}; check --rack"))
        })?;
        let base = Places::base(&rack_dir::chosen(None));
        let places = Places::new(&base, &file.rack, &canonical);
        Ok(Self { file, places })
    }

    /// Makes a directory of the rack, where no other user can meddle with it.
    pub fn prepare(&self, directory: &Path) -> Result<()> {
        let base = Places::base(&rack_dir::chosen(None));
        rack_dir::prepare_below(&base, directory)
    }

    /// The file's path as it was given.
    pub fn shown(&self) -> std::path::Display<'_> {
        self.file.path.display()
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
