//! The handover of a queue pair's receive side from hardware to software and back (srnic.md, "Mode race").
//!
//! Hardware alone accepts packets while each is the expected one. The first packet that is not expected starts the slow
//! path: hardware still places payloads, but puts *every* header that is not a duplicate into the control queue, and
//! software keeps the bitmap. Software reports by commands how far all packets have arrived, and returns the receive
//! side with a compare-and-set on the expected PSN: "all packets before E have arrived".
//!
//! On a busy queue pair some headers are always in flight to software, so a command that succeeds only if E follows the
//! newest header would never succeed. Hardware therefore keeps one more PSN, `clean_from`: since then, headers were
//! queued in order, without a gap, and none of them needs an action that must be executed in order (a completion or a
//! READ). If E is at or after `clean_from`, all packets before the newest header have arrived and no action that
//! software still has to execute can come out of order; hardware continues after the newest header. Software later
//! finds headers that are still queued to be duplicates, by their PSN, or notes them without effect.
//!
//! Hardware must know the cumulative PSN of software, too: a copy that was delayed for long must not be placed over
//! memory whose message is complete, because programs reuse that memory.

use crate::wire::Psn;

use super::packet_bitmap::PacketBitmap;

/// The receive state that hardware keeps on chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HardwareReceiver {
    /// Fast path: the next PSN. Slow path: the PSN after the newest header that was queued.
    expected: Psn24,
    /// All packets before this PSN have arrived and are executed.
    cumulative: Psn24,
    /// Slow path: since this PSN, headers were queued in order and need no ordered action.
    clean_from: Psn24,
    is_slow: bool,
}

/// A PSN in 3 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Psn24([u8; 3]);

impl Psn24 {
    const fn new(psn: Psn) -> Self {
        let [low, middle, high, _] = psn.get().to_le_bytes();
        Self([low, middle, high])
    }

    const fn psn(self) -> Psn {
        let [low, middle, high] = self.0;
        Psn::new(u32::from_le_bytes([low, middle, high, 0]))
    }
}

/// What hardware does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveVerdict {
    /// The expected packet: accepted by hardware alone.
    InOrder,
    /// The payload is placed, and the header goes to software.
    SlowPath,
    /// A copy of a packet before the cumulative PSN: not placed.
    Duplicate,
    /// Beyond the window of the bitmaps: dropped.
    BeyondWindow,
}

impl HardwareReceiver {
    /// Creates the state before the first packet.
    pub const fn new(first: Psn) -> Self {
        let first = Psn24::new(first);
        Self { expected: first, cumulative: first, clean_from: first, is_slow: false }
    }

    /// Returns the cumulative PSN: all packets before it have arrived and are executed.
    pub const fn cumulative(&self) -> Psn {
        if self.is_slow { self.cumulative.psn() } else { self.expected.psn() }
    }

    /// Returns whether software owns the receive side.
    pub const fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Returns what to do with a packet.
    pub const fn classify(&self, psn: Psn, window_packets: u32) -> ReceiveVerdict {
        let ahead = psn.after(self.cumulative());
        if ahead < 0 {
            ReceiveVerdict::Duplicate
        } else if ahead as u32 >= window_packets {
            ReceiveVerdict::BeyondWindow
        } else if ahead == 0 && !self.is_slow {
            ReceiveVerdict::InOrder
        } else {
            ReceiveVerdict::SlowPath
        }
    }

    /// Advances past the expected packet.
    pub const fn accept(&mut self) {
        self.expected = Psn24::new(self.expected.psn().plus(1));
        self.cumulative = self.expected;
    }

    /// Notes that the header of a packet has entered the control queue; must be called only afterwards. `is_ordered`
    /// tells whether it needs an action that must be executed in order. Returns true if this starts the slow path.
    pub const fn note_queued(&mut self, psn: Psn, is_ordered: bool) -> bool {
        let begins = !self.is_slow;
        if begins {
            self.cumulative = self.expected;
            self.clean_from = self.expected;
            self.is_slow = true;
        }
        let ahead = psn.after(self.expected.psn());
        if ahead > 0 {
            self.clean_from = Psn24::new(psn);
        }
        if ahead >= 0 {
            self.expected = Psn24::new(psn.plus(1));
        }
        if is_ordered && psn.after(self.clean_from.psn()) >= 0 {
            self.clean_from = Psn24::new(psn.plus(1));
        }
        begins
    }

    /// Executes software's command that all packets before `to` have arrived. Returns true if this advances the
    /// cumulative PSN.
    pub const fn advance_cumulative(&mut self, to: Psn) -> bool {
        let has_advanced = self.is_slow && to.after(self.cumulative.psn()) > 0;
        if has_advanced {
            self.cumulative = Psn24::new(to);
        }
        has_advanced
    }

    /// Executes software's compare-and-set "all packets before `expected` have arrived": returns the receive side to
    /// hardware if the headers queued since then have no gap and need no ordered action.
    pub const fn return_to_hardware(&mut self, expected: Psn) -> bool {
        let succeeds = self.is_slow && expected.after(self.clean_from.psn()) >= 0;
        if succeeds {
            self.is_slow = false;
            self.cumulative = self.expected;
        }
        succeeds
    }
}

/// The receive state that software keeps in the host's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftwareReceiver {
    /// All packets before this PSN have arrived.
    expected: Psn,
    /// Bit i: the packet `expected + i` has arrived.
    arrived: PacketBitmap,
}

impl SoftwareReceiver {
    /// Creates the state before the first packet.
    pub const fn new(first: Psn) -> Self {
        Self { expected: first, arrived: PacketBitmap::EMPTY }
    }

    /// Returns the first PSN that is missing.
    pub const fn expected(&self) -> Psn {
        self.expected
    }

    /// Processes a header from the control queue; `cumulative` is the cumulative PSN of hardware when it queued the
    /// header. Returns true if the packet is new.
    pub fn accept(&mut self, psn: Psn, cumulative: Psn) -> bool {
        // Hardware accepted packets alone in the meantime; the state before that is outdated.
        if cumulative.after(self.expected) > 0 {
            self.arrived.advance(cumulative.after(self.expected) as u32);
            self.expected = cumulative;
        }
        let ahead = psn.after(self.expected);
        if ahead < 0 || !self.arrived.set(ahead as u32) {
            return false;
        }
        let there = self.arrived.leading_ones();
        self.arrived.advance(there);
        self.expected = self.expected.plus(there);
        true
    }

    /// Returns whether no packet is missing, so that the receive side can be returned.
    pub fn is_complete(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Returns a bitmap with bit i set if the packet `expected + 1 + i` has arrived.
    pub fn sack_bitmap(&self) -> u128 {
        self.arrived.window(1)
    }
}

#[cfg(test)]
mod search;
