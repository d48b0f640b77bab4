//! `FILE` streams over connections.
//!
//! libc's streams call its internal `read` and `write`, which a preloaded library cannot interpose. A stream over a
//! connection is therefore created by `fopencookie`, libc's interface for custom streams. `stdin`, `stdout` and
//! `stderr` are replaced in the same way while they are connections.

use crate::{bytes, closing, real};
use libc::FILE;
use socket::process::locked::Locked;
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use stream::lifecycle;
use stream::table::{self, Entry};

#[repr(C)]
struct CookieFunctions {
    read: unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> isize,
    write: unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int>,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: CookieFunctions) -> *mut FILE;
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

unsafe extern "C" fn read_cookie(cookie: *mut c_void, buffer: *mut c_char, len: usize) -> isize {
    // SAFETY: libc passes a buffer that is writable for `len` bytes.
    unsafe { bytes::read(cookie.addr() as c_int, buffer.cast(), len) }
}

unsafe extern "C" fn write_cookie(cookie: *mut c_void, buffer: *const c_char, len: usize) -> isize {
    // SAFETY: libc passes a buffer that is readable for `len` bytes. The result is 0 and not -1 on failure, as
    // `fopencookie` requires of this function.
    unsafe { bytes::write(cookie.addr() as c_int, buffer.cast(), len) }.max(0)
}

unsafe extern "C" fn close_cookie(cookie: *mut c_void) -> c_int {
    let fd = cookie.addr() as c_int;
    OPEN.with(|open| open.retain(|stream| stream.fd != fd));
    // SAFETY: the program has closed the stream, and with it the descriptor.
    unsafe { closing::close(fd) }
}

unsafe extern "C" fn leave_open(_cookie: *mut c_void) -> c_int {
    0
}

fn functions(closes: bool) -> CookieFunctions {
    let close = if closes { close_cookie } else { leave_open };
    CookieFunctions { read: read_cookie, write: write_cookie, seek: None, close }
}

/// A stream created here, and its descriptor.
struct OpenStream {
    file: usize,
    fd: c_int,
}

/// The streams created here. Not in a `std::sync::Mutex`, because the child of a fork must find the lock free.
static OPEN: Locked<Vec<OpenStream>> = Locked::new(Vec::new());
/// Whether a stream was ever created; while none was, lookups skip the list.
static HAS_OPENED: AtomicBool = AtomicBool::new(false);

/// Locks the list before a fork, so that no thread is inside it while the process is copied.
pub fn before_fork() {
    OPEN.lock().lock_without_guard();
}

/// Unlocks the list after a fork, in parent and child.
pub fn after_fork() {
    OPEN.lock().unlock();
}

/// Writes what libc has buffered for the streams created here.
pub fn flush() {
    let nth = |index: usize| OPEN.with(|open| open.get(index).map(|stream| stream.file));
    let mut index = 0;
    while let Some(file) = nth(index) {
        // SAFETY: the stream is open, because a close removes it from the list.
        unsafe { libc::fflush(std::ptr::with_exposed_provenance_mut(file)) };
        index += 1;
    }
}

fn remember(file: *mut FILE, fd: c_int) {
    HAS_OPENED.store(true, Ordering::Release);
    OPEN.with(|open| open.push(OpenStream { file: file.expose_provenance(), fd }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    // A TCP socket may be connected later, while the stream is in use.
    if !crate::errno::keeping_errno(|| lifecycle::is_or_becomes_connection(fd)) {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::fdopen(fd, mode) };
    }
    // SAFETY: the C program's mode, valid as its call requires (manual page).
    let file = unsafe { fopencookie(std::ptr::without_provenance_mut(fd as usize), mode, functions(true)) };
    if !file.is_null() {
        remember(file, fd);
    }
    file
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fileno(file: *mut FILE) -> c_int {
    let find =
        |open: &mut Vec<OpenStream>| open.iter().find(|stream| stream.file == file.addr()).map(|stream| stream.fd);
    match HAS_OPENED.load(Ordering::Acquire).then(|| OPEN.with(find)).flatten() {
        Some(fd) => fd,
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        None => unsafe { real::fileno(file) },
    }
}

/// `vdprintf`: libc formats the text, which is then written by this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int {
    unsafe extern "C" {
        fn vasprintf(text: *mut *mut c_char, format: *const c_char, arguments: *mut c_void) -> c_int;
    }
    let mut text: *mut c_char = std::ptr::null_mut();
    // SAFETY: the C program's format and arguments, valid as its call requires (manual page).
    let len = unsafe { vasprintf(&raw mut text, format, arguments) };
    if len < 0 {
        return len;
    }
    let mut done = 0;
    while done < len as usize {
        // SAFETY: the text has `len` bytes, of which `done` have been written.
        let wrote = unsafe { bytes::write(fd, text.add(done).cast(), len as usize - done) };
        if wrote < 0 {
            done = usize::MAX;
            break;
        }
        done += wrote as usize;
    }
    // SAFETY: `vasprintf` allocated the text.
    unsafe { libc::free(text.cast()) };
    if done == usize::MAX { -1 } else { len }
}

/// Defines a variadic function, which Rust cannot express: it lays out its arguments as a `va_list` (System V ABI,
/// section 3.5.7). `$fixed_bytes` is the size of the general registers used by named arguments; `$move_format` moves
/// the format to the second argument register.
#[cfg(target_arch = "x86_64")]
macro_rules! variadic_dprintf {
    ($name:ident, $fixed_bytes:literal, $move_format:literal) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "sub rsp, 0xd8",
                "mov [rsp + 0x30], rdx",
                "mov [rsp + 0x38], rcx",
                "mov [rsp + 0x40], r8",
                "mov [rsp + 0x48], r9",
                "movaps [rsp + 0x50], xmm0",
                "movaps [rsp + 0x60], xmm1",
                "movaps [rsp + 0x70], xmm2",
                "movaps [rsp + 0x80], xmm3",
                "movaps [rsp + 0x90], xmm4",
                "movaps [rsp + 0xa0], xmm5",
                "movaps [rsp + 0xb0], xmm6",
                "movaps [rsp + 0xc0], xmm7",
                concat!("mov dword ptr [rsp], ", $fixed_bytes),
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rsp + 0xe0]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 0x20]",
                "mov [rsp + 16], rax",
                $move_format,
                "mov rdx, rsp",
                "call {vdprintf}",
                "add rsp, 0xd8",
                "ret",
                vdprintf = sym vdprintf,
            )
        }
    };
}

/// As on x86-64, by the procedure call standard for AArch64 (AAPCS64, appendix B): a `va_list` has the addresses behind
/// the arguments on the stack, in general and in vector registers, and the offsets of the first ones from these.
#[cfg(target_arch = "aarch64")]
macro_rules! variadic_dprintf {
    ($name:ident, $unnamed_offset:literal, $move_format:literal) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "sub sp, sp, 224",
                "stp x29, x30, [sp]",
                "mov x29, sp",
                "stp x2, x3, [sp, 16]",
                "stp x4, x5, [sp, 32]",
                "stp x6, x7, [sp, 48]",
                "stp q0, q1, [sp, 64]",
                "stp q2, q3, [sp, 96]",
                "stp q4, q5, [sp, 128]",
                "stp q6, q7, [sp, 160]",
                "add x9, sp, 224",
                "add x10, sp, 64",
                "stp x9, x10, [sp, 192]",
                "add x9, sp, 192",
                "str x9, [sp, 208]",
                concat!("mov w9, ", $unnamed_offset),
                "mov w10, -128",
                "stp w9, w10, [sp, 216]",
                $move_format,
                "add x2, sp, 192",
                "bl {vdprintf}",
                "ldp x29, x30, [sp]",
                "add sp, sp, 224",
                "ret",
                vdprintf = sym vdprintf,
            )
        }
    };
}

#[cfg(target_arch = "x86_64")]
variadic_dprintf!(dprintf, "16", "nop");
#[cfg(target_arch = "x86_64")]
variadic_dprintf!(__dprintf_chk, "24", "mov rsi, rdx");
#[cfg(target_arch = "aarch64")]
variadic_dprintf!(dprintf, "-48", "nop");
#[cfg(target_arch = "aarch64")]
variadic_dprintf!(__dprintf_chk, "-40", "mov x1, x2");

/// The standard streams of libc that are replaced at present.
struct StandardStreams(UnsafeCell<[*mut FILE; 3]>);

// SAFETY: only changed by `dup2` onto a standard descriptor, which a program does not do concurrently from several
// threads.
unsafe impl Sync for StandardStreams {}

static STANDARD: StandardStreams = StandardStreams(UnsafeCell::new([std::ptr::null_mut(); 3]));

/// Replaces or restores the stream of a standard descriptor that now refers to another file.
pub fn follow_standard_stream(fd: c_int) {
    if !(0..3).contains(&fd) || socket::process::identity::is_borrowed_memory() {
        return;
    }
    let is_connection = is_connection(fd);
    // SAFETY: libc's own variables; see `StandardStreams`.
    unsafe {
        let (variable, mode) = match fd {
            0 => (&raw mut stdin, c"r"),
            1 => (&raw mut stdout, c"w"),
            _ => (&raw mut stderr, c"w"),
        };
        let saved = &raw mut (*STANDARD.0.get())[fd as usize];
        if is_connection && (*saved).is_null() {
            let file = fopencookie(std::ptr::without_provenance_mut(fd as usize), mode.as_ptr(), functions(false));
            if !file.is_null() {
                remember(file, fd);
                *saved = std::mem::replace(&mut *variable, file);
                move_unwritten(*saved, file);
            }
        } else if !is_connection && !(*saved).is_null() {
            let ours = std::mem::replace(&mut *variable, std::mem::replace(&mut *saved, std::ptr::null_mut()));
            OPEN.with(|open| open.retain(|stream| stream.file != ours.addr()));
            libc::fclose(ours);
        }
    }
}

/// Moves text that the program has printed but libc has not written yet to the stream that replaces `from`.
unsafe fn move_unwritten(from: *mut FILE, to: *mut FILE) {
    unsafe extern "C" {
        fn __fpending(file: *mut FILE) -> usize;
        fn __fpurge(file: *mut FILE);
    }
    // SAFETY: both are streams of libc. Its headers define the layout of a stream as in `StreamBuffer`, and the pending
    // bytes begin at the base of the write area.
    unsafe {
        let pending_bytes = __fpending(from);
        if pending_bytes > 0 {
            let start = (*from.cast::<StreamBuffer>()).write_base;
            libc::fwrite(start.cast(), 1, pending_bytes, to);
            __fpurge(from);
        }
    }
}

/// The beginning of glibc's `struct _IO_FILE` (`bits/types/struct_FILE.h`), which is part of its ABI because macros use
/// it.
#[repr(C)]
struct StreamBuffer {
    flags: c_int,
    read: [*mut c_char; 3],
    write_base: *mut c_char,
}

fn is_connection(fd: c_int) -> bool {
    matches!(table::get(fd), Entry::Young(_) | Entry::Connection(_))
}

aliases! {
    fileno_unlocked(file: *mut FILE) -> c_int = fileno(file);
    __vdprintf_chk(fd: c_int, _flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int
        = vdprintf(fd, format, arguments);
}
