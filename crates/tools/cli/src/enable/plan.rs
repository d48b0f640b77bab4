//! What a drop-in must contain so that a service runs with lanes, and what no drop-in of ours can change.

use std::path::{Path, PathBuf};

use socket::rack::rules::Rules;
use socket::rack::shared::user_key_file;

use super::filters;
use super::paths::{Mounts, Need};
use super::unit::{Unit, UnitFiles};
use super::unit_file::{self, is_on, quoted, without_specifiers};
use crate::library::LoaderName;
use crate::program;

/// Where systemd looks for a program without a path.
const PROGRAM_FOLDERS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The program that starts a PostgreSQL cluster of Debian.
const PG_CTLCLUSTER: &str = "pg_ctlcluster";

/// What the service is to be given.
pub struct Wanted<'a> {
    pub rack: &'a Path,
    pub rules: &'a Rules,
    pub library: &'a LoaderName,
    pub requires_lane: bool,
    /// Where the service's files are.
    pub files: &'a UnitFiles,
    /// Returns the number of a user, given by name or number.
    pub number_of: fn(&str) -> Option<u32>,
}

/// The contents of a drop-in, and what to tell about the service.
#[derive(Debug, Default)]
pub struct Plan {
    /// The values of variables: those of `Environment=`.
    pub variables: Vec<(&'static str, String)>,
    /// Settings for the sandbox.
    pub sandbox: Vec<String>,
    /// What stands in the way, with the remedy.
    pub obstacles: Vec<String>,
    /// What is good to know.
    pub notes: Vec<String>,
}

impl Plan {
    pub fn new(unit: &Unit, wanted: &Wanted<'_>) -> Self {
        let mut plan = Self::default();
        plan.set_variables(unit, wanted);
        plan.open_paths(unit, wanted);
        plan.open_filters(unit);
        plan.check_environment(unit, wanted);
        plan.check_limits(unit);
        plan.check_programs(unit, wanted);
        plan.check_user(unit, wanted);
        plan
    }

    /// Returns the lines of the drop-in.
    pub fn lines(&self) -> Vec<String> {
        let assignment = |(name, value): &(&str, String)| format!("Environment={}", quoted(&format!("{name}={value}")));
        self.variables.iter().map(assignment).chain(self.sandbox.iter().cloned()).collect()
    }

    /// Returns what takes back the drop-in that `unit` has been loaded with: a file that is read after it.
    pub fn overridden(&self, unit: &Unit, wanted: &Wanted<'_>) -> Option<String> {
        let is_lost = |(name, value): &&(&str, String)| unit.variable(name).as_ref() != Some(value);
        let (shown, file) = if let Some((name, _)) = self.variables.iter().find(is_lost) {
            let names_it = |value: &str| value.is_empty() || value.contains(&format!("{name}="));
            (format!("Environment={name}"), unit.file_of_last("Environment", names_it))
        } else {
            let line = Self::new(unit, wanted).sandbox.into_iter().next()?;
            let takes_back = |value: &str| value.is_empty() || value == "none" || value.starts_with('~');
            let file = line.split_once('=').and_then(|(key, _)| unit.file_of_last(key, takes_back));
            (line, file)
        };
        let file = file.map_or_else(|| "another file".to_owned(), |file| format!("'{}'", file.display()));
        Some(format!("{shown} would have no effect, because {file} is read later; change the setting there"))
    }

    fn set_variables(&mut self, unit: &Unit, wanted: &Wanted<'_>) {
        let library = without_specifiers(&wanted.library.name);
        let before = unit.variable("LD_PRELOAD").unwrap_or_default();
        let names: Vec<&str> = before.split([':', ' ', '\t']).filter(|name| !name.is_empty()).collect();
        let is_copy = |name: &&&str| name.ends_with("/libcrosslane.so") && **name != library;
        if let Some(copy) = names.iter().find(is_copy) {
            let remedy = "remove it there, or give it with --library";
            self.obstacles.push(format!("Environment=LD_PRELOAD names another copy of the library, {copy}; {remedy}"));
        }
        let preload = match () {
            () if names.contains(&library.as_str()) => before,
            () if names.is_empty() => library,
            () => format!("{before}:{library}"),
        };
        self.variables.push(("LD_PRELOAD", preload));
        self.variables.push(("CROSSLANE_RACK", without_specifiers(&wanted.rack.to_string_lossy())));
        if wanted.requires_lane {
            self.variables.push(("CROSSLANE_REQUIRE_LANE", "1".to_owned()));
        }
    }

    fn open_paths(&mut self, unit: &Unit, wanted: &Wanted<'_>) {
        let mounts = Mounts::of(unit);
        let Wanted { rack, library: LoaderName { folder, .. }, .. } = wanted;
        let (in_rack, in_library) =
            (format!("rack '{}'", rack.display()), format!("library in '{}'", folder.display()));
        for (what, path, key, need) in [
            (&in_rack, *rack, "BindPaths", mounts.to_write(rack)),
            (&in_library, folder.as_path(), "BindReadOnlyPaths", mounts.to_see(folder)),
            (&in_library, folder.as_path(), "", mounts.to_execute(folder)),
        ] {
            let key = match need {
                Need::Nothing => continue,
                Need::Bind => key,
                Need::ReadWrite => "ReadWritePaths",
                Need::Executable => "ExecPaths",
                Need::Impossible(setting) => {
                    let remedy = "change that setting, or move what it keeps away";
                    self.obstacles.push(format!("{setting} keeps the service from the {what}; {remedy}"));
                    continue;
                }
            };
            self.sandbox.push(format!("{key}={}", without_specifiers(&path.to_string_lossy())));
        }
    }

    fn open_filters(&mut self, unit: &Unit) {
        let families = filters::families(unit);
        // An assignment to a list of what is denied takes away from it.
        let families = [families.unlisted, families.denied].concat();
        if !families.is_empty() {
            self.sandbox.push(format!("RestrictAddressFamilies={}", families.join(" ")));
        }
        let calls = filters::calls(unit);
        if !calls.denied.is_empty() {
            let what = "denies system calls that lanes need";
            let denied = calls.denied.join(", ");
            self.obstacles.push(format!("SystemCallFilter=~ {what}: {denied}; remove them from that list"));
        }
        if !calls.unlisted.is_empty() {
            self.sandbox.push(format!("SystemCallFilter={}", calls.unlisted.join(" ")));
        }
    }

    /// Checks what takes variables away after `Environment=` has set them.
    fn check_environment(&mut self, unit: &Unit, wanted: &Wanted<'_>) {
        let names = ["LD_PRELOAD", "CROSSLANE_RACK", "CROSSLANE_OFF"];
        if unit.variable("CROSSLANE_OFF").is_some_and(|value| !value.is_empty() && value != "0") {
            self.obstacles.push("Environment=CROSSLANE_OFF=1 switches lanes off; remove it".to_owned());
        }
        for word in unit.words(&["UnsetEnvironment"]) {
            if names[..2].contains(&word.split('=').next().unwrap_or_default()) {
                self.obstacles.push(format!("UnsetEnvironment={word} takes the variable away; remove it"));
            }
        }
        for file in unit.words(&["EnvironmentFile"]) {
            let path = file.trim_start_matches('-');
            let text = std::fs::read_to_string(wanted.files.path(Path::new(path))).unwrap_or_default();
            let keys = text.lines().filter_map(|line| line.trim().split_once('=')).map(|(key, _)| key.trim());
            for key in keys.filter(|key| names.contains(key)) {
                let what = format!("EnvironmentFile={path} sets {key}, and replaces Environment={key}");
                self.obstacles.push(format!("{what}; remove it there"));
            }
        }
    }

    fn check_limits(&mut self, unit: &Unit) {
        if let Some(limit) = unit.last("LimitAS").filter(|limit| limit.split(':').any(|part| part != "infinity")) {
            let why = "lanes reserve addresses; set MemoryMax= in its place";
            self.obstacles.push(format!("LimitAS={limit} leaves connections on kernel TCP: {why}"));
        }
        let keys = ["IPAddressDeny", "IPAddressAllow"];
        if let Some(key) = keys.into_iter().find(|key| !unit.values(&[key]).is_empty()) {
            let remedy = "set Environment=CROSSLANE_FILTERS=honour if it must";
            self.notes.push(format!("{key}= does not apply to lanes; {remedy}"));
        }
        if unit.last("Type") == Some("oneshot") {
            let remedy = "enable the service that holds the connections";
            self.notes.push(format!("Type=oneshot: this service only starts others or ends at once; {remedy}"));
        }
    }

    fn check_programs(&mut self, unit: &Unit, wanted: &Wanted<'_>) {
        for value in unit.values(&["ExecStart"]) {
            let words = unit_file::words(value);
            let Some(word) = words.first().map(|word| word.trim_start_matches(['@', '-', ':', '+', '!', '|'])) else {
                continue;
            };
            let Some(path) = find_program(word, unit, wanted) else { continue };
            if path.file_name().is_some_and(|name| name == PG_CTLCLUSTER) {
                let (rack, library) = (wanted.rack.display(), &wanted.library.name);
                let what = "gives PostgreSQL only the variables of its file 'environment', not those of this unit";
                let lines = format!("LD_PRELOAD = '{library}' and CROSSLANE_RACK = '{rack}'");
                let instance = unit.name.short().split_once('@').map_or("VERSION-CLUSTER", |(_, instance)| instance);
                let cluster = instance.replacen('-', "/", 1);
                let remedy = format!("write {lines} to /etc/postgresql/{cluster}/environment");
                self.obstacles.push(format!("ExecStart={word} {what}; {remedy}"));
            } else if let Some(obstacle) = program::obstacle(&path, Some(PROGRAM_FOLDERS.as_ref())) {
                self.obstacles.push(format!("ExecStart={word}: {obstacle}"));
            }
        }
    }

    fn check_user(&mut self, unit: &Unit, wanted: &Wanted<'_>) {
        if unit.is_on("DynamicUser") {
            let why = "the service has another user at each start, and rules name users by number";
            self.obstacles
                .push(format!("DynamicUser=yes: {why}; set DynamicUser=no, and User= to a user of the system"));
            return;
        }
        let user = unit.last("User").unwrap_or("root");
        if user.contains('%') {
            let what = "is known only once the service runs; compare it with crosslane rack-dir show";
            return self.notes.push(format!("User={user} {what}"));
        }
        let Some(uid) = (wanted.number_of)(user) else {
            return self
                .notes
                .push(format!("User={user}: there is no such user on this machine; useradd --system {user}"));
        };
        let named = wanted.rules.all().iter().filter(|rule| rule.from == uid || rule.to == uid);
        let others = named.clone().flat_map(|rule| [rule.from, rule.to]).filter(|other| ![0, uid].contains(other));
        // The kernel does not tell the service who other users are: their programs prove it by a key.
        let directory = wanted.rack.join(uid.to_string());
        let mut without_key = others.filter(|other| !directory.join(user_key_file(*other)).is_file());
        let hides_users = unit.last("PrivateUsers").is_some_and(|value| is_on(value) && !SHOWS_USERS.contains(&value));
        if hides_users && let Some(other) = without_key.next() {
            let shown = wanted.rack.display();
            let what = format!("the rule for user {other} needs a key in {shown}/{uid}, which is missing");
            let remedy = format!("crosslane rack-dir allow {shown} --from USER --to USER, as in the rule, makes it");
            self.obstacles.push(format!("PrivateUsers=yes: {what}; {remedy}"));
        }
        if named.count() == 0 {
            let shown = wanted.rack.display();
            let start = match unit.last("User") {
                Some(_) => format!("no rule of {shown} names user {user}"),
                None => {
                    format!("no rule of {shown} names root, as which the service starts; name the user it changes to")
                }
            };
            let user = if unit.last("User").is_some() { user } else { "USER" };
            let allow = format!("crosslane rack-dir allow {shown}");
            self.notes.push(format!("{start}: {allow} --from CLIENT --to {user}, or --from {user} --to SERVER"));
        }
    }
}

/// Values of `PrivateUsers=` with which users keep their numbers (systemd 257).
const SHOWS_USERS: [&str; 2] = ["identity", "full"];

/// Returns the file of a program in the service's root directory; `None` if that is an image, or the name has a
/// specifier or a variable.
fn find_program(word: &str, unit: &Unit, wanted: &Wanted<'_>) -> Option<PathBuf> {
    if word.contains(['%', '$']) || unit.last("RootImage").is_some() {
        return None;
    }
    let root = Path::new(unit.last("RootDirectory").unwrap_or("/").trim_start_matches('-'));
    let path = |absolute: &Path| wanted.files.path(&root.join(absolute.strip_prefix("/").unwrap_or(absolute)));
    if word.starts_with('/') {
        return Some(path(Path::new(word)));
    }
    PROGRAM_FOLDERS.split(':').map(|folder| path(&Path::new(folder).join(word))).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RACK: &str = "/srv/crosslane";
    const ENVIRONMENT: [&str; 2] =
        ["Environment=LD_PRELOAD=/usr/lib/crosslane/$LIB/libcrosslane.so", "Environment=CROSSLANE_RACK=/srv/crosslane"];
    /// What Debian's redis-server.service has of settings that concern lanes.
    const REDIS: &str = "\
Type=notify
ExecStart=/usr/bin/redis-server /etc/redis/redis.conf --supervised systemd --daemonize no
User=redis
UMask=007
PrivateTmp=true
LimitNOFILE=65535
PrivateDevices=true
ProtectHome=true
ProtectSystem=strict
ReadWritePaths=-/var/lib/redis
CapabilityBoundingSet=
MemoryDenyWriteExecute=true
NoNewPrivileges=true
PrivateUsers=true
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~ @privileged @resources
ReadWriteDirectories=-/etc/redis
NoExecPaths=/
ExecPaths=/usr/bin/redis-server /usr/lib /lib";
    /// The same of memcached.service and haproxy.service.
    const MEMCACHED: &str = "PrivateTmp=true\nProtectSystem=full\nRestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX";
    const HAPROXY: &str = "BindReadOnlyPaths=/dev/log:/var/lib/haproxy/dev/log\n\
        Environment=\"CONFIG=/etc/haproxy/haproxy.cfg\" \"EXTRAOPTS=-S /run/haproxy-master.sock\"";

    fn number_of(user: &str) -> Option<u32> {
        let known = [("root", 0), ("www-data", 33), ("redis", 104)];
        known.into_iter().find(|(name, _)| *name == user).map(|(_, uid)| uid)
    }

    struct Case {
        rules: Rules,
        library: LoaderName,
        root: tempfile::TempDir,
    }

    impl Case {
        fn new(rules: &str) -> Self {
            let name = "/usr/lib/crosslane/$LIB/libcrosslane.so".to_owned();
            let file = "/usr/lib/crosslane/lib/libcrosslane.so".into();
            let library = LoaderName { name, folder: "/usr/lib/crosslane".into(), file };
            Self { rules: Rules::parse(rules.as_bytes()).unwrap(), library, root: tempfile::tempdir().unwrap() }
        }

        fn plan(&self, settings: &str) -> Plan {
            self.with_rack(RACK, settings)
        }

        fn with_rack(&self, rack: &str, settings: &str) -> Plan {
            let files = UnitFiles::below(self.root.path());
            let (rules, library, rack) = (&self.rules, &self.library, Path::new(rack));
            let wanted = Wanted { rack, rules, library, requires_lane: false, files: &files, number_of };
            let plan = Plan::new(&Unit::of("a", &format!("[Service]\n{settings}\n")), &wanted);
            let after = format!("[Service]\n{settings}\n{}\n", plan.lines().join("\n"));
            let overridden = plan.overridden(&Unit::of("a", &after), &wanted);
            assert_eq!(overridden, None, "with its drop-in the service needs nothing else: {settings}");
            plan
        }
    }

    /// Asserts that there is one sentence that has all words.
    #[track_caller]
    fn assert_one(sentences: &[String], words: &[&str]) {
        assert_eq!(sentences.len(), 1, "{sentences:?}");
        assert!(!sentences[0].contains('\n') && sentences[0].len() < 400, "{sentences:?}");
        for word in words {
            assert!(sentences[0].contains(word), "{word:?} in {sentences:?}");
        }
    }

    #[test]
    fn services_of_debian_get_what_their_sandbox_lacks() {
        let case = Case::new("allow from 33 to 104");
        let redis = case.plan(REDIS);
        let sandbox = ["ReadWritePaths=/srv/crosslane", "RestrictAddressFamilies=AF_NETLINK"];
        assert_eq!(redis.lines(), [&ENVIRONMENT[..], &sandbox].concat());
        let words = ["PrivateUsers=yes", "user 33 needs a key in /srv/crosslane/104", "crosslane rack-dir allow"];
        assert_one(&redis.obstacles, &words);
        assert_eq!(redis.notes, [""; 0]);
        let memcached = case.plan(MEMCACHED);
        assert_eq!(memcached.lines(), [&ENVIRONMENT[..], &sandbox[1..]].concat());
        let haproxy = case.plan(HAPROXY);
        assert_eq!(haproxy.lines(), ENVIRONMENT);
        assert_one(&haproxy.notes, &["names root", "crosslane rack-dir allow /srv/crosslane --from CLIENT --to USER"]);
        assert_eq!([memcached.obstacles, haproxy.obstacles].concat(), [""; 0]);
    }

    #[test]
    fn a_library_named_before_stays_and_a_second_copy_is_refused() {
        let case = Case::new("");
        let preload = |value: &str| case.plan(&format!("Environment=LD_PRELOAD={value}"));
        let own = &case.library.name;
        for (before, after) in [
            ("/usr/lib/libjemalloc.so.2", format!("LD_PRELOAD=/usr/lib/libjemalloc.so.2:{own}")),
            ("/a%%b.so", format!("LD_PRELOAD=/a%%b.so:{own}")),
            (own, format!("LD_PRELOAD={own}")),
            ("", format!("LD_PRELOAD={own}")),
        ] {
            let plan = preload(before);
            assert_eq!(plan.lines()[0], format!("Environment={after}"));
            assert_eq!(plan.obstacles, [""; 0]);
        }
        let both = case.plan("Environment=\"LD_PRELOAD=/a.so /b.so\"");
        assert_eq!(both.lines()[0], format!("Environment=\"LD_PRELOAD=/a.so /b.so:{own}\""));
        assert_one(&preload("/opt/libcrosslane.so").obstacles, &["/opt/libcrosslane.so", "--library"]);
        assert_eq!(case.with_rack("/srv/50%", "").lines()[1], "Environment=CROSSLANE_RACK=/srv/50%%");
    }

    #[test]
    fn hidden_folders_are_bound_and_inaccessible_ones_stand_in_the_way() {
        let case = Case::new("");
        let sandbox = |settings: &str| case.plan(settings).sandbox;
        let library = "BindReadOnlyPaths=/usr/lib/crosslane";
        assert_eq!(sandbox("RootDirectory=/chroot"), ["BindPaths=/srv/crosslane", library]);
        assert_eq!(sandbox("TemporaryFileSystem=/srv"), ["BindPaths=/srv/crosslane"]);
        assert_eq!(sandbox("NoExecPaths=/\nExecPaths=/usr/bin"), ["ExecPaths=/usr/lib/crosslane"]);
        let refused = case.plan("InaccessiblePaths=/srv");
        assert_one(&refused.obstacles, &["InaccessiblePaths=/srv", "rack '/srv/crosslane'"]);
        assert_eq!(refused.sandbox, [""; 0]);
    }

    #[test]
    fn filters_are_opened_only_by_what_is_missing() {
        let case = Case::new("");
        assert_eq!(case.plan("RestrictAddressFamilies=~AF_PACKET").sandbox, [""; 0]);
        let denied = case.plan("RestrictAddressFamilies=~AF_UNIX AF_PACKET");
        assert_eq!(denied.sandbox, ["RestrictAddressFamilies=AF_UNIX"]);
        let listed = "SystemCallFilter=@file-system @network-io @process madvise";
        assert_eq!(case.plan(listed).sandbox, ["SystemCallFilter=flock memfd_create mremap"]);
        let plan = case.plan("SystemCallFilter=~memfd_create @mount");
        assert_one(&plan.obstacles, &["SystemCallFilter=~", "memfd_create", "remove"]);
        assert_eq!(plan.sandbox, [""; 0]);
    }

    #[test]
    fn limits_and_variables_that_exclude_lanes_stand_in_the_way() {
        let case = Case::new("");
        std::fs::write(case.root.path().join("default"), "# A=b\nCROSSLANE_RACK = /other\n").unwrap();
        for (settings, words) in [
            ("LimitAS=4G", &["LimitAS=4G", "MemoryMax="][..]),
            ("LimitAS=4G:infinity", &["LimitAS=4G:infinity"]),
            ("Environment=CROSSLANE_OFF=1", &["CROSSLANE_OFF"]),
            ("UnsetEnvironment=LD_PRELOAD=x A", &["UnsetEnvironment=LD_PRELOAD=x"]),
            ("EnvironmentFile=-/default", &["EnvironmentFile=/default", "CROSSLANE_RACK"]),
            ("DynamicUser=yes", &["DynamicUser=yes", "another user at each start", "DynamicUser=no"]),
        ] {
            assert_one(&case.plan(settings).obstacles, words);
        }
        let fine = "LimitAS=infinity\nEnvironmentFile=-/none\nDynamicUser=no\nNoNewPrivileges=yes\n\
                    MemoryDenyWriteExecute=yes\nProtectProc=invisible\nRestrictNamespaces=yes\nLockPersonality=yes";
        let plan = case.plan(fine);
        assert_eq!(plan.obstacles, [""; 0]);
        assert_eq!(plan.lines(), ENVIRONMENT);
    }

    #[test]
    fn the_user_of_the_service_is_compared_with_the_rules() {
        let case = Case::new("allow from 33 to 104\nallow from 0 to 104\n");
        let notes = |settings: &str| case.plan(settings).notes;
        assert_eq!(notes("User=redis"), [""; 0]);
        assert_eq!(notes(""), [""; 0], "root is named");
        assert_one(&notes("User=nobody-here"), &["no such user", "useradd --system nobody-here"]);
        assert_one(&notes("User=%i"), &["User=%i", "crosslane rack-dir show"]);
        let unnamed = Case::new("allow from 33 to 33\nallow from 0 to 104").plan("User=redis\nPrivateUsers=yes");
        assert_eq!(unnamed.obstacles, [""; 0], "root and the user itself have numbers");
        assert_eq!(case.plan("User=redis\nPrivateUsers=identity").obstacles, [""; 0]);
        assert_one(&notes("Type=oneshot"), &["Type=oneshot"]);
        assert_one(&notes("IPAddressDeny=any"), &["IPAddressDeny=", "CROSSLANE_FILTERS=honour"]);
    }

    #[test]
    fn a_program_that_loads_no_library_stands_in_the_way() {
        let case = Case::new("");
        let folder = case.root.path().join("usr/bin");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("damaged"), "\u{7f}ELF").unwrap();
        std::fs::write(folder.join("script"), "#!/bin/sh\n").unwrap();
        std::fs::write(folder.join(PG_CTLCLUSTER), "#!/usr/bin/perl\n").unwrap();
        let obstacles = |settings: &str| case.plan(settings).obstacles;
        for prefix in ["", "-", "@", "+!!", "|"] {
            assert_one(&obstacles(&format!("ExecStart={prefix}/usr/bin/damaged -x")), &["/usr/bin/damaged is damaged"]);
        }
        assert_one(&obstacles("ExecStart=damaged"), &["ExecStart=damaged"]);
        for fine in ["/usr/bin/script", "/usr/bin/none", "/usr/bin/%i", "$PROGRAM", "/usr/bin/damaged\nExecStart="] {
            assert_eq!(obstacles(&format!("ExecStart={fine}")), [""; 0], "{fine}");
        }
        let postgres = "ExecStart=-/usr/bin/pg_ctlcluster --skip-systemctl-redirect %i start";
        assert_one(&obstacles(postgres), &["pg_ctlcluster", "/etc/postgresql/VERSION/CLUSTER/environment"]);
    }

    #[test]
    fn a_file_that_is_read_later_and_takes_back_a_setting_is_named() {
        let case = Case::new("");
        let files = UnitFiles::below(case.root.path());
        let (rules, library, rack) = (&case.rules, &case.library, Path::new(RACK));
        let wanted = Wanted { rack, rules, library, requires_lane: true, files: &files, number_of };
        let strict = "[Service]\nProtectSystem=strict\n";
        let plan = Plan::new(&Unit::of("a", strict), &wanted);
        assert_eq!(plan.lines()[2..], ["Environment=CROSSLANE_REQUIRE_LANE=1", "ReadWritePaths=/srv/crosslane"]);
        for (later, shown) in [
            ("Environment=LD_PRELOAD=/x.so", "Environment=LD_PRELOAD"),
            ("Environment=", "Environment=LD_PRELOAD"),
            ("ReadWritePaths=", "ReadWritePaths=/srv/crosslane"),
        ] {
            let unit = Unit::of("a", &format!("{strict}{}\n{later}\n", plan.lines().join("\n")));
            let why = plan.overridden(&unit, &wanted).unwrap();
            assert!(why.starts_with(shown) && why.contains("'/usr/lib/systemd/system/a.service'"), "{why}");
        }
    }
}
