//! Buffers that are too large for a stack. Threads may have as little as 16 KiB of it (`PTHREAD_STACK_MIN`), so that no
//! array there has more than 1 KiB.

use rustix::io::Errno;

/// Returns a zeroed buffer on the heap.
///
/// # Errors
/// `NOMEM`.
pub(crate) fn on_heap(len_bytes: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len_bytes).map_err(|_| Errno::NOMEM)?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_zeroed() {
        assert_eq!(on_heap(5000).unwrap(), [0; 5000]);
        assert_eq!(on_heap(usize::MAX).err(), Some(Errno::NOMEM));
    }
}
