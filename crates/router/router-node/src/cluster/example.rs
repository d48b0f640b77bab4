//! An example cluster file.

use std::fmt::Write;

/// Returns a file of `nodes` nodes a, b, ..., each in a network namespace of its name, with an interface `eth0`.
pub fn example(nodes: u8) -> String {
    let mut text = String::from(HEAD);
    for node in (b'a'..).take(usize::from(nodes)).map(char::from) {
        let names = format!("name = \"{node}\"\nnamespace = \"{node}\"");
        let port = "device = \"eth0\"\nkind = \"auto\"";
        let written = write!(text, "\n[[nodes]]\n{names}\n\n[[nodes.ports]]\n{port}\n");
        assert!(written.is_ok(), "text grows");
    }
    text
}

const HEAD: &str = "\
# A cluster of routers: docs/router.md explains every key.
version = 1
name = \"cluster\"

[interconnect]
kind = \"lane\"                  # lane, window, rnic-lane, rnic-udp
batch = \"adaptive\"             # or packets a message, 1 to 32
latency_target_ns = \"10 us\"
balance = \"direct\"             # or valiant: over a third node while a link is congested
";
