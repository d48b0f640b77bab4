//! `dlopen` and `dlmopen` without `RTLD_DEEPBIND`.
//!
//! A plug-in that is loaded with that flag, as PHP and Apache's runtime load theirs, finds libc's functions before
//! those of this library: it would read and write the lifelines of connections. Without the flag it finds these first,
//! as it finds those of any library that the program itself is linked to.

use crate::real;
use std::ffi::{c_char, c_int, c_void};

/// The real function, and the flags to call it with. In two registers, as C returns it.
#[repr(C)]
struct Call {
    address: *mut c_void,
    flags: usize,
}

/// libc's `dlopen`, jumped to: it searches by the paths of its caller, which it knows from where it returns to.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "sub rsp, 16", // Calls are made with the stack at a multiple of 16.
        "mov edi, esi",
        "call {call}",
        "add rsp, 16",
        "pop rdi",
        "mov rsi, rdx",
        "jmp rax",
        call = sym dlopen_call,
    )
}

/// As [`dlopen`].
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
        "jmp rax", // The flags are where they belong: the second half of an answer is in the third argument's register.
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
