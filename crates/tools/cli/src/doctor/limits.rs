//! Checks of the limits of this process and of the machine, which its programs inherit.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use socket::accounting::memory_budget;

use super::Check;

const DESCRIPTORS_FEW: u64 = 1024;
/// Size of the file with the memory of one end of a connection, rounded up.
const MEMORY_FILE_BYTES: u64 = 8 << 20;
/// A bound below which lanes of a few busy connections stay small.
const LANE_MEMORY_LOW_BYTES: u64 = 64 << 20;
const PORTS_FEW: u32 = 10_000;
/// The defaults of Linux.
const MAPPINGS_DEFAULT: u64 = 65_530;

/// Returns all checks of limits.
pub fn checks() -> Vec<Check> {
    let sysctl = |name: &str| fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap_or_default();
    let soft = |resource| getrlimit(resource).current;
    memory_budget::init_limits();
    let descriptors = getrlimit(Resource::Nofile);
    vec![
        open_files(descriptors.current, descriptors.maximum),
        address_space(soft(Resource::As)),
        file_size(soft(Resource::Fsize)),
        lane_memory(memory_budget::limit_bytes()),
        mappings(&sysctl("vm/max_map_count")),
        ports(&sysctl("net/ipv4/ip_local_port_range")),
    ]
}

fn open_files(current: Option<u64>, maximum: Option<u64>) -> Check {
    let show = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string());
    let text = format!("{} (up to {}); a busy connection takes two", show(current), show(maximum));
    match current {
        Some(current) if current <= DESCRIPTORS_FEW => {
            let remedy = "ulimit -n 65536 for servers with many connections (systemd: LimitNOFILE=65536)";
            Check::note("open files", text, remedy)
        }
        _ => Check::ok("open files", text),
    }
}

/// Checks RLIMIT_AS: a program with this limit gets no lanes.
fn address_space(limit_bytes: Option<u64>) -> Check {
    match limit_bytes {
        None => Check::ok("address space", "unlimited"),
        Some(bytes) => {
            let remedy = "ulimit -v unlimited (systemd: LimitAS=infinity), and limit memory by the cgroup instead";
            Check::missing("address space", format!("{}, and lanes need it unlimited", units::bytes(bytes)), remedy)
        }
    }
}

/// Checks RLIMIT_FSIZE, which applies to the memory of lanes too.
fn file_size(limit_bytes: Option<u64>) -> Check {
    match limit_bytes {
        Some(bytes) if bytes < MEMORY_FILE_BYTES => {
            let found = format!("{}: connections stay on kernel TCP", units::bytes(bytes));
            Check::note("file size", found, "ulimit -f unlimited (systemd: LimitFSIZE=infinity)")
        }
        Some(bytes) => Check::ok("file size", units::bytes(bytes)),
        None => Check::ok("file size", "unlimited"),
    }
}

/// Checks the bound of the unread bytes of all lanes: from `net.ipv4.tcp_mem` and the limit of the memory cgroup.
fn lane_memory(bound_bytes: u64) -> Check {
    let found = format!("a process may use {} for unread bytes", units::bytes(bound_bytes));
    if bound_bytes < LANE_MEMORY_LOW_BYTES {
        let remedy = "raise the cgroup's memory limit (systemd: MemoryMax=; docker: --memory) or net.ipv4.tcp_mem";
        return Check::note("lane memory", format!("{found}: many busy connections keep small lanes"), remedy);
    }
    Check::ok("lane memory", found)
}

fn mappings(text: &str) -> Check {
    let max = text.trim().parse().unwrap_or(MAPPINGS_DEFAULT);
    let found = format!("{max}: up to {} connections of a process get lanes", max / 2);
    if max < MAPPINGS_DEFAULT {
        return Check::note("mappings", found, format!("sysctl vm.max_map_count={MAPPINGS_DEFAULT}"));
    }
    Check::ok("mappings", found)
}

/// Checks the ports that `connect` chooses from, over lanes as by TCP.
fn ports(text: &str) -> Check {
    let numbers: Vec<u32> = text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [first, last] = numbers[..] else { return Check::ok("source ports", "the default range") };
    let count = (last + 1).saturating_sub(first);
    let found = format!("{first} to {last}: {count} connections to one address");
    if count < PORTS_FEW {
        return Check::note("source ports", found, "sysctl net.ipv4.ip_local_port_range='32768 60999'");
    }
    Check::ok("source ports", found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn limits_that_keep_programs_from_lanes_or_slow_them_down_are_reported() {
        for (check, status) in [
            (open_files(Some(1024), Some(4096)), Status::Note),
            (open_files(Some(65_536), None), Status::Ok),
            (open_files(None, None), Status::Ok),
            (address_space(Some(4 << 30)), Status::Missing),
            (address_space(None), Status::Ok),
            (file_size(Some(1 << 20)), Status::Note),
            (file_size(Some(1 << 30)), Status::Ok),
            (lane_memory(48 << 20), Status::Note),
            (lane_memory(1 << 30), Status::Ok),
            (mappings("1000\n"), Status::Note),
            (mappings("1048576\n"), Status::Ok),
            (ports("60000\t60999\n"), Status::Note),
            (ports("32768\t60999\n"), Status::Ok),
            (ports(""), Status::Ok),
        ] {
            assert_eq!(check.status, status, "{check:?}");
        }
        assert_eq!(ports("32768\t60999\n").found, "32768 to 60999: 28232 connections to one address");
        assert!(lane_memory(48 << 20).found.contains("48.0 MiB"));
    }
}
