//! Making children.

use crate::real;
use libc::FILE;
use socket::lifecycle::while_inheritable;
use socket::system::note_spawn;
use std::ffi::{c_char, c_int, c_void};

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

spawns! { posix_spawn posix_spawnp }

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
