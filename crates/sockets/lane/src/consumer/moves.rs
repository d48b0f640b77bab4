//! Moves of a stream to the lane and away from it, as their receiver sees them; see `producer::moves`.

use super::{Consumer, HEAD, RECORD_STATE, WAKE_DUE};
use crate::Corrupt;
use crate::record::FrozenCursor;
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Returns whether everything up to `position` is read, where the sender's part of the stream ends in the lane
    /// ([`crate::Producer::end_move`]). The caller has loaded the position with acquire order.
    ///
    /// # Errors
    /// [`Corrupt`] if nothing is unread before the position is reached, if something follows it, or if the sender
    /// published an impossible record.
    pub fn has_reached(&self, position: u64) -> Result<bool, Corrupt> {
        let mut cursor = self.cursor();
        let is_unread = self.load_record(&mut cursor)?;
        let left_slots = position.wrapping_sub(cursor.head) as i64;
        match is_unread {
            true if left_slots > 0 => Ok(false),
            false if left_slots == 0 && cursor.record_bytes == 0 => Ok(true),
            _ => Err(Corrupt { what: "end of a move", value: position }),
        }
    }

    /// Returns the read position for a sender that is to take back what is unread: the position of the record, and its
    /// ring and the offset in it. The receiver reads nothing more before it restarts.
    pub fn frozen_cursor(&self) -> [u64; 2] {
        let cursor = self.cursor();
        FrozenCursor { head: cursor.head, ring: cursor.ring, offset_bytes: cursor.offset_bytes }.encode()
    }

    /// Restarts the lane at a position that [`crate::Producer::restart`] returned. The caller has loaded it with
    /// acquire order. What is unread is skipped.
    ///
    /// # Errors
    /// [`Corrupt`] if it is not such a position, or not behind all earlier ones.
    pub fn restart(&mut self, position: u64) -> Result<(), Corrupt> {
        let is_ahead = position.wrapping_sub(self.word(HEAD)) as i64 > 0;
        if !is_ahead || !position.is_multiple_of(self.layout.restart_alignment()) {
            return Err(Corrupt { what: "start of a move", value: position });
        }
        self.peeked_bytes = 0;
        self.set_word(HEAD, position);
        self.set_word(RECORD_STATE, 0);
        self.set_word(WAKE_DUE, 0);
        self.outbound.store_u64(self.layout.credit(), position, Ordering::Release);
        Ok(())
    }
}
