//! The cores that this process may use.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;

/// The two cores that a measurement uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CorePair {
    /// The core of the server.
    pub server: usize,
    /// The core of the client.
    pub client: usize,
}

impl CorePair {
    /// Chooses two of the allowed cores, on different physical cores where there are any. `None` with fewer than two.
    fn choose(allowed: &[usize], is_sibling: impl Fn(usize, usize) -> bool) -> Option<Self> {
        let (server, others) = allowed.split_first()?;
        let apart = others.iter().find(|other| !is_sibling(*server, **other));
        Some(Self { server: *server, client: *apart.or(others.first())? })
    }

    /// Returns two cores of this machine; `None` with fewer than two.
    ///
    /// # Errors
    /// When the CPU affinity cannot be read.
    pub fn of_this_machine() -> io::Result<Option<Self>> {
        Self::among(|_| true)
    }

    /// Returns two cores of this machine for which `keep` is true; `None` with fewer than two.
    ///
    /// # Errors
    /// When the CPU affinity cannot be read.
    pub fn among(keep: impl Fn(usize) -> bool) -> io::Result<Option<Self>> {
        let set = sched_getaffinity(None)?;
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core) && keep(*core)).collect();
        Ok(Self::choose(&allowed, |one, other| {
            let path = format!("/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list");
            std::fs::read_to_string(path).is_ok_and(|list| in_cpu_list(list.trim(), other))
        }))
    }
}

/// Returns whether a list of CPUs such as `0,4-7` names `core`.
pub fn in_cpu_list(list: &str, core: usize) -> bool {
    list.split(',').any(|part| match part.split_once('-') {
        Some((first, last)) => {
            first.parse().is_ok_and(|first: usize| first <= core) && last.parse().is_ok_and(|last: usize| core <= last)
        }
        None => part.parse() == Ok(core),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_are_avoided_when_there_is_a_choice() {
        let same_core = |one: usize, other: usize| one / 2 == other / 2;
        assert_eq!(CorePair::choose(&[0, 1, 2, 3], same_core), Some(CorePair { server: 0, client: 2 }));
        assert_eq!(CorePair::choose(&[4, 5], same_core), Some(CorePair { server: 4, client: 5 }));
        assert_eq!(CorePair::choose(&[3], same_core), None);
        assert_eq!(CorePair::choose(&[], same_core), None);
    }

    #[test]
    fn cpu_lists_are_read() {
        assert!(in_cpu_list("0,4-7", 0) && in_cpu_list("0,4-7", 5) && in_cpu_list("0,4-7", 7));
        assert!(!in_cpu_list("0,4-7", 1) && !in_cpu_list("0,4-7", 8) && !in_cpu_list("", 0) && !in_cpu_list("x-y", 0));
    }
}
