//! Legacy iptables (`linux/netfilter_ipv4/ip_tables.h`, `linux/netfilter_ipv6/ip6_tables.h`). They report no changes.

use std::fs;
use std::io;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::system::exchange;

const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
const NAME_BYTES: usize = 32;
/// Size of the answer to `GET_INFO`: name, hooks, five entries, five policies, number of entries, their size.
const INFO_BYTES: usize = 84;
/// Size of the answer to `GET_ENTRIES` before the entries.
const ENTRIES_HEADER_BYTES: usize = 40;
/// The hooks that packets between interfaces pass, by number.
const HOOKS: [(usize, &str); 3] = [(0, "PREROUTING"), (2, "FORWARD"), (4, "POSTROUTING")];
/// Verdicts: *accept* and *return*, as -1 minus the number.
const ACCEPT: i32 = -2;
const RETURN: i32 = -5;

/// One of the two versions.
struct Version {
    family: AddressFamily,
    level: libc::c_int,
    names: &'static str,
    program: &'static str,
    /// Offset in an entry of the offset of its target, which the offset of the next entry follows.
    target_offset_at: usize,
}

const VERSIONS: [Version; 2] = [
    Version {
        family: AddressFamily::INET,
        level: libc::IPPROTO_IP,
        names: "/proc/thread-self/net/ip_tables_names",
        program: "iptables-legacy",
        target_offset_at: 88,
    },
    Version {
        family: AddressFamily::INET6,
        level: libc::IPPROTO_IPV6,
        names: "/proc/thread-self/net/ip6_tables_names",
        program: "ip6tables-legacy",
        target_offset_at: 140,
    },
];

/// Returns a description of each chain that may touch packets between interfaces.
pub(super) fn find() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for version in &VERSIONS {
        // Without the module, there is no file.
        for table in fs::read_to_string(version.names).unwrap_or_default().lines() {
            found.extend(chains(version, table)?);
        }
    }
    Ok(found)
}

fn chains(version: &Version, table: &str) -> io::Result<Vec<String>> {
    let socket = rustix::net::socket_with(version.family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut info = request(table, INFO_BYTES);
    exchange(&socket, version.level, GET_INFO, &mut info)?;
    let number = |at: usize| u32_at(&info, at).unwrap_or(0) as usize;
    let mut entries = request(table, ENTRIES_HEADER_BYTES + number(80));
    entries[NAME_BYTES..NAME_BYTES + 4].copy_from_slice(&info[80..84]);
    // A table that changes in between is read again: nothing is missed, as it is polled.
    exchange(&socket, version.level, GET_ENTRIES, &mut entries)?;
    let entries = &entries[ENTRIES_HEADER_BYTES..];
    let is_touching = |hook: usize| {
        let is_valid = number(32) & 1 << hook != 0;
        is_valid && touches(entries, version, number(36 + 4 * hook), number(56 + 4 * hook))
    };
    let chains = HOOKS.into_iter().filter(|(hook, _)| is_touching(*hook));
    Ok(chains.map(|(_, name)| format!("{} table {table}, chain {name}", version.program)).collect())
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
