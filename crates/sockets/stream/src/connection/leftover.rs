//! What a peer has left in a lane and TCP does not have, because the peer is gone: parent and child of a fork receive
//! each byte of it once.
//!
//! * The peer is gone at the fork: the parent copies the bytes to memory that both share ([`Leftover::new`]).
//! * The peer is asked at the fork to write them to TCP, and dies before it does: both read them in the lane, which
//!   does not change any more, and share only the number of those that were taken ([`Leftover::in_lane`]).

use crate::spans::for_each_part;
use libc::iovec;
use std::convert::Infallible;
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{Mapping, Region};

/// The most that is kept: more than a lane and the buffers of TCP have.
const BYTES_MAX: usize = 32 << 20;
/// Offset of the number of bytes that were taken.
const TAKEN_AT: usize = 0;
/// Offset of the bytes.
const BYTES_AT: usize = 64;

/// Unread bytes that several processes may receive, each byte once.
pub(super) struct Leftover {
    memory: Region,
    len_bytes: usize,
}

impl Leftover {
    /// Creates an empty one; `None` without memory for that.
    pub fn new() -> Option<Self> {
        Self::with_room(BYTES_MAX)
    }

    /// Creates one whose bytes stay in a lane; `None` without memory for the number of those that were taken.
    pub fn in_lane() -> Option<Self> {
        Self::with_room(0)
    }

    fn with_room(bytes: usize) -> Option<Self> {
        let mapping = Mapping::anonymous(BYTES_AT + bytes).ok()?;
        Some(Self { memory: Region::of_mapping(Arc::new(mapping)), len_bytes: 0 })
    }

    /// Returns the memory after the bytes, of which `add` then makes some part of them.
    pub fn room(&mut self) -> iovec {
        let (end, all_bytes) = (BYTES_AT + self.len_bytes, self.memory.len_bytes());
        iovec { iov_base: self.memory.pointer(end, all_bytes - end).as_ptr().cast(), iov_len: all_bytes - end }
    }

    /// Adds what was written to the [room](Leftover::room).
    pub fn add(&mut self, bytes: usize) {
        self.len_bytes = (self.len_bytes + bytes).min(self.memory.len_bytes() - BYTES_AT);
    }

    /// Returns it in memory without room for more; `None` without memory for that.
    pub fn finish(self) -> Option<Self> {
        let mut bytes = vec![0; self.len_bytes];
        self.memory.read(BYTES_AT, &mut bytes);
        let kept = Self::with_room(bytes.len())?;
        kept.memory.write(BYTES_AT, &bytes);
        Some(Self { len_bytes: bytes.len(), ..kept })
    }

    /// Returns the number of bytes that were taken.
    pub fn taken_bytes(&self) -> usize {
        usize::try_from(self.memory.load_u64(TAKEN_AT, Ordering::Acquire)).unwrap_or(usize::MAX)
    }

    /// Returns the number of copied bytes that nobody has taken.
    pub fn unread_bytes(&self) -> usize {
        self.len_bytes.saturating_sub(self.taken_bytes())
    }

    /// Copies unread bytes to the spans, after their first `skip` bytes, unless they are only to be discarded. A call
    /// that only peeks leaves them unread.
    ///
    /// # Safety
    /// Every span is writable for its length, or `discards`.
    pub unsafe fn receive(&self, spans: &[iovec], skip: usize, peeks: bool, discards: bool) -> usize {
        let copied = self.take::<Infallible>(self.len_bytes, spans, skip, peeks, |from, to, len_bytes| {
            if !discards {
                // SAFETY: the source is within the bytes, because `take` asks for no others. The target is within spans
                // that are writable, by this function's contract.
                unsafe { self.memory.read_to(BYTES_AT + from, to, len_bytes) };
            }
            Ok(len_bytes)
        });
        let Ok(bytes) = copied;
        bytes
    }

    /// Calls `copy` with offsets in the `len_bytes` bytes, and parts of the spans after their first `skip` bytes, for
    /// what was not taken. `copy` returns the number of bytes that it has copied. They are taken unless the call only
    /// peeks. Returns their number.
    ///
    /// # Errors
    /// Those of `copy`.
    pub fn take<E>(
        &self,
        len_bytes: usize,
        spans: &[iovec],
        skip: usize,
        peeks: bool,
        mut copy: impl FnMut(usize, *mut u8, usize) -> Result<usize, E>,
    ) -> Result<usize, E> {
        loop {
            let taken = self.memory.load_u64(TAKEN_AT, Ordering::Acquire);
            let begin = usize::try_from(taken).unwrap_or(usize::MAX).min(len_bytes);
            let mut done = 0;
            let bytes = for_each_part(spans, skip, len_bytes - begin, |to, part_bytes| {
                let copied = copy(begin + done, to, part_bytes)?;
                done += copied;
                Ok(copied)
            })?;
            let next = taken + bytes as u64;
            // Another process may have taken them meanwhile.
            if peeks || self.memory.compare_exchange_u64(TAKEN_AT, taken, next).is_ok() {
                return Ok(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Leftover {
        let mut leftover = Leftover::new().expect("memory");
        assert!(leftover.room().iov_len >= bytes.len());
        leftover.memory.write(BYTES_AT, bytes);
        leftover.add(bytes.len());
        leftover.finish().expect("memory")
    }

    fn receive(leftover: &Leftover, len_bytes: usize, peeks: bool) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        let (first, second) = bytes.split_at_mut(len_bytes / 2);
        let span = |part: &mut [u8]| iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() };
        // SAFETY: the spans are parts of a vector.
        let got = unsafe { leftover.receive(&[span(first), span(second)], 0, peeks, false) };
        bytes.truncate(got);
        bytes
    }

    #[test]
    fn each_byte_is_received_once() {
        let all: Vec<u8> = (0..10_000_u32).map(|number| (number % 251) as u8).collect();
        let leftover = of(&all);
        assert_eq!(receive(&leftover, 9, true), all[..9]);
        assert_eq!(receive(&leftover, 5001, false), all[..5001]);
        assert_eq!(leftover.unread_bytes(), 4999);
        assert_eq!(receive(&leftover, 9000, false), all[5001..]);
        assert_eq!((leftover.unread_bytes(), receive(&leftover, 9000, false)), (0, vec![]));
    }

    #[test]
    fn threads_share_the_bytes() {
        let leftover = of(&[1; 100_000]);
        let take =
            || std::iter::repeat_with(|| receive(&leftover, 7, false).len()).take_while(|got| *got > 0).sum::<usize>();
        let sum: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
        });
        assert_eq!(sum, 100_000);
    }
}
