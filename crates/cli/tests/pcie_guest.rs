//! `crosslane pcie bench` on the BAR of an ivshmem device, inside a guest of the lab.
//!
//! The guest is emulated (no KVM is needed), so its times mean nothing; what is tested is that the way through sysfs to
//! a real BAR works.

use std::path::Path;

use lab::{Lab, Node};

const SCRIPT: &str = r#"
bench() { echo "exit $(crosslane pcie bench --device "pci:$DEVICE" --samples 1000 "$@" >&2; echo $?)"; }
for test in lat-rd lat-wrrd bw-rd bw-wr bw-rdwr; do bench --test $test --overwrite --json; done
bench --test bw-wr
bench --test lat-rd --bar 5
bench --test lat-rd --window 2M
"#;

#[test]
#[ignore = "boots a guest, emulated: some ten seconds"]
fn every_test_runs_on_ivshmem_and_what_is_missing_is_named() {
    let lab = Lab::new().guests(1).memory_bytes(1 << 20).built(Path::new(env!("CARGO_BIN_EXE_crosslane")));
    let report = lab.script(SCRIPT).run().unwrap().must_succeed();
    let console = report.output(Node::A);
    let exits: Vec<&str> = console.lines().filter_map(|line| line.trim().strip_prefix("exit ")).collect();
    assert_eq!(exits, ["0", "0", "0", "0", "0", "2", "2", "2"], "{console}");
    for words in ["\"test\":\"lat-rd\"", "\"test\":\"bw-rdwr\"", "--overwrite", "no BAR 5", "1048576 bytes"] {
        assert!(console.contains(words), "{words:?} in {console}");
    }
}
