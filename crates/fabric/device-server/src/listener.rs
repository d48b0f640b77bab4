//! The listening socket and its path in the file system.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::Error;

/// Backlog of the socket.
const BACKLOG: i32 = 64;
/// The kernel's limit of a unix socket address, without the terminating zero.
const NAME_BYTES_MAX: usize = 107;
/// Attempts to lock a directory, and the pause between them.
const LOCK_TRIES_MAX: u32 = 100;
const LOCK_TRY_EVERY: Duration = Duration::from_millis(20);

/// A listening socket and its path, which is removed with it.
#[derive(Debug)]
pub struct BoundSocket {
    listener: OwnedFd,
    path: PathBuf,
    /// Device and inode of the path, to recognize a file that has replaced it.
    identity: (u64, u64),
}

/// Binds a socket that only this user can connect to. Replaces a socket that no process has open.
pub fn bind(path: &Path) -> Result<BoundSocket, Error> {
    let address = address_of(path)?;
    // While the directory is locked, no other server checks or replaces the path: of two servers that start at the same
    // time, one gets it.
    let _locked = lock_folder(path)?;
    match rustix::fs::lstat(path) {
        Ok(found) => take_over(path, &address, &found)?,
        Err(Errno::NOENT) => {}
        Err(errno) => return Err(socket_error(path, "lstat", errno)),
    }
    let listener = socket(path, SocketType::STREAM)?;
    rustix::net::bind(&listener, &address).map_err(|errno| socket_error(path, "bind", errno))?;
    let made = rustix::fs::lstat(path).map_err(|errno| socket_error(path, "lstat", errno))?;
    // From here on the path is removed on every error.
    let socket = BoundSocket { listener, path: path.to_owned(), identity: identity(&made) };
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(|errno| socket_error(path, "chmod", errno))?;
    rustix::net::listen(&socket.listener, BACKLOG).map_err(|errno| socket_error(path, "listen", errno))?;
    Ok(socket)
}

impl BoundSocket {
    /// The listening socket, which is non-blocking.
    pub fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        let _locked = lock_folder(&self.path);
        if rustix::fs::lstat(&self.path).is_ok_and(|found| identity(&found) == self.identity) {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

fn address_of(path: &Path) -> Result<SocketAddrUnix, Error> {
    let length = path.as_os_str().len();
    if length > NAME_BYTES_MAX {
        return Err(Error::PathTooLong { path: path.to_owned(), length, length_max: NAME_BYTES_MAX });
    }
    if path.file_name().is_none() {
        return Err(Error::PathWithoutName { path: path.to_owned() });
    }
    SocketAddrUnix::new(path).map_err(|errno| socket_error(path, "its address", errno))
}

fn socket_error(path: &Path, step: &'static str, errno: Errno) -> Error {
    Error::Socket { path: path.to_owned(), step, errno }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Opens and locks the directory of a path. Only its owner may be able to write to it, because another user could
/// replace the socket.
fn lock_folder(path: &Path) -> Result<OwnedFd, Error> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |errno| Error::Directory { path: folder.to_owned(), errno };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(folder, flags, Mode::empty()).map_err(failed)?;
    let stat = rustix::fs::fstat(&opened).map_err(failed)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(Error::DirectoryForeign { path: folder.to_owned(), owner: stat.st_uid });
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(Error::DirectoryOpen { path: folder.to_owned(), mode: stat.st_mode & 0o7777 });
    }
    for _ in 0..LOCK_TRIES_MAX {
        match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(opened),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_TRY_EVERY),
            Err(errno) => return Err(failed(errno)),
        }
    }
    let waited_ms = u64::from(LOCK_TRIES_MAX) * LOCK_TRY_EVERY.as_millis() as u64;
    Err(Error::DirectoryLocked { path: folder.to_owned(), waited_ms })
}

/// Removes a socket that no process has open. A `connect` with a socket of another type tells whether a process has it
/// open, without that process noticing.
fn take_over(path: &Path, address: &SocketAddrUnix, found: &Stat) -> Result<(), Error> {
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(Error::NotASocket { path: path.to_owned() });
    }
    let probe = socket(path, SocketType::DGRAM)?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path).map_err(|errno| socket_error(path, "unlink", errno)),
        Ok(()) | Err(Errno::PROTOTYPE) => Err(Error::InUse { path: path.to_owned() }),
        Err(errno) => Err(socket_error(path, "connect", errno)),
    }
}

fn socket(path: &Path, kind: SocketType) -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
        .map_err(|errno| socket_error(path, "socket", errno))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use tempfile::TempDir;

    use super::*;

    fn folder() -> TempDir {
        tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    fn error_text(path: &Path) -> String {
        bind(path).unwrap_err().to_string()
    }

    #[test]
    fn a_socket_is_private_to_its_user_and_removed_when_dropped() {
        let folder = folder();
        let path = folder.path().join("device.sock");
        let socket = bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_is_not_in_use_is_replaced_and_one_in_use_is_not() {
        let folder = folder();
        let path = folder.path().join("device.sock");
        drop(UnixListener::bind(&path).unwrap()); // As after kill -9, the file stays.
        let socket = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err(), Error::InUse { path: path.clone() });
        assert!(UnixStream::connect(&path).is_ok(), "the first server still listens");
        drop(socket);
    }

    #[test]
    fn a_socket_that_has_replaced_the_own_one_is_not_removed() {
        let folder = folder();
        let path = folder.path().join("device.sock");
        let socket = bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(socket);
        assert!(path.exists());
    }

    #[test]
    fn an_unusable_path_is_refused_with_the_reason() {
        let folder = folder();
        let within = |name: &str| folder.path().join(name);
        let file = within("file");
        fs::write(&file, "text").unwrap();
        assert!(error_text(&file).contains("not a socket"));
        assert_eq!(fs::read_to_string(&file).unwrap(), "text");
        assert!(error_text(&within("missing/device.sock")).contains("No such file"));
        assert!(error_text(&within("file/device.sock")).contains("Not a directory"));
        assert!(error_text(&within(&"x".repeat(108))).contains("at most 107"));
        assert!(error_text(Path::new("/")).contains("no file name"));
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let folder = folder();
        for mode in [0o777, 0o1777, 0o770, 0o702] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            let error = bind(&folder.path().join("device.sock")).unwrap_err();
            assert_eq!(error, Error::DirectoryOpen { path: folder.path().to_owned(), mode });
        }
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        assert!(bind(&folder.path().join("device.sock")).is_ok());
    }

    #[test]
    fn of_servers_that_start_at_once_one_gets_the_path() {
        let folder = folder();
        let path = folder.path().join("device.sock");
        for _ in 0..20 {
            drop(UnixListener::bind(&path).unwrap());
            let claims: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| bind(&path))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 1, "{claims:?}");
        }
    }
}
