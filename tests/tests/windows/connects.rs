//! Connects to another node whose proxy or monitor does not answer: they continue in the background, as TCP's do.
//!
//! Each program prints `pending` once its calls have returned, and only then does the monitor or proxy continue: a call
//! that waited for them would have a different result.

use std::process::Command;

use system_tests::process::Stopped;
use system_tests::script::{COMMON, ECHO};
use system_tests::{Process, WAIT_MAX, paths, port};

use super::nodes::{ALL_SETTINGS, DIRECT, Nodes, Settings};

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

/// The process that does not answer.
#[derive(Clone, Copy)]
enum Stalled {
    /// The proxy of the program's node, which already has the remote listener.
    Proxy,
    /// The monitor of the program's node.
    Monitor,
}

const BOTH: [Stalled; 2] = [Stalled::Proxy, Stalled::Monitor];

/// Runs a client on node a, and lets the stalled process continue once the client has printed `pending`.
fn client(nodes: &Nodes, stalled: Stalled, script: &str, port: u16) -> String {
    client_after(|| (), nodes, stalled, script, port)
}

/// As [`client`], and calls `happens` once the process is stalled.
fn client_after(happens: impl FnOnce(), nodes: &Nodes, stalled: Stalled, script: &str, port: u16) -> String {
    let start = || nodes.start_client(&format!("{CODES}\n{script}"), port, "pending");
    let client = match stalled {
        Stalled::Proxy => {
            let _stopped = Stopped::new(nodes.nodes[0].proxy.pid());
            happens();
            start()
        }
        Stalled::Monitor => {
            let _silence = nodes.nodes[0].monitor.keep_silent();
            happens();
            start()
        }
    };
    client.wait(WAIT_MAX).must_succeed().stdout
}

/// Starts a server; if the proxy will be stalled, also makes it create the remote listener.
fn serve(nodes: &Nodes, stalled: Stalled) -> (Process, u16) {
    let (server, port) = nodes.serve(ECHO);
    if matches!(stalled, Stalled::Proxy) {
        nodes.connect_once(port);
    }
    (server, port)
}

fn for_all(check: impl Fn(&Nodes, Stalled)) {
    for settings in ALL_SETTINGS {
        let nodes = Nodes::start_as(settings);
        BOTH.into_iter().for_each(|stalled| check(&nodes, stalled));
    }
}

#[test]
fn a_nonblocking_connect_answers_as_tcp_while_pending_and_after() {
    if crate::is_pending(
        "the kernel connects at once to a proxy that does not run; a first connect waits for the monitor",
    ) {
        return;
    }
    for_all(|nodes, stalled| {
        let (_server, port) = serve(nodes, stalled);
        let output = client(
            nodes,
            stalled,
            r#"
server, first = begin()
output = [first, code(server.connect, address), code(server.send, b"x"), code(server.recv, 1), code(server.getpeername)]
one = select.poll()
one.register(server, select.POLLIN | select.POLLOUT)
output += [error_of(server), one.poll(0), select.select([server], [server], [server], 0)]
child = os.fork()
if child == 0:
    os._exit(len(one.poll(50)))
output.append(os.waitpid(child, 0)[1])
twin = server.dup()
epoll = select.epoll()
epoll.register(server, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
output.append(epoll.poll(0))
say("pending", *output)
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
        assert_eq!(output, format!("{pending}\nTrue [] 0\n0 EISCONN True\nTrue\n"));
    });
}

#[test]
fn a_waiting_connect_is_refused_as_by_tcp_without_a_listener() {
    if crate::is_pending("a refusal after the call has returned is a reset") {
        return;
    }
    for_all(|nodes, stalled| {
        let (server, port) = serve(nodes, stalled);
        let output = client_after(
            || drop(server),
            nodes,
            stalled,
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
        assert_eq!(output, "pending EINPROGRESS EALREADY\nTrue []\nTrue\nECONNREFUSED 0\n");
    });
}

#[test]
fn a_waiting_connect_leaves_nothing_behind_when_closed_or_cancelled() {
    if crate::is_pending("the kernel connects at once to a proxy that does not run") {
        return;
    }
    for_all(|nodes, stalled| {
        let (_server, port) = serve(nodes, stalled);
        let output = client(
            nodes,
            stalled,
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
        assert_eq!(output, "pending True\nb'hello'\n");
        nodes.wait_for_report(0, "no connection", |report| report.connections_open == 0);
    });
}

#[test]
fn an_event_loop_continues_while_connects_wait() {
    if crate::is_pending("a first connect waits for the monitor") {
        return;
    }
    let spans_for_some = Settings { spans: 3, ..DIRECT };
    let nodes = Nodes::start_as(spans_for_some);
    for stalled in BOTH {
        let (_server, port) = serve(&nodes, stalled);
        let output = client(
            &nodes,
            stalled,
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
        assert_eq!(output, "pending 0\nall\n");
    }
}

#[test]
fn a_blocking_connect_times_out_and_continues_in_the_background() {
    if crate::is_pending("a first connect waits for the monitor") {
        return;
    }
    let nodes = Nodes::start_as(DIRECT);
    for stalled in BOTH {
        let (_server, port) = serve(&nodes, stalled);
        let output = client(
            &nodes,
            stalled,
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
        assert_eq!(output, "pending EINPROGRESS\nTrue 0\nb'hello'\n");
    }
}

#[test]
fn a_connect_uses_kernel_tcp_while_the_monitor_is_silent() {
    let nodes = Nodes::start();
    let port = port::free_port();
    let with_address = |mut command: Command, script: &str| {
        command.args(["-c", &format!("{COMMON}\n{CODES}\n{script}"), "127.77.0.2", &port.to_string()]);
        Process::start(&mut command)
    };
    let python = paths::tool("python3");
    let server = with_address(nodes.nodes[1].rack.bare_command(&python), ECHO);
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    let silence = nodes.nodes[0].monitor.keep_silent();
    let client = with_address(
        nodes.nodes[0].rack.run(&["--node", "a"], &python),
        r#"
server, first = begin()
poll = select.poll()
poll.register(server, select.POLLOUT)
say(first, poll.poll(20_000) == [(server.fileno(), select.POLLOUT)], error_of(server))
say(code(server.connect, address), server.getpeername() == address)
server.setblocking(True)
server.sendall(b"hello")
say(read(server, 5))
"#,
    );
    let output = client.wait(WAIT_MAX).must_succeed().stdout;
    drop(silence);
    assert_eq!(output, "EINPROGRESS True 0\nEISCONN True\nb'hello'\n");
}
