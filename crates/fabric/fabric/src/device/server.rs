//! Devices behind an ivshmem server on this machine.

use super::backing_file;
use super::error::DeviceProblem;
use super::format::VECTORS_MAX;
use super::memory::Caching;
use super::opened::OpenedMemory;
use super::server_connection::{ServerConnection, Setup};
use rustix::fs::fstat;
use rustix::net::sockopt::socket_peercred;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Connects to the server at `path`, and receives the memory and `vectors` doorbells.
pub(super) fn connect(path: &Path, vectors: usize) -> Result<OpenedMemory, DeviceProblem> {
    if !(1..=VECTORS_MAX).contains(&vectors) {
        let found = format!("{vectors} doorbells asked for");
        return Err(DeviceProblem::unsuitable(found, format!("use 1 to {VECTORS_MAX}")));
    }
    let stream =
        UnixStream::connect(path).map_err(DeviceProblem::system("connect (is 'crosslane device-server' up?)"))?;
    stream.set_nonblocking(true).map_err(DeviceProblem::system("fcntl O_NONBLOCK"))?;
    let owner = socket_peercred(&stream).map_err(DeviceProblem::system("getsockopt SO_PEERCRED"))?;
    backing_file::check_owner(owner.uid.as_raw(), 0, 0)?;
    let (connection, Setup { memory, interrupts }) = ServerConnection::set_up(stream.into(), vectors)?;
    let stat = fstat(&memory).map_err(DeviceProblem::system("fstat of the server's memory"))?;
    Ok(OpenedMemory {
        name: path.display().to_string(),
        caching: Caching::Cached,
        descriptor: memory,
        offset_bytes: 0,
        len_bytes: stat.st_size as u64,
        lease_obstacle: None,
        interrupts,
        registers: None,
        server: Some(connection),
        kept_open: Vec::new(),
    })
}
