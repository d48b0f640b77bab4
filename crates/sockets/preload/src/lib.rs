//! `libcrosslane.so`: the C names of the socket layer, for `LD_PRELOAD`.
//!
//! Every function here has the name and signature of libc's, looks its descriptor up, and calls either the `socket`
//! crate or libc's own function. There is no logic but the translation of arguments and of errors into `errno`. Nothing
//! here unwinds.

#![allow(unsafe_code)] // Every function is called from C.
#![allow(clippy::missing_safety_doc)] // The contract of each is its manual page.
#![allow(missing_docs)]

mod bytes;
mod descriptors;
mod files;
#[cfg(target_arch = "x86_64")]
mod loading;
mod messages;
mod processes;
mod readiness;
mod real;
mod signals;
mod sockets;
mod syscalls;

use rustix::io::Errno;
use socket::lifecycle;
use socket::process::identity;
use socket::process::settings::settings;
use std::ffi::c_int;

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

/// Runs when the library is loaded, before the program.
extern "C" fn load() {
    socket::process::blocking::set_blocking_calls(real::recv, real::poll, real::epoll_pwait);
    socket::process::blocking::set_masked_blocking_calls(real::ppoll, real::pselect);
    socket::process::threads::find_single_threaded();
    socket::rendezvous::directory::remember_environment();
    socket::descriptor::successor::note_preload_origin();
    identity::note_process();
    lifecycle::check_environment();
    if settings().off {
        return;
    }
    signals::set_gates();
    // SAFETY: the handlers are C functions that live as long as the process.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
    lifecycle::adopt_inherited();
    files::adopt_standard_streams();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static UNLOAD: extern "C" fn() = unload;

/// Runs when the program ends by `exit`, behind its own handlers.
extern "C" fn unload() {
    if !settings().off {
        lifecycle::before_exit();
    }
}

extern "C" fn before_fork() {
    files::before_fork();
    lifecycle::before_fork();
}

extern "C" fn after_fork_in_parent() {
    lifecycle::after_fork_in_parent();
    files::after_fork();
}

extern "C" fn after_fork_in_child() {
    lifecycle::after_fork_in_child();
    files::after_fork();
}

fn set_errno(error: Errno) {
    // SAFETY: libc's own variable of this thread.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// Runs a call that makes a descriptor; what the library can spare makes room for it.
fn sparing_descriptors(call: impl Fn() -> c_int) -> c_int {
    let call = || match call() {
        fd if fd >= 0 => Ok(fd),
        _ => Err(socket::process::system::errno()),
    };
    keeping_errno(|| {
        socket::process::limit::retry_with_room(call, |error| *error == Errno::MFILE).unwrap_or_else(|error| {
            set_errno(error);
            -1
        })
    })
}

/// A count, or -1 with `errno`.
fn count_or_errno(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(count) => count as isize,
        Err(error) => {
            set_errno(error);
            -1
        }
    }
}

/// A call of the program's, which leaves `errno` alone where it succeeds: a lock of the standard library that another
/// thread has writes `EAGAIN` there, and so does a call of libc's that had to be tried twice.
#[inline]
fn keeping_errno<N: From<i8> + PartialOrd>(call: impl FnOnce() -> N) -> N {
    // SAFETY: libc's own variable of this thread.
    let before = unsafe { *libc::__errno_location() };
    let result = call();
    if result >= N::from(0) {
        // SAFETY: the same variable, which is writable for as long as the thread lives.
        unsafe { *libc::__errno_location() = before };
    }
    result
}

/// 0, or -1 with `errno`.
fn zero_or_errno(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            -1
        }
    }
}
