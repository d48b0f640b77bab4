//! A server whose lanes reach the bound of their memory. Needs root, and a memory controller of cgroups.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack, is_root};

/// The limit of the server's cgroup: its lanes get three quarters, which is less than what twelve clients do not read.
const LIMIT_BYTES: &str = "33554432";
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// A memory cgroup of a test.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// Creates a cgroup with a limit; `None` where this machine has no memory controller.
    fn new(limit_bytes: &str) -> Option<Self> {
        let name = format!("crosslane-test-{}", std::process::id());
        let roots = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        roots.into_iter().find_map(|(root, limit)| {
            let group = Self(Path::new(root).join(&name));
            fs::create_dir(&group.0).ok()?;
            fs::write(group.0.join(limit), limit_bytes).ok()?;
            Some(group)
        })
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_server_at_its_memory_bound_serves_clients_that_read_and_waits_for_the_others() {
    if !is_root() {
        println!("skipped: only root can create a memory cgroup");
        return;
    }
    let Some(group) = MemoryCgroup::new(LIMIT_BYTES) else {
        println!("skipped: this machine has no memory controller of cgroups");
        return;
    };
    for kind in ["poll", "epoll", "threads"] {
        let rack = Rack::new();
        let mut command = rack.require_lane(python());
        command.arg(package_file("python/memory_bound.py")).arg(kind).arg(group.0.join("cgroup.procs"));
        let finished = Process::start(&mut command).wait(RUN_LIMIT).must_succeed();
        assert_eq!(finished.stdout, "ok\n", "{kind}: {finished}");
    }
}
