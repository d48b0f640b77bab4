//! Timings from the paths of crate `pcie`, as a user of timed links computes them.

use fabric::timed::{LinkTiming, Pacer, TimedConfig, TimedLink, memory_bytes};
use fabric::{Inbound, Link, Outbound, heap, train_both};
use pcie::host::path::Path;
use std::time::Instant;
use volmem::sync::Ordering;

fn timing(path: &Path) -> LinkTiming {
    let payload_bytes_max = path.link().mps_bytes.bytes();
    let bytes_per_ns = path.packet_gbps() / 8.0;
    let packet_bytes = (path.write_busy(payload_bytes_max).ns() * bytes_per_ns).round() as u64;
    LinkTiming {
        one_way_ns: path.write(0).ns().round() as u64,
        bytes_per_us: (bytes_per_ns * 1000.0).round() as u64,
        header_bytes: packet_bytes - u64::from(payload_bytes_max),
        payload_bytes_max: payload_bytes_max.into(),
    }
}

/// The bridge of the published systems, and each PCIe generation. The test runs in real time, so it checks a lower
/// bound only.
#[test]
fn a_write_takes_at_least_what_the_path_says() {
    for name in Path::NAMES {
        let path = Path::named(name).expect("a path");
        let timing = timing(&path);
        assert!((16..=32).contains(&timing.header_bytes), "{name}: {timing:?}");
        let link_bytes = memory_bytes(8192, timing).expect("a timing");
        let (a, b) = heap::pair(link_bytes);
        let setup = || TimedConfig { window_bytes: 8192, timing, pacer: Pacer::new() };
        let (mut a, mut b) = (TimedLink::new(a, setup()).expect("an end"), TimedLink::new(b, setup()).expect("an end"));
        assert!(train_both(&mut a, &mut b));
        let (outbound, inbound) = (a.outbound(), b.inbound());
        for (round, len_bytes) in [8, 64, 256, 1000, 4096].into_iter().enumerate() {
            let begun = Instant::now();
            outbound.write(64, &vec![1; len_bytes]);
            outbound.store_u64(0, round as u64 + 1, Ordering::Release);
            while inbound.load_u64(0, Ordering::Acquire) != round as u64 + 1 {}
            let taken_ns = begun.elapsed().as_nanos() as f64;
            let least_ns = path.write(len_bytes as u32).ns();
            assert!(taken_ns > least_ns - 1.0, "{name}: {len_bytes} bytes in {taken_ns} ns, not {least_ns}");
        }
    }
}
