//! A process that has locked its memory. In a test program of its own, because `mlockall` affects the whole process.

#![cfg(not(loom))]
#![allow(unsafe_code)] // `mlockall` has no safe wrapper here.

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use volmem::Mapping;

const LEN_BYTES: usize = 4 << 20;

fn memory_file() -> File {
    // SAFETY: the name is a C string, and the returned descriptor has no owner yet.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"locked".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(LEN_BYTES as u64).unwrap();
    file
}

fn allocated_bytes(file: &File) -> u64 {
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn a_sparse_mapping_allocates_no_memory_before_it_is_accessed() {
    // SAFETY: the call only determines how later mappings are locked.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return eprintln!("mlockall: {}: this user may not lock memory", std::io::Error::last_os_error());
    }
    let file = memory_file();
    let sparse = Mapping::sparse(file.as_fd(), LEN_BYTES).unwrap();
    assert_eq!(allocated_bytes(&file), 0);
    // SAFETY: the offset is inside the mapping, and nothing else accesses its memory.
    unsafe { sparse.base().add(LEN_BYTES / 2).write_volatile(1) };
    assert!((1..LEN_BYTES as u64 / 2).contains(&allocated_bytes(&file)), "{} bytes", allocated_bytes(&file));

    let file = memory_file();
    match Mapping::new(file.as_fd(), LEN_BYTES) {
        Ok(_dense) => assert_eq!(allocated_bytes(&file), LEN_BYTES as u64, "mlockall allocates all memory"),
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}: only RLIMIT_MEMLOCK may prevent the mapping")
        }
    }
}
