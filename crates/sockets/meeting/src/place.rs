//! Where an accepting endpoint can be met: an abstract name, or a socket in the directory of its user.
//!
//! Abstract names belong to one network namespace, and any of its processes can bind them: they carry a keyed code of
//! the connection's addresses ([`name`](mod@crate::name)). A socket in a directory is reached from all namespaces that
//! see the directory, and only the directory's owner can bind it; its name is a code without a key.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::name::{self, Key};
use crate::reason::Reason;
use crate::system::Descriptor;
use crate::tuple::Tuple;

pub(crate) const SOCKET_FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The mode of a socket in a directory: members of the directory's group may connect.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o660);
/// Bytes of the name of a socket in a directory.
const NAME_BYTES: usize = 32;
/// Age from which a socket file may be left over from a process that has ended: its endpoint would have met long since.
const LEFT_OVER_S: i64 = 60;
/// Maximum number of entries of a directory that one sweep examines.
const SWEEP_ENTRIES_MAX: usize = 512;

/// Where endpoints meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At abstract names under a key.
    Names(Key),
    /// In directories: that of this user for an accepting endpoint; for a connecting one those of the users whom it may
    /// reach, in this order.
    Directories(Vec<PathBuf>),
}

impl From<Key> for Place {
    fn from(key: Key) -> Self {
        Self::Names(key)
    }
}

/// A bound socket, with its file if it has one.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) socket: Descriptor,
    pub(crate) file: Option<PathBuf>,
}

impl Place {
    /// Binds the socket of an accepting endpoint, whose tuple is given as it sees it.
    pub(crate) fn bind(&self, accepted: Tuple) -> Result<Bound, Reason> {
        let socket = unix_socket()?;
        match self {
            Self::Names(key) => match rustix::net::bind(&socket, &name::address(key, accepted)?) {
                Err(Errno::ADDRINUSE) => Err(Reason::NameTaken),
                bound => bound.map(|()| Bound { socket, file: None }).map_err(Reason::of_errno),
            },
            Self::Directories(directories) => {
                let directory = directories.first().ok_or(Reason::Rack)?;
                let file = file_of(directory, accepted);
                bind_file(socket.as_fd(), &file)?;
                Ok(Bound { socket, file: Some(file) })
            }
        }
    }

    /// Connects to the accepting endpoint of a connection, whose tuple is given as that endpoint sees it.
    pub(crate) fn connect(&self, accepted: Tuple) -> Result<Descriptor, Reason> {
        match self {
            Self::Names(key) => connect(&name::address(key, accepted)?),
            Self::Directories(directories) => {
                let mut found = Reason::Nobody;
                for directory in directories {
                    let address = SocketAddrUnix::new(file_of(directory, accepted)).map_err(Reason::of_errno)?;
                    match connect(&address) {
                        Err(Reason::Nobody) => {}
                        Err(reason @ Reason::Sandbox) => found = reason,
                        outcome => return outcome,
                    }
                }
                Err(found)
            }
        }
    }
}

fn unix_socket() -> Result<Descriptor, Reason> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SOCKET_FLAGS, None);
    socket.and_then(Descriptor::kept).map_err(Reason::of_errno)
}

fn connect(address: &SocketAddrUnix) -> Result<Descriptor, Reason> {
    let socket = unix_socket()?;
    match rustix::net::connect(&socket, address) {
        Ok(()) => Ok(socket),
        // A file that is no socket refuses too.
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Err(Reason::Nobody),
        Err(Errno::AGAIN) => Err(Reason::Full),
        Err(errno) => Err(Reason::of_errno(errno)),
    }
}

fn file_of(directory: &Path, accepted: Tuple) -> PathBuf {
    // The directory's owner is known, so the code needs no key.
    let name = name::name(&Key::from([0; 16]), accepted);
    let code = &name[name.len() - NAME_BYTES..];
    directory.join(std::str::from_utf8(code).unwrap_or_default())
}

fn bind_file(socket: BorrowedFd<'_>, file: &Path) -> Result<(), Reason> {
    let address = SocketAddrUnix::new(file).map_err(|_| Reason::Rack)?;
    let mut bound = rustix::net::bind(socket, &address);
    // A process that was killed leaves its file, and the addresses of its connection may be used again.
    if bound == Err(Errno::ADDRINUSE) && matches!(connect(&address), Err(Reason::Nobody)) {
        let _ = rustix::fs::unlink(file);
        bound = rustix::net::bind(socket, &address);
    }
    match bound {
        Err(Errno::ADDRINUSE) => return Err(Reason::NameTaken),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ROFS) => return Err(Reason::Rack),
        Err(Errno::NOSPC | Errno::DQUOT) => return Err(Reason::NoMemory),
        bound => bound.map_err(Reason::of_errno)?,
    }
    // The umask may have removed the group's rights. Nobody can connect yet: the socket does not listen.
    rustix::fs::chmodat(CWD, file, SOCKET_MODE, AtFlags::empty()).map_err(|errno| {
        let _ = rustix::fs::unlink(file);
        Reason::of_errno(errno)
    })
}

/// Removes socket files that processes of this user have left in their directory when they were killed.
pub fn sweep(directory: &Path, now_s: i64) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(listing) = rustix::fs::open(directory, flags, Mode::empty()).map(Descriptor::from) else { return };
    let mut buffer = [std::mem::MaybeUninit::<u8>::uninit(); 1024];
    let mut entries = rustix::fs::RawDir::new(listing.as_fd(), &mut buffer);
    for _ in 0..SWEEP_ENTRIES_MAX {
        let Some(Ok(entry)) = entries.next() else { return };
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name.len() != NAME_BYTES {
            continue;
        }
        let found = rustix::fs::statat(listing.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW);
        let is_old = found.is_ok_and(|found| {
            FileType::from_raw_mode(found.st_mode) == FileType::Socket && now_s - found.st_ctime > LEFT_OVER_S
        });
        let file = directory.join(name);
        let is_left =
            is_old && SocketAddrUnix::new(&file).is_ok_and(|address| matches!(connect(&address), Err(Reason::Nobody)));
        if is_left {
            let _ = rustix::fs::unlink(&file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    fn tuple() -> Tuple {
        Tuple::new("127.0.0.1:80".parse().unwrap(), "127.0.0.1:50000".parse().unwrap())
    }

    fn listen(bound: &Bound) {
        rustix::net::listen(&bound.socket, 1).unwrap();
    }

    #[test]
    fn a_socket_in_a_directory_is_reached_by_members_of_its_group() {
        let scratch = tempfile::tempdir().unwrap();
        let (here, other) = (scratch.path().join("here"), scratch.path().join("other"));
        std::fs::create_dir(&here).unwrap();
        let place = Place::Directories(vec![here.clone()]);
        let reaching = Place::Directories(vec![other, here.clone()]);
        assert_eq!(reaching.connect(tuple()).unwrap_err(), Reason::Nobody);
        let bound = place.bind(tuple()).unwrap();
        let file = bound.file.clone().unwrap();
        let metadata = std::fs::metadata(&file).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o777, 0o660);
        assert_eq!(reaching.connect(tuple()).unwrap_err(), Reason::Nobody, "it does not listen yet");
        listen(&bound);
        drop(reaching.connect(tuple()).unwrap());
        assert_eq!(reaching.connect(tuple().reversed()).unwrap_err(), Reason::Nobody, "another connection");
        assert_eq!(place.bind(tuple()).unwrap_err(), Reason::NameTaken);
        drop(bound);
        assert!(file.exists(), "as after a kill");
        place.bind(tuple()).unwrap();
        assert_eq!(Place::Directories(vec![scratch.path().join("none")]).bind(tuple()).unwrap_err(), Reason::Rack);
    }

    #[test]
    fn a_sweep_removes_what_killed_processes_have_left() {
        let scratch = tempfile::tempdir().unwrap();
        let place = Place::Directories(vec![scratch.path().to_owned()]);
        let (left, living) = (place.bind(tuple()).unwrap(), place.bind(tuple().reversed()).unwrap());
        listen(&living);
        let files = [left.file.clone().unwrap(), living.file.clone().unwrap()];
        drop(left);
        let now_s = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
        sweep(scratch.path(), now_s);
        assert!(files[0].exists(), "young");
        let other = scratch.path().join("other");
        std::fs::write(&other, "").unwrap();
        sweep(scratch.path(), now_s + LEFT_OVER_S + 2);
        assert_eq!(files.map(|file| file.exists()), [false, true]);
        assert!(other.exists());
    }

    #[test]
    fn links_and_other_files_are_nobody() {
        let scratch = tempfile::tempdir().unwrap();
        let place = Place::Directories(vec![scratch.path().to_owned()]);
        let file = file_of(scratch.path(), tuple());
        std::fs::write(&file, "").unwrap();
        assert_eq!(place.connect(tuple()).unwrap_err(), Reason::Nobody);
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&file, &file).unwrap();
        assert_eq!(place.connect(tuple()).unwrap_err(), Reason::Nobody);
    }
}
