//! Hostile clients: they are refused, and the server continues to serve others.

use std::fs;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use segment::Segment;
use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack, Server, WAIT_MAX, c, start_server, wait_for};

use super::{REQUIRED, echo_server, must_echo, must_echo_with, script, start_echo};

/// The paths of the sockets below a folder.
fn sockets_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(sockets_below(&entry.path()));
        } else if kind.is_socket() {
            found.push(entry.path());
        }
    }
    found
}

/// The path of the only server's lane listener.
fn rendezvous(rack: &Rack) -> PathBuf {
    let found = sockets_below(rack.path());
    assert_eq!(found.len(), 1, "sockets in the rack: {found:?}");
    found.into_iter().next().unwrap()
}

fn connect_raw(at: &Path) -> UnixStream {
    UnixStream::connect(at).unwrap_or_else(|error| panic!("{}: {error}", at.display()))
}

/// Sends bytes with descriptors, unless the server has already closed the connection.
fn send_with_descriptors(to: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    let _ = sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
}

/// Descriptors that a server must not accept as a segment.
fn wrong_descriptors() -> Vec<Vec<OwnedFd>> {
    let null = || OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let memory = |bytes: u64| {
        let file = fs::File::from(rustix::fs::memfd_create("junk", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(bytes).unwrap();
        OwnedFd::from(file)
    };
    let pipe = || rustix::pipe::pipe().unwrap().0;
    vec![
        vec![null()],
        vec![pipe()],
        vec![memory(0)],
        vec![memory(1 << 20)], // not sealed, so it could be truncated while mapped
        vec![memory(1 << 20), memory(4096), null()],
        (0..8).map(|_| null()).collect(),
    ]
}

#[test]
fn silent_clients_do_not_stall_a_server() {
    let rack = Rack::new();
    let server = start_echo(&rack);
    must_echo(&rack, &server);
    let at = rendezvous(&rack);
    let silent: Vec<UnixStream> = (0..5).map(|_| connect_raw(&at)).collect();
    must_echo(&rack, &server);
    drop(silent);
    must_echo(&rack, &server);
}

#[test]
fn clients_that_send_garbage_do_not_stall_a_server() {
    let rack = Rack::new();
    let server = start_echo(&rack);
    let at = rendezvous(&rack);
    let mut held = Vec::new();
    for bytes in [1, 7, 8, 63, 64, 65, 1000, 100_000] {
        for fill in [0x00, 0x5a, 0xff] {
            let mut client = connect_raw(&at);
            client.set_nonblocking(true).unwrap();
            let _ = client.write(&vec![fill; bytes]);
            if fill == 0x5a {
                held.push(client);
            }
        }
        must_echo(&rack, &server);
    }
}

#[test]
fn clients_that_pass_wrong_descriptors_do_not_stall_a_server() {
    let rack = Rack::new();
    let server = start_echo(&rack);
    let at = rendezvous(&rack);
    let before = descriptors_of(&server);
    let mut held = Vec::new();
    for descriptors in wrong_descriptors() {
        for bytes in [1_usize, 64, 4096] {
            let client = connect_raw(&at);
            send_with_descriptors(&client, &vec![0x11; bytes], &descriptors);
            if bytes == 64 {
                held.push(client);
            }
        }
        must_echo(&rack, &server);
    }
    drop(held);
    must_echo(&rack, &server);
    must_echo(&rack, &server);
    assert!(descriptors_of(&server) <= before + 1, "{before} descriptors became {}", descriptors_of(&server));
}

fn descriptors_of(server: &Server) -> usize {
    fs::read_dir(format!("/proc/{}/fd", server.process.pid())).unwrap().count()
}

/// The size of a connection's memory, and the offsets of the words of the lane to the server and of the lane back.
fn offsets_in_segment() -> Vec<String> {
    let [to_server, back] = [segment::Side::Acceptor, segment::Side::Connector].map(segment::layout_to);
    [
        Segment::SEGMENT_BYTES,
        to_server.small_offset,
        to_server.small_slots as usize,
        to_server.forward_offset,
        to_server.back_offset,
        back.forward_offset,
        back.back_offset,
    ]
    .map(|number| number.to_string())
    .to_vec()
}

const ECHO_CLIENTS_MAX: usize = 2000;
const KILLS_LIMIT: Duration = Duration::from_secs(300);

#[test]
fn clients_that_forge_words_of_their_connections_do_not_stall_a_server() {
    forge_words_of_connections_to(&[]);
}

#[test]
fn clients_that_forge_words_of_connections_shared_with_a_child_do_not_stall_a_server() {
    forge_words_of_connections_to(&["--with-child"]);
}

fn start_selector_echo(rack: &Rack, options: &[&str]) -> Server {
    start_server(|port| {
        let mut command = script(rack.require_lane(python()), "selector_echo_server.py", port);
        command.args(options);
        command
    })
}

/// The unit of processor times in `/proc` (`USER_HZ`).
const TICKS_PER_S: f64 = 100.0;

/// Seconds of processor time that a server has used.
fn cpu_s(server: &Server) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", server.process.pid())).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let [user, system] = [11, 12].map(|field: usize| fields[field].parse::<f64>().unwrap());
    (user + system) / TICKS_PER_S
}

/// How long a silent client is watched, and the processor time that the server may use meanwhile, which includes that
/// for its timers: a server that spins uses nearly all of the time.
const SILENCE: Duration = Duration::from_secs(2);
const SILENCE_CPU_S_MAX: f64 = 0.5;

/// Panics if a server is busy although its clients do nothing.
#[track_caller]
fn must_be_idle(server: &Server) {
    let before_s = cpu_s(server);
    std::thread::sleep(SILENCE);
    let used_s = cpu_s(server) - before_s;
    assert!(used_s < SILENCE_CPU_S_MAX, "{used_s} s of processor time in {SILENCE:?} of silence");
}

/// Panics unless a server has as few descriptors as it had, once it has noticed that its clients are gone.
#[track_caller]
fn must_keep_no_descriptors(server: &Server, before: usize) {
    wait_for("end of the clients' descriptors", || descriptors_of(server), |count| *count <= before + 1);
}

fn forge_words_of_connections_to(options: &[&str]) {
    let rack = Rack::new();
    let server = start_selector_echo(&rack, options);
    must_echo(&rack, &server);
    let descriptors_before = descriptors_of(&server);
    let mut hostile = script(rack.require_lane(python()), "hostile_client.py", server.port);
    let hostile = Process::start(hostile.args(offsets_in_segment()));
    // Forging all words takes some seconds.
    let has_forged = (0..ECHO_CLIENTS_MAX).any(|_| {
        must_echo(&rack, &server);
        hostile.stdout().starts_with("forged ") || !hostile.is_running()
    });
    assert!(has_forged && hostile.is_running(), "{} {}", hostile.stdout(), hostile.stderr());
    must_echo(&rack, &server);
    assert!(!hostile.stdout().contains("reset 0"), "no forged word had an effect");
    if options.is_empty() {
        must_be_idle(&server);
    }
    drop(hostile);
    must_echo(&rack, &server);
    must_keep_no_descriptors(&server, descriptors_before);
}

/// A client that passes descriptors on the lifelines of its connections; see `c/hostile/passer.c`.
fn start_passer(rack: &Rack, server: &Server, arguments: &[&str]) -> Process {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || c::build("passer", &[package_file("c/hostile/passer.c")], &["-O2", "-Wall", "-Wextra", "-Werror"]);
    let mut command = rack.require_lane(BUILT.get_or_init(build));
    let passer = Process::start(command.arg(server.port.to_string()).args(arguments));
    passer.wait_until("descriptors that were passed", WAIT_MAX, |passer| passer.stdout().contains("passed"));
    passer
}

#[test]
fn clients_that_pass_many_descriptors_on_their_connections_leave_none_in_a_server() {
    let rack = Rack::new();
    let server = start_selector_echo(&rack, &[]);
    drop(start_passer(&rack, &server, &["nulls", "5"]));
    must_echo(&rack, &server);
    let before = descriptors_of(&server);
    drop(start_passer(&rack, &server, &["nulls", "60"]));
    must_echo(&rack, &server);
    must_keep_no_descriptors(&server, before);
}

#[test]
fn clients_that_pass_sockets_that_linger_do_not_stall_a_server() {
    let rack = Rack::new();
    let server = start_selector_echo(&rack, &[]);
    let passer = start_passer(&rack, &server, &["linger"]);
    must_echo(&rack, &server);
    must_be_idle(&server);
    drop(passer);
    must_echo(&rack, &server);
}

/// A TCP socket whose last close would wait for a minute: its peer reads nothing of what it has sent.
fn lingering() -> OwnedFd {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    std::mem::forget(listener); // Closed, it would reset the connection.
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(60))).unwrap();
    socket.into()
}

#[test]
fn unknown_peers_at_the_socket_of_a_server_do_not_end_its_accept() {
    let rack = Rack::new();
    let server = start_server(|port| script(rack.require_lane(python()), "accept_once.py", port));
    let at = rendezvous(&rack);
    let pid = Pid::from_raw(server.process.pid() as i32).unwrap();
    // Stopped, so that the server becomes the last holder of each socket.
    kill_process(pid, Signal::STOP).unwrap();
    let peers: Vec<_> = (0..3).map(|_| connect_raw(&at)).collect();
    peers.iter().for_each(|peer| send_with_descriptors(peer, b"GET / HTTP/1.0", &[lingering()]));
    kill_process(pid, Signal::CONT).unwrap();
    must_echo(&rack, &server);
}

/// A program that has polled does not expect its next `accept` to block.
#[test]
fn an_unknown_peer_of_which_a_server_was_notified_does_not_block_its_accept() {
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    let server = Process::start(command.arg(package_file("python/listeners.py")).arg("--poll-and-accept"));
    server.wait_until("a port", WAIT_MAX, |server| server.stdout().contains('\n'));
    let peer = connect_raw(&rendezvous(&rack));
    let output = server.wait(WAIT_MAX).must_succeed().stdout;
    drop(peer);
    assert_eq!(output.lines().skip(1).collect::<Vec<_>>(), ["aborted", "nobody"]);
}

/// Kills clients and servers at random: the peers must see it, and nothing may leak.
fn kill_at_random_moments(count: &str) {
    // A failure prints the seed.
    let seed = std::process::id().to_string();
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    command.arg(package_file("python/kills.py")).args([count, &seed]);
    let finished = Process::start(&mut command).wait(KILLS_LIMIT);
    assert!(finished.status.success() && finished.stdout == "ok\n", "seed {seed}: {finished}");
}

#[test]
fn killed_endpoints_leave_nothing_behind() {
    kill_at_random_moments("300");
}

#[test]
#[ignore = "takes about ten seconds; in ./x exam"]
fn endpoints_killed_at_two_thousand_moments_leave_nothing_behind() {
    kill_at_random_moments("2000");
}

/// Options of the server and its client, and a function that creates something at the server's path.
type Obstacle = (&'static [&'static str], fn(&Path));

#[test]
fn stale_and_foreign_names_do_not_stop_a_new_server() {
    let rack = Rack::new();
    let server = start_echo(&rack);
    let (port, at) = (server.port, rendezvous(&rack));
    drop(server); // killed, so its name remains
    // The library does not remove what a user put there: a folder may cost the lane, never the connection.
    let obstacles: [Obstacle; 5] = [
        (REQUIRED, |_| {}),
        (REQUIRED, |at| fs::write(at, "a file").unwrap()),
        (REQUIRED, |at| symlink("/no/such/target", at).unwrap()),
        (REQUIRED, |at| drop(std::os::unix::net::UnixListener::bind(at).unwrap())), // a socket that no process has open
        (&[], |at| fs::create_dir(at).unwrap()),
    ];
    for (number, (options, create)) in obstacles.iter().enumerate() {
        if number > 0 {
            let _ = fs::remove_file(&at);
        }
        create(&at);
        let process = Process::start(&mut echo_server(&rack, options, port));
        process.wait_until("a listener", WAIT_MAX, |_| system_tests::port::is_listening(port));
        must_echo_with(&rack, options, &Server { process, port });
    }
}
