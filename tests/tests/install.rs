//! Installations: what is installed works wherever it is, and is removed again.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use system_tests::paths::{self, python, repository};
use system_tests::port::{free_port, is_listening};
use system_tests::rack::command_as_nobody;
use system_tests::{Finished, Process, WAIT_MAX, is_root};
use tempfile::TempDir;

/// Serves one connection, or is its client.
const ECHO: &str = "\
import socket, sys
port = int(sys.argv[2])
if sys.argv[1] == 'serve':
    server = socket.create_server(('127.0.0.1', port))
    connection, _ = server.accept()
    connection.sendall(connection.recv(10))
else:
    client = socket.create_connection(('127.0.0.1', port))
    client.sendall(b'answered')
    print(client.recv(10).decode())
";

fn finish(command: &mut Command) -> Finished {
    Process::start(command).wait(WAIT_MAX)
}

/// Lays out what is installed. Returns the folder, which has the script that installs it.
fn tree(folder: &TempDir) -> PathBuf {
    let tree = folder.path().join("tree");
    let release = paths::crosslane();
    let release = release.parent().expect("a folder");
    finish(Command::new(repository().join("scripts/package")).arg("tree").arg(release).arg(&tree)).must_succeed();
    tree
}

fn install(tree: &Path, prefix: &Path, more: &[&str]) -> Finished {
    finish(Command::new(tree.join("install.sh")).arg("--prefix").arg(prefix).args(more))
}

/// Returns all files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() && !path.is_symlink() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn what_is_installed_carries_a_connection_and_is_removed_again() {
    let folder = TempDir::new().expect("a folder");
    let (tree, prefix) = (tree(&folder), folder.path().join("prefix"));
    let former_folder = prefix.join("lib/pkgconfig");
    fs::create_dir_all(&former_folder).expect("a folder");
    install(&tree, &prefix, &[]).must_succeed();
    let rack = TempDir::new().expect("a folder");
    fs::set_permissions(rack.path(), Permissions::from_mode(0o700)).expect("a folder of this user");
    let (port, crosslane) = (free_port().to_string(), prefix.join("bin/crosslane"));
    let echo = |role: &str, more: &[&str]| {
        let mut command = Command::new(&crosslane);
        command.arg("run").arg("--rack").arg(rack.path()).args(more).arg("--").arg(python());
        Process::start(command.args(["-c", ECHO, role, &port]))
    };
    let server = echo("serve", &[]);
    server.wait_until("a listener", WAIT_MAX, |_| is_listening(port.parse().expect("a port")));
    let client = echo("call", &["--require-lane"]).wait(WAIT_MAX).must_succeed();
    assert_eq!(client.stdout, "answered\n");
    server.wait(WAIT_MAX).must_succeed();
    // Again, as an upgrade, with a file that the new release does not have.
    let list = prefix.join("share/crosslane/installed-files");
    let former = fs::read_to_string(&list).expect("a list");
    fs::write(prefix.join("bin/former"), "").expect("a file");
    fs::write(&list, format!("bin/former\n{former}")).expect("a list");
    install(&tree, &prefix, &[]).must_succeed();
    assert_eq!(fs::read_to_string(&list).expect("a list"), former);
    assert!(!prefix.join("bin/former").exists());
    fs::write(prefix.join("bin/other"), "").expect("a file");
    install(&tree, &prefix, &["--uninstall"]).must_succeed();
    assert_eq!(files(&prefix), [prefix.join("bin/other")], "another program's file stays");
    assert!(former_folder.exists(), "a folder that was there before stays");
    assert!(!prefix.join("share").exists() && !prefix.join("lib/crosslane").exists());
    install(&tree, &prefix, &["--uninstall"]).must_fail_in_one_line(2, &["nothing is installed", "check --prefix"]);
}

/// Returns the files to which a document links.
fn targets(document: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(document).expect("a document");
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
    let files = links.filter(|link| !link.contains("://")).filter_map(|link| link.split('#').next());
    files.filter(|file| !file.is_empty()).map(|file| document.with_file_name(file)).collect()
}

#[test]
fn links_of_installed_documents_lead_to_installed_files() {
    let folder = TempDir::new().expect("a folder");
    let documents = tree(&folder).join("share/doc/crosslane");
    let broken = |documents: &Path| -> Vec<PathBuf> {
        let all = files(documents).into_iter().filter(|path| path.extension().is_some_and(|end| end == "md"));
        all.flat_map(|document| targets(&document)).filter(|target| !target.exists()).collect()
    };
    assert!(broken(&documents).is_empty(), "{:?}", broken(&documents));
    assert!(targets(&documents.join("README.md")).len() > 5, "links to what is installed stay");
    // As the Debian package has them.
    fs::rename(documents.join("LICENSE"), documents.join("copyright")).expect("a licence");
    assert!(!broken(&documents).is_empty(), "the README links to the licence");
    let script = repository().join("scripts/installed-links.py");
    finish(Command::new(python()).arg(script).arg(&documents).arg("LICENSE=copyright")).must_succeed();
    assert!(broken(&documents).is_empty(), "{:?}", broken(&documents));
    let readme = fs::read_to_string(documents.join("README.md")).expect("a document");
    assert!(readme.contains("](copyright)") && readme.contains("`ARCHITECTURE.md` in the source"), "{readme}");
}

#[test]
fn a_prefix_that_cannot_be_used_is_refused_in_one_line() {
    let folder = TempDir::new().expect("a folder");
    let tree = tree(&folder);
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    for (prefix, words) in [
        (Path::new("/tmp/a b"), ["'/tmp/a b'", "blank"]),
        (Path::new("/proc/none"), ["'/proc/none'", "--prefix"]),
        (&file.join("below"), ["not a directory", "--prefix"]),
        (Path::new(""), ["--prefix", "empty"]),
    ] {
        install(&tree, prefix, &[]).must_fail_in_one_line(2, &words);
    }
    install(&tree, folder.path(), &["--no-such"]).must_fail_in_one_line(2, &["'--no-such'", "usage"]);
    fs::remove_file(tree.join("bin/crosslane")).expect("a file");
    install(&tree, folder.path(), &[]).must_fail_in_one_line(2, &["bin/crosslane' is missing", "unpack"]);
    if is_root() {
        let script = repository().join("scripts/install.sh");
        let mut command = command_as_nobody("/bin/sh");
        let text = fs::read_to_string(script).expect("a script");
        finish(command.args(["-c", &text, "install.sh", "--prefix", "/usr/local"]))
            .must_fail_in_one_line(2, &["'/usr/local", "not writable", "--prefix"]);
    }
}

#[test]
fn a_command_uses_only_a_library_of_its_release() {
    let folder = TempDir::new().expect("a folder");
    let command = folder.path().join("crosslane");
    paths::copy_program(&paths::crosslane(), &command);
    let run = |more: &[&str]| finish(Command::new(&command).arg("run").args(more).args(["--", "true"]));
    run(&[]).must_fail_in_one_line(2, &["no libcrosslane.so beside", "--library"]);
    let mut library = fs::read(paths::library()).expect("a library");
    let copy = folder.path().join("libcrosslane.so");
    fs::write(&copy, &library).expect("a copy");
    run(&[]).must_succeed();
    let owner = b"Crosslane\0\0\0";
    let at = library.windows(owner.len()).position(|bytes| bytes == owner).expect("a note") + owner.len();
    library[at] = b'9';
    fs::write(&copy, &library).expect("a copy");
    run(&[]).must_fail_in_one_line(2, &["of release 0.", "of release 9.", "--library"]);
    run(&["--library", copy.to_str().expect("UTF-8")]).must_succeed();
}

#[test]
fn each_command_and_each_file_format_has_a_manual_page() {
    let folder = TempDir::new().expect("a folder");
    finish(Command::new(paths::crosslane()).arg("manual").arg(folder.path())).must_succeed();
    let page = |name: &str| {
        let section = name.rsplit('.').next().expect("a section");
        fs::read_to_string(folder.path().join(format!("man{section}/{name}")))
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let help = finish(Command::new(paths::crosslane()).arg("--help")).must_succeed().stdout;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Continued lines are indented further.
    let names = commands.filter_map(|line| line.strip_prefix("  ")).filter_map(|line| line.split(' ').next());
    let names: Vec<&str> = names.filter(|name| !name.is_empty() && *name != "help").collect();
    assert!(names.len() >= 15, "{names:?}");
    for name in names {
        let text = page(&format!("crosslane-{name}.1"));
        assert!(text.contains(".SH NAME") && text.contains(".SH \"EXIT STATUS\""), "{text}");
    }
    for text in [page("crosslane-run.1"), page("crosslane-environment.7")] {
        assert!(text.contains("CROSSLANE_REQUIRE_LANE"), "{text}");
    }
    assert!(
        page("crosslane-up.1").contains("crosslane\\-rack\\fR(5)") && page("crosslane-rack.5").contains("window_bytes")
    );
    let troubleshooting = page("crosslane-troubleshooting.7");
    for words in ["not_loaded", "CANNOT LOAD", "crosslane\\-explain"] {
        assert!(troubleshooting.contains(words), "{words} in {troubleshooting}");
    }
    for path in files(folder.path()) {
        // Debian package groff-base. All warnings, no output.
        let formatted = finish(Command::new("groff").args(["-man", "-Tutf8", "-ww", "-z"]).arg(&path)).must_succeed();
        assert_eq!(formatted.stdout + &formatted.stderr, "", "{}", path.display());
    }
}
