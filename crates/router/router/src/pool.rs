//! Packet pool: buffers of two sizes, allocated and freed without heap allocation.

use std::ops::Range;

use packet::segmentation::{Segmentation, Segments};

/// Size of a cache line in bytes.
const LINE_BYTES: usize = 64;

/// A handle of a packet buffer (an mbuf of DPDK): the buffer, and the position of the frame in it. Handles are moved,
/// never copied, and must be returned by [`Pool::free`].
#[derive(Debug, PartialEq, Eq)]
pub struct Packet {
    /// Index of the first cache line of the buffer in the pool.
    line: u32,
    start: u16,
    bytes: u16,
    /// Of a large packet: the payload of each segment, and the length of IP and transport header, in bytes; otherwise
    /// 0.
    segment_bytes: u16,
    headers_bytes: u16,
}

impl Packet {
    /// Returns the length of the frame in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.bytes)
    }

    /// Returns whether this is a large packet, which is segmented later, see [`packet::segmentation`].
    #[inline]
    pub fn is_large(&self) -> bool {
        self.segment_bytes != 0
    }

    /// Returns the payload of each segment of a large packet in bytes; 0 for other packets.
    #[inline]
    pub fn segment_bytes(&self) -> u16 {
        self.segment_bytes
    }

    /// Returns the length in bytes of the longest IP packet that leaves for this one, which begins with its IP header:
    /// a segment of a large packet, or the packet itself.
    #[inline]
    pub fn ip_bytes_max(&self) -> usize {
        match self.segment_bytes {
            0 => self.len(),
            segment_bytes => self.len().min(usize::from(self.headers_bytes) + usize::from(segment_bytes)),
        }
    }

    /// Returns the number of packets and their bytes on a wire, of a frame with `link_bytes` before the IP header.
    #[inline]
    pub fn on_wire(&self, link_bytes: usize) -> (usize, usize) {
        if self.segment_bytes == 0 {
            return (1, self.len());
        }
        let headers_bytes = link_bytes + usize::from(self.headers_bytes);
        let payload_bytes = self.len().saturating_sub(headers_bytes);
        let packets = payload_bytes.div_ceil(usize::from(self.segment_bytes)).max(1);
        (packets, self.len() + (packets - 1) * headers_bytes)
    }

    /// Returns whether the frame is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// Lines of a buffer for a large packet, an odd number as below: the longest that [`Packet`] can describe.
const LARGE_LINES: u32 = 1023;
const LARGE_BYTES: usize = LARGE_LINES as usize * LINE_BYTES;

/// A pool of buffers, each with headroom before the frame for further headers: of one size, and some for large packets.
pub struct Pool {
    memory: Vec<u8>,
    /// Offset of the first buffer, aligned to a cache line.
    base: usize,
    buffer_bytes: usize,
    headroom_bytes: u16,
    /// First cache lines of free buffers. A stack: the last buffer freed is the first allocated, as it is in the cache.
    free: Vec<u32>,
    /// First line of the first buffer for large packets.
    large_line: u32,
    large_free: Vec<u32>,
}

impl Pool {
    /// Creates a pool of `buffers` of `buffer_bytes` each, `headroom_bytes` of which precede a new frame, without
    /// buffers for large packets.
    pub fn new(buffers: u32, buffer_bytes: u16, headroom_bytes: u16) -> Pool {
        Pool::with_large(buffers, buffer_bytes, headroom_bytes, 0)
    }

    /// Creates a pool like [`Pool::new`], with `large` buffers for large packets. Their memory is used once they are.
    pub fn with_large(buffers: u32, buffer_bytes: u16, headroom_bytes: u16, large: u32) -> Pool {
        assert!(headroom_bytes < buffer_bytes, "headroom {headroom_bytes} B leaves nothing of {buffer_bytes} B");
        let buffer_bytes = usize::from(buffer_bytes);
        // An odd number of lines between buffers: with a power of two, all headers would map to few cache sets and
        // evict each other.
        let stride_lines = buffer_bytes.div_ceil(LINE_BYTES) as u32 | 1;
        let large_line = buffers.checked_mul(stride_lines).expect("a pool must not exceed 256 GiB");
        let large_lines = large.checked_mul(LARGE_LINES).expect("a pool must not exceed 256 GiB");
        let lines = large_line.checked_add(large_lines).expect("a pool must not exceed 256 GiB");
        let memory = vec![0; (lines as usize + 1) * LINE_BYTES];
        let base = memory.as_ptr().align_offset(LINE_BYTES).min(LINE_BYTES);
        let free = (0..buffers).rev().map(|buffer| buffer * stride_lines).collect();
        let large_free = (0..large).rev().map(|buffer| large_line + buffer * LARGE_LINES).collect();
        Pool { memory, base, buffer_bytes, headroom_bytes, free, large_line, large_free }
    }

    /// Allocates an empty packet; returns `None` if no buffer is free.
    #[inline]
    pub fn alloc(&mut self) -> Option<Packet> {
        let line = self.free.pop()?;
        Some(Packet { line, start: self.headroom_bytes, bytes: 0, segment_bytes: 0, headers_bytes: 0 })
    }

    /// Allocates an empty packet with room for a large one; returns `None` if no such buffer is free.
    pub fn alloc_large(&mut self) -> Option<Packet> {
        let line = self.large_free.pop()?;
        Some(Packet { line, start: self.headroom_bytes, bytes: 0, segment_bytes: 0, headers_bytes: 0 })
    }

    /// Allocates a packet with these bytes; returns `None` if no buffer is free or `bytes` do not fit.
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

    /// Frees the buffer of a packet.
    #[inline]
    pub fn free(&mut self, packet: Packet) {
        if packet.line < self.large_line {
            self.free.push(packet.line);
        } else {
            self.large_free.push(packet.line);
        }
    }

    /// Sorts the free buffers, so that they are allocated in the order of a new pool.
    pub fn restore_order(&mut self) {
        self.free.sort_unstable_by(|one, other| other.cmp(one));
        self.large_free.sort_unstable_by(|one, other| other.cmp(one));
    }

    /// Returns the number of free buffers, without those for large packets.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Returns whether the pool has buffers for large packets, free or not.
    pub fn has_large(&self) -> bool {
        self.large_free.capacity() > 0
    }

    /// Returns the number of free buffers for large packets.
    pub fn large_available(&self) -> usize {
        self.large_free.len()
    }

    /// Declares a packet to be a large one, whose segments have a payload of `segment_bytes`. Its frame has
    /// `link_bytes` before the IP header. Returns `false`, and changes nothing, unless its headers are consistent.
    #[must_use]
    pub fn set_large(&self, packet: &mut Packet, link_bytes: usize, segment_bytes: u16) -> bool {
        let found = self.bytes(packet).get(link_bytes..).and_then(|ip| Segmentation::of(ip, segment_bytes));
        let Some(found) = found else { return false };
        (packet.segment_bytes, packet.headers_bytes) = (segment_bytes, found.headers_bytes() as u16);
        true
    }

    /// Returns the frame.
    #[inline]
    pub fn bytes(&self, packet: &Packet) -> &[u8] {
        &self.memory[self.range(packet)]
    }

    /// Returns the frame for modification.
    #[inline]
    pub fn bytes_mut(&mut self, packet: &Packet) -> &mut [u8] {
        let range = self.range(packet);
        &mut self.memory[range]
    }

    /// Returns one packet's frame, and another packet's frame for modification.
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

    /// Returns the maximum length in bytes of a frame in a new packet.
    #[inline]
    pub fn bytes_max(&self) -> usize {
        self.buffer_bytes - usize::from(self.headroom_bytes)
    }

    /// Returns the segments of a large packet; its frame has `link_bytes` before the IP header.
    pub fn segments(&self, packet: &Packet, link_bytes: usize) -> Option<Segments> {
        let ip = self.bytes(packet).get(link_bytes..)?;
        Some(Segmentation::of(ip, packet.segment_bytes)?.split(link_bytes))
    }

    /// Allocates the next segment, of `bytes` bytes, of a large packet; returns `None` if no buffer is free or it does
    /// not fit.
    pub fn alloc_segment(&mut self, large: &Packet, segments: &mut Segments, bytes: usize) -> Option<Packet> {
        let mut segment = if bytes <= self.bytes_max() { self.alloc()? } else { return None };
        self.resize(&mut segment, bytes);
        let (frame, to) = self.bytes_pair(large, &segment);
        if segments.write_next(frame, to).is_none() {
            self.free(segment);
            return None;
        }
        Some(segment)
    }

    /// Returns the maximum length in bytes of a frame in a new packet of [`Pool::alloc_large`].
    pub fn large_bytes_max(&self) -> usize {
        LARGE_BYTES - usize::from(self.headroom_bytes)
    }

    fn buffer_bytes_of(&self, packet: &Packet) -> usize {
        if packet.line < self.large_line { self.buffer_bytes } else { LARGE_BYTES }
    }

    /// Sets the length of the frame; added bytes have arbitrary content. Panics if `bytes` exceed the buffer.
    #[inline]
    pub fn resize(&self, packet: &mut Packet, bytes: usize) {
        assert!(usize::from(packet.start) + bytes <= self.buffer_bytes_of(packet), "{bytes} B do not fit a buffer");
        packet.bytes = bytes as u16;
    }

    /// Removes `bytes` from the front of the frame.
    #[inline]
    pub fn trim_front(&self, packet: &mut Packet, bytes: u16) {
        assert!(bytes <= packet.bytes, "{bytes} B from the front of {} B", packet.bytes);
        packet.start += bytes;
        packet.bytes -= bytes;
    }

    /// Removes `header_bytes` from the front of the frame, and truncates the rest to `bytes`. Panics if it is shorter.
    #[inline]
    pub fn trim(&self, packet: &mut Packet, header_bytes: u16, bytes: usize) {
        assert!(usize::from(header_bytes) + bytes <= packet.len(), "{header_bytes} B and {bytes} B of a frame");
        packet.start += header_bytes;
        packet.bytes = bytes as u16;
    }

    /// Prepends a header to the frame if the headroom suffices, and returns whether it did.
    #[inline]
    pub fn prepend<const N: usize>(&mut self, packet: &mut Packet, header: &[u8; N]) -> bool {
        if usize::from(packet.start) < N {
            return false;
        }
        packet.start -= N as u16;
        packet.bytes += N as u16;
        match self.bytes_mut(packet).first_chunk_mut::<N>() {
            Some(front) => *front = *header,
            None => unreachable!("the frame has just grown by {N} B"),
        }
        true
    }

    /// Returns the headroom of the packet in bytes.
    #[inline]
    pub fn headroom(&self, packet: &Packet) -> usize {
        usize::from(packet.start)
    }

    /// Extends the frame at its front by `bytes` of headroom. Panics if the headroom is smaller.
    #[inline]
    pub fn grow_front(&self, packet: &mut Packet, bytes: u16) {
        assert!(bytes <= packet.start, "{bytes} B before a frame with {} B of headroom", packet.start);
        packet.start -= bytes;
        packet.bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_holds_what_was_written_to_it() {
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
    fn buffers_are_reused_and_limited_in_number() {
        let mut pool = Pool::new(2, 128, 0);
        let packets: Vec<Packet> = (0..2).filter_map(|_| pool.alloc()).collect();
        assert_eq!((packets.len(), pool.alloc(), pool.available()), (2, None, 0));
        packets.into_iter().for_each(|packet| pool.free(packet));
        assert_eq!(pool.available(), 2);
        assert!(pool.alloc_copy(&[0; 129]).is_none(), "longer than a buffer");
        assert_eq!(pool.available(), 2);
    }

    #[test]
    fn restoring_the_order_makes_allocation_as_in_a_new_pool() {
        let mut pool = Pool::new(4, 128, 0);
        let alloc_all = |pool: &mut Pool| std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>();
        let first: Vec<u32> = alloc_all(&mut pool).into_iter().map(|packet| packet.line).collect();
        for line in [first[2], first[0], first[3], first[1]] {
            pool.free(Packet { line, start: 0, bytes: 0, segment_bytes: 0, headers_bytes: 0 });
        }
        pool.restore_order();
        assert_eq!(alloc_all(&mut pool).iter().map(|packet| packet.line).collect::<Vec<_>>(), first);
    }

    #[test]
    fn the_longest_frames_do_not_overlap() {
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
