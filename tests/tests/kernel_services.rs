//! What the kernel offers for its connections: states in /proc/net/tcp, `TIME_WAIT`, shares of listeners, devices,
//! deferred accepts, Fast Open, signatures, hop limits, socket activation, signals, packets of handshake and end.

use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack};

const RUN_LIMIT: Duration = Duration::from_secs(60);
const CHECKS: usize = 13;
/// Most checks make a connection busy first.
const LANE_BYTES_MIN: u64 = 1000;

#[test]
fn services_of_the_kernel_are_those_of_bare_connections() {
    let Some(rack) = Rack::with_lanes() else { return };
    let script = package_file("python/kernel_services.py");
    let bare = Process::start(rack.bare_command(python()).arg(&script)).wait(RUN_LIMIT).must_succeed().stdout;
    assert_eq!(bare.lines().count(), CHECKS, "{bare}");
    let (finished, traffic) = rack.run_watched(rack.run(&[], python()).arg(&script), RUN_LIMIT);
    assert_eq!(finished.must_succeed().stdout, bare);
    assert!(traffic.lane_bytes >= LANE_BYTES_MIN, "{traffic:?}");
}
