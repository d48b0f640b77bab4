//! A program that writes anything into the window of its peer's node.

use system_tests::WAIT_MAX;
use system_tests::script::ECHO;

use super::nodes::{DIRECT, Nodes};

const ATTACKERS: u64 = 10;

/// Moves a connection to its span, then writes random words there, half of them where the ends have theirs, and sends
/// and receives meanwhile. The seed follows.
const SCRIBBLER: &str = r#"
import ctypes, random
SPAN_BYTES, LINE_WORDS = 268 << 10, 8
def outbound_spans():
    for line in open("/proc/self/maps"):
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if line.split()[1].startswith("rw-s") and end - begin == SPAN_BYTES:
            yield (ctypes.c_uint64 * (SPAN_BYTES // 8)).from_address(begin)
def attack(seed):
    choices = random.Random(seed)
    with socket.create_connection(address, timeout=20) as server:
        for turn in range(20):
            server.sendall(b"x" * 64)
            read(server, 64)
        spans = list(outbound_spans())
        server.setblocking(False)
        for turn in range(1500):
            for span in spans:
                last = 4 * LINE_WORDS if choices.random() < 0.5 else len(span)
                at = choices.randrange(last)
                near = (span[at] + choices.randrange(-3, 4)) % 2**64
                span[at] = choices.choice([0, 1, 2, 2**63, 2**64 - 1, choices.getrandbits(64), near, near])
            if turn % 20 == 0:
                try:
                    server.send(b"y" * choices.choice([1, 100, 10_000]))
                    server.recv(65536)
                except BlockingIOError:
                    pass
                except OSError:
                    break
        return len(spans)
"#;

#[test]
fn a_program_that_scribbles_into_the_window_of_its_peer_harms_only_its_own_connection() {
    let nodes = Nodes::start_as(DIRECT);
    let (server, port) = nodes.serve(ECHO);
    for seed in 0..ATTACKERS {
        let script = format!("{SCRIBBLER}\nsay(\"spans\", attack({seed}))");
        assert_eq!(nodes.client(&script, port), "spans 1\n", "seed {seed}");
    }
    // Another connection of the same server works, and in the end the server waits without using its processor.
    nodes.connect_once(port);
    nodes.wait_for_report(0, "the end of all connections", |report| report.connections_open == 0);
    server.wait_until("an idle server", WAIT_MAX, |server| {
        let before = server.processor_time();
        std::thread::sleep(std::time::Duration::from_millis(200));
        (server.processor_time() - before).as_millis() < 20
    });
}
