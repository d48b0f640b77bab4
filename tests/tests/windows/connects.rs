//! Connects to another node while who should answer does not: they wait in the background, as TCP's do.
//!
//! Each program says `pending` once its calls have returned, and only then monitor or proxy go on: a call that waited
//! for them would end in another answer.

use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use system_tests::script::{COMMON, ECHO};
use system_tests::{PATIENCE, Process, place, port};

use super::{DIRECT, Nodes, READER, Settings, WAYS};

const CODES: &str = r#"
import asyncio, errno, select
def code(call, *arguments):
    try:
        call(*arguments)
        return "0"
    except OSError as error:
        return errno.errorcode[error.errno]
def error_of(connection):
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
def begin():
    server = socket.socket()
    server.setblocking(False)
    return server, code(server.connect, address)
"#;

/// Who does not answer.
#[derive(Clone, Copy)]
enum Deaf {
    /// The proxy of the program's node, for a listener that it stands in for already.
    Proxy,
    /// The monitor of the program's node.
    Monitor,
}

const BOTH: [Deaf; 2] = [Deaf::Proxy, Deaf::Monitor];

/// Runs a client on node a, and lets who is deaf hear again once it has said `pending`.
fn client(nodes: &Nodes, deaf: Deaf, script: &str, port: u16) -> String {
    client_after(|| (), nodes, deaf, script, port)
}

/// As [`client`], with something that happens when nobody hears any more.
fn client_after(happens: impl FnOnce(), nodes: &Nodes, deaf: Deaf, script: &str, port: u16) -> String {
    let start = || nodes.start_client(&format!("{CODES}\n{script}"), port, "pending");
    let client = match deaf {
        Deaf::Proxy => {
            let proxy = Pid::from_raw(nodes.nodes[0].proxy.pid() as i32).expect("a pid");
            kill_process(proxy, Signal::STOP).expect("a proxy");
            happens();
            let client = start();
            kill_process(proxy, Signal::CONT).expect("a proxy");
            client
        }
        Deaf::Monitor => {
            let _silence = nodes.nodes[0].monitor.keep_silent();
            happens();
            start()
        }
    };
    client.wait(PATIENCE).must_succeed().stdout
}

/// A server, and the proxy stands in for it where that is to be deaf.
fn serve(nodes: &Nodes, deaf: Deaf) -> (Process, u16) {
    let (server, port) = nodes.serve(ECHO);
    if matches!(deaf, Deaf::Proxy) {
        nodes.client(&READER.replace("say(outcome(server))", "pass"), port);
    }
    (server, port)
}

fn for_all(check: impl Fn(&Nodes, Deaf)) {
    for settings in WAYS {
        let nodes = Nodes::start_as(settings);
        BOTH.into_iter().for_each(|deaf| check(&nodes, deaf));
    }
}

#[test]
fn a_connect_that_does_not_block_answers_as_tcps_until_it_is_there_and_after() {
    for_all(|nodes, deaf| {
        let (_server, port) = serve(nodes, deaf);
        let said = client(
            nodes,
            deaf,
            r#"
server, first = begin()
said = [first, code(server.connect, address), code(server.send, b"x"), code(server.recv, 1), code(server.getpeername)]
one = select.poll()
one.register(server, select.POLLIN | select.POLLOUT)
said += [error_of(server), one.poll(0), select.select([server], [server], [server], 0)]
child = os.fork()
if child == 0:
    os._exit(len(one.poll(50)))
said.append(os.waitpid(child, 0)[1])
twin = server.dup()
epoll = select.epoll()
epoll.register(server, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
said.append(epoll.poll(0))
say("pending", *said)
say(epoll.poll(20) == [(server.fileno(), select.EPOLLOUT)], epoll.poll(0), error_of(server))
say(code(server.connect, address), code(server.connect, address), server.getpeername() == address)
data = os.urandom(1 << 20)
twin.setblocking(True)
threading.Thread(target=twin.sendall, args=(data,)).start()
server.setblocking(True)
say(read(server, len(data)) == data)
"#,
            port,
        );
        let pending = "pending EINPROGRESS EALREADY EAGAIN EAGAIN ENOTCONN 0 [] ([], [], []) 0 []";
        assert_eq!(said, format!("{pending}\nTrue [] 0\n0 EISCONN True\nTrue\n"));
    });
}

#[test]
fn a_connect_that_waits_is_refused_as_tcps_where_nobody_listens_any_more() {
    for_all(|nodes, deaf| {
        let (server, port) = serve(nodes, deaf);
        let said = client_after(
            || drop(server),
            nodes,
            deaf,
            r#"
server, first = begin()
epoll = select.epoll()
epoll.register(server, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
say("pending", first, code(server.connect, address))
refused = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLERR | select.EPOLLHUP
say(epoll.poll(20) == [(server.fileno(), refused)], epoll.poll(0))
poll = select.poll()
poll.register(server, select.POLLOUT)
say(poll.poll(20) == [(server.fileno(), select.POLLOUT | select.POLLERR | select.POLLHUP)])
say(errno.errorcode[error_of(server)], error_of(server))
"#,
            port,
        );
        assert_eq!(said, "pending EINPROGRESS EALREADY\nTrue []\nTrue\nECONNREFUSED 0\n");
    });
}

#[test]
fn a_connect_that_waits_leaves_nothing_behind_when_it_is_closed_or_taken_back() {
    for_all(|nodes, deaf| {
        let (_server, port) = serve(nodes, deaf);
        let said = client(
            nodes,
            deaf,
            r#"
def come_and_go():
    begun = [begin() for _ in range(20)]
    assert all(first == "EINPROGRESS" for _, first in begun), begun
    begun[0][0].shutdown(socket.SHUT_RDWR)
    assert begun[0][0].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
    for server, _ in begun:
        server.close()
    maps = open("/proc/self/maps").read()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:")
say("pending", come_and_go() == come_and_go())
with socket.create_connection(address, timeout=20) as server:
    server.sendall(b"hello")
    say(read(server, 5))
"#,
            port,
        );
        assert_eq!(said, "pending True\nb'hello'\n");
        nodes.report(0, "no connection", |report| report.connections_open == 0);
    });
}

#[test]
fn an_event_loop_goes_on_while_connects_wait() {
    let spans_for_some = Settings { spans: 3, ..DIRECT };
    let nodes = Nodes::start_as(spans_for_some);
    for deaf in BOTH {
        let (_server, port) = serve(&nodes, deaf);
        let said = client(
            &nodes,
            deaf,
            r#"
async def talk(number):
    reader, writer = await asyncio.open_connection(*address)
    data = struct.pack("!I", number) * 5000
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    writer.close()
    await writer.wait_closed()
async def main():
    talks = [asyncio.create_task(talk(number)) for number in range(40)]
    await asyncio.sleep(0.05)
    say("pending", sum(talk.done() for talk in talks))
    await asyncio.wait_for(asyncio.gather(*talks), 20)
    say("all")
asyncio.run(main())
"#,
            port,
        );
        assert_eq!(said, "pending 0\nall\n");
    }
}

#[test]
fn a_connect_that_blocks_ends_with_its_timeout_and_goes_on_in_the_background() {
    let nodes = Nodes::start_as(DIRECT);
    for deaf in BOTH {
        let (_server, port) = serve(&nodes, deaf);
        let said = client(
            &nodes,
            deaf,
            r#"
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
say("pending", code(server.connect, address))
poll = select.poll()
poll.register(server, select.POLLOUT)
say(poll.poll(20_000) == [(server.fileno(), select.POLLOUT)], error_of(server))
server.sendall(b"hello")
say(read(server, 5))
"#,
            port,
        );
        assert_eq!(said, "pending EINPROGRESS\nTrue 0\nb'hello'\n");
    }
}

#[test]
fn a_connect_that_waits_goes_by_kernel_tcp_to_a_server_without_lanes() {
    let nodes = Nodes::start();
    let port = port::free_port();
    let with_address = |mut command: Command, script: &str| {
        command.args(["-c", &format!("{COMMON}\n{CODES}\n{script}"), "127.77.0.2", &port.to_string()]);
        Process::start(&mut command)
    };
    let python = place::tool("python3");
    let server = with_address(nodes.nodes[1].rack.bare_command(&python), ECHO);
    server.wait_until("listening", PATIENCE, |server| server.stdout().contains("listening"));
    let silence = nodes.nodes[0].monitor.keep_silent();
    let client = with_address(
        nodes.nodes[0].rack.run(&["--node", "a"], &python),
        r#"
server, first = begin()
epoll = select.epoll()
epoll.register(server, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
said = [code(server.connect, address), epoll.poll(0)]
say("pending", first, *said)
say(epoll.poll(20) == [(server.fileno(), select.EPOLLOUT)], error_of(server))
say(code(server.connect, address), code(server.connect, address), server.getpeername() == address)
server.setblocking(True)
server.sendall(b"hello")
say(read(server, 5))
"#,
    );
    client.wait_until("pending", PATIENCE, |client| client.stdout().contains("pending"));
    drop(silence);
    let said = client.wait(PATIENCE).must_succeed().stdout;
    assert_eq!(said, "pending EINPROGRESS EALREADY []\nTrue 0\n0 EISCONN True\nb'hello'\n");
}
