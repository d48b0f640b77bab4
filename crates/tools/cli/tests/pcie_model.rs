//! Tests of the modelling commands of `crosslane pcie`.

mod command;

use command::{assert_fails, crosslane, stdout};
use serde_json::Value;

/// Runs a command with `--json` and returns its output.
fn json(arguments: &str) -> Value {
    let words: Vec<&str> = arguments.split_whitespace().chain(["--json"]).collect();
    let output = crosslane(&words);
    assert!(output.status.success(), "{arguments}: {output:?}");
    serde_json::from_str(&stdout(&output)).unwrap()
}

#[track_caller]
fn assert_near(value: &Value, expected: f64) {
    let found = value.as_f64().unwrap();
    assert!((found - expected).abs() <= 1e-4, "{found} is not {expected}");
}

/// Runs a command and returns the rows of its table.
fn rows(arguments: &str) -> Vec<String> {
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let text = stdout(&crosslane(&words));
    let (head, table) = text.split_once("\n\n").unwrap();
    assert!(head.contains("modelled"), "{head}");
    table.lines().skip(1).map(str::to_owned).collect()
}

const LINK: &str = "--gen 3 --lanes 8 --mps 256 --mrrs 512";

#[test]
fn bandwidth_of_one_size_is_an_object() {
    let answer = json(&format!("pcie bandwidth {LINK} --addr 64 --size 64 --mode published"));
    for (key, expected) in
        [("write_gbps", 42.0980), ("read_gbps", 44.1027), ("readwrite_gbps", 33.0770), ("tlp_gbps", 57.8848)]
    {
        assert_near(&answer[key], expected);
    }
    assert_eq!(answer["provenance"], "modelled");
    assert_eq!(answer["mode"], "published");
    assert_eq!(answer["size_bytes"], 64);
    assert_eq!(answer["link"]["mrrs_bytes"], 512);
    assert_eq!(answer.get("rows"), None);
}

#[test]
fn options_of_the_link_change_the_result() {
    for (options, key, expected) in [
        ("--addr 32", "write_gbps", 44.1027),
        ("--ecrc", "write_gbps", 40.2677),
        ("--gen 5 --lanes 16", "tlp_gbps", 454.8002),
        ("--rcb-chunks --size 256", "read_gbps", 44.1027),
        ("--rcb-chunks --rcb 128 --size 256", "read_gbps", 50.0625),
        ("--mrrs 128 --size 256", "readwrite_gbps", 45.1784),
    ] {
        let size = if options.contains("--size") { "" } else { "--size 64" };
        assert_near(&json(&format!("pcie bandwidth --mode published {size} {options}"))[key], expected);
    }
    // Bytes 60 to 123 are in two cache lines: completions of 4 and 60 bytes, 2 * 20 + 64 bytes for 64.
    assert_near(&json("pcie bandwidth --size 64 --offset 60")["read_gbps"], 64.0 * 62.230654 / 104.0);
}

#[test]
fn several_sizes_are_rows() {
    let answer = json("pcie bandwidth --mode published --size 60,64..66,1K");
    let sizes: Vec<u64> =
        answer["rows"].as_array().unwrap().iter().map(|row| row["size_bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [60, 64, 65, 66, 1024]);
    assert_near(&answer["rows"][0]["read_gbps"], 43.4136);
    assert_eq!(answer.get("write_gbps"), None);
    assert_eq!(rows("pcie bandwidth --size 64..128:32").len(), 3);
    assert!(rows("pcie bandwidth").len() > 5);
}

#[test]
fn the_throughput_of_cards_is_as_published() {
    for (name, figures) in [
        ("simple", [13.2308, 21.5385, 20.5813]),
        ("kernel", [18.4356, 24.1344, 28.0919]),
        ("dpdk", [21.5135, 36.1868, 28.9424]),
    ] {
        let answer = json(&format!("pcie nic --nic {name} {LINK} --size 64 --mode published"));
        for (key, expected) in ["bidirectional_gbps", "tx_gbps", "rx_gbps"].into_iter().zip(figures) {
            assert_near(&answer[key], expected);
        }
        assert_eq!(answer["nic"], name);
    }
    assert_eq!(rows("pcie nic --size 64,128").len(), 12);
}

/// The sums are those of `traffic_of_small_packets_in_descriptors` of the crate `pcie`.
#[test]
fn cards_of_400_and_800_gbps_fill_their_lines_with_small_frames() {
    let answer = json("pcie nic --nic mlx5-mprq --gen 5 --lanes 16 --size 60");
    let tlp_gbps = answer["tlp_gbps"].as_f64().unwrap();
    assert_near(&answer["bidirectional_gbps"], 60.0 * tlp_gbps / 103.125);
    for (arguments, frames) in [
        ("--gen 5 --lanes 16 --sustain 400", ["none", "302", "70"]),
        ("--gen 5 --lanes 16 --sustain 400 --mps 512 --mrrs 4096", ["1110", "114", "64"]),
        ("--gen 6 --lanes 16 --sustain 800", ["none", "322", "70"]),
        ("--gen 6 --lanes 16 --sustain 800 --mps 512 --mrrs 4096", ["1302", "126", "64"]),
        ("--gen 7 --lanes 16 --sustain 800", ["130", "64", "64"]),
    ] {
        let rows = rows(&format!("pcie nic --nic mlx5-kernel,mlx5-dpdk,mlx5-mprq {arguments}"));
        let found: Vec<&str> = rows.iter().filter_map(|row| row.split_whitespace().last()).collect();
        assert_eq!(found, frames, "{arguments}");
    }
}

#[test]
fn cards_sustain_line_rate_from_a_smallest_frame() {
    let answer = json("pcie nic --mode published --sustain 40");
    let frames: Vec<u64> =
        (answer["rows"].as_array().unwrap().iter()).map(|row| row["smallest_frame_bytes"].as_u64().unwrap()).collect();
    assert_eq!(frames[..3], [584, 300, 182]);
    assert_eq!(json("pcie nic --nic dpdk --sustain 100")["smallest_frame_bytes"], Value::Null);
    assert_eq!(rows("pcie nic --nic dpdk --sustain 100"), ["dpdk              none"]);
}

#[test]
fn a_custom_card_is_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    let packets =
        "[[transmit]]\nstep = \"packet\"\nbytes = \"frame\"\n[[receive]]\nstep = \"packet\"\nbytes = \"frame\"\n";
    let head = "name = \"mine\"\ndescription = \"packets alone\"\nsource = \"none\"\n";
    std::fs::write(&path, format!("{head}{packets}")).unwrap();
    let answer = json(&format!("pcie nic --nic {} --size 64 --mode published", path.display()));
    assert_near(&answer["bidirectional_gbps"], 33.0770);
    assert_eq!(answer["nic"], "mine");
    std::fs::write(&path, format!("{head}{packets}[[receive]]\nstep = \"doorbell\"\nbytes = \"4 ns\"\n")).unwrap();
    let output = crosslane(&["pcie", "nic", "--nic", path.to_str().unwrap()]);
    assert_fails(&output, 2, &["mine.toml", "receive[1].bytes", "'4 ns'"]);
}

#[test]
fn an_invalid_option_is_one_line_and_exit_code_2() {
    for (arguments, words) in [
        ("pcie bandwidth --mps 300", &["'300'", "--mps", "power of two"][..]),
        ("pcie bandwidth --mrrs 8192", &["8192", "--mrrs", "128 to 4096"]),
        ("pcie bandwidth --gen 8", &["generation 8", "1 to 7"]),
        ("pcie bandwidth --lanes 3", &["3 lanes", "1, 2, 4"]),
        ("pcie bandwidth --addr 48", &["48 bits", "32 or 64"]),
        ("pcie bandwidth --rcb 256", &["256 bytes", "64 or 128"]),
        ("pcie bandwidth --size 0", &["0 bytes", "--size"]),
        ("pcie bandwidth --size 64ns", &["'64ns'", "8K"]),
        ("pcie bandwidth --size 17M", &["17825792", "16777216"]),
        ("pcie bandwidth --size 9..7", &["'9..7'", "7..9"]),
        ("pcie bandwidth --offset 4K", &["4096", "0 to 4095"]),
        ("pcie bandwidth --offset 1 --mode published", &["1 was given", "corrected"]),
        ("pcie bandwidth --lanes 12 --mode published", &["12 lanes", "corrected"]),
        ("pcie bandwidth --mode right", &["'right'", "corrected", "crosslane pcie bandwidth --help"]),
        ("pcie nic --nic e1000", &["'e1000'", "simple, kernel, dpdk"]),
        ("pcie nic --nic ./no-such.toml", &["no-such.toml", "check the path"]),
        ("pcie nic --size 0", &["0 bytes"]),
        ("pcie nic --sustain -1", &["-1"]),
        ("pcie nic --sustain 0", &["'0'", "Gb/s"]),
        ("pcie nic --sustain 40 --size 64", &["--sustain", "--size"]),
        ("pcie latency --size 0", &["0 bytes"]),
        ("pcie latency --mode published", &["no latencies", "leave"]),
        ("pcie latency --switches 17", &["17", "--switches"]),
        ("pcie latency --switches 1 --switch-ns fast", &["'fast'", "105"]),
        ("pcie latency --switch-ns 90", &["--switches"]),
        ("pcie latency --memory-ns -1", &["-1"]),
        ("pcie latency --device-ns 1e30", &["'1e30'", "up to a second"]),
        ("pcie latency --memory-ns 1e10", &["'1e10'", "up to a second"]),
        ("pcie latency --switches 1 --switch-ns inf", &["'inf'", "up to a second"]),
        ("pcie nic --sustain 1e30", &["'1e30'", "100000 Gb/s"]),
        ("pcie latency --path ./no-such.toml", &["no-such.toml", "check the path"]),
        ("pcie nic --sustain 40 --frame-max 63", &["63", "64 to 9018"]),
    ] {
        assert_fails(&crosslane(&arguments.split_whitespace().collect::<Vec<_>>()), 2, words);
    }
}

/// A generation 3 x8 link needs 8 / 63.01538 ns for a byte; a read has a request of 24 bytes and a completion of 84.
/// The board adds 2 * 0.25 m * 7 ns/m, the memory 31.87 ns.
#[test]
fn the_minimum_latency_is_the_sum_of_its_parts() {
    let answer = json("pcie latency --size 64");
    assert_near(&answer["read_ns"], (24.0 + 84.0) * 8.0 / 63.015_384_6 + 3.5 + 31.87);
    assert_near(&answer["write_ns"], 88.0 * 8.0 / 63.015_384_6 + 1.75);
    let parts = answer["read_parts"].as_array().unwrap();
    let sum_ns: f64 = parts.iter().map(|part| part["ns"].as_f64().unwrap()).sum();
    assert_near(&answer["read_ns"], sum_ns);
    let lines = rows("pcie latency --size 64");
    assert!(lines.iter().any(|line| line.starts_with("read") && line.contains("memory")), "{lines:?}");
    // In each direction a switch adds 105 ns, the time of one header and 0.25 m.
    let switched = json("pcie latency --size 64 --switches 1");
    let more_ns = 2.0 * (105.0 + 1.75) + (24.0 + 20.0) * 8.0 / 63.015_384_6;
    assert_near(&switched["read_ns"], answer["read_ns"].as_f64().unwrap() + more_ns);
    let constants = json("pcie latency --root-complex-ns 100 --memory-ns 0 --device-ns 1 --switches 1 --switch-ns 105");
    assert_near(&constants["read_ns"], switched["read_ns"].as_f64().unwrap() + 101.0 - 31.87);
    assert_eq!(json("pcie latency --size 64,128")["rows"].as_array().unwrap().len(), 2);
}

#[test]
fn a_custom_path_is_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ntb.toml");
    let text = "name = \"ntb\"\nsource = \"none\"\ndevice_ns = 0\nroot_complex_ns = \"0.1 us\"\nmemory_read_ns = 0\n\
                memory_write_ns = 0\n[[links]]\nlength_m = 2\nns_per_m = 5\n";
    std::fs::write(&path, text).unwrap();
    let answer = json(&format!("pcie latency --path {}", path.display()));
    assert_eq!(answer["path"], "ntb");
    assert_near(&answer["write_ns"], 88.0 * 8.0 / 63.015_384_6 + 10.0 + 100.0);
    std::fs::write(&path, text.replace("0.1 us", "0.1 m")).unwrap();
    let output = crosslane(&["pcie", "latency", "--path", path.to_str().unwrap()]);
    assert_fails(&output, 2, &["ntb.toml", "line 4", "root_complex_ns", "'0.1 m'"]);
}
