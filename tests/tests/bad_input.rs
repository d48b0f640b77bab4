//! Wrong use, missing resources and hostile clients: one clear line or the kernel path, never a hang or a crash.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use system_tests::paths::{self, package_file, python, tool};
use system_tests::port::free_port;
use system_tests::rack::{NOBODY, command_as_nobody};
use system_tests::{Finished, Process, Rack, Server, WAIT_MAX, c, is_root, start_server};

#[path = "bad_input/memory_bound.rs"]
mod memory_bound;

/// Checks of the semantics suite that suffice where only the circumstances differ.
const SAMPLE: [&str; 3] = ["ping_pong_many", "names_agree", "epoll_ping_pong_many"];

fn finish(command: &mut Command) -> Finished {
    Process::start(command).wait(WAIT_MAX)
}

/// Panics unless the command exits with this code and one line that contains these words.
#[track_caller]
fn must_fail(command: &mut Command, code: i32, words: &[&str]) {
    let finished = finish(command).must_fail_in_one_line(code, words);
    assert_eq!(finished.stdout, "", "{finished}");
}

// --- the command line ----------------------------------------------------------------------------------------------

#[test]
fn an_unknown_program_is_named() {
    let rack = Rack::new();
    must_fail(&mut rack.run(&[], "no-such-program"), 2, &["no-such-program"]);
    must_fail(&mut rack.run(&[], "/no/such/program"), 2, &["/no/such/program"]);
    must_fail(&mut rack.run(&[], rack.path()), 2, &["directory"]);
}

#[test]
fn wrong_use_exits_with_2() {
    let rack = Rack::new();
    let wrong = |arguments: &[&str], about: &[&str]| {
        must_fail(rack.crosslane("run").args(arguments), 2, about);
    };
    wrong(&["--no-such-option", "--", "true"], &["--no-such-option"]);
    wrong(&["--node", "q7", "--", "true"], &["q7", "--node a"]);
    wrong(&["--node", "10.0.0.1", "--", "true"], &["10.0.0.1"]);
    wrong(&["--only", "80,99999x", "--", "true"], &["99999x"]);
    wrong(&["--only", "70000", "--", "true"], &["70000"]);
    wrong(&["--except", "90-80", "--", "true"], &["90-80"]);
    wrong(&["--only", "80", "--except", "81", "--", "true"], &["--only", "--except"]);
    wrong(&[], &["PROGRAM"]);
    must_fail(&mut rack.crosslane("no-such-command"), 2, &["no-such-command"]);
}

#[test]
fn the_programs_own_exit_code_is_passed_on() {
    let rack = Rack::new();
    let finished = finish(rack.require_lane("/bin/sh").args(["-c", "echo output; exit 37"])).must_exit_with(37);
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("output\n", ""));
}

#[test]
fn a_missing_library_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("crosslane");
    paths::copy_program(&paths::crosslane(), &alone);
    let rack = Rack::new();
    let mut command = rack.bare_command(&alone);
    must_fail(command.args(["run", "--", "true"]), 2, &["libcrosslane.so"]);
    must_fail(&mut rack.run(&["--library", "/no/such.so"], "true"), 2, &["/no/such.so"]);
    must_fail(&mut rack.run(&["--library", "/etc/passwd"], "true"), 2, &["/etc/passwd"]);
}

// --- programs that cannot take lanes -------------------------------------------------------------------------------

const GREETER: &str = "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 0; }\n";

/// Panics unless the program runs on the kernel path with one warning, and does not run where lanes are required.
#[track_caller]
fn must_fall_back(rack: &Rack, program: &Path, about: &[&str]) {
    let finished = finish(&mut rack.run(&[], program)).must_succeed().must_print_one_line(about);
    assert_eq!(finished.stdout, "ran\n");
    must_fail(&mut rack.require_lane(program), 1, about);
}

#[test]
fn a_static_program_falls_back() {
    let program = c::build_text("static-greeter", GREETER, &["-static"]);
    must_fall_back(&Rack::new(), &program, &["static-greeter", "static"]);
}

#[test]
fn a_go_program_falls_back() {
    for section in [".go.buildinfo", ".note.go.buildid"] {
        let mark = format!("__attribute__((section(\"{section}\"), used)) static const char mark[] = \"Go\";\n");
        let name = format!("go{}", section.replace('.', "-"));
        let program = c::build_text(&name, &(mark + GREETER), &[]);
        must_fall_back(&Rack::new(), &program, &[&name, "Go program"]);
    }
}

#[test]
fn a_setuid_program_falls_back() {
    if !is_root() {
        println!("skipped: only root can create a program that is setuid to another user");
        return;
    }
    let built = c::build_text("greeter", GREETER, &[]);
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("setuid-greeter");
    paths::copy_program(&built, &program);
    std::os::unix::fs::chown(&program, Some(NOBODY), Some(NOBODY)).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    must_fall_back(&Rack::new(), &program, &["setuid-greeter", "setuid"]);
}

#[test]
fn a_program_without_sockets_is_not_affected() {
    let rack = Rack::new();
    let script = "echo out; echo err >&2; seq 100 | wc -l; (exit 3); exit $?";
    let bare = finish(rack.bare_command("/bin/sh").args(["-c", script]));
    let laned = finish(rack.require_lane("/bin/sh").args(["-c", script]));
    assert_eq!((bare.code(), &bare.stdout, &bare.stderr), (laned.code(), &laned.stdout, &laned.stderr));
}

// --- programs that request features that lanes lack -----------------------------------------------------------------

/// Requests zero-copy and signals, once before a connection exists and once after; duplicates a descriptor of another
/// process. Prints the results.
const DEMANDING: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t signals;
static void count(int signal) { (void)signal; signals++; }
static int signal_comes(void)
{
    for (int i = 0; i < 2000 && !signals; i++)
        usleep(10000);
    return signals ? 0 : -1;
}

static long say(const char *what, long result)
{
    printf("%s: %s\n", what, result < 0 ? strerrorname_np(errno) : "fine");
    return result;
}

static int zero_copy_completes(int fd)
{
    struct pollfd entry = {.fd = fd, .events = 0};
    char room[256], bytes[20000] = {0};
    struct msghdr message = {.msg_control = room, .msg_controllen = sizeof room};
    if (send(fd, bytes, sizeof bytes, MSG_ZEROCOPY) < 0 || poll(&entry, 1, 20000) != 1)
        return -1;
    return (int)recvmsg(fd, &message, MSG_ERRQUEUE);
}

int main(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    setlinebuf(stdout); // so that the child does not print buffered lines again
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (struct sockaddr *)&at, size);
    listen(listener, 5);
    getsockname(listener, (struct sockaddr *)&at, &size);
    say("connect", connect(client, (struct sockaddr *)&at, size));
    int server = accept(listener, NULL, NULL);
    say("zero-copy of a lane", setsockopt(client, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on));
    say("signals of a lane", fcntl(server, F_SETFL, O_ASYNC));
    say("signals of a lane by ioctl", ioctl(server, FIOASYNC, &on));
    say("signals of a listener", fcntl(listener, F_SETFL, O_ASYNC));
    say("time stamps of a listener", setsockopt(listener, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on));
    pid_t child = fork();
    if (child == 0) {
        int pidfd = (int)syscall(SYS_pidfd_open, getppid(), 0);
        say("another's descriptor", syscall(SYS_pidfd_getfd, pidfd, server, 0));
        _exit(0);
    }
    waitpid(child, NULL, 0);

    int copier = socket(AF_INET, SOCK_STREAM, 0), loud = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(copier, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on);
    if (say("zero-copy of a socket", connect(copier, (struct sockaddr *)&at, size)) == 0
        && accept(listener, NULL, NULL) >= 0)
        say("completion", zero_copy_completes(copier));
    signal(SIGIO, count);
    fcntl(loud, F_SETOWN, getpid());
    fcntl(loud, F_SETFL, O_ASYNC);
    if (say("signals of a socket", connect(loud, (struct sockaddr *)&at, size)) == 0) {
        int speaker = accept(listener, NULL, NULL);
        signals = 0;
        send(speaker, "x", 1, 0);
        say("signal", signal_comes());
    }
    int signalled = socket(AF_INET, SOCK_STREAM, 0), plain = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_port = 0;
    bind(signalled, (struct sockaddr *)&at, size);
    fcntl(signalled, F_SETOWN, getpid());
    fcntl(signalled, F_SETFL, O_ASYNC | O_NONBLOCK);
    listen(signalled, 5);
    getsockname(signalled, (struct sockaddr *)&at, &size);
    signals = 0;
    say("to a listener with signals", connect(plain, (struct sockaddr *)&at, size));
    say("signal of it", signal_comes());
    return 0;
}
"#;

fn demanding() -> PathBuf {
    c::build_text("demanding", DEMANDING, &["-O2"])
}

#[test]
fn features_of_the_kernel_alone_work_as_bare() {
    let rack = Rack::new();
    let bare = finish(&mut rack.bare_command(demanding())).must_succeed();
    assert!(bare.stdout.lines().count() > 10 && bare.stdout.lines().all(|line| line.ends_with(": fine")), "{bare}");
    assert_eq!(finish(&mut rack.run(&[], demanding())).must_succeed().stdout, bare.stdout);
    let required = finish(&mut rack.require_lane(demanding()));
    assert!(rack.is_bare() || required.stderr.contains("a socket option keeps it on kernel TCP"), "{required}");
}

// --- the rack ------------------------------------------------------------------------------------------------------

/// Panics unless the sample passes, over lanes or over kernel TCP.
#[track_caller]
fn sample_must_pass(command: &mut Command) -> Finished {
    finish(command.args(SAMPLE)).must_succeed()
}

fn run_in(rack: &Path, options: &[&str], program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Rack::new().bare_command(paths::crosslane());
    command.arg("run").arg("--rack").arg(rack).args(options).arg("--").arg(program);
    command
}

#[test]
fn a_missing_rack_is_wrong_use() {
    for rack in ["/proc/no/rack", "/etc/passwd/rack"] {
        for options in [&[][..], &["--require-lane"]] {
            must_fail(&mut run_in(Path::new(rack), options, "true"), 2, &[rack]);
        }
    }
}

#[test]
fn an_invalid_rack_file_is_wrong_use() {
    for options in [&[][..], &["--require-lane"]] {
        must_fail(&mut run_in(Path::new("/etc/passwd"), options, "true"), 2, &["/etc/passwd, line 1"]);
    }
}

#[test]
fn a_rack_that_others_can_write_is_not_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let rack = folder.path().join("open");
    fs::create_dir(&rack).unwrap();
    fs::set_permissions(&rack, fs::Permissions::from_mode(0o777)).unwrap();
    must_fail(&mut run_in(&rack, &["--require-lane"], "true"), 2, &["open to other users", "--rack"]);
    sample_must_pass(&mut run_in(&rack, &[], c::semantics()));
}

#[test]
fn an_unwritable_rack_falls_back_for_an_ordinary_user() {
    if !is_root() {
        println!("skipped: only root can change its user");
        return;
    }
    let rack = Rack::new(); // mode 0700, owned by root
    let folder = tempfile::tempdir().unwrap();
    for program in [&paths::crosslane(), &paths::library(), c::semantics()] {
        paths::copy_program(program, &folder.path().join(program.file_name().unwrap()));
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = command_as_nobody(folder.path().join("crosslane"));
    command.arg("run").arg("--rack").arg(rack.path());
    command.arg("--").arg(folder.path().join("semantics"));
    let finished = sample_must_pass(&mut command);
    assert!(finished.stderr.starts_with("crosslane: "), "{finished}");
}

/// A shell in new mount and user namespaces; `None` if this machine does not allow them.
fn private_mounts(script: &str) -> Option<Command> {
    let mut options = vec!["--mount"];
    if !is_root() {
        options.extend(["--user", "--map-root-user"]);
    }
    let mut probe = Command::new(tool("unshare"));
    if !finish(probe.args(&options).arg("true")).status.success() {
        println!("skipped: this machine allows no private mounts");
        return None;
    }
    let mut command = Rack::new().bare_command(tool("unshare"));
    command.args(options).args(["sh", "-e", "-c", script, "sh"]);
    Some(command)
}

/// Mounts a full file system, or one without room for another name, at `$1`, and runs the other arguments there.
const FULL_OF_BYTES: &str = "mount -t tmpfs -o size=16k,mode=700 none $1; \
                             mkdir -m 700 $1/rack $1/crosslane-$(id -u); \
                             head -c 1000000 /dev/zero >$1/full 2>/dev/null || true; shift; exec \"$@\"";
const FULL_OF_NAMES: &str = "mount -t tmpfs -o nr_inodes=3,mode=700 none $1; \
                             mkdir -m 700 $1/rack $1/crosslane-$(id -u); \
                             shift; exec \"$@\"";

#[test]
fn a_full_rack_falls_back() {
    for script in [FULL_OF_BYTES, FULL_OF_NAMES] {
        let folder = tempfile::tempdir().unwrap();
        let Some(mut command) = private_mounts(script) else { return };
        command.arg(folder.path()).arg(paths::crosslane()).arg("run").arg("--rack").arg(folder.path().join("rack"));
        sample_must_pass(command.arg("--").arg(c::semantics()));
    }
}

#[test]
fn a_full_dev_shm_falls_back() {
    for script in [FULL_OF_BYTES, FULL_OF_NAMES] {
        let Some(mut command) = private_mounts(script) else { return };
        command.env_remove("XDG_RUNTIME_DIR");
        command.arg("/dev/shm").arg(paths::crosslane()).args(["run", "--"]).arg(c::semantics());
        sample_must_pass(&mut command);
    }
}

#[test]
fn a_full_rack_where_lanes_are_required_ends_with_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = private_mounts(FULL_OF_NAMES) else { return };
    command.arg(folder.path()).arg(paths::crosslane()).arg("run").arg("--rack").arg(folder.path().join("rack"));
    let finished = finish(command.args(["--require-lane", "--"]).arg(c::semantics()).args(SAMPLE));
    assert!(!finished.timed_out && finished.code() == Some(1), "{finished}");
    assert!(finished.stderr.contains("crosslane: "), "{finished}");
}

#[test]
fn a_missing_rack_in_the_environment_means_kernel_tcp() {
    let rack = Rack::new();
    for value in ["", "/proc/no/rack"] {
        let mut command = rack.bare_command(c::semantics());
        sample_must_pass(command.env("LD_PRELOAD", paths::library()).env("CROSSLANE_RACK", value));
    }
}

#[test]
fn garbage_among_stats_pages_is_ignored() {
    let rack = Rack::new();
    sample_must_pass(&mut rack.require_lane(c::semantics()));
    let stats_pages = rack.path().join("v1/stat");
    for (name, bytes) in [("1", 0), ("999999", 7), ("not-a-number", 100_000), ("2", 5_000_000)] {
        fs::write(stats_pages.join(name), vec![0xa5_u8; bytes]).unwrap();
    }
    rack.stat();
    sample_must_pass(&mut rack.require_lane(c::semantics()));
}

// --- descriptor limit ----------------------------------------------------------------------------------------------

#[test]
fn a_descriptor_limit_loses_no_connection() {
    let rack = Rack::new();
    for limit in ["16", "24", "64"] {
        for options in [&["--require-lane"][..], &[]] {
            let mut command = rack.run(options, python());
            command.arg(package_file("python/descriptor_limit.py")).arg(limit);
            let finished = finish(&mut command).must_succeed();
            assert!(finished.stdout.starts_with("ok "), "{finished}");
        }
    }
}

/// Descriptors of the server for the listener's hidden socket, the inner epoll, and the memory of a connection while it
/// is received.
const SERVER_DESCRIPTORS: usize = 3;

#[test]
fn a_server_at_its_descriptor_limit_serves_as_many_clients_as_over_tcp_and_resets_none() {
    let rack = Rack::new();
    for limits in [["40", "40"], ["60", "80"], ["300", "300"], ["1024", "1024"], ["1024", "4096"]] {
        let fitted = |command: &mut Command| -> usize {
            command.arg(package_file("python/accept_at_limit.py")).args(limits);
            let finished = finish(command).must_succeed();
            let fitted = finished.stdout.strip_prefix("ok ").and_then(|count| count.trim().parse().ok());
            fitted.unwrap_or_else(|| panic!("{finished}"))
        };
        let by_tcp = fitted(&mut Command::new(python()));
        let by_lanes = fitted(&mut rack.require_lane(python()));
        assert!(by_lanes + SERVER_DESCRIPTORS >= by_tcp, "{limits:?}: {by_lanes} of {by_tcp}");
    }
}

#[test]
fn a_client_that_cannot_create_memory_causes_no_broken_connection() {
    let rack = Rack::new();
    let mut command = rack.run(&[], python());
    let finished = finish(command.arg(package_file("python/no_memory_file.py"))).must_succeed();
    assert_eq!(finished.stdout, "ok\n");
}

// --- accelerated and bare programs ----------------------------------------------------------------------------------

const REQUIRED: &[&str] = &["--require-lane"];

fn start_echo(rack: &Rack) -> Server {
    start_server(|port| echo_server(rack, REQUIRED, port))
}

fn echo_server(rack: &Rack, options: &[&str], port: u16) -> Command {
    script(rack.run(options, python()), "echo_server.py", port)
}

fn echo_client(rack: &Rack, options: &[&str], port: u16) -> Command {
    script(rack.run(options, python()), "echo_client.py", port)
}

/// Appends a script of this package and a port to a command that runs Python.
fn script(mut command: Command, name: &str, port: u16) -> Command {
    command.arg(package_file("python").join(name)).arg(port.to_string());
    command
}

/// Panics unless a well-behaved client is served over a lane.
#[track_caller]
fn must_echo(rack: &Rack, server: &Server) {
    must_echo_with(rack, REQUIRED, server);
}

#[track_caller]
fn must_echo_with(rack: &Rack, options: &[&str], server: &Server) {
    let finished = finish(&mut echo_client(rack, options, server.port)).must_succeed();
    assert_eq!(finished.stdout, "echoed 100000\n");
    assert!(server.process.is_running(), "{}", server.process.stderr());
}

#[test]
fn a_required_lane_to_a_bare_server_is_refused_in_one_line() {
    let rack = Rack::new();
    let server = start_server(|port| script(rack.bare_command(python()), "echo_server.py", port));
    let client = script(rack.require_lane(python()), "patient_client.py", server.port);
    let finished = finish(&mut { client }).must_exit_with(1);
    let ours = finished.stderr.lines().filter(|line| line.starts_with("crosslane: ")).count();
    assert!(ours == 1 && finished.stderr.contains("ConnectionResetError"), "{finished}");
}

#[test]
fn a_bare_client_of_a_server_that_requires_lanes_is_reset_and_the_server_lives() {
    let rack = Rack::new();
    let server = start_echo(&rack);
    finish(&mut script(rack.bare_command(python()), "patient_client.py", server.port)).must_exit_with(1);
    must_echo(&rack, &server);
    let ours = server.process.stderr();
    assert!(ours.lines().any(|line| line.starts_with("crosslane: ")), "{ours}");
}

#[test]
fn connect_without_a_listener_is_refused() {
    let rack = Rack::new();
    let finished = finish(&mut echo_client(&rack, REQUIRED, free_port())).must_exit_with(1);
    assert!(finished.stderr.contains("ConnectionRefusedError"), "{finished}");
}

#[test]
fn a_client_killed_amid_a_message_does_not_affect_others() {
    let rack = Rack::new();
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(|port| {
        let mut command = rack.require_lane(tool("redis-server"));
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"]).arg(folder.path());
        command
    });
    let redis_cli = |arguments: &[&str]| {
        let mut command = rack.require_lane(tool("redis-cli"));
        command.args(["-h", "127.0.0.1", "-p", &server.port.to_string()]).args(arguments);
        finish(&mut command).must_succeed().stdout
    };
    for _ in 0..5 {
        let client = Process::start(&mut script(rack.require_lane(python()), "half_message.py", server.port));
        client.wait_until("half a message", WAIT_MAX, |client| client.stdout().contains("half"));
        drop(client); // kill -9
        assert_eq!(redis_cli(&["EXISTS", "half"]), "0\n");
    }
    let clients = redis_cli(&["CLIENT", "LIST"]);
    assert_eq!(clients.lines().filter(|line| line.starts_with("id=")).count(), 1, "{clients}");
}
