//! Decides whether a program that is about to run, by `exec` or `posix_spawn`, will load this library.
//!
//! A listener's hidden descriptor is only left to a program that loads the library: another program would hold it open
//! without accepting its connections, and clients would wait forever. In case of doubt the answer is no; clients then
//! use kernel TCP.
//!
//! Nothing here uses the heap or takes a lock, because signal handlers and the children of `fork` and `vfork` call it.

#![allow(unsafe_code)] // Strings that C programs pass to `exec`.

use crate::process::buffer::MappedBuffer;
use crate::process::memory;
use rustix::fd::OwnedFd;
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::ffi::{CStr, c_char};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The library's file name.
const LIBRARY: &[u8] = b"libcrosslane.so";
/// Depth of scripts that name scripts as their interpreters: the kernel follows five.
const SCRIPTS_MAX: usize = 5;
/// Bytes at the beginning of a file that the kernel reads to find a script's interpreter.
const BEGINNING_BYTES: usize = 256;
/// `PATH_MAX`.
const PATH_BYTES: usize = 4096;
/// Longest path of a dynamic linker that is compared with that of this process; a longer one counts as another.
const LINKER_PATH_BYTES: usize = 512;
/// Search path for programs named without a slash, if `PATH` is not set.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";
/// Number of a program's segments that are searched.
const SEGMENTS_MAX: u16 = 64;

/// Whether this process has loaded the library because of `LD_PRELOAD`; otherwise `/etc/ld.so.preload` names it, or the
/// program is linked to it.
static IS_FROM_ENVIRONMENT: AtomicBool = AtomicBool::new(false);

/// Records how the library was loaded. To be called once, before the program runs.
pub fn note_preload_origin() {
    use std::os::unix::ffi::OsStrExt;
    let is_named = std::env::var_os("LD_PRELOAD").is_some_and(|value| own_path_in(value.as_bytes()).is_some());
    IS_FROM_ENVIRONMENT.store(is_named, Ordering::Relaxed);
}

/// The environment of the program that is about to run.
#[derive(Clone, Copy)]
pub struct Environment(*const *const c_char);

impl Environment {
    /// An environment as `environ` has it.
    ///
    /// # Safety
    /// `variables` is null, or an array of strings that ends with a null pointer and outlives this value.
    pub unsafe fn new(variables: *const *const c_char) -> Self {
        Self(variables)
    }

    /// The environment of this process.
    pub fn of_this_process() -> Self {
        unsafe extern "C" {
            static environ: *const *const c_char;
        }
        // SAFETY: libc's variable, which is initialised before any other code runs; it is read once, here.
        Self(unsafe { environ })
    }

    fn get(&self, name: &[u8]) -> Option<&[u8]> {
        let mut place = self.0;
        if place.is_null() {
            return None;
        }
        // The kernel refuses an array or a string that cannot be read.
        while memory::is_readable(place) {
            // SAFETY: by the contract of `new`, the array ends with a null pointer, which has not been reached yet.
            let variable = unsafe { *place };
            if variable.is_null() || !memory::is_readable(variable) {
                return None;
            }
            // SAFETY: by the contract of `new`, the entries before the null pointer are strings.
            let variable = unsafe { CStr::from_ptr(variable) }.to_bytes();
            if let Some(value) = variable.strip_prefix(name).and_then(|rest| rest.strip_prefix(b"=")) {
                return Some(value);
            }
            // SAFETY: this entry was not the null pointer that ends the array, so that another entry follows.
            place = unsafe { place.add(1) };
        }
        None
    }

    /// Returns whether a program with this environment loads the library. `is_from_environment`: whether this process
    /// loaded it because of its environment.
    fn names_library(&self, is_from_environment: bool) -> bool {
        // A value that is not understood ends the program.
        let is_off = self
            .get(b"CROSSLANE_OFF")
            .is_some_and(|value| !value.is_empty() && stats_page::switch(value) != Some(false));
        let is_named = || match self.get(b"LD_PRELOAD").and_then(own_path_in).map(path_from_root) {
            // Only the dynamic linker knows where this is.
            Some(path) if path.contains(&b'$') || !path.contains(&b'/') => true,
            Some(path) => with_c_string(path, can_be_read) == Some(true),
            None => false,
        };
        !is_off && (!is_from_environment || is_named())
    }
}

fn can_be_read(path: &CStr) -> bool {
    rustix::fs::access(path, Access::READ_OK).is_ok()
}

/// Returns the part of a path behind the `/..` components that lead from the dynamic linker's directory (`$LIB`) to the
/// root. `crosslane run` names the library by such a path.
fn path_from_root(path: &[u8]) -> &[u8] {
    const UP: &[u8] = b"/..";
    let way = path.windows(UP.len()).rposition(|part| part == UP).filter(|_| path.contains(&b'$'));
    way.map_or(path, |at| &path[at + UP.len()..])
}

fn own_path_in(preloaded: &[u8]) -> Option<&[u8]> {
    let mut paths = preloaded.split(|byte| matches!(byte, b' ' | b':'));
    paths.find(|path| path.rsplit(|byte| *byte == b'/').next() == Some(LIBRARY))
}

/// Returns whether the program in the file `path`, relative to `dir`, loads the library; `flags` are those of
/// `execveat(2)`. Returns `None` if there is no such file.
pub fn loads_library(dir: BorrowedFd<'_>, path: &CStr, flags: AtFlags, environment: Environment) -> Option<bool> {
    match open(dir, path, flags) {
        Ok(file) => {
            let is_named = environment.names_library(IS_FROM_ENVIRONMENT.load(Ordering::Relaxed));
            Some(uses_own_linker(file, SCRIPTS_MAX) == Ok(true) && is_named)
        }
        Err(Errno::NOENT | Errno::NOTDIR) => None,
        Err(_) => Some(false),
    }
}

/// As [`loads_library`], for the file that `execvp` finds for `name`.
pub fn searched_loads_library(name: &CStr, environment: Environment) -> Option<bool> {
    if name.to_bytes().contains(&b'/') {
        return loads_library(CWD, name, AtFlags::empty(), environment);
    }
    let own = Environment::of_this_process();
    let is_program = |path: &CStr| {
        let is_file = rustix::fs::stat(path).is_ok_and(|stat| file_type(&stat) == FileType::RegularFile);
        is_file && rustix::fs::access(path, Access::EXEC_OK).is_ok()
    };
    let in_dir = |dir: &[u8]| {
        with_joined(dir, name.to_bytes(), |path| {
            is_program(path).then(|| loads_library(CWD, path, AtFlags::empty(), environment)).flatten()
        })
    };
    let dirs = own.get(b"PATH").unwrap_or(DEFAULT_PATH);
    dirs.split(|byte| *byte == b':').find_map(|dir| in_dir(dir).flatten())
}

fn with_c_string<R>(bytes: &[u8], then: impl FnOnce(&CStr) -> R) -> Option<R> {
    with_joined(b"", bytes, then)
}

/// Runs `then` on the path of a file in a directory; an empty `dir` is the current directory.
fn with_joined<R>(dir: &[u8], name: &[u8], then: impl FnOnce(&CStr) -> R) -> Option<R> {
    let mut buffer = MappedBuffer::new(PATH_BYTES).ok()?;
    let buffer = buffer.bytes();
    let slash: &[u8] = if dir.is_empty() { b"" } else { b"/" };
    let mut len = 0;
    for part in [dir, slash, name] {
        buffer.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    CStr::from_bytes_with_nul(buffer.get(..=len)?).ok().map(then)
}

fn open(dir: BorrowedFd<'_>, path: &CStr, flags: AtFlags) -> Result<OwnedFd, Errno> {
    if flags.contains(AtFlags::EMPTY_PATH) && path.is_empty() {
        // Another descriptor of the same open file, which is read without moving its position.
        return rustix::io::fcntl_dupfd_cloexec(dir, 0);
    }
    let no_link = if flags.contains(AtFlags::SYMLINK_NOFOLLOW) { OFlags::NOFOLLOW } else { OFlags::empty() };
    // Opening a FIFO must not block.
    rustix::fs::openat(dir, path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | no_link, Mode::empty())
}

fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Returns whether a program, or its interpreter, is linked dynamically by the same linker as this process and gains no
/// privileges; the linker then obeys `LD_PRELOAD`.
fn uses_own_linker(file: OwnedFd, scripts: usize) -> Result<bool, Errno> {
    let file = RawClosed(Some(file));
    let stat = rustix::fs::fstat(file.fd())?;
    if file_type(&stat) != FileType::RegularFile {
        return Ok(false);
    }
    let mut beginning = [0; BEGINNING_BYTES];
    let len = read_at(file.fd(), &mut beginning, 0)?;
    let beginning = &beginning[..len];
    if let Some(line) = beginning.strip_prefix(b"#!") {
        let Some(interpreter) = interpreter_in(line).filter(|_| scripts > 0) else { return Ok(false) };
        drop(file);
        let next = |path: &CStr| open(CWD, path, AtFlags::empty()).and_then(|file| uses_own_linker(file, scripts - 1));
        return with_c_string(interpreter, next).unwrap_or(Ok(false));
    }
    Ok(!is_secure_exec(file.fd(), &stat) && has_own_linker(file.fd(), beginning))
}

/// A file that is closed by a raw system call, because libc's `close` is interposed by this library.
struct RawClosed(Option<OwnedFd>);

impl RawClosed {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("open until dropped").as_fd()
    }
}

impl Drop for RawClosed {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            crate::descriptor::hidden::close(file);
        }
    }
}

fn interpreter_in(line: &[u8]) -> Option<&[u8]> {
    let line = line.split(|byte| *byte == b'\n').next()?.trim_ascii_start();
    line.split(|byte| matches!(byte, b' ' | b'\t')).next().filter(|path| !path.is_empty())
}

/// Returns whether the kernel would run the program in secure-execution mode (`AT_SECURE`).
fn is_secure_exec(file: BorrowedFd<'_>, stat: &Stat) -> bool {
    use rustix::process::{getegid, geteuid, getgid, getuid};
    let (uid, gid) = (getuid(), getgid());
    let changes_user = stat.st_mode & libc::S_ISUID != 0 && stat.st_uid != uid.as_raw();
    let changes_group = stat.st_mode & libc::S_ISGID != 0 && stat.st_gid != gid.as_raw();
    let has_capabilities = rustix::fs::fgetxattr(file, c"security.capability", &mut [0_u8; 64][..]).is_ok();
    geteuid() != uid || getegid() != gid || changes_user || changes_group || has_capabilities
}

fn read_at(file: BorrowedFd<'_>, bytes: &mut [u8], at: u64) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *bytes, at))
}

/// Returns whether a program names the dynamic linker of this process. The offsets are those of the ELF-64
/// specification.
fn has_own_linker(file: BorrowedFd<'_>, header: &[u8]) -> bool {
    const PROGRAM_HEADER_BYTES: u64 = 56;
    let half = |at: usize| header.get(at..at + 2).map(|it| u16::from_le_bytes([it[0], it[1]]));
    let is_same_machine = header.get(..5) == Some(b"\x7fELF\x02") && half(18) == own_machine();
    let (Some(headers_at), Some(count), true) = (word(header, 32), half(56), is_same_machine) else { return false };
    for index in 0..u64::from(count.min(SEGMENTS_MAX)) {
        let mut segment = [0; PROGRAM_HEADER_BYTES as usize];
        let at = headers_at.saturating_add(index * PROGRAM_HEADER_BYTES);
        if read_at(file, &mut segment, at) != Ok(segment.len()) {
            return false;
        }
        let kind = u32::from_le_bytes([segment[0], segment[1], segment[2], segment[3]]);
        if kind == libc::PT_INTERP {
            let mut path = [0; LINKER_PATH_BYTES];
            let len = word(&segment, 32).map_or(0, |len| len.min(LINKER_PATH_BYTES as u64)) as usize;
            let is_read = read_at(file, &mut path[..len], word(&segment, 8).unwrap_or(0)).is_ok();
            return is_read && CStr::from_bytes_until_nul(&path).is_ok_and(is_own_linker);
        }
    }
    false
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

/// Returns the `e_machine` of programs for this machine.
fn own_machine() -> Option<u16> {
    match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        _ => None,
    }
}

fn is_own_linker(path: &CStr) -> bool {
    let Some(own) = own_linker() else { return false };
    let same_file = |one: &Stat, other: &Stat| (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino);
    own == path || matches!((rustix::fs::stat(own), rustix::fs::stat(path)), (Ok(a), Ok(b)) if same_file(&a, &b))
}

/// Returns the path of this program's dynamic linker, from the program headers that the kernel has mapped.
fn own_linker() -> Option<&'static CStr> {
    // SAFETY: the function only reads the auxiliary vector.
    let [headers, count] = [libc::AT_PHDR, libc::AT_PHNUM].map(|kind| unsafe { libc::getauxval(kind) } as usize);
    if headers == 0 {
        return None;
    }
    // SAFETY: the auxiliary vector gives address and number of the program headers, which stay mapped.
    let headers =
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<libc::Elf64_Phdr>(headers), count) };
    let find = |kind| headers.iter().find(|header| header.p_type == kind);
    let bias = (headers.as_ptr().addr() as u64).wrapping_sub(find(libc::PT_PHDR)?.p_vaddr);
    let path = find(libc::PT_INTERP)?.p_vaddr.wrapping_add(bias) as usize;
    // SAFETY: by the program headers, a string in a segment that stays mapped.
    Some(unsafe { CStr::from_ptr(std::ptr::with_exposed_provenance(path)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    /// Returns an environment of these variables.
    fn environment(variables: &[&CStr]) -> Environment {
        let pointers: Vec<_> = variables.iter().map(|it| it.as_ptr()).chain([std::ptr::null()]).collect();
        let strings: Vec<_> = variables.iter().map(|it| (*it).to_owned()).collect();
        let pointers = Vec::leak(pointers);
        pointers.iter_mut().zip(Vec::leak(strings)).for_each(|(place, it)| *place = it.as_ptr());
        // SAFETY: the array ends with a null pointer; it and its strings are leaked.
        unsafe { Environment::new(pointers.as_ptr()) }
    }

    fn loads(path: &CStr) -> bool {
        loads_library(CWD, path, AtFlags::empty(), environment(&[])).expect("a file")
    }

    fn file(name: &str, contents: &[u8], mode: u32) -> std::ffi::CString {
        let path = std::env::temp_dir().join(format!("crosslane-successor-{}-{name}", std::process::id()));
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(contents).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
        std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).unwrap()
    }

    fn remove(path: &CStr) {
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
    }

    #[test]
    fn a_program_with_the_same_linker_loads_it_and_so_does_its_script() {
        let own = c"/proc/self/exe";
        assert!(loads(own));
        assert!(!loads(c"/proc/self/maps"), "no program");
        assert_eq!(loads_library(CWD, c"/nonexistent", AtFlags::empty(), environment(&[])), None);
        let script = file("script", b"#! /proc/self/exe -x\n", 0o755);
        let of_script = [b"#!", script.to_bytes(), b"\n"].concat();
        let second = file("second", &of_script, 0o755);
        assert!(loads(&script) && loads(&second));
        let endless = file("endless", b"", 0o755);
        std::fs::write(endless.to_str().unwrap(), [b"#!", endless.to_bytes(), b"\n"].concat()).unwrap();
        assert!(!loads(&endless));
        [script, second, endless].iter().for_each(|path| remove(path));
    }

    #[test]
    fn a_static_program_and_one_that_gets_rights_do_not() {
        let whole = std::fs::read("/proc/self/exe").unwrap();
        let without_linker = {
            let mut bytes = whole.clone();
            let headers = word(&bytes, 32).unwrap() as usize;
            let count = usize::from(u16::from_le_bytes([bytes[56], bytes[57]]));
            let interpreter = (0..count).map(|index| headers + 56 * index).find(|at| bytes[*at] == 3).unwrap();
            bytes[interpreter] = 0;
            bytes
        };
        let fixed = file("static", &without_linker, 0o755);
        assert!(!loads(&fixed));
        let mut of_other_machine = whole.clone();
        of_other_machine[18] ^= 1;
        let other_machine = file("machine", &of_other_machine, 0o755);
        assert!(!loads(&other_machine));
        let whole = file("whole", &whole, 0o755);
        assert!(loads(&whole));
        let set_id = rustix::fs::Gid::from_raw(rustix::process::getgid().as_raw() + 1);
        if rustix::fs::chown(&*whole, None, Some(set_id)).is_ok() {
            std::fs::set_permissions(whole.to_str().unwrap(), std::fs::Permissions::from_mode(0o2755)).unwrap();
            assert!(!loads(&whole), "another group's rights");
        }
        [fixed, other_machine, whole].iter().for_each(|path| remove(path));
    }

    #[test]
    fn the_environment_decides_where_it_has_loaded_this_one() {
        let here = file("libcrosslane.so", b"", 0o644);
        let whole = here.to_str().unwrap().to_owned();
        let dir = format!("{whole}.d");
        std::fs::create_dir(&dir).unwrap();
        std::fs::rename(&whole, format!("{dir}/libcrosslane.so")).unwrap();
        let named = std::ffi::CString::new(format!("LD_PRELOAD=/x/y.so:{dir}/libcrosslane.so")).unwrap();
        let is_loaded = |variables: &[&CStr]| environment(variables).names_library(true);
        assert!(environment(&[]).names_library(false), "by /etc/ld.so.preload, or linked");
        assert!(!is_loaded(&[]) && !is_loaded(&[c"LD_PRELOAD=/x/y.so", c"A=libcrosslane.so"]));
        assert!(
            is_loaded(&[&named])
                && is_loaded(&[c"CROSSLANE_OFF=0", &named])
                && is_loaded(&[c"CROSSLANE_OFF=no", &named])
        );
        assert!(!is_loaded(&[&named, c"CROSSLANE_OFF=1"]));
        assert!(is_loaded(&[c"LD_PRELOAD=/usr/$LIB/libcrosslane.so /x/y.so"]));
        assert!(!is_loaded(&[c"LD_PRELOAD=/nonexistent/libcrosslane.so"]), "as after chroot");
        assert!(!is_loaded(&[c"LD_PRELOAD=/usr/$LIB/../../../../../../nonexistent/libcrosslane.so"]));
        let by_root = format!("LD_PRELOAD=/usr/$LIB/../../../../../..{dir}/libcrosslane.so");
        assert!(is_loaded(&[&std::ffi::CString::new(by_root).unwrap()]));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_name_without_a_slash_is_searched_for() {
        assert_eq!(searched_loads_library(c"sh", environment(&[])), Some(true));
        assert_eq!(searched_loads_library(c"no-such-program", environment(&[])), None);
    }
}
