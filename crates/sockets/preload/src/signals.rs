//! Signal handlers: the program's own run behind gates that count their runs.

use crate::real;
use socket::process::signals::{self, Handler, HandlerKind};
use std::ffi::c_int;

/// Defines the functions that the kernel enters instead of a handler. Each looks up the handler and jumps to it with
/// the kernel's arguments and stack frame, so that the stack of a handler looks as usual.
///
/// x86-64's kernel passes all three arguments to every handler, AArch64's only the number to one without `SA_SIGINFO`
/// (`setup_return` in `arch/arm64/kernel/signal.c`). `$arguments` sets the others there.
macro_rules! gates {
    ($($name:ident $find:ident $kind:ident $arguments:expr;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "call {find}",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp rax",
                find = sym $find,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                $arguments,
                "stp x29, x30, [sp, -48]!",
                "stp x0, x1, [sp, 16]",
                "str x2, [sp, 32]",
                "bl {find}",
                "mov x16, x0",
                "ldp x0, x1, [sp, 16]",
                "ldr x2, [sp, 32]",
                "ldp x29, x30, [sp], 48",
                "br x16",
                find = sym $find,
            )
        }

        extern "C" fn $find(signal: c_int) -> usize {
            signals::enter(signal, HandlerKind::$kind)
        }
    )*};
}

// At a handler's entry the stack pointer is the address of the frame: a `siginfo_t` of 128 bytes, which is not filled
// in without `SA_SIGINFO`, and the context.
gates! {
    gate_of_plain find_plain Plain "mov x1, 0\n add x2, sp, 128";
    gate_of_informed find_informed SigInfo "";
}

/// Installs the gates.
pub(crate) fn set_gates() {
    signals::set_holder_check(stream::process::defers_handlers);
    signals::set_gates(gate_of_plain as *const () as usize, gate_of_informed as *const () as usize);
}

fn handler_of(action: &libc::sigaction) -> Handler {
    let kind = if action.sa_flags & libc::SA_SIGINFO != 0 { HandlerKind::SigInfo } else { HandlerKind::Plain };
    Handler { kind, address: action.sa_sigaction }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let new = unsafe { new.as_ref() };
    if new.is_some_and(|new| new.sa_flags & libc::SA_RESETHAND != 0) {
        signals::note_one_shot();
    }
    let (result, shown) = signals::replace_handler(signal, new.map(handler_of), |address| {
        let changed = new.zip(address).map(|(new, address)| libc::sigaction { sa_sigaction: address, ..*new });
        let changed = changed.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: null, or a copy of the C program's action; `old` is null or writable, as its call requires.
        let result = unsafe { real::sigaction(signal, changed, old) };
        // SAFETY: null, or filled by the call.
        let before = unsafe { old.as_ref() }.filter(|_| result == 0).map(handler_of);
        (result, result == 0, before)
    });
    // SAFETY: null, or valid as the C program's call requires (manual page).
    if let (Some(shown), Some(old)) = (shown, unsafe { old.as_mut() }) {
        old.sa_sigaction = shown.address;
    }
    result
}

/// The older functions, whose handlers take the signal number only.
fn change_plain(signal: c_int, handler: usize, in_kernel: impl FnOnce(usize) -> usize) -> usize {
    let plain = |address| Handler { kind: HandlerKind::Plain, address };
    let (result, shown) = signals::replace_handler(signal, Some(plain(handler)), |address| {
        let before = in_kernel(address.unwrap_or(handler));
        (before, before != libc::SIG_ERR, signals::handler_of_gate(before))
    });
    shown.map_or(result, |shown| shown.address)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    change_plain(signal, handler, |handler| unsafe { real::signal(signal, handler) })
}

/// `signal` in a program that only requests the standards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sysv_signal(signal: c_int, handler: usize) -> usize {
    signals::note_one_shot();
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    change_plain(signal, handler, |handler| unsafe { real::__sysv_signal(signal, handler) })
}

aliases! {
    bsd_signal(number: c_int, handler: usize) -> usize = signal(number, handler);
    ssignal(number: c_int, handler: usize) -> usize = signal(number, handler);
    sysv_signal(number: c_int, handler: usize) -> usize = __sysv_signal(number, handler);
}
