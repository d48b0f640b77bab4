//! How a proxy outlives its monitor, and what keeps connections with a span beyond the link, the proxy and the monitor.
//!
//! | what ends | what keeps the descriptors | until |
//! |---|---|---|
//! | the link | the thread that had the connection | the link is up again, or `return_ns` have passed |
//! | the proxy | the monitor, duplicates ([`control::proxy::FromProxy::Deposit`]) | the next proxy runs |
//! | the monitor | the proxy, which continues | another monitor connects, or `return_ns` have passed |
//!
//! When proxy and monitor end together, the descriptors end too, and the programs see a reset.

use super::error::DriverError;
use control::proxy::{
    Configuration, Handover, RetainedConnection, RetainedDescriptors, ToProxy, VERSION, send_retained,
};
use control::{Channel, Received, peer_uid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Backlog of monitors; there is more than one only if one has died.
const BACKLOG: i32 = 16;
/// How long a monitor that has connected may take to send its request.
const REQUEST_LIMIT: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// The socket to which the next monitor connects when this proxy's monitor has died.
#[derive(Debug)]
pub(super) struct SuccessorListener {
    listener: OwnedFd,
    path: PathBuf,
}

impl SuccessorListener {
    /// Listens at `path`. A socket that exists there belonged to an earlier proxy, which has ended: its monitor has
    /// waited for that, and holds the node's lock.
    pub(super) fn listen(path: &Path) -> Result<Self, DriverError> {
        let listener = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            match rustix::fs::unlink(path) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            bind(&listener, &SocketAddrUnix::new(path)?)?;
            listen(&listener, BACKLOG)?;
            Ok(listener)
        };
        let failed = |errno| DriverError::Rack { path: path.display().to_string(), errno };
        Ok(Self { listener: listener().map_err(failed)?, path: path.to_owned() })
    }

    /// Waits up to `limit` for a monitor, sends it this proxy's configuration, and returns its request.
    pub(super) fn next(&self, limit: Timespec, configuration: &Configuration) -> Option<(Channel, SuccessorRequest)> {
        let _ = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&limit));
        let successor = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()?;
        let successor = is_own_user(&successor).then(|| Channel::new(successor))?;
        let configuration = Some(Box::new(configuration.clone()));
        let sent = successor.send(&Handover { version: VERSION, configuration, connections: Vec::new() }, &[]);
        // A process that only checked whether the proxy lives has closed already.
        sent.ok().and_then(|()| receive_request(&successor)).map(|request| (successor, request))
    }
}

/// The request of a monitor that has connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SuccessorRequest {
    /// This proxy continues under the new monitor.
    Adopt,
    /// This proxy hands over its connections with a span, and ends.
    Release,
}

fn receive_request(successor: &Channel) -> Option<SuccessorRequest> {
    let _ = poll(&mut [PollFd::new(successor, PollFlags::IN)], Some(&REQUEST_LIMIT));
    match successor.receive::<ToProxy>() {
        Ok(Received::Message(ToProxy::Adopt, _)) => Some(SuccessorRequest::Adopt),
        Ok(Received::Message(ToProxy::Release, _)) => Some(SuccessorRequest::Release),
        _ => None,
    }
}

impl Drop for SuccessorListener {
    /// Removes the socket. No other proxy can listen there while this one lives.
    fn drop(&mut self) {
        let _ = rustix::fs::unlink(&self.path);
    }
}

fn is_own_user(peer: &OwnedFd) -> bool {
    let own_uid = rustix::process::geteuid().as_raw();
    peer_uid(peer).is_ok_and(|uid| uid == own_uid || uid == 0)
}

/// Hands all retained connections over to a monitor. Those that it does not accept end with this proxy.
pub(super) fn hand_over(successor: &Channel, retained: &[(RetainedConnection, RetainedDescriptors)]) {
    let retained: Vec<(RetainedConnection, [BorrowedFd<'_>; 2])> =
        retained.iter().map(|(connection, descriptors)| (*connection, descriptors.as_fds())).collect();
    let sent = send_retained(successor, &retained, |connections| Handover {
        version: VERSION,
        configuration: None,
        connections,
    });
    if let Err(error) = &sent {
        eprintln!("crosslane proxy: the new monitor did not accept the retained connections: {error}");
    }
}
