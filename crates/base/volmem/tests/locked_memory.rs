//! A process that has locked its memory, alone in a test program of its own: what it locks is the whole process.

#![cfg(not(loom))]
#![allow(unsafe_code)] // What the test is about has no safe form.

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use volmem::Mapping;

const LEN_BYTES: usize = 4 << 20;

fn memory_file() -> File {
    // SAFETY: the name is a C string, and the descriptor that comes back has no owner yet.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"locked".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(LEN_BYTES as u64).unwrap();
    file
}

fn taken_bytes(file: &File) -> u64 {
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn a_sparse_mapping_takes_no_memory_before_it_is_touched() {
    // SAFETY: says only how memory mapped from now on is held.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return eprintln!("mlockall: {}: this user locks no memory", std::io::Error::last_os_error());
    }
    let file = memory_file();
    let sparse = Mapping::sparse(file.as_fd(), LEN_BYTES).unwrap();
    assert_eq!(taken_bytes(&file), 0);
    // SAFETY: nobody else has the memory of this mapping.
    unsafe { sparse.base().add(LEN_BYTES / 2).write_volatile(1) };
    assert!((1..LEN_BYTES as u64 / 2).contains(&taken_bytes(&file)), "{} bytes", taken_bytes(&file));

    let file = memory_file();
    match Mapping::new(file.as_fd(), LEN_BYTES) {
        Ok(_dense) => assert_eq!(taken_bytes(&file), LEN_BYTES as u64, "what mlockall asks for"),
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}: only RLIMIT_MEMLOCK is in the way")
        }
    }
}
