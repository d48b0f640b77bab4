//! Detects processes that are frozen by the freezer of control groups, version 2 or 1, from the files of the kernel.
//! These are the only way to distinguish a frozen process from a sleeping one.

use std::path::{Path, PathBuf};

/// Mount points of control groups; `None` where they are not mounted.
#[derive(Debug, Default)]
pub struct CgroupFreezer {
    /// The mount point of version 2.
    unified: Option<PathBuf>,
    /// The mount point of the freezer of version 1.
    legacy: Option<PathBuf>,
}

impl CgroupFreezer {
    /// Finds the mount points that this process sees.
    pub fn find() -> Self {
        std::fs::read_to_string("/proc/self/mountinfo")
            .map_or_else(|_| Self::default(), |mounts| Self::from_mountinfo(&mounts))
    }

    fn from_mountinfo(mounts: &str) -> Self {
        let mut found = Self::default();
        for line in mounts.lines() {
            let Some((mount, system)) = line.split_once(" - ") else { continue };
            let mut mount = mount.split(' ').skip(3);
            // In a mount of a subtree, the paths of `/proc/PID/cgroup` do not apply.
            let (Some("/"), Some(root)) = (mount.next(), mount.next()) else { continue };
            let (kind, options) = system.split_once(' ').unwrap_or((system, ""));
            let options = options.rsplit(' ').next().unwrap_or("");
            match kind {
                "cgroup2" => found.unified = Some(PathBuf::from(root)),
                "cgroup" if options.split(',').any(|option| option == "freezer") => {
                    found.legacy = Some(PathBuf::from(root));
                }
                _ => {}
            }
        }
        found
    }

    /// Returns whether a process is frozen; false if that cannot be determined.
    pub fn is_frozen(&self, process: u32) -> bool {
        let groups = std::fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        self.state_files(&groups)
            .iter()
            .any(|(file, word)| std::fs::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line == *word)))
    }

    /// Returns the state files of these groups, each with the line that it contains when frozen.
    fn state_files(&self, groups: &str) -> Vec<(PathBuf, &'static str)> {
        let file = |line: &str| {
            let (_, group) = line.split_once(':')?;
            let (controllers, group) = group.split_once(':')?;
            let (root, name, word) = match controllers {
                "" => (&self.unified, "cgroup.events", "frozen 1"),
                "freezer" => (&self.legacy, "freezer.state", "FROZEN"),
                _ => return None,
            };
            let group = Path::new(group.strip_prefix('/')?);
            // The path of a group outside this process's root begins with "..".
            (!group.starts_with("..")).then_some(())?;
            Some((root.as_ref()?.join(group).join(name), word))
        };
        groups.lines().filter_map(file).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "35 30 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n\
                          36 30 0:31 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n\
                          37 30 0:32 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer\n";

    #[test]
    fn the_state_files_of_a_process_are_found_for_both_versions() {
        let groups = "6:freezer:/docker/7\n1:cpu:/docker/7\n0::/system.slice/a:b.scope\n";
        let files = CgroupFreezer::from_mountinfo(MOUNTS).state_files(groups);
        let expected = [
            ("/sys/fs/cgroup/freezer/docker/7/freezer.state", "FROZEN"),
            ("/sys/fs/cgroup/unified/system.slice/a:b.scope/cgroup.events", "frozen 1"),
        ];
        assert_eq!(files, expected.map(|(file, word)| (PathBuf::from(file), word)));
    }

    #[test]
    fn groups_that_are_not_visible_have_no_state_files() {
        let part = "35 30 0:30 /docker/7 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert!(CgroupFreezer::from_mountinfo(part).state_files("0::/docker/7\n").is_empty(), "a part of the tree");
        assert!(CgroupFreezer::from_mountinfo(MOUNTS).state_files("0::/../8\n").is_empty(), "of another container");
        assert!(CgroupFreezer::from_mountinfo("nonsense\n1 2 - cgroup2\n").state_files("0::/\nnonsense\n").is_empty());
        assert!(!CgroupFreezer::default().is_frozen(std::process::id()));
    }
}
