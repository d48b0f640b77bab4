//! The numbers of users: those of this process's user namespace, and those of the machine (`user_namespaces(7)`).

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::rules::OVERFLOW_UID;
use crate::descriptor::hidden::close;
use crate::process::locked::Locked;

/// The map of a user namespace: 340 lines at most (Linux 4.15).
const MAP_BYTES_MAX: usize = 16 << 10;
const MAP_PATH: &str = "/proc/self/uid_map";

/// The map that was last read, and the user namespace that it belongs to.
static KNOWN: Locked<Option<(u64, UserMap)>> = Locked::new(None);

/// Returns the map of this process's user namespace, which is read again if the process has entered another one.
/// Without `/proc`, as in a changed root directory, it is the one that was last read.
///
/// # Errors
/// Those of [`UserMap::read`].
pub fn of_this_process() -> Result<UserMap, Errno> {
    let namespace = rustix::fs::stat("/proc/self/ns/user").map(|found| found.st_ino);
    let known = KNOWN.with(|known| known.clone());
    match (namespace, known) {
        (Ok(namespace), Some((of, map))) if namespace == of => Ok(map),
        (Err(_), Some((_, map))) => Ok(map),
        (namespace, _) => {
            let map = UserMap::read()?;
            KNOWN.with(|known| *known = namespace.ok().map(|namespace| (namespace, map.clone())));
            Ok(map)
        }
    }
}

/// Continues in the child of a fork: another thread of the parent may have held the lock.
pub fn after_fork_in_child() {
    KNOWN.lock().reset();
}

/// How the numbers of this process's user namespace belong to those of the namespace around it, which is the machine's
/// unless namespaces are nested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserMap {
    ranges: Vec<Range>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    inside: u32,
    outside: u32,
    count: u32,
}

impl UserMap {
    /// Returns the map of a process that is in no user namespace of its own.
    pub fn identity() -> Self {
        Self { ranges: vec![Range { inside: 0, outside: 0, count: u32::MAX }] }
    }

    /// Reads the map of this process's user namespace.
    ///
    /// # Errors
    /// Those of open and read, and `INVAL` for contents that are no map.
    pub fn read() -> Result<Self, Errno> {
        let file = rustix::fs::open(MAP_PATH, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut bytes = vec![0_u8; MAP_BYTES_MAX];
        let read = rustix::io::read(&file, &mut bytes[..]);
        close(file);
        Self::parse(&String::from_utf8_lossy(&bytes[..read?])).ok_or(Errno::INVAL)
    }

    fn parse(text: &str) -> Option<Self> {
        let ranges = text.lines().map(|line| {
            let mut numbers = line.split_whitespace().map(|word| word.parse::<u32>().ok());
            match [numbers.next(), numbers.next(), numbers.next(), numbers.next()] {
                [Some(Some(inside)), Some(Some(outside)), Some(Some(count)), None] => {
                    Some(Range { inside, outside, count })
                }
                _ => None,
            }
        });
        ranges.collect::<Option<_>>().map(|ranges| Self { ranges })
    }

    /// Returns whether there are users without a number in this namespace. The kernel shows them as the overflow user.
    pub fn hides_users(&self) -> bool {
        self.ranges.iter().map(|range| u64::from(range.count)).sum::<u64>() < u64::from(u32::MAX)
    }

    /// Returns a user's number on the machine. `None` for the number that stands for all users without one.
    pub fn on_machine(&self, inside: u32) -> Option<u32> {
        let outside = self.find(inside, |range| (range.inside, range.outside))?;
        (inside != OVERFLOW_UID && outside != OVERFLOW_UID).then_some(outside)
    }

    /// Returns the number in this namespace of a user of the machine. `None` for a user without one.
    pub fn here(&self, outside: u32) -> Option<u32> {
        let inside = self.find(outside, |range| (range.outside, range.inside))?;
        (inside != OVERFLOW_UID && outside != OVERFLOW_UID).then_some(inside)
    }

    fn find(&self, number: u32, ends: impl Fn(&Range) -> (u32, u32)) -> Option<u32> {
        self.ranges.iter().find_map(|range| {
            let (from, to) = ends(range);
            let offset = number.checked_sub(from).filter(|offset| *offset < range.count)?;
            to.checked_add(offset)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_translated_in_both_directions() {
        let map = UserMap::parse("         0       1000          1\n         1     100000      65536\n").unwrap();
        assert_eq!((map.on_machine(0), map.here(1000)), (Some(1000), Some(0)));
        assert_eq!((map.on_machine(999), map.here(100_998)), (Some(100_998), Some(999)));
        assert_eq!((map.on_machine(70_000), map.here(0), map.here(999)), (None, None, None));
        assert!(map.hides_users() && !UserMap::identity().hides_users());
        assert_eq!(map.on_machine(OVERFLOW_UID), None, "it stands for all users without a number");
        let identity = UserMap::parse("0 0 4294967295").unwrap();
        assert_eq!(identity, UserMap::identity());
        assert_eq!((identity.on_machine(33), identity.here(33)), (Some(33), Some(33)));
        assert_eq!((identity.on_machine(OVERFLOW_UID), identity.here(OVERFLOW_UID)), (None, None));
    }

    #[test]
    fn other_contents_are_no_map() {
        for text in ["0 0", "0 0 1 2", "a b c", "0 0 -1", "\n"] {
            assert_eq!(UserMap::parse(text), None, "{text:?}");
        }
        assert_eq!(UserMap::parse("").unwrap().on_machine(0), None, "no map was written yet");
    }

    #[test]
    fn this_process_has_a_map() {
        let uid = rustix::process::geteuid().as_raw();
        assert!(of_this_process().unwrap().on_machine(uid).is_some());
        assert_eq!(of_this_process(), UserMap::read());
    }
}
