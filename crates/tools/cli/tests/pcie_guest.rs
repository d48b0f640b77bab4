//! Tests of `crosslane pcie bench` in a guest of the lab, on the BAR of an ivshmem device and on memory of two NUMA
//! nodes.
//!
//! The guest is emulated (no KVM is needed), so its times are meaningless. The tests check that access to a BAR through
//! sysfs works, and that a window is on the requested node and in the requested pages.

use std::path::Path;
use std::time::Duration;

use lab::{Device, Lab, Node};

const BAR: &str = r#"
bench() { echo "exit $(crosslane pcie bench --device "pci:$DEVICE" --samples 1000 "$@" >&2; echo $?)"; }
for test in lat-rd lat-wrrd bw-rd bw-wr bw-rdwr; do bench --test $test --overwrite --json; done
bench --test bw-wr
bench --test lat-rd --bar 5
bench --test lat-rd --window 2M
"#;

#[test]
#[ignore = "boots an emulated guest, about ten seconds"]
fn every_test_runs_on_ivshmem_and_errors_name_what_is_missing() {
    let lab = Lab::new().guests(1).memory_bytes(1 << 20).built(Path::new(env!("CARGO_BIN_EXE_crosslane")));
    let report = lab.script(BAR).run().unwrap().must_succeed();
    let console = report.output(Node::A);
    let exits: Vec<&str> = console.lines().filter_map(|line| line.trim().strip_prefix("exit ")).collect();
    assert_eq!(exits, ["0", "0", "0", "0", "0", "2", "2", "2"], "{console}");
    for words in ["\"test\":\"lat-rd\"", "\"test\":\"bw-rdwr\"", "--overwrite", "no BAR 5", "1048576 bytes"] {
        assert!(console.contains(words), "{words:?} in {console}");
    }
}

/// Time limit. The test takes about twenty seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(300);

/// Each `seen` starts a benchmark that does not end, and checks its window in the kernel's statistics.
const MEMORY: &str = r#"
seen() {
    words=$1 huge_kb=$2
    shift 2
    crosslane pcie bench --device memory --test lat-rd --window 4M --samples 1000000000 "$@" >/dev/null &
    wait_for grep -q "memfd:crosslane-pcie-bench.* $words\$" /proc/$!/numa_maps
    found=$(awk '/crosslane-pcie-bench/ { ours = 1 } ours && /^ShmemPmdMapped/ { print $2; exit }' /proc/$!/smaps)
    [ "$found" = "$huge_kb" ] || { echo "$* has $found KB in huge pages, not $huge_kb"; return 1; }
    kill $!
    echo "seen $*: $words"
}
ends() {
    wanted=$1
    shift
    code=0
    "$@" || code=$?
    [ $code = "$wanted" ] || { echo "exit $code, not $wanted: $*"; return 1; }
}
bench="crosslane pcie bench --device memory --samples 500"
all="--test lat-rd --window 4M --json"

ends 2 $bench $all --pages thp
ends 2 $bench $all --pages 2m
ends 2 $bench $all --pages 1g
echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled
echo 4 >/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages
ends 2 $bench $all --pages 2m --numa remote
ends 1 taskset 1 $bench $all
ends 1 taskset 3 $bench $all --numa remote
echo 4 >/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages

for place in local:0 remote:1; do
    numa=${place%:*} node=${place#*:}
    seen "N$node=1024 kernelpagesize_kB=4" 0 --numa $numa --pages 4k
    seen "N$node=1024 kernelpagesize_kB=4" 4096 --numa $numa --pages thp
    seen "N$node=2 kernelpagesize_kB=2048" 0 --numa $numa --pages 2m
    for pages in 4k thp 2m; do
        for test in lat-rd:cold lat-wrrd:host-warm bw-rd:device-warm bw-wr:cold bw-rdwr:host-warm; do
            ends 0 $bench --test ${test%:*} --cache ${test#*:} --numa $numa --pages $pages --json >/tmp/result
            echo "ran $(sed 's/.*; window \([^"]*\)".*/\1/' /tmp/result)"
        done
    done
done
"#;

#[test]
#[ignore = "boots an emulated guest, about ten seconds"]
fn memory_is_on_the_requested_node_and_in_the_requested_pages() {
    let lab = Lab::new().guests(1).device(Device::None).memory_nodes(2).ram_bytes(1 << 30).limit(LIMIT);
    let lab = lab.built(Path::new(env!("CARGO_BIN_EXE_crosslane")));
    let report = lab.script(MEMORY).run().unwrap().must_succeed();
    let console = report.output(Node::A);
    let lines = |start: &str| console.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(lines("seen --numa"), 6, "{console}");
    for (node, host) in [(0, "1 (node 0)"), (1, "2 (node 1)")] {
        for (kilobytes, tests) in [(4, 5), (2048, 10)] {
            let place =
                format!("in pages of {kilobytes} KB on node {node}, device on core 0 (node 0), host on core {host}");
            assert_eq!(lines(&format!("ran {place}")), tests, "{place} in {console}");
        }
    }
    let errors: Vec<&str> =
        console.lines().filter_map(|line| line.split_once("crosslane: memory: ")).map(|(_, line)| line).collect();
    let words = [
        "transparent huge pages of shared memory are off ('never')",
        "no 2 free pages of 2m; as root: echo 2 > /sys/kernel",
        "no 1 free pages of 1g",
        "no 2 free pages of 2m on node 1; as root: echo 2 > /sys/devices/system/node/node1",
        "lends one core",
        "a core on a second node",
    ];
    assert_eq!(errors.len(), words.len(), "{errors:?}");
    errors.iter().zip(words).for_each(|(error, words)| assert!(error.contains(words), "{words:?} in {error:?}"));
}
