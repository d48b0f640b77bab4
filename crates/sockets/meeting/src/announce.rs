//! The accepting endpoint's announcement: a listener at the place of its connection.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::bell::Held;
use crate::endpoint::Endpoint;
use crate::met::{Credentials, peer_credentials};
use crate::place::{Bound, Rendezvous, SOCKET_FLAGS, SocketFile};
use crate::reason::Reason;
use crate::receive::discard;
use crate::system::Descriptor;

/// A listening AF_UNIX socket at the place of a connection. Nobody can connect any more once it is dropped.
///
/// A process that shares it with its parent or a child calls [`close_shared`](Self::close_shared) instead of dropping
/// it.
#[derive(Debug)]
pub struct Announcement {
    socket: Descriptor,
    /// Its file, if it is in a directory.
    file: Option<SocketFile>,
    is_shared: bool,
}

/// A process that has connected to an announcement.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) bell: Held,
    pub(crate) credentials: Credentials,
}

impl Announcement {
    /// Announces an accepting endpoint, in three system calls, and five in a directory.
    ///
    /// # Errors
    /// [`Reason::NameTaken`] if the name has an owner; [`Reason::Rack`] without the directory;
    /// [`Reason::NoDescriptors`], [`Reason::NoMemory`], [`Reason::Sandbox`] and [`Reason::System`] by the errors of
    /// `socket(2)`, `bind(2)` and `listen(2)`.
    pub fn bind(place: &Rendezvous, endpoint: &Endpoint) -> Result<Self, Reason> {
        let Bound { socket, file } = place.listen(endpoint.tuple)?;
        Ok(Self { socket, file, is_shared: false })
    }

    /// Accepts the next caller, if there is one, in two system calls.
    pub(crate) fn accept(&self) -> Result<Option<Caller>, Reason> {
        let socket = match rustix::net::accept_with(&self.socket, SOCKET_FLAGS) {
            Ok(socket) => Descriptor::kept(socket).map_err(Reason::of_errno)?,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(errno) => return Err(Reason::of_errno(errno)),
        };
        let credentials = peer_credentials(socket.as_fd());
        let bell = Held::new(socket);
        credentials.map(|credentials| Some(Caller { bell, credentials })).ok_or(Reason::System)
    }

    /// Closes this process's descriptor, and leaves the announcement to the others that hold it.
    pub fn close_shared(mut self) {
        self.is_shared = true;
    }
}

impl AsFd for Announcement {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Announcement {
    /// Empties the queue of callers, whose unread messages the kernel would close with the socket as they are.
    fn drop(&mut self) {
        if self.is_shared {
            return;
        }
        if let Some(file) = &self.file {
            file.remove();
        }
        // Nobody can be added to the queue from now on, so the loop ends.
        if rustix::net::shutdown(&self.socket, Shutdown::Both).is_err() {
            return;
        }
        while let Ok(socket) = rustix::net::accept_with(&self.socket, SOCKET_FLAGS) {
            discard(Descriptor::from(socket));
        }
    }
}
