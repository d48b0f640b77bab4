//! The addresses in a rack directory, remembered while the directory does not change.

use std::net::SocketAddr;
use std::sync::Mutex;

use rustix::fs::Stat;
use rustix::time::{ClockId, clock_gettime};

/// Maximum number of addresses that are remembered: a longer list takes longer to read than the look-ups that it saves.
pub(super) const ADDRESSES_KNOWN_MAX: usize = 256;
/// Time after a change of a directory until its time stamp identifies its contents: the kernel takes the stamp from a
/// clock with steps of at most 10 ms, so that a second change soon after the first may leave the stamp as it is.
const STAMP_SETTLES_NS: i64 = 50_000_000;
/// The same on a file system that may store whole seconds only, of which two are the coarsest step.
const COARSE_STAMP_SETTLES_NS: i64 = 2_500_000_000;

/// The time of the last change of a directory's entries, in seconds and nanoseconds.
type Stamp = (i64, i64);

/// The addresses in one directory.
#[derive(Debug, Default)]
pub(super) struct KnownAddresses {
    /// Only tried to be locked: its holder may not exist in the child of a fork.
    known: Mutex<Option<(Stamp, Vec<SocketAddr>)>>,
}

impl KnownAddresses {
    /// Returns whether the directory has none of the `wanted` addresses. `status` is the directory's, `list` reads its
    /// addresses, and returns `None` if there are too many. Returns `None` if it is not known.
    pub(super) fn has_none(
        &self,
        status: &Stat,
        mut wanted: impl Iterator<Item = SocketAddr>,
        list: impl FnOnce() -> Option<Vec<SocketAddr>>,
    ) -> Option<bool> {
        let stamp = (status.st_mtime, status.st_mtime_nsec as i64);
        let mut known = self.known.try_lock().ok()?;
        if known.as_ref().is_none_or(|(of, _)| *of != stamp) {
            *known = if is_settled(stamp) { list().map(|addresses| (stamp, addresses)) } else { None };
        }
        known.as_ref().map(|(_, addresses)| !wanted.any(|address| addresses.contains(&address)))
    }
}

/// Returns whether a change from now on gives the directory another stamp.
fn is_settled((seconds, nanoseconds): Stamp) -> bool {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    let age_ns = (now.tv_sec - seconds).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec - nanoseconds);
    age_ns > if nanoseconds == 0 { COARSE_STAMP_SETTLES_NS } else { STAMP_SETTLES_NS }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::directory::tests::Scratch;
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    #[test]
    fn a_stamp_in_whole_seconds_settles_later() {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        assert!(!is_settled((now.tv_sec - 1, 0)) && !is_settled((now.tv_sec, now.tv_nsec)));
        assert!(is_settled((now.tv_sec - 1, 1)) && is_settled((now.tv_sec - 4, 0)));
        assert!(!is_settled((now.tv_sec + 60, 1)), "the clock was set back");
    }

    #[test]
    fn the_addresses_are_read_again_when_the_directory_changes() {
        let folder = Scratch::new();
        let [one, two]: [SocketAddr; 2] = ["127.0.0.1:80", "[::]:443"].map(|text| text.parse().unwrap());
        let (known, reads) = (KnownAddresses::default(), Cell::new(0));
        let has_none = |address: SocketAddr| {
            known.has_none(&rustix::fs::stat(&folder.0).unwrap(), [address].into_iter(), || {
                reads.set(reads.get() + 1);
                let names = std::fs::read_dir(&folder.0).unwrap();
                Some(names.map(|name| name.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect())
            })
        };
        let wait_until_known = || {
            let began = Instant::now();
            while has_none(one).is_none() && began.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        assert_eq!(has_none(one), None, "the directory has just been made");
        wait_until_known();
        assert_eq!((has_none(one), has_none(two), reads.get()), (Some(true), Some(true), 1));
        std::fs::create_dir(folder.0.join(one.to_string())).unwrap();
        assert_eq!(has_none(one), None, "it has just changed");
        wait_until_known();
        assert_eq!((has_none(one), has_none(two), reads.get()), (Some(false), Some(true), 2));
    }
}
