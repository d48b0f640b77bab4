//! The host's memory, as a NIC uses it.

use thiserror::Error;

/// The host does not have memory where the table of keys says it does: it was unmapped while registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{bytes} bytes at {address:#x} are not mapped in the host; deregister memory before unmapping it")]
pub struct MemoryFault {
    /// The address of the access.
    pub address: u64,
    /// The length of the access.
    pub bytes: u64,
}

/// The memory operations of a NIC. Addresses are those of the host and have been checked against keys; an
/// implementation must still check that the host has the memory.
pub trait HostMemory {
    /// The payload of a packet: bytes (`[u8]`) where data is moved, `()` where only lengths matter.
    type Payload: ?Sized;

    /// Copies the first bytes of a payload, for a packet that the NIC keeps; empty where only lengths matter.
    fn copy_payload(payload: &Self::Payload, bytes: u32) -> Vec<u8>;

    /// Returns a copied payload as a payload.
    fn payload_from_copy(copy: &[u8]) -> &Self::Payload;

    /// Copies memory into a payload, at offset `at` of the payload.
    ///
    /// # Errors
    /// If the host does not have the memory.
    fn gather(&mut self, address: u64, bytes: u32, payload: &mut Self::Payload, at: u32) -> Result<(), MemoryFault>;

    /// Copies a payload from offset `at` on into memory.
    ///
    /// # Errors
    /// If the host does not have the memory.
    fn place(&mut self, address: u64, bytes: u32, payload: &Self::Payload, at: u32) -> Result<(), MemoryFault>;

    /// Stores the result of an atomic operation: 8 bytes in the host's byte order.
    ///
    /// # Errors
    /// If the host does not have the memory.
    fn store(&mut self, address: u64, value: u64) -> Result<(), MemoryFault>;

    /// Replaces 8 bytes with `swap` if they equal `compare`; returns the previous value. Atomic among all NICs of the
    /// host.
    ///
    /// # Errors
    /// If the host does not have the memory.
    fn compare_swap(&mut self, address: u64, compare: u64, swap: u64) -> Result<u64, MemoryFault>;

    /// Adds to 8 bytes, mod 2^64; returns the previous value. Atomic among all NICs of the host.
    ///
    /// # Errors
    /// If the host does not have the memory.
    fn fetch_add(&mut self, address: u64, add: u64) -> Result<u64, MemoryFault>;
}

/// The memory of a simulation in which only lengths matter: every address exists and reads as zeros.
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

/// Memory in a vector that starts at address 0: for tests, and for hosts whose registered memory is contiguous.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ByteMemory(pub Vec<u8>);

impl ByteMemory {
    /// Creates a memory of `bytes` zeros.
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

    fn payload_from_copy(copy: &[u8]) -> &[u8] {
        copy
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
