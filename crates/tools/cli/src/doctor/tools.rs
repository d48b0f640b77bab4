//! Checks of the programs that the demo, the benchmarks and the tests use.

use std::ffi::OsStr;

use super::Check;
use crate::program;

struct Tool {
    name: &'static str,
    package: &'static str,
    purpose: &'static str,
}

const TOOLS: [Tool; 10] = [
    Tool { name: "redis-server", package: "redis-server", purpose: "crosslane demo" },
    Tool { name: "redis-benchmark", package: "redis-tools", purpose: "crosslane demo" },
    Tool { name: "cc", package: "gcc libc6-dev", purpose: "crosslane bench sockets" },
    Tool { name: "memcached", package: "memcached", purpose: "the tests" },
    Tool { name: "nginx", package: "nginx", purpose: "the tests" },
    Tool { name: "curl", package: "curl", purpose: "the tests" },
    Tool { name: "wrk", package: "wrk", purpose: "the tests" },
    Tool { name: "iperf3", package: "iperf3", purpose: "the tests" },
    Tool { name: "sockperf", package: "sockperf", purpose: "the tests" },
    Tool { name: "qemu-system-x86_64", package: "qemu-system-x86", purpose: "./x lab" },
];

/// Returns one check for each tool.
pub fn checks() -> Vec<Check> {
    // Servers are installed in folders that only the PATH of root contains.
    let mut search = std::env::var_os("PATH").unwrap_or_default();
    search.push(":/usr/local/sbin:/usr/sbin:/sbin");
    TOOLS.iter().map(|tool| check(tool, &search)).collect()
}

fn check(tool: &Tool, search: &OsStr) -> Check {
    match program::resolve(tool.name.as_ref(), Some(search)) {
        Ok(path) => Check::ok(tool.name, format!("{} (for {})", path.display(), tool.purpose)),
        Err(_) => Check::note(
            tool.name,
            format!("not installed; {} needs it", tool.purpose),
            format!("apt-get install {}", tool.package),
        ),
    }
}
