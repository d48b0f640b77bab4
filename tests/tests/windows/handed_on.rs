//! Connections in the windows that are handed on: by exec and by SCM_RIGHTS.

use system_tests::script::ECHO;

use super::{DIRECT, DIRECT_WAYS, Nodes, WRITE_COMBINED, path_of};

/// Connects, and has programs that get the connection.
const GIVER: &str = r#"
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

/// Runs a client on node a, and waits until its connection is gone from the windows.
#[track_caller]
fn give(nodes: &Nodes, script: &str) -> String {
    let (_server, port) = nodes.serve(ECHO);
    let said = nodes.client(&format!("{GIVER}\n{script}"), port);
    assert_eq!(nodes.wait_for_free_spans(0, 1).bytes_sent, 0);
    said
}

#[test]
fn a_connection_in_the_windows_is_handed_on_by_exec_and_by_scm_rights() {
    DIRECT_WAYS.map(Nodes::start_as).iter().for_each(hand_on);
}

fn hand_on(nodes: &Nodes) {
    let said = give(
        nodes,
        r#"
ours, theirs = socket.socketpair()
heir = start('''
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 10, 4)[1]
assert len(fds) == 1, fds
talk(socket.socket(fileno=fds[0]), b"by message")
''', theirs)
socket.send_fds(ours, [b"x"], [server.fileno()])
say(heir.wait())
become('''
talk(socket.socket(fileno=int(sys.argv[1])), b"after exec")
print("after exec")
''')
"#,
    );
    assert_eq!(said, "0\nafter exec\n");
}

/// At the highest number that a descriptor can have: higher than all that is hidden.
#[test]
fn a_program_that_has_the_device_open_itself_has_it_after_exec_and_after_its_connection() {
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
    let said = give(&nodes, &format!("MEMORY = '{}'\n{script}", path_of(&nodes.memory).display()));
    assert_eq!(said, "True\n");
}

/// Whoever takes one maps a device that the sender names.
#[test]
fn a_connection_on_a_device_is_taken_only_from_the_same_user_or_root() {
    let said = give(
        &Nodes::start_as(WRITE_COMBINED),
        r#"
def hand_over(kind, uid):
    theirs = socket.socket(socket.AF_UNIX, kind)
    theirs.bind(f"\0crosslane-test-{os.getpid()}-{kind}-{uid}")
    if kind == socket.SOCK_STREAM:
        theirs.listen()
    heir = start('''
carrier = socket.socket(fileno=int(sys.argv[1]))
if carrier.type == socket.SOCK_STREAM:
    carrier = carrier.accept()[0]
fds = socket.recv_fds(carrier, 10, 4)[1]
assert len(fds) == 1, fds
print(socket.socket(fileno=fds[0]).family.name)
''', theirs)
    os.seteuid(uid)
    with socket.socket(socket.AF_UNIX, kind) as ours:
        ours.connect(theirs.getsockname())
        socket.send_fds(ours, [b"x"], [server.fileno()])
    os.seteuid(OWN)
    return heir.communicate()[0].strip()
OWN, NOBODY = os.geteuid(), 65534
say("same user", hand_over(socket.SOCK_STREAM, OWN))
say("unknown", hand_over(socket.SOCK_DGRAM, OWN))
# Only root can become somebody else.
say("another", hand_over(socket.SOCK_STREAM, NOBODY) if OWN == 0 else "AF_UNIX")
talk(server, b"after all")
"#,
    );
    assert_eq!(said, "same user AF_INET\nunknown AF_UNIX\nanother AF_UNIX\n");
}

/// A connection in memory that says itself what lies where takes two of a message's 253 descriptors, on a device three.
#[test]
fn a_message_with_more_connections_than_it_has_room_for_is_refused_as_a_whole() {
    for (way, most) in [(DIRECT, 126), (WRITE_COMBINED, 84)] {
        let script = r#"
ours, theirs = socket.socketpair()
heir = start('''
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 10, 253)[1]
talk(socket.socket(fileno=fds[-1]), b"the last one")
print(len(fds))
''', theirs)
try:
    socket.send_fds(ours, [b"x"], [server.fileno()] * (MOST + 1))
    sys.exit("one too many was sent")
except OSError as error:
    say(errno.errorcode[error.errno])
talk(server, b"refused")
socket.send_fds(ours, [b"x"], [server.fileno()] * MOST)
say(heir.communicate()[0].strip())
"#;
        let said = give(&Nodes::start_as(way), &format!("MOST = {most}\n{script}"));
        assert_eq!(said, format!("EINVAL\n{most}\n"));
    }
}
