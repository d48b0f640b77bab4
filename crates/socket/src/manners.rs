//! Long copies that give way.
//!
//! A stream whose bytes are there copies for as long as there is room, and whoever shares its processor waits: where
//! processors are few, a short message between two other programs waits for such copies at every hand-over. So a
//! program that its proxy has told so ([`crate::segment::Status::GiveWay`]) lets others run between pieces.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that are copied before others may run: a microsecond or two.
const PIECE_BYTES: usize = 8 << 10;

/// Bytes that this process has copied since it last gave way, in connections that do.
static COPIED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// So many bytes were copied by a connection that gives way.
fn note_copied(bytes: usize) {
    // Threads that copy at once lose some of the count: then one gives way later.
    let copied_bytes = COPIED_BYTES.load(Ordering::Relaxed).saturating_add(bytes);
    let is_enough = copied_bytes >= PIECE_BYTES;
    COPIED_BYTES.store(if is_enough { 0 } else { copied_bytes }, Ordering::Relaxed);
    if is_enough {
        rustix::thread::sched_yield();
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
