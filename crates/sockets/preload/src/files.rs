//! `FILE` streams over connections.
//!
//! libc's streams read and write by calls inside libc, which no preloaded library sees. A stream over a connection is
//! therefore made with libc's own means for foreign streams (`fopencookie`), and so are `stdin`, `stdout` and `stderr`
//! while a connection is theirs.

use crate::{bytes, descriptors, real};
use libc::FILE;
use socket::entry::{self, Entry};
use socket::process::lock::Lock;
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

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
    // SAFETY: libc's buffer.
    unsafe { bytes::read(cookie.addr() as c_int, buffer.cast(), len) }
}

unsafe extern "C" fn write_cookie(cookie: *mut c_void, buffer: *const c_char, len: usize) -> isize {
    // SAFETY: libc's buffer. A stream expects zero, not -1, from a failed write.
    unsafe { bytes::write(cookie.addr() as c_int, buffer.cast(), len) }.max(0)
}

unsafe extern "C" fn close_cookie(cookie: *mut c_void) -> c_int {
    let fd = cookie.addr() as c_int;
    with_open(|open| open.retain(|stream| stream.fd != fd));
    // SAFETY: closing the stream closes its descriptor.
    unsafe { descriptors::close(fd) }
}

unsafe extern "C" fn keep_cookie(_cookie: *mut c_void) -> c_int {
    0
}

fn functions(closes: bool) -> CookieFunctions {
    let close = if closes { close_cookie } else { keep_cookie };
    CookieFunctions { read: read_cookie, write: write_cookie, seek: None, close }
}

/// A stream made here, and the descriptor it stands for.
struct OpenStream {
    file: usize,
    fd: c_int,
}

/// All of them. Not in a `std::sync::Mutex`, because the child of a fork must find the lock free.
struct Open {
    lock: Lock,
    /// Under `lock`.
    streams: UnsafeCell<Vec<OpenStream>>,
}

// SAFETY: the list is accessed under the lock.
unsafe impl Sync for Open {}

static OPEN: Open = Open { lock: Lock::new(), streams: UnsafeCell::new(Vec::new()) };
/// Whether there has been one: a program without asks nobody.
static HAS_OPENED: AtomicBool = AtomicBool::new(false);

fn with_open<R>(access: impl FnOnce(&mut Vec<OpenStream>) -> R) -> R {
    let _guard = OPEN.lock.lock();
    // SAFETY: under the lock.
    access(unsafe { &mut *OPEN.streams.get() })
}

/// Before a fork: no thread is inside the list while the process is copied.
pub fn before_fork() {
    OPEN.lock.lock_without_guard();
}

/// After a fork, in parent and child.
pub fn after_fork() {
    OPEN.lock.unlock();
}

fn remember(file: *mut FILE, fd: c_int) {
    HAS_OPENED.store(true, Ordering::Release);
    with_open(|open| open.push(OpenStream { file: file.addr(), fd }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    // A TCP socket may be connected later, under the stream's hands.
    if !matches!(entry::get(fd), Entry::Connection(_) | Entry::Stream(_)) {
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
    match HAS_OPENED.load(Ordering::Acquire).then(|| with_open(find)).flatten() {
        Some(fd) => fd,
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        None => unsafe { real::fileno(file) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fileno_unlocked(file: *mut FILE) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { fileno(file) }
}

/// `vdprintf`: formatted by libc, written by us.
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
        // SAFETY: the text has `len` bytes.
        let wrote = unsafe { bytes::write(fd, text.add(done).cast(), len as usize - done) };
        if wrote < 0 {
            done = usize::MAX;
            break;
        }
        done += wrote as usize;
    }
    // SAFETY: made by `vasprintf`.
    unsafe { libc::free(text.cast()) };
    if done == usize::MAX { -1 } else { len }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __vdprintf_chk(
    fd: c_int,
    _flag: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { vdprintf(fd, format, arguments) }
}

/// A variadic function, which Rust cannot define: lays its arguments out as a `va_list` of the System V ABI, section
/// 3.5.7. `$fixed_bytes` are the general registers that named arguments took, `$move_format` brings the format into the
/// second.
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

#[cfg(target_arch = "x86_64")]
variadic_dprintf!(dprintf, "16", "nop");
#[cfg(target_arch = "x86_64")]
variadic_dprintf!(__dprintf_chk, "24", "mov rsi, rdx");

/// The standard streams that libc made, while ours are in their place.
struct Standard(UnsafeCell<[*mut FILE; 3]>);

// SAFETY: changed only by `dup2` onto a standard descriptor, which a program does not do from several threads at once.
unsafe impl Sync for Standard {}

static STANDARD: Standard = Standard(UnsafeCell::new([std::ptr::null_mut(); 3]));

/// `fd` is now something else: if it is a standard descriptor, its stream follows.
pub fn follow_standard_stream(fd: c_int) {
    if !(0..3).contains(&fd) || socket::process::identity::is_borrowed_memory() {
        return;
    }
    let is_connection = entry::connection(fd).is_some();
    // SAFETY: libc's own variables; see `Standard`.
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
                hand_over_unwritten(*saved, file);
            }
        } else if !is_connection && !(*saved).is_null() {
            let ours = std::mem::replace(&mut *variable, std::mem::replace(&mut *saved, std::ptr::null_mut()));
            with_open(|open| open.retain(|stream| stream.file != ours.addr()));
            libc::fclose(ours);
        }
    }
}

/// What a program has printed and libc has not written yet goes to what the descriptor is now.
unsafe fn hand_over_unwritten(from: *mut FILE, to: *mut FILE) {
    unsafe extern "C" {
        fn __fpending(file: *mut FILE) -> usize;
        fn __fpurge(file: *mut FILE);
    }
    // SAFETY: libc's streams; its own headers lay a stream out as `StreamBuffer` says, and what is pending begins at
    // the base of the writing part.
    unsafe {
        let pending_bytes = __fpending(from);
        if pending_bytes > 0 {
            let start = (*from.cast::<StreamBuffer>()).write_base;
            libc::fwrite(start.cast(), 1, pending_bytes, to);
            __fpurge(from);
        }
    }
}

/// The beginning of glibc's `struct _IO_FILE` (`bits/types/struct_FILE.h`), which its macros have made part of its ABI.
#[repr(C)]
struct StreamBuffer {
    flags: c_int,
    read: [*mut c_char; 3],
    write_base: *mut c_char,
}

/// After `exec`: a standard descriptor may be an inherited connection.
pub fn adopt_standard_streams() {
    (0..3).filter(|&fd| entry::connection(fd).is_some()).for_each(follow_standard_stream);
}
