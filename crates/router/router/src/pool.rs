//! Packets in buffers of one size, taken and given back without allocation.

use std::ops::Range;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// A packet: a buffer of a [`Pool`], and where in it the frame lies. It is moved, never copied; [`Pool::free`] takes
/// it.
#[derive(Debug, PartialEq, Eq)]
pub struct Packet {
    /// The cache line of the pool's where the buffer begins.
    line: u32,
    start: u16,
    bytes: u16,
}

impl Packet {
    /// Bytes of the frame.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.bytes)
    }

    /// Whether there is no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// Buffers of one size. Each has room before the frame, for headers that grow.
pub struct Pool {
    memory: Vec<u8>,
    /// Where the first buffer begins: at a cache line.
    base: usize,
    buffer_bytes: usize,
    headroom_bytes: u16,
    /// Lines where free buffers begin. The last that was given back is the first to be taken: it is in the caches.
    free: Vec<u32>,
}

impl Pool {
    /// `buffers` of `buffer_bytes` each, `headroom_bytes` of which lie before a new frame.
    pub fn new(buffers: u32, buffer_bytes: u16, headroom_bytes: u16) -> Pool {
        assert!(headroom_bytes < buffer_bytes, "headroom {headroom_bytes} B leaves nothing of {buffer_bytes} B");
        let buffer_bytes = usize::from(buffer_bytes);
        // From one buffer to the next: an odd number of lines. With a power of two, all headers would share few sets of
        // the caches, and drive each other out.
        let stride_lines = buffer_bytes.div_ceil(LINE_BYTES) as u32 | 1;
        let lines = buffers.checked_mul(stride_lines).expect("a pool of 256 GiB at most");
        let memory = vec![0; (lines as usize + 1) * LINE_BYTES];
        let base = memory.as_ptr().align_offset(LINE_BYTES).min(LINE_BYTES);
        let free = (0..buffers).rev().map(|buffer| buffer * stride_lines).collect();
        Pool { memory, base, buffer_bytes, headroom_bytes, free }
    }

    /// An empty packet; `None` when all buffers are out.
    #[inline]
    pub fn alloc(&mut self) -> Option<Packet> {
        let line = self.free.pop()?;
        Some(Packet { line, start: self.headroom_bytes, bytes: 0 })
    }

    /// A packet of these bytes; `None` when all buffers are out, or `bytes` do not fit one.
    #[inline]
    pub fn alloc_copy(&mut self, bytes: &[u8]) -> Option<Packet> {
        if bytes.len() > self.bytes_max() {
            return None;
        }
        let mut packet = self.alloc()?;
        packet.bytes = bytes.len() as u16;
        self.bytes_mut(&packet).copy_from_slice(bytes);
        Some(packet)
    }

    /// Gives the packet's buffer back.
    #[inline]
    pub fn free(&mut self, packet: Packet) {
        self.free.push(packet.line);
    }

    /// Free buffers are taken in the order of a new pool again, whatever order they came back in.
    pub fn restore_order(&mut self) {
        self.free.sort_unstable_by(|one, other| other.cmp(one));
    }

    /// Buffers that can be taken.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// The frame.
    #[inline]
    pub fn bytes(&self, packet: &Packet) -> &[u8] {
        &self.memory[self.range(packet)]
    }

    /// The frame, to be changed in place.
    #[inline]
    pub fn bytes_mut(&mut self, packet: &Packet) -> &mut [u8] {
        let range = self.range(packet);
        &mut self.memory[range]
    }

    /// One packet's frame to be read, while another's is changed.
    pub fn bytes_pair(&mut self, read: &Packet, change: &Packet) -> (&[u8], &mut [u8]) {
        let ranges = [self.range(read), self.range(change)];
        let [read, change] = self.memory.get_disjoint_mut(ranges).expect("two packets have two buffers");
        (read, change)
    }

    #[inline]
    fn range(&self, packet: &Packet) -> Range<usize> {
        let start = self.base + packet.line as usize * LINE_BYTES + usize::from(packet.start);
        start..start + usize::from(packet.bytes)
    }

    /// The longest frame that a new packet can hold.
    #[inline]
    pub fn bytes_max(&self) -> usize {
        self.buffer_bytes - usize::from(self.headroom_bytes)
    }

    /// Sets the frame's length; what is new in it is whatever the buffer held. `bytes` beyond the buffer is a bug.
    #[inline]
    pub fn resize(&self, packet: &mut Packet, bytes: usize) {
        assert!(usize::from(packet.start) + bytes <= self.buffer_bytes, "{bytes} B do not fit a buffer");
        packet.bytes = bytes as u16;
    }

    /// Moves the frame's start: `bytes` are taken from its front.
    #[inline]
    pub fn trim_front(&self, packet: &mut Packet, bytes: u16) {
        assert!(bytes <= packet.bytes, "{bytes} B from the front of {} B", packet.bytes);
        packet.start += bytes;
        packet.bytes -= bytes;
    }

    /// Takes `header_bytes` from the frame's front, and leaves `bytes` of what follows, of which there are as many.
    #[inline]
    pub fn trim(&self, packet: &mut Packet, header_bytes: u16, bytes: usize) {
        assert!(usize::from(header_bytes) + bytes <= packet.len(), "{header_bytes} B and {bytes} B of a frame");
        packet.start += header_bytes;
        packet.bytes = bytes as u16;
    }

    /// Puts a header before the frame, when there is room; says whether there was.
    #[inline]
    pub fn prepend<const N: usize>(&mut self, packet: &mut Packet, header: &[u8; N]) -> bool {
        if usize::from(packet.start) < N {
            return false;
        }
        packet.start -= N as u16;
        packet.bytes += N as u16;
        match self.bytes_mut(packet).first_chunk_mut::<N>() {
            Some(place) => *place = *header,
            None => unreachable!("a frame that grew by {N} B has as many"),
        }
        true
    }

    /// Bytes of room before the frame.
    #[inline]
    pub fn headroom(&self, packet: &Packet) -> usize {
        usize::from(packet.start)
    }

    /// Moves the frame's start: room of `bytes` before it becomes part of it.
    #[inline]
    pub fn grow_front(&self, packet: &mut Packet, bytes: u16) {
        assert!(bytes <= packet.start, "{bytes} B before a frame with {} B of room", packet.start);
        packet.start -= bytes;
        packet.bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_what_was_put_into_it() {
        let mut pool = Pool::new(3, 128, 32);
        let mut a = pool.alloc_copy(b"hello").expect("a buffer");
        let b = pool.alloc_copy(b"world").expect("a buffer");
        pool.grow_front(&mut a, 2);
        pool.bytes_mut(&a)[..2].copy_from_slice(b"o ");
        assert_eq!((pool.bytes(&a), pool.bytes(&b)), (&b"o hello"[..], &b"world"[..]));
        pool.trim_front(&mut a, 3);
        let (read, change) = pool.bytes_pair(&a, &b);
        change[..4].copy_from_slice(read);
        assert_eq!(pool.bytes(&b), b"ellod");
    }

    #[test]
    fn buffers_come_back_and_no_more_than_there_are() {
        let mut pool = Pool::new(2, 128, 0);
        let packets: Vec<Packet> = (0..2).filter_map(|_| pool.alloc()).collect();
        assert_eq!((packets.len(), pool.alloc(), pool.available()), (2, None, 0));
        packets.into_iter().for_each(|packet| pool.free(packet));
        assert_eq!(pool.available(), 2);
        assert!(pool.alloc_copy(&[0; 129]).is_none(), "more than a buffer holds");
        assert_eq!(pool.available(), 2);
    }

    #[test]
    fn buffers_are_taken_in_their_first_order_again_when_that_is_restored() {
        let mut pool = Pool::new(4, 128, 0);
        let alloc_all = |pool: &mut Pool| std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>();
        let first: Vec<u32> = alloc_all(&mut pool).into_iter().map(|packet| packet.line).collect();
        for line in [first[2], first[0], first[3], first[1]] {
            pool.free(Packet { line, start: 0, bytes: 0 });
        }
        pool.restore_order();
        assert_eq!(alloc_all(&mut pool).iter().map(|packet| packet.line).collect::<Vec<_>>(), first);
    }

    #[test]
    fn the_longest_frame_of_every_buffer_is_its_own() {
        let mut pool = Pool::new(5, 200, 10);
        let packets: Vec<Packet> = (0..5).filter_map(|fill| pool.alloc_copy(&[fill; 190])).collect();
        for (fill, packet) in packets.iter().enumerate() {
            assert_eq!(pool.bytes(packet), &[fill as u8; 190]);
        }
    }

    #[test]
    #[should_panic(expected = "do not fit a buffer")]
    fn a_frame_never_grows_beyond_its_buffer() {
        let mut pool = Pool::new(1, 128, 28);
        let mut packet = pool.alloc().expect("a buffer");
        pool.resize(&mut packet, 101);
    }
}
