//! Hostile clients: they are refused, and the server continues to serve others.

use std::fs;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use segment::Segment;
use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack, Server, WAIT_MAX, start_server};

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

fn forge_words_of_connections_to(options: &[&str]) {
    let rack = Rack::new();
    let server = start_server(|port| {
        let mut command = script(rack.require_lane(python()), "selector_echo_server.py", port);
        command.args(options);
        command
    });
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
    drop(hostile);
    must_echo(&rack, &server);
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
