//! Enumerations of a rack file and their spelling.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// Defines an enum whose variants have one spelling in files, on the command line and in output.
macro_rules! string_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)* }

        impl $name {
            /// All variants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the spelling.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let words = || Self::ALL.iter().map(|known| known.as_str()).collect::<Vec<_>>().join(", ");
                let known = Self::ALL.iter().find(|known| known.as_str() == text);
                known.copied().ok_or_else(|| format!("'{text}' is unknown; choose one of {}", words()))
            }
        }
    };
}

string_enum! {
    /// How a node reaches the device that joins the nodes.
    Backend {
        /// A device server on this machine that hands out shared memory.
        Shm = "shm",
        /// A memory BAR of a PCI device.
        Pci = "pci",
        /// CXL or persistent memory, or a file on a DAX or huge-page mount.
        Dax = "dax",
    }
}

string_enum! {
    /// How a PCI device is opened.
    PciMode {
        /// The resource files of sysfs; no interrupts.
        Sysfs = "sysfs",
        /// VFIO, with doorbell interrupts.
        Vfio = "vfio",
    }
}

string_enum! {
    /// Whether the caches of all hosts of a DAX device are coherent.
    Coherence {
        /// Hosts see each other's stores.
        Coherent = "coherent",
        /// Cache lines are flushed after stores and invalidated before loads.
        NonCoherent = "non-coherent",
    }
}

string_enum! {
    /// The programs that write windows.
    #[derive(Default)]
    Trust {
        /// Only the proxies.
        #[default]
        Proxy = "proxy",
        /// Applications as well: the operator trusts them with the whole window.
        Direct = "direct",
    }
}

string_enum! {
    /// The class of a partition.
    Class {
        /// Connections that exchange short messages.
        Latency = "latency",
        /// Connections that stream.
        Bulk = "bulk",
    }
}

string_enum! {
    /// The action of an access rule.
    #[derive(Default)]
    Access {
        /// The connection is allowed.
        #[default]
        Allow = "allow",
        /// The connection is refused.
        Deny = "deny",
    }
}

string_enum! {
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
    /// Returns an example of a node's `device`, if the backend needs one.
    pub fn example_device(self) -> Option<&'static str> {
        match self {
            Self::Shm => None,
            Self::Pci => Some("0000:00:04.0"),
            Self::Dax => Some("/dev/dax0.0"),
        }
    }
}
