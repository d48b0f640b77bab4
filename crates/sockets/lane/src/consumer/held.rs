//! Held records, as their receiver sees them; see `producer::held`.

use super::{Consumer, Cursor, HEAD};
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Returns whether the next record may be a held one, with one load of the line that also contains the end of the
    /// stream. Requires no mutual exclusion.
    #[inline]
    pub fn may_be_held(&self) -> bool {
        let held = self.inbound.load_u64(self.layout.held(), Ordering::Acquire);
        held != 0 && held.wrapping_sub(1).wrapping_sub(self.word(HEAD)) as i64 >= 0
    }

    /// Returns the millisecond of the sender's clock since which the next record is held, or `None` if it is not held.
    /// Requires no mutual exclusion.
    pub fn held_since_ms(&self) -> Option<u32> {
        self.held()?;
        Some(self.inbound.load_u64(self.layout.held_since(), Ordering::Relaxed) as u32)
    }

    /// Makes this receiver treat the records that the sender holds as published ones. Returns `false` if there are
    /// none. The sender may publish them, too: that changes nothing for a receiver that has done so.
    pub fn publish_held(&mut self) -> bool {
        let Some(cursor) = self.held() else { return false };
        self.store_cursor(&Cursor { is_held: true, ..cursor });
        true
    }

    /// Returns the read position if the next record is a held one.
    fn held(&self) -> Option<Cursor> {
        if !self.may_be_held() {
            return None;
        }
        let held = self.inbound.load_u64(self.layout.held(), Ordering::Acquire);
        let mut cursor = self.cursor();
        let is_next = !self.load_record(&mut cursor).unwrap_or(true)
            && cursor.record_bytes == 0
            && held == cursor.head.wrapping_add(1);
        is_next.then_some(cursor)
    }
}
