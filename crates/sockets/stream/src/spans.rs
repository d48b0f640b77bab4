//! The buffers of a call: an array of `iovec`, of which a first part is done.

use libc::iovec;

/// Most spans of one system call (`IOV_MAX`).
const SPANS_MAX: usize = 1024;

/// Returns the number of bytes of all spans together.
#[inline]
pub fn total_bytes(spans: &[iovec]) -> usize {
    spans.iter().fold(0, |total, span| total.saturating_add(span.iov_len))
}

/// Calls `visit` with the address and the length of each part of the spans after their first `skip` bytes, and at most
/// `bytes_max` bytes together, until it returns fewer bytes than the part has. Returns the sum of what it has returned.
///
/// # Errors
/// The first error of `visit`, unless bytes were done before.
#[inline]
pub fn for_each_part<E>(
    spans: &[iovec],
    skip: usize,
    bytes_max: usize,
    mut visit: impl FnMut(*mut u8, usize) -> Result<usize, E>,
) -> Result<usize, E> {
    let mut skip = skip;
    let mut done = 0;
    for span in spans {
        let skipped = skip.min(span.iov_len);
        skip -= skipped;
        let wanted = (span.iov_len - skipped).min(bytes_max - done);
        if wanted == 0 {
            continue;
        }
        match visit(span.iov_base.cast::<u8>().wrapping_add(skipped), wanted) {
            Ok(bytes) => {
                done += bytes;
                if bytes < wanted || done == bytes_max {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Copies the bytes of the spans after their first `skip` bytes to `to`, which they fill.
///
/// # Safety
/// These bytes are readable.
pub unsafe fn copy(spans: &[iovec], skip: usize, to: &mut [u8]) {
    let mut done = 0;
    let Ok(_) = for_each_part::<std::convert::Infallible>(spans, skip, to.len(), |base, len_bytes| {
        // SAFETY: `base` is readable for `len_bytes` by this function's contract, and the parts together are no longer
        // than `to`, which is memory of this library.
        unsafe { std::ptr::copy_nonoverlapping(base, to[done..].as_mut_ptr(), len_bytes) };
        done += len_bytes;
        Ok(len_bytes)
    });
}

/// The spans of a call after their first `skip` bytes, and at most `bytes_max` bytes, for a system call.
pub struct Part {
    spans: [iovec; Self::SPANS],
    count: usize,
}

impl Part {
    /// Spans on the stack: a call with more is done in several steps.
    const SPANS: usize = 8;

    /// Returns the part.
    pub fn new(spans: &[iovec], skip: usize, bytes_max: usize) -> Self {
        debug_assert!(spans.len() <= SPANS_MAX);
        let mut part = Self { spans: [const { iovec { iov_base: std::ptr::null_mut(), iov_len: 0 } }; 8], count: 0 };
        let Ok(_) = for_each_part::<std::convert::Infallible>(spans, skip, bytes_max, |base, len_bytes| {
            if part.count == Self::SPANS {
                return Ok(0);
            }
            part.spans[part.count] = iovec { iov_base: base.cast(), iov_len: len_bytes };
            part.count += 1;
            Ok(len_bytes)
        });
        part
    }

    /// Returns the spans of the part.
    pub fn spans(&self) -> &[iovec] {
        &self.spans[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans_of(buffers: &mut [&mut [u8]]) -> Vec<iovec> {
        buffers.iter_mut().map(|it| iovec { iov_base: it.as_mut_ptr().cast(), iov_len: it.len() }).collect()
    }

    #[test]
    fn a_part_begins_and_ends_anywhere() {
        let (mut one, mut two, mut three) = ([0; 3], [0; 0], [0; 5]);
        let spans = spans_of(&mut [&mut one, &mut two, &mut three]);
        assert_eq!(total_bytes(&spans), 8);
        for skip in 0..=8 {
            for bytes_max in 0..=9 {
                let part = Part::new(&spans, skip, bytes_max);
                assert_eq!(total_bytes(part.spans()), bytes_max.min(8 - skip), "{skip} {bytes_max}");
            }
        }
    }

    #[test]
    fn bytes_are_copied_from_any_place() {
        let (mut one, mut two) = (*b"abc", *b"defgh");
        let spans = spans_of(&mut [&mut one, &mut two]);
        for skip in 0..8 {
            for bytes in 0..=8 - skip {
                let mut to = vec![0; bytes];
                // SAFETY: the spans are those of the arrays above.
                unsafe { copy(&spans, skip, &mut to) };
                assert_eq!(to, b"abcdefgh"[skip..skip + bytes]);
            }
        }
    }

    #[test]
    fn a_short_visit_ends_the_walk() {
        let (mut one, mut two) = ([0; 3], [0; 5]);
        let spans = spans_of(&mut [&mut one, &mut two]);
        let mut visits = Vec::new();
        let done = for_each_part::<()>(&spans, 1, usize::MAX, |_, len_bytes| {
            visits.push(len_bytes);
            Ok(len_bytes.min(4))
        });
        assert_eq!((done, visits), (Ok(6), vec![2, 5]));
        assert_eq!(for_each_part(&spans, 0, 8, |_, _| Err("refused")), Err("refused"));
    }
}
