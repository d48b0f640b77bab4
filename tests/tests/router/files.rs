//! Cluster files that differ from the running cluster.

use std::fs;
use std::path::Path;

use system_tests::wait_until;

use crate::cluster::{Lab, PLAIN};

const NAMESPACES: [&str; 4] = ["a", "b", "h1", "h2"];

/// Nodes a and b of [`PLAIN`], each with a host.
fn lab(test: &str) -> Option<Lab> {
    let lab = Lab::new(test, &NAMESPACES)?;
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    Some(lab)
}

/// Whether a process is alive: one that has ended, also a zombie, has no command line.
fn is_alive(pid: u64) -> bool {
    fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline")).is_ok_and(|command| !command.is_empty())
}

#[test]
fn down_ends_nodes_whose_file_has_changed() {
    let Some(lab) = lab("down_ends_nodes_whose_file_has_changed") else { return };
    lab.write(PLAIN);
    lab.up();
    let pids = [0, 1].map(|index| lab.node(index)["pid"].as_u64().expect("a number"));
    let alive = || pids.map(is_alive);
    assert_eq!(alive(), [true, true]);
    let broken = "version = 1\nnodes = 7\n";
    lab.write(broken);
    lab.finish("down", &["--node", "z"])
        .must_fail_in_one_line(2, &["cluster.toml", "line 2", "nodes", "run here: a, b"]);
    assert_eq!(alive(), [true, true]);
    lab.finish("down", &["--node", "a"]).must_succeed();
    assert_eq!(alive(), [false, true]);
    // Under another name the cluster has another directory, which does not contain node b.
    lab.write(&PLAIN.replace("\"plain\"", "\"other\"").replace("\"b\"", "\"c\""));
    lab.finish("down", &[]).must_succeed();
    assert_eq!(alive(), [false, false]);
    // Taking down a valid cluster that is not up succeeds.
    lab.finish("down", &[]).must_succeed();
    lab.write(broken);
    lab.finish("down", &[]).must_fail_in_one_line(2, &["cluster.toml", "line 2", "run here: none"]);
    fs::remove_file(lab.file()).expect("a file");
    lab.finish("down", &[]).must_fail_in_one_line(2, &["cluster.toml", "No such file", "run here: none"]);
}

#[test]
fn an_mtu_above_the_interfaces_is_reported_with_its_remedy() {
    let Some(lab) = lab("an_mtu_above_the_interfaces_is_reported_with_its_remedy") else { return };
    let with_mtu = |mtu: u32| PLAIN.replacen("\"eth0\"", &format!("\"eth0\"\nmtu_bytes = {mtu}"), 1);
    lab.write(&with_mtu(1600));
    let line = "mtu_bytes = 1600 is cut to 1500, the MTU of the interface; run 'ip link set eth0 mtu 1600', or lower \
                it in the file";
    let up = lab.finish("up", &[]).must_succeed();
    assert!(up.stdout.contains(&format!("node a: port eth0: {line}\n")), "{up}");
    assert!(!up.stdout.contains("node b: port"), "{up}");
    let status = lab.finish("status", &[]).must_succeed();
    assert!(status.stdout.contains(&format!("port eth0: {line}\n")), "{status}");
    let log = lab.log("a");
    assert_eq!(log.matches(line).count(), 1, "{log}");

    lab.ip("a", &["link", "set", "eth0", "mtu", "1600"]);
    let port = || lab.node(0)["ports"][0].clone();
    wait_until("the file's MTU", || port()["mtu_bytes"] == 1600 && port()["mtu_cut"].is_null());
    lab.write(&with_mtu(1700));
    let reload = lab.finish("reload", &[]).must_succeed();
    assert!(reload.stdout.contains("node a: port 'eth0': mtu_bytes = 1700 is cut to 1600, the MTU"), "{reload}");
    lab.write(PLAIN);
    lab.finish("reload", &[]).must_succeed();
    assert!(port()["mtu_cut"].is_null(), "{}", port());
}
