//! Programs as the engine sees them: a stream in each direction, rings, and an end.

use fabric::{Inbound, Outbound};
use lane::{Draft, Span};
use proxy::{Broken, ConnectionKey, Input, LocalEndpoint};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a program and the proxy's endpoint of its connection share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Bytes that the proxy has not consumed.
    pub output: VecDeque<u8>,
    /// The program has shut its sending direction down.
    pub is_finished: bool,
    /// Its last descriptor is closed.
    pub is_closed: bool,
    /// It was killed with bytes unread, or reset the connection.
    pub is_killed: bool,
    /// Bytes that it can read.
    pub input: VecDeque<u8>,
    /// Bound on the unread bytes.
    pub input_bytes_max: usize,
    /// After the readable bytes, it finds the end of the stream.
    pub input_is_finished: bool,
    /// The other program has closed.
    pub input_is_closed: bool,
    /// The connection was reset.
    pub input_is_reset: bool,
    /// The proxy has asked to be rung for bytes.
    pub wants_bytes: bool,
    /// The proxy has asked to be rung for room.
    pub wants_room: bool,
    /// The key of the connection in the proxy.
    pub key: Option<ConnectionKey>,
    /// The program has rung.
    pub is_rung: bool,
    /// Sent just when the proxy parks the connection, without a ring.
    pub late_output: Vec<u8>,
    /// Sent just when the proxy has consumed earlier bytes.
    pub next_output: Vec<u8>,
    finish_is_seen: bool,
    consumed_bytes: u64,
    /// The other node's server has accepted the connection.
    pub is_opened: bool,
}

/// The proxy's endpoint of a program.
#[derive(Debug, Clone)]
pub struct ProgramStub(pub Arc<Mutex<Shared>>);

impl ProgramStub {
    pub fn new(input_bytes_max: usize) -> Self {
        Self(Arc::new(Mutex::new(Shared { input_bytes_max, ..Shared::default() })))
    }

    pub fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program sends.
    pub fn send(&self, bytes: impl Iterator<Item = u8>) {
        let mut shared = self.lock();
        shared.output.extend(bytes);
        shared.ring_for_bytes();
    }

    /// The program reads.
    pub fn read(&self, bytes_max: usize) -> Vec<u8> {
        let mut shared = self.lock();
        let bytes = bytes_max.min(shared.input.len());
        let read = shared.input.drain(..bytes).collect();
        if shared.has_room() && shared.wants_room {
            shared.wants_room = false;
            shared.is_rung = true;
        }
        read
    }

    /// The program changes its state.
    pub fn change(&self, change: impl FnOnce(&mut Shared)) {
        let mut shared = self.lock();
        change(&mut shared);
        shared.is_rung = true;
    }
}

impl Shared {
    fn ring_for_bytes(&mut self) {
        if std::mem::take(&mut self.wants_bytes) {
            self.is_rung = true;
        }
    }

    fn room_bytes(&self) -> usize {
        self.input_bytes_max - self.input.len()
    }

    fn has_room(&self) -> bool {
        self.room_bytes() * 4 >= self.input_bytes_max
    }

    fn accept(&mut self, bytes: &[u8]) -> usize {
        assert!(!self.input_is_finished && !self.input_is_closed, "bytes after the end");
        let taken = bytes.len().min(self.room_bytes());
        self.input.extend(&bytes[..taken]);
        taken
    }
}

impl LocalEndpoint for ProgramStub {
    fn may_have_input(&mut self) -> bool {
        let shared = self.lock();
        let end_is_new = shared.is_closed || shared.is_killed || (shared.is_finished && !shared.finish_is_seen);
        !shared.output.is_empty() || end_is_new
    }

    fn input(&mut self) -> Input {
        let mut shared = self.lock();
        let first = shared.output.as_slices().0.len();
        match (shared.is_killed, first, shared.is_closed, shared.is_finished) {
            (true, ..) => Input::Broken,
            (_, 1.., ..) => Input::Bytes(first),
            (_, _, true, _) => Input::Closed,
            (_, _, _, true) => {
                shared.finish_is_seen = true;
                Input::Finished
            }
            _ => Input::Nothing,
        }
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        draft.append(&self.lock().output.as_slices().0[..len_bytes]);
    }

    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        let shared = self.lock();
        destination.copy_from_slice(&shared.output.as_slices().0[skip_bytes..skip_bytes + destination.len()]);
    }

    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        let mut shared = self.lock();
        shared.output.drain(..len_bytes);
        shared.consumed_bytes += len_bytes as u64;
        let next = std::mem::take(&mut shared.next_output);
        shared.output.extend(next);
        Ok(())
    }

    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        let mut copy = vec![0; bytes.len_bytes()];
        bytes.read(&mut copy);
        self.write(&copy)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        Ok(self.lock().accept(bytes))
    }

    fn has_room(&mut self) -> bool {
        self.lock().has_room()
    }

    fn finish(&mut self) {
        self.lock().input_is_finished = true;
    }

    fn close(self) {
        self.lock().input_is_closed = true;
    }

    fn reset(self) {
        self.lock().input_is_reset = true;
    }

    fn park(&mut self, for_room: bool) {
        let mut shared = self.lock();
        let late = std::mem::take(&mut shared.late_output);
        shared.output.extend(late);
        shared.wants_bytes = true;
        shared.wants_room |= for_room;
    }

    fn unpark(&mut self) {
        let mut shared = self.lock();
        (shared.wants_bytes, shared.wants_room) = (false, false);
    }

    fn is_broken(&mut self) -> bool {
        self.lock().is_killed
    }

    fn opened(&mut self) {
        let mut shared = self.lock();
        assert!(!shared.is_opened, "opened twice");
        shared.is_opened = true;
    }
}
