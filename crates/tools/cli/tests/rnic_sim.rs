//! Tests of `crosslane rnic sim` with command lines that scripts use.

mod command;

use std::io::Write;

use command::{assert_fails, crosslane, stdout};
use serde_json::Value;

fn answer(line: &str) -> Value {
    let arguments: Vec<&str> = ["rnic", "sim"].into_iter().chain(line.split(' ')).collect();
    let output = crosslane(&arguments);
    assert!(output.status.success(), "{line}: {output:?}");
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn number(answer: &Value, key: &str) -> f64 {
    let value = key.split('.').fold(answer, |value, part| &value[part]);
    value.as_f64().unwrap_or_else(|| panic!("no number {key} in {answer}"))
}

#[test]
fn every_experiment_prints_its_figures() {
    let qps = answer("qps --nic connection-cache --qps 300 --gbps 100 --seed 1 --json");
    assert!((50.0..98.0).contains(&number(&qps, "goodput_gbps")) && qps["provenance"] == "modelled");
    let chance = answer("qps --nic srnic-paged --qps 300 --turns chance --size 1024 --gbps 10 --json");
    assert!(number(&chance, "goodput_gbps") > 8.0 && number(&chance, "context_read_gbps") >= 0.0, "{chance}");
    let loss = answer("loss --transport srnic --loss 0.01 --gbps 10 --seed 1 --json");
    assert!(number(&loss, "goodput_gbps") > 8.0 && (0.0..=1.0).contains(&number(&loss, "slow_path_share")));
    let spray = answer("spray --skew-us 1 --loss 0.01 --json");
    assert!(number(&spray, "goodput_share") >= 0.97 && number(&spray, "sprayed.goodput_gbps") > 90.0, "{spray}");
    let rate = answer("rate --qps 128 --size 64,4096 --pipeline-mops 20 --json");
    assert!(rate["rates"][0]["limit"] == "pipeline" && rate["rates"][0]["mops"] == 20.0, "{rate}");
    assert!(rate["rates"][1]["limit"] == "link" && rate["rates"][1]["message_bytes"] == 4096, "{rate}");
    let latency = answer("latency --nic srnic --size 64 --json");
    assert!(number(&latency, "p50_us") > 1.0 && number(&latency, "p99_us") >= number(&latency, "p50_us"));
    let fct = answer(
        "fct --topology leaf-spine-256 --workload storage-2019 --load 0.5 --transport srnic --seed 1 --json \
         --duration-ms 0.005",
    );
    for key in ["events", "events_per_s", "slowdown.mean", "slowdown.p50", "slowdown.p99", "memory_bytes"] {
        assert!(number(&fct, key) >= 1.0, "{key}");
    }
}

#[test]
fn a_load_above_the_capacity_of_an_oversubscribed_network_is_a_warning() {
    let of = |load| ["rnic", "sim", "fct", "--topology", "three-tier-4096", "--duration-ms", "0.001", "--load", load];
    let stderr = |load| String::from_utf8(crosslane(&of(load)).stderr).unwrap();
    let line = stderr("0.5");
    assert!(line.contains("--load 0.5 is 1.99 times what three-tier-4096 carries") && line.contains("0.25"), "{line}");
    assert_eq!(stderr("0.125"), "");
}

#[test]
fn a_scenario_file_is_simulated_and_an_invalid_one_is_named() {
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let text = "version = 1\n[topology]\nkind = \"dumbbell\"\nhosts_per_side = 2\nhost_gbps = 100\nmiddle_gbps = 40\n\
                [workload]\nkind = \"permutation\"\nbytes = 20000\n";
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let pcap = tempfile::NamedTempFile::new().unwrap();
    let answer = answer(&format!("run {path} --json --pcap {} --pcap-host 1", pcap.path().display()));
    let magic = std::fs::read(pcap.path()).unwrap();
    assert_eq!(u32::from_be_bytes(magic[..4].try_into().unwrap()), 0xa1b2_3c4d, "a pcap file in nanoseconds");
    assert_eq!((number(&answer, "flows"), number(&answer, "flows_ended")), (4.0, 4.0));
    let names = [&answer["file"], &answer["topology"], &answer["workload"], &answer["load"]];
    assert_eq!(names, [&Value::from(path.as_str()), &"dumbbell-4".into(), &"permutation".into(), &Value::Null]);
    file.write_all(b"senders = 0\nspeed = 3\n").unwrap();
    assert_fails(&crosslane(&["rnic", "sim", "run", &path]), 2, &[&path, "line 11", "speed"]);
    assert_fails(&crosslane(&["rnic", "sim", "qps", "--qps", "0"]), 2, &["qps 0; take 1 to 1048576"]);
    assert_fails(&crosslane(&["rnic", "sim", "spray", "--paths", "65"]), 2, &["paths 65; take 1 to 64"]);
    assert_fails(&crosslane(&["rnic", "sim", "rate", "--size", "8,0"]), 2, &["size 0; take 1 to 4096"]);
    assert_fails(&crosslane(&["rnic", "sim", "fct", "--workload", "cache"]), 2, &["cache-follower"]);
    assert_fails(&crosslane(&["rnic", "sim", "fct", "--load", "1.5"]), 2, &["a load of 1.5; take more than 0"]);
}

#[test]
fn flows_that_do_not_finish_are_counted_and_fail_the_run() {
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let text = "version = 1\nuntil = \"1 us\"\n[topology]\nkind = \"dumbbell\"\nhosts_per_side = 2\nhost_gbps = 100\n\
                middle_gbps = 40\n[workload]\nkind = \"permutation\"\nbytes = 20000\n[transport]\nack_timeout = ";
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let run = crosslane(&["rnic", "sim", "run", &path]);
    assert_fails(&run, 2, &[&path]);
    file.write_all(b"\"67 ms\"\n").unwrap();
    let run = crosslane(&["rnic", "sim", "run", &path, "--json"]);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && error.contains("0 of 4 flows failed and 4 did not finish"), "{error}");
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    let counts = ["flows", "flows_ended", "flows_failed", "flows_unfinished"].map(|key| number(&report, key));
    assert_eq!((counts, number(&report, "ack_timeout_us")), ([4.0, 0.0, 0.0, 4.0], 67_108.864));
    let run = crosslane(&["rnic", "sim", "run", &path]);
    assert!(String::from_utf8_lossy(&run.stdout).contains("0 failed, 4 did not finish"), "{run:?}");
    let (_directory, path) = scenario("kind = \"incast\"\nsenders = 3\nbytes = 400000\n[lines]\nloss = 0.02\n");
    let text = std::fs::read_to_string(&path).unwrap().replace("[transport]", "[transport]\nack_timeout = \"off\"");
    std::fs::write(&path, text).unwrap();
    let run = crosslane(&["rnic", "sim", "run", &path]);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && error.contains("nothing sends them again: give an ack_timeout"), "{error}");
    let run = crosslane(&["rnic", "sim", "run", &path, "--json"]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert!(number(&report, "simulated_us") < 100_000.0, "nothing happens after the losses: {report}");
    let directory = tempfile::tempdir().unwrap();
    let pcap = directory.path().join("a.pcap").display().to_string();
    let run = crosslane(&["rnic", "sim", "run", &path, "--pcap", &pcap, "--pcap-host", "4"]);
    assert_fails(&run, 2, &["--pcap-host 4: take 0 to 3"]);
    let refused = crosslane(&["rnic", "sim", "fct", "--ack-timeout", "1e30"]);
    assert_fails(&refused, 2, &["'1e30' is not an ACK timeout; write auto, off, or a time"]);
}

/// A scenario of four hosts with PFC, a small buffer and a rate-based congestion control, and the directory that it is
/// in.
fn scenario(workload: &str) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.toml");
    let text = format!(
        "version = 1\n[topology]\nkind = \"dumbbell\"\nhosts_per_side = 2\nhost_gbps = 100\nmiddle_gbps = 40\n\
         [switches]\nbuffer_bytes = 600000\npfc = true\necn_kmin_bytes = 20000\necn_kmax_bytes = 80000\n\
         [transport]\npolicy = \"go-back-n\"\ncongestion = \"dcqcn\"\n[workload]\n{workload}"
    );
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap().to_owned();
    (directory, path)
}

#[test]
fn results_of_flows_and_time_series_are_written_and_change_nothing() {
    let (directory, path) = scenario("kind = \"incast\"\nsenders = 3\nbytes = 400000\n");
    let [flows, series] = ["flows.csv", "series.csv"].map(|name| directory.path().join(name).display().to_string());
    let plain = answer(&format!("run {path} --json"));
    let line = format!("run {path} --json --flows {flows} --series {series}");
    let arguments: Vec<&str> =
        ["rnic", "sim"].into_iter().chain(line.split(' ')).chain(["--series-interval", "1 us"]).collect();
    let observed: Value = serde_json::from_str(&stdout(&crosslane(&arguments))).unwrap();
    for key in ["events", "fct_us", "slowdown", "bins", "network", "endpoints", "simulated_us"] {
        assert_eq!(plain[key], observed[key], "{key}");
    }
    let text = std::fs::read_to_string(&flows).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    let head = "flow,from,to,bytes,start_us,fct_us,ideal_fct_us,slowdown,retransmitted_packets,outcome";
    assert_eq!((rows[0].join(","), rows.len()), (head.to_owned(), 4));
    let fcts: Vec<f64> = rows[1..].iter().map(|row| row[5].parse().unwrap()).collect();
    assert!((fcts.iter().copied().fold(0.0, f64::max) - number(&plain, "fct_us.max")).abs() < 1e-5, "{text}");
    assert!(rows[1..].iter().all(|row| (row[3], row[8], row[9]) == ("400000", "0", "finished")), "{text}");
    let text = std::fs::read_to_string(&series).unwrap();
    assert!(text.starts_with("time_us,kind,object,value\n"));
    let rows: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split(',').collect()).collect();
    let of = |kind: &str| rows.iter().filter(|row| row[1] == kind).map(|row| row[3]).collect::<Vec<_>>();
    let most = |kind: &str| of(kind).iter().filter_map(|value| value.parse::<f64>().ok()).fold(0.0, f64::max);
    assert!(
        most("queue_bytes") > 20_000.0 && most("queue_bytes") <= number(&plain, "network.queue_max_bytes"),
        "{text}"
    );
    assert!(of("rate_gbps").len() > 8 && (most("rate_gbps") - 100.0).abs() < 1e-3, "{text}");
    assert!(of("rate_gbps").iter().filter(|value| value.is_empty()).count() == 3, "a flow's rate ends with it: {text}");
    let pauses = rows.iter().filter(|row| row[1] == "pauses").map(|row| (row[2], row[3].parse::<u64>().unwrap()));
    let last: std::collections::BTreeMap<&str, u64> = pauses.collect();
    assert_eq!(last.values().sum::<u64>() as f64, number(&plain, "network.pauses"), "{text}");
    assert!(rows.is_sorted_by_key(|row| (row[0].parse::<f64>().unwrap() * 1e6) as u64), "{text}");
}

#[test]
fn unfinished_flows_have_no_completion_time_and_retransmissions_are_those_of_all_flows() {
    let (directory, path) = scenario("kind = \"permutation\"\nbytes = 2000000\n[lines]\nloss = 0.02\n");
    let text = std::fs::read_to_string(&path).unwrap().replace("version = 1", "version = 1\nuntil = \"300 us\"");
    std::fs::write(&path, text).unwrap();
    let flows = directory.path().join("flows.csv");
    let run = crosslane(&["rnic", "sim", "run", &path, "--json", "--flows", flows.to_str().unwrap()]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    let text = std::fs::read_to_string(&flows).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split(',').collect()).collect();
    assert!(rows.iter().any(|row| row[9] == "unfinished" && row[5].is_empty() && row[7].is_empty()), "{text}");
    let retransmitted: u64 = rows.iter().map(|row| row[8].parse::<u64>().unwrap()).sum();
    assert_eq!(retransmitted as f64, number(&report, "endpoints.retransmitted_packets"));
    assert!(retransmitted > 0);
}

#[test]
fn invalid_outputs_are_refused_before_the_run() {
    let (_directory, path) = scenario("kind = \"permutation\"\n");
    let run = |options: &[&str]| crosslane(&[&["rnic", "sim", "run", &path], options].concat());
    assert_fails(&run(&["--flows", "/nowhere/flows.csv"]), 1, &["cannot write /nowhere/flows.csv"]);
    assert_fails(&run(&["--series", "/nowhere/series.csv"]), 1, &["cannot write /nowhere/series.csv"]);
    for interval in ["1 ps", "0", "1e30 s", "soon"] {
        let refused = run(&["--series", "/dev/null", "--series-interval", interval]);
        assert_fails(&refused, 2, &["is not a time from 100 ns to 1000 s"]);
    }
    assert_fails(&run(&["--plot", "/nowhere/a.svg"]), 1, &["cannot write /nowhere/a.svg"]);
    assert_fails(&run(&["--plot", "a.png"]), 2, &["'a.png' is not the name of an SVG file; write FILE.svg"]);
    assert_fails(&run(&["--series-interval", "1 us"]), 2, &["--series"]);
    assert_fails(&run(&["--flows", "/dev/full"]), 1, &["cannot write the results of flows"]);
}

#[test]
fn a_run_is_plotted_by_flow_size_and_completion_time() {
    let (directory, path) =
        scenario("kind = \"poisson\"\ndistribution = \"web-search\"\nload = 0.5\nduration = \"9 ms\"\n");
    let plot = directory.path().join("run.svg");
    let run = crosslane(&["rnic", "sim", "run", &path, "--plot", plot.to_str().unwrap()]);
    assert!(run.status.success(), "{run:?}");
    let [by_size, by_time] = ["run.svg", "run-fct.svg"].map(|name| {
        let text = std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(text.starts_with("<svg") && text.contains("modelled"), "{name}: {text}");
        text
    });
    assert!(by_size.contains("Slowdown by flow size") && by_size.contains("\np50\n"), "{by_size}");
    assert!(by_time.contains("completion time (us)"), "{by_time}");
}

#[test]
fn percentiles_that_few_flows_do_not_have_are_left_out() {
    let (_directory, path) = scenario("kind = \"incast\"\nsenders = 3\nbytes = 40000\n");
    let json = answer(&format!("run {path} --json"));
    for values in [&json["slowdown"], &json["bins"][0], &json["fct_us"]] {
        assert!(values["p95"].is_null() && values["p99"].is_null() && values["p999"].is_null(), "{values}");
        assert!(values["p50"].is_number() && values["max"].is_number(), "{values}");
    }
    let table = stdout(&crosslane(&["rnic", "sim", "run", &path]));
    let row: Vec<&str> = table.lines().last().unwrap().split_whitespace().collect();
    assert_eq!((row[0], row[1], row[4], row[5]), ("all", "3", "-", "-"), "{table}");
}

#[test]
fn durations_and_rates_count_from_the_first_flows_start() {
    let directory = tempfile::tempdir().unwrap();
    let run = |start_us: u64, until: &str| {
        let trace = directory.path().join("trace.csv");
        std::fs::write(&trace, format!("{start_us},0,2,1000000\n{start_us},1,3,1000000\n")).unwrap();
        let file = directory.path().join("a.toml");
        let text = format!(
            "version = 1\n{until}[topology]\nkind = \"dumbbell\"\nhosts_per_side = 2\nhost_gbps = 100\n\
             middle_gbps = 100\n[workload]\nkind = \"trace\"\ntrace = \"{}\"\n",
            trace.display()
        );
        std::fs::write(&file, text).unwrap();
        let series = directory.path().join("series.csv").display().to_string();
        let run = crosslane(&["rnic", "sim", "run", file.to_str().unwrap(), "--json", "--series", &series]);
        (run, std::fs::read_to_string(series).unwrap_or_default())
    };
    let report = |start_us| {
        let (run, series) = run(start_us, "");
        (serde_json::from_str::<Value>(&stdout(&run)).unwrap(), series)
    };
    let ((at_once, series_at_once), (late, series_late)) = (report(0), report(2_000_000));
    for key in ["simulated_us", "goodput_gbps_per_host", "slowdown", "fct_us"] {
        assert_eq!(at_once[key], late[key], "{key}");
    }
    assert!(number(&late, "simulated_us") < 300.0 && number(&late, "goodput_gbps_per_host") > 15.0, "{late}");
    assert_eq!(series_at_once.lines().count(), series_late.lines().count());
    assert!(series_late.lines().nth(1).unwrap().starts_with("20000"), "files keep their times: {series_late}");
    let (refused, _) = run(2_000_000, "until = \"1 s\"\n");
    assert_fails(
        &refused,
        2,
        &["a.toml, until: 1000000 us is before the first flow starts, at 2000000 us; write a later"],
    );
}

#[test]
fn files_of_ns3_and_htsim_describe_the_same_network_and_flows_as_ours() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mut ns3 = "11 3 10\n8 9 10\n".to_owned();
    (0..8).for_each(|host| ns3 += &format!("{host} {} 100Gbps 1us 0\n", 8 + host / 4));
    [8, 9].iter().for_each(|leaf| ns3 += &format!("{leaf} 10 100Gbps 1us 0\n"));
    let ns3 = write("topology.txt", &ns3);
    let htsim = write(
        "a.topo",
        "Nodes 8\nTiers 2\nPodsize 8\nTier 0\nDownlink_speed_Gbps 100\nRadix_Down 4\nRadix_Up 1\n\
         Downlink_Latency_ns 1000\nTier 1\nDownlink_speed_Gbps 100\nRadix_Down 2\nBundle 1\n\
         Downlink_Latency_ns 1000\n",
    );
    let flow = write("flow.txt", "2\n0 7 3 100 300000 2\n4 1 3 100 300000 2.00001\n");
    let without_port = write("conweave.txt", "2\n0 7 3 300000 2.000000000\n4 1 3 300000 2.000010000\n");
    let cm = write(
        "a.cm",
        "Nodes 8\nConnections 2\n0->7 start 2000000000000 size 300000\n4->1 start 2000010000000 size 300000\n",
    );
    let trace = write("trace.csv", "start_us,from,to,bytes\n2000000,0,7,300000\n2000010,4,1,300000\n");
    let preset = "kind = \"leaf-spine\"\nleaves = 2\nhosts_per_leaf = 4\nspines = 1\nhost_gbps = 100\nleaf_gbps = 100";
    let mut results = Vec::new();
    for (topology, workload) in [
        (preset.to_owned(), format!("kind = \"trace\"\ntrace = \"{trace}\"")),
        (format!("kind = \"ns3\"\nfile = \"{ns3}\""), format!("kind = \"ns3\"\nfile = \"{flow}\"")),
        (format!("kind = \"htsim\"\nfile = \"{htsim}\""), format!("kind = \"htsim\"\nfile = \"{cm}\"")),
        (format!("kind = \"htsim\"\nfile = \"{htsim}\""), format!("kind = \"ns3\"\nfile = \"{flow}\"")),
        (format!("kind = \"ns3\"\nfile = \"{ns3}\""), format!("kind = \"ns3\"\nfile = \"{without_port}\"")),
    ] {
        let file = write("a.toml", &format!("version = 1\n[topology]\n{topology}\n[workload]\n{workload}\n"));
        let answer = answer(&format!("run {file} --json"));
        assert_eq!((number(&answer, "hosts"), number(&answer, "flows_ended")), (8.0, 2.0));
        results.push(answer["fct_us"].clone());
    }
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
    let refused = |workload: &str, expected: &str| {
        let file = write("a.toml", &format!("version = 1\n[topology]\n{preset}\n[workload]\n{workload}\n"));
        assert_fails(&crosslane(&["rnic", "sim", "run", &file]), 2, &["a.toml, line 9, workload: ", expected]);
    };
    let empty = write("empty.csv", "start_us,from,to,bytes\n");
    refused(&format!("kind = \"trace\"\ntrace = \"{empty}\""), "empty.csv: there is no flow; write one line");
    let far = write("far.txt", "1\n0 8 3 100 300000 2\n");
    refused(
        &format!("kind = \"ns3\"\nfile = \"{far}\""),
        "far.txt, line 2: there is no host 8; write a number from 0 to 7",
    );
    refused("kind = \"htsim\"", "file is missing; this kind of workload needs it");
}
