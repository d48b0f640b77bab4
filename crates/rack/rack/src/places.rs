//! Where the sockets, logs and directories of a running rack lie.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::Rack;

/// The folder of all running racks of a user.
const RACKS: &str = "racks";
/// `BASE/racks/RACK/NODE`: how far a node's directory is below the base.
const NODE_DEPTH: usize = 3;

/// Where the files of a running rack lie on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The rack's directory.
    pub directory: PathBuf,
}

/// Where the files of one node lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlaces {
    /// The node's directory: the rack directory of its programs.
    pub directory: PathBuf,
}

impl Places {
    /// The places of a rack whose file is `file`, an absolute path without links or an address in etcd, below the base
    /// of all racks.
    pub fn new(base: &Path, rack: &Rack, file: &Path) -> Self {
        Self { directory: base.join(RACKS).join(rack.name.clone() + &ending(file)) }
    }

    /// The places below a base of running racks that were made from `file`, whatever their names are, and that have a
    /// copy of what it said.
    pub fn with_copy(base: &Path, file: &Path) -> Vec<Self> {
        let ending = ending(file);
        let found = std::fs::read_dir(base.join(RACKS)).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_of_it = |path: &PathBuf| path.as_os_str().as_bytes().ends_with(ending.as_bytes());
        found.filter(is_of_it).map(|directory| Self { directory }).filter(|places| places.copy().is_file()).collect()
    }

    /// What the nodes of this machine go by, as a rack file, where the rack is described elsewhere.
    pub fn copy(&self) -> PathBuf {
        self.directory.join("rack.toml")
    }

    /// The base of all racks when a program's own rack directory is `rack_dir`: a program that runs in a node finds the
    /// rack that its node belongs to.
    pub fn base(rack_dir: &Path) -> PathBuf {
        let base = rack_dir.ancestors().nth(NODE_DEPTH);
        let is_of_node = rack_dir.ancestors().nth(2).is_some_and(|racks| racks.ends_with(RACKS));
        base.filter(|_| is_of_node).unwrap_or(rack_dir).to_owned()
    }

    /// The places of a node.
    pub fn node(&self, name: &str) -> NodePlaces {
        NodePlaces { directory: self.directory.join(name) }
    }

    /// Where the device server listens.
    pub fn device_socket(&self) -> PathBuf {
        self.directory.join("device.sock")
    }

    /// What the device server says.
    pub fn device_log(&self) -> PathBuf {
        self.directory.join("device.log")
    }

    /// Held while the rack is brought up or down.
    pub fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }
}

impl NodePlaces {
    /// Where the monitor answers programs and commands.
    pub fn monitor_socket(&self) -> PathBuf {
        self.directory.join("monitor.sock")
    }

    /// What the monitor says.
    pub fn monitor_log(&self) -> PathBuf {
        self.directory.join("monitor.log")
    }

    /// Held by the monitor as long as it lives; its process number stands in it.
    pub fn monitor_pid(&self) -> PathBuf {
        self.directory.join("monitor.pid")
    }

    /// Where a proxy waits for the next monitor when its own has died.
    pub fn heir_socket(&self) -> PathBuf {
        self.directory.join("proxy.sock")
    }

    /// What the proxy says.
    pub fn proxy_log(&self) -> PathBuf {
        self.directory.join("proxy.log")
    }

    /// Where metrics are served.
    pub fn metrics_socket(&self) -> PathBuf {
        self.directory.join("metrics.sock")
    }

    /// What programs of the node find in `CROSSLANE_RACK`.
    pub fn environment(&self) -> OsString {
        self.directory.clone().into_os_string()
    }
}

/// What the directory of a rack from `file` ends with.
fn ending(file: &Path) -> String {
    format!("-{:08x}", hash(file.as_os_str().as_bytes()) as u32)
}

/// FNV-1a: the same in every release, which the standard library's hash is not.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Trust};

    #[test]
    fn two_files_of_one_name_have_directories_of_their_own() {
        let rack = Rack::example(2, Backend::Shm, None, Trust::Proxy);
        let place = |file: &str| Places::new(Path::new("/base"), &rack, Path::new(file)).directory;
        assert!(place("/a/r.toml").starts_with("/base/racks"));
        assert_eq!(place("/a/r.toml"), place("/a/r.toml"));
        assert_ne!(place("/a/r.toml"), place("/b/r.toml"));
    }

    #[test]
    fn a_copy_is_found_by_what_it_was_made_from() {
        let base = tempfile::tempdir().unwrap();
        let (rack, file) = (Rack::example(2, Backend::Shm, None, Trust::Proxy), Path::new("etcd://h:1/r"));
        let places = Places::new(base.path(), &rack, file);
        assert_eq!(Places::with_copy(base.path(), file), []);
        std::fs::create_dir_all(&places.directory).unwrap();
        assert_eq!(Places::with_copy(base.path(), file), []);
        std::fs::write(places.copy(), "").unwrap();
        assert_eq!(Places::with_copy(base.path(), file), [places]);
        assert_eq!(Places::with_copy(base.path(), Path::new("etcd://h:1/other")), []);
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_program_of_a_node_finds_the_base_that_its_node_was_made_in() {
        assert_eq!(Places::base(Path::new("/run/x/racks/rack-12345678/a")), Path::new("/run/x"));
        assert_eq!(Places::base(Path::new("/run/x")), Path::new("/run/x"));
        assert_eq!(Places::base(Path::new("/run/user/0/crosslane")), Path::new("/run/user/0/crosslane"));
    }
}
