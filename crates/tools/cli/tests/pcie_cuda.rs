//! Tests of `crosslane pcie bench --device cuda:0` with fake NVIDIA libraries, which check every argument and that all
//! resources are released. Whether the kernels work can be tested only on a real GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// All names under which the program looks for the compiler library.
const COMPILERS: [&str; 4] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"];
const LAT_RD: [&str; 6] = ["--test", "lat-rd", "--cache", "device-warm", "--samples", "300"];
const BW_RD: [&str; 8] = ["--test", "bw-rd", "--cache", "host-warm", "--window", "256K", "--samples", "10000"];

/// A folder with the two fake libraries and the log of their complaints.
struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
    fn new() -> Self {
        let fake = Self { folder: tempfile::tempdir().unwrap() };
        fake.compile("driver.c", "libcuda.so.1", &[]);
        fake.compile("compiler.c", "libnvrtc.so", &[]);
        fake
    }

    fn compile(&self, source: &str, library: &str, options: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda").join(source);
        let mut compiler = Command::new("cc");
        compiler.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]).args(options);
        compiler.arg("-o").arg(self.path(library)).arg(source);
        let output = compiler.stdin(Stdio::null()).output().expect("cc: install gcc");
        assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, device: &str, arguments: &[&str]) -> Command {
        self.of("bench", device, arguments)
    }

    fn of(&self, subcommand: &str, device: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crosslane"));
        command.args(["pcie", subcommand, "--device", device]).args(arguments);
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("FAKE_CUDA_LOG", self.path("log"));
        command
    }

    /// Returns the complaints of the libraries.
    fn complaints(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

/// Asserts an exit code, one line on standard error that contains `words`, and nothing on standard output.
#[track_caller]
fn assert_fails(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), text.lines().count()), (Some(code), 1), "{words:?}: {text}");
    assert!(text.starts_with("crosslane: cuda: "), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
    assert!(output.stdout.is_empty());
}

#[track_caller]
fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn latencies_are_ticks_minus_the_timer_overhead_in_every_cache_state() {
    let fake = Fake::new();
    for (test, expected_ns) in [("lat-rd", 700.0), ("lat-wrrd", 1200.0)] {
        for cache in ["cold", "host-warm", "device-warm"] {
            let arguments = ["--test", test, "--cache", cache, "--window", "4K", "--samples", "150", "--json", "--raw"];
            let result = json(&fake.command("cuda:0", &arguments).output().unwrap());
            assert_eq!(result["p50_ns"], expected_ns, "{test} {cache}");
            assert_eq!((&result["timer_cost_ns"], &result["timer_step_ns"]), (&4.0.into(), &0.5.into()));
            assert_eq!(result["raw_ns"].as_array().unwrap().len(), 150);
            assert_eq!((&result["provenance"], &result["device"]), (&"measured".into(), &"cuda:0".into()));
        }
    }
    assert_eq!(fake.complaints(), "");
}

#[test]
fn bandwidth_is_measured_with_the_best_number_of_warps() {
    let fake = Fake::new();
    for test in ["bw-rd", "bw-wr", "bw-rdwr"] {
        let arguments = ["--test", test, "--cache", "cold", "--window", "256K", "--samples", "10000", "--json"];
        let result = json(&fake.command("cuda:0", &arguments).output().unwrap());
        // 64 concurrent warps; 640 ns for a read of 64 bytes, 512 ns for a write; bw-rdwr does half as many of each.
        let expected = match test {
            "bw-rd" => 51.2,
            "bw-wr" => 64.0,
            _ => 64.0 * 64.0 * 8.0 / (640.0 + 512.0),
        };
        let gbps = result["gbps"].as_f64().unwrap();
        assert!((gbps / expected - 1.0).abs() < 0.01, "{test}: {gbps}, not {expected}");
        let words = result["description"].as_str().unwrap();
        assert!(words.contains("Fake GPU") && words.contains("95% of the rate from 64 on"), "{words}");
    }
    assert_eq!(fake.complaints(), "");
}

/// The kernels are compiled again for each new size, after the previous module and pinned memory have been released.
#[test]
fn a_sweep_opens_the_gpu_twice_and_runs_every_test() {
    let fake = Fake::new();
    let sweep = |fail: &str| {
        let tests = ["--test", "bw-rd,lat-rd", "--size", "8,64,4096", "--samples", "5000", "--json"];
        let arguments = [&tests[..], &["--cache", "host-warm", "--window", "16M"]].concat();
        fake.of("sweep", "cuda:0", &arguments).env("FAKE_CUDA_FAIL", fail).output().unwrap()
    };
    let results = json(&sweep("cuDevicePrimaryCtxRetain@3"));
    let description = |result: &Value| result["description"].as_str().unwrap().to_owned();
    let results = results.as_array().unwrap();
    assert_eq!(results.len(), 6);
    for result in results {
        let is_latency = result["test"] == "lat-rd";
        assert_eq!(description(result).contains("warps in flight"), !is_latency, "{result}");
        let words = result["size_bytes"].as_f64().unwrap() / 8.0;
        let (figure, expected) = match is_latency {
            true => ("p50_ns", 620.0 + 10.0 * words),
            false => ("gbps", 64.0 * 64.0 * words / (560.0 + 10.0 * words)),
        };
        let found = result[figure].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 0.01, "{found}, not {expected}: {result}");
        assert!(result["link"].is_null(), "no device has that address: {result}");
    }
    let failed = sweep("cuModuleUnload");
    let stderr = String::from_utf8_lossy(&failed.stderr);
    assert!(stderr.ends_with("crosslane: cuda: cuModuleUnload failed with 2 (CUDA_ERROR_OUT_OF_MEMORY)\n"), "{stderr}");
    assert_eq!((failed.status.code(), fake.complaints().as_str()), (Some(1), ""));
}

#[test]
fn kernels_are_loaded_once_for_all_windows_of_a_size() {
    let fake = Fake::new();
    for (fail, succeeds) in [("cuModuleLoadData@2", false), ("cuModuleLoadData@3", true)] {
        let arguments = ["--test", "lat-rd", "--size", "8,64", "--window", "4K,8K", "--samples", "100"];
        let mut command = fake.of("sweep", "cuda:0", &arguments);
        assert_eq!(command.env("FAKE_CUDA_FAIL", fail).output().unwrap().status.success(), succeeds, "{fail}");
    }
    assert_eq!(fake.complaints(), "");
}

#[test]
fn a_failed_call_is_named_and_all_resources_are_released() {
    let fake = Fake::new();
    for (name, shown) in [
        ("cuInit", "cuInit"),
        ("cuDeviceGetCount", "cuDeviceGetCount"),
        ("cuDeviceGet", "cuDeviceGet"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain"),
        ("cuDeviceGetName", "cuDeviceGetName"),
        ("cuDeviceGetPCIBusId", "cuDeviceGetPCIBusId"),
        ("cuDeviceGetAttribute@3", "cuDeviceGetAttribute"),
        ("cuCtxSetCurrent", "cuCtxSetCurrent"),
        ("cuCtxSetCurrent@9", "cuCtxSetCurrent"),
        ("cuModuleLoadData", "cuModuleLoadData"),
        ("cuMemHostAlloc", "cuMemHostAlloc"),
        ("cuMemHostGetDevicePointer_v2", "cuMemHostGetDevicePointer"),
        ("cuMemAlloc_v2@4", "cuMemAlloc"),
        ("cuMemcpyHtoD_v2@5", "cuMemcpyHtoD"),
        ("cuMemcpyDtoH_v2@2", "cuMemcpyDtoH"),
        ("cuModuleGetFunction@4", "cuModuleGetFunction"),
        ("cuEventCreate@2", "cuEventCreate"),
        ("cuEventRecord@2", "cuEventRecord"),
        ("cuLaunchKernel@4", "kernel"),
        ("cuEventSynchronize", "cuEventSynchronize"),
        ("cuCtxSynchronize", "cuCtxSynchronize"),
        ("cuEventElapsedTime@5", "cuEventElapsedTime"),
    ] {
        for arguments in [&LAT_RD[..], &BW_RD] {
            let output = fake.command("cuda:0", arguments).env("FAKE_CUDA_FAIL", name).output().unwrap();
            assert_fails(&output, 1, &[shown, "failed with 2", "CUDA_ERROR_OUT_OF_MEMORY"]);
            assert_eq!(fake.complaints(), "", "{name}");
        }
    }
}

/// Shows that the fake libraries detect leaks: the device ignores a failed release, the fake library does not.
#[test]
fn a_leaked_resource_is_a_complaint() {
    for (name, words) in [
        ("cuMemFree_v2", "memory of the GPU left"),
        ("cuMemFreeHost", "pinned memory left"),
        ("cuEventDestroy_v2", "events left"),
        ("cuDevicePrimaryCtxRelease_v2", "context left"),
    ] {
        let fake = Fake::new();
        let output = fake.command("cuda:0", &LAT_RD).env("FAKE_CUDA_FAIL", name).output().unwrap();
        assert!(output.status.success() && fake.complaints().contains(words), "{name}: {}", fake.complaints());
    }
}

#[test]
fn an_error_of_the_compiler_is_shown() {
    let fake = Fake::new();
    for (name, words) in [
        ("nvrtcCreateProgram", &["nvrtcCreateProgram", "6"][..]),
        ("nvrtcCompileProgram", &["compute_90", "kernels.cu(3): error: expected a ;"]),
        ("nvrtcGetPTX", &["no code"]),
        ("nvrtcGetPTXSize", &["no code"]),
    ] {
        assert_fails(&fake.command("cuda:0", &LAT_RD).env("FAKE_CUDA_FAIL", name).output().unwrap(), 1, words);
        assert_eq!(fake.complaints(), "", "{name}");
    }
}

#[test]
fn a_library_that_lacks_a_function_is_too_old() {
    for (source, library, function) in
        [("driver.c", "libcuda.so.1", "cuEventCreate"), ("compiler.c", "libnvrtc.so", "nvrtcGetPTXSize")]
    {
        let fake = Fake::new();
        fake.compile(source, library, &[&format!("-D{function}=renamed")]);
        let output = fake.command("cuda:0", &LAT_RD).output().unwrap();
        assert_fails(&output, 1, &[library, function, "too old"]);
    }
}

#[test]
fn missing_libraries_and_gpus_are_wrong_use() {
    let fake = Fake::new();
    assert_fails(&fake.command("cuda:1", &LAT_RD).output().unwrap(), 2, &["no GPU 1", "this machine has 1"]);
    let none = fake.command("cuda:0", &LAT_RD).env("FAKE_CUDA_COUNT", "0").output().unwrap();
    assert_fails(&none, 2, &["no GPU 0", "this machine has 0"]);
    assert_eq!(fake.complaints(), "");
    // Files that are not libraries hide those that the machine may have.
    for name in COMPILERS {
        fs::write(fake.path(name), "").unwrap();
    }
    assert_fails(&fake.command("cuda:0", &LAT_RD).output().unwrap(), 2, &["libnvrtc.so", "install"]);
    fs::write(fake.path("libcuda.so.1"), "").unwrap();
    assert_fails(&fake.command("cuda:0", &LAT_RD).output().unwrap(), 2, &["libcuda.so.1", "NVIDIA"]);
}

#[test]
fn doctor_names_the_library_that_is_missing() {
    let fake = Fake::new();
    let found = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crosslane"));
        let output = command.args(["doctor", "--json"]).env("LD_LIBRARY_PATH", fake.folder.path()).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == "cuda").unwrap().clone();
        (check["found"].as_str().unwrap().to_owned(), check["remedy"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(found(), ("libcuda.so.1 libnvrtc.so".to_owned(), String::new()));
    for name in COMPILERS {
        fs::write(fake.path(name), "").unwrap();
    }
    let (name, remedy) = found();
    assert!(name == "no libnvrtc.so" && remedy.contains("package libnvrtc"), "{name}: {remedy}");
    fs::write(fake.path("libcuda.so.1"), "").unwrap();
    let (name, remedy) = found();
    assert!(name == "no libcuda.so.1" && remedy.contains("NVIDIA's driver"), "{name}: {remedy}");
}

#[test]
fn unsupported_parameters_are_rejected_before_memory_is_pinned() {
    let fake = Fake::new();
    for (more, word) in [
        (&["--size", "12"][..], "multiples of 8"),
        (&["--window", "4100"], "multiple of 8"),
        (&["--host-offset", "4"], "multiples of 8"),
        (&["--device-offset", "8"], "--device-offset"),
        (&["--iommu", "4k"], "--iommu"),
        (&["--numa", "remote"], "numactl"),
    ] {
        let arguments = [&LAT_RD[..], more].concat();
        assert_fails(&fake.command("cuda:0", &arguments).output().unwrap(), 2, &[word]);
    }
    let short = ["--test", "bw-rd", "--window", "8K"];
    assert_fails(&fake.command("cuda:0", &short).output().unwrap(), 2, &["--window 262144"]);
    assert_eq!(fake.complaints(), "");
}
