//! The metrics of router nodes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::Value;

use super::cluster::{Lab, PLAIN};

fn scrape(mut stream: impl Read + Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n").expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    text
}

/// Returns the value of a metric with these labels after the node's.
fn value(text: &str, name: &str, labels: &str) -> u64 {
    let start = format!("{name}{{node=\"a\"{labels}}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&start));
    line.unwrap_or_else(|| panic!("no {start}in {text}")).parse().expect("a number")
}

#[test]
fn metrics_agree_with_the_status() {
    let Some(lab) = Lab::new("metrics_agree_with_the_status", &["a", "b", "h1", "h2"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    // The kernel chooses a port for a listener that ends at once, and gives it to no other program soon.
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    lab.write(&PLAIN.replacen("name = \"a\"", &format!("name = \"a\"\nmetrics = \"{port}\""), 1));
    lab.up();
    lab.ping("h1", "10.77.2.2").must_succeed();
    let nodes = lab.json("status", &["--node", "a"]);
    let log = Path::new(nodes["nodes"][0]["log"].as_str().expect("a path"));
    let socket = log.with_extension("metrics.sock");
    let before = lab.node(0);
    let texts =
        [scrape(UnixStream::connect(&socket).expect("a socket")), scrape(TcpStream::connect(port).expect("a port"))];
    let after = lab.node(0);
    for text in texts {
        assert_eq!(value(&text, "crosslane_router_peer_up", ",peer=\"b\""), 1);
        assert_eq!(value(&text, "crosslane_router_port_up", ",port=\"eth0\""), 1);
        assert_eq!(value(&text, "crosslane_router_forwards", ""), 1);
        let packets = value(&text, "crosslane_router_port_received_packets_total", ",port=\"eth0\"");
        let of = |status: &Value| status["ports"][0]["traffic"]["received_packets"].as_u64().expect("a number");
        assert!(packets >= 2 && (of(&before)..=of(&after)).contains(&packets), "{packets}");
    }
    lab.finish("down", &[]).must_succeed();
    assert!(!socket.exists());
}

/// A counter that went back would be taken for a restart.
#[test]
fn counters_stay_with_their_ports_when_the_file_moves_these() {
    let test = "counters_stay_with_their_ports_when_the_file_moves_these";
    let Some(lab) = Lab::new(test, &["a", "b", "h1", "h2"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    let (eth0, tap0) = (
        "[[nodes.ports]]\ndevice = \"eth0\"\n",
        "[[nodes.ports]]\ndevice = \"tap0\"\nkind = \"tap\"\naddresses = [\"10.9.0.1/24\"]\n",
    );
    lab.write(&PLAIN.replacen(eth0, &format!("{eth0}{tap0}"), 1));
    lab.up();
    lab.ping("h1", "10.77.2.2").must_succeed();
    let packets = |device: &str| {
        let status = lab.node(0);
        let port = status["ports"].as_array().expect("ports").iter().find(|port| port["device"] == device);
        port.expect("a port")["traffic"]["received_packets"].as_u64().expect("a number")
    };
    let before = packets("eth0");
    assert!(before >= 2, "{before}");
    lab.write(&PLAIN.replacen(eth0, &format!("{tap0}{eth0}"), 1));
    lab.finish("reload", &[]).must_succeed();
    assert!(packets("eth0") >= before && packets("tap0") < before, "{} {}", packets("eth0"), packets("tap0"));
    // Another port at the former place begins at 0.
    lab.write(&PLAIN.replacen(eth0, &format!("{}{eth0}", tap0.replace("tap0", "tap1")), 1));
    lab.finish("reload", &[]).must_succeed();
    assert!(packets("eth0") >= before && packets("tap1") < before);
    lab.ping("h1", "10.77.2.2").must_succeed();
    assert!(packets("eth0") > before);
    lab.finish("down", &[]).must_succeed();
}
