//! Fields of headers, big end first.

/// Takes fields off bytes; past the end it says how many bytes there should have been.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes taken so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The next bytes.
    ///
    /// # Errors
    /// How many bytes there should be in all.
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

/// Puts fields into bytes that were measured before.
pub(super) struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes put so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// # Panics
    /// Past the end.
    pub(super) fn put(&mut self, field: &[u8]) {
        let end = self.at + field.len();
        self.bytes[self.at..end].copy_from_slice(field);
        self.at = end;
    }

    /// The lowest 24 bits.
    pub(super) fn u24(&mut self, field: u32) {
        let [_, low @ ..] = field.to_be_bytes();
        self.put(&low);
    }
}
