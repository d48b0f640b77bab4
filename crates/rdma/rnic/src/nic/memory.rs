//! The memory of a NIC's host.

use thiserror::Error;

/// Memory that the host does not have where the keys' table says that it does: what the driver registered is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{bytes} bytes at {address:#x} are not in the host's memory; deregister memory before it goes")]
pub struct MemoryFault {
    /// The first byte asked for.
    pub address: u64,
    /// How many.
    pub bytes: u64,
}

/// What a NIC does with its host's memory. Addresses are the host's, as registered, and were checked against keys; an
/// implementation checks them against what it has all the same.
pub trait HostMemory {
    /// What a packet carries: bytes (`[u8]`) where real ones move, `()` where only lengths matter.
    type Payload: ?Sized;

    /// A payload's first bytes, for as long as a NIC keeps the packet: nothing where only lengths matter.
    fn copy_payload(payload: &Self::Payload, bytes: u32) -> Vec<u8>;

    /// The payload that was kept.
    fn payload_from_copy(kept: &[u8]) -> &Self::Payload;

    /// Copies memory into a payload, from the payload's byte `at` on.
    ///
    /// # Errors
    /// When it does not have these bytes.
    fn gather(&mut self, address: u64, bytes: u32, payload: &mut Self::Payload, at: u32) -> Result<(), MemoryFault>;

    /// Copies a payload's bytes from `at` on into memory.
    ///
    /// # Errors
    /// When it does not have room there.
    fn place(&mut self, address: u64, bytes: u32, payload: &Self::Payload, at: u32) -> Result<(), MemoryFault>;

    /// Stores 8 bytes in the host's own order: the answer to an atomic operation.
    ///
    /// # Errors
    /// When it does not have them.
    fn store(&mut self, address: u64, value: u64) -> Result<(), MemoryFault>;

    /// Replaces 8 bytes by `swap` if they are `compare`; gives what was there. Atomic among all NICs of the host.
    ///
    /// # Errors
    /// When it does not have them.
    fn compare_swap(&mut self, address: u64, compare: u64, swap: u64) -> Result<u64, MemoryFault>;

    /// Adds to 8 bytes, mod 2^64; gives what was there. Atomic among all NICs of the host.
    ///
    /// # Errors
    /// When it does not have them.
    fn fetch_add(&mut self, address: u64, add: u64) -> Result<u64, MemoryFault>;
}

/// Memory of a simulation in which only lengths matter: everything is there, and holds zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoMemory;

impl HostMemory for NoMemory {
    type Payload = ();

    fn copy_payload((): &(), _: u32) -> Vec<u8> {
        Vec::new()
    }

    fn payload_from_copy(_: &[u8]) -> &() {
        &()
    }

    fn gather(&mut self, _: u64, _: u32, (): &mut (), _: u32) -> Result<(), MemoryFault> {
        Ok(())
    }

    fn place(&mut self, _: u64, _: u32, (): &(), _: u32) -> Result<(), MemoryFault> {
        Ok(())
    }

    fn store(&mut self, _: u64, _: u64) -> Result<(), MemoryFault> {
        Ok(())
    }

    fn compare_swap(&mut self, _: u64, _: u64, _: u64) -> Result<u64, MemoryFault> {
        Ok(0)
    }

    fn fetch_add(&mut self, _: u64, _: u64) -> Result<u64, MemoryFault> {
        Ok(0)
    }
}

/// Real bytes, from address 0 on: for tests, and for hosts whose registered memory is one piece.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ByteMemory(pub Vec<u8>);

impl ByteMemory {
    /// So many zeros.
    pub fn new(bytes: usize) -> Self {
        Self(vec![0; bytes])
    }

    fn at(&mut self, address: u64, bytes: u32) -> Result<&mut [u8], MemoryFault> {
        let fault = MemoryFault { address, bytes: u64::from(bytes) };
        let first = usize::try_from(address).map_err(|_| fault)?;
        let last = first.checked_add(bytes as usize).ok_or(fault)?;
        self.0.get_mut(first..last).ok_or(fault)
    }

    fn word(&mut self, address: u64) -> Result<&mut [u8; 8], MemoryFault> {
        let fault = MemoryFault { address, bytes: 8 };
        self.at(address, 8)?.first_chunk_mut().ok_or(fault)
    }
}

impl HostMemory for ByteMemory {
    type Payload = [u8];

    fn copy_payload(payload: &[u8], bytes: u32) -> Vec<u8> {
        payload[..payload.len().min(bytes as usize)].to_vec()
    }

    fn payload_from_copy(kept: &[u8]) -> &[u8] {
        kept
    }

    fn gather(&mut self, address: u64, bytes: u32, payload: &mut [u8], at: u32) -> Result<(), MemoryFault> {
        let fault = MemoryFault { address, bytes: u64::from(bytes) };
        let source = self.at(address, bytes)?;
        let (first, bytes) = (at as usize, bytes as usize);
        payload.get_mut(first..first + bytes).ok_or(fault)?.copy_from_slice(source);
        Ok(())
    }

    fn place(&mut self, address: u64, bytes: u32, payload: &[u8], at: u32) -> Result<(), MemoryFault> {
        let fault = MemoryFault { address, bytes: u64::from(bytes) };
        let (first, length) = (at as usize, bytes as usize);
        let source = payload.get(first..first + length).ok_or(fault)?;
        self.at(address, bytes)?.copy_from_slice(source);
        Ok(())
    }

    fn store(&mut self, address: u64, value: u64) -> Result<(), MemoryFault> {
        *self.word(address)? = value.to_ne_bytes();
        Ok(())
    }

    fn compare_swap(&mut self, address: u64, compare: u64, swap: u64) -> Result<u64, MemoryFault> {
        let word = self.word(address)?;
        let before = u64::from_ne_bytes(*word);
        if before == compare {
            *word = swap.to_ne_bytes();
        }
        Ok(before)
    }

    fn fetch_add(&mut self, address: u64, add: u64) -> Result<u64, MemoryFault> {
        let word = self.word(address)?;
        let before = u64::from_ne_bytes(*word);
        *word = before.wrapping_add(add).to_ne_bytes();
        Ok(before)
    }
}
