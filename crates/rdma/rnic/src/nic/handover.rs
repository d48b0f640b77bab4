//! How the receiving side of a queue pair goes from hardware to software and back (srnic.md, "Mode race").
//!
//! Hardware alone takes packets while each is the expected one. The first that is not sends it into the slow path:
//! from then on it places payloads, but *every* header that is not of the past goes to the control queue, and software
//! keeps the bitmap. Software tells by commands how far everything is there, and returns the queue pair by a
//! compare-and-set on the expected number: "all before E is there".
//!
//! On a busy queue pair headers are always under way to software, so a command that succeeds only when E is the number
//! after the newest header would never succeed. Hardware therefore keeps one number more: since `clean_from`, headers
//! were queued in order, without a gap, and with nothing to be done for them that has an order (no completion, no
//! READ). If E is at or after that, everything before the newest header is there, nothing that software still has to do
//! for it can come out of order, and hardware goes on behind the newest header. What is still queued then, software
//! finds to be of the past, by number, or notes for nothing.
//!
//! What software has settled matters to hardware too: a copy that was long under way must not be placed over memory
//! whose message is completed, for programs use it again.

use crate::wire::Psn;

use super::packet_bitmap::PacketBitmap;

/// Hardware's half: on chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HardwareReceiver {
    /// Fast: the next packet. Slow: the number after the newest one that was queued.
    expected: Psn24,
    /// All before this is there and done with.
    cumulative: Psn24,
    /// Slow: from here on all before `expected` were queued, with nothing to do for them in order.
    clean_from: Psn24,
    is_slow: bool,
}

/// A number of 24 bits takes 3 bytes on chip.
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
    /// The expected one: taken by hardware alone.
    InOrder,
    /// Placed, and its header queued for software.
    SlowPath,
    /// A copy of what is settled: never placed.
    Duplicate,
    /// Further ahead than bitmaps reach: dropped.
    BeyondWindow,
}

impl HardwareReceiver {
    /// Nothing came yet.
    pub const fn new(first: Psn) -> Self {
        let first = Psn24::new(first);
        Self { expected: first, cumulative: first, clean_from: first, is_slow: false }
    }

    /// All before this is there and done with.
    pub const fn cumulative(&self) -> Psn {
        if self.is_slow { self.cumulative.psn() } else { self.expected.psn() }
    }

    /// Whether software has this queue pair.
    pub const fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// What to do with this packet.
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

    /// The expected packet was taken.
    pub const fn accept(&mut self) {
        self.expected = Psn24::new(self.expected.psn().plus(1));
        self.cumulative = self.expected;
    }

    /// A packet's header is in the control queue; to be called only once it is. `is_ordered`: something is to be done
    /// for it, in order. True when that begins the slow path.
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

    /// Software's word that all before `to` is there. True when that is news.
    pub const fn advance_cumulative(&mut self, to: Psn) -> bool {
        let is_news = self.is_slow && to.after(self.cumulative.psn()) > 0;
        if is_news {
            self.cumulative = Psn24::new(to);
        }
        is_news
    }

    /// Software's compare-and-set, "all before `expected` is there": back to hardware alone, if what was queued since
    /// has no gap and nothing to be done in order.
    pub const fn return_to_hardware(&mut self, expected: Psn) -> bool {
        let fits = self.is_slow && expected.after(self.clean_from.psn()) >= 0;
        if fits {
            self.is_slow = false;
            self.cumulative = self.expected;
        }
        fits
    }
}

/// Software's half: in the host's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftwareReceiver {
    /// All before this is there.
    expected: Psn,
    /// Bit i: the packet `expected + i` is there.
    arrived: PacketBitmap,
}

impl SoftwareReceiver {
    /// Nothing came yet.
    pub const fn new(first: Psn) -> Self {
        Self { expected: first, arrived: PacketBitmap::EMPTY }
    }

    /// All before this is there.
    pub const fn expected(&self) -> Psn {
        self.expected
    }

    /// Takes a header from the control queue; `cumulative` is what hardware had settled when it queued it. True when the
    /// packet is new.
    pub fn accept(&mut self, psn: Psn, cumulative: Psn) -> bool {
        // Hardware went on alone since: what software knew is past.
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

    /// Whether nothing is missing: the queue pair can be given back.
    pub fn is_complete(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Bit i: the packet `expected + 1 + i` is there.
    pub fn sack_bitmap(&self) -> u128 {
        self.arrived.window(1)
    }
}

#[cfg(test)]
mod search;
