//! The engine's interface to the proxy's endpoint of a connection, whose other endpoint a program of this node holds.

use crate::frame::{Carried, ConnectionNumber};
use fabric::{Inbound, Outbound};
use lane::{Draft, Span};

/// What a program has sent, or the state of its sending direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// This number of bytes, at least one, are available in one contiguous piece.
    Bytes(usize),
    /// There is nothing to read now.
    Nothing,
    /// Everything has been read, and the program has shut its sending direction down.
    Finished,
    /// Everything has been read, and the program's last descriptor is closed.
    Closed,
    /// The program has reset the connection, was killed with bytes unread, or has corrupted the memory.
    Broken,
}

/// The program has corrupted the memory of the connection, or is gone: the connection must be reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

/// The proxy's endpoint of a connection, which stands in for the program of the other node. No method blocks. The
/// provided methods suit an endpoint that never sleeps and ignores the end of the connection.
pub trait LocalEndpoint: Sized {
    /// Returns whether [`LocalEndpoint::input`] may have something new to report. Called often, and should cost one
    /// load.
    fn may_have_input(&mut self) -> bool;
    /// Returns what the program has sent and the engine has not consumed.
    fn input(&mut self) -> Input;
    /// Appends the first `len_bytes` of the input to a record.
    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize);
    /// Copies bytes of the input to memory of this process, from `skip_bytes` on.
    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]);
    /// Consumes bytes that were copied.
    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken>;
    /// Writes bytes of a window to the program, and returns the number of bytes that it had room for.
    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken>;
    /// As [`LocalEndpoint::write_span`], from memory of this process.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken>;
    /// Returns whether there is enough room to justify a wake-up.
    fn has_room(&mut self) -> bool;
    /// Wakes the program if it sleeps until bytes are written or consumed, which has happened since the last call.
    /// Returns whether it was woken.
    fn wake_sleeper(&mut self) -> bool {
        false
    }

    /// Tells the program that no bytes follow.
    fn finish(&mut self) {}

    /// Tells the program that the other endpoint has closed in good order.
    fn close(self) {}

    /// Tells the program that the connection was reset.
    fn reset(self) {}

    /// Asks the program to ring when it sends, or also when it has read. The engine polls once more afterwards.
    fn park(&mut self, _for_room: bool) {}

    /// Returns memory that is not used. Called a few times a second while [`LocalEndpoint`]s have such memory.
    fn reclaim(&mut self) {}

    /// Ends what [`LocalEndpoint::park`] began.
    fn unpark(&mut self) {}

    /// Takes what the kernel has reported of the program: rings of its bell, input, and ends.
    fn note_events(&mut self) {}

    /// Returns whether the program has reset the connection or was killed: earlier bytes may then be discarded.
    fn is_broken(&mut self) -> bool {
        false
    }

    /// The server at the other node has accepted the connection that this program opened.
    fn opened(&mut self) {}

    /// The connection `number` has begun, and the peer has accepted the span that this endpoint has proposed, or may
    /// use the one that it has proposed itself. Returns whether there is such a span.
    fn begin_with_span(&mut self, _number: ConnectionNumber) -> bool {
        false
    }

    /// Returns whether the program has rung for the program at the other node since the last call.
    fn take_ring(&mut self) -> bool {
        false
    }

    /// Returns once whether the program does not use its span any more.
    fn take_left(&mut self) -> bool {
        false
    }

    /// Tells the program that the other program does not use the span any more.
    fn peer_left(&mut self) {}

    /// Wakes the program of a connection with a span, because the other program has stored into its window.
    fn wake(&mut self) {}

    /// Returns whether a connection with a span can be resumed over another link.
    fn may_outlive_link(&mut self) -> bool {
        false
    }

    /// Returns the index of the span, which must be the same at both nodes.
    fn span_index(&self) -> u32 {
        0
    }

    /// Returns the kernel's counts of what was carried for the program; `None` if the kernel has ended the connection.
    fn carried(&mut self) -> Option<Carried> {
        None
    }
}
