//! Tests of `crosslane pcie bench`, `sweep`, `compare` and `import`.

mod command;

use std::fs;
use std::path::Path;
use std::process::Output;

use command::{assert_fails, crosslane};
use serde_json::Value;

const SCHEMA: &str = include_str!("../../../../docs/pcie-result.schema.json");
const PUBLISHED: &str = "Test,PAT,Cache,HO,DO,WinSZ,SZ,Time(cyc),Time,Bytes,Trans,BW (GB/s),Trans/s\n\
    BW_DMA_RD,Rand,HWarm,0,0,8192,64,179895856,149913213.33,536870912,8388608,28.65,55956428.48\n\
    BW_DMA_RD,Rand,HWarm,0,0,8192,128,239932480,199943733.33,1073741824,8388608,42.96,41954843.30\n";

fn pcie(arguments: &[&str]) -> Output {
    crosslane(&[&["pcie"], arguments].concat())
}

#[track_caller]
fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn assert_matches_schema(value: &Value) {
    let schema = jsonschema::validator_for(&serde_json::from_str(SCHEMA).unwrap()).unwrap();
    if let Some(error) = schema.iter_errors(value).next() {
        panic!("{error} at {}", error.instance_path);
    }
}

#[track_caller]
fn assert_wrong_use(arguments: &[&str], words: &[&str]) {
    assert_fails(&pcie(arguments), 2, words);
}

fn write(folder: &Path, name: &str, contents: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, contents).unwrap();
    path.to_str().unwrap().to_owned()
}

const MEMORY: [&str; 5] = ["bench", "--device", "memory", "--samples", "500"];

#[test]
fn an_invalid_test_is_one_line_and_exit_code_2() {
    let bench = |more: &[&'static str]| [&["bench", "--test", "lat-rd"], more].concat();
    for (more, words) in [
        (&["--device", "nonsense"][..], &["'nonsense'", "sim:SYSTEM"][..]),
        (&["--device", "sim:nonsense"], &["'nonsense'", "hsw"]),
        (&["--device", "sim:hsw", "--numa", "remote"], &["hsw", "one socket"]),
        (&["--device", "sim:hsw+device.tags=0"], &["device.tags", "1 to 1024"]),
        (&["--device", "sim:hsw+device.tagz=1"], &["tagz", "hsw"]),
        (&["--device", "sim:hsw+tags"], &["hsw", "'tags'", "SECTION.KEY=VALUE"]),
        (&["--device", "sim:nonsense+device.tags=1"], &["'nonsense'", "hsw"]),
        (&["--device", "pci:ffff:00:1f.7"], &["'ffff:00:1f.7'", "lspci"]),
        (&["--device", "cuda:x"], &["'x'", "cuda:0"]),
        // Without a driver the library is missing; with a driver the GPU is missing.
        (&["--device", "cuda:4000"], &["cuda:"]),
        (&["--device", "memory", "--window", "1K", "--size", "2K"], &["1024", "2048", "enlarge"]),
        (&["--device", "memory", "--window", "128M"], &["134217728", "64M"]),
        (&["--device", "memory", "--size", "8K"], &["8192", "1 to 4096"]),
        (&["--device", "memory", "--size", "x"], &["'x'", "--size"]),
        (&["--device", "memory", "--host-offset", "64"], &["64", "0 to 63"]),
        (&["--device", "memory", "--samples", "0"], &["0 samples"]),
        (&["--device", "memory", "--iommu", "4k"], &["--iommu", "--pages"]),
        (&["--device", "memory", "--cache", "hot"], &["'hot'", "host-warm"]),
        (&["--device", "memory", "--raw"], &["--json"]),
        (&[], &["--device"]),
    ] {
        assert_wrong_use(&bench(more), words);
    }
    assert_wrong_use(&["bench", "--device", "memory", "--test", "lat"], &["'lat'", "lat-wrrd"]);
    assert_wrong_use(&["sweep", "--device", "memory"], &["--test"]);
    assert_wrong_use(&["sweep", "--device", "memory", "--figure", "cdf", "--size", "64"], &["--figure", "--size"]);
}

#[test]
fn invalid_files_are_one_line_and_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let broken = write(folder.path(), "broken.json", b"{");
    let other = write(folder.path(), "other.json", b"{\"schema\": \"other/3\"}");
    let table = write(folder.path(), "table.csv", b"a,b\n1,2\n");
    assert_wrong_use(&["compare", "/nowhere/a.json", &broken], &["/nowhere/a.json"]);
    assert_wrong_use(&["compare", &broken, &broken], &["broken.json", "not JSON"]);
    assert_wrong_use(&["compare", &other, &other], &["other.json", "'other/3'", "crosslane-pcie/1"]);
    assert_wrong_use(&["import", &table], &["table.csv:1", "pcie-bench"]);
    assert_wrong_use(&["import", "/nowhere"], &["/nowhere"]);
}

#[test]
fn every_test_prints_json_that_matches_the_schema() {
    for (test, figure) in
        [("lat-rd", "p99_ns"), ("lat-wrrd", "p99_ns"), ("bw-rd", "gbps"), ("bw-wr", "gbps"), ("bw-rdwr", "gbps")]
    {
        let result = json(&pcie(&[&MEMORY[..], &["--test", test, "--cache", "host-warm", "--json"]].concat()));
        assert_matches_schema(&result);
        assert!(result[figure].as_f64().unwrap() >= 0.0, "{result}");
        assert_eq!((result["test"].as_str(), result["window_bytes"].as_u64()), (Some(test), Some(8192)));
    }
}

#[test]
fn a_simulated_host_prints_the_same_figures_for_the_same_seed() {
    let run = |test: &str| {
        let words = format!(
            "bench --device sim:hsw --test {test} --size 64 --window 8K --cache device-warm --iommu 4k --numa local \
             --seed 1 --json"
        );
        pcie(&words.split_whitespace().collect::<Vec<_>>())
    };
    for (test, figures) in [("lat-rd", &["p50_ns", "p95_ns", "p99_ns", "max_ns"][..]), ("bw-rd", &["gbps"])] {
        let output = run(test);
        assert_eq!(output.stdout, run(test).stdout);
        let result = json(&output);
        assert_matches_schema(&result);
        figures.iter().for_each(|figure| assert!(result[*figure].as_f64().unwrap() > 0.0, "{figure} in {result}"));
    }
}

#[test]
fn predictions_are_marked_in_tables_json_and_plots() {
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().to_str().unwrap();
    let devices = "sim:hsw,sim:milan,sim:hsw+device.tags=64";
    let words = format!("sweep --device {devices} --test bw-rd --size 64,1024 --samples 500 --plot {plots}");
    let sweep = |more: &[&str]| pcie(&words.split_whitespace().chain(more.iter().copied()).collect::<Vec<_>>());
    let rows = json(&sweep(&["--json"]));
    assert_matches_schema(&rows);
    let prediction = |row: usize| rows[row].get("prediction").cloned();
    assert_eq!(prediction(0), None, "hsw is calibrated");
    assert!(prediction(2).unwrap().get("error_percent").is_none(), "no figure supports small transfers");
    let milan = prediction(3).unwrap();
    assert!(milan["rests_on"].as_str().unwrap().contains("data sheets") && milan["error_percent"].is_f64(), "{milan}");
    let changed = prediction(4).unwrap();
    assert!(changed["rests_on"].as_str().unwrap().contains("device.tags=64"), "{changed}");
    assert!(changed.get("error_percent").is_none(), "{changed}");

    let table = String::from_utf8(sweep(&[]).stdout).unwrap();
    let error = milan["error_percent"].as_f64().unwrap();
    for words in [format!("prediction, +-{error:.0}%"), "prediction, error unknown".into(), "modelled\n".into()] {
        assert!(table.contains(&words), "{words:?} in {table}");
    }
    assert!(table.contains("sim:milan is a prediction; it rests on data sheets"), "{table}");
    let plot = fs::read_to_string(folder.path().join("bw-rd-by-size.svg")).unwrap();
    assert!(plot.contains("sim:milan (prediction)") && !plot.contains("sim:hsw (prediction)"), "{plot}");
}

#[test]
fn options_without_effect_are_refused() {
    let bench = |device, option: &[&'static str]| {
        [&["bench", "--device", device, "--test", "lat-rd", "--samples", "10"], option].concat()
    };
    assert_wrong_use(&bench("sim:hsw", &["--pages", "2m"]), &["--pages has no effect on sim:hsw", "--iommu"]);
    assert_wrong_use(&bench("memory", &["--bar", "0"]), &["--bar has no effect on memory", "pci:ADDRESS"]);
    let words = ["sweep", "--device", "sim:hsw,sim:ib", "--test", "lat-rd", "--overwrite"];
    assert_wrong_use(&words, &["--overwrite has no effect on sim:hsw, sim:ib"]);
}

#[test]
fn predictions_are_compared_with_published_figures() {
    let report = json(&pcie(&["predictions", "--json"]));
    for name in ["ice-lake", "milan", "sapphire-rapids", "genoa"] {
        let system = report["systems"].as_array().unwrap().iter().find(|one| one["system"] == name).unwrap();
        assert!(system["latency_error_percent"].as_f64().unwrap() > 0.0, "{system}");
    }
    for figure in report["figures"].as_array().unwrap() {
        let deviation = figure["deviation_percent"].as_f64().unwrap().abs();
        assert!(figure["stated_error_percent"].as_f64().is_none_or(|error| deviation <= error), "{figure}");
    }
    let text = String::from_utf8(pcie(&["predictions", "--system", "bdw"]).stdout).unwrap();
    assert!(text.contains("no published figure") && !text.contains("PUBLISHED"), "{text}");
    let text = pcie(&["predictions", "--system", "milan"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("RESTS ON") && text.contains("EPYC 74F3") && !text.contains("genoa"), "{text}");
    assert!(text.contains("kept") && !text.contains("+0.0%"), "a bound has no difference: {text}");
    assert_wrong_use(&["predictions", "--system", "hsw"], &["'hsw'", "not a prediction", "fit --check"]);
    assert_wrong_use(&["predictions", "--system", "p4"], &["'p4'", "genoa"]);
}

#[test]
fn raw_samples_are_included_on_request() {
    let result = json(&pcie(&[&MEMORY[..], &["--test", "lat-rd", "--json", "--raw"]].concat()));
    assert_matches_schema(&result);
    assert_eq!(result["raw_ns"].as_array().unwrap().len(), 500);
}

#[test]
fn a_sweep_writes_plots_and_rows_that_a_comparison_reads() {
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().join("plots");
    let sweep = ["sweep", "--device", "memory", "--test", "bw-rd", "--size", "64,128", "--samples", "500"];
    let more = ["--cache", "host-warm", "--json", "--plot", plots.to_str().unwrap()];
    let output = pcie(&[&sweep[..], &more].concat());
    let rows = json(&output);
    assert_matches_schema(&rows);
    assert_eq!(rows.as_array().unwrap().len(), 2);
    assert!(fs::read_to_string(plots.join("bw-rd-by-size.svg")).unwrap().starts_with("<svg"));
    assert!(fs::read(plots.join("bw-rd-by-size.png")).unwrap().starts_with(b"\x89PNG"));

    let mine = write(folder.path(), "mine.json", &output.stdout);
    let data = write(folder.path(), "bw.csv", PUBLISHED.as_bytes());
    let imported = pcie(&["import", &data]);
    assert_matches_schema(&json(&imported));
    let theirs = write(folder.path(), "theirs.json", &imported.stdout);
    let compared = json(&pcie(&["compare", &theirs, &mine, "--json", "--plot", plots.to_str().unwrap()]));
    let differences = compared["differences"].as_array().unwrap();
    assert_eq!((differences.len(), compared["only_a"].as_u64()), (2, Some(0)));
    assert_eq!((differences[0]["figure"].as_str(), differences[0]["a"].as_f64()), (Some("gbps"), Some(28.65)));
    let text = pcie(&["compare", &theirs, &mine]);
    assert!(String::from_utf8(text.stdout).unwrap().contains("42.960"));
}

#[test]
fn a_comparison_marks_predictions() {
    let folder = tempfile::tempdir().unwrap();
    let of = |system: &str, name: &str| {
        let device = format!("sim:{system}");
        let run = ["bench", "--device", &device, "--test", "bw-rd", "--size", "1024", "--samples", "500", "--json"];
        write(folder.path(), name, &pcie(&run).stdout)
    };
    let (hsw, milan) = (of("hsw", "hsw.json"), of("milan", "milan.json"));
    let compared = json(&pcie(&["compare", &hsw, &milan, "--json"]));
    let difference = &compared["differences"][0];
    assert!(difference.get("prediction_a").is_none() && difference["provenance_a"] == "modelled", "{difference}");
    let prediction = &difference["prediction_b"];
    assert!(prediction["rests_on"].is_string() && prediction["error_percent"].is_f64(), "{difference}");
    let text = String::from_utf8(pcie(&["compare", &hsw, &milan]).stdout).unwrap();
    let row = text.lines().find(|line| line.starts_with("sim:hsw")).unwrap();
    assert!(row.contains("modelled") && row.contains("prediction, +-"), "{text}");
    assert!(text.contains("sim:milan is a prediction; it rests on"), "{text}");
}

#[test]
fn files_without_a_test_in_common_are_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let small = pcie(&[&MEMORY[..], &["--test", "bw-rd", "--json"]].concat());
    let large = pcie(&[&MEMORY[..], &["--test", "bw-rd", "--size", "128", "--json"]].concat());
    let small = write(folder.path(), "small.json", &small.stdout);
    let large = write(folder.path(), "large.json", &large.stdout);
    assert_wrong_use(&["compare", &small, &large], &["no test in common"]);
}
