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
mod readiness;
#[path = "../../preload/src/real.rs"]
#[allow(dead_code, reason = "shared with the library that this one replaces")]
mod real;
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
}
