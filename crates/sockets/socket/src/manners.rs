//! Giving way: in long copies, and whether it brings anything.
//!
//! A stream whose bytes are there copies for as long as there is room, and whoever shares its processor waits: where
//! processors are few, a short message between two other programs waits for such copies at every hand-over. So a
//! program that its proxy has told so ([`crate::segment::Status::GiveWay`]) lets others run between pieces. Whether
//! there are too few processors each party finds out for itself, by what its yields bring ([`Yielder`]): the parties of
//! a message may be many on one processor and alone on another.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::sandbox;
use crate::spin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes that are copied before others may run: a microsecond or two.
const PIECE_BYTES: usize = 8 << 10;
/// After a yield that brought nobody a short turn, the next ones are left out for so long, twice as long each time,
const REST_TICKS_MIN: u64 = 2 * TICKS_PER_MICROSECOND;
/// and for so many times as long as the yield took at most: milliseconds each beside somebody who computes.
const REST_PER_YIELD: u64 = 16;

/// Bytes that this process has copied since it last gave way, in connections that do.
static COPIED_BYTES: AtomicUsize = AtomicUsize::new(0);
static YIELDER: Yielder = Yielder::new();

/// Lets others run, as long as there are any that want the processor for a moment. A yield that nobody takes costs half
/// a microsecond, and one that is taken by somebody who computes costs milliseconds: then the next ones are left out.
#[derive(Debug)]
pub struct Yielder {
    /// When the last yield ended, by the clock's ticks; zero before the first.
    yielded_ticks: AtomicU64,
    /// For how long there is none after it; zero where it brought somebody a short turn.
    rest_ticks: AtomicU64,
}

impl Yielder {
    /// That has tried nothing.
    pub const fn new() -> Self {
        Self { yielded_ticks: AtomicU64::new(0), rest_ticks: AtomicU64::new(0) }
    }

    /// Lets others run, unless that brought nothing a moment ago.
    pub fn give_way(&self) {
        let before = ticks();
        if !sandbox::is_confined() && self.is_due(before) && !spin::hogs().are_there(before) {
            rustix::thread::sched_yield();
            let after = ticks();
            self.note(before, after);
            spin::hogs().note_away(before, after);
        }
    }

    /// Whether somebody took a short turn in the last yield.
    pub fn lets_others_run(&self) -> bool {
        self.yielded_ticks.load(Ordering::Relaxed) != 0 && self.rest_ticks.load(Ordering::Relaxed) == 0
    }

    fn is_due(&self, now: u64) -> bool {
        // A clock that was set back, with the whole machine, ends a rest.
        now.wrapping_sub(self.yielded_ticks.load(Ordering::Relaxed)) >= self.rest_ticks.load(Ordering::Relaxed)
    }

    /// A yield began and ended then.
    fn note(&self, before: u64, after: u64) {
        let took_ticks = after.saturating_sub(before);
        // Threads that yield at once overwrite each other: one tries again too soon, or too late.
        let rest_ticks = match spin::is_short_turn(took_ticks) {
            true => 0,
            false => {
                let doubled_ticks = self.rest_ticks.load(Ordering::Relaxed).saturating_mul(2);
                doubled_ticks.min(REST_PER_YIELD.saturating_mul(took_ticks)).max(REST_TICKS_MIN)
            }
        };
        self.rest_ticks.store(rest_ticks, Ordering::Relaxed);
        self.yielded_ticks.store(after, Ordering::Relaxed);
    }
}

impl Default for Yielder {
    fn default() -> Self {
        Self::new()
    }
}

/// So many bytes were copied by a connection that gives way.
fn note_copied(bytes: usize) {
    // Threads that copy at once lose some of the count: then one gives way later.
    let copied_bytes = COPIED_BYTES.load(Ordering::Relaxed).saturating_add(bytes);
    let is_enough = copied_bytes >= PIECE_BYTES;
    COPIED_BYTES.store(if is_enough { 0 } else { copied_bytes }, Ordering::Relaxed);
    if is_enough {
        YIELDER.give_way();
    }
}

/// Copies `len_bytes` by `copy`, which gets where a piece begins and how long it is, and answers how much of it went:
/// less than all of it ends the copy. Returns how many bytes went, and gives way after each piece.
///
/// # Errors
/// What `copy` answers.
pub fn in_pieces<E>(len_bytes: usize, mut copy: impl FnMut(usize, usize) -> Result<usize, E>) -> Result<usize, E> {
    let mut done_bytes = 0;
    while done_bytes < len_bytes {
        let piece_bytes = PIECE_BYTES.min(len_bytes - done_bytes);
        let went_bytes = copy(done_bytes, piece_bytes)?;
        done_bytes += went_bytes;
        note_copied(went_bytes);
        if went_bytes < piece_bytes {
            break;
        }
    }
    Ok(done_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN_TICKS: u64 = 2 * TICKS_PER_MICROSECOND;
    /// Of somebody who computes.
    const LONG_TICKS: u64 = 4000 * TICKS_PER_MICROSECOND;

    #[test]
    fn others_are_let_run_for_as_long_as_they_take_short_turns() {
        let yielder = Yielder::new();
        for before in (1..100).map(|count| count * TURN_TICKS) {
            assert!(yielder.is_due(before));
            yielder.note(before, before + TURN_TICKS);
        }
    }

    #[test]
    fn yields_that_nobody_takes_are_left_out_for_longer_each_time_until_somebody_does() {
        let yielder = Yielder::new();
        let rest_after = |took_ticks| {
            yielder.note(1000, 1000 + took_ticks);
            yielder.rest_ticks.load(Ordering::Relaxed)
        };
        assert!(!spin::is_short_turn(1) && !spin::is_short_turn(LONG_TICKS), "what the others are");
        let rests = [(); 5].map(|()| rest_after(LONG_TICKS));
        assert_eq!(rests, [1, 2, 4, 8, 16].map(|times| times * REST_TICKS_MIN));
        let rested = 1000 + LONG_TICKS + rests[4];
        assert_eq!([rested - 1, rested, 999].map(|now| yielder.is_due(now)), [false, true, true]);
        assert_eq!([rest_after(TURN_TICKS), rest_after(1), rest_after(1)], [0, REST_TICKS_MIN, REST_TICKS_MIN]);
    }

    #[test]
    fn rests_are_never_longer_than_some_times_what_the_yield_took() {
        let yielder = Yielder::new();
        (0..64).for_each(|_| yielder.note(1000, 1000 + LONG_TICKS));
        assert_eq!(yielder.rest_ticks.load(Ordering::Relaxed), REST_PER_YIELD * LONG_TICKS);
        assert!(!yielder.lets_others_run());
    }

    #[test]
    fn pieces_follow_each_other_to_the_end() {
        let mut pieces = Vec::new();
        let all = in_pieces(2 * PIECE_BYTES + 5, |begin, len_bytes| {
            pieces.push((begin, len_bytes));
            Ok::<_, ()>(len_bytes)
        });
        assert_eq!(all, Ok(2 * PIECE_BYTES + 5));
        assert_eq!(pieces, [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 5)]);
    }

    #[test]
    fn a_piece_that_goes_in_part_is_the_last() {
        let mut room_bytes = PIECE_BYTES + 7;
        let went = in_pieces(4 * PIECE_BYTES, |_, len_bytes| {
            let went_bytes = len_bytes.min(room_bytes);
            room_bytes -= went_bytes;
            Ok::<_, ()>(went_bytes)
        });
        assert_eq!(went, Ok(PIECE_BYTES + 7));
    }

    #[test]
    fn errors_end_it_and_nothing_is_no_copy() {
        assert_eq!(in_pieces(9, |_, _| Err("broken")), Err("broken"));
        assert_eq!(in_pieces(0, |_, _| Err("not called")), Ok(0));
    }
}
