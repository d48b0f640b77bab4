//! What is sent to the peer.

use super::super::sender::Resent;
use super::{Broken, Relay};
use fabric::Inbound;
use lane::{Corrupt, Span};
use libc::iovec;
use path::SendBy;
use rustix::io::Errno;
use socket::process::blocking;

impl Relay {
    /// Sends bytes of a window, and returns the number of bytes that there was room for.
    ///
    /// # Errors
    /// [`Broken`] if the connection must be reset.
    pub fn write_span<I: Inbound>(&mut self, span: &Span<'_, I>) -> Result<usize, Broken> {
        let tcp = self.tcp();
        match self.send_by()? {
            Some(SendBy::Lane) => {
                self.has_written = true;
                let lane = self.sender.lane().ok_or(Broken)?;
                let mut done = lane.write_span(span)?;
                if done < span.len_bytes() && lane.note_entered(tcp) {
                    done += lane.write_span(&span.part(done, span.len_bytes() - done))?;
                }
                self.growth.note(lane.has_grown());
                Ok(done)
            }
            Some(_) => {
                let mut bytes = std::mem::take(&mut self.outgoing);
                bytes.resize(span.len_bytes(), 0);
                span.read(&mut bytes);
                let sent = self.send_by_tcp(&bytes);
                self.outgoing = bytes;
                sent
            }
            None => Ok(0),
        }
    }

    /// As [`Relay::write_span`], from memory of this process.
    ///
    /// # Errors
    /// As [`Relay::write_span`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let tcp = self.tcp();
        match self.send_by()? {
            Some(SendBy::Lane) => {
                self.has_written = true;
                let lane = self.sender.lane().ok_or(Broken)?;
                // SAFETY: the slice is readable, and not the lane's memory.
                let mut done = unsafe { lane.write_from(bytes.as_ptr(), bytes.len()) }?;
                if done < bytes.len() && lane.note_entered(tcp) {
                    let rest = &bytes[done..];
                    // SAFETY: the rest of the slice is readable, and not the lane's memory.
                    done += unsafe { lane.write_from(rest.as_ptr(), rest.len()) }?;
                }
                self.growth.note(lane.has_grown());
                Ok(done)
            }
            Some(_) => self.send_by_tcp(bytes),
            None => Ok(0),
        }
    }

    /// Returns how the next bytes are to be sent; `None` if there is no room for any.
    fn send_by(&mut self) -> Result<Option<SendBy>, Broken> {
        let (tcp, role) = (self.tcp(), self.role);
        match self.sender.prepare(tcp, role) {
            SendBy::Resend => match self.sender.resend(tcp)? {
                Resent::All => Ok(Some(SendBy::Tcp)),
                Resent::Blocked => Ok(None),
                Resent::Ended => Err(Broken),
            },
            by => Ok(Some(by)),
        }
    }

    fn send_by_tcp(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        self.meet(false);
        let (tcp, role) = (self.tcp(), self.role);
        self.sender.enter_kernel(tcp, role);
        let spans = [iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        // SAFETY: the span is a slice, which is readable.
        let sent = unsafe { tcp.send(&spans, 0) };
        self.sender.leave_kernel(sent.unwrap_or(0));
        match sent {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            sent => sent.map_err(|_| Broken),
        }
    }

    /// Writes to TCP what the peer has left in a lane that has ended, as far as there is room, and ends the stream
    /// behind it if that is due.
    pub(super) fn resend(&mut self) {
        let (tcp, role) = (self.tcp(), self.role);
        let resent = match self.sender.prepare(tcp, role) {
            SendBy::Resend => self.sender.resend(tcp),
            SendBy::Tcp | SendBy::Lane => Ok(Resent::All),
        };
        self.is_broken |= matches!(resent, Err(Corrupt { .. }));
        self.finish_if_due(resent == Ok(Resent::All));
    }

    /// Returns whether there is enough room to justify a wake-up.
    pub fn has_room(&mut self) -> bool {
        let tcp = self.tcp();
        match self.send_by() {
            Ok(Some(SendBy::Lane)) => self.sender.lane().is_none_or(|lane| lane.has_room(tcp)),
            Ok(Some(_)) => blocking::poll_now(tcp.0, libc::POLLOUT) != 0,
            Ok(None) => false,
            Err(Broken) => true,
        }
    }
}
