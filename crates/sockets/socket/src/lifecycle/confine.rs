//! The change of a process's connections when the program puts itself under a system call filter.

use crate::entry::{self, Entry};
use crate::epoll;
use crate::process::settings::settings;
use crate::process::{sandbox, system};
use std::ffi::c_long;
use std::os::fd::RawFd;

/// Runs `install`, which puts the process under a system call filter. From then on, established connections make only
/// the system calls that the program makes.
pub fn confine(install: impl FnOnce() -> c_long) -> c_long {
    if settings().off || sandbox::is_confined() {
        return install();
    }
    confine_connections();
    sandbox::set_confined(true);
    let result = install();
    if result < 0 {
        let error = system::errno();
        sandbox::set_confined(false);
        release_connections();
        // SAFETY: `__errno_location` returns the address of this thread's `errno`, which is writable.
        unsafe { *libc::__errno_location() = error.raw_os_error() };
    }
    result
}

fn confine_connections() {
    entry::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Connection(connection) = entry
            && !epoll::is_in_a_set(connection)
            && connection.confine()
        {
            entry::set(fd, Entry::Confined(connection));
        }
    });
}

/// Reverts [`confine_connections`], because the kernel has refused the filter.
fn release_connections() {
    entry::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Confined(connection) = entry {
            connection.unconfine();
            entry::set(fd, Entry::Connection(connection));
        }
    });
}
