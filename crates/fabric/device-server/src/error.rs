//! Errors, each as one line with its remedy.

use std::path::PathBuf;

use rustix::io::Errno;
use thiserror::Error;

use crate::limits::{SIZE_BYTES_MIN, VECTORS_MAX};

/// Why a server could not be started.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// The size is not a power of two. A device's memory is a PCI BAR.
    #[error("size {bytes}: not a power of two from {SIZE_BYTES_MIN} on; try --size {nearest}")]
    Size {
        /// Size asked for.
        bytes: u64,
        /// The nearest valid size.
        nearest: u64,
    },
    /// The number of vectors is out of range.
    #[error("vectors {vectors}: 1 to {VECTORS_MAX} are possible; try --vectors 4")]
    Vectors {
        /// Number asked for.
        vectors: u32,
    },
    /// The path exceeds the kernel's limit of a unix socket address.
    #[error(
        "socket '{}': {length} bytes are too long for a socket address, at most {length_max}; \
         give a shorter path",
        path.display()
    )]
    PathTooLong {
        /// Path asked for.
        path: PathBuf,
        /// Length in bytes.
        length: usize,
        /// Maximum length.
        length_max: usize,
    },
    /// The path has no file name, such as `/`.
    #[error("socket '{}': no file name; give the path of a socket in a directory of your own", path.display())]
    PathWithoutName {
        /// Path asked for.
        path: PathBuf,
    },
    /// The directory cannot be opened.
    #[error("directory '{}' of the socket: {errno}; make it with mkdir -m 700, or give another path", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
    /// Other users can write to the directory, and could replace the socket by theirs.
    #[error(
        "directory '{}' of the socket: mode {mode:03o}, other users can write to it; \
         chmod 700 it, or give a path in a directory of your own",
        path.display()
    )]
    DirectoryOpen {
        /// The directory.
        path: PathBuf,
        /// Mode of the directory.
        mode: u32,
    },
    /// Another user owns the directory.
    #[error(
        "directory '{}' of the socket: owned by user {owner}; \
         give a path in a directory of your own",
        path.display()
    )]
    DirectoryForeign {
        /// The directory.
        path: PathBuf,
        /// User ID of the owner.
        owner: u32,
    },
    /// Another process holds the lock of the directory.
    #[error(
        "directory '{}' of the socket: locked by another process for {waited_ms} ms; \
         end that process, or give another directory",
        path.display()
    )]
    DirectoryLocked {
        /// The directory.
        path: PathBuf,
        /// Milliseconds waited.
        waited_ms: u64,
    },
    /// Another server uses the socket.
    #[error("socket '{}': in use by another server; end that server, or give another path", path.display())]
    InUse {
        /// Path asked for.
        path: PathBuf,
    },
    /// The path is a file that is not a socket. It is left alone.
    #[error(
        "socket '{}': the file exists and is not a socket; \
         remove it, or give another path",
        path.display()
    )]
    NotASocket {
        /// Path asked for.
        path: PathBuf,
    },
    /// The socket could not be made.
    #[error("socket '{}': {step}: {errno}; give another path", path.display())]
    Socket {
        /// Path asked for.
        path: PathBuf,
        /// The failed operation.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The memory exceeds the available memory: filling it would invoke the OOM killer.
    #[error("size {bytes}: {available} bytes of memory are available; give a smaller --size")]
    MemoryTooLarge {
        /// Size asked for.
        bytes: u64,
        /// Bytes available.
        available: u64,
    },
    /// The memory could not be allocated.
    #[error("size {bytes}: the memory cannot be allocated: {step}: {errno}; give a smaller --size")]
    Memory {
        /// Size asked for.
        bytes: u64,
        /// The failed operation.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The limit of open descriptors is too low for the clients.
    #[error(
        "{wanted} descriptors are needed for {vectors} vectors, {limit} are allowed; \
         raise ulimit -Hn, or give fewer --vectors"
    )]
    Descriptors {
        /// Descriptors needed.
        wanted: u64,
        /// Vectors of a client.
        vectors: u32,
        /// The hard limit.
        limit: u64,
    },
    /// Waiting for clients failed.
    #[error("waiting for clients: {errno}; start the server again")]
    Wait {
        /// The kernel's error.
        errno: Errno,
    },
}

impl Error {
    /// Whether the arguments can never be valid, so that the exit code is that of wrong usage.
    pub fn is_wrong_use(&self) -> bool {
        matches!(
            self,
            Self::Size { .. } | Self::Vectors { .. } | Self::PathTooLong { .. } | Self::PathWithoutName { .. }
        )
    }
}
