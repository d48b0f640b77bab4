//! Tests of `crosslane router status` that do not need root: exit codes and output that scripts read.

use std::fs;
use std::process::{Command, Output};

mod command;

use command::{CROSSLANE, assert_fails, crosslane, error_line, stdout};

/// Runs `status` for a cluster of which no node runs. With `has_machines`, only the first node is of this machine.
fn status(has_machines: bool, arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut text = "version = 1\n".to_owned();
    if has_machines {
        text += "key = \"/nowhere/key\"\n[interconnect]\nkind = \"rnic-udp\"\n";
    }
    // No machine has an address of TEST-NET-1 (RFC 5737).
    for (name, ip) in [("a", "127.0.0.1"), ("b", "192.0.2.9")] {
        text += &format!("[[nodes]]\nname = \"{name}\"\n");
        if has_machines {
            text += &format!("control = \"{ip}:4700\"\nfabric = \"{ip}:4791\"\n");
        }
        text += "[[nodes.ports]]\ndevice = \"eth0\"\n";
    }
    fs::write(folder.path().join("c.toml"), text).unwrap();
    let mut command = Command::new(CROSSLANE);
    command.args(["router", "status", "--cluster", "c.toml"]).args(arguments);
    command.env("CROSSLANE_RACK", folder.path().join("base")).current_dir(folder.path()).output().unwrap()
}

#[test]
fn nodes_that_are_down_are_shown_and_make_the_command_fail() {
    let cases: [(bool, &[&str], &str); 4] = [
        (false, &[], "nodes 'a', 'b' of"),
        (false, &["--node", "b"], "node 'b' of"),
        (true, &[], "node 'a' of"),
        (true, &["--node", "b"], "node 'b' of"),
    ];
    for (has_machines, arguments, missing) in cases {
        let output = status(has_machines, arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(error_line(&output).contains(missing), "{output:?}");
        assert!(stdout(&output).starts_with("NODE  STATE"), "{output:?}");
    }
    let output = status(false, &["--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["nodes"][1]["is_up"]), (Some(1), &false.into()));
    // A missing file is wrong use.
    assert_fails(&crosslane(&["router", "status", "--cluster", "/nowhere/c.toml"]), 2, &["/nowhere/c.toml"]);
}
