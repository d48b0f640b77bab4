//! Checks of what this process, and with it its programs, is confined by: filters, security modules, namespaces,
//! private mounts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::Check;
use crate::processes::Processes;
use crate::processes::program::folder_identity;
use crate::rack_dir::shared::SharedView;

/// Inode of the machine's own user namespace (include/linux/proc_ns.h).
const USER_NAMESPACE_OF_MACHINE: &str = "user:[4026531837]";

/// Returns all checks. Lanes need none of these, but both programs must be confined alike in some. `denied` are the
/// calls that other checks have tried in vain.
pub fn checks(rack: &Path, denied: &[&str]) -> Vec<Check> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let link = |path: &str| fs::read_link(path).map(|target| target.display().to_string()).unwrap_or_default();
    let marks: Vec<&str> =
        CONTAINER_MARKS.iter().filter(|(path, _)| Path::new(path).exists()).map(|(_, name)| *name).collect();
    vec![
        seccomp(&read("/proc/self/status"), denied),
        security_module(&read("/proc/self/attr/current")),
        user_namespace(&link("/proc/self/ns/user"), &read("/proc/self/uid_map")),
        network_namespace(&link("/proc/self/ns/net"), &namespaces_of(rack)),
        private_mount(&read("/proc/self/mountinfo"), rack),
        container(&marks),
    ]
}

/// Reports the filter of system calls, and which of the calls that lanes need it denies.
fn seccomp(status: &str, denied: &[&str]) -> Check {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
    let privileges = if field("NoNewPrivs:") == "1" { "; no new privileges" } else { "" };
    let found = match field("Seccomp:") {
        "0" => "no filter",
        "1" => "strict mode",
        "2" if !denied.is_empty() => {
            let found = format!("a filter is active, and these fail: {}{privileges}", denied.join(", "));
            return Check::note("seccomp", found, "allow them (systemd: SystemCallFilter=@system-service)");
        }
        "2" => "a filter is active and allows what lanes need",
        _ => "this kernel has no filters",
    };
    Check::ok("seccomp", format!("{found}{privileges}"))
}

/// Reports the label of AppArmor, SELinux or Smack. Landlock cannot be seen from inside.
fn security_module(label: &str) -> Check {
    let label = label.trim_matches(['\0', '\n', ' ']);
    if label.is_empty() || label == "unconfined" {
        return Check::ok("security module", "unconfined");
    }
    let remedy = "only if stat counts sandbox or handshake_failed: allow UNIX sockets and file descriptors between \
                  the profiles of both programs";
    Check::note("security module", format!("profile {label}"), remedy)
}

fn user_namespace(namespace: &str, uid_map: &str) -> Check {
    if namespace.is_empty() || namespace == USER_NAMESPACE_OF_MACHINE {
        return Check::ok("user namespace", "the machine's");
    }
    let map: Vec<&str> = uid_map.split_ascii_whitespace().collect();
    let shown = match map[..] {
        [inside, outside, ..] if inside != outside => format!(": user {inside} is {outside} outside"),
        _ => String::new(),
    };
    let remedy = "the rack directory must belong to the user as it is seen here: map both programs' users alike";
    Check::note("user namespace", format!("not the machine's{shown}"), remedy)
}

/// Returns the network namespaces of the programs that meet in the rack; none if it is shared, where these may differ.
fn namespaces_of(rack: &Path) -> Vec<u64> {
    if matches!(SharedView::of(rack), Ok(Some(_))) {
        return Vec::new();
    }
    let (Some(rack), Ok(processes)) = (folder_identity(rack), Processes::scan()) else { return Vec::new() };
    let members = processes.all().filter(|program| program.rack_identity() == Some(rack));
    members.map(|program| program.namespace).collect()
}

/// Compares the network namespace with those of the programs that meet in the rack.
fn network_namespace(namespace: &str, of_programs: &[u64]) -> Check {
    let own = namespace.trim_start_matches("net:[").trim_end_matches(']');
    let others: BTreeSet<String> = of_programs.iter().map(u64::to_string).filter(|inode| inode != own).collect();
    if others.is_empty() {
        return Check::ok("network namespace", own);
    }
    let others: Vec<String> = others.into_iter().collect();
    let found = format!("{own}; programs of the rack also run in {}", others.join(", "));
    let remedy = "only programs of one network namespace get lanes: docker run --network container:NAME, or one pod";
    Check::note("network namespace", found, remedy)
}

/// Checks that the rack is not in a directory of `PrivateTmp=`, which only one service sees.
fn private_mount(mountinfo: &str, rack: &Path) -> Check {
    // proc_pid_mountinfo(5): the fourth field is the root of the mount in its file system, the fifth its mount point.
    let mounts = mountinfo.lines().filter_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        Some((*words.get(3)?, *words.get(4)?))
    });
    let holding = mounts.filter(|(_, point)| rack.starts_with(point)).max_by_key(|(_, point)| point.len());
    match holding {
        Some((root, point)) if root.contains("/systemd-private-") => {
            let found = format!("the rack is in {point}, which only this service sees (PrivateTmp=)");
            Check::note("private mounts", found, "set CROSSLANE_RACK to a directory below /run: docs/deploy.md")
        }
        _ => Check::ok("private mounts", "the rack is in none"),
    }
}

/// Files by which container engines mark their containers.
const CONTAINER_MARKS: [(&str, &str); 3] =
    [("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/run/systemd/container", "systemd")];

fn container(marks: &[&str]) -> Check {
    match marks {
        [] => Check::ok("container", "none"),
        marks => {
            let remedy = "share a network namespace and the rack directory with the other program: docs/deploy.md";
            Check::note("container", marks.join(" "), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn confinements_that_both_programs_must_share_are_reported() {
        let private = "30 1 0:5 / / rw - ext4 /dev/a rw\n\
                       31 30 0:5 /tmp/systemd-private-3f-redis.service-x/tmp /tmp rw - ext4 /dev/a rw\n";
        for (check, status, words) in [
            (seccomp("NoNewPrivs:\t1\nSeccomp:\t2\n", &[]), Status::Ok, "allows what lanes need; no new privileges"),
            (seccomp("Seccomp:\t2\n", &["memfd"]), Status::Note, "these fail: memfd"),
            (seccomp("NoNewPrivs:\t0\nSeccomp:\t0\n", &["memfd"]), Status::Ok, "no filter"),
            (security_module("unconfined\n"), Status::Ok, "unconfined"),
            (security_module("kernel\0"), Status::Note, "profile kernel"),
            (security_module("docker-default (enforce)\n"), Status::Note, "docker-default"),
            (user_namespace(USER_NAMESPACE_OF_MACHINE, ""), Status::Ok, "machine"),
            (user_namespace("user:[4026532211]", "   0  100000  65536\n"), Status::Note, "user 0 is 100000 outside"),
            (user_namespace("user:[4026532211]", "   0  0  4294967295\n"), Status::Note, "not the machine's"),
            (network_namespace("net:[7]", &[7]), Status::Ok, "7"),
            (network_namespace("net:[9]", &[7, 9, 7]), Status::Note, "9; programs of the rack also run in 7"),
            (private_mount(private, Path::new("/tmp/rack")), Status::Note, "PrivateTmp="),
            (private_mount(private, Path::new("/run/rack")), Status::Ok, "none"),
            (container(&["docker"]), Status::Note, "docker"),
            (container(&[]), Status::Ok, "none"),
        ] {
            assert_eq!(check.status, status, "{check:?}");
            assert!(check.found.contains(words), "{words:?} is missing: {check:?}");
        }
    }
}
