//! The five tests of pcie-bench and their parameters (SIGCOMM 2018, section 4).

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Size of a page, whose boundary no unit crosses.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of a cache line, at which every unit begins.
pub const LINE_BYTES: u64 = 64;
/// The smallest window of the published method.
pub const WINDOW_BYTES_MIN: u64 = 1 << 10;
/// The largest window of the published method.
pub const WINDOW_BYTES_MAX: u64 = 64 << 20;
/// The largest transfer: one page.
pub const SIZE_BYTES_MAX: u32 = PAGE_BYTES as u32;

/// A kind of test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Latency of a DMA read.
    LatRd,
    /// Latency of a DMA write followed by a read of the same address.
    LatWrrd,
    /// Bandwidth of DMA reads.
    BwRd,
    /// Bandwidth of DMA writes.
    BwWr,
    /// Bandwidth of alternating reads and writes, reported for each direction.
    BwRdwr,
}

/// The state of the caches before a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// No line of the window: 64 MB of other memory were touched before.
    #[default]
    Cold,
    /// The CPU wrote the window.
    HostWarm,
    /// The device wrote the window.
    DeviceWarm,
}

/// How the device's addresses are translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Iommu {
    /// No translation.
    #[default]
    Off,
    /// In pages of 4 KB.
    #[serde(rename = "4k")]
    Pages4K,
    /// In pages of 2 MB.
    #[serde(rename = "2m")]
    Pages2M,
}

/// The socket of the memory, relative to that of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Numa {
    /// The same socket.
    #[default]
    Local,
    /// Another socket.
    Remote,
}

/// The order in which the units of the window are visited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// A unit is drawn for each transfer, possibly the same one twice in a row, as in the published firmware
    /// (pciebench-nfp, me/utils.c, `dma_addr_init`). Devices whose caches would serve a second visit make one in each
    /// pass.
    #[default]
    Random,
    /// In the order of addresses.
    Sequential,
}

/// One test with all its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Test {
    /// Kind of the test.
    pub test: Kind,
    /// Bytes of one transfer.
    pub size_bytes: u32,
    /// Bytes of host memory over which the transfers are spread.
    pub window_bytes: u64,
    /// Offset of a transfer in its unit, 0 to 63.
    #[serde(default)]
    pub host_offset_bytes: u32,
    /// Offset of the device's buffer in its cache line, 0 to 63.
    #[serde(default)]
    pub device_offset_bytes: u32,
    /// Order in which units are visited.
    #[serde(default)]
    pub order: Order,
    /// State of the caches before the test.
    #[serde(default)]
    pub cache: Cache,
    /// Address translation.
    #[serde(default)]
    pub iommu: Iommu,
    /// Socket of the memory.
    #[serde(default)]
    pub numa: Numa,
    /// Number of latencies, or of transfers that are timed together.
    pub samples: u64,
    /// Seed of all random numbers.
    #[serde(default)]
    pub seed: u64,
}

/// An invalid test.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TestError {
    /// The transfer size is zero or more than a page.
    #[error("a transfer of {0} bytes is not possible; choose 1 to {SIZE_BYTES_MAX}")]
    Size(u32),
    /// The window is out of the range of the method.
    #[error("a window of {0} bytes is out of range; choose {WINDOW_BYTES_MIN} (1K) to {WINDOW_BYTES_MAX} (64M)")]
    Window(u64),
    /// The offset is out of range.
    #[error("an offset of {0} bytes leaves the cache line; choose 0 to 63")]
    Offset(u32),
    /// The window has no space for a unit.
    #[error("a window of {window_bytes} bytes is smaller than a transfer's unit of {unit_bytes}; enlarge the window")]
    WindowTooSmall {
        /// Size of the window.
        window_bytes: u64,
        /// Bytes that a transfer needs, including the offset, in whole lines.
        unit_bytes: u64,
    },
    /// A unit crosses a page boundary.
    #[error("{size_bytes} bytes at offset {offset_bytes} cross a 4 KB boundary; reduce one of them")]
    CrossesPage {
        /// Size of the transfer.
        size_bytes: u32,
        /// Offset of the transfer in its unit.
        offset_bytes: u32,
    },
    /// There are no samples.
    #[error("0 samples measure nothing; choose at least 1")]
    NoSamples,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::LatRd, Self::LatWrrd, Self::BwRd, Self::BwWr, Self::BwRdwr];

    /// Returns whether the test yields latencies rather than a bandwidth.
    pub fn is_latency(self) -> bool {
        matches!(self, Self::LatRd | Self::LatWrrd)
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::LatRd => "lat-rd",
            Self::LatWrrd => "lat-wrrd",
            Self::BwRd => "bw-rd",
            Self::BwWr => "bw-wr",
            Self::BwRdwr => "bw-rdwr",
        }
    }
}

impl Cache {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::HostWarm => "host-warm",
            Self::DeviceWarm => "device-warm",
        }
    }
}

impl Iommu {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Pages4K => "4k",
            Self::Pages2M => "2m",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl Test {
    /// Number of latencies of a published run.
    pub const LATENCY_SAMPLES: u64 = 2_097_152;
    /// Number of transfers of a published bandwidth run.
    pub const BANDWIDTH_SAMPLES: u64 = 8_388_608;

    /// Returns the number of transfers in all directions: a read-and-write test makes `samples` in each.
    pub fn transfers(&self) -> u64 {
        self.samples * if self.test == Kind::BwRdwr { 2 } else { 1 }
    }

    /// Returns the bytes of a unit, the part of the window that one transfer uses: size and offset, rounded up to whole
    /// lines.
    pub fn unit_bytes(&self) -> u64 {
        (u64::from(self.size_bytes) + u64::from(self.host_offset_bytes)).next_multiple_of(LINE_BYTES)
    }

    /// Returns the number of units in a page; no unit crosses its end.
    pub fn units_per_page(&self) -> u64 {
        PAGE_BYTES / self.unit_bytes()
    }

    /// Returns the number of units in the window.
    pub fn units(&self) -> u64 {
        let whole_pages = self.window_bytes / PAGE_BYTES;
        let rest_bytes = self.window_bytes % PAGE_BYTES;
        whole_pages * self.units_per_page() + rest_bytes / self.unit_bytes()
    }

    /// Returns the address in the window at which the transfer of unit `index` begins.
    pub fn address_of(&self, index: u64) -> u64 {
        let page = index / self.units_per_page();
        let in_page = index % self.units_per_page();
        page * PAGE_BYTES + in_page * self.unit_bytes() + u64::from(self.host_offset_bytes)
    }

    /// Checks that the test is valid.
    ///
    /// # Errors
    /// The first parameter that is out of range.
    pub fn check(&self) -> Result<(), TestError> {
        if !(1..=SIZE_BYTES_MAX).contains(&self.size_bytes) {
            return Err(TestError::Size(self.size_bytes));
        }
        if !(WINDOW_BYTES_MIN..=WINDOW_BYTES_MAX).contains(&self.window_bytes) {
            return Err(TestError::Window(self.window_bytes));
        }
        for offset_bytes in [self.host_offset_bytes, self.device_offset_bytes] {
            if u64::from(offset_bytes) >= LINE_BYTES {
                return Err(TestError::Offset(offset_bytes));
            }
        }
        let unit_bytes = self.unit_bytes();
        if unit_bytes > PAGE_BYTES {
            let (size_bytes, offset_bytes) = (self.size_bytes, self.host_offset_bytes);
            return Err(TestError::CrossesPage { size_bytes, offset_bytes });
        }
        if unit_bytes > self.window_bytes {
            return Err(TestError::WindowTooSmall { window_bytes: self.window_bytes, unit_bytes });
        }
        if self.samples == 0 { Err(TestError::NoSamples) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn test(size_bytes: u32, window_bytes: u64) -> Test {
        Test {
            test: Kind::LatRd,
            size_bytes,
            window_bytes,
            host_offset_bytes: 0,
            device_offset_bytes: 0,
            order: Order::Random,
            cache: Cache::Cold,
            iommu: Iommu::Off,
            numa: Numa::Local,
            samples: 1,
            seed: 0,
        }
    }

    #[test]
    fn impossible_tests_are_refused() {
        assert_eq!(test(0, 8192).check(), Err(TestError::Size(0)));
        assert_eq!(test(4097, 8192).check(), Err(TestError::Size(4097)));
        assert_eq!(test(64, 1023).check(), Err(TestError::Window(1023)));
        assert_eq!(test(64, (64 << 20) + 1).check(), Err(TestError::Window((64 << 20) + 1)));
        assert_eq!(test(2048, 1024).check(), Err(TestError::WindowTooSmall { window_bytes: 1024, unit_bytes: 2048 }));
        let crossing = Test { host_offset_bytes: 1, ..test(4096, 8192) };
        assert_eq!(crossing.check(), Err(TestError::CrossesPage { size_bytes: 4096, offset_bytes: 1 }));
        assert_eq!(Test { device_offset_bytes: 64, ..test(64, 8192) }.check(), Err(TestError::Offset(64)));
        assert_eq!(Test { samples: 0, ..test(64, 8192) }.check(), Err(TestError::NoSamples));
    }

    proptest! {
        #[test]
        fn no_unit_leaves_the_window_or_crosses_a_page(
            size_bytes in 1..=SIZE_BYTES_MAX, offset in 0..64_u32, window_bytes in WINDOW_BYTES_MIN..(1_u64 << 20)
        ) {
            let test = Test { host_offset_bytes: offset, ..test(size_bytes, window_bytes) };
            prop_assume!(test.check().is_ok());
            prop_assert!(test.units() > 0);
            for index in [0, 1, test.units() / 2, test.units() - 1] {
                let first = test.address_of(index.min(test.units() - 1));
                let last = first + u64::from(size_bytes) - 1;
                prop_assert!(last < window_bytes);
                prop_assert_eq!(first / PAGE_BYTES, last / PAGE_BYTES);
            }
        }
    }
}
