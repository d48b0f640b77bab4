//! What a server is asked for.

use std::path::{Path, PathBuf};

use crate::Error;

/// The smallest memory: a page.
pub const SIZE_BYTES_MIN: u64 = 4096;
/// The largest: what a PCI BAR of 64 bits is good for in machines of today.
const SIZE_BYTES_MAX: u64 = 1 << 46;
/// Vectors of a client at most: each is a descriptor here and in every client.
pub const VECTORS_MAX: u32 = 64;

/// A socket's path, a memory's size and a number of vectors that can be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub(crate) socket: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) vectors: u32,
}

impl Options {
    /// Checks what needs no look at the machine.
    pub fn new(socket: &Path, size_bytes: u64, vectors: u32) -> Result<Self, Error> {
        if !size_bytes.is_power_of_two() || !(SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(&size_bytes) {
            let nearest = size_bytes.clamp(SIZE_BYTES_MIN, SIZE_BYTES_MAX).next_power_of_two();
            return Err(Error::Size { bytes: size_bytes, nearest });
        }
        if !(1..=VECTORS_MAX).contains(&vectors) {
            return Err(Error::Vectors { vectors });
        }
        Ok(Self { socket: socket.to_owned(), size_bytes, vectors })
    }

    /// Where clients connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The memory's size.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Doorbells a client has.
    pub fn vectors(&self) -> u32 {
        self.vectors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(size_bytes: u64, vectors: u32) -> Result<Options, Error> {
        Options::new(Path::new("device.sock"), size_bytes, vectors)
    }

    #[test]
    fn a_size_is_a_power_of_two_of_a_page_at_least() {
        for (bytes, nearest) in [(0, 4096), (2048, 4096), (4097, 8192), (3 << 20, 4 << 20), (u64::MAX, 1 << 46)] {
            assert_eq!(new(bytes, 1), Err(Error::Size { bytes, nearest }));
        }
        for bytes in [4096, 64 << 20, 1 << 46] {
            assert_eq!(new(bytes, 1).map(|options| options.size_bytes()), Ok(bytes));
        }
    }

    #[test]
    fn a_client_has_1_to_64_vectors() {
        for vectors in [0, 65, u32::MAX] {
            assert_eq!(new(4096, vectors), Err(Error::Vectors { vectors }));
        }
        assert!(new(4096, 1).is_ok() && new(4096, 64).is_ok());
    }
}
