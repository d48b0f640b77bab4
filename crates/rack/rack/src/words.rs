//! The words of a rack file.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// An enum whose variants are words: in files, on the command line and in output alike.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.word())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let words = || Self::ALL.iter().map(|known| known.word()).collect::<Vec<_>>().join(", ");
                let known = Self::ALL.iter().find(|known| known.word() == text);
                known.copied().ok_or_else(|| format!("'{text}' is unknown; choose one of {}", words()))
            }
        }
    };
}

words! {
    /// How a node reaches the device that joins the nodes.
    Backend {
        /// A device server on this machine, which hands out shared memory.
        Shm = "shm",
        /// A memory BAR of a PCI device.
        Pci = "pci",
        /// CXL or persistent memory, or a file on such or on huge pages.
        Dax = "dax",
    }
}

words! {
    /// How a PCI device is opened.
    PciMode {
        /// The resource files of sysfs; no interrupts.
        Sysfs = "sysfs",
        /// VFIO, with doorbell interrupts.
        Vfio = "vfio",
    }
}

words! {
    /// Whether the caches of all hosts of a DAX device see each other's stores.
    Coherence {
        /// They do.
        Coherent = "coherent",
        /// They do not: lines are flushed and dropped.
        NonCoherent = "non-coherent",
    }
}

words! {
    /// Who writes windows.
    #[derive(Default)]
    Trust {
        /// The proxies alone.
        #[default]
        Proxy = "proxy",
        /// Programs as well: the operator trusts them with the whole window.
        Direct = "direct",
    }
}

words! {
    /// What a partition is for.
    Class {
        /// Connections that exchange short messages.
        Latency = "latency",
        /// Connections that stream.
        Bulk = "bulk",
    }
}

words! {
    /// What a rule says.
    #[derive(Default)]
    Access {
        /// The connection is made.
        #[default]
        Allow = "allow",
        /// It is refused.
        Deny = "deny",
    }
}

words! {
    /// A link whose delay and rate are modelled.
    Timing {
        /// PCIe 3.0, 16 lanes.
        Gen3x16 = "gen3x16",
        /// PCIe 4.0, 16 lanes.
        Gen4x16 = "gen4x16",
        /// PCIe 5.0, 16 lanes.
        Gen5x16 = "gen5x16",
        /// PCIe 6.0, 16 lanes.
        Gen6x16 = "gen6x16",
        /// PCIe 3.0, 16 lanes, through a non-transparent bridge: 500 ns one way.
        Ntb = "ntb",
    }
}

impl Backend {
    /// What a node's `device` looks like.
    pub fn example_device(self) -> Option<&'static str> {
        match self {
            Self::Shm => None,
            Self::Pci => Some("0000:00:04.0"),
            Self::Dax => Some("/dev/dax0.0"),
        }
    }
}
