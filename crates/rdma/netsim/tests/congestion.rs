//! Congestion control in small networks, described by scenario files: every preset runs, and senders that wait because
//! of their rate or window cause no timeout.

use netsim::experiments::{FctExperiment, FctResult, Observers};
use netsim::scenario::Scenario;
use netsim::topology::HostId;

/// Runs an incast in a star. `tables` are further tables, after the keys of `transport`.
fn run(senders: u32, bytes: u32, switches: &str, transport: &str) -> FctResult {
    let hosts = senders + 1;
    let text = format!(
        "version = 1\n[topology]\nkind = \"leaf-spine\"\nleaves = 1\nhosts_per_leaf = {hosts}\nspines = 1\n\
         host_gbps = 100\nleaf_gbps = 100\n[switches]\n{switches}\n[workload]\nkind = \"incast\"\nsenders = {senders}\n\
         bytes = {bytes}\n[transport]\n{transport}\n"
    );
    let scenario = Scenario::parse("a.toml", &text).unwrap();
    FctExperiment::from_scenario(&scenario).run(Observers::default()).unwrap()
}

#[test]
fn every_preset_runs_with_its_thresholds() {
    let presets = [
        ("dctcp", "dctcp", ["paper"].as_slice()),
        ("dctcp", "dcqcn", &["paper", "100g", "400g"]),
        ("dcqcn", "dcqcn", &["paper", "100g", "400g"]),
        ("dcqcn-paper", "dcqcn", &["paper", "100g", "400g"]),
        ("dcqcn", "timely", &["paper", "100g", "400g"]),
        ("dcqcn", "swift", &["htsim"]),
    ];
    for (ecn, control, names) in presets {
        for name in names {
            let transport = format!(
                "policy = \"go-back-n\"\ncongestion = \"{control}\"\n[transport.{control}]\npreset = \"{name}\""
            );
            let result = run(8, 1_000_000, &format!("pfc = true\necn_preset = \"{ecn}\""), &transport);
            assert_eq!((result.flows_ended, result.endpoints.retransmitted_packets), (8, 0), "{ecn} {control} {name}");
            // 8 MB with headers take 693 us at 100 Gb/s.
            assert!(result.fct_us.max > 690.0 && result.fct_us.max < 20_000.0, "{control} {name}: {:?}", result.fct_us);
        }
    }
}

#[test]
fn no_timeout_expires_because_a_sender_is_paced_at_the_minimum_rate() {
    // TIMELY cuts at each round trip, DCQCN at each queued packet, and no increase comes.
    let slow = [
        ("timely", "rtt_low = 10\nrtt_high = 10\nmin_mbps = 100", 15_000.0),
        ("dcqcn", "increase_interval = \"1 s\"\nmin_mbps = 100", 125.0),
    ];
    let marks = "ecn_kmin_bytes = 0\necn_kmax_bytes = 1\necn_pmax = 1.0";
    for policy in ["go-back-n", "irn", "srnic", "srnic-paged", "connection-cache"] {
        for (mtu_bytes, timeout) in [(1000, "auto"), (4096, "auto"), (1000, "100 us"), (4096, "100 us")] {
            for (control, keys, fct_us) in slow {
                let transport = format!(
                    "policy = \"{policy}\"\nmtu_bytes = {mtu_bytes}\nack_timeout = \"{timeout}\"\n\
                     congestion = \"{control}\"\n[transport.{control}]\n{keys}"
                );
                let result = run(2, 700_000, marks, &transport);
                let found = (result.flows_ended, result.endpoints.timeouts, result.endpoints.retransmitted_packets);
                assert_eq!(found, (2, 0, 0), "{control} {policy} {mtu_bytes} {timeout}");
                // 121 us at line rate; a packet of 1000 bytes takes 87 us at 100 Mb/s.
                assert!(result.fct_us.max > fct_us, "{control} {policy} {mtu_bytes}: {:?}", result.fct_us);
            }
        }
    }
}

/// More senders than packets in a round trip: the fair window is a fraction of a packet.
#[test]
fn swift_holds_its_target_with_windows_below_one_packet() {
    let incast = |policy: &str, min_window: f64| {
        let transport = format!(
            "policy = \"{policy}\"\nack_packets = 1\nack_timeout = \"10 ms\"\ncongestion = \"swift\"\n\
             [transport.swift]\nbase_target = \"10 us\"\n\
             link_target = 0\nscaling_range = 0\ninitial_window_bytes = 1000\n\
             min_window_packets = {min_window}"
        );
        run(400, 100_000, "ecn = false", &transport)
    };
    for policy in ["go-back-n", "srnic"] {
        let (paced, bursty) = (incast(policy, 0.01), incast(policy, 1.0));
        for result in [&paced, &bursty] {
            // A probe of srnic asks for an acknowledgement that the queue of the start delays.
            assert!(policy == "srnic" || result.endpoints.timeouts == 0, "{policy}: {:?}", result.endpoints);
            assert!(result.endpoints.retransmitted_packets <= result.endpoints.timeouts, "{policy}");
            assert_eq!(result.flows_ended, 400, "{policy}");
        }
        // 400 packets always wait where no window is below one.
        assert!(bursty.network.queue_max_bytes > 350_000, "{policy}: {}", bursty.network.queue_max_bytes);
        // The link stays busy: 40 MB with headers take 3464 us.
        // Senders share the queue of fewer packets, so that the mean flow finishes much earlier than the last.
        assert!(paced.fct_us.mean < 0.8 * bursty.fct_us.mean, "{policy}: {:?} {:?}", paced.fct_us, bursty.fct_us);
        assert!(paced.fct_us.max < 1.25 * 3464.0, "{policy}: {:?}", paced.fct_us);
    }
}

/// Runs 15 senders of 200 KB to one host through switches, at this rate and delay, and returns the result with the time
/// that the packets take on the last link, in microseconds.
fn incast_over(gbps: f64, delay_us: u32, transport: &str) -> (FctResult, f64) {
    let text = format!(
        "version = 1\nuntil = \"60 s\"\n[topology]\nkind = \"leaf-spine\"\nleaves = 4\nhosts_per_leaf = 4\n\
         spines = 1\nhost_gbps = {gbps}\nleaf_gbps = {gbps}\ndelay = \"{delay_us} us\"\n[workload]\nkind = \"incast\"\n\
         senders = 15\nbytes = 200000\n[transport]\n{transport}\n"
    );
    let scenario = Scenario::parse("a.toml", &text).unwrap();
    let result = FctExperiment::from_scenario(&scenario).run(Observers::default()).unwrap();
    (result, 15.0 * 200.0 * 1082.0 * 8.0 / gbps / 1000.0)
}

/// Timeouts and targets that were published for fast and short networks must fit slow and long ones.
#[test]
fn every_policy_and_control_finishes_at_any_rate_and_delay() {
    for (gbps, delay_us) in [(0.1, 1), (1.0, 1), (100.0, 1), (100.0, 1000), (400.0, 1)] {
        for policy in ["go-back-n", "irn", "srnic", "connection-cache"] {
            for control in ["none", "bdp-window", "dctcp", "dcqcn", "swift", "timely"] {
                let transport = format!("policy = \"{policy}\"\ncongestion = \"{control}\"");
                let (result, bound_us) = incast_over(gbps, delay_us, &transport);
                let tag = format!("{gbps} Gb/s, {delay_us} us, {policy}, {control}");
                assert_eq!(result.flows_ended, 15, "{tag}: {result:?}");
                let round_trips_us = 200.0 * 8.0 * f64::from(delay_us);
                let most_us = 1.5 * bound_us + round_trips_us + 2000.0;
                assert!(result.fct_us.max < most_us, "{tag}: {} of {bound_us} us", result.fct_us.max);
            }
        }
    }
}

/// A flow between two fast hosts of a network whose first host is slow. It has the rate of its link, with every policy.
#[test]
fn each_host_sends_at_the_rate_of_its_own_link() {
    let policies = ["go-back-n", "irn", "srnic", "srnic-paged", "connection-cache"];
    let controls = ["none", "bdp-window", "dctcp", "dcqcn", "swift", "timely"];
    for (policy, control) in policies.into_iter().flat_map(|policy| controls.map(|control| (policy, control))) {
        let line = |host: &str, gbps: u32| format!("{{ ends = [\"{host}\", \"s\"], gbps = {gbps}, delay = \"1 us\" }}");
        let text = format!(
            "version = 1\n[topology]\nkind = \"graph\"\nhosts = [\"c\", \"a\", \"b\"]\nswitches = [\"s\"]\n\
             lines = [{}, {}, {}]\n[workload]\nkind = \"permutation\"\nbytes = 1000000\n[transport]\n\
             policy = \"{policy}\"\ncongestion = \"{control}\"\n",
            line("c", 1),
            line("a", 100),
            line("b", 100)
        );
        let mut scenario = Scenario::parse("a.toml", &text).unwrap();
        scenario.flows.truncate(1);
        (scenario.flows[0].from, scenario.flows[0].to) = (HostId(1), HostId(2));
        let result = FctExperiment::from_scenario(&scenario).run(Observers::default()).unwrap();
        // 87 us for the packets, and the latencies.
        assert!(result.fct_us.max < 100.0, "{policy} {control}: {:?}", result.fct_us);
        // From the slow host, the same flow takes a hundred times as long.
        (scenario.flows[0].from, scenario.flows[0].to) = (HostId(0), HostId(2));
        let result = FctExperiment::from_scenario(&scenario).run(Observers::default()).unwrap();
        assert!((8656.0..8900.0).contains(&result.fct_us.max), "{policy} {control}: {:?}", result.fct_us);
    }
}

/// Where data flow in both directions, notifications without priority wait behind data, and senders cut later.
#[test]
fn notifications_pass_data_unless_told_otherwise() {
    let run = |priority: bool| {
        let text = format!(
            "version = 1\n[topology]\nkind = \"dumbbell\"\nhosts_per_side = 4\nhost_gbps = 100\nmiddle_gbps = 100\n\
             [switches]\npfc = true\n[workload]\nkind = \"all-to-all\"\nbytes = 300000\n[transport]\n\
             policy = \"go-back-n\"\ncongestion = \"dcqcn\"\n[transport.dcqcn]\ncnp_priority = {priority}\n"
        );
        let scenario = Scenario::parse("a.toml", &text).unwrap();
        FctExperiment::from_scenario(&scenario).run(Observers::default()).unwrap()
    };
    let (before, behind) = (run(true), run(false));
    assert_eq!((before.flows_ended, behind.flows_ended), (56, 56));
    let (short, long) = (before.network.queue_max_bytes, behind.network.queue_max_bytes);
    assert!(2 * long > 3 * short, "{short} {long}");
}

/// Small buffers drop most of an incast again and again, which must not use up a flow's eight timeouts.
#[test]
fn an_incast_through_a_small_buffer_finishes() {
    for (bytes, policy, control) in [200_000, 1_000_000].into_iter().flat_map(|bytes| {
        ["go-back-n", "srnic", "irn"]
            .into_iter()
            .flat_map(move |policy| ["none", "dctcp", "dcqcn"].map(|control| (bytes, policy, control)))
    }) {
        let switches = format!("buffer_bytes = {bytes}");
        let result = run(15, 1_000_000, &switches, &format!("policy = \"{policy}\"\ncongestion = \"{control}\""));
        let found = (result.flows_ended, result.flows_failed, result.network.dropped_packets > 0);
        assert_eq!(found, (15, 0, true), "{bytes} {policy} {control}: {result:?}");
    }
}
