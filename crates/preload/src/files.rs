//! `FILE` streams over connections.
//!
//! libc's streams read and write by calls inside libc, which no preloaded library sees. A stream over a connection is therefore made
//! with libc's own means for foreign streams (`fopencookie`), and so are `stdin`, `stdout` and `stderr` while a connection is theirs.

use crate::{bytes, descriptors, real};
use libc::FILE;
use socket::table;
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;

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

static OPEN: Mutex<Vec<OpenStream>> = Mutex::new(Vec::new());

fn with_open<R>(access: impl FnOnce(&mut Vec<OpenStream>) -> R) -> R {
    access(&mut OPEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if table::connection(fd).is_none() {
        // SAFETY: the C caller's.
        return unsafe { real::fdopen(fd, mode) };
    }
    // SAFETY: the C caller's mode.
    let file = unsafe { fopencookie(std::ptr::without_provenance_mut(fd as usize), mode, functions(true)) };
    if !file.is_null() {
        with_open(|open| open.push(OpenStream { file: file.addr(), fd }));
    }
    file
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fileno(file: *mut FILE) -> c_int {
    match with_open(|open| open.iter().find(|stream| stream.file == file.addr()).map(|stream| stream.fd)) {
        Some(fd) => fd,
        // SAFETY: the C caller's.
        None => unsafe { real::fileno(file) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fileno_unlocked(file: *mut FILE) -> c_int {
    // SAFETY: the C caller's.
    unsafe { fileno(file) }
}

/// The standard streams that libc made, while ours are in their place.
struct Standard(UnsafeCell<[*mut FILE; 3]>);

// SAFETY: changed only by `dup2` onto a standard descriptor, which a program does not do from several threads at once.
unsafe impl Sync for Standard {}

static STANDARD: Standard = Standard(UnsafeCell::new([std::ptr::null_mut(); 3]));

/// `fd` is now something else: if it is a standard descriptor, its stream follows.
pub fn follow_standard_stream(fd: c_int) {
    if !(0..3).contains(&fd) || socket::lifecycle::is_borrowed_memory() {
        return;
    }
    let is_connection = table::connection(fd).is_some();
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
                with_open(|open| open.push(OpenStream { file: file.addr(), fd }));
                *saved = std::mem::replace(&mut *variable, file);
            }
        } else if !is_connection && !(*saved).is_null() {
            let ours = std::mem::replace(&mut *variable, std::mem::replace(&mut *saved, std::ptr::null_mut()));
            with_open(|open| open.retain(|stream| stream.file != ours.addr()));
            libc::fclose(ours);
        }
    }
}

/// After `exec`: a standard descriptor may be an inherited connection.
pub fn adopt_standard_streams() {
    (0..3).filter(|&fd| table::connection(fd).is_some()).for_each(follow_standard_stream);
}
