//! `libcrosslane.so`: the C names of the stream sockets, for `LD_PRELOAD`.
//!
//! Every function has the name and signature of one in libc, looks up its descriptor, and calls either the `stream`
//! crate or the function of libc. The only logic is the conversion of arguments, and of errors to `errno`. No function
//! unwinds.

#![allow(unsafe_code)] // Every function is called from C.
#![allow(clippy::missing_safety_doc)] // The contract of each is its manual page.
#![allow(missing_docs)]

#[macro_use]
mod aliases;
mod bytes;
mod closing;
mod descriptors;
mod errno;
mod file_transfer;
mod files;
mod loading;
mod messages;
mod processes;
mod readiness;
mod real;
mod signals;
mod sockets;
mod syscalls;

use socket::process::identity;
use socket::process::settings::settings;

/// The release, which `crosslane run` compares with its own: an ELF note (elf(5)) of type 1 with the owner
/// `Crosslane`.
#[repr(C, align(4))]
struct ReleaseNote {
    name_bytes: u32,
    contents_bytes: u32,
    kind: u32,
    name: [u8; 12],
    contents: [u8; RELEASE.len()],
}

const RELEASE: &[u8] = env!("CARGO_PKG_VERSION").as_bytes();

#[used]
#[unsafe(link_section = ".note.crosslane")]
static RELEASE_NOTE: ReleaseNote = ReleaseNote {
    name_bytes: 10,
    contents_bytes: RELEASE.len() as u32,
    kind: 1,
    name: *b"Crosslane\0\0\0",
    contents: *RELEASE.first_chunk().unwrap(),
};

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

/// Runs when the library is loaded, before the program.
extern "C" fn load() {
    socket::process::blocking::set_blocking_calls(real::recv, real::poll, real::epoll_pwait);
    socket::process::blocking::set_masked_blocking_calls(real::ppoll, real::pselect);
    socket::process::threads::find_single_threaded();
    socket::rack::location::remember_environment();
    identity::note_process();
    socket::environment::check();
    if settings().off {
        return;
    }
    stream::process::note_load();
    signals::set_gates();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
}

#[used]
#[unsafe(link_section = ".fini_array")]
static UNLOAD: extern "C" fn() = unload;

/// Runs when the program ends by `exit`, after its own handlers.
extern "C" fn unload() {
    if stream::process::may_release_holds() {
        // libc would write to connections after they are released.
        files::flush();
    }
    stream::process::before_exit();
}

extern "C" fn before_fork() {
    // Blocks signals: no handler finds the lock of the files held.
    stream::process::before_fork();
    files::before_fork();
}

extern "C" fn after_fork_in_parent() {
    files::after_fork();
    stream::process::after_fork_in_parent();
}

extern "C" fn after_fork_in_child() {
    files::after_fork();
    stream::process::after_fork_in_child();
}
