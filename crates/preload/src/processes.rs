//! Making children, and system calls that go around libc.

use crate::real;
use libc::FILE;
use socket::lifecycle::while_inheritable;
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut c_int,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    note_spawn();
    // SAFETY: the C caller's.
    while_inheritable(|| unsafe { real::posix_spawn(pid, path, actions, attributes, arguments, environment) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut c_int,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    note_spawn();
    // SAFETY: the C caller's.
    while_inheritable(|| unsafe { real::posix_spawnp(pid, path, actions, attributes, arguments, environment) })
}

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

/// libc's `syscall`, which is variadic: all its arguments are in registers or on the stack, where this definition finds
/// them.
///
/// A ring of the kernel would bypass the library, so there is none: programs then take epoll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
) -> c_long {
    if number == libc::SYS_io_uring_setup && !socket::lifecycle::settings().off {
        crate::set_errno(rustix::io::Errno::NOSYS);
        return -1;
    }
    // SAFETY: the C caller's.
    let result = unsafe { raw_syscall(number, first, second, third, fourth, fifth, sixth) };
    if (-4095..0).contains(&result) {
        crate::set_errno(rustix::io::Errno::from_raw_os_error(-result as i32));
        return -1;
    }
    result
}

#[cfg(target_arch = "x86_64")]
unsafe fn raw_syscall(
    number: c_long,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
) -> c_long {
    let result: c_long;
    // SAFETY: the kernel's calling convention; what the call does is the C caller's affair.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            in("r9") sixth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    result
}

#[unsafe(no_mangle)]
pub extern "C" fn io_uring_queue_init(_entries: u32, _ring: *mut c_void, _flags: u32) -> c_int {
    -libc::ENOSYS
}

#[unsafe(no_mangle)]
pub extern "C" fn io_uring_queue_init_params(_entries: u32, _ring: *mut c_void, _parameters: *mut c_void) -> c_int {
    -libc::ENOSYS
}
