//! Scans of the unread records, which consume nothing.

use super::records::step_over;
use super::{Consumer, Cursor};
use crate::Corrupt;
use crate::record::SLOT_BYTES;
use fabric::{Inbound, Outbound};

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Copies unread bytes from `skip_bytes` on without consuming them; returns their number.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the lane's memory.
    pub unsafe fn peek_to(&self, skip_bytes: usize, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut skip_bytes = skip_bytes;
        let mut read_bytes = 0;
        let end = self.scan_unread(|record| {
            let left_bytes = record.record_bytes - record.offset_bytes;
            let skipped_bytes = left_bytes.min(skip_bytes);
            skip_bytes -= skipped_bytes;
            let from = Cursor { offset_bytes: record.offset_bytes + skipped_bytes, ..*record };
            let chunk_bytes = (left_bytes - skipped_bytes).min(len_bytes - read_bytes);
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract,
            // and `read_bytes` plus `chunk_bytes` are at most that (`min`).
            unsafe { self.copy_out(&from, destination.add(read_bytes), chunk_bytes) };
            read_bytes += chunk_bytes;
            read_bytes < len_bytes
        })?;
        if read_bytes == 0 && len_bytes > 0 {
            self.check_fin(&end)?;
        }
        Ok(read_bytes)
    }

    /// Returns the number of unread bytes in the lane now.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn unread_bytes(&self) -> Result<usize, Corrupt> {
        let mut unread_bytes = 0;
        self.scan_unread(|record| {
            unread_bytes += record.record_bytes - record.offset_bytes;
            true
        })?;
        Ok(unread_bytes)
    }

    /// Returns a number that grows whenever records arrive, for edge-triggered readiness. `seen` is the last number
    /// returned.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn arrivals(&self, seen: u64) -> Result<u64, Corrupt> {
        let end = self.scan_unread(|_| true)?;
        // An open record grows without a change of the position.
        let so_far = end.head.wrapping_mul(SLOT_BYTES as u64).wrapping_add(end.record_bytes as u64);
        Ok(so_far.max(seen))
    }

    /// Calls `visit` for each unread record until it returns `false`; returns the position where the scan ended. The
    /// scan is limited to one lap, because a hostile sender may publish endlessly.
    fn scan_unread(&self, mut visit: impl FnMut(&Cursor) -> bool) -> Result<Cursor, Corrupt> {
        let mut cursor = self.cursor();
        let first = cursor.head;
        let lap = self.layout.slots_total();
        while cursor.head.wrapping_sub(first) < lap && self.load_record(&mut cursor)? && visit(&cursor) {
            cursor.offset_bytes = cursor.record_bytes;
            let ring = self.ring(&cursor);
            step_over(&mut cursor, ring); // Stays in an open record, to which bytes may have been appended.
        }
        Ok(cursor)
    }
}
