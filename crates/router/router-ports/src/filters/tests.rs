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
            ("arp", "input", true),
            ("arp", "output", true),
            ("bridge", "forward", false),
            ("bridge", "prerouting", false),
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
        // A policy without a rule, also of a table that is switched off; and a jump to a chain that only counts.
        nft("table ip t { chain c { type filter hook forward priority 0; policy drop; }\n}");
        assert_eq!(find(watch).len(), 1);
        assert!(watch.has_changed());
        nft("table ip t { flags dormant; }");
        assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
        nft("add table ip t");
        assert_eq!((watch.has_changed(), find(watch).len()), (true, 1));
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
        let arp_rules = [
            ("-P OUTPUT DROP", "-P OUTPUT ACCEPT", Some("table filter, chain OUTPUT")),
            ("-A INPUT -s 192.0.2.1 -j DROP", "-F INPUT", Some("table filter, chain INPUT")),
            ("-A INPUT -s 192.0.2.1 -j ACCEPT", "-F INPUT", None),
        ];
        let programs =
            [("iptables-legacy", &rules[..]), ("ip6tables-legacy", &rules[..]), ("arptables-legacy", &arp_rules[..])];
        for (program, rules) in programs {
            if Command::new(program).arg("--version").output().is_err() {
                println!("skipped: {program} is not installed");
                continue;
            }
            for &(add, remove, found) in rules {
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

#[test]
fn queueing_disciplines_that_shape_are_found() {
    within("queueing_disciplines_that_shape", |watch, find| {
        let disciplines = [
            ("pfifo limit 10", None),
            ("tbf rate 1mbit burst 10kb latency 10ms", Some("tbf")),
            ("handle 1: htb default 1", Some("htb")),
        ];
        for (discipline, found) in disciplines {
            for device in ["b", "a"] {
                if !run(&format!("tc qdisc add dev {device} root {discipline}")) {
                    println!("skipped: the kernel has no qdisc {discipline}");
                    continue;
                }
                let expected = found.filter(|_| device == "a").map(|kind| format!("tc qdisc {kind}, egress of a"));
                let expected: Vec<String> = expected.into_iter().collect();
                assert_eq!((watch.has_changed(), find(watch)), (true, expected), "{discipline} {device}");
                assert!(run(&format!("tc qdisc del dev {device} root")));
                assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
            }
        }
    });
}

#[test]
fn ipsec_policies_for_forwarded_packets_are_found() {
    within("ipsec_policies_for_forwarded_packets", |watch, find| {
        assert!(run("ip address add 192.0.2.1/24 dev a") && run("ip -6 address add fd00::1/64 dev a nodad"));
        let template = "tmpl src 192.0.2.1 dst 192.0.2.2 proto esp mode tunnel";
        let policies = [
            ("src 10.1.0.0/24 dst 10.2.0.0/24 dir fwd action block".to_owned(), Some("direction fwd, block")),
            ("src fd01::/64 dst fd02::/64 dir out action block".to_owned(), Some("direction out, block")),
            (format!("src 10.1.0.0/24 dst 10.2.0.0/24 dir out {template}"), Some("direction out, encrypt")),
            // Exceptions, and those for packets of the node itself.
            ("src 10.1.0.0/24 dst 10.2.0.0/24 dir fwd action allow".to_owned(), None),
            ("src 10.1.0.0/24 dst 10.2.0.0/24 dir in action block".to_owned(), None),
            (format!("src 192.0.2.1/32 dst 192.0.2.2/32 dir out {template}"), None),
            ("src fd02::/64 dst fd00::1/128 dir fwd action block".to_owned(), None),
            (format!("src 10.1.0.0/24 dst 10.2.0.0/24 dir out {template} if_id 5"), None),
        ];
        assert!(watch.has_changed());
        for (policy, found) in policies {
            // The identifier precedes the templates.
            let policy = match policy.strip_suffix(" if_id 5") {
                Some(policy) => policy.replace(" tmpl", " if_id 5 tmpl"),
                None => policy,
            };
            if !run(&format!("ip xfrm policy add {policy}")) {
                println!("skipped: the kernel has no IPsec policies");
                return;
            }
            let expected: Vec<String> = found.map(|found| format!("IPsec policy, {found}")).into_iter().collect();
            assert_eq!((watch.has_changed(), find(watch)), (true, expected), "{policy}");
            assert!(run("ip xfrm policy flush"));
            assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
        }
        if run("ip xfrm policy setdefault fwd block") {
            assert_eq!((watch.has_changed(), find(watch)), (true, vec!["IPsec default policy, block".to_owned()]));
            assert!(run("ip xfrm policy setdefault fwd accept in block"));
            assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
        }
    });
}

#[test]
fn policy_routing_rules_for_forwarded_packets_are_found() {
    within("policy_routing_rules_for_forwarded", |watch, find| {
        assert!(run("ip address add 192.0.2.1/24 dev a"));
        assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
        let rules = [
            ("ip rule", "to 10.2.0.0/16 blackhole", true),
            ("ip -6 rule", "from fd01::/64 prohibit", true),
            ("ip rule", "from 10.1.0.0/16 lookup 100", true),
            ("ip rule", "iif a lookup 100", true),
            ("ip rule", "not fwmark 7 lookup 100", true),
            ("ip rule", "lookup main suppress_prefixlength 0", true),
            ("ip rule", "uidrange 0-10 lookup 100", true),
            ("ip rule", "from 10.1.0.0/16 lookup main", false),
            ("ip rule", "iif lo lookup 100", false),
            ("ip rule", "iif b lookup 100", false),
            ("ip rule", "oif a lookup 100", false),
            ("ip rule", "fwmark 7 lookup 100", false),
            ("ip rule", "from 192.0.2.1 lookup 100", false),
            ("ip rule", "uidrange 5-10 lookup 100", false),
        ];
        for (program, rule, matters) in rules {
            if !run(&format!("{program} add {rule} priority 77")) {
                println!("skipped: the kernel has no policy routing");
                return;
            }
            let family = if program.contains("-6") { "IPv6" } else { "IPv4" };
            let expected = matters.then(|| format!("{family} policy routing rule of priority 77"));
            let expected: Vec<String> = expected.into_iter().collect();
            assert_eq!((watch.has_changed(), find(watch)), (true, expected), "{rule}");
            assert!(run(&format!("{program} del priority 77")));
            assert_eq!((watch.has_changed(), find(watch)), (true, Vec::new()));
        }
        // A rule for an address matters once it is no longer the node's.
        assert!(run("ip rule add from 192.0.2.1 lookup 100"));
        assert!(run("ip address del 192.0.2.1/24 dev a"));
        assert_eq!((watch.has_changed(), find(watch).len()), (true, 1));
    });
}

#[test]
fn netfilter_programs_of_forwarded_packets_are_described() {
    let described = |program| super::describe_program(program);
    let expected = "BPF netfilter program of some network namespace, IPv6, hook forward";
    assert_eq!(described((10, 2)).as_deref(), Some(expected));
    assert_eq!((described((2, 1)), described((2, 3))), (None, None), "input and output");
    assert!(described((2, 4)).unwrap().ends_with("IPv4, hook postrouting"));
}
