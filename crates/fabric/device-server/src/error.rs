//! What can go wrong, each as one line with its remedy.

use std::path::PathBuf;

use rustix::io::Errno;
use thiserror::Error;

use crate::{SIZE_BYTES_MIN, VECTORS_MAX};

/// Why there is no server.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// A device's memory is a PCI BAR, whose size is a power of two.
    #[error("size {bytes}: not a power of two from {SIZE_BYTES_MIN} on; try --size {nearest}")]
    Size {
        /// The size asked for.
        bytes: u64,
        /// The next one that is possible.
        nearest: u64,
    },
    /// More or fewer vectors than a client can have.
    #[error("vectors {vectors}: 1 to {VECTORS_MAX} are possible; try --vectors 4")]
    Vectors {
        /// The number asked for.
        vectors: u32,
    },
    /// The kernel's limit of a socket's name.
    #[error(
        "socket '{}': {length} bytes are too long for a socket's name, at most {length_max}; \
         give a shorter path",
        path.display()
    )]
    PathTooLong {
        /// The path asked for.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
        /// What is possible.
        length_max: usize,
    },
    /// A path that ends in nothing, such as `/`.
    #[error("socket '{}': no file name; give the path of a socket in a directory of yours", path.display())]
    PathWithoutName {
        /// The path asked for.
        path: PathBuf,
    },
    /// The directory cannot be opened.
    #[error("directory '{}' of the socket: {errno}; make it with mkdir -m 700, or give another path", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        errno: Errno,
    },
    /// In a directory where others write, others could put their socket in the place of ours.
    #[error(
        "directory '{}' of the socket: mode {mode:03o}, others can write there; \
         chmod 700 it, or give a path in a directory of your own",
        path.display()
    )]
    DirectoryOpen {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The same, by its owner.
    #[error(
        "directory '{}' of the socket: belongs to user {owner}; \
         give a path in a directory of your own",
        path.display()
    )]
    DirectoryForeign {
        /// The directory.
        path: PathBuf,
        /// Who owns it.
        owner: u32,
    },
    /// Somebody else is claiming a socket in the same directory and does not come to an end.
    #[error(
        "directory '{}' of the socket: locked by another process for {waited_ms} ms; \
         end that process, or give another directory",
        path.display()
    )]
    DirectoryLocked {
        /// The directory.
        path: PathBuf,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// Another server answers there.
    #[error("socket '{}': in use, a server answers there; end that one, or give another path", path.display())]
    InUse {
        /// The path asked for.
        path: PathBuf,
    },
    /// Something else has that name, and is left alone.
    #[error(
        "socket '{}': there is a file of that name which is no socket; \
         remove it, or give another path",
        path.display()
    )]
    NotASocket {
        /// The path asked for.
        path: PathBuf,
    },
    /// The kernel refused the socket.
    #[error("socket '{}': {step}: {errno}; give another path", path.display())]
    Socket {
        /// The path asked for.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
    /// More memory than the machine has to give: filling it would end some program.
    #[error("size {bytes}: {available} bytes of memory are free; give a smaller --size")]
    MemoryTooLarge {
        /// The size asked for.
        bytes: u64,
        /// What is there.
        available: u64,
    },
    /// The kernel refused the memory.
    #[error("size {bytes}: the memory cannot be had: {step}: {errno}; give a smaller --size")]
    Memory {
        /// The size asked for.
        bytes: u64,
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
    /// Every client costs descriptors.
    #[error(
        "{wanted} descriptors are needed for {vectors} vectors, {limit} are allowed; \
         raise ulimit -Hn, or give fewer --vectors"
    )]
    Descriptors {
        /// How many are needed.
        wanted: u64,
        /// For how many vectors.
        vectors: u32,
        /// The hard limit.
        limit: u64,
    },
    /// The kernel refused to wait.
    #[error("waiting for clients: {errno}; start the server again")]
    Wait {
        /// What the kernel said.
        errno: Errno,
    },
}

impl Error {
    /// Whether what was asked for can never be had: the command line's fault.
    pub fn is_wrong_use(&self) -> bool {
        matches!(
            self,
            Self::Size { .. } | Self::Vectors { .. } | Self::PathTooLong { .. } | Self::PathWithoutName { .. }
        )
    }
}
