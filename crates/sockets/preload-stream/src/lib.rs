//! `libcrosslane_stream.so`: the C names of the stream sockets that keep the kernel's connections, for `LD_PRELOAD`.
//!
//! It replaces `libcrosslane.so` once it can do everything that programs need; see the crate `stream`.
//!
//! Every function has the name and signature of one in libc, looks up its descriptor, and calls either the `stream`
//! crate or the function of libc. The only logic is the conversion of arguments, and of errors to `errno`. No function
//! unwinds.

#![allow(unsafe_code)] // Every function is called from C.
#![allow(clippy::missing_safety_doc)] // The contract of each is its manual page.
#![allow(missing_docs)]

#[macro_use]
#[path = "../../preload/src/aliases.rs"]
mod aliases;
mod bytes;
mod descriptors;
mod errno;
mod file_transfer;
mod messages;
mod processes;
mod readiness;
#[path = "../../preload/src/real.rs"]
#[allow(dead_code, reason = "shared with the library that this one replaces")]
mod real;
mod signals;
mod sockets;

use socket::process::identity;

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

/// Runs when the library is loaded, before the program.
extern "C" fn load() {
    socket::process::blocking::set_blocking_calls(real::recv, real::poll, real::epoll_pwait);
    socket::process::blocking::set_masked_blocking_calls(real::ppoll, real::pselect);
    socket::process::threads::find_single_threaded();
    socket::rendezvous::directory::remember_environment();
    identity::note_process();
    signals::set_gates();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
}

extern "C" fn before_fork() {
    stream::process::before_fork();
}

extern "C" fn after_fork_in_parent() {
    stream::process::after_fork_in_parent();
}

extern "C" fn after_fork_in_child() {
    stream::process::after_fork_in_child();
}
