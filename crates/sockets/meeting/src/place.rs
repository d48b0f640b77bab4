//! Where an accepting endpoint can be met: an abstract name, or a socket in the directory of its user.
//!
//! Abstract names belong to one network namespace, and any of its processes can bind them: they carry a keyed code of
//! the connection's addresses ([`name`](mod@crate::name)). A socket in a directory is reached from all namespaces that
//! see the directory, and only the directory's owner can bind it; its name is a code without a key.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::name::{self, Key};
use crate::reason::Reason;
use crate::system::{self, Descriptor};
use crate::tuple::Tuple;

pub(crate) const SOCKET_FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The mode of a socket in a directory: whoever can reach the directory may connect.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o666);
/// Length of the queue of callers. There is one true caller; names are public, so others may connect.
const BACKLOG: i32 = 4;
/// What is appended to the name of a socket until others may find it.
const DRAFT_EXTENSION: &str = "new";
/// Bytes of the name of a socket in a directory.
const NAME_BYTES: usize = 32;
/// Age from which a socket file may be left over from a process that has ended: its endpoint would have met long since.
const LEFT_OVER_S: i64 = 60;
/// Bytes of directory entries that are read at once.
const LISTING_BYTES: usize = 4096;
/// Maximum number of entries of a directory that one sweep examines.
const SWEEP_ENTRIES_MAX: usize = 512;

/// Where endpoints meet.
#[derive(Clone, Debug)]
pub enum Rendezvous {
    /// At abstract names under a key.
    Names(Key),
    /// In directories of users.
    Directories(Directories),
}

/// Directories of users.
#[derive(Clone, Debug)]
pub struct Directories {
    /// The directory that their paths begin at; without one, they are absolute.
    pub base: Option<fn() -> BorrowedFd<'static>>,
    /// For an accepting endpoint, that of its user. For a connecting one, those of the users whom it may reach, in the
    /// order in which it tries them.
    pub of_users: Vec<UserDirectory>,
}

/// The directory of a user.
#[derive(Clone, Debug)]
pub struct UserDirectory {
    /// The user's number on the machine.
    pub user: u32,
    /// Its path.
    pub path: PathBuf,
}

impl From<Key> for Rendezvous {
    fn from(key: Key) -> Self {
        Self::Names(key)
    }
}

/// A bound socket, with its file if it has one.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) socket: Descriptor,
    pub(crate) file: Option<SocketFile>,
}

/// The file of a socket.
#[derive(Clone, Debug)]
pub(crate) struct SocketFile {
    base: Option<fn() -> BorrowedFd<'static>>,
    path: PathBuf,
}

impl Rendezvous {
    /// Binds the socket of an accepting endpoint, whose tuple is given as it sees it, and listens.
    pub(crate) fn listen(&self, accepted: Tuple) -> Result<Bound, Reason> {
        let socket = unix_socket()?;
        match self {
            Self::Names(key) => match rustix::net::bind(&socket, &name::address(key, accepted)?) {
                Err(Errno::ADDRINUSE) => Err(Reason::NameTaken),
                bound => {
                    bound.and_then(|()| rustix::net::listen(&socket, BACKLOG)).map_err(Reason::of_errno)?;
                    Ok(Bound { socket, file: None })
                }
            },
            Self::Directories(directories) => {
                let (_, file) = directories.files(accepted).next().ok_or(Reason::Rack)?;
                file.listen(socket.as_fd())?;
                Ok(Bound { socket, file: Some(file) })
            }
        }
    }

    /// Connects to the accepting endpoint of a connection, whose tuple is given as that endpoint sees it, and calls
    /// `meet` with the socket and the user in whose directory it was. Tries the next directory if that fails.
    pub(crate) fn connect<T>(
        &self,
        accepted: Tuple,
        mut meet: impl FnMut(Descriptor, Option<u32>) -> Result<T, Reason>,
    ) -> Result<T, Reason> {
        match self {
            Self::Names(key) => {
                let address = name::address(key, accepted)?;
                meet(connect(|socket| rustix::net::connect(socket, &address))?, None)
            }
            Self::Directories(directories) => {
                let mut found = Reason::Nobody;
                for (user, file) in directories.files(accepted) {
                    match file.connect().and_then(|socket| meet(socket, Some(user))) {
                        Err(Reason::Nobody) => {}
                        Err(reason) => found = reason,
                        Ok(met) => return Ok(met),
                    }
                }
                Err(found)
            }
        }
    }

    /// Returns whether an accepting endpoint may be in more than one directory.
    pub fn is_choice(&self) -> bool {
        matches!(self, Self::Directories(directories) if directories.of_users.len() > 1)
    }

    /// Leaves out the directory of a user.
    pub fn leave_out(&mut self, user: u32) {
        if let Self::Directories(directories) = self {
            directories.of_users.retain(|directory| directory.user != user);
        }
    }
}

impl Directories {
    fn files(&self, accepted: Tuple) -> impl Iterator<Item = (u32, SocketFile)> {
        // The owner of a directory is known, so the code needs no key.
        let name = name::name(&Key::from([0; 16]), accepted);
        let base = self.base;
        self.of_users.iter().map(move |UserDirectory { user, path }| {
            let code = std::str::from_utf8(&name[name.len() - NAME_BYTES..]).unwrap_or_default();
            (*user, SocketFile { base, path: path.join(code) })
        })
    }
}

impl SocketFile {
    fn directory(&self) -> BorrowedFd<'static> {
        self.base.map_or(CWD, |base| base())
    }

    fn connect(&self) -> Result<Descriptor, Reason> {
        let connected = connect(|socket| match self.base {
            None => rustix::net::connect(socket, &SocketAddrUnix::new(&self.path)?),
            Some(base) => system::connect_in(base(), socket, self.path.as_os_str().as_bytes()),
        });
        // A sandbox denies the call itself (Landlock), the group's rights the way to the file.
        let is_hidden = || {
            let directory = self.path.parent().unwrap_or(&self.path);
            rustix::fs::accessat(self.directory(), directory, Access::EXEC_OK, AtFlags::EACCESS).is_err()
        };
        if matches!(connected, Err(Reason::Sandbox)) && is_hidden() { Err(Reason::Rack) } else { connected }
    }

    /// Binds a socket to the file, and listens. The file appears when all of this is done, with its rights: a peer that
    /// found it before would take it for one that it may not reach.
    fn listen(&self, socket: BorrowedFd<'_>) -> Result<(), Reason> {
        let draft = Self { base: self.base, path: self.path.with_extension(DRAFT_EXTENSION) };
        let mut bound = draft.bind(socket);
        if bound == Err(Errno::ADDRINUSE) {
            // Of a process that was killed meanwhile.
            draft.remove();
            bound = draft.bind(socket);
        }
        match bound {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ROFS) => return Err(Reason::Rack),
            Err(Errno::NOSPC | Errno::DQUOT) => return Err(Reason::NoMemory),
            bound => bound.map_err(Reason::of_errno)?,
        }
        draft.publish(socket, self).inspect_err(|_| draft.remove())
    }

    fn bind(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        match self.base {
            None => rustix::net::bind(socket, &SocketAddrUnix::new(&self.path)?),
            Some(base) => system::bind_in(base(), socket, self.path.as_os_str().as_bytes()),
        }
    }

    /// Listens, and gives the file its rights and its name.
    fn publish(&self, socket: BorrowedFd<'_>, name: &Self) -> Result<(), Reason> {
        let directory = self.directory();
        // The umask may have removed rights.
        rustix::fs::chmodat(directory, &self.path, SOCKET_MODE, AtFlags::empty()).map_err(Reason::of_errno)?;
        rustix::net::listen(socket, BACKLOG).map_err(Reason::of_errno)?;
        let keep = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(directory, &self.path, directory, &name.path, keep) {
            // A process that was killed leaves its file, and the addresses of its connection may be used again.
            Err(Errno::EXIST) if matches!(name.connect(), Err(Reason::Nobody)) => {
                rustix::fs::renameat(directory, &self.path, directory, &name.path).map_err(Reason::of_errno)
            }
            Err(Errno::EXIST) => Err(Reason::NameTaken),
            renamed => renamed.map_err(Reason::of_errno),
        }
    }

    pub(crate) fn remove(&self) {
        let _ = rustix::fs::unlinkat(self.directory(), &self.path, AtFlags::empty());
    }
}

fn unix_socket() -> Result<Descriptor, Reason> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SOCKET_FLAGS, None);
    socket.and_then(Descriptor::kept).map_err(Reason::of_errno)
}

fn connect(connect: impl FnOnce(BorrowedFd<'_>) -> Result<(), Errno>) -> Result<Descriptor, Reason> {
    let socket = unix_socket()?;
    match connect(socket.as_fd()) {
        Ok(()) => Ok(socket),
        // A file that is no socket refuses too.
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Err(Reason::Nobody),
        Err(Errno::AGAIN) => Err(Reason::Full),
        Err(errno) => Err(Reason::of_errno(errno)),
    }
}

/// Removes socket files that processes of this user have left in their directory when they were killed.
pub fn sweep(own: &Directories, now_s: i64) {
    let Some(UserDirectory { path: directory, .. }) = own.of_users.first() else { return };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let base = own.base.map_or(CWD, |base| base());
    let Ok(listing) = rustix::fs::openat(base, directory, flags, Mode::empty()).map(Descriptor::from) else { return };
    let mut buffer: Vec<u8> = Vec::with_capacity(LISTING_BYTES);
    let mut entries = rustix::fs::RawDir::new(listing.as_fd(), buffer.spare_capacity_mut());
    for _ in 0..SWEEP_ENTRIES_MAX {
        let Some(Ok(entry)) = entries.next() else { return };
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name.len() != NAME_BYTES && !name.ends_with(DRAFT_EXTENSION) {
            continue;
        }
        let found = rustix::fs::statat(listing.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW);
        let is_old = found.is_ok_and(|found| {
            FileType::from_raw_mode(found.st_mode) == FileType::Socket && now_s - found.st_ctime > LEFT_OVER_S
        });
        let file = SocketFile { base: own.base, path: directory.join(name) };
        if is_old && matches!(file.connect(), Err(Reason::Nobody)) {
            file.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::path::Path;

    fn tuple() -> Tuple {
        Tuple::new("127.0.0.1:80".parse().unwrap(), "127.0.0.1:50000".parse().unwrap())
    }

    fn directories(paths: &[&Path]) -> Rendezvous {
        Rendezvous::Directories(own(paths))
    }

    fn own(paths: &[&Path]) -> Directories {
        let of_users = (1..).zip(paths).map(|(user, path)| UserDirectory { user, path: (*path).to_owned() }).collect();
        Directories { base: None, of_users }
    }

    /// Returns the user in whose directory an endpoint was found.
    fn reach(place: &Rendezvous, tuple: Tuple) -> Result<Option<u32>, Reason> {
        place.connect(tuple, |_, user| Ok(user))
    }

    fn file(bound: &Bound) -> PathBuf {
        bound.file.clone().unwrap().path
    }

    #[test]
    fn a_socket_in_a_directory_is_reached_by_whoever_reaches_the_directory() {
        let scratch = tempfile::tempdir().unwrap();
        let (here, other) = (scratch.path().join("here"), scratch.path().join("other"));
        std::fs::create_dir(&here).unwrap();
        let place = directories(&[&here]);
        let reaching = directories(&[&other, &here]);
        assert_eq!(reach(&reaching, tuple()).unwrap_err(), Reason::Nobody);
        let bound = place.listen(tuple()).unwrap();
        let file = file(&bound);
        let metadata = std::fs::metadata(&file).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o777, 0o666);
        assert_eq!(std::fs::read_dir(&here).unwrap().count(), 1, "no draft is left");
        assert_eq!(reach(&reaching, tuple()).unwrap(), Some(2), "whose directory it is");
        assert_eq!(reach(&reaching, tuple().reversed()).unwrap_err(), Reason::Nobody, "another connection");
        assert_eq!(place.listen(tuple()).unwrap_err(), Reason::NameTaken);
        drop(bound);
        assert!(file.exists(), "as after a kill");
        place.listen(tuple()).unwrap();
        assert_eq!(directories(&[&scratch.path().join("none")]).listen(tuple()).unwrap_err(), Reason::Rack);
    }

    #[test]
    fn somebody_who_cannot_be_met_does_not_keep_the_next_one_out() {
        let scratch = tempfile::tempdir().unwrap();
        let paths = ["first", "second"].map(|name| scratch.path().join(name));
        paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let bound = paths.each_ref().map(|path| directories(&[path]).listen(tuple()).unwrap());
        let both = directories(&[&paths[0], &paths[1]]);
        let refusing = |refused: u32| {
            move |_, user: Option<u32>| if user == Some(refused) { Err(Reason::NoRule) } else { Ok(user) }
        };
        assert_eq!(both.connect(tuple(), refusing(1)), Ok(Some(2)));
        assert_eq!(both.connect(tuple(), refusing(2)), Ok(Some(1)));
        let mut callers = Vec::new();
        let mut call = |socket, user| {
            callers.push(socket);
            Ok(user)
        };
        while both.connect(tuple(), &mut call) == Ok(Some(1)) {}
        assert_eq!(both.connect(tuple(), &mut call), Ok(Some(2)), "the queue of the first is full");
        drop(bound);
        assert_eq!(both.connect(tuple(), refusing(0)), Err(Reason::Nobody));
    }

    #[test]
    fn a_sweep_removes_what_killed_processes_have_left() {
        let scratch = tempfile::tempdir().unwrap();
        let place = directories(&[scratch.path()]);
        let (left, living) = (place.listen(tuple()).unwrap(), place.listen(tuple().reversed()).unwrap());
        let files = [file(&left), file(&living)];
        drop(left);
        let now_s = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
        sweep(&own(&[scratch.path()]), now_s);
        assert!(files[0].exists(), "young");
        let other = scratch.path().join("other");
        std::fs::write(&other, "").unwrap();
        sweep(&own(&[scratch.path()]), now_s + LEFT_OVER_S + 2);
        assert_eq!(files.map(|file| file.exists()), [false, true]);
        assert!(other.exists());
    }

    #[test]
    fn links_and_other_files_are_nobody() {
        let scratch = tempfile::tempdir().unwrap();
        let place = directories(&[scratch.path()]);
        let file = own(&[scratch.path()]).files(tuple()).next().unwrap().1.path;
        std::fs::write(&file, "").unwrap();
        assert_eq!(reach(&place, tuple()).unwrap_err(), Reason::Nobody);
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&file, &file).unwrap();
        assert_eq!(reach(&place, tuple()).unwrap_err(), Reason::Nobody);
    }
}
