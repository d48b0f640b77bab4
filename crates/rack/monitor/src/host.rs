//! What a monitor needs of its machine: the node's lock, its sockets, the limit of open descriptors.

use std::fs::File;
use std::io::Write as _;
use std::process;

use rack::NodeRunDir;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

use crate::error::MonitorError;
use crate::settings::MonitorSettings;

/// Removes the sockets of a node. The caller holds the node's lock.
pub fn remove_sockets(settings: &MonitorSettings) {
    let run_dir = settings.node_run_dir();
    // The monitor's socket goes last: while it exists, processes of this node may run.
    let _ = std::fs::remove_file(run_dir.successor_socket());
    let _ = std::fs::remove_file(run_dir.metrics_socket());
    let _ = std::fs::remove_file(run_dir.monitor_socket());
}

/// Raises the limit of open descriptors: each doorbell of a peer is one, two while it is sent to the proxy, and each
/// connection of a program is one.
pub fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Locks the node's process number file and writes this process's number to it. The lock lasts while the file is open.
pub fn lock_pid_file(run_dir: &NodeRunDir, node: &str) -> Result<File, MonitorError> {
    let path = run_dir.monitor_pid();
    let shown = path.display().to_string();
    let failed = |error: std::io::Error| MonitorError::System {
        what: shown.clone(),
        error: Errno::from_io_error(&error).unwrap_or(Errno::IO),
    };
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(failed)?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let pid = std::fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
        return Err(MonitorError::AlreadyRunning { node: node.to_owned(), pid });
    }
    file.set_len(0).map_err(failed)?;
    writeln!(file, "{}", process::id()).map_err(failed)?;
    Ok(file)
}
