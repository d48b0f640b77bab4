//! The options of a server.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::limits::{SIZE_BYTES_MAX, SIZE_BYTES_MIN, VECTORS_MAX};

/// Path of the socket, size of the memory and number of vectors, all valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub(crate) socket: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) vectors: u32,
}

impl Options {
    /// Checks what does not depend on the machine.
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

    /// Path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Size of the memory.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Number of doorbells of a client.
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
    fn a_size_is_a_power_of_two_and_at_least_a_page() {
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
