//! Cursors that read and write header fields in big-endian byte order.

/// Reads fields from a slice. Past the end, each method returns the number of bytes that the slice should have had.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the number of bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Returns the next bytes.
    ///
    /// # Errors
    /// The total number of bytes that are needed, if the slice is shorter.
    pub(super) fn take<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], usize> {
        let end = self.at + BYTES;
        let taken = self.bytes.get(self.at..end).and_then(|bytes| bytes.first_chunk().copied()).ok_or(end)?;
        self.at = end;
        Ok(taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, usize> {
        self.take::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, usize> {
        self.take().map(u16::from_be_bytes)
    }

    pub(super) fn u24(&mut self) -> Result<u32, usize> {
        self.take().map(|[high, middle, low]| u32::from_be_bytes([0, high, middle, low]))
    }

    pub(super) fn u32(&mut self) -> Result<u32, usize> {
        self.take().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, usize> {
        self.take().map(u64::from_be_bytes)
    }

    pub(super) fn u128(&mut self) -> Result<u128, usize> {
        self.take().map(u128::from_be_bytes)
    }
}

/// Writes fields into a slice that is known to be large enough.
pub(super) struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the number of bytes written so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// # Panics
    /// If the field does not fit.
    pub(super) fn put(&mut self, field: &[u8]) {
        let end = self.at + field.len();
        self.bytes[self.at..end].copy_from_slice(field);
        self.at = end;
    }

    /// Writes the lowest 24 bits.
    pub(super) fn u24(&mut self, field: u32) {
        let [_, low @ ..] = field.to_be_bytes();
        self.put(&low);
    }
}
