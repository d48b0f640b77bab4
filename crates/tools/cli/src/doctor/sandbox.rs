//! Checks of what this process, and with it its programs, is confined by: filters, security modules, namespaces,
//! private mounts.

use std::fs;
use std::path::Path;

use super::Check;

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
        network_namespace(&link("/proc/self/ns/net"), rack),
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

/// Reports the label of AppArmor, SELinux or Smack. Landlock cannot be seen from inside: a connect that it denies is
/// counted as `connect_denied`.
fn security_module(label: &str) -> Check {
    let label = label.trim_matches(['\0', '\n', ' ']);
    if label.is_empty() || label == "unconfined" {
        return Check::ok("security module", "unconfined");
    }
    let remedy = "only if stat counts connect_denied or handshake_failed: allow UNIX sockets and file descriptors \
                  between the profiles of both programs";
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

/// Compares the network namespace with those of the programs that have listened in the rack.
fn network_namespace(namespace: &str, rack: &Path) -> Check {
    let own = namespace.trim_start_matches("net:[").trim_end_matches(']');
    let folder = rack.join(socket::rendezvous::directory::VERSION);
    let names = names_in(&folder);
    let others = names.iter().filter_map(|name| name.strip_prefix("net-")).filter(|inode| *inode != own);
    let others: Vec<&str> = others.filter(|inode| !names_in(&folder.join(format!("net-{inode}"))).is_empty()).collect();
    if others.is_empty() {
        return Check::ok("network namespace", own);
    }
    let found = format!("{own}; programs of the rack also listen in {}", others.join(", "));
    let remedy = "only programs of one network namespace get lanes: docker run --network container:NAME, or one pod";
    Check::note("network namespace", found, remedy)
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
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
        let rack = tempfile::tempdir().unwrap();
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
            (network_namespace("net:[7]", rack.path()), Status::Ok, "7"),
            (private_mount(private, Path::new("/tmp/rack")), Status::Note, "PrivateTmp="),
            (private_mount(private, Path::new("/run/rack")), Status::Ok, "none"),
            (container(&["docker"]), Status::Note, "docker"),
            (container(&[]), Status::Ok, "none"),
        ] {
            assert_eq!(check.status, status, "{check:?}");
            assert!(check.found.contains(words), "{words:?} is missing: {check:?}");
        }
    }

    #[test]
    fn listeners_of_other_network_namespaces_are_named() {
        let rack = tempfile::tempdir().unwrap();
        let version = rack.path().join(socket::rendezvous::directory::VERSION);
        fs::create_dir_all(version.join("net-7/0.0.0.0:80")).unwrap();
        fs::create_dir_all(version.join("net-8")).unwrap();
        assert_eq!(network_namespace("net:[7]", rack.path()).status, Status::Ok, "nobody listens in 8");
        let check = network_namespace("net:[9]", rack.path());
        assert_eq!((check.status, check.found.as_str()), (Status::Note, "9; programs of the rack also listen in 7"));
    }
}
