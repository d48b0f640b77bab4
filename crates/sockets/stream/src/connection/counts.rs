//! The byte counts that a program asks the kernel for, which does not know what lanes carry.

use super::Connection;

/// Counters in the kernel's `struct tcp_info`, by their place.
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
const BYTES_SENT: usize = 200;

impl Connection {
    /// Adds to the kernel's answer to `TCP_INFO`, or to its beginning, what lanes have carried.
    pub fn amend_tcp_info(&'static self, info: &mut [u8]) {
        let (sent, acked) = self.sender.lock().map_or((0, 0), |sender| sender.bytes_by_lane());
        let received = self.receiver.lock().map_or(0, |receiver| receiver.bytes_by_lane());
        for (place, bytes) in [(BYTES_ACKED, acked), (BYTES_RECEIVED, received), (BYTES_SENT, sent)] {
            if let Some(counter) = info.get_mut(place..).and_then(<[u8]>::first_chunk_mut) {
                *counter = u64::from_ne_bytes(*counter).wrapping_add(bytes).to_ne_bytes();
            }
        }
    }
}
