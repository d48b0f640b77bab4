//! Checks of the machine: kernel, memory, the rack, the library.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::thread::MembarrierQuery;

use super::Check;
use crate::{elf, lanes, library, rack_dir};

/// Oldest kernel version with memfd, seals and everything else that lanes use.
const KERNEL_MIN: (u32, u32) = (4, 14);
const SHARED_MEMORY_LOW_BYTES: u64 = 64 << 20;

/// The checks that try a system call, which a filter may deny.
pub const CALLS: [&str; 4] = ["memfd", "AF_UNIX", "membarrier", "pidfd"];

/// Returns all checks of the machine; those that lanes need come first.
pub fn checks(rack: Option<&Path>, library: Option<&Path>) -> Vec<Check> {
    vec![
        kernel(),
        memfd(),
        unix_sockets(),
        cores(),
        shared_memory(),
        rack_directory(rack),
        library_loads(library),
        glibc(),
        membarrier(),
        io_uring(),
        huge_pages(),
        pidfd(),
        ptrace(),
    ]
}

fn kernel() -> Check {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    match version(&release) {
        Some(found) if found >= KERNEL_MIN => Check::ok("kernel", format!("Linux {release}")),
        _ => Check::missing("kernel", format!("Linux {release}"), "boot Linux 4.14 or newer"),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn memfd() -> Check {
    let sealed = || -> Result<(), Errno> {
        let fd = rustix::fs::memfd_create(c"crosslane-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, 4096)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        if rustix::fs::fcntl_get_seals(&fd)?.contains(seals) { Ok(()) } else { Err(Errno::NOSYS) }
    };
    match sealed() {
        Ok(()) => Check::ok("memfd", "sealable memory"),
        Err(error) => {
            Check::missing("memfd", error.to_string(), "allow memfd_create and its seals (seccomp, container)")
        }
    }
}

fn unix_sockets() -> Check {
    match UnixStream::pair() {
        Ok(_) => Check::ok("AF_UNIX", "stream sockets"),
        Err(error) => {
            let remedy = "allow AF_UNIX sockets (seccomp, container; systemd: RestrictAddressFamilies=AF_UNIX)";
            Check::missing("AF_UNIX", error.to_string(), remedy)
        }
    }
}

fn cores() -> Check {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        1 => Check::note("cores", "1 core", "use 2 cores or more: with one, each message needs a context switch"),
        cores => Check::ok("cores", format!("{cores} cores")),
    }
}

fn shared_memory() -> Check {
    let Ok(found) = rustix::fs::statvfs("/dev/shm") else {
        return Check::note("/dev/shm", "missing", "mount -t tmpfs -o nosuid,nodev tmpfs /dev/shm");
    };
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    let text = format!("{} free", units::bytes(free));
    if free < SHARED_MEMORY_LOW_BYTES {
        return Check::note("/dev/shm", text, "mount -o remount,size=1g /dev/shm (docker run --shm-size=1g)");
    }
    Check::ok("/dev/shm", text)
}

fn rack_directory(given: Option<&Path>) -> Check {
    let rack = rack_dir::chosen(given);
    match rack_dir::check_named(given).and_then(|()| rack_dir::prepare(&rack)) {
        Ok(()) if lanes::are_off(&rack) => {
            let found = format!("{}: lanes are switched off", rack.display());
            Check::note("rack", found, "crosslane lanes on (with the same --rack)")
        }
        Ok(()) => {
            if let Err(error) = rack_dir::write_page(&rack) {
                let found = format!("{}: a page cannot be written: {error}", rack.display());
                return Check::note("rack", found, "make room there: programs use lanes, but stat does not see them");
            }
            let is_shared = rack_dir::shared(&rack).is_ok_and(|shared| shared.is_some());
            let shared = if is_shared { ", shared by several users" } else { "" };
            Check::ok("rack", format!("{}{shared}; a page was written", rack.display()))
        }
        Err(error) => with_remedy("rack", &format!("{error:#}")),
    }
}

/// Splits an error of this command at its semicolon into what was found and the remedy.
fn with_remedy(name: &'static str, error: &str) -> Check {
    let (found, remedy) = error.split_once("; ").unwrap_or((error, "see crosslane run --help"));
    Check::missing(name, found, remedy)
}

fn library_loads(given: Option<&Path>) -> Check {
    let path = match library::find(given) {
        Ok(path) => path,
        Err(error) => return with_remedy("library", &format!("{error:#}")),
    };
    match runs_with(&path) {
        Ok(()) => {
            let release = elf::release(&path).unwrap_or_else(|| "unknown".to_owned());
            Check::ok("library", format!("{} (release {release})", path.display()))
        }
        Err(why) => Check::missing("library", format!("{}: {why}", path.display()), "build it on this machine"),
    }
}

/// Checks that the loader loads the library. It continues without a library that it cannot load and prints a warning to
/// standard error.
fn runs_with(library: &Path) -> Result<(), String> {
    let mut command = Command::new("true");
    // With CROSSLANE_OFF the library reads no other variable.
    command.env("LD_PRELOAD", library::preload_name(library)).env("CROSSLANE_OFF", "1").stdin(Stdio::null());
    let output = command.output().map_err(|error| error.to_string())?;
    let warnings = String::from_utf8_lossy(&output.stderr);
    match warnings.lines().next() {
        Some(line) => Err(line.to_owned()),
        None if output.status.success() => Ok(()),
        None => Err(format!("'true' ended with {}", output.status)),
    }
}

fn glibc() -> Check {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => {
            Check::ok("glibc", String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        _ => Check::note("glibc", "version unknown", "run programs built for glibc; musl programs are not accelerated"),
    }
}

fn membarrier() -> Check {
    if rustix::thread::membarrier_query().contains(MembarrierQuery::PRIVATE_EXPEDITED) {
        return Check::ok("membarrier", "expedited");
    }
    Check::note("membarrier", "missing", "allow membarrier (seccomp) or boot a kernel with CONFIG_MEMBARRIER")
}

fn io_uring() -> Check {
    match fs::read_to_string("/proc/sys/kernel/io_uring_disabled").as_deref().map(str::trim) {
        Ok("0") => Check::ok("io_uring", "present, but hidden from accelerated programs, which use epoll"),
        Ok(_) => Check::ok("io_uring", "disabled; programs use epoll"),
        Err(_) => Check::ok("io_uring", "cannot be disabled; accelerated programs use epoll"),
    }
}

fn huge_pages() -> Check {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Total:")).map_or("0", str::trim);
    if total == "0" {
        return Check::note("huge pages", "none reserved", "sysctl vm.nr_hugepages=64, for large windows");
    }
    Check::ok("huge pages", format!("{total} reserved"))
}

/// Checks pidfd_open, which the commands use to signal monitors and servers and to wait for them.
fn pidfd() -> Check {
    match rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()) {
        Ok(_) => Check::ok("pidfd", "present, for 'crosslane up' and 'down'"),
        Err(error) => {
            let remedy = "boot Linux 5.3 or newer, and allow pidfd_open (seccomp, container): up and down need it";
            Check::note("pidfd", error.to_string(), remedy)
        }
    }
}

/// Reports the Yama ptrace scope. Debuggers and strace depend on it; lanes do not.
fn ptrace() -> Check {
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").as_deref().map(str::trim) {
        Err(_) => Check::ok("ptrace", "not limited by Yama"),
        Ok(scope @ ("0" | "1")) => Check::ok("ptrace", format!("scope {scope}: debuggers and strace work")),
        Ok(scope) => {
            let remedy = "sysctl kernel.yama.ptrace_scope=1, only to debug or strace programs";
            Check::note("ptrace", format!("scope {scope}: only root traces"), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_parsed() {
        for (release, expected) in [
            ("6.18.0-rc1", Some((6, 18))),
            ("5.15.167.4-microsoft-standard-WSL2", Some((5, 15))),
            ("4.14", Some((4, 14))),
            ("next", None),
            ("", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
    }

    #[test]
    fn a_library_that_does_not_load_is_detected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(runs_with(file.path()).is_err());
        assert!(runs_with(Path::new("/no/such.so")).unwrap_err().contains("cannot be preloaded"));
    }
}
