//! `dlopen` and `dlmopen` without `RTLD_DEEPBIND`.
//!
//! A plug-in that is loaded with that flag, as by PHP and Apache's runtime, finds libc's functions before those of this
//! library and would miss the bytes of lanes. Without the flag, it finds these first, like the
//! functions of any library that the program is linked to.

use crate::real;
use std::ffi::{c_char, c_int, c_void};

/// The address of libc's function, and the flags to pass to it. C returns this struct in two registers.
#[repr(C)]
struct Call {
    address: *mut c_void,
    flags: usize,
}

/// Jumps to libc's `dlopen`, which determines the search path from its return address, that is, from its caller.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "sub rsp, 16", // The stack must be aligned to 16 bytes at a call.
        "mov edi, esi",
        "call {call}",
        "add rsp, 16",
        "pop rdi",
        "mov rsi, rdx",
        "jmp rax",
        call = sym dlopen_call,
    )
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, -32]!",
        "str x0, [sp, 16]",
        "mov w0, w1",
        "bl {call}",
        "mov x16, x0",
        "ldr x0, [sp, 16]", // The flags are in place: a struct's second word is returned in the second register.
        "ldp x29, x30, [sp], 32",
        "br x16",
        call = sym dlopen_call,
    )
}

/// As [`dlopen`].
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlmopen(namespace: isize, path: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, -32]!",
        "stp x0, x1, [sp, 16]",
        "mov w0, w2",
        "bl {call}",
        "mov x16, x0",
        "mov x2, x1",
        "ldp x0, x1, [sp, 16]",
        "ldp x29, x30, [sp], 32",
        "br x16",
        call = sym dlmopen_call,
    )
}

/// As [`dlopen`].
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlmopen(namespace: isize, path: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "mov edi, edx",
        "call {call}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax", // The flags are in place: a struct's second word is returned in the register of the third argument.
        call = sym dlmopen_call,
    )
}

extern "C" fn dlopen_call(flags: c_int) -> Call {
    Call { address: real::dlopen_address(), flags: without_deepbind(flags) }
}

extern "C" fn dlmopen_call(flags: c_int) -> Call {
    Call { address: real::dlmopen_address(), flags: without_deepbind(flags) }
}

fn without_deepbind(flags: c_int) -> usize {
    let kept = if socket::process::settings::settings().off { flags } else { flags & !libc::RTLD_DEEPBIND };
    kept as u32 as usize
}
