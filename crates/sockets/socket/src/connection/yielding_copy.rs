//! Long copies in chunks, between which other threads can run.
//!
//! A stream copies as long as there is room, while threads that share its processor wait. Where processors are few, a
//! short message between two other programs waits for such copies at every hop. A program whose proxy has asked it to
//! yield ([`segment::PeerStatus::GiveWay`]) yields between chunks, as long as yielding helps.

use crate::process::sandbox;
use std::sync::atomic::{AtomicUsize, Ordering};
use wait::Yielder;

/// Bytes of a chunk, which take one or two microseconds to copy.
const CHUNK_BYTES: usize = 8 << 10;

/// Bytes that this process has copied since it last yielded, in connections that yield.
static COPIED_BYTES: AtomicUsize = AtomicUsize::new(0);
static YIELDER: Yielder = Yielder::new();

/// Counts copied bytes, and yields after each chunk.
fn note_copied(bytes: usize) {
    // Threads that copy at the same time may lose part of the count, and then yield later.
    let copied_bytes = COPIED_BYTES.load(Ordering::Relaxed).saturating_add(bytes);
    let is_enough = copied_bytes >= CHUNK_BYTES;
    COPIED_BYTES.store(if is_enough { 0 } else { copied_bytes }, Ordering::Relaxed);
    if is_enough && !sandbox::is_confined() {
        YIELDER.yield_if_useful();
    }
}

/// Copies `len_bytes` by `copy`, which takes the offset and the length of a chunk and returns how many bytes it copied.
/// A chunk that is copied in part ends the copy. Yields after each chunk. Returns the number of bytes copied.
///
/// # Errors
/// Those of `copy`.
pub fn copy_yielding<E>(len_bytes: usize, mut copy: impl FnMut(usize, usize) -> Result<usize, E>) -> Result<usize, E> {
    let mut done_bytes = 0;
    while done_bytes < len_bytes {
        let chunk_bytes = CHUNK_BYTES.min(len_bytes - done_bytes);
        let copied_bytes = copy(done_bytes, chunk_bytes)?;
        done_bytes += copied_bytes;
        note_copied(copied_bytes);
        if copied_bytes < chunk_bytes {
            break;
        }
    }
    Ok(done_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_whole_length() {
        let mut chunks = Vec::new();
        let all = copy_yielding(2 * CHUNK_BYTES + 5, |begin, len_bytes| {
            chunks.push((begin, len_bytes));
            Ok::<_, ()>(len_bytes)
        });
        assert_eq!(all, Ok(2 * CHUNK_BYTES + 5));
        assert_eq!(chunks, [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, 5)]);
    }

    #[test]
    fn a_chunk_that_is_copied_in_part_is_the_last() {
        let mut room_bytes = CHUNK_BYTES + 7;
        let copied = copy_yielding(4 * CHUNK_BYTES, |_, len_bytes| {
            let copied_bytes = len_bytes.min(room_bytes);
            room_bytes -= copied_bytes;
            Ok::<_, ()>(copied_bytes)
        });
        assert_eq!(copied, Ok(CHUNK_BYTES + 7));
    }

    #[test]
    fn an_error_ends_the_copy_and_an_empty_one_copies_nothing() {
        assert_eq!(copy_yielding(9, |_, _| Err("broken")), Err("broken"));
        assert_eq!(copy_yielding(0, |_, _| Err("not called")), Ok(0));
    }
}
