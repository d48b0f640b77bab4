//! Parsing and checks of rack files.

use std::net::IpAddr;
use std::path::Path;

use proptest::prelude::*;
use rack::{
    ACCESS_PARTS_MAX, Access, AccessRule, Backend, Class, Coherence, LinkTiming, NODES_MAX, PARTITIONS_MAX, Partitions,
    PciMode, Proxy, Publish, Rack, RackFile, Timing, Trust,
};

const TAKEN: &str = "is already that of nodes[0]; give each node its own";

fn parse(text: &str) -> Result<RackFile, String> {
    RackFile::parse(Path::new("r.toml"), text.as_bytes()).map_err(|error| error.to_string())
}

fn example(backend: Backend) -> String {
    let timing = (backend == Backend::Shm).then_some(Timing::Gen4x16);
    Rack::example(3, backend, timing, Trust::Proxy).to_string()
}

#[test]
fn every_example_is_read_back_from_its_text() {
    for backend in Backend::ALL {
        for trust in Trust::ALL {
            for timing in Timing::ALL.iter().map(|timing| Some(*timing)).chain([None]) {
                let rack = Rack::example(NODES_MAX, *backend, timing.filter(|_| *backend == Backend::Shm), *trust);
                assert_eq!(parse(&rack.to_string()).unwrap().rack, rack);
            }
        }
    }
}

#[test]
fn absent_keys_have_the_values_of_an_example() {
    let nodes = "[[nodes]]\nname='a'\naddress='127.77.0.1'\n[[nodes]]\nname='b'\naddress='127.77.0.2'\n";
    let found = parse(&format!("version=1\n[device]\nbackend='shm'\n{nodes}")).unwrap();
    assert_eq!(found.rack, Rack::example(2, Backend::Shm, None, Trust::Proxy));
}

/// Returns the error after replacing `from` once by `to` in the example.
fn refused(backend: Backend, from: &str, to: &str) -> String {
    let text = example(backend);
    assert!(text.contains(from), "{from:?} in\n{text}");
    parse(&text.replacen(from, to, 1)).expect_err(to)
}

#[test]
fn an_error_is_one_line_with_file_line_key_value_and_remedy() {
    let line = |text: &str, part: &str| 1 + text[..text.find(part).unwrap()].matches('\n').count();
    let text = example(Backend::Shm);
    let second = line(&text, "127.77.0.2");
    for (from, to, expected) in [
        (
            "address = \"127.77.0.2\"",
            "address = \"127.77.0.1\"",
            format!("r.toml, line {second}, nodes[1].address: '127.77.0.1' {TAKEN}"),
        ),
        ("name = \"b\"", "name = \"a\"", format!("r.toml, line {}, nodes[1].name: 'a' {TAKEN}", second - 1)),
        (
            "window_bytes = 4194304",
            "window_bytes = 131072",
            format!(
                "r.toml, line {}, device.window_bytes: 131072 bytes are too few for 2 partitions of a \
                 modelled link; make it at least 2170880, or ask for fewer",
                line(&text, "window_bytes")
            ),
        ),
        (
            "version = 1",
            "version = 2",
            "r.toml, line 2, version: 2 belongs to another release, this one reads 1; \
             a file of this release begins as 'crosslane rack example' prints it"
                .to_owned(),
        ),
    ] {
        assert_eq!(refused(Backend::Shm, from, to), expected);
    }
}

#[test]
fn the_only_node_of_a_machine_can_have_any_address() {
    let text = example(Backend::Pci).replace("127.77.0.1", "10.1.2.1").replace("127.77.0.2", "10.1.2.2");
    let host = "address = \"10.1.2.1\"\nbackend = \"shm\"";
    let beside_guests = text.replace("address = \"10.1.2.1\"\ndevice = \"0000:00:04.0\"", host);
    assert!(beside_guests.contains(host));
    assert_eq!(parse(&beside_guests).map(|file| file.rack.nodes[0].address), Ok(IpAddr::from([10, 1, 2, 1])));
}

/// A backend's example, a text in it, its replacement, and parts of the expected error.
type Refusal = (Backend, &'static str, &'static str, &'static [&'static str]);

fn each_is_refused(refusals: &[Refusal]) {
    for (backend, from, to, words) in refusals {
        let error = refused(*backend, from, to);
        assert!(error.starts_with("r.toml, ") && error.lines().count() == 1 && error.contains(';'), "{error}");
        for word in *words {
            assert!(error.contains(word), "{to:?}: {word:?} in {error:?}");
        }
    }
}

#[test]
fn each_invalid_value_of_device_and_nodes_is_named_with_line_and_remedy() {
    use Backend::Shm;
    each_is_refused(&[
        (Shm, "backend = \"shm\"", "backend = \"infiniband\"", &["device.backend", "infiniband", "`shm`, `pci`"]),
        (Shm, "timing = \"gen4x16\"", "timing = \"gen7\"", &["link.timing", "gen7", "`gen6x16`"]),
        (Shm, "window_bytes = 4194304", "window_bytes = \"4 ms\"", &["device.window_bytes", "'4 ms'", "\"2 KiB\""]),
        (Shm, "[timeouts]", "[proxy]\nslice_bytes = 3\n[timeouts]", &["proxy.slice_bytes", "64 to 1048576"]),
        (Shm, "window_bytes = 4194304", "window_bytes = 4194305", &["device.window_bytes", "multiple of 4096"]),
        (Shm, "query_ns = 1000000000", "query_ns = \"1 KiB\"", &["timeouts.query_ns", "'1 KiB'", "nanoseconds"]),
        (Shm, "query_ns = 1000000000", "query_ns = 10", &["timeouts.query_ns", "10 ns", "1 ms"]),
        (Shm, "address = \"127.77.0.2\"", "address = \"127.77.0\"", &["nodes[1].address", "'127.77.0'", "127.77.0.1"]),
        (Shm, "address = \"127.77.0.2\"", "address = \"::\"", &["nodes[1].address", "'::'", "a single node"]),
        (Shm, "address = \"127.77.0.2\"", "address = \"fe80::2\"", &["nodes[1].address", "'fe80::2'", "link-local"]),
        (
            Shm,
            "address = \"127.77.0.2\"",
            "address = \"fd00::2\"",
            &["nodes[1].address", "'fd00::2'", "another family"],
        ),
        (
            Shm,
            "address = \"127.77.0.2\"",
            "address = \"127.0.0.1\"",
            &["nodes[1].address", "'127.0.0.1'", "loopback", "127.77.0.1"],
        ),
        (
            Shm,
            "address = \"127.77.0.2\"",
            "address = \"10.1.2.3\"",
            &["nodes[1].address", "'10.1.2.3'", "several nodes on one machine", "127.77.0.0/16"],
        ),
        (Shm, "name = \"c\"", "name = \"C d\"", &["nodes[2].name", "\"C d\"", "a to z"]),
        (Shm, "address = \"127.77.0.2\"", "adress = \"127.77.0.2\"", &["nodes[1]", "adress", "`address`"]),
        (
            Shm,
            "address = \"127.77.0.3\"",
            "address = \"127.77.0.3\"\ndevice = \"x\"",
            &["nodes[2].device", "'x'", "remove"],
        ),
        (
            Shm,
            "address = \"127.77.0.3\"",
            "address = \"127.77.0.3\"\nmetrics = \"1.2.3.4:5\"",
            &["metrics", "loopback"],
        ),
    ]);
}

#[test]
fn each_other_invalid_value_is_named_with_line_and_remedy() {
    use Backend::{Dax, Pci, Shm};
    each_is_refused(&[
        (Shm, "class = \"bulk\"", "class = \"fast\"", &["partitions[1].class", "fast", "`bulk`"]),
        (Shm, "count = 1", "count = 0", &["partitions[0].count", "at least 1"]),
        (Shm, "count = 1", "count = 2\ncores = [1]", &["partitions[0].cores", "1 cores for 2", "count = 1"]),
        (Shm, "count = 1", "count = -1", &["partitions[0].count", "-1", "at least 1"]),
        (Shm, "count = 1", "count = 64", &["partitions", "65 partitions in all", "at most 64"]),
        (Shm, "count = 1", "count = 65", &["partitions[0].count", "65", "at most 64"]),
        (Shm, "count = 1", "count = 20000", &["[0].count: 20000 partitions; at most 64 in all: lower it"]),
        (Shm, "count = 1", "count = 100000", &["[0].count: 100000 partitions; at most 64 in all: lower it"]),
        (
            Shm,
            "class = \"latency\"\ncount = 1",
            "class = \"bulk\"\ncount = 1",
            &["partitions", "2 of class \"bulk\" for 0", "as many"],
        ),
        (
            Shm,
            "class = \"bulk\"\ncount = 1",
            "class = \"bulk\"\ncount = 3",
            &["partitions", "3 of class \"bulk\" for 1", "as many"],
        ),
        (
            Shm,
            "class = \"bulk\"\ncount = 1",
            "class = \"bulk\"\ncores = [1]",
            &["partitions[1].cores", "1 for a bulk partition", "any core", "name the same core"],
        ),
        (Shm, "trust = \"proxy\"", "trust = true", &["trust", "line 4"]),
        (
            Shm,
            "[timeouts]",
            "[[access]]\nfrom = \"z\"\naction = \"deny\"\n[timeouts]",
            &["access[0].from", "\"z\"", "a, b, c"],
        ),
        (Shm, "[timeouts]", "[[access]]\nports = \"9-7\"\naction = \"deny\"\n[timeouts]", &["access[0].ports", "7-9"]),
        (
            Shm,
            "[timeouts]",
            "[[access]]\nports = 0\naction = \"deny\"\n[timeouts]",
            &["access[0].ports", "'0'", "65535"],
        ),
        (Shm, "backend = \"shm\"", "backend = \"shm\"\nmode = \"vfio\"", &["device.mode", "vfio", "remove"]),
        (Pci, "device = \"0000:00:04.0\"\n", "", &["nodes[0].device", "missing", "0000:00:04.0"]),
        (Pci, "device = \"0000:00:04.0\"", "device = \"00:04.0\"", &["nodes[0].device", "00:04.0", "0000:00:04.0"]),
        (Dax, "coherence = \"coherent\"", "#", &["device.coherence", "missing", "non-coherent"]),
        (Dax, "device = \"/dev/dax0.0\"", "device = \"dax0.0\"", &["nodes[0].device", "dax0.0", "/dev/dax0.0"]),
        (Dax, "device = \"/dev/dax0.0\"", "backend = \"shm\"", &["device.backend", "all"]),
        (Dax, "[timeouts]", "[link]\ntiming = \"ntb\"\n[timeouts]", &["link.timing", "'a'", "\"dax\"", "clock"]),
        (
            Shm,
            "address = \"127.77.0.2\"",
            "address = \"127.77.0.2\"\nbackend = \"pci\"\ndevice = \"0000:00:04.0\"",
            &["link.timing", "\"gen4x16\"", "'b'", "\"pci\"", "remove [link]"],
        ),
        (Shm, "version = 1", "", &["line 1", "version", "missing", "version = 1"]),
        (Shm, "version = 1", "version = \"1\"", &["line 2", "version", "string"]),
        (Shm, "[timeouts]", "[timeouts", &["line"]),
        (Shm, "[[nodes]]", "[[hosts]]", &["hosts", "`nodes`"]),
    ]);
}

#[test]
fn more_rules_than_fit_a_message_are_refused() {
    let rules =
        |count: usize, ports: &str| format!("\n[[access]]\nports = \"{ports}\"\naction = \"deny\"").repeat(count);
    let text = |rules: String| example(Backend::Shm) + &rules;
    assert!(parse(&text(rules(ACCESS_PARTS_MAX / 2, "1"))).is_ok());
    let error = parse(&text(rules(ACCESS_PARTS_MAX / 2, "1,3"))).unwrap_err();
    assert!(error.contains("access: 1536 rules") && error.contains("at most 1024"), "{error}");
}

#[test]
fn windows_without_room_for_a_direct_connection_are_refused() {
    let text = Rack::example(2, Backend::Shm, None, Trust::Direct).to_string();
    let with = |bytes: u64| parse(&text.replacen("window_bytes = 33554432", &format!("window_bytes = {bytes}"), 1));
    let line = 1 + text[..text.find("window_bytes").unwrap()].matches('\n').count();
    assert_eq!(
        with(409_600).unwrap_err(),
        format!(
            "r.toml, line {line}, device.window_bytes: 409600 bytes leave no room for a connection with trust = \
             \"direct\" besides 2 partitions; make it at least 614400, or set trust = \"proxy\""
        )
    );
    assert!(with(614_400).is_ok());
}

#[test]
fn one_node_and_too_many_nodes_are_refused() {
    let with = |count: usize| {
        let mut rack = Rack::example(2, Backend::Shm, None, Trust::Proxy);
        let node = rack.nodes[0].clone();
        rack.nodes = (0..count)
            .map(|index| {
                let address = IpAddr::from([127, 77, 1, index as u8]);
                rack::Node { name: format!("n{index}"), address, ..node.clone() }
            })
            .collect();
        parse(&rack.to_string())
    };
    assert!(with(1).unwrap_err().contains("1 nodes are not a rack"));
    assert!(with(NODES_MAX).is_ok());
    assert!(with(NODES_MAX + 1).unwrap_err().contains("33 nodes"));
}

#[test]
fn the_first_rule_that_matches_decides() {
    let rule = |from: &str, to: &str, ports: Option<&str>, action| AccessRule {
        from: from.to_owned(),
        to: to.to_owned(),
        ports: ports.map(|ports| ports.parse().unwrap()),
        action,
    };
    let mut rack = Rack::example(3, Backend::Shm, None, Trust::Proxy);
    assert!(rack.allows(0, 1, 80));
    rack.access = vec![
        rule("a", "b", Some("80,90-99"), Access::Allow),
        rule("*", "b", None, Access::Deny),
        rule("c", "*", None, Access::Deny),
    ];
    let ports = [(0, 1, 95, true), (0, 1, 81, false), (2, 1, 80, false), (2, 0, 80, false), (1, 0, 80, true)];
    for (from, to, port, allowed) in ports {
        assert_eq!(rack.allows(from, to, port), allowed, "{from} {to} {port}");
    }
    rack.access_default = Access::Deny;
    assert!(!rack.allows(1, 0, 80) && rack.allows(0, 1, 80) && !rack.allows(7, 0, 80));
}

#[test]
fn the_digest_covers_what_nodes_must_agree_on() {
    let rack = Rack::example(3, Backend::Shm, None, Trust::Proxy);
    let changed = |change: fn(&mut Rack)| {
        let mut other = rack.clone();
        change(&mut other);
        other.digest() != rack.digest()
    };
    assert!(!changed(|rack| rack.nodes[1].metrics = "127.0.0.1:9".parse().ok()));
    assert!(!changed(|rack| rack.partitions[0].cores = Some(vec![1])));
    assert!(!changed(|rack| rack.nodes[0].backend = Some(Backend::Pci)));
    assert!(changed(|rack| rack.nodes.swap(0, 1)));
    assert!(changed(|rack| rack.nodes[2].address = IpAddr::from([127, 77, 0, 9])));
    assert!(changed(|rack| rack.device.window_bytes *= 2));
    assert!(changed(|rack| rack.partitions[0].count = 2));
    assert!(changed(|rack| rack.trust = Trust::Direct));
    assert!(changed(|rack| rack.link = Some(LinkTiming { timing: Timing::Ntb, one_way_ns: None })));
}

#[test]
fn failover_needs_proxies_and_its_port_needs_failover() {
    let direct = Rack::example(2, Backend::Shm, None, Trust::Direct).to_string();
    let both = direct.replace("failover = false", "failover = true");
    let at = 1 + both.lines().position(|line| line.starts_with("failover")).unwrap();
    let expected = format!(
        "r.toml, line {at}, failover: true with trust = \"direct\": data that programs wrote to windows cannot be \
         sent again; set it to false, or trust to \"proxy\""
    );
    assert_eq!(parse(&both).unwrap_err(), expected);
    let port = |text: &str, port| text.replace("failover = ", &format!("failover_port = {port}\nfailover = "));
    let proxied = example(Backend::Shm);
    assert!(parse(&port(&proxied, 7000)).unwrap_err().contains("failover_port: 7000 has no effect without failover"));
    let on = proxied.replace("failover = false", "failover = true");
    assert!(parse(&port(&on, 0)).unwrap_err().contains("failover_port: 0 is not a port"));
    assert_eq!(parse(&port(&on, 7000)).unwrap().rack.failover_ports(), Some(7000..=7000));
    let cores = on.replacen("count = 1", "count = 2\ncores = [1, 0]", 1);
    assert_eq!(parse(&port(&cores, 65534)).unwrap().rack.failover_ports(), Some(65534..=65535));
    assert!(parse(&port(&cores, 65535)).unwrap_err().contains("failover_port: 65535 is too high"));
}

#[test]
fn data_partitions_are_numbered_through_all_entries() {
    let mut rack = Rack::example(2, Backend::Shm, None, Trust::Proxy);
    rack.partitions[0] = Partitions { class: Class::Latency, count: 2, cores: Some(vec![3, 5]) };
    let found: Vec<_> = rack.data_partitions().iter().map(|partition| (partition.class, partition.core)).collect();
    assert_eq!(found, [(Class::Latency, Some(3)), (Class::Latency, Some(5)), (Class::Bulk, None)]);
}

/// Generates racks that cover what is written to and read from a file.
fn racks() -> impl Strategy<Value = Rack> {
    let backends = prop::sample::select(Backend::ALL);
    let timings = prop::option::of((prop::sample::select(Timing::ALL), prop::option::of(0.0..1e9)));
    let entries = prop::collection::vec((1..4_u16, any::<bool>()), 1..PARTITIONS_MAX / 8);
    let partitions = (entries, any::<prop::sample::Index>());
    let nodes = prop::collection::btree_map("[a-z0-9][a-z0-9-]{0,22}", any::<u32>(), 2..9);
    let rules = prop::collection::vec((any::<bool>(), any::<bool>(), prop::option::of(1..u16::MAX)), 0..5);
    let device = "/dev/[a-zA-Z\"\\\\ é.#=]{1,20}";
    (backends, timings, partitions, nodes, rules, device, any::<[bool; 3]>(), 100..2000_u64).prop_map(
        |(backend, timing, partitions, nodes, rules, device, flags, pages)| {
            let mut rack = Rack::example(2, backend, None, if flags[0] { Trust::Direct } else { Trust::Proxy });
            // Failover is not available with direct trust.
            rack.failover = flags[1] && !flags[0];
            rack.failover_port = Some(pages as u16).filter(|_| rack.failover && flags[2]);
            rack.access_default = if flags[2] { Access::Deny } else { Access::Allow };
            rack.link = timing
                .filter(|_| backend == Backend::Shm)
                .map(|(timing, one_way_ns)| LinkTiming { timing, one_way_ns });
            let (sizes, bulk_entries) = partitions;
            // Each bulk partition is paired with a latency partition.
            let of_class = |class, entries: usize| {
                let some = |&(count, bound): &(u16, bool)| (count, bound.then(|| (0..count).collect()));
                let all = sizes.iter().map(some).take(entries);
                all.map(move |(count, cores)| Partitions { class, count, cores }).collect::<Vec<_>>()
            };
            let bulk = of_class(Class::Bulk, bulk_entries.index(sizes.len()));
            rack.partitions = [of_class(Class::Latency, sizes.len()), bulk].concat();
            rack.device.window_bytes = 4096 * (pages + if rack.link.is_some() { 12_000 } else { 1100 });
            rack.proxy = Proxy { slice_bytes: flags[0].then_some(64 * (pages - 100)) };
            let node = rack.nodes[0].clone();
            rack.nodes = nodes
                .into_iter()
                .enumerate()
                .map(|(index, (name, low))| {
                    let address = if backend == Backend::Shm {
                        IpAddr::from([127, 77, index as u8, low as u8])
                    } else if low % 2 == 0 {
                        IpAddr::from([10, 0, index as u8, low as u8 | 1])
                    } else {
                        IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x0b00 | index as u16, low as u16]).to_canonical()
                    };
                    let device = if backend == Backend::Dax { Some(device.clone()) } else { node.device.clone() };
                    rack::Node { name, address, device, ..node.clone() }
                })
                .collect();
            rack.access = rules
                .into_iter()
                .map(|(from_any, deny, port)| AccessRule {
                    from: if from_any { "*".to_owned() } else { rack.nodes[0].name.clone() },
                    to: rack.nodes[1].name.clone(),
                    ports: port.map(|port| format!("{port},{port}-65535").parse().unwrap()),
                    action: if deny { Access::Deny } else { Access::Allow },
                })
                .collect();
            rack
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_rack_is_read_back_from_its_own_text(rack in racks()) {
        prop_assert_eq!(parse(&rack.to_string()).unwrap().rack, rack);
    }

    #[test]
    fn arbitrary_bytes_give_a_rack_or_one_line(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Err(error) = RackFile::parse(Path::new("r.toml"), &bytes) {
            let error = error.to_string();
            prop_assert!(error.starts_with("r.toml") && error.lines().count() == 1, "{}", error);
        }
    }

    #[test]
    fn an_example_with_a_few_bytes_changed_gives_a_rack_or_one_line(
        backend in prop::sample::select(Backend::ALL),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..6),
    ) {
        let mut bytes = example(backend).into_bytes();
        for (index, byte, kind) in changes {
            let index = index.index(bytes.len());
            match kind {
                0 => bytes[index] = byte & 0x7f,
                1 => bytes.insert(index, byte & 0x7f),
                _ => drop(bytes.remove(index)),
            }
        }
        if let Err(error) = RackFile::parse(Path::new("r.toml"), &bytes) {
            let error = error.to_string();
            prop_assert!(error.starts_with("r.toml") && error.lines().count() == 1, "{}", error);
        }
    }
}

#[test]
fn enumerations_are_parsed_from_the_spelling_of_the_file() {
    assert_eq!("non-coherent".parse(), Ok(Coherence::NonCoherent));
    assert_eq!("vfio".parse(), Ok(PciMode::Vfio));
    assert_eq!(
        "gen9".parse::<Timing>(),
        Err("'gen9' is unknown; choose one of gen3x16, gen4x16, gen5x16, gen6x16, ntb".to_owned())
    );
}

#[test]
fn published_ports_are_all_none_or_those_of_a_list() {
    let base = Rack::example(2, Backend::Shm, None, Trust::Proxy).to_string();
    let with = |value: &str| parse(&base.replace("\n[device]", &format!("publish = {value}\n\n[device]")));
    let has = |value: &str, port: u16| with(value).expect("a rack").rack.publish.has(port);
    assert_eq!([has("true", 1), has("false", 80)], [true, false]);
    let list = "[6379, \"8000-8010,9\"]";
    assert_eq!([6379, 8000, 8010, 9, 8011, 80].map(|port| has(list, port)), [true, true, true, true, false, false]);
    let rack = with(list).expect("a rack").rack;
    assert_eq!(parse(&rack.to_string()).unwrap().rack, rack, "the text of a rack is read back");
    let mut of_node = rack;
    of_node.nodes[1].publish = Some(Publish::Nothing);
    assert_eq!(parse(&of_node.to_string()).unwrap().rack, of_node);
    let published = of_node.nodes.iter().map(|node| of_node.publish_of(node).has(9)).collect::<Vec<_>>();
    assert_eq!(published, [true, false]);
    for value in ["6379", "\"80\"", "1.5"] {
        assert!(with(value).unwrap_err().contains("as in [6379"), "{value}: {}", with(value).unwrap_err());
    }
    assert!(with("[]").unwrap_err().contains("write false"));
    assert!(with("[0]").unwrap_err().contains("is not a port"));
    assert!(with("[true]").is_err());
}
