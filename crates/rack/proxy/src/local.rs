//! What the engine asks of the end of a connection that a program of this node holds the other end of.

use crate::frame::Number;
use fabric::{Inbound, Outbound};
use lane::{Draft, Span};

/// What a program has sent, or what else there is to say of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// So many bytes, at least one, wait in one piece.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// Everything is taken, and the program has shut its sending direction down.
    Finished,
    /// Everything is taken, and the program's last descriptor is gone.
    Closed,
    /// The program of a connection in the windows has rung for the other one.
    Rang,
    /// The program reset the connection, was killed with bytes unread, or spoiled the memory.
    Broken,
}

/// The program has spoiled the memory of the connection, or is gone: it is to be reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

/// The local end of a connection: the proxy's, as a stand-in for the program of the other node. Nothing here waits.
/// What is provided is right where nobody sleeps, and nobody wants to know of ends.
pub trait Local: Sized {
    /// Whether [`Local::input`] may have something new to say. Called often, and should cost one load.
    fn may_have_input(&mut self) -> bool;
    /// What the program has sent and nobody has taken.
    fn input(&mut self) -> Input;
    /// Appends the first `len_bytes` of the input to a record, as they are.
    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize);
    /// Copies bytes of the input to memory of this process, from `skip_bytes` on.
    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]);
    /// Takes bytes that were copied.
    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken>;
    /// Hands bytes of a window to the program; answers how many it had room for.
    fn put_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken>;
    /// As [`Local::put_span`], from memory of this process.
    fn put(&mut self, bytes: &[u8]) -> Result<usize, Broken>;
    /// Whether there is enough room to be worth a wake-up.
    fn has_room(&mut self) -> bool;
    /// Wakes the program if it sleeps for what was put or consumed since the last call; answers whether it did.
    fn ring(&mut self) -> bool {
        false
    }

    /// Tells the program whether others, who have little to say, wait for the processor that it copies with.
    fn give_way(&mut self, _gives_way: bool) {}

    /// Tells the program that nothing follows.
    fn finish(&mut self) {}

    /// Tells the program that the other end is gone, in good order.
    fn close(self) {}

    /// Tells the program that the connection was reset.
    fn reset(self) {}

    /// Asks the program to ring when it sends, or also when it has read. The engine looks once more afterwards.
    fn park(&mut self, _for_room: bool) {}

    /// Ends what [`Local::park`] began.
    fn unpark(&mut self) {}

    /// Takes the rings out of the lifeline, and finds out whether it has ended.
    fn hear(&mut self) {}

    /// Whether the program has reset the connection or was killed: what it sent before may not matter any more.
    fn is_broken(&mut self) -> bool {
        false
    }

    /// The server at the other node has taken the connection that this program opened.
    fn opened(&mut self) {}

    /// Whether the connection lies in the windows: then [`Local::input`] says `Rang`, `Closed`, `Broken` or `Nothing`.
    fn is_direct(&self) -> bool {
        false
    }

    /// The connection `number` lies in the windows: where this end has proposed, or where it is already. `false`: it is
    /// not there, and has proposed nothing.
    fn placed(&mut self, _number: Number) -> bool {
        false
    }

    /// Where in the windows the connection lies: both nodes must mean the same place.
    fn place(&self) -> u32 {
        0
    }

    /// Wakes the program of a connection in the windows: the other one has stored.
    fn call(&mut self) {}

    /// Tells the program of a connection in the windows that nobody is left at the other end.
    fn peer_left(&mut self) {}
}
