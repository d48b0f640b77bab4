//! Packets in buffers of one size, taken and given back without allocation.

/// A packet: a buffer of a [`Pool`], and where in it the frame lies. It is moved, never copied; [`Pool::free`] takes
/// it.
#[derive(Debug, PartialEq, Eq)]
pub struct Packet {
    buffer: u32,
    start: u16,
    bytes: u16,
}

/// Buffers of one size. Each has room before the frame, for headers that grow.
pub struct Pool {
    memory: Vec<u8>,
    buffer_bytes: usize,
    headroom_bytes: u16,
    free: Vec<u32>,
}

impl Pool {
    /// `buffers` of `buffer_bytes` each, `headroom_bytes` of which lie before a new frame.
    pub fn new(buffers: u32, buffer_bytes: u16, headroom_bytes: u16) -> Pool {
        assert!(headroom_bytes < buffer_bytes, "headroom {headroom_bytes} B leaves nothing of {buffer_bytes} B");
        let memory = vec![0; buffers as usize * usize::from(buffer_bytes)];
        let free = (0..buffers).rev().collect();
        Pool { memory, buffer_bytes: usize::from(buffer_bytes), headroom_bytes, free }
    }

    /// An empty packet; `None` when all buffers are out.
    pub fn take(&mut self) -> Option<Packet> {
        let buffer = self.free.pop()?;
        Some(Packet { buffer, start: self.headroom_bytes, bytes: 0 })
    }

    /// Gives the packet's buffer back.
    pub fn free(&mut self, packet: Packet) {
        self.free.push(packet.buffer);
    }

    /// Buffers that can be taken.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// The frame.
    pub fn bytes(&self, packet: &Packet) -> &[u8] {
        &self.memory[self.range(packet)]
    }

    /// The frame, to be changed in place.
    pub fn bytes_mut(&mut self, packet: &Packet) -> &mut [u8] {
        let range = self.range(packet);
        &mut self.memory[range]
    }

    fn range(&self, packet: &Packet) -> std::ops::Range<usize> {
        let start = packet.buffer as usize * self.buffer_bytes + usize::from(packet.start);
        start..start + usize::from(packet.bytes)
    }

    /// The longest frame that a new packet can hold.
    pub fn bytes_max(&self) -> usize {
        self.buffer_bytes - usize::from(self.headroom_bytes)
    }

    /// Sets the frame's length; what is new in it is whatever the buffer held. `bytes` beyond the buffer is a bug.
    pub fn resize(&self, packet: &mut Packet, bytes: usize) {
        assert!(usize::from(packet.start) + bytes <= self.buffer_bytes, "{bytes} B do not fit a buffer");
        packet.bytes = bytes as u16;
    }

    /// Moves the frame's start: `bytes` are taken from its front.
    pub fn trim_front(&self, packet: &mut Packet, bytes: u16) {
        assert!(bytes <= packet.bytes, "{bytes} B from the front of {} B", packet.bytes);
        packet.start += bytes;
        packet.bytes -= bytes;
    }

    /// Moves the frame's start: room of `bytes` before it becomes part of it.
    pub fn grow_front(&self, packet: &mut Packet, bytes: u16) {
        assert!(bytes <= packet.start, "{bytes} B before a frame with {} B of room", packet.start);
        packet.start -= bytes;
        packet.bytes += bytes;
    }
}
