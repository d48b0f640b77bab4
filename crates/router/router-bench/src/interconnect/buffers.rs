//! Buffers of the sender, reused from one trial to the next: the kernel takes longer to allocate new ones than some
//! trials last.

use std::sync::{Mutex, PoisonError};

use router::{Packet, Pool};

/// Bytes of a buffer, and of the room before its packet.
pub(super) const BUFFER_BYTES: u16 = 2048;
pub(super) const HEADROOM_BYTES: u16 = 64;

/// The buffers of the previous trial, and their number.
pub(super) static RETAINED: Buffers = Buffers(Mutex::new(None));

pub(super) struct Buffers(Mutex<Option<(u32, Pool)>>);

impl Buffers {
    /// Returns `count` buffers, each of which was just written. Otherwise the kernel allocates their pages when packets
    /// first queue up, which takes as long as several packets, so that more packets queue up: at 1500 B a queue that
    /// had begun to grow never drained.
    pub(super) fn written(&self, count: u32) -> Pool {
        let left = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut pool = match left {
            Some((left, pool)) if left == count => pool,
            _ => Pool::new(count, BUFFER_BYTES, HEADROOM_BYTES),
        };
        touch(&mut pool);
        pool
    }

    /// Retains the buffers for the next trial, if all of them have been returned. They are allocated in the order of
    /// new ones.
    pub(super) fn retain(&self, count: u32, mut pool: Pool) {
        if pool.available() == count as usize {
            pool.restore_order();
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((count, pool));
        }
    }
}

fn touch(pool: &mut Pool) {
    const BYTES: [u8; (BUFFER_BYTES - HEADROOM_BYTES) as usize] = [1; (BUFFER_BYTES - HEADROOM_BYTES) as usize];
    let all: Vec<Packet> = std::iter::from_fn(|| pool.alloc_copy(&BYTES)).collect();
    // The buffer that was allocated first is the first to be allocated again.
    all.into_iter().rev().for_each(|packet| pool.free(packet));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the address of the first buffer.
    fn address(pool: &mut Pool) -> usize {
        let packet = pool.alloc().unwrap();
        let address = pool.bytes(&packet).as_ptr().addr();
        pool.free(packet);
        address
    }

    #[test]
    fn buffers_are_reused_for_the_same_count_when_all_were_returned() {
        let buffers = Buffers(Mutex::new(None));
        let mut pool = buffers.written(7);
        let first = address(&mut pool);
        let packets = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        packets.into_iter().for_each(|packet| pool.free(packet));
        buffers.retain(7, pool);
        let mut again = buffers.written(7);
        assert_eq!(address(&mut again), first);
        let _out = again.alloc();
        buffers.retain(7, again);
        assert!(buffers.0.lock().unwrap().is_none(), "one is still allocated");
        buffers.retain(7, Pool::new(7, BUFFER_BYTES, HEADROOM_BYTES));
        assert_eq!(buffers.written(8).available(), 8, "another count needs a new pool");
    }
}
