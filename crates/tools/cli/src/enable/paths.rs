//! What a service's mount namespace lets it reach, by its settings (systemd.exec(5), "Sandboxing").
//!
//! systemd sorts all mounts by path. A deeper one is on top, except below an inaccessible path, where there are none.
//! Paths with specifiers (`%i`) are taken as they are written.

use std::path::{Path, PathBuf};

use super::unit::Unit;
use super::unit_file;

/// What a setting does to a path and to what is below it. Of two with one path, the first kind counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Inaccessible,
    /// The same path of the machine.
    Bound {
        is_writable: bool,
    },
    /// Other contents.
    Hidden,
    ReadOnly,
    ReadWrite,
    NotExecutable,
    Executable,
}

/// A setting for a path.
#[derive(Clone, Debug)]
struct Mount {
    path: PathBuf,
    kind: Kind,
    /// As it is in the unit.
    setting: String,
}

/// What a service needs in order to use a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    Nothing,
    /// `BindPaths=` or `BindReadOnlyPaths=`.
    Bind,
    /// `ReadWritePaths=`.
    ReadWrite,
    /// `ExecPaths=`.
    Executable,
    /// Nothing helps while this setting is there.
    Impossible(String),
}

/// The mounts of a service.
pub struct Mounts(Vec<Mount>);

impl Mounts {
    pub fn of(unit: &Unit) -> Self {
        let mut mounts = Self(Vec::new());
        mounts.add_lists(unit);
        mounts.add_binds(unit);
        mounts.add_system(unit);
        mounts.add_home(unit);
        let is_dynamic = unit.is_on("DynamicUser");
        if unit.is_on("PrivateTmp") || is_dynamic {
            let setting = if unit.is_on("PrivateTmp") { "PrivateTmp" } else { "DynamicUser" };
            mounts.add(&["/tmp", "/var/tmp"], Kind::Hidden, &format!("{setting}=yes"));
        }
        for key in ["RootDirectory", "RootImage"] {
            if let Some(root) = unit.last(key).filter(|root| root.trim_start_matches('-') != "/") {
                mounts.add(&["/"], Kind::Hidden, &format!("{key}={root}"));
            }
        }
        mounts
    }

    fn add(&mut self, paths: &[&str], kind: Kind, setting: &str) {
        let mount = |path: &&str| Mount { path: resolved(path), kind, setting: setting.to_owned() };
        self.0.extend(paths.iter().map(mount));
    }

    fn add_lists(&mut self, unit: &Unit) {
        for (keys, kind) in [
            (&["InaccessiblePaths", "InaccessibleDirectories"][..], Kind::Inaccessible),
            (&["ReadOnlyPaths", "ReadOnlyDirectories"], Kind::ReadOnly),
            (&["ReadWritePaths", "ReadWriteDirectories"], Kind::ReadWrite),
            (&["NoExecPaths"], Kind::NotExecutable),
            (&["ExecPaths"], Kind::Executable),
            (&["TemporaryFileSystem"], Kind::Hidden),
        ] {
            for word in unit.words(keys) {
                let path = word.trim_start_matches(['-', '+']);
                let path = if kind == Kind::Hidden { path.split(':').next().unwrap_or_default() } else { path };
                self.add(&[path], kind, &format!("{}={word}", keys[0]));
            }
        }
    }

    fn add_binds(&mut self, unit: &Unit) {
        for (key, is_writable) in [("BindPaths", true), ("BindReadOnlyPaths", false)] {
            for word in unit.words(&[key]) {
                let mut parts = word.trim_start_matches('-').split(':');
                let from = parts.next().unwrap_or_default();
                let to = parts.next().filter(|to| !to.is_empty()).unwrap_or(from);
                let kind = if from == to { Kind::Bound { is_writable } } else { Kind::Hidden };
                self.add(&[to], kind, &format!("{key}={word}"));
            }
        }
    }

    fn add_system(&mut self, unit: &Unit) {
        let is_dynamic = unit.is_on("DynamicUser");
        let value = unit.last("ProtectSystem").filter(|value| unit_file::is_on(value));
        let setting = match (value, is_dynamic) {
            (Some(value), _) => format!("ProtectSystem={value}"),
            (None, true) => "DynamicUser=yes".to_owned(),
            (None, false) => return,
        };
        match value {
            _ if is_dynamic || value == Some("strict") => {
                self.add(&["/"], Kind::ReadOnly, &setting);
                let others = ["/dev", "/proc", "/sys", "/home", "/root", "/run/user"];
                self.add(&others, Kind::ReadWrite, &setting);
            }
            Some("full") => self.add(&["/usr", "/boot", "/efi", "/etc"], Kind::ReadOnly, &setting),
            _ => self.add(&["/usr", "/boot", "/efi"], Kind::ReadOnly, &setting),
        }
    }

    fn add_home(&mut self, unit: &Unit) {
        let value = unit.last("ProtectHome").filter(|value| unit_file::is_on(value));
        let kind = match value {
            Some("read-only") => Kind::ReadOnly,
            Some("tmpfs") => Kind::Hidden,
            Some(_) => Kind::Inaccessible,
            None => return,
        };
        self.add(&["/home", "/root", "/run/user"], kind, &format!("ProtectHome={}", value.unwrap_or_default()));
    }

    /// Returns the setting that counts for a path, of those that `is_one` selects.
    fn over(&self, path: &Path, is_one: impl Fn(Kind) -> bool) -> Option<&Mount> {
        let covering = self.0.iter().filter(|mount| is_one(mount.kind) && path.starts_with(&mount.path));
        covering.min_by_key(|mount| (std::cmp::Reverse(mount.path.components().count()), mount.kind))
    }

    /// Returns what the service needs in order to see a path.
    pub fn to_see(&self, path: &Path) -> Need {
        if let Some(mount) = self.over(path, |kind| kind == Kind::Inaccessible) {
            return Need::Impossible(mount.setting.clone());
        }
        match self.over(path, |kind| matches!(kind, Kind::Hidden | Kind::Bound { .. })) {
            Some(Mount { kind: Kind::Hidden, .. }) => Need::Bind,
            _ => Need::Nothing,
        }
    }

    /// Returns what the service needs in order to create files in a directory.
    pub fn to_write(&self, path: &Path) -> Need {
        let seen = self.to_see(path);
        if seen != Need::Nothing {
            return seen;
        }
        let is_right = |kind| matches!(kind, Kind::ReadOnly | Kind::ReadWrite | Kind::Bound { .. });
        match self.over(path, is_right) {
            Some(Mount { kind: Kind::ReadOnly | Kind::Bound { is_writable: false }, path: of, setting }) => {
                if of == path { Need::Impossible(setting.clone()) } else { Need::ReadWrite }
            }
            _ => Need::Nothing,
        }
    }

    /// Returns what the service needs in order to map a file of a directory that it sees as a program.
    pub fn to_execute(&self, path: &Path) -> Need {
        match self.over(path, |kind| matches!(kind, Kind::NotExecutable | Kind::Executable)) {
            Some(Mount { kind: Kind::NotExecutable, path: of, setting }) => {
                if of == path {
                    Need::Impossible(setting.clone())
                } else {
                    Need::Executable
                }
            }
            _ => Need::Nothing,
        }
    }
}

/// Returns a path without links, such as `/var/run`, as far as it exists on this machine.
fn resolved(path: &str) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(text: &str) -> Mounts {
        Mounts::of(&Unit::of("a", &format!("[Service]\n{text}\n")))
    }

    fn to_write(text: &str, path: &str) -> Need {
        mounts(text).to_write(Path::new(path))
    }

    fn impossible(setting: &str) -> Need {
        Need::Impossible(setting.to_owned())
    }

    #[test]
    fn a_rack_on_a_read_only_path_needs_the_right_to_write() {
        for (text, path, need) in [
            ("", "/srv/rack", Need::Nothing),
            ("ProtectSystem=strict", "/srv/rack", Need::ReadWrite),
            ("ProtectSystem=strict", "/dev/shm/rack", Need::Nothing),
            ("ProtectSystem=strict\nReadWritePaths=-/srv", "/srv/rack", Need::Nothing),
            ("ProtectSystem=strict\nReadWriteDirectories=/srv\nReadWritePaths=", "/srv/rack", Need::ReadWrite),
            ("ProtectSystem=full", "/srv/rack", Need::Nothing),
            ("ProtectSystem=full", "/etc/rack", Need::ReadWrite),
            ("ProtectSystem=yes", "/etc/rack", Need::Nothing),
            ("ProtectSystem=true", "/usr/rack", Need::ReadWrite),
            ("ProtectSystem=no", "/usr/rack", Need::Nothing),
            ("DynamicUser=yes", "/srv/rack", Need::ReadWrite),
            ("ReadOnlyPaths=/srv", "/srv/rack", Need::ReadWrite),
            ("ReadOnlyPaths=/srv/rack", "/srv/rack", impossible("ReadOnlyPaths=/srv/rack")),
            ("ReadOnlyPaths=/srv/rac", "/srv/rack", Need::Nothing),
            ("BindReadOnlyPaths=/srv/rack", "/srv/rack", impossible("BindReadOnlyPaths=/srv/rack")),
            ("ProtectSystem=strict\nBindPaths=/srv/rack", "/srv/rack", Need::Nothing),
        ] {
            assert_eq!(to_write(text, path), need, "{text:?}");
        }
    }

    #[test]
    fn a_hidden_rack_needs_a_bind_mount_and_an_inaccessible_one_cannot_be_shown() {
        for (text, path, need) in [
            ("PrivateTmp=true", "/tmp/rack", Need::Bind),
            ("PrivateTmp=true", "/var/tmp/rack", Need::Bind),
            ("PrivateTmp=true", "/srv/rack", Need::Nothing),
            ("PrivateTmp=true\nBindPaths=/tmp/rack", "/tmp/rack", Need::Nothing),
            ("TemporaryFileSystem=/srv:ro,mode=755", "/srv/rack", Need::Bind),
            ("TemporaryFileSystem=/srv\nBindPaths=/opt:/srv/rack", "/srv/rack", Need::Bind),
            ("TemporaryFileSystem=/srv\nReadWritePaths=/srv/rack", "/srv/rack", Need::Bind),
            ("RootDirectory=/chroot", "/srv/rack", Need::Bind),
            ("RootDirectory=/chroot\nBindPaths=/srv", "/srv/rack", Need::Nothing),
            ("RootDirectory=/", "/srv/rack", Need::Nothing),
            ("RootImage=/image.raw", "/srv/rack", Need::Bind),
            ("ProtectHome=tmpfs", "/home/rack", Need::Bind),
            ("ProtectHome=read-only", "/home/rack", Need::ReadWrite),
            ("ProtectHome=true", "/home/rack", impossible("ProtectHome=true")),
            ("ProtectHome=true", "/srv/rack", Need::Nothing),
            ("InaccessiblePaths=-/srv\nBindPaths=/srv/rack", "/srv/rack", impossible("InaccessiblePaths=-/srv")),
        ] {
            assert_eq!(to_write(text, path), need, "{text:?}");
        }
    }

    #[test]
    fn a_library_on_a_path_without_programs_needs_the_right_to_be_executed() {
        let redis = mounts("NoExecPaths=/\nExecPaths=/usr/bin/redis-server /usr/lib /lib");
        assert_eq!(redis.to_execute(Path::new("/usr/lib/crosslane")), Need::Nothing);
        assert_eq!(redis.to_execute(Path::new("/opt/crosslane")), Need::Executable);
        assert_eq!(mounts("NoExecPaths=/opt").to_execute(Path::new("/opt")), impossible("NoExecPaths=/opt"));
        assert_eq!(mounts("").to_execute(Path::new("/opt")), Need::Nothing);
    }
}
