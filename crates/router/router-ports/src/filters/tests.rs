//! Filters of namespaces that exist during a test.

use std::io::Write as _;
use std::process::{Command, Stdio};

use super::*;
use crate::Interface;
use crate::namespace;

/// Runs a program in the network namespace of the calling thread. Returns whether the kernel has what it needs.
#[track_caller]
fn run(command: &str) -> bool {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_absent = error.contains("not found") || error.contains("not supported") || error.contains("Unknown");
    assert!(output.status.success() || is_absent, "{command}: {error}");
    output.status.success()
}

#[track_caller]
fn nft(commands: &str) {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{commands}");
}

/// Runs a test in a namespace with interfaces `a` and `b`.
fn within(test: &str, run_test: impl FnOnce(&mut FilterWatch, &dyn Fn(&mut FilterWatch) -> Vec<String>) + Send) {
    let Some(namespace) = namespace::for_test(test) else { return };
    namespace
        .within(|| {
            assert!(run("ip link add name a type veth peer name b"));
            let interfaces = vec![(Interface::by_name("a").unwrap().index, "a".to_owned())];
            let find = |watch: &mut FilterWatch| watch.find(&interfaces).unwrap();
            let mut watch = FilterWatch::open().unwrap();
            assert_eq!((find(&mut watch), watch.has_changed()), (Vec::new(), false));
            run_test(&mut watch, &find);
        })
        .unwrap();
}

#[test]
fn chains_of_nftables_that_may_touch_transit_packets_are_found() {
    within("chains_of_nftables_that_may_touch", |watch, find| {
        let chain = |hook: &str| format!("chain c {{ type filter hook {hook} priority 0; policy accept; RULES\n}}");
        let hooks = [
            ("ip", "prerouting", true),
            ("ip6", "forward", true),
            ("inet", "postrouting", true),
            ("inet", "input", false),
            ("ip", "output", false),
            ("arp", "input", false),
            ("bridge", "forward", false),
            ("netdev", "ingress device a", true),
            ("netdev", "ingress device b", false),
            ("netdev", "ingress devices = { b, a }", true),
            ("netdev", "egress device a", true),
            ("inet", "ingress device a", true),
        ];
        let rules = [
            ("", false),
            ("counter;", false),
            ("meta length 100 counter; accept;", false),
            ("drop;", true),
            ("meta mark set 1;", true),
            ("meta length 100 counter drop;", true),
            ("limit rate 1/second accept;", true),
            ("meta length vmap { 100 : drop };", true),
            ("jump other;", true),
        ];
        for (family, hook, passes) in hooks {
            for (rules, touches) in rules {
                let chain = chain(hook).replace("RULES", rules);
                nft(&format!("table {family} t {{ chain other {{ counter drop; }}\n{chain}\n}}"));
                assert!(watch.has_changed(), "{family} {hook} {rules}");
                let name = hook.split(' ').next().unwrap();
                let expected = format!("nftables {family} table t, chain c, hook {name}");
                let expected: Vec<String> = (touches && passes).then_some(expected).into_iter().collect();
                assert_eq!(find(watch), expected, "{family} {hook} {rules}");
                nft(&format!("delete table {family} t"));
                assert!(watch.has_changed());
            }
        }
        // A policy without a rule, and a jump to a chain that only counts.
        nft("table ip t { chain c { type filter hook forward priority 0; policy drop; }\n}");
        assert_eq!(find(watch).len(), 1);
        nft("flush ruleset; table ip t { chain d { counter; }\n\
             chain c { type filter hook forward priority 0; jump d; }\n}");
        assert_eq!(find(watch), Vec::<String>::new());
    });
}

#[test]
fn chains_of_legacy_iptables_that_may_touch_transit_packets_are_found() {
    within("chains_of_legacy_iptables", |watch, find| {
        let rules = [
            ("-P FORWARD DROP", "-P FORWARD ACCEPT", Some("table filter, chain FORWARD")),
            ("-A FORWARD -p tcp -j DROP", "-F FORWARD", Some("table filter, chain FORWARD")),
            ("-A FORWARD -p tcp", "-F FORWARD", None),
            ("-A FORWARD -j ACCEPT", "-F FORWARD", None),
            ("-A INPUT -j DROP", "-F INPUT", None),
            ("-t mangle -A PREROUTING -j MARK --set-mark 1", "-t mangle -F", Some("table mangle, chain PREROUTING")),
            ("-t nat -A POSTROUTING -j MASQUERADE", "-t nat -F", Some("table nat, chain POSTROUTING")),
        ];
        for program in ["iptables-legacy", "ip6tables-legacy"] {
            for (add, remove, found) in rules {
                if !run(&format!("{program} {add}")) {
                    println!("skipped: the kernel has no '{program} {add}'");
                    continue;
                }
                let expected: Vec<String> = found.map(|found| format!("{program} {found}")).into_iter().collect();
                assert_eq!(
                    (find(watch), FilterWatch::find_polled(&[])),
                    (expected.clone(), expected),
                    "{program} {add}"
                );
                assert!(run(&format!("{program} {remove}")));
                assert_eq!(find(watch), Vec::<String>::new(), "{program} {remove}");
            }
        }
    });
}

#[test]
fn filters_of_tc_are_found() {
    within("filters_of_tc_are_found", |watch, find| {
        for (qdisc, direction) in [("ingress", "ingress"), ("clsact", "ingress"), ("clsact", "egress")] {
            for device in ["b", "a"] {
                if !run(&format!("tc qdisc add dev {device} {qdisc}")) {
                    println!("skipped: the kernel has no qdisc {qdisc}");
                    return;
                }
                assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()), "a qdisc without filters");
                let parent = if qdisc == "ingress" { "parent ffff:" } else { direction };
                let rule = "protocol ip u32 match ip dst 192.0.2.1/32 action mirred egress redirect dev lo";
                assert!(run(&format!("tc filter add dev {device} {parent} {rule}")));
                let expected = (device == "a").then(|| format!("tc u32 filter, {direction} of a"));
                let expected: Vec<String> = expected.into_iter().collect();
                assert_eq!((watch.has_changed(), find(watch)), (true, expected), "{qdisc} {direction} {device}");
                assert!(run(&format!("tc qdisc del dev {device} {qdisc}")));
                assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
            }
        }
    });
}
