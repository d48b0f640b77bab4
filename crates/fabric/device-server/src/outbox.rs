//! What a client is still to be told.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::clients::CLIENTS_MAX;
use crate::message::Notice;

/// Notices that wait at most: everybody who is there when a client comes, and everybody going and coming again, twice.
pub const NOTICES_MAX: usize = 5 * CLIENTS_MAX;
/// Bytes of a socket's send buffer. Small, because descriptors in flight count against this user's limit.
pub const SEND_BUFFER_BYTES: usize = 8 << 10;
/// Messages that such a buffer can hold: the kernel counts half a KiB and more for each.
pub const IN_FLIGHT_MAX: usize = 2 * SEND_BUFFER_BYTES / 512;

/// A bounded queue of notices, and how much of the first one the kernel has taken.
#[derive(Debug, Default)]
pub struct Outbox {
    notices: VecDeque<Notice>,
    messages_sent: usize,
    bytes_sent: usize,
}

/// Why a client cannot be told anything more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It does not read, and its queue is full.
    Full,
    /// Its socket failed.
    Broken(Errno),
}

impl Outbox {
    /// Adds a notice.
    pub fn push(&mut self, notice: Notice) -> Result<(), Stop> {
        if self.notices.len() >= NOTICES_MAX {
            return Err(Stop::Full);
        }
        self.notices.push_back(notice);
        Ok(())
    }

    /// Whether everything has been told.
    pub fn is_empty(&self) -> bool {
        self.notices.is_empty()
    }

    /// Hands to the kernel what it takes without waiting.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Stop> {
        while let Some(notice) = self.notices.front() {
            let (word, descriptor) = notice.message(self.messages_sent);
            let bytes = word.to_le_bytes();
            // The descriptor goes with the first byte.
            let descriptor = descriptor.filter(|_| self.bytes_sent == 0);
            match send(socket, &bytes[self.bytes_sent..], descriptor) {
                Ok(sent) => self.advance(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(Stop::Broken(errno)),
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
        if self.notices.front().is_some_and(|notice| self.messages_sent >= notice.messages()) {
            self.notices.pop_front();
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
    use crate::message::Departure;

    fn gone(id: u16) -> Notice {
        Notice::Gone(Rc::new(Departure { id }))
    }

    #[test]
    fn what_a_stalled_client_misses_it_gets_in_order_when_it_reads() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, SEND_BUFFER_BYTES).unwrap();
        let mut outbox = Outbox::default();
        for id in 0..NOTICES_MAX as u16 {
            outbox.push(gone(id)).unwrap();
        }
        outbox.flush(ours.as_fd()).unwrap();
        assert!(!outbox.is_empty(), "the kernel took everything: nothing was stalled");
        for id in 0..NOTICES_MAX as i64 {
            outbox.flush(ours.as_fd()).unwrap();
            let mut word = [0; 8];
            theirs.read_exact(&mut word).unwrap();
            assert_eq!(i64::from_le_bytes(word), id);
        }
        assert!(outbox.is_empty());
    }

    #[test]
    fn a_queue_ends_at_its_bound() {
        let mut outbox = Outbox::default();
        for id in 0..NOTICES_MAX as u16 {
            outbox.push(gone(id)).unwrap();
        }
        assert_eq!(outbox.push(gone(0)), Err(Stop::Full));
    }

    #[test]
    fn a_socket_whose_other_end_is_closed_is_broken() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let mut outbox = Outbox::default();
        outbox.push(gone(1)).unwrap();
        assert_eq!(outbox.flush(ours.as_fd()), Err(Stop::Broken(Errno::PIPE)));
    }
}
