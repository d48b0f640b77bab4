//! Registers of a device: every access is executed exactly once, with its width.

use crate::mapping::Mapping;

const REGISTER_BYTES: usize = size_of::<u32>();

/// Registers of 32 bits in a mapping.
#[derive(Debug)]
pub struct Registers(Mapping);

impl Registers {
    /// Returns the registers in `mapping`.
    pub fn new(mapping: Mapping) -> Self {
        Self(mapping)
    }

    /// Reads the register at `offset` (4-byte aligned), and converts it from little endian.
    ///
    /// # Panics
    /// If there is no register at `offset`.
    pub fn load(&self, offset: usize) -> u32 {
        // SAFETY: `register` has checked bounds and alignment, and the mapping lives as long as `self`.
        u32::from_le(unsafe { self.register(offset).read_volatile() })
    }

    /// Writes the register at `offset` (4-byte aligned).
    ///
    /// # Panics
    /// If there is no register at `offset`.
    pub fn store(&self, offset: usize, value: u32) {
        // SAFETY: `register` has checked bounds and alignment, and the mapping lives as long as `self`.
        unsafe { self.register(offset).write_volatile(value.to_le()) }
    }

    fn register(&self, offset: usize) -> *mut u32 {
        let is_there = offset.is_multiple_of(REGISTER_BYTES)
            && offset.checked_add(REGISTER_BYTES).is_some_and(|end| end <= self.0.len_bytes());
        assert!(is_there, "no register at {offset} of {} bytes", self.0.len_bytes());
        // SAFETY: the assertion has checked that the offset is inside the mapping.
        unsafe { self.0.base().as_ptr().add(offset).cast() }
    }
}
