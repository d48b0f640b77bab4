//! Programs of the simulator, which send and read by rules and record round-trip times.

use fabric::{Inbound, Outbound};
use lane::{Draft, Span};
use proxy::{Broken, Input, LocalEndpoint};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of every record: their values do not matter.
const ZEROS: [u8; 16 << 10] = [0; 16 << 10];

/// What a program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Sends messages of this length, as fast as they are consumed.
    Source(usize),
    /// Reads everything.
    Sink,
    /// Reads nothing: its buffer holds this number of bytes.
    Unread(usize),
    /// Sends this number of bytes, and again whenever as many have come back.
    Ping(usize),
    /// Sends back what it has received.
    Pong,
}

/// A program.
#[derive(Debug, Clone)]
pub(crate) struct Program(Rc<RefCell<State>>);

#[derive(Debug)]
struct State {
    role: Role,
    /// The time between receiving and sending.
    answer_ns: u64,
    due_bytes: usize,
    due_ns: u64,
    come_bytes: usize,
    sent_ns: u64,
    round_trips_ns: Vec<u64>,
}

/// The proxy's endpoint of a program.
#[derive(Debug)]
pub(crate) struct ProgramEnd {
    program: Program,
    clock_ns: Arc<AtomicU64>,
}

impl Program {
    /// Creates a program that begins at `begin_ns`.
    pub(crate) fn new(role: Role, answer_ns: u64, begin_ns: u64) -> Self {
        let due_bytes = if let Role::Ping(bytes) = role { bytes } else { 0 };
        let state = State {
            role,
            answer_ns,
            due_bytes,
            due_ns: begin_ns,
            come_bytes: 0,
            sent_ns: begin_ns,
            round_trips_ns: Vec::new(),
        };
        Self(Rc::new(RefCell::new(state)))
    }

    pub(crate) fn end(&self, clock_ns: &Arc<AtomicU64>) -> ProgramEnd {
        ProgramEnd { program: self.clone(), clock_ns: Arc::clone(clock_ns) }
    }

    /// Returns the round-trip times so far.
    pub(crate) fn round_trips_ns(&self) -> Vec<u64> {
        self.0.borrow().round_trips_ns.clone()
    }
}

impl State {
    fn waiting_bytes(&self, now_ns: u64) -> usize {
        match self.role {
            Role::Source(bytes) if now_ns >= self.due_ns => bytes,
            Role::Ping(_) | Role::Pong if now_ns >= self.due_ns => self.due_bytes,
            _ => 0,
        }
    }

    fn take(&mut self, bytes: usize, now_ns: u64) -> usize {
        self.come_bytes += bytes;
        match self.role {
            Role::Source(_) | Role::Sink => {}
            Role::Unread(bytes_max) => {
                let room = bytes_max.saturating_sub(self.come_bytes - bytes);
                let taken = room.min(bytes);
                self.come_bytes -= bytes - taken;
                return taken;
            }
            Role::Pong => {
                self.due_bytes += bytes;
                self.due_ns = now_ns + self.answer_ns;
            }
            Role::Ping(size) => {
                if self.come_bytes >= size {
                    self.come_bytes = 0;
                    // The program's time is counted at both ends.
                    self.round_trips_ns.push(now_ns + self.answer_ns - self.sent_ns);
                    self.due_ns = now_ns + self.answer_ns;
                    self.sent_ns = self.due_ns;
                    self.due_bytes = size;
                }
            }
        }
        bytes
    }
}

impl ProgramEnd {
    fn now_ns(&self) -> u64 {
        self.clock_ns.load(Ordering::Relaxed)
    }
}

impl LocalEndpoint for ProgramEnd {
    fn may_have_input(&mut self) -> bool {
        self.input() != Input::Nothing
    }

    fn input(&mut self) -> Input {
        match self.program.0.borrow().waiting_bytes(self.now_ns()) {
            0 => Input::Nothing,
            bytes => Input::Bytes(bytes),
        }
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        draft.append(&ZEROS[..len_bytes]);
    }

    fn read_input(&mut self, _skip_bytes: usize, destination: &mut [u8]) {
        destination.fill(0);
    }

    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        let mut state = self.program.0.borrow_mut();
        state.due_bytes = state.due_bytes.saturating_sub(len_bytes);
        Ok(())
    }

    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        let now_ns = self.now_ns();
        Ok(self.program.0.borrow_mut().take(bytes.len_bytes(), now_ns))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let now_ns = self.now_ns();
        Ok(self.program.0.borrow_mut().take(bytes.len(), now_ns))
    }

    fn has_room(&mut self) -> bool {
        !matches!(self.program.0.borrow().role, Role::Unread(_))
    }
}
