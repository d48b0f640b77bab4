//! Legacy iptables and arptables (`linux/netfilter_ipv4/ip_tables.h`, `linux/netfilter_ipv6/ip6_tables.h`,
//! `linux/netfilter_arp/arp_tables.h`). They report no changes.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::system::exchange;

const NAME_BYTES: usize = 32;
/// The largest number of further attempts to read a table that changes.
const READS_MAX: u32 = 8;
/// Size of the answer about entries before the entries.
const ENTRIES_HEADER_BYTES: usize = 40;
/// The hooks that packets between interfaces pass, by number.
const HOOKS: &[(usize, &str)] = &[(0, "PREROUTING"), (2, "FORWARD"), (4, "POSTROUTING")];
/// The hooks of ARP packets: the router resolves addresses of hosts itself.
const ARP_HOOKS: &[(usize, &str)] = &[(0, "INPUT"), (1, "OUTPUT")];
/// Verdicts: *accept* and *return*, as -1 minus the number.
const ACCEPT: i32 = -2;
const RETURN: i32 = -5;

/// One of the three versions.
struct Version {
    family: AddressFamily,
    level: libc::c_int,
    /// The socket option that reads the hooks of a table. The next one reads its entries.
    get_info: libc::c_int,
    names: &'static str,
    program: &'static str,
    hooks: &'static [(usize, &'static str)],
    /// Number of hooks that a table of any kind has.
    hooks_max: usize,
    /// Offset in an entry of the offset of its target, which the offset of the next entry follows.
    target_offset_at: usize,
}

const VERSIONS: [Version; 3] = [
    Version {
        family: AddressFamily::INET,
        level: libc::IPPROTO_IP,
        get_info: 64,
        names: "/proc/thread-self/net/ip_tables_names",
        program: "iptables-legacy",
        hooks: HOOKS,
        hooks_max: 5,
        target_offset_at: 88,
    },
    Version {
        family: AddressFamily::INET6,
        level: libc::IPPROTO_IPV6,
        get_info: 64,
        names: "/proc/thread-self/net/ip6_tables_names",
        program: "ip6tables-legacy",
        hooks: HOOKS,
        hooks_max: 5,
        target_offset_at: 140,
    },
    Version {
        family: AddressFamily::INET,
        level: libc::IPPROTO_IP,
        get_info: 96,
        names: "/proc/thread-self/net/arp_tables_names",
        program: "arptables-legacy",
        hooks: ARP_HOOKS,
        hooks_max: 3,
        target_offset_at: 164,
    },
];

/// Returns a description of each chain that may touch packets between interfaces.
pub(super) fn find() -> Vec<String> {
    let mut found = Vec::new();
    for version in &VERSIONS {
        // Without the module, there is no file.
        for table in fs::read_to_string(version.names).unwrap_or_default().lines() {
            let program = version.program;
            match chains(version, table) {
                Ok(names) => found.extend(names.iter().map(|name| format!("{program} table {table}, chain {name}"))),
                Err(error) => found.push(format!("{program} table {table}, which cannot be read: {error}")),
            }
        }
    }
    found
}

/// Returns the names of the chains of a table that may touch packets.
fn chains(version: &Version, table: &str) -> io::Result<Vec<&'static str>> {
    let socket = rustix::net::socket_with(version.family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut attempts = 0..READS_MAX;
    loop {
        match read_chains(version, table, &socket) {
            // The table has changed in between.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && attempts.next().is_some() => {}
            read => return read,
        }
    }
}

fn read_chains(version: &Version, table: &str, socket: &OwnedFd) -> io::Result<Vec<&'static str>> {
    let entries_at = NAME_BYTES + 4;
    let policies_at = entries_at + 4 * version.hooks_max;
    // The number of entries follows the policies, and then their size.
    let size_at = policies_at + 4 * version.hooks_max + 4;
    let mut info = request(table, size_at + 4);
    exchange(socket, version.level, version.get_info, &mut info)?;
    let number = |at: usize| u32_at(&info, at).unwrap_or(0) as usize;
    let mut entries = request(table, ENTRIES_HEADER_BYTES + number(size_at));
    entries[NAME_BYTES..NAME_BYTES + 4].copy_from_slice(&info[size_at..]);
    exchange(socket, version.level, version.get_info + 1, &mut entries)?;
    let entries = &entries[ENTRIES_HEADER_BYTES..];
    let is_touching = |hook: usize| {
        let is_valid = number(NAME_BYTES) & 1 << hook != 0;
        is_valid && touches(entries, version, number(entries_at + 4 * hook), number(policies_at + 4 * hook))
    };
    let chains = version.hooks.iter().filter(|(hook, _)| is_touching(*hook));
    Ok(chains.map(|(_, name)| *name).collect())
}

fn request(table: &str, bytes: usize) -> Vec<u8> {
    let mut request = vec![0; bytes];
    let name_bytes = table.len().min(NAME_BYTES - 1);
    request[..name_bytes].copy_from_slice(&table.as_bytes()[..name_bytes]);
    request
}

/// Returns whether the chain of a hook may touch packets: its policy, at `policy_at`, is not to accept them, or one of
/// its rules, which begin at `at`, does more than count or accept. Entries that cannot be parsed may do anything.
fn touches(entries: &[u8], version: &Version, mut at: usize, policy_at: usize) -> bool {
    while at <= policy_at {
        let offset = |of: usize| u16_at(entries, at + version.target_offset_at + of).map(usize::from);
        let (Some(target_at), Some(next)) = (offset(0), offset(2).filter(|next| *next > 0)) else { return true };
        let target = at + target_at;
        // The standard target has no name. Its verdict is the position of the next entry to apply if it is positive.
        let is_standard = entries.get(target + 2) == Some(&0);
        let Some(verdict) = u32_at(entries, target + NAME_BYTES) else { return true };
        let verdict = verdict as i32;
        let is_fall_through = usize::try_from(verdict).is_ok_and(|verdict| verdict == at + next);
        let is_harmless = match verdict {
            ACCEPT => true,
            RETURN => at < policy_at,
            _ => is_fall_through && at < policy_at,
        };
        if !is_standard || !is_harmless {
            return true;
        }
        at += next;
    }
    false
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}
