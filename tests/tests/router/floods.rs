//! Floods of forged ARP and neighbour discovery.

use serde_json::Value;
use system_tests::{Process, WAIT_MAX, paths, wait_until};

use super::cluster::{Lab, PLAIN};

/// Sends neighbour solicitations and ARP requests to the router until it is ended, in bursts of 40, from forged
/// addresses: 400 of the network `fd77:1::/64`, 90 of `10.77.1.0/24`. So many also find room in the kernel's table,
/// which all namespaces of the machine share.
const FLOOD: &str = r#"
import socket, struct, sys, time
router, own = (bytes.fromhex(mac.replace(":", "")) for mac in sys.argv[1:3])
port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
port.bind(("eth0", 0))
target = socket.inet_pton(socket.AF_INET6, "fd77:1::1")

def solicitation(number):
    source = socket.inet_pton(socket.AF_INET6, "fd77:1::bad:%x" % number)
    message = struct.pack("!BBHI", 135, 0, 0, 0) + target + bytes([1, 1]) + own
    pseudo = source + target + struct.pack("!II", len(message), 58)
    total = sum(struct.unpack("!%dH" % ((len(pseudo) + len(message)) // 2), pseudo + message))
    total = (total & 0xffff) + (total >> 16)
    total = (total & 0xffff) + (total >> 16)
    message = message[:2] + struct.pack("!H", 0xffff - total) + message[4:]
    return router + own + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(message), 58, 255) + source + target + message

def request(number):
    sender = socket.inet_aton("10.77.1.%d" % (100 + number % 90))
    body = struct.pack("!HHBBH", 1, 0x800, 6, 4, 1) + own + sender + bytes(6) + socket.inet_aton("10.77.1.1")
    return b"\xff" * 6 + own + b"\x08\x06" + body

number = 0
while True:
    for _ in range(20):
        port.send(solicitation(number % 400))
        port.send(request(number))
        number += 1
    time.sleep(0.01)
"#;

/// Returns the hardware address of `eth0`.
fn mac(lab: &Lab, at: &str) -> String {
    let link: Value = serde_json::from_str(&lab.ip(at, &["-j", "link", "show", "eth0"])).expect("JSON");
    link[0]["address"].as_str().expect("an address").to_owned()
}

#[test]
fn forged_neighbours_are_not_announced_and_displace_no_host() {
    let name = "forged_neighbours_are_not_announced_and_displace_no_host";
    let Some(lab) = Lab::new(name, &["a", "b", "h1", "h2", "h3"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.join(("a", "eth1"), ("h3", "eth0"), 3);
    lab.write(&PLAIN.replacen("device = \"eth0\"", "device = \"eth0\"\n\n[[nodes.ports]]\ndevice = \"eth1\"", 1));
    lab.up();
    for address in ["10.77.1.2", "fd77:1::2", "10.77.3.2", "fd77:3::2"] {
        lab.ping("h2", address).must_succeed();
        // Hosts that answer are announced.
        wait_until("a host route", || lab.routes("b", address)[0]["metric"] == u32::MAX);
    }
    for address in ["10.77.2.2", "fd77:2::2"] {
        wait_until("a host route", || lab.routes("b", address)[0]["metric"] == u32::MAX);
    }
    let routes = || ["v4", "v6"].map(|version| lab.node(1)["routes"][version].as_u64().expect("a number"));
    let before = routes();
    let mut flood = lab.at("h1", paths::tool("python3"));
    let flood = Process::start(flood.args(["-c", FLOOD, &mac(&lab, "a"), &mac(&lab, "h1")]));
    wait_until("refused neighbours", || lab.node(0)["neighbours_refused"].as_u64() > Some(500));
    // Hosts at the same port and at others reach each other, in both directions, and so do new ones.
    lab.ip("h1", &["address", "add", "10.77.1.9/24", "dev", "eth0"]);
    lab.ip("h1", &["address", "add", "fd77:1::9/64", "dev", "eth0", "nodad"]);
    for (from, to) in [("h1", 2), ("h3", 2), ("h2", 3), ("h3", 1)] {
        lab.ping(from, &format!("10.77.{to}.2")).must_succeed();
        lab.ping(from, &format!("fd77:{to}::2")).must_succeed();
    }
    for address in ["10.77.1.9", "fd77:1::9"] {
        lab.ping("h2", address).must_succeed();
        wait_until("a host route", || lab.routes("b", address)[0]["metric"] == u32::MAX);
    }
    // Link-local addresses are not announced; each version has one new host.
    assert_eq!(routes(), before.map(|routes| routes + 1), "{:#}", lab.node(1)["routes"]);
    flood.stop(WAIT_MAX);
    let forged = |neighbour: &Value| {
        let address = neighbour["address"].as_str().expect("an address");
        address.contains("bad") || address.starts_with("10.77.1.1")
    };
    wait_until("no forged neighbour", || !lab.node(0)["neighbours"].as_array().expect("neighbours").iter().any(forged));
    assert_eq!(routes(), before.map(|routes| routes + 1));
}
