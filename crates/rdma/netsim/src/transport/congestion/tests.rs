use rnic::nic::CongestionControl;

use super::*;

fn line(gbps: f64) -> LineRate {
    let rate = LinkRate::from_gbps(gbps).unwrap();
    LineRate { rate, bdp_bytes: 100_000, window_bytes: 120_000, links: 4, round_trip: Span::from_ns(9000.0) }
}

fn parse(table: &str) -> TransportConfig {
    config::parse("a.toml", table).unwrap()
}

fn error(table: &str) -> String {
    let message = match config::parse::<TransportConfig>("a.toml", table) {
        Ok(parsed) => parsed.check(LinkRate::from_gbps(100.0).unwrap()).unwrap_err(),
        Err(error) => error.to_string(),
    };
    assert!(!message.contains('\n'), "{message}");
    message
}

fn dcqcn(table: &str, gbps: f64) -> Dcqcn {
    match parse(&format!("congestion = 'dcqcn'\n{table}")).congestion_control(&line(gbps)) {
        CongestionControl::Dcqcn(constants) => constants,
        other => panic!("{other:?}"),
    }
}

#[test]
fn steps_fit_the_hosts_link_unless_a_preset_is_named() {
    let steps = |table: &str, gbps| {
        let Dcqcn { step_bps, hyper_step_bps, .. } = dcqcn(table, gbps);
        (step_bps / 1_000_000, hyper_step_bps / 1_000_000)
    };
    assert_eq!([25.0, 100.0, 400.0].map(|gbps| steps("", gbps)), [(5, 50), (20, 200), (80, 800)]);
    let preset = |name| steps(&format!("[dcqcn]\npreset = '{name}'"), 100.0);
    assert_eq!(["paper", "100g", "400g"].map(preset), [(40, 200), (20, 200), (80, 800)]);
    assert_eq!(dcqcn("[dcqcn]\npreset = 'paper'", 40.0), Dcqcn::published(40_000_000_000));
}

#[test]
fn keys_replace_single_values_of_a_preset() {
    let found = dcqcn(
        "[dcqcn]\npreset = 'paper'\ngain = 0.5\nalpha_interval = '2 us'\ndecrease_interval = '4 us'\n\
         increase_interval = '300 us'\nbyte_counter_bytes = 0\nfast_recoveries = 1\nadditive_mbps = 20\n\
         hyper_mbps = 100\nmin_mbps = 1000\nclamp_target = false\ncnp_interval = 0",
        100.0,
    );
    let expected = Dcqcn {
        line_bps: 100_000_000_000,
        least_bps: 1_000_000_000,
        step_bps: 20_000_000,
        hyper_step_bps: 100_000_000,
        gain: 0.5,
        alpha_ns: 2000,
        decrease_ns: 4000,
        increase_ns: 300_000,
        byte_counter: 0,
        recoveries: 1,
        clamps_target: false,
        cnp_period: Span::ZERO,
    };
    assert_eq!(found, expected);
    let dctcp = parse("[dctcp]\npreset = 'paper'\ngain = 0.25\nincrease_bytes = 500\nmax_window_bytes = 90000");
    let expected = Dctcp { initial_bytes: 120_000, bytes_max: 90_000, gain: 0.25, increase_bytes: 500 };
    assert_eq!(dctcp.congestion_control(&line(100.0)), CongestionControl::Dctcp(expected));
    let window = parse("congestion = 'bdp-window'\n[bdp-window]\nwindow_bytes = 104000");
    assert_eq!(window.congestion_control(&line(100.0)), CongestionControl::BdpWindow { bytes: 104_000 });
}

#[test]
fn timely_and_swift_have_their_constants_as_keys() {
    let timely = parse(
        "congestion = 'timely'\n[timely]\npreset = 'paper'\ngain = 0.5\nbeta = 0.4\nrtt_low = '5 us'\n\
         rtt_high = '50 us'\nrtt_min = '2 us'\nmin_mbps = 1",
    );
    let CongestionControl::Timely(found) = timely.congestion_control(&line(100.0)) else { panic!("{timely:?}") };
    assert_eq!((found.step_bps, found.hyper_step_bps, found.least_bps), (10_000_000, 50_000_000, 1_000_000));
    assert_eq!([found.rtt_low, found.rtt_high, found.rtt_min].map(|span| span.ns()), [5e3, 50e3, 2e3]);
    assert_eq!((found.gain, found.beta), (0.5, 0.4));
    let swift = parse(
        "congestion = 'swift'\n[swift]\npreset = 'htsim'\nbase_target = '10 us'\nlink_target = '1 us'\n\
         scaling_range = 0\nincrease_packets = 2\nmax_decrease = 0.25\nmin_window_packets = 0.5",
    );
    let CongestionControl::Swift(found) = swift.congestion_control(&line(100.0)) else { panic!("{swift:?}") };
    assert_eq!((found.target.ns(), found.scaling_range), (14e3, Span::ZERO));
    assert_eq!((found.increase, found.decrease_max, found.window_min), (2.0, 0.25, 0.5));
    assert_eq!((found.initial_bytes, found.bytes_max), (120_000, 1_000_000));
}

#[test]
fn targets_of_round_trip_times_fit_long_networks_unless_a_preset_is_named() {
    let times = |table: &str, ms: f64| {
        let line = LineRate { round_trip: Span::from_ns(ms * 1e6), ..line(100.0) };
        match parse(table).congestion_control(&line) {
            CongestionControl::Timely(Timely { rtt_low, rtt_high, rtt_min, .. }) => [rtt_low, rtt_high, rtt_min],
            CongestionControl::Swift(Swift { target, scaling_range, .. }) => [target, scaling_range, Span::ZERO],
            other => panic!("{other:?}"),
        }
        .map(|span| (span.ns() / 1e3).round())
    };
    let timely = "congestion = 'timely'\n";
    for (ms, expected) in [(0.009, [50.0, 500.0, 20.0]), (0.02, [50.0, 500.0, 20.0]), (2.0, [5e3, 50e3, 2e3])] {
        assert_eq!(times(timely, ms), expected, "{ms} ms");
    }
    assert_eq!(times(&format!("{timely}[timely]\npreset = '100g'"), 2.0), [50.0, 500.0, 20.0]);
    assert_eq!(times(&format!("{timely}[timely]\nrtt_low = '9 us'"), 2.0), [9.0, 50e3, 2e3]);
    let swift = "congestion = 'swift'\n";
    // The base, and four links of base / 6.55.
    assert_eq!(times(swift, 0.016), [32.0, 100.0, 0.0]);
    assert_eq!(times(swift, 1.6), [2000.0 + 1221.0, 10_000.0, 0.0]);
    assert_eq!(times(&format!("{swift}[swift]\npreset = 'htsim'"), 1.6), [32.0, 100.0, 0.0]);
    assert_eq!(times(&format!("{swift}[swift]\nbase_target = '20 us'"), 1.6), [32.0, 100.0, 0.0]);
}

#[test]
fn a_refused_key_is_named_with_its_value_and_the_remedy() {
    for (table, expected) in [
        ("[dcqcn]\npreset = '50g'", "a.toml, line 2, dcqcn.preset: unknown variant `50g`, expected one of `paper`"),
        ("[swift]\npreset = 'paper'", "a.toml, line 2, swift.preset: unknown variant `paper`, expected `htsim`"),
        ("[dcqcn]\ngain = 0", "a.toml, line 2, dcqcn.gain: '0' is not in range; write a number above 0 and at most 1"),
        ("[dcqcn]\nalpha_interval = 0", "a.toml, line 2, dcqcn.alpha_interval: '0 ns' is not in range; write a time"),
        (
            "[dcqcn]\ncnp_interval = '2 s'",
            "a.toml, line 2, dcqcn.cnp_interval: '2000000000 ns' is not in range; write 0",
        ),
        ("[timely]\nmin_mbps = -1", "a.toml, line 2, timely.min_mbps: '-1' is not a rate in range; write Mb/s"),
        ("[dctcp]\nmax_window_bytes = 1", "a.toml, line 2, dctcp.max_window_bytes: '1' is not a window in range"),
        ("[swift]\nmin_window_packets = 0", "a.toml, line 2, swift.min_window_packets: '0' is not a number of packets"),
        ("ack_packets = 0", "a.toml, line 1, ack_packets: '0' is not in range; write 1 to 256 packets"),
        ("[dcqcn]\nrai = 1", "a.toml, line 2, dcqcn.rai: unknown field `rai`, expected one of"),
        (
            "[dcqcn]\ngain = 0.5",
            "the table dcqcn has no effect with congestion = \"dctcp\"; write congestion = \"dcqcn\"",
        ),
        ("window_packets = 513", "window_packets is 513; write 1 to 512 with policy = \"srnic\""),
        ("[irn]\nlow_packets = 1", "the table irn has no effect with policy = \"srnic\"; write policy = \"irn\""),
        (
            "congestion = 'dcqcn'\n[dcqcn]\nmin_mbps = 200000",
            "dcqcn.min_mbps is 200000, above the hosts' 100000 Mb/s; write less",
        ),
        (
            "congestion = 'timely'\n[timely]\nrtt_low = '1 ms'",
            "timely.rtt_low is 1000000 ns, above rtt_high, 500000 ns; write at most rtt_high",
        ),
        (
            "congestion = 'swift'\n[swift]\nscaling_max_packets = 0.1",
            "swift.scaling_min_packets is 0.1, not below scaling_max_packets, 0.1; write less",
        ),
        (
            "[dctcp]\ninitial_window_bytes = 2000\nmax_window_bytes = 1000",
            "dctcp.initial_window_bytes is 2000, above max_window_bytes, 1000; write at most 1000",
        ),
    ] {
        let error = error(table);
        assert!(error.starts_with(expected), "{error}\n{expected}");
    }
}

#[test]
fn a_reported_configuration_has_the_given_keys_and_no_others() {
    let parsed = parse("congestion = 'dcqcn'\n[dcqcn]\npreset = '100g'\nmin_mbps = 10");
    let text = serde_json::to_value(parsed).unwrap();
    assert_eq!(text["dcqcn"], serde_json::json!({ "preset": "100g", "min_mbps": 10.0 }));
    assert!(text.get("swift").is_none());
}
