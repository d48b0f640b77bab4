//! The kernel settings that nodes change, across kills.

use rustix::process::Signal;
use system_tests::process::signal;
use system_tests::{netns, paths};

use crate::cluster::{Lab, PLAIN};

const SETTINGS: [&str; 3] =
    ["net.ipv4.conf.eth0.forwarding", "net.ipv6.conf.all.forwarding", "net.ipv4.conf.eth0.rp_filter"];

fn values(lab: &Lab) -> String {
    let output = lab.at("a", paths::tool("sysctl")).arg("-n").args(SETTINGS).output().expect("sysctl runs");
    String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn kill(lab: &Lab) {
    signal(lab.node(0)["pid"].as_u64().expect("up"), Signal::KILL);
}

#[test]
fn settings_found_first_are_restored_after_kills() {
    let name = "settings_found_first_are_restored_after_kills";
    let Some(lab) = Lab::new(name, &["a", "b", "host-a", "host-b"]) else { return };
    lab.join(("a", "eth0"), ("host-a", "eth0"), 1);
    lab.join(("b", "eth0"), ("host-b", "eth0"), 2);
    lab.write(PLAIN);
    let set: Vec<String> = SETTINGS.iter().map(|setting| format!("{setting}=1")).collect();
    assert!(lab.at("a", paths::tool("sysctl")).arg("-qw").args(&set).status().expect("sysctl runs").success());
    for kills in 1..3 {
        for _ in 0..kills {
            lab.up();
            assert_eq!(values(&lab), "0 0 0");
            kill(&lab);
        }
        lab.up();
        lab.finish("down", &[]).must_succeed();
        assert_eq!(values(&lab), "1 1 1", "after {kills} kills");
    }
    // 'down' restores them without a further start.
    lab.up();
    kill(&lab);
    lab.finish("down", &[]).must_succeed();
    assert_eq!(values(&lab), "1 1 1");
    // The namespace is made anew: its settings are not the killed node's.
    lab.up();
    kill(&lab);
    netns::delete_all(&lab.namespace("a"));
    netns::add(&lab.namespace("a"));
    lab.finish("down", &[]).must_succeed();
    let forwarding = lab.at("a", paths::tool("sysctl")).args(["-n", SETTINGS[1]]).output().expect("sysctl runs");
    assert_eq!(forwarding.stdout, b"0\n");
}
