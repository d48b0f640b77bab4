//! The memory that the lanes of this process may use beyond their small rings.
//!
//! A memfd has no limit of its own, and an allocation beyond a memory cgroup's limit wakes the OOM killer instead of
//! failing. So each process accounts for what it allocates, and stays below two limits: half of what `tcp_mem` grants
//! kernel TCP at most, and three quarters of its memory cgroup's limit. Other processes may use a part of the latter,
//! so the cgroup's usage is read again whenever a MiB more was charged. Page cache does not count, because the kernel
//! reclaims it when memory is allocated. At the limit, lanes stay as small as they are.

use crate::process::buffer;
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use crate::process::sandbox;
use crate::process::system::{for_each_line, read_text};
use lane::Budget;
use std::ffi::CString;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes of drained rings that a process keeps without releasing them under pressure: a connection with the next
/// message then finds its memory in the cache.
pub const WARM_BYTES: usize = 4 << 20;
/// Charged bytes after which the cgroup's usage is read again.
const CHECK_EVERY_BYTES: usize = 1 << 20;
/// The limit where neither of the two can be read.
const LIMIT_BYTES_DEFAULT: u64 = 1 << 30;
const PAGE_BYTES: u64 = 4096;
/// Version 1 of cgroups reports at least this for "no limit".
const NO_LIMIT_BYTES: u64 = 1 << 60;

static CHARGED_BYTES: AtomicUsize = AtomicUsize::new(0);
static LIMITS: OnceLock<Limits> = OnceLock::new();
/// Bytes that may be charged before the cgroup's usage is read again.
static UNCHECKED_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Clock ticks when the cgroup last had too little room. For a millisecond nothing is read again: a program that polls
/// many lanes at the limit would spend its time on that.
static REFUSED_TICKS: AtomicU64 = AtomicU64::new(0);

/// The limits of this process, read once.
#[derive(Debug)]
struct Limits {
    bytes: u64,
    cgroup: Option<CgroupLimit>,
}

/// The limit that a memory cgroup sets.
#[derive(Debug)]
struct CgroupLimit {
    /// The bytes that its usage may reach.
    bytes: u64,
    usage_file: CString,
    /// The file with the parts of the usage, and the names of those that the kernel reclaims.
    stat_file: CString,
    reclaimable: [&'static str; 2],
}

/// The budget of this process, as the lanes charge it.
#[derive(Debug)]
pub struct ProcessBudget;

/// The budget of this process.
pub static PROCESS_BUDGET: ProcessBudget = ProcessBudget;

impl Budget for ProcessBudget {
    fn charge(&self, bytes: usize) -> bool {
        if sandbox::is_confined() {
            return false;
        }
        let take = |taken: usize| taken.checked_add(bytes).filter(|sum| *sum as u64 <= limit_bytes());
        let is_within = CHARGED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        let is_taken = is_within && cgroup_has_room(bytes, true);
        if is_within && !is_taken {
            self.release(bytes);
        }
        publish();
        is_taken
    }

    fn has_room(&self, bytes: usize) -> bool {
        let sum = charged_bytes().saturating_add(bytes) as u64;
        !sandbox::is_confined() && sum <= limit_bytes() && cgroup_has_room(bytes, false)
    }

    fn release(&self, bytes: usize) {
        let give = |taken: usize| Some(taken.saturating_sub(bytes));
        let _ = CHARGED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, give);
        publish();
    }
}

/// Publishes the numbers on the stats page.
fn publish() {
    crate::accounting::process_stats::note_lane_memory(charged_bytes() as u64, limit_bytes());
}

/// Returns the bytes that the lanes of this process have charged.
pub fn charged_bytes() -> usize {
    CHARGED_BYTES.load(Ordering::Relaxed)
}

/// Returns the bytes that they may charge.
pub fn limit_bytes() -> u64 {
    LIMITS.get().map_or(LIMIT_BYTES_DEFAULT, |limits| limits.bytes)
}

/// Reads the limits, which allocates. Call it before there is a lane: a lane may grow in a signal handler.
pub fn init_limits() {
    LIMITS.get_or_init(|| {
        let mut text = [0; 256];
        let tcp = read_text(c"/proc/sys/net/ipv4/tcp_mem", &mut text).and_then(pages_of_tcp_mem);
        let tcp_bytes = tcp.map_or(LIMIT_BYTES_DEFAULT, |pages| pages.saturating_mul(PAGE_BYTES) / 2);
        let cgroup = Cgroup::find();
        let limit = cgroup.as_ref().and_then(Cgroup::limit_bytes);
        let share = limit.map(|limit| limit / 4 * 3);
        Limits {
            bytes: tcp_bytes.min(share.unwrap_or(u64::MAX)).max(1),
            cgroup: cgroup.zip(share).and_then(|(cgroup, bytes)| cgroup.limit_to(bytes)),
        }
    });
}

/// Parses the last of three numbers such as `288459 384612 576918`.
fn pages_of_tcp_mem(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().nth(2)?.parse().ok()
}

/// Returns whether the cgroup has room for `bytes` more below three quarters of its limit, as of the last time its
/// usage was read. `charges` them.
fn cgroup_has_room(bytes: usize, charges: bool) -> bool {
    let Some(cgroup) = LIMITS.get().and_then(|limits| limits.cgroup.as_ref()) else { return true };
    let spend = |left: usize| left.checked_sub(bytes).map(|rest| if charges { rest } else { left });
    if UNCHECKED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok() {
        return true;
    }
    if ticks().wrapping_sub(REFUSED_TICKS.load(Ordering::Relaxed)) < TICKS_PER_MILLISECOND {
        return false;
    }
    let Some(left) = cgroup.left_bytes(bytes.max(2 * CHECK_EVERY_BYTES)) else { return true };
    let has_room = left >= bytes as u64;
    if !has_room {
        REFUSED_TICKS.store(ticks(), Ordering::Relaxed);
    }
    // Other processes use the rest too, so at most half of it may be charged before the next check.
    UNCHECKED_BYTES.store(usize::try_from(left / 2).unwrap_or(usize::MAX).min(CHECK_EVERY_BYTES), Ordering::Relaxed);
    has_room
}

impl CgroupLimit {
    /// Returns how many bytes the usage is below the limit, exactly if that is less than `wanted`. `None` if it cannot
    /// be read.
    fn left_bytes(&self, wanted: usize) -> Option<u64> {
        let mut text = [0; 64];
        let used = read_text(self.usage_file.as_c_str(), &mut text).and_then(number_in)?;
        let left = self.bytes.saturating_sub(used);
        if left >= wanted as u64 {
            return Some(left);
        }
        Some(self.bytes.saturating_sub(used.saturating_sub(self.reclaimable_bytes())))
    }

    /// Returns the bytes of the usage that the kernel reclaims when other memory is allocated: file pages that are not
    /// shared memory.
    fn reclaimable_bytes(&self) -> u64 {
        let mut sum = 0_u64;
        for_each_line(self.stat_file.as_c_str(), &mut |line| {
            if let Some((name, number)) = line.split_once(' ')
                && self.reclaimable.contains(&name)
            {
                sum = sum.saturating_add(number_in(number).unwrap_or(0));
            }
        });
        sum
    }
}

/// Parses a number of bytes in the format of cgroups.
fn number_in(text: &str) -> Option<u64> {
    let text = text.trim_ascii();
    if text == "max" { Some(u64::MAX) } else { text.parse().ok() }
}

/// The memory cgroup of this process, as a directory that this process can see.
struct Cgroup {
    folder: String,
    is_v2: bool,
}

impl Cgroup {
    fn find() -> Option<Self> {
        let mut text = buffer::on_heap(4096).ok()?;
        let own = read_text(c"/proc/self/cgroup", &mut text)?;
        let v1 = own.lines().find_map(|line| memory_path(line).map(|path| (path, false)));
        let (path, is_v2) =
            v1.or_else(|| own.lines().find_map(|line| line.strip_prefix("0::")).map(|path| (path, true)))?;
        let root = if is_v2 { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
        // In a cgroup namespace the root is the cgroup itself.
        let own = Self { folder: format!("{root}{path}"), is_v2 };
        let found = if own.limit_file().is_some() { own } else { Self { folder: root.to_owned(), is_v2 } };
        found.limit_file().is_some().then_some(found)
    }

    fn limit_file(&self) -> Option<u64> {
        self.read(if self.is_v2 { "memory.max" } else { "memory.limit_in_bytes" })
    }

    /// Returns the lowest limit of the cgroup and its ancestors, or `None` if there is none.
    fn limit_bytes(&self) -> Option<u64> {
        let root_len = if self.is_v2 { "/sys/fs/cgroup".len() } else { "/sys/fs/cgroup/memory".len() };
        let mut folder = self.folder.clone();
        let mut lowest = u64::MAX;
        loop {
            let here = Self { folder: folder.clone(), is_v2: self.is_v2 };
            lowest = lowest.min(here.limit_file().unwrap_or(u64::MAX));
            match folder.rfind('/').filter(|at| *at >= root_len && folder.len() > root_len) {
                Some(at) => folder.truncate(at),
                None => break,
            }
        }
        (lowest < NO_LIMIT_BYTES).then_some(lowest)
    }

    /// Returns the limit that lanes keep, of `bytes`.
    fn limit_to(&self, bytes: u64) -> Option<CgroupLimit> {
        Some(CgroupLimit {
            bytes,
            usage_file: self.path_of(if self.is_v2 { "memory.current" } else { "memory.usage_in_bytes" })?,
            stat_file: self.path_of("memory.stat")?,
            // In version 1, these include the descendants, as the usage does.
            reclaimable: if self.is_v2 {
                ["active_file", "inactive_file"]
            } else {
                ["total_active_file", "total_inactive_file"]
            },
        })
    }

    fn path_of(&self, file: &str) -> Option<CString> {
        CString::new(format!("{}/{file}", self.folder)).ok()
    }

    fn read(&self, file: &str) -> Option<u64> {
        let mut text = [0; 64];
        read_text(self.path_of(file)?.as_c_str(), &mut text).and_then(number_in)
    }
}

/// Returns the path in a line such as `4:memory:/docker/1234`.
fn memory_path(line: &str) -> Option<&str> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    controllers.split(',').any(|controller| controller == "memory").then_some(path.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_controller_is_found_among_others() {
        assert_eq!(memory_path("4:memory:/docker/12"), Some("/docker/12"));
        assert_eq!(memory_path("4:cpu,memory:/a:b"), Some("/a:b"));
        assert_eq!(memory_path("4:memory:/"), Some(""));
        assert_eq!(memory_path("3:cpuset:/"), None);
        assert_eq!(memory_path("0::/user.slice"), None);
    }

    #[test]
    fn page_cache_is_room_but_shared_memory_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            CString::new(path.into_os_string().into_encoded_bytes()).unwrap()
        };
        let padding = format!("shmem 50\ninactive_anon 50\n{}\n", "long ".repeat(300));
        let limit = |used: u64| CgroupLimit {
            bytes: 1000,
            usage_file: file("memory.current", &format!("{used}\n")),
            stat_file: file("memory.stat", &format!("{padding}active_file 300\ninactive_file 200\nunevictable 7\n")),
            reclaimable: ["active_file", "inactive_file"],
        };
        assert_eq!(limit(900).left_bytes(400), Some(600), "500 of the 900 bytes are page cache");
        assert_eq!(limit(2000).left_bytes(400), Some(0));
        assert_eq!(limit(500).left_bytes(400), Some(500), "enough without knowing the parts");
    }

    #[test]
    fn the_limit_of_kernel_tcp_is_the_last_number() {
        assert_eq!(pages_of_tcp_mem("288459\t384612\t576918\n"), Some(576_918));
        assert_eq!(pages_of_tcp_mem("1 2"), None);
    }

    #[test]
    fn charges_stay_within_the_limit_and_can_be_released() {
        init_limits();
        assert!(limit_bytes() > 0);
        let before = charged_bytes();
        assert!(PROCESS_BUDGET.charge(4096));
        assert!(!PROCESS_BUDGET.charge(usize::MAX / 2), "more than any limit");
        PROCESS_BUDGET.release(4096);
        assert!(charged_bytes() <= before.max(charged_bytes()));
    }
}
