//! Tests of `crosslane rack-dir`, and of the other commands with a rack directory that several users share.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

mod command;
mod library;

use command::{CROSSLANE, assert_fails, can_make_shared_racks, crosslane, error_line, stdout};

/// Users and a group without names.
const CLIENT: u32 = 3_999_001;
const SERVER: u32 = 3_999_002;
const OTHER: u32 = 3_999_003;
const GROUP: u32 = 3_999_100;

/// A folder for a shared rack, with copies of the command and of a library that does nothing.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    /// Returns a fixture; `None` without the rights to make shared racks.
    fn new() -> Option<Self> {
        if !can_make_shared_racks() {
            return None;
        }
        let fixture = Self { folder: tempfile::tempdir().unwrap() };
        set_mode(fixture.folder.path(), 0o755);
        Some(fixture)
    }

    /// Returns a fixture whose folder `rack` is a shared rack.
    fn with_rack() -> Option<Self> {
        let fixture = Self::new()?;
        let created = fixture.create(&GROUP.to_string());
        assert!(created.status.success() && stdout(&created).contains("rack-dir allow"), "{created:?}");
        Some(fixture)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn rack(&self) -> PathBuf {
        self.path("rack")
    }

    fn create(&self, group: &str) -> Output {
        crosslane(&["rack-dir", "create", self.rack().to_str().unwrap(), "--group", group])
    }

    fn allow(&self, from: &str, to: &str, more: &[&str]) -> Output {
        let rack = self.rack();
        let arguments = ["rack-dir", "allow", rack.to_str().unwrap(), "--from", from, "--to", to];
        crosslane(&[&arguments, more].concat())
    }

    fn allow_numbers(&self) {
        let allowed = self.allow(&CLIENT.to_string(), &SERVER.to_string(), &[]);
        assert!(allowed.status.success() && allowed.stderr.is_empty(), "{allowed:?}");
    }

    fn rules(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("rack/rules")).unwrap();
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    /// Returns a command line that runs as another user, who is a member of the group.
    fn run_as(&self, uid: u32, group: u32, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={uid}"), format!("--regid={group}"), "--clear-groups".to_owned()]);
        command.arg("--").arg(program).env_remove("CROSSLANE_REQUIRE_LANE").env_remove("LD_PRELOAD");
        command
    }

    /// Returns `crosslane` for another user.
    fn crosslane_as(&self, uid: u32, group: u32) -> Command {
        let own = self.path("crosslane");
        if !own.exists() {
            copy(Path::new(CROSSLANE), &own);
        }
        self.run_as(uid, group, &own)
    }

    fn library(&self) -> PathBuf {
        let library = self.path("libcrosslane.so");
        if !library.exists() {
            library::compile(&library, env!("CARGO_PKG_VERSION"));
        }
        library
    }

    /// Returns `crosslane run` in the shared rack, for another user.
    fn run(&self, uid: u32, group: u32, options: &[&str]) -> Output {
        let mut command = self.crosslane_as(uid, group);
        command.arg("run").arg("--library").arg(self.library()).args(options).args(["--", "echo", "ran"]);
        command.env("CROSSLANE_RACK", self.rack()).output().unwrap()
    }
}

/// Copies a file in another process, so that no concurrently started process has it open for writing (ETXTBSY).
fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns owner, group and mode.
fn rights(path: &Path) -> (u32, u32, u32) {
    let found = fs::symlink_metadata(path).unwrap();
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

/// Makes the directory of a user with another owner.
fn squat(path: &Path, owner: u32) {
    fs::create_dir(path).unwrap();
    chown(path, Some(owner), None).unwrap();
}

#[test]
fn a_shared_rack_is_made_and_set_right_again() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let (rack, rules) = (fixture.rack(), fixture.path("rack/rules"));
    assert_eq!(rights(&rack), (0, GROUP, 0o3770));
    assert_eq!(rights(&rules), (0, GROUP, 0o644));
    let header = fs::read_to_string(&rules).unwrap();
    assert!(header.lines().count() <= 4 && header.lines().all(|line| line.starts_with('#')), "{header}");
    fixture.allow_numbers();
    let (before, other) = (fs::read_to_string(&rules).unwrap(), GROUP + 1);
    for mode in [0o700, 0o777] {
        set_mode(&rack, mode);
        set_mode(&rules, 0o600);
        let again = fixture.create(&other.to_string());
        assert!(again.status.success() && again.stderr.is_empty(), "{again:?}");
        assert_eq!(rights(&rack), (0, other, 0o3770));
        assert_eq!(rights(&rules), (0, other, 0o644));
        assert_eq!(rights(&fixture.path("rack").join(CLIENT.to_string())), (CLIENT, other, 0o711));
        assert_eq!(fs::read_to_string(&rules).unwrap(), before, "the rules stay");
    }
}

#[test]
fn an_empty_directory_of_root_becomes_a_shared_rack_and_others_are_refused() {
    let Some(fixture) = Fixture::new() else { return };
    let group = GROUP.to_string();
    let refused = |words: &[&str]| assert_fails(&fixture.create(&group), 2, words);
    let rack = fixture.rack();
    fs::create_dir(&rack).unwrap();
    fs::write(rack.join("file"), "").unwrap();
    set_mode(&rack, 0o1777);
    refused(&["contains 'file' and is no shared rack", "name an empty one"]);
    fs::rename(rack.join("file"), rack.join("rules")).unwrap();
    fs::write(rack.join("rules"), "#!/usr/bin/make -f\nall:\n").unwrap();
    refused(&["'rules', line 2: 'all:': not a rule"]);
    fs::write(rack.join("rules"), "").unwrap();
    chown(rack.join("rules"), Some(OTHER), None).unwrap();
    refused(&["'rules' does not belong to root", "remove it"]);
    fs::remove_file(rack.join("rules")).unwrap();
    chown(&rack, Some(OTHER), None).unwrap();
    refused(&["belongs to user 3999003", "chown root it"]);
    chown(&rack, Some(0), None).unwrap();
    assert!(fixture.create(&group).status.success());
    assert_eq!(rights(&rack), (0, GROUP, 0o3770));
}

#[test]
fn a_link_or_a_file_is_not_made_a_shared_rack() {
    let Some(fixture) = Fixture::new() else { return };
    let (rack, target) = (fixture.rack(), fixture.path("target"));
    fs::create_dir(&target).unwrap();
    symlink(&target, &rack).unwrap();
    let before = rights(&target);
    assert_fails(&fixture.create(&GROUP.to_string()), 2, &["is a link", "name the directory itself"]);
    let with_slash = format!("{}/", rack.display());
    let create = |path: &str| crosslane(&["rack-dir", "create", path, "--group", &GROUP.to_string()]);
    assert_fails(&create(&with_slash), 2, &["is a link"]);
    assert_eq!(rights(&target), before);
    assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
    fs::remove_file(&rack).unwrap();
    fs::write(&rack, "").unwrap();
    assert_fails(&fixture.create(&GROUP.to_string()), 2, &["is not a directory", "name another"]);
    assert_fails(&create("/"), 2, &["'/' cannot be shared", "name a directory below it"]);
    assert_fails(&create(fixture.path(&"x".repeat(60)).to_str().unwrap()), 2, &["at most", "give a shorter one"]);
    assert_fails(&create(fixture.path("none/rack").to_str().unwrap()), 2, &["none'", "mkdir -p it"]);
}

#[test]
fn a_directory_that_others_can_replace_is_not_made_a_shared_rack() {
    let Some(fixture) = Fixture::new() else { return };
    let group = GROUP.to_string();
    for mode in [0o777, 0o770] {
        set_mode(fixture.folder.path(), mode);
        assert_fails(&fixture.create(&group), 2, &["is writable by others", "choose another place"]);
    }
    set_mode(fixture.folder.path(), 0o755);
    chown(fixture.folder.path(), Some(OTHER), None).unwrap();
    assert_fails(&fixture.create(&group), 2, &["belongs to user 3999003", "choose another place"]);
    chown(fixture.folder.path(), Some(0), None).unwrap();
    assert!(!fixture.rack().exists());
    set_mode(fixture.folder.path(), 0o1777);
    assert!(fixture.create(&group).status.success(), "the sticky bit keeps others from replacing it");
}

#[test]
fn an_unknown_group_or_user_is_wrong_use() {
    let Some(fixture) = Fixture::new() else { return };
    let unknown = fixture.create("no-such-group");
    assert_fails(&unknown, 2, &["group 'no-such-group'", "groupadd --system 'no-such-group'"]);
    assert!(!fixture.rack().exists());
    assert_fails(&fixture.allow("1", "2", &[]), 2, &["is no shared rack", "crosslane rack-dir create"]);
    assert!(fixture.create(&GROUP.to_string()).status.success());
    for (from, to, ports, words) in [
        ("no-such-user", "2", None, &["--from: user 'no-such-user'", "useradd"][..]),
        ("1", "no-such-user", None, &["--to: user 'no-such-user'", "useradd"]),
        ("65534", "2", None, &["--from: user 65534", "name another user"]),
        ("1", "nobody", None, &["--to: user 65534", "name another user"]),
        ("1", "4294967295", None, &["'4294967295'"]),
        ("1", "2", Some("0"), &["--ports: '0': not a port from 1 to 65535"]),
        ("1", "2", Some(""), &["--ports: an empty entry", "80,443"]),
        ("1", "2", Some("9-7"), &["--ports: '9-7'", "swap its ends"]),
        ("1", "2", Some("80\nallow from 5 to 6"), &["--ports"]),
    ] {
        let more: Vec<&str> = ports.into_iter().flat_map(|ports| ["--ports", ports]).collect();
        let failed = fixture.allow(from, to, &more);
        if ports.is_none_or(|ports| !ports.contains('\n')) {
            assert_fails(&failed, 2, words);
        }
        assert_eq!(failed.status.code(), Some(2), "{failed:?}");
    }
    assert!(fixture.rules().is_empty() && !fixture.path("rack/1").exists());
}

#[test]
fn only_root_makes_and_changes_shared_racks() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let rack = fixture.rack();
    for arguments in [
        &["create", rack.to_str().unwrap(), "--group", "0"][..],
        &["allow", rack.to_str().unwrap(), "--from", "1", "--to", "2"],
    ] {
        let output = fixture.crosslane_as(CLIENT, GROUP).arg("rack-dir").args(arguments).output().unwrap();
        assert_fails(&output, 2, &["user 3999001 is not root", "run it as root"]);
    }
}

#[test]
fn a_rule_is_added_once_with_the_directories_of_its_users() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let (from, to) = (CLIENT.to_string(), SERVER.to_string());
    for (ports, said) in [(&["--ports", " 80, 443 ,6000 - 6100"][..], "ports 80,443,6000-6100"), (&[], "all ports")] {
        let allowed = fixture.allow(&from, &to, ports);
        assert!(allowed.status.success() && allowed.stderr.is_empty(), "no account, no warning: {allowed:?}");
        assert!(stdout(&allowed).contains(said) && !stdout(&allowed).contains("already"), "{allowed:?}");
        assert!(stdout(&fixture.allow(&from, &to, ports)).contains("already"));
    }
    let rule = format!("allow from {from} to {to}");
    let names = format!("  # {from} to {to}");
    assert_eq!(fixture.rules(), [format!("{rule} ports 80,443,6000-6100{names}"), format!("{rule}{names}")]);
    assert_eq!(rights(&fixture.path("rack/rules")), (0, GROUP, 0o644));
    for user in [CLIENT, SERVER] {
        assert_eq!(rights(&fixture.rack().join(user.to_string())), (user, GROUP, 0o711));
    }
    let hidden = fs::read_dir(fixture.rack()).unwrap().flatten().filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with('.')
    });
    assert_eq!(hidden.count(), 0, "no draft is left");
}

#[test]
fn a_user_whom_a_rule_names_needs_not_be_in_the_group_where_there_are_access_control_lists() {
    let Some(fixture) = Fixture::with_rack() else { return };
    if nix::unistd::User::from_name("daemon").ok().flatten().is_none() {
        return;
    }
    let allowed = fixture.allow("root", "daemon", &[]);
    assert!(allowed.status.success(), "{allowed:?}");
    assert_eq!(fixture.rules(), ["allow from 0 to 1  # root to daemon"]);
    if !allowed.stderr.is_empty() {
        let line = error_line(&allowed);
        assert!(line.contains("user daemon") && line.contains("usermod -aG 3999100 daemon"), "{line}");
        return;
    }
    fixture.allow_numbers();
    for (uid, is_named) in [(CLIENT, true), (SERVER, true), (OTHER, false)] {
        let ran = fixture.run(uid, GROUP + 1, &["--require-lane"]);
        assert_eq!(ran.status.success(), is_named, "{ran:?}");
    }
    assert_eq!(rights(&fixture.rack()), (0, GROUP, 0o3770));
    // Who is not named any more loses it when the modes are set right.
    fs::write(fixture.path("rack/rules"), "").unwrap();
    assert!(fixture.create(&GROUP.to_string()).status.success());
    assert!(!fixture.run(CLIENT, GROUP + 1, &["--require-lane"]).status.success());
}

#[test]
fn invalid_rules_are_named_by_their_line_and_not_changed() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let text = "# rules\nallow from 1 to 2\nallow from redis to 2\ndeny\n";
    fs::write(fixture.path("rack/rules"), text).unwrap();
    let failed = fixture.allow("5", "6", &[]);
    assert_fails(&failed, 2, &["'rules', line 3: user 'redis': not a number", "id -u redis"]);
    assert_eq!(fs::read_to_string(fixture.path("rack/rules")).unwrap(), text);
    assert!(!fixture.path("rack/5").exists());
    let shown = crosslane(&["rack-dir", "show", fixture.rack().to_str().unwrap()]);
    assert_eq!(shown.status.code(), Some(1));
    for line in ["line 3: user 'redis'", "line 4: 'deny': not a rule"] {
        assert!(stdout(&shown).contains(line), "{shown:?}");
    }
    // Programs need all of the file: without one it is made again.
    fs::remove_file(fixture.path("rack/rules")).unwrap();
    fixture.allow_numbers();
    assert_eq!(fixture.rules(), ["allow from 3999001 to 3999002  # 3999001 to 3999002"]);
}

#[test]
fn concurrent_commands_lose_no_rule() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let start = |from: u32| {
        let rack = fixture.rack();
        let mut command = Command::new(CROSSLANE);
        command.args(["rack-dir", "allow"]).arg(rack).args(["--from", &from.to_string(), "--to", &SERVER.to_string()]);
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let users: Vec<u32> = (0..8).map(|index| CLIENT + 100 + index).collect();
    let commands: Vec<Child> = users.iter().map(|user| start(*user)).collect();
    for mut command in commands {
        assert!(command.wait().unwrap().success());
    }
    let mut rules = fixture.rules();
    rules.sort();
    let expected = users.iter().map(|user| format!("allow from {user} to {SERVER}  # {user} to {SERVER}"));
    assert_eq!(rules, expected.collect::<Vec<_>>());
}

#[test]
fn a_directory_that_another_user_has_made_first_is_named() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let squatted = fixture.rack().join(SERVER.to_string());
    squat(&squatted, OTHER);
    let failed = fixture.allow(&CLIENT.to_string(), &SERVER.to_string(), &[]);
    let remedy = format!("rm -r '{}'", squatted.display());
    assert_fails(&failed, 1, &["belongs to user 3999003, not to 3999002", &remedy]);
    assert!(fixture.rules().is_empty());
    let shown = crosslane(&["rack-dir", "show", fixture.rack().to_str().unwrap()]);
    assert_eq!(shown.status.code(), Some(1));
    assert!(stdout(&shown).contains("its directory '3999002' is not a directory of user 3999002 alone"), "{shown:?}");
    fs::remove_dir(&squatted).unwrap();
    symlink("/etc", &squatted).unwrap();
    let failed = fixture.allow(&CLIENT.to_string(), &SERVER.to_string(), &[]);
    assert_fails(&failed, 1, &["is not a directory of user 3999002", "repeat this"]);
    assert_eq!(rights(Path::new("/etc")).0, 0);
    fs::remove_file(&squatted).unwrap();
    fixture.allow_numbers();
    set_mode(&squatted, 0o777);
    fixture.allow_numbers();
    assert_eq!(rights(&squatted), (SERVER, GROUP, 0o711), "its own directory is set right");
}

#[test]
fn show_reports_rules_and_problems_also_as_json() {
    let Some(fixture) = Fixture::with_rack() else { return };
    fixture.allow("0", &SERVER.to_string(), &["--ports", "80-90,7"]);
    let rack = fixture.rack();
    let show = || {
        let output = crosslane(&["rack-dir", "show", "--json", rack.to_str().unwrap()]);
        (output.status.code(), valid(&stdout(&output)))
    };
    let (code, json) = show();
    assert_eq!((code, &json["usable"], &json["lanes_off"]), (Some(0), &true.into(), &false.into()));
    assert_eq!(json["group"], serde_json::json!({"gid": GROUP, "name": null}));
    let server = serde_json::json!({"uid": SERVER, "user": SERVER.to_string()});
    assert_eq!((&json["rules"][0]["to"], &json["rules"][0]["ports"]), (&server, &"80-90,7".into()));
    assert_eq!(json["rules"][0]["from"]["user"], "root");
    assert_eq!(json["users"][1], serde_json::json!({"uid": SERVER, "user": SERVER.to_string(), "usable": true}));
    let text = stdout(&crosslane(&["rack-dir", "show", rack.to_str().unwrap()]));
    for words in ["of group 3999100", "root (0)", "80-90,7", "Users with a directory: root (0), 3999002"] {
        assert!(text.contains(words), "{words:?} in\n{text}");
    }
    set_mode(&rack, 0o770);
    let (code, json) = show();
    assert_eq!((code, &json["problems"]), (Some(1), &serde_json::json!(["its mode is 770; chmod 3770 it"])));
    let missing = crosslane(&["rack-dir", "show", fixture.path("none").to_str().unwrap()]);
    assert_fails(&missing, 2, &["none'", "crosslane rack-dir create"]);
    let private = crosslane(&["rack-dir", "show", fixture.folder.path().to_str().unwrap()]);
    assert!(stdout(&private).contains("it is not shared") && private.status.code() == Some(1), "{private:?}");
}

/// Parses JSON, and checks it against its schema.
#[track_caller]
fn valid(text: &str) -> serde_json::Value {
    let schema = serde_json::from_str(include_str!("../../../../docs/rack-dir.schema.json")).unwrap();
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    if let Err(error) = jsonschema::validator_for(&schema).unwrap().validate(&value) {
        panic!("{error} at {} in {text}", error.instance_path);
    }
    value
}

#[test]
fn a_shared_rack_is_described_as_a_device_for_containers() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let library = fixture.library();
    let (rack, to) = (fixture.rack(), fixture.path("cdi"));
    let device = |more: &[&str]| {
        let arguments = ["rack-dir", "device", rack.to_str().unwrap(), "--to", to.to_str().unwrap()];
        let library = ["--library", library.to_str().unwrap()];
        let library = if more.contains(&"--remove") { &[][..] } else { &library };
        crosslane(&[&arguments, library, more].concat())
    };
    let written = stdout(&device(&[]));
    assert!(written.contains("--device crosslane/rack=shared"), "{written}");
    assert_eq!(stdout(&device(&[])), written, "again");
    let file = to.join("crosslane-shared.json");
    assert_eq!(rights(&file).2, 0o644);
    let description: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(description["cdiVersion"], "0.3.0");
    assert_eq!(description["kind"], "crosslane/rack");
    let edits = &description["devices"][0]["containerEdits"];
    assert_eq!(edits["env"][1], format!("CROSSLANE_RACK={}", rack.display()));
    let preload = edits["env"][0].as_str().unwrap();
    assert!(preload.starts_with("LD_PRELOAD=/") && preload.ends_with(library.to_str().unwrap()), "{preload}");
    let mounts = edits["mounts"].as_array().unwrap();
    let paths: Vec<_> = mounts.iter().map(|mount| mount["hostPath"].as_str().unwrap()).collect();
    assert_eq!(paths, [rack.to_str().unwrap(), library.to_str().unwrap()], "nothing else of the library's folder");
    assert!(stdout(&device(&["--name", "second.1"])).contains("crosslane/rack=second.1"));
    assert!(stdout(&device(&["--remove"])).contains("Removed"));
    assert!(!file.exists() && stdout(&device(&["--remove"])).contains("nothing to do"));
    for name in ["", "a/b", "-a", "a b", "a.", "2nd"] {
        assert_fails(&device(&[&format!("--name={name}")]), 2, &["--name: "]);
    }
    let second = fixture.path("second");
    let created = crosslane(&["rack-dir", "create", second.to_str().unwrap(), "--group", &GROUP.to_string()]);
    assert!(created.status.success());
    let of_second =
        ["rack-dir", "device", second.to_str().unwrap(), "--to", to.to_str().unwrap(), "--name", "second.1"];
    assert_fails(&crosslane(&[&of_second[..], &["--remove"]].concat()), 2, &["is the device of rack", "--name"]);
    fs::write(&file, "{\"kind\": \"other/class\"}").unwrap();
    for more in [&[][..], &["--remove"]] {
        assert_fails(&device(more), 2, &["was not written by crosslane"]);
    }
    let other = fixture.path("other");
    fs::create_dir(&other).unwrap();
    let refused =
        crosslane(&["rack-dir", "device", other.to_str().unwrap(), "--to", to.to_str().unwrap(), "--name", "b"]);
    assert_fails(&refused, 2, &["is no shared rack; crosslane rack-dir create"]);
}

#[test]
fn members_run_programs_in_a_shared_rack() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let ran = fixture.run(CLIENT, GROUP, &["--require-lane"]);
    assert_eq!((ran.status.code(), stdout(&ran).as_str(), ran.stderr.as_slice()), (Some(0), "ran\n", &b""[..]));
    assert_eq!(rights(&fixture.rack().join(CLIENT.to_string())), (CLIENT, GROUP, 0o711));
}

#[test]
fn a_shared_rack_that_cannot_be_used_is_an_error_or_a_warning() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let (rack, rules) = (fixture.rack(), fixture.path("rack/rules"));
    let prefix = format!("crosslane: rack '{}': ", rack.display());
    let check = |group: u32, words: &str| {
        let strict = fixture.run(CLIENT, group, &["--require-lane"]);
        assert_fails(&strict, 2, &[&prefix, words]);
        let lenient = fixture.run(CLIENT, group, &[]);
        let line = error_line(&lenient);
        assert!(line.starts_with(&prefix) && line.contains(words) && line.contains("kernel TCP"), "{line}");
        assert_eq!((lenient.status.code(), stdout(&lenient).as_str()), (Some(0), "ran\n"));
    };
    for mode in [0o3777, 0o770, 0o2770] {
        set_mode(&rack, mode);
        check(GROUP, &format!("its mode is {mode:o}; chmod 3770 it"));
    }
    set_mode(&rack, 0o3770);
    check(GROUP + 1, "not a member of its group");
    fs::write(&rules, "allow\n").unwrap();
    check(GROUP, "'rules', line 1: 'allow': not a rule");
    fs::write(&rules, "").unwrap();
    chown(&rules, Some(OTHER), Some(GROUP)).unwrap();
    check(GROUP, "'rules' does not belong to root");
    chown(&rules, Some(0), Some(GROUP)).unwrap();
    squat(&rack.join(CLIENT.to_string()), OTHER);
    check(GROUP, "its directory '3999001' is not a directory of user 3999001 alone; remove it");
    chown(&rack, Some(OTHER), Some(GROUP)).unwrap();
    set_mode(&rack, 0o3770);
    check(GROUP, "it belongs to user 3999003; chown root it");
}

#[test]
fn only_root_switches_the_lanes_of_a_shared_rack() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let (rack, file) = (fixture.rack(), fixture.path("rack/lanes-off"));
    let lanes = |state: &str| crosslane(&["lanes", state, "--rack", rack.to_str().unwrap()]);
    let member = fixture.crosslane_as(CLIENT, GROUP).args(["lanes", "off", "--rack"]).arg(&rack).output().unwrap();
    assert_fails(&member, 2, &["only root switches its lanes", "run this as root"]);
    assert!(!file.exists());
    let target = fixture.path("target");
    fs::write(&target, "kept").unwrap();
    symlink(&target, &file).unwrap();
    let is_off = || {
        let shown = crosslane(&["rack-dir", "show", rack.to_str().unwrap()]);
        let doctor = crosslane(&["doctor", "--rack", rack.to_str().unwrap()]);
        let off = "lanes are switched off";
        assert_eq!(stdout(&shown).contains(off), stdout(&doctor).contains(off));
        stdout(&shown).contains(off)
    };
    chown_link(&file, OTHER);
    assert!(!is_off(), "a member's file does not count");
    assert!(lanes("off").status.success() && is_off());
    assert!(fs::symlink_metadata(&file).unwrap().is_file());
    assert_eq!(fs::read_to_string(&target).unwrap(), "kept", "a link is not followed");
    assert!(lanes("on").status.success() && !is_off() && !file.exists());
    assert!(lanes("on").status.success());
}

fn chown_link(path: &Path, owner: u32) {
    std::os::unix::fs::lchown(path, Some(owner), None).unwrap();
}

#[test]
fn doctor_checks_a_shared_rack() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let rack = fixture.rack();
    let doctor = || stdout(&crosslane(&["doctor", "--rack", rack.to_str().unwrap()]));
    assert!(doctor().contains(&format!("{}, shared by several users", rack.display())));
    set_mode(&rack, 0o3777);
    let text = doctor();
    assert!(text.contains("its mode is 3777 -> chmod 3770 it") && text.contains("MISSING"), "{text}");
}

/// Makes the folder of pages of a user, and a page in it.
fn publish(directory: &Path, uid: u32, program: &[u8]) -> &'static stats_page::StatsPage {
    for folder in ["v1", "v1/stat"] {
        fs::create_dir(directory.join(folder)).unwrap();
        set_mode(&directory.join(folder), 0o700);
        chown(directory.join(folder), Some(uid), None).unwrap();
    }
    let page = stats_page::StatsPage::create(&stats_page::PageConfig { rack: directory, node: None, program });
    assert!(page.is_published());
    page
}

#[test]
fn stat_shows_the_pages_below_the_directories_of_users() {
    let Some(fixture) = Fixture::with_rack() else { return };
    let rack = fixture.rack();
    assert!(fixture.allow("0", &SERVER.to_string(), &[]).status.success());
    let (own, other) = (rack.join("0"), rack.join(SERVER.to_string()));
    let pages = [publish(&own, 0, b"of-root"), publish(&other, SERVER, b"of-server")];
    let stat = |arguments: &[&str]| {
        let mut command = Command::new(CROSSLANE);
        let output = command.arg("stat").args(arguments).env("CROSSLANE_RACK", &rack).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        stdout(&output)
    };
    let json: serde_json::Value = serde_json::from_str(&stat(&["--json"])).unwrap();
    let names = |json: &serde_json::Value| -> Vec<String> {
        let processes = json["processes"].as_array().unwrap().iter();
        let mut names: Vec<String> =
            processes.filter_map(|process| process["program"].as_str().map(str::to_owned)).collect();
        names.retain(|name| name.starts_with("of-"));
        names.sort();
        names
    };
    assert_eq!(names(&json), ["of-root", "of-server"], "root sees the pages of all users");
    assert!(stat(&["--rack", rack.to_str().unwrap()]).contains("of-server"));
    let all: serde_json::Value = serde_json::from_str(&stat(&["--all", "--json"])).unwrap();
    assert_eq!(names(&all), ["of-root", "of-server"]);
    for (directory, uid) in [(&own, 0), (&other, SERVER)] {
        let mut racks = all["racks"].as_array().unwrap().iter();
        let found =
            racks.find(|found| found["directory"] == directory.to_str().unwrap()).unwrap_or_else(|| panic!("{all}"));
        assert_eq!(found["uid"], uid);
    }
    let mut of_server = fixture.crosslane_as(SERVER, GROUP);
    let seen = of_server.args(["stat", "--json"]).env("CROSSLANE_RACK", &rack).output().unwrap();
    let seen: serde_json::Value = serde_json::from_str(&stdout(&seen)).unwrap();
    assert_eq!(seen["unreadable"].as_array().map(Vec::len), Some(1), "its page belongs to root here: {seen}");
    let outside = fixture.crosslane_as(OTHER, GROUP + 1).args(["stat", "--rack"]).arg(&rack).output().unwrap();
    assert_fails(&outside, 2, &["not a member of its group", "add its user"]);
    pages.iter().for_each(|page| page.remove());
}

/// The reason for a connection that the rules do not allow.
const DENIED: &str = "no_rule";

const ENDPOINT: &str = r#"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int count, char **words) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (count > 1) {
        at.sin_port = htons(atoi(words[1]));
        if (connect(fd, (void *)&at, length)) return 1;
    } else if (bind(fd, (void *)&at, length) || listen(fd, 1) || getsockname(fd, (void *)&at, &length)) return 1;
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    if (count == 1) accept(fd, NULL, NULL);
    return getchar();
}
"#;

/// A program of another user with the library, which ends with its standard input.
struct Endpoint {
    process: Child,
    port: String,
}

impl Endpoint {
    fn start(fixture: &Fixture, uid: u32, arguments: &[&str]) -> Self {
        let mut command = fixture.run_as(uid, GROUP, &fixture.path("endpoint"));
        command.args(arguments).env("LD_PRELOAD", fixture.path("libcrosslane.so"));
        command.env("CROSSLANE_RACK", fixture.rack()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Self { process, port: port.trim().to_owned() }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn compile_endpoint(fixture: &Fixture) {
    let mut command = Command::new("cc");
    command.args(["-x", "c", "-", "-o"]).arg(fixture.path("endpoint")).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut compiler = command.spawn().expect("the tests need a C compiler");
    compiler.stdin.take().unwrap().write_all(ENDPOINT.as_bytes()).unwrap();
    let (mut said, done) = (String::new(), compiler.wait().unwrap());
    compiler.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(done.success(), "{said}");
    library::compile(&fixture.path("libcrosslane.so"), env!("CARGO_PKG_VERSION"));
}

#[test]
fn explain_finds_programs_of_several_users_in_one_rack_and_follows_its_rules() {
    let Some(fixture) = Fixture::with_rack() else { return };
    compile_endpoint(&fixture);
    let server = Endpoint::start(&fixture, SERVER, &[]);
    let client = Endpoint::start(&fixture, CLIENT, &[&server.port]);
    let reason = |process: &Child| {
        let output = crosslane(&["explain", "--json", "--pid", &process.id().to_string()]);
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(json["processes"][0]["rack"], fixture.rack().to_str().unwrap());
        let mut sockets = json["sockets"].as_array().unwrap().iter();
        sockets.find(|socket| socket["state"] == "connected").unwrap()["reason"].clone()
    };
    let reasons = || [reason(&client.process), reason(&server.process)];
    assert_eq!(reasons(), [DENIED, DENIED], "no rule allows it");
    assert!(fixture.allow(&SERVER.to_string(), &CLIENT.to_string(), &[]).status.success());
    assert_eq!(reasons(), [DENIED, DENIED], "the rule is for the other direction");
    let allow = |ports: &str| fixture.allow(&CLIENT.to_string(), &SERVER.to_string(), &["--ports", ports]);
    assert!(allow("1").status.success());
    assert_eq!(reasons(), [DENIED, DENIED], "the rule is for another port");
    assert!(allow(&server.port).status.success());
    assert_eq!(reasons(), ["not_busy", "not_busy"]);
    let mut command = Command::new(CROSSLANE);
    let all = command.args(["stat", "--all", "--json"]).env_remove("CROSSLANE_RACK").output().unwrap();
    let all: serde_json::Value = serde_json::from_str(&stdout(&all)).unwrap();
    let rack = fixture.rack().join(SERVER.to_string());
    let mut racks = all["racks"].as_array().unwrap().iter();
    let found = racks.find(|found| found["directory"] == rack.to_str().unwrap()).unwrap_or_else(|| panic!("{all}"));
    let programs = found["programs"].as_array().unwrap();
    assert_eq!((programs.len(), &programs[0]["pid"]), (1, &server.process.id().into()), "one rack for each user");
    assert_eq!(programs[0]["has_page"], false);
    set_mode(&fixture.rack(), 0o770);
    assert_eq!(reasons(), ["rack_unavailable", "rack_unavailable"]);
}
