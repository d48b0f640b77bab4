//! A sender's buffers, from one trial to the next: to find memory for new ones takes the kernel longer than many a
//! trial's packets do.

use std::sync::{Mutex, PoisonError};

use router::{Packet, Pool};

use super::nodes::{BUFFER_BYTES, HEADROOM_BYTES};

/// What the trial before left, and how many they are.
pub(super) static KEPT: Buffers = Buffers(Mutex::new(None));

pub(super) struct Buffers(Mutex<Option<(u32, Pool)>>);

impl Buffers {
    /// So many, each of which was written into just now. Else the kernel finds the memory when packets first wait,
    /// which takes as long as several packets, so that more wait: at 1500 B a queue that had begun to grow never ended.
    pub(super) fn written(&self, count: u32) -> Pool {
        let left = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut pool = match left {
            Some((left, pool)) if left == count => pool,
            _ => Pool::new(count, BUFFER_BYTES, HEADROOM_BYTES),
        };
        touch(&mut pool);
        pool
    }

    /// Keeps buffers for the next trial, if all of them are back. They will be taken in the order of new ones.
    pub(super) fn keep(&self, count: u32, mut pool: Pool) {
        if pool.available() == count as usize {
            pool.restore_order();
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((count, pool));
        }
    }
}

fn touch(pool: &mut Pool) {
    const BYTES: [u8; (BUFFER_BYTES - HEADROOM_BYTES) as usize] = [1; (BUFFER_BYTES - HEADROOM_BYTES) as usize];
    let all: Vec<Packet> = std::iter::from_fn(|| pool.alloc_copy(&BYTES)).collect();
    // The first that was taken is the first to be taken again.
    all.into_iter().rev().for_each(|packet| pool.free(packet));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the first buffer lies.
    fn place(pool: &mut Pool) -> usize {
        let packet = pool.alloc().unwrap();
        let place = pool.bytes(&packet).as_ptr().addr();
        pool.free(packet);
        place
    }

    #[test]
    fn buffers_are_kept_for_as_many_when_all_are_back() {
        let buffers = Buffers(Mutex::new(None));
        let mut pool = buffers.written(7);
        let first = place(&mut pool);
        let packets = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        packets.into_iter().for_each(|packet| pool.free(packet));
        buffers.keep(7, pool);
        let mut again = buffers.written(7);
        assert_eq!(place(&mut again), first);
        let _out = again.alloc();
        buffers.keep(7, again);
        assert!(buffers.0.lock().unwrap().is_none(), "one is out");
        buffers.keep(7, Pool::new(7, BUFFER_BYTES, HEADROOM_BYTES));
        assert_eq!(buffers.written(8).available(), 8, "another number of them is another pool");
    }
}
