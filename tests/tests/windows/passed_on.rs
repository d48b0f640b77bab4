//! Connections in windows that are passed on by exec and by SCM_RIGHTS.

use system_tests::script::ECHO;

use super::nodes::{DIRECT, DIRECT_SETTINGS, Nodes, WRITE_COMBINED, path_of};

/// Connects and starts programs that receive the connection.
const SENDER: &str = r#"
import errno, fcntl, resource, subprocess
TALK = '''
import os, socket, sys
def talk(server, who):
    server.sendall(who)
    assert server.recv(100) == who
'''
def start(program, inherited, *words):
    words = [sys.executable, "-c", TALK + program, str(inherited.fileno()), *words]
    return subprocess.Popen(words, pass_fds=[inherited.fileno()], stdout=subprocess.PIPE, text=True)
def become(program, *words):
    os.set_inheritable(server.fileno(), True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", TALK + program, str(server.fileno()), *words])
exec(TALK)
server = socket.create_connection(address, timeout=20)
server.settimeout(None)
talk(server, b"before")
"#;

/// Runs a client on node a and waits until no connection is left in the windows.
#[track_caller]
fn run_sender(nodes: &Nodes, script: &str) -> String {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(&format!("{SENDER}\n{script}"), port);
    nodes.assert_direct(&nodes.wait_for_free_spans(0, 1));
    output
}

#[test]
fn a_connection_in_the_windows_is_passed_on_by_exec_and_by_scm_rights() {
    DIRECT_SETTINGS.map(Nodes::start_as).iter().for_each(pass_on);
}

fn pass_on(nodes: &Nodes) {
    let output = run_sender(
        nodes,
        r#"
ours, theirs = socket.socketpair()
receiver = start('''
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 10, 4)[1]
assert len(fds) == 1, fds
talk(socket.socket(fileno=fds[0]), b"by message")
''', theirs)
socket.send_fds(ours, [b"x"], [server.fileno()])
say(receiver.wait())
become('''
talk(socket.socket(fileno=int(sys.argv[1])), b"after exec")
print("after exec")
''')
"#,
    );
    assert_eq!(output, "0\nafter exec\n");
}

/// The descriptor has the highest possible number, above all hidden descriptors.
#[test]
fn a_program_keeps_its_own_descriptor_of_the_device_after_exec_and_close() {
    let nodes = Nodes::start_as(WRITE_COMBINED);
    let script = r#"
highest = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16) - 1
own = fcntl.fcntl(os.open(MEMORY, os.O_RDWR), fcntl.F_DUPFD, highest)
become('''
own, server = int(sys.argv[2]), socket.socket(fileno=int(sys.argv[1]))
talk(server, b"after exec")
server.close()
print(os.pread(own, 6, 0) == os.pread(os.open(sys.argv[3], os.O_RDONLY), 6, 0))
''', str(own), MEMORY)
"#;
    let output = run_sender(&nodes, &format!("MEMORY = '{}'\n{script}", path_of(&nodes.memory).display()));
    assert_eq!(output, "True\n");
}

#[test]
fn a_connection_passed_back_to_its_holder_is_the_same_one() {
    for way in DIRECT_SETTINGS {
        let output = run_sender(
            &Nodes::start_as(way),
            r#"
ours, theirs = socket.socketpair()
socket.send_fds(ours, [b"x"], [server.fileno()])
again = socket.socket(fileno=socket.recv_fds(theirs, 10, 4)[1][0])
def stream(own):
    for _ in range(200):
        own.sendall(b"12345678" * 100)
senders = [threading.Thread(target=stream, args=(own,)) for own in (server, again)]
[sender.start() for sender in senders]
say(read(again, 320_000) == b"12345678" * 40_000)
[sender.join() for sender in senders]
server.close()
talk(again, b"still there")
"#,
        );
        assert_eq!(output, "True\n");
    }
}

/// The memfd looks like one that represents spans of windows: sealed, and with a file position that is an offset.
#[test]
fn a_memfd_of_the_program_is_passed_unchanged() {
    let output = run_sender(
        &Nodes::start_as(DIRECT),
        r#"
own = os.memfd_create("own", os.MFD_ALLOW_SEALING)
os.write(own, b"its own" * 100_000)
fcntl.fcntl(own, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
ours, theirs = socket.socketpair()
receiver = start('''
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 10, 5)[1]
assert len(fds) == 3, fds
talk(socket.socket(fileno=fds[1]), b"by message")
print(*[os.pread(fd, 7, 0).decode() for fd in (fds[0], fds[2])])
''', theirs)
socket.send_fds(ours, [b"x"], [own, server.fileno(), own])
say(receiver.communicate()[0].strip())
"#,
    );
    assert_eq!(output, "its own its own\n");
}

#[test]
fn connections_are_passed_on_by_several_messages_at_once() {
    let output = run_sender(
        &Nodes::start_as(DIRECT),
        r#"
import ctypes
C = ctypes.CDLL(None, use_errno=True)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
class Message(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("name_bytes", ctypes.c_uint), ("vectors", ctypes.POINTER(Vector)),
        ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_long), ("bytes", ctypes.c_ulong)]
class Room:
    def __init__(self, fd):
        control = struct.pack("@Qiii4x", 20, socket.SOL_SOCKET, socket.SCM_RIGHTS, fd)
        self.data, self.control = ctypes.create_string_buffer(b"x", 10), ctypes.create_string_buffer(control, 24)
        self.vector = Vector(ctypes.addressof(self.data), 1)
    def fill(self, message):
        message.vectors, message.count = ctypes.pointer(self.vector), 1
        message.control, message.control_bytes = ctypes.addressof(self.control), 24
rooms = [Room(server.fileno()), Room(server.fileno())]
messages = (Message * 2)()
[room.fill(message) for room, message in zip(rooms, messages)]
ours, theirs = socket.socketpair()
say(C.sendmmsg(ours.fileno(), messages, 2, 0))
into = [Room(-1), Room(-1)]
[room.fill(message) for room, message in zip(into, messages)]
say(C.recvmmsg(theirs.fileno(), messages, 2, 0, None))
for room in into:
    fd = struct.unpack_from("@i", room.control.raw, 16)[0]
    with socket.socket(fileno=fd) as again:
        talk(again, b"by several")
talk(server, b"still there")
"#,
    );
    assert_eq!(output, "2\n2\n");
}
