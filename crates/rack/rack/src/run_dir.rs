//! Paths of the sockets, logs and directories of a running rack.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::{Rack, fnv};

/// The directory that contains all running racks of a user.
const RACKS: &str = "racks";
/// Depth of a node's directory `BASE/racks/RACK/NODE` below the base.
const NODE_DEPTH: usize = 3;

/// The directory of a running rack on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    /// Path of the directory.
    pub directory: PathBuf,
}

/// The directory of a running node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRunDir {
    /// Path of the directory, which is the rack directory of the node's programs.
    pub directory: PathBuf,
}

impl RunDir {
    /// Returns the directory below `base` of a rack whose file is `file`, an absolute path without symbolic links or an
    /// address in etcd.
    pub fn new(base: &Path, rack: &Rack, file: &Path) -> Self {
        Self { directory: base.join(RACKS).join(rack.name.clone() + &suffix(file)) }
    }

    /// Returns the directories below `base` of running racks that were started from `file`, whatever their names are,
    /// and that contain a copy of their description.
    pub fn with_copy(base: &Path, file: &Path) -> Vec<Self> {
        let suffix = suffix(file);
        let found = std::fs::read_dir(base.join(RACKS)).into_iter().flatten().flatten().map(|entry| entry.path());
        let has_suffix = |path: &PathBuf| path.as_os_str().as_bytes().ends_with(suffix.as_bytes());
        found
            .filter(has_suffix)
            .map(|directory| Self { directory })
            .filter(|run_dir| run_dir.copy().is_file())
            .collect()
    }

    /// Path of a copy, as a rack file, of the description by which the nodes of this machine run, where the rack is
    /// described in etcd.
    pub fn copy(&self) -> PathBuf {
        self.directory.join("rack.toml")
    }

    /// Returns the base of all racks for a program whose rack directory is `rack_dir`. The directory of a node leads to
    /// the base of the rack that the node belongs to.
    pub fn base(rack_dir: &Path) -> PathBuf {
        let base = rack_dir.ancestors().nth(NODE_DEPTH);
        let is_of_node = rack_dir.ancestors().nth(2).is_some_and(|racks| racks.ends_with(RACKS));
        base.filter(|_| is_of_node).unwrap_or(rack_dir).to_owned()
    }

    /// Returns the directory of a node.
    pub fn node(&self, name: &str) -> NodeRunDir {
        NodeRunDir { directory: self.directory.join(name) }
    }

    /// Path of the device server's socket.
    pub fn device_socket(&self) -> PathBuf {
        self.directory.join("device.sock")
    }

    /// Path of the device server's log.
    pub fn device_log(&self) -> PathBuf {
        self.directory.join("device.log")
    }

    /// Path of the lock that is held while the rack is brought up or down.
    pub fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }
}

impl NodeRunDir {
    /// Path of the socket at which the monitor answers programs and commands.
    pub fn monitor_socket(&self) -> PathBuf {
        self.directory.join("monitor.sock")
    }

    /// Path of the monitor's log.
    pub fn monitor_log(&self) -> PathBuf {
        self.directory.join("monitor.log")
    }

    /// Path of the file that contains the monitor's process number and that the monitor keeps locked.
    pub fn monitor_pid(&self) -> PathBuf {
        self.directory.join("monitor.pid")
    }

    /// Path of the socket at which a proxy waits for the next monitor after its own has died.
    pub fn successor_socket(&self) -> PathBuf {
        self.directory.join("proxy.sock")
    }

    /// Path of the proxy's log.
    pub fn proxy_log(&self) -> PathBuf {
        self.directory.join("proxy.log")
    }

    /// Path of the socket at which metrics are served.
    pub fn metrics_socket(&self) -> PathBuf {
        self.directory.join("metrics.sock")
    }

    /// Returns the value of `CROSSLANE_RACK` for programs of the node.
    pub fn environment(&self) -> OsString {
        self.directory.clone().into_os_string()
    }
}

/// Returns the suffix of the directory name of a rack from `file`.
fn suffix(file: &Path) -> String {
    format!("-{:08x}", fnv::hash(file.as_os_str().as_bytes()) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Trust};

    #[test]
    fn files_of_the_same_name_have_different_directories() {
        let rack = Rack::example(2, Backend::Shm, None, Trust::Proxy);
        let directory = |file: &str| RunDir::new(Path::new("/base"), &rack, Path::new(file)).directory;
        assert!(directory("/a/r.toml").starts_with("/base/racks"));
        assert_eq!(directory("/a/r.toml"), directory("/a/r.toml"));
        assert_ne!(directory("/a/r.toml"), directory("/b/r.toml"));
    }

    #[test]
    fn a_copy_is_found_by_the_source_of_the_rack() {
        let base = tempfile::tempdir().unwrap();
        let (rack, file) = (Rack::example(2, Backend::Shm, None, Trust::Proxy), Path::new("etcd://h:1/r"));
        let run_dir = RunDir::new(base.path(), &rack, file);
        assert_eq!(RunDir::with_copy(base.path(), file), []);
        std::fs::create_dir_all(&run_dir.directory).unwrap();
        assert_eq!(RunDir::with_copy(base.path(), file), []);
        std::fs::write(run_dir.copy(), "").unwrap();
        assert_eq!(RunDir::with_copy(base.path(), file), [run_dir]);
        assert_eq!(RunDir::with_copy(base.path(), Path::new("etcd://h:1/other")), []);
    }

    #[test]
    fn the_base_is_found_from_the_directory_of_a_node() {
        assert_eq!(RunDir::base(Path::new("/run/x/racks/rack-12345678/a")), Path::new("/run/x"));
        assert_eq!(RunDir::base(Path::new("/run/x")), Path::new("/run/x"));
        assert_eq!(RunDir::base(Path::new("/run/user/0/crosslane")), Path::new("/run/user/0/crosslane"));
    }
}
