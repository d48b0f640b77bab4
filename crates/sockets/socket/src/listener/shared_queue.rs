//! A queue of connections that one process has held and releases to all processes that share its listener.
//!
//! TCP keeps such connections in the listener, from which any process can accept them. A process that holds them itself
//! must pass them on when it has other work or ends: through a pair of sockets that `fork` passes to all of these
//! processes, and `exec` to a program that gets the lane listener as well. Such a program finds the pair by the name of
//! its sending end.

use crate::descriptor::hidden::{self, HiddenFd, Need, close};
use crate::descriptor::received::discard;
use crate::process::limit;
use crate::process::system::inode_of;
use crate::rendezvous::name_key::NameKey;
use crate::rendezvous::{self, Accepted};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The name of a sending socket begins with this. The inode of the lane listener follows, and a random number.
const NAME_HEAD: &str = "crosslane/returned/";
/// Maximum number of names that are tried: other processes may have bound some, but not all of 2^32.
const NAMES_TRIED_MAX: usize = 16;
/// More than the kernel grants, so that the queue is as long as possible.
const QUEUE_BYTES: usize = i32::MAX as usize / 2;

/// A queue of connections, each with the time at which it may be accepted without bytes.
pub(crate) struct SharedQueue {
    sender: HiddenFd,
    receiver: HiddenFd,
}

impl SharedQueue {
    /// Creates the queue of the listener with this lane listener.
    ///
    /// # Errors
    /// `MFILE` and similar errors, when no descriptor is free.
    pub fn new(lane_fd: RawFd) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (sender, receiver) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&sender, QUEUE_BYTES)?;
        bind_to_free_name(sender.as_fd(), &name_head_of(lane_fd).ok_or(Errno::BADF)?)?;
        Ok(Self {
            sender: HiddenFd::hide(sender, Need::Required)?,
            receiver: HiddenFd::hide(receiver, Need::Required)?,
        })
    }

    /// Returns the queue of the listener with this lane listener, if it is among `sockets` that came by `exec`.
    pub fn inherited(lane_fd: RawFd, sockets: &[RawFd]) -> Option<Self> {
        let head = name_head_of(lane_fd)?;
        let is_queues = |name: &Vec<u8>| name.starts_with(head.as_bytes());
        let (receiver, name) = sockets.iter().find_map(|&fd| Some((fd, name_behind(fd).filter(is_queues)?)))?;
        let sender = sockets.iter().copied().find(|&fd| own_name(fd).as_ref() == Some(&name))?;
        // SAFETY: this library has created both sockets before `exec`, as their name and the user of their creator
        // show, and no other code of this program owns them.
        let hide = |fd| HiddenFd::adopt(unsafe { OwnedFd::from_raw_fd(fd) }, Need::Required).ok();
        Some(Self { sender: hide(sender)?, receiver: hide(receiver)? })
    }

    /// Sets whether the queue stays open through `exec`, as the lane listener does.
    pub fn set_inheritable(&self, inheritable: bool) {
        for fd in [&self.sender, &self.receiver] {
            // Errors are ignored, as for the lane listener: without a descriptor for the marker, the program that
            // follows finds nothing.
            let _ = fd.set_inheritable(inheritable);
        }
    }

    /// Returns the receiving socket, which is readable when there is a connection.
    ///
    /// # Errors
    /// `BADF` when it has been released.
    pub fn receiver(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.receiver.fd()
    }

    /// Adds a connection to the queue.
    ///
    /// # Errors
    /// `AGAIN` when the queue is full.
    pub fn push(&self, lifeline: BorrowedFd<'_>, due_ns: u64) -> Result<(), Errno> {
        rendezvous::send_with_descriptor(self.sender.fd()?, &due_ns.to_ne_bytes(), Some(lifeline))
    }

    /// Removes and returns the first connection and the time when it is due; `None` when there is none. `key` is that
    /// of the listener's rack.
    ///
    /// # Errors
    /// `MFILE` and similar errors, when no descriptor is free.
    pub fn pop(&self, key: &NameKey) -> Result<Option<(Accepted, u64)>, Errno> {
        let mut due_ns = [0; 8];
        let receiver = self.receiver.fd()?;
        let received =
            limit::with_free_descriptor(receiver, || rendezvous::receive_with_descriptors(receiver, &mut due_ns));
        let mut fds = match received {
            Err(Errno::AGAIN) => return Ok(None), // Another process has removed it.
            received => received?.1,
        };
        let Some(lifeline) = fds.pop() else { return Ok(None) };
        match rendezvous::peer_of(lifeline.as_fd(), key) {
            Some((tuple, opener)) => {
                Ok(Some((Accepted { lifeline, tuple: tuple.reversed(), opener }, u64::from_ne_bytes(due_ns))))
            }
            None => {
                discard(lifeline);
                Ok(None)
            }
        }
    }
}

/// Closes the queues among `sockets`, which came by `exec`, whose listener did not: clients in a queue from which no
/// process removes them would wait forever.
pub(crate) fn close_orphaned_queues(sockets: &[RawFd]) {
    for &fd in sockets.iter().filter(|&&fd| !hidden::is_hidden(fd)) {
        let mut names = own_name(fd).into_iter().chain(name_behind(fd));
        if names.any(|name| name.starts_with(NAME_HEAD.as_bytes())) {
            // SAFETY: this library has created the socket before `exec`, as its name and the user of its creator show,
            // and no other code of this program owns it.
            close(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

fn name_head_of(lane_fd: RawFd) -> Option<String> {
    inode_of(lane_fd).map(|inode| format!("{NAME_HEAD}{inode}/"))
}

fn bind_to_free_name(sender: BorrowedFd<'_>, head: &str) -> Result<(), Errno> {
    for _ in 0..NAMES_TRIED_MAX {
        let name = format!("{head}{:08x}", rendezvous::spread_u32());
        match rustix::net::bind(sender, &SocketAddrUnix::new_abstract_name(name.as_bytes())?) {
            Err(Errno::ADDRINUSE) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::ADDRINUSE)
}

/// Returns the name of a sending socket.
fn own_name(fd: RawFd) -> Option<Vec<u8>> {
    name_in_pair(fd, |socket| rustix::net::getsockname(socket).ok())
}

/// Returns the name of the sending socket that leads to a receiving one.
fn name_behind(fd: RawFd) -> Option<Vec<u8>> {
    name_in_pair(fd, |socket| rustix::net::getpeername(socket).ok().flatten())
}

/// Returns a name in a pair of sockets; `None` also for a pair of another user, which may have been sent to this
/// program.
fn name_in_pair(fd: RawFd, ask: impl FnOnce(BorrowedFd<'_>) -> Option<SocketAddrAny>) -> Option<Vec<u8>> {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let address = SocketAddrUnix::try_from(ask(socket)?).ok()?;
    let name = address.abstract_name()?.to_vec();
    // The kernel records the creator of a pair as the peer at both of its sockets.
    (rendezvous::is_trusted(socket, None) == Ok(true)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, IntoRawFd};

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    /// Returns the descriptors of a queue as a program finds them after `exec`.
    fn left_by(queue: SharedQueue) -> [RawFd; 2] {
        [queue.receiver, queue.sender].map(|fd| fd.unhide().unwrap().into_raw_fd())
    }

    #[test]
    fn a_queue_is_found_for_its_listener_only() {
        let (lane, other) = pair();
        let queue = SharedQueue::new(lane.as_raw_fd()).unwrap();
        queue.push(other.as_fd(), 7).unwrap();
        let left = left_by(queue);
        let sockets = [other.as_raw_fd(), left[0], lane.as_raw_fd(), left[1]];
        assert!(SharedQueue::inherited(other.as_raw_fd(), &sockets).is_none());
        assert!(SharedQueue::inherited(lane.as_raw_fd(), &left[..1]).is_none(), "without the sender");
        assert!(SharedQueue::inherited(lane.as_raw_fd(), &left[1..]).is_none(), "without the receiver");
        let found = SharedQueue::inherited(lane.as_raw_fd(), &sockets).unwrap();
        let mut due_ns = [0; 8];
        let (_, fds, _) = rendezvous::receive_with_descriptors(found.receiver().unwrap(), &mut due_ns).unwrap();
        assert_eq!((u64::from_ne_bytes(due_ns), fds.len()), (7, 1));
    }

    #[test]
    fn queues_without_their_listener_are_closed_and_other_sockets_are_not() {
        let ((lane, other), (found, kept)) = (pair(), pair());
        let left = left_by(SharedQueue::new(lane.as_raw_fd()).unwrap());
        // SAFETY: the descriptor is open until `close_orphaned_queues` closes it.
        let receiver = unsafe { BorrowedFd::borrow_raw(left[0]) }.try_clone_to_owned().unwrap();
        close_orphaned_queues(&[left[0], lane.as_raw_fd(), left[1], other.as_raw_fd(), found.as_raw_fd()]);
        let received = |fd: &OwnedFd| rendezvous::receive_with_descriptors(fd.as_fd(), &mut [0; 8]).map(|got| got.0);
        assert_eq!(received(&receiver), Ok(0), "the sending socket is closed");
        assert_eq!((received(&other), received(&kept)), (Err(Errno::AGAIN), Err(Errno::AGAIN)));
    }

    #[test]
    fn queues_of_one_listener_have_names_of_their_own() {
        let (lane, _other) = pair();
        let queues: Vec<SharedQueue> = (0..8).map(|_| SharedQueue::new(lane.as_raw_fd()).unwrap()).collect();
        let names: std::collections::BTreeSet<_> = queues.iter().filter_map(|it| own_name(it.sender.raw())).collect();
        assert_eq!(names.len(), queues.len());
    }
}
