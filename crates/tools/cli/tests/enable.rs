//! Tests of `crosslane enable` and `crosslane disable`, with the unit files of a root directory of their own.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

mod command;
mod library;

use command::{CROSSLANE, assert_fails, can_make_shared_racks, crosslane, error_line, stdout};

const UNITS: &str = "usr/lib/systemd/system";
const DROP_IN: &str = "etc/systemd/system/server.service.d/50-crosslane.conf";
/// A service without a sandbox.
const PLAIN: &str = "[Service]\nExecStart=/bin/sh -c true\n";

/// A root directory with unit files, a shared rack, and a library that does nothing.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    /// Returns a fixture; `None` without the rights to make a shared rack.
    fn new() -> Option<Self> {
        if !can_make_shared_racks() {
            return None;
        }
        // Not below /tmp, which PrivateTmp= hides.
        let folder = tempfile::Builder::new().prefix("enable-").tempdir_in("/run").unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let fixture = Self { folder };
        let created = crosslane(&["rack-dir", "create", &fixture.rack(), "--group", "3999100"]);
        assert!(created.status.success(), "{created:?}");
        let allowed = crosslane(&["rack-dir", "allow", &fixture.rack(), "--from", "0", "--to", "3999001"]);
        assert!(allowed.status.success(), "{allowed:?}");
        library::compile(&fixture.path("libcrosslane.so"), env!("CARGO_PKG_VERSION"));
        fixture.write(&format!("{UNITS}/server.service"), PLAIN);
        Some(fixture)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn rack(&self) -> String {
        self.path("rack").to_str().unwrap().to_owned()
    }

    /// Writes a file below the root directory.
    fn write(&self, name: &str, text: &str) {
        let path = self.path("root").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path("root").join(name)).ok()
    }

    /// Runs `crosslane enable` in the root directory with the library.
    fn enable(&self, service: &str, options: &[&str]) -> Output {
        let (root, library) = (self.path("root"), self.path("libcrosslane.so"));
        let mut command = Command::new(CROSSLANE);
        command.args(["enable", service, "--rack", &self.rack()]).arg("--root").arg(root).arg("--library").arg(library);
        command.args(options).output().unwrap()
    }

    fn disable(&self, service: &str) -> Output {
        crosslane(&["disable", service, "--root", self.path("root").to_str().unwrap()])
    }

    /// Returns the settings of the drop-in of a service that is enabled with a unit file.
    fn settings(&self, unit: &str) -> Vec<String> {
        self.write(&format!("{UNITS}/server.service"), unit);
        assert_succeeds(&self.enable("server", &[]));
        let text = self.read(DROP_IN).unwrap();
        text.lines().skip(2).map(str::to_owned).collect()
    }

    /// Returns what LD_PRELOAD and CROSSLANE_RACK are.
    fn environment(&self, before: &str) -> Vec<String> {
        let library = self.path("libcrosslane.so");
        let preload = format!("Environment=LD_PRELOAD={before}/usr/$LIB/../../../../../..{}", library.display());
        vec![preload, format!("Environment=CROSSLANE_RACK={}", self.rack())]
    }
}

#[track_caller]
fn assert_succeeds(output: &Output) {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_service_is_enabled_and_disabled_again() {
    let Some(fixture) = Fixture::new() else { return };
    for (service, heading) in [("server", "Wrote /etc/systemd/system/"), ("server.service", "is written already")] {
        let enabled = fixture.enable(service, &[]);
        assert_succeeds(&enabled);
        assert!(stdout(&enabled).contains(heading), "{enabled:?}");
        let text = fixture.read(DROP_IN).unwrap();
        let comment = "# Written by 'crosslane enable'; to remove it: crosslane disable server";
        let expected = [&[comment.to_owned(), "[Service]".to_owned()], &fixture.environment("")[..]].concat();
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert!(stdout(&enabled).contains(&text), "the file is shown");
    }
    let written = fs::metadata(fixture.path("root").join(DROP_IN)).unwrap();
    assert_eq!(written.permissions().mode() & 0o7777, 0o644);
    assert_succeeds(&fixture.enable("server", &["--require-lane"]));
    assert!(fixture.read(DROP_IN).unwrap().ends_with("\nEnvironment=CROSSLANE_REQUIRE_LANE=1\n"));
    for words in ["Removed /etc/systemd/system/server.service.d/50-crosslane.conf", "nothing to do"] {
        let disabled = fixture.disable("server");
        assert_succeeds(&disabled);
        assert!(stdout(&disabled).contains(words), "{disabled:?}");
    }
    assert!(!fixture.path("root/etc/systemd/system/server.service.d").exists(), "an empty folder goes too");
}

#[test]
fn a_check_writes_nothing_and_fails_if_something_stands_in_the_way() {
    let Some(fixture) = Fixture::new() else { return };
    let checked = fixture.enable("server", &["--check"]);
    assert_succeeds(&checked);
    assert!(stdout(&checked).starts_with("Would write /etc/systemd/system/server.service.d/"), "{checked:?}");
    assert!(stdout(&checked).contains(&fixture.environment("").join("\n")));
    fixture.write(&format!("{UNITS}/server.service"), "[Service]\nLimitAS=4G\nDynamicUser=yes\n");
    for options in [&["--check"][..], &[]] {
        let refused = fixture.enable("server", options);
        assert_eq!(refused.status.code(), Some(1));
        assert!(error_line(&refused).contains("service 'server': 2 obstacles"), "{refused:?}");
        for words in ["In the way: LimitAS=4G", "In the way: DynamicUser=yes"] {
            assert!(stdout(&refused).contains(words), "{words}: {refused:?}");
        }
    }
    assert!(!fixture.path("root/etc").exists());
}

#[test]
fn other_drop_ins_are_read_and_left_alone() {
    let Some(fixture) = Fixture::new() else { return };
    let other = "etc/systemd/system/server.service.d/40-malloc.conf";
    fixture.write(other, "[Service]\nEnvironment=LD_PRELOAD=/usr/lib/libjemalloc.so.2\n");
    for _ in 0..2 {
        assert_eq!(fixture.settings(PLAIN), fixture.environment("/usr/lib/libjemalloc.so.2:"));
    }
    assert_succeeds(&fixture.disable("server"));
    assert!(fixture.read(other).is_some(), "its folder stays");
    let later = "etc/systemd/system/server.service.d/override.conf";
    fixture.write(later, "[Service]\nEnvironment=CROSSLANE_RACK=/other\n");
    let refused = fixture.enable("server", &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stdout(&refused).contains(&format!("'/{later}' is read later")), "{refused:?}");
}

#[test]
fn a_file_of_somebody_else_is_neither_replaced_nor_removed() {
    let Some(fixture) = Fixture::new() else { return };
    let foreign = "# my own\n[Service]\nUser=redis\n";
    fixture.write(DROP_IN, foreign);
    let refused = fixture.enable("server", &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stdout(&refused).contains("was not written by crosslane enable; remove or rename it"), "{refused:?}");
    assert_fails(&fixture.disable("server"), 1, &["50-crosslane.conf' was not written by crosslane enable"]);
    assert_eq!(fixture.read(DROP_IN).unwrap(), foreign);
}

#[test]
fn only_what_the_sandbox_lacks_is_added() {
    let Some(fixture) = Fixture::new() else { return };
    let rack = fixture.rack();
    let sandbox = |settings: &str| fixture.settings(&format!("[Service]\n{settings}\n"))[2..].to_vec();
    assert_eq!(sandbox("ProtectSystem=full\nPrivateTmp=yes\nNoNewPrivileges=yes"), [""; 0]);
    assert_eq!(sandbox("ProtectSystem=strict"), [format!("ReadWritePaths={rack}")]);
    let families = "RestrictAddressFamilies=AF_INET";
    assert_eq!(sandbox(families), ["RestrictAddressFamilies=AF_UNIX AF_NETLINK"]);
    assert_eq!(sandbox(""), [""; 0], "no list, no restriction");
    let folder = fixture.folder.path().display().to_string();
    let hidden = format!("TemporaryFileSystem={folder}");
    let expected = [format!("BindPaths={rack}"), format!("BindReadOnlyPaths={folder}")];
    assert_eq!(sandbox(&hidden), expected);
}

#[test]
fn an_instance_of_a_template_has_a_folder_of_its_own() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.write(&format!("{UNITS}/server@.service"), "[Service]\nProtectSystem=strict\n");
    assert_succeeds(&fixture.enable("server@16-main", &[]));
    let text = fixture.read("etc/systemd/system/server@16-main.service.d/50-crosslane.conf").unwrap();
    assert!(text.ends_with(&format!("ReadWritePaths={}\n", fixture.rack())), "{text}");
    assert!(!fixture.path("root/etc/systemd/system/server@.service.d").exists());
    assert_succeeds(&fixture.disable("server@16-main.service"));
    assert!(fixture.read("etc/systemd/system/server@16-main.service.d/50-crosslane.conf").is_none());
}

#[test]
fn an_alias_is_enabled_by_the_name_of_its_service() {
    let Some(fixture) = Fixture::new() else { return };
    let folder = fixture.path("root/etc/systemd/system");
    fs::create_dir_all(&folder).unwrap();
    symlink("/lib/systemd/system/server.service", folder.join("alias.service")).unwrap();
    assert_succeeds(&fixture.enable("alias", &[]));
    assert!(fixture.read(DROP_IN).is_some());
    assert_succeeds(&fixture.disable("alias"));
    assert!(fixture.read(DROP_IN).is_none());
}

#[test]
fn a_service_that_is_gone_can_still_be_disabled() {
    let Some(fixture) = Fixture::new() else { return };
    assert_succeeds(&fixture.enable("server", &[]));
    fs::remove_dir_all(fixture.path("root/usr")).unwrap();
    assert_succeeds(&fixture.disable("server"));
    assert!(fixture.read(DROP_IN).is_none());
}

#[test]
fn what_is_no_service_no_rack_or_no_library_is_wrong_use() {
    let Some(fixture) = Fixture::new() else { return };
    for (service, words) in [
        ("none", &["service 'none'", "/usr/lib/systemd/system", "systemctl list-unit-files"][..]),
        ("none@1", &["service 'none@1'"]),
        ("nginx.socket", &["'nginx.socket' is a socket unit", "name the service"]),
        ("a/b", &["'a/b' is no name of a service"]),
        ("../server", &["'../server' is no name of a service"]),
        ("a\nb", &[r"'a\nb' is no name of a service"]),
        ("", &["'' is no name of a service"]),
    ] {
        assert_fails(&fixture.enable(service, &[]), 2, words);
    }
    assert_fails(&fixture.disable("nginx.socket"), 2, &["'nginx.socket'"]);
    let root = fixture.path("root").to_str().unwrap().to_owned();
    let private = fixture.path("root/usr").to_str().unwrap().to_owned();
    for (rack, words) in [
        ("/no/rack", &["rack '/no/rack' (--rack)", "crosslane rack-dir create /no/rack"][..]),
        (&private, &["(--rack) is not shared", "crosslane rack-dir create"]),
    ] {
        assert_fails(&crosslane(&["enable", "server", "--root", &root, "--rack", rack]), 2, words);
    }
    let mut by_variable = Command::new(CROSSLANE);
    by_variable.args(["enable", "server", "--root", &root]).env("CROSSLANE_RACK", "/no/rack");
    assert_fails(&by_variable.output().unwrap(), 2, &["rack '/no/rack' (CROSSLANE_RACK)"]);
    if !Path::new("/var/lib/crosslane").exists() {
        let by_default = by_variable.env_remove("CROSSLANE_RACK").output().unwrap();
        assert_fails(&by_default, 2, &["rack '/var/lib/crosslane' (the default without --rack)", "with --rack"]);
    }
    let no_library =
        crosslane(&["enable", "server", "--root", &root, "--rack", &fixture.rack(), "--library", "/no.so"]);
    assert_fails(&no_library, 2, &["no library '/no.so'"]);
    assert_fails(&crosslane(&["enable", "server", "--root", "/no/root"]), 2, &["--root '/no/root'"]);
    assert!(!fixture.path("root/etc").exists());
}

#[test]
fn only_root_enables_and_disables() {
    let Some(fixture) = Fixture::new() else { return };
    let own = fixture.path("crosslane");
    // In another process, so that no concurrently started process has it open for writing (ETXTBSY).
    assert!(Command::new("cp").arg(CROSSLANE).arg(&own).status().unwrap().success());
    for subcommand in ["enable", "disable"] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=3999001", "--regid=3999001", "--clear-groups", "--"]).arg(&own);
        let output = command.args([subcommand, "server"]).output().unwrap();
        assert_fails(&output, 2, &["user 3999001 is not root", "run it as root"]);
    }
}

#[test]
fn systemd_finds_nothing_wrong_in_a_drop_in() {
    let Some(fixture) = Fixture::new() else { return };
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!("skipped: systemd-analyze is not installed");
        return;
    }
    let strict =
        "ProtectSystem=strict\nRestrictAddressFamilies=AF_INET\nSystemCallFilter=@basic-io\nNoExecPaths=/run\n";
    let unit = format!("{PLAIN}{strict}TemporaryFileSystem=/run\nEnvironment=\"LD_PRELOAD=/a.so /b.so\"\n");
    assert!(fixture.settings(&unit).len() >= 6);
    // systemd reads the same unit and drop-in from one folder.
    let units = fixture.path("root").join(UNITS);
    let folder = fixture.path("root/etc/systemd/system/server.service.d");
    fs::rename(folder, units.join("server.service.d")).unwrap();
    let verify = |text: Option<&str>| {
        if let Some(text) = text {
            fs::write(units.join("server.service.d/50-crosslane.conf"), text).unwrap();
        }
        let mut command = Command::new("systemd-analyze");
        command
            .arg("verify")
            .arg(units.join("server.service"))
            .env("SYSTEMD_UNIT_PATH", format!("{}:", units.display()));
        String::from_utf8_lossy(&command.output().unwrap().stderr).into_owned()
    };
    let found = verify(None);
    assert!(!found.contains("crosslane"), "{found}");
    let wrong = verify(Some("[Service]\nReadWritePaths=relative\n"));
    assert!(wrong.contains("50-crosslane.conf"), "it reads the drop-in: {wrong}");
}
