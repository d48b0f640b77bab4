//! Making children.

use crate::real;
use libc::FILE;
use socket::lifecycle::{self, while_inheritable};
use socket::system::note_spawn;
use std::ffi::{c_char, c_int, c_long, c_void};

/// `vfork` returns twice into the caller's frame: count, then jump.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn vfork() -> c_int {
    core::arch::naked_asm!(
        "sub rsp, 8",
        "call {note}",
        "call {address}",
        "add rsp, 8",
        "jmp rax",
        note = sym note_spawn,
        address = sym real::vfork_address,
    )
}

/// Forks, with the handlers around it that libc calls around `fork`.
pub fn with_handlers(fork: impl FnOnce() -> c_long) -> c_long {
    if lifecycle::settings().off {
        return fork();
    }
    lifecycle::before_fork();
    let pid = fork();
    if pid == 0 {
        lifecycle::after_fork_in_child();
    } else {
        let error = socket::system::errno();
        lifecycle::after_fork_in_parent();
        crate::set_errno(error);
    }
    pid
}

/// `fork` without the program's handlers; ours are needed all the same.
#[unsafe(export_name = "_Fork")]
pub unsafe extern "C" fn bare_fork() -> c_int {
    // SAFETY: the C caller's.
    with_handlers(|| unsafe { real::bare_fork() }.into()) as c_int
}

/// What the child of a `clone` that copies memory is to run.
struct Start {
    run: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
}

extern "C" fn start_child(start: *mut c_void) -> c_int {
    lifecycle::after_fork_in_child();
    // SAFETY: the caller of `clone` made it, in memory that the child has a copy of.
    let start = unsafe { &*start.cast::<Start>() };
    (start.run)(start.argument)
}

/// libc's `clone`, which is variadic: all its arguments are where this definition finds them. A child with a copy of
/// the memory is one of `fork`, one with the memory itself one of `vfork` or a thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    run: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: *mut c_int,
    tls: *mut c_void,
    child_tid: *mut c_int,
) -> c_int {
    if flags & libc::CLONE_VM != 0 || lifecycle::settings().off {
        if flags & libc::CLONE_THREAD == 0 {
            note_spawn();
        }
        // SAFETY: the C caller's.
        return unsafe { real::clone(run, stack, flags, argument, parent_tid, tls, child_tid) };
    }
    let mut start = Start { run, argument };
    let start = (&raw mut start).cast();
    // SAFETY: the C caller's.
    let clone = || unsafe { real::clone(start_child, stack, flags, start, parent_tid, tls, child_tid) };
    with_handlers(|| clone().into()) as c_int
}

macro_rules! spawns {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            pid: *mut c_int,
            path: *const c_char,
            actions: *const c_void,
            attributes: *const c_void,
            arguments: *const *mut c_char,
            environment: *const *mut c_char,
        ) -> c_int {
            note_spawn();
            // SAFETY: the C caller's.
            while_inheritable(|| unsafe { real::$name(pid, path, actions, attributes, arguments, environment) })
        }
    )*};
}

spawns! { posix_spawn posix_spawnp pidfd_spawn pidfd_spawnp }

#[unsafe(no_mangle)]
pub unsafe extern "C" fn system(command: *const c_char) -> c_int {
    note_spawn();
    // SAFETY: the C caller's.
    unsafe { real::system(command) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    note_spawn();
    // SAFETY: the C caller's.
    unsafe { real::popen(command, mode) }
}
