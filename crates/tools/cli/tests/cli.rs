//! Tests of the built command: its output, its exit codes, and the environment of the programs that it runs.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

mod command;
mod library;

use command::{CROSSLANE, assert_fails, crosslane, error_line, stdout};

/// A folder with a rack directory and a library that does nothing.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap() };
        library::compile(&fixture.path("library.so"), env!("CARGO_PKG_VERSION"));
        fs::DirBuilder::new().mode(0o700).create(fixture.path("rack")).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn compile(&self, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        let output = self.path(name);
        let mut command = Command::new("cc");
        command.args(flags).args(["-x", "c", "-", "-o"]).arg(&output).stdin(Stdio::piped());
        let mut compiler = command.spawn().expect("the tests need a C compiler");
        compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
        assert!(compiler.wait().unwrap().success());
        output
    }

    fn script(&self, name: &str, text: &str) -> PathBuf {
        self.program(name, text.as_bytes())
    }

    fn program(&self, name: &str, contents: &[u8]) -> PathBuf {
        let (draft, path) = (self.path(&format!("{name}.draft")), self.path(name));
        fs::write(&draft, contents).unwrap();
        copy(&draft, &path);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Returns `crosslane run` with the rack and library of this fixture, without inherited variables of Crosslane.
    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(CROSSLANE);
        command.arg("run").arg("--library").arg(self.path("library.so"));
        command.arg("--rack").arg(self.path("rack")).args(arguments);
        for variable in ["RACK", "NODE", "ONLY", "EXCEPT", "REQUIRE_LANE", "OFF", "VERSION"] {
            command.env_remove(format!("CROSSLANE_{variable}"));
        }
        command.env_remove("LD_PRELOAD");
        command
    }
}

/// Copies a file in another process. Processes that concurrent tests start would inherit a descriptor that is open for
/// writing here, and a file that is open for writing cannot be executed (ETXTBSY).
fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

#[test]
fn wrong_use_is_one_line_and_exit_code_2() {
    for (arguments, words) in [
        (&["--bad"][..], &["--bad", "crosslane --help"][..]),
        (&["nonsense"], &["no command 'nonsense'", "crosslane --help"]),
        (&["rnu", "--", "true"], &["no command 'rnu'", "'run'"]),
        (&["bench", "socket"], &["no command 'socket'", "'sockets'"]),
        (&["explain", "--pid", "abc"], &["'abc'", "a process ID is a positive number", "ps"]),
        (&["demo", "--rounds", "x"], &["'x'", "not a whole number"]),
        (&["run"], &["PROGRAM", "crosslane run --help"]),
        (&["run", "--node", "q7", "--", "true"], &["'q7'", "letter a to z", "--node a"]),
        (&["run", "--node", "127.0.0.1", "--", "true"], &["'127.0.0.1'", "127.77.0.0/16"]),
        (&["run", "--node", "", "--", "true"], &["--node"]),
        (&["run", "--only", "0", "--", "true"], &["'0'", "1 to 65535"]),
        (&["run", "--except", "9-7", "--", "true"], &["'9-7'", "7-9"]),
        (&["run", "--only", "1", "--except", "2", "--", "true"], &["--only", "--except"]),
        (&["run", "--onyl", "1", "--", "true"], &["--onyl", "--only"]),
        (&["stat", "--jsn"], &["--jsn", "--json"]),
        (&["stat", "extra"], &["extra"]),
        (&["top", "--interval", "0"], &["0", "--interval"]),
        (&["bench", "nonsense"], &["nonsense", "crosslane bench --help"]),
        (&["demo", "--rounds", "0"], &["0", "--rounds"]),
        (&["bench", "sockets", "--only", "bulk", "--clients", "3"], &["--clients 3", "add connects-at-once"]),
        (&["bench", "sockets", "--baseline", "old.so"], &["--library"]),
        (&["bench", "sockets", "--clients", "9999"], &["--clients 9999", "give --connections 2"]),
    ] {
        assert_fails(&crosslane(arguments), 2, words);
    }
    assert_eq!(crosslane(&[]).status.code(), Some(2));
}

#[test]
fn help_and_version_succeed() {
    let version = crosslane(&["--version"]);
    assert!(version.status.success());
    let release = concat!("crosslane ", env!("CARGO_PKG_VERSION"));
    assert!(stdout(&version).starts_with(release));
    // The short form is the first line.
    let short = crosslane(&["-V"]);
    assert_eq!(stdout(&short).lines().collect::<Vec<_>>(), [stdout(&version).lines().next().unwrap()]);
    let rack = stdout(&crosslane(&["rack", "example"]));
    let (_, rack) = rack.split_once("version = ").expect("a rack file has a version");
    let rack = format!("rack {},", rack.lines().next().unwrap());
    for part in
        [machine::COMMIT, "linux", "features: windows (shm, pci, dax)", "srnic", "rnic-udp", &rack, "crosslane-pcie/1"]
    {
        assert!(stdout(&version).contains(part), "{part}: {}", stdout(&version));
    }
    for command in ["run", "stat", "top", "doctor", "demo", "bench", "bench sockets", ""] {
        let help = Command::new(CROSSLANE).args(command.split_whitespace()).arg("--help").output().unwrap();
        let usage = format!("Usage: crosslane {command}");
        assert!(help.status.success() && stdout(&help).contains(usage.trim()), "{command}");
    }
}

#[test]
fn a_program_that_cannot_be_run_is_wrong_use_everywhere() {
    let fixture = Fixture::new();
    let plain = fixture.path("plain");
    fs::write(&plain, "text").unwrap();
    let fails = |arguments: &[&str], words: &[&str]| assert_fails(&fixture.run(arguments).output().unwrap(), 2, words);
    for command in ["compare", "explain"] {
        let output = crosslane(&[command, "--", "no-such-program"]);
        assert_fails(&output, 2, &["'no-such-program'", "in PATH", "install it"]);
    }
    fails(&["--", "no-such-program"], &["'no-such-program'", "in PATH", "install it"]);
    fails(&["--", "/no/such"], &["'/no/such'", "check the path"]);
    fails(&["--", "/"], &["'/'", "directory"]);
    fails(&["--", ""], &["empty"]);
    fails(&["--", plain.to_str().unwrap()], &["not executable", "chmod +x"]);
}

#[test]
fn a_file_that_is_not_a_library_is_rejected() {
    let fixture = Fixture::new();
    let with = |library: &Path| {
        let mut command = Command::new(CROSSLANE);
        command.args([OsStr::new("run"), "--library".as_ref(), library.as_ref(), "--".as_ref(), "true".as_ref()]);
        command.output().unwrap()
    };
    assert_fails(&with(Path::new("/no/such.so")), 2, &["/no/such.so", "--library"]);
    assert_fails(&with(&fixture.script("text.so", "no library")), 2, &["text.so", "not a shared library"]);
    let other = fixture.compile("other.so", "int x;\n", &["-shared", "-fPIC"]);
    assert_fails(&with(&other), 2, &["other.so", "not that of crosslane", "--library"]);
    let library = fixture.path("library.so").display().to_string();
    let compared = crosslane(&["bench", "sockets", "--library", &library, "--baseline", "/no/such.so"]);
    assert_fails(&compared, 2, &["/no/such.so", "check --baseline"]);
    let blank = fixture.path("with blank.so");
    fs::copy(fixture.path("library.so"), &blank).unwrap();
    assert_fails(&with(&blank), 2, &["with blank.so", "LD_PRELOAD"]);
}

/// Returns the name under which only glibc's loader finds the library.
fn preload_name(library: &Path) -> String {
    let found_by_glibc = if Path::new("/usr/lib").is_dir() { "/usr/$LIB/../../../../../.." } else { "" };
    format!("{found_by_glibc}{}", library.display())
}

/// Other loaders, such as musl's, use the name literally and continue without libraries that they do not find.
#[test]
fn only_a_loader_that_expands_lib_finds_the_library() {
    if !Path::new("/usr/lib").is_dir() {
        return; // Without /usr/lib the name is a plain path.
    }
    let fixture = Fixture::new();
    let show = "echo $LD_PRELOAD; grep -o library.so /proc/self/maps";
    let shown = stdout(&fixture.run(&["--", "sh", "-c", show]).output().unwrap());
    let (name, loaded) = shown.split_once('\n').unwrap();
    assert!(name.contains("$LIB") && !Path::new(name).exists(), "'{name}' exists without glibc's loader");
    assert!(loaded.contains("library.so"), "glibc's loader has not found '{name}'");
}

#[test]
fn the_library_is_found_beside_the_command_and_in_its_tree() {
    let fixture = Fixture::new();
    fs::create_dir_all(fixture.path("bin")).unwrap();
    fs::create_dir_all(fixture.path("lib/crosslane/lib64")).unwrap();
    let command = fixture.path("bin/crosslane");
    copy(Path::new(CROSSLANE), &command);
    let run = || {
        let mut command = Command::new(&command);
        command.arg("run").arg("--rack").arg(fixture.path("rack")).args(["--", "sh", "-c", "echo $LD_PRELOAD"]);
        command.env_remove("LD_PRELOAD").output().unwrap()
    };
    if !Path::new("/usr/lib/crosslane").exists() && !Path::new("/usr/local/lib/crosslane").exists() {
        assert_fails(&run(), 2, &["no libcrosslane.so", "install the library", "--library"]);
    }
    for folder in ["lib/crosslane", "lib/crosslane/lib64", "bin"] {
        let library = fixture.path(folder).join("libcrosslane.so");
        fs::copy(fixture.path("library.so"), &library).unwrap();
        let found = stdout(&run());
        assert_eq!(found.trim_end(), preload_name(&fs::canonicalize(library).unwrap()));
    }
}

#[test]
fn the_environment_of_the_program_reflects_the_options() {
    let fixture = Fixture::new();
    let variables = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let text = stdout(&output);
        let is_ours = |line: &&str| line.starts_with("CROSSLANE_") || line.starts_with("LD_PRELOAD=");
        let mut lines: Vec<String> = text.lines().filter(is_ours).map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let library = preload_name(&fs::canonicalize(fixture.path("library.so")).unwrap());
    let rack = format!("CROSSLANE_RACK={}", fixture.path("rack").display());

    let plain = variables(&mut fixture.run(&["--", "env"]));
    assert_eq!(plain, [rack.clone(), format!("LD_PRELOAD={library}")]);

    let mut full = fixture.run(&["--node", "b", "--only", "80,90-99", "--require-lane", "--", "env"]);
    full.env("CROSSLANE_EXCEPT", "1").env("CROSSLANE_OFF", "1").env("LD_PRELOAD", &library);
    let expected = ["CROSSLANE_NODE=b", "CROSSLANE_ONLY=80,90-99", &rack, "CROSSLANE_REQUIRE_LANE=1"];
    let expected: Vec<String> = expected.iter().map(|line| (*line).to_owned()).collect();
    let mut expected = [expected, vec![format!("LD_PRELOAD={library}")]].concat();
    expected.sort();
    assert_eq!(variables(&mut full), expected);

    let other = fixture.compile("other.so", "int other_nothing;", &["-shared", "-fPIC"]);
    let mut except = fixture.run(&["--except", "22", "--node", "127.77.3.4", "--", "env"]);
    except.env("CROSSLANE_ONLY", "1").env("LD_PRELOAD", &other);
    let expected = [
        "CROSSLANE_EXCEPT=22",
        "CROSSLANE_NODE=127.77.3.4",
        &rack,
        &format!("LD_PRELOAD={}:{library}", other.display()),
    ];
    assert_eq!(variables(&mut except), expected);
}

#[test]
fn arguments_exit_code_signals_and_stdin_are_those_of_the_program() {
    let fixture = Fixture::new();
    let arguments = ["--", "printf", "%s|", "--node", "z", "--", "-h", ""];
    assert_eq!(stdout(&fixture.run(&arguments).output().unwrap()), "--node|z|--|-h||");
    assert_eq!(stdout(&fixture.run(&arguments[1..]).output().unwrap()), "--node|z|--|-h||", "without -- in front");

    let status = |script: &str| fixture.run(&["--", "sh", "-c", script]).status().unwrap();
    assert_eq!(status("exit 7").code(), Some(7));
    assert_eq!(status("kill -KILL $$").signal(), Some(9));
    let pipe = fixture.run(&["--", "sh", "-c", "kill -PIPE $$; exit 3"]).status().unwrap();
    assert_eq!(pipe.signal(), Some(13), "SIGPIPE is not ignored");

    let mut cat = fixture.run(&["--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    cat.stdin.take().unwrap().write_all(b"through").unwrap();
    assert_eq!(stdout(&cat.wait_with_output().unwrap()), "through");
}

/// Asserts that a program that cannot use lanes runs with a warning, and is an error if lanes are required.
fn assert_kernel_only(fixture: &Fixture, program: &Path, words: &[&str]) {
    let program = program.to_str().unwrap();
    let strict = fixture.run(&["--require-lane", "--", program]).output().unwrap();
    assert_fails(&strict, 1, &[&[program], words].concat());
    let lenient = fixture.run(&["--", program]).output().unwrap();
    let line = error_line(&lenient);
    assert!(line.contains(program) && line.contains("kernel TCP"), "{line}");
    assert_eq!((lenient.status.code(), stdout(&lenient).as_str()), (Some(5), "ran\n"));
}

const RAN: &str = "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 5; }\n";

#[test]
fn a_dynamic_program_runs_without_a_warning() {
    let fixture = Fixture::new();
    for (name, flags) in [("pie", &["-pie", "-fPIE"][..]), ("fixed", &["-no-pie"])] {
        let program = fixture.compile(name, RAN, flags);
        let output = fixture.run(&["--require-lane", "--", program.to_str().unwrap()]).output().unwrap();
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(5), "ran\n"));
        assert_eq!(output.stderr, b"");
    }
}

#[test]
fn a_static_program_runs_on_the_kernel_path_or_not_at_all() {
    let fixture = Fixture::new();
    for (name, flags) in [("static", &["-static"][..]), ("static-pie", &["-static-pie"])] {
        let program = fixture.compile(name, RAN, flags);
        assert_kernel_only(&fixture, &program, &["statically linked", "link it dynamically"]);
    }
}

#[test]
fn a_script_is_checked_by_its_interpreter() {
    let fixture = Fixture::new();
    let interpreter = fixture.compile("interpreter", RAN, &["-static"]);
    let script = fixture.script("script", &format!("#!{}\n", interpreter.display()));
    let output = fixture.run(&["--require-lane", "--", script.to_str().unwrap()]).output().unwrap();
    assert_fails(&output, 1, &[interpreter.to_str().unwrap(), "statically linked"]);

    let shell = fixture.script("shell", "#!/usr/bin/env sh\necho ran\n");
    let output = fixture.run(&["--require-lane", "--", shell.to_str().unwrap()]).output().unwrap();
    assert_eq!((stdout(&output).as_str(), output.stderr.as_slice()), ("ran\n", &b""[..]));
}

#[test]
fn a_setuid_program_runs_on_the_kernel_path_or_not_at_all() {
    let fixture = Fixture::new();
    let program = fixture.compile("setuid", RAN, &[]);
    if chown(&program, Some(65534), Some(65534)).is_err() {
        eprintln!("skipped: only root can change the owner of a file");
        return;
    }
    fs::set_permissions(fixture.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_kernel_only(&fixture, &program, &["is setuid", "LD_PRELOAD"]);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o2755)).unwrap();
    assert_kernel_only(&fixture, &program, &["is setgid", "LD_PRELOAD"]);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let output = fixture.run(&["--require-lane", "--", program.to_str().unwrap()]).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(5), &b""[..]));
}

/// `cap_net_bind_service`, permitted and effective, as struct vfs_cap_data of version 2 (capabilities(7)).
const CAPABILITIES: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_program_with_file_capabilities_runs_on_the_kernel_path_or_not_at_all() {
    let fixture = Fixture::new();
    let program = fixture.compile("capable", RAN, &[]);
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(&program, c"security.capability", &CAPABILITIES, flags).is_err() {
        eprintln!("skipped: only root can set file capabilities");
        return;
    }
    let name = program.to_str().unwrap();
    let of_root = fixture.run(&["--require-lane", "--", name]).output().unwrap();
    assert_eq!((of_root.status.code(), of_root.stderr.as_slice()), (Some(5), &b""[..]), "root gains no capability");
    // The command and the rack of another user, who can read the files of the test.
    fs::set_permissions(fixture.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let own = fixture.path("command");
    copy(Path::new(CROSSLANE), &own);
    chown(fixture.path("rack"), Some(65534), Some(65534)).unwrap();
    let run = |options: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&own).arg("run").args(options);
        command.arg("--library").arg(fixture.path("library.so")).arg("--rack").arg(fixture.path("rack"));
        command.env_remove("CROSSLANE_REQUIRE_LANE").args(["--", name]).output().unwrap()
    };
    assert_fails(&run(&["--require-lane"]), 1, &[name, "has file capabilities", "LD_PRELOAD"]);
    let lenient = run(&[]);
    assert!(error_line(&lenient).contains("has file capabilities"), "{lenient:?}");
    assert_eq!((lenient.status.code(), stdout(&lenient).as_str()), (Some(5), "ran\n"));
}

#[test]
fn another_loader_or_processor_is_named() {
    let fixture = Fixture::new();
    let strict = |program: &Path| fixture.run(&["--require-lane", "--", program.to_str().unwrap()]).output().unwrap();
    let musl = fixture.compile("musl", RAN, &["-Wl,--dynamic-linker=/lib/ld-musl-none.so.1"]);
    assert_fails(&strict(&musl), 1, &["/lib/ld-musl-none.so.1", "glibc"]);

    let mut bytes = fs::read(&musl).unwrap();
    bytes[4] = 1;
    let narrow = fixture.program("narrow", &bytes);
    assert_fails(&strict(&narrow), 1, &["narrow", "word size"]);
    let lenient = fixture.run(&["--", narrow.to_str().unwrap()]).output().unwrap();
    assert_eq!(lenient.status.code().map(|code| code != 0), Some(true), "{lenient:?}");

    bytes.truncate(100);
    bytes[4] = 2;
    let narrow = fixture.program("narrow", &bytes);
    assert_fails(&strict(&narrow), 1, &["narrow", "damaged"]);
}

#[test]
fn a_loader_that_would_fail_gets_no_library() {
    let fixture = Fixture::new();
    let loader = "/lib/../lib64/ld-linux-x86-64.so.2";
    if !Path::new(loader).exists() {
        return;
    }
    let alias = fixture.path("ld-other.so");
    std::os::unix::fs::symlink(loader, &alias).unwrap();
    let source = "#include <stdio.h>\n#include <stdlib.h>\n\
                  int main(void) { puts(getenv(\"LD_PRELOAD\") ? \"set\" : \"unset\"); }\n";
    let program = fixture.compile("other", source, &[&format!("-Wl,--dynamic-linker={}", alias.display())]);
    let output = fixture.run(&["--", program.to_str().unwrap()]).output().unwrap();
    assert!(error_line(&output).contains("ld-other.so"));
    assert_eq!(stdout(&output), "unset\n");
}

#[test]
fn a_rack_that_cannot_be_used_warns_or_fails() {
    let fixture = Fixture::new();
    let shared = fixture.path("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o750)).unwrap();
    let long = fixture.path(&"x/".repeat(300));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&long).unwrap();
    for (rack, word) in [(&long, "too long"), (&shared, "give another with --rack")] {
        let run = |strict: &[&str]| {
            let mut command = Command::new(CROSSLANE);
            command.arg("run").arg("--library").arg(fixture.path("library.so")).arg("--rack").arg(rack);
            command.args(strict).args(["--", "echo", "ran"]).output().unwrap()
        };
        assert_fails(&run(&["--require-lane"]), 2, &[rack.to_str().unwrap(), word]);
        let lenient = run(&[]);
        assert!(error_line(&lenient).contains("kernel TCP"));
        assert_eq!(stdout(&lenient), "ran\n");
    }
}

#[test]
fn a_directory_of_the_system_is_not_to_be_closed_to_other_users() {
    let output = crosslane(&["stat", "--rack", "/etc"]);
    assert_fails(&output, 2, &["'/etc'", "open to other users", "give another with --rack"]);
    assert!(!error_line(&output).contains("chmod"), "{output:?}");
}

#[test]
fn an_unknown_variable_causes_one_warning_however_many_programs_run() {
    let fixture = Fixture::new();
    let mut command = fixture.run(&["--", "sh", "-c", "for i in 1 2 3; do echo; env true; done"]);
    let output = command.env("CROSSLANE_REQUIRELANE", "1").output().unwrap();
    assert!(error_line(&output).starts_with("crosslane: CROSSLANE_REQUIRELANE: no variable"), "{output:?}");
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "\n\n\n"));
}

#[test]
fn a_named_directory_that_does_not_exist_is_wrong_use_and_is_not_created() {
    let fixture = Fixture::new();
    let missing = fixture.path("mistyped");
    let library = fixture.path("library.so");
    let run = ["run", "--library", library.to_str().unwrap(), "--", "echo", "ran"];
    for arguments in [&run[..], &["stat"], &["top"]] {
        let by_variable = Command::new(CROSSLANE).args(arguments).env("CROSSLANE_RACK", &missing).output().unwrap();
        assert_fails(&by_variable, 2, &[missing.to_str().unwrap(), "CROSSLANE_RACK", "mkdir -m 700"]);
        let (command, rest) = arguments.split_first().unwrap();
        let by_option = Command::new(CROSSLANE).arg(command).arg("--rack").arg(&missing).args(rest).output().unwrap();
        assert_fails(&by_option, 2, &[missing.to_str().unwrap(), "--rack", "mkdir -m 700"]);
    }
    let doctor = Command::new(CROSSLANE).arg("doctor").arg("--rack").arg(&missing).output().unwrap();
    assert!(stdout(&doctor).contains("mistyped"), "{doctor:?}");
    assert!(!missing.exists());
}

#[test]
fn an_inherited_requirement_of_lanes_is_enforced_and_an_invalid_one_is_wrong_use() {
    let fixture = Fixture::new();
    let program = fixture.compile("static", RAN, &["-static"]);
    let run = |value: &str| {
        let mut command = fixture.run(&["--", program.to_str().unwrap()]);
        command.env("CROSSLANE_REQUIRE_LANE", value).output().unwrap()
    };
    assert_fails(&run("true"), 1, &["statically linked"]);
    assert_fails(&run("maybe"), 2, &["CROSSLANE_REQUIRE_LANE='maybe'", "set 1"]);
    assert_eq!(run("no").status.code(), Some(5));
}

#[test]
fn stat_shows_a_process_until_it_ends() {
    let fixture = Fixture::new();
    let rack = fixture.path("rack");
    let stat = |json: &str| {
        let mut command = Command::new(CROSSLANE);
        command.arg("stat").args(Some(json).filter(|json| !json.is_empty())).arg("--rack").arg(&rack);
        stdout(&command.output().unwrap())
    };
    assert!(stat("").starts_with("Nothing runs over crosslane"));

    let config =
        stats_page::PageConfig { rack: &rack, node: stats_page::node_address("c").map(Into::into), program: b"a-test" };
    let page = stats_page::StatsPage::create(&config);
    let connection = stats_page::NewConnection {
        path: stats_page::DataPath::Lane,
        role: stats_page::Role::Connect,
        fd: 12,
        local: None,
        peer: "127.77.0.1:6379".parse().ok(),
        reason: None,
    };
    let slot = page.open_connection(&connection);
    slot.add_sent(3 << 20);
    let text = stat("");
    for word in ["a-test", "127.77.0.1:6379", "3.0 MiB", "lane"] {
        assert!(text.contains(word), "{word} in\n{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&stat("--json")).unwrap();
    assert_eq!(json["schema"], "crosslane-stat/1");
    assert_eq!(json["processes"][0]["node"], "c");
    assert_eq!(json["processes"][0]["totals"]["lane_bytes_sent"], 3 << 20);
    assert_eq!(json["processes"][0]["connections"][0]["local"], serde_json::Value::Null);

    slot.close();
    page.remove();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&stat("--json")).unwrap()["processes"], serde_json::json!([]));
}

#[test]
fn top_without_a_terminal_prints_one_snapshot() {
    let fixture = Fixture::new();
    let rack = fixture.path("rack");
    let top = crosslane(&["top", "--rack", rack.to_str().unwrap()]);
    assert!(top.status.success());
    assert!(stdout(&top).starts_with("Nothing runs over crosslane"));
    let json = crosslane(&["top", "--json", "--rack", rack.to_str().unwrap()]);
    assert!(stdout(&json).contains("crosslane-stat/1"));
}

#[test]
fn a_rack_that_cannot_be_read_is_an_error() {
    let fixture = Fixture::new();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(fixture.path("rack/v1/stat")).unwrap();
    fs::set_permissions(fixture.path("rack/v1/stat"), fs::Permissions::from_mode(0o777)).unwrap();
    let output = crosslane(&["stat", "--rack", fixture.path("rack").to_str().unwrap()]);
    assert_fails(&output, 1, &["rack", "--rack"]);
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(CROSSLANE).args(["stat", "--json"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn doctor_reports_what_is_present_and_what_is_missing() {
    let fixture = Fixture::new();
    let doctor = |library: &Path| {
        let mut command = Command::new(CROSSLANE);
        command.args(["doctor", "--json", "--library"]).arg(library).arg("--rack").arg(fixture.path("rack"));
        let output = command.output().unwrap();
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        (output.status.code(), json)
    };
    let status_of = |json: &serde_json::Value, name: &str| {
        let checks = json["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap()["status"].as_str().unwrap().to_owned()
    };
    let (code, json) = doctor(&fixture.path("library.so"));
    assert_eq!((code, &json["schema"], &json["lanes_work"]), (Some(0), &"crosslane-doctor/1".into(), &true.into()));
    for name in ["kernel", "memfd", "AF_UNIX", "rack", "library"] {
        assert_eq!(status_of(&json, name), "ok", "{name}");
    }
    let checks = json["checks"].as_array().unwrap();
    assert!(checks.iter().any(|check| check["found"].as_str().unwrap().ends_with("; a page was written")), "{json}");
    assert_eq!(fs::read_dir(fixture.path("rack")).unwrap().count(), 0, "it is removed again");
    let (code, json) = doctor(Path::new("/no/such.so"));
    assert_eq!((code, &json["lanes_work"]), (Some(1), &false.into()));
    assert_eq!(status_of(&json, "library"), "missing");
}
