//! Connects to another node while the proxy or the monitor of this one does not answer. The kernel connects to a proxy
//! that does not run, and the program goes on.
//!
//! Each program prints `pending` once its calls have returned, and only then does the proxy continue: a call that
//! waited for it would have a different result.

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

/// Runs a client on node a, and lets its proxy continue once the client has printed `pending`.
fn client(nodes: &Nodes, script: &str, port: u16) -> String {
    client_after(|| (), nodes, script, port)
}

/// As [`client`], and calls `happens` once the proxy is stopped.
fn client_after(happens: impl FnOnce(), nodes: &Nodes, script: &str, port: u16) -> String {
    let client = {
        let _stopped = Stopped::new(nodes.nodes[0].proxy.pid());
        happens();
        nodes.start_client(&format!("{CODES}\n{script}"), port, "pending")
    };
    client.wait(WAIT_MAX).must_succeed().stdout
}

/// Starts a server, of which the proxy of node a knows.
fn serve(nodes: &Nodes) -> (Process, u16) {
    let (server, port) = nodes.serve(ECHO);
    nodes.connect_once(port);
    (server, port)
}

fn for_all(check: impl Fn(&Nodes)) {
    ALL_SETTINGS.into_iter().for_each(|settings| check(&Nodes::start_as(settings)));
}

#[test]
fn bytes_that_are_sent_before_the_proxy_answers_arrive() {
    for_all(|nodes| {
        let (_server, port) = serve(nodes);
        let output = client(
            nodes,
            r#"
server, first = begin()
poll = select.poll()
poll.register(server, select.POLLOUT)
say("pending", first, poll.poll(0) == [(server.fileno(), select.POLLOUT)], code(server.send, b"early"))
say(code(server.connect, address), server.getpeername() == address)
server.setblocking(True)
say(read(server, 5))
"#,
            port,
        );
        assert_eq!(output, "pending EINPROGRESS True 0\n0 True\nb'early'\n");
    });
}

#[test]
fn a_refusal_after_the_call_has_returned_is_an_error_of_the_socket() {
    for_all(|nodes| {
        let (server, port) = serve(nodes);
        let output = client_after(
            || drop(server),
            nodes,
            r#"
server, first = begin()
poll = select.poll()
poll.register(server, 0)
say("pending", first)
say(poll.poll(20_000) == [(server.fileno(), select.POLLERR | select.POLLHUP)])
say(errno.errorcode[error_of(server)], error_of(server))
"#,
            port,
        );
        assert_eq!(output, "pending EINPROGRESS\nTrue\nECONNREFUSED 0\n");
    });
}

#[test]
fn connections_that_end_before_the_proxy_answers_leave_nothing_behind() {
    for_all(|nodes| {
        let (_server, port) = serve(nodes);
        let output = client(
            nodes,
            r#"
def come_and_go():
    begun = [begin() for _ in range(20)]
    assert all(first == "EINPROGRESS" for _, first in begun), begun
    begun[0][0].shutdown(socket.SHUT_RDWR)
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
    let spans_for_some = Settings { spans: 3, ..DIRECT };
    let nodes = Nodes::start_as(spans_for_some);
    let (_server, port) = serve(&nodes);
    let output = client(
        &nodes,
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

#[test]
fn a_blocking_connect_times_out_and_continues_in_the_background() {
    let nodes = Nodes::start_as(DIRECT);
    let (_server, port) = serve(&nodes);
    let output = client(
        &nodes,
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
    assert_eq!(output, "EINPROGRESS True 0\n0 True\nb'hello'\n");
}
