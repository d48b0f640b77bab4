//! What a service's lists of address families and of system calls leave out of what lanes need.
//!
//! systemd merges the assignments of such a list: the first one says whether it allows or, with `~`, denies, and each
//! later one adds to the list, or takes away from it if it is of the other kind (systemd.exec(5)).

use std::collections::BTreeSet;

use super::unit::Unit;
use super::unit_file;

/// The address families of the library's own sockets.
const FAMILIES: [&str; 2] = ["AF_UNIX", "AF_NETLINK"];

/// The system calls of the library, and the groups of systemd that contain each (systemd-analyze syscall-filter).
const CALLS: [(&str, &[&str]); 23] = [
    ("accept4", NETWORK),
    ("bind", NETWORK),
    ("clone", &["@process", "@system-service", "@known"]),
    ("connect", NETWORK),
    ("fallocate", FILES),
    ("fchdir", FILES),
    ("fchmod", FILES),
    ("flock", SERVICE),
    ("ftruncate", FILES),
    ("futex", DEFAULT),
    ("getrandom", DEFAULT),
    ("listen", NETWORK),
    ("madvise", SERVICE),
    ("memfd_create", &["@ipc", "@system-service", "@known"]),
    ("mkdirat", FILES),
    ("mmap", DEFAULT),
    ("mremap", SERVICE),
    ("newfstatat", FILES),
    ("recvmsg", NETWORK),
    ("renameat2", FILES),
    ("sendmsg", NETWORK),
    ("socket", NETWORK),
    ("statx", FILES),
];
const NETWORK: &[&str] = &["@network-io", "@system-service", "@known"];
const FILES: &[&str] = &["@file-system", "@system-service", "@known"];
const SERVICE: &[&str] = &["@system-service", "@known"];
const DEFAULT: &[&str] = &["@default", "@system-service", "@known"];

/// What a list leaves out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Names that the list allows by no assignment.
    pub unlisted: Vec<&'static str>,
    /// Names that an assignment with `~` denies.
    pub denied: Vec<&'static str>,
}

/// Returns the address families that a service may not use.
pub fn families(unit: &Unit) -> LeftOut {
    let mut list = List::default();
    for value in unit.values(&["RestrictAddressFamilies"]) {
        match value {
            "none" => list = List { is_of_allowed: Some(true), ..List::default() },
            value => list.merge(value, &FAMILIES, |word, name| word == name),
        }
    }
    list.left_out(&FAMILIES)
}

/// Returns the system calls that a service may not make.
pub fn calls(unit: &Unit) -> LeftOut {
    let names = CALLS.map(|(name, _)| name);
    let groups = |name: &str| CALLS.iter().find(|(of, _)| *of == name).map_or(&[][..], |(_, groups)| groups);
    let contains = |word: &str, name: &str| {
        // A word may end with the error that the call returns.
        let word = word.split(':').next().unwrap_or_default();
        word == name || groups(name).contains(&word)
    };
    let mut list = List::default();
    for (index, value) in unit.values(&["SystemCallFilter"]).into_iter().enumerate() {
        list.merge(value, &names, contains);
        if index == 0 && list.is_of_allowed == Some(true) {
            list.merge("@default", &names, contains);
        }
    }
    list.left_out(&names)
}

/// A list while it is read.
#[derive(Default)]
struct List {
    /// Whether it is a list of what is allowed; `None` without an assignment.
    is_of_allowed: Option<bool>,
    allowed: BTreeSet<&'static str>,
    denied: BTreeSet<&'static str>,
}

impl List {
    fn merge(&mut self, value: &str, names: &[&'static str], contains: impl Fn(&str, &str) -> bool) {
        let (denies, value) = match value.strip_prefix('~') {
            Some(rest) => (true, rest),
            None => (false, value),
        };
        self.is_of_allowed.get_or_insert(!denies);
        let words = unit_file::words(value);
        for name in names.iter().filter(|name| words.iter().any(|word| contains(word, name))) {
            let (to, from) =
                if denies { (&mut self.denied, &mut self.allowed) } else { (&mut self.allowed, &mut self.denied) };
            to.insert(name);
            from.remove(name);
        }
    }

    fn left_out(self, names: &[&'static str]) -> LeftOut {
        let Self { is_of_allowed, allowed, denied } = self;
        let is_unlisted = |name: &&&str| !allowed.contains(**name) && !denied.contains(**name);
        let unlisted = names.iter().filter(|_| is_of_allowed == Some(true)).filter(is_unlisted).copied().collect();
        LeftOut { unlisted, denied: denied.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn unit(text: &str) -> Unit {
        Unit::of("a", &format!("[Service]\n{text}\n"))
    }

    #[test]
    fn address_families_are_left_out_only_where_there_is_a_list() {
        for (text, unlisted, denied) in [
            ("", &[][..], &[][..]),
            ("RestrictAddressFamilies=", &[], &[]),
            ("RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", &["AF_NETLINK"], &[]),
            ("RestrictAddressFamilies=AF_INET\nRestrictAddressFamilies=AF_NETLINK", &["AF_UNIX"], &[]),
            ("RestrictAddressFamilies=AF_INET\nRestrictAddressFamilies=", &[], &[]),
            ("RestrictAddressFamilies=none", &["AF_UNIX", "AF_NETLINK"], &[]),
            ("RestrictAddressFamilies=~AF_PACKET", &[], &[]),
            ("RestrictAddressFamilies=~AF_PACKET AF_NETLINK", &[], &["AF_NETLINK"]),
            ("RestrictAddressFamilies=~AF_NETLINK\nRestrictAddressFamilies=AF_NETLINK", &[], &[]),
        ] {
            let expected = LeftOut { unlisted: unlisted.to_vec(), denied: denied.to_vec() };
            assert_eq!(families(&unit(text)), expected, "{text:?}");
        }
    }

    #[test]
    fn system_calls_are_found_in_groups_and_by_name() {
        let redis = "SystemCallFilter=@system-service\nSystemCallFilter=~ @privileged @resources";
        assert_eq!(calls(&unit(redis)), LeftOut::default());
        assert_eq!(calls(&unit("")), LeftOut::default());
        let some = calls(&unit("SystemCallFilter=@file-system @network-io @process madvise flock"));
        assert_eq!(some, LeftOut { unlisted: vec!["memfd_create", "mremap"], denied: vec![] });
        let basic = calls(&unit("SystemCallFilter=@basic-io")).unlisted;
        assert!(basic.contains(&"socket") && !basic.contains(&"mmap"), "@default is allowed anyway: {basic:?}");
        let denied = calls(&unit("SystemCallFilter=~@ipc:EPERM @mount"));
        assert_eq!(denied, LeftOut { unlisted: vec![], denied: vec!["memfd_create"] });
        let taken_away = calls(&unit("SystemCallFilter=@system-service\nSystemCallFilter=~memfd_create"));
        assert_eq!(taken_away, denied);
        assert_eq!(calls(&unit("SystemCallFilter=~memfd_create\nSystemCallFilter=memfd_create")), LeftOut::default());
    }

    #[test]
    fn the_groups_are_those_of_the_installed_systemd() {
        let Ok(output) = Command::new("systemd-analyze").args(["syscall-filter", "@system-service"]).output() else {
            eprintln!("skipped: systemd-analyze is not installed");
            return;
        };
        let group = String::from_utf8_lossy(&output.stdout).into_owned();
        for (name, groups) in CALLS {
            let own = groups[0];
            let shown = Command::new("systemd-analyze").args(["syscall-filter", own]).output().unwrap();
            let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
            assert!(shown.split_whitespace().any(|word| word == name), "{name} is not in {own}");
            assert!(own == "@system-service" || group.contains(own), "{own} is not in @system-service");
        }
    }
}
