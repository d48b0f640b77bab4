//! What the tests of this crate share.

use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};

/// 64 bytes in a window of 8 KiB.
pub(crate) fn test(kind: Kind) -> Test {
    Test {
        test: kind,
        size_bytes: 64,
        window_bytes: 8192,
        host_offset_bytes: 0,
        device_offset_bytes: 0,
        order: Order::Random,
        cache: Cache::HostWarm,
        iommu: Iommu::Off,
        numa: Numa::Local,
        samples: 1000,
        seed: 1,
    }
}
