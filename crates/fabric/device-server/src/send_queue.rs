//! The messages that are queued for a client.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::limits::CLIENTS_MAX;
use crate::message::Notification;

/// Maximum number of queued notifications: the doorbells of all clients when a client connects, and all clients
/// disconnecting and connecting again, twice.
pub const QUEUE_LEN_MAX: usize = 5 * CLIENTS_MAX;
/// Bytes of a socket's send buffer. Small, because descriptors in flight count toward the user's limit.
pub const SEND_BUFFER_BYTES: usize = 8 << 10;
/// Maximum number of messages in such a buffer: the kernel accounts at least half a KiB for each.
pub const IN_FLIGHT_MAX: usize = 2 * SEND_BUFFER_BYTES / 512;

/// A bounded queue of notifications, and the progress of the first one.
#[derive(Debug, Default)]
pub struct SendQueue {
    queue: VecDeque<Notification>,
    messages_sent: usize,
    bytes_sent: usize,
}

/// Why no more messages can be sent to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The client does not read, and its queue is full.
    Full,
    /// The socket failed.
    Broken(Errno),
}

impl SendQueue {
    /// Queues a notification.
    pub fn push(&mut self, notification: Notification) -> Result<(), SendError> {
        if self.queue.len() >= QUEUE_LEN_MAX {
            return Err(SendError::Full);
        }
        self.queue.push_back(notification);
        Ok(())
    }

    /// Whether everything has been sent.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends as much as possible without blocking.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), SendError> {
        while let Some(notification) = self.queue.front() {
            let (word, descriptor) = notification.message(self.messages_sent);
            let bytes = word.to_le_bytes();
            // The descriptor is sent with the first byte.
            let descriptor = descriptor.filter(|_| self.bytes_sent == 0);
            match send(socket, &bytes[self.bytes_sent..], descriptor) {
                Ok(sent) => self.advance(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(SendError::Broken(errno)),
            }
        }
        Ok(())
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes_sent += bytes;
        if self.bytes_sent < size_of::<i64>() {
            return;
        }
        (self.bytes_sent, self.messages_sent) = (0, self.messages_sent + 1);
        if self.queue.front().is_some_and(|notification| self.messages_sent >= notification.messages()) {
            self.queue.pop_front();
            self.messages_sent = 0;
        }
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<usize, Errno> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        assert!(fits, "the buffer has space for one descriptor");
    }
    sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::rc::Rc;

    use super::*;
    use crate::message::Disconnection;

    fn disconnected(id: u16) -> Notification {
        Notification::Disconnected(Rc::new(Disconnection { id }))
    }

    #[test]
    fn a_stalled_client_gets_its_messages_in_order_when_it_reads() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, SEND_BUFFER_BYTES).unwrap();
        let mut send_queue = SendQueue::default();
        for id in 0..QUEUE_LEN_MAX as u16 {
            send_queue.push(disconnected(id)).unwrap();
        }
        send_queue.flush(ours.as_fd()).unwrap();
        assert!(!send_queue.is_empty(), "the kernel accepted everything: nothing was stalled");
        for id in 0..QUEUE_LEN_MAX as i64 {
            send_queue.flush(ours.as_fd()).unwrap();
            let mut word = [0; 8];
            theirs.read_exact(&mut word).unwrap();
            assert_eq!(i64::from_le_bytes(word), id);
        }
        assert!(send_queue.is_empty());
    }

    #[test]
    fn a_queue_is_bounded() {
        let mut send_queue = SendQueue::default();
        for id in 0..QUEUE_LEN_MAX as u16 {
            send_queue.push(disconnected(id)).unwrap();
        }
        assert_eq!(send_queue.push(disconnected(0)), Err(SendError::Full));
    }

    #[test]
    fn sending_to_a_closed_socket_fails() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let mut send_queue = SendQueue::default();
        send_queue.push(disconnected(1)).unwrap();
        assert_eq!(send_queue.flush(ours.as_fd()), Err(SendError::Broken(Errno::PIPE)));
    }
}
